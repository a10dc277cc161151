"""Each row once: rows that occur several times are added, in a fixed order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.rows.leaf import INT32
from gradcombine.types import Array


class Distinct(NamedTuple):
    """Rows that occur once each.

    Attributes:
      indices: int32 of shape (size,), ascending; then padding, the index ``rows``.
      values: of shape (size, ...); -0 where there is padding.
      count: int32 scalar, how many different rows there were. More than ``size``: the last ones are missing here.
    """

    indices: Array
    values: Array
    count: Array


def distinct(backend: Backend, indices: Array, values: Array, rows: int, size: int) -> Distinct:
    """The different rows among some, sorted; the values of a row are added in the canonical tree.

    A tree because it takes log2 of the most frequent row's occurrences in passes over the values, where a chain would
    take as many passes as occurrences; and because a framework's own segment sum adds in an order of its own.

    Args:
      indices: int32 of shape (n,), n of 1 or more, from 0 to rows; the index ``rows`` is padding.
      values: of shape (n, ...).
      rows: the number of rows of the whole array.
      size: how many rows to keep, at most n.
    """
    n, shape = backend.shape(indices)[0], backend.shape(values)[1:]
    order = backend.argsort(indices)
    ordered = backend.take(indices, order)
    here = backend.asarray(np.arange(n, dtype=np.int32))
    valid = ordered < backend.full((), rows, INT32)
    before = backend.concat([backend.full((1,), -1, INT32, [indices]), ordered[:-1]])
    first = (ordered > before) & valid
    number = backend.cumsum(backend.cast(first, INT32))
    past = backend.full((n,), n, INT32)
    starts = backend.put(backend.full((n,), 0, INT32, [indices]), backend.where(first, number - 1, past), here)
    position = here - backend.take(starts, backend.maximum(number - 1, backend.full((n,), 0, INT32)))
    added = _add_runs(backend, ordered, position, here, valid, backend.take(values, order))
    filled, kept = here[:size] < number[-1], starts[:size]
    nothing = backend.full((size, *shape), -0.0, backend.dtype(values))
    return Distinct(
        backend.where(filled, backend.take(ordered, kept), backend.full((size,), rows, INT32)),
        backend.where(across(filled, len(shape)), backend.take(added, kept), nothing),
        number[-1],
    )


def across(condition: Array, axes: int) -> Array:
    """A vector with so many more axes of length 1."""
    return condition[(slice(None), *[None] * axes)]


def _add_runs(backend: Backend, ordered: Array, position: Array, here: Array, valid: Array, values: Array) -> Array:
    """In each place, the sum of the run of equal indices from there on, in the canonical tree that begins there."""
    n, axes = backend.shape(ordered)[0], len(backend.shape(values)) - 1
    last = backend.full((n,), n - 1, INT32)

    def longer(span: Array, values: Array) -> Array:
        return backend.total(backend.cast(valid & (position >= span), INT32)) > 0

    def pairs(span: Array, values: Array) -> tuple[Array, Array]:
        later = here + span
        inside = backend.where(later > last, last, later)
        same = (backend.take(ordered, inside) == ordered) & (later <= last)
        return span * 2, backend.where(across(same, axes), backend.add(values, backend.take(values, inside)), values)

    return backend.loop(longer, pairs, backend.full((), 1, INT32), values)[1]


def union(backend: Backend, a: tuple[Array, Array], b: tuple[Array, Array], rows: int, size: int) -> Distinct:
    """The rows of two tables, sorted; a row of both is ``a + b``.

    Each place of the result finds where its row comes from, so that all values are read and written once.

    Args:
      a, b: indices and values, as `Distinct` has them.
      rows: the number of rows of the whole array.
      size: how many rows to keep.
    """
    (a_indices, a_values), (b_indices, b_values) = a, b
    m, n, shape = backend.shape(a_indices)[0], backend.shape(b_indices)[0], backend.shape(a_values)[1:]
    end, zero = backend.full((), rows, INT32), backend.full((n,), 0, INT32)
    held = backend.total(backend.cast(a_indices < end, INT32))
    smaller = backend.search_sorted(a_indices, b_indices)
    shared = backend.take(a_indices, _at_most(backend, smaller, m - 1)) == b_indices
    present = b_indices < end
    new = backend.cast(present & ~shared, INT32)
    more = backend.cumsum(new)
    # Places past the end are left out.
    past = backend.full((n,), size, INT32)
    place = backend.where(present, smaller + more - new, past)
    here = backend.asarray(np.arange(size, dtype=np.int32))
    like = [a_indices]
    none = backend.full((size,), n, INT32, like)
    b_from = backend.put(none, place, backend.asarray(np.arange(n, dtype=np.int32)))
    taken = backend.put(backend.full((size,), 0, INT32, like), backend.where(new > zero, place, past), new)
    a_from = here - backend.cumsum(taken)
    in_a, in_b = (taken == 0) & (a_from < held), b_from < none
    a_from, b_from = backend.where(in_a, a_from, here * 0), _at_most(backend, b_from, n - 1)
    left, right = backend.take(a_values, a_from), backend.take(b_values, b_from)
    from_a, from_b = across(in_a, len(shape)), across(in_b, len(shape))
    nothing = backend.full((size, *shape), -0.0, backend.dtype(a_values))
    either = backend.where(from_a, left, backend.where(from_b, right, nothing))
    padding = backend.full((size,), rows, INT32)
    b_or_padding = backend.where(in_b, backend.take(b_indices, b_from), padding)
    return Distinct(
        backend.where(in_a, backend.take(a_indices, a_from), b_or_padding),
        backend.where(from_a & from_b, backend.add(left, right), either),
        held + more[-1],
    )


def _at_most(backend: Backend, positions: Array, last: int) -> Array:
    limit = backend.full(backend.shape(positions), last, INT32)
    return backend.where(positions > limit, limit, positions)
