"""Validation of settings: one table, from the name of a parameter or field to its check.

Public functions check their arguments at the entry, and code behind them does not check again:

>>> check(order="tree", max_every=None)
>>> valid("every", np.int64(4))
4
>>> check(order="left")
Traceback (most recent call last):
    ...
gradcombine.errors.GradCombineError: : expected order 'sequential' or 'tree', received 'left'

(`gradcombine.errors.operation` adds the name of the function.) A dataclass of settings derives from `Settings`, whose
``__post_init__`` checks the fields whose names are in the table:

>>> @dataclass(frozen=True)
... class Example(Settings):
...     every: int
...     order: Order = "sequential"
>>> Example(np.int64(4))
Example(every=4, order='sequential')

Arguments of a single function are not in the table; it calls `require_integer` etc. of `gradcombine.errors` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
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
"""Returns the valid value, converted to one type; raises GradCombineError for an invalid one."""

MOST_MICROBATCHES = 1 << 24
"""Largest window whose microbatches are counted in float32, which represents all integers up to 2**24."""


@dataclass(frozen=True)
class Settings:
    """Base class of settings: checks and converts the fields that are in the table, on construction."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in FIELDS:
                object.__setattr__(self, field.name, valid(field.name, getattr(self, field.name)))


def check(**settings: Any) -> None:
    """Raises GradCombineError unless all settings pass the checks of their names."""
    for name, value in settings.items():
        FIELDS[name](value)


def valid(name: str, value: object) -> Any:
    """Checks the value of the setting ``name`` and returns it, converted."""
    return FIELDS[name](value)


def one_of(expected: str, literal: object) -> Check:
    """A check for the strings of a Literal type; ``{}`` in ``expected`` stands for their list."""
    names = get_args(literal)

    def check(value: Any) -> Any:
        require_one_of(expected.format(list(names)), value, names)
        return value

    return check


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _reduction(value: Any) -> Any:
    # This module cannot import Reduction; no other class has the method.
    if isinstance(value, type) or not hasattr(value, "all_finalize"):
        name = getattr(value, "__name__", None) if callable(value) else None
        # The usual mistake: reductions.mean in place of reductions.mean().
        received = type(value).__name__ if name is None else f"{name}, not called"
        raise invalid("a Reduction, for instance reductions.mean()", received)
    return value


def collective(expected: str) -> Check:
    def check(value: Any) -> Any:
        if isinstance(value, type) or not hasattr(value, "all_gather"):
            raise invalid(expected, shown(value))
        return value

    return check


EXPECTED_LENGTH = "a window length that is an integer of 1 or more, or a function of the window index (in int32)"
LENGTH = partial(require_integer, EXPECTED_LENGTH)

UNTIL_FLUSH = MOST
"""The ``every`` of a window that only a flush ends."""

_FLAGS = (
    "average_aggregated_gradients",
    "compat",
    "differentiate",
    "full",
    "grad_norm",
    "has_aux",
    "interleaved",
    "scale_local_gradients",
    "scales_by_weight",
    "sparse_as_dense",
    "unique",
    "use_grad_mean",
)
_SKIP = optional(partial(require_function, "a skip function, or None"))
_FUNCTIONS = ("allreduce", "finalize", "gradients", "init", "loss", "merge", "update")

FIELDS: Mapping[str, Check] = {
    **{name: partial(require_flag, name) for name in _FLAGS},
    **{name: partial(require_function, f"a function as {name}") for name in _FUNCTIONS},
    "capacity": partial(require_integer, "a capacity of 1 row or more", highest=2**63 - 1),
    "every": lambda value: value if callable(value) else LENGTH(value),
    "folder": partial(require_path, "a folder"),
    "holder": partial(require_integer, "a holder, from 0", lowest=0),
    "index": partial(require_integer, "the index of a window, from 0", lowest=0),
    "max_every": optional(LENGTH),
    "max_norm": partial(require_number, "a positive and finite max_norm", lowest=np.nextafter(0, 1)),
    "microbatches": partial(require_integer, "from 1 to 2**24 microbatches", highest=MOST_MICROBATCHES),
    "order": one_of("order 'sequential' or 'tree'", Order),
    "over": collective("a collective: LOCAL, jax_axis(name) or tf_replicas()"),
    "overflow": one_of("overflow of {}", Overflow),
    "precision": one_of("a precision of {}", Precision),
    "reduction": _reduction,
    "replicas": partial(require_integer, f"from 1 to {MOST_REPLICAS} replicas", highest=MOST_REPLICAS),
    "should_skip_update_fn": _SKIP,
    "skip": _SKIP,
    "totals": optional(one_of("totals of {}, or None", Totals)),
    "weight": optional(partial(require_function, "a function as weight")),
}
"""The check of each setting, by the setting's name."""
