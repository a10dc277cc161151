"""One interface to all optimizers under test, and the trace that one leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.types import Tree
from gradcombine.verify.check.retyping import NotWide as NotWide

OPERATION = "check_microbatches"

Loss: TypeAlias = Callable[[Any, Any], Any]
"""From parameters and a microbatch to its mean loss, a scalar."""

Leaves: TypeAlias = list[np.ndarray | None]
"""The leaves of a tree, None for no gradient."""


class Outcome(NamedTuple):
    """Result of an update.

    Attributes:
      moved: whether it moved a parameter.
      calls: by how much the inner optimizer's count of steps grew.
      reached: the gradient that the inner optimizer received, if it ran.
      changed: whether the updates differ from the inner optimizer's.
    """

    moved: bool
    calls: int
    reached: Leaves | None
    changed: bool


class Step(NamedTuple):
    """A microbatch: its weight, its gradient, and its outcome."""

    weight: float
    gradient: Leaves
    outcome: Outcome


Trace: TypeAlias = list[list[Step]]
"""The steps of every window."""


class Run(Protocol):
    """One training, step by step."""

    @property
    def params(self) -> Any: ...

    def step(self, gradient: Leaves, weight: float, last: bool) -> Outcome: ...


class Subject(Protocol):
    """A loss with an optimizer that accumulates."""

    def gradient(self, params: Any, microbatch: Any) -> Leaves: ...

    def wide_gradient(self, params: Any, microbatch: Any) -> Leaves:
        """The gradient, computed in float64.

        Raises:
          NotWide: where the loss cannot be computed in float64.
        """
        ...

    def start(self, params: Any, alone: bool) -> Run:
        """A new run; alone: of the accumulation without an optimizer, which leaves the parameters as they are."""
        ...


def leaves(value: Tree) -> Leaves:
    """The leaves as NumPy arrays."""
    return [None if is_absent(x) else np.asarray(x) for x in tree.flatten(OPERATION, value)[0]]


def observe(
    subject: Subject, params: Any, windows: Sequence[Sequence[Any]], weights: Sequence[Sequence[float]]
) -> Trace:
    """Trains over the windows, and records the outcome of each microbatch."""
    run = subject.start(params, alone=False)
    trace: Trace = []
    for microbatches, scales in zip(windows, weights, strict=True):
        steps: list[Step] = []
        for i, (microbatch, weight) in enumerate(zip(microbatches, scales, strict=True)):
            gradient = subject.gradient(run.params, microbatch)
            steps.append(Step(weight, gradient, run.step(gradient, weight, i + 1 == len(microbatches))))
        trace.append(steps)
    return trace


Change: TypeAlias = Callable[[int, int, int, np.ndarray], np.ndarray]
"""From the numbers of window, microbatch and leaf, and the leaf, to another one of the same shape and dtype."""


def replay(subject: Subject, params: Any, trace: Trace, change: Change) -> Trace:
    """Accumulates the gradients of a trace again, changed, with nothing after the accumulation."""
    run = subject.start(params, alone=True)
    again: Trace = []
    for w, window in enumerate(trace):
        steps: list[Step] = []
        for i, step in enumerate(window):
            gradient: Leaves = [None if x is None else change(w, i, leaf, x) for leaf, x in enumerate(step.gradient)]
            outcome = run.step(gradient, step.weight, i + 1 == len(window))
            steps.append(Step(step.weight, gradient, outcome))
        again.append(steps)
    return again
