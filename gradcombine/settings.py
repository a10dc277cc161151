"""Settings of public functions: one table, by the name of the parameter or field, of what each has to be.

A public function checks its arguments where they come in, and goes on with values that it need not look at again:

>>> check(order="tree", max_every=None)
>>> valid("every", np.int64(4))
4
>>> check(order="left")
Traceback (most recent call last):
    ...
gradcombine.errors.GradCombineError: : expected order 'sequential' or 'tree', received 'left'

(`gradcombine.errors.operation` names the function.) A dataclass of settings derives from `Settings`, which checks those
of its fields whose names are in the table, when it is made:

>>> @dataclass(frozen=True)
... class Example(Settings):
...     every: int
...     order: Order = "sequential"
>>> Example(np.int64(4))
Example(every=4, order='sequential')

A value that one function alone has gets no row: see `require_integer` and its like in `gradcombine.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, get_args

import numpy as np

from gradcombine.errors import (
    MOST,
    MOST_REPLICAS,
    invalid,
    require_flag,
    require_function,
    require_integer,
    require_number,
    require_one_of,
    require_path,
    shown,
)
from gradcombine.types import Order, Overflow, Precision, Totals

Check: TypeAlias = Callable[[Any], Any]
"""Returns a value, converted where several types mean the same one; raises a GradCombineError for any other one."""

MOST_MICROBATCHES = 1 << 24
"""Of a window that counts each: float32 has all integers up to there."""


@dataclass(frozen=True)
class Settings:
    """Base class of settings: those of its fields that the table has are checked, and converted, when it is made."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in FIELDS:
                object.__setattr__(self, field.name, valid(field.name, getattr(self, field.name)))


def check(**settings: Any) -> None:
    """Raises a GradCombineError unless each setting is one that the table allows under its name."""
    for name, value in settings.items():
        FIELDS[name](value)


def valid(name: str, value: object) -> Any:
    """The setting of this name, converted; raises a GradCombineError unless the table allows it."""
    return FIELDS[name](value)


def integer(expected: str, lowest: int = 1, highest: int = MOST) -> Check:
    return lambda value: require_integer(expected, value, lowest, highest)


def number(expected: str, lowest: float) -> Check:
    return lambda value: require_number(expected, value, lowest)


def one_of(expected: str, literal: object) -> Check:
    """A check for the names of a Literal type, of which ``{}`` in the text stands for the list."""
    names = get_args(literal)

    def check(value: Any) -> Any:
        require_one_of(expected.format(list(names)), value, names)
        return value

    return check


def flag(name: str) -> Check:
    return lambda value: require_flag(name, value)


def path(expected: str) -> Check:
    return lambda value: require_path(expected, value)


def function(expected: str) -> Check:
    return lambda value: require_function(expected, value)


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def or_function(check: Check) -> Check:
    return lambda value: value if callable(value) else check(value)


def _reduction(value: Any) -> Any:
    """Only a Reduction has this method; ``reductions.mean`` for ``reductions.mean()`` is the likely slip."""
    if isinstance(value, type) or not hasattr(value, "all_finalize"):
        name = getattr(value, "__name__", None) if callable(value) else None
        received = type(value).__name__ if name is None else f"{name}, not called"
        raise invalid("a Reduction, for instance reductions.mean()", received)
    return value


def collective(expected: str) -> Check:
    def check(value: Any) -> Any:
        if isinstance(value, type) or not hasattr(value, "all_gather"):
            raise invalid(expected, shown(value))
        return value

    return check


EXPECTED_LENGTH = "a window length that is an integer of 1 or more, or a function of the window index (of 32 bits)"
LENGTH = integer(EXPECTED_LENGTH)
"""The length of a window."""

UNTIL_FLUSH = MOST
"""The ``every`` of a window that a flush alone ends."""

_FLAGS = (
    "average_aggregated_gradients",
    "compat",
    "differentiate",
    "divided",
    "flush",
    "full",
    "fused",
    "grad_norm",
    "has_aux",
    "interleaved",
    "packed",
    "scale_local_gradients",
    "scales_by_weight",
    "sparse_as_dense",
    "unique",
    "use_grad_mean",
)
_FUNCTIONS = ("allreduce", "finalize", "gradients", "init", "loss", "merge", "update")

FIELDS: Mapping[str, Check] = {
    **{name: flag(name) for name in _FLAGS},
    **{name: function(f"a function as {name}") for name in _FUNCTIONS},
    "capacity": integer("a capacity of 1 row or more", highest=2**63 - 1),
    "every": or_function(LENGTH),
    "folder": path("a folder"),
    "holder": integer("a holder, from 0", 0),
    "index": integer("the index of a window, from 0", 0),
    "max_every": optional(LENGTH),
    "max_norm": number("a positive and finite max_norm", np.nextafter(0, 1)),
    "microbatches": integer("from 1 to 2**24 microbatches", highest=MOST_MICROBATCHES),
    "order": one_of("order 'sequential' or 'tree'", Order),
    "over": collective("a collective: LOCAL, jax_axis(name) or tf_replicas()"),
    "overflow": one_of("overflow of {}", Overflow),
    "precision": one_of("a precision of {}", Precision),
    "reduction": _reduction,
    "replicas": integer(f"from 1 to {MOST_REPLICAS} replicas", highest=MOST_REPLICAS),
    "should_skip_update_fn": optional(function("a skip function, or None")),
    "skip": optional(function("a skip function, or None")),
    "totals": optional(one_of("totals of {}, or None", Totals)),
    "weight": optional(function("a function as weight")),
}
"""The check of each setting, by its name."""
