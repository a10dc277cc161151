"""Calls that must be refused, each by name: what a user may hand over by mistake, in NumPy and eagerly."""

from __future__ import annotations

import datetime
import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np

import gradcombine as gc
from gradcombine import foreign_orders, noise, reductions, replicated, sparse, statefile
from gradcombine.tree import static_absence, static_dtype, static_rows
from gradcombine.verify import (
    FlightRecorder,
    assert_within_ulp,
    check_reduction,
    compare,
    equal_bits,
    explain,
    first_divergence,
    record,
    ulp_distance,
)
from gradcombine.verify.diff.dumps import open_dump

ONE = np.ones(2, np.float32)
ROWS = sparse.row_sparse(np.int32([1]), np.float32([[3]]), rows=4)
Pair = namedtuple("Pair", "a b")


class Mute:
    """An object that nothing here knows, and that cannot even be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Untrue:
    """Its comparisons have no truth."""

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    def __hash__(self) -> int:
        return 0


def deep(levels: int, leaf: Any = ONE) -> Any:
    tree = leaf
    for _ in range(levels):
        tree = [tree]
    return tree


def circular_list() -> Any:
    tree: list[Any] = [ONE]
    tree.append(tree)
    return tree


def circular_dict() -> Any:
    tree: dict[str, Any] = {"w": ONE}
    tree["self"] = tree
    return tree


LEAVES: dict[str, Any] = {
    "a string": "text",
    "bytes": b"text",
    "an object": object(),
    "a mute object": Mute(),
    "a set": {1.0, 2.0},
    "a frozenset": frozenset([1.0]),
    "a generator": (x for x in [ONE]),
    "a function": len,
    "a class": np.ndarray,
    "a dtype": np.dtype(np.float32),
    "an array of objects": np.array([1, None], object),
    "an array of strings": np.array(["a", "b"]),
    "an array of bytes": np.array([b"a"]),
    "an array of dates": np.array(["2020-01-01"], "datetime64[D]"),
    "an array of durations": np.array([1], "timedelta64[s]"),
    "a structured array": np.zeros(2, [("a", np.float32), ("b", np.int32)]),
    "a record": np.zeros(2, [("a", np.float32)])[0],
    "void": np.zeros(2, "V4"),
    "a Decimal": Decimal(1),
    "a Fraction": Fraction(1, 2),
    "2**31": 2**31,
    "-2**31 - 1": -(2**31) - 1,
    "10**5000": 10**5000,  # which Python does not print
    "a bool": True,
    "an array of bools": np.array([True, False]),
    "a datetime": datetime.datetime(2020, 1, 1),
    "Ellipsis": ...,
    "NotImplemented": NotImplemented,
    "a reduction": reductions.sum(),
}
TREES: dict[str, Callable[[], Any]] = {
    "a deep tree": lambda: deep(1000),
    "a deep dict": lambda: functools.reduce(lambda tree, _: {"a": tree}, range(1000), ONE),
    "a circular list": circular_list,
    "a circular dict": circular_dict,
    "keys of complex numbers": lambda: {1j: ONE, 2j: ONE},
    "keys of objects": lambda: {object(): ONE, object(): ONE},
    "keys of tuples": lambda: {("a", 1): ONE, ("a", "b"): ONE},
}
WEIGHTS: dict[str, Any] = {
    "a string": "1",
    "None": None,
    "a list": [1.0],
    "NaN": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "negative": -1,
    "-10**5000": -(10**5000),
    "Fraction(10**5000)": Fraction(10**5000),
    "negative array": np.float32(-1),
    "NaN array": np.array(np.nan),
    "complex": 1 + 0j,
    "complex array": np.complex64(1),
    "a vector": np.ones(1, np.float32),
    "a string array": np.array("1"),
    "an object array": np.array(1, object),
    "a datetime": datetime.datetime(2020, 1, 1),
    "datetime64": np.datetime64("2020-01-01"),
    "timedelta64": np.timedelta64(1, "s"),
    "timedelta": datetime.timedelta(1),
    "a Decimal": Decimal(1),
    "a record": np.zeros(1, [("a", np.float32)])[0],
    "void": np.zeros((), "V4"),
    "a mute object": Mute(),
    "a dict": {"w": 1.0},
    "a set": {1.0},
    "a function": len,
}


class Failing:
    """Its own code fails, in attributes (``*``: all) and methods."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if {name, "*"} & set(self._names):
            raise RuntimeError(name)
        raise AttributeError(name)

    def __index__(self) -> int:
        raise RuntimeError

    __float__ = __array__ = __bool__ = __len__ = __index__


def shaped(shape: Any, dtype: Any = ONE.dtype) -> Any:
    """What has a shape and a dtype, and no elements."""
    return SimpleNamespace(shape=shape, dtype=dtype)


OWN_CODE: dict[str, Any] = {
    "a failing dtype": Failing("dtype"),
    "a failing shape": Failing("shape", "all_gather", "__name__"),
    "attributes that fail": Failing("*"),
    "a shape of None": shaped(None),
    "a shape of a number": shaped(3),
    "a shape of text": shaped(("a",)),
    "a negative shape": shaped((-1,)),
    "a shape of floats": shaped((2.5,)),
}
"""Refused wherever something is expected."""
INTEGERS: dict[str, Any] = {
    "0": 0,
    "-1": -1,
    "2.0": 2.0,
    "a string": "2",
    "True": True,
    "None": None,
    "NaN": float("nan"),
    "a list": [2],
    "an array": np.array([2, 3]),
    "a vector of one": np.array([2]),
    "a bool array": np.array(True),
    "np.True_": np.True_,
    "a float array": np.float32(2),
    "2**31": 2**31,
    "10**400": 10**400,
    "a mute object": Mute(),
    "Untrue": Untrue(),
}
DTYPES: dict[str, Any] = {
    "float31": "float31",
    "a number": 3,
    "a list": ["float32"],
    "an array": ONE,
    "object": object,
    "str": str,
    "bool": bool,
    "datetime64": "datetime64[s]",
    "structured": [("a", np.float32)],
    "void": "V4",
    "an empty string": "",
    "finfo": "finfo",
    "a mute object": Mute(),
    "a dict": {},
    "not hashable": set(),
}
CHOICES: dict[str, Any] = {
    "a list": [],
    "a dict": {},
    "None": None,
    "a string": "ring",
    "3": 3,
    "True": True,
    "1.0": 1.0,
    "an array": np.array(["tree", "add_n"]),
    "Untrue": Untrue(),
    "a mute object": Mute(),
    "bytes": b"tree",
}
NO_REDUCTIONS: dict[str, Any] = {
    "None": None,
    "a string": "sum",
    "not called": reductions.sum,
    "a tuple": (np.zeros_like, np.add),
    "builtin sum": sum,
    "a module": reductions,
    "a mute object": Mute(),
    "an accumulator": gc.accumulate(reductions.sum(), every=2),
    "an array": ONE,
}
NO_COLLECTIVES: dict[str, Any] = {
    "None": None,
    "a string": "data",
    "a list": ["data"],
    "a class": type(gc.LOCAL),
    "not called": gc.jax_axis,
    "an array": ONE,
    "a mute object": Mute(),
}


def _states() -> dict[str, Any]:
    state = reductions.sum().init({"w": ONE})
    acc = gc.accumulate(reductions.sum(), every=2)
    window = acc.init({"w": ONE})
    return {
        "None": None,
        "an array": ONE,
        "a dict": {},
        "another reduction's": reductions.mean().init({"w": ONE}),
        "an exact one": reductions.sum("exact").init({"w": ONE}),
        "of rows": reductions.row_sum(2).init(ROWS),
        "of per_leaf": reductions.per_leaf({"w": reductions.sum()}).init({"w": ONE}),
        "a tuple of its parts": tuple(state),
        "value of None": state._replace(value=None),
        "value of a set": state._replace(value={"w": frozenset([1.0])}),
        "value of an empty tuple": state._replace(value={"w": ()}),
        "value of another tree": state._replace(value={"v": ONE}),
        "value of text": state._replace(value="text"),
        "value of objects": state._replace(value={"w": np.array([None, None])}),
        "value of another dtype": state._replace(value={"w": np.ones(2, np.int32)}),
        "value of another shape": state._replace(value={"w": np.ones(3, np.float32)}),
        "weight of None": state._replace(weight=None),
        "weight of text": state._replace(weight="text"),
        "weight of a shape": state._replace(weight=ONE),
        "weight of objects": state._replace(weight=np.array(None)),
        "count of None": state._replace(count=None),
        "count of a shape": state._replace(count=np.int32([1, 2, 3])),
        "count of text": state._replace(count="1"),
        "count of floats": state._replace(count=np.float32(1)),
        "dtypes of None": state._replace(dtypes=None),
        "dtypes of another tree": state._replace(dtypes={"v": static_dtype("float32")}),
        "dtypes of text": state._replace(dtypes={"w": "text"}),
        "dtypes of no gradient": state._replace(dtypes={"w": static_absence()}),
        "made for another dtype": reductions.sum(dtype="float64").init({"w": ONE}),
        "a window": window,
    }


def _windows() -> dict[str, Any]:
    acc = gc.accumulate(reductions.sum(), every=2)
    window = acc.init({"w": ONE})
    counter = gc.accumulate(reductions.sum(), every=2, order="tree").init({"w": ONE}).levels
    return {
        "a counter that has not counted": window._replace(levels=counter._replace(filled=None)),
        "a counter of text": window._replace(levels=counter._replace(filled="1")),
        "a counter of two numbers": window._replace(levels=counter._replace(filled=np.int32([0, 1]))),
        "a counter of None": window._replace(levels=counter._replace(stacked=None)),
        "a counter of one state": window._replace(levels=counter._replace(stacked=window.levels[0])),
        "a counter without levels": window._replace(
            levels=counter._replace(stacked=reductions.sum().init({"w": ONE})._replace(value={"w": np.zeros((0, 2))}))
        ),
        "None": None,
        "a tuple of its parts": tuple(window),
        "a state": window.levels[0],
        "levels of None": window._replace(levels=None),
        "no levels": window._replace(levels=()),
        "two levels in a tuple": window._replace(levels=window.levels * 2),
        "levels of None each": window._replace(levels=(None,)),
        "a list of levels of another": window._replace(levels=(reductions.mean().init({"w": ONE}),)),
        "step of None": window._replace(step=None),
        "step of text": window._replace(step="0"),
        "step of a shape": window._replace(step=np.int32([0, 1])),
        "step of a float": window._replace(step=np.float32(0)),
        "index of None": window._replace(index=None),
        "index of a shape": window._replace(index=np.int32([0, 1])),
        "index of text": window._replace(index="0"),
    }


Call = Callable[[Any], Any]
MEAN, SUM = reductions.mean(), reductions.sum()
WINDOW = gc.accumulate(MEAN, every=2)
VARIABLE = replicated.variable("sum", over=gc.LOCAL)


def one(reduction: gc.Reduction) -> Call:
    return lambda leaf: gc.combine(reduction, [{"w": leaf}])


def weighted(reduction: gc.Reduction, value: Any = ONE) -> Call:
    return lambda weight: gc.combine(reduction, [value], weights=[weight])


def rows_with(values: Any) -> sparse.RowSparse:
    return sparse.RowSparse(np.int32([0, 1]), values, static_rows(4))


TAKES_LEAF: dict[str, Call] = {
    "add_n": lambda x: gc.add_n([{"w": x}]),
    "mean of two": lambda x: gc.mean([{"w": ONE}, {"w": x}]),
    "exact": one(reductions.sum("exact")),
    "moments": one(reductions.moments()),
    "max": one(reductions.max()),
    "row_sum": one(reductions.row_sum(2)),
    "sparse_as_dense": one(reductions.sparse_as_dense(SUM)),
    "all_reduce": lambda x: gc.all_reduce(SUM, {"w": x}, over=gc.LOCAL),
    "update": lambda x: WINDOW.update({"w": x}, WINDOW.init({"w": ONE})),
    "squared_norm": lambda x: noise.squared_norm({"w": x}),
    "noise_scale": lambda x: noise.noise_scale(x, 1.0, 1.0, 2),
    "left_chain": lambda x: foreign_orders.left_chain([{"w": x}, {"w": x}]),
    "ring": lambda x: foreign_orders.ring([{"w": x}, {"w": x}]),
    "to_dense": sparse.to_dense,
    "indices": lambda x: sparse.row_sparse(x, ONE, 3),
    "values of rows": lambda x: gc.combine(reductions.row_sum(2), [rows_with(x)]),
    "add_rows": lambda x: sparse.add_rows(x, ROWS),
    "assign": lambda x: VARIABLE.assign(VARIABLE.init({"w": ONE}), {"w": x}),
}
TAKES_TREE: dict[str, Call] = {
    "add_n": lambda t: gc.add_n([t]),
    "mean": lambda t: gc.mean([t, t]),
    "init": WINDOW.init,
    "row_sum": lambda t: gc.combine(reductions.row_sum(2), [t]),
    "per_leaf": reductions.per_leaf,
    "a prefix": lambda t: gc.combine(reductions.per_leaf({"w": SUM}), [t]),
    "sparse_as_dense": lambda t: gc.combine(reductions.sparse_as_dense(SUM), [t]),
    "densify": sparse.densify,
    "squared_norm": noise.squared_norm,
    "left_chain": lambda t: foreign_orders.left_chain([t]),
    "variable": VARIABLE.init,
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
TAKES_INTEGER: dict[str, Call] = {
    "every": lambda n: gc.accumulate(SUM, every=n),
    "every from a function": lambda n: gc.accumulate(SUM, every=lambda i: n).ready(WINDOW.init(ONE)),
    "max_every": lambda n: gc.accumulate(SUM, every=lambda i: 2, order="tree", max_every=n),
    "max_terms": lambda n: reductions.sum("exact", max_terms=n),
    "max_terms of a mean": lambda n: reductions.mean("exact", max_terms=n),
    "rows": lambda n: sparse.row_sparse(np.int32([0]), np.ones((1, 2), np.float32), n),
    "stacked": replicated.stacked,
}
TAKES_DTYPE: dict[str, Call] = {
    "sum": lambda d: reductions.sum(dtype=d),
    "output": lambda d: reductions.mean(output_dtype=d),
    "wire": lambda d: reductions.product(wire_dtype=d),
    "max": lambda d: reductions.max(output_dtype=d),
    "min": lambda d: reductions.min(output_dtype=d),
    "moments": lambda d: reductions.moments(dtype=d),
    "adasum": lambda d: reductions.adasum(dtype=d),
    "row_sum": lambda d: reductions.row_sum(2, dtype=d),
    "row_mean on the wire": lambda d: reductions.row_mean(2, wire_dtype=d),
    "left_chain": lambda d: foreign_orders.left_chain([ONE], dtype=d),
}
TAKES_NAME: dict[str, Call] = {
    "method": lambda x: gc.add_n([ONE], method=x),
    "order of combine": lambda x: gc.combine(SUM, [ONE], order=x),
    "order of accumulate": lambda x: gc.accumulate(SUM, every=2, order=x),
    "order of all_reduce": lambda x: gc.all_reduce(SUM, ONE, over=gc.LOCAL, order=x),
    "precision": reductions.sum,
    "overflow": lambda x: reductions.row_sum(2, overflow=x),
    "aggregation": lambda x: replicated.variable(x, over=gc.LOCAL),
    "synchronization": lambda x: replicated.variable("sum", x, over=gc.LOCAL),
}
TAKES_REDUCTION: dict[str, Call] = {
    "combine": lambda r: gc.combine(r, [ONE]),
    "accumulate": lambda r: gc.accumulate(r, every=2),
    "all_reduce": lambda r: gc.all_reduce(r, ONE, over=gc.LOCAL),
    "merge_replicas": lambda r: gc.merge_replicas(r, ONE, over=gc.LOCAL),
    "checked": reductions.checked,
    "sparse_as_dense": reductions.sparse_as_dense,
    "per_leaf": lambda r: reductions.per_leaf({"w": r}),
}
TAKES_COLLECTIVE: dict[str, Call] = {
    "all_reduce": lambda over: gc.all_reduce(SUM, ONE, over=over),
    "merge_replicas": lambda over: gc.merge_replicas(SUM, SUM.init(ONE), over=over),
    "variable": lambda over: replicated.variable("sum", over=over),
}
TAKES_LIST: dict[str, Call] = {
    "add_n": gc.add_n,
    "tree_sum": gc.tree_sum,
    "weights": lambda x: gc.mean([ONE, ONE], weights=x),
    "left_chain": foreign_orders.left_chain,
}
NO_LISTS: dict[str, Any] = {
    "a dict": {"w": ONE},
    "an array": np.ones((2, 2)),
    "a NamedTuple": Pair(ONE, ONE),
    "a string": "ab",
    "bytes": b"ab",
    "a bytearray": bytearray(b"ab"),
    "a set": {1.0, 2.0},
    "a number": 1.0,
    "nothing": [],
    "an object": object(),
}
FLAGS: dict[str, Any] = {
    "None": None,
    "text": "no",
    "an array": np.array([True, False]),
    "untrue": Untrue(),
    **OWN_CODE,
}
TAKES_FLAG: dict[str, Call] = {
    "packed": lambda x: foreign_orders.ring([ONE], packed=x),
    "fused": lambda x: foreign_orders.welford([ONE], fused=x),
    "unique": lambda x: sparse.add_rows(np.ones((4, 1), np.float32), ROWS, unique=x),
    "full": lambda x: statefile.resize(SUM, [SUM.init(ONE)], 2, full=x),
}
NUMBERS: dict[str, Any] = {
    "10**400": 10**400,
    "NaN": float("nan"),
    "-1": -1,
    "text": "1",
    "a complex number": 1j,
    "True": True,
    "an array": ONE,
    **OWN_CODE,
}
TAKES_NUMBER: dict[str, Call] = {
    "max_norm": lambda x: reductions.clipped(SUM, x),
    "roundings": lambda x: compare(ONE, ONE, reference=ONE, roundings=x),
    "ulp": lambda x: assert_within_ulp(ONE, ONE, x),
    "ulp of a leaf": lambda x: assert_within_ulp(ONE, ONE, {"(root)": x}),
}
PATHS: dict[str, Any] = {
    "None": None,
    "a long name": "a" * 300 + ".npz",
    "a number": 3,
    "a NUL": "a\0.npz",
    "a surrogate": "\ud800.npz",
    **OWN_CODE,
}
TAKES_PATH: dict[str, Call] = {
    "inspect": statefile.inspect,
    "save": lambda x: statefile.save(x, SUM, SUM.init(ONE)),
    "open_dump": open_dump,
    "record": record,
    "first_divergence": lambda x: first_divergence(x, x),
    "FlightRecorder": lambda x: FlightRecorder(x, ONE),
}
TAKES_ARRAY: dict[str, Call] = {
    "equal_bits": lambda x: equal_bits(x, x),
    "ulp_distance": lambda x: ulp_distance(x, x),
    "digest": gc.digest,
    "a table": lambda x: sparse.add_rows(x, ROWS),
    "values of rows": lambda x: sparse.row_sparse(np.int32([0, 1]), x, 4),
}
NO_ARRAYS: dict[str, Any] = {
    name: LEAVES[name]
    for name in ("an array of objects", "an array of strings", "a structured array", "void", "an array of dates")
} | OWN_CODE
TAKES_STATE: dict[str, Call] = {
    "update": lambda s: (gc.check_state(SUM, s), SUM.update(s, {"w": ONE})),
    "merge": lambda s: (gc.check_state(SUM, s), SUM.merge(SUM.init({"w": ONE}), s)),
}
TAKES_WINDOW: dict[str, Call] = {
    "update": lambda s: (gc.check_state(SUM, s), gc.accumulate(SUM, every=2).update({"w": ONE}, s)),
    "value": lambda s: (gc.check_state(SUM, s), gc.accumulate(SUM, every=2).value(s)),
}
TABLES: dict[str, tuple[dict[str, Call], dict[str, Any]]] = {
    "leaf": (TAKES_LEAF, LEAVES | OWN_CODE),
    "tree": (TAKES_TREE, TREES),
    "weight": (TAKES_WEIGHT, WEIGHTS | OWN_CODE),
    "integer": (TAKES_INTEGER, INTEGERS | OWN_CODE),
    "flag": (TAKES_FLAG, FLAGS),
    "number": (TAKES_NUMBER, NUMBERS),
    "path": (TAKES_PATH, PATHS),
    "array": (TAKES_ARRAY, NO_ARRAYS),
    "dtype": (TAKES_DTYPE, DTYPES),
    "name": (TAKES_NAME, CHOICES),
    "reduction": (TAKES_REDUCTION, NO_REDUCTIONS | OWN_CODE),
    "collective": (TAKES_COLLECTIVE, NO_COLLECTIVES | OWN_CODE),
    "list": (TAKES_LIST, NO_LISTS),
    "state": (TAKES_STATE, _states()),
    "window": (TAKES_WINDOW, _windows()),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "exact sums of different max_terms": lambda: reductions.sum("exact").merge(
        reductions.sum("exact").init(ONE), reductions.sum("exact", max_terms=10**6).init(ONE)
    ),
    "adasum of longdouble": lambda: gc.combine(reductions.adasum(), [np.ones(2, np.longdouble)]),
    "a state made for another dtype": lambda: gc.check_state(SUM, reductions.sum(dtype="float64").init(ONE)),
    "different NamedTuples": lambda: gc.add_n([Pair(ONE, ONE), (ONE, ONE)]),
    "dict and OrderedDict": lambda: gc.add_n([{"a": ONE}, OrderedDict(a=ONE)]),
    "list and tuple": lambda: gc.add_n([[ONE], (ONE,)]),
    "names of addn_blocks": lambda: foreign_orders.addn_blocks([ONE, ONE], names=[1, "a"]),
    "no names of addn_blocks": lambda: foreign_orders.addn_blocks([ONE, ONE], names=5),
    "a reused term": lambda: foreign_orders.addn_blocks([ONE, ONE], reused=np.array([True])),
    "weights of text": lambda: explain([ONE, ONE], ONE, ["1", 1.0]),
    "infinite weights": lambda: explain([ONE, ONE], ONE, [1.0, float("inf")]),
    "ranks of floats": lambda: explain([ONE, ONE], ONE, ranks=[1.5]),
    "ranks of None": lambda: foreign_orders.mean_of_means([ONE], ranks=None),
    "weights of a number": lambda: foreign_orders.mean_of_means([ONE], ranks=1, weights=3),
    "ranks of an object": lambda: foreign_orders.mean_of_means([ONE], ranks=Failing("__floordiv__")),
    "divided of an object": lambda: foreign_orders.welford([ONE], divided=Failing()),
    "a number of 64 bits": lambda: gc.combine(
        reductions.numbered(SUM, 4), [reductions.Numbered(ONE, np.int64(2**32 + 1))]
    ),
    "a shape without an end": lambda: gc.mean([shaped((2**70,))]),
    "a ring of shapes": lambda: foreign_orders.ring([shaped((2**70,))]),
    "rows of durations": lambda: sparse.to_dense(rows_with(np.ones((2, 3), "m8[s]"))),
    "elements of text": lambda: check_reduction(SUM, elements=["1"]),
    "weights of lists": lambda: check_reduction(SUM, weights=[[1]]),
    "leaves that nothing draws": lambda: check_reduction(SUM, like=np.broadcast_to(np.float32(0), (2**40,))),
    "twins of a number": lambda: FlightRecorder("never.log", ONE, twins=3),
    "behind of text": lambda: FlightRecorder("never.log", ONE, behind="1"),
    "a state of None among others": lambda: statefile.resize(SUM, [SUM.init(ONE), None], 2),
    "a state of another reduction, alone": lambda: statefile.resize(SUM, [MEAN.init(ONE)], 1),
    "2**31 - 1 replicas": lambda: statefile.resize(SUM, [SUM.init(ONE)], 2**31 - 1),
    "differentiable": lambda: reductions.differentiable(None),
    "a reduction without a name": lambda: gc.Reduction(np.zeros_like, np.add, np.add, np.copy, name=None),
    "an empty that does not fit": lambda: gc.combine(
        reductions.elementwise("own", empty=10**400, update=max, merge=max), [ONE]
    ),
    "axis of a number": lambda: gc.jax_axis(3),
    "axis of nothing": lambda: gc.jax_axis(()),
}
