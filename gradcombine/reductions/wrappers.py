"""Reductions made of another one: checked, zeroed, clipped, made dense, and measured."""

from __future__ import annotations

from functools import reduce

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import dtype_of, is_absent, resolve
from gradcombine.errors import invalid, operation
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import OnContributions, Reduction, described
from gradcombine.reductions.weights import EXPECTED, parse, scaled, where
from gradcombine.settings import check, valid
from gradcombine.sparse import densify, is_row_sparse, row_slices
from gradcombine.types import Array, Leaf, Scalar, State, Tree


@operation("checked")
def checked(reduction: Reduction) -> Reduction:
    """Checks weights whose value is not known while tracing, at run time.

    Outside of compiled code weights are always checked. Inside, this adds the framework's own run-time check for a
    weight that is NaN, infinite or negative: under jax.jit the function has to be wrapped by
    jax.experimental.checkify.checkify, whose error then reports it; in tf.function it raises
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
        parsed = parse(backend, weight)
        if parsed.known is None:
            zero = backend.full((), 0, backend.dtype(parsed.array))
            # x - x is 0 for every finite x, and NaN for NaN and the infinities.
            finite = parsed.array - parsed.array == zero
            backend.check((parsed.array >= zero) & finite, self.name, EXPECTED, "one that is not")
        return value, weight


@operation("zeroed")
def zeroed(reduction: Reduction) -> Reduction:
    """Gives a contribution that holds NaN or infinity anywhere the weight 0.

    As loss scaling skips a step whose gradients have overflowed, but a contribution at a time: in a list one tree, over
    replicas that of each replica. All leaves of the contribution are left out, the finite ones too, so that a mean
    divides by what was counted.

    Args:
      reduction: any reduction of arrays.

    Returns:
      A reduction with the same states. Its derivative with respect to what is left out is 0.

    Bits: those of the reduction over the finite contributions alone, with the others in their places at weight 0.

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
        arrays = [x if is_absent(x) else backend.asarray(x) for x in leaves]

        def is_inexact(x: Leaf) -> bool:
            return not is_absent(x) and dtypes.kind(backend.dtype(x)) in ("float", "complex")

        def is_finite(x: Array) -> Array:
            # x - x is 0 for every finite x, and NaN for NaN and the infinities.
            x = backend.cast(x, dtypes.working(backend.dtype(x)))
            return backend.total(backend.add(x, -x)) == backend.full((), 0, backend.dtype(x))

        inexact = [x for x in arrays if is_inexact(x)]
        if not inexact:
            return value, weight
        finite = reduce(lambda a, b: a & b, map(is_finite, inexact))
        if backend.concrete(finite) is not None and bool(finite):
            return value, weight

        def kept(x: Leaf) -> Leaf:
            # What is masked by its weight alone would make derivatives NaN. Integers stay, as a microbatch's number.
            return backend.where(finite, x, backend.full((), 0, backend.dtype(x))) if is_inexact(x) else x

        wide = any(dtypes.is_wide(backend.dtype(x)) for x in inexact)
        return tree.unflatten(structure, map(kept, arrays)), where(backend, finite, weight, wide)


@operation("clipped")
def clipped(reduction: Reduction, max_norm: float) -> Reduction:
    """Clips each contribution by its global norm: ``g * min(1, max_norm / |g|)``.

    What is clipped is one contribution at a time (in a list one tree, over replicas that of each replica), by the norm
    over all its leaves together, before it is weighted: as for differentially private means, and against outliers. Of a
    `Numbered` contribution that is its value, of a `Ratio` its numerator. To clip what a window has become, clip the
    result.

    Args:
      reduction: any reduction of float leaves.
      max_norm: the longest that a contribution stays as it is, a positive number.

    Returns:
      A reduction with the same states. A contribution whose norm is NaN or infinite, as where squares overflow, becomes
      NaN in every element, and so does its derivative: it has no direction. `zeroed`, inside or outside, leaves it out;
      outside, the derivative with respect to it is 0.

    Raises:
      GradCombineError: for a ``max_norm`` that is not positive and finite; in ``update`` for leaves that are no floats.

    Bits: a contribution that is not too long keeps its own. The squares are added in the order that the framework
    chooses, in float32 at least, so the norm of n elements, and with it a clipped element, is off by at most a relative
    ``(n / 2 + 3) u``, with u = 2**-24 in float32; a narrower leaf is then rounded once more.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.clipped(gc.reductions.mean(), 5), [np.float32([3, 4]), np.float32([30, 40])])
    array([3., 4.], dtype=float32)
    """
    check(reduction=reduction)
    return Clipped(reduction, valid("max_norm", max_norm))


class Clipped(OnContributions):
    """See `clipped`."""

    def __init__(self, of: Reduction, max_norm: float) -> None:
        super().__init__(of)
        self.max_norm = max_norm

    def around(self, of: Reduction) -> Reduction:
        return Clipped(of, self.max_norm)

    @property
    def description(self) -> str:
        return described("clipped", self.of.description, max_norm=self.max_norm)

    @operation("clipped")
    def changed(self, value: Tree, weight: Scalar) -> tuple[Tree, Scalar]:
        gradients, rebuild = self.gradients(value)
        leaves, structure = tree.flatten(gradients)
        backend = resolve([*leaves, weight])
        norm = global_norm(backend, leaves, structure)
        dtype = backend.dtype(norm)
        one, most = (backend.full((), x, dtype) for x in (1, self.max_norm))
        finite = backend.add(norm, -norm) == backend.full((), 0, dtype)
        # Divided by no 0, of which the derivative would be NaN. No array: JAX looks for NaN where one is made.
        long = norm > most
        factor = backend.where(long, backend.divide(most, backend.where(long, norm, one)), one)
        factor = backend.where(finite, factor, dtype.type(np.nan))

        def short(leaf: Leaf) -> Leaf:
            if is_absent(leaf):
                return leaf
            x = backend.asarray(leaf)
            leaf_dtype = backend.dtype(x)
            return backend.cast(
                scaled(backend, x, backend.cast(factor, dtypes.working(leaf_dtype)), leaf_dtype), leaf_dtype
            )

        return rebuild(tree.unflatten(structure, map(short, leaves))), weight


def global_norm(backend: Backend, leaves: list[Leaf], structure: tree.Structure) -> Array:
    """``sqrt(sum of x**2)`` over all leaves, in the widest of their dtypes and at least float32.

    Raises:
      GradCombineError: for a leaf that is not a float.
    """
    dtype = norm_dtype(leaves, structure)
    arrays = [backend.cast(backend.asarray(leaf), dtype) for leaf in leaves if not is_absent(leaf)]
    zero, one = (backend.full((), x, dtype) for x in (0, 1))
    squares = reduce(backend.add, (backend.total(backend.product(x, x)) for x in arrays), zero)
    # The derivative of the root is infinite at 0, where that of the norm is taken to be 0.
    none = squares == zero
    return backend.where(none, zero, backend.sqrt(backend.where(none, one, squares)))


def norm_dtype(leaves: list[Leaf], structure: tree.Structure) -> np.dtype:
    """The dtype of `global_norm`, for leaves that may be specs."""
    dtype = dtypes.FLOAT32
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        if is_absent(leaf):
            continue
        leaf_dtype = dtype_of(leaf)
        if dtypes.kind(leaf_dtype) != "float":
            raise invalid("float leaves, the only ones with a norm here", leaf_dtype, path)
        dtype = max(dtype, leaf_dtype, key=lambda dtype: dtype.itemsize)
    return dtype


@operation("sparse_as_dense")
def sparse_as_dense(reduction: Reduction) -> Reduction:
    """Makes row-sparse contributions dense before they are combined.

    For sums of sparse and dense contributions, and where so many rows occur that a dense state is smaller. The result
    is dense, as that of tf.AggregationMethod is for mixed terms.

    Args:
      reduction: any reduction of arrays.

    Returns:
      A reduction with the same states, whose ``init`` and ``update`` make every `gradcombine.sparse.RowSparse`,
      tf.IndexedSlices and BCOO dense.

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

    @property
    def description(self) -> str:
        return described("sparse_as_dense", self.of.description)

    @operation()
    def init(self, like: Tree) -> State:
        leaves, structure = tree.flatten(like, is_row_sparse)
        return self.of.init(tree.unflatten(structure, map(_whole, leaves)))

    def changed(self, value: Tree, weight: Scalar) -> tuple[Tree, Scalar]:
        return densify(value), weight


def _whole(leaf: Leaf) -> Leaf:
    """A dense array like a row-sparse one, which may be of specs; any other leaf itself."""
    slices = row_slices(leaf)
    if slices is None:
        return leaf
    if slices.rows is None:
        raise invalid("a known number of rows", "a dense_shape that is not static")
    backend = resolve([slices.values])
    shape = (slices.rows, *backend.shape(slices.values)[1:])
    return backend.full(shape, 0, backend.dtype(slices.values), [slices.values])
