"""One leaf's accumulator: what the reductions differ in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import shape_of
from gradcombine.errors import invalid
from gradcombine.reductions import dtypes
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array, Leaf, Order, Tree

Accumulator = Any
"""An array, or a NamedTuple of arrays, tuples of them and constants; the first has as many axes as contributions."""


@dataclass(eq=False, slots=True)
class Totals:
    """The sum of weights and the count of a state.

    Attributes:
      weight: the sum of weights.
      count: the number of contributions.
      has_some: whether it is certain that the count is not 0.
    """

    weight: Accumulator
    count: Array
    has_some: bool = False
    _made: dict[Hashable, Array] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Array]) -> Array:
        """A value derived from the totals, once for all leaves: traced for each leaf it would be most of a program."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def divisor(self, backend: Backend, dtype: np.dtype) -> Array:
        """The sum of weights, a scalar: 1 where nothing was added, NaN where it has overflowed.

        The quotient by infinity would be 0, a wrong number.
        """
        if dtype not in self._made:
            weight = backend.cast(self.weight, dtype)
            # No array: JAX looks for NaN where one is made, if it is asked to.
            weight = backend.where(weight == backend.full((), np.inf, dtype), dtype.type(np.nan), weight)
            self._made[dtype] = weight if self.has_some else self.unless_empty(backend, weight, 1)
        return self._made[dtype]

    def unless_empty(self, backend: Backend, x: Array, otherwise: int = 0) -> Array:
        """``x``, or a constant where nothing was added."""
        if self.has_some:
            return x
        dtype = backend.dtype(x)
        # No ==, by which a graph of TensorFlow 1 compares objects: Horovod's aggregation runs there.
        empty = self.once("empty", lambda: self.count < 1)
        constant = self.once((otherwise, dtype), lambda: backend.full((), otherwise, dtype))
        return backend.where(empty, constant, x)


class Cell(ABC):
    """The monoid on one leaf. `gradcombine.reductions.treewise` lifts it to trees.

    Contributions are arrays here, and the sum of weights is one running value: exact for integers up to 2**24, else
    rounded at each addition. A cell that differs overrides these methods.

    Attributes:
      name: the reduction's, for error messages.
      kinds: the kinds of dtypes of contributions that it accepts.
      settings: the dtypes of accumulator and result.
      is_leaf: which containers count as leaves; None: none do.
      additive: whether ``merge`` adds arrays elementwise, so that replicas may use an all-reduce.
      adds_terms: whether ``update`` adds one array, `term`, to an accumulator that is one.
      takes_lists: whether it takes several contributions at once, by `update_many`.
      takes_traced: whether it does where weights are not known.
      joins: whether all but `idle` is elementwise, so that small leaves may be handled as one.
      most_replicas: how many may merge their states by `all_merge`, without gathering them.
    """

    name: str
    kinds: tuple[str, ...]
    settings: dtypes.Settings
    is_leaf: Callable[[Tree], bool] | None = None
    additive: bool = False
    adds_terms: bool = False
    takes_lists: bool = False
    takes_traced: bool = False
    joins: bool = False
    most_replicas: int = 0

    @abstractmethod
    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> Accumulator:
        """The neutral accumulator, placed like ``like``."""

    @abstractmethod
    def update(self, backend: Backend, a: Accumulator, x: Leaf, weight: Weight, totals: Totals) -> Accumulator:
        """One more contribution to an accumulator that has had ``totals`` so far. Its weight may be 0: see `masked`."""

    @abstractmethod
    def merge(
        self, backend: Backend, a: Accumulator, b: Accumulator, a_totals: Totals, b_totals: Totals
    ) -> Accumulator:
        """Two accumulators become one; the totals are what each has had."""

    @abstractmethod
    def finish(self, backend: Backend, a: Accumulator, totals: Totals, output: np.dtype) -> Leaf:
        """The result, of dtype ``output``."""

    def arrays(self, leaf: Leaf) -> tuple[Array, ...]:
        """The arrays of a leaf; the first one has its dtype and place."""
        return (leaf,)

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a leaf, or of those that an accumulator is for."""
        return shape_of(parts(leaf)[0])

    def entering(self, backend: Backend, a: Accumulator, made_for: np.dtype, leaf: Leaf) -> Leaf:
        """A contribution as `update` takes it.

        Raises:
          GradCombineError: for one of another shape or dtype than the accumulator is for.
        """
        expected, received = backend.shape(a if not isinstance(a, tuple) else parts(a)[0]), backend.shape(leaf)
        if expected != received:
            raise invalid(f"shape {expected}", received)
        dtype = backend.dtype(leaf)
        if dtype != made_for:
            self.require_dtype(made_for, dtype)
        return backend.asarray(leaf)

    def require_dtype(self, made_for: np.dtype, dtype: np.dtype) -> None:
        """Raises for a dtype that does not enter and leave the accumulator as the one that it was made for."""
        running, received = self.running(made_for), self.running(dtype)
        if (received, self.settings.output(dtype)) != (running, self.settings.output(made_for)):
            expected = f"dtype {made_for}, accumulated in {running}"
            raise invalid(expected, f"{dtype}, accumulated in {received}")

    def masked(self, backend: Backend, zero: Array, old: Accumulator, new: Accumulator) -> Accumulator:
        """The accumulator that `update` returned, or the old one where the weight turns out to be 0."""
        return where(backend, zero, old, new)

    def idle(self, backend: Backend, a: Accumulator, weight: Weight, totals: Totals) -> Accumulator:
        """The accumulator after a contribution of this weight that has no gradient for this leaf."""
        return a

    def running(self, dtype: np.dtype) -> np.dtype:
        """The dtype of the accumulator's arrays for contributions of ``dtype``."""
        return self.settings.running(dtype)

    def empty_weight(self, backend: Backend, dtype: np.dtype, like: Sequence[Leaf]) -> Accumulator:
        """The sum of no weights: a scalar, or a NamedTuple of scalars."""
        return backend.full((), 0, dtype, like)

    def add_weight(self, backend: Backend, total: Accumulator, weight: Weight) -> Accumulator:
        """One more weight."""
        return backend.add(total, weight.cast(backend, backend.dtype(total)))

    def merge_weights(self, backend: Backend, a: Accumulator, b: Accumulator) -> Accumulator:
        """Two sums of weights become one."""
        return backend.add(a, b)

    def link(self, backend: Backend, total: Accumulator, leaves: Sequence[Leaf]) -> Accumulator:
        """The sum of weights, made a function of these contributions for the frameworks' derivatives."""
        return total

    def term(self, backend: Backend, a: Accumulator, x: Leaf, weight: Weight) -> Array:
        """The addend of a contribution, unspecified for a weight of 0. See ``adds_terms``."""
        raise NotImplementedError

    def update_many(
        self, backend: Backend, a: Accumulator, xs: Sequence[Array | None], weights: Sequence[Weight], order: Order
    ) -> Accumulator:
        """The accumulator merged with the contributions, combined in this order, to the bit. See ``takes_lists``.

        None stands where there is no contribution. A weight may turn out to be 0 if the cell takes traced ones.
        """
        raise NotImplementedError

    def total_weight(
        self, backend: Backend, dtype: np.dtype, like: Sequence[Leaf], weights: Sequence[Weight], order: Order
    ) -> Accumulator:
        """`empty_weight` with weights that are known, added in this order. See ``takes_lists``."""
        raise NotImplementedError

    def all_merge(
        self, backend: Backend, collective: Collective, accumulators: Sequence[Accumulator], totals: Totals
    ) -> tuple[list[Accumulator], Totals]:
        """`merge` and `merge_weights` over the replicas, in any order, to the bit. See ``most_replicas``."""
        raise NotImplementedError

    def all_finish(
        self,
        backend: Backend,
        collective: Collective,
        accumulators: Sequence[Accumulator],
        outputs: Sequence[np.dtype],
        totals: Totals,
        weight: Weight,
    ) -> list[Array] | None:
        """`finish` of `all_merge`, where each replica has had one contribution, of this weight; None if it cannot."""
        raise NotImplementedError


def parts(a: Accumulator) -> tuple[Array, ...]:
    """The arrays of an accumulator."""
    if not isinstance(a, tuple):
        return (a,)
    # Constants have no fields.
    return tuple(x for part in cast("tuple[Any, ...]", a) for x in parts(part))


def refilled(a: Accumulator, arrays: Sequence[Array]) -> Accumulator:
    """An accumulator like another one, of these arrays."""
    remaining = iter(arrays)

    def build(a: Any) -> Any:
        if not isinstance(a, tuple):
            return next(remaining)
        fields = cast("tuple[Any, ...]", a)
        kind: Any = type(fields)
        return kind(*map(build, fields)) if hasattr(kind, "_fields") else tuple(map(build, fields))

    return build(a)


def where(backend: Backend, condition: Array, a: Accumulator, b: Accumulator) -> Accumulator:
    return refilled(a, [backend.where(condition, x, y) for x, y in zip(parts(a), parts(b), strict=True)])
