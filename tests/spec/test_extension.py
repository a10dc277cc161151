"""User-defined reductions, on trees or on single arrays, and wrappers, in all modes."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions, statefile, tree
from gradcombine.reductions.algebra import Wrapper
from tests.spec import modes
from tests.spec.programs import rows
from tests.spec.selection import among

MODES = ("numpy", "jax_shard_map", "tf_function", "jax_scan", "jax_vmap", "jax_shard_map_scan", "tf_xla", "tf_mirrored")


class Sums(NamedTuple):
    high: Any
    squares: Any


def _rooted(xp: Any, a: Sums, totals: Any) -> Any:
    return xp.sqrt(a.squares), xp.add(a.high, xp.full((), 0, xp.dtype(a.high)))


TOP = reductions.elementwise(
    "top",
    empty=Sums(-np.inf, 0),
    update=lambda xp, a, x, w: Sums(xp.maximum(a.high, x), xp.add(a.squares, xp.scale(x * x, w))),
    merge=lambda xp, a, b: Sums(xp.maximum(a.high, b.high), xp.add(a.squares, b.squares)),
    finalize=_rooted,
    kinds=("float", "integer"),
)
AMAX = reductions.elementwise(
    "amax",
    empty=0,
    update=lambda xp, a, x, weight: xp.maximum(a, abs(x)),
    merge=lambda xp, a, b: xp.maximum(a, b),
    kinds=("float", "integer"),
)
SQUARES = gc.Reduction(
    init=lambda like: {"squares": np.zeros_like(like["w"]), "total": np.zeros((), np.float32)},
    update=lambda s, x, w: {"squares": s["squares"] + w * x["w"] * x["w"], "total": s["total"] + w},
    merge=lambda a, b: {name: a[name] + b[name] for name in a},
    finalize=lambda s: (s["squares"], s["total"]),
    name="squares",
)
EXTENDED = {
    "top": TOP,
    "amax": AMAX,
    "squares": SQUARES,
    "clipped": reductions.clipped(reductions.zeroed(reductions.mean()), 5),
    "zeroed": reductions.zeroed(reductions.clipped(reductions.sum(), 5)),
    "measured": reductions.measured(reductions.zeroed(reductions.sum())),
    "left": reductions.zeroed(reductions.measured(reductions.clipped(reductions.mean(), 5))),
}


def everywhere(env: modes.Env, data: Any) -> Any:
    """Each reduction in a list, over time and over replicas; only the last one communicates."""
    trees, weights = rows(data["values"]), [data["weights"][i] for i in range(data["weights"].shape[0])]
    out = {}
    for name in ("top", "squares", "left"):  # a tuple as accumulator, functions on trees, and all wrappers
        reduction = EXTENDED[name]
        acc = gc.accumulate(reduction, every=len(trees))

        def step(state: Any, x: Any, acc: Any = acc) -> Any:
            return acc.update(x["values"], state, x["weights"])

        state = env.loop(step, acc.init(trees[0]), data)
        merged = gc.merge_replicas(reduction, state, env.collective)
        out[name] = {
            "list": gc.combine(reduction, trees, weights),
            "time": acc.value(state),
            "replicas": acc.value(merged),
        }
    return out


W = np.float32([[[3, 4], [np.inf, 1], [6, 8]], [[-9, 12], [2, -2], [0, 0]]])
"""Contributions by replica and step; their norms are at most 5 or such that clipping to 5 is exact."""
WEIGHTS = np.float32([[1, 1, 3], [3, 0, 0.5]])


def expected(name: str, w: list[list[float]], weights: list[float]) -> list[Any]:
    """Expected values; exact, as all norms of clipped values are integers."""
    weighted = [(x, Fraction(k)) for x, k in zip(w, weights, strict=True) if k]
    if name in ("amax", "top", "squares"):
        columns = [[x[i] for x, _ in weighted] for i in range(2)]
        squares = [sum(float(k) * x[i] ** 2 for x, k in weighted) for i in range(2)]
        if name == "amax":
            return [[max(map(abs, column)) for column in columns]]
        if name == "top":
            return [np.sqrt(np.float32(squares)), [max(column) for column in columns]]
        return [squares, float(sum(k for _, k in weighted))]
    finite = [([Fraction(v) for v in x], k) for x, k in weighted if np.isfinite(x).all()]
    total = sum(k for _, k in finite)
    unclipped = [sum((x[i] * k for x, k in finite), Fraction()) for i in range(2)]
    if name == "measured":
        norms = [float(np.hypot(*x)) for x, _ in weighted]
        return [list(map(float, unclipped)), max(norms), len(weighted), float(sum(k for _, k in weighted))]
    lengths = [sum(v * v for v in x) for x, _ in finite]
    factors = [Fraction(5) / Fraction(float(np.sqrt(float(n)))) if n > 25 else Fraction(1) for n in lengths]
    sums = [sum((x[i] * k * f for (x, k), f in zip(finite, factors, strict=True)), Fraction()) for i in range(2)]
    means = [[float(s / total) for s in sums]]
    if name == "left":
        return [*means, float(np.sqrt(float(max(lengths)))), len(finite), float(total)]
    return means if name == "clipped" else [[float(s) for s in sums]]


def observed(name: str, value: Any) -> list[Any]:
    if name in ("measured", "left"):
        value, metrics = value
        return [value["w"], metrics.norm_max, metrics.count, metrics.weight]
    if name == "top":
        return list(value["w"])
    return list(value) if name == "squares" else [value["w"]]


@pytest.mark.parametrize("name", among((), MODES))
def test_what_is_defined_and_wrapped_is_the_same_in_every_place(name: str) -> None:
    """Includes traced weights, one of them 0, a leaf that is None, and a contribution with an infinity."""
    mode = modes.get(name)
    ranks = range(min(2, max(mode.replicas)))
    data = [{"values": {"w": W[r], "none": None}, "weights": WEIGHTS[r]} for r in ranks]
    everyone = np.concatenate([W[r] for r in ranks]), np.concatenate([WEIGHTS[r] for r in ranks])
    for rank, result in enumerate(mode.run(everywhere, data)):
        own = W[rank], WEIGHTS[rank]
        among_whom = {"list": own, "time": own, "replicas": everyone}
        for defined, places in result.items():
            for place, value in places.items():
                wanted = expected(defined, *(x.tolist() for x in among_whom[place]))
                for x, y in zip(observed(defined, value), wanted, strict=True):
                    np.testing.assert_allclose(x, np.float32(y), rtol=3e-7, err_msg=f"{defined}: {place}")


VALUES = [{"w": np.float32([1, -2])}, {"w": np.float32([3, 4])}]


@pytest.mark.parametrize("order", ["sequential", "tree"])
@pytest.mark.parametrize("name", EXTENDED)
def test_partial_windows_come_back_from_a_file(name: str, order: Any, tmp_path: Any) -> None:
    acc = gc.accumulate(EXTENDED[name], every=2, order=order)
    state = acc.update(VALUES[0], acc.init(VALUES[0]), 2)
    statefile.save(tmp_path / "state.npz", EXTENDED[name], state)
    loaded = statefile.load(tmp_path / "state.npz", EXTENDED[name], VALUES[0])
    kept, *others = (acc.value(acc.update(VALUES[1], s, 3)) for s in (state, loaded, pickle.loads(pickle.dumps(state))))
    assert [_lists(value) for value in others] == [_lists(kept)] * 2


@pytest.mark.parametrize("name", EXTENDED)
@pytest.mark.parametrize(
    ("value", "weight", "message"),
    [
        ({"w": np.float32([1, 2, 3])}, 1, r"leaf \['w'\]: expected .*shape \(2,\), received .*\(3,\)"),
        ({"w": np.float64([1, 2])}, 1, r"leaf \['w'\]: expected .*float32.*received .*float64"),
        ({"v": np.float32([1, 2])}, 1, r"leaf \['w'\]"),
        (VALUES[0], -1, "a finite weight that is not negative, received -1"),
    ],
    ids=["shape", "dtype", "structure", "weight"],
)
def test_bad_contributions_are_refused(name: str, value: Any, weight: Any, message: str) -> None:
    reduction = EXTENDED[name]
    with pytest.raises(gc.GradCombineError, match=message):
        reduction.update(reduction.init(VALUES[0]), value, weight)


@pytest.mark.parametrize("whole", [SQUARES, reductions.sum(), AMAX], ids=lambda r: r.name)
def test_a_replaced_function_counts_in_every_place(whole: gc.Reduction) -> None:
    """Replaced functions are used however the original reduction combines lists or replicas."""

    class Doubled(Wrapper):
        def update(self, state: Any, value: Any, weight: Any = 1) -> Any:
            return self.of.update(state, {"w": value["w"] * np.float32(2)}, weight)

    doubled = Doubled(whole)
    acc = gc.accumulate(doubled, every=2)
    state = acc.init(VALUES[0])
    for value in VALUES:
        state = acc.update(value, state)
    merged = gc.merge_replicas(doubled, state, gc.LOCAL)
    expected = _lists(gc.combine(whole, [{"w": 2 * value["w"]} for value in VALUES]))
    for value in (gc.combine(doubled, VALUES), acc.value(state), acc.value(merged)):
        assert _lists(value) == expected
    assert _lists(gc.combine(whole, VALUES)) != expected


def _lists(value: Any) -> list[Any]:
    return [np.asarray(x).tolist() for x in tree.flatten(value)[0]]


@pytest.mark.parametrize(
    ("leaf", "weights", "expected"),
    [
        (np.int8, [1, 0.5], np.int32([7, 120])),
        (np.float16, [1, 3], np.float16([7, 120])),
        (np.float64, [1, 0], np.float64([3, 120])),
    ],
)
def test_dtypes_of_one_definition(leaf: Any, weights: Any, expected: Any) -> None:
    """Narrow leaves are accumulated in 32 bits; a reduction that does not multiply accepts any weight for integers."""
    result = gc.combine(AMAX, [np.array([3, -120], leaf), np.array([-7, 1], leaf)], weights)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


def _amax(**changed: Any) -> Any:
    functions = {"empty": 0, "update": lambda xp, a, x, w: a, "merge": lambda xp, a, b: a}
    return reductions.elementwise("amax", **{**functions, **changed})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _amax(empty="0"), "a number, a tuple of numbers or a function as empty"),
        (lambda: _amax(merge=None), "a function as merge"),
        (lambda: _amax(kinds="float"), "kinds among"),
        (lambda: _amax(kinds=("floats",)), "kinds among"),
        (lambda: reductions.elementwise("", empty=0, update=max, merge=max), "a name"),
        (lambda: gc.combine(_amax(kinds=("integer",)), VALUES), r"leaf \['w'\]: expected a dtype that is integer"),
        (lambda: gc.combine(_amax(kinds=("integer",), empty=np.inf), [np.int32([1])]), "a number of int32 as empty"),
        (
            lambda: gc.combine(_amax(update=lambda xp, a, x, w: x.sum()), VALUES),
            r"amax: leaf \['w'\]: expected float32 of shape \(2,\) from update, received float32 of shape \(\)",
        ),
        (
            lambda: gc.combine(_amax(merge=lambda xp, a, b: (a, b)), VALUES, order="tree"),
            r"from merge, received tuple of",
        ),
        (lambda: reductions.clipped(reductions.mean, 1), "a Reduction, for instance"),
        (lambda: reductions.clipped(reductions.mean(), 0), "a positive and finite max_norm, received 0"),
        (
            lambda: gc.combine(reductions.clipped(reductions.sum(), 1), [{"n": np.int32([1])}]),
            r"clipped: leaf \['n'\]: expected float leaves",
        ),
        (lambda: reductions.measured(reductions.sum()).init({"n": np.int32([1])}), r"measured\(sum\): leaf \['n'\]"),
    ],
)
def test_bad_definitions_are_refused(make: Any, message: str) -> None:
    with pytest.raises(gc.GradCombineError, match=message):
        make()


def test_a_clipped_contribution_without_a_finite_norm_is_nan_and_zeroed_leaves_it_out() -> None:
    """The square of 1e30 overflows: clipping it to 0 would lose it silently."""
    values = [np.float32([1e30, 1]), np.float32([3, 4])]
    assert np.isnan(gc.combine(reductions.clipped(reductions.mean(), 5), values)).all()
    dropped = reductions.clipped(reductions.zeroed(reductions.mean()), 5)
    np.testing.assert_array_equal(gc.combine(dropped, values), np.float32([3, 4]))


@pytest.mark.parametrize("denominator", [True, 2, 2.0])
def test_zeroed_leaves_the_denominators_of_ratios_as_they_are(denominator: float) -> None:
    values = [reductions.Ratio(np.float32([x, 2]), denominator) for x in (np.nan, 2)]
    result = gc.combine(reductions.zeroed(reductions.ratio()), values)
    np.testing.assert_array_equal(result, np.float32([2, 2]) / denominator)


@pytest.mark.parametrize(
    "framework",
    ["numpy", *(pytest.param(x, marks=pytest.mark.needs(x)) for x in ("jax", "tensorflow"))],
)
def test_numbers_above_the_range_of_a_dtype_are_infinite(framework: str) -> None:
    values = [modes.as_arrays(framework, np.float32([3, 4]))]
    np.testing.assert_array_equal(gc.combine(reductions.clipped(reductions.mean(), 1e300), values), [3, 4])
    np.testing.assert_array_equal(gc.combine(_amax(empty=1e300), values), [np.inf, np.inf])


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", ["clipped", "zeroed", "measured"])
def test_derivatives_through_wrappers(name: str) -> None:
    """A skipped contribution has derivative 0, not NaN; a clipped one that of x / |x|, and that of x at 0."""
    import jax
    import jax.numpy as jnp

    acc = gc.accumulate(EXTENDED[name], every=3)

    def loss(x: Any) -> Any:
        state = acc.init(x[0])
        for row in x:
            state = acc.update(row, state)
        return (acc.value(state).value if name == "measured" else acc.value(state)) @ jnp.float32([25, 0])

    x = jnp.float32([[6, 8], [jnp.inf, 1], [0, 0]])
    scale, count = (1, 1) if name == "measured" else (5, 2 if name == "clipped" else 1)
    # d/dx (5 x / |x|) at (6, 8): 5 / 10 * (I - x x' / 100)
    first = [25, 0] if scale == 1 else [25 * 0.5 * 0.64 / count, -25 * 0.5 * 0.48 / count]
    lost = [np.nan if name == "clipped" else 0] * 2  # clipped before it is skipped
    wanted = np.float32([first, lost, [25 / count, 0]])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), wanted, rtol=1e-6)
