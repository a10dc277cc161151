"""Finds the bound to which gradients are clipped, by results that have the same norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradcombine.verify.check.leaves import flat
from gradcombine.verify.check.running import ONE_BATCH, Floats
from gradcombine.verify.check.standard import SAME, Standard

CLOSE = 1e-5
"""Relative difference of sizes up to which they are the same."""


def clip_bound(standard: Standard, results: Sequence[Floats], leaves: Sequence[int]) -> str:
    """Describes the norm, or the largest element, that the largest results share although they differ; may be empty.

    The clipped elements differ between results, unlike those of a running variance, which copies change equally.
    Gradients do not exceed the bound at perturbed parameters, unlike those of a bias after batch normalization: in a
    batch of copies, their norm does not depend on the example, only on the bias.
    """
    vectors = [flat([x[i] for i in leaves]) for x in results]
    norms, maxima = [_norm(x) for x in vectors], [_repeated_maximum(np.abs(x)) for x in vectors]
    for sizes, size, text in ((norms, _norm, "a norm of"), (maxima, _maximum, "a largest element of")):
        top = max(sizes)
        first, *others = [x for x, y in zip(vectors, sizes, strict=True) if y >= top * (1 - CLOSE)]
        smallest = 0 if sizes is norms else top * (1 - CLOSE)
        for x in others if top > 0 else ():
            compared = np.maximum(np.abs(x), np.abs(first)) >= smallest
            if np.any(np.abs(x - first)[compared] > SAME * top) and not _is_exceeded(standard, leaves, size, top):
                return f"{text} {top:.6g}"
    return ""


def _is_exceeded(standard: Standard, leaves: Sequence[int], size: Callable[[np.ndarray], float], bound: float) -> bool:
    """Whether a gradient of copies of an example is larger at perturbed parameters; False for new parameters."""
    if standard.subject.returns_params:  # which change by moments, too
        return False
    results = (standard.elsewhere(0, ONE_BATCH, rows, standard.wide is not None) for rows in standard.units)
    return any(x is not None and size(flat([x.floats[i] for i in leaves])) > bound * (1 + CLOSE) for x in results)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def _maximum(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0))


def _repeated_maximum(sizes: np.ndarray) -> float:
    """Returns the maximum if several elements share it, as after clipping by value; else 0."""
    *_, second, first = np.sort(np.append(sizes, [0, 0]))
    return float(first) if second >= first * (1 - CLOSE) else 0.0
