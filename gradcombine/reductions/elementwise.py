"""What sum, mean, product, min, max, first and last share: one accumulator a leaf, one weight and one count a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.autograph import ordinary
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import is_absent, owner, resolve
from gradcombine.errors import GradCombineError
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.weights import Weight, parse
from gradcombine.types import Array, Order, Reduction, State, Tree


class ElementwiseState(NamedTuple):
    """The partial result of an elementwise reduction. Each reduction has a subclass of its own.

    Attributes:
      value: the tree of accumulators; None where the parameter has no gradient.
      weight: real scalar, the sum of weights.
      count: int32 scalar, the number of contributions whose weight is not 0.
      output: a tree of empty arrays, each of the dtype that the result is cast to; None where that is the
        accumulator's.
    """

    value: Tree
    weight: Array
    count: Array
    output: Tree


class Rule(NamedTuple):
    """What tells one elementwise reduction from another.

    Attributes:
      state: its state's class, which tells its states from those of other reductions.
      kinds: the dtype kinds it accepts.
      identity: the value of an empty accumulator of a given dtype.
      combine: two accumulators become one; the flags say which of them are empty.
      finish: the accumulator as it leaves, given the state that it belongs to.
      additive: whether ``combine`` is addition: contributions are multiplied by their weight, and replicas may
        all-reduce.
      averages: see `Reduction`.
    """

    name: str
    state: type[ElementwiseState]
    kinds: tuple[str, ...]
    identity: Callable[[np.dtype], Any]
    combine: Callable[[Backend, Array, Array, Array, Array], Array]
    finish: Callable[[Backend, Array, ElementwiseState], Array]
    additive: bool = False
    averages: bool = False


def as_is(backend: Backend, x: Array, state: ElementwiseState) -> Array:
    """An accumulator that is its own result."""
    return x


def build(rule: Rule, dtype: Any, output_dtype: Any, wire_dtype: Any) -> Reduction:
    """The Reduction of a rule, with its three dtype settings (None: see `gradcombine.reductions.dtypes`)."""
    lifted = _Elementwise(rule, dtypes.parse(dtype), dtypes.parse(output_dtype), dtypes.parse(wire_dtype))
    return Reduction(
        rule.name,
        lifted.init,
        lifted.update,
        lifted.merge,
        lifted.finalize,
        lifted.clear,
        lifted.all_merge,
        rule.averages,
    )


@dataclass(frozen=True)
class _Elementwise:
    rule: Rule
    dtype: np.dtype | None
    output_dtype: np.dtype | None
    wire_dtype: np.dtype | None

    @ordinary
    def init(self, like: Tree) -> State:
        name = self.rule.name
        leaves, structure = tree.flatten(name, like)
        backend = resolve(name, leaves)
        values: list[Any] = []
        outputs: list[Any] = []
        widest = dtypes.FLOAT32
        for leaf, path in zip(leaves, structure.paths(), strict=True):
            value, output = self._init_leaf(backend, leaf, path)
            values.append(value)
            outputs.append(output)
            if value is not None and dtypes.kind(backend.dtype(value)) in ("float", "complex"):
                widest = np.promote_types(widest, dtypes.part(backend.dtype(value)))
        present = [leaf for leaf in leaves if not is_absent(leaf)]
        return self.rule.state(
            tree.unflatten(structure, values),
            backend.full((), 0, widest, present),
            backend.full((), 0, dtypes.INT32, present),
            tree.unflatten(structure, outputs),
        )

    def _init_leaf(self, backend: Backend, leaf: Any, path: str) -> tuple[Any, Any]:
        if leaf is None:
            return None, None
        described = _owner(leaf)
        shape = described.shape(leaf)
        if described.absent(leaf):
            return None, backend.full((0, *shape), 0, np.dtype(np.bool_))
        dtype = described.dtype(leaf)
        if dtypes.kind(dtype) not in self.rule.kinds:
            raise GradCombineError(self.rule.name, f"a dtype that is {' or '.join(self.rule.kinds)}", dtype, path)
        running = dtypes.accumulator(dtype, self.dtype)
        value = backend.full(shape, self.rule.identity(running), running, [leaf])
        output = dtypes.output(dtype, running, self.output_dtype)
        if output == running and dtype == running:
            return value, None
        return value, backend.full((0, *shape), 0, output)

    @ordinary
    def update(self, state: State, value: Tree, weight: Any = 1) -> State:
        name = self.rule.name
        structure, values, outputs = self._open(state, name)
        contributions = tree.flatten_as(name, structure, value)
        backend = resolve(name, [*values, *contributions, state.weight, weight])
        w = parse(name, backend, weight)
        zero = w.is_zero(backend)
        checked = [
            self._check_leaf(x, accumulator, output, path)
            for x, accumulator, output, path in zip(contributions, values, outputs, structure.paths(), strict=True)
        ]
        if zero is True:
            return state
        flags = state.count == 0, backend.full((), False, np.dtype(np.bool_))
        updated = []
        for old, x, path in zip(values, checked, structure.paths(), strict=True):
            new = old if x is None else self.rule.combine(backend, old, self._enter(backend, old, x, w, path), *flags)
            # Masked by where: a contribution of weight 0 may hold NaN.
            updated.append(new if x is None or zero is False else backend.where(zero, old, new))
        total = backend.add(state.weight, w.cast(backend, _dtype(state.weight)))
        count = state.count + 1
        if zero is not False:
            total, count = backend.where(zero, state.weight, total), backend.where(zero, state.count, count)
        return self.rule.state(tree.unflatten(structure, updated), total, count, state.output)

    def _enter(self, backend: Backend, accumulator: Array, x: Any, w: Weight, path: str) -> Array:
        """The contribution in the accumulator's dtype, multiplied by its weight where the reduction adds."""
        running = _dtype(accumulator)
        if not self.rule.additive or w.is_one:
            return backend.cast(backend.asarray(x), running)
        if dtypes.kind(running) == "integer" and not w.is_integral(backend):
            raise GradCombineError(self.rule.name, f"an integer weight for a leaf of {running}", "another one", path)
        working = dtypes.working(running)
        scaled = backend.scale(backend.cast(backend.asarray(x), working), w.cast(backend, dtypes.part(working)))
        return backend.cast(scaled, running)

    def _check_leaf(self, x: Any, accumulator: Any, output: Any, path: str) -> Any:
        """The contribution to one leaf, None where there is none.

        Raises:
          GradCombineError: where shape or dtype are not those that the state was made for.
        """
        if is_absent(x):
            return None
        if accumulator is None:
            raise GradCombineError(self.rule.name, "no gradient, as where the state was made", "an array", path)
        described, kept = _owner(x), _owner(accumulator)
        expected, received = kept.shape(accumulator), described.shape(x)
        if expected != received:
            raise GradCombineError(self.rule.name, f"shape {expected}", received, path)
        dtype, running = described.dtype(x), kept.dtype(accumulator)
        if output is None:
            made_for = running
        elif self.output_dtype is None and dtypes.kind(running) != "integer":
            made_for = _dtype(output)
        else:  # an output dtype of its own hides the contributions' one: whatever leads to the same accumulator will do
            made_for = dtype
        if dtype != made_for or dtypes.accumulator(dtype, self.dtype) != running:
            raise GradCombineError(self.rule.name, f"dtype {made_for}, accumulated in {running}", dtype, path)
        return x

    @ordinary
    def merge(self, a: State, b: State) -> State:
        name = self.rule.name
        structure, lefts, _ = self._open(a, name)
        other, rights, _ = self._open(b, name)
        if structure != other:
            tree.flatten_as(name, structure, b.value)
        backend = resolve(name, [*lefts, *rights, a.count, b.count])
        empties = a.count == 0, b.count == 0
        values = []
        for left, right, path in zip(lefts, rights, structure.paths(), strict=True):
            if _described(left) != _described(right):
                raise GradCombineError(name, f"a state of {_described(left)}", _described(right), path)
            values.append(None if left is None else self.rule.combine(backend, left, right, *empties))
        weight = backend.add(a.weight, b.weight)
        return self.rule.state(tree.unflatten(structure, values), weight, a.count + b.count, a.output)

    @ordinary
    def finalize(self, state: State) -> Tree:
        structure, values, outputs = self._open(state, self.rule.name)
        backend = resolve(self.rule.name, [*values, state.count])
        finished = [self._finish_leaf(backend, state, x, out) for x, out in zip(values, outputs, strict=True)]
        return tree.unflatten(structure, finished)

    def _finish_leaf(self, backend: Backend, state: ElementwiseState, x: Any, output: Any) -> Any:
        if x is None:
            return None if output is None else backend.make_absent(_owner(output).shape(output)[1:])
        finished = self.rule.finish(backend, x, state)
        return finished if output is None else backend.cast(finished, _dtype(output))

    @ordinary
    def clear(self, state: State) -> State:
        structure, values, _ = self._open(state, self.rule.name)
        backend = resolve(self.rule.name, [*values, state.count])

        def empty(x: Any) -> Any:
            return None if x is None else backend.full(backend.shape(x), self.rule.identity(_dtype(x)), _dtype(x), [x])

        weight, count = (backend.full((), 0, _dtype(x), [x]) for x in (state.weight, state.count))
        return self.rule.state(tree.unflatten(structure, map(empty, values)), weight, count, state.output)

    @ordinary
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        structure, values, _ = self._open(state, self.rule.name)
        paths = [path for path, x in zip(structure.paths(), values, strict=True) if x is not None]
        present = [x for x in values if x is not None]
        backend = resolve(self.rule.name, [*present, state.count])
        collective.require_own(self.rule.name, paths, present)
        wired = [self._to_wire(backend, x) for x in present]

        def rebuild(arrays: Sequence[Array]) -> State:
            *returned, weight, count = arrays
            remaining = iter(returned)
            filled = [None if x is None else backend.cast(next(remaining), _dtype(x)) for x in values]
            return self.rule.state(tree.unflatten(structure, filled), weight, count, state.output)

        bundle = [*wired, state.weight, state.count]
        if self.rule.additive and order == "sequential":
            return rebuild(collective.all_sum(bundle))
        gathered = collective.all_gather(bundle)
        states = (rebuild([stack[rank] for stack in gathered]) for rank in range(collective.size()))
        return fold_pairwise(self.merge, states)

    def _to_wire(self, backend: Backend, x: Array) -> Array:
        if self.wire_dtype is None or dtypes.kind(_dtype(x)) != dtypes.kind(self.wire_dtype):
            return x
        return backend.cast(x, self.wire_dtype)

    def _open(self, state: State, operation: str) -> tuple[tree.Structure, list[Any], list[Any]]:
        if type(state) is not self.rule.state:
            raise GradCombineError(operation, f"a {self.rule.state.__name__}", type(state).__name__)
        values, structure = tree.flatten(operation, state.value)
        return structure, values, tree.flatten_as(operation, structure, state.output)


def _owner(leaf: Any) -> Backend:
    backend = owner(leaf)
    assert backend is not None  # tree.flatten lets no other leaf through
    return backend


def _dtype(array: Array) -> np.dtype:
    return _owner(array).dtype(array)


def _described(array: Any) -> str:
    return "no gradient" if array is None else f"shape {_owner(array).shape(array)} and dtype {_dtype(array)}"
