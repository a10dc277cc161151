"""The primitives and the collectives that an algorithm may use.

Where ``+``, ``>=``, ``&`` and their like mean the same on the arrays of all frameworks, the operators are used as they
are. What stands here differs between frameworks, in meaning or in bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.types import Array, Leaf, Tree

Kernel: TypeAlias = Callable[..., tuple[Array, ...]]
"""A function of module level: ``kernel(backend, *static, *arrays)``."""


class Split(NamedTuple):
    """One container, taken apart one level deep."""

    names: tuple[Any, ...]
    """The keys of a dict, the positions of a list, the fields of a NamedTuple."""
    children: tuple[Tree, ...]
    rebuild: Callable[[Sequence[Tree]], Tree]
    static: Any = None
    """Static data that must be equal as well for two containers to match."""
    form: str = "{}"
    """How a path spells a name, for instance ``"[{!r}]"``."""


class RowSlices(NamedTuple):
    """An array of which only some rows are held."""

    indices: Array
    """Integers of shape (n,). Rows may occur several times."""
    values: Array
    """Of shape (n, ...): one row for each index."""
    rows: int | None
    """The number of rows of the whole array; None where it is not known while tracing."""


class Backend(ABC):
    """One framework. What is not abstract has a default, written over the rest."""

    name: str
    differentiates: bool
    """Whether the framework takes derivatives."""

    @abstractmethod
    def owns(self, leaf: Leaf) -> bool:
        """Whether ``leaf`` is an array, variable, traced value or shape/dtype spec of this framework."""

    def split(self, node: Tree) -> Split | None:
        """Takes apart a container type that is registered with this framework; None for anything else."""
        return None

    @abstractmethod
    def asarray(self, leaf: Leaf) -> Array:
        """The leaf as an array, its dtype kept."""

    @abstractmethod
    def dtype(self, leaf: Leaf) -> np.dtype:
        """The NumPy dtype (ml_dtypes for bfloat16 and float8) of an array or spec, of this framework or NumPy's."""

    @abstractmethod
    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The static shape of an array or spec, of this framework or NumPy's."""

    @abstractmethod
    def concrete(self, array: Array) -> np.ndarray | None:
        """The value, or None while tracing."""

    def absent(self, leaf: Leaf) -> bool:
        """Whether a leaf of this framework stands for "no gradient", as None does everywhere."""
        return False

    def make_absent(self, shape: tuple[int, ...]) -> Leaf:
        """The leaf that `absent` recognises, for a parameter of this shape."""
        return None

    @abstractmethod
    def full(self, shape: tuple[int, ...], fill: float, dtype: np.dtype, like: Sequence[Leaf] = ()) -> Array:
        """A filled array. It varies over the axes that all of ``like`` do; placed as the one of its shape, if alone."""

    @abstractmethod
    def cast(self, array: Array, dtype: np.dtype) -> Array:
        """The values in another dtype, rounded to nearest even."""

    @abstractmethod
    def add(self, a: Array, b: Array) -> Array:
        """a + b, silent on overflow."""

    @abstractmethod
    def total(self, array: Array) -> Array:
        """The sum of all elements, a scalar; in an order that the framework chooses."""

    @abstractmethod
    def largest(self, array: Array) -> Array:
        """The largest of int32 elements along the last axis, which stays, of length 1."""

    @abstractmethod
    def product(self, a: Array, b: Array) -> Array:
        """a * b elementwise, silent on overflow; may be fused with a following addition."""

    @abstractmethod
    def scale(self, array: Array, weight: Array) -> Array:
        """array * weight for a scalar of the array's real dtype; rounded once, never fused into an addition."""

    @abstractmethod
    def divide(self, array: Array, divisor: Array) -> Array:
        """array / divisor for a scalar of the array's real dtype, correctly rounded."""

    @abstractmethod
    def sqrt(self, array: Array) -> Array:
        """The square root of floats, correctly rounded on CPU; NaN of negative ones."""

    @abstractmethod
    def where(self, condition: Array, a: Array, b: Array) -> Array:
        """a where the boolean condition holds, else b."""

    @abstractmethod
    def bitcast(self, array: Array, dtype: np.dtype) -> Array:
        """Reinterprets the bits as another dtype of equal width, or of a smaller one: then with one more axis or two.

        Complex numbers are read as their parts.
        """

    @abstractmethod
    def shift_left(self, a: Array, amount: Array | int) -> Array:
        """``a << amount`` for int32 and int64, and amounts from 0 to 31 or 63."""

    @abstractmethod
    def shift_right(self, a: Array, amount: Array | int) -> Array:
        """``a >> amount`` for integers of 32 and 64 bits, and amounts from 0 to 31 or 63; a sign bit is repeated."""

    def maximum(self, a: Array, b: Array) -> Array:
        """The larger one. NaN where either is NaN; ``b`` where both are equal."""
        return self.where(a != a, a, self.where(b != b, b, self.where(a > b, a, b)))

    def fused(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """``kernel(self, *static, *arrays)`` in one pass over memory, as far as the framework can.

        Args:
          kernel: an elementwise function, whose bits do not depend on how it is compiled.
          static: hashable arguments.
          arrays: of one shape, or scalars.
        """
        return self.traced_once(kernel, static, arrays)

    @abstractmethod
    def fused_totals(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The sums modulo 2**32 of all elements of each of ``kernel(self, *static, *arrays)``, as scalars.

        In one pass over memory, as far as the framework can, without an array of the results' size.

        Args:
          kernel: an elementwise function to uint32, of one shape.
          static: hashable arguments.
          arrays: of one shape.
        """

    def traced_once(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """``kernel(self, *static, *arrays)``, of any kernel; traced once for all arrays of these shapes and dtypes."""
        return tuple(kernel(self, *static, *arrays))

    def prefers_rows(self, shape: tuple[int, ...], count: int) -> bool:
        """Whether so many arrays of a shape are better the rows of one: where operations cost more than elements."""
        return False

    def prefers_joined(self, array: Array) -> bool:
        """Whether so small an array is better a part of one with others: where operations cost more than elements."""
        return False

    def joined(self, function: Callable[..., Tree], *arguments: Tree) -> Tree:
        """``function(*arguments)``, elementwise, of arrays that were joined and whose results are unpacked."""
        return function(*arguments)

    def apply_if_rare(
        self, condition: Array, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]
    ) -> tuple[Array, ...]:
        """``kernel(self, *static, *arrays)`` where the scalar condition holds, else the arrays, which are not copied.

        Args:
          condition: known or traced; it seldom holds.
          kernel: as for `fused`. Its results have the shapes and dtypes of the arrays.
          static: hashable arguments.
          arrays: of one shape.
        """
        return self.fused(kernel, static, arrays) if condition else tuple(arrays)

    def custom_derivative(
        self,
        function: Callable[..., Sequence[Array]],
        surrogate: Callable[..., Sequence[Array]],
        leaves: Sequence[Leaf],
    ) -> list[Array]:
        """``function(*leaves)``, whose derivative of every order, in forward and reverse mode, is the surrogate's.

        Args:
          function: from leaves to arrays. It closes over no array: it may run again where those are gone.
          surrogate: likewise, to arrays of the same shapes and dtypes. Nothing of it runs where no derivative is taken.
          leaves: arrays of any framework and None. Derivatives are with respect to those of this one.
        """
        return list(function(*leaves))

    def row_slices(self, leaf: Leaf) -> RowSlices | None:
        """The parts of a row-sparse array of this framework's own kind; None for anything else."""
        return None

    @abstractmethod
    def argsort(self, keys: Array) -> Array:
        """The int32 positions that sort a vector of integers; equal ones stay in their order."""

    def flat(self, array: Array) -> Array:
        """All elements along one axis."""
        return array.reshape(-1)

    @abstractmethod
    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        """The elements in another shape, in row-major order; one of its lengths may be -1."""

    @abstractmethod
    def row_numbers(self, array: Array) -> Array:
        """For each element, of `flat`, the number of its row along the last axis, int32."""

    @abstractmethod
    def cumsum(self, array: Array) -> Array:
        """The running totals of an int32 vector."""

    @abstractmethod
    def search_sorted(self, ordered: Array, keys: Array) -> Array:
        """For each of the int32 keys, how many of an ascending int32 vector are smaller, as int32."""

    def loop(
        self, condition: Callable[..., Array], body: Callable[..., tuple[Array, ...]], *carry: Array
    ) -> tuple[Array, ...]:
        """The arrays ``carry = body(*carry)`` after all the times that the boolean ``condition(*carry)`` held."""
        while condition(*carry):
            carry = body(*carry)
        return carry

    def repeat(
        self,
        turns: Array,
        body: Callable[[Array, list[Array], list[Array]], list[Array]],
        carry: Sequence[Array],
        constants: Sequence[Array],
        most: int,
    ) -> list[Array]:
        """``carry = body(i, carry, constants)`` for i from 0 to ``turns - 1``; differentiable.

        Args:
          turns: int32 scalar, known or traced, from 0 to ``most``.
          body: a function of the arrays that it is given, and of no others. Its results have the shapes and dtypes of
            ``carry``.
          carry: the arrays to begin with.
          constants: what every turn reads, which is not copied.
          most: bounds the turns, for a derivative.
        """
        for i in range(int(turns)):
            carry = body(i, list(carry), list(constants))
        return list(carry)

    @abstractmethod
    def stack(self, arrays: Sequence[Array]) -> Array:
        """The arrays along a new first axis."""

    @abstractmethod
    def slice_at(self, array: Array, i: Array | int) -> Array:
        """``array[i]``, for an int32 scalar that is a position of the first axis."""

    @abstractmethod
    def update_at(self, array: Array, i: Array | int, row: Array) -> Array:
        """The array with ``row`` at position ``i`` of the first axis, in place where compiled code owns the array."""

    @abstractmethod
    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """The arrays one after another along an axis."""

    def unpack(self, array: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """The consecutive parts of a vector, in these shapes."""
        ends = accumulate(map(math.prod, shapes))
        return [self.reshape(array[end - math.prod(x) : end], x) for x, end in zip(shapes, ends, strict=True)]

    @abstractmethod
    def take(self, array: Array, positions: Array) -> Array:
        """The rows at int32 positions, all of which exist."""

    @abstractmethod
    def put(self, array: Array, positions: Array, rows: Array) -> Array:
        """The array with these rows at int32 positions, from 0 on: distinct ones, and ones past the end, left out."""

    def check(self, condition: Array, operation: str, expected: str, received: str) -> None:
        """Raises at run time where ``condition`` is false, also in compiled code that supports it."""
        if not np.all(condition):
            raise GradCombineError(operation, expected, received)


class Collective:
    """Communication among the replicas that run the same program. Arguments are bundles: one call, one exchange.

    The methods are those of one replica, `gradcombine.LOCAL`, which gets back what it sends.
    """

    framework: str | None = None
    """The framework whose arrays it exchanges; None: any."""

    def __repr__(self) -> str:
        return "LOCAL"

    def size(self) -> int:
        """The number of replicas."""
        return 1

    def rank(self) -> Array:
        """This replica's number, from 0."""
        return np.int32(0)

    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        """The elementwise sum over replicas, in an order that the framework chooses."""
        return list(arrays)

    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        """The elementwise maximum over replicas, of int8 arrays."""
        return list(arrays)

    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        """The replicas' arrays, stacked by rank along a new first axis."""
        return [array[None] for array in arrays]

    def of_each_rank(self, arrays: Sequence[Array]) -> Iterator[list[Array]]:
        """The arrays of each replica in turn, after one exchange."""
        gathered = self.all_gather(arrays)
        return ([stack[rank] for stack in gathered] for rank in range(self.size()))

    def narrow_ways(self) -> tuple[str, ...]:
        """How leaves may be sent as codes, in flat arrays: ``"gathered"``, or also in ``"parts"`` by `all_to_all`."""
        return ()

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        """Of arrays with one row per replica: this replica's rows of all replicas' arrays, by rank."""
        return list(arrays)

    def reduce_scatter_map(
        self,
        function: Callable[[Sequence[Array], Sequence[Array]], list[Array]],
        summed: Sequence[Array],
        common: Sequence[Array],
    ) -> list[Array]:
        """``function(sums over replicas of summed, common)``; where it can be, computed by each replica for a part.

        The function is elementwise, and has one result for each array of ``common``, which are the same on all
        replicas: of its shape. It must not depend on the order of sums, as those of integers do not.
        """
        return function(self.all_sum(summed), common)

    def mark_varying(self, arrays: Sequence[Array]) -> list[Array]:
        """Marks arrays as each replica's own, where the framework keeps account of that."""
        return list(arrays)

    def require_unreduced(self, paths: Sequence[str], leaves: Sequence[Array]) -> None:
        """Raises where a leaf is known to be combined over the replicas already."""
