"""Lifts the reduction of one leaf, a `Cell`, to trees: an accumulator per leaf, a weight and a count per tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import dtype_of, resolve
from gradcombine.errors import invalid, not_of, within
from gradcombine.pairwise import fold_ranks
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, described
from gradcombine.reductions.cell import (
    Accumulator,
    Cell,
    FlatState,
    Small,
    Totals,
    TreewiseState,
    parts,
    refilled,
    require_sendable,
    summary,
    where,
)
from gradcombine.reductions.weights import Weight, parse
from gradcombine.sparse import require_dense
from gradcombine.types import Array, Leaf, Order, Scalar, State, Tree
from gradcombine.wires import exchange
from gradcombine.wires.wire import Wire, require_wire


class Treewise(Reduction):
    """The reduction that applies a cell to every leaf.

    Args:
      cell: the reduction of a leaf.
      state: the class of the states.
      wire: the compression of float accumulators between replicas; None: none.
      scales_by_weight, derivative, divides: see `Reduction`.
      settings: further settings for the description.
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
        self.scales_by_weight, self.divides, self.adds = scales_by_weight, divides, cell.adds_terms
        self._settings, self._derivative = settings, derivative

    @property
    def description(self) -> str:
        requested = {"dtype": self.cell.settings.accumulator, "output_dtype": self.cell.settings.result}
        return described(self.name, **self._settings, **requested, wire=self.wire)

    @property
    def derivative(self) -> Reduction | None:
        if self._derivative is None and self.wire is not None:
            flags = {"scales_by_weight": self.scales_by_weight, "divides": self.divides}
            return Treewise(self.cell, self.state, **flags, **self._settings)
        return self._derivative

    def init(self, like: Tree) -> State:
        cell = self.cell
        leaves, structure = tree.flatten(like, cell.is_leaf)
        first = [cell.arrays(leaf)[0] for leaf in leaves]
        backend = resolve(first)
        made_for, values = [tree.static_of(x) for x in first], list[Accumulator]()
        with within(lambda: structure.path(len(values))):
            for leaf, x, spec in zip(leaves, first, made_for, strict=True):
                absent = spec.dtype is None
                values.append(None if absent else self._empty(backend, spec.dtype, cell.shape(leaf), x))
        present = [x for x, spec in zip(first, made_for, strict=True) if spec.dtype is not None]
        if not cell.takes_indices and any(spec.dtype is not None and spec.dtype.kind in "iu" for spec in made_for):
            require_dense(structure)
        widest = dtypes.of_weights([spec.dtype for spec in made_for if spec.dtype is not None])
        weight = cell.empty_weight(backend, widest, present)
        count = backend.full((), 0, dtypes.INT32, present)
        flat = FlatState(structure, values, made_for)
        if self.wire is not None:
            require_sendable(self.wire, flat, cell.shape, leaves)
        return self.state(flat.value(values), weight, count, tree.unflatten(structure, made_for))

    def _empty(self, backend: Backend, dtype: np.dtype, shape: tuple[int, ...], like: Leaf) -> Accumulator:
        """The empty accumulator for contributions of this dtype and shape, placed like the array ``like``."""
        if dtypes.kind(dtype) not in self.cell.kinds:
            raise invalid(f"a dtype that is {' or '.join(self.cell.kinds)}", dtype)
        return self.cell.empty(backend, shape, self.cell.running(dtype), like)

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        return self._updated(state, value, weight, multiplies=True)

    def add_weighted(self, state: State, value: Tree, weight: Scalar) -> State:
        return self._updated(state, value, weight, multiplies=False)

    def _updated(self, state: State, value: Tree, weight: Scalar, multiplies: bool) -> State:
        flat, leaves, backend, w = self._flatten_all(state, value, weight)
        cell, zero, totals = self.cell, w.zero, Totals(state.weight, state.count)
        factor = w if multiplies else parse(backend, 1)
        is_known = isinstance(zero, bool)

        def update_leaf(_: None, a: Accumulator, x: Leaf) -> Accumulator:
            new = cell.update(backend, a, x, factor, totals)
            # A where, not a product: a contribution of weight 0 may be NaN.
            return new if is_known else cell.masked(backend, zero, a, new)

        apply, updated = Small(backend, update_leaf) if cell.joins else update_leaf, list[Accumulator]()
        with within(lambda: flat.structure.path(len(updated))):
            for a, spec, leaf in zip(flat.values, flat.made_for, leaves, strict=True):
                if leaf is not None and not backend.absent(leaf):
                    updated.append(apply(None, a, _checked(cell, backend, a, spec, leaf)))
                    continue
                new = None if a is None else cell.idle(backend, a, w, totals)
                updated.append(new if is_known or new is a else cell.masked(backend, zero, a, new))
        if zero is True:
            return state
        if isinstance(apply, Small):
            updated = apply.results(updated)
        total, count = cell.link(backend, cell.add_weight(backend, state.weight, w), leaves), state.count + 1
        if not is_known:
            total = where(backend, zero, state.weight, total)
            count = backend.where(zero, state.count, count)
        return flat.rebuild(state, updated, total, count)

    def contribution(self, state: State, value: Tree, weight: Scalar) -> State:
        flat, leaves, backend, w = self._flatten_all(state, value, weight)
        cell, zero, empty = self.cell, w.zero, self._empty_totals(backend, flat, state)
        terms = list[Array | None]()
        with within(lambda: flat.structure.path(len(terms))):
            for a, spec, leaf in zip(flat.values, flat.made_for, leaves, strict=True):
                if leaf is None or backend.absent(leaf):
                    terms.append(None)
                    continue
                term = cell.term(backend, a, _checked(cell, backend, a, spec, leaf), w)
                if not isinstance(zero, bool):
                    dtype = backend.dtype(term)
                    neutral = empty.once(dtype, partial(cell.empty, backend, (), dtype, term))
                    term = backend.where(zero, neutral, term)
                terms.append(None if zero is True else term)
        total, count = cell.add_weight(backend, empty.weight, w), empty.count + 1
        if zero is not False:
            total, count = (where(backend, zero, x, y) for x, y in ((empty.weight, total), (empty.count, count)))
        return flat.rebuild(state, terms, total, count)

    def _flatten_all(self, state: State, value: Tree, weight: Scalar) -> tuple[FlatState, list[Leaf], Backend, Weight]:
        flat = self._flatten(state)
        leaves = tree.flatten_as(flat.structure, value, self.cell.is_leaf)
        arrays = leaves if self.cell.is_leaf is None else [x for leaf in leaves for x in self.cell.arrays(leaf)]
        backend = resolve([*flat.arrays(), *arrays, state.count, weight])
        return flat, leaves, backend, parse(backend, weight)

    def combine(self, values: Sequence[Tree], weights: Sequence[Scalar], order: Order) -> Tree:
        cell = self.cell
        if not cell.takes_lists:
            return super().combine(values, weights, order)
        leaves, structure = tree.flatten(values[0])
        rows = [leaves, *[tree.flatten_as(structure, value) for value in values[1:]]]
        all_leaves = list(chain.from_iterable(rows))
        backend = resolve([*all_leaves, *weights])
        parsed = [parse(backend, weight) for weight in weights]
        known = [w for w in parsed if w.known is not None]
        if len(known) < len(parsed) and not cell.takes_traced:
            return super().combine(values, weights, order)
        columns = list(zip(*rows, strict=True))
        likes, present, made_for, empties = list[Leaf](), list[Leaf](), list[np.dtype | None](), list[Accumulator]()
        has_integers = False
        with within(lambda: structure.path(len(empties))):
            # Before the weights: raises for dtypes that `of_weights` does not support.
            for column in columns:
                given = [x for x in column if x is not None]
                like = next((x for x in given if not backend.absent(x)), given[0] if given else None)
                likes.append(like)
                if like is None or backend.absent(like):
                    made_for.append(None)
                    empties.append(None)
                    continue
                present.append(like)
                made_for.append(dtype := backend.dtype(like))
                has_integers = has_integers or dtype.kind in "iu"
                empties.append(self._empty(backend, dtype, backend.shape(like), like))
        if has_integers:
            require_dense(structure)
        widest = dtypes.of_weights([dtype for dtype in made_for if dtype is not None])
        total = cell.total_weight(backend, widest, present, known, order)
        known_count = len([w for w in known if w.zero is False])
        count = backend.full((), known_count, dtypes.INT32, present)
        for w in parsed:
            if w.known is None:
                total = where(backend, w.zero, total, cell.add_weight(backend, total, w))
                count = backend.where(w.zero, count, count + 1)
        totals = Totals(cell.link(backend, total, all_leaves), count, has_some=known_count > 0)

        def combine_leaf(output: np.dtype, a: Accumulator, *xs: Array) -> Leaf:
            return cell.finish(backend, cell.update_many(backend, a, xs, parsed, order), totals, output)

        apply, results = Small(backend, combine_leaf) if cell.joins else combine_leaf, list[Leaf]()
        with within(lambda: structure.path(len(results))):
            for a, like, dtype, column in zip(empties, likes, made_for, columns, strict=True):
                if dtype is None:
                    results.append(None if like is None else backend.make_absent(backend.shape(like)))
                    continue
                xs, has_some = list[Array | None](), False
                for x, w in zip(column, parsed, strict=True):
                    absent = x is None or backend.absent(x)
                    checked = None if absent else cell.checked(backend, a, dtype, x)
                    xs.append(None if w.zero is True else checked)
                    has_some = has_some or xs[-1] is not None
                output = cell.settings.output(dtype)
                results.append(apply(output, a, *xs) if has_some else cell.finish(backend, a, totals, output))
        return tree.unflatten(structure, apply.results(results) if isinstance(apply, Small) else results)

    def merge(self, a: State, b: State) -> State:
        left, right = self._flatten(a), self._flatten(b)
        if left.structure != right.structure:
            raise tree.difference(left.structure, right.structure)
        cell, backend = self.cell, resolve([*left.arrays(), *right.arrays(), a.count, b.count])
        totals = Totals(a.weight, a.count), Totals(b.weight, b.count)

        def merge_leaf(_: None, x: Accumulator, y: Accumulator) -> Accumulator:
            return cell.merge(backend, x, y, *totals)

        apply, values = Small(backend, merge_leaf) if cell.joins else merge_leaf, list[Accumulator]()
        with within(lambda: left.structure.path(len(values))):
            for x, y in zip(left.values, right.values, strict=True):
                expected, received = summary(x), summary(y)
                if expected != received:
                    raise invalid(f"a state of {expected}", received)
                values.append(None if x is None else apply(None, x, y))
        if isinstance(apply, Small):
            values = apply.results(values)
        return left.rebuild(a, values, cell.merge_weights(backend, a.weight, b.weight), a.count + b.count)

    def finalize(self, state: State) -> Tree:
        flat = self._flatten(state)
        cell, backend = self.cell, resolve([*flat.arrays(), state.count])
        count = backend.concrete(state.count)
        totals = Totals(state.weight, state.count, count is not None and bool(count != 0))

        def finish(output: np.dtype, a: Accumulator) -> Leaf:
            return cell.finish(backend, a, totals, output)

        apply, results = Small(backend, finish) if cell.joins else finish, list[Leaf]()
        with within(lambda: flat.structure.path(len(results))):
            for a, spec in zip(flat.values, flat.made_for, strict=True):
                if spec.dtype is None:
                    results.append(_absent(backend, spec))
                    continue
                if a is None:
                    raise invalid(f"an accumulator for contributions of {spec}", "none")
                results.append(apply(cell.settings.output(spec.dtype), a))
        return tree.unflatten(flat.structure, apply.results(results) if isinstance(apply, Small) else results)

    def all_finalize(self, state: State, collective: Collective, order: Order, weight: Scalar) -> Tree:
        cell = self.cell
        if not cell.most_replicas:
            return self.finalize(self.all_merge(state, collective, order))
        flat = self._flatten(state)
        backend = resolve([*flat.arrays(), state.count, weight])
        outputs = [cell.settings.output(spec.dtype) for spec in flat.made_for if spec.dtype is not None]
        totals, w = Totals(state.weight, state.count), parse(backend, weight)
        if (results := cell.all_finish(backend, collective, flat.present(), outputs, totals, w)) is None:
            return self.finalize(self.all_merge(state, collective, "sequential"))
        remaining = iter(results)
        finished = (_absent(backend, spec) if spec.dtype is None else next(remaining) for spec in flat.made_for)
        return tree.unflatten(flat.structure, finished)

    def clear(self, state: State) -> State:
        flat = self._flatten(state)
        backend, values = resolve([*flat.arrays(), state.count]), list[Accumulator]()
        with within(lambda: flat.structure.path(len(values))):
            for a, spec in zip(flat.values, flat.made_for, strict=True):
                empty = None if a is None else self._empty(backend, spec.dtype, self.cell.shape(a), parts(a)[0])
                values.append(empty)
        totals = self._empty_totals(backend, flat, state)
        return flat.rebuild(state, values, totals.weight, totals.count)

    def _empty_totals(self, backend: Backend, flat: FlatState, state: State) -> Totals:
        present = [spec.dtype for spec in flat.made_for if spec.dtype is not None]
        dtype = dtypes.of_weights(present) if present else dtype_of(parts(state.weight)[0])
        weight = self.cell.empty_weight(backend, dtype, parts(state.weight))
        return Totals(weight, backend.full((), 0, dtypes.INT32, [state.count]))

    def all_merge(self, state: State, collective: Collective, order: Order, errors: list[Array] | None = None) -> State:
        """See `Reduction`. Appends the rounding errors of leaves that the wire compresses to ``errors``."""
        backend = resolve([*self._flatten(state).arrays(), state.count, collective.rank()])
        # A restored checkpoint may have Python numbers in place of scalar arrays.
        state = tree.map(backend.asarray, state)
        arrays = (flat := self._flatten(state)).arrays()
        with_paths = zip(flat.structure.paths(), flat.values, strict=True)
        paths = [path for path, a in with_paths if a is not None for _ in parts(a)]
        collective.require_unreduced(zip(paths, arrays, strict=True))
        if collective.size() <= self.cell.most_replicas:
            merged, totals = self.cell.all_merge(backend, collective, flat.present(), Totals(state.weight, state.count))
            remaining = iter(merged)
            values = [None if a is None else next(remaining) for a in flat.values]
            return flat.rebuild(state, values, totals.weight, totals.count)

        def rebuild(received: Sequence[Array]) -> State:
            remaining = iter(received)

            def like(a: Any) -> Any:
                return refilled(a, [backend.cast(next(remaining), dtype_of(x)) for x in parts(a)])

            values = [None if a is None else like(a) for a in flat.values]
            return flat.rebuild(state, values, like(state.weight), next(remaining))

        def arrays_of(merged: State) -> list[Array]:
            return [*self._flatten(merged).arrays(), *parts(merged.weight), merged.count]

        others = [*parts(state.weight), state.count]
        adds, wire = self.cell.additive and order == "sequential", None if collective.size() == 1 else self.wire
        if wire is None:
            bundle = [*arrays, *others]
            if adds:
                return rebuild(collective.all_sum(bundle))
            return fold_ranks(backend, collective, self.merge, arrays_of, rebuild, collective.of_each_rank(bundle))
        if adds:
            return rebuild(exchange.all_sum(backend, collective, wire, paths, arrays, others, errors))
        # The path of None marks arrays that are sent uncompressed.
        narrow = [p if dtypes.kind(dtype_of(x)) == "float" else None for p, x in zip(paths, arrays, strict=True)]
        ranks = exchange.all_gather(backend, collective, wire, [*narrow, *(None for _ in others)], [*arrays, *others])
        return fold_ranks(backend, collective, self.merge, arrays_of, rebuild, ranks)

    def _flatten(self, state: State) -> FlatState:
        if state.__class__ is not self.state:
            raise not_of(f"a {self.state.__name__}", state, self.state)
        made_for, structure = tree.flatten(state.dtypes, tree.is_static)
        accumulators = tree.split_as(structure, state.value)
        values = [None if isinstance(a, tree.Static) else a for a in accumulators]
        return FlatState(structure, values, made_for)


def _checked(cell: Cell, backend: Backend, a: Accumulator, spec: Any, leaf: Leaf) -> Leaf:
    """Converts a contribution for the cell; raises if it does not fit the accumulator."""
    if a is None:
        raise invalid("no gradient, as in the tree that the state was made for", "an array")
    return cell.checked(backend, a, spec.dtype, leaf)


def _absent(backend: Backend, spec: Any) -> Leaf:
    """The result of a leaf without gradient."""
    return None if spec.shape is None else backend.make_absent(spec.shape)
