"""Trees, dtypes and shapes of written values, and errors that leave the state unchanged."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import replicated

BF16 = ml_dtypes.bfloat16
POLICIES = [(a, s) for a in ("sum", "mean", "only_first_replica") for s in ("on_write", "on_read")]


def _made(aggregation: str, synchronization: str, start: Any, replicas: int = 2) -> Any:
    variable = replicated.variable(aggregation, synchronization, over=replicated.stacked(replicas))
    return variable, variable.init(start)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sum", ([6, 8], [12])), ("mean", ([3, 4], [6])), ("only_first_replica", ([1, 2], [5]))],
)
@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_trees(aggregation: str, synchronization: str, expected: Any) -> None:
    start = {"w": np.zeros(2, np.float32), "none": None, "b": (np.float32(0),)}
    variable, state = _made(aggregation, synchronization, start)
    own = {"w": np.float32([[1, 2], [5, 6]]), "none": None, "b": (np.float32([5, 7]),)}
    read = variable.cross.read(variable.assign_add(state, own))
    assert read["none"] is None
    assert (read["w"].tolist(), [float(read["b"][0])]) == expected


@pytest.mark.parametrize(("aggregation", "synchronization"), POLICIES)
def test_none_writes_nothing(aggregation: str, synchronization: str) -> None:
    start = {"w": np.float32([1, 2]), "b": np.float32(3)}
    variable, state = _made(aggregation, synchronization, start)
    for write in (variable.assign, variable.assign_add, variable.cross.assign):
        kept = write(state, {"w": None, "b": None})
        np.testing.assert_array_equal(kept.value["w"], np.float32([[1, 2], [1, 2]]))
        np.testing.assert_array_equal(kept.value["b"], np.float32([3, 3]))


@pytest.mark.parametrize(("aggregation", "synchronization"), POLICIES)
@pytest.mark.parametrize("dtype", [np.float16, np.float64, BF16, np.complex64, np.int8, np.uint32, np.int64])
def test_dtypes_are_kept(aggregation: str, synchronization: str, dtype: Any) -> None:
    if aggregation == "mean" and np.dtype(dtype).kind in "iu":
        with pytest.raises(gc.GradCombineError, match=r"float or complex, for aggregation mean with synchronization"):
            _made(aggregation, synchronization, np.zeros(3, dtype))
        return
    variable, state = _made(aggregation, synchronization, np.full(3, 9, dtype))
    state = variable.assign_sub(state, np.array([[1, 2, 3], [3, 2, 1]], dtype))
    on_write = {"sum": [5, 5, 5], "mean": [7, 7, 7], "only_first_replica": [8, 7, 6]}
    on_read = {"sum": [14, 14, 14], "mean": [7, 7, 7], "only_first_replica": [8, 7, 6]}
    read = variable.cross.read(state)
    assert (read.dtype, state.value.dtype) == (dtype, dtype)
    assert read.tolist() == (on_write if synchronization == "on_write" else on_read)[aggregation]


def test_unsigned_and_narrow_integers_wrap() -> None:
    variable, state = _made("sum", "on_write", np.uint8(1))
    assert variable.assign_sub(state, np.uint8([1, 1])).value.tolist() == [255, 255]
    assert variable.assign_add(state, np.uint8([255, 255])).value.tolist() == [255, 255]


def test_overflow_is_silent_and_infinite() -> None:
    most = np.finfo(np.float32).max
    variable, state = _made("sum", "on_read", most)
    assert variable.assign_add(state, np.float32([most, 0])).value.tolist() == [np.inf, most]
    assert variable.assign_sub(state, np.float32([-most, 0])).value.tolist() == [np.inf, most]


def test_a_state_that_has_diverged_elsewhere_reads_as_the_first_replica() -> None:
    variable = replicated.variable("sum", "on_write", over=replicated.stacked(2))
    assert variable.cross.read(replicated.ReplicatedState(np.float32([1, 4]))) == 1


@pytest.mark.parametrize("replicas", [1, 2, 3, 7, 200])
@pytest.mark.parametrize("total", [-128, -7, 0, 1, 127])
def test_integer_shares_sum_to_the_total(replicas: int, total: int) -> None:
    variable, state = _made("sum", "on_read", np.zeros(2, np.int8), replicas)
    state = variable.cross.assign(state, np.int8([total, 0]))
    assert state.value.dtype == np.int8
    assert [sum(column) for column in state.value.T.tolist()] == [total, 0]
    assert variable.cross.read(state).tolist() == [total, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.complex64])
def test_float_shares_are_quotients(dtype: Any) -> None:
    variable, state = _made("sum", "on_read", np.zeros((), dtype), 3)
    (share,) = set(variable.cross.assign(state, np.ones((), dtype)).value.tolist())
    assert share == np.asarray(np.float32(1) / np.float32(3)).astype(dtype)


@pytest.mark.parametrize("number", [1, 1.0, True, 1 + 0j])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_, np.complex64])
def test_python_numbers(number: Any, dtype: Any) -> None:
    ladder = {bool: 0, int: 1, float: 2, complex: 3}[type(number)]
    least, most = {np.bool_: (0, 0), np.int32: (1, 1), np.float32: (1, 2), np.complex64: (1, 3)}[dtype]
    variable, state = _made("only_first_replica", "on_write", np.zeros((), dtype))
    if least <= ladder <= most:
        assert variable.assign(state, number).value.tolist() == [1, 1]
    else:
        with pytest.raises(gc.GradCombineError, match="a number that a variable of"):
            variable.assign(state, number)


def test_a_mean_of_a_python_number_is_the_number() -> None:
    variable, state = _made("mean", "on_write", {"a": np.float32(0), "b": np.float32(0)}, 3)
    value = variable.assign(state, {"a": 0.1, "b": np.float32([1, 2, 6])}).value
    assert value["a"].tolist() == [np.float32(0.1)] * 3
    assert value["b"].tolist() == [3, 3, 3]


ERRORS = {
    "structure": ({"w": np.float32([[1, 2], [3, 4]])}, "structure"),
    "shape": ({"w": np.float32([1, 2]), "n": None}, r"leaf \['w'\]: expected shape \(2, 2\)"),
    "dtype": ({"w": np.float64([[1, 2], [3, 4]]), "n": None}, r"leaf \['w'\]: .* dtype float32, received .* float64"),
    "number of a vector": ({"w": 1.0, "n": None}, r"leaf \['w'\]: expected shape \(2,\), received the number 1.0"),
    "too large": ({"w": None, "n": 2**40}, r"leaf \['n'\]: expected a number that a variable of int32 can hold"),
    "fraction": ({"w": None, "n": 0.5}, r"leaf \['n'\]: expected a number that a variable of int32 can hold"),
    "none there": ({"w": None, "n": None, "x": None}, "structure"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("op", ["assign", "assign_add", "assign_sub"])
def test_refused_values_leave_the_state_as_it_is(name: str, op: str) -> None:
    value, message = ERRORS[name]
    variable, state = _made("only_first_replica", "on_read", {"w": np.float32([1, 2]), "n": np.int32(5)})
    with pytest.raises(gc.GradCombineError, match=f"replicated.{op}: .*{message}"):
        getattr(variable, op)(state, value)
    np.testing.assert_array_equal(state.value["w"], np.float32([[1, 2], [1, 2]]))
    np.testing.assert_array_equal(state.value["n"], np.int32([5, 5]))


def test_refusals_say_what_to_choose() -> None:
    variable, state = _made("none", "auto", np.float32(0))
    with pytest.raises(
        gc.GradCombineError, match=r"only_first_replica.*on_read.*cross\.assign.*on_write, on 2 replicas"
    ):
        variable.assign_add(state, np.float32([1, 2]))
    variable, state = _made("sum", "on_write", {"n": np.float32(0)})
    with pytest.raises(gc.GradCombineError, match=r"leaf \['n'\]: expected an array with this replica's value"):
        variable.assign_add(state, {"n": 1.0})
    variable, state = _made("none", "on_read", np.float32(0))
    with pytest.raises(gc.GradCombineError, match=r"replicated\.cross\.read: expected aggregation sum, mean or"):
        variable.cross.read(state)


def test_what_is_not_a_state() -> None:
    variable, state = _made("sum", "on_write", np.float32(0))
    with pytest.raises(gc.GradCombineError, match="a ReplicatedState"):
        variable.read(state.value)
    with pytest.raises(gc.GradCombineError, match="3 components along the first axis"):
        replicated.variable("sum", over=replicated.stacked(3)).cross.read(state)
    with pytest.raises(gc.GradCombineError, match="None, as in the value passed to init"):
        variable.assign(variable.init(None), np.float32([1, 2]))
    flag, made = _made("only_first_replica", "on_write", np.bool_(True))
    with pytest.raises(gc.GradCombineError, match="a numeric variable"):
        flag.assign_add(made, np.array([True, False]))
