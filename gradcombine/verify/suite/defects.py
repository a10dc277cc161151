"""Steps with a known defect, and a correct one, as inputs of `gradcombine check` and `gradcombine audit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradcombine.audit import Audit
from gradcombine.verify.check import Verdict, check_step
from gradcombine.verify.suite.outcomes import CLEAN, NAMED, Finding

EXAMPLES, PARTS = 10, 4
"""Size of a batch, and number of microbatches, which are of unequal size: 3, 3, 3 and 1 examples."""


def checked(inputs: np.ndarray, targets: np.ndarray) -> Iterator[Finding]:
    """Checks a least-squares step in NumPy that averages the microbatches' means, and one that weights them by size.

    Args:
      inputs: float32 array of shape (`EXAMPLES`, n).
      targets: float32 array of shape (`EXAMPLES`,).
    """
    steps = {"microbatches averaged": (False, NAMED), "weighted by examples": (True, CLEAN)}
    for name, (weighted, promise) in steps.items():
        start = np.zeros(inputs.shape[1], np.float32)
        report = check_step(_make_step(weighted), start, (inputs, targets), microbatches=(PARTS,))
        causes = ", ".join(dict.fromkeys(str(fault.cause).partition(":")[0] for fault in report.faults))
        holds = causes == "mean of means" if promise == NAMED else report.verdict is Verdict.PASSES
        yield Finding("defects", {"asked": "check", "step": name, "answer": causes or "no defect"}, promise, holds)


def audited(report: Audit) -> Finding:
    """Row for an audit of ``optax.MultiSteps``, which runs the optimizer in every call."""
    names = ", ".join(sorted({finding.name for finding in report.findings}))
    labels = {"asked": "audit", "step": "optax.MultiSteps", "answer": names or "no defect"}
    return Finding("defects", labels, NAMED, names == "optimizer-every-microbatch")


def _make_step(weighted: bool) -> Callable[[int], Callable[..., Any]]:
    def make_step(microbatches: int) -> Callable[..., Any]:
        size = -(-EXAMPLES // microbatches)

        def step(w: np.ndarray, batch: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
            inputs, targets = batch
            parts = [(inputs[i : i + size], targets[i : i + size]) for i in range(0, EXAMPLES, size)]
            means = [x.T @ (x @ w - y) / np.float32(len(y)) for x, y in parts]
            weights = np.array([len(y) if weighted else 1 for _, y in parts], np.float32)
            return np.stack(means).T @ weights / weights.sum()

        return step

    return make_step
