"""Reductions that pick a value keep its bits, even of subnormal numbers, which XLA and TensorFlow compare as zeros."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from tests.spec import exact, modes
from tests.spec.programs import rows
from tests.spec.selection import among

NAMES = ("min", "max", "first", "last")


def pairs(dtype: str) -> np.ndarray:
    """Two contributions, of shape (2, n): every pair of zeros, subnormal and normal numbers of both signs."""
    info = ml_dtypes.finfo(np.dtype(dtype))
    tiny, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    sizes = [0.0, tiny, 2 * tiny, normal - tiny, normal, 1.0]
    values = np.array([sign * size for size in sizes for sign in (1, -1)]).astype(dtype)
    return np.stack([np.repeat(values, len(values)), np.tile(values, len(values))])


def wanted(name: str, a: Any, b: Any) -> float:
    if name in ("first", "last"):
        return float({"first": a, "last": b}[name])
    picked = {"min": min, "max": max}[name](a, b, key=lambda x: Fraction(float(x)))
    return float(picked) or 0.0  # a zero result is +0


def picked(env: modes.Env, data: Any) -> Any:
    """Picks from a list, in which a traced weight of 0 keeps the bits, and over the mode's replicas."""
    results = {}
    for name in NAMES:
        reduction = getattr(reductions, name)()
        listed = gc.combine(reduction, [*rows(data["x"]), data["x"][0]], [1, data["one"], data["zero"]])
        results[name] = gc.all_reduce(reduction, listed, over=env.collective)
    return results


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", among((), modes.UNROLLED))
def test_what_is_picked_keeps_its_bits(name: str, dtype: str) -> None:
    x = pairs(dtype)
    expected = {n: np.array([wanted(n, a, b) for a, b in x.T]).astype(x.dtype) for n in NAMES}
    mode = modes.get(name)
    chosen = [[0, 0], [1, 1]] if name in modes.REPLICATED else [[0, 1]]
    dealt = [{"x": x[which], "one": np.float32(1e-40), "zero": np.float32(0)} for which in chosen]
    for result in mode.run(picked, dealt):
        for reduction in NAMES:
            np.testing.assert_array_equal(exact.bits(result[reduction]), exact.bits(expected[reduction]), reduction)


@pytest.mark.parametrize("framework", ["numpy", pytest.param("jax", marks=pytest.mark.needs("jax"))])
def test_nan_of_either_sign_is_nan_beside_anything(framework: str) -> None:
    nans = np.float32([np.nan, -np.nan])
    others = np.float32([-np.inf, -1, -0.0, 0, 1e-40, np.inf, np.nan])
    x = np.stack([np.repeat(nans, len(others)), np.tile(others, len(nans))])
    mode = modes.get({"jax": "jax_jit"}.get(framework, framework))
    for dealt in (x, x[::-1]):
        (result,) = mode.run(extrema, [dealt])
        assert np.isnan(result).all()


def extrema(env: modes.Env, x: Any) -> Any:
    return [gc.combine(reduction, rows(x)) for reduction in (reductions.min(), reductions.max())]


def test_long_doubles_are_compared_as_they_are() -> None:
    x = [np.longdouble([1, -0.0, 2.0**-1074]), 1 - np.finfo(np.longdouble).eps * np.longdouble([1, 1, 1])]
    np.testing.assert_array_equal(gc.combine(reductions.min(), x), [x[1][0], 0, x[0][2]], strict=False)
    np.testing.assert_array_equal(gc.combine(reductions.max(), x), [1, x[1][1], x[1][2]], strict=False)


@pytest.mark.parametrize("name", ["min", "max", "first"])
def test_a_missing_leaf_has_one_meaning_in_every_grouping(name: str) -> None:
    reduction, trees = getattr(reductions, name)(), [{"w": np.float32([2, -3])}, {"w": None}]
    for terms in (trees, trees[::-1], [*trees, trees[0]]):
        states = [reduction.update(reduction.init(trees[0]), x) for x in terms]
        results = [
            gc.combine(reduction, terms),
            gc.combine(reduction, terms, order="tree"),
            reduction.finalize(reduce(reduction.merge, states)),
        ]
        assert len({result["w"].tobytes() for result in results}) == 1


def test_last_keeps_a_missing_leaf_in_an_update_and_takes_all_of_a_later_state() -> None:
    reduction, present, missing = reductions.last(), np.float32([2]), None
    empty = reduction.init(present)
    state = reduction.update(empty, present)
    assert reduction.finalize(reduction.update(state, missing)) == 2
    assert reduction.finalize(reduction.merge(state, reduction.update(empty, missing))) == 0
