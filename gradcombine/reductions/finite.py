"""Reductions that leave out what is not finite."""

from __future__ import annotations

from functools import reduce
from typing import Any

from gradcombine import tree
from gradcombine.autograph import no_autograph
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, on_contributions, require_reduction
from gradcombine.reductions.weights import where
from gradcombine.types import Array, Tree


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
