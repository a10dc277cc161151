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
