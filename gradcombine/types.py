"""The types that every floor shares."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

Array: TypeAlias = Any
"""A NumPy array, a JAX array or tracer, or a TensorFlow tensor."""

Tree: TypeAlias = Any
"""Nested dicts, lists, tuples, NamedTuples and registered JAX nodes of arrays and None."""

State: TypeAlias = Any
"""The partial result of a reduction: a NamedTuple tree of arrays."""

Order: TypeAlias = Literal["sequential", "tree"]
"""``"sequential"``: one running value. ``"tree"``: the canonical binary tree over the contributions' numbers."""


class BinaryCounter(NamedTuple):
    """Partial states of 1, 2, 4, 8 ... contributions.

    Attributes:
      stacked: a state of the reduction whose arrays have one more axis, the first. Level ``i`` holds 2**i contributions
        where bit ``i`` of ``filled`` is set, and anything where it is not; the last one holds all from there on.
      filled: int32 scalar, the contributions in the levels.
    """

    stacked: State
    filled: Array


class AccumulateState(NamedTuple):
    """A window of contributions over time.

    Attributes:
      levels: a tuple of one partial state of the reduction. Under order ``"tree"`` a `BinaryCounter` of several.
      step: int32 scalar, the contributions of this window so far, those of weight 0 counted.
      index: int32 scalar, the number of this window, from 0.
    """

    levels: tuple[State, ...] | BinaryCounter
    step: Array
    index: Array
