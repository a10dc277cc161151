"""Row-sparse leaves next to dense ones, in exchanges, and converted to dense arrays."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.reductions import row_mean, row_sum, sparse_as_dense
from gradcombine.sparse import RowSparse, add_rows, densify, row_sparse, to_dense
from gradcombine.tree import static_rows
from tests.spec import exact, modes, sparse_data
from tests.spec.data import FLOATS
from tests.spec.programs import rows
from tests.spec.selection import among
from tests.spec.sparse_data import ROWS, WIDTH, contributions

MIXED = gc.reductions.per_leaf({"embedding": row_mean(capacity=ROWS), "dense": gc.reductions.mean()})


def window(env: modes.Env, data: Any) -> Any:
    acc = gc.accumulate(MIXED, every=2)

    def step(state: Any, x: Any) -> Any:
        return acc.update(x["grads"], state, x["weight"])

    like = {"embedding": np.zeros((ROWS, WIDTH), np.float32), "dense": np.zeros((), np.float32)}
    state = env.loop(step, acc.init(like if env.loop is modes.python_loop else rows(data["grads"])[0]), data)
    return acc.value(gc.merge_replicas(MIXED, state, env.collective))


@pytest.mark.parametrize(
    "name",
    among(
        ("numpy", "jax_shard_map_scan"),
        ("numpy", "jax_scan", "jax_shard_map_scan", "tf_eager", "tf_mirrored"),
    ),
)
def test_beside_dense_leaves_over_two_windows(name: str) -> None:
    """A NaN in the first window does not affect the second one."""
    indices = np.int32([[0, 1, 2], [3, 4, 5], [5, 1, 5], [2, 1, 6]])
    values = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    values[1, 1] = np.nan
    embedding = RowSparse(indices, values, static_rows(ROWS))
    data = {
        "grads": {"embedding": embedding, "dense": np.float32([np.nan, 1, 2, 4])},
        "weight": np.float32([1, 2, 3, 1]),
    }
    mode = modes.get(name)
    n = mode.replicas[-1] if mode.replicas[-1] == 1 else 2
    for result in mode.run(window, [data] * n):
        assert result["dense"] == 2.5
        # Rows 5: (12 + 16) * 3 / 4; 1: (14 * 3 + 20) / 4; 2: 18 / 4.
        assert result["embedding"].indices.tolist() == [1, 2, 5, 6, 6, 6]
        assert result["embedding"].values[:, 0].tolist() == [15.5, 4.5, 21, 0, 0, 0]
        assert result["embedding"].values[:, 1].tolist() == [16.5, 4.75, 22.5, 0, 0, 0]


class Recorded(Collective):
    """A collective of one replica that records what it sends."""

    elements = 0

    def all_gather(self, arrays: Sequence[Any]) -> list[Any]:
        self.elements += sum(np.size(x) for x in arrays)
        return super().all_gather(arrays)

    def all_sum(self, arrays: Sequence[Any]) -> list[Any]:
        self.elements += sum(np.size(x) for x in arrays)
        return super().all_sum(arrays)


def test_replicas_exchange_rows_alone() -> None:
    over, leaf = Recorded(), row_sparse(np.int32([7, 123]), np.ones((2, 4), np.float32), rows=10**6)
    result = gc.all_reduce(row_sum(capacity=5), leaf, over=over)
    assert result.shape == (10**6, 4)
    # Five indices, five rows of four elements, the flag, the weight and the count.
    assert over.elements == 5 + 5 * 4 + 3


def test_accumulator_and_output_dtypes() -> None:
    third = np.float32(1) / np.float32(3)
    leaf = row_sparse(np.int32([1, 1]), np.full((2, 1), third, np.float32), rows=4)
    narrow = gc.all_reduce(row_sum(2, output_dtype=np.float16), leaf, over=gc.LOCAL)
    assert narrow.values.dtype == np.float16
    assert narrow.values[0, 0] == np.float16(third + third)
    ones = row_sparse(np.zeros(300, np.int32), np.ones((300, 1), ml_dtypes.bfloat16), rows=4)
    assert gc.combine(row_sum(1, output_dtype="float32"), [ones]).values.item() == 300
    assert gc.combine(row_sum(1), [ones] * 2).values.dtype == ml_dtypes.bfloat16


@given(data=contributions(4, FLOATS))
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_as_dense_has_the_values_of_the_sparse_result(name: str, data: Any) -> None:
    acc = gc.accumulate(sparse_as_dense(getattr(gc.reductions, name)()), every=4)
    values = rows(data["values"])
    state = acc.init(values[0])
    for value, weight in zip(values, data["weights"], strict=True):
        state = acc.update(value, state, weight)
    np.testing.assert_array_equal(acc.value(state), sparse_data.expected(name, data, "sequential"))


def test_sparse_and_dense_contributions_make_a_dense_sum() -> None:
    leaf, dense = row_sparse(np.int32([1, 1]), np.float32([3, 4]), rows=3), np.float32([1, 2, 3])
    for exactly in (gc.reductions.sum(), gc.reductions.sum("exact")):
        assert gc.combine(exactly, map(densify, [leaf, dense])).tolist() == [1, 9, 3]
        acc = gc.accumulate(sparse_as_dense(exactly), every=2)
        assert acc.value(acc.update(dense, acc.update(leaf, acc.init(dense)))).tolist() == [1, 9, 3]
    assert gc.combine(sparse_as_dense(gc.reductions.max()), [leaf, leaf]).tolist() == [0, 7, 0]


@pytest.mark.parametrize("order", ["sequential", "tree"])
@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (gc.reductions.sum(), [2, 11, 6]),
        (gc.reductions.mean("exact"), [0.5, 2.75, 1.5]),
        (gc.reductions.max(), [1, 7, 3]),
        (gc.reductions.last(), [1, 2, 3]),
    ],
    ids=["sum", "exact", "max", "last"],
)
def test_a_list_may_hold_both(order: Any, reduction: gc.Reduction, expected: list[float]) -> None:
    leaf, dense = row_sparse(np.int32([1, 1]), np.float32([3, 4]), rows=3), np.float32([1, 2, 3])
    terms = [{"table": leaf, "w": None}, {"table": dense, "w": None}, {"table": None, "w": None}]
    terms.append({"table": dense, "w": None})
    combined = gc.combine(sparse_as_dense(reduction), terms, order=order)
    assert combined["table"].tolist() == expected
    for wrong in ([leaf, np.float32([1, 2])], [leaf, {"a": dense}], [[leaf], [dense, dense]]):
        with pytest.raises(gc.GradCombineError):
            gc.combine(sparse_as_dense(reduction), wrong, order=order)


@given(data=contributions(1, FLOATS))
def test_dense_values_and_their_application(data: Any) -> None:
    (leaf,) = rows(data["values"])
    leaf = leaf._replace(values=np.where(np.isnan(leaf.values), np.float32(0.3), leaf.values))
    alone = leaf._replace(indices=leaf.indices[None], values=leaf.values[None])
    terms = {"values": alone, "weights": np.float32([1])}
    wanted = sparse_data.expected("sum", terms, "tree")
    np.testing.assert_array_equal(to_dense(leaf), wanted)
    table = np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    np.testing.assert_array_equal(exact.bits(add_rows(table, leaf)), exact.bits(table + wanted))
    once = gc.combine(row_sum(capacity=ROWS), [leaf])
    np.testing.assert_array_equal(exact.bits(add_rows(table, once, unique=True)), exact.bits(table + wanted))


def made_dense(env: modes.Env, leaf: Any) -> Any:
    return to_dense(leaf)


@pytest.mark.parametrize(
    "name",
    [
        "numpy",
        *(pytest.param(name, marks=pytest.mark.needs("jax")) for name in ("jax_jit", "jax_shard_map")),
        *(pytest.param(name, marks=pytest.mark.needs("tensorflow")) for name in ("tf_function", "tf_xla")),
    ],
)
def test_occurrences_are_added_in_the_canonical_tree(name: str) -> None:
    """The values are such that a chain, or a tree that starts at the end, has different bits."""
    values = np.random.default_rng(12).standard_normal((24, 1)).astype(np.float32)
    indices = np.int32([3, 1] * 11 + [1, 0])
    terms = {row: [(Fraction(float(v)), Fraction(1), False) for v in values[indices == row, 0]] for row in range(4)}
    wanted = [exact.combine("sum", terms[row], "tree") if terms[row] else 0.0 for row in range(4)]
    for row in (1, 3):
        assert wanted[row] != exact.combine("sum", terms[row], "sequential")
        assert wanted[row] != exact.combine("sum", terms[row][::-1], "tree")
    leaf = RowSparse(indices, values, static_rows(4))
    (result,) = modes.get(name).run(made_dense, [leaf])
    np.testing.assert_array_equal(exact.bits(result[:, 0]), exact.bits(np.float32(wanted)))


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_rows_of_any_shape_and_contributions_without_any(shape: tuple[int, ...]) -> None:
    ones = row_sparse(np.int32([4, 2]), np.ones((2, *shape), np.complex64) * 2j, rows=5)
    none = row_sparse(np.zeros(0, np.int32), np.zeros((0, *shape), np.complex64), rows=5)
    result = gc.combine(row_mean(3), [none, ones])
    assert result.indices.tolist() == [2, 4, 5] and result.shape == (5, *shape)
    np.testing.assert_array_equal(result.values, np.stack([np.full(shape, x) for x in (1j, 1j, 0)]))
    assert gc.combine(row_mean(3), [none]).indices.tolist() == [5, 5, 5]
    np.testing.assert_array_equal(to_dense(none), np.zeros((5, *shape)))
    np.testing.assert_array_equal(add_rows(to_dense(ones), none), to_dense(ones))


@pytest.mark.needs("tensorflow")
def test_a_table_without_rows_is_refused() -> None:
    import tensorflow as tf

    slices = tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))
    with pytest.raises(gc.GradCombineError, match=r"of shape \(rows, ...\), received float32 of shape \(\)"):
        add_rows(np.float32(3), slices)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint32])
def test_indices_of_any_integer_dtype(dtype: Any) -> None:
    leaf = row_sparse(np.array([4, 250, 4], dtype), np.ones((3, 1), np.float32), rows=251)
    result = gc.combine(row_sum(2), [leaf])
    assert result.indices.dtype == np.int32
    assert (result.indices.tolist(), result.values.ravel().tolist()) == ([4, 250], [2, 1])


@pytest.mark.parametrize("form", ["rows", pytest.param("BCOO", marks=pytest.mark.needs("jax"))])
@pytest.mark.parametrize("combine", [gc.add_n, gc.tree_sum, lambda x: gc.combine(gc.reductions.max(), x)])
def test_indices_are_not_added(form: str, combine: Any) -> None:
    leaf: Any = row_sparse(np.int32([1]), np.float32([[2]]), rows=4)
    if form == "BCOO":
        from gradcombine.integrations.jax.bcoo import to_bcoo

        leaf = to_bcoo(leaf)
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: expected dense arrays .*row_sum"):
        combine([{"w": leaf}, {"w": leaf}])
    with pytest.raises(gc.GradCombineError, match="expected dense arrays"):
        gc.reductions.sum().init(leaf)
