# pyright: standard
"""Values that a TensorFlow graph fixes before it runs: constants, and the iterations of its loops."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from gradcombine.audit.subject import walk
from gradcombine.audit.tensorflow.inlined import Inlined, Operation, Turning, Value
from gradcombine.types import Array

TURNS = 1000
"""Of a loop that are followed one after another."""

LONGEST = 2**31
"""Turns of a loop that are counted."""

LARGEST = 1024
"""Elements of a constant that is looked at."""

DEEPEST = 200
"""Operations one behind another that are looked through."""

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


def constant(graph: Inlined, value: Value, known: Mapping[Value, Any], depth: int = 0) -> Any:
    """A value as an array of NumPy, from the values that are known; None for what only running the graph tells."""
    if value in known:
        return known[value]
    if depth > DEEPEST:
        return None
    if value in graph.sources:
        origins = graph.origins(value, known)
        return constant(graph, origins.pop(), known, depth + 1) if len(origins) == 1 else None
    x = graph.producers.get(value)
    if x is None:
        return None
    if x.op in ("Identity", "IdentityN"):
        return constant(graph, x.inputs[x.outputs.index(value)], known, depth + 1)
    if x.op in ("Shape", "Size"):
        array = graph.arrays[x.inputs[0]]
        if not array.exact:
            return None
        return np.array(array.dims if x.op == "Shape" else array.elements, np.int64)
    if x.op == "Const":
        return _told(x)
    if x.op not in COMPUTED and x.op not in ("Cast", "StridedSlice"):
        return None
    inputs = [constant(graph, v, known, depth + 1) for v in x.inputs]
    if x.op in ("LogicalAnd", "LogicalOr"):
        settled = np.array(x.op == "LogicalOr")
        if any(v is not None and v == settled for v in inputs):
            return settled
    if any(v is None for v in inputs):
        return None
    if x.op == "Cast":
        return _cast(inputs[0], graph.arrays[value].kind)
    if x.op == "StridedSlice":
        return _one_of(x, inputs)
    try:
        found = np.asarray(COMPUTED[x.op](*inputs))
    except (ValueError, TypeError, ZeroDivisionError, MemoryError):
        return None
    return found if found.size <= LARGEST else None


def turns(graph: Inlined, turning: Turning) -> int | None:
    """How often a loop turns; None where only running it tells."""
    if turning.proceed is None:
        return None
    needed, operations = _needed(graph, turning)
    state = {i: constant(graph, turning.given[i], {}) for i in needed}
    linear = operations <= MONOTONE | LINEAR | {"Const", "Identity"}
    steps = list[dict[int, Any]]()
    for turn in range(TURNS):
        more = constant(graph, turning.proceed, {turning.asked[i]: v for i, v in state.items()})
        if more is None or more.size != 1:
            return None
        if not more.item():
            return turn
        given = {turning.carried[i]: v for i, v in state.items()}
        after = {i: constant(graph, turning.results[i], given) for i in needed}
        if any(v is None and state[i] is not None for i, v in after.items()):
            return None
        if linear and all(v is not None for v in after.values()):
            # What is computed of sums alone, and grew twice by the same, goes on to do so.
            steps.append({i: after[i] - state[i] for i in needed})
            if len(steps) > 1 and all(np.array_equal(steps[-1][i], steps[-2][i]) for i in needed):
                return _first_refusal(graph, turning, after, steps[-1], turn + 1)
        state = after
    return None


def _first_refusal(
    graph: Inlined, turning: Turning, state: dict[int, Any], step: dict[int, Any], turn: int
) -> int | None:
    """The turn before which a condition of comparisons of what grows evenly is false for the first time."""

    def ends(n: int) -> bool:
        given = {turning.asked[i]: v + n * step[i] for i, v in state.items()}
        more = constant(graph, turning.proceed or 0, given)
        return more is None or not more

    found = bisect_left(range(LONGEST), True, key=ends)
    return None if found == LONGEST else turn + found


def _needed(graph: Inlined, turning: Turning) -> tuple[list[int], set[str]]:
    """The carried values that decide whether a loop goes on, and the operations that compute the decision."""
    carried = {v: i for values in (turning.carried, turning.asked) for i, v in enumerate(values)}

    def before(v: Value) -> Iterable[Value]:
        x = graph.producers.get(v)
        if v in carried:
            return [turning.results[carried[v]]]
        return graph.sources.get(v) or (x.inputs if x is not None and turning in x.site.turns else ())

    values = walk([turning.proceed or 0], before)
    made = (graph.producers.get(v) for v in values if v not in carried and v not in graph.sources)
    operations = {x.op for x in made if x is not None and turning in x.site.turns}
    return sorted({carried[v] for v in values if v in carried}), operations


def _told(x: Operation) -> Any:
    from tensorflow import make_ndarray

    proto = x.node.attr["value"].tensor
    if np.prod([d.size for d in proto.tensor_shape.dim] or [1]) > LARGEST:
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


def _one_of(x: Operation, inputs: list[Any]) -> Any:
    """One element of a vector, ``shape[i]``, which is what programs ask for."""
    array, begin, *_ = inputs
    plain = not any(x.node.attr[name].i for name in ("ellipsis_mask", "new_axis_mask") if name in x.node.attr)
    if array.ndim != 1 or not plain or "shrink_axis_mask" not in x.node.attr or len(begin) != 1:
        return None
    if x.node.attr["shrink_axis_mask"].i != 1 or not -len(array) <= begin[0] < len(array):
        return None
    return array[int(begin[0])]
