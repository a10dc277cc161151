"""The sum ``sum(w * g)`` and the mean ``sum(w * g) / sum(w)``, in three precisions."""

from __future__ import annotations

from gradcombine.errors import invalid, operation, require_integer, shown
from gradcombine.reductions import dtypes
from gradcombine.reductions.adding import Added, Compensated
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.exact.digits import FLOAT32, SPILLED_CAPACITY
from gradcombine.reductions.exact.exact_cell import Exact
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.settings import check
from gradcombine.types import DType, Precision
from gradcombine.wires.wire import Wire


class SumState(TreewiseState):
    """Sums of ``w * g``."""


class CompensatedSumState(TreewiseState):
    """Compensated sums of ``w * g``, as pairs."""


class ExactSumState(TreewiseState):
    """Exact sums of ``w * g``, in fixed-point digits."""


class MeanState(TreewiseState):
    """Sums of ``w * g``, before the division."""


class CompensatedMeanState(TreewiseState):
    """Compensated sums of ``w * g``, as pairs, before the division."""


class ExactMeanState(TreewiseState):
    """Exact sums of ``w * g``, in fixed-point digits, before the division."""


@operation("sum")
def sum(
    precision: Precision = "fast",
    dtype: DType = None,
    *,
    output_dtype: DType = None,
    wire: Wire | None = None,
    max_terms: int = 4096,
) -> Reduction:
    """The weighted sum ``w_1 g_1 + w_2 g_2 + ...``.

    Args:
      precision: ``"fast"``: a running value in the accumulator dtype, rounded at each addition. ``"compensated"``: a
        pair of the running value and its rounding errors; float and complex leaves. ``"exact"``: a fixed-point integer
        that is rounded once, at the end; float leaves.
      dtype: the accumulator dtype. None: that of the contributions, but float32 for narrower floats and 32 bits for
        narrower integers.
      output_dtype: the dtype of the result. None: that of the contributions; for integers, that of the accumulator.
      wire: the compression of partial sums between replicas, for float leaves: `gradcombine.wires.cast` or
        `gradcombine.wires.blocks`, which send fewer bits and add in float32. Derivatives ignore it. None: none.
      max_terms: the number of terms of an exact sum: one per contribution, and one for each further 24 bits of a weight
        of an integer type (two for a 32-bit integer array). Float32 elements take 12 bytes for up to 4096 terms, else
        24 bytes for up to 2**26; float64 elements always allow 2**26. The result of more terms is NaN.

    Returns:
      A reduction of float, complex and integer leaves; integer leaves require integer weights. Without contributions
      the result is 0.

    Bits: determined by the contributions and their order, on every backend, eager and compiled, unless a value is
    subnormal. Products with a weight are rounded once, and never fused with the addition. Order ``"tree"`` does not
    depend on how the contributions are split over time and replicas. An all-reduce in order ``"sequential"`` adds in an
    order that the framework chooses, and may lose the sign of a zero. Integer sums are exact, modulo the dtype's width.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.sum(), [np.float32([1, 2]), np.float32([3, 4])], weights=[1, 10])
    array([31., 42.], dtype=float32)
    """
    return _sum_or_mean("sum", precision, dtype, output_dtype, wire, max_terms)


@operation("mean")
def mean(
    precision: Precision = "fast",
    dtype: DType = None,
    *,
    output_dtype: DType = None,
    wire: Wire | None = None,
    max_terms: int = 4096,
) -> Reduction:
    """The weighted mean ``(w_1 g_1 + w_2 g_2 + ...) / (w_1 + w_2 + ...)``, divided once, after all merging.

    If the weight of a microbatch is its number of tokens (or examples), the mean of the mean gradients per token over
    microbatches and replicas is the gradient of the full batch. The unweighted mean is not if the numbers differ.

    The sum of weights has the widest dtype of the contributions, but at least float32. It is exact for integers up to
    2**24; other weights are rounded at each addition unless the precision is ``"exact"``, whatever ``dtype`` is: with
    ``"compensated"`` or float64, use integers, such as numbers of tokens, where the last digits matter.

    Args:
      precision, dtype, output_dtype, wire, max_terms: as for `gradcombine.reductions.sum`.

    Returns:
      A reduction of float and complex leaves; integer leaves are an error. Without contributions the result is 0. It is
      NaN if the sum of weights (for precision ``"exact"``: a weight) overflows the accumulator, and if a traced weight
      is negative, infinite or NaN.

    Bits: as for `gradcombine.reductions.sum`, and the quotient is correctly rounded on CPU (not by XLA on GPU).

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.mean(), [np.float32([1, 2]), np.float32([4, 5])], weights=[3, 1])
    array([1.75, 2.75], dtype=float32)
    """
    return _sum_or_mean("mean", precision, dtype, output_dtype, wire, max_terms)


_STATES: dict[str, dict[Precision, type[TreewiseState]]] = {
    "sum": {"fast": SumState, "compensated": CompensatedSumState, "exact": ExactSumState},
    "mean": {"fast": MeanState, "compensated": CompensatedMeanState, "exact": ExactMeanState},
}


def _sum_or_mean(
    name: str, precision: Precision, dtype: DType, output_dtype: DType, wire: Wire | None, max_terms: int
) -> Reduction:
    check(precision=precision)
    settings, state, divides = dtypes.Settings(dtype, output_dtype), _STATES[name][precision], name == "mean"
    flags = {"scales_by_weight": divides, "divides": divides}
    if precision == "compensated":
        cell = Compensated(name, settings, divides)
        return Treewise(cell, state, wire=wire, **flags, precision=precision)
    if precision == "exact":
        if dtype is not None or wire is not None:
            received = wire if dtype is None else dtype
            raise invalid("no dtype and no wire for precision 'exact'", shown(received))
        terms = require_integer(f"max_terms from 1 to {SPILLED_CAPACITY}", max_terms, highest=SPILLED_CAPACITY)
        spills = terms > FLOAT32.capacity
        cell, room = Exact(name, settings, divides, spills), SPILLED_CAPACITY if spills else None
        derivative = _sum_or_mean(name, "fast", None, output_dtype, None, max_terms)
        return Treewise(cell, state, derivative=derivative, **flags, precision=precision, max_terms=room)
    kinds = ("float", "complex") if divides else dtypes.NUMERIC
    return Treewise(Added(name, kinds, divides, settings), state, wire=wire, **flags)
