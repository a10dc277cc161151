"""A reduction that refuses bad weights at run time."""

from __future__ import annotations

from typing import Any

from gradcombine import tree
from gradcombine.autograph import no_autograph
from gradcombine.backends.registry import resolve
from gradcombine.reductions.algebra import Reduction, on_contributions, require_reduction
from gradcombine.reductions.weights import EXPECTED, parse
from gradcombine.types import Tree


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
