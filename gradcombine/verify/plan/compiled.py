"""A way's programs, compiled, and what a window of them takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from gradcombine.audit import Audit, OutOfMemoryError, Target, audit
from gradcombine.audit.program import Program
from gradcombine.audit.subject import Exchange
from gradcombine.audit.target import bounds
from gradcombine.errors import GradCombineError
from gradcombine.integrations.jax import run_if
from gradcombine.verify.plan import ways, written
from gradcombine.verify.plan.planning import Figures, Row
from gradcombine.verify.plan.prediction import Microbatch, predict
from gradcombine.verify.plan.problem import Problem
from gradcombine.verify.plan.ways import Part, Way


def microbatch_of(problem: Problem, target: Target) -> Microbatch | None:
    """None where not even that fits."""
    try:
        window = _compiled([ways.microbatch(problem)], target)
    except OutOfMemoryError:
        return None
    except Exception as error:  # of the loss, which is not ours
        raise GradCombineError("plan", "a loss whose gradients compile", _reason(error)) from None
    ((report, calls),) = window.audits
    memory = report.memory
    return Microbatch(
        window.figures.moved / calls, window.figures.sent / calls, 0 if memory is None else memory.temporary
    )


def row_of(problem: Problem, way: Way, target: Target, base: Microbatch | None) -> Row:
    row = Row(way.name, written.code(problem, way), [], None, None, {}, None, "")
    try:
        parts = ways.programs(problem, way)
        row = row._replace(predicted=base and predict(problem, way, base))
        window = _compiled(parts, target)
    except OutOfMemoryError as error:  # the compiler's
        return row._replace(lacking=_exceeded(str(error)), refused=_reason(error))
    except Exception as error:  # of a framework, a compiler or the loss: the other ways may do without it
        return row._replace(refused=_reason(error))
    most = math.inf if target.figures is None else target.figures.memory
    return row._replace(
        calls=window.audits,
        compiled=window.figures,
        bounds=bounds(target, window.flops, window.figures.moved, window.exchanges),
        lacking=int(max(0, window.figures.memory - most)),
    )


def _reason(error: Exception) -> str:
    if isinstance(error, GradCombineError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _exceeded(message: str) -> int | None:
    """Bytes, as far as the compiler's words tell.

    >>> _exceeded("Used 17.50G of 15.75G hbm. Exceeded hbm capacity by 1.75G.") == 7 * 2**28
    True
    >>> _exceeded("required for HLO temporaries (29.75G) exceeds available HBM (15.75G).") == 14 * 2**30
    True
    """
    size = r"([\d.]+)([KMGT]?)"
    if found := re.search(rf"xceeded \w+ capacity by {size}", message):
        return _bytes(*found.groups())
    found = re.search(rf"\({size}\) exceeds available \w+ \({size}\)", message)
    return None if found is None else _bytes(*found.groups()[:2]) - _bytes(*found.groups()[2:])


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


RUN_IF = run_if.__file__
"""Where the branches come from that the library's steps have."""


class _Window(NamedTuple):
    """Cost of a window of compiled programs on each device."""

    audits: list[tuple[Audit, int]]
    figures: Figures
    flops: dict[int, float]
    exchanges: list[Exchange]


def _compiled(parts: Sequence[Part], target: Target) -> _Window:
    # What does not fit is a row too, with its figures.
    figures = target.figures
    roomy = target._replace(figures=figures and figures._replace(memory=2**62))
    audits = [(audit(part.step, *part.args, target=roomy)._replace(target=target), part.calls) for part in parts]
    flops, moved, exchanges = dict[int, float](), 0, list[Exchange]()
    for report, calls in audits:
        program = cast("Program", report.program)  # of a function of JAX
        rare = set(_ends(program))
        for name, _, size, products in program.work():
            often = 1 if name in rare else calls
            moved += often * size
            for width, count in products.items():
                flops[width] = flops.get(width, 0.0) + often * count
        for exchange in report.exchanges:
            exchanges += [exchange] * (1 if exchange.computation in rare else calls)
    peaks = [report.memory.peak for report, _ in audits if report.memory is not None]
    sent = sum(x.times * x.sent() for x in exchanges)
    return _Window(audits, Figures(moved, sent, max(peaks, default=0)), flops, exchanges)


def _ends(program: Program) -> Iterator[str]:
    """The computations of the branch that ends a window, which one call of a window takes."""
    for _, x, _ in program.executed():
        if x.opcode in ("while", "conditional") and any(frame.file == RUN_IF for frame in program.frames(x)):
            heads = x.called("body") if x.opcode == "while" else program.bodies(x)
            for head in heads:
                yield from {inner for inner, _, _ in program.executed(head)}
