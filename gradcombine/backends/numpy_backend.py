# pyright: standard
"""The NumPy backend, which is always available."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from gradcombine.backends.protocol import Backend, Kernel, primitive
from gradcombine.errors import invalid, shown
from gradcombine.types import Array, Leaf

NARROW = frozenset(np.dtype(x) for x in vars(ml_dtypes).values() if isinstance(x, type) and issubclass(x, np.generic))
"""The dtypes of ml_dtypes."""

# A Python number gets the dtype that JAX and TensorFlow give it, so that a tree means the same in all three.
_PYTHON_DTYPES: dict[type, np.dtype] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int32),
    float: np.dtype(np.float32),
    complex: np.dtype(np.complex64),
}

_SILENT = np.errstate(all="ignore")
"""Decorator that suppresses floating-point warnings."""

_WORTH_JOINING = 1 << 12
"""Most elements of an array that is concatenated with others."""

_BLOCK = 1 << 14
"""Elements per block of a fused kernel."""


class NumpyBackend(Backend):
    name = "numpy"
    differentiates = False
    add = primitive(_SILENT(np.add))
    product = primitive(_SILENT(np.multiply))
    sqrt = primitive(_SILENT(np.sqrt))
    where = primitive(np.where)
    reshape = primitive(np.reshape)
    stack = primitive(np.stack)
    concat = primitive(np.concatenate)
    largest = primitive(partial(np.max, axis=-1, keepdims=True))
    cumsum = primitive(partial(np.cumsum, dtype=np.int32))
    take = primitive(partial(np.take, axis=0))
    slice_at = primitive(operator.getitem)

    def owns(self, leaf: Leaf) -> bool:
        if isinstance(leaf, (np.ndarray, np.generic, *_PYTHON_DTYPES)):
            return True
        dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
        return isinstance(dtype, np.dtype) and isinstance(shape, tuple) and all(map(_is_length, shape))

    def asarray(self, leaf: Leaf) -> Array:
        if type(leaf) is np.ndarray:
            return leaf
        if not self.owns(leaf):
            raise invalid("an array or a number", shown(leaf))
        if isinstance(leaf, np.ma.MaskedArray):  # masked elements would be combined too
            raise invalid("an array without a mask", type(leaf).__name__)
        try:
            array = np.asarray(leaf, self.dtype(leaf))
            if array.shape != self.shape(leaf):
                raise TypeError
            return array
        except OverflowError:
            expected = "a Python integer of 32 bits (pass a wider one as an array)"
            raise invalid(expected, shown(leaf)) from None
        except MemoryError:
            raise
        except Exception:  # an object with a shape and a dtype that NumPy cannot convert
            raise invalid("an array or a number", type(leaf).__name__) from None

    def dtype(self, leaf: Leaf) -> np.dtype:
        if type(leaf) is np.ndarray:
            return leaf.dtype
        known = _PYTHON_DTYPES.get(type(leaf))
        if known is None and not hasattr(leaf, "dtype"):  # a subclass of a Python number, such as IntEnum
            return next(dtype for number, dtype in _PYTHON_DTYPES.items() if isinstance(leaf, number))
        return known or np.dtype(leaf.dtype)

    def concrete(self, array: Array) -> np.ndarray | None:
        return np.asarray(array)

    def full(self, shape: tuple[int, ...], fill: float, dtype: np.dtype, like: Sequence[Leaf] = ()) -> Array:
        if shape == ():
            return np.array(fill, dtype)
        try:
            return np.full(shape, fill, dtype)
        except ValueError:
            raise invalid("a shape that an array can have", shown(shape)) from None

    def cast(self, array: Array, dtype: np.dtype) -> Array:
        array = np.asarray(array)
        return array if array.dtype == dtype else self._rounded(array, dtype)

    @_SILENT
    def _rounded(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        try:
            return array.astype(dtype, copy=False)
        except TypeError:  # ml_dtypes cannot cast between some narrow dtypes; float32 represents all of them exactly
            return array.astype(np.float32).astype(dtype)

    @_SILENT
    def total(self, array: Array) -> Array:
        return np.sum(array, dtype=array.dtype)

    def scale(self, array: Array, weight: Array) -> Array:
        if np.iscomplexobj(array):
            return _of_parts(self.scale, array, weight)
        return self.product(array, weight)

    @_SILENT
    def divide(self, array: Array, divisor: Array) -> Array:
        return _of_parts(np.divide, array, divisor) if np.iscomplexobj(array) else np.divide(array, divisor)

    def bitcast(self, array: Array, dtype: np.dtype) -> Array:
        native = self.dtype(array).newbyteorder("=")
        packed = np.ascontiguousarray(array, native).reshape(np.shape(array))
        same_width = packed.dtype.itemsize == np.dtype(dtype).itemsize
        return packed.view(dtype) if same_width else packed[..., None].view(dtype)

    def shift_left(self, a: Array, amount: Array | int) -> Array:
        return np.left_shift(a, np.asarray(amount, np.int32))

    def shift_right(self, a: Array, amount: Array | int) -> Array:
        dtype = self.dtype(a)
        return np.right_shift(a, np.asarray(amount, dtype if dtype.kind == "u" else np.int32))

    def maximum(self, a: Array, b: Array) -> Array:
        if np.asarray(a).dtype.kind in "iu":
            return np.maximum(a, b)
        return np.where(a != a, a, np.where(a > b, a, b))

    def fused(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        # Intermediate results of a block stay in the CPU cache.
        shape = np.broadcast_shapes(*map(np.shape, arrays))
        if (size := math.prod(shape)) <= _BLOCK:
            return tuple(kernel(self, *static, *arrays))
        flat = [np.reshape(array, -1) if np.ndim(array) else array for array in arrays]
        results: list[Array] = []
        for start in range(0, size, _BLOCK):
            block = slice(start, start + _BLOCK)
            parts = kernel(self, *static, *(array[block] if np.ndim(array) else array for array in flat))
            results = results or [np.empty(size, part.dtype) for part in parts]
            for result, part in zip(results, parts, strict=True):
                result[block] = part
        return tuple(result.reshape(shape) for result in results)

    def prefers_joined(self, array: Array) -> bool:
        return np.size(array) <= _WORTH_JOINING

    def fused_totals(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        flat = [np.reshape(array, -1) for array in arrays]
        starts = range(0, max(flat[0].size, 1), _BLOCK)
        blocks = (kernel(self, *static, *(array[i : i + _BLOCK] for array in flat)) for i in starts)
        return tuple(
            np.sum(parts, dtype=np.uint32)
            for parts in zip(*([np.sum(part, dtype=np.uint32) for part in block] for block in blocks), strict=True)
        )

    def argsort(self, keys: Array) -> Array:
        return np.argsort(keys, kind="stable").astype(np.int32)

    def row_numbers(self, array: Array) -> Array:
        return np.arange(array.size, dtype=np.int32) // np.int32(array.shape[-1])

    def search_sorted(self, ordered: Array, keys: Array) -> Array:
        return np.searchsorted(ordered, keys).astype(np.int32)

    def update_at(self, array: Array, i: Array | int, row: Array) -> Array:
        result = np.array(array)
        result[i] = row
        return result

    def unpack(self, array: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        # A view that outlives this call would keep the full buffer alive.
        return [part.copy() for part in super().unpack(array, shapes)]

    def put(self, array: Array, positions: Array, rows: Array) -> Array:
        inside, result = positions < len(array), np.array(array)
        result[positions[inside]] = rows[inside]
        return result


def _is_length(n: Any) -> bool:
    return isinstance(n, (int, np.integer)) and bool(n >= 0)


def _of_parts(function: Any, array: Array, scalar: Array) -> Array:
    # Complex by real, each part on its own: a complex product would turn inf + 0j into NaN.
    out = np.empty_like(array)
    out.real, out.imag = function(array.real, scalar), function(array.imag, scalar)
    return out


BACKEND = NumpyBackend()
