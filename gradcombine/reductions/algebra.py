"""The algebra: a reduction is four pure functions, and everything that runs it is built from them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, operation
from gradcombine.pairwise import fold_pairwise
from gradcombine.settings import check
from gradcombine.sparse import is_row_sparse
from gradcombine.types import Array, Leaf, Order, Scalar, State, Tree, no_autograph
from gradcombine.wires.wire import Wire


class Reduction(ABC):
    """A commutative monoid over gradient trees, as four pure functions.

    Whoever writes them has a reduction that runs over a list, time, replicas and any mixture, in every mode. What is
    passed to ``Reduction`` may be written for one framework, or with operators for all. The methods of the same names
    also check their arguments; their states record the reduction and the leaves that they were made for. The library's
    own reductions are subclasses: they override the four, and where they know a faster way to the same bits the others.

    Args:
      init: ``init(like) -> state``, the empty state for trees shaped like ``like`` (arrays or shape/dtype specs): an
        array or a tree of arrays. The function is given NumPy arrays of zeros, which take no memory.
      update: ``update(state, value, weight) -> state``, one more contribution. Called by the library, the weight is a
        scalar array: float64 where a leaf has that precision, else float32. A contribution of weight 0 is discarded
        afterwards, whatever the function returns for it. The method has the default ``weight=1``.
      merge: ``merge(a, b) -> state``, two partial states become one; ``a`` holds the earlier contributions.
      finalize: ``finalize(state) -> value``, the combined tree.
      name: what error messages call it.
      scales_by_weight: whether the result is per unit of weight, as a mean is. `per_leaf` hands its weight to such
        reductions; the others learn from it only whether the contribution is present.

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

    name: str
    scales_by_weight: bool = False
    wire: Wire | None = None
    """How replicas send partial sums; None: as they are."""

    written: type[Reduction]
    """The class of reductions that are made of four functions."""
    __signature__: inspect.Signature

    def __new__(cls, *args: Any, **kwargs: Any) -> Reduction:
        return object.__new__(Reduction.written if cls is Reduction else cls)

    def __repr__(self) -> str:
        return self.description

    @abstractmethod
    def init(self, like: Tree) -> State:
        """The empty state for trees shaped like ``like``."""

    @abstractmethod
    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        """The state with one more contribution."""

    @abstractmethod
    def merge(self, a: State, b: State) -> State:
        """Two partial states become one; ``a`` holds the earlier contributions."""

    @abstractmethod
    def finalize(self, state: State) -> Tree:
        """The combined tree."""

    @abstractmethod
    def clear(self, state: State) -> State:
        """The empty state of the same shapes, with the dtypes that `init` would give it."""

    @property
    def description(self) -> str:
        """The reduction with all of its settings, for instance ``"clipped(mean('fast'), 1.0)"``.

        State files hold it: a state goes on under the settings that it was begun under.
        """
        return self.name

    @property
    def derivative(self) -> Reduction | None:
        """The reduction whose derivative this one has in a list and over replicas.

        None: derivatives flow through the functions.
        """
        return None

    @property
    def microbatches(self) -> int | None:
        """The length of the ledger, of a reduction whose contributions are numbered; None for any other one."""
        return None

    @property
    def summed_over(self) -> Collective | None:
        """The replicas whose contributions each update sums, so that a state is a part of theirs; None: no others'."""
        return None

    @property
    def adds(self) -> bool:
        """Whether `contribution` gives states whose accumulators only need adding to those of another one."""
        return False

    @property
    def divides(self) -> bool:
        """Whether the result is a sum of ``w * g`` over that of ``w``, so that `add_weighted` has a meaning."""
        return False

    def combine(self, values: Sequence[Tree], weights: Sequence[Scalar], order: Order) -> Tree:
        """The value of one contribution or more, added to an empty state in this order.

        Subclasses override it where they know a faster way to the same bits.
        """
        empty = self.init(_common(values))
        pairs = zip(values, weights, strict=True)
        if order == "tree":
            return self.finalize(fold_pairwise(self.merge, (self.update(empty, *pair) for pair in pairs)))
        return self.finalize(reduce(lambda state, pair: self.update(state, *pair), pairs, empty))

    @operation()
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        """Merges the states of all replicas. By default they are gathered, and merged in the tree over ranks."""
        leaves, structure = tree.flatten(state)
        backend = resolve([*leaves, collective.rank()])
        ranks = collective.of_each_rank([backend.asarray(x) for x in leaves])
        return fold_pairwise(self.merge, (tree.unflatten(structure, arrays) for arrays in ranks))

    @operation()
    def all_finalize(self, state: State, collective: Collective, order: Order, weight: Scalar) -> Tree:
        """``finalize`` of ``all_merge``, of states that have each had one contribution, of this weight."""
        return self.finalize(self.all_merge(state, collective, order))

    def contribution(self, state: State, value: Tree, weight: Scalar) -> State:
        """One contribution by itself, for the leaves of the given state. See `adds`.

        Accumulators are constants where there is nothing to add.
        """
        raise NotImplementedError

    def add_weighted(self, state: State, value: Tree, weight: Scalar) -> State:
        """``update`` with a value that has been multiplied by its weight already. See `divides`."""
        raise NotImplementedError

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        """The gradients in a contribution, and a function that puts others in their place."""
        return value, lambda gradients: gradients


class Wrapper(Reduction):
    """A reduction made of another one, whose states it has. Subclasses override what they change.

    Attributes:
      of: the other reduction.
    """

    def __init__(self, of: Reduction) -> None:
        check(reduction=of)
        self.of = of
        self.name = of.name
        self.scales_by_weight = of.scales_by_weight
        self.wire = of.wire

    def around(self, of: Reduction) -> Reduction:
        """A wrapper with these settings around another reduction."""
        return type(self)(of)

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
        return f"{type(self).__name__.lower()}({self.of.description})"

    @property
    def derivative(self) -> Reduction | None:
        return None if self.of.derivative is None else self.around(self.of.derivative)

    @property
    def microbatches(self) -> int | None:
        return self.of.microbatches

    @property
    def summed_over(self) -> Collective | None:
        return self.of.summed_over

    @no_autograph
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        return self.of.all_merge(state, collective, order)

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        return self.of.gradients(value)


class OnContributions(Wrapper):
    """A wrapper that changes contributions or their weights, and nothing else."""

    def changed(self, value: Tree, weight: Scalar) -> tuple[Tree, Scalar]:
        """The contribution and its weight as the other reduction gets them."""
        return value, weight

    @property
    def adds(self) -> bool:
        return self.of.adds

    @property
    def divides(self) -> bool:
        return self.of.divides

    @operation()
    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        return self.of.update(state, *self.changed(value, weight))

    @operation()
    def combine(self, values: Sequence[Tree], weights: Sequence[Scalar], order: Order) -> Tree:
        changed, weighing = zip(*map(self.changed, values, weights), strict=True)
        return self.of.combine(changed, weighing, order)

    @operation()
    def contribution(self, state: State, value: Tree, weight: Scalar) -> State:
        return self.of.contribution(state, *self.changed(value, weight))

    @operation()
    def add_weighted(self, state: State, value: Tree, weight: Scalar) -> State:
        return self.of.add_weighted(state, *self.changed(value, weight))


class Weighed(OnContributions):
    """A reduction that `per_leaf` hands its weight to, as it does to averages."""

    def __init__(self, of: Reduction) -> None:
        super().__init__(of)
        self.scales_by_weight = True


def described(*parts: Any, **settings: Any) -> str:
    """A call in words: a name, arguments, and those settings that are not None.

    >>> described("clipped", "mean()", max_norm=1.0, dtype=None)
    'clipped(mean(), max_norm=1.0)'
    """
    name, *arguments = parts
    arguments += [f"{key}={value}" for key, value in settings.items() if value is not None]
    return f"{name}({', '.join(arguments)})"


def _common(trees: Sequence[Tree]) -> Tree:
    """The first tree, with each of its None leaves taken from the first tree that has a gradient there."""
    # What a row-sparse leaf stands for is the reduction's to say: it may take dense ones beside it.
    leaves, structure = tree.flatten(trees[0], is_row_sparse)
    for value in trees[1:]:
        others = tree.flatten_as(structure, value, is_row_sparse)
        leaves = [other if leaf is None else leaf for leaf, other in zip(leaves, others, strict=True)]
    return tree.unflatten(structure, leaves)


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
        leaves, structure = tree.flatten(arguments)
    except GradCombineError:
        return run(reduction, *arguments)  # which says better what is wrong
    backend = resolve(leaves)
    if not backend.differentiates:
        return run(reduction, *arguments)
    form: list[Any] = []

    def arrays_of(one: Reduction) -> Callable[..., Sequence[Array]]:
        def call(*leaves: Leaf) -> list[Array]:
            result, outer = tree.flatten(run(one, *tree.unflatten(structure, leaves)))
            missing = [(i, x) for i, x in enumerate(result) if is_absent(x)]
            form[:] = [outer, missing]
            return [x for x in result if not is_absent(x)]

        return call

    result = backend.custom_derivative(arrays_of(reduction), arrays_of(derivative), leaves)
    outer, missing = form
    for i, x in missing:
        result.insert(i, x)
    return tree.unflatten(outer, result)
