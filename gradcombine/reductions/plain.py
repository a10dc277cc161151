"""Reductions whose accumulator is a single array: product, minimum, maximum, first and last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.errors import operation
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.cell import Cell, Totals
from gradcombine.reductions.exact.digits import grid_for
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array, DType, Leaf, Scalar
from gradcombine.wires.wire import Wire


@dataclass(frozen=True)
class Plain(Cell):
    """A cell whose accumulator is a single array, and whose contributions merge like accumulators.

    Attributes:
      identity: the value of an empty accumulator, by dtype.
      combine: ``combine(backend, a, b, a_empty, b_empty)``, which merges two accumulators.
    """

    name: str
    kinds: tuple[str, ...]
    identity: Callable[[np.dtype], Scalar]
    combine: Callable[[Backend, Array, Array, Array, Array], Array]
    settings: dtypes.Settings = dtypes.Settings()  # noqa: RUF009 (immutable)
    takes_indices: bool = False

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> Array:
        return backend.full(shape, self.identity(running), running, [like])

    def update(self, backend: Backend, a: Array, x: Array, weight: Weight, totals: Totals) -> Array:
        present = backend.full((), False, np.dtype(np.bool_))
        return self.combine(backend, a, backend.cast(x, backend.dtype(a)), totals.count == 0, present)

    def merge(self, backend: Backend, a: Array, b: Array, a_totals: Totals, b_totals: Totals) -> Array:
        return self.combine(backend, a, b, a_totals.count == 0, b_totals.count == 0)

    def finish(self, backend: Backend, a: Array, totals: Totals, output: np.dtype) -> Array:
        return backend.cast(a, output)


class ProductState(TreewiseState):
    """Products."""


@operation("product")
def product(dtype: DType = None, *, output_dtype: DType = None, wire: Wire | None = None) -> Reduction:
    """The product of all contributions of nonzero weight, whatever their weights are.

    Args:
      dtype, output_dtype, wire: as for `gradcombine.reductions.sum`.

    Returns:
      A reduction of float and integer leaves. Without contributions the result is 1.

    Bits: as for `gradcombine.reductions.sum`; replicas are always merged in the canonical tree over their ranks.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.product(), [np.float32([1, 2]), np.float32([3, 4])])
    array([3., 8.], dtype=float32)
    """
    cell = Plain("product", ("float", "integer"), _one, _multiply, dtypes.Settings(dtype, output_dtype))
    return Treewise(cell, ProductState, wire=wire)


def _one(dtype: np.dtype) -> int:
    return 1


def _multiply(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return backend.product(a, b)


class MaxState(TreewiseState):
    """Maxima."""


class MinState(TreewiseState):
    """Minima."""


@operation("max")
def max(*, output_dtype: DType = None) -> Reduction:
    """The elementwise maximum of all contributions of nonzero weight, for instance of FP8 amax values.

    Args:
      output_dtype: the dtype of the result. None: that of the contributions, but at least 32 bits for integers.

    Returns:
      A reduction of float and integer leaves. A NaN in any contribution gives NaN. Without contributions the result is
      -inf, or the smallest integer.

    Bits: those of one of the contributions, even if it is subnormal, for any order and grouping, in every mode; except
    that a zero is always +0, and that the payload of a NaN is undefined. If ``output_dtype`` casts between float64 and
    a narrower float, XLA and TensorFlow flush subnormal numbers.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.max(), [np.float32([1, 5]), np.float32([3, 4])])
    array([3., 5.], dtype=float32)
    """
    return Treewise(Plain("max", ("float", "integer"), _lowest, _larger, dtypes.Settings(None, output_dtype)), MaxState)


@operation("min")
def min(*, output_dtype: DType = None) -> Reduction:
    """The elementwise minimum; otherwise as `max`. Without contributions the result is +inf, or the largest integer.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.min(), [np.float32([1, 5]), np.float32([3, 4])])
    array([1., 4.], dtype=float32)
    """
    settings = dtypes.Settings(None, output_dtype)
    return Treewise(Plain("min", ("float", "integer"), _highest, _smaller, settings), MinState)


def _lowest(dtype: np.dtype) -> Scalar:
    return -np.inf if dtypes.kind(dtype) == "float" else ml_dtypes.iinfo(dtype).min


def _highest(dtype: np.dtype) -> Scalar:
    return np.inf if dtypes.kind(dtype) == "float" else ml_dtypes.iinfo(dtype).max


def _larger(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return _select(backend, a, b, lambda x, y: x > y)


def _smaller(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return _select(backend, a, b, lambda x, y: x < y)


def _select(backend: Backend, a: Array, b: Array, before: Callable[[Array, Array], Array]) -> Array:
    """``a`` if it is before ``b``, else ``b``; NaN if one is NaN, and +0 for zeros, so that it is commutative."""
    left, right = _sort_key(backend, a), _sort_key(backend, b)
    first = before(left, right)
    chosen = backend.where(first, a, b)
    if dtypes.kind(backend.dtype(chosen)) != "float":
        return chosen
    # Selects the key again, as compilers turn a comparison of the bits of `chosen` into one of floats, with subnormal
    # numbers equal to 0.
    zero = backend.where(first, left, right) == backend.full((), 0, backend.dtype(left))

    def with_positive_zero(zero: Array, x: Array) -> list[Array]:
        return [backend.where(zero, backend.full((), 0, backend.dtype(x)), x)]

    def identity(_: Array, x: Array) -> list[Array]:
        return [x]

    # Zeros pass the gradient through, too.
    (chosen,) = backend.custom_derivative(with_positive_zero, identity, [zero, chosen])
    return backend.where(a != a, a, backend.where(b != b, b, chosen))


def _sort_key(backend: Backend, x: Array) -> Array:
    """Integers in the order of the floats: XLA and TensorFlow compare subnormal floats as zeros.

    Integers and NumPy's long doubles, which other frameworks do not have, are their own keys.
    """
    dtype = backend.dtype(x)
    if dtypes.kind(dtype) != "float" or dtype.itemsize > 8:
        return x
    layout = grid_for(dtype)
    bits = backend.bitcast(x, layout.word)
    return backend.where(bits < 0, -(bits & layout.most), bits)


class FirstState(TreewiseState):
    """The first contribution so far."""


class LastState(TreewiseState):
    """The last contribution so far."""


@operation("first")
def first() -> Reduction:
    """The first contribution of nonzero weight; over replicas, that of the lowest rank.

    ``merge`` is associative but not commutative (nor is that of `last`): its first argument has the earlier
    contributions. Over replicas this is ONLY_FIRST_REPLICA of tf.VariableAggregation.

    Returns:
      A reduction of numeric and boolean leaves. Without contributions, and for a leaf that is None in the first one,
      the result is 0.

    Bits: those of the contribution, in every mode.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.first(), [np.float32([1, 5]), np.float32([3, 4])], weights=[0, 1])
    array([3., 4.], dtype=float32)
    """
    return Treewise(Plain("first", dtypes.KINDS, _zero, _earlier, takes_indices=True), FirstState)


@operation("last")
def last() -> Reduction:
    """The last contribution of nonzero weight; over replicas, that of the highest rank. Otherwise as `first`.

    A leaf that is None in a contribution keeps its value in ``update``; `merge` takes all leaves of the later state, 0
    where it has had none. So the result depends on the grouping if contributions have different leaves.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.last(), [np.float32([1, 5]), np.float32([3, 4])])
    array([3., 4.], dtype=float32)
    """
    return Treewise(Plain("last", dtypes.KINDS, _zero, _later, takes_indices=True), LastState)


def _zero(dtype: np.dtype) -> Scalar:
    return 0


def _earlier(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return backend.where(a_empty, b, a)


def _later(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return backend.where(b_empty, a, b)
