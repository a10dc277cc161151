"""Compares small constants such as epsilons in the JAX programs of one batch and of a division.

A different epsilon may change the result by less than the rounding bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradcombine.verify.check.retyping import operations
from gradcombine.verify.check.running import ONE_BATCH, Split, Subject

SMALL = 1e-2
"""Upper bound of epsilons: smaller constants that are added, or are an operand of a maximum."""


def other_constants(subject: Subject, split: Split) -> str:
    """Describes epsilons that differ between one batch and a division; empty if none do or a program is unknown."""
    one, divided = (_epsilons(subject, x) for x in (ONE_BATCH, split))
    only_one, only_divided = sorted(one - divided), sorted(divided - one)
    # An epsilon that only one of the programs has may be a guard.
    if not only_one or not only_divided:
        return ""
    first, second = (", ".join(f"{x:g}" for x in values) for values in (only_one, only_divided))
    return f"constants: {first} in one batch but {second} in {split}, a difference that rounding may hide"


def _epsilons(subject: Subject, split: Split) -> set[float]:
    program = subject.program(subject.step(split), subject.batch)
    equations: Iterable[Any] = [] if program is None else operations(program.retyped.program.jaxpr)
    constants = [
        float(x.val)
        for operation in equations
        if operation.primitive.name in ("add", "max")
        for x in operation.invars
        if hasattr(x, "val") and getattr(x.val, "ndim", 0) == 0 and "float" in x.aval.dtype.name
    ]
    return {float(f"{x:.6g}") for x in constants if 0 < x < SMALL}
