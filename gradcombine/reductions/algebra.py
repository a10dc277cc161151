"""The algebra: a reduction is four pure functions, and whatever runs it is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from gradcombine import static, tree
from gradcombine.autograph import no_autograph
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import dtype_of, shape_of
from gradcombine.reductions.weights import parse
from gradcombine.types import Array, Order, State, Tree

Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]


class Shortcuts(NamedTuple):
    """Faster ways to what the four functions of a reduction give, to the bit; one for each place.

    Attributes:
      stand_for: the four functions. For any others the shortcuts do not count.
      clear: time. ``clear(state) -> state``: the empty state of the same shapes.
      all_merge: replicas. ``all_merge(state, collective, order) -> state``: ``merge`` over the states of all replicas.
      update_many: a list. ``update_many(state, values, weights, order) -> state``: the state merged with all the
        values, combined in this order; None for weights that it does not take. None for reductions without such a way.
      all_finalize: replicas. ``all_finalize(state, collective, weight) -> value``: ``finalize`` of ``all_merge`` of
        states that have each had one contribution, of this weight. None for reductions without such a way.
      derivative: the reduction whose derivative this one has in a list and over replicas. None: derivatives flow
        through the functions.
    """

    stand_for: Functions
    clear: Callable[[State], State]
    all_merge: Callable[[State, Collective, Order], State]
    update_many: Callable[[State, Sequence[Tree], Sequence[Any], Order], State | None] | None = None
    all_finalize: Callable[[State, Collective, Any], Tree] | None = None
    derivative: Reduction | None = None


@dataclass(frozen=True)
class Reduction:
    """A commutative monoid over gradient trees, as four pure functions.

    Whoever writes them has a reduction that runs over a list, time, replicas and any mixture, in every mode. What is
    passed to ``Reduction`` may be written for one framework, or with operators for all. The attributes of the same
    names check their arguments besides; their states tell in which reduction and for which leaves they were made.

    Attributes:
      init: ``init(like) -> state``, the empty state for trees shaped like ``like`` (arrays or shape/dtype specs): an
        array or a tree of arrays. The function is given NumPy arrays of zeros, which take no memory.
      update: ``update(state, value, weight) -> state``, one more contribution. Called by the library, the weight is a
        scalar array: float64 where a leaf has that precision, else float32. One of weight 0 is left out afterwards,
        whatever the function makes of it. As an attribute it has the default ``weight=1``.
      merge: ``merge(a, b) -> state``, two partial states become one; ``a`` holds the earlier contributions.
      finalize: ``finalize(state) -> value``, the combined tree.
      name: what error messages call it.
      scales_by_weight: whether the result is per unit of weight, as a mean is. `per_leaf` hands its weight to such
        reductions; the others learn from it only whether the contribution is present.
      shortcuts: for the library's own reductions.

    Raises:
      GradCombineError: in ``update`` for a tree that does not match, for a weight that is negative or not finite, and
        where the functions return a state of other shapes or dtypes than they were given.

    Bits: whatever the functions' are. Over replicas states are gathered, and merged in the canonical tree over ranks.

    A state keeps an empty one beside it, to begin the next window with, and so takes twice the memory of the function's
    own. `elementwise` has no need of that.

    >>> import numpy as np, gradcombine as gc
    >>> sum_of_squares = gc.Reduction(
    ...     init=lambda like: np.zeros_like(like),
    ...     update=lambda state, x, weight: state + weight * x * x,
    ...     merge=lambda a, b: a + b,
    ...     finalize=lambda state: state,
    ...     name="sum_of_squares",
    ... )
    >>> gc.combine(sum_of_squares, [np.float32([1, 2]), np.float32([3, 4])], weights=[1, 10])
    array([ 91., 164.], dtype=float32)
    """

    init: Callable[[Tree], State]
    update: Callable[..., State]
    merge: Callable[[State, State], State]
    finalize: Callable[[State], Tree]
    name: str = "reduction"
    scales_by_weight: bool = False
    shortcuts: Shortcuts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.shortcuts is None or self.shortcuts.stand_for != self.functions:
            for name, function in zip(_NAMES, self.functions, strict=True):
                if not callable(function):
                    raise GradCombineError("Reduction", f"a function as {name}", repr(function))
            guarded = _Guarded(self.name, *self.functions)
            for name in _NAMES:
                object.__setattr__(self, name, getattr(guarded, name))
            object.__setattr__(self, "shortcuts", Shortcuts(self.functions, guarded.clear, guarded.all_merge))

    @property
    def functions(self) -> Functions:
        """The four functions."""
        return self.init, self.update, self.merge, self.finalize

    def clear(self, state: State) -> State:
        """The empty state of the same shapes."""
        return self._shortcuts.clear(state)

    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        """``merge`` over the states of all replicas."""
        return self._shortcuts.all_merge(state, collective, order)

    @property
    def update_many(self) -> Callable[[State, Sequence[Tree], Sequence[Any], Order], State | None] | None:
        """See `Shortcuts`."""
        return self._shortcuts.update_many

    @property
    def all_finalize(self) -> Callable[[State, Collective, Any], Tree] | None:
        """See `Shortcuts`."""
        return self._shortcuts.all_finalize

    @property
    def derivative(self) -> Reduction | None:
        """See `Shortcuts`."""
        return self._shortcuts.derivative

    @property
    def _shortcuts(self) -> Shortcuts:
        assert self.shortcuts is not None  # since it was made
        return self.shortcuts


_NAMES = ("init", "update", "merge", "finalize")


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


@dataclass(frozen=True)
class _Guarded:
    """A user's four functions behind the checks that the library's own make."""

    name: str
    own_init: Callable[[Tree], State]
    own_update: Callable[..., State]
    own_merge: Callable[[State, State], State]
    own_finalize: Callable[[State], Tree]

    @no_autograph
    def init(self, like: Tree) -> GuardedState:
        leaves, structure = tree.flatten(self.name, like)
        kinds = [static.of_leaf(leaf, with_shape=True) for leaf in leaves]
        present = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind.dtype is not None]
        zeros = [None if is_absent(x) else np.broadcast_to(np.zeros((), dtype_of(x)), shape_of(x)) for x in leaves]
        made, inner = tree.flatten(self.name, self.own_init(tree.unflatten(structure, zeros)))
        backend = resolve(self.name, [*leaves, *made])
        # Placed as the leaves are: a state that begins the same on all replicas may still become each one's own.
        own = backend.full((), False, np.dtype(np.bool_), present)
        arrays = (None if x is None else backend.where(own, backend.asarray(x), backend.asarray(x)) for x in made)
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
        return state._replace(value=state.empty, count=state.count * 0)

    @no_autograph
    def all_merge(self, state: GuardedState, collective: Collective, order: Order) -> GuardedState:
        self._require(state)
        own, structure = tree.flatten(self.name, (state.value, state.count))

        def rebuild(received: Sequence[Array]) -> GuardedState:
            value, count = tree.unflatten(structure, received)
            return state._replace(value=value, count=count)

        return fold_pairwise(self.merge, map(rebuild, of_each_rank(collective, own)))

    def _require(self, state: Any) -> None:
        if not isinstance(state, GuardedState):
            raise GradCombineError(self.name, "a GuardedState", type(state).__name__)

    def _matching(self, state: GuardedState, value: Tree) -> list[Any]:
        """The leaves of a contribution, after a check that it is one for this state."""
        made_for, structure = tree.flatten(self.name, state.made_for, static.is_static)
        leaves = tree.flatten_as(self.name, structure, value)
        for expected, leaf, path in zip(made_for, leaves, structure.paths(), strict=True):
            received = static.of_leaf(leaf, with_shape=True)
            if received.dtype is None or (received.dtype, received.shape) == (expected.dtype, expected.shape):
                continue
            if expected.dtype is None:
                raise GradCombineError(self.name, "no gradient, as where the state was made", "an array", path)
            wanted, got = (f"dtype {kind.dtype} and shape {kind.shape}" for kind in (expected, received))
            raise GradCombineError(self.name, wanted, got, path)
        return leaves

    def _alike(self, function: str, backend: Backend, expected: State, received: State) -> State:
        """What a function returned, if it is a state like the one that it was given."""
        olds, structure = tree.flatten(self.name, self._given(expected))
        news = tree.flatten_as(f"{self.name}: what {function} returns", structure, received)
        arrays = []
        for old, new, path in zip(olds, news, structure.paths(), strict=True):
            if old is None and new is None:
                arrays.append(None)
                continue
            kinds = [None if x is None else (str(backend.dtype(x)), backend.shape(x)) for x in (old, new)]
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


def of_each_rank(collective: Collective, arrays: Sequence[Array]) -> Iterator[list[Array]]:
    """The arrays of each replica in turn, after one exchange."""
    gathered = collective.all_gather(arrays)
    return ([stack[rank] for stack in gathered] for rank in range(collective.size()))


def on_contributions(
    reduction: Reduction,
    transform: Callable[[Tree, Any], tuple[Tree, Any]],
    like: Callable[[Tree], Tree] = lambda like: like,
) -> Reduction:
    """The same reduction, of contributions that pass through a function first.

    Args:
      reduction: any reduction.
      transform: ``transform(value, weight) -> (value, weight)``, pure.
      like: what that makes of the shapes and dtypes for which a state is made.

    Returns:
      A reduction with the same states, merged and finalized as before.
    """

    @no_autograph
    def init(made_for: Tree) -> State:
        return reduction.init(like(made_for))

    @no_autograph
    def update(state: State, value: Tree, weight: Any = 1) -> State:
        return reduction.update(state, *transform(value, weight))

    @no_autograph
    def update_many(state: State, values: Sequence[Tree], weights: Sequence[Any], order: Order) -> State | None:
        assert reduction.update_many is not None
        changed, weighing = zip(*map(transform, values, weights), strict=True)
        return reduction.update_many(state, changed, weighing, order)

    functions = init, update, reduction.merge, reduction.finalize
    many = None if reduction.update_many is None else update_many
    derivative = None if reduction.derivative is None else on_contributions(reduction.derivative, transform, like)
    shortcuts = Shortcuts(functions, reduction.clear, reduction.all_merge, many, derivative=derivative)
    return replace(reduction, init=init, update=update, shortcuts=shortcuts)


def require_reduction(operation: str, reduction: Any, path: str = "") -> None:
    """Refuses what is not a Reduction; ``reductions.mean`` for ``reductions.mean()`` is the likely slip."""
    if not isinstance(reduction, Reduction):
        name = getattr(reduction, "__name__", None) if callable(reduction) else None
        received = type(reduction).__name__ if name is None else f"{name}, not called"
        raise GradCombineError(operation, "a Reduction, for instance reductions.mean()", received, path)
