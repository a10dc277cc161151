"""Lifts a cell, which combines one leaf, to trees: one accumulator a leaf, one weight and one count a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.autograph import ordinary
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, renamed
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import accumulator, dtypes
from gradcombine.reductions.cell import Accumulator, BatchCell, Cell, IntegerCell, Totals, described, dtype_of, parts
from gradcombine.reductions.weights import Weight, parse
from gradcombine.types import Array, Order, Reduction, State, Tree


class TreewiseState(NamedTuple):
    """A partial result. Each reduction has a subclass of its own, which tells its states from those of others.

    Attributes:
      value: the tree of accumulators; None where the parameter has no gradient.
      weight: the sum of weights, a real scalar (of an exact reduction, a NamedTuple of scalars).
      count: int32 scalar, the number of contributions whose weight is not 0.
      output: a tree of empty arrays, each of the dtype of the result; None where that is the accumulator's.
    """

    value: Tree
    weight: Any
    count: Array
    output: Tree


def lift(cell: Cell, state: type[TreewiseState], wire_dtype: Any = None, averages: bool = False) -> Reduction:
    """The Reduction that applies a cell to every leaf.

    Args:
      cell: what happens on a leaf.
      state: the class of the states.
      wire_dtype: in which replicas exchange floating accumulators; None: as they are.
      averages: see `Reduction`.
    """
    lifted = _Treewise(cell, state, dtypes.parse(wire_dtype, cell.name))
    return Reduction(
        cell.name,
        lifted.init,
        lifted.update,
        lifted.merge,
        lifted.finalize,
        lifted.clear,
        lifted.all_merge,
        averages,
        lifted.update_many if isinstance(cell, BatchCell) else None,
        lifted.all_finalize if isinstance(cell, IntegerCell) else None,
    )


@dataclass(frozen=True)
class _Treewise:
    cell: Cell
    state: type[TreewiseState]
    wire_dtype: np.dtype | None

    @ordinary
    def init(self, like: Tree) -> State:
        leaves, structure = tree.flatten(self.cell.name, like)
        backend = resolve(self.cell.name, leaves)
        made = [self._init_leaf(backend, x, path) for x, path in zip(leaves, structure.paths(), strict=True)]
        present = [x for x in leaves if not is_absent(x)]
        reals = [dtypes.part(described(x).dtype(x)) for x in present if dtypes.kind(described(x).dtype(x)) != "integer"]
        widest = max([dtypes.FLOAT32, *reals], key=lambda dtype: dtype.itemsize)
        return self.state(
            tree.unflatten(structure, [value for value, _ in made]),
            self.cell.empty_weight(backend, widest, present),
            backend.full((), 0, dtypes.INT32, present),
            tree.unflatten(structure, [output for _, output in made]),
        )

    def _init_leaf(self, backend: Backend, leaf: Any, path: str) -> tuple[Any, Any]:
        if leaf is None:
            return None, None
        with renamed(self.cell.name, path):
            shape = described(leaf).shape(leaf)
            if described(leaf).absent(leaf):
                return None, backend.full((0, *shape), 0, np.dtype(np.bool_))
            dtype = described(leaf).dtype(leaf)
        if not dtypes.is_of(dtype, self.cell.kinds):
            raise GradCombineError(self.cell.name, f"a dtype that is {' or '.join(self.cell.kinds)}", dtype, path)
        running, output = self.cell.running(dtype), self.cell.output(dtype)
        value = self.cell.empty(backend, shape, running, leaf)
        return value, None if output == running == dtype else backend.full((0, *shape), 0, output)

    @ordinary
    def update(self, state: State, value: Tree, weight: Any = 1) -> State:
        structure, values, outputs = self._open(state)
        contributions = tree.flatten_as(self.cell.name, structure, value)
        backend = resolve(self.cell.name, [*accumulator.arrays(values), *contributions, state.count, weight])
        w = parse(self.cell.name, backend, weight)
        zero, totals = w.is_zero(backend), Totals(state.weight, state.count)
        updated = [
            self._update_leaf(backend, *leaf, w, totals)
            for leaf in zip(values, contributions, outputs, structure.paths(), strict=True)
        ]
        if zero is True:
            return state
        total, count = self.cell.add_weight(backend, state.weight, w), state.count + 1
        if isinstance(self.cell, IntegerCell):
            total = self.cell.link(backend, total, contributions)
        if zero is not False:
            # Masked by where: a contribution of weight 0 may hold NaN.
            pairs = zip(values, updated, strict=True)
            updated = [new if new is old else accumulator.where(backend, zero, old, new) for old, new in pairs]
            total = accumulator.where(backend, zero, state.weight, total)
            count = backend.where(zero, state.count, count)
        return self.state(tree.unflatten(structure, updated), total, count, state.output)

    def _update_leaf(self, backend: Backend, a: Any, x: Any, output: Any, path: str, w: Weight, totals: Totals) -> Any:
        if not self._takes(a, x, output, path):
            return self._idle(backend, a, [w], totals)
        try:
            return self.cell.update(backend, a, backend.asarray(x), w, totals)
        except GradCombineError as error:
            raise GradCombineError(self.cell.name, error.expected, error.received, path) from None

    def _idle(self, backend: Backend, a: Any, weights: Sequence[Weight], totals: Totals) -> Any:
        return (
            self.cell.idle(backend, a, weights, totals) if a is not None and isinstance(self.cell, IntegerCell) else a
        )

    def _takes(self, a: Any, x: Any, output: Any, path: str) -> bool:
        """Whether there is a contribution to the accumulator; refuses one that does not match it."""
        name = self.cell.name
        if is_absent(x):
            return False
        if a is None:
            raise GradCombineError(name, "no gradient, as where the state was made", "an array", path)
        kept = parts(a)[0]
        with renamed(name, path):
            expected, received = described(kept).shape(kept), described(x).shape(x)
            dtype, running = described(x).dtype(x), dtype_of(kept)
        if expected != received:
            raise GradCombineError(name, f"shape {expected}", received, path)
        made_for = running if output is None else dtype_of(output)
        if (self.cell.running(dtype), self.cell.output(dtype)) != (running, made_for):
            raise GradCombineError(name, f"dtype {made_for}, accumulated in {running}", dtype, path)
        return True

    @ordinary
    def update_many(
        self, state: State, values: Sequence[Tree], weights: Sequence[Any], order: Order = "sequential"
    ) -> State | None:
        cell: Any = self.cell
        structure, accumulators, outputs = self._open(state)
        columns = [tree.flatten_as(cell.name, structure, value) for value in values]
        arrays = [x for column in columns for x in column]
        backend = resolve(cell.name, [*accumulator.arrays(accumulators), *arrays, state.count, *weights])
        parsed = [parse(cell.name, backend, weight) for weight in weights]
        if not cell.takes_many(parsed):
            return None
        totals = Totals(state.weight, state.count)

        def entering(a: Any, x: Any, output: Any, path: str, weight: Weight) -> Array | None:
            zero = weight.is_zero(backend)
            if not self._takes(a, x, output, path) or zero is True:
                return None
            return accumulator.unless(backend, zero, backend.asarray(x))

        def leaf(a: Any, output: Any, path: str, *xs: Any) -> Any:
            present = [entering(a, x, output, path, w) for x, w in zip(xs, parsed, strict=True)]
            if all(x is None for x in present):
                return self._idle(backend, a, parsed, totals)
            try:
                return cell.update_many(backend, a, present, parsed, totals, order)
            except GradCombineError as error:
                raise GradCombineError(cell.name, error.expected, error.received, path) from None

        updated = list(map(leaf, accumulators, outputs, structure.paths(), *columns))
        known = [w for w in parsed if w.known is not None]
        total, count = state.weight, accumulator.plus(backend, state.count, sum(w.known != 0 for w in known))
        if known:
            total = cell.add_weights(backend, total, known, order)
        for w in parsed:
            if w.known is None:
                zero = w.is_zero(backend)
                total = accumulator.where(backend, zero, total, cell.add_weight(backend, total, w))
                count = backend.where(zero, count, count + 1)
        if isinstance(cell, IntegerCell):
            total = cell.link(backend, total, arrays)
        return self.state(tree.unflatten(structure, updated), total, count, state.output)

    @ordinary
    def merge(self, a: State, b: State) -> State:
        structure, lefts, _ = self._open(a)
        _, rights, _ = self._open(b, structure)
        backend = resolve(self.cell.name, [*accumulator.arrays(lefts), *accumulator.arrays(rights), a.count, b.count])
        totals = Totals(a.weight, a.count), Totals(b.weight, b.count)
        values = []
        for left, right, path in zip(lefts, rights, structure.paths(), strict=True):
            if accumulator.summary(left) != accumulator.summary(right):
                raise GradCombineError(
                    self.cell.name, f"a state of {accumulator.summary(left)}", accumulator.summary(right), path
                )
            values.append(None if left is None else self.cell.merge(backend, left, right, *totals))
        weight = self.cell.merge_weights(backend, a.weight, b.weight)
        return self.state(tree.unflatten(structure, values), weight, a.count + b.count, a.output)

    @ordinary
    def finalize(self, state: State) -> Tree:
        structure, values, outputs = self._open(state)
        backend = resolve(self.cell.name, [*accumulator.arrays(values), state.count])
        totals = Totals(state.weight, state.count)

        def finish(a: Any, output: Any) -> Any:
            if a is None:
                return accumulator.absent(backend, output)
            return self.cell.finish(backend, a, totals, accumulator.result_dtype(a, output))

        return tree.unflatten(structure, map(finish, values, outputs))

    @ordinary
    def all_finalize(self, state: State, collective: Collective, weight: Any) -> Tree:
        cell: Any = self.cell
        structure, values, outputs = self._open(state)
        backend = resolve(cell.name, [*accumulator.arrays(values), state.count, weight])
        present = [
            (a, accumulator.result_dtype(a, output)) for a, output in zip(values, outputs, strict=True) if a is not None
        ]
        given, totals = list(zip(*present, strict=True)) or [(), ()], Totals(state.weight, state.count)
        results = cell.all_finish(backend, collective, *given, totals, parse(cell.name, backend, weight))
        if results is None:
            return self.finalize(self.all_merge(state, collective, "sequential"))
        back = iter(results)
        finished = (
            accumulator.absent(backend, o) if a is None else next(back) for a, o in zip(values, outputs, strict=True)
        )
        return tree.unflatten(structure, finished)

    @ordinary
    def clear(self, state: State) -> State:
        structure, values, _ = self._open(state)
        backend = resolve(self.cell.name, [*accumulator.arrays(values), state.count])

        def empty(a: Any) -> Any:
            if a is None:
                return None
            kept = parts(a)[0]
            return self.cell.empty(backend, backend.shape(kept), dtype_of(kept), kept)

        weight = self.cell.empty_weight(backend, dtype_of(parts(state.weight)[0]), parts(state.weight))
        count = backend.full((), 0, dtypes.INT32, [state.count])
        return self.state(tree.unflatten(structure, map(empty, values)), weight, count, state.output)

    @ordinary
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        structure, values, _ = self._open(state)
        arrays = accumulator.arrays(values)
        paths = [path for path, a in zip(structure.paths(), values, strict=True) if a is not None for _ in parts(a)]
        collective.require_own(self.cell.name, paths, arrays)
        backend = resolve(self.cell.name, [*arrays, state.count, collective.rank()])
        if isinstance(self.cell, IntegerCell) and collective.size() <= self.cell.most_replicas:
            present = [a for a in values if a is not None]
            merged, totals = self.cell.all_merge(backend, collective, present, Totals(state.weight, state.count))
            back = iter(merged)
            filled = [None if a is None else next(back) for a in values]
            return self.state(tree.unflatten(structure, filled), *totals, state.output)

        def rebuild(received: Sequence[Array]) -> State:
            back = iter(received)

            def like(a: Accumulator) -> Accumulator:
                return accumulator.like(a, [backend.cast(next(back), dtype_of(x)) for x in parts(a)])

            filled = [None if a is None else like(a) for a in values]
            weight, count = like(state.weight), next(back)
            return self.state(tree.unflatten(structure, filled), weight, count, state.output)

        bundle = [*(self._to_wire(backend, x) for x in arrays), *parts(state.weight), state.count]
        if self.cell.additive and order == "sequential":
            return rebuild(collective.all_sum(bundle))
        gathered = collective.all_gather(bundle)
        states = (rebuild([stack[rank] for stack in gathered]) for rank in range(collective.size()))
        return fold_pairwise(self.merge, states)

    def _to_wire(self, backend: Backend, x: Array) -> Array:
        if self.wire_dtype is None or dtypes.kind(dtype_of(x)) != dtypes.kind(self.wire_dtype):
            return x
        return backend.cast(x, self.wire_dtype)

    def _open(
        self, state: State, structure: tree.Structure | None = None
    ) -> tuple[tree.Structure, list[Any], list[Any]]:
        """The structure, the accumulators and the output dtypes of a state of this reduction."""
        name = self.cell.name
        if type(state) is not self.state:
            raise GradCombineError(name, f"a {self.state.__name__}", type(state).__name__)
        accumulator.require_totals(name, state.weight, state.count)
        compound = self.cell.compound
        is_leaf = None if compound is None else (lambda node: isinstance(node, compound))
        values, found = tree.flatten(name, state.value, is_leaf)
        if structure is not None and found != structure:
            raise tree.difference(name, structure, found)
        return found, values, tree.flatten_as(name, found, state.output)
