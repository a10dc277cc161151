"""The norm of a contribution, and reductions of contributions that are clipped by it."""

from __future__ import annotations

from functools import reduce
from numbers import Real
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.autograph import no_autograph
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, shown
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, on_contributions, require_reduction
from gradcombine.reductions.cell import dtype_of
from gradcombine.reductions.weights import scaled
from gradcombine.types import Array, Tree


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
            own = backend.dtype(x)
            return backend.cast(scaled(backend, x, backend.cast(factor, dtypes.working(own)), own), own)

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
        own = dtype_of(leaf)
        if dtypes.kind(own) != "float":
            raise GradCombineError(operation, "float leaves, of which alone there is a norm here", own, path)
        dtype = max(dtype, own, key=lambda dtype: dtype.itemsize)
    return dtype
