"""Reductions made from four functions of a user, with checks of their arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import dtype_of, is_absent, placeholder, resolve, shape_of
from gradcombine.errors import GradCombineError, invalid, operation, shown
from gradcombine.pairwise import fold_ranks
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.weights import parse
from gradcombine.settings import check, valid
from gradcombine.types import Array, Leaf, Order, Scalar, State, Tree


class GuardedState(NamedTuple):
    """The state of a user's reduction.

    Attributes:
      value: the state that the user's functions made.
      empty: the state that the user's ``init`` made.
      count: int32 scalar, the number of contributions of nonzero weight.
      made_for: constants in the structure: for each leaf, its dtype and shape or "no gradient".
    """

    value: State
    empty: State
    count: Array
    made_for: Tree


class Nothing(NamedTuple):
    """Replaces a None in the state of a user's function."""


class Written(Reduction):
    """See `Reduction`."""

    state = GuardedState

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
        self._init, self._update, self._merge, self._finalize = init, update, merge, finalize

    def init(self, like: Tree) -> GuardedState:
        leaves, structure = tree.flatten(like)
        specs = [tree.static_of(leaf, with_shape=True) for leaf in leaves]
        present = [leaf for leaf, spec in zip(leaves, specs, strict=True) if spec.dtype is not None]
        zeros = [None if is_absent(x) else placeholder(x) for x in leaves]
        made, inner = tree.flatten(self._init(tree.unflatten(structure, zeros)))
        backend = resolve([*leaves, *made])
        # A where on a condition like the leaves gives the arrays their placement, and their varying axes in shard_map.
        placed = backend.full((), False, np.dtype(np.bool_), present)
        arrays = (None if x is None else backend.where(placed, backend.asarray(x), backend.asarray(x)) for x in made)
        empty = _without_none(inner, arrays)
        return GuardedState(empty, empty, backend.full((), 0, dtypes.INT32, present), tree.unflatten(structure, specs))

    def update(self, state: GuardedState, value: Tree, weight: Scalar = 1) -> GuardedState:
        self.require(state)
        leaves = self._flatten(state, value)
        backend = resolve([state.count, *leaves, *tree.flatten(state.value)[0], weight])
        parsed = parse(backend, weight)
        zero = parsed.zero
        if zero is True:
            return state
        wide = any(dtypes.part(backend.dtype(x)) == np.float64 for x in leaves if not is_absent(x))
        scalar = parsed.cast(backend, np.dtype(np.float64) if wide else dtypes.FLOAT32)
        updated = self._checked("update", backend, state.value, self._update(_with_none(state.value), value, scalar))
        count = state.count + 1
        if zero is not False:
            # A where, not a product: a contribution of weight 0 may be NaN.
            updated, count = tree.select(backend, zero, (state.value, state.count), (updated, count))
        return state._replace(value=updated, count=count)

    def merge(self, a: GuardedState, b: GuardedState) -> GuardedState:
        self.require(a)
        self.require(b)
        expected, received = (tree.flatten(state.made_for)[1] for state in (a, b))
        if expected != received:
            raise tree.difference(expected, received)
        backend = resolve([x for state in (a, b) for x in tree.flatten(state.value)[0]])
        self._checked("merge", backend, a.value, _with_none(b.value))
        merged = self._checked("merge", backend, a.value, self._merge(_with_none(a.value), _with_none(b.value)))
        return a._replace(value=merged, count=a.count + b.count)

    def finalize(self, state: GuardedState) -> Tree:
        self.require(state)
        return self._finalize(_with_none(state.value))

    def clear(self, state: GuardedState) -> GuardedState:
        self.require(state)
        if not all(map(tree.is_static, tree.flatten(state.made_for, tree.is_static)[0])):
            raise invalid("a state made for constants", shown(state.made_for), ".made_for")
        backend = resolve([state.count])
        return state._replace(value=state.empty, count=backend.full((), 0, dtypes.INT32, [state.count]))

    def all_merge(self, state: GuardedState, collective: Collective, order: Order) -> GuardedState:
        self.require(state)
        leaves, structure = tree.flatten((state.value, state.count))
        backend = resolve([*leaves, collective.rank()])
        arrays = [backend.asarray(x) for x in leaves]

        def arrays_of(merged: GuardedState) -> list[Array]:
            return tree.flatten((merged.value, merged.count))[0]

        def rebuild(received: Sequence[Array]) -> GuardedState:
            value, count = tree.unflatten(structure, received)
            return state._replace(value=value, count=count)

        return fold_ranks(backend, collective, self.merge, arrays_of, rebuild, collective.of_each_rank(arrays))

    def _flatten(self, state: GuardedState, value: Tree) -> list[Leaf]:
        """Returns the leaves of a contribution; raises if it does not fit the state."""
        made_for, structure = tree.flatten(state.made_for, tree.is_static)
        leaves = tree.flatten_as(structure, value)
        for expected, leaf, path in zip(made_for, leaves, structure.paths(), strict=True):
            received = tree.static_of(leaf, with_shape=True)
            if received.dtype is None or (received.dtype, received.shape) == (expected.dtype, expected.shape):
                continue
            if expected.dtype is None:
                raise invalid("no gradient, as in the tree that the state was made for", "an array", path)
            wanted, got = (f"dtype {spec.dtype} and shape {spec.shape}" for spec in (expected, received))
            raise invalid(wanted, got, path)
        return leaves

    def _checked(self, function: str, backend: Backend, expected: State, received: State) -> State:
        """Returns the result of a user's function; raises if its structure, shapes or dtypes differ from the state."""
        olds, structure = tree.flatten(_with_none(expected))
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
            specs = [None if x is None else (dtype_of(x), shape_of(x)) for x in (old, new)]
            if specs[0] != specs[1]:
                wanted, got = ("no array" if spec is None else f"{spec[0]} of shape {spec[1]}" for spec in specs)
                raise invalid(f"{wanted} from {function}", got, path)
            arrays.append(backend.asarray(new))
        return _without_none(structure, arrays)


def _with_none(state: State) -> State:
    """The state as the user's functions made it."""
    leaves, structure = tree.flatten(state, lambda node: isinstance(node, Nothing))
    return tree.unflatten(structure, [None if isinstance(x, Nothing) else x for x in leaves])


def _without_none(structure: tree.Structure, leaves: Iterable[Leaf]) -> State:
    """The state without None, which TensorFlow's loops and the counter of order "tree" do not support."""
    return tree.unflatten(structure, [Nothing() if x is None else x for x in leaves])
