"""Whether a window's gradient, as one batch, is the weighted mean of its microbatches': a law of the loss alone.

Both are computed in float64, where rounding is far below what is looked for: they may differ by the unit roundoff of
float32, 2**-24, times the largest element of any of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradcombine.verify.microbatches.report import Cause, Fault
from gradcombine.verify.microbatches.subject import Leaves, NotWide, Subject

_U = 2.0**-24


class Law(NamedTuple):
    """What was found: the largest distance over what is allowed, why it was not judged, and a fault if there is one."""

    share: float | None
    not_judged: str
    fault: Fault | None


def law(
    subject: Subject,
    params: Any,
    windows: Sequence[Sequence[Any]],
    weights: Sequence[Sequence[float]],
    join: Callable[[Sequence[Any]], Any],
) -> Law:
    """Judges the first window of each length, at the parameters that the training starts from."""
    worst, seen = 0.0, set()
    for w, (microbatches, scales) in enumerate(zip(windows, weights, strict=True)):
        if len(microbatches) in seen:
            continue
        seen.add(len(microbatches))
        try:
            parts = [subject.wide_gradient(params, microbatch) for microbatch in microbatches]
            whole = subject.wide_gradient(params, join(microbatches))
        except NotWide as reason:
            return Law(None, str(reason), None)
        given = np.array(scales, np.float64)
        found = _share(whole, parts, given / given.sum())
        if found > 1:
            return Law(found, "", Fault(Cause.LOSS, w, _likely(whole, parts)))
        worst = max(worst, found)
    return Law(worst, "", None)


def _likely(whole: Leaves, parts: Sequence[Leaves]) -> str:
    ones = np.ones(len(parts))
    if _share(whole, parts, ones) <= 1:
        return "it is their sum: a loss that is summed over examples has no mean of its microbatches"
    if _share(whole, parts, ones / len(parts)) <= 1:
        return "it is their unweighted mean: the weights given are others than the loss has"
    free = _fitted(whole, parts)
    if free is not None:
        return "its microbatches count {} in it".format(", ".join(f"{x:.4g}" for x in free))
    return "it is no combination of its microbatches' gradients that is known, as where batch normalization joins them"


def _fitted(whole: Leaves, parts: Sequence[Leaves]) -> np.ndarray | None:
    """The coefficients that make the whole of its parts, if there are some and nothing else is possible."""
    columns = [(x, column) for x, column in zip(whole, zip(*parts, strict=True), strict=True) if x is not None]
    rows = [
        np.stack([np.zeros_like(x) if y is None else y for y in column]).reshape(len(parts), -1)
        for x, column in columns
    ]
    if not rows:
        return None
    matrix, found = np.concatenate(rows, axis=1).T, np.concatenate([x.reshape(-1) for x, _ in columns])
    if len(found) <= len(parts):
        return None
    coefficients, _, rank, _ = np.linalg.lstsq(matrix, found, rcond=None)
    return coefficients if rank == len(parts) and _share(whole, parts, coefficients) <= 1 else None


def _share(whole: Leaves, parts: Sequence[Leaves], coefficients: np.ndarray) -> float:
    columns = list(zip(*parts, strict=True))
    largest = max((float(np.abs(x).max(initial=0)) for column in columns for x in column if x is not None), default=0)
    allowed = _U * np.abs(coefficients).sum() * largest
    off = 0.0
    for expected, column in zip(whole, columns, strict=True):
        if expected is None:
            continue
        terms = [np.zeros_like(expected) if x is None else x for x in column]
        off = max(off, float(np.abs(expected - np.tensordot(coefficients, np.stack(terms), 1)).max(initial=0)))
    return off / allowed if allowed else (float("inf") if off else 0.0)
