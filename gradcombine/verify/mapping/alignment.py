"""The order of axes in which one leaf is most like another."""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations
from typing import NamedTuple, TypeAlias

import numpy as np

from gradcombine.verify.dumps import Entry

Axes: TypeAlias = tuple[int, ...]

MOST = 1 << 26
"""Larger leaves are not loaded to find out whether they are transposed: they are taken as they stand."""

MOST_AXES = 5
"""Leaves of more axes are taken as they stand, too: they have too many orders."""

SURE = 0.999
"""At this cosine the order of axes at hand is taken without a look at others."""

ALIKE = 0.9
"""The least cosine at which two leaves are taken for the same one by their values alone, or for transposed."""


class Alignment(NamedTuple):
    """An order of the second leaf's axes, None for the one at hand; and the cosine of the angle in that order."""

    axes: Axes | None
    cosine: float


@lru_cache(maxsize=4096)
def orders(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Axes | None, ...]:
    """The orders of b's axes that give a's shape: the one at hand (None), then the plain transposition."""
    identity = tuple(range(len(b)))
    if sorted(a) != sorted(b) or len(a) > MOST_AXES:
        return (None,) if a == b else ()
    found = [order for order in permutations(identity) if tuple(b[i] for i in order) == a]
    found.sort(key=lambda order: (order != identity, order != identity[::-1]))
    return tuple(None if order == identity else order for order in found)


def axes(a: Entry, b: Entry) -> Axes | None:
    """The order of b's axes, of those with a's shape, that is most like a; the one at hand if none is like it.

    Nothing is read where there is but one order, or the leaf is huge.
    """
    possible = orders(a.shape, b.shape)
    if len(possible) == 1 or a.size > MOST:
        return possible[0]
    found = best(a, b)
    return found.axes if found.cosine >= ALIKE else possible[0]


def best(a: Entry, b: Entry) -> Alignment:
    """Of the orders of b's axes that have a's shape, the one that is most like a."""
    left, right = a.whole(), b.whole()
    options = []
    for order in orders(a.shape, b.shape):
        options.append(Alignment(order, _cosine(left, right if order is None else right.transpose(order))))
        if order is None and options[0].cosine >= SURE:
            break
    # Of equals the first.
    return max(options, key=lambda option: option.cosine)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    x, y = (side.astype(np.float64 if side.dtype.kind != "c" else np.complex128).reshape(-1) for side in (a, b))
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    # Scaled first: squares of what float64 holds need not be held by it.
    scales = [float(np.abs(side).max(initial=0)) for side in (x, y)]
    if not all(scales):
        return 1.0 if not any(scales) else 0.0
    x, y = x / scales[0], y / scales[1]
    return float(np.vdot(x, y).real) / float(np.linalg.norm(x) * np.linalg.norm(y))
