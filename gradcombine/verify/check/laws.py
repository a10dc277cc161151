"""The laws that reductions have to obey, each as two sides that are equal for all contributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.places.lists import combine
from gradcombine.places.replicas import all_reduce, merge_replicas
from gradcombine.places.time import accumulate
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.guarded import GuardedState
from gradcombine.types import Order, State, Tree
from gradcombine.verify.in_process import run_replicas


class Contribution(NamedTuple):
    """A tree and its weight."""

    value: Tree
    weight: Any


class Sides(NamedTuple):
    """Two values or states that have to be equal, with captions."""

    left: Any
    right: Any
    captions: tuple[str, str]


Terms: TypeAlias = Sequence[Contribution]
Made: TypeAlias = Callable[[Contribution], State]
"""Function that returns a state with one contribution, once or many times."""


class Law(NamedTuple):
    """A law: two sides that are equal for all contributions.

    Attributes:
      statement: the law in words.
      terms: number of contributions.
      sides: ``sides(reduction, like, contributions, made)`` yields pairs that have to be equal.
      exact: whether they have to be bitwise equal even if rounding is allowed.
      waiver: the argument of `check_reduction` that waives the law.
    """

    statement: str
    terms: int
    sides: Callable[[Reduction, Tree, Terms, Made], Iterator[Sides]]
    exact: bool = False
    waiver: str = ""


def _empty(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    del terms, state
    value = reduction.finalize(reduction.init(like))
    yield Sides(value, mapped(lambda x: np.where(x != x, 0, x), value), ("finalize(init(like))", "without NaN"))


def _runs(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    empty, a = reduction.init(like), state(terms[0])
    expected = mapped(np.zeros_like, reduction.finalize(empty))
    for other in (reduction.merge(a, a), reduction.merge(empty, a), reduction.merge(a, empty), reduction.clear(a)):
        received = mapped(np.zeros_like, reduction.finalize(other))
        yield Sides(received, expected, ("shapes and dtypes of a value", "of the empty state's"))


def _deterministic(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    del like
    a, b = (state(term) for term in terms)
    for name, run in (
        ("update", lambda: state(terms[0])),
        ("merge", lambda: reduction.merge(a, b)),
        ("finalize", lambda: reduction.finalize(a)),
    ):
        yield Sides(run(), run(), (f"{name}", f"{name} again"))


def _pure(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    del state
    empty = reduction.init(like)
    kept: list[tuple[str, Any, Any]] = []

    def keep(name: str, tree: Any) -> Any:
        kept.append((name, tree, mapped(np.array, tree)))
        return tree

    def unchanged(function: str) -> Iterator[Sides]:
        return (Sides(now, then, (f"{name} after {function}", "before")) for name, now, then in kept)

    keep("the empty state", empty)
    states: list[State] = []
    for term in terms:
        keep("a contribution", term.value)
        states.append(reduction.update(empty, *term))
        yield from unchanged("update")
        keep("a state", states[-1])
    for name, run in (("finalize", reduction.finalize), ("clear", reduction.clear), ("merge", reduction.merge)):
        run(*(states if name == "merge" else states[:1]))
        yield from unchanged(name)


def _identity(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    empty, a = reduction.init(like), state(terms[0])
    yield _values(reduction, reduction.merge(empty, a), a, ("merge(init, a)", "a"))
    yield _values(reduction, reduction.merge(a, empty), a, ("merge(a, init)", "a"))
    none, twice = reduction.merge(empty, reduction.init(like)), reduction.merge(a, a)
    yield _values(reduction, none, empty, ("merge(init, init)", "init"))
    for name, same in (("merge(init, a)", reduction.merge(none, a)), ("merge(a, init)", reduction.merge(a, none))):
        # Differences that the value hides may appear in the next merge.
        yield _values(reduction, reduction.merge(same, a), twice, (f"merge({name}, a)", "merge(a, a)"))


def _update(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    del like
    s = state(terms[0])
    merged = reduction.merge(s, reduction.update(reduction.init(terms[1].value), *terms[1]))
    yield _values(
        reduction, reduction.update(s, *terms[1]), merged, ("update(s, v, w)", "merge(s, update(init, v, w))")
    )


def _weight_0(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    del like
    s, (value, weight) = state(terms[0]), terms[1]
    for name, x in (("v", value), ("NaN", _nan(value))):
        for zero in (0, weight * 0):
            yield Sides(reduction.update(s, x, zero), s, (f"update(s, {name}, 0)", "s"))


def _twice(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    del like
    s, (v, w) = state(terms[0]), terms[1]
    twice = reduction.update(reduction.update(s, v, w), v, w)
    yield _values(
        reduction, reduction.update(s, v, 2 * w), twice, ("update(s, v, 2 * w)", "update(update(s, v, w), v, w)")
    )


def _clear(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    yield Sides(reduction.clear(state(terms[0])), reduction.init(like), ("clear(s)", "init"))


def _associative(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    del like
    a, b, c = (state(term) for term in terms)
    left, right = reduction.merge(reduction.merge(a, b), c), reduction.merge(a, reduction.merge(b, c))
    yield _values(reduction, left, right, ("merge(merge(a, b), c)", "merge(a, merge(b, c))"))


def _commutative(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    del like
    a, b = (state(term) for term in terms)
    yield _values(reduction, reduction.merge(a, b), reduction.merge(b, a), ("merge(a, b)", "merge(b, a)"))


def _same_everywhere(reduction: Reduction, like: Tree, terms: Terms, state: Made) -> Iterator[Sides]:
    del like, state
    places = _places(reduction, terms)
    name, first = next(places)
    return (Sides(value, first, (place, name)) for place, value in places)


LAWS = (
    Law("an empty state has a value, without NaN", 0, _empty, exact=True),
    Law("the functions run, and structure, shapes and dtypes of states and values stay the same", 1, _runs, exact=True),
    Law("the functions leave their arguments as they are", 2, _pure, exact=True),
    Law("the functions are deterministic", 2, _deterministic, exact=True),
    Law("the empty state is the identity of merge: merge(init, a) == a == merge(a, init)", 1, _identity),
    Law("update(s, v, w) == merge(s, update(init, v, w))", 2, _update),
    Law("a contribution of weight 0 changes nothing, even NaN: update(s, v, 0) == s", 2, _weight_0, exact=True),
    Law("clear gives the empty state: clear(s) == init", 1, _clear, exact=True),
    Law("merge is associative: merge(merge(a, b), c) == merge(a, merge(b, c))", 3, _associative),
    Law("merge is commutative: merge(a, b) == merge(b, a)", 2, _commutative, waiver="commutative=False"),
    Law(
        "twice the weight counts as two contributions: update(s, v, 2 * w) == update(update(s, v, w), v, w)",
        2,
        _twice,
        waiver="weighted=False",
    ),
    Law("a list, time, replicas and mixtures of them give the same value", 4, _same_everywhere),
)
DETERMINISTIC = LAWS[3]


def _values(reduction: Reduction, left: State, right: State, captions: tuple[str, str]) -> Sides:
    """Compares two states by their values."""
    return Sides(reduction.finalize(left), reduction.finalize(right), captions)


def _places(reduction: Reduction, terms: Terms) -> Iterator[tuple[str, Any]]:
    """Yields the value of the contributions in every place, lazily."""
    values, weights = zip(*terms, strict=True)
    half = len(terms) // 2
    orders: tuple[Order, ...] = ("sequential", "tree")
    for order in orders:
        yield f"a list, {order}", combine(reduction, values, weights, order)
        time = accumulate(reduction, every=len(terms), order=order).value(_window(reduction, terms, order))
        yield f"time, {order}", time

        def replica(rank: int, over: Collective, order: Order = order) -> Any:
            state = _window(reduction, terms[rank * half : (rank + 1) * half], order)
            merged = merge_replicas(reduction, state, over, order)
            return accumulate(reduction, every=half, order=order).value(merged)

        for value in run_replicas(2, replica):
            yield f"2 replicas with {half} each, {order}", value

        def alone(rank: int, over: Collective, order: Order = order) -> Any:
            return all_reduce(reduction, values[rank], over, weights[rank], order)

        for value in run_replicas(len(terms), alone):
            yield f"{len(terms)} replicas with 1 each, {order}", value


def _window(reduction: Reduction, terms: Terms, order: Order) -> State:
    acc = accumulate(reduction, every=len(terms), order=order)
    state = acc.init(terms[0].value)
    for value, weight in terms:
        state = acc.update(value, state, weight)
    return state


def _nan(value: Tree) -> Tree:
    """Returns the tree with NaN instead of all floats."""
    leaves, structure = tree.flatten(value)
    backend = resolve(leaves)

    def poisoned(x: Any) -> Any:
        if is_absent(x) or dtypes.kind(backend.dtype(x)) not in ("float", "complex"):
            return x
        return backend.full(backend.shape(x), np.nan, backend.dtype(x), [x])

    return tree.unflatten(structure, map(poisoned, leaves))


def mapped(function: Callable[[Any], Any], node: Tree) -> Tree:
    """Applies a function to every leaf except None."""
    leaves, structure = tree.flatten(node)
    return tree.unflatten(structure, [x if is_absent(x) else function(x) for x in leaves])


def copy_of(x: Any) -> Any:
    return cast("np.ndarray", x).copy() if isinstance(x, np.ndarray) else x


def own_state(side: Any) -> Any:
    """Returns the state as the user's functions see it."""
    return side.value if isinstance(side, GuardedState) else side
