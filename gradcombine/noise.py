"""The gradient noise scale, which estimates the largest useful batch size."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import invalid, operation, within
from gradcombine.reductions import dtypes
from gradcombine.types import Array, Tree

__all__ = ["noise_scale", "squared_norm"]

_FLOATING = ("float", "complex")


class NoiseScale(NamedTuple):
    """The gradient noise scale of a window, as scalars.

    Attributes:
      scale: ``trace / squared_norm``, in examples (the unit of the weights): the batch size at which the noise in the
        mean gradient is as large as the gradient.
      trace: the trace of the covariance of one example's gradient.
      squared_norm: the squared norm of the true gradient.
    """

    scale: Array
    trace: Array
    squared_norm: Array


@operation("squared_norm")
def squared_norm(value: Tree) -> Array:
    """The sum of the squared magnitudes of all elements, ``|g|**2``.

    Args:
      value: a tree of float and complex leaves. None is "no gradient" and adds nothing.

    Returns:
      A scalar of float32, or of float64 if a leaf is float64 or complex128. Narrower leaves are squared in float32.

    Raises:
      GradCombineError: for a leaf of integers.

    Bits: not guaranteed, unless all additions are exact: the framework chooses the order of additions within a leaf.

    >>> import numpy as np
    >>> float(squared_norm({"w": np.float32([1, 2]), "b": np.float32(2), "frozen": None}))
    9.0
    """
    leaves, structure = tree.flatten(value)
    backend = resolve(leaves)
    sums: list[Array] = []
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        if is_absent(leaf):
            continue
        with within(path):
            array = backend.asarray(leaf)
        if dtypes.kind(backend.dtype(array)) not in _FLOATING:
            raise invalid("a dtype that is float or complex", backend.dtype(array), path)
        magnitude = abs(array) if dtypes.kind(backend.dtype(array)) == "complex" else array
        magnitude = backend.cast(magnitude, dtypes.working(backend.dtype(magnitude)))
        sums.append(backend.total(backend.product(magnitude, magnitude)))
    widest = max((backend.dtype(x) for x in sums), key=lambda dtype: dtype.itemsize, default=dtypes.FLOAT32)
    return reduce(backend.add, (backend.cast(x, widest) for x in sums), backend.full((), 0, widest))


@operation("noise_scale")
def noise_scale(mean_square: Array, square_of_mean: Array, weight: Array, count: Array) -> NoiseScale:
    """Estimates the gradient noise scale ``tr(S) / |G|**2`` from gradients of microbatches of any sizes.

    The gradient g_i of b_i examples has mean G and covariance S / b_i. With B = sum(b_i) and the weighted mean
    g = sum(b_i g_i) / B, this gives ``E[sum(b_i |g_i|**2) / B] = |G|**2 + n tr(S) / B`` and
    ``E[|g|**2] = |G|**2 + tr(S) / B``. Solving for the two unknowns yields unbiased estimates::

        tr(S)  = B (sum(b_i |g_i|**2) / B - |g|**2) / (n - 1)
        |G|**2 = |g|**2 - tr(S) / B

    With equal sizes over n replicas this is the estimator of McCandlish et al., appendix A.1. It needs a few scalars
    besides the gradients, which can be reduced together with them, over a list, time and replicas, as in the example.

    Args:
      mean_square: scalar, the weighted mean of the contributions' `squared_norm`.
      square_of_mean: scalar, the `squared_norm` of the weighted mean gradient.
      weight: scalar, the sum of the weights: the number of examples.
      count: scalar, the number of contributions of nonzero weight.

    Returns:
      A `NoiseScale` of float32 scalars, or float64 if ``mean_square`` is: ``scale``, ``trace`` and ``squared_norm``.
      NaN for fewer than two contributions. The estimates are noisy, and ``squared_norm`` may be negative: average
      ``trace`` and ``squared_norm`` over many windows before dividing them. For the trace of each element, multiply the
      variance of `gradcombine.reductions.moments` by ``weight / (count - 1)``.

    Raises:
      GradCombineError: for an argument that is not a real scalar.

    Bits: determined by the four scalars, in every mode in which division is correctly rounded.

    References: S. McCandlish, J. Kaplan, D. Amodei et al., `An Empirical Model of Large-Batch Training
    <https://arxiv.org/abs/1812.06162>`_, 2018.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import reductions
    >>> mean, total = reductions.mean(), reductions.sum()
    >>> step = reductions.per_leaf({"grads": mean, "square": mean, "examples": total, "n": total})
    >>> def contribution(grads, examples):
    ...     return {"grads": grads, "square": squared_norm(grads), "examples": np.float32(examples), "n": np.int32(1)}
    >>> acc = gc.accumulate(step, every=3)
    >>> state = acc.init(contribution({"w": np.zeros(2, np.float32)}, 0))
    >>> for grads, examples in (([6, 3], 1), ([2, 1], 2), ([4, -1], 1)):
    ...     state = acc.update(contribution({"w": np.float32(grads)}, examples), state, weight=examples)
    >>> out = acc.value(gc.merge_replicas(step, state, over=gc.LOCAL))
    >>> noise = noise_scale(out["square"], squared_norm(out["grads"]), out["examples"], out["n"])
    >>> float(noise.trace), float(noise.squared_norm), round(float(noise.scale), 3)
    (9.5, 10.875, 0.874)
    """
    scalars = {"mean_square": mean_square, "square_of_mean": square_of_mean, "weight": weight, "count": count}
    backend = resolve(scalars.values())
    arrays = {name: backend.asarray(x) for name, x in scalars.items()}
    for name, x in arrays.items():
        if backend.shape(x) != () or dtypes.kind(backend.dtype(x)) not in ("float", "integer"):
            received = f"shape {backend.shape(x)} and dtype {backend.dtype(x)}"
            raise invalid(f"a real scalar as {name}", received)
    received = backend.dtype(arrays["mean_square"])
    dtype = received if received == np.float64 else dtypes.FLOAT32
    mean_of_squares, squared_mean, examples, n = (backend.cast(x, dtype) for x in arrays.values())
    one, nan = (backend.full((), fill, dtype) for fill in (1, np.nan))
    degrees = backend.where(n > one, backend.add(n, -one), nan)
    # The squared error of the mean gradient: tr(S) / B.
    error = backend.divide(backend.add(mean_of_squares, -squared_mean), degrees)
    trace = backend.scale(error, examples)
    signal = backend.add(squared_mean, -error)
    return NoiseScale(backend.divide(trace, signal), trace, signal)
