"""Reductions of trees from a cell that combines one leaf: an accumulator per leaf, a weight and a count per tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
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
from gradcombine.types import Array, Leaf, Order, Scalar, State, Tree
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
        cell = self.cell
        leaves, structure = tree.flatten(like, cell.is_leaf)
        first = [cell.arrays(leaf)[0] for leaf in leaves]
        backend = resolve(first)
        made_for, values = [tree.static_of(x) for x in first], list[Accumulator]()
        try:
            for leaf, x, kind in zip(leaves, first, made_for, strict=True):
                absent = kind.dtype is None
                values.append(None if absent else self._empty(backend, kind.dtype, cell.shape(leaf), x))
        except GradCombineError as error:
            error.within(structure.path(len(values)))
            raise
        present = [x for x, kind in zip(first, made_for, strict=True) if kind.dtype is not None]
        widest = dtypes.of_weights([kind.dtype for kind in made_for if kind.dtype is not None])
        weight = cell.empty_weight(backend, widest, present)
        count = backend.full((), 0, dtypes.INT32, present)
        opened = Opened(structure, values, made_for)
        if self.wire is not None:
            require_sendable(self.wire, opened, cell.shape, leaves)
        return self.state(opened.value(values), weight, count, tree.unflatten(structure, made_for))

    def _empty(self, backend: Backend, dtype: np.dtype, shape: tuple[int, ...], like: Leaf) -> Accumulator:
        """The accumulator of a leaf of this dtype and shape, placed like the array ``like``."""
        if dtypes.kind(dtype) not in self.cell.kinds:
            raise invalid(f"a dtype that is {' or '.join(self.cell.kinds)}", dtype)
        return self.cell.empty(backend, shape, self.cell.running(dtype), like)

    @operation()
    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        return self._updated(state, value, weight, multiplies=True)

    @operation()
    def add_weighted(self, state: State, value: Tree, weight: Scalar) -> State:
        return self._updated(state, value, weight, multiplies=False)

    def _updated(self, state: State, value: Tree, weight: Scalar, multiplies: bool) -> State:
        flat, leaves, backend, w = self._entered(state, value, weight)
        cell, zero, totals = self.cell, w.zero, Totals(state.weight, state.count)
        factor = w if multiplies else parse(backend, 1)
        is_known = isinstance(zero, bool)

        def added(_: None, a: Accumulator, x: Leaf) -> Accumulator:
            new = cell.update(backend, a, x, factor, totals)
            # Masked by where: a contribution of weight 0 may hold NaN.
            return new if is_known else cell.masked(backend, zero, a, new)

        apply, updated = Small(backend, added) if cell.joins else added, list[Accumulator]()
        try:
            for a, kind, leaf in zip(flat.values, flat.made_for, leaves, strict=True):
                if leaf is not None and not backend.absent(leaf):
                    updated.append(apply(None, a, _entering(cell, backend, a, kind, leaf)))
                    continue
                new = None if a is None else cell.idle(backend, a, w, totals)
                updated.append(new if is_known or new is a else cell.masked(backend, zero, a, new))
        except GradCombineError as error:
            error.within(flat.structure.path(len(updated)))
            raise
        if zero is True:
            return state
        if isinstance(apply, Small):
            updated = apply.results(updated)
        total, count = cell.link(backend, cell.add_weight(backend, state.weight, w), leaves), state.count + 1
        if not is_known:
            total = where(backend, zero, state.weight, total)
            count = backend.where(zero, state.count, count)
        return flat.closed(state, updated, total, count)

    @operation()
    def contribution(self, state: State, value: Tree, weight: Scalar) -> State:
        flat, leaves, backend, w = self._entered(state, value, weight)
        cell, zero, empty = self.cell, w.zero, self._empty_totals(backend, flat, state)
        terms = list[Array | None]()
        try:
            for a, kind, leaf in zip(flat.values, flat.made_for, leaves, strict=True):
                if leaf is None or backend.absent(leaf):
                    terms.append(None)
                    continue
                term = cell.term(backend, a, _entering(cell, backend, a, kind, leaf), w)
                if not isinstance(zero, bool):
                    dtype = backend.dtype(term)
                    nothing = empty.once(dtype, partial(cell.empty, backend, (), dtype, term))
                    term = backend.where(zero, nothing, term)
                terms.append(None if zero is True else term)
        except GradCombineError as error:
            error.within(flat.structure.path(len(terms)))
            raise
        total, count = cell.add_weight(backend, empty.weight, w), empty.count + 1
        if zero is not False:
            total, count = (where(backend, zero, x, y) for x, y in ((empty.weight, total), (empty.count, count)))
        return flat.closed(state, terms, total, count)

    def _entered(self, state: State, value: Tree, weight: Scalar) -> tuple[Opened, list[Leaf], Backend, Weight]:
        flat = self._open(state)
        leaves = tree.flatten_as(flat.structure, value, self.cell.is_leaf)
        arrays = leaves if self.cell.is_leaf is None else [x for leaf in leaves for x in self.cell.arrays(leaf)]
        backend = resolve([*flat.arrays(), *arrays, state.count, weight])
        return flat, leaves, backend, parse(backend, weight)

    @operation()
    def combine(self, values: Sequence[Tree], weights: Sequence[Scalar], order: Order) -> Tree:
        cell = self.cell
        if not cell.takes_lists:
            return super().combine(values, weights, order)
        leaves, structure = tree.flatten(values[0])
        rows = [leaves, *[tree.flatten_as(structure, value) for value in values[1:]]]
        entered = list(chain.from_iterable(rows))
        backend = resolve([*entered, *weights])
        parsed = [parse(backend, weight) for weight in weights]
        known = [w for w in parsed if w.known is not None]
        if len(known) < len(parsed) and not cell.takes_traced:
            return super().combine(values, weights, order)
        columns = list(zip(*rows, strict=True))
        likes, present, made_for, begun = list[Leaf](), list[Leaf](), list[np.dtype | None](), list[Accumulator]()
        try:
            # First, as it raises for dtypes that no sum of weights has.
            for column in columns:
                # A leaf that is None in some trees has a gradient if another tree has one.
                like = next((x for x in column if x is not None), None)
                likes.append(like)
                if like is None or backend.absent(like):
                    made_for.append(None)
                    begun.append(None)
                    continue
                present.append(like)
                made_for.append(dtype := backend.dtype(like))
                begun.append(self._empty(backend, dtype, backend.shape(like), like))
        except GradCombineError as error:
            error.within(structure.path(len(begun)))
            raise
        widest = dtypes.of_weights([dtype for dtype in made_for if dtype is not None])
        total = cell.total_weight(backend, widest, present, known, order)
        counted = len([w for w in known if w.zero is False])
        count = backend.full((), counted, dtypes.INT32, present)
        for w in parsed:
            if w.known is None:
                total = where(backend, w.zero, total, cell.add_weight(backend, total, w))
                count = backend.where(w.zero, count, count + 1)
        totals = Totals(cell.link(backend, total, entered), count, has_some=counted > 0)

        def combined(output: np.dtype, a: Accumulator, *xs: Array) -> Leaf:
            return cell.finish(backend, cell.update_many(backend, a, xs, parsed, order), totals, output)

        apply, results = Small(backend, combined) if cell.joins else combined, list[Leaf]()
        try:
            for a, like, dtype, column in zip(begun, likes, made_for, columns, strict=True):
                if dtype is None:
                    results.append(None if like is None else backend.make_absent(backend.shape(like)))
                    continue
                xs, counts = list[Array | None](), False
                for x, w in zip(column, parsed, strict=True):
                    absent = x is None or backend.absent(x)
                    checked = None if absent else cell.entering(backend, a, dtype, x)
                    xs.append(None if w.zero is True else checked)
                    counts = counts or xs[-1] is not None
                output = cell.settings.output(dtype)
                results.append(apply(output, a, *xs) if counts else cell.finish(backend, a, totals, output))
        except GradCombineError as error:
            error.within(structure.path(len(results)))
            raise
        return tree.unflatten(structure, apply.results(results) if isinstance(apply, Small) else results)

    @operation()
    def merge(self, a: State, b: State) -> State:
        left, right = self._open(a), self._open(b)
        if left.structure != right.structure:
            raise tree.difference(left.structure, right.structure)
        cell, backend = self.cell, resolve([*left.arrays(), *right.arrays(), a.count, b.count])
        totals = Totals(a.weight, a.count), Totals(b.weight, b.count)

        def merged(_: None, x: Accumulator, y: Accumulator) -> Accumulator:
            return cell.merge(backend, x, y, *totals)

        apply, values = Small(backend, merged) if cell.joins else merged, list[Accumulator]()
        try:
            for x, y in zip(left.values, right.values, strict=True):
                expected, received = summary(x), summary(y)
                if expected != received:
                    raise invalid(f"a state of {expected}", received)
                values.append(None if x is None else apply(None, x, y))
        except GradCombineError as error:
            error.within(left.structure.path(len(values)))
            raise
        if isinstance(apply, Small):
            values = apply.results(values)
        return left.closed(a, values, cell.merge_weights(backend, a.weight, b.weight), a.count + b.count)

    @operation()
    def finalize(self, state: State) -> Tree:
        flat = self._open(state)
        cell, backend = self.cell, resolve([*flat.arrays(), state.count])
        count = backend.concrete(state.count)
        totals = Totals(state.weight, state.count, count is not None and bool(count != 0))

        def finish(output: np.dtype, a: Accumulator) -> Leaf:
            return cell.finish(backend, a, totals, output)

        apply, results = Small(backend, finish) if cell.joins else finish, list[Leaf]()
        try:
            for a, kind in zip(flat.values, flat.made_for, strict=True):
                if kind.dtype is None:
                    results.append(_absent(backend, kind))
                    continue
                if a is None:
                    raise invalid(f"an accumulator for contributions of {kind}", "none")
                results.append(apply(cell.settings.output(kind.dtype), a))
        except GradCombineError as error:
            error.within(flat.structure.path(len(results)))
            raise
        return tree.unflatten(flat.structure, apply.results(results) if isinstance(apply, Small) else results)

    @operation()
    def all_finalize(self, state: State, collective: Collective, order: Order, weight: Scalar) -> Tree:
        cell = self.cell
        if not cell.most_replicas:
            return self.finalize(self.all_merge(state, collective, order))
        flat = self._open(state)
        backend = resolve([*flat.arrays(), state.count, weight])
        outputs = [cell.settings.output(kind.dtype) for kind in flat.made_for if kind.dtype is not None]
        totals, w = Totals(state.weight, state.count), parse(backend, weight)
        if (results := cell.all_finish(backend, collective, flat.present(), outputs, totals, w)) is None:
            return self.finalize(self.all_merge(state, collective, "sequential"))
        back = iter(results)
        finished = (_absent(backend, kind) if kind.dtype is None else next(back) for kind in flat.made_for)
        return tree.unflatten(flat.structure, finished)

    @operation()
    def clear(self, state: State) -> State:
        flat = self._open(state)
        backend, values = resolve([*flat.arrays(), state.count]), list[Accumulator]()
        try:
            for a, kind in zip(flat.values, flat.made_for, strict=True):
                empty = None if a is None else self._empty(backend, kind.dtype, self.cell.shape(a), parts(a)[0])
                values.append(empty)
        except GradCombineError as error:
            error.within(flat.structure.path(len(values)))
            raise
        totals = self._empty_totals(backend, flat, state)
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


def _entering(cell: Cell, backend: Backend, a: Accumulator, kind: Any, leaf: Leaf) -> Leaf:
    """The contribution as the cell takes it; raises for one that does not match the accumulator."""
    if a is None:
        raise invalid("no gradient, as where the state was made", "an array")
    return cell.entering(backend, a, kind.dtype, leaf)


def _absent(backend: Backend, kind: Any) -> Leaf:
    """The result where there is no gradient."""
    return None if kind.shape is None else backend.make_absent(kind.shape)
