"""The laws that reductions have to obey, each as two sides that are equal for all contributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, operation, shown
from gradcombine.places.lists import combine
from gradcombine.places.replicas import all_reduce, merge_replicas
from gradcombine.places.time import accumulate
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import Array, Order, State, Tree
from gradcombine.verify.check.leaves import as_numpy


class Contribution(NamedTuple):
    """A tree and its weight."""

    value: Tree
    weight: Any


class Sides(NamedTuple):
    """Two values or states that have to be equal, with captions."""

    left: Any
    right: Any
    captions: tuple[str, str]


class Trial(NamedTuple):
    """Arguments of a law.

    Attributes:
      reduction: the reduction under test.
      like: a tree like the contributions' values.
      terms: the contributions.
      state: function that returns a state with one contribution, once or many times.
    """

    reduction: Reduction
    like: Tree
    terms: Sequence[Contribution]
    state: Callable[[Contribution], State]

    def values(self, left: State, right: State, captions: tuple[str, str]) -> Sides:
        """Compares two states by their values."""
        return Sides(self.reduction.finalize(left), self.reduction.finalize(right), captions)


class Law(NamedTuple):
    """A law: two sides that are equal for all contributions.

    Attributes:
      statement: the law in words.
      terms: number of contributions.
      sides: yields pairs that have to be equal.
      exact: whether they have to be bitwise equal even if rounding is allowed.
      waiver: the argument of `check_reduction` that waives the law.
    """

    statement: str
    terms: int
    sides: Callable[[Trial], Iterator[Sides]]
    exact: bool = False
    waiver: str = ""


def _empty(t: Trial) -> Iterator[Sides]:
    value = t.reduction.finalize(t.reduction.init(t.like))
    if all(map(is_absent, tree.flatten(value)[0])) and not all(map(is_absent, tree.flatten(t.like)[0])):
        raise GradCombineError(t.reduction.name, "an array from finalize", shown(value))

    def without_nan(x: Any) -> np.ndarray:
        array = as_numpy(x)
        return np.where(array != array, np.zeros_like(array), array)  # a literal 0 would make booleans integers

    yield Sides(value, mapped(without_nan, value), ("finalize(init(like))", "without NaN"))


def _runs(t: Trial) -> Iterator[Sides]:
    r, empty, a = t.reduction, t.reduction.init(t.like), t.state(t.terms[0])
    expected = mapped(_zeros, r.finalize(empty))
    for other in (r.merge(a, a), r.merge(empty, a), r.merge(a, empty), r.clear(a)):
        received = mapped(_zeros, r.finalize(other))
        yield Sides(received, expected, ("shapes and dtypes of a value", "of the empty state's"))


def _deterministic(t: Trial) -> Iterator[Sides]:
    a, b = map(t.state, t.terms)
    for name, run in (
        ("update", lambda: t.state(t.terms[0])),
        ("merge", lambda: t.reduction.merge(a, b)),
        ("finalize", lambda: t.reduction.finalize(a)),
    ):
        yield Sides(run(), run(), (name, f"{name} again"))


def _pure(t: Trial) -> Iterator[Sides]:
    r, empty, kept = t.reduction, t.reduction.init(t.like), list[tuple[str, Any, Any]]()

    def keep(name: str, tree: Any) -> None:
        kept.append((name, tree, mapped(lambda x: as_numpy(x).copy(), tree)))

    def unchanged(function: str) -> Iterator[Sides]:
        return (Sides(now, then, (f"{name} after {function}", "before")) for name, now, then in kept)

    keep("the empty state", empty)
    states: list[State] = []
    for term in t.terms:
        keep("a contribution", term.value)
        states.append(r.update(empty, *term))
        yield from unchanged("update")
        keep("a state", states[-1])
    for name, run in (("finalize", r.finalize), ("clear", r.clear), ("merge", r.merge)):
        run(*(states if name == "merge" else states[:1]))
        yield from unchanged(name)


def _identity(t: Trial) -> Iterator[Sides]:
    r, empty, a = t.reduction, t.reduction.init(t.like), t.state(t.terms[0])
    yield t.values(r.merge(empty, a), a, ("merge(init, a)", "a"))
    yield t.values(r.merge(a, empty), a, ("merge(a, init)", "a"))
    none, twice = r.merge(empty, r.init(t.like)), r.merge(a, a)
    yield t.values(none, empty, ("merge(init, init)", "init"))
    for name, same in (("merge(init, a)", r.merge(none, a)), ("merge(a, init)", r.merge(a, none))):
        # Differences that the value hides may appear in the next merge.
        yield t.values(r.merge(same, a), twice, (f"merge({name}, a)", "merge(a, a)"))


def _update(t: Trial) -> Iterator[Sides]:
    r, s, term = t.reduction, t.state(t.terms[0]), t.terms[1]
    merged = r.merge(s, r.update(r.init(term.value), *term))
    yield t.values(r.update(s, *term), merged, ("update(s, v, w)", "merge(s, update(init, v, w))"))


def _weight_0(t: Trial) -> Iterator[Sides]:
    s, (value, weight) = t.state(t.terms[0]), t.terms[1]
    for name, x in (("v", value), ("NaN", _nan(value))):
        for zero in (0, weight * 0):
            yield Sides(t.reduction.update(s, x, zero), s, (f"update(s, {name}, 0)", "s"))


def _twice(t: Trial) -> Iterator[Sides]:
    r, s, (v, w) = t.reduction, t.state(t.terms[0]), t.terms[1]
    twice = r.update(r.update(s, v, w), v, w)
    yield t.values(r.update(s, v, 2 * w), twice, ("update(s, v, 2 * w)", "update(update(s, v, w), v, w)"))
    # Weights that are rounded to a narrower dtype double exactly.
    yield t.values(r.update(s, v, 3 * w), r.update(twice, v, w), ("update(s, v, 3 * w)", "three times update(s, v, w)"))


def _clear(t: Trial) -> Iterator[Sides]:
    yield Sides(t.reduction.clear(t.state(t.terms[0])), t.reduction.init(t.like), ("clear(s)", "init"))


def _associative(t: Trial) -> Iterator[Sides]:
    merge, (a, b, c) = t.reduction.merge, map(t.state, t.terms)
    yield t.values(merge(merge(a, b), c), merge(a, merge(b, c)), ("merge(merge(a, b), c)", "merge(a, merge(b, c))"))


def _commutative(t: Trial) -> Iterator[Sides]:
    merge, (a, b) = t.reduction.merge, map(t.state, t.terms)
    yield t.values(merge(a, b), merge(b, a), ("merge(a, b)", "merge(b, a)"))


def _same_everywhere(t: Trial) -> Iterator[Sides]:
    places = _places(t.reduction, t.terms)
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


def _places(reduction: Reduction, terms: Sequence[Contribution]) -> Iterator[tuple[str, Any]]:
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


def _window(reduction: Reduction, terms: Sequence[Contribution], order: Order) -> State:
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


def _zeros(leaf: Any) -> np.ndarray:
    return np.zeros_like(as_numpy(leaf))


# --- replicas in one process ---


def run_replicas(count: int, program: Callable[[int, Collective], Any]) -> list[Any]:
    """Returns ``program(rank, collective)`` for each replica. The program is pure, and runs once more per exchange."""
    exchanged: list[list[Sequence[Array]]] = []
    while True:
        results: list[Any] = []
        sent: list[Sequence[Array]] = []
        for rank in range(count):
            try:
                results.append(program(rank, _Replica(rank, count, exchanged)))
            except _Unknown as exchange:
                sent.append(exchange.arrays)
        if not sent:
            return results
        assert not results  # otherwise replicas differ in their number of exchanges
        exchanged.append(sent)


class _Unknown(BaseException):
    """Interrupts a program at its first exchange whose other operands are not known yet."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        super().__init__()
        self.arrays = arrays


class _Replica(Collective):
    def __init__(self, rank: int, count: int, exchanged: list[list[Sequence[Array]]]) -> None:
        self._rank, self._count, self._exchanged = rank, count, iter(exchanged)

    def size(self) -> int:
        return self._count

    def rank(self) -> Array:
        return np.int32(self._rank)

    def _columns(self, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
        """The operands of all replicas, for each array."""
        sent = next(self._exchanged, None)
        if sent is None:
            raise _Unknown(arrays)
        return list(zip(*sent, strict=True))

    @operation("all_sum")
    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        return [reduce(resolve(column).add, column) for column in self._columns(arrays)]

    @operation("all_max")
    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        return [reduce(resolve(column).maximum, column) for column in self._columns(arrays)]

    @operation("all_gather")
    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        return [resolve(column).stack(column) for column in self._columns(arrays)]

    def narrow_ways(self) -> tuple[str, ...]:
        return ("gathered", "parts")

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        return [gathered[:, self._rank] for gathered in self.all_gather(arrays)]
