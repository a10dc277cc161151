"""Every candidate is recovered from its result, and so are results of the frameworks themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import GradCombineError, foreign_orders
from gradcombine.verify import explain
from gradcombine.verify.explain.candidates import candidates

RNG = np.random.default_rng(11)
TREES = [
    {
        "kernel": RNG.normal(size=(23, 30)).astype(np.float32),
        "bias": RNG.normal(size=70).astype(np.float32),
        "none": None,
    }
    for _ in range(12)
]
WEIGHTS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
RANKS = (2, 3, 4, 6)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    ("count", "sample"),
    [
        (2, 4),
        pytest.param(6, 4, marks=pytest.mark.full),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 10_000), (5, 10_000), (6, 60))),
    ],
)
def test_candidates_are_found_again(count: int, sample: int, weighted: bool) -> None:
    """Each candidate is among the matches of its result, and all matches give that result.

    For six trees, which have the most candidates, a sample of them.
    """
    trees = [tree | {"kernel": tree["kernel"][:7]} for tree in TREES[:count]]
    weights = WEIGHTS[:count] if weighted else None
    ranks = [each for each in RANKS if count % each == 0]
    tried = list(candidates(trees, weights, ranks))
    results = {str(candidate): candidate.run() for candidate in tried}
    assert len(results) == len(tried)
    for name in list(results)[:: max(1, len(results) // sample)]:
        found = explain(trees, results[name], weights, ranks=ranks)
        matches = [str(verdict.candidate) for verdict in found.matches]
        assert name in matches
        for other in filter(results.__contains__, matches):
            wanted = results[name]["kernel"]
            np.testing.assert_array_equal(results[other]["kernel"].astype(wanted.dtype), wanted)


def test_few_candidates_give_the_same_result() -> None:
    """Orders and scalings can be distinguished; otherwise an explanation would be meaningless."""
    made = [candidate.run() for candidate in candidates(TREES[:6], WEIGHTS[:6], RANKS)]
    results = [b"".join(x[leaf].astype(np.float64).tobytes() for leaf in ("kernel", "bias")) for x in made]
    assert len(set(results)) > 0.7 * len(results)


def one(name: str) -> list[Any]:
    return [x[name] for x in TREES]


def add_n() -> Any:
    return tf.add_n(one("kernel"))


def multi_steps() -> Any:
    tx = optax.MultiSteps(optax.sgd(-1.0), 12)
    with jax.numpy_dtype_promotion("standard"):
        state = tx.init(one("kernel")[0])
        for g in one("kernel"):
            updates, state = tx.update(jnp.asarray(g), state)
    return updates


def psum() -> Any:
    shards = np.stack([np.stack(one("kernel")[rank * 3 : rank * 3 + 3]) for rank in range(4)])

    def own(x: Any) -> Any:
        return jax.lax.psum(x[0] + x[1] + x[2], "data")

    return jax.pmap(own, axis_name="data", devices=jax.devices()[:4])(shards)[0]


def scan_in_bfloat16() -> Any:
    def step(total: Any, x: Any) -> Any:
        return total + x.astype(jnp.bfloat16), None

    return jax.lax.scan(step, jnp.zeros((23, 30), jnp.bfloat16), np.stack(one("kernel")))[0]


def mean_of_reciprocals() -> Any:
    """As in a training loop that scales each microbatch's loss by 1 / k."""
    return sum(jnp.asarray(g) * np.float32(1 / 12) for g in one("kernel"))


def token_mean() -> Any:
    return gc.mean([tf.constant(x) for x in one("kernel")], WEIGHTS)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (add_n, "sum, added by AddN (tf.add_n on CPU), in float32"),
        (multi_steps, "Welford's mean (optax.MultiSteps), added one after another, in float32"),
        (psum, "sum, added by psum over 4 ranks, split into blocks, in float32"),
        (scan_in_bfloat16, "sum, added one after another, in bfloat16"),
        (mean_of_reciprocals, "sum of each * (1 / n), added one after another, in float32"),
        (token_mean, "weighted sum / total weight, added one after another, in float32"),
    ],
)
def test_the_real_thing_is_recognised(make: Callable[[], Any], expected: str) -> None:
    found = explain(one("kernel"), make(), WEIGHTS, ranks=(4,))
    assert str(found.matches[0].candidate) == expected
    assert str(found).startswith(f"the result is, to the bit: {expected}")


@pytest.mark.full
def test_what_no_order_gives_is_said_with_the_nearest() -> None:
    result = gc.add_n(TREES)
    result["kernel"][0, 0] = np.nextafter(result["kernel"][0, 0], np.float32(9))
    found = explain(TREES, result, ranks=RANKS)
    assert found.matches == ()
    assert str(found).startswith("no known order gives this result; the closest is: sum, added one after another")
    assert "99.9% of the elements equal, the largest distance 1 ulp" in str(found)


def test_the_sign_of_a_zero_counts() -> None:
    """A chain that starts from +0 loses the sign of -0; those of candidates do not, compensated and exact sums do."""
    zeros = [np.float32([-0.0, 1]), np.float32([-0.0, 2])]
    kept, lost = (
        {str(x.candidate).removeprefix("sum, added ") for x in explain(zeros, np.float32([zero, 3])).matches}
        for zero in (-0.0, 0.0)
    )
    assert kept == {f"one after another, in {dtype}" for dtype in ("float32", "float64", "float16", "bfloat16")}
    assert lost == {
        "one after another, in compensated",
        "in any order, in exact",
        "in any order, by NVLS over 2 ranks, in float32",
    }


def test_a_narrower_result_is_compared_as_such() -> None:
    """bfloat16 gradients, summed in float32 and rounded once."""
    result = gc.add_n(TREES)["kernel"].astype(ml_dtypes.bfloat16)
    assert (
        str(explain(one("kernel"), result, ranks=()).matches[0].candidate) == "sum, added one after another, in float32"
    )


def chain_of(trees: Sequence[Any], wide: Any) -> Any:
    """Adds the trees sequentially in the dtype `wide` and rounds once."""
    total = trees[0].astype(wide)
    for x in trees[1:]:
        total = total + x.astype(wide)
    return total.astype(trees[0].dtype)


@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [
        (np.float64, np.float64),
        (np.float64, np.float32),
        pytest.param(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, marks=pytest.mark.full),
        pytest.param(ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2, marks=pytest.mark.full),
        pytest.param(ml_dtypes.float8_e5m2, np.float32, marks=pytest.mark.full),
    ],
)
def test_every_float_dtype_is_explained(dtype: Any, accumulator: Any) -> None:
    trees = [x.astype(dtype) for x in one("kernel")]
    found = explain(trees, chain_of(trees, accumulator), WEIGHTS, ranks=(4,))
    assert str(found.matches[0].candidate) == f"sum, added one after another, in {np.dtype(accumulator)}"


@pytest.mark.parametrize("count", [5, pytest.param(7, marks=pytest.mark.full), pytest.param(9, marks=pytest.mark.full)])
def test_a_ring_is_known_over_any_number_of_ranks(count: int) -> None:
    found = explain(TREES[:count], foreign_orders.ring(TREES[:count]))
    assert str(found.matches[0].candidate) == f"sum, added in a ring over {count} ranks, in float32"


@pytest.mark.full
def test_a_leaf_that_all_candidates_give_says_nothing() -> None:
    zeros = np.zeros(10_000, np.float32)
    trees = [x | {"zeros": zeros, "nan": np.full(3, np.nan, np.float32)} for x in TREES[:5]]
    result = gc.add_n(trees)
    found = explain(trees, result)
    assert found.uninformative == ("['nan']", "['zeros']")
    assert found.elements == 23 * 30 + 70
    assert "uninformative leaves, which all candidates reproduce: ['nan'], ['zeros']" in str(found)
    result["kernel"][:] += 1
    result["bias"][:] += 1
    assert explain(trees, result).verdicts[0].share < 0.1


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_result_that_all_candidates_give_has_no_explanation(value: float) -> None:
    constant = np.full(1000, value, np.float32)
    found = explain([constant] * 5, constant, [1, 2, 3, 4, 5])
    assert found.matches == () and found.uninformative == ("",)
    assert str(found).startswith("all ") and "does not show which one was used" in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], np.ones(2)), "one contribution or more"),
        (([np.ones(2)], np.ones(2), [1, 2]), "expected 1 weights, received 2"),
        (([np.ones(2)], np.ones(2), [-1]), "explain: expected a finite weight"),
        (([np.ones(3)], np.ones(2)), r"the result's shape, \(2,\)"),
        (([np.int32([1])], np.ones(1)), "a float array of 64 bits at most, received int32"),
        (([{"a": np.ones(1)}], {"b": np.ones(1)}), "expected the structure"),
        (([{}, {}], {}), "one element or more in the result, received none"),
        (([{"a": None}], {"a": None}), "one element or more in the result, received none"),
        (([np.ones((0, 3))], np.ones((0, 3))), "one element or more in the result, received none"),
        (([np.ones(1, np.longdouble)], np.ones(1)), "64 bits at most, received float128"),
    ],
)
def test_bad_input_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        explain(*arguments)


def test_replicas_hold_equally_many_contributions() -> None:
    contributions = [np.float32([i, 1]) for i in range(4)]
    with pytest.raises(GradCombineError, match="of which one divides 4 contributions, received 3, 8"):
        explain(contributions, sum(contributions), ranks=(3, 8))
    assert explain(contributions, sum(contributions), ranks=(3, 2)).matches


def test_integer_weights_may_exceed_64_bits() -> None:
    weights = [2**70, 2**71]
    result = np.float32(2**70) * np.float32([1, 2]) + np.float32(2**71) * np.float32([3, 4])
    found = explain([np.float32([1, 2]), np.float32([3, 4])], result, weights)
    assert "weighted sum" in {verdict.candidate.scaling for verdict in found.matches}


@pytest.mark.full
@pytest.mark.parametrize("kind", [int, np.int64, float], ids=str)
def test_exact_sums_of_integer_weights_are_not_those_of_floats(kind: Any) -> None:
    """Products with integers are exact, products with floats are rounded: each result matches only its weights."""
    weights = [kind(w) for w in WEIGHTS]
    others = [float(w) if kind is not float else int(w) for w in weights]
    result = gc.combine(gc.reductions.sum("exact"), one("kernel"), weights)
    explained = [explain(one("kernel"), result, given, ranks=(4,)).matches for given in (weights, others)]
    found = [any("any order, in exact" in str(verdict.candidate) for verdict in matches) for matches in explained]
    assert found == [True, False]
