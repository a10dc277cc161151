"""Similarity of leaves by value, over all orders of their axes, and matching of leaves by values alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gradcombine.formats import PIECE, Entry
from gradcombine.verify.diff.dumps import Dump

Axes: TypeAlias = tuple[int, ...]

MAX_SIZE = 1 << 26
"""Leaves with more elements are not loaded to find out whether they are transposed."""

MAX_ORDERS = 120
"""Most orders of the axes of a leaf that are tried."""

CERTAIN = 0.999
"""If the first order of axes reaches this cosine, no other order is tried."""

ALIKE = 0.9
"""The minimum cosine at which two leaves are considered the same by values alone, or transposed."""


class Alignment(NamedTuple):
    """An order of the second leaf's axes, None if unchanged, and the cosine of the leaves in that order."""

    axes: Axes | None
    cosine: float


@lru_cache(maxsize=4096)
def orders(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Axes | None, ...]:
    """The orders of b's axes that give a's shape, at most `MAX_ORDERS`: unchanged (None), reversed, then others."""
    if sorted(a) != sorted(b):
        return ()
    identity = tuple(range(len(b)))
    first = [order for order in (identity, identity[::-1]) if tuple(b[i] for i in order) == a]
    found = dict.fromkeys([*first, *islice(_fitting(a, b, ()), MAX_ORDERS)])
    return tuple(None if order == identity else order for order in islice(found, MAX_ORDERS))


def _fitting(a: tuple[int, ...], b: tuple[int, ...], chosen: Axes) -> Iterator[Axes]:
    """Orders of b's axes that begin with the chosen ones and give a's shape."""
    if len(chosen) == len(a):
        yield chosen
        return
    for i, length in enumerate(b):
        if length == a[len(chosen)] and i not in chosen:
            yield from _fitting(a, b, (*chosen, i))


def axes(a: Entry, b: Entry, expected: Axes | None = None) -> Axes | None:
    """The order of b's axes in which it is most similar to a, or the first of `orders` if it is not `ALIKE` in any.

    Nothing is read if only one order is possible, or if the leaf is huge.

    Args:
      a, b: the leaves.
      expected: the order to try before the others, if it gives a's shape.
    """
    possible = _by_priority(a, b, expected)
    if len(possible) == 1 or a.size > MAX_SIZE:
        return possible[0]
    best = align(a, b, expected)
    return best.axes if best.cosine >= ALIKE else possible[0]


def align(a: Entry, b: Entry, expected: Axes | None = None) -> Alignment:
    """The order of b's axes, among those that give a's shape, in which it is most similar to a."""
    left, right = a.whole(), b.whole()
    options: list[Alignment] = []
    for order in _by_priority(a, b, expected):
        options.append(Alignment(order, cosine(left, right if order is None else right.transpose(order))))
        if options[0].cosine >= CERTAIN:
            break
    # The first of several best ones.
    return max(options, key=lambda option: option.cosine)


def _by_priority(a: Entry, b: Entry, expected: Axes | None) -> tuple[Axes | None, ...]:
    """The `orders` of b's axes, the expected one first."""
    possible = orders(a.shape, b.shape)
    first = None if expected == tuple(range(len(b.shape))) else expected
    return tuple(dict.fromkeys([first, *possible])) if expected is not None and first in possible else possible


def are_alike(a: Entry, b: Entry, order: Axes | None) -> bool:
    """Whether two leaves are `ALIKE` in this order of b's axes; huge leaves are not read, and are."""
    if a.size > MAX_SIZE:
        return True
    right = b.whole()
    return cosine(a.whole(), right if order is None else right.transpose(order)) >= ALIKE


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of the angle between two arrays, where both are finite; 1 if both are 0, and 0 if one is."""
    x, y = (side.astype(np.float64 if side.dtype.kind != "c" else np.complex128).reshape(-1) for side in (a, b))
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    # Scaled, since squares of float64 numbers may overflow.
    scales = [float(np.abs(side.view(np.float64)).max(initial=0)) for side in (x, y)]
    if not all(scales):
        return 1.0 if not any(scales) else 0.0
    x, y = x / scales[0], y / scales[1]
    return float(np.vdot(x, y).real) / float(np.linalg.norm(x) * np.linalg.norm(y))


Aligned: TypeAlias = tuple[str, str, Axes | None]
"""The names of two leaves, and the order of the second one's axes."""

WIDTH = 256
"""The length of a sketch."""

_NEAREST = 8
"""Number of nearest leaves that are tried for each leaf, and of rounds for leaves whose nearest ones were taken."""

_FAR = 0.5
"""Maximum squared distance between sketches. That of unit vectors with cosine `ALIKE` is about 0.2."""


def closest(
    a: Dump,
    b: Dump,
    reading: Callable[[str], None] = lambda name: None,
    fit: Callable[[str, str], bool] = lambda left, right: True,
) -> Iterator[Aligned]:
    """Pairs the leaves of two dumps by value: equal leaves in the order of the dumps, then the most similar first.

    Equal leaves are found by a checksum that does not depend on the order of axes. The others are projected to `WIDTH`
    numbers each (a count sketch), which preserves distances to about a tenth, and only near pairs are compared. So each
    leaf is read a few times, regardless of the number of leaves.

    Args:
      a, b: dumps of unmatched leaves.
      reading: called with the name of each leaf before it is read.
      fit: whether two leaves may be paired, by their names.

    References: Charikar, Chen, Farach-Colton, `Finding frequent items in data streams
    <https://doi.org/10.1016/S0304-3975(03)00400-6>`_, 2004.
    """
    groups: defaultdict[tuple[int, ...], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, dump in enumerate((a, b)):
        for name, leaf in dump.items():
            groups[tuple(sorted(leaf.shape))][side].append(name)
    for left, right in groups.values():
        if left and right:
            equal = list(_equal(a, b, left, right, reading, fit))
            yield from equal
            taken = {name for name, _, _ in equal}, {name for _, name, _ in equal}
            rest = [[x for x in names if x not in taken[i]] for i, names in enumerate((left, right))]
            yield from _alike(a, b, rest[0], rest[1], fit)


def _equal(
    a: Dump,
    b: Dump,
    left: list[str],
    right: list[str],
    reading: Callable[[str], None],
    fit: Callable[[str, str], bool],
) -> Iterator[Aligned]:
    same: defaultdict[int, list[str]] = defaultdict(list)
    for name in right:
        reading(name)
        same[_checksum(b[name])].append(name)
    for name in left:
        reading(name)
        others = same[_checksum(a[name])]
        other = next((other for other in others if fit(name, other)), None)
        best = None if other is None else _aligned(a[name], b[other])
        if other is not None and best is not None and best.cosine >= CERTAIN:
            others.remove(other)
            yield name, other, best.axes


def _alike(a: Dump, b: Dump, left: list[str], right: list[str], fit: Callable[[str, str], bool]) -> Iterator[Aligned]:
    by_shape: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, name in enumerate(left):
        by_shape[a[name].shape].append(i)
    candidates: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], list[int], list[int]]] = []
    for shape, positions in by_shape.items():
        rows: list[np.ndarray] = []
        others: list[int] = []
        for j, name in enumerate(right):
            for sketch in _sketches(b[name], shape):
                rows.append(sketch)
                others.append(j)
        if rows:
            sketches = np.stack([_sketch(a[left[i]].pieces()) for i in positions])
            candidates.append((sketches, np.stack(rows), positions, others))
    free = np.ones(len(left), bool), np.ones(len(right), bool)
    for _ in range(_NEAREST):
        pairs = sorted({pair for group in candidates for pair in _near(*group, *free)})
        found = False
        for _, _, i, j in pairs:
            if free[0][i] and free[1][j] and fit(left[i], right[j]):
                best = _aligned(a[left[i]], b[right[j]])
                if best is not None and best.cosine >= ALIKE:
                    free[0][i] = free[1][j] = False
                    found = True
                    yield left[i], right[j], best.axes
        if not found:
            return


def _near(
    left: np.ndarray,
    right: np.ndarray,
    positions: list[int],
    others: list[int],
    free_left: np.ndarray,
    free_right: np.ndarray,
) -> Iterator[tuple[float, int, int, int]]:
    """The nearest pairs of unmatched leaves: squared distance, difference of positions, and both positions."""
    rows, columns = np.array(positions), np.array(others)
    kept = np.flatnonzero(free_right[columns])
    lengths = np.square(right[kept]).sum(axis=1)
    nearest = min(_NEAREST, len(kept))
    if not nearest:
        return
    waiting = np.flatnonzero(free_left[rows])
    for start in range(0, len(waiting), WIDTH):
        block = waiting[start : start + WIDTH]
        x = left[block]
        apart = np.square(x).sum(axis=1)[:, None] + lengths - 2 * x @ right[kept].T
        for row, distances in zip(block, apart, strict=True):
            for at in np.argpartition(distances, nearest - 1)[:nearest]:
                i, j = int(rows[row]), int(columns[kept[at]])
                if distances[at] <= _FAR:
                    yield float(distances[at]), abs(i - j), i, j


def _aligned(a: Entry, b: Entry) -> Alignment | None:
    """The best alignment of two leaves; None for huge leaves of different shapes."""
    if a.size <= MAX_SIZE:
        return align(a, b)
    return Alignment(None, 1.0) if a.shape == b.shape else None


def _sketches(leaf: Entry, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """A sketch of the leaf for each order of its axes that gives this shape."""
    possible = orders(shape, leaf.shape)
    if possible == (None,) or leaf.size > MAX_SIZE:
        if None in possible:
            yield _sketch(leaf.pieces())
        return
    array = leaf.whole()
    for order in possible:
        yield _sketch([array.reshape(-1) if order is None else array.transpose(order).reshape(-1)])


def _sketch(pieces: Iterable[np.ndarray]) -> np.ndarray:
    """The direction of a vector in `WIDTH` numbers: each element is added to, or subtracted from, one of them."""
    out, square, start = np.zeros(WIDTH), 0.0, 0
    for piece in pieces:
        for begin in range(0, piece.size, PIECE):
            x = _numbers(piece[begin : begin + PIECE])
            position = np.arange(start, start + x.size, dtype=np.uint64)
            # The first `WIDTH` elements get one number each, so small leaves are not projected.
            mixed = np.where(position < WIDTH, position, _mixed(position))
            signs = 1.0 - 2.0 * ((mixed >> np.uint64(8)) & np.uint64(1)).astype(np.float64)
            out += np.bincount((mixed & np.uint64(WIDTH - 1)).astype(np.int64), x * signs, WIDTH)
            square += float(x @ x)
            start += x.size
    return out / np.sqrt(square) if square else out


def _checksum(leaf: Entry) -> int:
    """A checksum that does not depend on the order of the elements."""
    total = 0
    for piece in leaf.pieces():
        total += int(_mixed((_numbers(piece) + 0.0).view(np.uint64)).sum(dtype=np.uint64))
    return total % (1 << 64)


def _numbers(piece: np.ndarray) -> npt.NDArray[np.float64]:
    """Elements as float64, with 0 for NaN and infinities; complex ones as a combination of both parts."""
    if piece.dtype.kind == "c":
        piece = np.real(piece) + 0.75 * np.imag(piece)
    numbers = piece.astype(np.float64)
    return np.where(np.isfinite(numbers), numbers, 0.0)


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of the input."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
