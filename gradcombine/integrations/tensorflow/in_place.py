"""Contributions that are added to a window where it lies, without a second buffer of its size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from gradcombine import tree
from gradcombine.backends.tensorflow_backend import unguarded
from gradcombine.reductions.algebra import Reduction, Shortcuts
from gradcombine.types import AccumulateState, Array, BinaryCounter, State, Tree
from gradcombine.window import Window


class InPlace(NamedTuple):
    """One more contribution to a window whose accumulators stay where they are.

    Attributes:
      replaces: whether the contribution takes the window's place; a boolean scalar.
      terms: what is added to each accumulator, in its dtype; None for nothing.
      after: the state after it, without accumulators.
    """

    replaces: Array
    terms: list[Any]
    after: AccumulateState


def pays() -> bool:
    """Whether writing in place is the fast way here: in a graph that XLA does not compile.

    XLA copies a buffer that a conditional writes, and needs no second one for a plain assignment. Eagerly, the general
    way has the same operations. Either way gives the same bits.
    """
    return not tf.executing_eagerly() and tf.__internal__.get_enclosing_xla_context() is None


def is_added(window: Window, state: AccumulateState) -> bool:
    """Whether a contribution to this state is added to one accumulator a leaf, and nothing else."""
    return window.reduction.contribution is not None and not isinstance(state.levels, BinaryCounter)


def contribute(window: Window, state: AccumulateState, gradients: Tree, weight: Any) -> InPlace:
    """`Window.contribute`, of which the additions are left to `write`.

    Args:
      window: of a reduction that adds, see `is_added`.
      state: with variables as accumulators, which are not read.
      gradients, weight: as there.
    """
    assert window.reduction.contribution is not None
    level = state.levels[0]
    with unguarded():  # a product is made here, and added in a conditional
        part = window.reduction.contribution(level, gradients, weight)
    totals = replace(window, reduction=_of_states(window.reduction))
    after = totals.contribute(state._replace(levels=(_bare(level),)), _bare(part))
    return InPlace(window.is_full(state), [None if tree.is_static(x) else x for x in part.value], after)


def write(pending: InPlace, accumulators: Sequence[Any], empty: Callable[[], Sequence[Any]]) -> None:
    """Adds the terms to the variables, or puts them in their place.

    Args:
      pending: a contribution.
      accumulators: variables.
      empty: what they hold in an empty window.
    """
    pairs = list(zip(accumulators, pending.terms, strict=True))

    def replaced() -> None:
        nothing = empty() if any(term is None for term in pending.terms) else pending.terms
        for (x, term), neutral in zip(pairs, nothing, strict=True):
            x.assign(neutral if term is None else term, read_value=False)

    def added() -> None:
        for x, term in pairs:
            if term is not None:
                x.assign_add(term, read_value=False)

    tf.cond(pending.replaces, replaced, added)


def value(window: Window, state: AccumulateState) -> Any:
    """`Window.value` of a state in variables, whose sum of weights no compiler knows."""
    with unguarded():
        return window.value(state)


def _of_states(reduction: Reduction) -> Reduction:
    """The reduction whose contributions are states of the given one."""

    def update(state: State, part: State, weight: Any = 1) -> State:
        return reduction.merge(state, part)

    functions = reduction.init, update, reduction.merge, reduction.finalize
    return replace(reduction, update=update, shortcuts=Shortcuts(functions, reduction.clear, reduction.all_merge))


def _bare(state: State) -> State:
    """The state of no leaves, of the same sum of weights and count."""
    return state._replace(value=[], dtypes=[])
