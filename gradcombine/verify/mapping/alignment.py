"""The order of axes in which one leaf is most like another."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations
from typing import NamedTuple, TypeAlias

import numpy as np

from gradcombine.verify.dumps import Entry

Axes: TypeAlias = tuple[int, ...]

MOST = 1 << 26
"""Larger leaves are not loaded to find out whether they are transposed: they are taken as they stand."""

SURE = 0.999
"""At this cosine the order of axes at hand is taken without a look at others."""


class Alignment(NamedTuple):
    """An order of the second leaf's axes, None for the one at hand; and the cosine of the angle in that order."""

    axes: Axes | None
    cosine: float


def possible(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether some order of b's axes has a's shape."""
    return sorted(a) == sorted(b) and len(a) <= 5


def axes(a: Entry, b: Entry) -> Axes | None:
    """The order of b's axes that is most like a; nothing is read where there is but one, or the leaf is huge."""
    if a.shape == b.shape and (a.size > MOST or len(list(_orders(a.shape, b.shape))) == 1):
        return None
    return best(a, b).axes


def best(a: Entry, b: Entry) -> Alignment:
    """Of the orders of b's axes that have a's shape, the one that is most like a."""
    left, right = a.whole(), b.whole()
    options = []
    if a.shape == b.shape:
        options.append(Alignment(None, _cosine(left, right)))
        if options[0].cosine >= SURE:
            return options[0]
    identity = tuple(range(len(a.shape)))
    orders = [order for order in _orders(a.shape, b.shape) if order != identity]
    options += [Alignment(order, _cosine(left, right.transpose(order))) for order in orders]
    # Of equals the first: the order at hand, then the plain transposition.
    return max(options, key=lambda option: option.cosine)


def _orders(a: tuple[int, ...], b: tuple[int, ...]) -> Iterable[Axes]:
    reverse = tuple(reversed(range(len(b))))
    orders = sorted(permutations(range(len(b))), key=lambda order: order != reverse)
    return (order for order in orders if tuple(b[i] for i in order) == a)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    x, y = (side.astype(np.float64 if side.dtype.kind != "c" else np.complex128).reshape(-1) for side in (a, b))
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    lengths = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    if not all(lengths):
        return 1.0 if not any(lengths) else 0.0
    return float(np.vdot(x, y).real) / (lengths[0] * lengths[1])
