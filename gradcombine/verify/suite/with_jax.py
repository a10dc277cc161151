# pyright: standard
"""Programs of JAX: eager, jit, scan; pmap and shard_map over virtual CPU devices; audits of the library's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradcombine as gc
from gradcombine.audit import Audit, audit
from gradcombine.integrations.jax import train_step
from gradcombine.integrations.optax import accumulate
from gradcombine.types import AccumulateState, Array, Scalar, Tree
from gradcombine.verify.suite.classifier import CLASSES, PIXELS, Batch, initial_parameters
from gradcombine.verify.suite.combine import ANY_REPLICAS, TIME, Contributions, Framework, Mode, Program, Update
from gradcombine.verify.suite.frameworks import RATE, ROWS, STEPS_EVERY


def _scan(update: Update, state: AccumulateState, values: Sequence[Tree], weights: Sequence[Scalar]) -> AccumulateState:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(values, weights, strict=True))
    return lax.scan(lambda state, each: (update(each[0], state, each[1]), None), state, stacked)[0]


def _pmap(program: Program, count: int, blocks: Contributions) -> list[Tree]:
    return _by_rank(jax.pmap(program, "data", devices=jax.devices()[:count])(*blocks), count)


def _shard_map(check_vma: bool, program: Program, count: int, blocks: Contributions) -> list[Tree]:
    def local(*blocks: Tree) -> Tree:
        result = program(*jax.tree.map(lambda block: block[0], blocks))
        return jax.tree.map(lambda leaf: leaf[None], result)

    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    # Results are stacked by replica, so that each replica's result is checked.
    spec = PartitionSpec("data")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return _by_rank(jax.jit(sharded)(*blocks), count)


def _by_rank(stacked: Tree, count: int) -> list[Tree]:
    return [{name: result[rank] for name, result in stacked.items()} for rank in range(count)]


def _loss(parameters: Mapping[str, Array], images: jax.Array, targets: jax.Array) -> jax.Array:
    residual = images @ parameters["w"] + parameters["b"] - targets
    return (residual**2).sum(axis=1).mean() / 2


@jax.jit
def _measure(parameters: Mapping[str, Array], batch: Batch) -> dict[str, Array]:
    value, gradients = jax.value_and_grad(_loss)(parameters, *batch)
    return gradients | {"loss": value}


def _audited(replicas: int) -> dict[str, list[str]]:
    """Audits the library's steps, and `optax.MultiSteps`, which runs the optimizer in every call."""
    audits = {
        "a window in one call": _step(replicas, microbatches=STEPS_EVERY, over=gc.jax_axis("data")),
        "a microbatch in each call": _step(replicas, every=STEPS_EVERY),
        "accumulate": _transformation(accumulate(optax.adam(RATE), STEPS_EVERY)),
        "optax.MultiSteps": _transformation(optax.MultiSteps(optax.adam(RATE), STEPS_EVERY)),
    }
    return {name: [finding.name for finding in report.findings] for name, report in audits.items()}


def _step(replicas: int, **settings: Any) -> Audit:
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("data",))

    def specs(tree: Tree, *axes: str) -> Tree:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    step = train_step(lambda params, batch: _loss(params, *batch), optax.adam(RATE), **settings)
    parameters = initial_parameters()
    rows = replicas * STEPS_EVERY * ROWS
    batch = np.zeros((rows, PIXELS), np.float32), np.zeros((rows, CLASSES), np.float32)
    state = jax.eval_shape(step.init, parameters)
    return audit(step.compiled, specs(parameters), specs(state), specs(batch, "data"))


def _transformation(tx: Any) -> Audit:
    def step(parameters: Tree, state: Tree, gradients: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters = jax.tree.map(jnp.asarray, initial_parameters())
    return audit(jax.jit(step, donate_argnums=(0, 1)), parameters, tx.init(parameters), parameters)


JAX = Framework(
    "jax",
    jnp.asarray,
    gc.jax_axis("data"),
    {
        "eager": Mode(),
        "jit": Mode(compiled=jax.jit),
        "scan": Mode((TIME,), window=jax.jit(_scan, static_argnums=0)),
        "pmap": Mode(ANY_REPLICAS, window=_scan, spread=_pmap),
        "shard_map": Mode(ANY_REPLICAS, window=_scan, spread=partial(_shard_map, True)),
        "shard_map, no vma": Mode(ANY_REPLICAS, window=_scan, spread=partial(_shard_map, False), on_demand=True),
    },
    _measure,
    _audited,
)
