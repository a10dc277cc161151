"""Runs the verification: combine, models, training in both frameworks, audits.

The summation order of the frameworks' matmuls is unspecified, so no bits are promised for gradients: two float32
computations of a gradient differ by at most the sum of their error bounds, from `classifier`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

import gradcombine as gc
from gradcombine.verify.check import Verdict, check_step
from gradcombine.verify.suite import frameworks
from gradcombine.verify.suite.classifier import SIZES, Batch, analyse, analyse_mean, batches, initial_parameters, share
from gradcombine.verify.suite.combine import Contributions, cases, combined
from gradcombine.verify.suite.frameworks import NUMPY, Results, trained, verified
from gradcombine.verify.suite.outcomes import BOUND, CLEAN, DIFFERS, NAMED, Finding, Report, compared
from gradcombine.verify.suite.with_jax import JAX

COUNTS = (1, 2, 4, 8)
"""Numbers of replicas."""

ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "OMP_NUM_THREADS")
"""Variables that change the frameworks' kernels."""


def verify(replicas: int, full: bool, inject_fault: bool, progress: Callable[[str, int], None]) -> Report:
    """Runs the verification; TensorFlow runs in a separate process, and is not imported in this one.

    Args:
      replicas: the largest number of replicas.
      full: whether to run all numbers of replicas in `COUNTS`, instead of 2 and the largest, and all modes.
      inject_fault: whether to flip one bit in the input of the last row of the combine, and to audit a step with a
        defect.
      progress: called at the start of each step, with its name and the total number of steps.
    """
    start = time.perf_counter()
    counts = counts_of(replicas, full)
    numpy_cases = list(cases(NUMPY, counts, full))
    steps = len(numpy_cases) + len(list(cases(JAX, counts, full))) + 4
    parts = [*batches(SIZES), *batches([sum(SIZES)])]
    # The input of every row of the combine, so that only the combine can differ.
    source = Contributions(frameworks.measured(NUMPY, parts[:-1]), list(map(np.float32, SIZES)))

    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        task = source, parts, counts, full
        pending = executor.submit(frameworks.in_tensorflow, *task, inject_fault)
        progress("a step with a defect, and repaired", steps)
        checks = list(checked(*batches([10])))
        rows = list(combined(numpy_cases, source, False, lambda name: progress(name, steps)))
        jax = verified(JAX, *task, progress=lambda name: progress(name, steps))
        contrast = list(trained(JAX, weighted=False))
        progress("TensorFlow's rows, in a separate process", steps)
        tensorflow = pending.result()

    both = {"jax": jax, "tensorflow": tensorflow}
    trainings = {name: x.training for name, x in both.items()} | {"mean of means": contrast}
    curves = {name: [float(mean["loss"]) for _, mean in training] for name, training in trainings.items()}
    multi_steps = jax.audited.pop("optax.MultiSteps")
    if inject_fault:
        jax.audited["accumulate"] = multi_steps
    findings = [
        *rows,
        *jax.rows,
        *tensorflow.rows,
        *_model_rows(both, parts),
        *checks,
        _defect_row("audit", "optax.MultiSteps", multi_steps, "optimizer-every-microbatch"),
        *_training_rows(both, curves),
        _audit_row(jax.audited | tensorflow.audited),
    ]
    command = f"gradcombine verify --replicas {replicas}{' --full' * full}{' --inject-fault' * inject_fault}"
    return Report(findings, curves, _settings(command, counts, inject_fault), time.perf_counter() - start)


def counts_of(replicas: int, full: bool) -> list[int]:
    """Numbers of replicas to run.

    >>> counts_of(8, full=False), counts_of(8, full=True), counts_of(2, full=False), counts_of(1, full=False)
    ([2, 8], [1, 2, 4, 8], [2], [1])
    """
    counts = [count for count in COUNTS if count <= replicas]
    return counts if full else sorted({*counts[1:2], counts[-1]})


def checked(batch: Batch) -> Iterator[Finding]:
    """Checks two steps in NumPy: one averages the means of unequal microbatches, one weights them by their sizes."""
    for name, weighted, cause in (
        ("microbatches averaged", False, "mean of means"),
        ("weighted by examples", True, ""),
    ):
        report = check_step(partial(_make_step, weighted), initial_parameters(), batch, microbatches=(4,))
        causes = [str(fault.cause).partition(":")[0] for fault in report.faults]
        passes = report.verdict is Verdict.PASSES
        yield _defect_row("check", name, causes if causes or passes else [report.verdict.value], cause)


def _make_step(weighted: bool, microbatches: int) -> Callable[..., Any]:
    def step(params: Any, batch: Batch) -> Any:
        parts = list(map(Batch, *(np.array_split(x, microbatches) for x in batch)))
        gradients = [NUMPY.measure(params, part) for part in parts]
        return gc.mean(gradients, [len(part.images) for part in parts] if weighted else None)

    return step


def _defect_row(asked: str, step: str, answers: Sequence[str], expected: str) -> Finding:
    """Row for a step whose only defect is ``expected``, or that has none if it is empty."""
    answer = ", ".join(dict.fromkeys(answers))
    labels = {"asked": asked, "step": step, "answer": answer or "no defect"}
    return Finding("defects", labels, NAMED if expected else CLEAN, answer == expected)


def _audit_row(findings: Mapping[str, Sequence[str]]) -> Finding:
    """Row for the audits of the library's steps, which must not have findings."""
    defects = "; ".join(f"{name}: {', '.join(sorted(set(names)))}" for name, names in findings.items() if names)
    return Finding("audit", {"steps": ", ".join(findings), "defects": defects or "none"}, CLEAN, not defects)


def _settings(command: str, counts: list[int], inject_fault: bool) -> dict[str, Any]:
    def versions(*names: str) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in names}

    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "versions": {"gradcombine": gc.__version__, **versions("numpy", "jax", "tensorflow")},
        "microbatches": list(SIZES),
        "replicas": counts,
        "inject_fault": inject_fault,
        "training": {
            "windows": frameworks.WINDOWS,
            "microbatches": frameworks.EVERY,
            "learning rate": frameworks.LEARNING_RATE,
        },
        "libraries": versions("jaxlib", "optax", "ml_dtypes"),
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processors": os.cpu_count()},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _model_rows(both: Mapping[str, Results], parts: Sequence[Batch]) -> Iterator[Finding]:
    """Compares weighted means, and means of means, with the full batch's gradient, and the gradients of JAX with those
    of TensorFlow, leaf by leaf.
    """
    bounds, mean_bounds = analyse(initial_parameters(), parts[-1])[1], analyse_mean(initial_parameters(), parts[:-1])[1]
    allowed = {name: bound + mean_bounds[name] for name, bound in bounds.items()}
    for framework, results in both.items():
        *values, reference = results.gradients
        for name, weights, promise in (("weighted mean", SIZES, BOUND), ("mean of means", None, DIFFERS)):
            result = gc.mean(values, weights=weights)
            labels = {"framework": framework, "combined": name}
            yield compared("full batch", labels, promise, result, reference, share(result, reference, allowed))
    a, b = (results.gradients[-1] for results in both.values())
    for name, bound in bounds.items():
        left, right = {name: a[name]}, {name: b[name]}
        labels = {"leaf": name, "shape": "x".join(map(str, a[name].shape)) or "scalar"}
        yield compared("kernels", labels, BOUND, left, right, share(left, right, {name: 2 * bound}))


def _training_rows(both: Mapping[str, Results], curves: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """Checks that each step is along the window's gradient, that the loss decreases, and that the curves agree.

    To bound the distance of two trainings, rounding errors would have to be propagated through all steps. Instead each
    step is compared with the exact gradient at the parameters before it, and the distance of the frameworks' curves
    with the distance to a training without weights.
    """

    def row(framework: str, law: str, promise: str, ratio: float) -> Finding:
        return Finding("training", {"framework": framework, "law": law}, promise, ratio <= 1, share=ratio)

    for name, results in both.items():
        steps = zip(results.training, frameworks.windows(), strict=True)
        worst = max(share(mean, *analyse_mean(params, window)) for (params, mean), window in steps)
        yield row(name, "every step is the window's gradient", BOUND, worst)
        yield row(name, "last loss / first loss", "falls", curves[name][-1] / curves[name][0])
    jax, tensorflow, contrast = map(np.array, curves.values())
    ratio = float(np.abs(jax - tensorflow).max()) / float(np.abs(jax - contrast).max())
    yield row("jax, tensorflow", "distance of the curves / distance without weights", "nearer", ratio)
