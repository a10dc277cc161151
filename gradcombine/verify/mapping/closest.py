"""Pairs of leaves by their values alone. Each leaf is read a few times, however many others there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gradcombine.formats import entry
from gradcombine.verify.dumps import Dump, Entry
from gradcombine.verify.mapping import alignment
from gradcombine.verify.mapping.alignment import ALIKE, MOST, SURE, Axes

Found: TypeAlias = tuple[str, str, Axes | None]

WIDTH = 256
"""The length of a sketch."""

_NEAREST = 8
"""How many leaves are looked at for each, and how often for those that others have taken."""

_FAR = 0.5
"""Sketches of unit vectors of cosine `ALIKE`, 0.2 apart when squared, are nearer than this."""


def closest(a: Dump, b: Dump, reading: Callable[[str], None] = lambda name: None) -> Iterator[Found]:
    """Pairs the leaves of two dumps by value: equal ones in the order of the dumps, then the most alike first.

    Equal leaves are found by a checksum that is the same in any order of axes. Of the others, each is projected to
    `WIDTH` numbers (a count sketch), which keeps distances to about a tenth; pairs of near ones are then compared.

    Args:
      a, b: dumps whose leaves have no counterpart yet.
      reading: called with the name of each leaf before it is read.

    References: Charikar, Chen, Farach-Colton, `Finding frequent items in data streams
    <https://doi.org/10.1016/S0304-3975(03)00400-6>`_, 2004.
    """
    groups: defaultdict[tuple[int, ...], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, dump in enumerate((a, b)):
        for name, leaf in dump.items():
            groups[tuple(sorted(leaf.shape))][side].append(name)
    for left, right in groups.values():
        if left and right:
            found = list(_equal(a, b, left, right, reading))
            yield from found
            taken = {name for name, _, _ in found}, {name for _, name, _ in found}
            yield from _alike(a, b, *([x for x in names if x not in taken[i]] for i, names in enumerate((left, right))))


def _equal(a: Dump, b: Dump, left: list[str], right: list[str], reading: Callable[[str], None]) -> Iterator[Found]:
    same: defaultdict[int, list[str]] = defaultdict(list)
    for name in right:
        reading(name)
        same[_checksum(b[name])].append(name)
    for names in same.values():
        names.reverse()
    for name in left:
        reading(name)
        others = same[_checksum(a[name])]
        if others:
            found = _aligned(a[name], b[others[-1]])
            if found is not None and found.cosine >= SURE:
                yield name, others.pop(), found.axes


def _alike(a: Dump, b: Dump, left: list[str], right: list[str]) -> Iterator[Found]:
    by_shape: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, name in enumerate(left):
        by_shape[a[name].shape].append(i)
    candidates: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], list[int], list[int]]] = []
    for shape, own in by_shape.items():
        rows, others = [], []
        for j, name in enumerate(right):
            for sketch in _turned_sketches(b[name], shape):
                rows.append(sketch)
                others.append(j)
        if rows:
            candidates.append((np.stack([_sketch(a[left[i]].pieces()) for i in own]), np.stack(rows), own, others))
    free = np.ones(len(left), bool), np.ones(len(right), bool)
    for _ in range(_NEAREST):
        pairs = sorted({pair for group in candidates for pair in _near(*group, *free)})
        progress = False
        for _, _, i, j in pairs:
            if free[0][i] and free[1][j]:
                found = _aligned(a[left[i]], b[right[j]])
                if found is not None and found.cosine >= ALIKE:
                    free[0][i] = free[1][j] = False
                    progress = True
                    yield left[i], right[j], found.axes
        if not progress:
            return


def _near(
    left: np.ndarray,
    right: np.ndarray,
    own: list[int],
    others: list[int],
    free_left: np.ndarray,
    free_right: np.ndarray,
) -> Iterator[tuple[float, int, int, int]]:
    """The nearest pairs of free leaves: squared distance, difference of positions, and both positions."""
    rows, columns = np.array(own), np.array(others)
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


def _aligned(a: Entry, b: Entry) -> alignment.Alignment | None:
    """How two leaves are most alike; None for huge ones of two shapes."""
    if a.size <= MOST:
        return alignment.best(a, b)
    return alignment.Alignment(None, 1.0) if a.shape == b.shape else None


def _turned_sketches(leaf: Entry, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The leaf's sketch in each order of its axes that has this shape."""
    orders = alignment.orders(shape, leaf.shape)
    if orders == (None,) or leaf.size > MOST:
        if None in orders:
            yield _sketch(leaf.pieces())
        return
    whole = leaf.whole()
    for order in orders:
        yield _sketch([whole.reshape(-1) if order is None else whole.transpose(order).reshape(-1)])


def _sketch(pieces: Iterable[np.ndarray]) -> np.ndarray:
    """The direction of a vector in `WIDTH` numbers: each element is added to one of them, or subtracted."""
    out, square, start = np.zeros(WIDTH), 0.0, 0
    for piece in pieces:
        for begin in range(0, piece.size, entry.PIECE):
            x = _numbers(piece[begin : begin + entry.PIECE])
            place = np.arange(start, start + x.size, dtype=np.uint64)
            # The first ones have a number each, so that small leaves are kept as they are.
            mixed = np.where(place < WIDTH, place, _mixed(place))
            signs = 1.0 - 2.0 * ((mixed >> np.uint64(8)) & np.uint64(1)).astype(np.float64)
            out += np.bincount((mixed & np.uint64(WIDTH - 1)).astype(np.int64), x * signs, WIDTH)
            square += float(x @ x)
            start += x.size
    return out / np.sqrt(square) if square else out


def _checksum(leaf: Entry) -> int:
    """A number that leaves of the same elements have in common, in whatever order."""
    total = 0
    for piece in leaf.pieces():
        total += int(_mixed((_numbers(piece) + 0.0).view(np.uint64)).sum(dtype=np.uint64))
    return total % (1 << 64)


def _numbers(piece: np.ndarray) -> npt.NDArray[np.float64]:
    """Elements as float64, 0 for NaN and infinities; of complex ones a mixture of both parts."""
    if piece.dtype.kind == "c":
        piece = np.real(piece) + 0.75 * np.imag(piece)
    found = piece.astype(np.float64)
    return np.where(np.isfinite(found), found, 0.0)


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64: every bit depends on every other."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
