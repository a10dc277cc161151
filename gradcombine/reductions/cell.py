"""The reduction of one leaf, in which treewise reductions differ, and their states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import dtype_of, shape_of
from gradcombine.errors import invalid
from gradcombine.reductions import dtypes
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array, Leaf, Order, Scalar, State, Tree
from gradcombine.wires.wire import Wire

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


class TreewiseState(NamedTuple):
    """A partial result. Each reduction has its own subclass, to detect states of other reductions.

    Attributes:
      value: the tree of accumulators; a constant in the structure for a leaf without gradient.
      weight: the sum of weights, a real scalar; for exact reductions, a NamedTuple of scalars.
      count: int32 scalar, the number of contributions of nonzero weight.
      dtypes: constants in the structure: for each leaf, the dtype of the contributions or "no gradient".
    """

    value: Tree
    weight: Scalar
    count: Array
    dtypes: Tree


@dataclass(eq=False, slots=True)
class FlatState:
    """A flattened state.

    Attributes:
      structure: the structure of ``dtypes``.
      values: the accumulators; None for a leaf without gradient.
      made_for: the constants of ``dtypes``, in the same order.
    """

    structure: tree.Structure
    values: list[Accumulator | None]
    made_for: list[Any]

    def present(self) -> list[Accumulator]:
        return [a for a in self.values if a is not None]

    def arrays(self) -> list[Array]:
        return [x for a in self.values if a is not None for x in parts(a)]

    def rebuild(self, state: State, values: Sequence[Accumulator | None], weight: Scalar, count: Array) -> State:
        """The state with these accumulators, weight and count."""
        return state.__class__(self.value(values), weight, count, state.dtypes)

    def value(self, values: Sequence[Accumulator | None]) -> Tree:
        """The tree of these accumulators, with a constant for each None."""
        pairs = zip(values, self.made_for, strict=True)
        return tree.unflatten(self.structure, [spec if a is None else a for a, spec in pairs])


def summary(a: Accumulator | None) -> str:
    """Describes an accumulator for error messages."""
    if a is None:
        return "no gradient"
    first = parts(a)[0]
    text = f"shape {shape_of(first)} and dtype {dtype_of(first)}"
    return f"{text} in {getattr(a, 'in_words', type(a).__name__)}" if first is not a else text


def require_sendable(
    wire: Wire, flat: FlatState, shape: Callable[[Leaf], tuple[int, ...]], leaves: Sequence[Leaf]
) -> None:
    """Raises for leaves that are not floats and that the wire does not keep uncompressed."""
    for path, leaf, spec in zip(flat.structure.paths(), leaves, flat.made_for, strict=True):
        is_float = spec.dtype is None or dtypes.kind(spec.dtype) == "float"
        if not is_float and not wire.keeps(path, shape(leaf)):
            raise invalid(f"a float leaf for {wire!r}, or one that its wide= keeps uncompressed", spec.dtype, path)


class Small:
    """Calls an elementwise function; defers calls on small leaves, to run them on the concatenated leaves.

    The leaves of a call and its result have the same shape.

    Args:
      backend: the backend of the leaves.
      function: ``function(static, *leaves)``, of accumulators, arrays and None.
    """

    def __init__(self, backend: Backend, function: Callable[..., Accumulator]) -> None:
        self.backend, self.function = backend, function
        self._calls: dict[tuple[Hashable, Hashable], list[_Call]] = {}

    def __call__(self, static: Hashable, *leaves: Accumulator | None) -> Accumulator:
        """The result, or a deferred call that `results` replaces by it."""
        if not self.backend.prefers_joined(parts(leaves[0])[0]):
            return self.function(static, *leaves)
        held = [() if leaf is None else tuple(map(self.backend.asarray, parts(leaf))) for leaf in leaves]
        call = _Call(leaves, held)
        held_dtypes = tuple(tuple(array.dtype for array in arrays) for arrays in held)
        self._calls.setdefault((static, held_dtypes), []).append(call)
        return call

    def results(self, values: Sequence[Accumulator]) -> list[Accumulator]:
        """Runs the deferred calls, and replaces them among ``values`` by their results."""
        done: dict[_Call, Accumulator] = {}
        for (static, _), calls in self._calls.items():
            done.update(zip(calls, self._run(static, calls), strict=True))
        return [done[value] if isinstance(value, _Call) else value for value in values]

    def _run(self, static: Hashable, calls: Sequence[_Call]) -> list[Accumulator]:
        backend, like = self.backend, calls[0].leaves
        if len(calls) == 1:
            return [self.function(static, *like)]
        columns = zip(*(call.held for call in calls), strict=True)
        joined = [[self._join(arrays) for arrays in zip(*column, strict=True)] for column in columns]
        pairs = zip(like, joined, strict=True)
        leaves = (None if leaf is None else refilled(leaf, arrays) for leaf, arrays in pairs)
        result = backend.joined(self.function, static, *leaves)
        shapes = [backend.shape(call.held[0][0]) for call in calls]
        pieces = [backend.unpack(array, shapes) for array in parts(result)]
        return [refilled(result, arrays) for arrays in zip(*pieces, strict=True)]

    def _join(self, arrays: Sequence[Array]) -> Array:
        return self.backend.concat([self.backend.flat(array) for array in arrays])


class _Call:
    """A deferred call: its arguments, and the arrays of each."""

    def __init__(self, leaves: tuple[Accumulator | None, ...], held: list[tuple[Array, ...]]) -> None:
        self.leaves, self.held = leaves, held
