"""Row-sparse reductions at their limits: capacity, index range, mismatched structures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine.reductions import row_mean, row_sum
from gradcombine.sparse import RowSparse, add_rows, row_sparse, to_dense
from gradcombine.tree import static_rows
from tests.spec import modes
from tests.spec.selection import among, in_modes

ROWS = 9
EAGER = ("numpy", "jax_eager", "tf_eager")
COMPILED = ("jax_jit", "jax_scan", "jax_vmap", "jax_shard_map", "tf_function", "tf_xla", "tf_mirrored")
QUICK = ("numpy", "tf_eager", "jax_jit", "tf_function")
TWO = row_sum(capacity=2)


def leaf(*indices: int, rows: int = ROWS, width: int = 2) -> RowSparse:
    """Rows of ones, with unvalidated indices."""
    values = np.ones((len(indices), width), np.float32)
    return RowSparse(np.int32(indices), values, static_rows(rows))


def two_updates(env: modes.Env, data: Any) -> Any:
    state = TWO.update(TWO.init(data[0]), data[0])
    result = TWO.finalize(TWO.update(state, data[1]))
    return {"rows": result, "dense": to_dense(result), "added": add_rows(to_dense(data[0]), result)}


FULL = [leaf(3, 3, 8), leaf(8, 8, 3)]
TOO_MANY = r"row_sum: expected at most 2 different rows .*, received 3"
OUTSIDE = r"row_sum: expected indices from 0 to 9, received (-1|10)"
LOST: dict[str, tuple[list[RowSparse], str]] = {
    "in one": ([leaf(3, 3, 8), leaf(1, 4, 7)], TOO_MANY),
    "together": ([leaf(3, 3, 8), leaf(8, 4, 4)], TOO_MANY),
    "negative": ([leaf(3, 3, 8), leaf(8, -1, 3)], OUTSIDE),
    "past the end": ([leaf(9, 9, 9), leaf(10, 9, 9)], OUTSIDE),
}


@pytest.mark.parametrize("name", among(QUICK, EAGER + COMPILED))
def test_as_many_rows_as_there_is_room_for(name: str) -> None:
    (result,) = modes.get(name).run(two_updates, [FULL])
    assert result["rows"].indices.tolist() == [3, 8]
    assert result["rows"].values.tolist() == [[3, 3], [3, 3]]
    assert result["dense"][:, 0].tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 3]
    assert result["added"][:, 1].tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 4]


@pytest.mark.parametrize(
    ("case", "name"), in_modes(dict.fromkeys(LOST, ("numpy", "tf_eager")) | {"past the end": EAGER}, EAGER)
)
def test_lost_rows_raise_where_they_are_known(name: str, case: str) -> None:
    data, message = LOST[case]
    with pytest.raises(gc.GradCombineError, match=message):
        modes.get(name).run(two_updates, [data])


@pytest.mark.parametrize("case", LOST)
@pytest.mark.parametrize("name", among(QUICK, COMPILED))
def test_lost_rows_make_compiled_results_nan(name: str, case: str) -> None:
    """All rows become NaN, and so does any array that they are added to, even if the only index was out of range."""
    (result,) = modes.get(name).run(two_updates, [LOST[case][0]])
    assert np.isnan(result["rows"].values).all()
    assert np.isnan(result["dense"]).any() and np.isnan(result["added"]).any()


def test_lost_rows_stay_lost_until_the_state_is_cleared() -> None:
    state = TWO.update(TWO.init(FULL[0]), FULL[0])
    (table,) = [state.value]
    lost = state._replace(value=table._replace(lost=np.int32(1)))
    for later in (TWO.update(lost, FULL[1]), TWO.merge(lost, state), TWO.merge(state, lost)):
        assert np.isnan(TWO.finalize(later).values).all()
    cleared = TWO.update(TWO.clear(lost), FULL[0])
    assert TWO.finalize(cleared).values.tolist() == [[2, 2], [1, 1]]


WRONG = {
    "more columns": (leaf(1, width=3), r"expected rows of shape \(9, 2\), received \(9, 3\)"),
    "more rows": (leaf(1, rows=10), r"expected rows of shape \(9, 2\), received \(10, 2\)"),
    "dense": (np.zeros((9, 2), np.float32), "expected a RowSparse.*sparse_as_dense.*, received a dense array"),
    "float64": (leaf(1)._replace(values=np.ones((1, 2))), "expected dtype float32, accumulated in float32"),
    "float indices": (leaf(1)._replace(indices=np.ones(1)), r"expected integer indices of shape \(n,\)"),
    "fewer values": (leaf(1, 2)._replace(values=np.ones((1, 2), np.float32)), "expected values of 2 rows"),
    "another structure": ([leaf(1)], r"leaf \(root\): expected the structure"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_match_is_refused_and_the_state_stays_whole(case: str) -> None:
    state = TWO.update(TWO.init({"e": FULL[0], "other": None}), {"e": FULL[0], "other": None})
    before = [np.array(x) for x in (*state.value["e"], state.weight, state.count)]
    wrong, message = WRONG[case]
    where = r"row_sum: leaf \['e'\]: " if case != "another structure" else ""
    with pytest.raises(gc.GradCombineError, match=where + message if where else "expected the structure"):
        TWO.update(state, {"e": wrong, "other": None})
    for old, new in zip(before, (*state.value["e"], state.weight, state.count), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_gradient_where_none_was_announced_is_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="expected no gradient, as in the tree that the state was made for"):
        TWO.update(TWO.init({"e": None}), {"e": leaf(1)})


def test_states_of_other_capacities_and_reductions_are_refused() -> None:
    state = TWO.init(leaf(1))
    with pytest.raises(gc.GradCombineError, match=r"capacity 2, received .* capacity 3"):
        TWO.merge(state, row_sum(capacity=3).init(leaf(1)))
    with pytest.raises(gc.GradCombineError, match="expected a RowMeanState, received RowSumState"):
        row_mean(capacity=2).finalize(state)


@pytest.mark.parametrize("capacity", [0, -1, 2.0, True, None])
def test_bad_capacities(capacity: Any) -> None:
    with pytest.raises(gc.GradCombineError, match="expected a capacity of 1 row or more"):
        row_sum(capacity)


@pytest.mark.parametrize("overflow", ["dense", "drop", None])
def test_policies_that_are_none(overflow: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"expected overflow of \['error', 'check'\]"):
        row_mean(2, overflow=overflow)


@pytest.mark.parametrize("rows", [0, -3, 2.5, 2**31 - 1])
def test_bad_numbers_of_rows(rows: Any) -> None:
    with pytest.raises(gc.GradCombineError, match="expected a number of rows from 1 to 2147483646"):
        row_sparse(np.int32([0]), np.ones((1, 2), np.float32), rows)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_integers_are_refused(dtype: Any) -> None:
    with pytest.raises(gc.GradCombineError, match="expected a dtype that is float or complex"):
        TWO.init(np.zeros((3, 2), dtype))
