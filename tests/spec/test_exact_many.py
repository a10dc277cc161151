"""Exact sums of more terms than the words hold without settling, and the kernels for large arrays and lists."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.reductions.cell import parts, refilled
from tests.spec import exact, modes
from tests.spec.programs import rows
from tests.spec.selection import among, in_modes

MANY = reductions.sum("exact", max_terms=2**26)
FEW = reductions.sum("exact")


DISTINCT = ("numpy", "jax_eager", "jax_jit", "tf_eager", "tf_function", "tf_xla")
"""Modes that differ for programs without replicas and loops."""


def folded(reduction: gc.Reduction, x: np.ndarray) -> Any:
    """The state after all rows of x, in order."""
    state = reduction.init(x[0])
    for start in range(0, len(x), 1000):
        block = x[start : start + 1000]
        state = exact.at_once(reduction, state, list(block), [1] * len(block))
    return state


def settled(state: Any) -> Any:
    """Settles the words of a state, by merging it with an empty one."""
    return MANY.merge(state, MANY.clear(state))


ALL = "all kinds side by side"


def all_kinds(n: int, size: int) -> np.ndarray:
    return np.concatenate(list(exact.patterns(n, size).values()), axis=1)


@pytest.mark.parametrize(
    ("n", "kind"),
    [
        *(pytest.param(5, kind, marks=pytest.mark.full) for kind in exact.patterns(2, 2)),
        pytest.param(5000, ALL, marks=pytest.mark.full),
        pytest.param(2**16, ALL, marks=pytest.mark.slow),
    ],
)
def test_order_grouping_and_error_bound(n: int, kind: str) -> None:
    """Settled words depend on the multiset of terms only."""
    x = all_kinds(n, 4) if kind == ALL else exact.patterns(n, 4)[kind]
    exact.check_grouping(MANY, partial(folded, MANY), x, seeds=[1], settled=settled)


@pytest.mark.full
def test_both_states_have_one_result() -> None:
    """Up to 4096 terms, the capacity for more changes no bit."""
    x = all_kinds(4096, 4)
    few, many = folded(FEW, x), folded(MANY, x)
    np.testing.assert_array_equal(exact.bits(FEW.finalize(few)), exact.bits(MANY.finalize(many)))


@pytest.mark.full
@pytest.mark.parametrize("name", among(("jax_scan",), ("numpy", "jax_scan")))
def test_one_update_after_another(name: str) -> None:
    """Enough terms to settle twice; their digits would overflow otherwise."""
    x = np.concatenate([exact.patterns(5000, 2)[kind] for kind in ("every exponent", "all digits full")], axis=1)
    (words,) = modes.get(name).run(stream, [x])
    for word, expected in zip(words, parts(settled(folded(MANY, x)).value), strict=True):
        np.testing.assert_array_equal(word, expected)


def stream(env: modes.Env, x: Any) -> Any:
    return parts(settled(env.loop(MANY.update, MANY.init(x[0]), x)).value)


FULL = np.float32(2**16 - 2**-8)
"""A number whose top digit is the largest possible: its leading bit is the highest of a bin."""


@pytest.mark.full
@pytest.mark.parametrize("absent", [[{"w": None}], [{"w": None}] * 2])
def test_a_leaf_without_contributions_is_settled_with_the_others(absent: list[Any]) -> None:
    """The leaf has no contribution whenever the words must be settled."""
    state, terms = MANY.init({"w": FULL}), 0
    while terms < 4200:
        deposits = int(state.weight.deposits)
        room = 2048 - len(absent) - deposits % 2048
        if room > 8:
            state, terms = exact.at_once(MANY, state, [{"w": FULL}] * (room - 4), [1] * (room - 4)), terms + room - 4
        elif (deposits + len(absent)) % 2048 >= len(absent):
            state, terms = MANY.update(state, {"w": FULL}), terms + 1
        elif len(absent) == 1:
            state = MANY.update(state, absent[0])
        else:
            state = exact.at_once(MANY, state, absent, [1] * len(absent))
    assert MANY.finalize(state)["w"] == np.float32(terms * float(FULL))


def across(env: modes.Env, state: Any) -> Any:
    """Adds two contributions; the words are settled before the second one."""
    states, traced = [state], MANY.finalize(MANY.update(MANY.clear(state), FULL))
    for weight in (1, np.float32(1)):
        states.append(MANY.update(states[-1], traced, weight))
    return [(parts(s.value), parts(s.weight)) for s in states[1:]]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", among(("numpy", "jax_jit", "tf_function"), (*DISTINCT, "jax_shard_map", "tf_mirrored"))
)
def test_every_mode_settles_at_the_same_time(name: str) -> None:
    state = folded(MANY, np.full(2046, FULL))
    (received,) = modes.get(name).run(across, [state])
    (expected,) = modes.get("numpy").run(across, [state])
    for words, others in zip(received, expected, strict=True):
        for word, other in zip([*words[0], *words[1]], [*others[0], *others[1]], strict=True):
            np.testing.assert_array_equal(word, other)
    tops = [int(words[0][0]) >> 3 for words in received]
    assert tops[0] >= 2**16 > tops[1] >= 0


MEANS = reductions.mean("exact", max_terms=2**26)


def doubled(x: np.ndarray) -> Any:
    """The state of a mean of the rows of x with weights 1, 2, 3 ..., each counted 2**20 times."""
    state = MEANS.init(x[0])
    for i, row in enumerate(x):
        state = MEANS.update(state, row, i + 1)
    for _ in range(20):
        state = MEANS.merge(state, state)
    return state


def continued(env: modes.Env, data: Any) -> Any:
    """Doubles a mean of millions of terms and adds one contribution."""
    empty = MEANS.init(data["x"])
    state = empty._replace(value=refilled(empty.value, data["value"]), weight=refilled(empty.weight, data["weight"]))
    state = MEANS.update(MEANS.merge(state, state), data["x"], 3)
    return MEANS.finalize(state), parts(state.value), parts(state.weight)


@pytest.mark.parametrize("name", among(("numpy",), DISTINCT))
def test_millions_of_terms(name: str) -> None:
    mode = modes.get(name)
    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    state = doubled(x)
    data = {"x": x[0], "value": parts(state.value), "weight": parts(state.weight)}
    ((mean, value, weight),) = mode.run(continued, [data])
    ((_, value_there, weight_there),) = modes.get("numpy").run(continued, [data])
    for word, expected in zip([*value, *weight], [*value_there, *weight_there], strict=True):
        np.testing.assert_array_equal(word, expected)
    for column, received in zip(x.T, mean, strict=True):
        values = [Fraction(float(v)) for v in column]
        total = sum((v * (i + 1) for i, v in enumerate(values)), Fraction(0)) * 2**21 + 3 * values[0]
        assert float(received) == float(exact.round_to(total / exact.round_to(Fraction(10 * 2**21 + 3))))


def test_more_than_the_room_is_nan_for_good() -> None:
    state = MANY.update(MANY.init(np.float32(0)), np.float32(1.1))
    for i in range(27):
        assert MANY.finalize(state) == np.float32(np.float32(1.1) * 2.0**i)
        state = MANY.merge(state, state)
    for _ in range(3):
        assert np.isnan(MANY.finalize(state))
        state = MANY.merge(state, state)


INF, NAN = np.float32(np.inf), np.float32(np.nan)
COLUMNS = {
    "+inf": ([INF, 1], INF),
    "-inf": ([-INF, 1], -INF),
    "both": ([INF, -INF], NAN),
    "NaN": ([NAN, 1], NAN),
    "finite": ([1, 2], 3 * 2.0**16),
}


def test_specials_are_not_counted_over() -> None:
    """2**17 infinities exceed the bits of the count of one sign."""
    x = np.float32([values for values, _ in COLUMNS.values()]).T
    state = folded(MANY, x)
    for _ in range(16):
        state = MANY.merge(state, state)
    expected = np.float32([value for _, value in COLUMNS.values()])
    np.testing.assert_array_equal(exact.bits(MANY.finalize(state)), exact.bits(expected))


@pytest.mark.parametrize("max_terms", [0, -1, 2**26 + 1, 10.0, True, "many"])
def test_refuses_other_numbers_of_terms(max_terms: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"mean: expected max_terms from 1 to 67108864"):
        reductions.mean("exact", max_terms=max_terms)


def test_refuses_the_state_of_the_other_size() -> None:
    with pytest.raises(gc.GradCombineError, match="sum"):
        MANY.update(FEW.init(np.float32([1])), np.float32([1]))


def batches(env: modes.Env, data: Any) -> Any:
    """The mean of a list with traced weights, by successive updates and in one pass."""
    reduction = reductions.mean("exact")
    trees, weights = rows(data["x"]), rows(data["weights"])
    one = reduction.init(trees[0])
    for value, weight in zip(trees, weights, strict=True):
        one = reduction.update(one, value, weight)
    return reduction.finalize(one), gc.combine(reduction, trees, weights), one.count


@pytest.mark.parametrize(("dtype", "name"), in_modes(dict.fromkeys((np.int32, np.float32), ("numpy",)), DISTINCT))
def test_several_at_once_are_one_after_another(name: str, dtype: Any) -> None:
    """Includes a NaN of weight 0."""
    rng = np.random.default_rng(3)
    data = {"x": rng.normal(size=(3, 4)).astype(np.float32), "weights": np.array([3, 0, 5000], dtype)}
    data["x"][1] = np.nan
    ((one, many, count),) = modes.get(name).run(batches, [data])
    assert count == 2
    np.testing.assert_array_equal(exact.bits(one), exact.bits(many))
    weights = data["weights"].astype(int).tolist()
    for column, received, listed in zip(data["x"].T, one, many, strict=True):
        total = sum((Fraction(float(x)) * w for x, w in zip(column, weights, strict=True) if w), Fraction(0))
        expected = float(exact.round_to(total / sum(weights)))
        assert float(listed) == expected if dtype == np.int32 else float(listed) == float(received)


LARGE = 2**14 + 3
"""Size of a leaf that NumPy processes in blocks and TensorFlow compiles."""


def large(env: modes.Env, data: Any) -> Any:
    reduction = reductions.mean("exact")
    a = reduction.update(reduction.init(data["x"][0]), data["x"][0], data["weights"][0])
    b = reduction.update(reduction.init(data["x"][0]), data["x"][1])
    state = reduction.merge(a, b)
    return parts(state.value), reduction.finalize(state)


@pytest.mark.full
@pytest.mark.parametrize("name", among(("tf_function",), (*DISTINCT[1:], "tf_mirrored")))
def test_large_leaves(name: str) -> None:
    """The words equal those of NumPy for the leaf in small pieces."""
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(2, LARGE)) * 10.0 ** rng.integers(-45, 39, (2, LARGE))).astype(np.float32)
    weights = np.int32([5001])
    ((words, result),) = modes.get(name).run(large, [{"x": x.reshape(2, 1, LARGE), "weights": weights}])
    pieces = [modes.get("numpy").run(large, [{"x": p, "weights": weights}])[0] for p in np.split(x[:, :-3], 2, 1)]
    assert result.shape == (1, LARGE)
    for word, expected in zip(words, zip(*(w for w, _ in pieces), strict=True), strict=True):
        np.testing.assert_array_equal(word[0, :-3], np.concatenate(expected))
    expected = np.concatenate([mean for _, mean in pieces])
    np.testing.assert_array_equal(exact.bits(result[0, :-3]), exact.bits(expected))


def test_states_of_few_and_of_many_terms_do_not_mix() -> None:
    like = {"w": np.zeros(2, np.float32)}
    few = reductions.mean("exact")
    words = [f"digits for max_terms {side} 4096" for side in ("up to", "above")]
    for a, b, (own, other) in ((few, MEANS, words), (MEANS, few, words[::-1])):
        with pytest.raises(gc.GradCombineError) as caught:
            a.merge(a.init(like), b.init(like))
        held = "shape (2,) and dtype int32 in"
        assert str(caught.value) == f"mean: leaf ['w']: expected a state of {held} {own}, received {held} {other}"
