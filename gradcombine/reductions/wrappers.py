"""Wrappers that transform contributions: `checked`, `zeroed`, `clipped` and `sparse_as_dense`."""

from __future__ import annotations

from functools import reduce

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import dtype_of, is_absent, resolve
from gradcombine.errors import invalid, operation
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import OnContributions, Reduction, Wrapper
from gradcombine.reductions.numbered import without_numbers
from gradcombine.reductions.weights import EXPECTED, parse, scaled, where
from gradcombine.settings import valid
from gradcombine.sparse import densify, is_row_sparse, row_slices
from gradcombine.types import Array, Leaf, Scalar, State, Tree


@operation("checked")
def checked(reduction: Reduction) -> Reduction:
    """Checks traced weights at run time.

    Outside of compiled code weights are always checked. Inside, this adds a run-time check of the framework for a
    weight that is NaN, infinite or negative. Under jax.jit, the function must be wrapped in
    jax.experimental.checkify.checkify, whose error reports it; in tf.function it raises
    tf.errors.InvalidArgumentError (XLA drops assertions).

    Args:
      reduction: any reduction.

    Returns:
      A reduction with the same states, values and bits.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.checked(gc.reductions.sum()), [np.float32([1, 2])], weights=[2])
    array([2., 4.], dtype=float32)
    """
    return Checked(reduction)


class Checked(OnContributions):
    """See `checked`."""

    def changed(self, value: Tree, weight: Scalar) -> tuple[Tree, Scalar]:
        leaves, _ = tree.flatten(value)
        backend = resolve([*leaves, weight])
        unusable = parse(backend, weight).invalid
        if unusable is not None:
            backend.check(~unusable, self.name, EXPECTED, "a negative weight, infinity or NaN")
        return value, weight


@operation("zeroed")
def zeroed(reduction: Reduction) -> Reduction:
    """Gives weight 0 to a contribution that has a NaN or infinity in any leaf.

    As loss scaling skips steps whose gradients overflow, but for single contributions: for a tree of a list, or the
    tree of a replica. All leaves of the contribution are skipped, even finite ones, and a mean divides by the sum of
    the weights of the others.

    Args:
      reduction: any reduction of arrays.

    Returns:
      A reduction with the same states. Its derivative with respect to a skipped contribution is 0.

    Bits: those of the reduction with weight 0 for the skipped contributions.

    >>> import numpy as np, gradcombine as gc
    >>> grads = [np.float32([1, 2]), np.float32([np.inf, 0]), np.float32([3, 4])]
    >>> gc.combine(gc.reductions.zeroed(gc.reductions.mean()), grads)
    array([2., 3.], dtype=float32)
    """
    return Zeroed(reduction)


class Zeroed(OnContributions):
    """See `zeroed`."""

    def changed(self, value: Tree, weight: Scalar) -> tuple[Tree, Scalar]:
        leaves, structure = tree.flatten(value)
        backend = resolve([*leaves, weight])
        # Other sparse containers than tf.IndexedSlices are flattened.
        slices = [None if is_absent(x) else row_slices(x) for x in leaves]
        values = [x if rows is None else rows.values for x, rows in zip(leaves, slices, strict=True)]
        arrays = [x if is_absent(x) else backend.asarray(x) for x in values]

        def is_inexact(x: Leaf) -> bool:
            return not is_absent(x) and dtypes.kind(backend.dtype(x)) in ("float", "complex")

        def is_finite(x: Array) -> Array:
            # x - x is 0 for finite x, and NaN for NaN and infinities.
            x = backend.cast(x, dtypes.working(backend.dtype(x)))
            return backend.total(backend.add(x, -x)) == backend.full((), 0, backend.dtype(x))

        inexact = [x for x in arrays if is_inexact(x)]
        if not inexact:
            return value, weight
        finite = reduce(lambda a, b: a & b, map(is_finite, inexact))
        if backend.concrete(finite) is not None and bool(finite):
            return value, weight

        wide, changed = any(dtypes.is_wide(backend.dtype(x)) for x in inexact), list(leaves)
        for i, (x, rows, leaf) in enumerate(zip(arrays, slices, leaves, strict=True)):
            if is_inexact(x):  # integers are kept, such as the index of a microbatch
                # A weight of 0 alone would make derivatives NaN.
                x = backend.where(finite, x, backend.full((), 0, backend.dtype(x)))
                changed[i] = x if rows is None else type(leaf)(x, leaf.indices, leaf.dense_shape)
        return tree.unflatten(structure, changed), where(backend, finite, weight, wide)


def zeroed_weight(reduction: Reduction, value: Tree, weight: Scalar) -> Scalar:
    """The weight of a contribution that is not numbered yet: 0 if a `zeroed` among the wrappers skips it."""
    reduction, changes = without_numbers(reduction), list[OnContributions]()
    while isinstance(reduction, Wrapper):
        if isinstance(reduction, OnContributions):
            changes.append(reduction)
        reduction = reduction.of
    if any(isinstance(x, Zeroed) for x in changes):
        for wrapper in changes:  # a wrapper around it may change whether the contribution is finite
            value, weight = wrapper.changed(value, weight)
    return weight


@operation("clipped")
def clipped(reduction: Reduction, max_norm: float) -> Reduction:
    """Clips each contribution by its global norm: ``g * min(1, max_norm / |g|)``.

    Clips single contributions (a tree of a list, or the tree of a replica) before they are weighted, as for
    differentially private means and against outliers. Clips the value of a `Numbered` contribution and the numerator of
    a `Ratio`. To clip the gradient of a window instead, clip the result.

    Args:
      reduction: any reduction of dense float leaves.
      max_norm: the largest norm of a contribution, positive and finite.

    Returns:
      A reduction with the same states. A contribution whose norm is NaN or infinite (also by overflow of the squares)
      has no direction: all its elements and their derivatives become NaN. `zeroed` inside of this wrapper skips it;
      around it, `zeroed` skips what has a NaN or infinity itself, and the derivative with respect to it is 0.

    Raises:
      GradCombineError: for a ``max_norm`` that is not positive and finite; in ``update`` for leaves that are not
        floats.

    Bits: a contribution that is not clipped keeps its bits. Squares are added in an order that the framework chooses,
    in at least float32, so the relative error of the norm of n elements, and of a clipped element, is at most
    ``(n / 2 + 3) u``, with u = 2**-24 in float32; narrower leaves are rounded once more.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.clipped(gc.reductions.mean(), 5), [np.float32([3, 4]), np.float32([30, 40])])
    array([3., 4.], dtype=float32)
    """
    return Clipped(reduction, valid("max_norm", max_norm))


class Clipped(OnContributions):
    """See `clipped`."""

    def __init__(self, of: Reduction, max_norm: float) -> None:
        super().__init__(of, max_norm=max_norm)
        self.max_norm = max_norm

    @operation("clipped")
    def changed(self, value: Tree, weight: Scalar) -> tuple[Tree, Scalar]:
        gradients, rebuild = self.gradients(value)
        backend = resolve([*tree.flatten(gradients)[0], weight])
        norm = global_norm(backend, gradients)
        dtype = backend.dtype(norm)
        one, most = (backend.full((), x, dtype) for x in (1, min(self.max_norm, float(np.finfo(dtype).max))))
        finite = backend.add(norm, -norm) == backend.full((), 0, dtype)
        # Never divides by 0, as the derivative would be NaN.
        exceeds = norm > most
        factor = backend.where(exceeds, backend.divide(most, backend.where(exceeds, norm, one)), one)
        # NaN as a NumPy scalar: jax_debug_nans raises for a new array that is NaN.
        factor = backend.where(finite, factor, dtype.type(np.nan))

        def clip(leaf: Leaf) -> Leaf:
            if is_absent(leaf):
                return leaf
            x = backend.asarray(leaf)
            leaf_dtype = backend.dtype(x)
            leaf_factor = backend.cast(factor, dtypes.working(leaf_dtype))
            return backend.cast(scaled(backend, x, leaf_factor, leaf_dtype), leaf_dtype)

        return rebuild(tree.map(clip, gradients)), weight


def global_norm(backend: Backend, gradients: Tree) -> Array:
    """``sqrt(sum of x**2)`` over all leaves, in `norm_dtype`."""
    dtype = norm_dtype(gradients)
    arrays = [backend.cast(backend.asarray(leaf), dtype) for _, leaf in tree.present(gradients)]
    zero, one = (backend.full((), x, dtype) for x in (0, 1))
    squares = reduce(backend.add, (backend.total(backend.product(x, x)) for x in arrays), zero)
    # Avoids the infinite derivative of sqrt at 0; that of the norm is defined as 0.
    is_zero = squares == zero
    return backend.where(is_zero, zero, backend.sqrt(backend.where(is_zero, one, squares)))


def norm_dtype(gradients: Tree) -> np.dtype:
    """The widest dtype of the leaves or specs, at least float32; raises for a leaf that is not a float."""
    dtype = dtypes.FLOAT32
    for path, leaf in tree.present(gradients):
        leaf_dtype = dtype_of(leaf)
        if dtypes.kind(leaf_dtype) != "float":
            raise invalid("float leaves, for a global norm", leaf_dtype, path)
        dtype = max(dtype, leaf_dtype, key=lambda dtype: dtype.itemsize)
    return dtype


@operation("sparse_as_dense")
def sparse_as_dense(reduction: Reduction) -> Reduction:
    """Converts row-sparse contributions to dense arrays before they are combined.

    For sums of sparse and dense contributions, and for so many rows that a dense state is smaller. The result is dense,
    like that of tf.AggregationMethod for mixed terms.

    Args:
      reduction: any reduction of arrays.

    Returns:
      A reduction with the same states, whose ``init`` and ``update`` convert `gradcombine.sparse.RowSparse`,
      tf.IndexedSlices and BCOO leaves.

    Bits: those of the reduction over `gradcombine.sparse.to_dense` of the contributions.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> mean = gc.reductions.sparse_as_dense(gc.reductions.mean())
    >>> acc = gc.accumulate(mean, every=2)
    >>> state = acc.init(np.zeros((2, 1), np.float32))
    >>> state = acc.update(sparse.row_sparse(np.int32([1, 1]), np.float32([[4], [2]]), rows=2), state)
    >>> state = acc.update(np.float32([[1], [2]]), state)
    >>> acc.value(state)
    array([[0.5],
           [4. ]], dtype=float32)
    """
    return SparseAsDense(reduction)


class SparseAsDense(OnContributions):
    """See `sparse_as_dense`."""

    call = "sparse_as_dense"

    def init(self, like: Tree) -> State:
        return self.of.init(tree.map(_dense_like, like, is_leaf=is_row_sparse))

    def changed(self, value: Tree, weight: Scalar) -> tuple[Tree, Scalar]:
        return densify(value), weight


def _dense_like(leaf: Leaf) -> Leaf:
    """Dense zeros for a row-sparse leaf of arrays or specs; other leaves unchanged."""
    slices = row_slices(leaf)
    if slices is None:
        return leaf
    if slices.rows is None:
        raise invalid("a known number of rows", "a dense_shape that is not static")
    backend = resolve([slices.values])
    shape = (slices.rows, *backend.shape(slices.values)[1:])
    return backend.full(shape, 0, backend.dtype(slices.values), [slices.values])
