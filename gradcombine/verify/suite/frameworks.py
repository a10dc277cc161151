# pyright: standard
"""Verification in one framework: the combine, gradients, a training, audits; JAX and TensorFlow in a process each."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

import gradcombine as gc
from gradcombine.verify.check.laws import mapped
from gradcombine.verify.suite.classifier import SIZES, Arrays, Batch, batches, initial_parameters
from gradcombine.verify.suite.combine import (
    ANY_REPLICAS,
    MEAN,
    ONE_REPLICA,
    Contributions,
    Framework,
    Mode,
    cases,
    combined,
)
from gradcombine.verify.suite.outcomes import Finding

WINDOWS, EVERY, LEARNING_RATE = 16, 4, 0.05
"""Training: number of windows, microbatches per window, learning rate."""

STEPS_EVERY, ROWS, RATE = 4, 8, 0.1
"""Audited steps: microbatches per window, examples per microbatch, learning rate."""


def _measure(parameters: Mapping[str, np.ndarray], batch: Batch) -> Arrays:
    residual = batch.images @ parameters["w"] + parameters["b"] - batch.targets
    n = len(residual)
    return {"b": residual.sum(axis=0) / n, "loss": (residual**2).sum() / (2 * n), "w": batch.images.T @ residual / n}


NUMPY = Framework(
    "numpy",
    np.asarray,
    gc.LOCAL,
    {"eager": Mode((*ONE_REPLICA, *ANY_REPLICAS))},
    _measure,
    lambda replicas: {},
)
"""The reference, with a single replica."""


class Results(NamedTuple):
    """Results of a framework.

    Attributes:
      rows: of the combine.
      gradients: of all batches.
      training: for each window, the parameters before it, and its mean gradient and loss.
      audited: see `Framework`.
    """

    rows: list[Finding]
    gradients: list[Arrays]
    training: list[tuple[Arrays, Arrays]]
    audited: dict[str, list[str]]


def verified(
    framework: Framework,
    contributions: Contributions,
    parts: Sequence[Batch],
    counts: Sequence[int],
    full: bool,
    inject_fault: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> Results:
    """Runs the verification in a framework.

    Args:
      framework: the framework.
      contributions: input of the combine.
      parts: batches whose gradients are computed.
      counts: numbers of replicas.
      full: whether to run all modes.
      inject_fault: whether the last row of the combine gets a corrupted input.
      progress: called with the name of each row, and with ``"training"`` and ``"audit"``.
    """
    gradients = measured(framework, parts)
    rows = list(combined(list(cases(framework, counts, full)), contributions, inject_fault, progress))
    progress("training")
    training = list(trained(framework))
    progress("audit")
    return Results(rows, gradients, training, framework.audited(min(2, max(counts))))


def measured(framework: Framework, parts: Sequence[Batch]) -> list[Arrays]:
    """Gradients of batches, and their losses, at the initial parameters."""
    parameters = mapped(framework.array, initial_parameters())
    return mapped(np.asarray, [framework.measure(parameters, batch) for batch in parts])


def windows() -> list[list[Batch]]:
    """Microbatches of all windows, which have the same sizes and cover consecutive examples."""
    parts = iter(batches(SIZES[:EVERY] * WINDOWS))
    return [list(islice(parts, EVERY)) for _ in range(WINDOWS)]


def trained(framework: Framework, weighted: bool = True) -> Iterator[tuple[Arrays, Arrays]]:
    """Runs gradient descent with one step per window; the loss is averaged in the same tree as the gradients.

    Args:
      framework: the framework.
      weighted: whether to weight microbatches by their number of examples; otherwise a mean of means is computed.

    Yields:
      The parameters before a step, and the window's mean loss and gradient.
    """
    parameters = mapped(framework.array, initial_parameters())
    accumulator = gc.accumulate(MEAN, every=EVERY)
    state = accumulator.init(parameters | {"loss": framework.array(np.float32(0))})
    for window in windows():
        for batch in window:
            weight = framework.array(np.float32(len(batch.images) if weighted else 1))
            state = accumulator.update(framework.measure(parameters, batch), state, weight)
        mean = accumulator.value(state)
        yield mapped(np.asarray, parameters), mapped(np.asarray, mean)
        parameters = {name: leaf - LEARNING_RATE * mean[name] for name, leaf in parameters.items()}


DEVICES = 8


def prepare_devices() -> None:
    """Sets environment variables that JAX and TensorFlow read on import, and that new processes inherit."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def in_tensorflow(*arguments: Any) -> Results:
    """Imports TensorFlow, configures its CPUs, and calls `verified` with these arguments; called in a new process."""
    # TensorFlow would import JAX, for its converter to TensorFlow Lite.
    sys.modules.setdefault("jax", None)  # pyright: ignore[reportArgumentType]
    stderr = os.dup(2)
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        import tensorflow as tf  # its C++ code writes messages before it reads its log level
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    # Bits are compared on the CPU only.
    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    from gradcombine.verify.suite.with_tensorflow import TENSORFLOW  # after the settings above

    return verified(TENSORFLOW, *arguments)
