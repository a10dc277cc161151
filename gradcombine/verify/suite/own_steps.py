# pyright: standard
"""The library's own steps, compiled and traced on this machine: an audit of them has to find nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradcombine as gc
from gradcombine.audit import Audit, audit
from gradcombine.integrations.jax import train_step
from gradcombine.integrations.optax import accumulate
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.verify.suite import digits as problem
from gradcombine.verify.suite import jax_rows, tensorflow_rows
from gradcombine.verify.suite.outcomes import CLEAN, Finding

EVERY, ROWS, RATE = 4, 8, 0.1


def audited(replicas: int, inject_fault: bool) -> Finding:
    """One row for all steps.

    Args:
      replicas: over which they run.
      inject_fault: whether `optax.MultiSteps`, which runs its optimizer in each call, stands in for `accumulate`.
    """
    found = {name: {x.name for x in make().findings} for name, make in _steps(replicas, inject_fault)}
    defects = "; ".join(f"{name}: {', '.join(sorted(names))}" for name, names in found.items() if names)
    labels = {"steps": ", ".join(found), "defects": defects or "none"}
    return Finding("audit", labels, CLEAN, not defects)


def _steps(replicas: int, inject_fault: bool) -> Iterator[tuple[str, Callable[[], Audit]]]:
    yield "a window in one call", partial(_in_jax, replicas, microbatches=EVERY, over=gc.jax_axis("data"))
    yield "a microbatch in each call", partial(_in_jax, replicas, every=EVERY)
    yield "accumulate", partial(_in_optax, inject_fault)
    yield "AccumulatedStep", partial(_in_tensorflow, replicas)


def _in_jax(replicas: int, **settings: Any) -> Audit:
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("data",))

    def placed(tree: Any, *axes: str) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    step = train_step(lambda params, batch: jax_rows.loss(params, *batch), optax.adam(RATE), **settings)
    parameters = problem.initial_parameters()
    rows = replicas * EVERY * ROWS
    batch = np.zeros((rows, problem.PIXELS), np.float32), np.zeros(rows, np.int32)
    state = jax.eval_shape(step.init, parameters)
    return audit(step.compiled, placed(parameters), placed(state), placed(batch, "data"))


def _in_optax(inject_fault: bool) -> Audit:
    tx: Any = optax.MultiSteps(optax.adam(RATE), EVERY) if inject_fault else accumulate(optax.adam(RATE), EVERY)

    def step(parameters: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters = jax.tree.map(jnp.asarray, problem.initial_parameters())
    return audit(jax.jit(step, donate_argnums=(0, 1)), parameters, tx.init(parameters), parameters)


def _in_tensorflow(replicas: int) -> Audit:
    strategy = tensorflow_rows.strategy(replicas)
    with strategy.scope():
        variables = {name: tf.Variable(tf.constant(leaf)) for name, leaf in problem.initial_parameters().items()}
        names = list(variables)

        def gradients(images: tf.Tensor, labels: tf.Tensor) -> Any:
            found = tensorflow_rows.measured({name: variables[name] for name in names}, images, labels)
            return [found[name] for name in names], tf.size(labels)

        def descend(gradients: Any, variables: Any) -> None:
            for gradient, variable in zip(gradients, variables, strict=True):
                variable.assign_sub(RATE * gradient)

        step = AccumulatedStep(gradients, [variables[name] for name in names], descend, every=EVERY)
    images, labels = tf.TensorSpec([ROWS, problem.PIXELS]), tf.TensorSpec([ROWS], tf.int32)
    return audit(tf.function(step), images, labels)
