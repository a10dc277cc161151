"""tf.IndexedSlices from a tape to an optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.integrations.tensorflow.indexed_slices import from_indexed_slices, to_indexed_slices
from gradcombine.reductions.rows import row_mean, row_sum
from gradcombine.reductions.wrappers import sparse_as_dense
from gradcombine.sparse import densify, to_dense
from tests.integrations.tensorflow.strategies import mirrored

ROWS = 12
IDS = np.int32([[3, 3, 7], [7, 0, 3], [11, 7, 7], [3, 0, 0]])


def slices(indices: Any, rows: int | None = ROWS, width: int = 2) -> tf.IndexedSlices:
    shape = None if rows is None else tf.constant([rows, width])
    return tf.IndexedSlices(tf.ones((len(indices), width)), tf.constant(indices, tf.int64), shape)


def tape_gradient(table: tf.Variable, ids: tf.Tensor) -> tf.IndexedSlices:
    with tf.GradientTape() as tape:
        looked_up = tf.gather(table, ids)
        loss = tf.reduce_sum(looked_up * looked_up)
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)
    return gradient


@pytest.mark.sampled
@pytest.mark.parametrize("compiled", ["eager", pytest.param("function", marks=pytest.mark.full), "xla"])
def test_gradients_of_a_tape_accumulate_and_reach_the_variable(compiled: str) -> None:
    table = tf.Variable(tf.reshape(tf.range(2.0 * ROWS), (ROWS, 2)))
    start = table.numpy()
    acc = gc.accumulate(row_mean(capacity=5), every=len(IDS))

    def window() -> Any:
        state = acc.init(tf.zeros((ROWS, 2)))
        for ids, weight in zip(IDS, (1.0, 2.0, 1.0, 4.0), strict=True):
            state = acc.update(tape_gradient(table, tf.constant(ids)), state, weight)
        return acc.value(state)

    run = window if compiled == "eager" else tf.function(window, jit_compile=compiled == "xla")
    gradient = to_indexed_slices(run())
    assert gradient.indices.numpy().tolist() == [0, 3, 7, 11]
    table.scatter_sub(gradient)
    times = np.zeros(ROWS)
    for ids, weight in zip(IDS, (1, 2, 1, 4), strict=True):
        np.add.at(times, ids, weight)
    np.testing.assert_array_equal(table.numpy(), start - 2 * start * times[:, None] / 8)


@pytest.mark.parametrize("order", ["sequential", "tree"])
@pytest.mark.parametrize("reduction", [row_mean(capacity=5), gc.reductions.mean()], ids=["rows", "dense"])
def test_replicas_combine_the_gradients_of_a_tape(order: Any, reduction: gc.Reduction) -> None:
    strategy = mirrored(2)
    values = tf.reshape(tf.range(12.0), (2, 3, 2))

    @tf.function
    def gradient() -> Any:
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        rows = tf.IndexedSlices(values[rank], tf.constant(IDS)[rank], tf.constant([ROWS, 2]))
        return gc.all_reduce(reduction, rows, over=gc.tf_replicas(), order=order)

    combined = tf.nest.map_structure(lambda x: strategy.experimental_local_results(x)[0], strategy.run(gradient))
    expected = np.zeros((ROWS, 2), np.float32)
    np.add.at(expected, IDS[:2], values.numpy() / 2)
    np.testing.assert_array_equal(to_dense(combined) if reduction.name == "row_mean" else combined, expected)


@pytest.mark.full
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_states_pass_through_the_loops_of_tensorflow(order: Any) -> None:
    acc = gc.accumulate(row_mean(capacity=5), every=4, order=order)
    values = tf.reshape(tf.range(24.0), (4, 3, 2))
    like, data = {"table": tf.zeros((ROWS, 2)), "none": None}, (tf.constant(IDS), values)

    def added(state: Any, ids: Any, rows: Any = None) -> Any:
        ids, rows = ids if rows is None else (ids, rows)
        return acc.update({"table": tf.IndexedSlices(rows, ids, (ROWS, 2)), "none": None}, state)

    def while_loop() -> Any:
        def body(i: Any, state: Any) -> Any:
            return i + 1, added(state, data[0][i], values[i])

        return tf.while_loop(lambda i, _: i < 4, body, (0, acc.init(like)))[1]

    def converted() -> Any:
        state = acc.init(like)
        for i in tf.range(4):
            state = added(state, data[0][i], values[i])
        return state

    def scanned() -> Any:
        return tf.nest.map_structure(lambda x: x[-1], tf.scan(added, data, acc.init(like)))

    def reduced() -> Any:
        return tf.data.Dataset.from_tensor_slices(data).reduce(acc.init(like), lambda state, x: added(state, *x))

    wanted = np.zeros((ROWS, 2))
    np.add.at(wanted, IDS.ravel(), values.numpy().reshape(-1, 2))
    for loop in (while_loop, converted, scanned, reduced):
        result = tf.function(lambda loop=loop: acc.value(loop()), jit_compile=loop is while_loop)()
        assert result["none"] is None and result["table"].indices.numpy().tolist() == [0, 3, 7, 11, ROWS]
        np.testing.assert_array_equal(to_dense(result["table"]), wanted / 4)


def test_keras_optimizers_take_the_result() -> None:
    table = tf.Variable(tf.ones((ROWS, 2)))
    result = gc.combine(row_sum(capacity=4), [slices([3, 3]), slices([7])])
    tf.keras.optimizers.SGD(0.5).apply_gradients([(to_indexed_slices(result), table)])
    wanted = np.ones((ROWS, 2))
    wanted[3], wanted[7] = 0, 0.5
    np.testing.assert_array_equal(table.numpy(), wanted)


@pytest.mark.sampled
@pytest.mark.parametrize("run_eagerly", [True, False])
def test_slices_whose_number_is_not_known(run_eagerly: bool) -> None:
    """Up to `capacity` distinct rows fit; one more is an error at run time."""
    reduction = row_sum(capacity=3)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 2])])
    def total(indices: tf.Tensor, values: tf.Tensor) -> Any:
        leaf = from_indexed_slices(tf.IndexedSlices(values, indices), rows=ROWS, size=4)
        return tuple(gc.combine(reduction, [leaf, leaf], weights=[1, 2]))

    tf.config.run_functions_eagerly(run_eagerly)
    try:
        for indices in ([5, 1, 5, 2], [5], []):
            found, values, _ = total(tf.constant(indices, tf.int64), tf.ones((len(indices), 2)))
            distinct = sorted(set(indices))
            assert found.numpy().tolist() == distinct + [ROWS] * (3 - len(distinct))
            assert values.numpy()[:, 0].tolist() == [3.0 * indices.count(i) for i in distinct] + [0] * (
                3 - len(distinct)
            )
        with pytest.raises(gc.GradCombineError if run_eagerly else tf.errors.InvalidArgumentError):
            total(tf.constant([1, 2, 3, 1, 1], tf.int64), tf.ones((5, 2)))
    finally:
        tf.config.run_functions_eagerly(False)


def test_dense_shapes_that_differ_are_refused_and_nothing_is_written() -> None:
    reduction = row_sum(capacity=3)
    state = reduction.update(reduction.init(slices([1])), slices([1, 2]))
    before = [x.numpy() for x in (*state.value[:3], state.weight, state.count)]
    with pytest.raises(gc.GradCombineError, match=r"row_sum: expected rows of shape \(12, 2\), received \(13, 2\)"):
        reduction.update(state, slices([1], rows=13))
    with pytest.raises(gc.GradCombineError, match=r"row_sum: expected rows of shape \(12, 2\), received \(12, 3\)"):
        reduction.update(state, slices([1], width=3))
    for old, new in zip(before, (*state.value[:3], state.weight, state.count), strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    # Without a dense_shape, update takes the shape from the state, but init cannot.
    assert reduction.finalize(reduction.update(state, slices([4], rows=None))).indices.numpy().tolist() == [1, 2, 4]
    with pytest.raises(gc.GradCombineError, match="known number of rows"):
        reduction.init(slices([1], rows=None))


REFUSED = {
    "rows, or a static dense_shape": lambda: from_indexed_slices(slices([1], rows=None)),
    "13 rows": lambda: from_indexed_slices(slices([1]), rows=13),
    "at most 1 slices": lambda: from_indexed_slices(slices([1, 2]), size=1),
    "indices from 0 to 12": lambda: from_indexed_slices(slices([13])),
    "a known number of rows": lambda: to_dense(slices([1], rows=None)),
    "a static number of slices": lambda: _unknown().get_concrete_function(),
}


def _unknown() -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def convert(indices: tf.Tensor) -> Any:
        return from_indexed_slices(tf.IndexedSlices(tf.ones((tf.size(indices), 2)), indices), rows=ROWS).values

    return convert


@pytest.mark.parametrize("expected", REFUSED)
def test_refusals(expected: str) -> None:
    with pytest.raises(gc.GradCombineError, match=f"expected .*{expected}"):
        REFUSED[expected]()


def test_there_and_back() -> None:
    leaf = from_indexed_slices(slices([4, 4, 0]), size=5)
    back = to_indexed_slices(leaf)
    assert back.indices.numpy().tolist() == [4, 4, 0] and back.dense_shape.numpy().tolist() == [ROWS, 2]
    np.testing.assert_array_equal(back.values.numpy(), np.ones((3, 2)))
    np.testing.assert_array_equal(tf.convert_to_tensor(back), to_dense(leaf))


def test_slices_and_tensors_make_a_dense_sum_as_in_tensorflow() -> None:
    terms = [slices([1, 1]), tf.fill((ROWS, 2), 0.5), slices([2, 1])]
    wanted = tf.add_n([tf.convert_to_tensor(x) for x in terms])
    np.testing.assert_array_equal(gc.combine(sparse_as_dense(gc.reductions.sum()), terms), wanted)
    np.testing.assert_array_equal(gc.add_n([densify(x) for x in terms]), wanted)


@pytest.mark.full
def test_a_row_too_many_stops_a_function_that_checks() -> None:
    def run(overflow: Any) -> Any:
        reduction = row_sum(capacity=2, overflow=overflow)

        @tf.function
        def total(indices: tf.Tensor) -> tf.Tensor:
            values = tf.ones((3, 2))
            return gc.combine(reduction, [tf.IndexedSlices(values, indices, tf.constant([ROWS, 2]))]).values

        return total

    assert np.isnan(run("error")(tf.constant([1, 2, 3])).numpy()).all()
    assert run("check")(tf.constant([1, 2, 1])).numpy().tolist() == [[2, 2], [1, 1]]
    for indices in ([1, 2, 3], [1, 2, 13]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="at most 2 different rows, all in range"):
            run("check")(tf.constant(indices))


@pytest.mark.parametrize("shape", [(3, 0), (3, 2, 0)])
def test_rows_without_elements(shape: tuple[int, ...]) -> None:
    made = to_dense(gc.sparse.row_sparse(tf.constant([1, 3, 1]), tf.zeros(shape), ROWS))
    assert tuple(made.shape) == (ROWS, *shape[1:])


@pytest.mark.parametrize(("dtype", "count"), [(tf.bfloat16, 300), (tf.float16, 3000)])
def test_narrow_duplicate_rows_are_rounded_once(dtype: Any, count: int) -> None:
    table = tf.Variable(tf.zeros((ROWS, 1), dtype))

    def gradient(ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids))
        return tape.gradient(loss, [table]), 1.0

    step = AccumulatedStep(gradient, [table], lambda grads, tables: tables[0].assign(grads[0]), every=1)
    step(tf.ones(count, tf.int32))
    wanted = tf.cast(tf.constant([[0]] + [[count]] + [[0]] * (ROWS - 2)), dtype)
    np.testing.assert_array_equal(table, wanted)
    ones = tf.IndexedSlices(tf.ones((count, 1), dtype), tf.ones(count, tf.int32), tf.constant([ROWS, 1]))
    for combined in (gc.add_n([ones]), gc.combine(sparse_as_dense(gc.reductions.sum("exact")), [ones]), to_dense(ones)):
        np.testing.assert_array_equal(combined, wanted)
