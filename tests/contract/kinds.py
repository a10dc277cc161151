"""Kinds of arguments of public functions, each with a valid value and with mistakes that users make."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

import gradcombine as gc
from gradcombine import reductions, sparse
from gradcombine.tree import static_dtype

ONE = np.ones(2, np.float32)
TREE = {"w": ONE}
SUM, MEAN = reductions.sum(), reductions.mean()
ACC = gc.accumulate(SUM, every=2)
ROWS = sparse.row_sparse(np.int32([1]), np.float32([[3]]), rows=4)


class Kind(NamedTuple):
    """A kind of argument.

    Attributes:
      valid: makes a valid value.
      mistakes: invalid values, by name.
    """

    valid: Callable[[], Any]
    mistakes: dict[str, Any]

    def but(self, valid: Any, *accepted: str) -> Kind:
        """The kind with another valid value and without the mistakes that a function accepts."""
        return Kind(lambda: valid, self.without(*accepted).mistakes)

    def without(self, *accepted: str) -> Kind:
        """The kind without the mistakes that a function accepts."""
        assert set(accepted) <= set(self.mistakes)
        return Kind(self.valid, {name: x for name, x in self.mistakes.items() if name not in accepted})


def refusal(call: Callable[[], Any]) -> str:
    """Empty if the call raises one short GradCombineError with an operation; otherwise what it did instead."""
    try:
        call()
    except gc.GradCombineError as error:
        text = str(error)
        return "" if error.operation and len(text) < 800 and len(text.splitlines()) == 1 else text
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def unrefused(call: Callable[[Any], Any], mistakes: dict[str, Any]) -> dict[str, str]:
    """What the call did instead of refusing these values, by name."""
    return {name: what for name, value in mistakes.items() if (what := refusal(lambda: call(value)))}  # noqa: B023


LEAVES: dict[str, Any] = {
    "a string": "text",
    "bytes": b"text",
    "an object": object(),
    "a set": {1.0, 2.0},
    "a generator": (x for x in [ONE]),
    "a function": len,
    "a class": np.ndarray,
    "a dtype": np.dtype(np.float32),
    "an array of objects": np.array([1, None], object),
    "an array of strings": np.array(["a", "b"]),
    "an array of dates": np.array(["2020-01-01"], "datetime64[D]"),
    "a structured array": np.zeros(2, [("a", np.float32), ("b", np.int32)]),
    "a Fraction": Fraction(1, 2),
    "2**31": 2**31,
    "a bool": True,
    "an array of bools": np.array([True, False]),
    "a date": datetime.datetime(2020, 1, 1),
    "Ellipsis": ...,
    "a reduction": SUM,
}
_ARRAYS = {name: LEAVES[name] for name in ("an array of objects", "an array of strings", "a structured array")}
_LISTS: dict[str, Any] = {
    "None": None,
    "a dict": TREE,
    "a string": "ab",
    "a set": {1.0, 2.0},
    "a number": 1.0,
    "an object": object(),
}
_STATES = {
    "None": None,
    "an array": ONE,
    "a dict": {},
    "another reduction's": MEAN.init(TREE),
    "an exact one": reductions.sum("exact").init(TREE),
    "a window": ACC.init(TREE),
    "a tuple of its parts": tuple(SUM.init(TREE)),
    "without a value": SUM.init(TREE)._replace(value=None),
    "of another tree": SUM.init(TREE)._replace(value={"v": ONE}),
    "of another dtype": SUM.init(TREE)._replace(value={"w": np.ones(2, np.int32)}),
    "of another shape": SUM.init(TREE)._replace(value={"w": np.ones(3, np.float32)}),
    "a weight of text": SUM.init(TREE)._replace(weight="text"),
    "a count of floats": SUM.init(TREE)._replace(count=np.float32(1)),
    "made for another tree": SUM.init(TREE)._replace(dtypes={"v": static_dtype("float32")}),
}

# Kinds that several parameters share.
LEAF = Kind(lambda: ONE, LEAVES)
TREES = Kind(lambda: TREE, {name: {"w": x} for name, x in LEAVES.items()})
LIST_OF_TREES = Kind(
    lambda: [TREE, TREE],
    _LISTS
    | {f"{name} in a list": [TREE, {"w": x}] for name, x in LEAVES.items()}
    | {
        "nothing": [],
        "another structure": [TREE, {"v": ONE}],
        "another shape": [TREE, {"w": np.ones(3, np.float32)}],
    },
)
WEIGHT = Kind(
    lambda: 2,
    {
        "a string": "1",
        "None": None,
        "a list": [1.0],
        "NaN": float("nan"),
        "inf": float("inf"),
        "negative": -1,
        "a negative array": np.float32(-1),
        "complex": 1 + 0j,
        "a vector": np.ones(1, np.float32),
        "an array of objects": np.array(1, object),
        "a date": datetime.datetime(2020, 1, 1),
        "a duration": np.timedelta64(1, "s"),
        "a dict": {"w": 1.0},
        "a function": len,
    },
)
WEIGHTS = Kind(
    lambda: [1, 2], {name: x for name, x in _LISTS.items() if name != "None"} | {"too few": [1], "negative": [1, -1]}
)
POSITIVE = Kind(
    lambda: 2,
    {
        "0": 0,
        "-1": -1,
        "2.0": 2.0,
        "a string": "2",
        "True": True,
        "None": None,
        "NaN": float("nan"),
        "a list": [2],
        "an array": np.array([2, 3]),
        "a float array": np.float32(2),
        "10**400": 10**400,
    },
)
MAYBE_POSITIVE = POSITIVE.but(None, "None")
NOT_NEGATIVE = POSITIVE.but(0, "0")
NUMBER = Kind(
    lambda: 1.0,
    {
        "10**400": 10**400,
        "NaN": float("nan"),
        "-1": -1,
        "text": "1",
        "None": None,
        "a complex number": 1j,
        "True": True,
        "an array": ONE,
        "a dict": {},
    },
)
FLAG = Kind(lambda: True, {"None": None, "text": "no", "an array": np.array([True, False]), "a dict": {}})
NAME = Kind(lambda: "own", {"None": None, "3": 3, "a list": ["own"], "nothing": "", "bytes": b"own"})
DTYPE = Kind(
    lambda: None,
    {
        "float31": "float31",
        "a number": 3,
        "a list": ["float32"],
        "an array": ONE,
        "object": object,
        "str": str,
        "bool": bool,
        "dates": "datetime64[s]",
        "structured": [("a", np.float32)],
        "nothing": "",
        "a dict": {},
    },
)
_CHOICES: dict[str, Any] = {
    "a list": [],
    "a dict": {},
    "another string": "nearest",
    "1.0": 1.0,
    "bytes": b"tree",
    "an array": np.array(["tree", "add_n"]),
}


def choice(valid: Any) -> Kind:
    return Kind(lambda: valid, _CHOICES)


REDUCTION = Kind(
    lambda: SUM,
    {
        "None": None,
        "a string": "sum",
        "not called": reductions.sum,
        "a tuple": (np.zeros_like, np.add),
        "a function": sum,
        "a module": reductions,
        "an accumulator": ACC,
        "an array": ONE,
    },
)
MAYBE_REDUCTION = Kind(lambda: None, {name: x for name, x in REDUCTION.mistakes.items() if name != "None"})
OVER = Kind(
    lambda: gc.LOCAL,
    {
        "None": None,
        "a string": "data",
        "a list": ["data"],
        "a class": type(gc.LOCAL),
        "not called": gc.jax_axis,
        "an array": ONE,
    },
)
FUNCTION = Kind(lambda: lambda *_: None, {"None": None, "text": "loss", "a number": 1, "an array": ONE})
STATE = Kind(lambda: SUM.init(TREE), _STATES)
STATES = Kind(
    lambda: [SUM.init(TREE)], _LISTS | {"nothing": []} | {f"{name} in a list": [x] for name, x in _STATES.items()}
)
WINDOW = Kind(
    lambda: ACC.init(TREE),
    {
        "None": None,
        "an array": ONE,
        "a state": SUM.init(TREE),
        "a tuple of its parts": tuple(ACC.init(TREE)),
        "no levels": ACC.init(TREE)._replace(levels=()),
        "levels of another": ACC.init(TREE)._replace(levels=(MEAN.init(TREE),)),
        "a step of text": ACC.init(TREE)._replace(step="0"),
        "a step of floats": ACC.init(TREE)._replace(step=np.float32(0)),
        "an index of a shape": ACC.init(TREE)._replace(index=np.int32([0, 1])),
    },
)
PATH = Kind(lambda: "a.npz", {"None": None, "a number": 3, "a NUL": "a\0.npz", "a long name": "a" * 300 + ".npz"})

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("value", "like", "begun", "start", "a", "b"), TREES),
    **dict.fromkeys(("values", "contributions"), LIST_OF_TREES),
    **dict.fromkeys(("rows", "capacity", "replicas", "every", "ranks"), POSITIVE),
    **dict.fromkeys(("microbatches", "backward_passes_per_step", "every_k_schedule"), POSITIVE),
    **dict.fromkeys(("max_every",), MAYBE_POSITIVE),
    **dict.fromkeys(("index", "holder", "behind", "ulps", "reused"), NOT_NEGATIVE),
    **dict.fromkeys(("dtype", "output_dtype", "accumulator", "accumulator_dtype"), DTYPE),
    **dict.fromkeys(("packed", "fused", "divided", "unique", "full", "scales_by_weight", "commutative"), FLAG),
    **dict.fromkeys(("has_aux", "differentiate", "interleaved", "use_grad_mean", "compat", "weighted"), FLAG),
    **dict.fromkeys(("sparse_as_dense", "average_aggregated_gradients", "scale_local_gradients"), FLAG),
    **dict.fromkeys(("path", "folder", "directory"), PATH),
    **dict.fromkeys(("function", "loss", "gradients", "allreduce", "make_step"), FUNCTION),
    **dict.fromkeys(("max_norm", "prescale_factor", "postscale_factor", "gradient_predivide_factor"), NUMBER),
    "reduction": REDUCTION,
    "over": OVER,
    "state": STATE,
    "states": STATES,
    "weight": WEIGHT,
    "weights": WEIGHTS,
    "order": choice("tree"),
    "wire": Kind(
        lambda: gc.wires.cast("bfloat16"), {"a dtype": "bfloat16", "not called": gc.wires.cast, "a number": 8}
    ),
    "rounding": choice("stochastic"),
    "wide": Kind(lambda: True, {"a name": "w", "a number": 3, "a list": ["w"]}),
    "method": choice("add_n"),
    "precision": choice("exact"),
    "overflow": choice("nan"),
    "aggregation": choice("sum"),
    "synchronization": choice("auto"),
    "op": choice("average"),
    "mode": choice("eager"),
    "returns": choice("params"),
    "name": NAME,
    "table": Kind(lambda: np.ones((4, 1), np.float32), _ARRAYS),
    "mean": MAYBE_REDUCTION,
}
"""Kinds by parameter name."""
