"""Damaged states and invalid arrays raise one short error and leave all existing values unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions, tree
from tests.contract.kinds import LEAVES, ONE, ROWS, WEIGHT, refusal, unrefused

NO_PARTS: dict[str, Any] = {
    "None": None,
    "text": "text",
    "2**31": 2**31,
    "10**400": 10**400,
    "a float": 1.5,
    "an object": object(),
    "an empty tuple": (),
    "a list": [ONE],
    "a pair": (ONE, ONE),
    "three of three": (np.int32([1, 2, 3]),) * 3,
    "another shape": np.ones((2, 3), np.float32),
    "integers of 64 bits": np.int64([1, 2]),
    "objects": np.array([None, None]),
    "a scalar": np.uint64(2**63),
    "a constant": tree.static_dtype("float32"),
}
"""Replacements for each part of a state; most of them are invalid there."""
DAMAGED: dict[str, gc.Reduction] = {
    "mean": reductions.mean(),
    "exact": reductions.mean("exact"),
    "many": reductions.sum("exact", max_terms=2**20),
    "compensated": reductions.sum("compensated"),
    "moments": reductions.moments(),
    "rows": reductions.row_mean(4),
    "numbered": reductions.numbered(reductions.sum(), 4),
    "measured": reductions.measured(reductions.max()),
    "own": gc.Reduction(np.zeros_like, lambda s, x, w: s + w * x, np.add, lambda s: s),
}


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, tuple) else ():
        yield from places(node[key], (*path, key))


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    items = [replaced(x, path[1:], value) if i == path[0] else x for i, x in enumerate(node)]
    return type(node)(*items) if hasattr(node, "_fields") else tuple(items)


@pytest.mark.sampled
@pytest.mark.parametrize("name", DAMAGED)
def test_every_part_of_a_state_is_looked_at(name: str) -> None:
    """For every replaced part, `check_state` raises its one error, or all functions accept the state."""
    reduction = DAMAGED[name]
    value = {"rows": ROWS, "numbered": reductions.Numbered(ONE, 2)}.get(name, ONE)
    state = reduction.update(reduction.init(value), value, 2)
    uses: dict[str, Callable[[Any], Any]] = {
        "update": lambda s: reduction.update(s, value, 2),
        "merge": lambda s: reduction.merge(state, s),
        "finalize": reduction.finalize,
        "clear": reduction.clear,
        "merge_replicas": lambda s: gc.merge_replicas(reduction, s, over=gc.LOCAL),
    }

    def checked(damaged: Any, call: Callable[[Any], Any]) -> Any:
        gc.check_state(reduction, damaged)
        return call(damaged)

    happened = {
        (use, path, what): received
        for path in places(state)
        if len(path) < 5
        for what, part in NO_PARTS.items()
        for use, call in uses.items()
        if (received := refusal(lambda: checked(replaced(state, path, part), call))) not in ("", "accepted")  # noqa: B023
    }
    assert happened == {}


def test_a_state_without_its_accumulator_has_no_result() -> None:
    """Returning None would mean that the parameter has no gradient."""
    state = reductions.mean().init(ONE)
    with pytest.raises(gc.GradCombineError, match="an accumulator for contributions of float32"):
        reductions.mean().finalize(state._replace(value=None))
    with pytest.raises(gc.GradCombineError, match=r"check_state: leaf \.weight: expected .* a leaf here"):
        gc.check_state(reductions.mean(), state._replace(weight=()))


STATEFUL: dict[str, gc.Reduction] = {
    "sum": reductions.sum(),
    "exact": reductions.mean("exact"),
    "compensated": reductions.sum("compensated"),
    "moments": reductions.moments(),
    "last": reductions.last(),
    "per_leaf": reductions.per_leaf({"w": reductions.mean(), "b": reductions.max()}),
}


def bits(state: Any) -> list[bytes]:
    leaves, _ = tree.flatten(state)
    return [np.asarray(leaf).tobytes() for leaf in leaves if leaf is not None]


@pytest.mark.parametrize("order", ["sequential", "tree"])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_failed_update_leaves_the_state_whole(name: str, order: Any) -> None:
    """The leaf before the bad one is valid; its update must not become visible."""
    acc = gc.accumulate(STATEFUL[name], every=8, order=order)
    good = {"b": ONE, "w": ONE * 3}
    state = acc.update(good, acc.update(good, acc.init(good)))
    before = bits(state)
    leaves = LEAVES | {"another shape": np.ones(3, np.float32)}
    assert unrefused(lambda leaf: acc.update({"b": ONE, "w": leaf}, state), leaves) == {}
    assert unrefused(lambda weight: acc.update(good, state, weight), WEIGHT.mistakes) == {}
    assert bits(state) == before


SUM, MEAN = reductions.sum(), reductions.mean()
WINDOW = gc.accumulate(MEAN, every=2)
Call = Callable[[Any], Any]


def one(reduction: gc.Reduction) -> Call:
    return lambda leaf: gc.combine(reduction, [{"w": leaf}])


def weighted(reduction: gc.Reduction, value: Any = ONE) -> Call:
    return lambda weight: gc.combine(reduction, [value], weights=[weight])


TAKES_LEAF: dict[str, Call] = {
    "add_n": lambda x: gc.add_n([{"w": x}]),
    "exact": one(reductions.sum("exact")),
    "moments": one(reductions.moments()),
    "max": one(reductions.max()),
    "all_reduce": lambda x: gc.all_reduce(SUM, {"w": x}, over=gc.LOCAL),
    "update": lambda x: WINDOW.update({"w": x}, WINDOW.init({"w": ONE})),
}
TAKES_WEIGHT: dict[str, Call] = {
    "mean": weighted(MEAN),
    "exact": weighted(reductions.sum("exact")),
    "max": weighted(reductions.max()),
    "moments": weighted(reductions.moments()),
    "checked": weighted(reductions.checked(MEAN)),
    "per_leaf": weighted(reductions.per_leaf({"w": reductions.max()}), {"w": ONE}),
    "row_mean": weighted(reductions.row_mean(2), ROWS),
    "update": lambda w: WINDOW.update(ONE, WINDOW.init(ONE), w),
    "all_reduce": lambda w: gc.all_reduce(MEAN, ONE, over=gc.LOCAL, weight=w),
}


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("call", TAKES_LEAF)
def test_tensors_that_hold_no_dense_numbers_are_refused(call: str) -> None:
    import tensorflow as tf

    leaves = {
        "a string": tf.constant(["a"]),
        "a sparse tensor": tf.sparse.from_dense(np.eye(2, dtype=np.float32)),
        "a ragged tensor": tf.ragged.constant([[1.0], [2.0, 3.0]]),
        "a handle": tf.Variable(1.0).handle,
        "rows of an unknown number": tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])),
        "an unknown shape": tf.TensorSpec(None, tf.float32),
        "a dataset": tf.data.Dataset.range(2),
    }
    assert unrefused(TAKES_LEAF[call], leaves) == {}


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("reduction", [reductions.sum(), reductions.mean("exact")])
def test_an_unknown_shape_names_operation_and_leaf(reduction: gc.Reduction) -> None:
    import tensorflow as tf

    spec = {"layer": {"w": tf.TensorSpec([None, 2], tf.float32)}}
    with pytest.raises(gc.GradCombineError, match=r"leaf \['layer'\]\['w'\]: expected a shape that is known") as caught:
        reduction.init(spec)
    assert caught.value.operation == reduction.name


@pytest.mark.needs("jax")
@pytest.mark.parametrize("call", TAKES_WEIGHT)
def test_jax_arrays_that_are_no_weights_are_refused(call: str) -> None:
    import jax
    from jax.experimental import sparse

    weights = {
        "a key": jax.random.key(0),
        "a spec": jax.ShapeDtypeStruct((), np.float32),
        "a BCOO": sparse.empty((2, 2)),
        "a complex number": jax.numpy.complex64(1),
    }
    assert unrefused(TAKES_WEIGHT[call], weights) == {}


def test_what_a_generator_raises_comes_through() -> None:
    def batches() -> Iterator[Any]:
        yield ONE
        raise LookupError("the data")

    with pytest.raises(LookupError, match="the data"):
        gc.add_n(batches())


def test_subclasses_of_numbers_are_numbers() -> None:
    class Count(IntEnum):
        TWO = 2

    assert gc.mean([ONE, ONE * 4], weights=[Count.TWO, 1]).tolist() == [2, 2]
    assert gc.add_n([Count.TWO, 3]) == 5


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
@pytest.mark.parametrize("make", [reductions.sum, reductions.mean, reductions.product])
def test_floats_stay_floats(make: Any, dtype: str) -> None:
    """An integer accumulator or result would truncate them silently."""
    for setting in ("dtype", "output_dtype"):
        result = gc.combine(make(**{setting: dtype}), [np.float32([1.5])])
        assert result.dtype == np.float32 and result.tolist() == [1.5]


def test_merged_replicas_take_pythons_numbers() -> None:
    """A state restored from JSON holds Python numbers."""
    for reduction in (
        reductions.sum(),
        reductions.mean("exact"),
        gc.Reduction(np.zeros_like, lambda s, x, w: s + w * x, np.add, lambda s: s),
    ):
        state = reduction.update(reduction.init(np.float32(0)), np.float32(2))
        leaves, structure = tree.flatten(state)
        plain = tree.unflatten(structure, [np.asarray(x).item() for x in leaves])
        assert reduction.finalize(gc.merge_replicas(reduction, plain, over=gc.LOCAL)) == 2


@pytest.mark.needs("jax")
def test_traced_arrays_have_no_bits_to_compare() -> None:
    import jax

    from gradcombine.verify import compare, explain

    for call in (lambda x: compare(x, x), lambda x: explain([x, x], x)):
        with pytest.raises(gc.GradCombineError, match="a traced one"):
            jax.eval_shape(call, ONE)


def test_objects_are_saved_in_no_state_file(tmp_path: Any) -> None:
    own = gc.Reduction(lambda x: np.array([{}, None]), lambda s, x, w: s, lambda a, b: a, lambda s: s)
    with pytest.raises(gc.GradCombineError):
        gc.statefile.save(tmp_path / "window.npz", own, own.init(np.float32(0)))
