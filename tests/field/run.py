"""Checks the steps of harnesses in this environment: ``python -m tests.field.run HARNESS`` prints lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gradcombine.verify import check_step
from tests.field.problem import TABLE, truth

MICROBATCHES = 4


def gradient(made: Any, returns: str) -> np.ndarray:
    """The table's float64 gradient from a result; for parameters after SGD with rate 1, their difference."""
    leaves = [made]
    if not hasattr(made, "__array__"):
        import jax

        leaves = jax.tree.leaves(made)
    table = np.asarray(next(x for x in leaves if np.shape(x) == TABLE.shape), np.float64)
    return TABLE.astype(np.float64) - table if returns == "params" else table


def checked(harness: str) -> dict[str, Any]:
    """The verdict on a harness's step, and the errors of one batch and of its microbatches against the closed form."""
    module = import_module(f"tests.field.{harness}")
    began = time.process_time()
    report = check_step(**module.make_case(), microbatches=(MICROBATCHES,))
    seconds, exact, off = time.process_time() - began, getattr(module, "TRUTH", truth()), []
    for k in (1, MICROBATCHES):
        case = module.make_case()
        made = gradient(case["make_step"](k)(case["params"], case["batch"]), case.get("returns", "gradients"))
        off.append(float(np.linalg.norm(made - exact) / np.linalg.norm(exact)))
    return {
        "harness": harness,
        "package": module.PACKAGE,
        "version": version(module.PACKAGE),
        "uses": module.USES,
        "verdict": str(report.verdict),
        "causes": [fault.cause.name for fault in report.faults],
        "line": report.faults[0].line if report.faults else "",
        "detail": report.faults[0].detail if report.faults else "; ".join(report.not_checked),
        "off": off,
        "seconds": seconds,
        "lines": len(Path(str(module.__file__)).read_text().splitlines()),
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(checked(name)), flush=True)
