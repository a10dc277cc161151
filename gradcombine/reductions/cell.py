"""The reduction of one leaf: the base class in which treewise reductions differ."""

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
"""An array, or a NamedTuple of arrays, tuples of arrays and constants; the first array has the contributions' rank."""


@dataclass(eq=False, slots=True)
class Totals:
    """The sum of weights and the number of contributions of a state.

    Attributes:
      weight: the sum of weights.
      count: the number of contributions of nonzero weight.
      has_some: whether the count is known not to be 0.
    """

    weight: Accumulator
    count: Array
    has_some: bool = False
    _cache: dict[Hashable, Array] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Array]) -> Array:
        """Computes a value derived from the totals once for all leaves; per leaf, it would be most of a program."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def divisor(self, backend: Backend, dtype: np.dtype) -> Array:
        """The sum of weights, a scalar: 1 if there are no contributions, NaN if it overflowed.

        A mean divided by infinity would be 0, a wrong number.
        """
        if dtype not in self._cache:
            weight = backend.cast(self.weight, dtype)
            # NaN as a NumPy scalar: jax_debug_nans raises for a new array that is NaN.
            weight = backend.where(weight == backend.full((), np.inf, dtype), dtype.type(np.nan), weight)
            self._cache[dtype] = weight if self.has_some else self.unless_empty(backend, weight, 1)
        return self._cache[dtype]

    def unless_empty(self, backend: Backend, x: Array, otherwise: int = 0) -> Array:
        """``x``, or a constant if there are no contributions."""
        if self.has_some:
            return x
        dtype = backend.dtype(x)
        # Not == 0: TensorFlow 1 graph tensors, which the Horovod integration has, compare by identity.
        empty = self.once("empty", lambda: self.count < 1)
        constant = self.once((otherwise, dtype), lambda: backend.full((), otherwise, dtype))
        return backend.where(empty, constant, x)


class Cell(ABC):
    """A reduction of one leaf. `gradcombine.reductions.treewise` lifts it to trees.

    By default contributions are arrays, and the sum of weights is a running value: exact for integers up to 2**24, else
    rounded at each addition. Other cells override these methods.

    Attributes:
      name: the name of the reduction, for error messages.
      kinds: the kinds of dtypes of contributions that it accepts.
      settings: the dtypes of accumulator and result.
      is_leaf: whether a container counts as a leaf; None: none do.
      takes_indices: whether leaves may be indices of a sparse array, since the result is one contribution as a whole.
      additive: whether ``merge`` adds arrays elementwise, so that replicas may use an all-reduce.
      adds_terms: whether accumulators are arrays and ``update`` adds `term`.
      takes_lists: whether it implements `update_many` and `total_weight`.
      takes_traced: whether `update_many` takes traced weights.
      joins: whether all methods but `idle` are elementwise, so that small leaves may be concatenated.
      most_replicas: the largest number of replicas for `all_merge`; states are gathered for more.
    """

    name: str
    kinds: tuple[str, ...]
    settings: dtypes.Settings
    is_leaf: Callable[[Tree], bool] | None = None
    takes_indices: bool = False
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
        """Adds a contribution; ``totals`` are those before it. A traced weight may be 0: see `masked`."""

    @abstractmethod
    def merge(
        self, backend: Backend, a: Accumulator, b: Accumulator, a_totals: Totals, b_totals: Totals
    ) -> Accumulator:
        """Merges two accumulators with their totals."""

    @abstractmethod
    def finish(self, backend: Backend, a: Accumulator, totals: Totals, output: np.dtype) -> Leaf:
        """The result, of dtype ``output``."""

    def arrays(self, leaf: Leaf) -> tuple[Array, ...]:
        """The arrays of a leaf; the first one has its dtype and placement."""
        return (leaf,)

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a leaf, or of the contributions to an accumulator."""
        return shape_of(parts(leaf)[0])

    def checked(self, backend: Backend, a: Accumulator, made_for: np.dtype, leaf: Leaf) -> Leaf:
        """Converts a contribution for `update`; raises for a shape or dtype that does not fit the accumulator."""
        expected, received = backend.shape(a if not isinstance(a, tuple) else parts(a)[0]), backend.shape(leaf)
        if expected != received:
            raise invalid(f"shape {expected}", received)
        dtype = backend.dtype(leaf)
        if dtype != made_for:
            self.require_dtype(made_for, dtype)
        return backend.asarray(leaf)

    def require_dtype(self, made_for: np.dtype, dtype: np.dtype) -> None:
        """Raises for a dtype whose accumulator and result dtypes are not those of ``made_for``."""
        running, received = self.running(made_for), self.running(dtype)
        if (received, self.settings.output(dtype)) != (running, self.settings.output(made_for)):
            expected = f"dtype {made_for}, accumulated in {running}"
            raise invalid(expected, f"{dtype}, accumulated in {received}")

    def masked(self, backend: Backend, zero: Array, old: Accumulator, new: Accumulator) -> Accumulator:
        """The result ``new`` of `update`, or the old accumulator if the traced weight is 0."""
        return where(backend, zero, old, new)

    def idle(self, backend: Backend, a: Accumulator, weight: Weight, totals: Totals) -> Accumulator:
        """The accumulator after a contribution of this weight that has no gradient for this leaf."""
        return a

    def running(self, dtype: np.dtype) -> np.dtype:
        """The dtype of the accumulator for contributions of ``dtype``."""
        return self.settings.running(dtype)

    def empty_weight(self, backend: Backend, dtype: np.dtype, like: Sequence[Leaf]) -> Accumulator:
        """The empty sum of weights: a scalar, or a NamedTuple of scalars."""
        return backend.full((), 0, dtype, like)

    def add_weight(self, backend: Backend, total: Accumulator, weight: Weight) -> Accumulator:
        """Adds a weight to a sum of weights."""
        return backend.add(total, weight.cast(backend, backend.dtype(total)))

    def merge_weights(self, backend: Backend, a: Accumulator, b: Accumulator) -> Accumulator:
        """Merges two sums of weights."""
        return backend.add(a, b)

    def link(self, backend: Backend, total: Accumulator, leaves: Sequence[Leaf]) -> Accumulator:
        """Makes the sum of weights depend on these contributions, for automatic differentiation."""
        return total

    def term(self, backend: Backend, a: Accumulator, x: Leaf, weight: Weight) -> Array:
        """The addend of a contribution; undefined for weight 0. See ``adds_terms``."""
        raise NotImplementedError

    def update_many(
        self, backend: Backend, a: Accumulator, xs: Sequence[Array | None], weights: Sequence[Weight], order: Order
    ) -> Accumulator:
        """Adds several contributions in this order, with the same bits as `update` and `merge`. See ``takes_lists``.

        A contribution that is None keeps its position in the tree. Traced weights may be 0, see ``takes_traced``.
        """
        raise NotImplementedError

    def total_weight(
        self, backend: Backend, dtype: np.dtype, like: Sequence[Leaf], weights: Sequence[Weight], order: Order
    ) -> Accumulator:
        """The sum of known weights, added in this order. See ``takes_lists``."""
        raise NotImplementedError

    def all_merge(
        self, backend: Backend, collective: Collective, accumulators: Sequence[Accumulator], totals: Totals
    ) -> tuple[list[Accumulator], Totals]:
        """`merge` and `merge_weights` over the replicas; the bits do not depend on the order. See ``most_replicas``."""
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
        """`finish` of `all_merge` for one contribution of this weight per replica; None if it is not supported."""
        raise NotImplementedError


def parts(a: Accumulator) -> tuple[Array, ...]:
    """The arrays of an accumulator."""
    if not isinstance(a, tuple):
        return (a,)
    # Constants are empty tuples.
    return tuple(x for part in cast("tuple[Any, ...]", a) for x in parts(part))


def refilled(a: Accumulator, arrays: Sequence[Array]) -> Accumulator:
    """An accumulator of the same structure with these arrays."""
    remaining = iter(arrays)

    def build(a: Any) -> Any:
        if not isinstance(a, tuple):
            return next(remaining)
        fields = cast("tuple[Any, ...]", a)
        cls: Any = type(fields)
        return cls(*map(build, fields)) if hasattr(cls, "_fields") else tuple(map(build, fields))

    return build(a)


def where(backend: Backend, condition: Array, a: Accumulator, b: Accumulator) -> Accumulator:
    return refilled(a, [backend.where(condition, x, y) for x, y in zip(parts(a), parts(b), strict=True)])
