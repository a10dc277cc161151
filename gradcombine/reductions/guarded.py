"""Reductions of four functions that a user wrote, behind the checks that the library's own make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import dtype_of, is_absent, placeholder, resolve, shape_of
from gradcombine.errors import GradCombineError, invalid, operation, require_type, shown
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.weights import parse
from gradcombine.settings import check, valid
from gradcombine.types import Array, Leaf, Order, Scalar, State, Tree


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

    @operation("Reduction")
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
            raise invalid("a name", shown(name))
        check(init=init, update=update, merge=merge, finalize=finalize)
        self.name, self.scales_by_weight = name, valid("scales_by_weight", scales_by_weight)
        self.own_init, self.own_update, self.own_merge, self.own_finalize = init, update, merge, finalize

    @operation()
    def init(self, like: Tree) -> GuardedState:
        leaves, structure = tree.flatten(like)
        kinds = [tree.static_of(leaf, with_shape=True) for leaf in leaves]
        present = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind.dtype is not None]
        zeros = [None if is_absent(x) else placeholder(x) for x in leaves]
        made, inner = tree.flatten(self.own_init(tree.unflatten(structure, zeros)))
        backend = resolve([*leaves, *made])
        # Placed as the leaves are: a state that begins the same on all replicas may still become each one's own.
        placed = backend.full((), False, np.dtype(np.bool_), present)
        arrays = (None if x is None else backend.where(placed, backend.asarray(x), backend.asarray(x)) for x in made)
        empty = _kept(inner, arrays)
        return GuardedState(empty, empty, backend.full((), 0, dtypes.INT32, present), tree.unflatten(structure, kinds))

    @operation()
    def update(self, state: GuardedState, value: Tree, weight: Scalar = 1) -> GuardedState:
        self._require(state)
        leaves = self._matching(state, value)
        backend = resolve([state.count, *leaves, *tree.flatten(state.value)[0], weight])
        parsed = parse(backend, weight)
        zero = parsed.zero
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

    @operation()
    def merge(self, a: GuardedState, b: GuardedState) -> GuardedState:
        self._require(a)
        self._require(b)
        expected, received = (tree.flatten(state.made_for)[1] for state in (a, b))
        if expected != received:
            raise tree.difference(expected, received)
        backend = resolve([x for state in (a, b) for x in tree.flatten(state.value)[0]])
        self._alike("merge", backend, a.value, self._given(b.value))
        merged = self._alike("merge", backend, a.value, self.own_merge(self._given(a.value), self._given(b.value)))
        return a._replace(value=merged, count=a.count + b.count)

    @operation()
    def finalize(self, state: GuardedState) -> Tree:
        self._require(state)
        return self.own_finalize(self._given(state.value))

    @operation()
    def clear(self, state: GuardedState) -> GuardedState:
        self._require(state)
        if not all(map(tree.is_static, tree.flatten(state.made_for, tree.is_static)[0])):
            raise invalid("a state made for constants", shown(state.made_for), ".made_for")
        backend = resolve([state.count])
        return state._replace(value=state.empty, count=backend.full((), 0, dtypes.INT32, [state.count]))

    @operation()
    def all_merge(self, state: GuardedState, collective: Collective, order: Order) -> GuardedState:
        self._require(state)
        leaves, structure = tree.flatten((state.value, state.count))
        backend = resolve([*leaves, collective.rank()])
        arrays = [backend.asarray(x) for x in leaves]

        def rebuild(received: Sequence[Array]) -> GuardedState:
            value, count = tree.unflatten(structure, received)
            return state._replace(value=value, count=count)

        return fold_pairwise(self.merge, map(rebuild, collective.of_each_rank(arrays)))

    def _require(self, state: State) -> None:
        require_type("a GuardedState", state, GuardedState)

    def _matching(self, state: GuardedState, value: Tree) -> list[Leaf]:
        """The leaves of a contribution, after a check that it is one for this state."""
        made_for, structure = tree.flatten(state.made_for, tree.is_static)
        leaves = tree.flatten_as(structure, value)
        for expected, leaf, path in zip(made_for, leaves, structure.paths(), strict=True):
            received = tree.static_of(leaf, with_shape=True)
            if received.dtype is None or (received.dtype, received.shape) == (expected.dtype, expected.shape):
                continue
            if expected.dtype is None:
                raise invalid("no gradient, as where the state was made", "an array", path)
            wanted, got = (f"dtype {kind.dtype} and shape {kind.shape}" for kind in (expected, received))
            raise invalid(wanted, got, path)
        return leaves

    def _alike(self, function: str, backend: Backend, expected: State, received: State) -> State:
        """Returns the state that a function made; raises if its structure, shapes or dtypes have changed."""
        olds, structure = tree.flatten(self._given(expected))
        try:
            news = tree.flatten_as(structure, received)
        except GradCombineError as error:
            error.rename(f"{self.name}: what {function} returns")
            raise
        arrays: list[Array | None] = []
        for old, new, path in zip(olds, news, structure.paths(), strict=True):
            if old is None and new is None:
                arrays.append(None)
                continue
            kinds = [None if x is None else (dtype_of(x), shape_of(x)) for x in (old, new)]
            if kinds[0] != kinds[1]:
                wanted, got = ("no array" if kind is None else f"{kind[0]} of shape {kind[1]}" for kind in kinds)
                raise invalid(f"{wanted} from {function}", got, path)
            arrays.append(backend.asarray(new))
        return _kept(structure, arrays)

    def _given(self, state: State) -> State:
        """A state as the functions made it, which may hold None."""
        leaves, structure = tree.flatten(state, _is_nothing)
        return tree.unflatten(structure, [None if _is_nothing(x) else x for x in leaves])


def _kept(structure: tree.Structure, leaves: Iterable[Leaf]) -> State:
    """A state of arrays alone: loops of TensorFlow and the counter of order "tree" know no None."""
    return tree.unflatten(structure, [Nothing() if x is None else x for x in leaves])


def _is_nothing(node: Tree) -> bool:
    return isinstance(node, Nothing)
