"""Division by the sum of weights."""

from __future__ import annotations

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import Totals
from gradcombine.types import Array


def over_weight(backend: Backend, total: Array, totals: Totals) -> Array:
    """``total / weight`` in at least float32, correctly rounded; +0 where nothing was added.

    NaN where the sum of weights has overflowed: the quotient by infinity would be 0, a wrong number.
    """
    running = backend.dtype(total)
    working = dtypes.working(running)
    weight = backend.cast(totals.weight, dtypes.part(working))
    one, infinity = (backend.full((), value, dtypes.part(working)) for value in (1, np.inf))
    # No array: JAX looks for NaN where one is made, if it is asked to.
    weight = backend.where(weight == infinity, dtypes.part(working).type(np.nan), weight)
    divisor = backend.where(totals.count == 0, one, weight)
    quotient = backend.divide(backend.cast(total, working), divisor)
    return zero_if_empty(backend, backend.cast(quotient, running), totals)


def zero_if_empty(backend: Backend, x: Array, totals: Totals) -> Array:
    """+0 where nothing was added."""
    count = backend.concrete(totals.count)
    if count is not None and count != 0:
        return x
    return backend.where(totals.count == 0, backend.full((), 0, backend.dtype(x)), x)
