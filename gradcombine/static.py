# pyright: standard
"""Constants in the structure of a state: the dtypes of results, absent gradients, and numbers of rows.

A state has to keep, until `finalize`, the dtype of each result and which leaves have no gradient. Neither can be an
array, as an absent leaf has none, and other objects do not pass through compiled functions. But every framework keeps
the type of a container: so each constant is an empty NamedTuple of a type of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Static:
    """Base class of the constants.

    Attributes:
      dtype: the dtype of the leaf; None for "no gradient" and for a number of rows.
      shape: the shape of the leaf, or None if the constant does not record it. For "no gradient": the shape of an
        absent leaf that has one, such as a JAX float0 array.
      rows: the number of rows; None for other constants.
    """

    dtype: np.dtype | None
    shape: tuple[int, ...] | None
    rows: int | None

    def __repr__(self) -> str:
        return type(self).__name__

    def __reduce__(self) -> Any:
        if self.rows is not None:
            return static_rows, (self.rows,)
        return (static_absence, (self.shape,)) if self.dtype is None else (static_dtype, (str(self.dtype), self.shape))


@cache
def static_dtype(dtype: str | np.dtype[Any], shape: tuple[int, ...] | None = None) -> Any:
    """The constant for a dtype and, optionally, a shape.

    >>> static_dtype(np.dtype(np.float32)), static_dtype("bfloat16").dtype, static_dtype("float32", (2, 3))
    (float32, dtype(bfloat16), float32_2x3)
    """
    resolved: np.dtype[Any] = np.dtype(getattr(ml_dtypes, str(dtype), dtype))
    return _constant(str(resolved), dtype=resolved, shape=shape)


@cache
def static_absence(shape: tuple[int, ...] | None = None) -> Any:
    """The constant for "no gradient".

    >>> static_absence(), static_absence((2, 3))
    (no_gradient, no_gradient_2x3)
    """
    return _constant("no_gradient", shape=shape)


@cache
def static_rows(rows: int) -> Any:
    """The constant for a number of rows.

    >>> static_rows(1000), static_rows(1000).rows
    (rows_1000, 1000)
    """
    return _constant(f"rows_{rows}", rows=rows)


@cache
def _constant(
    name: str, dtype: np.dtype | None = None, shape: tuple[int, ...] | None = None, rows: int | None = None
) -> Any:
    if shape is not None:
        name = f"{name}_{'x'.join(map(str, shape))}"
    attributes = {"__slots__": (), "dtype": dtype, "shape": shape, "rows": rows}
    return type(name, (Static, NamedTuple("Constant", [])), attributes)()


is_static: Callable[[Any], bool] = Static.__instancecheck__
"""Whether a node is a constant."""
