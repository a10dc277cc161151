# pyright: standard
"""Programs of TensorFlow: eager, tf.function, XLA; MirroredStrategy over logical CPUs; an audit of the library's step.

Imported in a separate process; see `gradcombine.verify.suite.frameworks.in_tensorflow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import tensorflow as tf

import gradcombine as gc
from gradcombine.audit import Target, audit
from gradcombine.audit.target import HERE
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.types import Array, Tree
from gradcombine.verify.suite.classifier import CLASSES, PIXELS, Batch, initial_parameters
from gradcombine.verify.suite.combine import ANY_REPLICAS, Contributions, Framework, Mode, Program
from gradcombine.verify.suite.frameworks import RATE, ROWS, STEPS_EVERY

# No function here branches on a tensor, and AutoGraph would convert each function on each replica.
_traced = partial(tf.function, autograph=False)


def _mirrored(program: Program, count: int, blocks: Contributions) -> list[Tree]:
    strategy = _strategy(count)

    def block_of(context: tf.distribute.ReplicaContext) -> Tree:
        return tf.nest.map_structure(lambda block: tf.constant(block[context.replica_id_in_sync_group]), blocks)

    arguments = strategy.experimental_distribute_values_from_function(block_of)
    results = _traced(lambda blocks: strategy.run(program, args=blocks))(arguments)
    local = {name: strategy.experimental_local_results(result) for name, result in results.items()}
    return [{name: result[rank] for name, result in local.items()} for rank in range(count)]


@cache
def _strategy(count: int) -> tf.distribute.Strategy:
    # The default collective ops of several strategies in one process interfere.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{rank}" for rank in range(count)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


@tf.function(reduce_retracing=True)
def _gradients(parameters: Mapping[str, Array], images: tf.Tensor, targets: tf.Tensor) -> dict[str, Array]:
    """Computes the gradient, and the loss as ``"loss"``."""
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        residual = images @ parameters["w"] + parameters["b"] - targets
        loss = tf.reduce_mean(tf.reduce_sum(residual**2, axis=1)) / 2
    return tape.gradient(loss, parameters) | {"loss": loss}


def _measure(parameters: Mapping[str, Array], batch: Batch) -> dict[str, Array]:
    return _gradients(parameters, *map(tf.constant, batch))


def _audited(replicas: int) -> dict[str, list[str]]:
    """Audits the library's step."""
    with _strategy(replicas).scope():
        variables = {name: tf.Variable(tf.constant(leaf)) for name, leaf in initial_parameters().items()}

        def gradients(images: tf.Tensor, targets: tf.Tensor) -> tuple[Tree, Array]:
            grads = _gradients(dict(variables), images, targets)
            return [grads[name] for name in variables], tf.shape(images)[0]

        def descend(gradients: Tree, variables: Tree) -> None:
            for gradient, variable in zip(gradients, variables, strict=True):
                variable.assign_sub(RATE * gradient)

        step = AccumulatedStep(gradients, list(variables.values()), descend, every=STEPS_EVERY)
    batch = tf.TensorSpec([ROWS, PIXELS]), tf.TensorSpec([ROWS, CLASSES])
    # The audit of a TensorFlow graph needs no compiler, and thus no JAX devices.
    here = Target(HERE, (), 1, None)
    report = audit(tf.function(step), *batch, target=here)
    return {"AccumulatedStep": [finding.name for finding in report.findings]}


TENSORFLOW = Framework(
    "tensorflow",
    tf.constant,
    gc.tf_replicas(),
    {
        "eager": Mode(),
        "tf.function": Mode(compiled=_traced),
        "XLA": Mode(compiled=partial(_traced, jit_compile=True)),
        # As a separate tf.function, the update is traced once instead of once per step.
        "MirroredStrategy": Mode(ANY_REPLICAS, compiled=_traced, spread=_mirrored),
    },
    _measure,
    _audited,
)
