"""The types that every floor shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

Array: TypeAlias = Any
"""A NumPy array, a JAX array or tracer, or a TensorFlow tensor."""

Tree: TypeAlias = Any
"""Nested dicts, lists, tuples, NamedTuples and registered JAX nodes of arrays and None."""

State: TypeAlias = Any
"""The partial result of a reduction: a NamedTuple tree of arrays."""

Order: TypeAlias = Literal["sequential", "tree"]
"""``"sequential"``: one running value. ``"tree"``: the canonical binary tree over the contributions' numbers."""


class Reduction(NamedTuple):
    """A monoid over gradient trees, as pure functions.

    Attributes:
      name: what error messages call it.
      init: ``init(like) -> state``, the empty state for trees shaped like ``like`` (arrays or shape/dtype specs).
      update: ``update(state, value, weight=1) -> state``, one more contribution. A weight of 0 changes nothing.
      merge: ``merge(a, b) -> state``, two partial states become one; ``a`` holds the earlier contributions.
      finalize: ``finalize(state) -> value``, the combined tree.
      clear: ``clear(state) -> state``, the empty state of the same shapes.
      all_merge: ``all_merge(state, collective, order) -> state``, ``merge`` over the states of all replicas.
      averages: whether the result is per unit of weight (a mean). `per_leaf` hands its weight to such reductions;
        the others learn from it only whether the contribution is present.
      update_many: ``update_many(state, values, weights, order) -> state``: the state merged with all the values,
        combined in this order, to the bit, in less time; it returns None for weights that it does not take. None for
        reductions that have no such way.
      all_finalize: ``all_finalize(state, collective, weight) -> value``: ``finalize`` of ``all_merge`` of states that
        have each had one contribution, of this weight, with less to exchange. None for reductions without such a way.
      derivative: the reduction whose derivative is this one's. None: derivatives flow through these functions.
    """

    name: str
    init: Callable[[Tree], State]
    update: Callable[..., State]
    merge: Callable[[State, State], State]
    finalize: Callable[[State], Tree]
    clear: Callable[[State], State]
    all_merge: Callable[[State, Any, Order], State]
    averages: bool = False
    update_many: Callable[[State, Sequence[Tree], Sequence[Any], Order], State | None] | None = None
    all_finalize: Callable[[State, Any, Any], Tree] | None = None
    derivative: Reduction | None = None


class AccumulateState(NamedTuple):
    """A window of contributions over time.

    Attributes:
      levels: partial states of the reduction. One under order ``"sequential"``; under ``"tree"`` a binary counter,
        where level ``i`` is empty or holds 2**i contributions.
      step: int32 scalar, the contributions of this window so far, those of weight 0 counted.
      index: int32 scalar, the number of this window, from 0.
    """

    levels: tuple[State, ...]
    step: Array
    index: Array
