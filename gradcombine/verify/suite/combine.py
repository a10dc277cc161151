"""Rows of the combine: one program for each place, run in every mode of a framework, and compared with NumPy's list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.types import AccumulateState, Array, Order, Scalar, Tree
from gradcombine.verify.check.laws import mapped
from gradcombine.verify.suite.classifier import Arrays, Batch, share, weighted_mean
from gradcombine.verify.suite.outcomes import BITS, BOUND, Finding, compared

MEAN = gc.reductions.mean()

ORDERS: tuple[Order, ...] = ("sequential", "tree")

LIST, TIME, REPLICAS, TIME_AND_REPLICAS = "list", "time", "replicas", "time x replicas"
"""Places of a row: gradients are combined in a list, over time, over replicas, or over time and then replicas."""

ONE_REPLICA, ANY_REPLICAS = (LIST, TIME), (REPLICAS, TIME_AND_REPLICAS)


class Contributions(NamedTuple):
    """Contributions of microbatches: flat dicts of float32 arrays, and their float32 numbers of examples."""

    values: Sequence[Tree]
    weights: Sequence[Scalar]

    def blocks(self, count: int) -> Contributions:
        """Cuts a block of consecutive contributions for each replica; stacks those that replicas combine together."""
        size = len(self.values) // count
        columns = [self.values[i::size] for i in range(size)]
        values = [{name: np.stack([value[name] for value in column]) for name in column[0]} for column in columns]
        return Contributions(values, [np.array(self.weights[i::size]) for i in range(size)])


Program: TypeAlias = Callable[[Sequence[Tree], Sequence[Scalar]], Tree]
"""Combines the contributions of one replica with those of the others."""


Update: TypeAlias = Callable[[Tree, AccumulateState, Scalar], AccumulateState]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def loop(update: Update, state: AccumulateState, values: Sequence[Tree], weights: Sequence[Scalar]) -> AccumulateState:
    for value, weight in zip(values, weights, strict=True):
        state = update(value, state, weight)
    return state


class Mode(NamedTuple):
    """A way to run programs.

    Attributes:
      places: the places that it has.
      compiled: compiles a function: the combination of a list, or the update of a window.
      window: ``window(update, state, values, weights)`` accumulates a full window.
      spread: ``spread(program, count, blocks)`` returns each replica's result; None for a single replica.
      on_demand: whether the mode is run with ``--full`` only.
    """

    places: Sequence[str] = ONE_REPLICA
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = eager
    window: Callable[[Update, AccumulateState, Sequence[Tree], Sequence[Scalar]], AccumulateState] = loop
    spread: Callable[[Program, int, Contributions], list[Tree]] | None = None
    on_demand: bool = False


class Framework(NamedTuple):
    """A framework.

    Attributes:
      name: its name.
      array: converts a NumPy array.
      over: the replicas, inside a program.
      modes: by name.
      measure: computes the gradient of a batch and its ``"loss"``, as one flat dict of the framework's arrays.
      audited: names of the findings in the audits of steps, by step, for a number of replicas.
    """

    name: str
    array: Callable[[Any], Array]
    over: Collective
    modes: Mapping[str, Mode]
    measure: Callable[[Mapping[str, Array], Batch], Mapping[str, Array]]
    audited: Callable[[int], dict[str, list[str]]]


class Case(NamedTuple):
    """A row of the combine.

    Attributes:
      framework, mode: how the program is run.
      place: what is combined: over replicas, each replica has one contribution, so there are as many as replicas; in
        all other places, all contributions; over time and replicas, replica r has the r-th block of them.
      replicas: number of replicas.
      order: order of addition.
    """

    framework: Framework
    mode: str
    place: str
    replicas: int
    order: Order

    @property
    def promise(self) -> str:
        """`BITS` or `BOUND`.

        The canonical tree gives the same bits in every mode and place, for every number of replicas; so does the
        sequential order without replicas. Over replicas, the sequential order is that of the framework's all-reduce,
        which does not promise bits. The list in NumPy is the reference, and is compared with the exact value only.
        """
        if self.framework.name == "numpy":
            return BOUND if self.place == LIST else BITS
        return BOUND if self.order == "sequential" and self.place in ANY_REPLICAS else BITS

    def inputs(self, contributions: Contributions) -> Contributions:
        """The contributions that the row combines."""
        count = self.replicas if self.place == REPLICAS else None
        return Contributions(contributions.values[:count], contributions.weights[:count])

    def run(self, inputs: Contributions) -> list[Arrays]:
        """Every replica's result."""
        spread = self.framework.modes[self.mode].spread
        if spread is None:
            return mapped(np.asarray, [self.program(*mapped(self.framework.array, inputs))])
        return mapped(np.asarray, spread(self.program, self.replicas, inputs.blocks(self.replicas)))

    def program(self, values: Sequence[Tree], weights: Sequence[Scalar]) -> Tree:
        """Combines the contributions of one replica with those of the others."""
        mode, over, order = self.framework.modes[self.mode], self.framework.over, self.order
        if self.place == LIST:
            return mode.compiled(partial(gc.combine, MEAN, order=order))(values, weights)
        if self.place == REPLICAS:
            return gc.all_reduce(MEAN, values[0], over=over, weight=weights[0], order=order)
        accumulator = gc.accumulate(MEAN, every=len(values), order=order)
        state = mode.window(mode.compiled(accumulator.update), accumulator.init(values[0]), values, weights)
        if self.place == TIME_AND_REPLICAS:
            state = gc.merge_replicas(MEAN, state, over=over, order=order)
        return accumulator.value(state)

    def judged(self, results: list[Arrays], contributions: Contributions) -> Finding:
        """Compares the replicas' results with NumPy's list, and the worst of them with the exact mean."""
        values, weights = self.inputs(contributions)
        additions = len(values) - 1 if self.order == "sequential" else (len(values) - 1).bit_length()
        reference = gc.combine(MEAN, values, weights, order=self.order)
        exact, bound = weighted_mean(values, weights, additions)
        worst = max(share(result, exact, bound) for result in results)
        labels = self._asdict() | {"framework": self.framework.name}
        return compared("combine", labels, self.promise, results, [reference] * self.replicas, worst)


def cases(framework: Framework, counts: Sequence[int], full: bool) -> Iterator[Case]:
    """Rows of a framework, including the modes ``on_demand`` if ``full``; ``counts``: of replicas."""
    for name, mode in framework.modes.items():
        if full or not mode.on_demand:
            for order, place, count in product(ORDERS, mode.places, counts if mode.spread else (1,)):
                yield Case(framework, name, place, count, order)


def combined(
    cases: Sequence[Case], contributions: Contributions, inject_fault: bool, progress: Callable[[str], None]
) -> Iterator[Finding]:
    """Runs and judges rows; with ``inject_fault``, the last one gets contributions with one flipped bit."""
    for case in cases:
        progress(f"{case.framework.name}, {case.mode}, {case.place}")
        inputs = case.inputs(contributions)
        if inject_fault and case is cases[-1]:
            inputs = flip_lowest_bit(inputs, case.order)
        yield case.judged(case.run(inputs), contributions)


def flip_lowest_bit(contributions: Contributions, order: Order) -> Contributions:
    """Flips the lowest bit of one element of the first contribution, one for which this changes the combined bits."""
    (first, *others), weights = contributions
    flipped = (first["w"].view(np.uint32) ^ np.uint32(1)).view(np.float32)
    both = ([first | {"w": leaf}, *others] for leaf in (first["w"], flipped))
    before, after = (gc.combine(MEAN, values, weights, order=order)["w"] for values in both)
    changed = np.argmax(before != after)
    corrupted = first["w"].copy()
    corrupted.flat[changed] = flipped.flat[changed]
    return Contributions([first | {"w": corrupted}, *others], weights)
