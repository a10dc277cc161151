"""The array primitives and the collectives that algorithms are written in.

Operators such as ``+``, ``>=`` and ``&`` that mean the same in all frameworks are used directly. What frameworks do
differently, in meaning or in bits, is a primitive here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.types import Array, Leaf, Tree

Kernel: TypeAlias = Callable[..., tuple[Array, ...]]
"""A module-level function: ``kernel(backend, *static, *arrays)``."""

ToArrays: TypeAlias = Callable[..., Sequence[Array]]
"""A function from leaves to arrays."""

Iteration: TypeAlias = Callable[[Array, list[Array], list[Array]], list[Array]]
"""One iteration of `Backend.repeat`: ``body(i, carry, constants)`` returns the new ``carry``."""

primitive: Any = staticmethod
"""Makes a method from a framework's function; of type Any, because such functions name and type their parameters."""


class Split(NamedTuple):
    """A container flattened one level deep."""

    names: tuple[Any, ...]
    """Keys of a dict, indices of a list or fields of a NamedTuple."""
    children: tuple[Tree, ...]
    rebuild: Callable[[Sequence[Tree]], Tree]
    static: Any = None
    """Static data that must also be equal for two containers to match."""
    form: str = "{}"
    """Format of a name in a pytree path, for instance ``"[{!r}]"``."""


class RowSlices(NamedTuple):
    """A row-sparse array: all rows that are not listed are zero."""

    indices: Array
    """Row indices: integers of shape (n,), possibly with duplicates."""
    values: Array
    """One row for each index: shape (n, ...)."""
    rows: int | None
    """Number of rows of the dense array, or None if it is unknown while tracing."""


class Backend(ABC):
    """The primitives of one framework. Defaults are written in terms of the abstract methods."""

    name: str
    differentiates: bool
    """Whether the framework has automatic differentiation."""

    @abstractmethod
    def owns(self, leaf: Leaf) -> bool:
        """Whether ``leaf`` is an array, variable, traced value or shape/dtype spec of this framework."""

    def split(self, node: Tree) -> Split | None:
        """Flattens a container type registered with this framework by one level; returns None for other nodes."""
        return None

    @abstractmethod
    def asarray(self, leaf: Leaf) -> Array:
        """Converts a leaf to an array of the same dtype."""

    @abstractmethod
    def dtype(self, leaf: Leaf) -> np.dtype:
        """The NumPy dtype (of ml_dtypes for bfloat16 and float8) of an array or spec of this framework or of NumPy."""

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The static shape of a number, array or spec of this framework or of NumPy."""
        return tuple(getattr(leaf, "shape", ()))

    @abstractmethod
    def concrete(self, array: Array) -> np.ndarray | None:
        """The value as a NumPy array, or None for a tracer or symbolic tensor."""

    def absent(self, leaf: Leaf) -> bool:
        """Whether a leaf is this framework's marker of "no gradient", besides None."""
        return False

    def make_absent(self, shape: tuple[int, ...]) -> Leaf:
        """The marker of "no gradient" (see `absent`) for a parameter of this shape."""
        return None

    @abstractmethod
    def full(self, shape: tuple[int, ...], fill: float, dtype: np.dtype, like: Sequence[Leaf] = ()) -> Array:
        """Creates an array filled with ``fill``.

        It varies over the manual mesh axes that every leaf in ``like`` varies over. If ``like`` is a single leaf of the
        same shape, the array also gets its sharding.
        """

    @abstractmethod
    def cast(self, array: Array, dtype: np.dtype) -> Array:
        """Casts to another dtype, rounding to nearest even."""

    @abstractmethod
    def add(self, a: Array, b: Array) -> Array:
        """a + b, without overflow warnings."""

    @abstractmethod
    def total(self, array: Array) -> Array:
        """The scalar sum of all elements; the order of additions is up to the framework."""

    @abstractmethod
    def largest(self, array: Array) -> Array:
        """The maximum of int32 elements along the last axis, with keepdims."""

    @abstractmethod
    def product(self, a: Array, b: Array) -> Array:
        """Elementwise a * b, without overflow warnings; may be fused with a subsequent addition."""

    @abstractmethod
    def scale(self, array: Array, weight: Array) -> Array:
        """array * weight for a scalar of the array's real dtype, rounded once: never fused into an addition."""

    @abstractmethod
    def divide(self, array: Array, divisor: Array) -> Array:
        """array / divisor for a scalar of the array's real dtype, correctly rounded."""

    @abstractmethod
    def sqrt(self, array: Array) -> Array:
        """The square root of floats, correctly rounded on CPU; NaN for negative elements."""

    @abstractmethod
    def where(self, condition: Array, a: Array, b: Array) -> Array:
        """Selects from a where the boolean condition is true, else from b."""

    @abstractmethod
    def bitcast(self, array: Array, dtype: np.dtype) -> Array:
        """Reinterprets the bits as another dtype of the same or a smaller width.

        A smaller width appends an axis over the pieces of each element; for complex input these may be two axes, the
        parts and their pieces.
        """

    @abstractmethod
    def shift_left(self, a: Array, amount: Array | int) -> Array:
        """``a << amount`` for int32 (amounts 0 to 31) and int64 (0 to 63)."""

    @abstractmethod
    def shift_right(self, a: Array, amount: Array | int) -> Array:
        """``a >> amount`` for 32-bit (amounts 0 to 31) and 64-bit integers (0 to 63); arithmetic if signed."""

    def maximum(self, a: Array, b: Array) -> Array:
        """The elementwise maximum: NaN if either is NaN, ``b`` if they are equal."""
        return self.where(a != a, a, self.where(b != b, b, self.where(a > b, a, b)))

    def fused(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Computes ``kernel(self, *static, *arrays)``, in one pass over memory where the framework allows.

        Args:
          kernel: an elementwise function whose bits do not depend on how it is compiled.
          static: hashable arguments.
          arrays: arrays of one shape, and scalars.
        """
        return self.traced_once(kernel, static, arrays)

    @abstractmethod
    def fused_totals(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Sums all elements of each result of ``kernel(self, *static, *arrays)`` modulo 2**32, to scalars.

        One pass over memory where the framework allows: the results of the kernel are not stored.

        Args:
          kernel: an elementwise function with uint32 results, all of one shape.
          static: hashable arguments.
          arrays: arrays of one shape.
        """

    def traced_once(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Computes ``kernel(self, *static, *arrays)``; traces once per combination of shapes and dtypes.

        The kernel need not be elementwise.
        """
        return tuple(kernel(self, *static, *arrays))

    def traced(self, function: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
        """A function of arrays whose calls in a graph share one trace per combination of shapes and dtypes."""
        return function

    def prefers_rows(self, shape: tuple[int, ...], count: int) -> bool:
        """Whether stacking ``count`` arrays of this shape costs less than an operation on each."""
        return False

    def prefers_joined(self, array: Array) -> bool:
        """Whether the array is so small that concatenating it with others costs less than an operation on each."""
        return False

    def joined(self, function: Callable[..., Tree], *arguments: Tree) -> Tree:
        """Calls an elementwise function on concatenated arrays, whose results are split afterwards."""
        return function(*arguments)

    def apply_if_rare(
        self, condition: Array, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]
    ) -> tuple[Array, ...]:
        """Computes ``kernel(self, *static, *arrays)`` if the condition is true, else returns the arrays uncopied.

        Args:
          condition: boolean scalar, concrete or traced, that is rarely true.
          kernel: as for `fused`, with results of the arrays' shapes and dtypes.
          static: hashable arguments.
          arrays: arrays of one shape.
        """
        return self.fused(kernel, static, arrays) if condition else tuple(arrays)

    def custom_derivative(self, function: ToArrays, surrogate: ToArrays, leaves: Sequence[Leaf]) -> list[Array]:
        """Computes ``function(*leaves)`` with the derivatives of ``surrogate``, in both modes and to every order.

        Args:
          function: maps leaves to arrays. It must not close over arrays: it may be traced again in another scope.
          surrogate: maps leaves to arrays of the same shapes and dtypes. It runs only if a derivative is taken.
          leaves: arrays of any framework and None. Derivatives are taken with respect to this framework's arrays.
        """
        return list(function(*leaves))

    def row_slices(self, leaf: Leaf) -> RowSlices | None:
        """The parts of this framework's row-sparse array type; None for any other leaf."""
        return None

    @abstractmethod
    def argsort(self, keys: Array) -> Array:
        """The int32 permutation that sorts a vector of integers, stably."""

    def flat(self, array: Array) -> Array:
        """The array flattened to a vector."""
        return self.reshape(array, (-1,))

    @abstractmethod
    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Reshapes in row-major order; one length may be -1."""

    @abstractmethod
    def row_numbers(self, array: Array) -> Array:
        """The int32 row index of each element of `flat`, where a row is a slice along the last axis."""

    @abstractmethod
    def cumsum(self, array: Array) -> Array:
        """The cumulative sum of an int32 vector."""

    @abstractmethod
    def search_sorted(self, ordered: Array, keys: Array) -> Array:
        """The int32 leftmost insertion index of each int32 key in an ascending int32 vector."""

    def loop(
        self, condition: Callable[..., Array], body: Callable[..., tuple[Array, ...]], *carry: Array
    ) -> tuple[Array, ...]:
        """Runs ``carry = body(*carry)`` while the boolean scalar ``condition(*carry)`` is true; returns ``carry``."""
        while condition(*carry):
            carry = body(*carry)
        return carry

    def repeat(
        self, count: Array, body: Iteration, carry: Sequence[Array], constants: Sequence[Array], most: int
    ) -> list[Array]:
        """Runs ``carry = body(i, carry, constants)`` for ``i`` in ``range(count)``; differentiable.

        Args:
          count: int32 scalar, concrete or traced, from 0 to ``most``.
          body: returns arrays of the shapes and dtypes of ``carry``. It must not close over arrays.
          carry: initial arrays.
          constants: arrays that every iteration reads, which are not copied.
          most: static upper bound of ``count``, for reverse-mode derivatives.
        """
        for i in range(int(count)):
            carry = body(i, list(carry), list(constants))
        return list(carry)

    @abstractmethod
    def stack(self, arrays: Sequence[Array]) -> Array:
        """Stacks the arrays along a new first axis."""

    @abstractmethod
    def slice_at(self, array: Array, i: Array | int) -> Array:
        """``array[i]``, for an int32 scalar in bounds of the first axis."""

    @abstractmethod
    def update_at(self, array: Array, i: Array | int, row: Array) -> Array:
        """The array with ``array[i]`` replaced by ``row``; in place where compiled code owns the buffer."""

    @abstractmethod
    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """Concatenates the arrays along an axis."""

    def unpack(self, array: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Splits a vector into consecutive parts of these shapes."""
        ends = accumulate(map(math.prod, shapes))
        return [self.reshape(array[end - math.prod(x) : end], x) for x, end in zip(shapes, ends, strict=True)]

    @abstractmethod
    def take(self, array: Array, positions: Array) -> Array:
        """Gathers rows at int32 positions, which must be in bounds."""

    @abstractmethod
    def put(self, array: Array, positions: Array, rows: Array) -> Array:
        """Overwrites rows at distinct, non-negative int32 positions; drops rows whose position is past the end."""

    def check(self, condition: Array, operation: str, expected: str, received: str) -> None:
        """Raises at run time if ``condition`` is false anywhere, in compiled code too where that is supported."""
        if not np.all(condition):
            raise GradCombineError(operation, expected, received)


class Collective:
    """Communication among replicas that run the same program. Each method exchanges all of its arrays in one call.

    This base class, `gradcombine.LOCAL`, is a single replica: it returns the arrays as they are.
    """

    framework: str | None = None
    """Framework of the arrays that it exchanges; None: any."""

    def __repr__(self) -> str:
        return "LOCAL"

    def size(self) -> int:
        """The number of replicas."""
        return 1

    def rank(self) -> Array:
        """The index of this replica, an integer scalar."""
        return np.int32(0)

    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        """The elementwise sum over replicas; the order of additions is up to the framework."""
        return list(arrays)

    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        """The elementwise maximum over replicas of int8 arrays."""
        return list(arrays)

    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays of all replicas, stacked by rank along a new first axis."""
        return [array[None] for array in arrays]

    def of_each_rank(self, arrays: Sequence[Array]) -> Iterator[list[Array]]:
        """Yields the arrays of each replica by rank, after a single exchange."""
        gathered = self.all_gather(arrays)
        return ([stack[rank] for stack in gathered] for rank in range(self.size()))

    def narrow_ways(self) -> tuple[str, ...]:
        """Exchanges that leaves encoded in a narrow dtype may use.

        ``"gathered"`` is one `all_gather`; ``"parts"`` is `all_to_all`, and an `all_gather` of the reduced parts.
        """
        return ()

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        """Exchanges arrays with one row per replica: row ``r`` of a result is rank ``r``'s row for this replica."""
        return list(arrays)

    def reduce_scatter_map(
        self,
        function: Callable[[Sequence[Array], Sequence[Array]], list[Array]],
        summed: Sequence[Array],
        common: Sequence[Array],
    ) -> list[Array]:
        """Computes ``function(all_sum(summed), common)``; where possible, each replica computes only its shard.

        Args:
          function: elementwise. It returns one array per array of ``common``, of the same shape, whose bits do not
            depend on the order in which ``summed`` was summed (integer sums, for instance).
          summed: arrays to sum over replicas.
          common: arrays that are identical on all replicas.
        """
        return function(self.all_sum(summed), common)

    def mark_varying(self, arrays: Sequence[Array]) -> list[Array]:
        """Marks arrays as varying over the replicas, if the framework tracks this in types."""
        return list(arrays)

    def require_unreduced(self, leaves: Iterable[tuple[str, Array]]) -> None:
        """Raises if the framework knows that one of the leaves, with their paths, is reduced over the replicas."""
