"""The algebra: a reduction is four pure functions, and everything that runs it is built from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, attribute, shown
from gradcombine.reductions.guarded import Guarded
from gradcombine.types import Array, Order, State, Tree, no_autograph

Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]


class Shortcuts(NamedTuple):
    """Faster ways to what the four functions of a reduction give, to the bit; one for each place.

    Attributes:
      stand_for: the four functions. With any others the shortcuts do not apply.
      clear: time. ``clear(state) -> state``: the empty state of the same shapes.
      all_merge: replicas. ``all_merge(state, collective, order) -> state``: ``merge`` over the states of all replicas.
      update_many: a list. ``update_many(state, values, weights, order) -> state``: the state (None: an empty one for
        such values) merged with all the values, combined in this order; None for weights that it does not take. None
        for reductions without such a way.
      all_finalize: replicas. ``all_finalize(state, collective, weight) -> value``: ``finalize`` of ``all_merge`` of
        states that have each had one contribution, of this weight. None for reductions without such a way.
      contribution: time. ``contribution(state, value, weight) -> state``: one contribution by itself, for the leaves
        of the given state: its accumulators only need adding to those of a state, and are constants where there is
        nothing to add. None for reductions that do more than add.
      derivative: the reduction whose derivative this one has in a list and over replicas. None: derivatives flow
        through the functions.
      add_weighted: ``add_weighted(state, value, weight) -> state``: ``update`` with a value that has been multiplied by
        its weight already. None for reductions that do not divide by the sum of weights.
    """

    stand_for: Functions
    clear: Callable[[State], State]
    all_merge: Callable[[State, Collective, Order], State]
    update_many: Callable[[State | None, Sequence[Tree], Sequence[Any], Order], State | None] | None = None
    all_finalize: Callable[[State, Collective, Any], Tree] | None = None
    contribution: Callable[[State, Tree, Any], State] | None = None
    derivative: Reduction | None = None
    add_weighted: Callable[[State, Tree, Any], State] | None = None


@dataclass(frozen=True)
class Reduction:
    """A commutative monoid over gradient trees, as four pure functions.

    Whoever writes them has a reduction that runs over a list, time, replicas and any mixture, in every mode. What is
    passed to ``Reduction`` may be written for one framework, or with operators for all. The attributes of the same
    names also check their arguments; their states record the reduction and the leaves that they were made for.

    Attributes:
      init: ``init(like) -> state``, the empty state for trees shaped like ``like`` (arrays or shape/dtype specs): an
        array or a tree of arrays. The function is given NumPy arrays of zeros, which take no memory.
      update: ``update(state, value, weight) -> state``, one more contribution. Called by the library, the weight is a
        scalar array: float64 where a leaf has that precision, else float32. A contribution of weight 0 is discarded
        afterwards, whatever the function returns for it. As an attribute it has the default ``weight=1``.
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

    Each state carries an empty one along, to begin the next window with, and so takes twice the memory of your own;
    `elementwise` avoids that.

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
        if not isinstance(self.name, str) or not self.name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GradCombineError("Reduction", "a name", shown(self.name))
        if not isinstance(self.shortcuts, (Shortcuts, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GradCombineError("Reduction", "Shortcuts, or None", shown(self.shortcuts))
        if self.shortcuts is None or self.shortcuts.stand_for != self.functions:
            for name, function in zip(_NAMES, self.functions, strict=True):
                if not callable(function):
                    raise GradCombineError("Reduction", f"a function as {name}", shown(function))
            guarded = Guarded(self.name, *self.functions)
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
    def update_many(self) -> Callable[[State | None, Sequence[Tree], Sequence[Any], Order], State | None] | None:
        """See `Shortcuts`."""
        return self._shortcuts.update_many

    @property
    def all_finalize(self) -> Callable[[State, Collective, Any], Tree] | None:
        """See `Shortcuts`."""
        return self._shortcuts.all_finalize

    @property
    def contribution(self) -> Callable[[State, Tree, Any], State] | None:
        """See `Shortcuts`."""
        return self._shortcuts.contribution

    @property
    def derivative(self) -> Reduction | None:
        """See `Shortcuts`."""
        return self._shortcuts.derivative

    @property
    def add_weighted(self) -> Callable[[State, Tree, Any], State] | None:
        """See `Shortcuts`."""
        return self._shortcuts.add_weighted

    @property
    def _shortcuts(self) -> Shortcuts:
        assert self.shortcuts is not None  # since it was made
        return self.shortcuts


_NAMES = ("init", "update", "merge", "finalize")


def require_reduction(operation: str, reduction: Any, path: str = "") -> None:
    """Refuses what is not a Reduction; ``reductions.mean`` for ``reductions.mean()`` is the likely slip."""
    if not isinstance(reduction, Reduction):
        name = attribute(reduction, "__name__") if callable(reduction) else None
        received = type(reduction).__name__ if name is None else f"{name}, not called"
        raise GradCombineError(operation, "a Reduction, for instance reductions.mean()", received, path)


class DifferentiableState(NamedTuple):
    """A partial result, and that of the reduction whose derivative it has."""

    value: State
    derivative: State


@no_autograph
def differentiable(reduction: Reduction) -> Reduction:
    """The same reduction, with a derivative over time as well.

    A list and an all-reduce of precision ``"exact"`` have the derivative of the sum and the mean. A state of integers
    has none: a derivative through `accumulate`, `update` or `merge` is refused. The states of this reduction hold
    beside the integers a running value of precision ``"fast"``, which the derivative flows through.

    Args:
      reduction: any reduction. One whose states have a derivative is returned as it is.

    Returns:
      A reduction of the same values, to the bit. Its states take 4 more bytes per float32 element.

    >>> import jax, jax.numpy as jnp, gradcombine as gc
    >>> acc = gc.accumulate(gc.reductions.differentiable(gc.reductions.mean("exact")), every=2)
    >>> def loss(x):
    ...     state = acc.update(x * x, acc.init(x))
    ...     return acc.value(acc.update(x, state)).sum()
    >>> jax.grad(loss)(jnp.float32([1, 2]))
    Array([1.5, 2.5], dtype=float32)
    """
    require_reduction("differentiable", reduction)
    derivative = reduction.derivative
    if derivative is None:
        return reduction

    def open_(state: State) -> DifferentiableState:
        if not isinstance(state, DifferentiableState):
            raise GradCombineError(reduction.name, "a DifferentiableState", type(state).__name__)
        return state

    @no_autograph
    def init(like: Tree) -> DifferentiableState:
        return DifferentiableState(reduction.init(like), derivative.init(like))

    @no_autograph
    def update(state: State, value: Tree, weight: Any = 1) -> DifferentiableState:
        a, b = open_(state)
        return DifferentiableState(reduction.update(a, value, weight), derivative.update(b, value, weight))

    @no_autograph
    def merge(a: State, b: State) -> DifferentiableState:
        pairs = zip((reduction, derivative), open_(a), open_(b), strict=True)
        return DifferentiableState(*(one.merge(x, y) for one, x, y in pairs))

    @no_autograph
    def finalize(state: State) -> Tree:
        def run(one: Reduction, state: DifferentiableState) -> Tree:
            return one.finalize(state.value if one is reduction else state.derivative)

        return derived(reduction, run, open_(state))

    @no_autograph
    def clear(state: State) -> DifferentiableState:
        a, b = open_(state)
        return DifferentiableState(reduction.clear(a), derivative.clear(b))

    @no_autograph
    def all_merge(state: State, collective: Collective, order: Order) -> DifferentiableState:
        a, b = open_(state)
        return DifferentiableState(
            reduction.all_merge(a, collective, order), derivative.all_merge(b, collective, order)
        )

    functions = init, update, merge, finalize
    shortcuts = Shortcuts(functions, clear, all_merge, derivative=derivative)
    return replace(reduction, init=init, update=update, merge=merge, finalize=finalize, shortcuts=shortcuts)


def derived(reduction: Reduction, run: Callable[..., Tree], *arguments: Tree) -> Tree:
    """``run(reduction, *arguments)``, with the derivative of ``run(reduction.derivative, *arguments)``.

    Args:
      reduction: any.
      run: what is done with a reduction; arrays that matter for the derivative are all in ``arguments``.
      arguments: trees of arrays and None.
    """
    derivative = reduction.derivative
    if derivative is None:
        return run(reduction, *arguments)
    try:
        leaves, structure = tree.flatten(reduction.name, arguments)
    except GradCombineError:
        return run(reduction, *arguments)  # which says better what is wrong
    backend = resolve(reduction.name, leaves)
    form: list[Any] = []

    def arrays_of(one: Reduction) -> Callable[..., Sequence[Array]]:
        def call(*leaves: Any) -> list[Array]:
            result, outer = tree.flatten(reduction.name, run(one, *tree.unflatten(structure, leaves)))
            missing = [(i, x) for i, x in enumerate(result) if is_absent(x)]
            form[:] = [outer, missing]
            return [x for x in result if not is_absent(x)]

        return call

    result = backend.custom_derivative(arrays_of(reduction), arrays_of(derivative), leaves)
    outer, missing = form
    for i, x in missing:
        result.insert(i, x)
    return tree.unflatten(outer, result)
