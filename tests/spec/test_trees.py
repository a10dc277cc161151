"""Trees: None leaves, all container types, specs as ``like``, several reductions in one tree, states as trees."""

from __future__ import annotations

import dataclasses
import io
from collections import OrderedDict, defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import chex
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions, tree
from gradcombine.errors import GradCombineError
from gradcombine.verify import check_reduction
from tests.spec import exact, modes
from tests.spec.programs import REDUCTIONS, rows
from tests.spec.selection import cases, communicating

needs_jax = pytest.mark.needs("jax")
needs_tensorflow = pytest.mark.needs("tensorflow")
WAYS = reductions.per_leaf(
    {"grads": reductions.mean(), "loss": reductions.mean(), "tokens": reductions.sum(), "amax": reductions.max()}
)


def in_one_pass(env: modes.Env, data: Any) -> Any:
    acc = gc.accumulate(WAYS, every=2)
    values = rows(data)
    state = acc.init(values[0])
    for value in values:
        state = acc.update(value, state, value["tokens"])
    return acc.value(gc.merge_replicas(WAYS, state, env.collective))


@pytest.mark.full
def test_several_reductions_in_one_tree(replicated: modes.Mode) -> None:
    """Token-weighted gradients and loss, summed token counts and maximum amax of 2 microbatches on 2 replicas."""
    tokens = np.int32([[1, 3], [0, 4]])
    grads = np.float32([[[8, 16], [0, 8]], [[np.nan, np.nan], [4, -4]]])
    loss = np.float32([[2, 4], [np.inf, 6]])
    amax = np.float32([[1, 9], [99, 5]])
    data = [
        {"grads": {"w": grads[r], "frozen": None}, "loss": loss[r], "tokens": tokens[r], "amax": amax[r]}
        for r in range(2)
    ]
    for result in replicated.run(in_one_pass, data):
        assert result["grads"]["frozen"] is None
        np.testing.assert_array_equal(result["grads"]["w"], np.float32([3, 3]))
        assert result["loss"] == np.float32((2 * 1 + 4 * 3 + 6 * 4) / 8)
        assert result["tokens"] == 8
        assert result["tokens"].dtype == np.int32
        assert result["amax"] == 9


@communicating
def test_none_in_some_trees_adds_nothing(mode: modes.Mode) -> None:
    """A leaf that is None in one microbatch counts as a zero gradient; None in all microbatches stays None."""
    data = {"a": np.float32([2, 4]), "b": np.float32([6, 8]), "none": None}
    (result,) = mode.run(_partly_none, [data])
    np.testing.assert_array_equal(result["list"]["w"], np.float32([3, 4]))
    np.testing.assert_array_equal(result["time"]["w"], np.float32([3, 4]))
    assert result["list"]["none"] is result["time"]["none"] is None


def _partly_none(env: modes.Env, data: Any) -> Any:
    first, second = {"w": None, "none": data["none"]}, {"w": data["b"], "none": None}
    acc = gc.accumulate(reductions.mean(), every=2)
    state = acc.init({"w": data["a"], "none": None})
    for value in (first, second):
        state = acc.update(value, state)
    return {"list": gc.mean([first, second]), "time": acc.value(state)}


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: {"b": b, "a": a},
        lambda a, b: OrderedDict([("z", a), ("a", b)]),
        lambda a, b: defaultdict(list, {"z": a, "a": b}),
        lambda a, b: [a, (b,)],
        lambda a, b: Point(a, {"y": b}),
        lambda a, b: {1: a, 0: [b, None, []]},
        lambda a, b: (a, b),
    ],
)
def test_containers_keep_their_kind_and_order(make: Any) -> None:
    total = gc.add_n([make(np.float32([1]), np.float32([2])), make(np.float32([10]), np.float32([20]))])
    expected = make(np.float32([11]), np.float32([22]))
    assert type(total) is type(expected)
    assert repr(total) == repr(expected)


def test_paths_of_leaves() -> None:
    _, structure = tree.flatten({"layer": [Point(1.0, None)], "bias": 2.0})
    assert list(structure.paths()) == ["['bias']", "['layer'][0].x", "['layer'][0].y"]


@needs_jax
def test_registered_jax_nodes_with_static_fields() -> None:
    import jax
    import jax.numpy as jnp

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        weight: Any
        bias: Any
        name: str = dataclasses.field(metadata={"static": True}, default="dense")

    one, two = Layer(jnp.ones(2), None), Layer(jnp.full(2, 2.0), None)
    total = gc.add_n([{"layer": one}, {"layer": two}])
    chex.assert_trees_all_equal(total, {"layer": Layer(jnp.full(2, 3.0), None)})
    acc = gc.accumulate(reductions.mean(), every=2)
    state = acc.update(two, jax.jit(acc.update)(one, acc.init(one)))
    chex.assert_trees_all_equal(acc.value(state), Layer(jnp.full(2, 1.5), None))
    with pytest.raises(gc.GradCombineError, match="add_n: leaf"):
        gc.add_n([one, Layer(jnp.ones(2), None, name="other")])


@chex.dataclass(frozen=True)
class Dense:
    weight: Any
    bias: Any


@pytest.mark.full
@needs_jax
def test_the_laws_hold_for_gradients_in_a_dataclass() -> None:
    check_reduction(reductions.mean(), [Dense(weight=np.zeros(2, np.float32), bias=None)], examples=3)


@needs_jax
def test_float0_passes_through_in_its_place() -> None:
    import jax

    def loss(params: Any) -> Any:
        return params["w"].sum() * 2

    params = {"w": jax.numpy.ones(2), "steps": jax.numpy.ones(3, int)}
    grads = jax.grad(loss, allow_int=True)(params)
    acc = gc.accumulate(reductions.mean(), every=2)
    for value in (gc.mean([grads, grads]), acc.value(acc.update(grads, acc.init(grads)))):
        assert value["steps"].dtype == jax.dtypes.float0
        assert value["steps"].shape == (3,)
        np.testing.assert_array_equal(value["w"], np.float32([2, 2]))


@needs_jax
@pytest.mark.parametrize("make", [reductions.sum, partial(reductions.sum, "exact"), reductions.max])
def test_float0_is_no_gradient_wherever_it_stands(make: Any) -> None:
    import jax

    absent, present = np.zeros(2, jax.dtypes.float0), jax.numpy.float32([1, 2])
    for values in ([absent, present], [None, absent, present], [present, absent]):
        np.testing.assert_array_equal(gc.combine(make(), values), present)


@needs_jax
@needs_tensorflow
def test_like_may_be_specs() -> None:
    import jax
    import tensorflow as tf

    acc = gc.accumulate(reductions.mean(), every=2)
    for like, value in (
        (jax.ShapeDtypeStruct((2,), np.float32), jax.numpy.ones(2)),
        (tf.TensorSpec([2], tf.float32), tf.ones(2)),
        (tf.Variable([0.0, 0.0]), tf.ones(2)),
        (np.empty(2, np.float32), np.ones(2, np.float32)),
    ):
        made = acc.init({"w": like, "none": None})
        np.testing.assert_array_equal(acc.value(acc.update({"w": value, "none": None}, made))["w"], np.ones(2))


@needs_tensorflow
def test_a_module_attribute_is_an_ordinary_tree() -> None:
    """tf.Module and Keras wrap the dicts and lists that they hold."""
    import tensorflow as tf

    module = tf.Module()
    module.grads = {"w": [tf.ones(2)]}
    total = gc.add_n([module.grads, {"w": [tf.ones(2)]}])
    assert type(total) is dict
    np.testing.assert_array_equal(total["w"][0], [2, 2])


@needs_tensorflow
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_state_may_be_a_module_attribute(name: str) -> None:
    """A tf.Module wraps tuples in proxies, and makes copies of their type with variables."""
    import tensorflow as tf

    acc = gc.accumulate(REDUCTIONS[name], every=4, order="tree")
    expected = acc.init([tf.zeros(2), (tf.zeros(1),)])
    module = tf.Module()
    module.state, module.grads = expected, [tf.constant([1.0, 2.0]), (tf.constant([3.0]),)]
    for _ in range(2):
        expected = acc.update([tf.constant([1.0, 2.0]), (tf.constant([3.0]),)], expected)
        module.state = acc.update(module.grads, module.state)
        chex.assert_trees_all_equal(acc.value(module.state), acc.value(expected))
    module.variables_of = tf.nest.map_structure(tf.Variable, module.state)
    chex.assert_trees_all_equal(acc.value(module.variables_of), acc.value(expected))


@needs_tensorflow
def test_states_of_a_saved_model_are_other_types(tmp_path: Path) -> None:
    import tensorflow as tf

    acc = gc.accumulate(reductions.mean(), every=2)
    state, module = acc.init(tf.zeros(2)), tf.Module()
    module.update = tf.function(acc.update)
    module.update.get_concrete_function(tf.zeros(2), state)
    tf.saved_model.save(module, str(tmp_path))
    updated = tf.saved_model.load(str(tmp_path)).update(tf.ones(2), state)
    with pytest.raises(GradCombineError, match=r"received AccumulateState of 3, another type.*pack_sequence_as"):
        acc.value(updated)
    with pytest.raises(GradCombineError, match=r"received MeanState of 4, another type.*pack_sequence_as"):
        reductions.mean().finalize(updated.levels[0])
    again = tf.nest.pack_sequence_as(state, tf.nest.flatten(updated))
    np.testing.assert_array_equal(acc.value(again), [1, 1])


@needs_jax
@pytest.mark.parametrize("name", REDUCTIONS)
def test_states_are_jax_trees(name: str) -> None:
    import jax

    acc = gc.accumulate(REDUCTIONS[name], every=4, order="tree")
    value = {"w": jax.numpy.asarray([1.0, 2.0]), "none": None}
    state = acc.update(value, acc.init(value))
    leaves, definition = jax.tree.flatten(state)
    again = jax.tree.unflatten(definition, leaves)
    assert type(again.levels.stacked) is type(state.levels.stacked)
    chex.assert_trees_all_equal(acc.value(again), value)
    shapes = jax.eval_shape(acc.update, value, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)


@needs_tensorflow
def test_states_are_tf_nests() -> None:
    import tensorflow as tf

    acc = gc.accumulate(reductions.mean(), every=3)
    state = acc.init({"w": tf.zeros(2, tf.bfloat16), "none": None})
    again = tf.nest.map_structure(tf.identity, state)
    tf.nest.assert_same_structure(state, again)


LOOPED = REDUCTIONS | {
    "exact": reductions.mean("exact"),
    "exact, many": reductions.sum("exact", max_terms=2**20),
    "compensated": reductions.mean("compensated"),
    "moments": reductions.moments(),
    "per_leaf": reductions.per_leaf({"w": reductions.mean("exact"), "none": reductions.sum()}),
    "adasum": reductions.adasum(),
}
# Orthogonal vectors: their adasum is the sum, and its dot products are exact in any order of summation.
LOOPED_VALUES = {"adasum": [[1.0, 0.0], [0.0, 2.0], [2.0, -1.0]]}


LOOPS, ORDERS = ("converted", "while_loop", "while_loop, compiled"), ("sequential", "tree")
COMPILED = ("mean", "last", "exact")
QUICK_LOOPS = [
    *((name, "converted", "sequential") for name in LOOPED if name != "per_leaf"),
    *((name, "while_loop, compiled", "tree") for name in COMPILED),
]


@pytest.mark.sampled
@needs_tensorflow
@pytest.mark.parametrize(("name", "loop", "order"), cases(QUICK_LOOPS, LOOPED, LOOPS, ORDERS, pairwise=True))
def test_states_pass_through_the_loops_of_tensorflow(name: str, loop: str, order: Any) -> None:
    """Includes leaves without gradients, result dtypes, digits and several levels; with and without XLA."""
    import tensorflow as tf

    acc = gc.accumulate(LOOPED[name], every=4, order=order)
    like = {"w": tf.zeros(2), "none": None}
    values = tf.constant(LOOPED_VALUES.get(name, [[1.0, 2.0], [3.0, 5.0], [2.0, 8.0]]))

    def added(state: Any, w: Any) -> Any:
        return acc.update({"w": w, "none": None}, state)

    def while_loop(values: Any) -> Any:
        def body(i: Any, state: Any) -> Any:
            return i + 1, added(state, values[i])

        return acc.value(tf.while_loop(lambda i, _: i < 3, body, (0, acc.init(like)))[1])

    def converted(values: Any) -> Any:
        state = acc.init(like)
        for i in tf.range(3):
            state = added(state, values[i])
        return acc.value(state)

    expected = gc.combine(LOOPED[name], [{"w": w, "none": None} for w in values.numpy()], order=order)
    function = converted if loop == "converted" else while_loop
    received = tf.function(function, jit_compile=loop.endswith("compiled"))(values)
    tf.nest.map_structure(np.testing.assert_array_equal, received["w"], expected["w"])


@pytest.mark.full
@needs_tensorflow
def test_states_pass_through_scan_foldl_and_datasets() -> None:
    import tensorflow as tf

    acc = gc.accumulate(reductions.mean(), every=4, order="tree")
    like, values = {"w": tf.zeros(2, tf.bfloat16), "none": None}, tf.constant([[1, 2], [3, 5]], tf.bfloat16)

    def added(state: Any, w: Any) -> Any:
        return acc.update({"w": w, "none": None}, state)

    @tf.function
    def loops() -> Any:
        scanned = tf.scan(added, values, acc.init(like))
        folded = tf.foldl(added, values, acc.init(like))
        reduced = tf.data.Dataset.from_tensor_slices(values).reduce(acc.init(like), added)
        return [acc.value(state) for state in (tf.nest.map_structure(lambda x: x[-1], scanned), folded, reduced)]

    for value in loops():
        assert value["none"] is None
        assert value["w"].dtype == tf.bfloat16 and value["w"].numpy().tolist() == [2.0, 3.5]


@needs_jax
@needs_tensorflow
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_a_window_saved_in_one_framework_resumes_in_another(order: Any) -> None:
    import jax.numpy as jnp
    import tensorflow as tf

    rng = np.random.default_rng(0)
    grads = [{"w": rng.normal(size=3).astype(np.float32), "b": None} for _ in range(8)]
    weights = rng.integers(1, 9, 8)
    acc = gc.accumulate(reductions.mean(), every=8, order=order)
    converts = [np.asarray, jnp.asarray, tf.constant]
    state = acc.init(grads[0])
    for i, (value, weight) in enumerate(zip(grads, weights, strict=True)):
        convert = converts[i * 3 // 8]
        state = acc.update({"w": convert(value["w"]), "b": None}, _saved_and_loaded(state, convert), weight=weight)
    unbroken = gc.combine(reductions.mean(), grads, weights, order)
    np.testing.assert_array_equal(exact.bits(np.asarray(acc.value(state)["w"])), exact.bits(unbroken["w"]))


def _saved_and_loaded(state: Any, convert: Any) -> Any:
    leaves, structure = tree.flatten(state)
    file = io.BytesIO()
    np.savez(file, **{str(i): np.asarray(leaf) for i, leaf in enumerate(leaves) if leaf is not None})
    file.seek(0)
    loaded = np.load(file)
    return tree.unflatten(structure, [None if x is None else convert(loaded[str(i)]) for i, x in enumerate(leaves)])


@needs_jax
def test_a_node_without_children_is_no_leaf() -> None:
    """Example: a module with static fields only."""
    import equinox as eqx

    nodes = [eqx.nn.Identity(), np.float32(1)]
    leaves, structure = tree.flatten(nodes)
    assert leaves == [1]
    assert isinstance(tree.unflatten(structure, leaves)[0], eqx.nn.Identity)
