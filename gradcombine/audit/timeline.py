"""A timeline of one call: operations in program order, with their compute, bytes moved and exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from gradcombine.audit.auditing import Audit
from gradcombine.audit.program import Loops, Program
from gradcombine.audit.subject import short, size_text
from gradcombine.audit.target import bounds
from gradcombine.reporting.sections import Band, Mark, Timeline

LANES = ("compute", "memory", "exchange")
BINS = 500
"""Horizontal resolution; narrower operations are averaged."""

DEEPEST = 3
"""Most levels of nested loops that are drawn."""


class _Step(NamedTuple):
    """One execution of an operation.

    Attributes:
      costs: lower bound of the time in each lane, in seconds; without published figures, flops and bytes.
      loops: enclosing loops.
      exchange: one-based index among the program's exchanges; 0 for other operations.
    """

    costs: tuple[float, float, float]
    loops: Loops
    exchange: int


def timeline(report: Audit) -> Timeline | None:
    """The timeline of one call; None for a graph, and if nothing is computed, moved or exchanged.

    Operations follow each other, each as wide as the largest of its three lower bounds; of a loop, one iteration is
    drawn. Without published figures, the width is the bytes moved and sent, and compute is relative to these.
    """
    published = report.target.figures is not None
    if not isinstance(report.program, Program):
        return None
    steps = list(_steps(report, report.program))
    costs = np.array([step.costs for step in steps]).reshape(-1, len(LANES))
    widths = costs.max(1) if published else costs[:, 1:].sum(1)
    ends = np.cumsum(widths)
    if not len(steps) or not ends[-1]:
        return None
    total, ends = float(ends[-1]), ends / ends[-1]
    if not published and (most := np.divide(costs[:, 0], widths, where=widths > 0, out=np.zeros_like(widths)).max()):
        costs[:, 0] /= most
    edges = np.linspace(0, 1, BINS + 1)
    heights = {
        name: np.diff(np.interp(edges, [0, *ends], [0, *np.cumsum(cost) / total])) * BINS
        for name, cost in zip(LANES, costs.T, strict=True)
    }
    words = _time if published else size_text
    return Timeline(
        {name: [min(1.0, float(h)) for h in height] for name, height in heights.items()},
        _bands(report.program, steps, [0.0, *ends.tolist()], total, published),
        [
            Mark(float(end - width / total / 2), str(step.exchange), _exchange(report, step.exchange))
            for step, end, width in zip(steps, ends, widths, strict=True)
            if step.exchange
        ],
        words(total),
        _note(report, published),
        f"Compute, memory and exchange of one call, {len(report.exchanges)} collectives",
    )


def _steps(report: Audit, program: Program) -> Iterator[_Step]:
    figures, number = report.target.figures, 0
    for name, x, loops in program.executed():
        exchange, moved, flops = program.exchange(name, x, ()), program.traffic(name, x), program.flops(name, x)
        exchanges = [] if exchange is None else [exchange]
        number += len(exchanges)
        if not (exchanges or moved or flops):
            continue
        if figures is None:
            costs = sum(flops.values()), float(moved), sum(one.sent() for one in exchanges)
        else:
            bound = bounds(report.target, flops, moved, exchanges)
            compute, memory, exchanged = (bound[lane].seconds or 0.0 for lane in LANES)
            costs = compute, memory, exchanged
        yield _Step(costs, loops, number if exchanges else 0)


def _bands(
    program: Program, steps: Sequence[_Step], starts: Sequence[float], total: float, published: bool
) -> list[Band]:
    """Bands over the drawn iteration of each loop."""
    bands = list[Band]()
    for depth in range(DEEPEST):
        for loops, group in groupby(enumerate(steps), key=lambda step: step[1].loops[: depth + 1]):
            (first, _), *others = group
            if len(loops) > depth:
                loop = loops[depth]
                width = starts[first + len(others) + 1] - starts[first]
                trips = "?" if loop.trips is None else f"{loop.trips:,}"
                each = (_time if published else size_text)(width * total)
                source = short(program.source(loop.operation))
                words = f"a loop of {trips} iterations, {each} each" + f", {source}" * bool(source)
                bands.append(Band(starts[first], width, depth, f"x {trips}", words))
    return bands


def _exchange(report: Audit, number: int) -> str:
    x = report.exchanges[number - 1]
    source = short(report.program.source(x.x))
    often = f", {x.times:,} times in a call" * (x.times > 1)
    return f"{number}: {x.kind} of {size_text(x.size)} {x.over}{often}" + f", {source}" * bool(source)


def _note(report: Audit, published: bool) -> str:
    loops = " One iteration of each loop is drawn."
    if not published:
        return (
            f"No rates are published for {report.target.name}: the width of an operation is the bytes that it moves "
            f"and sends, and its height in the compute lane is its operations per byte.{loops}"
        )
    unknown = [name for name, bound in report.bounds.items() if bound.seconds is None]
    omitted = f" Without {' and '.join(unknown)}, for which no rate is published." if unknown else ""
    return (
        "The width of an operation is the largest of its three lower bounds, and its height in a lane is the fraction "
        f"of that width which the lane takes. Operations follow each other.{loops}{omitted}"
    )


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
