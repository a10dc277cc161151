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
from gradcombine.verify.suite import defects, frameworks, places, with_jax
from gradcombine.verify.suite.classifier import Batch, analyse, analyse_mean
from gradcombine.verify.suite.frameworks import NUMPY, Gradients
from gradcombine.verify.suite.outcomes import BOUND, CLEAN, DIFFERS, Finding, Report
from gradcombine.verify.suite.places import Contributions, combine

COUNTS = (1, 2, 4, 8)
"""All numbers of replicas."""

ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "OMP_NUM_THREADS")
"""Variables that change the frameworks' kernels."""

Trained = list[tuple[Gradients, Gradients]]
"""For each window, the parameters before it, and its mean gradient and loss."""


def verify(replicas: int, full: bool, inject_fault: bool, started: Callable[[str, int], None]) -> Report:
    """Runs all the rows: TensorFlow's in a process of their own, so that this one does not import it.

    Args:
      replicas: the largest number of replicas.
      full: whether all of `COUNTS` up to it are run, and not 2 and it alone; and in all modes.
      inject_fault: whether one bit of one row's input is flipped, the last of those that promise bits, and the audit
        gets a step with a defect.
      started: called as each step begins, with its name and the number of all the steps.
    """
    begun = time.perf_counter()
    counts = counts_of(replicas, full)
    with ProcessPoolExecutor(1, get_context("spawn"), places.prepare_tensorflow) as beside:
        beside.submit(frameworks.in_tensorflow)
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


def _rows(
    counts: list[int],
    full: bool,
    inject_fault: bool,
    started: Callable[[str, int], None],
    beside: ProcessPoolExecutor,
) -> tuple[list[Finding], dict[str, list[float]]]:
    own = [*NUMPY.cases(counts, full), *with_jax.JAX.cases(counts, full)]
    count, replicas = len(own) + 5, min(2, max(counts))
    examples, parameters = problem.load(), problem.initial_parameters()
    batches = list(problem.cut(examples, problem.SIZES))
    whole = problem.join(batches)

    started("gradients of the microbatches", count)
    sizes = [len(batch.labels) for batch in batches]
    *values, reference = frameworks.measured(with_jax.measure, parameters, [*batches, whole])
    # One source for every row: what differs then is the combine.
    source = Contributions(values, sizes)
    tensorflow = {
        name: beside.submit(frameworks.in_tensorflow, name, *arguments)
        for name, *arguments in (
            ("gradients", parameters, [*batches, whole]),
            ("combined", counts, full, source, inject_fault),
            ("trained", examples),
            ("audited", replicas),
        )
    }
    started("a step with a defect, and repaired", count)
    few = slice(defects.EXAMPLES)
    accused = list(defects.checked(examples.images[few], examples.labels[few].astype(np.float32)))
    rows = combine(own, source, lambda name: started(name, count))
    started("training", count)
    windows = frameworks.windows(examples)
    trained = {"jax": list(frameworks.steps(with_jax.JAX, with_jax.measure, windows))}
    contrast = list(frameworks.steps(with_jax.JAX, with_jax.measure, windows, weighted=False))
    started("audit", count)
    audits = with_jax.audited(replicas)
    multi = audits.pop("optax.MultiSteps")
    audits["accumulate"] = multi if inject_fault else audits["accumulate"]
    started("TensorFlow's rows, in a process of their own", count)
    *others, other = tensorflow["gradients"].result()
    contributions = {"jax": source, "tensorflow": Contributions(others, sizes)}
    models = list(_models(contributions, {"jax": reference, "tensorflow": other}, parameters, batches))
    rows += tensorflow["combined"].result()
    trained["tensorflow"] = tensorflow["trained"].result()
    curves = {name: _losses(each) for name, each in [*trained.items(), ("mean of means", contrast)]}
    names = {name: [x.name for x in report.findings] for name, report in audits.items()}
    clean = _audited(names | {"AccumulatedStep": tensorflow["audited"].result()})
    training = _training_findings(trained, curves, windows)
    return [*rows, *models, *accused, defects.audited(multi), *training, clean], curves


def _audited(findings: dict[str, list[str]]) -> Finding:
    """The row of the library's own steps, in which an audit has to find nothing."""
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


def _models(
    contributions: dict[str, Contributions],
    references: dict[str, Gradients],
    parameters: Gradients,
    batches: Sequence[Batch],
) -> Iterator[Finding]:
    """The weighted mean equals the full batch's gradient up to rounding, a mean of means does not; and how far the two
    frameworks' gradients of that batch are apart, leaf by leaf.
    """
    whole = problem.join(batches)
    bounds, mean_bounds = analyse(parameters, whole)[1], analyse_mean(parameters, batches)[1]
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


def _losses(steps: Trained) -> list[float]:
    return [float(measured["loss"]) for _, measured in steps]


def _training_findings(
    trained: dict[str, Trained], curves: dict[str, list[float]], windows: list[list[Batch]]
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
