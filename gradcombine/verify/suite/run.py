"""The whole verification, one step at a time: the combine, the models, and a training in both frameworks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tensorflow as tf

import gradcombine as gc
from gradcombine.types import Tree
from gradcombine.verify.suite import digits as problem
from gradcombine.verify.suite import jax_rows, own_steps, places, tensorflow_rows
from gradcombine.verify.suite import promises as laws
from gradcombine.verify.suite.digits import Batch, analyse_mean
from gradcombine.verify.suite.outcomes import BITS, BOUND, Finding, Report
from gradcombine.verify.suite.places import Case, Contributions
from gradcombine.verify.suite.promises import Gradients, Measure

COUNTS = (1, 2, 4, 8)
"""The numbers of replicas."""

ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "OMP_NUM_THREADS")
"""What changes the frameworks' kernels, and so belongs to a report."""


def verify(replicas: int, inject_fault: bool, started: Callable[[str, int], None]) -> Report:
    """Runs all the rows.

    Args:
      replicas: the largest number of replicas.
      inject_fault: whether one bit of one row's input is flipped, the last of those that promise bits, and the audit
        gets a step with a defect.
      started: called as each step begins, with its name and the number of all the steps.
    """
    begun = time.perf_counter()
    counts = [count for count in COUNTS if count <= replicas]
    cases = [*places.numpy_cases(), *jax_rows.cases(counts), *tensorflow_rows.cases(counts)]
    count = len(cases) + 4
    examples, parameters = problem.load(), problem.initial_parameters()
    batches = list(problem.cut(examples, problem.SIZES))

    started("gradients of the microbatches", count)
    contributions = {name: laws.contributions(measure, parameters, batches) for name, measure in _MEASURES.items()}
    # One source for every row: what differs then is the combine.
    findings = _combine(cases, contributions["jax"], inject_fault, lambda name: started(name, count))
    started("full batch and kernels", count)
    findings += _models(contributions, parameters, batches)
    started("training", count)
    curves, trained = _train(examples)
    started("audit", count)
    trained.append(own_steps.audited(min(2, max(counts)), inject_fault))
    settings = {
        "command": f"gradcombine verify --replicas {replicas}{' --inject-fault' if inject_fault else ''}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "versions": {
            "gradcombine": gc.__version__,
            **{name: importlib.metadata.version(name) for name in ("numpy", "jax", "tensorflow")},
        },
        "microbatches": list(problem.SIZES),
        "replicas": counts,
        "inject_fault": inject_fault,
        "training": {"windows": WINDOWS, "microbatches": EVERY, "learning rate": LEARNING_RATE},
        "libraries": {
            name: importlib.metadata.version(name) for name in ("jaxlib", "optax", "ml_dtypes", "scikit-learn")
        },
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processors": os.cpu_count()},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }
    return Report([*findings, *trained], curves, settings, time.perf_counter() - begun)


def _combine(
    cases: Sequence[Case], contributions: Contributions, inject_fault: bool, started: Callable[[str], None]
) -> list[Finding]:
    judge = laws.Judge(contributions)
    findings: list[Finding] = []
    corrupted = [case for case in cases if laws.promised(case) == BITS][-1] if inject_fault else None
    for case in cases:
        started(f"{case.framework}, {case.mode}, {case.place}")
        inputs = case.contributions(contributions)
        if case is corrupted:
            inputs = laws.flip_lowest_bit(case, inputs)
        findings.append(judge.finding(case, case.run(inputs)))
    return findings


def _models(contributions: dict[str, Contributions], parameters: Gradients, batches: Sequence[Batch]) -> list[Finding]:
    whole = problem.join(batches)
    findings: list[Finding] = []
    for name, measure in _MEASURES.items():
        findings += laws.full_batch(name, measure, contributions[name], parameters, batches)
    jax, tensorflow = (measure(parameters, whole) for measure in _MEASURES.values())
    return [*findings, *laws.kernels(jax, tensorflow, parameters, whole)]


def _train(examples: Batch) -> tuple[dict[str, list[float]], list[Finding]]:
    windows = _windows(examples)
    trained = {name: list(_steps(framework, windows)) for name, framework in FRAMEWORKS.items()}
    unweighted = list(_steps(FRAMEWORKS["jax"], windows, weighted=False))
    curves = {name: _losses(steps) for name, steps in [*trained.items(), ("mean of means", unweighted)]}
    return curves, list(_training_findings(trained, unweighted, windows))


WINDOWS, EVERY, LEARNING_RATE = 16, 4, 1.0


class Framework(NamedTuple):
    """The training loop's interface to a framework."""

    measure: Callable[[Any, Batch], Tree]
    constant: Callable[[Any], Any]
    exported: Callable[[Tree], dict[str, np.ndarray]]


FRAMEWORKS = {
    "jax": Framework(jax_rows.measure, jnp.float32, jax_rows.exported),
    "tensorflow": Framework(tensorflow_rows.measure, partial(tf.constant, dtype=tf.float32), tensorflow_rows.exported),
}


def _measured(framework: Framework, parameters: Gradients, batch: Batch) -> Gradients:
    return framework.exported(framework.measure(parameters, batch))


_MEASURES: dict[str, Measure] = {name: partial(_measured, framework) for name, framework in FRAMEWORKS.items()}


class Window(NamedTuple):
    """One step of training, on a window of microbatches.

    Attributes:
      parameters: before the step.
      measured: the window's mean loss and gradient.
    """

    parameters: dict[str, np.ndarray]
    measured: dict[str, np.ndarray]


def _windows(examples: Batch) -> list[list[Batch]]:
    """The microbatches of all windows: each window has the same sizes, and goes on where the last one ended."""
    sizes = problem.SIZES[:EVERY]
    return [list(problem.cut(examples, sizes, window * sum(sizes))) for window in range(WINDOWS)]


def _steps(framework: Framework, windows: list[list[Batch]], weighted: bool = True) -> Iterator[Window]:
    """Gradient descent, a step a window, with the loss averaged in the same tree as the gradients.

    Args:
      weighted: by the number of examples; otherwise the mean of the microbatches' means.
    """
    parameters = {name: framework.constant(leaf) for name, leaf in problem.initial_parameters().items()}
    accumulator = gc.accumulate(places.MEAN, every=EVERY)
    state = accumulator.init(parameters | {"loss": framework.constant(0)})
    for window in windows:
        for batch in window:
            weight = framework.constant(len(batch.labels) if weighted else 1)
            state = accumulator.update(framework.measure(parameters, batch), state, weight)
        mean = accumulator.value(state)
        yield Window(framework.exported(parameters), framework.exported(mean))
        parameters = {name: leaf - LEARNING_RATE * mean[name] for name, leaf in parameters.items()}


def _losses(windows: list[Window]) -> list[float]:
    return [float(window.measured["loss"]) for window in windows]


def _training_findings(
    trained: dict[str, list[Window]], unweighted: list[Window], windows: list[list[Batch]]
) -> Iterator[Finding]:
    """Each step follows the gradient of its whole window, the loss falls, and the curves stay together.

    A bound of how far two trainings may part would have to follow rounding errors through every step. Instead each
    step is held against the exact gradient at the parameters that it starts from, which bounds what the step itself
    adds; and the curves have to be nearer to each other than to what dropping the weights makes of them.
    """
    for name, steps in trained.items():
        shares: list[float] = []
        for step, batches in zip(steps, windows, strict=True):
            values, bounds = analyse_mean(step.parameters, batches)
            shares += [problem.share(np.abs(step.measured[leaf] - values[leaf]), bounds[leaf]) for leaf in bounds]
        yield _finding(name, "every step is the window's gradient", BOUND, max(shares))
        curve = _losses(steps)
        yield _finding(name, "last loss / first loss", "falls", curve[-1] / curve[0])
    jax, tensorflow, contrast = (np.array(_losses(steps)) for steps in (*trained.values(), unweighted))
    apart, dropped = float(np.abs(jax - tensorflow).max()), float(np.abs(jax - contrast).max())
    yield _finding("jax, tensorflow", "distance of the curves / distance without weights", "nearer", apart / dropped)


def _finding(framework: str, law: str, promise: str, share: float) -> Finding:
    return Finding("training", {"framework": framework, "law": law}, promise, share <= 1, share=share)
