"""Row-sparse accumulators: the rows that occurred, each once, in a table of fixed capacity."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from gradcombine import tree
from gradcombine.autograph import ordinary
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.checks import require_integer, require_one_of
from gradcombine.errors import GradCombineError
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.accumulator import require_totals, shape_of
from gradcombine.reductions.algebra import Reduction, Shortcuts
from gradcombine.reductions.cell import RoundedWeights, Totals, dtype_of
from gradcombine.reductions.row_table import RowTable, empty_table, join, result, single, table_for
from gradcombine.reductions.weights import parse
from gradcombine.sparse.leaf import extent, is_row_sparse, row_slices
from gradcombine.types import Array, Order, State, Tree

Overflow = Literal["error", "check"]
_WEIGHTS = RoundedWeights()


class RowsState(NamedTuple):
    """A partial result. Each reduction has a subclass of its own.

    Attributes:
      value: the tree of `RowTable`s; None where the parameter has no gradient.
      weight: the sum of weights, a real scalar.
      count: int32 scalar, the number of contributions whose weight is not 0.
    """

    value: Tree
    weight: Array
    count: Array


@dataclass(frozen=True)
class Rows:
    """The functions of one reduction.

    Attributes:
      name: of the reduction.
      state: the class of its states.
      capacity: how many different rows a table holds.
      settings: the dtypes of accumulator and result.
      finish: ``finish(backend, sums, totals)``: the values as they leave, before they are cast.
      overflow: what happens to one row too many.
      wire_dtype: in which replicas exchange the values; None: as they are.
    """

    name: str
    state: type[RowsState]
    capacity: int
    settings: dtypes.Settings
    finish: Callable[[Backend, Array, Totals], Array]
    overflow: Overflow
    wire_dtype: np.dtype | None

    def reduction(self, scales_by_weight: bool) -> Reduction:
        """The `Reduction` of these functions."""
        require_integer(self.name, "a capacity of 1 row or more", self.capacity, highest=sys.maxsize)
        require_one_of(self.name, f"overflow of {list(get_args(Overflow))}", self.overflow, get_args(Overflow))
        functions = self.init, self.update, self.merge, self.finalize
        shortcuts = Shortcuts(functions, self.clear, self.all_merge)
        return Reduction(*functions, name=self.name, scales_by_weight=scales_by_weight, shortcuts=shortcuts)

    @ordinary
    def init(self, like: Tree) -> State:
        leaves, structure = tree.flatten(self.name, like, is_row_sparse)
        arrays = [x for leaf in leaves if not is_absent(leaf) for x in _arrays(leaf)]
        backend = resolve(self.name, arrays)
        tables = [
            None if is_absent(leaf) else table_for(self.name, backend, leaf, self.capacity, self.settings, path)
            for leaf, path in zip(leaves, structure.paths(), strict=True)
        ]
        wide = any(dtypes.part(dtype_of(table.values)) == np.float64 for table in tables if table is not None)
        weight = _WEIGHTS.empty_weight(backend, np.dtype(np.float64) if wide else dtypes.FLOAT32, arrays)
        count = backend.full((), 0, dtypes.INT32, arrays)
        return self.state(tree.unflatten(structure, tables), weight, count)

    @ordinary
    def update(self, state: State, value: Tree, weight: Any = 1) -> State:
        structure, tables = self._open(state)
        leaves, received = tree.flatten(self.name, value, is_row_sparse)
        if received != structure:
            raise tree.difference(self.name, structure, received)
        arrays = [x for leaf in leaves if not is_absent(leaf) for x in _arrays(leaf)]
        backend = resolve(self.name, [*_flat(tables), *arrays, state.count, weight])
        w = parse(self.name, backend, weight)
        paths = list(structure.paths())
        entering = [
            None if is_absent(leaf) else self._entering(backend, table, leaf, path)
            for table, leaf, path in zip(tables, leaves, paths, strict=True)
        ]
        zero = w.is_zero(backend)
        known = zero if isinstance(zero, bool) else backend.concrete(zero)
        if known is not None and known:
            return state
        updated = [
            table if table is None or slices is None else self._join(backend, table, slices, w, path)
            for table, slices, path in zip(tables, entering, paths, strict=True)
        ]
        total, count = _WEIGHTS.add_weight(backend, state.weight, w), state.count + 1
        if known is None:
            total = backend.where(zero, state.weight, total)
            count = backend.where(zero, state.count, count)
        return self.state(tree.unflatten(structure, updated), total, count)

    def _entering(self, backend: Backend, table: RowTable | None, leaf: Any, path: str) -> Any:
        slices = row_slices(leaf)
        if table is None:
            raise GradCombineError(self.name, "no gradient, as where the state was made", "an array", path)
        if slices is None:
            expected = "a RowSparse, tf.IndexedSlices or BCOO (for dense ones as well: sparse_as_dense)"
            raise GradCombineError(self.name, expected, "a dense array", path)
        rows, shape = backend.shape(table.extent)[0], backend.shape(table.values)[1:]
        received = (rows if slices.rows is None else slices.rows, *shape_of(self.name, slices.values, path)[1:])
        if received != (rows, *shape):
            raise GradCombineError(self.name, f"rows of shape {(rows, *shape)}", received, path)
        dtype, running, output = dtype_of(slices.values), dtype_of(table.values), dtype_of(table.extent)
        if (self.settings.running(dtype), self.settings.output(dtype)) != (running, output):
            raise GradCombineError(self.name, f"dtype {output}, accumulated in {running}", dtype, path)
        return slices

    def _join(self, backend: Backend, table: RowTable, slices: Any, weight: Any, path: str) -> RowTable:
        added = single(self.name, backend, table, slices, weight, path)
        return table if added is None else self._checked(backend, join(self.name, backend, table, added, path))

    def _checked(self, backend: Backend, table: RowTable) -> RowTable:
        if self.overflow == "check":
            size = backend.shape(table.indices)[0]
            expected = f"at most {size} different rows, all in range"
            backend.check(table.lost == 0, self.name, expected, "more, or an index out of range")
        return table

    @ordinary
    def merge(self, a: State, b: State) -> State:
        structure, lefts = self._open(a)
        found, rights = self._open(b)
        if found != structure:
            raise tree.difference(self.name, structure, found)
        backend = resolve(self.name, [*_flat(lefts), *_flat(rights), a.count, b.count])
        tables = []
        for left, right, path in zip(lefts, rights, structure.paths(), strict=True):
            if _described(left) != _described(right):
                raise GradCombineError(self.name, f"a state of {_described(left)}", _described(right), path)
            joined = None
            if left is not None and right is not None:
                joined = self._checked(backend, join(self.name, backend, left, right, path))
            tables.append(joined)
        weight = _WEIGHTS.merge_weights(backend, a.weight, b.weight)
        return self.state(tree.unflatten(structure, tables), weight, a.count + b.count)

    @ordinary
    def finalize(self, state: State) -> Tree:
        structure, tables = self._open(state)
        backend = resolve(self.name, [*_flat(tables), state.count])
        totals = Totals(state.weight, state.count)

        def finish(values: Array) -> Array:
            return self.finish(backend, values, totals)

        return tree.unflatten(structure, [None if t is None else result(backend, t, finish) for t in tables])

    @ordinary
    def clear(self, state: State) -> State:
        structure, tables = self._open(state)
        backend = resolve(self.name, [*_flat(tables), state.count])
        empty = [None if table is None else empty_table(backend, table) for table in tables]
        weight = _WEIGHTS.empty_weight(backend, dtype_of(state.weight), [state.weight])
        count = backend.full((), 0, dtypes.INT32, [state.count])
        return self.state(tree.unflatten(structure, empty), weight, count)

    @ordinary
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        structure, tables = self._open(state)
        backend = resolve(self.name, [*_flat(tables), state.count])
        present = [(path, t) for path, t in zip(structure.paths(), tables, strict=True) if t is not None]
        collective.require_own(self.name, [path for path, _ in present], [t.values for _, t in present])
        bundle = [x for _, t in present for x in (t.indices, self._to_wire(backend, t.values), t.lost)]
        gathered = collective.all_gather([*bundle, state.weight, state.count])

        def of_rank(rank: int) -> State:
            back = iter([stack[rank] for stack in gathered])

            def rebuild(table: RowTable | None) -> RowTable | None:
                if table is None:
                    return None
                indices, values, lost = next(back), next(back), next(back)
                rows, output = backend.shape(table.extent)[0], dtype_of(table.extent)
                limits = extent(backend, rows, [values], output)
                return RowTable(indices, backend.cast(values, dtype_of(table.values)), lost, limits)

            return self.state(tree.unflatten(structure, list(map(rebuild, tables))), next(back), next(back))

        return fold_pairwise(self.merge, map(of_rank, range(collective.size())))

    def _to_wire(self, backend: Backend, values: Array) -> Array:
        if self.wire_dtype is None or dtypes.kind(dtype_of(values)) != dtypes.kind(self.wire_dtype):
            return values
        return backend.cast(values, self.wire_dtype)

    def _open(self, state: State) -> tuple[tree.Structure, list[RowTable | None]]:
        if type(state) is not self.state:
            raise GradCombineError(self.name, f"a {self.state.__name__}", type(state).__name__)
        require_totals(self.name, state.weight, state.count)
        tables, structure = tree.flatten(self.name, state.value, lambda node: isinstance(node, RowTable))
        return structure, tables


def _arrays(leaf: Any) -> tuple[Any, ...]:
    slices = row_slices(leaf)
    return (leaf,) if slices is None else (slices.indices, slices.values)


def _flat(tables: Sequence[RowTable | None]) -> list[Array]:
    return [x for table in tables if table is not None for x in table]


def _described(table: RowTable | None) -> str:
    if table is None:
        return "no gradient"
    shape = (int(table.extent.shape[0]), *map(int, table.values.shape[1:]))
    return f"shape {shape}, dtype {dtype_of(table.values)} and capacity {int(table.indices.shape[0])}"
