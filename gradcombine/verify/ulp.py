"""How far apart two float arrays are, in units in the last place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcombine.errors import GradCombineError

NAN_DISTANCE = np.iinfo(np.uint64).max
"""The distance between NaN and any number: more than between any two numbers."""


def ulp_distance(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """How many steps from one representable number to the next lead from ``a`` to ``b``, elementwise.

    The bits of a float, read as sign and magnitude, number the representable values in order; the distance is the
    difference of the two numbers. +0 and -0 are the same number, so 0 apart; the largest finite value is 1 from
    infinity. NaN is 0 from NaN, whatever its payload, and `NAN_DISTANCE` from everything else.

    Args:
      a, b: arrays of one shape and one float dtype of 8 to 64 bits, those of ml_dtypes among them.

    Returns:
      uint64, of that shape.

    Raises:
      GradCombineError: for two shapes or two dtypes.

    >>> import numpy as np
    >>> ulp_distance(np.float32([1, 0, np.nan]), np.float32([1.0000001, -0.0, np.nan]))
    array([1, 0, 0], dtype=uint64)
    """
    left, right = _alike(a, b)
    first, second = _ordered(left), _ordered(right)
    # The difference of two 64-bit orders may need 64 bits without a sign: subtraction modulo 2**64 is exact there.
    with np.errstate(over="ignore"):
        distance = np.maximum(first, second).view(np.uint64) - np.minimum(first, second).view(np.uint64)
    nans = np.isnan(left).astype(int) + np.isnan(right).astype(int)
    return np.select([nans == 1, nans == 2], [np.uint64(NAN_DISTANCE), np.uint64(0)], distance)


def equal_bits(a: npt.ArrayLike, b: npt.ArrayLike) -> bool:
    """Whether two arrays hold the same bits: the sign of a zero and the payload of a NaN count.

    >>> import numpy as np
    >>> equal_bits(np.float32([0.0]), np.float32([-0.0]))
    False
    """
    left, right = _alike(a, b)
    return left.tobytes() == right.tobytes()


def _alike(a: npt.ArrayLike, b: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    left, right = (x.astype(x.dtype.newbyteorder("="), copy=False) for x in (np.asarray(a), np.asarray(b)))
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        expected = f"two arrays of shape {left.shape} and dtype {left.dtype}"
        raise GradCombineError("verify", expected, f"shape {right.shape} and dtype {right.dtype}")
    return left, right


def _ordered(array: np.ndarray) -> npt.NDArray[np.int64]:
    """An integer a float, in the floats' own order: the magnitude's bits, negated where the sign bit is set."""
    if array.dtype.itemsize == 1:
        # Not every 8-bit float has a sign bit, or a zero; but there are only 256 of them.
        values = np.arange(256, dtype=np.uint8).view(array.dtype).astype(np.float32)
        return np.searchsorted(np.unique(values[~np.isnan(values)]), array.astype(np.float32))
    size = array.dtype.itemsize
    bits = np.ascontiguousarray(array).reshape(array.shape).view(f"i{size}")
    magnitude = bits & np.iinfo(bits.dtype).max
    return np.where(bits < 0, -magnitude, magnitude).astype(np.int64)
