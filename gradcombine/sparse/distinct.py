"""Each row once: rows that occur several times are added, in a fixed order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.sparse.leaf import INT32
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


def distinct(
    backend: Backend, indices: Array, values: Array, rows: int, size: int, repeats: int | None = None
) -> Distinct:
    """The different rows among some, sorted; the values of a row are added in the canonical tree.

    A tree because it takes log2(repeats) passes over the values whatever the indices are, where a chain would take as
    many steps as the most frequent row occurs; and because a framework's own segment sum adds in an order of its own.
    For rows that occur twice both are the same.

    Args:
      indices: int32 of shape (n,), n of 1 or more, from 0 to rows; the index ``rows`` is padding.
      values: of shape (n, ...).
      rows: the number of rows of the whole array.
      size: how many rows to keep, at most n.
      repeats: how often a row occurs at most; None: not known.
    """
    n = backend.shape(indices)[0]
    order = backend.argsort(indices)
    ordered = backend.take(indices, order)
    here = backend.asarray(np.arange(n, dtype=np.int32))
    end = backend.full((), rows, INT32)
    before = backend.concat([backend.full((1,), -1, INT32, [indices]), ordered[:-1]])
    first = (ordered > before) & (ordered < end)
    number = backend.cumsum(backend.cast(first, INT32))
    past = backend.full((n,), n, INT32)
    starts = backend.put(backend.full((n,), 0, INT32, [indices]), backend.where(first, number - 1, past), here)
    position = here - backend.take(starts, backend.maximum(number - 1, backend.full((n,), 0, INT32)))
    most = _most(backend, position, ordered < end, n if repeats is None else repeats)
    added = _add_runs(backend, ordered, position, here, backend.take(values, order), most)
    filled = here[:size] < number[-1]
    kept = starts[:size]
    shape = backend.shape(values)[1:]
    nothing = backend.full((size, *shape), -0.0, backend.dtype(values))
    return Distinct(
        backend.where(filled, backend.take(ordered, kept), backend.full((size,), rows, INT32)),
        backend.where(across(filled, len(shape)), backend.take(added, kept), nothing),
        number[-1],
    )


def across(condition: Array, axes: int) -> Array:
    """A vector with so many more axes of length 1."""
    return condition[(slice(None), *[None] * axes)]


def _most(backend: Backend, position: Array, valid: Array, bound: int) -> int:
    """How often a row occurs at most: counted where the indices are known."""
    found, counted = backend.concrete(position), backend.concrete(valid)
    if found is None or counted is None:
        return bound
    return int(np.max(found[counted], initial=0)) + 1


def _add_runs(backend: Backend, ordered: Array, position: Array, here: Array, values: Array, most: int) -> Array:
    """The values, and in the first place of each run of equal indices the sum of the run."""
    n, axes = backend.shape(ordered)[0], len(backend.shape(values)) - 1
    span = 1
    while span < min(most, n):
        later = backend.concat([values[span:], values[:span]])
        same = backend.concat([ordered[span:], ordered[:span]]) == ordered
        pair = (position % (2 * span) == 0) & same & (here < n - span)
        values = backend.where(across(pair, axes), backend.add(values, later), values)
        span *= 2
    return values
