"""The base classes of reductions: four pure functions, and the defaults that are built from them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial, reduce
from types import FunctionType
from typing import Any

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, operation, require_type
from gradcombine.pairwise import fold_pairwise, fold_ranks
from gradcombine.settings import check
from gradcombine.sparse import is_row_sparse
from gradcombine.types import Array, Leaf, Order, Scalar, State, Tree, no_autograph
from gradcombine.wires.wire import Wire

NAMED = (
    "init",
    "update",
    "merge",
    "finalize",
    "clear",
    "combine",
    "all_merge",
    "all_finalize",
    "contribution",
    "add_weighted",
)
"""The methods whose errors name the reduction, unless a method only forwards (`no_autograph`)."""


class Reduction(ABC):
    """A commutative monoid over gradient trees, as four pure functions.

    A reduction of your own is made from four functions, and runs over a list, time, replicas and any mixture of them,
    in every mode. They may be written for one framework, or for all with operators only. The methods of the same names
    also check their arguments, and their states record the reduction and the leaves that they were made for. The
    reductions of the library are subclasses: they override the four methods, and others for speed, with the same bits.

    Args:
      init: ``init(like) -> state``, the empty state for trees shaped like ``like``: an array or a tree of arrays. The
        library passes NumPy arrays of zeros that take no memory.
      update: ``update(state, value, weight) -> state``, adds a contribution. The library passes the weight as a scalar
        array: float64 if a leaf is float64 or complex128, else float32. The result for a contribution of weight 0 is
        discarded. The method has the default ``weight=1``.
      merge: ``merge(a, b) -> state``, merges two partial states; ``a`` has the earlier contributions.
      finalize: ``finalize(state) -> value``, the combined tree.
      name: the name in error messages.
      scales_by_weight: whether the result is per unit of weight, as a mean is. `per_leaf` passes its weight to such
        reductions, and 0 or 1 to others.

    Raises:
      GradCombineError: in ``update`` for a tree that does not match, for a weight that is negative or not finite, and
        if the functions return a state whose shapes or dtypes differ from those of their input.

    Bits: those of the functions. Over replicas, states are gathered and merged in the canonical tree over the ranks.

    Each state also carries an empty one, from which the next window starts, so it takes twice the memory of the state
    of your functions; `elementwise` avoids that.

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

    name: str
    state: type[Any]
    """The class of the states, where it is one of this reduction alone."""
    scales_by_weight: bool = False
    wire: Wire | None = None
    """The compression of partial sums between replicas; None: none."""
    microbatches: int | None = None
    """The number of microbatches of a `numbered` reduction's ledger; None for other reductions."""
    summed_over: Collective | None = None
    """The replicas over which each update sums, so that states are shards of the sum; None: none."""
    adds: bool = False
    """Whether states from `contribution` merge by adding their accumulators."""
    divides: bool = False
    """Whether the result is ``sum(w * g) / sum(w)``, so that `add_weighted` is defined."""

    written: type[Reduction]
    """The class of reductions made from four functions, which ``Reduction(...)`` returns."""
    __signature__: inspect.Signature

    def __init_subclass__(cls) -> None:
        """Adds the name of the reduction to errors of the methods, and excludes them from AutoGraph."""
        for name in NAMED:
            method = vars(cls).get(name)
            if isinstance(method, FunctionType) and not hasattr(method, "autograph_info__"):
                setattr(cls, name, operation()(method))

    def __new__(cls, *args: Any, **kwargs: Any) -> Reduction:
        return object.__new__(Reduction.written if cls is Reduction else cls)

    def __repr__(self) -> str:
        return self.description

    @abstractmethod
    def init(self, like: Tree) -> State:
        """The empty state for trees shaped like ``like``."""

    @abstractmethod
    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        """Adds a contribution."""

    @abstractmethod
    def merge(self, a: State, b: State) -> State:
        """Merges two partial states; ``a`` has the earlier contributions."""

    @abstractmethod
    def finalize(self, state: State) -> Tree:
        """The combined tree."""

    @abstractmethod
    def clear(self, state: State) -> State:
        """The empty state of the same shapes, with the dtypes that `init` gives."""

    def require(self, state: State) -> Any:
        """Returns a state of this reduction; raises for any other."""
        return require_type(f"a {self.state.__name__}", state, self.state)

    @property
    def description(self) -> str:
        """The reduction with all of its settings, for instance ``"clipped(mean('fast'), 1.0)"``.

        State files record it: a state can only be used with the settings that it was made with.
        """
        return self.name

    @property
    def derivative(self) -> Reduction | None:
        """The reduction whose derivative replaces that of this one, in a list and over replicas.

        None: differentiates the functions themselves.
        """
        return None

    def combine(self, values: Sequence[Tree], weights: Sequence[Scalar], order: Order) -> Tree:
        """The result of one or more contributions, in this order.

        Subclasses override it with faster code of the same bits.
        """
        empty = self.init(_common(values))
        pairs = zip(values, weights, strict=True)
        if order == "tree":
            return self.finalize(fold_pairwise(self.merge, (self.update(empty, *pair) for pair in pairs)))
        return self.finalize(reduce(lambda state, pair: self.update(state, *pair), pairs, empty))

    @operation()
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        """Merges the states of all replicas; by default gathers them and merges them in the canonical tree."""
        leaves, structure = tree.flatten(state)
        backend = resolve([*leaves, collective.rank()])
        ranks = collective.of_each_rank([backend.asarray(x) for x in leaves])
        return fold_ranks(backend, collective, self.merge, _leaves, partial(tree.unflatten, structure), ranks)

    @operation()
    def all_finalize(self, state: State, collective: Collective, order: Order, weight: Scalar) -> Tree:
        """``finalize`` of ``all_merge``, for states of one contribution each, which has this weight."""
        return self.finalize(self.all_merge(state, collective, order))

    def contribution(self, state: State, value: Tree, weight: Scalar) -> State:
        """The state of one contribution alone, for the leaves of ``state``. See `adds`.

        The accumulators of leaves without a gradient, or of known weight 0, are constants.
        """
        raise NotImplementedError

    def add_weighted(self, state: State, value: Tree, weight: Scalar) -> State:
        """`update` with a value that is already multiplied by its weight. See `divides`."""
        raise NotImplementedError

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        """The gradients of a contribution, and a function from new gradients to the new contribution."""
        return value, lambda gradients: gradients


class Wrapper(Reduction):
    """A reduction that wraps another one and has its states; by default it only forwards.

    Attributes:
      of: the wrapped reduction.
      settings: the other arguments of the constructor, by name.
      call: the function that makes it, for the description; empty: the name of the class.
    """

    call = ""

    def __init__(self, of: Reduction, **settings: Any) -> None:
        check(reduction=of)
        self.of, self.settings = of, settings
        self.name = of.name
        self.scales_by_weight = of.scales_by_weight
        self.wire = of.wire
        self.microbatches = of.microbatches
        self.summed_over = of.summed_over

    def around(self, of: Reduction) -> Reduction:
        """A wrapper with the same settings around another reduction."""
        return type(self)(of, **self.settings)

    @no_autograph
    def init(self, like: Tree) -> State:
        return self.of.init(like)

    @no_autograph
    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        return self.of.update(state, value, weight)

    @no_autograph
    def merge(self, a: State, b: State) -> State:
        return self.of.merge(a, b)

    @no_autograph
    def finalize(self, state: State) -> Tree:
        return self.of.finalize(state)

    @no_autograph
    def clear(self, state: State) -> State:
        return self.of.clear(state)

    @property
    def description(self) -> str:
        return described(self.call or type(self).__name__.lower(), self.of.description, **self.settings)

    @property
    def derivative(self) -> Reduction | None:
        return None if self.of.derivative is None else self.around(self.of.derivative)

    @no_autograph
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        return self.of.all_merge(state, collective, order)

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        return self.of.gradients(value)


class OnContributions(Wrapper):
    """A wrapper that transforms contributions or their weights only."""

    def __init__(self, of: Reduction, **settings: Any) -> None:
        super().__init__(of, **settings)
        self.adds, self.divides = of.adds, of.divides

    def changed(self, value: Tree, weight: Scalar) -> tuple[Tree, Scalar]:
        """The transformed contribution and weight."""
        return value, weight

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        return self.of.update(state, *self.changed(value, weight))

    def combine(self, values: Sequence[Tree], weights: Sequence[Scalar], order: Order) -> Tree:
        changed_values, changed_weights = zip(*map(self.changed, values, weights), strict=True)
        return self.of.combine(changed_values, changed_weights, order)

    def contribution(self, state: State, value: Tree, weight: Scalar) -> State:
        return self.of.contribution(state, *self.changed(value, weight))

    def add_weighted(self, state: State, value: Tree, weight: Scalar) -> State:
        return self.of.add_weighted(state, *self.changed(value, weight))


class Weighed(OnContributions):
    """Makes `per_leaf` pass its weight to a reduction, as it does to averages."""

    def __init__(self, of: Reduction) -> None:
        super().__init__(of)
        self.scales_by_weight = True


def described(name: str, /, *arguments: str, **settings: Any) -> str:
    """The text of a call with a name, arguments, and keyword arguments except those that are None.

    >>> described("clipped", "mean()", max_norm=1.0, dtype=None)
    'clipped(mean(), max_norm=1.0)'
    """
    keywords = [f"{key}={value}" for key, value in settings.items() if value is not None]
    return f"{name}({', '.join([*arguments, *keywords])})"


def _leaves(value: Tree) -> list[Leaf]:
    return tree.flatten(value)[0]


def _common(trees: Sequence[Tree]) -> Tree:
    """The first tree, with its leaves without a gradient replaced by those of the first tree that has one there."""
    # Row-sparse leaves are not flattened: some reductions accept dense and row-sparse contributions to a leaf.
    leaves, structure = tree.flatten(trees[0], is_row_sparse)
    for value in trees[1:]:
        others = tree.flatten_as(structure, value, is_row_sparse)
        pairs = zip(leaves, others, strict=True)
        leaves = [leaf if other is None or not is_absent(leaf) else other for leaf, other in pairs]
    return tree.unflatten(structure, leaves)


def derived(reduction: Reduction, run: Callable[..., Tree], *arguments: Tree) -> Tree:
    """``run(reduction, *arguments)``, with the derivative of ``run(reduction.derivative, *arguments)``.

    Args:
      reduction: a reduction.
      run: a function of a reduction and trees. It must not close over arrays to differentiate with respect to.
      arguments: trees of arrays and None.
    """
    derivative = reduction.derivative
    if derivative is None:
        return run(reduction, *arguments)
    try:
        leaves, structure = tree.flatten(arguments)
    except GradCombineError:
        return run(reduction, *arguments)  # raises a more specific error
    backend = resolve(leaves)
    if not backend.differentiates:
        return run(reduction, *arguments)
    form: list[Any] = []

    # custom_derivative takes and returns arrays only: absent leaves of the result are removed, and put back after it.
    def on_arrays(chosen: Reduction) -> Callable[..., Sequence[Array]]:
        def call(*leaves: Leaf) -> list[Array]:
            result, outer = tree.flatten(run(chosen, *tree.unflatten(structure, leaves)))
            absent = [(i, x) for i, x in enumerate(result) if is_absent(x)]
            form[:] = [outer, absent]
            return [x for x in result if not is_absent(x)]

        return call

    result = backend.custom_derivative(on_arrays(reduction), on_arrays(derivative), leaves)
    outer, absent = form
    for i, x in absent:
        result.insert(i, x)
    return tree.unflatten(outer, result)
