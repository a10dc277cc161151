# pyright: standard
"""Cost of a window of each way: of its programs, as compiled, and as predicted by the formulas of docs/plan.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from gradcombine import reductions, wires
from gradcombine.audit import Audit, OutOfMemoryError, Target, audit
from gradcombine.audit.program import Program
from gradcombine.audit.subject import Exchange
from gradcombine.audit.target import bounds
from gradcombine.errors import GradCombineError, invalid
from gradcombine.integrations.jax import run_if, value_and_grad
from gradcombine.types import Tree
from gradcombine.verify.plan.problem import Problem, plain
from gradcombine.verify.plan.ranking import Figures, Row
from gradcombine.verify.plan.ways import Part, Way, code, programs, split_specs
from gradcombine.wires import Wire


def microbatch_of(problem: Problem, target: Target) -> Figures | None:
    """Cost of the gradients of one microbatch: bytes that they move, send along other axes than the replicas', and need
    beside arguments and results; None where not even that fits.
    """
    try:
        window = _compiled([_microbatch(problem)], target)
    except OutOfMemoryError:
        return None
    except Exception as error:  # of the loss, which is not ours
        raise invalid("a loss whose gradients compile", _reason(error)) from None
    ((report, calls),) = window.audits
    memory = report.memory
    return Figures(window.figures.moved / calls, window.figures.sent / calls, 0 if memory is None else memory.temporary)


def _microbatch(problem: Problem) -> Part:
    """The gradients of one microbatch of each replica, and nothing else."""
    gradient = value_and_grad(problem.loss, 1, weight=problem.weight)

    def one(params: Tree, *batch: Tree) -> Tree:
        return jax.tree.map(lambda x: x[None], gradient(params, *batch)[1])

    rows = [P(problem.axis) if divided else P() for divided in problem.rows]
    mapped = jax.shard_map(
        one,
        mesh=problem.mesh,
        in_specs=(P(), *rows),
        out_specs=P(problem.axis),
        axis_names={problem.axis},
        check_vma=False,
    )
    return jax.jit(mapped), (problem.params, *problem.part(problem.microbatches)), problem.microbatches


def row_of(problem: Problem, way: Way, target: Target, base: Figures | None) -> Row:
    row = Row(way.name, code(problem, way), [], None, None, {}, None, "")
    try:
        parts = programs(problem, way)
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
    audits = [(audit(step, *args, target=roomy)._replace(target=target), calls) for step, args, calls in parts]
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


def predict(problem: Problem, way: Way, one: Figures) -> Figures:
    """Predicts the cost of a window, where nothing is fused and nothing copied without need."""
    n, k = problem.replicas, problem.microbatches
    calls = 1 if way.calls == "window" else k
    split, sharded = way.place != "replicated", way.place == "zero2"
    optimizer = problem.beside(jax.eval_shape(problem.optimizer.init, plain(problem.params)))
    state = problem.beside(jax.eval_shape(reductions.mean(**way.mean).init, plain(problem.params)))
    p, p_part, a = held(problem.params), held(split_specs(problem, problem.params)), held(state)
    o = held(split_specs(problem, optimizer) if split else optimizer)
    own = a / n if sharded else a
    wire = way.mean.get("wire")
    sums = _exchange(way, n, k, a, a if wire is None or n == 1 else _coded(state, wire, n))
    gathers = {"replicated": 0, "zero1": 1, "zero2": 1, "fsdp": calls}[way.place] * (n > 1)

    # The counter of the canonical tree holds a sum on each level, and adds on two of them on average.
    levels = k.bit_length() if "tree" in way.numbers else 1
    passes = 2 * (levels + 1) if levels > 1 else 2
    within = k * (one.moved + (own if sharded else p) + passes * own)
    end = (a / n if split else a) + {"replicated": 2 * p, "fsdp": 2 * p_part}.get(way.place, p_part + 3 * p) + 2 * o
    moved = within + sums.moved + end + gathers * (p_part + p)

    batch = problem.batch if calls == 1 else problem.part(k)
    fsdp = way.place == "fsdp"
    kept = (p_part if fsdp else p) + o + held(batch) + levels * own
    working = one.memory + p + (p if fsdp and n > 1 else 0)
    return Figures(moved, k * one.sent + sums.sent + gathers * (n - 1) / n * p, kept + max(working, sums.memory))


def held(values: Tree) -> int:
    """Bytes of specs on each device."""
    leaves = jax.tree.leaves(values)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def _exchange(way: Way, n: int, k: int, a: float, wire: float) -> Figures:
    """Cost of the exchange of accumulators of a bytes, wire bytes as they are sent, and the memory that it needs."""
    ring, both = (n - 1) / n, 13 / 12 * a
    if n == 1:
        return Figures(0, 0, 0)
    if way.place == "zero2":
        return Figures(k * (wire + a / n), k * ring * wire, wire)
    if "exact" in way.numbers:  # a byte of the level for each element, whose words have 12 or more
        return Figures(2 * both, 2 * ring * both, both)
    if {"compensated", "tree"} & set(way.numbers):
        return Figures((1 + 2 * n) * wire, (n - 1) * wire, n * wire)
    if way.place == "replicated":
        return Figures(2 * wire, 2 * ring * wire, wire)
    return Figures(wire + wire / n, ring * wire, wire)


def _coded(values: Tree, wire: Wire, n: int) -> float:
    """Bytes of specs on each device as a wire sends them, each leaf the cheapest way; 2 (n - 1) / n are sent."""
    total = 0.0
    for path, x in jax.tree_util.tree_leaves_with_path(values):
        elements = math.prod(x.sharding.shard_shape(x.shape))
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and not wire.keeps(jax.tree_util.keystr(path), x.shape)
        costs = wires.bytes_sent(wire, elements, n, x.dtype.itemsize)
        total += (min(costs.values()) if narrow else costs["wide"]) * n / (2 * (n - 1))
    return total
