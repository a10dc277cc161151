"""The line of a step's source that a cause comes from, where its program in JAX has one line that can be meant.

A mean of means divides by the number of microbatches, or of parts on all devices: by 2 where there are 2 of them, by 4
where there are 4; or by the counter of `optax.MultiSteps`, where that is updated more than once. A term of the loss is
divided where it becomes smaller by as much as a divisor becomes larger. An accumulator that is too narrow is added to,
in its own dtype, within a scan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from gradcombine.audit.subject import LIBRARIES
from gradcombine.errors import GradCombineError
from gradcombine.verify.check.case import BY_NUMBER
from gradcombine.verify.check.leaves import is_float_dtype
from gradcombine.verify.check.retyping import operations
from gradcombine.verify.check.running import WHOLE, NotFiniteError, NotWide, Split, Subject
from gradcombine.verify.check.standard import Floats, flat
from gradcombine.verify.check.step_report import Cause
from gradcombine.verify.compare.ulp import rounding_unit

Line: TypeAlias = tuple[str, int]

NOT_OF_USERS = (*LIBRARIES, "/gradcombine/verify/", "/lib/python3")


def line_of(cause: Cause, detail: str, subject: Subject, split: Split) -> str:
    """The file and line, as "step.py:12"; empty where none is known, or several could be meant."""
    shapes = {x.shape for _, x in subject.param_leaves}
    found = set[Line]()
    if cause is Cause.MEAN_OF_MEANS or (cause is Cause.SCALED and BY_NUMBER in detail):
        found = _divided(subject, split, shapes) or _divided(subject, split, {()}) or _averaged(subject, split)
    elif cause is Cause.PRECISION:
        found = set(_narrow_sums(_program(subject, split), shapes))
    return in_words(*found.pop()) if len(found) == 1 else ""


def dividing(subject: Subject, split: Split, terms: Sequence[Floats]) -> str:
    """The line where each of these parts of a division's result is divided, by a number that is computed if there is
    such a line; empty where one of them has none or several."""
    divisions = [x for x in _program(subject, split) if x.primitive.name == "div"]
    computed = {line for x in divisions if not hasattr(x.invars[1], "val") for line in _users_line(x)}
    lines = [*dict.fromkeys(line for x in divisions for line in _users_line(x))]
    places = {line: i for i, line in enumerate(lines)}
    moved = np.ones((1 + len(lines), len(lines))) + STEP * np.eye(1 + len(lines), len(lines), -1)
    try:
        results = subject.scaled(split, lambda x: places.get(next(_users_line(x), ("", 0))), moved.tolist())
    except (NotWide, NotFiniteError):
        return ""
    still, *others = [flat(x.floats) for x in results]
    parts = [flat(x) for x in terms]
    matrix = np.stack([*parts, still - np.sum(parts, axis=0)], axis=1)
    found: list[list[Line]] = [[] for _ in parts]
    for line, made in zip(lines, others, strict=True):
        change = (still - made) / STEP  # the sum of what it divides
        times, *_ = np.linalg.lstsq(matrix, change)
        if np.linalg.norm(matrix @ times - change) <= 1e-3 * np.linalg.norm(change):
            for of_term, a in zip(found, times, strict=False):
                of_term += [line] if a > 0.5 else []
    chosen = [[x for x in of_term if x in computed] or of_term for of_term in found]
    return " and ".join(dict.fromkeys(in_words(*x[0]) for x in chosen)) if {*map(len, chosen)} == {1} else ""


STEP = 2.0**-20
"""By how much of itself a divisor is changed."""


def in_words(file: str, line: int) -> str:
    """A line as messages name it: files are named from here, if below."""
    path = Path(file).resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def _divided(subject: Subject, split: Split, shapes: set[tuple[int, ...]]) -> set[Line]:
    """Lines that divide by the number of parts, here and in another division, if there is one."""
    found = set(_divisions(_program(subject, split), split, shapes))
    others = (Split(k, split.devices) for k in (2, 4, 3, 5) if k != split.microbatches)
    other = next((x for x in others if subject.examples % (x.microbatches * x.devices) == 0), None)
    if other is not None:
        with suppress(GradCombineError):  # of a step that is not made for this number
            found &= set(_divisions(_program(subject, other), other, shapes))
    return found


def _averaged(subject: Subject, split: Split) -> set[Line]:
    """Lines that update `optax.MultiSteps`: more often than in one batch, or in a loop of several iterations."""
    one, program = (_program(subject, x) for x in (WHOLE, split))
    loops = [x for x in program if x.primitive.name == "scan" and x.params["length"] > 1]
    looped = [x for loop in loops for x in operations(loop.params["jaxpr"].jaxpr)]
    before, now = (Counter(_multi_steps(x)) for x in (one, program))
    return set(_multi_steps(looped)) | {line for line, times in now.items() if times > before[line]}


def _multi_steps(program: Sequence[Any]) -> Iterator[Line]:
    for x in program:  # optax traces its branches by themselves: the user's frame is that of the conditional
        within = operations(SimpleNamespace(eqns=[x]))
        if _is_of_multi_steps(x) and any(y.primitive.name == "div" and _is_of_multi_steps(y) for y in within):
            yield from _users_line(x)


def _is_of_multi_steps(equation: Any) -> bool:
    """Whether it is written there, and not in an optimizer that is called there."""
    file = next((frame.file_name for frame in _frames(equation) if "/jax/_src/" not in frame.file_name), "")
    return MULTI_STEPS.search(file) is not None


MULTI_STEPS = re.compile(r"/optax/(transforms|_src)/_?(accumulation|accumulating|wrappers)\.py$")
"""Files of `optax.MultiSteps`; nothing else in them divides."""


def _program(subject: Subject, split: Split) -> Sequence[Any]:
    traced = subject.program(subject.step(split), subject.batch)
    return [] if traced is None else list(operations(traced.retyped.program.jaxpr))


def _divisions(program: Sequence[Any], split: Split, shapes: set[tuple[int, ...]]) -> Iterator[Line]:
    numbers = {split.microbatches, split.devices, split.microbatches * split.devices} - {1}
    for x in program:
        if x.primitive.name not in ("div", "mul") or x.outvars[0].aval.shape not in shapes:
            continue
        for operand in x.invars[1:] if x.primitive.name == "div" else x.invars:
            value = getattr(operand, "val", None)
            if value is None or np.shape(value) != () or np.iscomplexobj(value):
                continue
            if not np.isfinite(number := float(value)) or number == 0:
                continue
            if any(np.isclose(number if x.primitive.name == "div" else 1 / number, n, rtol=1e-2) for n in numbers):
                yield from _users_line(x)


def _narrow_sums(program: Sequence[Any], shapes: set[tuple[int, ...]]) -> Iterator[Line]:
    for scan in (x for x in program if x.primitive.name == "scan"):
        body, first = scan.params["jaxpr"].jaxpr, scan.params["num_consts"]
        carried = set(map(id, body.invars[first : first + scan.params["num_carry"]]))
        for x in body.eqns:
            made = x.outvars[0].aval
            adds = x.primitive.name in ("add", "add_any") and carried & set(map(id, x.invars))
            if adds and made.shape in shapes and _is_narrow(made.dtype):
                yield from _users_line(x)


def _is_narrow(dtype: Any) -> bool:
    return is_float_dtype(dtype) and rounding_unit(np.dtype(dtype)) > rounding_unit(np.dtype(np.float32))


AT = "at "


def place_of(equation: Any) -> str:
    """A scope that keeps the user's line of an operation that is bound again."""
    return next((f"{AT}{file}:{line}" for file, line in _users_line(equation)), "bound")


def _users_line(equation: Any) -> Iterator[Line]:
    for scope in equation.source_info.name_stack.stack:
        if (name := getattr(scope, "name", "")).startswith(AT):
            file, _, line = name.removeprefix(AT).rpartition(":")
            yield file, int(line)
            return
    for frame in _frames(equation):
        if not any(part in frame.file_name for part in NOT_OF_USERS):
            yield frame.file_name, frame.line_num
            return


def _frames(equation: Any) -> Sequence[Any]:
    traceback = equation.source_info.traceback
    return [] if traceback is None else traceback.frames
