"""Small constants of a step's JAX program, as epsilons are, that are others in a division than in one batch.

An epsilon that is another one may move a result by less than rounding is allowed to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradcombine.verify.check.retyping import operations
from gradcombine.verify.check.running import WHOLE, Split, Subject

SMALL = 1e-2
"""Below it, a constant that is added or bounds something from below is taken for an epsilon."""


def other_constants(subject: Subject, split: Split) -> str:
    """Names the epsilons of one batch that others replace; empty where none does, or a program cannot be read."""
    whole, divided = (_epsilons(subject, x) for x in (WHOLE, split))
    ours, theirs = sorted(whole - divided), sorted(divided - whole)
    # A guard that one of them has in addition may be right.
    if not ours or not theirs:
        return ""
    first, second = (", ".join(f"{x:g}" for x in values) for values in (ours, theirs))
    return f"constants: {first} in one batch, and {second} in {split}, which rounding may hide"


def _epsilons(subject: Subject, split: Split) -> set[float]:
    program = subject.program(subject.step(split), subject.batch)
    found: Iterable[Any] = [] if program is None else operations(program.retyped.program.jaxpr)
    constants = [
        float(x.val)
        for operation in found
        if operation.primitive.name in ("add", "max")
        for x in operation.invars
        if hasattr(x, "val") and getattr(x.val, "ndim", 0) == 0 and "float" in x.aval.dtype.name
    ]
    return {float(f"{x:.6g}") for x in constants if 0 < x < SMALL}
