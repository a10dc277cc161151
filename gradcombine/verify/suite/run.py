"""The whole verification, one step at a time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence

from gradcombine.verify.suite import (
    digits,
    jax_rows,
    laws,
    places,
    tensorflow_rows,
    train,
)
from gradcombine.verify.suite.digits import Batch
from gradcombine.verify.suite.findings import BITS, Finding, Report
from gradcombine.verify.suite.laws import Gradients, Measure
from gradcombine.verify.suite.places import Case, Contributions

COUNTS = (1, 2, 4, 8)
"""The numbers of replicas."""

ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "OMP_NUM_THREADS")
"""What changes the frameworks' kernels, and so belongs to a report."""


def verify(replicas: int, inject_fault: bool, started: Callable[[str, int], None]) -> Report:
    """Runs all the rows.

    Args:
      replicas: the largest number of replicas.
      inject_fault: whether one bit of one row's input is flipped: the last of those that promise bits.
      started: called as each step begins, with its name and the number of all the steps.
    """
    begun = time.perf_counter()
    counts = [count for count in COUNTS if count <= replicas]
    cases = [*places.numpy_cases(), *jax_rows.cases(counts), *tensorflow_rows.cases(counts)]
    steps = len(cases) + 3
    examples, parameters = digits.load(), digits.initial_parameters()
    batches = list(digits.cut(examples, digits.SIZES))

    started("gradients of the microbatches", steps)
    contributions = {name: laws.contributions(measure, parameters, batches) for name, measure in _MEASURES.items()}
    # One source for every row: what differs then is the combine.
    findings = _combine(cases, contributions["jax"], inject_fault, lambda name: started(name, steps))
    started("full batch and kernels", steps)
    findings += _models(contributions, parameters, batches)
    started("training", steps)
    curves, trained = _train(examples)
    settings = {
        "versions": {name: importlib.metadata.version(name) for name in ("gradcombine", "numpy", "jax", "tensorflow")},
        "microbatches": list(digits.SIZES),
        "replicas": counts,
        "inject_fault": inject_fault,
        "training": {"windows": train.WINDOWS, "microbatches": train.EVERY, "learning rate": train.LEARNING_RATE},
        "libraries": {name: importlib.metadata.version(name) for name in ("jaxlib", "ml_dtypes", "scikit-learn")},
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processors": os.cpu_count()},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }
    return Report([*findings, *trained], curves, settings, time.perf_counter() - begun)


def _combine(
    cases: Sequence[Case], contributions: Contributions, inject_fault: bool, started: Callable[[str], None]
) -> list[Finding]:
    judge, findings = laws.Judge(contributions), []
    corrupted = [case for case in cases if laws.promised(case) == BITS][-1] if inject_fault else None
    for case in cases:
        started(f"{case.framework}, {case.mode}, {case.place}")
        inputs = case.contributions(contributions)
        if case is corrupted:
            inputs = laws.flip_lowest_bit(case, inputs)
        findings.append(judge.finding(case, case.run(inputs)))
    return findings


def _models(contributions: dict[str, Contributions], parameters: Gradients, batches: Sequence[Batch]) -> list[Finding]:
    whole = digits.join(batches)
    findings: list[Finding] = []
    for name, measure in _MEASURES.items():
        findings += laws.full_batch(name, measure, contributions[name], parameters, batches)
    jax, tensorflow = (measure(parameters, whole) for measure in _MEASURES.values())
    return [*findings, *laws.kernels(jax, tensorflow, parameters, whole)]


def _train(examples: Batch) -> tuple[dict[str, list[float]], list[Finding]]:
    windows = train.batches(examples)
    trained = {name: list(train.train(framework, windows)) for name, framework in train.FRAMEWORKS.items()}
    unweighted = list(train.train(train.FRAMEWORKS["jax"], windows, weighted=False))
    curves = {name: train.losses(steps) for name, steps in [*trained.items(), ("mean of means", unweighted)]}
    return curves, list(train.laws(trained, unweighted, windows))


_MEASURES: dict[str, Measure] = {
    "jax": lambda parameters, batch: jax_rows.exported(jax_rows.measure(parameters, batch)),
    "tensorflow": lambda parameters, batch: tensorflow_rows.exported(tensorflow_rows.measure(parameters, batch)),
}
