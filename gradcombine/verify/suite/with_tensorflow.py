# pyright: standard
"""TensorFlow: eager, tf.function and XLA; MirroredStrategy over logical CPUs; the library's step, traced.

The functions that `run` calls are the tasks of a process of its own.
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


def _mirrored(function: Callable[..., Tree], count: int, dealt: tuple[Tree, np.ndarray]) -> list[Tree]:
    replicas = _strategy(count)

    def block_of(context: tf.distribute.ReplicaContext) -> Tree:
        return tf.nest.map_structure(lambda block: tf.constant(block[context.replica_id_in_sync_group]), dealt)

    arguments = replicas.experimental_distribute_values_from_function(block_of)
    results = _traced(lambda contributions: replicas.run(function, args=contributions))(arguments)
    local = {name: replicas.experimental_local_results(result) for name, result in results.items()}
    return [exported({name: result[rank] for name, result in local.items()}) for rank in range(count)]


@cache
def _strategy(count: int) -> tf.distribute.Strategy:
    # The default collective ops of two strategies in one process disturb each other.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{rank}" for rank in range(count)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


# Nothing here branches on a tensor, and AutoGraph would rewrite each function on each replica.
_traced = partial(tf.function, autograph=False)
_traced_once = cache(_traced)


def _xla(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """`function` compiled by XLA, from the graph that tf.function has traced of it."""
    return _traced(_traced_once(function), jit_compile=True)


TENSORFLOW = Framework(
    "tensorflow",
    tf.constant,
    {"eager": eager, "tf.function": _traced_once, "XLA": _xla},
    {"MirroredStrategy": _mirrored},
    gc.tf_replicas(),
    # As a separate function, the update is traced once, not once for each step.
    partial(unrolled, _traced),
    {},
)


@tf.function(reduce_retracing=True)
def _gradients(parameters: dict[str, Array], images: tf.Tensor, labels: tf.Tensor) -> dict[str, Array]:
    """The gradient and the ``"loss"``."""
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
    """The loss and its gradient of each batch."""
    return measured(_measure, parameters, batches)


def trained(examples: Batch) -> list[tuple[Gradients, Gradients]]:
    """See `gradcombine.verify.suite.frameworks.steps`."""
    return list(steps(TENSORFLOW, _measure, windows(examples)))


def combined(counts: list[int], full: bool, contributions: Contributions, inject_fault: bool) -> list[Finding]:
    """The rows of the combine."""
    cases = list(TENSORFLOW.cases(counts, full))
    corrupted = [case for case in cases if promised(case) == BITS][-1] if inject_fault else None
    return combine(cases, contributions, corrupted=corrupted)


def audited(replicas: int) -> list[str]:
    """The names of the findings in the library's own step."""
    strategy = _strategy(replicas)
    with strategy.scope():
        variables = {name: tf.Variable(tf.constant(leaf)) for name, leaf in initial_parameters().items()}

        def gradients(images: tf.Tensor, labels: tf.Tensor) -> tuple[Tree, Array]:
            found = _gradients(dict(variables), images, labels)
            return [found[name] for name in variables], tf.size(labels)

        def descend(gradients: Tree, variables: Tree) -> None:
            for gradient, variable in zip(gradients, variables, strict=True):
                variable.assign_sub(RATE * gradient)

        step = AccumulatedStep(gradients, list(variables.values()), descend, every=STEPS_EVERY)
    images, labels = tf.TensorSpec([ROWS, PIXELS]), tf.TensorSpec([ROWS], tf.int32)
    # A graph needs no compiler, and so no devices of JAX.
    here = Target(HERE, (), 1, None)
    return [finding.name for finding in audit(tf.function(step), images, labels, target=here).findings]
