"""Constants in the structure of a tree.

A state has to know, long after its last contribution, in which dtype its result leaves, and which leaves have no
gradient. An array can say so only by being there, and what is neither array nor container does not pass through a
compiled function. But the type of a container does, in every framework: so each constant is an empty NamedTuple, of a
class of its own. Row-sparse arrays say their number of rows in the same way.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gradcombine.backends.registry import is_absent, owner
from gradcombine.errors import GradCombineError


class Static:
    """What the constants have in common; each is a NamedTuple without fields as well.

    Attributes:
      dtype: the dtype that it stands for; None where there is no gradient.
      shape: that it stands for; None where that is not part of it. Where there is no gradient: of the array that says
        so, as JAX's float0 does; None for None.
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
        return (no_gradient, (self.shape,)) if self.dtype is None else (of_dtype, (str(self.dtype), self.shape))


@cache
def of_dtype(dtype: str | np.dtype[Any], shape: tuple[int, ...] | None = None) -> Any:
    """The constant that stands for a dtype, or for one and a shape.

    >>> of_dtype(np.dtype(np.float32)), of_dtype("bfloat16").dtype, of_dtype("float32", (2, 3))
    (float32, dtype(bfloat16), float32_2x3)
    """
    known: np.dtype[Any] = np.dtype(getattr(ml_dtypes, str(dtype), dtype))
    name = str(known) if shape is None else "_".join([str(known), "x".join(map(str, shape))])
    return _constant(name, dtype=known, shape=shape)


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
    return type(name, (Static, NamedTuple("Constant", [])), meaning)()


def is_static(node: Any) -> bool:
    return isinstance(node, Static)


def of_leaf(leaf: Any, with_shape: bool = False) -> Any:
    """The constant that stands for a leaf's dtype (and shape), or for its "no gradient"."""
    if leaf is None:
        return no_gradient()
    backend = owner(leaf)
    if backend is None:
        raise GradCombineError("static", "an array, a number or None", type(leaf).__name__)
    if is_absent(leaf):
        return no_gradient(backend.shape(leaf))
    return of_dtype(backend.dtype(leaf), backend.shape(leaf) if with_shape else None)
