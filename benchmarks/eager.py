"""Eager updates of small leaves, where the time is that of Python: calls for `gate.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gradcombine as gc
from gradcombine import reductions

FAST, EXACT, ADDITIONS = "update", "update, exact", "np.add for each leaf"


def updates(leaves: int, elements: int = 8) -> dict[str, Callable[[], Any]]:
    """Updates of a window of gradients as NumPy arrays.

    Args:
      leaves: number of arrays.
      elements: of each array.
    """
    gradients = {f"w{i}": np.full(elements, 1 + i, np.float32) for i in range(leaves)}

    def update(reduction: gc.Reduction) -> Callable[[], Any]:
        window = gc.accumulate(reduction, every=4)
        state = window.update(gradients, window.init(gradients))
        return lambda: window.update(gradients, state)

    totals = {name: gradient.copy() for name, gradient in gradients.items()}
    return {
        FAST: update(reductions.mean()),
        EXACT: update(reductions.mean("exact")),
        ADDITIONS: lambda: {name: np.add(totals[name], gradient) for name, gradient in gradients.items()},
    }
