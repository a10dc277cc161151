"""Lifts a cell, which combines one leaf, to trees: one accumulator per leaf, one weight and one count per tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import (
    dtype_of,
    in_words,
    is_absent,
    is_array_of,
    require_count,
    require_scalar,
    resolve,
    shape_of,
)
from gradcombine.errors import GradCombineError, at, attribute, shown
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, Shortcuts
from gradcombine.reductions.cell import Cell, Totals, parts, refilled, where
from gradcombine.reductions.guarded import of_each_rank
from gradcombine.reductions.weights import Weight, parse
from gradcombine.types import Array, Order, State, Tree, no_autograph


class TreewiseState(NamedTuple):
    """A partial result. Each reduction has a subclass of its own, which tells its states from those of others.

    Attributes:
      value: the tree of accumulators; a constant in the structure where the parameter has no gradient.
      weight: the sum of weights, a real scalar (of an exact reduction, a NamedTuple of scalars).
      count: int32 scalar, the number of contributions whose weight is not 0.
      dtypes: constants in the structure: for each leaf the dtype of the contributions, or that there is no gradient.
    """

    value: Tree
    weight: Any
    count: Array
    dtypes: Tree


def lift(
    cell: Cell,
    state: type[TreewiseState],
    wire_dtype: Any = None,
    scales_by_weight: bool = False,
    derivative: Reduction | None = None,
    divides: bool = False,
) -> Reduction:
    """The Reduction that applies a cell to every leaf.

    Args:
      cell: what happens on a leaf.
      state: the class of the states.
      wire_dtype: in which replicas exchange floating accumulators; None: as they are.
      scales_by_weight: see `Reduction`.
      derivative: see `Shortcuts`.
      divides: whether the result is a sum of ``w * g`` over that of ``w``.
    """
    lifted = _Treewise(cell, state, dtypes.parse(wire_dtype, cell.name))
    functions = lifted.init, lifted.update, lifted.merge, lifted.finalize
    many = lifted.update_many if cell.takes_lists else None
    finalize = lifted.all_finalize if cell.most_replicas else None
    alone = lifted.contribution if cell.adds_terms else None
    weighted = lifted.add_weighted if divides else None
    shortcuts = Shortcuts(functions, lifted.clear, lifted.all_merge, many, finalize, alone, derivative, weighted)
    return Reduction(*functions, name=cell.name, scales_by_weight=scales_by_weight, shortcuts=shortcuts)


@dataclass(frozen=True)
class _Treewise:
    cell: Cell
    state: type[TreewiseState]
    wire_dtype: np.dtype | None

    @no_autograph
    def init(self, like: Tree) -> State:
        leaves, structure = tree.flatten(self.cell.name, like, self.cell.is_leaf)
        return self._begun(structure, leaves)[1]

    def _begun(self, structure: tree.Structure, leaves: Sequence[Any]) -> tuple[_Opened, State]:
        """The empty state for leaves like these, also as it is when opened."""
        first = [self.cell.arrays(leaf)[0] for leaf in leaves]
        backend = resolve(self.cell.name, first)
        made_for = [tree.static_of(x) for x in first]

        def empty(leaf: Any, like: Any, kind: Any) -> Any:
            if kind.dtype is None:
                return None
            if not dtypes.is_of(kind.dtype, self.cell.kinds):
                raise GradCombineError(self.cell.name, f"a dtype that is {' or '.join(self.cell.kinds)}", kind.dtype)
            return self.cell.empty(backend, self.cell.shape(leaf), self.cell.running(kind.dtype), like)

        opened = _Opened(structure, self._each(structure, empty, leaves, first, made_for), made_for)
        present = [x for x, kind in zip(first, made_for, strict=True) if kind.dtype is not None]
        widest = dtypes.of_weights(kind.dtype for kind in made_for if kind.dtype is not None)
        weight = self.cell.empty_weight(backend, widest, present)
        count = backend.full((), 0, dtypes.INT32, present)
        return opened, self.state(opened.value(opened.values), weight, count, tree.unflatten(structure, made_for))

    @no_autograph
    def update(self, state: State, value: Tree, weight: Any = 1) -> State:
        return self._updated(state, value, weight, multiplies=True)

    @no_autograph
    def add_weighted(self, state: State, value: Tree, weight: Any) -> State:
        return self._updated(state, value, weight, multiplies=False)

    def _updated(self, state: State, value: Tree, weight: Any, multiplies: bool) -> State:
        flat, leaves, backend, w = self._entered(state, value, weight)
        zero, totals = w.is_zero(backend), Totals(state.weight, state.count)
        factor = w if multiplies else parse(self.cell.name, backend, 1)

        def update(a: Any, kind: Any, leaf: Any) -> Any:
            if is_absent(leaf):
                return None if a is None else self.cell.idle(backend, a, [w], totals)
            return self.cell.update(backend, a, self._entering(backend, a, kind, leaf), factor, totals)

        updated = self._each(flat.structure, update, flat.values, flat.made_for, leaves)
        if zero is True:
            return state
        total = self.cell.link(backend, self.cell.add_weight(backend, state.weight, w), leaves)
        count = state.count + 1
        if zero is not False:
            # Masked by where: a contribution of weight 0 may hold NaN.
            pairs = zip(flat.values, updated, strict=True)
            updated = [new if new is old else self.cell.masked(backend, zero, old, new) for old, new in pairs]
            total = where(backend, zero, state.weight, total)
            count = backend.where(zero, state.count, count)
        return flat.closed(state, updated, total, count)

    @no_autograph
    def contribution(self, state: State, value: Tree, weight: Any) -> State:
        cell = self.cell
        flat, leaves, backend, w = self._entered(state, value, weight)
        zero, empty = w.is_zero(backend), self._empty_totals(backend, state)

        def term(a: Any, kind: Any, leaf: Any) -> Array | None:
            if is_absent(leaf):
                return None
            added = cell.term(backend, a, self._entering(backend, a, kind, leaf), w)
            if isinstance(zero, bool):
                return None if zero else added
            dtype = backend.dtype(added)
            return backend.where(zero, empty.once(dtype, lambda: cell.empty(backend, (), dtype, added)), added)

        terms = self._each(flat.structure, term, flat.values, flat.made_for, leaves)

        total, count = cell.add_weight(backend, empty.weight, w), empty.count + 1
        if zero is not False:
            total, count = (where(backend, zero, x, y) for x, y in ((empty.weight, total), (empty.count, count)))
        return flat.closed(state, terms, total, count)

    def _entered(self, state: State, value: Tree, weight: Any) -> tuple[_Opened, list[Any], Backend, Weight]:
        flat = self._open(state)
        leaves = tree.flatten_as(self.cell.name, flat.structure, value, self.cell.is_leaf)
        arrays = (x for leaf in leaves for x in self.cell.arrays(leaf))
        backend = resolve(self.cell.name, [*flat.arrays(), *arrays, state.count, weight])
        return flat, leaves, backend, parse(self.cell.name, backend, weight)

    def _entering(self, backend: Backend, a: Any, kind: Any, leaf: Any) -> Any:
        """The contribution as the cell takes it; refuses one that does not match the accumulator."""
        if a is None:
            raise GradCombineError(self.cell.name, "no gradient, as where the state was made", "an array")
        return self.cell.entering(backend, a, kind.dtype, leaf)

    def _each(self, structure: tree.Structure, function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
        """What the function makes of each leaf; errors name the leaf."""
        results: list[Any] = []
        for row in zip(*columns, strict=True):
            try:
                results.append(function(*row))
            except GradCombineError as error:
                raise at(error, self.cell.name, structure.path(len(results))) from None
        return results

    @no_autograph
    def update_many(
        self, state: State | None, trees: Sequence[Tree], weights: Sequence[Any], order: Order = "sequential"
    ) -> State | None:
        cell = self.cell
        if state is None:
            leaves, structure = tree.flatten(cell.name, trees[0])
            rows = [leaves, *(tree.flatten_as(cell.name, structure, value) for value in trees[1:])]
            like = [next((x for x in column if x is not None), None) for column in zip(*rows, strict=True)]
            flat, whole = self._begun(structure, like)
        else:
            flat, whole = self._open(state), state
            rows = [tree.flatten_as(cell.name, flat.structure, value) for value in trees]
        entered = [x for row in rows for x in row]
        backend = resolve(cell.name, [*flat.arrays(), *entered, whole.count, *weights])
        parsed = [parse(cell.name, backend, weight) for weight in weights]
        if not cell.takes_many(parsed):
            return None
        totals, zeros = Totals(whole.weight, whole.count), [weight.is_zero(backend) for weight in parsed]

        def update(a: Any, kind: Any, *xs: Any) -> Any:
            def entering(leaf: Any, zero: Array | bool) -> Array | None:
                x = None if is_absent(leaf) else self._entering(backend, a, kind, leaf)
                return None if x is None or zero is True else _unless(backend, zero, x)

            present = [entering(x, zero) for x, zero in zip(xs, zeros, strict=True)]
            if all(x is None for x in present):
                return None if a is None else cell.idle(backend, a, parsed, totals)
            return cell.update_many(backend, a, present, parsed, totals, order)

        values = self._each(flat.structure, update, flat.values, flat.made_for, *rows)
        known = [w for w in parsed if w.known is not None]
        total, count = whole.weight, _plus(backend, whole.count, sum(w.known != 0 for w in known))
        if known:
            total = cell.add_weights(backend, total, known, order)
        for w, zero in zip(parsed, zeros, strict=True):
            if w.known is None:
                total = where(backend, zero, total, cell.add_weight(backend, total, w))
                count = backend.where(zero, count, count + 1)
        return flat.closed(whole, values, cell.link(backend, total, entered), count)

    @no_autograph
    def merge(self, a: State, b: State) -> State:
        name, left, right = self.cell.name, self._open(a), self._open(b)
        if left.structure != right.structure:
            raise tree.difference(name, left.structure, right.structure)
        backend = resolve(name, [*left.arrays(), *right.arrays(), a.count, b.count])
        totals = Totals(a.weight, a.count), Totals(b.weight, b.count)

        def merge(x: Any, y: Any) -> Any:
            expected, received = _summary(x), _summary(y)
            if expected != received:
                raise GradCombineError(name, f"a state of {expected}", received)
            return None if x is None else self.cell.merge(backend, x, y, *totals)

        values = self._each(left.structure, merge, left.values, right.values)
        return left.closed(a, values, self.cell.merge_weights(backend, a.weight, b.weight), a.count + b.count)

    @no_autograph
    def finalize(self, state: State) -> Tree:
        flat = self._open(state)
        backend = resolve(self.cell.name, [*flat.arrays(), state.count])
        totals = Totals(state.weight, state.count)

        def finish(a: Any, kind: Any) -> Any:
            if kind.dtype is None:
                return _absent(backend, kind)
            if a is None:
                raise GradCombineError(self.cell.name, f"an accumulator for contributions of {kind}", "none")
            return self.cell.finish(backend, a, totals, self.cell.output(kind.dtype))

        return tree.unflatten(flat.structure, self._each(flat.structure, finish, flat.values, flat.made_for))

    @no_autograph
    def all_finalize(self, state: State, collective: Collective, weight: Any) -> Tree:
        cell = self.cell
        flat = self._open(state)
        backend = resolve(cell.name, [*flat.arrays(), state.count, weight])
        outputs = [cell.output(kind.dtype) for kind in flat.made_for if kind.dtype is not None]
        totals, w = Totals(state.weight, state.count), parse(cell.name, backend, weight)
        if (results := cell.all_finish(backend, collective, flat.present(), outputs, totals, w)) is None:
            return self.finalize(self.all_merge(state, collective, "sequential"))
        back = iter(results)
        finished = (_absent(backend, kind) if kind.dtype is None else next(back) for kind in flat.made_for)
        return tree.unflatten(flat.structure, finished)

    @no_autograph
    def clear(self, state: State) -> State:
        flat = self._open(state)
        backend = resolve(self.cell.name, [*flat.arrays(), state.count])

        def empty(a: Any) -> Any:
            if a is None:
                return None
            kept = parts(a)[0]
            return self.cell.empty(backend, self.cell.shape(a), dtype_of(kept), kept)

        totals = self._empty_totals(backend, state)
        return flat.closed(state, list(map(empty, flat.values)), totals.weight, totals.count)

    def _empty_totals(self, backend: Backend, state: State) -> Totals:
        weight = self.cell.empty_weight(backend, dtype_of(parts(state.weight)[0]), parts(state.weight))
        return Totals(weight, backend.full((), 0, dtypes.INT32, [state.count]))

    @no_autograph
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        backend = resolve(self.cell.name, [*self._open(state).arrays(), state.count, collective.rank()])
        leaves, structure = tree.flatten(self.cell.name, state)
        # Python's numbers, as some restore them, are no arrays to exchange.
        state = tree.unflatten(structure, map(backend.asarray, leaves))
        arrays = (flat := self._open(state)).arrays()
        named = zip(flat.structure.paths(), flat.values, strict=True)
        paths = [path for path, a in named if a is not None for _ in parts(a)]
        collective.require_unreduced(self.cell.name, paths, arrays)
        if collective.size() <= self.cell.most_replicas:
            cell = self.cell
            merged, totals = cell.all_merge(backend, collective, flat.present(), Totals(state.weight, state.count))
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

        bundle = [*_on_wire(backend, arrays, self.wire_dtype), *parts(state.weight), state.count]
        if self.cell.additive and order == "sequential":
            return rebuild(collective.all_sum(bundle))
        return fold_pairwise(self.merge, map(rebuild, of_each_rank(collective, bundle)))

    def _open(self, state: State) -> _Opened:
        return _opened(self.cell, self.state, state)


@dataclass(frozen=True)
class _Opened:
    """A state, flattened.

    Attributes:
      structure: of its tree.
      values: the accumulators; None where there is no gradient.
      made_for: constants, in the same order.
    """

    structure: tree.Structure
    values: list[Any]
    made_for: list[Any]

    def present(self) -> list[Any]:
        return [a for a in self.values if a is not None]

    def arrays(self) -> list[Array]:
        return [array for a in self.values if a is not None for array in parts(a)]

    def closed(self, state: State, values: Sequence[Any], weight: Any, count: Array) -> State:
        """The state with other accumulators."""
        return type(state)(self.value(values), weight, count, state.dtypes)

    def value(self, values: Sequence[Any]) -> Tree:
        """The tree of these accumulators."""
        pairs = zip(self.made_for, values, strict=True)
        return tree.unflatten(self.structure, [kind if value is None else value for kind, value in pairs])


def _unless(backend: Backend, zero: Array | bool, x: Array) -> Array:
    return x if isinstance(zero, bool) else backend.where(zero, backend.full((), 0, backend.dtype(x)), x)


def _plus(backend: Backend, count: Array, more: int) -> Array:
    """The sum, still known where the count was."""
    known = backend.concrete(count)
    return count + more if known is None else backend.full((), int(known) + more, dtypes.INT32, [count])


def _on_wire(backend: Backend, arrays: Sequence[Array], wire: np.dtype | None) -> list[Array]:
    """The arrays as replicas exchange them."""
    if wire is None:
        return list(arrays)
    return [backend.cast(x, wire) if dtypes.kind(dtype_of(x)) == dtypes.kind(wire) else x for x in arrays]


def _summary(a: Any) -> str:
    if a is None:
        return "no gradient"
    kept = parts(a)[0]
    held = f"shape {shape_of(kept)} and dtype {dtype_of(kept)}"
    return f"{held} in {getattr(a, 'in_words', type(a).__name__)}" if kept is not a else held


class _Forms:
    """In the place of a backend: makes forms of arrays, which take no memory."""

    def full(self, shape: tuple[int, ...], fill: Any, dtype: np.dtype, like: Any = ()) -> _Form:
        return _Form(shape, dtype)


@dataclass(frozen=True, slots=True)
class _Form:
    """What an array is to be like; its dtype may be in any byte order."""

    shape: tuple[int, ...]
    dtype: np.dtype


_FORMS: Any = _Forms()


def _is_like(a: Any, form: Any) -> bool:
    if isinstance(form, _Form):
        return is_array_of(a, form.dtype, form.shape)
    return a.__class__ is form.__class__ and len(a) == len(form) and all(map(_is_like, a, form))


def _is_accumulator(cell: Cell, a: Any, running: np.dtype, form: Callable[..., Any]) -> bool:
    """Whether an accumulator is like the empty one for contributions of its shape."""
    try:
        if isinstance(a, tuple):
            return _is_like(a, form(running, cell.shape(a)))
        return is_array_of(a, running) and isinstance(form(running, ()), _Form)
    except Exception:  # of whatever a caller has made of it
        return False


def _wanted(cell: Cell, a: Any, running: np.dtype, form: Callable[..., Any]) -> str:
    try:
        words = form(running, cell.shape(a)).in_words
    except Exception:  # for a form without words, or a shape that there is none of
        words = None
    return words if isinstance(words, str) else "what this reduction makes"


def _received(a: Any) -> str:
    words = attribute(a, "in_words")
    return words if isinstance(words, str) else in_words(a)


def _require_weight(cell: Cell, weight: Any, made_for: Iterable[Any]) -> None:
    """Refuses a damaged sum of weights."""
    widest = dtypes.of_weights(kind.dtype for kind in made_for if kind.dtype is not None)
    form = cell.empty_weight(_FORMS, widest, ())
    if isinstance(form, _Form):
        require_scalar(cell.name, "a real scalar", weight, "fiu", ".weight")
    elif not _is_like(weight, form):
        raise GradCombineError(cell.name, "a sum of weights as this reduction has it", shown(weight), ".weight")


def _opened(cell: Cell, kind: type, state: State) -> _Opened:
    """A state that must be of this class, and whole.

    Raises:
      GradCombineError: for another state, and for a damaged one.
    """
    if type(state) is not kind:
        raise GradCombineError(cell.name, f"a {kind.__name__}", type(state).__name__)
    made_for, structure = tree.flatten(cell.name, state.dtypes, tree.is_static)
    if not all(map(tree.is_static, made_for)):
        raise GradCombineError(cell.name, "a state whose dtypes are constants", shown(state.dtypes))
    split = tree.split_as(cell.name, structure, state.value)
    values = [None if tree.is_static(a) else a for a in split]

    # Many leaves have one dtype, and some one shape.
    @cache
    def form(running: np.dtype, shape: tuple[int, ...]) -> Any:
        return cell.empty(_FORMS, shape, running, None)

    @cache
    def running_of(dtype: np.dtype) -> np.dtype | None:
        return cell.running(dtype) if dtypes.is_of(dtype, cell.kinds) else None

    for i, (a, entry) in enumerate(zip(values, made_for, strict=True)):
        if entry.dtype is None:
            if a is not None:
                expected = "no accumulator, where there is no gradient"
                raise GradCombineError(cell.name, expected, shown(a), structure.path(i))
            continue
        if (running := running_of(entry.dtype)) is None:
            raise GradCombineError(cell.name, f"a state for {' or '.join(cell.kinds)}", entry, structure.path(i))
        if a is not None and not _is_accumulator(cell, a, running, form):
            expected = (
                f"an accumulator of {running}, for contributions of {entry.dtype}: {_wanted(cell, a, running, form)}"
            )
            raise GradCombineError(cell.name, expected, _received(a), structure.path(i))
    _require_weight(cell, state.weight, made_for)
    require_count(cell.name, state.count, ".count")
    return _Opened(structure, values, made_for)


def _absent(backend: Backend, kind: Any) -> Any:
    """The result where there is no gradient."""
    return None if kind.shape is None else backend.make_absent(kind.shape)
