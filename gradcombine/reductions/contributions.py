"""Reductions of contributions that something happens to first: checked, zeroed, clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from numbers import Real
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import dtype_of, is_absent, resolve
from gradcombine.errors import GradCombineError, shown
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, Shortcuts, require_reduction
from gradcombine.reductions.weights import EXPECTED, parse, scaled, where
from gradcombine.types import Array, Order, State, Tree, no_autograph


def on_contributions(
    reduction: Reduction,
    transform: Callable[[Tree, Any], tuple[Tree, Any]],
    like: Callable[[Tree], Tree] = lambda like: like,
) -> Reduction:
    """The same reduction, of contributions that pass through a function first.

    Args:
      reduction: any reduction.
      transform: ``transform(value, weight) -> (value, weight)``, pure.
      like: what that makes of the shapes and dtypes for which a state is made.

    Returns:
      A reduction with the same states, merged and finalized as before.
    """

    @no_autograph
    def init(made_for: Tree) -> State:
        return reduction.init(like(made_for))

    @no_autograph
    def update(state: State, value: Tree, weight: Any = 1) -> State:
        return reduction.update(state, *transform(value, weight))

    @no_autograph
    def update_many(state: State | None, values: Sequence[Tree], weights: Sequence[Any], order: Order) -> State | None:
        assert reduction.update_many is not None
        changed, weighing = zip(*map(transform, values, weights), strict=True)
        return reduction.update_many(state, changed, weighing, order)

    @no_autograph
    def contribution(state: State, value: Tree, weight: Any) -> State:
        assert reduction.contribution is not None
        return reduction.contribution(state, *transform(value, weight))

    functions = init, update, reduction.merge, reduction.finalize
    alone = None if reduction.contribution is None else contribution
    many = None if reduction.update_many is None else update_many
    derivative = None if reduction.derivative is None else on_contributions(reduction.derivative, transform, like)
    shortcuts = Shortcuts(
        functions, reduction.clear, reduction.all_merge, many, contribution=alone, derivative=derivative
    )
    return replace(reduction, init=init, update=update, shortcuts=shortcuts)


@no_autograph
def checked(reduction: Reduction) -> Reduction:
    """The same reduction, which also checks weights whose value is not known while tracing.

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
    require_reduction("checked", reduction)

    @no_autograph
    def weighed(value: Tree, weight: Any) -> tuple[Tree, Any]:
        leaves, _ = tree.flatten(reduction.name, value)
        backend = resolve(reduction.name, [*leaves, weight])
        parsed = parse(reduction.name, backend, weight)
        if parsed.known is None:
            zero = backend.full((), 0, backend.dtype(parsed.array))
            # x - x is 0 for every finite x, and NaN for NaN and the infinities.
            finite = parsed.array - parsed.array == zero
            backend.check((parsed.array >= zero) & finite, reduction.name, EXPECTED, "one that is not")
        return value, weight

    return on_contributions(reduction, weighed)


@no_autograph
def zeroed(reduction: Reduction) -> Reduction:
    """The same reduction, in which a contribution that holds NaN or infinity anywhere has weight 0.

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
    require_reduction("zeroed", reduction)

    @no_autograph
    def left_out(value: Tree, weight: Any) -> tuple[Tree, Any]:
        leaves, structure = tree.flatten(reduction.name, value)
        backend = resolve(reduction.name, [*leaves, weight])
        arrays = [x if is_absent(x) else backend.asarray(x) for x in leaves]

        def is_finite(x: Array) -> Array:
            # x - x is 0 for every finite x, and NaN for NaN and the infinities.
            x = backend.cast(x, dtypes.working(backend.dtype(x)))
            return backend.total(backend.add(x, -x)) == backend.full((), 0, backend.dtype(x))

        inexact = [x for x in arrays if not is_absent(x) and dtypes.kind(backend.dtype(x)) in ("float", "complex")]
        if not inexact:
            return value, weight
        finite = reduce(lambda a, b: a & b, map(is_finite, inexact))
        if backend.concrete(finite) is not None and bool(finite):
            return value, weight

        def kept(x: Any) -> Any:
            # What is masked by its weight alone would make derivatives NaN.
            return x if is_absent(x) else backend.where(finite, x, backend.full((), 0, backend.dtype(x)))

        wide = any(dtypes.part(backend.dtype(x)).itemsize > 4 for x in inexact)
        return tree.unflatten(structure, map(kept, arrays)), where(reduction.name, backend, finite, weight, wide)

    return on_contributions(reduction, left_out)


@no_autograph
def clipped(reduction: Reduction, max_norm: float) -> Reduction:
    """The same reduction, of contributions none of which is longer than ``max_norm``: ``g * min(1, max_norm / |g|)``.

    What is clipped is one contribution at a time (in a list one tree, over replicas that of each replica), by the norm
    over all its leaves together, before it is weighted: as for differentially private means, and against outliers. To
    clip what a window has become, clip the result.

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
    require_reduction("clipped", reduction)
    if not isinstance(max_norm, Real) or not 0 < float(max_norm) < np.inf:
        raise GradCombineError("clipped", "a positive and finite max_norm", shown(max_norm))

    @no_autograph
    def shortened(value: Tree, weight: Any) -> tuple[Tree, Any]:
        leaves, structure = tree.flatten(reduction.name, value)
        backend = resolve(reduction.name, [*leaves, weight])
        norm = global_norm("clipped", backend, leaves, structure)
        dtype = backend.dtype(norm)
        one, most = (backend.full((), x, dtype) for x in (1, float(max_norm)))
        finite = backend.add(norm, -norm) == backend.full((), 0, dtype)
        # Divided by no 0, of which the derivative would be NaN. No array: JAX looks for NaN where one is made.
        long = norm > most
        factor = backend.where(long, backend.divide(most, backend.where(long, norm, one)), one)
        factor = backend.where(finite, factor, dtype.type(np.nan))

        def short(leaf: Any) -> Any:
            if is_absent(leaf):
                return leaf
            x = backend.asarray(leaf)
            leaf_dtype = backend.dtype(x)
            return backend.cast(
                scaled(backend, x, backend.cast(factor, dtypes.working(leaf_dtype)), leaf_dtype), leaf_dtype
            )

        return tree.unflatten(structure, map(short, leaves)), weight

    return on_contributions(reduction, shortened)


def global_norm(operation: str, backend: Backend, leaves: list[Any], structure: tree.Structure) -> Array:
    """``sqrt(sum of x**2)`` over all leaves, in the widest of their dtypes and at least float32.

    Raises:
      GradCombineError: for a leaf that is not a float.
    """
    dtype = norm_dtype(operation, leaves, structure)
    arrays = [backend.cast(backend.asarray(leaf), dtype) for leaf in leaves if not is_absent(leaf)]
    zero, one = (backend.full((), x, dtype) for x in (0, 1))
    squares = reduce(backend.add, (backend.total(backend.product(x, x)) for x in arrays), zero)
    # The derivative of the root is infinite at 0, where that of the norm is taken to be 0.
    none = squares == zero
    return backend.where(none, zero, backend.sqrt(backend.where(none, one, squares)))


def norm_dtype(operation: str, leaves: list[Any], structure: tree.Structure) -> np.dtype:
    """The dtype of `global_norm`, for leaves that may be specs."""
    dtype = dtypes.FLOAT32
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        if is_absent(leaf):
            continue
        leaf_dtype = dtype_of(leaf)
        if dtypes.kind(leaf_dtype) != "float":
            raise GradCombineError(operation, "float leaves, of which alone there is a norm here", leaf_dtype, path)
        dtype = max(dtype, leaf_dtype, key=lambda dtype: dtype.itemsize)
    return dtype
