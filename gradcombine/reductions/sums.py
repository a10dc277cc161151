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
    check(precision=precision)
    settings = dtypes.Settings(dtype, output_dtype)
    if precision == "compensated":
        cell = Compensated("sum", settings, divides=False)
        return Treewise(cell, CompensatedSumState, wire=wire, precision=precision)
    if precision == "exact":
        _require_exact_exchange(dtype, wire)
        cell = Exact("sum", settings, divides=False, spills=_needs_spills(max_terms))
        derivative = sum(output_dtype=output_dtype)
        return Treewise(cell, ExactSumState, derivative=derivative, precision=precision, max_terms=cell.room)
    cell = Added("sum", ("float", "complex", "integer"), False, settings)
    return Treewise(cell, SumState, wire=wire)


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
    check(precision=precision)
    settings = dtypes.Settings(dtype, output_dtype)
    if precision == "compensated":
        cell = Compensated("mean", settings, divides=True)
        return Treewise(cell, CompensatedMeanState, wire=wire, scales_by_weight=True, divides=True, precision=precision)
    if precision == "exact":
        _require_exact_exchange(dtype, wire)
        cell = Exact("mean", settings, divides=True, spills=_needs_spills(max_terms))
        derivative = mean(output_dtype=output_dtype)
        details = {"precision": precision, "max_terms": cell.room}
        return Treewise(cell, ExactMeanState, scales_by_weight=True, derivative=derivative, divides=True, **details)
    cell = Added("mean", ("float", "complex"), True, settings)
    return Treewise(cell, MeanState, wire=wire, scales_by_weight=True, divides=True)


def _needs_spills(max_terms: int) -> bool:
    """Whether exact sums of float32 need spill words; raises unless ``max_terms`` is an integer from 1 to 2**26."""
    expected = f"max_terms from 1 to {SPILLED_CAPACITY}"
    return require_integer(expected, max_terms, highest=SPILLED_CAPACITY) > FLOAT32.capacity


def _require_exact_exchange(dtype: DType, wire: Wire | None) -> None:
    """Raises for settings that do not apply to precision "exact", whose accumulators are integers."""
    if dtype is not None or wire is not None:
        received = wire if dtype is None else dtype
        raise invalid("no dtype and no wire for precision 'exact'", shown(received))
