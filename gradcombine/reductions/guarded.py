"""Reductions of four functions that a user wrote, behind the checks that the library's own make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import dtype_of, is_absent, placeholder, resolve, shape_of
from gradcombine.errors import GradCombineError, require_flag, shown
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, of_each_rank
from gradcombine.reductions.weights import parse
from gradcombine.types import Array, Order, State, Tree, no_autograph


class GuardedState(NamedTuple):
    """A partial result of functions that a user wrote.

    Attributes:
      value: the functions' own state.
      empty: the same before any contribution.
      count: int32 scalar, the number of contributions whose weight is not 0.
      made_for: constants in the tree's structure: for each leaf its dtype and shape, or that there is no gradient.
    """

    value: State
    empty: State
    count: Array
    made_for: Tree


class Nothing(NamedTuple):
    """Stands in a state for a None that a user's function made."""


class Written(Reduction):
    """See `Reduction`."""

    def __init__(
        self,
        init: Callable[[Tree], State],
        update: Callable[..., State],
        merge: Callable[[State, State], State],
        finalize: Callable[[State], Tree],
        name: str = "reduction",
        scales_by_weight: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GradCombineError("Reduction", "a name", shown(name))
        functions = {"init": init, "update": update, "merge": merge, "finalize": finalize}
        for what, function in functions.items():
            if not callable(function):
                raise GradCombineError("Reduction", f"a function as {what}", shown(function))
        self.name, self.scales_by_weight = name, require_flag("Reduction", "scales_by_weight", scales_by_weight)
        self.own_init, self.own_update, self.own_merge, self.own_finalize = init, update, merge, finalize

    @no_autograph
    def init(self, like: Tree) -> GuardedState:
        leaves, structure = tree.flatten(self.name, like)
        kinds = [tree.static_of(leaf, with_shape=True) for leaf in leaves]
        present = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind.dtype is not None]
        zeros = [None if is_absent(x) else placeholder(x) for x in leaves]
        made, inner = tree.flatten(self.name, self.own_init(tree.unflatten(structure, zeros)))
        backend = resolve(self.name, [*leaves, *made])
        # Placed as the leaves are: a state that begins the same on all replicas may still become each one's own.
        placed = backend.full((), False, np.dtype(np.bool_), present)
        arrays = (None if x is None else backend.where(placed, backend.asarray(x), backend.asarray(x)) for x in made)
        empty = _kept(inner, arrays)
        return GuardedState(empty, empty, backend.full((), 0, dtypes.INT32, present), tree.unflatten(structure, kinds))

    @no_autograph
    def update(self, state: GuardedState, value: Tree, weight: Any = 1) -> GuardedState:
        self._require(state)
        leaves = self._matching(state, value)
        backend = resolve(self.name, [state.count, *leaves, *tree.flatten(self.name, state.value)[0], weight])
        parsed = parse(self.name, backend, weight)
        zero = parsed.is_zero(backend)
        if zero is True:
            return state
        wide = any(dtypes.part(backend.dtype(x)) == np.float64 for x in leaves if not is_absent(x))
        scalar = parsed.cast(backend, np.dtype(np.float64) if wide else dtypes.FLOAT32)
        updated = self._alike("update", backend, state.value, self.own_update(self._given(state.value), value, scalar))
        count = state.count + 1
        if zero is not False:
            # Masked by where: a contribution of weight 0 may hold NaN.
            updated, count = tree.select(backend, zero, (state.value, state.count), (updated, count))
        return state._replace(value=updated, count=count)

    @no_autograph
    def merge(self, a: GuardedState, b: GuardedState) -> GuardedState:
        self._require(a)
        self._require(b)
        expected, received = (tree.flatten(self.name, state.made_for)[1] for state in (a, b))
        if expected != received:
            raise tree.difference(self.name, expected, received)
        backend = resolve(self.name, [x for state in (a, b) for x in tree.flatten(self.name, state.value)[0]])
        self._alike("merge", backend, a.value, self._given(b.value))
        merged = self._alike("merge", backend, a.value, self.own_merge(self._given(a.value), self._given(b.value)))
        return a._replace(value=merged, count=a.count + b.count)

    @no_autograph
    def finalize(self, state: GuardedState) -> Tree:
        self._require(state)
        return self.own_finalize(self._given(state.value))

    @no_autograph
    def clear(self, state: GuardedState) -> GuardedState:
        self._require(state)
        if not all(map(tree.is_static, tree.flatten(self.name, state.made_for, tree.is_static)[0])):
            raise GradCombineError(self.name, "a state made for constants", shown(state.made_for), ".made_for")
        backend = resolve(self.name, [state.count])
        return state._replace(value=state.empty, count=backend.full((), 0, dtypes.INT32, [state.count]))

    @no_autograph
    def all_merge(self, state: GuardedState, collective: Collective, order: Order) -> GuardedState:
        self._require(state)
        leaves, structure = tree.flatten(self.name, (state.value, state.count))
        backend = resolve(self.name, [*leaves, collective.rank()])
        arrays = [backend.asarray(x) for x in leaves]

        def rebuild(received: Sequence[Array]) -> GuardedState:
            value, count = tree.unflatten(structure, received)
            return state._replace(value=value, count=count)

        return fold_pairwise(self.merge, map(rebuild, of_each_rank(collective, arrays)))

    def _require(self, state: Any) -> None:
        if not isinstance(state, GuardedState):
            raise GradCombineError(self.name, "a GuardedState", type(state).__name__)

    def _matching(self, state: GuardedState, value: Tree) -> list[Any]:
        """The leaves of a contribution, after a check that it is one for this state."""
        made_for, structure = tree.flatten(self.name, state.made_for, tree.is_static)
        leaves = tree.flatten_as(self.name, structure, value)
        for expected, leaf, path in zip(made_for, leaves, structure.paths(), strict=True):
            received = tree.static_of(leaf, with_shape=True)
            if received.dtype is None or (received.dtype, received.shape) == (expected.dtype, expected.shape):
                continue
            if expected.dtype is None:
                raise GradCombineError(self.name, "no gradient, as where the state was made", "an array", path)
            wanted, got = (f"dtype {kind.dtype} and shape {kind.shape}" for kind in (expected, received))
            raise GradCombineError(self.name, wanted, got, path)
        return leaves

    def _alike(self, function: str, backend: Backend, expected: State, received: State) -> State:
        """Returns the state that a function made; raises if its structure, shapes or dtypes have changed."""
        olds, structure = tree.flatten(self.name, self._given(expected))
        news = tree.flatten_as(f"{self.name}: what {function} returns", structure, received)
        arrays: list[Array | None] = []
        for old, new, path in zip(olds, news, structure.paths(), strict=True):
            if old is None and new is None:
                arrays.append(None)
                continue
            kinds = [None if x is None else (dtype_of(x), shape_of(x)) for x in (old, new)]
            if kinds[0] != kinds[1]:
                wanted, got = ("no array" if kind is None else f"{kind[0]} of shape {kind[1]}" for kind in kinds)
                raise GradCombineError(self.name, f"{wanted} from {function}", got, path)
            arrays.append(backend.asarray(new))
        return _kept(structure, arrays)

    def _given(self, state: State) -> State:
        """A state as the functions made it, which may hold None."""
        leaves, structure = tree.flatten(self.name, state, _is_nothing)
        return tree.unflatten(structure, [None if _is_nothing(x) else x for x in leaves])


def _kept(structure: tree.Structure, leaves: Iterable[Any]) -> State:
    """A state of arrays alone: loops of TensorFlow and the counter of order "tree" know no None."""
    return tree.unflatten(structure, [Nothing() if x is None else x for x in leaves])


def _is_nothing(node: Any) -> bool:
    return isinstance(node, Nothing)
