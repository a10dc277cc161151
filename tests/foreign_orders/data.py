"""Random data whose sum depends on the order, and comparisons of sums."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float64": np.float64,
    "complex64": np.complex64,
    "int32": np.int32,
}


def normal(n: int, shape: tuple[int, ...] = (513,), dtype: str = "float32", seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn = [rng.normal(size=shape) for _ in range(n)]
    if dtype == "complex64":
        drawn = [x + 1j * rng.normal(size=shape) for x in drawn]
    return [np.asarray(1000 * x if dtype == "int32" else x).astype(DTYPES[dtype]) for x in drawn]


def assert_same_bits(received: Any, expected: Any) -> None:
    a, b = np.asarray(received), np.asarray(expected)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_array_equal(np.frombuffer(a.tobytes(), np.uint8), np.frombuffer(b.tobytes(), np.uint8))


def assert_same_sum(received: Any, other: Any, terms: Any) -> None:
    """Asserts that two float32 sums of n terms differ by at most ``2 gamma(n - 1) sum |x|`` (Higham, 2002, 4.2)."""
    n = len(terms) - 1
    gamma = n * 2.0**-24 / (1 - n * 2.0**-24)
    bound = 2 * gamma * np.abs(np.float64(terms)).sum(axis=0)
    assert (np.abs(np.float64(received) - other) <= bound).all()
