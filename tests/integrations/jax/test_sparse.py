"""BCOO gradients, and gradients of embedding tables as rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, sparse
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax.bcoo import from_bcoo, to_bcoo, value_and_row_grad
from gradcombine.reductions.rows import row_mean, row_sum
from gradcombine.sparse import RowSparse, add_rows, row_sparse, to_dense
from gradcombine.tree import static_rows
from tests.integrations.jax.replicas import mesh

ROWS, WIDTH = 10, 3


def bcoo(indices: Any) -> sparse.BCOO:
    values = jnp.arange(len(indices) * WIDTH, dtype=jnp.float32).reshape(-1, WIDTH)
    return sparse.BCOO((values, jnp.int32(indices)[:, None]), shape=(ROWS, WIDTH))


@pytest.mark.full
def test_bcoo_there_and_back() -> None:
    matrix = bcoo([4, 9, 4, 10])
    leaf = from_bcoo(matrix)
    assert leaf.shape == (ROWS, WIDTH)
    np.testing.assert_array_equal(to_bcoo(leaf).todense(), matrix.todense())
    np.testing.assert_array_equal(to_dense(matrix), matrix.todense())


@pytest.mark.full
@pytest.mark.parametrize("compile_", [pytest.param(lambda f: f, id="eager", marks=pytest.mark.full), jax.jit])
def test_bcoo_contributions(compile_: Any) -> None:
    terms = [bcoo([4, 9]), bcoo([9, 10]), bcoo([9, 4])]
    result = compile_(lambda xs: gc.combine(row_sum(capacity=3), xs))(terms)
    wanted = sum(np.asarray(x.todense()) for x in terms)
    assert result.indices.tolist() == [4, 9, 10]
    np.testing.assert_array_equal(to_bcoo(result).todense(), wanted)


@pytest.mark.parametrize("shape", [{"n_batch": 1, "n_dense": 0}, {"n_dense": 0}])
def test_another_bcoo_is_refused(shape: Any) -> None:
    matrix = sparse.empty((ROWS, WIDTH), **shape)
    with pytest.raises(gc.GradCombineError, match="expected a BCOO of rows"):
        row_sum(capacity=3).init(matrix)
    with pytest.raises(gc.GradCombineError, match="expected a BCOO"):
        from_bcoo(matrix)


def test_what_is_no_bcoo_is_refused() -> None:
    leaf: Any = np.ones(3)
    with pytest.raises(gc.GradCombineError, match="expected a BCOO, received ndarray"):
        from_bcoo(leaf)


def loss(embedded: Any, params: Any, targets: Any) -> Any:
    return jnp.sum((embedded["e"] @ params["w"] - targets) ** 2), embedded["e"].shape


# Small integers: sums are exact in any order.
TABLES = {"e": jnp.arange(ROWS * WIDTH, dtype=jnp.float32).reshape(ROWS, WIDTH) % 5}
PARAMS = {"w": jnp.float32([1, -2, 1])}
BATCH_IDS = jnp.int32([[[3, 3], [7, 0]], [[0, 9], [9, 9]], [[1, 7], [7, 7]], [[9, 9], [0, 3]]])
TARGETS = jnp.arange(16, dtype=jnp.float32).reshape(4, 2, 2)


def dense_gradient(ids: Any, targets: Any) -> Any:
    return jax.grad(lambda t, p: loss({"e": t["e"][ids]}, p, targets)[0], argnums=(0, 1))(TABLES, PARAMS)


TABLE, ROW_IDS = {"w": np.ones((ROWS, WIDTH), np.float32)}, {"w": np.int32([1, 2])}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_bcoo(3), "to_bcoo: expected a RowSparse, received int"),
        (lambda: value_and_row_grad(3), "value_and_row_grad: expected a function as loss, received 3"),
        (lambda: value_and_row_grad(max, has_aux="yes"), "value_and_row_grad: expected True or False as has_aux"),
        (
            lambda: summed_rows(TABLE, {"v": ROW_IDS["w"]}),
            r"leaf \['w'\]: expected the structure to have a leaf here",
        ),
        (lambda: summed_rows(TABLE, {"w": None}), r"leaf \['w'\]: expected an array or a number, received None"),
        (lambda: summed_rows(TABLE, {"w": [1, 2]}), r"leaf \['w'\]: expected the structure to have a leaf here"),
        (
            lambda: summed_rows(TABLE, {"w": np.ones(2)}),
            r"leaf \['w'\]: expected integers as ids .* float64 of shape",
        ),
        (lambda: summed_rows({"w": np.ones(3, int)}, ROW_IDS), r"leaf \['w'\]: expected a table of floats .* int64"),
        (lambda: summed_rows({"w": 1.0}, ROW_IDS), r"leaf \['w'\]: expected a table of .* with a first axis of rows"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(gc.GradCombineError, match=message):
        call()


def summed_rows(tables: Any, ids: Any) -> Any:
    return value_and_row_grad(lambda embedded, factor: factor * embedded["w"].sum())(tables, ids, jnp.float32(1))


@pytest.mark.full
def test_row_gradients_are_those_of_the_dense_table() -> None:
    grad = value_and_row_grad(loss, has_aux=True)
    (value, aux), (row_grads, rest) = grad(TABLES, {"e": BATCH_IDS[0]}, PARAMS, TARGETS[0])
    dense, params = dense_gradient(BATCH_IDS[0], TARGETS[0])
    assert value == loss({"e": TABLES["e"][BATCH_IDS[0]]}, PARAMS, TARGETS[0])[0] and aux == (2, 2, WIDTH)
    assert row_grads["e"].indices.tolist() == BATCH_IDS[0].ravel().tolist()
    np.testing.assert_array_equal(to_dense(row_grads["e"]), dense["e"])
    np.testing.assert_array_equal(rest["w"], params["w"])


@pytest.mark.full
def test_padding_looks_up_zeros_and_has_no_gradient() -> None:
    ids = jnp.int32([[ROWS, 2], [2, ROWS]])
    (value, _), (row_grads, _) = value_and_row_grad(loss, has_aux=True)(TABLES, {"e": ids}, PARAMS, TARGETS[0])
    padded = jnp.where((ids < ROWS)[..., None], TABLES["e"][jnp.minimum(ids, ROWS - 1)], 0)
    assert value == loss({"e": padded}, PARAMS, TARGETS[0])[0]
    assert gc.combine(row_sum(capacity=2), [row_grads])["e"].indices.tolist() == [2, ROWS]


@pytest.mark.full
def test_ids_out_of_range_are_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="row_sparse: expected indices from 0 to 10, received 11"):
        value_and_row_grad(loss, has_aux=True)(TABLES, {"e": jnp.int32([[11, 2], [0, 0]])}, PARAMS, TARGETS[0])


REDUCTION = gc.reductions.per_leaf((row_mean(capacity=5), gc.reductions.mean()))
GRAD = value_and_row_grad(loss, has_aux=True)


def _contribution(ids: Any, targets: Any, params: Any = PARAMS) -> Any:
    return GRAD(TABLES, {"e": ids}, params, targets)[1]


def _wanted() -> Any:
    each = [dense_gradient(ids, targets) for ids, targets in zip(BATCH_IDS, TARGETS, strict=True)]
    return jax.tree.map(lambda *xs: sum(np.asarray(x) for x in xs) / 4, *each)


def _check(result: Any) -> None:
    dense, params = _wanted()
    assert result[0]["e"].indices.tolist() == [0, 1, 3, 7, 9]
    np.testing.assert_array_equal(to_dense(result[0]["e"]), dense["e"])
    np.testing.assert_array_equal(result[1]["w"], params["w"])


@pytest.mark.full
def test_microbatches_in_a_scan() -> None:
    acc = gc.accumulate(REDUCTION, every=4)

    def run(batch_ids: Any, targets: Any) -> Any:
        state = acc.init((TABLES, PARAMS))
        return acc.value(
            jax.lax.scan(lambda s, x: (acc.update(_contribution(*x), s), None), state, (batch_ids, targets))[0]
        )

    _check(jax.jit(run)(BATCH_IDS, TARGETS))


@pytest.mark.full
def test_no_array_of_the_size_of_the_table_is_made() -> None:
    table = jax.ShapeDtypeStruct((10**6, WIDTH), np.float32)

    def step(table: Any, ids: Any, targets: Any) -> Any:
        _, (row_grads, _) = GRAD({"e": table}, {"e": ids}, PARAMS, targets)
        return add_rows(table, gc.combine(row_mean(capacity=4), [row_grads, row_grads])["e"])

    args = (table, *(jax.ShapeDtypeStruct((2, 2), dtype) for dtype in (np.int32, np.float32)))
    memory = jax.jit(step, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 10**6 * WIDTH * 4
    assert memory.temp_size_in_bytes < 10**5


@pytest.mark.full
def test_replicas_under_check_vma() -> None:
    """The table is replicated; the gradients of its rows vary over the replicas."""

    def body(batch_ids: Any, targets: Any) -> Any:
        varying = jax.lax.pcast(PARAMS, "data", to="varying")
        contribution = _contribution(batch_ids[0], targets[0], varying)
        return gc.all_reduce(REDUCTION, contribution, over=gc.jax_axis("data"))

    _check(jax.jit(jax.shard_map(body, mesh=mesh(4, "data"), in_specs=P("data"), out_specs=P()))(BATCH_IDS, TARGETS))


def test_a_row_too_many_reaches_checkify() -> None:
    reduction = row_sum(capacity=2, overflow="check")

    def total(indices: Any) -> Any:
        leaf = RowSparse(indices, jnp.ones((3, 1)), static_rows(ROWS))
        return gc.combine(reduction, [leaf]).values

    checked = jax.jit(checkify.checkify(total))
    error, values = checked(jnp.int32([1, 1, 2]))
    assert error.get() is None and values.ravel().tolist() == [2, 1]
    for indices in ([1, 2, 3], [1, 2, ROWS + 1]):
        assert "at most 2 different rows, all in range" in checked(jnp.int32(indices))[0].get()


def test_a_leaf_passes_through_transformations_with_its_shape() -> None:
    leaf = row_sparse(jnp.int32([1]), jnp.ones((1, WIDTH)), rows=ROWS)
    assert jax.jit(lambda x: x)(leaf).shape == (ROWS, WIDTH)
    shapes: list[Any] = []
    jax.jit(lambda x: shapes.append(x.shape))(leaf)
    assert shapes == [(ROWS, WIDTH)]
