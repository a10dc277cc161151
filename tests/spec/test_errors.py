"""Bad input raises one clear error that names the operation, the leaf, and what was expected and received."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from tests.spec.modes import as_arrays

ONE = np.ones(2, np.float32)
NAMED = {"decoder": {"w": ONE}}


def other(leaf: Any) -> Any:
    return {"decoder": {"w": leaf}}


CASES: dict[str, tuple[Callable[[Callable[[Any], Any]], Any], str]] = {
    "structure": (
        lambda to: gc.mean([to(NAMED), to({"decoder": {"v": ONE}})]),
        r"mean: leaf \['decoder'\]\['w'\]: expected .*, received nothing; also different: \['decoder'\]\['v'\]",
    ),
    "structure, deeper": (
        lambda to: gc.mean([to(NAMED), to(other([ONE]))]),
        r"mean: leaf \['decoder'\]\['w'\]: expected the structure to have a leaf here, received a list of 1",
    ),
    "shape": (
        lambda to: gc.add_n([to(NAMED), to(other(np.ones(3, np.float32)))]),
        r"add_n: leaf \['decoder'\]\['w'\]: expected shape \(2,\), received \(3,\)",
    ),
    "dtype": (
        lambda to: gc.add_n([to(NAMED), to(other(np.ones(2, np.float16)))]),
        r"add_n: leaf \['decoder'\]\['w'\]: expected dtype float32, accumulated in float32, received float16",
    ),
    "gradient where there was none": (
        lambda to: _window(to({"decoder": {"w": None}}), to(NAMED)),
        r"mean: leaf \['decoder'\]\['w'\]: expected no gradient, as in the tree .*, received an array",
    ),
    "mean of integers": (
        lambda to: gc.mean([to(other(np.ones(2, np.int32)))]),
        r"mean: leaf \['decoder'\]\['w'\]: expected a dtype that is float or complex, received int32",
    ),
    "weight too few": (lambda to: gc.mean([to(ONE)] * 4, weights=[1, 2, 3]), "mean: expected 4 weights, received 3"),
    "weight negative": (lambda to: gc.mean([to(ONE)], weights=[-1.0]), "not negative, received -1"),
    "weight NaN": (lambda to: gc.mean([to(ONE)], weights=[float("nan")]), "a finite weight .* received nan"),
    "weight infinite": (lambda to: gc.mean([to(ONE)], weights=[float("inf")]), "a finite weight .* received inf"),
    "weight of a shape": (
        lambda to: gc.mean([to(ONE)], weights=[to(ONE)]),
        r"mean: expected a weight of shape \(\), received one of shape \(2,\)",
    ),
    "weight of a kind": (lambda to: gc.mean([to(ONE)], weights=["1"]), "a finite weight .* received str"),
    "fractional weight of integers": (
        lambda to: gc.combine(reductions.sum(), [to({"n": np.int32([1])})], weights=[0.5]),
        r"sum: leaf \['n'\]: expected an integer weight for a leaf of int32",
    ),
    "Python integer": (
        lambda to: gc.add_n([other(2**40), other(1)]),
        r"add_n: leaf \['decoder'\]\['w'\]: expected a Python integer of 32 bits .* received 1099511627776",
    ),
    "Python integer on a replica": (
        lambda to: gc.all_reduce(reductions.sum(), other(2**40), over=gc.LOCAL),
        r"all_reduce: leaf \['decoder'\]\['w'\]: expected a Python integer of 32 bits .* received 1099511627776",
    ),
    "leaf of a kind": (lambda to: gc.add_n([{"w": "text"}]), r"add_n: leaf \['w'\]: expected an array.* received str"),
    "empty list": (lambda to: gc.mean([]), "mean: expected one tree or more, received an empty list"),
    "a tree for a list": (lambda to: gc.mean(to(NAMED)), "mean: expected a list of trees, received dict"),
    "method": (lambda to: gc.add_n([to(ONE)], method="ring"), "add_n: expected a method of .* received 'ring'"),
    "order": (
        lambda to: gc.combine(reductions.sum(), [to(ONE)], order="ring"),  # pyright: ignore[reportArgumentType]
        "combine: expected order 'sequential' or 'tree', received 'ring'",
    ),
    "precision": (lambda to: reductions.sum("double"), r"sum: expected a precision of \['fast'"),  # pyright: ignore
    "reduction not called": (
        lambda to: gc.combine(reductions.mean, [to(ONE)]),  # pyright: ignore[reportArgumentType]
        r"combine: expected a Reduction, for instance reductions.mean\(\), received mean, not called",
    ),
    "state of another reduction": (
        lambda to: reductions.sum().update(reductions.mean().init(to(ONE)), to(ONE)),
        "sum: expected a SumState, received MeanState",
    ),
    "state of another tree": (
        lambda to: reductions.sum().update(reductions.sum().init(to(ONE)), to(NAMED)),
        r"sum: leaf \(root\): expected the structure to have a leaf here, received a dict of 1",
    ),
    "merge of other trees": (
        lambda to: reductions.sum().merge(reductions.sum().init(to(ONE)), reductions.sum().init(to(np.ones(3)))),
        r"sum: .*expected a state of shape \(2,\) and dtype float32, received shape \(3,\)",
    ),
    "state of another accumulator": (
        lambda to: gc.accumulate(reductions.sum(), every=2).value(reductions.sum().init(to(ONE))),
        "accumulate: expected an AccumulateState, received SumState",
    ),
    "state of another order": (
        lambda to: gc.accumulate(reductions.sum(), every=4).update(
            to(ONE), gc.accumulate(reductions.sum(), every=4, order="tree").init(to(ONE))
        ),
        "accumulate: expected a state of 1 level, received 3",
    ),
    "every zero": (lambda to: gc.accumulate(reductions.sum(), every=0), "accumulate: expected a window length .* 0"),
    "every negative": (lambda to: gc.accumulate(reductions.sum(), every=-2), "accumulate: expected .* received -2"),
    "every fractional": (lambda to: gc.accumulate(reductions.sum(), every=2.5), "accumulate: .* received 2.5"),
    "every a bool": (lambda to: gc.accumulate(reductions.sum(), every=True), "accumulate: .* received True"),
    "every from a function": (
        lambda to: gc.accumulate(reductions.sum(), every=lambda index: 0).ready(
            gc.accumulate(reductions.sum(), every=1).init(to(ONE))
        ),
        "accumulate: expected a window length .* received 0",
    ),
    "function without a bound": (
        lambda to: gc.accumulate(reductions.sum(), every=lambda index: 2, order="tree"),
        "accumulate: expected max_every",
    ),
    "collective": (
        lambda to: gc.all_reduce(reductions.sum(), to(ONE), over="data"),
        "all_reduce: expected a collective",
    ),
    "per_leaf of something else": (lambda to: reductions.per_leaf({"w": 3}), r"per_leaf: leaf \['w'\]: .* Reduction"),
    "per_leaf of another tree": (
        lambda to: gc.combine(reductions.per_leaf({"w": reductions.sum()}), [to({"v": ONE})]),
        r"per_leaf: leaf \['w'\]: expected the structure to have a leaf here, received nothing",
    ),
}


def _window(like: Any, value: Any) -> Any:
    acc = gc.accumulate(reductions.mean(), every=2)
    return acc.update(value, acc.init(like))


def traced(framework: str, function: Callable[[], Any]) -> Any:
    """Calls the function while the framework traces: errors that are known then are raised then."""
    if framework == "jax":
        import jax

        return jax.eval_shape(function)
    import tensorflow as tf

    return tf.function(function).get_concrete_function()


FRAMEWORKS = [
    "numpy",
    pytest.param("jax", marks=pytest.mark.needs("jax")),
    pytest.param("tensorflow", marks=pytest.mark.needs("tensorflow")),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bad_input(framework: str, case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(gc.GradCombineError, match=message) as caught:
        call(partial(as_arrays, framework))
    assert caught.value.operation
    assert caught.value.expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
def test_bad_input_while_tracing(framework: str, case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(gc.GradCombineError, match=message):
        traced(framework, lambda: call(partial(as_arrays, framework)))


@pytest.mark.needs("jax", "tensorflow")
def test_two_frameworks_do_not_mix() -> None:
    with pytest.raises(gc.GradCombineError, match="mean: expected arrays of one framework, received arrays of jax and"):
        gc.mean([as_arrays("jax", ONE), as_arrays("tensorflow", ONE)])
    with pytest.raises(gc.GradCombineError, match="expected arrays of one framework"):
        _window(as_arrays("tensorflow", NAMED), as_arrays("jax", NAMED))


@pytest.mark.needs("jax")
@pytest.mark.parametrize(
    ("factor", "dtype", "received"),
    [(1.5, np.float32, r"float32 of shape \(\)"), ([1, 2], np.int32, r"int32 of shape \(2,\)")],
)
def test_a_traced_length_that_is_none(factor: Any, dtype: Any, received: str) -> None:
    import jax

    acc = gc.accumulate(reductions.sum(), every=lambda index: index.astype(dtype) * np.asarray(factor, dtype))
    state = acc.init(as_arrays("jax", ONE))
    with pytest.raises(gc.GradCombineError, match=f"accumulate: expected a window length .* received {received}"):
        jax.eval_shape(acc.update, as_arrays("jax", ONE), state)


@pytest.mark.needs("jax")
def test_an_axis_that_is_not_bound() -> None:
    expected = r"jax_axis\('data'\): expected an axis that the surrounding .* binds, received unbound axis name: data"
    with pytest.raises(gc.GradCombineError, match=expected):
        gc.all_reduce(reductions.sum(), as_arrays("jax", ONE), over=gc.jax_axis("data"))
    for reduction in (reductions.sum(), reductions.sum("exact"), reductions.max()):
        with pytest.raises(gc.GradCombineError, match=expected):
            gc.merge_replicas(reduction, reduction.init(as_arrays("jax", ONE)), over=gc.jax_axis("data"))


@pytest.mark.needs("tensorflow")
def test_a_collective_in_cross_replica_context() -> None:
    import tensorflow as tf

    from tests.integrations.tensorflow.strategies import mirrored

    with mirrored(2).scope(), pytest.raises(gc.GradCombineError, match=r"replica context.*cross-replica context"):
        gc.all_reduce(reductions.sum(), tf.ones(2), over=gc.tf_replicas())


def weighted(reduction: gc.Reduction) -> Callable[[Any, Any], Any]:
    return lambda value, weight: gc.combine(reduction, [value, value], [weight, 1.0])


@pytest.mark.parametrize("weight", [np.nan, -1.0, -1e-45, np.inf])
@pytest.mark.needs("jax")
def test_checked_weights_under_jit(weight: float) -> None:
    import jax
    from jax.experimental import checkify

    run = jax.jit(checkify.checkify(weighted(reductions.checked(reductions.mean()))))
    error, _ = run(as_arrays("jax", ONE), np.float32(weight))
    assert "expected a finite weight that is not negative" in (error.get() or "")
    error, value = run(as_arrays("jax", ONE), np.float32(3))
    assert error.get() is None
    np.testing.assert_array_equal(value, ONE)


@pytest.mark.parametrize("weight", [np.nan, -1.0, -1e-45, np.inf])
@pytest.mark.needs("tensorflow")
def test_checked_weights_in_a_tf_function(weight: float) -> None:
    import tensorflow as tf

    run = tf.function(weighted(reductions.checked(reductions.mean())))
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected a finite weight"):
        run(as_arrays("tensorflow", ONE), tf.constant(weight))
    np.testing.assert_array_equal(run(as_arrays("tensorflow", ONE), tf.constant(3.0)), ONE)


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
def test_a_traced_weight_that_is_nan_makes_a_mean_nan(framework: str) -> None:
    run = weighted(reductions.mean())
    if framework == "jax":
        import jax

        value = jax.jit(run)(as_arrays("jax", ONE), np.float32(np.nan))
    else:
        import tensorflow as tf

        value = tf.function(run)(as_arrays("tensorflow", ONE), tf.constant(np.nan))
    assert np.isnan(np.asarray(value)).all()


def test_an_error_comes_back_from_another_process() -> None:
    with pytest.raises(gc.GradCombineError) as caught:
        gc.mean([{"w": np.float32([1, 2])}, {"w": np.float32([3])}])
    back = pickle.loads(pickle.dumps(caught.value))
    assert str(back) == str(caught.value) == "mean: leaf ['w']: expected shape (2,), received (1,)"
    assert (back.operation, back.path) == ("mean", "['w']")
