# pyright: standard
"""Programs of TensorFlow: eager, tf.function, XLA; MirroredStrategy over logical CPUs; an audit of the library's step.

`run` calls the public functions in a separate process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import tensorflow as tf

import gradcombine as gc
from gradcombine.audit import Target, audit
from gradcombine.audit.target import HERE
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.types import Array, Tree
from gradcombine.verify.suite.classifier import PIXELS, Batch, initial_parameters
from gradcombine.verify.suite.frameworks import (
    RATE,
    ROWS,
    STEPS_EVERY,
    Framework,
    Gradients,
    eager,
    exported,
    measured,
    steps,
    unrolled,
    windows,
)
from gradcombine.verify.suite.outcomes import BITS, Finding
from gradcombine.verify.suite.places import Contributions, combine, promised


def _mirrored(function: Callable[..., Tree], count: int, stacked: tuple[Tree, np.ndarray]) -> list[Tree]:
    strategy = _strategy(count)

    def block_of(context: tf.distribute.ReplicaContext) -> Tree:
        return tf.nest.map_structure(lambda block: tf.constant(block[context.replica_id_in_sync_group]), stacked)

    arguments = strategy.experimental_distribute_values_from_function(block_of)
    results = _traced(lambda contributions: strategy.run(function, args=contributions))(arguments)
    local = {name: strategy.experimental_local_results(result) for name, result in results.items()}
    return [exported({name: result[rank] for name, result in local.items()}) for rank in range(count)]


@cache
def _strategy(count: int) -> tf.distribute.Strategy:
    # The default collective ops of several strategies in one process interfere.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{rank}" for rank in range(count)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


# No function here branches on a tensor, and AutoGraph would convert each function on each replica.
_traced = partial(tf.function, autograph=False)
_traced_once = cache(_traced)


def _xla(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """Compiles a function by XLA, from its traced tf.function."""
    return _traced(_traced_once(function), jit_compile=True)


TENSORFLOW = Framework(
    "tensorflow",
    tf.constant,
    {"eager": eager, "tf.function": _traced_once, "XLA": _xla},
    {"MirroredStrategy": _mirrored},
    gc.tf_replicas(),
    # As a separate tf.function, the update is traced once instead of once per step.
    partial(unrolled, _traced),
    {},
)


@tf.function(reduce_retracing=True)
def _gradients(parameters: dict[str, Array], images: tf.Tensor, labels: tf.Tensor) -> dict[str, Array]:
    """Computes the gradient, and the loss as ``"loss"``."""
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        hidden = tf.tanh(images @ parameters["w1"] + parameters["b1"])
        logits = hidden @ parameters["w2"] + parameters["b2"]
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return tape.gradient(loss, parameters) | {"loss": loss}


def _measure(parameters: dict[str, Array], batch: Batch) -> dict[str, Array]:
    tensors = {name: tf.convert_to_tensor(leaf) for name, leaf in parameters.items()}
    return _gradients(tensors, tf.constant(batch.images), tf.constant(batch.labels))


def gradients(parameters: Gradients, batches: Sequence[Batch]) -> list[Gradients]:
    """Gradients of batches and their losses."""
    return measured(_measure, parameters, batches)


def trained(examples: Batch) -> list[tuple[Gradients, Gradients]]:
    """Runs the training; see `gradcombine.verify.suite.frameworks.steps`."""
    return list(steps(TENSORFLOW, _measure, windows(examples)))


def combined(counts: list[int], full: bool, contributions: Contributions, inject_fault: bool) -> list[Finding]:
    """Rows of the combine; with ``inject_fault``, the last one that promises bits gets a corrupted input."""
    cases = list(TENSORFLOW.cases(counts, full))
    corrupted = [case for case in cases if promised(case) == BITS][-1] if inject_fault else None
    return combine(cases, contributions, corrupted=corrupted)


def audited(replicas: int) -> list[str]:
    """Names of the audit's findings in the library's step."""
    strategy = _strategy(replicas)
    with strategy.scope():
        variables = {name: tf.Variable(tf.constant(leaf)) for name, leaf in initial_parameters().items()}

        def gradients(images: tf.Tensor, labels: tf.Tensor) -> tuple[Tree, Array]:
            grads = _gradients(dict(variables), images, labels)
            return [grads[name] for name in variables], tf.size(labels)

        def descend(gradients: Tree, variables: Tree) -> None:
            for gradient, variable in zip(gradients, variables, strict=True):
                variable.assign_sub(RATE * gradient)

        step = AccumulatedStep(gradients, list(variables.values()), descend, every=STEPS_EVERY)
    images, labels = tf.TensorSpec([ROWS, PIXELS]), tf.TensorSpec([ROWS], tf.int32)
    # The audit of a TensorFlow graph needs no compiler, and thus no JAX devices.
    here = Target(HERE, (), 1, None)
    return [finding.name for finding in audit(tf.function(step), images, labels, target=here).findings]
