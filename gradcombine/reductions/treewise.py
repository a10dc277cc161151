"""Reductions of trees from a cell that combines one leaf: an accumulator per leaf, a weight and a count per tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import dtype_of, resolve
from gradcombine.errors import GradCombineError, invalid, operation
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, described
from gradcombine.reductions.cell import Accumulator, Cell, Totals, parts, refilled, where
from gradcombine.reductions.small import Small
from gradcombine.reductions.treewise_state import Opened, TreewiseState, require_sendable, summary
from gradcombine.reductions.weights import Weight, parse
from gradcombine.types import Array, Order, State, Tree
from gradcombine.wires import exchange
from gradcombine.wires.wire import Wire, require_wire


class Treewise(Reduction):
    """The Reduction that applies a cell to every leaf.

    Args:
      cell: what happens on a leaf.
      state: the class of the states.
      wire: how replicas send the accumulators of float leaves; None: as they are.
      scales_by_weight: see `Reduction`.
      derivative: see `Reduction`.
      divides: see `Reduction`.
      settings: for its description, beside the dtypes.
    """

    def __init__(
        self,
        cell: Cell,
        state: type[TreewiseState],
        *,
        wire: Wire | None = None,
        scales_by_weight: bool = False,
        derivative: Reduction | None = None,
        divides: bool = False,
        **settings: Any,
    ) -> None:
        self.cell, self.state, self.name = cell, state, cell.name
        self.wire = None if wire is None else require_wire(wire)
        self.scales_by_weight = scales_by_weight
        self._settings, self._derivative, self._divides = settings, derivative, divides

    @property
    def description(self) -> str:
        asked = {"dtype": self.cell.settings.accumulator, "output_dtype": self.cell.settings.result}
        return described(self.name, **self._settings, **asked, wire=self.wire)

    @property
    def derivative(self) -> Reduction | None:
        if self._derivative is None and self.wire is not None:
            own = {"scales_by_weight": self.scales_by_weight, "divides": self._divides}
            return Treewise(self.cell, self.state, **own, **self._settings)
        return self._derivative

    @property
    def divides(self) -> bool:
        return self._divides

    @property
    def adds(self) -> bool:
        return self.cell.adds_terms

    @operation()
    def init(self, like: Tree) -> State:
        leaves, structure = tree.flatten(like, self.cell.is_leaf)
        first = [self.cell.arrays(leaf)[0] for leaf in leaves]
        backend = resolve(first)
        made_for = [tree.static_of(x) for x in first]

        def empty(leaf: Any, like: Any, kind: Any) -> Any:
            return None if kind.dtype is None else self._empty(backend, leaf, like, kind.dtype)

        values = self._each(structure, empty, leaves, first, made_for)
        present = [x for x, kind in zip(first, made_for, strict=True) if kind.dtype is not None]
        widest = dtypes.of_weights([kind.dtype for kind in made_for if kind.dtype is not None])
        weight = self.cell.empty_weight(backend, widest, present)
        count = backend.full((), 0, dtypes.INT32, present)
        opened = Opened(structure, values, made_for)
        if self.wire is not None:
            require_sendable(self.wire, opened, self.cell.shape, leaves)
        return self.state(opened.value(values), weight, count, tree.unflatten(structure, made_for))

    def _empty(self, backend: Backend, leaf: Any, like: Any, dtype: np.dtype) -> Accumulator:
        """The accumulator of a leaf of this dtype, placed like the array ``like``."""
        if not dtypes.is_of(dtype, self.cell.kinds):
            raise invalid(f"a dtype that is {' or '.join(self.cell.kinds)}", dtype)
        return self.cell.empty(backend, self.cell.shape(leaf), self.cell.running(dtype), like)

    @operation()
    def update(self, state: State, value: Tree, weight: Any = 1) -> State:
        return self._updated(state, value, weight, multiplies=True)

    @operation()
    def add_weighted(self, state: State, value: Tree, weight: Any) -> State:
        return self._updated(state, value, weight, multiplies=False)

    def _updated(self, state: State, value: Tree, weight: Any, multiplies: bool) -> State:
        flat, leaves, backend, w = self._entered(state, value, weight)
        zero, totals = w.is_zero(backend), Totals(state.weight, state.count)
        factor, cell = w if multiplies else parse(backend, 1), self.cell

        def added(_: None, a: Any, x: Any) -> Any:
            new = cell.update(backend, a, x, factor, totals)
            # Masked by where: a contribution of weight 0 may hold NaN.
            return new if isinstance(zero, bool) else cell.masked(backend, zero, a, new)

        apply = self._elementwise(backend, added)

        def update(a: Any, kind: Any, leaf: Any) -> Any:
            if leaf is not None and not backend.absent(leaf):
                return apply(None, a, _entering(cell, backend, a, kind, leaf))
            new = None if a is None else cell.idle(backend, a, [w], totals)
            return new if new is a or isinstance(zero, bool) else cell.masked(backend, zero, a, new)

        updated = self._each(flat.structure, update, flat.values, flat.made_for, leaves, small=apply)
        if zero is True:
            return state
        total = self.cell.link(backend, self.cell.add_weight(backend, state.weight, w), leaves)
        count = state.count + 1
        if zero is not False:
            total = where(backend, zero, state.weight, total)
            count = backend.where(zero, state.count, count)
        return flat.closed(state, updated, total, count)

    @operation()
    def contribution(self, state: State, value: Tree, weight: Any) -> State:
        cell = self.cell
        flat, leaves, backend, w = self._entered(state, value, weight)
        zero, empty = w.is_zero(backend), self._empty_totals(backend, flat, state)

        def term(a: Any, kind: Any, leaf: Any) -> Array | None:
            if leaf is None or backend.absent(leaf):
                return None
            added = cell.term(backend, a, _entering(cell, backend, a, kind, leaf), w)
            if isinstance(zero, bool):
                return None if zero else added
            dtype = backend.dtype(added)
            return backend.where(zero, empty.once(dtype, lambda: cell.empty(backend, (), dtype, added)), added)

        terms = self._each(flat.structure, term, flat.values, flat.made_for, leaves)

        total, count = cell.add_weight(backend, empty.weight, w), empty.count + 1
        if zero is not False:
            total, count = (where(backend, zero, x, y) for x, y in ((empty.weight, total), (empty.count, count)))
        return flat.closed(state, terms, total, count)

    def _entered(self, state: State, value: Tree, weight: Any) -> tuple[Opened, list[Any], Backend, Weight]:
        flat = self._open(state)
        leaves = tree.flatten_as(flat.structure, value, self.cell.is_leaf)
        arrays = leaves if self.cell.is_leaf is None else [x for leaf in leaves for x in self.cell.arrays(leaf)]
        backend = resolve([*flat.arrays(), *arrays, state.count, weight])
        return flat, leaves, backend, parse(backend, weight)

    def _elementwise(self, backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, or where it takes small leaves together, its calls, for `_each`."""
        return Small(backend, function) if self.cell.joins else function

    def _each(
        self, structure: tree.Structure, function: Callable[..., Any], *columns: Iterable[Any], small: Any = None
    ) -> list[Any]:
        """Applies a function leaf by leaf, with what it has put off in ``small``; errors name the leaf."""
        results: list[Any] = []
        for row in zip(*columns, strict=True):
            try:
                results.append(function(*row))
            except GradCombineError as error:
                error.within(structure.path(len(results)))
                raise
        return small.results(results) if isinstance(small, Small) else results

    @operation()
    def combine(self, values: Sequence[Tree], weights: Sequence[Any], order: Order) -> Tree:
        cell = self.cell
        if not cell.takes_lists:
            return super().combine(values, weights, order)
        leaves, structure = tree.flatten(values[0])
        rows = [leaves, *[tree.flatten_as(structure, value) for value in values[1:]]]
        columns, entered = list(zip(*rows, strict=True)), [x for row in rows for x in row]
        backend = resolve([*entered, *weights])
        parsed = [parse(backend, weight) for weight in weights]
        if not cell.takes_many(parsed):
            return super().combine(values, weights, order)
        zeros = [w.known == 0 if w.known is not None else w.is_zero(backend) for w in parsed]
        # A leaf that is None in some trees has a gradient if another tree has one.
        likes = [next((x for x in column if x is not None), None) for column in columns]
        made_for = [None if x is None or backend.absent(x) else backend.dtype(x) for x in likes]

        def begun(like: Any, dtype: np.dtype | None) -> Any:
            return None if dtype is None else self._empty(backend, like, like, dtype)

        # First, as it raises for dtypes that no sum of weights has.
        accumulators = self._each(structure, begun, likes, made_for)
        present = [x for x, dtype in zip(likes, made_for, strict=True) if dtype is not None]
        widest = dtypes.of_weights([dtype for dtype in made_for if dtype is not None])
        empty = Totals(cell.empty_weight(backend, widest, present), backend.full((), 0, dtypes.INT32, present))
        totals = self._totals(backend, empty, parsed, zeros, order)
        totals = Totals(cell.link(backend, totals.weight, entered), totals.count)

        def combined(output: np.dtype, a: Any, *xs: Any) -> Any:
            pairs = zip(xs, zeros, strict=True)
            masked = [x if x is None or zero is False else _masked(backend, zero, x) for x, zero in pairs]
            total = cell.update_many(backend, a, masked, parsed, empty, order)
            return cell.finish(backend, total, totals, output)

        apply = self._elementwise(backend, combined)

        def combine(a: Any, like: Any, dtype: np.dtype | None, column: Sequence[Any]) -> Any:
            if dtype is None:
                return None if like is None else backend.make_absent(backend.shape(like))
            output = cell.output(dtype)
            entering: list[Any] = []
            counts = False
            for x, zero in zip(column, zeros, strict=True):
                if x is None or backend.absent(x):
                    entering.append(None)
                    continue
                checked = cell.entering(backend, a, dtype, x)
                entering.append(None if zero is True else checked)
                counts |= zero is not True
            if counts:
                return apply(output, a, *entering)
            return cell.finish(backend, cell.idle(backend, a, parsed, empty), totals, output)

        results = self._each(structure, combine, accumulators, likes, made_for, columns, small=apply)
        return tree.unflatten(structure, results)

    def _totals(
        self, backend: Backend, empty: Totals, weights: Sequence[Weight], zeros: Sequence[Array | bool], order: Order
    ) -> Totals:
        """The totals of contributions of these weights, in this order."""
        known = [w for w in weights if w.known is not None]
        total, count = empty.weight, empty.count
        if known:
            total = self.cell.add_weights(backend, total, known, order)
            count = _plus(backend, count, len([w for w in known if w.known != 0]))
        for w, zero in zip(weights, zeros, strict=True):
            if w.known is None:
                total = where(backend, zero, total, self.cell.add_weight(backend, total, w))
                count = backend.where(zero, count, count + 1)
        return Totals(total, count)

    @operation()
    def merge(self, a: State, b: State) -> State:
        left, right = self._open(a), self._open(b)
        if left.structure != right.structure:
            raise tree.difference(left.structure, right.structure)
        backend = resolve([*left.arrays(), *right.arrays(), a.count, b.count])
        totals = Totals(a.weight, a.count), Totals(b.weight, b.count)

        def merged(_: None, x: Any, y: Any) -> Any:
            return self.cell.merge(backend, x, y, *totals)

        apply = self._elementwise(backend, merged)

        def merge(x: Any, y: Any) -> Any:
            expected, received = summary(x), summary(y)
            if expected != received:
                raise invalid(f"a state of {expected}", received)
            return None if x is None else apply(None, x, y)

        values = self._each(left.structure, merge, left.values, right.values, small=apply)
        return left.closed(a, values, self.cell.merge_weights(backend, a.weight, b.weight), a.count + b.count)

    @operation()
    def finalize(self, state: State) -> Tree:
        flat = self._open(state)
        backend = resolve([*flat.arrays(), state.count])
        totals = Totals(state.weight, state.count)

        def finished(output: np.dtype, a: Any) -> Any:
            return self.cell.finish(backend, a, totals, output)

        apply = self._elementwise(backend, finished)

        def finish(a: Any, kind: Any) -> Any:
            if kind.dtype is None:
                return _absent(backend, kind)
            if a is None:
                raise invalid(f"an accumulator for contributions of {kind}", "none")
            return apply(self.cell.output(kind.dtype), a)

        results = self._each(flat.structure, finish, flat.values, flat.made_for, small=apply)
        return tree.unflatten(flat.structure, results)

    @operation()
    def all_finalize(self, state: State, collective: Collective, order: Order, weight: Any) -> Tree:
        cell = self.cell
        if not cell.most_replicas:
            return self.finalize(self.all_merge(state, collective, order))
        flat = self._open(state)
        backend = resolve([*flat.arrays(), state.count, weight])
        outputs = [cell.output(kind.dtype) for kind in flat.made_for if kind.dtype is not None]
        totals, w = Totals(state.weight, state.count), parse(backend, weight)
        if (results := cell.all_finish(backend, collective, flat.present(), outputs, totals, w)) is None:
            return self.finalize(self.all_merge(state, collective, "sequential"))
        back = iter(results)
        finished = (_absent(backend, kind) if kind.dtype is None else next(back) for kind in flat.made_for)
        return tree.unflatten(flat.structure, finished)

    @operation()
    def clear(self, state: State) -> State:
        flat = self._open(state)
        backend = resolve([*flat.arrays(), state.count])

        def empty(a: Any, kind: Any) -> Any:
            return None if a is None else self._empty(backend, a, parts(a)[0], kind.dtype)

        totals = self._empty_totals(backend, flat, state)
        values = self._each(flat.structure, empty, flat.values, flat.made_for)
        return flat.closed(state, values, totals.weight, totals.count)

    def _empty_totals(self, backend: Backend, flat: Opened, state: State) -> Totals:
        present = [kind.dtype for kind in flat.made_for if kind.dtype is not None]
        dtype = dtypes.of_weights(present) if present else dtype_of(parts(state.weight)[0])
        weight = self.cell.empty_weight(backend, dtype, parts(state.weight))
        return Totals(weight, backend.full((), 0, dtypes.INT32, [state.count]))

    @operation()
    def all_merge(self, state: State, collective: Collective, order: Order, errors: list[Array] | None = None) -> State:
        """See `Reduction`. Appends what the wire rounds off to ``errors``, of leaves that it does not keep wide."""
        backend = resolve([*self._open(state).arrays(), state.count, collective.rank()])
        leaves, structure = tree.flatten(state)
        # Python's numbers, as some restore them, are no arrays to exchange.
        state = tree.unflatten(structure, map(backend.asarray, leaves))
        arrays = (flat := self._open(state)).arrays()
        named = zip(flat.structure.paths(), flat.values, strict=True)
        paths = [path for path, a in named if a is not None for _ in parts(a)]
        collective.require_unreduced(paths, arrays)
        if collective.size() <= self.cell.most_replicas:
            merged, totals = self.cell.all_merge(backend, collective, flat.present(), Totals(state.weight, state.count))
            back = iter(merged)
            return flat.closed(
                state, [None if a is None else next(back) for a in flat.values], totals.weight, totals.count
            )

        def rebuild(received: Sequence[Array]) -> State:
            back = iter(received)

            def like(a: Any) -> Any:
                return refilled(a, [backend.cast(next(back), dtype_of(x)) for x in parts(a)])

            values = [None if a is None else like(a) for a in flat.values]
            return flat.closed(state, values, like(state.weight), next(back))

        others = [*parts(state.weight), state.count]
        adds, wire = self.cell.additive and order == "sequential", None if collective.size() == 1 else self.wire
        if wire is None:
            bundle = [*arrays, *others]
            if adds:
                return rebuild(collective.all_sum(bundle))
            return fold_pairwise(self.merge, map(rebuild, collective.of_each_rank(bundle)))
        if adds:
            return rebuild(exchange.all_sum(backend, collective, wire, paths, arrays, others, errors))
        narrow = [p if dtypes.kind(dtype_of(x)) == "float" else None for p, x in zip(paths, arrays, strict=True)]
        sent = exchange.all_gather(backend, collective, wire, [*narrow, *(None for _ in others)], [*arrays, *others])
        return fold_pairwise(self.merge, map(rebuild, sent))

    def _open(self, state: State) -> Opened:
        if type(state) is not self.state:
            raise invalid(f"a {self.state.__name__}", type(state).__name__)
        made_for, structure = tree.flatten(state.dtypes, tree.is_static)
        accumulators = tree.split_as(structure, state.value)
        values = [None if isinstance(a, tree.Static) else a for a in accumulators]
        return Opened(structure, values, made_for)


def _entering(cell: Cell, backend: Backend, a: Any, kind: Any, leaf: Any) -> Any:
    """The contribution as the cell takes it; raises for one that does not match the accumulator."""
    if a is None:
        raise invalid("no gradient, as where the state was made", "an array")
    return cell.entering(backend, a, kind.dtype, leaf)


def _masked(backend: Backend, zero: Array, x: Array) -> Array:
    return backend.where(zero, backend.full((), 0, backend.dtype(x)), x)


def _plus(backend: Backend, count: Array, more: int) -> Array:
    """The sum, still known where the count was."""
    known = backend.concrete(count)
    return count + more if known is None else backend.full((), int(known) + more, dtypes.INT32, [count])


def _absent(backend: Backend, kind: Any) -> Any:
    """The result where there is no gradient."""
    return None if kind.shape is None else backend.make_absent(kind.shape)
