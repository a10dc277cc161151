# pyright: standard
"""Programs of JAX: eager, jit, scan; pmap and shard_map over virtual CPU devices; audits of the library's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from gradcombine.types import AccumulateState, Array, Order, Tree
from gradcombine.verify.suite.classifier import PIXELS, Batch, initial_parameters
from gradcombine.verify.suite.frameworks import RATE, ROWS, STEPS_EVERY, Framework, Window, eager, exported
from gradcombine.verify.suite.outcomes import TIME
from gradcombine.verify.suite.places import MEAN, Contributions


def _in_scan(order: Order, inputs: Contributions) -> list[Tree]:
    @jax.jit
    def run(values: Tree, weights: jax.Array) -> Tree:
        accumulator, state = _scan(values, weights, order)
        return accumulator.value(state)

    return [exported(run(*inputs.stacked(len(inputs.weights))))]


def _scan(values: Tree, weights: jax.Array, order: Order) -> Window:
    accumulator = gc.accumulate(MEAN, every=len(weights), order=order)
    initial = accumulator.init(jax.tree.map(lambda value: value[0], values))

    def step(state: AccumulateState, contribution: tuple[Tree, Array]) -> tuple[AccumulateState, None]:
        return accumulator.update(contribution[0], state, contribution[1]), None

    return accumulator, lax.scan(step, initial, (values, weights))[0]


def _pmap(function: Callable[..., Tree], count: int, stacked: tuple[Tree, np.ndarray]) -> list[Tree]:
    return _by_rank(jax.pmap(function, "data", devices=jax.devices()[:count])(*stacked), count)


def _shard_map(
    check_vma: bool, function: Callable[..., Tree], count: int, stacked: tuple[Tree, np.ndarray]
) -> list[Tree]:
    def local(*blocks: Tree) -> Tree:
        result = function(*jax.tree.map(lambda block: block[0], blocks))
        return jax.tree.map(lambda leaf: leaf[None], result)

    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    # Results are stacked by replica, so that each replica's result is checked.
    spec = PartitionSpec("data")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return _by_rank(jax.jit(sharded)(*stacked), count)


def _by_rank(stacked: Tree, count: int) -> list[Tree]:
    results = exported(stacked)
    return [{name: result[rank] for name, result in results.items()} for rank in range(count)]


JAX = Framework(
    "jax",
    jnp.asarray,
    {"eager": eager, "jit": jax.jit},
    {"pmap": _pmap, "shard_map": partial(_shard_map, True), "shard_map, no vma": partial(_shard_map, False)},
    gc.jax_axis("data"),
    _scan,
    {("scan", TIME): _in_scan},
    frozenset({"shard_map, no vma"}),
)


def _loss(parameters: Mapping[str, Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    hidden = jnp.tanh(images @ parameters["w1"] + parameters["b1"])
    logits = hidden @ parameters["w2"] + parameters["b2"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


@jax.jit
def measure(parameters: dict[str, Array], batch: Batch) -> dict[str, Array]:
    value, gradients = jax.value_and_grad(_loss)(parameters, *batch)
    return gradients | {"loss": value}


def audited(replicas: int) -> dict[str, Audit]:
    """Audits the library's steps, and `optax.MultiSteps`, which runs the optimizer in every call."""
    return {
        "a window in one call": _step(replicas, microbatches=STEPS_EVERY, over=gc.jax_axis("data")),
        "a microbatch in each call": _step(replicas, every=STEPS_EVERY),
        "accumulate": _transformation(accumulate(optax.adam(RATE), STEPS_EVERY)),
        "optax.MultiSteps": _transformation(optax.MultiSteps(optax.adam(RATE), STEPS_EVERY)),
    }


def _step(replicas: int, **settings: Any) -> Audit:
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("data",))

    def specs(tree: Tree, *axes: str) -> Tree:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    step = train_step(lambda params, batch: _loss(params, *batch), optax.adam(RATE), **settings)
    parameters = initial_parameters()
    rows = replicas * STEPS_EVERY * ROWS
    batch = np.zeros((rows, PIXELS), np.float32), np.zeros(rows, np.int32)
    state = jax.eval_shape(step.init, parameters)
    return audit(step.compiled, specs(parameters), specs(state), specs(batch, "data"))


def _transformation(tx: Any) -> Audit:
    def step(parameters: Tree, state: Tree, gradients: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters = jax.tree.map(jnp.asarray, initial_parameters())
    return audit(jax.jit(step, donate_argnums=(0, 1)), parameters, tx.init(parameters), parameters)
