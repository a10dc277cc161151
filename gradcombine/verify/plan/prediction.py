"""Predicted cost of a way, from sizes and from one microbatch: the formulas of docs/plan.md."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcombine.verify.plan import recipes
from gradcombine.verify.plan.planning import Figures
from gradcombine.verify.plan.problem import Problem, plain
from gradcombine.verify.plan.ways import Way, reduction_of


class Microbatch(NamedTuple):
    """Cost of the gradients of one microbatch on each device, in bytes.

    Attributes:
      moved: in main memory, the gradients' writing included.
      sent: to other devices, along other axes than the replicas'.
      temporary: beside arguments and results.
    """

    moved: float
    sent: float
    temporary: float


class _Exchange(NamedTuple):
    """Of the sums of a window.

    Attributes:
      sent, moved: in a window.
      room: that it needs at a time.
    """

    sent: float
    moved: float
    room: float


def predict(problem: Problem, way: Way, one: Microbatch) -> Figures:
    """Predicts the cost of a window, where nothing is fused and nothing copied without need."""
    n, k = problem.replicas, problem.microbatches
    calls = 1 if way.calls == "window" else k
    split, sharded = way.place != "replicated", way.place == "zero2"
    optimizer = problem.beside(jax.eval_shape(problem.optimizer.init, plain(problem.params)))
    state = problem.beside(jax.eval_shape(reduction_of(way).init, plain(problem.params)))
    p, p_part, a = held(problem.params), held(_split(problem, problem.params)), held(state)
    o = held(_split(problem, optimizer) if split else optimizer)
    own = a / n if sharded else a
    sums = _exchange(way, n, k, a, held(_narrowed(state)) if "bfloat16" in way.numbers else a)
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
    working = one.temporary + p + (p if fsdp and n > 1 else 0)
    return Figures(moved, k * one.sent + sums.sent + gathers * (n - 1) / n * p, kept + max(working, sums.room))


def held(values: Any) -> int:
    """Bytes of specs on each device."""
    leaves = jax.tree.leaves(values)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def _exchange(way: Way, n: int, k: int, a: float, wire: float) -> _Exchange:
    """Of accumulators of a bytes, wire bytes as they are sent."""
    ring = (n - 1) / n
    if n == 1:
        return _Exchange(0, 0, 0)
    if way.place == "zero2":
        return _Exchange(k * ring * a, k * (a + a / n), a)
    if "exact" in way.numbers:
        # A byte of the level for each element, whose words have 12 or more.
        both = 13 / 12 * a
        return _Exchange(2 * ring * both, 2 * both, both)
    if {"compensated", "tree"} & set(way.numbers):
        return _Exchange((n - 1) * wire, (1 + 2 * n) * wire, n * wire)
    if way.place == "replicated":
        return _Exchange(2 * ring * wire, 2 * wire, wire)
    return _Exchange(ring * wire, wire + wire / n, wire)


def _narrowed(values: Any) -> Any:
    """Floats as bfloat16."""

    def one(x: Any) -> Any:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 2
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if narrow else x.dtype, sharding=x.sharding)

    return jax.tree.map(one, values)


def _split(problem: Problem, values: Any) -> Any:
    where = recipes.split(values, problem.mesh, problem.axis)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), values, where)
