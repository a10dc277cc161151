"""Runs the verification: combine, models, training in both frameworks, audits.

The summation order of the frameworks' kernels (matmul, tanh, softmax) is unspecified, so no bits are promised for
gradients: two float32 computations of a gradient differ by at most the sum of their error bounds, from `classifier`.
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
from gradcombine.verify.suite import defects, frameworks, places, with_jax
from gradcombine.verify.suite.classifier import Batch, analyse, analyse_mean
from gradcombine.verify.suite.frameworks import NUMPY, Gradients
from gradcombine.verify.suite.outcomes import BOUND, CLEAN, DIFFERS, Finding, Report
from gradcombine.verify.suite.places import Contributions, combine

COUNTS = (1, 2, 4, 8)
"""Numbers of replicas."""

ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "OMP_NUM_THREADS")
"""Variables that change the frameworks' kernels."""

Training = list[tuple[Gradients, Gradients]]
"""For each window, the parameters before it, and its mean gradient and loss."""


def verify(replicas: int, full: bool, inject_fault: bool, progress: Callable[[str, int], None]) -> Report:
    """Runs the verification; TensorFlow runs in a separate process, and is not imported in this one.

    Args:
      replicas: the largest number of replicas.
      full: whether to run all numbers of replicas in `COUNTS`, instead of 2 and the largest, and all modes.
      inject_fault: whether to flip one bit in the input of the last row that promises bits, and to audit a step with a
        defect.
      progress: called at the start of each step, with its name and the total number of steps.
    """
    start = time.perf_counter()
    counts = counts_of(replicas, full)
    with ProcessPoolExecutor(1, get_context("spawn"), places.prepare_tensorflow) as executor:
        executor.submit(frameworks.in_tensorflow)
        findings, curves = _rows(counts, full, inject_fault, progress, executor)
    command = f"gradcombine verify --replicas {replicas}{' --full' * full}{' --inject-fault' * inject_fault}"
    return Report(findings, curves, _settings(command, counts, inject_fault), time.perf_counter() - start)


def counts_of(replicas: int, full: bool) -> list[int]:
    """Numbers of replicas to run.

    >>> counts_of(8, full=False), counts_of(8, full=True), counts_of(2, full=False), counts_of(1, full=False)
    ([2, 8], [1, 2, 4, 8], [2], [1])
    """
    counts = [count for count in COUNTS if count <= replicas]
    return counts if full else sorted({*counts[1:2], counts[-1]})


def _rows(
    counts: list[int],
    full: bool,
    inject_fault: bool,
    progress: Callable[[str, int], None],
    executor: ProcessPoolExecutor,
) -> tuple[list[Finding], dict[str, list[float]]]:
    cases = [*NUMPY.cases(counts, full), *with_jax.JAX.cases(counts, full)]
    steps, replicas = len(cases) + 5, min(2, max(counts))
    examples, parameters = problem.load(), problem.initial_parameters()
    batches = list(problem.cut(examples, problem.SIZES))
    full_batch = problem.join(batches)

    progress("gradients of the microbatches", steps)
    sizes = [len(batch.labels) for batch in batches]
    *values, jax_reference = frameworks.measured(with_jax.measure, parameters, [*batches, full_batch])
    # The input of every row of the combine, so that only the combine can differ.
    source = Contributions(values, sizes)
    tensorflow = {
        name: executor.submit(frameworks.in_tensorflow, name, *arguments)
        for name, *arguments in (
            ("gradients", parameters, [*batches, full_batch]),
            ("combined", counts, full, source, inject_fault),
            ("trained", examples),
            ("audited", replicas),
        )
    }
    progress("a step with a defect, and repaired", steps)
    few = slice(defects.EXAMPLES)
    checks = list(defects.checked(examples.images[few], examples.labels[few].astype(np.float32)))
    rows = combine(cases, source, lambda name: progress(name, steps))
    progress("training", steps)
    windows = frameworks.windows(examples)
    trainings = {"jax": list(frameworks.steps(with_jax.JAX, with_jax.measure, windows))}
    contrast = list(frameworks.steps(with_jax.JAX, with_jax.measure, windows, weighted=False))
    progress("audit", steps)
    audits = with_jax.audited(replicas)
    multi_steps = audits.pop("optax.MultiSteps")
    audits["accumulate"] = multi_steps if inject_fault else audits["accumulate"]
    progress("TensorFlow's rows, in a separate process", steps)
    *tensorflow_values, tensorflow_reference = tensorflow["gradients"].result()
    contributions = {"jax": source, "tensorflow": Contributions(tensorflow_values, sizes)}
    references = {"jax": jax_reference, "tensorflow": tensorflow_reference}
    models = list(_model_rows(contributions, references, parameters, batches))
    rows += tensorflow["combined"].result()
    trainings["tensorflow"] = tensorflow["trained"].result()
    curves = {name: _losses(training) for name, training in [*trainings.items(), ("mean of means", contrast)]}
    names = {name: [x.name for x in report.findings] for name, report in audits.items()}
    clean = _audit_row(names | {"AccumulatedStep": tensorflow["audited"].result()})
    training_rows = _training_rows(trainings, curves, windows)
    return [*rows, *models, *checks, defects.audited(multi_steps), *training_rows, clean], curves


def _audit_row(findings: dict[str, list[str]]) -> Finding:
    """Row for the audits of the library's steps, which must not have findings."""
    defects = "; ".join(f"{name}: {', '.join(sorted(set(names)))}" for name, names in findings.items() if names)
    return Finding("audit", {"steps": ", ".join(findings), "defects": defects or "none"}, CLEAN, not defects)


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
        "training": {
            "windows": frameworks.WINDOWS,
            "microbatches": frameworks.EVERY,
            "learning rate": frameworks.LEARNING_RATE,
        },
        "libraries": {name: importlib.metadata.version(name) for name in ("jaxlib", "optax", "ml_dtypes")},
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processors": os.cpu_count()},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _model_rows(
    contributions: dict[str, Contributions],
    references: dict[str, Gradients],
    parameters: Gradients,
    batches: Sequence[Batch],
) -> Iterator[Finding]:
    """Compares weighted means, and means of means, with the full batch's gradient, and the gradients of JAX with those
    of TensorFlow, leaf by leaf.
    """
    bounds, mean_bounds = analyse(parameters, problem.join(batches))[1], analyse_mean(parameters, batches)[1]
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


def _share(a: np.ndarray, b: np.ndarray, bound: np.ndarray) -> float:
    return problem.share(np.abs(np.float64(a) - b), bound)


def _losses(training: Training) -> list[float]:
    return [float(mean["loss"]) for _, mean in training]


def _training_rows(
    trainings: dict[str, Training], curves: dict[str, list[float]], windows: list[list[Batch]]
) -> Iterator[Finding]:
    """Checks that each step is along the window's gradient, that the loss decreases, and that the curves agree.

    To bound the distance of two trainings, rounding errors would have to be propagated through all steps. Instead each
    step is compared with the exact gradient at the parameters before it, and the distance of the frameworks' curves
    with the distance to a training without weights.
    """
    for name, training in trainings.items():
        shares: list[float] = []
        for (parameters, mean), batches in zip(training, windows, strict=True):
            values, bounds = analyse_mean(parameters, batches)
            shares += [problem.share(np.abs(mean[leaf] - values[leaf]), bounds[leaf]) for leaf in bounds]
        yield _training_row(name, "every step is the window's gradient", BOUND, max(shares))
        yield _training_row(name, "last loss / first loss", "falls", curves[name][-1] / curves[name][0])
    jax, tensorflow, contrast = map(np.array, curves.values())
    ratio = float(np.abs(jax - tensorflow).max()) / float(np.abs(jax - contrast).max())
    yield _training_row("jax, tensorflow", "distance of the curves / distance without weights", "nearer", ratio)


def _training_row(framework: str, law: str, promise: str, share: float) -> Finding:
    return Finding("training", {"framework": framework, "law": law}, promise, share <= 1, share=share)
