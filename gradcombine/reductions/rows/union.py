"""The rows of two tables as one."""

from __future__ import annotations

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.rows.distinct import Distinct, across
from gradcombine.reductions.rows.leaf import INT32
from gradcombine.types import Array


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
