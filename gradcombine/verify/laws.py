"""The laws of a reduction, as pairs of states that must be equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import State, Tree

Pair = tuple[State, State]


class Contribution(NamedTuple):
    """A tree and its weight."""

    value: Tree
    weight: Any


class Law(NamedTuple):
    """What holds for any contributions.

    Attributes:
      statement: the law, for a reader.
      terms: how many contributions it is about.
      pairs: ``pairs(reduction, contributions)``: states that are equal.
      of_states: whether the states themselves are equal, to the bit; else their values are, where nothing rounds.
    """

    statement: str
    terms: int
    pairs: Callable[[Reduction, Sequence[Contribution]], list[Pair]]
    of_states: bool = False


def _identity(reduction: Reduction, terms: Sequence[Contribution]) -> list[Pair]:
    empty, a = reduction.init(terms[0].value), _state(reduction, terms[0])
    return [(reduction.merge(empty, a), a), (reduction.merge(a, empty), a)]


def _update(reduction: Reduction, terms: Sequence[Contribution]) -> list[Pair]:
    a = _state(reduction, terms[0])
    return [(reduction.update(a, *terms[1]), reduction.merge(a, _state(reduction, terms[1])))]


def _weight_0(reduction: Reduction, terms: Sequence[Contribution]) -> list[Pair]:
    a, (value, weight) = _state(reduction, terms[0]), terms[1]
    nothing = [(value, 0), (value, weight * 0), (_nan(value), 0), (_nan(value), weight * 0)]
    return [(reduction.update(a, *contribution), a) for contribution in nothing]


def _clear(reduction: Reduction, terms: Sequence[Contribution]) -> list[Pair]:
    return [(reduction.clear(_state(reduction, terms[0])), reduction.init(terms[0].value))]


def _associative(reduction: Reduction, terms: Sequence[Contribution]) -> list[Pair]:
    a, b, c = (_state(reduction, term) for term in terms)
    return [(reduction.merge(reduction.merge(a, b), c), reduction.merge(a, reduction.merge(b, c)))]


def _commutative(reduction: Reduction, terms: Sequence[Contribution]) -> list[Pair]:
    a, b = (_state(reduction, term) for term in terms)
    return [(reduction.merge(a, b), reduction.merge(b, a))]


IDENTITY = Law("the empty state is the identity of merge: merge(init, a) == a == merge(a, init)", 1, _identity)
UPDATE = Law("update(s, v, w) == merge(s, update(init, v, w))", 2, _update)
WEIGHT_0 = Law("a contribution of weight 0 changes nothing, NaN neither: update(s, v, 0) == s", 2, _weight_0, True)
CLEAR = Law("clear gives the empty state: clear(s) == init", 1, _clear, True)
ASSOCIATIVE = Law("merge is associative: merge(merge(a, b), c) == merge(a, merge(b, c))", 3, _associative)
COMMUTATIVE = Law("merge is commutative: merge(a, b) == merge(b, a)", 2, _commutative)

LAWS = (IDENTITY, UPDATE, WEIGHT_0, CLEAR, ASSOCIATIVE, COMMUTATIVE)
"""Those that may be asked of traced arrays as well."""


def _state(reduction: Reduction, term: Contribution) -> State:
    """Of one contribution."""
    return reduction.update(reduction.init(term.value), *term)


def _nan(value: Tree) -> Tree:
    """The tree with NaN in place of all floats."""
    leaves, structure = tree.flatten("laws", value)
    backend = resolve("laws", leaves)

    def spoilt(x: Any) -> Any:
        if is_absent(x) or dtypes.kind(backend.dtype(x)) not in ("float", "complex"):
            return x
        return backend.full(backend.shape(x), np.nan, backend.dtype(x), [x])

    return tree.unflatten(structure, map(spoilt, leaves))
