# pyright: standard
"""Constant folding in TensorFlow graphs, and the trip counts of their loops."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from gradcombine.audit.subject import walk
from gradcombine.audit.tensorflow.values import CHOSEN, EITHER, GraphLoop, Operation, Value, makers, origins
from gradcombine.types import Array

MAX_ITERATIONS = 1000
"""Most iterations of a loop that are evaluated one by one."""

MAX_TRIPS = 2**31
"""Largest trip count that is found by extrapolation."""

MAX_ELEMENTS = 1024
"""Most elements of a constant that is evaluated."""

MAX_DEPTH = 200
"""Longest chain of operations that is evaluated."""

COMPUTED: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Neg": np.negative,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "RealDiv": np.divide,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "LogicalNot": np.logical_not,
    "Abs": np.abs,
    "ZerosLike": np.zeros_like,
    "OnesLike": np.ones_like,
    "Ceil": np.ceil,
    "Floor": np.floor,
    "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or,
    "Squeeze": np.squeeze,
    "Reshape": np.reshape,
    "Prod": lambda x, axes: np.prod(x, tuple(np.atleast_1d(axes))),
    "Range": np.arange,
    "Select": np.where,
    "Pack": lambda *x: np.stack(x),
    "SelectV2": np.where,
    "ExpandDims": lambda x, axis: np.expand_dims(x, int(axis)),
}

MONOTONE = {"Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd"}
LINEAR = {"Add", "AddV2", "Sub", "Neg"}


def constant(value: Value, known: Mapping[Value, Any] = MappingProxyType({})) -> Any:
    """Evaluates a value to a NumPy array, from the values in ``known``; None if it depends on inputs of the graph."""
    evaluated = dict(known)

    def at(depth: int, v: Value) -> Any:
        if v not in evaluated and depth <= MAX_DEPTH:
            evaluated[v] = _computed(v, known, partial(at, depth + 1))
        return evaluated.get(v)

    with np.errstate(all="ignore"):
        return at(0, value)


def _computed(value: Value, known: Mapping[Value, Any], evaluate: Callable[[Value], Any]) -> Any:
    x = value.maker
    if x is None:
        return None
    if x.passed(value):
        sources = origins(value, known)
        return evaluate(sources.pop()) if len(sources) == 1 else None
    if x.op in ("Shape", "Size"):
        array = x.inputs[0].shape
        if not array.exact:
            return None
        return np.array(array.dims if x.op == "Shape" else array.elements, np.int64)
    if x.op == "Const":
        return _constant_of(x)
    if x.op not in COMPUTED and x.op not in ("Cast", "StridedSlice"):
        return None
    inputs = [evaluate(v) for v in x.inputs]
    if x.op in ("LogicalAnd", "LogicalOr"):
        absorbing = np.array(x.op == "LogicalOr")
        if any(v is not None and v == absorbing for v in inputs):
            return absorbing
    if any(v is None for v in inputs):
        return None
    if x.op == "Cast":
        return _cast(inputs[0], value.shape.kind)
    if x.op == "StridedSlice":
        return _element(x, inputs)
    try:
        result = np.asarray(COMPUTED[x.op](*inputs))
    except (ValueError, TypeError, ZeroDivisionError, MemoryError):
        return None
    return result if result.size <= MAX_ELEMENTS else None


def trip_count(loop: GraphLoop) -> int | None:
    """The number of iterations of a loop; None if it depends on inputs of the graph, or is too large."""
    if loop.condition is None:
        return None
    needed, operations = _needed(loop, loop.condition)
    rows = [x for x in zip(loop.initial, loop.carried, loop.results, strict=True) if x[1] in needed]
    state = {v: constant(initial) for initial, v, _ in rows}
    are_numbers = all(v.shape.kind != "pred" for v in state)
    linear = are_numbers and operations <= MONOTONE | LINEAR | {"Const", "Identity", EITHER, CHOSEN}
    step = dict[Value, Any]()
    for iteration in range(MAX_ITERATIONS):
        more = constant(loop.condition, state)
        if more is None or more.size != 1:
            return None
        if not more.item():
            return iteration
        after = {v: constant(result, state) for _, v, result in rows}
        if any(x is None and state[v] is not None for v, x in after.items()):
            return None
        if linear and all(x is not None for x in after.values()):
            # Values that are computed by additions only, and twice grew by the same, will continue to do so.
            before, step = step, {v: x - state[v] for v, x in after.items()}
            if before and all(np.array_equal(step[v], before[v]) for v in step):
                return _first_false(loop.condition, after, step, iteration + 1)
        state = after
    return None


def _first_false(condition: Value, state: dict[Value, Any], step: dict[Value, Any], iteration: int) -> int | None:
    """Extrapolates state that grows by ``step`` to the first iteration for which a monotone condition is false."""

    def ends(n: int) -> bool:
        more = constant(condition, {v: x + n * step[v] for v, x in state.items()})
        return more is None or not more

    remaining = bisect_left(range(MAX_TRIPS), True, key=ends)
    return None if remaining == MAX_TRIPS else iteration + remaining


def _needed(loop: GraphLoop, condition: Value) -> tuple[set[Value], set[str]]:
    """All values that a loop's condition depends on, and the operations in the loop that compute them."""
    results = dict(zip(loop.carried, loop.results, strict=True))

    def before(v: Value) -> Sequence[Value]:
        if v in results:
            return [results[v]]
        x = v.maker
        return () if x is None else x.passed(v) or (x.inputs if loop in x.site.loops else ())

    values = walk([condition], before)
    return values, {x.op for x in makers(values) if loop in x.site.loops}


def _constant_of(x: Operation) -> Any:
    from tensorflow import make_ndarray

    proto = x.node.attr["value"].tensor
    if np.prod([d.size for d in proto.tensor_shape.dim] or [1]) > MAX_ELEMENTS:
        return None
    array = make_ndarray(proto)
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    return array if array.dtype.kind in "fb" else None


def _cast(array: Array, kind: str) -> Any:
    if kind == "pred":
        return array.astype(bool)
    if kind.startswith(("s", "u")):
        return np.trunc(array).astype(np.int64)
    return array.astype({"f32": np.float32, "f64": np.float64}[kind]) if kind in ("f32", "f64") else None


def _element(x: Operation, inputs: list[Any]) -> Any:
    """Evaluates a strided slice that takes one element of a vector, such as ``shape[i]``; None for others."""
    array, begin, *_ = inputs
    has_masks = any(x.node.attr[name].i for name in ("ellipsis_mask", "new_axis_mask") if name in x.node.attr)
    if array.ndim != 1 or has_masks or "shrink_axis_mask" not in x.node.attr or len(begin) != 1:
        return None
    if x.node.attr["shrink_axis_mask"].i != 1 or not -len(array) <= begin[0] < len(array):
        return None
    return array[int(begin[0])]
