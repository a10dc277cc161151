"""Sum ``sum(w * g)`` and mean ``sum(w * g) / sum(w)``: plain and compensated here, exact ones in `exact`."""

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
    """Pairs that sum to those of ``w * g``."""


class ExactSumState(TreewiseState):
    """Digits of sums of ``w * g``."""


class MeanState(TreewiseState):
    """Sums of ``w * g``, not divided yet."""


class CompensatedMeanState(TreewiseState):
    """Pairs that sum to those of ``w * g``, not divided yet."""


class ExactMeanState(TreewiseState):
    """Digits of sums of ``w * g``, not divided yet."""


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
      precision: ``"fast"``: one running value in the accumulator dtype, rounded at each addition. ``"compensated"``: a
        pair, in which the roundings' errors are kept; float and complex leaves. ``"exact"``: integers in fixed point,
        rounded once, at the end; float leaves.
      dtype: of the accumulators. None: the contributions' own, float32 for narrower floats, 32 bits for narrower
        integers.
      output_dtype: of the result. None: the contributions' own; narrow integers stay as wide as their accumulator.
      wire: how replicas send partial sums: None: as they are; `gradcombine.wires.cast` or `gradcombine.wires.blocks`:
        in fewer bits, added in float32. Float leaves. A derivative passes through as if it were None.
      max_terms: what an exact sum must have room for: one term a contribution, and one for each further 24 bits of a
        weight of an integer type (two for one of 32 bits that is an array). Up to 4096, an element takes 12 bytes, else
        24. There is room for 4096 terms or for 2**26 (float64: always 2**26); with more, the result is NaN.

    Returns:
      A reduction of float, complex and integer leaves. Integer leaves take integer weights. No contribution: zeros.

    Bits: the same for the same contributions in the same order, on every backend, eager and compiled, where no value is
    subnormal. Products with a weight are rounded once, never fused into the addition. Order ``"tree"`` does not depend
    on how the contributions are divided over time and replicas; an all-reduce in order ``"sequential"`` adds in the
    order that the framework chooses, and may lose the sign of a zero. Integers: exact, modulo the dtype's width.

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
        cell = Exact("sum", settings, divides=False, many=_needs_room(max_terms))
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

    With the number of tokens (or examples) of each microbatch as its weight, the mean of per-token mean gradients over
    microbatches and replicas is the gradient of the full batch. A mean of means is not, where the numbers differ.

    Args:
      precision, dtype, output_dtype, wire, max_terms: as for `gradcombine.reductions.sum`.

    Returns:
      A reduction of float and complex leaves; a mean of integers is an error. No contribution: zeros. NaN where
      the sum of weights is not a finite number in the range of the accumulator (of precision ``"exact"``, where a
      weight is not); traced weights that are negative, infinite or NaN make it NaN as well.

    Bits: as for `gradcombine.reductions.sum`, and the quotient is correctly rounded on CPU. (XLA on GPU does not divide
    correctly rounded.)

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
        cell = Exact("mean", settings, divides=True, many=_needs_room(max_terms))
        derivative = mean(output_dtype=output_dtype)
        own = {"precision": precision, "max_terms": cell.room}
        return Treewise(cell, ExactMeanState, scales_by_weight=True, derivative=derivative, divides=True, **own)
    cell = Added("mean", ("float", "complex"), True, settings)
    return Treewise(cell, MeanState, wire=wire, scales_by_weight=True, divides=True)


def _needs_room(max_terms: int) -> bool:
    """Whether exact sums of float32 need room for more terms than words of digits hold.

    Raises:
      GradCombineError: for what is not an integer from 1 to 2**26.
    """
    expected = f"max_terms from 1 to {SPILLED_CAPACITY}"
    return require_integer(expected, max_terms, highest=SPILLED_CAPACITY) > FLOAT32.capacity


def _require_exact_exchange(dtype: DType, wire: Wire | None) -> None:
    """Refuses settings that precision "exact" has no use for: its accumulators are integers."""
    if dtype is not None or wire is not None:
        received = wire if dtype is None else dtype
        raise invalid("no dtype and no wire for precision 'exact'", shown(received))
