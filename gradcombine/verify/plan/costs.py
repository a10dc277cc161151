# pyright: standard
"""Cost of a window for each strategy: of the compiled programs, and as predicted by the formulas of docs/plan.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from gradcombine import reductions, wires
from gradcombine.audit import Audit, OutOfMemoryError, Target, audit
from gradcombine.audit.program import Program
from gradcombine.audit.subject import Exchange
from gradcombine.audit.target import Bound, bounds
from gradcombine.errors import GradCombineError, invalid
from gradcombine.integrations.jax import jax_window, value_and_grad
from gradcombine.types import Tree
from gradcombine.verify.plan.problem import Problem, plain
from gradcombine.verify.plan.programs import Part, code, programs, split_specs
from gradcombine.verify.plan.strategies import Figures, Row, Strategy
from gradcombine.wires import Wire


def microbatch_of(problem: Problem, target: Target) -> Figures | None:
    """Compiles the gradients of one microbatch, without an exchange over the replicas.

    Returns:
      Bytes that are moved, sent along axes other than the replicas', and needed in addition to arguments and results;
      None if they do not fit in memory.
    """
    try:
        audits, figures, _ = _compiled([_microbatch(problem)], target)
    except OutOfMemoryError:
        return None
    except Exception as error:  # the loss is foreign code
        raise invalid("a loss whose gradients compile", _reason(error)) from None
    ((report, calls),) = audits
    memory = report.memory
    return Figures(figures.moved / calls, figures.sent / calls, 0 if memory is None else memory.temporary)


def _microbatch(problem: Problem) -> Part:
    """The gradients of one microbatch on each replica, not reduced over the replicas."""
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


def row_of(problem: Problem, strategy: Strategy, target: Target, microbatch: Figures | None) -> Row:
    row = Row(strategy.name, code(problem, strategy), [], None, None, {}, None, "")
    try:
        parts = programs(problem, strategy)
        row = row._replace(predicted=microbatch and predict(problem, strategy, microbatch))
        audits, compiled, limits = _compiled(parts, target)
    except OutOfMemoryError as error:
        return row._replace(lacking=_exceeded(str(error)), refused=_reason(error))
    except Exception as error:  # of a framework, the compiler or the loss; other strategies may work
        return row._replace(refused=_reason(error))
    capacity = math.inf if target.figures is None else target.figures.memory
    lacking = int(max(0, compiled.memory - capacity))
    return row._replace(calls=audits, compiled=compiled, bounds=limits, lacking=lacking)


def _reason(error: Exception) -> str:
    if isinstance(error, GradCombineError):
        return str(error).removeprefix(": ")  # an error of this package has no name of an operation yet
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _exceeded(message: str) -> int | None:
    """Bytes by which memory is exceeded, parsed from the compiler's message; None if it does not say.

    >>> _exceeded("Used 17.50G of 15.75G hbm. Exceeded hbm capacity by 1.75G.") == 7 * 2**28
    True
    >>> _exceeded("required for HLO temporaries (29.75G) exceeds available HBM (15.75G).") == 14 * 2**30
    True
    """
    size = r"([\d.]+)([KMGT]?)"
    if match := re.search(rf"xceeded \w+ capacity by {size}", message):
        return _bytes(*match.groups())
    match = re.search(rf"\({size}\) exceeds available \w+ \({size}\)", message)
    return None if match is None else _bytes(*match.groups()[:2]) - _bytes(*match.groups()[2:])


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


RUN_IF = jax_window.__file__
"""Source file of the conditionals at the boundary of a window."""


def _compiled(parts: Sequence[Part], target: Target) -> tuple[list[tuple[Audit, int]], Figures, dict[str, Bound]]:
    """The audit and number of calls of each program, and the cost and lower bounds of a window on each device."""
    # With unlimited memory: programs that do not fit get a row with figures, too.
    figures = target.figures
    unlimited = target._replace(figures=figures and figures._replace(memory=2**62))
    unbound = [(audit(step, *args, target=unlimited), calls) for step, args, calls in parts]
    audits = [(x._replace(target=x.target._replace(figures=figures)), calls) for x, calls in unbound]
    flops, moved, exchanges = dict[int, float](), 0, list[Exchange]()
    for report, calls in audits:
        program = cast("Program", report.program)  # a JAX program
        boundary = set(_boundary(program))
        for name, _, size, products in program.work():
            times = 1 if name in boundary else calls
            moved += times * size
            for width, count in products.items():
                flops[width] = flops.get(width, 0.0) + times * count
        for exchange in report.exchanges:
            exchanges += [exchange] * (1 if exchange.computation in boundary else calls)
    peaks = [report.memory.peak for report, _ in audits if report.memory is not None]
    sent = sum(x.times * x.sent() for x in exchanges)
    return audits, Figures(moved, sent, max(peaks, default=0)), bounds(audits[0][0].target, flops, moved, exchanges)


def _boundary(program: Program) -> Iterator[str]:
    """Names of the computations in the conditional at the boundary, which are executed once per window."""
    for _, x, _ in program.executed():
        if x.opcode in ("while", "conditional") and any(frame.file == RUN_IF for frame in program.frames(x)):
            heads = x.called("body") if x.opcode == "while" else program.bodies(x)
            for head in heads:
                yield from {inner for inner, _, _ in program.executed(head)}


def predict(problem: Problem, strategy: Strategy, microbatch: Figures) -> Figures:
    """Predicts the cost of a window, without fusion and without unnecessary copies."""
    n, k = problem.replicas, problem.microbatches
    calls = 1 if strategy.calls == "window" else k
    sharded, scattered, fsdp = strategy.place != "replicated", strategy.place == "zero2", strategy.place == "fsdp"
    optimizer = problem.with_shardings(jax.eval_shape(problem.optimizer.init, plain(problem.params)))
    state = problem.with_shardings(jax.eval_shape(reductions.mean(**strategy.mean).init, plain(problem.params)))
    # The variables of the formulas in docs/plan.md.
    p, p_part, a = device_bytes(problem.params), device_bytes(split_specs(problem, problem.params)), device_bytes(state)
    o = device_bytes(split_specs(problem, optimizer) if sharded else optimizer)
    accumulators = a / n if scattered else a
    wire = strategy.mean.get("wire")
    if any(size > 1 for name, size in problem.mesh.shape.items() if name != problem.axis):
        wire = None  # leaves stay wide beside axes that the compiler shards
    sums = _exchange(strategy, n, k, a, a if wire is None or n == 1 else _encoded_bytes(state, wire, n))
    gathers = {"replicated": 0, "zero1": 1, "zero2": 1, "fsdp": calls}[strategy.place] * (n > 1)

    # The binary counter has a sum on each level, and on average adds on two of them.
    levels = k.bit_length() if "tree" in strategy.numbers else 1
    passes = 2 * (levels + 1) if levels > 1 else 2
    within = k * (microbatch.moved + (accumulators if scattered else p) + passes * accumulators)
    update = {"replicated": 2 * p, "fsdp": 2 * p_part}.get(strategy.place, p_part + 3 * p) + 2 * o
    moved = within + sums.moved + (a / n if sharded else a) + update + gathers * (p_part + p)

    batch = problem.batch if calls == 1 else problem.part(k)
    persistent = (p_part if fsdp else p) + o + device_bytes(batch) + levels * accumulators
    working = microbatch.memory + p + (p if fsdp and n > 1 else 0)
    sent = k * microbatch.sent + sums.sent + gathers * (n - 1) / n * p
    return Figures(moved, sent, persistent + max(working, sums.memory))


def device_bytes(values: Tree) -> int:
    """Bytes of specs on each device."""
    leaves = jax.tree.leaves(values)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def _exchange(strategy: Strategy, n: int, k: int, a: float, encoded: float) -> Figures:
    """Cost of the exchange of accumulators of ``a`` bytes, sent as ``encoded`` bytes."""
    ring, exact = (n - 1) / n, 13 / 12 * a
    if n == 1:
        return Figures(0, 0, 0)
    if strategy.place == "zero2":
        return Figures(k * (encoded + a / n), k * ring * encoded, encoded)
    if "exact" in strategy.numbers:  # words of at least 12 bytes per element, and a byte for its level
        return Figures(2 * exact, 2 * ring * exact, exact)
    if {"compensated", "tree"} & set(strategy.numbers):
        return Figures((1 + 2 * n) * encoded, (n - 1) * encoded, n * encoded)
    if strategy.place == "replicated":
        return Figures(2 * encoded, 2 * ring * encoded, encoded)
    return Figures(encoded + encoded / n, ring * encoded, encoded)


def _encoded_bytes(values: Tree, wire: Wire, n: int) -> float:
    """Bytes on each device as encoded by a wire, with the smallest encoding per leaf; 2 (n - 1) / n of it is sent."""
    total = 0.0
    for path, x in jax.tree_util.tree_leaves_with_path(values):
        elements = math.prod(x.sharding.shard_shape(x.shape))
        is_encoded = jnp.issubdtype(x.dtype, jnp.floating) and not wire.keeps(jax.tree_util.keystr(path), x.shape)
        costs = wires.bytes_sent(wire, elements, n, x.dtype.itemsize)
        total += (min(costs.values()) if is_encoded else costs["wide"]) * n / (2 * (n - 1))
    return total
