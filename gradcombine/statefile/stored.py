"""How an array lies in a file: as it is, where both formats know its dtype, else as its bytes."""

from __future__ import annotations

import hashlib

import numpy as np

NATIVE = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""The dtypes that .npz and .safetensors both have."""


def stored_as(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape in the file. Another dtype becomes uint8, with one more axis: the bytes of each element."""
    if dtype.name in NATIVE:
        return dtype.newbyteorder("<"), shape
    return np.dtype(np.uint8), (*shape, dtype.itemsize)


def to_stored(array: np.ndarray) -> np.ndarray:
    """The array as it lies in the file, in C order."""
    dtype, shape = stored_as(array.dtype, array.shape)
    whole = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name in NATIVE:
        return whole.astype(dtype, copy=False)
    return whole.reshape(-1).view(np.uint8).reshape(shape)


def from_stored(stored: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_stored`."""
    if dtype.name in NATIVE:
        return stored.astype(dtype, copy=False)
    return stored.reshape(-1).view(dtype).reshape(shape)


def digest(stored: np.ndarray) -> str:
    """The SHA-256 of the bytes in the file."""
    return hashlib.sha256(stored.reshape(-1).view(np.uint8).data).hexdigest()
