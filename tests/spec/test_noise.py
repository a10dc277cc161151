"""The gradient noise scale over time and replicas, in every mode."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.noise import noise_scale, squared_norm
from tests.spec import exact, modes
from tests.spec.programs import rows
from tests.spec.selection import communicating, traced_quickly, unrolled

STEP = reductions.per_leaf(
    {
        "grads": reductions.mean(),
        "square": reductions.mean(),
        "examples": reductions.sum(),
        "n": reductions.sum(),
        "moments": reductions.moments(),
    }
)


def contribution(grads: Any, examples: Any) -> Any:
    square = squared_norm(grads)
    return {"grads": grads, "square": square, "examples": examples, "n": np.int32(1), "moments": grads}


def in_one_pass(env: modes.Env, data: Any) -> Any:
    """Noise scale over all replicas, from one replica's stacked gradients and numbers of examples."""
    acc = gc.accumulate(STEP, every=4)
    microbatches = list(zip(rows(data["grads"]), rows(data["examples"]), strict=True))
    state = acc.init(contribution(*microbatches[0]))
    for grads, examples in microbatches:
        state = acc.update(contribution(grads, examples), state, weight=examples)
    out = acc.value(gc.merge_replicas(STEP, state, env.collective))
    return {"noise": noise_scale(out["square"], squared_norm(out["grads"]), out["examples"], out["n"]), **out}


def data_of(vectors: Any, examples: Any) -> Any:
    w = np.float32(vectors)
    return {"grads": {"w": w[:, :1], "b": w[:, 1], "none": None}, "examples": np.float32(examples)}


VECTORS, EXAMPLES = [[6, 3], [2, 1], [np.nan, np.inf], [4, -1]], [1, 2, 0, 1]
"""Three microbatches of unequal sizes and an empty one: squared norms 45, 5 and 17, mean gradient (3.5, 1).

The mean square is (45 + 2 * 5 + 17) / 4 = 18, the square of the mean 13.25, so tr(S) = 4 * (18 - 13.25) / 2 = 9.5 and
|G|**2 = 13.25 - 9.5 / 4 = 10.875.
"""


def check(result: Any) -> None:
    np.testing.assert_array_equal(result["grads"]["w"], np.float32([3.5]))
    assert (result["square"], result["examples"], result["n"]) == (18, 4, 3)
    assert (result["noise"].trace, result["noise"].squared_norm) == (9.5, 10.875)
    assert Fraction(float(result["noise"].scale)) == exact.round_to(Fraction(19, 2) / Fraction(87, 8))


@unrolled
@communicating
def test_unequal_microbatches(mode: modes.Mode) -> None:
    (result,) = mode.run(in_one_pass, [data_of(VECTORS, EXAMPLES)])
    check(result)


@traced_quickly(("jax_shard_map",))
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.full)])
@unrolled
def test_unequal_microbatches_over_replicas(replicated: modes.Mode, replicas: int) -> None:
    blocks = zip(np.split(np.float32(VECTORS), replicas), np.split(np.float32(EXAMPLES), replicas), strict=True)
    for result in replicated.run(in_one_pass, [data_of(*block) for block in blocks]):
        check(result)


@unrolled
@pytest.mark.parametrize(
    ("vectors", "examples"),
    [([[6, 3]], [2]), pytest.param([[6, 3], [1, 1]], [2, 0], marks=pytest.mark.full), ([[6, 3]], [0])],
)
@communicating
def test_fewer_than_two_contributions_tell_nothing(mode: modes.Mode, vectors: Any, examples: Any) -> None:
    (result,) = mode.run(in_one_pass, [data_of(vectors, examples)])
    assert np.isnan(result["noise"]).all()


@unrolled
@communicating
def test_the_estimates_are_unbiased(mode: modes.Mode) -> None:
    """Averages over all draws of four examples into microbatches of 1, 1 and 2 are exact.

    An example's gradient is (2, 0) or (0, 4): the true gradient (1, 2), and tr(S) = (4 + 16) / 2 - 5 = 5.
    """
    estimates = []
    for drawn in itertools.product(([2, 0], [0, 4]), repeat=4):
        vectors = [drawn[0], drawn[1], np.add(drawn[2], drawn[3]) / 2, [0, 0]]  # same number as in the program above
        (result,) = mode.run(in_one_pass, [data_of(vectors, [1, 1, 2, 0])])
        noise, spread = result["noise"], result["moments"]
        assert noise.trace == (spread["w"].variance[0] + spread["b"].variance) * 4 / 2
        estimates.append((noise.trace, noise.squared_norm))
    assert tuple(np.mean(estimates, axis=0)) == (5, 5)


def norm(env: modes.Env, data: Any) -> Any:
    return squared_norm(data)


@unrolled
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.complex64])
def test_squared_norm(mode: modes.Mode, dtype: Any) -> None:
    """Squares are computed in float32 or wider: 300**2 overflows float16."""
    whole = np.array([300, 4])
    values = whole * 1j + 3 * (whole == 4) if dtype == np.complex64 else whole
    (result,) = mode.run(norm, [{"w": values.astype(dtype), "b": np.float32(2), "none": None}])
    stored = Fraction(float(np.float32(300).astype(dtype).real)) ** 2
    assert result.dtype == np.float32
    assert Fraction(float(result)) == stored + 16 + (9 if dtype == np.complex64 else 0) + 4


def test_squared_norm_of_wide_leaves_and_of_none() -> None:
    wide = squared_norm({"a": np.float64([1 + 2.0**-30]), "b": np.float32([1])})
    assert (wide.dtype, wide) == (np.float64, (1 + 2.0**-30) ** 2 + 1)
    assert (squared_norm({"a": None}).dtype, squared_norm({"a": None})) == (np.float32, 0)


def test_what_has_no_norm_and_no_noise_scale() -> None:
    with pytest.raises(gc.GradCombineError, match=r"squared_norm: leaf \['n'\]: expected a dtype that is float"):
        squared_norm({"n": np.int32([1])})
    with pytest.raises(
        gc.GradCombineError, match=r"noise_scale: expected a real scalar as weight, received shape \(2,\)"
    ):
        noise_scale(2.0, 1.0, np.ones(2), 2)
