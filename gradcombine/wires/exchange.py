"""All-reduces through a wire: each leaf by the exchange that sends the fewest bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import dtype_of, shape_of
from gradcombine.errors import operation, require_integer
from gradcombine.pairwise import sum_rows
from gradcombine.types import Array
from gradcombine.wires.coding import FLOAT32, decode, encode
from gradcombine.wires.wire import Wire, require_wire

PARTS, GATHERED, WIDE = "parts", "gathered", "wide"
"""The exchanges of a leaf, that with the most roundings first.

Parts: an all-to-all sends the r-th part of the leaf to replica r, which sums it; an all-gather distributes the sums.
Gathered: every replica gathers the leaf of all replicas and sums it. Wide: the framework's all-reduce of accumulators.
"""


@operation("bytes_sent")
def bytes_sent(wire: Wire, elements: int, replicas: int, itemsize: int = 4) -> dict[str, int]:
    """Bytes that each replica sends for a leaf, by type of exchange.

    The cheapest exchange is used; among equal ones, that with the fewest roundings.

    Args:
      wire: `cast` or `blocks`.
      elements: number of elements of the leaf.
      replicas: number of replicas N.
      itemsize: bytes per element of the accumulators.

    Returns:
      ``"wide"``: an all-reduce of the accumulators, 2 (N - 1) / N of their bytes. ``"gathered"``: N - 1 times the
      encoded leaf; rounds once. ``"parts"``: 2 (N - 1) / N of the encoded leaf, with each part padded to full blocks;
      rounds twice. Not available on TensorFlow replicas, which have no all-to-all.

    >>> import gradcombine as gc
    >>> gc.wires.bytes_sent(gc.wires.cast("bfloat16"), elements=1024, replicas=8)
    {'wide': 7168, 'gathered': 14336, 'parts': 3584}
    """
    require_wire(wire)
    elements = require_integer("0 elements or more", elements, 0, 2**63 - 1)
    n = require_integer("1 replica or more", replicas)
    itemsize = require_integer("1 byte or more", itemsize)
    return {
        WIDE: 2 * (n - 1) * elements * max(itemsize, 4) // n,
        GATHERED: (n - 1) * wire.nbytes(elements),
        PARTS: 2 * (n - 1) * wire.nbytes(-(-elements // n)),
    }


def method(wire: Wire, collective: Collective, path: str, array: Array) -> str:
    """The exchange that an array is sent by: WIDE, GATHERED or PARTS."""
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
    """Sums ``arrays`` over replicas through the wire, and ``others`` by a plain all-reduce.

    Decoded arrays are added in float32 in the canonical tree over ranks, and all replicas decode the same codes.

    Args:
      collective: over the replicas.
      wire: the encoding.
      paths: of ``arrays``.
      arrays: float arrays.
      others: further arrays.
      errors: appended to, if not None: this replica's rounding errors, for each array that the wire does not keep wide.

    Returns:
      The sums of ``arrays``, then those of ``others``.
    """
    n = collective.size()
    methods = [method(wire, collective, path, x) for path, x in zip(paths, arrays, strict=True)]
    narrow = [(x, by) for x, by in zip(arrays, methods, strict=True) if by != WIDE]
    parts = [in_rows(backend, x, n) for x, by in narrow if by == PARTS]
    errors_of_parts, errors_of_rows = (None, None) if errors is None else (list[Array](), list[Array]())
    part_sums = iter(sum_parts(backend, collective, wire, parts, errors_of_parts))
    rows = [next(part_sums) if by == PARTS else in_rows(backend, x, 1) for x, by in narrow]
    received = iter(gather_rows(backend, collective, wire, rows, 1, errors_of_rows))
    wide = iter(collective.all_sum([*(x for x, by in zip(arrays, methods, strict=True) if by == WIDE), *others]))

    def narrow_sum(x: Array, by: str) -> Array:
        return _like(backend, x, next(received) if by == PARTS else sum_rows(backend, next(received)))

    sums = [next(wide) if by == WIDE else narrow_sum(x, by) for x, by in zip(arrays, methods, strict=True)]
    if errors is not None and errors_of_parts is not None and errors_of_rows is not None:
        of_parts, of_rows = iter(errors_of_parts), iter(errors_of_rows)
        for path, x, by in zip(paths, arrays, methods, strict=True):
            if by != WIDE:
                error = next(of_rows)
                if by == PARTS:  # the replica that summed a part also keeps the error of encoding the sum
                    ranks = np.arange(n, dtype=np.int32).reshape(n, 1)
                    is_mine = backend.asarray(ranks) == collective.rank()
                    error = backend.add(next(of_parts), backend.where(is_mine, error, backend.full((), -0.0, FLOAT32)))
                errors.append(backend.reshape(backend.flat(error)[: math.prod(shape_of(x))], shape_of(x)))
            elif not wire.keeps(path, shape_of(x)):
                errors.append(backend.full(shape_of(x), -0.0, FLOAT32, [x]))
    return [*sums, *wide]


def sum_parts(
    backend: Backend, collective: Collective, wire: Wire, arrays: Sequence[Array], errors: list[Array] | None = None
) -> list[Array]:
    """Reduce-scatters arrays with one row per replica: returns this replica's row of each sum, shape (1, columns)."""
    sent = [_encoded(backend, collective, wire, x, 0) for x in arrays]
    _append_errors(backend, wire, arrays, sent, errors)
    received = iter(collective.all_to_all([x for codes in sent for x in codes]) if sent else [])
    return [
        sum_rows(backend, _decoded(backend, wire, x, [next(received) for _ in codes]))
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
    """All-gathers rows of shape (1, columns); returns them decoded, of shape (replicas, columns)."""
    sent = [_encoded(backend, collective, wire, x, salt) for x in rows]
    _append_errors(backend, wire, rows, sent, errors)
    gathered = iter(collective.all_gather([x[0] for codes in sent for x in codes]))
    return [_decoded(backend, wire, x, [next(gathered) for _ in codes]) for x, codes in zip(rows, sent, strict=True)]


def _append_errors(
    backend: Backend, wire: Wire, rows: Sequence[Array], sent: Sequence[Sequence[Array]], errors: list[Array] | None
) -> None:
    """Appends the errors of encoding, which are exact; -0 (neutral in sums) where they are 0 or not finite."""
    if errors is not None:
        for x, codes in zip(rows, sent, strict=True):
            error = -backend.add(_decoded(backend, wire, x, codes), -x)
            is_finite = backend.add(error, -error) == 0
            errors.append(backend.where(is_finite, error, backend.full((), -0.0, FLOAT32)))


def _encoded(backend: Backend, collective: Collective, wire: Wire, rows: Array, salt: int) -> tuple[Array, ...]:
    """Encodes rows, padded with zeros to full blocks."""
    n, columns = backend.shape(rows)
    if missing := -columns % wire.block:
        rows = backend.concat([rows, backend.full((n, missing), 0, FLOAT32, [rows])], axis=1)
    return encode(backend, wire, rows, collective.rank() * 2 + salt)


def _decoded(backend: Backend, wire: Wire, like: Array, codes: Sequence[Array]) -> Array:
    return decode(backend, wire, *codes)[:, : backend.shape(like)[1]]


def all_gather(
    backend: Backend, collective: Collective, wire: Wire, paths: Sequence[str | None], arrays: Sequence[Array]
) -> Iterator[list[Array]]:
    """Yields the arrays of each replica by rank. Arrays with a path (not None) are sent through the wire."""
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


def in_rows(backend: Backend, x: Array, rows: int) -> Array:
    """Reshapes an array into this many rows of float32, padded with zeros."""
    flat, size = backend.flat(backend.cast(x, FLOAT32)), math.prod(shape_of(x))
    if missing := -size % rows:
        flat = backend.concat([flat, backend.full((missing,), 0, FLOAT32, [flat])])
    return backend.reshape(flat, (rows, -1))


def _like(backend: Backend, x: Array, rows: Array) -> Array:
    """Reverts `in_rows`: the first elements of ``rows`` in the shape and dtype of ``x``."""
    shape = shape_of(x)
    return backend.cast(backend.reshape(backend.flat(rows)[: math.prod(shape)], shape), dtype_of(x))
