"""Constants in the structure of a tree.

A state has to know, long after its last contribution, in which dtype its result leaves, and which leaves have no
gradient. An array can say so only by being there, and what is neither array nor container does not pass through a
compiled function. But the type of a container does, in every framework: so each constant is an empty NamedTuple, of a
class of its own. Row-sparse arrays say their number of rows in the same way.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from gradcombine.backends.registry import is_absent, owner
from gradcombine.errors import GradCombineError


class Static:
    """What the constants have in common; each is a NamedTuple without fields as well.

    Attributes:
      dtype: the dtype that it stands for; None where there is no gradient.
      shape: where there is no gradient: of the array that stands for it, as JAX's float0 does; None for None.
      rows: the number of rows that it stands for; None for another constant.
    """

    dtype: np.dtype | None
    shape: tuple[int, ...] | None
    rows: int | None

    def __repr__(self) -> str:
        return type(self).__name__

    def __reduce__(self) -> Any:
        if self.rows is not None:
            return of_rows, (self.rows,)
        return (no_gradient, (self.shape,)) if self.dtype is None else (of_dtype, (str(self.dtype),))


@cache
def of_dtype(dtype: str | np.dtype) -> Any:
    """The constant that stands for a dtype.

    >>> of_dtype(np.dtype(np.float32)), of_dtype("bfloat16").dtype
    (float32, dtype(bfloat16))
    """
    known = np.dtype(getattr(ml_dtypes, str(dtype), dtype))
    return _constant(str(known), dtype=known)


@cache
def no_gradient(shape: tuple[int, ...] | None = None) -> Any:
    """The constant that stands for "no gradient".

    >>> no_gradient(), no_gradient((2, 3))
    (no_gradient, no_gradient_2x3)
    """
    name = "no_gradient" if shape is None else "_".join(["no_gradient", "x".join(map(str, shape))])
    return _constant(name, shape=shape)


@cache
def of_rows(rows: int) -> Any:
    """The constant that stands for a number of rows.

    >>> of_rows(1000), of_rows(1000).rows
    (rows_1000, 1000)
    """
    return _constant(f"rows_{rows}", rows=rows)


@cache
def _constant(
    name: str, dtype: np.dtype | None = None, shape: tuple[int, ...] | None = None, rows: int | None = None
) -> Any:
    meaning = {"__slots__": (), "dtype": dtype, "shape": shape, "rows": rows}
    return type(name, (Static, namedtuple("Constant", ())), meaning)()


def is_static(node: Any) -> bool:
    return isinstance(node, Static)


def of_leaf(leaf: Any) -> Any:
    """The constant that stands for a leaf's dtype, or for its "no gradient"."""
    if leaf is None:
        return no_gradient()
    backend = owner(leaf)
    if backend is None:
        raise GradCombineError("static", "an array, a number or None", type(leaf).__name__)
    return no_gradient(backend.shape(leaf)) if is_absent(leaf) else of_dtype(backend.dtype(leaf))
