"""A timeline of one call: the operations in order, with their computation, bytes and exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gradcombine.audit.auditing import Audit
from gradcombine.audit.program import Loops, Program
from gradcombine.audit.subject import short, size_text
from gradcombine.audit.target import bounds
from gradcombine.audit.tensorflow.graph import Graph
from gradcombine.reporting.sections import Band, Mark, Timeline

LANES = ("compute", "memory", "exchange")
BINS = 500
"""Across the drawing: what is narrower is averaged."""

DEEPEST = 3
"""Loops within loops that are drawn."""


class _Step(NamedTuple):
    """One operation, of one turn of the loops around it.

    Attributes:
      costs: in each lane, seconds at the bound; where nothing is published, operations and bytes.
      loops: around it.
      exchange: its number among the program's, from 1 on; 0 for what exchanges nothing.
    """

    costs: tuple[float, float, float]
    loops: Loops
    exchange: int


def timeline(report: Audit) -> Timeline | None:
    """The drawing of one call; None where nothing is computed, moved or exchanged, and for a graph.

    An operation is as wide as the longest of its three times at the bound, one after another; a turn of a loop is drawn
    once. Where nothing is published, an operation is as wide as the bytes that it moves and sends, and the height of
    what it computes is relative to that.
    """
    published = report.target.figures is not None
    if isinstance(report.program, Graph):
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
    figures = report.target.figures
    numbers = {(x.computation, x.x.name): i for i, x in enumerate(program.exchanges, 1)}
    for name, x, loops in program.executed():
        number, moved, flops = numbers.get((name, x.name), 0), program.traffic(name, x), dict[int, float]()
        for _, _, count, width in program.products(name, x):
            flops[width] = flops.get(width, 0.0) + count
        if not (number or moved or flops):
            continue
        exchanges = [program.exchanges[number - 1]._replace(loops=())] if number else []
        if figures is None:
            costs = sum(flops.values()), float(moved), sum(one.sent() for one in exchanges)
        else:
            bound = bounds(report.target, flops, moved, exchanges)
            compute, memory, exchange = (bound[lane].seconds or 0.0 for lane in LANES)
            costs = compute, memory, exchange
        yield _Step(costs, loops, number)


def _bands(
    program: Program, steps: Sequence[_Step], starts: Sequence[float], total: float, published: bool
) -> list[Band]:
    """The loops, from where each begins to where its turn ends."""
    found = list[Band]()
    for depth in range(DEEPEST):
        begun = 0
        for i in range(len(steps) + 1):
            around = steps[begun].loops[: depth + 1] if begun < len(steps) else ()
            if i < len(steps) and steps[i].loops[: depth + 1] == around:
                continue
            if len(around) > depth:
                loop = around[depth]
                width = starts[i] - starts[begun]
                turns = "?" if loop.trips is None else f"{loop.trips:,}"
                each = (_time if published else size_text)(width * total)
                source = short(program.source(loop.operation))
                words = f"a loop of {turns} iterations, {each} each" + f", {source}" * bool(source)
                found.append(Band(starts[begun], width, depth, f"x {turns}", words))
            begun = i
    return found


def _exchange(report: Audit, number: int) -> str:
    x = report.exchanges[number - 1]
    source = short(report.program.source(x.x))
    often = f", {x.times:,} times in a call" * (x.times > 1)
    return f"{number}: {x.kind} of {size_text(x.size)} over {x.members} devices{often}" + f", {source}" * bool(source)


def _note(report: Audit, published: bool) -> str:
    turns = " One iteration of a loop is drawn."
    if not published:
        return (
            f"Nothing is published of {report.target.name}: an operation is as wide as the bytes that it moves and "
            f"sends, and as high in the lane of compute as it computes for each byte.{turns}"
        )
    unknown = [name for name, bound in report.bounds.items() if bound.seconds is None]
    left = f" Without {' and '.join(unknown)}, of which no rate is published." if unknown else ""
    return (
        "An operation is as wide as the longest of its three times at the bound, one after another, and as high in a "
        f"lane as the part of this that the lane takes.{turns}{left}"
    )


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
