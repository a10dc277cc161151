"""Sums over replicas through a wire, each leaf in the way that moves the fewest bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import dtype_of, shape_of
from gradcombine.errors import operation, require_integer
from gradcombine.types import Array
from gradcombine.wires.coding import FLOAT32, decode, encode
from gradcombine.wires.wire import Wire, require_wire

PARTS, GATHERED, WIDE = "parts", "gathered", "wide"
"""The ways, that of the most roundings first.

In parts: replica r gets the r-th part of the leaf from all, adds it up, and all gather the sums. Gathered: each gets
the leaf from all, and adds up all of it. Wide: the framework's all-reduce of the accumulators.
"""


@operation("bytes_sent")
def bytes_sent(wire: Wire, elements: int, replicas: int, itemsize: int = 4) -> dict[str, int]:
    """Bytes that each replica sends for a leaf, in each way; it is sent in the cheapest one, of fewest roundings.

    Args:
      wire: `cast` or `blocks`.
      elements: of the leaf.
      replicas: their number.
      itemsize: bytes of an element of the accumulators.

    Returns:
      ``"wide"``: an all-reduce of the accumulators, 2 (N - 1) / N of their bytes. ``"gathered"``: N - 1 times the
      narrow leaf; rounded once. ``"parts"``: 2 (N - 1) / N of the narrow leaf, each part filled up to whole blocks;
      rounded twice. Replicas of TensorFlow have no all-to-all, and so no parts.

    >>> import gradcombine as gc
    >>> gc.wires.bytes_sent(gc.wires.cast("bfloat16"), elements=1024, replicas=8)
    {'wide': 7168, 'gathered': 14336, 'parts': 3584}
    """
    require_wire(wire)
    elements = require_integer("0 elements or more", elements, 0)
    n = require_integer("1 replica or more", replicas)
    itemsize = require_integer("1 byte or more", itemsize)
    return {
        WIDE: 2 * (n - 1) * elements * max(itemsize, 4) // n,
        GATHERED: (n - 1) * wire.nbytes(elements),
        PARTS: 2 * (n - 1) * wire.nbytes(-(-elements // n)),
    }


def way(wire: Wire, collective: Collective, path: str, array: Array) -> str:
    """The way that an array is sent in."""
    shape, possible = shape_of(array), [WIDE, *collective.narrow_ways()]
    if wire.keeps(path, shape):
        return WIDE
    costs = bytes_sent(wire, math.prod(shape), collective.size(), dtype_of(array).itemsize)
    return min(possible, key=lambda name: costs[name])


def all_sum(
    backend: Backend,
    collective: Collective,
    wire: Wire,
    paths: Sequence[str],
    arrays: Sequence[Array],
    others: Sequence[Array],
    errors: list[Array] | None = None,
) -> list[Array]:
    """The sums over replicas of float arrays through the wire, and then those of the others, which stay wide.

    Through the wire they are added in float32 in the canonical tree over ranks, once, and every replica decodes the
    same codes. To ``errors`` is appended what this replica rounds off, of each array that the wire does not keep wide.
    """
    n = collective.size()
    ways = [way(wire, collective, path, x) for path, x in zip(paths, arrays, strict=True)]
    narrow = [(x, to) for x, to in zip(arrays, ways, strict=True) if to != WIDE]
    in_parts = [in_rows(backend, x, n) for x, to in narrow if to == PARTS]
    first, second = (None, None) if errors is None else (list[Array](), list[Array]())
    mine = iter(sum_parts(backend, collective, wire, in_parts, first))
    rows = [next(mine) if to == PARTS else in_rows(backend, x, 1) for x, to in narrow]
    received = iter(gather_rows(backend, collective, wire, rows, 1, second))
    wide = iter(collective.all_sum([*(x for x, to in zip(arrays, ways, strict=True) if to == WIDE), *others]))

    def arrived(x: Array, to: str) -> Array:
        return _like(backend, x, next(received) if to == PARTS else added(backend, next(received)))

    sums = [next(wide) if to == WIDE else arrived(x, to) for x, to in zip(arrays, ways, strict=True)]
    if errors is not None and first is not None and second is not None:
        of_parts, of_rows = iter(first), iter(second)
        for path, x, to in zip(paths, arrays, ways, strict=True):
            if to != WIDE:
                lost = next(of_rows)
                if to == PARTS:  # the error of the sum is kept where it was made
                    ranks = np.arange(n, dtype=np.int32).reshape(n, 1)
                    own = backend.asarray(ranks) == collective.rank()
                    lost = backend.add(next(of_parts), backend.where(own, lost, backend.full((), -0.0, FLOAT32)))
                errors.append(backend.reshape(backend.flat(lost)[: math.prod(shape_of(x))], shape_of(x)))
            elif not wire.keeps(path, shape_of(x)):
                errors.append(backend.full(shape_of(x), -0.0, FLOAT32, [x]))
    return [*sums, *wide]


def sum_parts(
    backend: Backend, collective: Collective, wire: Wire, arrays: Sequence[Array], errors: list[Array] | None = None
) -> list[Array]:
    """This replica's row of the sum of the replicas' arrays, of shape (1, columns); arrays have one row per replica."""
    sent = [_encoded(backend, collective, wire, x, 0) for x in arrays]
    _keep(backend, wire, arrays, sent, errors)
    received = iter(collective.all_to_all([x for codes in sent for x in codes]) if sent else [])
    return [
        added(backend, _decoded(backend, wire, x, [next(received) for _ in codes]))
        for x, codes in zip(arrays, sent, strict=True)
    ]


def gather_rows(
    backend: Backend,
    collective: Collective,
    wire: Wire,
    rows: Sequence[Array],
    salt: int = 0,
    errors: list[Array] | None = None,
) -> list[Array]:
    """The rows of all replicas, of shape (replicas, columns), as they arrive; each has one, of shape (1, columns)."""
    sent = [_encoded(backend, collective, wire, x, salt) for x in rows]
    _keep(backend, wire, rows, sent, errors)
    gathered = iter(collective.all_gather([x[0] for codes in sent for x in codes]))
    return [_decoded(backend, wire, x, [next(gathered) for _ in codes]) for x, codes in zip(rows, sent, strict=True)]


def _keep(
    backend: Backend, wire: Wire, rows: Sequence[Array], sent: Sequence[Sequence[Array]], errors: list[Array] | None
) -> None:
    """Appends what rounding takes away, without rounding; where it is 0 or not finite, -0, with which sums begin."""
    if errors is not None:
        for x, codes in zip(rows, sent, strict=True):
            lost = -backend.add(_decoded(backend, wire, x, codes), -x)
            is_finite = backend.add(lost, -lost) == 0
            errors.append(backend.where(is_finite, lost, backend.full((), -0.0, FLOAT32)))


def _encoded(backend: Backend, collective: Collective, wire: Wire, rows: Array, salt: int) -> tuple[Array, ...]:
    """The codes of rows, which are filled up with zeros to whole blocks."""
    n, columns = backend.shape(rows)
    if missing := -columns % wire.block:
        rows = backend.concat([rows, backend.full((n, missing), 0, FLOAT32, [rows])], axis=1)
    return encode(backend, wire, rows, collective.rank() * 2 + salt)


def _decoded(backend: Backend, wire: Wire, like: Array, codes: Sequence[Array]) -> Array:
    return decode(backend, wire, *codes)[:, : backend.shape(like)[1]]


def all_gather(
    backend: Backend, collective: Collective, wire: Wire, paths: Sequence[str | None], arrays: Sequence[Array]
) -> Iterator[list[Array]]:
    """The arrays of each replica in turn: as they arrive through the wire, where they have a path."""
    kept = [
        path is None or 0 in shape_of(x) or wire.keeps(path, shape_of(x)) for path, x in zip(paths, arrays, strict=True)
    ]
    narrow = [x for x, keep in zip(arrays, kept, strict=True) if not keep]
    rows = iter(gather_rows(backend, collective, wire, [in_rows(backend, x, 1) for x in narrow]))
    wide = iter(collective.all_gather([x for x, keep in zip(arrays, kept, strict=True) if keep]))
    stacks = [next(wide) if keep else next(rows) for keep in kept]
    for rank in range(collective.size()):
        yield [
            stack[rank] if keep else _like(backend, x, stack[rank])
            for x, stack, keep in zip(arrays, stacks, kept, strict=True)
        ]


def added(backend: Backend, rows: Array) -> Array:
    """The sum of the rows in the canonical tree, of shape (1, columns)."""
    while (n := backend.shape(rows)[0]) > 1:
        pairs = backend.add(rows[0 : n - n % 2 : 2], rows[1::2])
        rows = backend.concat([pairs, rows[n - 1 :]]) if n % 2 else pairs
    return rows


def in_rows(backend: Backend, x: Array, rows: int) -> Array:
    """The elements in float32, in rows; the last ones are filled up with zeros."""
    flat, size = backend.flat(backend.cast(x, FLOAT32)), math.prod(shape_of(x))
    if missing := -size % rows:
        flat = backend.concat([flat, backend.full((missing,), 0, FLOAT32, [flat])])
    return backend.reshape(flat, (rows, -1))


def _like(backend: Backend, x: Array, rows: Array) -> Array:
    """The first elements in the shape and dtype of an array."""
    shape = shape_of(x)
    return backend.cast(backend.reshape(backend.flat(rows)[: math.prod(shape)], shape), dtype_of(x))
