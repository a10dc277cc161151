"""Training with accumulated gradients, the same in both frameworks, each window checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tensorflow as tf

import gradcombine as gc
from gradcombine.types import Tree
from gradcombine.verify.suite import digits, jax_rows, rounding, tensorflow_rows
from gradcombine.verify.suite.digits import Batch
from gradcombine.verify.suite.findings import BOUND, Finding
from gradcombine.verify.suite.places import MEAN
from gradcombine.verify.suite.rounding import analyse_mean

WINDOWS, EVERY, LEARNING_RATE = 16, 4, 1.0


class Framework(NamedTuple):
    """What the training loop needs of a framework."""

    measure: Callable[[Any, Batch], Tree]
    constant: Callable[[Any], Any]
    exported: Callable[[Tree], dict[str, np.ndarray]]


FRAMEWORKS = {
    "jax": Framework(jax_rows.measure, jnp.float32, jax_rows.exported),
    "tensorflow": Framework(tensorflow_rows.measure, lambda x: tf.constant(x, tf.float32), tensorflow_rows.exported),
}


class Window(NamedTuple):
    """One step of training.

    Attributes:
      parameters: before the step.
      measured: the window's mean loss and gradient.
    """

    parameters: dict[str, np.ndarray]
    measured: dict[str, np.ndarray]


def batches(examples: Batch) -> list[list[Batch]]:
    """The microbatches of all windows: each window has the same sizes, and goes on where the last one ended."""
    sizes = digits.SIZES[:EVERY]
    return [list(digits.cut(examples, sizes, window * sum(sizes))) for window in range(WINDOWS)]


def train(framework: Framework, windows: list[list[Batch]], weighted: bool = True) -> Iterator[Window]:
    """Gradient descent, a step a window, with the loss averaged in the same tree as the gradients.

    Args:
      weighted: by the number of examples; otherwise the mean of the microbatches' means.
    """
    parameters = {name: framework.constant(leaf) for name, leaf in digits.initial_parameters().items()}
    accumulator = gc.accumulate(MEAN, every=EVERY)
    state = accumulator.init(parameters | {"loss": framework.constant(0)})
    for window in windows:
        for batch in window:
            weight = framework.constant(len(batch.labels) if weighted else 1)
            state = accumulator.update(framework.measure(parameters, batch), state, weight)
        mean = accumulator.value(state)
        yield Window(framework.exported(parameters), framework.exported(mean))
        parameters = {name: leaf - LEARNING_RATE * mean[name] for name, leaf in parameters.items()}


def losses(windows: list[Window]) -> list[float]:
    return [float(window.measured["loss"]) for window in windows]


def laws(trained: dict[str, list[Window]], unweighted: list[Window], windows: list[list[Batch]]) -> Iterator[Finding]:
    """Each step follows the gradient of its whole window, the loss falls, and the curves stay together.

    A bound of how far two trainings may part would have to follow rounding errors through every step. Instead each
    step is held against the exact gradient at the parameters that it starts from, which bounds what the step itself
    adds; and the curves have to be nearer to each other than to what dropping the weights makes of them.
    """
    for name, steps in trained.items():
        shares = []
        for step, batches in zip(steps, windows, strict=True):
            values, bounds = analyse_mean(step.parameters, batches)
            shares += [rounding.share(np.abs(step.measured[leaf] - values[leaf]), bounds[leaf]) for leaf in bounds]
        yield _finding(name, "every step is the window's gradient", BOUND, max(shares))
        curve = losses(steps)
        yield _finding(name, "last loss / first loss", "falls", curve[-1] / curve[0])
    jax, tensorflow, contrast = (np.array(losses(steps)) for steps in (*trained.values(), unweighted))
    apart, dropped = float(np.abs(jax - tensorflow).max()), float(np.abs(jax - contrast).max())
    yield _finding("jax, tensorflow", "distance of the curves / distance without weights", "nearer", apart / dropped)


def _finding(framework: str, law: str, promise: str, share: float) -> Finding:
    return Finding("training", {"framework": framework, "law": law}, promise, share <= 1, share=share)
