"""The whole verification, one step at a time: the combine, the models, a training in both frameworks, an audit.

The frameworks' kernels (matmul, tanh, softmax) add in orders of their own, so of gradients no bits are promised: two
float32 computations of one gradient are as far apart as both their errors, bounded in `classifier`, at most.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

import gradcombine as gc
from gradcombine.verify.compare.ulp import equal_bits
from gradcombine.verify.suite import classifier as problem
from gradcombine.verify.suite import defects, frameworks, places
from gradcombine.verify.suite.classifier import Batch, analyse, analyse_mean
from gradcombine.verify.suite.outcomes import BITS, BOUND, DIFFERS, Finding, Report
from gradcombine.verify.suite.places import Case, Contributions

COUNTS = (1, 2, 4, 8)
"""All numbers of replicas."""

ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "OMP_NUM_THREADS")
"""Variables that change the frameworks' kernels."""

WINDOWS, EVERY, LEARNING_RATE = 16, 4, 1.0
"""Of the training."""

Gradients = dict[str, np.ndarray]
"""A gradient and its loss."""


def verify(replicas: int, full: bool, inject_fault: bool, started: Callable[[str, int], None]) -> Report:
    """Runs all the rows: TensorFlow's of the combine, and the audit, in a process of their own.

    Args:
      replicas: the largest number of replicas.
      full: whether all of `COUNTS` up to it are run, and not 2 and it alone; and in all modes.
      inject_fault: whether one bit of one row's input is flipped, the last of those that promise bits, and the audit
        gets a step with a defect.
      started: called as each step begins, with its name and the number of all the steps.
    """
    begun = time.perf_counter()
    counts = counts_of(replicas, full)
    with ProcessPoolExecutor(1, get_context("spawn"), places.prepare_devices) as beside:
        beside.submit(_loaded)
        findings, curves = _rows(counts, full, inject_fault, started, beside)
    command = f"gradcombine verify --replicas {replicas}{' --full' * full}{' --inject-fault' * inject_fault}"
    return Report(findings, curves, _settings(command, counts, inject_fault), time.perf_counter() - begun)


def counts_of(replicas: int, full: bool) -> list[int]:
    """The numbers of replicas that are run.

    >>> counts_of(8, full=False), counts_of(8, full=True), counts_of(2, full=False), counts_of(1, full=False)
    ([2, 8], [1, 2, 4, 8], [2], [1])
    """
    counts = [count for count in COUNTS if count <= replicas]
    return counts if full else sorted({*counts[1:2], counts[-1]})


def _loaded() -> None:
    """Imports the frameworks: this module does."""


def _rows(
    counts: list[int],
    full: bool,
    inject_fault: bool,
    started: Callable[[str, int], None],
    beside: ProcessPoolExecutor,
) -> tuple[list[Finding], dict[str, list[float]]]:
    own = [case for case in frameworks.cases(counts, full) if case.framework != "tensorflow"]
    count = len(own) + 5
    examples, parameters = problem.load(), problem.initial_parameters()
    batches = list(problem.cut(examples, problem.SIZES))

    started("gradients of the microbatches", count)
    sizes = [len(batch.labels) for batch in batches]
    contributions = {
        name: Contributions([_measured(name, parameters, batch) for batch in batches], sizes)
        for name in frameworks.MEASURES
    }
    # One source for every row: what differs then is the combine.
    source = contributions["jax"]
    tensorflow = beside.submit(_in_tensorflow, counts, full, source, inject_fault)
    audited = beside.submit(frameworks.audited, min(2, max(counts)), inject_fault)
    started("a step with a defect, and repaired", count)
    few = slice(defects.EXAMPLES)
    accused = list(defects.checked(examples.images[few], examples.labels[few].astype(np.float32)))
    combined = _combine(own, source, lambda name: started(name, count))
    started("full batch and kernels", count)
    models = list(_models(contributions, parameters, batches))
    started("training", count)
    curves, trained = _train(examples)
    started("TensorFlow's rows and the audit, in a process of their own", count)
    found, clean = audited.result()
    return [*combined, *tensorflow.result(), *models, *accused, found, *trained, clean], curves


def _settings(command: str, counts: list[int], inject_fault: bool) -> dict[str, Any]:
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "versions": {
            "gradcombine": gc.__version__,
            **{name: importlib.metadata.version(name) for name in ("numpy", "jax", "tensorflow")},
        },
        "microbatches": list(problem.SIZES),
        "replicas": counts,
        "inject_fault": inject_fault,
        "training": {"windows": WINDOWS, "microbatches": EVERY, "learning rate": LEARNING_RATE},
        "libraries": {name: importlib.metadata.version(name) for name in ("jaxlib", "optax", "ml_dtypes")},
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processors": os.cpu_count()},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _in_tensorflow(counts: list[int], full: bool, contributions: Contributions, inject_fault: bool) -> list[Finding]:
    cases = [case for case in frameworks.cases(counts, full) if case.framework == "tensorflow"]
    corrupted = [case for case in cases if places.promised(case) == BITS][-1] if inject_fault else None
    return _combine(cases, contributions, corrupted=corrupted)


def _combine(
    cases: Sequence[Case],
    contributions: Contributions,
    started: Callable[[str], None] = lambda name: None,
    corrupted: Case | None = None,
) -> list[Finding]:
    judge = places.Judge(contributions)
    findings: list[Finding] = []
    for case in cases:
        started(f"{case.framework}, {case.mode}, {case.place}")
        inputs = case.contributions(contributions)
        if case is corrupted:
            inputs = places.flip_lowest_bit(case, inputs)
        findings.append(judge.finding(case, case.run(inputs)))
    return findings


def _measured(framework: str, parameters: Gradients, batch: Batch) -> Gradients:
    return frameworks.exported(frameworks.MEASURES[framework](parameters, batch))


def _models(
    contributions: dict[str, Contributions], parameters: Gradients, batches: Sequence[Batch]
) -> Iterator[Finding]:
    """The weighted mean equals the full batch's gradient up to rounding, a mean of means does not; and how far the two
    frameworks' gradients of that batch are apart, leaf by leaf.
    """
    whole = problem.join(batches)
    bounds, mean_bounds = analyse(parameters, whole)[1], analyse_mean(parameters, batches)[1]
    references = {name: _measured(name, parameters, whole) for name in contributions}
    for framework, (values, weights) in contributions.items():
        reference = references[framework]
        for combined, scale in (("weighted mean", weights), ("mean of means", None)):
            result = gc.mean(values, weights=scale)
            pairs = [(result[name], leaf) for name, leaf in reference.items()]
            share = max(_share(result[name], reference[name], bounds[name] + mean_bounds[name]) for name in reference)
            labels = {"framework": framework, "combined": combined}
            promise, holds = (BOUND, share <= 1) if scale else (DIFFERS, share > 1)
            yield Finding("full batch", labels, promise, holds, *places.distances(pairs), share)
    for name in sorted(bounds):
        a, b = (reference[name] for reference in references.values())
        share = _share(a, b, 2 * bounds[name])
        labels = {"leaf": name, "shape": "x".join(map(str, a.shape)) or "scalar"}
        yield Finding("kernels", labels, BOUND, share <= 1, *places.distances([(a, b)]), share, equal_bits(a, b))


def _share(a: np.ndarray, b: np.ndarray, allowed: np.ndarray) -> float:
    return problem.share(np.abs(np.float64(a) - b), allowed)


def _train(examples: Batch) -> tuple[dict[str, list[float]], list[Finding]]:
    windows = _windows(examples)
    trained = {name: list(_steps(name, windows)) for name in frameworks.MEASURES}
    contrast = list(_steps("jax", windows, weighted=False))
    curves = {name: _losses(steps) for name, steps in [*trained.items(), ("mean of means", contrast)]}
    return curves, list(_training_findings(trained, curves, windows))


def _windows(examples: Batch) -> list[list[Batch]]:
    """The microbatches of all windows: each window has the same sizes, and goes on where the last one ended."""
    sizes = problem.SIZES[:EVERY]
    return [list(problem.cut(examples, sizes, window * sum(sizes))) for window in range(WINDOWS)]


def _steps(framework: str, windows: list[list[Batch]], weighted: bool = True) -> Iterator[tuple[Gradients, Gradients]]:
    """Gradient descent, a step a window, with the loss averaged in the same tree as the gradients.

    Args:
      weighted: by the number of examples; otherwise the mean of the microbatches' means.

    Yields:
      The parameters before a step, and the window's mean loss and gradient.
    """
    array, measure = frameworks.FRAMEWORKS[framework].array, frameworks.MEASURES[framework]
    parameters = {name: array(leaf) for name, leaf in problem.initial_parameters().items()}
    accumulator = gc.accumulate(places.MEAN, every=EVERY)
    state = accumulator.init(parameters | {"loss": array(np.float32(0))})
    for window in windows:
        for batch in window:
            weight = array(np.float32(len(batch.labels) if weighted else 1))
            state = accumulator.update(measure(parameters, batch), state, weight)
        mean = accumulator.value(state)
        yield frameworks.exported(parameters), frameworks.exported(mean)
        parameters = {name: leaf - LEARNING_RATE * mean[name] for name, leaf in parameters.items()}


def _losses(steps: Sequence[tuple[Gradients, Gradients]]) -> list[float]:
    return [float(measured["loss"]) for _, measured in steps]


def _training_findings(
    trained: dict[str, list[tuple[Gradients, Gradients]]], curves: dict[str, list[float]], windows: list[list[Batch]]
) -> Iterator[Finding]:
    """Each step follows the gradient of its whole window, the loss falls, and the curves stay together.

    A bound of how far two trainings may part would have to follow rounding errors through every step. Instead each
    step is held against the exact gradient at the parameters that it starts from, which bounds what the step itself
    adds; and the curves have to be nearer to each other than to what dropping the weights makes of them.
    """
    for name, steps in trained.items():
        shares: list[float] = []
        for (parameters, measured), batches in zip(steps, windows, strict=True):
            values, bounds = analyse_mean(parameters, batches)
            shares += [problem.share(np.abs(measured[leaf] - values[leaf]), bounds[leaf]) for leaf in bounds]
        yield _finding(name, "every step is the window's gradient", BOUND, max(shares))
        yield _finding(name, "last loss / first loss", "falls", curves[name][-1] / curves[name][0])
    jax, tensorflow, contrast = map(np.array, curves.values())
    apart, dropped = float(np.abs(jax - tensorflow).max()), float(np.abs(jax - contrast).max())
    yield _finding("jax, tensorflow", "distance of the curves / distance without weights", "nearer", apart / dropped)


def _finding(framework: str, law: str, promise: str, share: float) -> Finding:
    return Finding("training", {"framework": framework, "law": law}, promise, share <= 1, share=share)
