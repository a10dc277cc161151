"""Sum ``sum(w * g)`` and mean ``sum(w * g) / sum(w)``: plain and compensated here, exact ones in `exact`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import load, shape_of
from gradcombine.errors import GradCombineError, require_integer, require_one_of, shown
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.cell import Cell, Totals
from gradcombine.reductions.exact.cell import Exact
from gradcombine.reductions.exact.digits import FLOAT32, SPILLED_CAPACITY
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.reductions.weights import Weight, factor, scaled, weighted
from gradcombine.types import Array, Order, no_autograph

Precision = Literal["fast", "compensated", "exact"]


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


@no_autograph
def sum(
    precision: Precision = "fast",
    dtype: Any = None,
    *,
    output_dtype: Any = None,
    wire_dtype: Any = None,
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
      wire_dtype: in which replicas exchange the partial sums. None: the accumulators' own.
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
    _require_precision("sum", precision)
    settings = dtypes.Settings(dtype, output_dtype, "sum")
    if precision == "compensated":
        cell = Compensated("sum", settings, divides=False)
        return Treewise(cell, CompensatedSumState, wire_dtype=wire_dtype, precision=precision)
    if precision == "exact":
        _require_no_accumulator_dtype("sum", dtype, wire_dtype)
        cell = Exact("sum", settings, divides=False, many=_needs_room("sum", max_terms))
        derivative = sum(output_dtype=output_dtype)
        return Treewise(cell, ExactSumState, derivative=derivative, precision=precision, max_terms=cell.room)
    cell = Added("sum", ("float", "complex", "integer"), zero_if_empty, settings)
    return Treewise(cell, SumState, wire_dtype=wire_dtype)


@no_autograph
def mean(
    precision: Precision = "fast",
    dtype: Any = None,
    *,
    output_dtype: Any = None,
    wire_dtype: Any = None,
    max_terms: int = 4096,
) -> Reduction:
    """The weighted mean ``(w_1 g_1 + w_2 g_2 + ...) / (w_1 + w_2 + ...)``, divided once, after all merging.

    With the number of tokens (or examples) of each microbatch as its weight, the mean of per-token mean gradients over
    microbatches and replicas is the gradient of the full batch. A mean of means is not, where the numbers differ.

    Args:
      precision, dtype, output_dtype, wire_dtype, max_terms: as for `gradcombine.reductions.sum`.

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
    _require_precision("mean", precision)
    settings = dtypes.Settings(dtype, output_dtype, "mean")
    if precision == "compensated":
        cell = Compensated("mean", settings, divides=True)
        return Treewise(
            cell, CompensatedMeanState, wire_dtype=wire_dtype, scales_by_weight=True, divides=True, precision=precision
        )
    if precision == "exact":
        _require_no_accumulator_dtype("mean", dtype, wire_dtype)
        cell = Exact("mean", settings, divides=True, many=_needs_room("mean", max_terms))
        derivative = mean(output_dtype=output_dtype)
        own = {"precision": precision, "max_terms": cell.room}
        return Treewise(cell, ExactMeanState, scales_by_weight=True, derivative=derivative, divides=True, **own)
    cell = Added("mean", ("float", "complex"), over_weight, settings)
    return Treewise(cell, MeanState, wire_dtype=wire_dtype, scales_by_weight=True, divides=True)


def _require_precision(operation: str, precision: str) -> None:
    """Refuses a precision that no algorithm here has."""
    require_one_of(operation, f"a precision of {list(get_args(Precision))}", precision, get_args(Precision))


def _needs_room(operation: str, max_terms: int) -> bool:
    """Whether exact sums of float32 need room for more terms than words of digits hold.

    Raises:
      GradCombineError: for what is not an integer from 1 to 2**26.
    """
    expected = f"max_terms from 1 to {SPILLED_CAPACITY}"
    return require_integer(operation, expected, max_terms, highest=SPILLED_CAPACITY) > FLOAT32.capacity


def _require_no_accumulator_dtype(operation: str, dtype: Any, wire_dtype: Any) -> None:
    """Refuses settings that precision "exact" has no use for: its accumulators are integers."""
    if dtype is not None or wire_dtype is not None:
        received = wire_dtype if dtype is None else dtype
        raise GradCombineError(operation, "no dtype and no wire_dtype for precision 'exact'", shown(received))


_BLOCK = 32
"""So many terms are added by one kernel, which compiled code may share between blocks: a power of two."""


_ROWS_A_TURN = 8
"""Rows that a turn of a loop adds: more take longer to trace, fewer to run."""


@dataclass(frozen=True)
class Added(Cell):
    """The cell of plain sums and means: one running value.

    Attributes:
      result: ``result(backend, a, totals)``: the accumulator as it leaves, before it is cast.
      settings: of accumulator and result.
    """

    name: str
    kinds: tuple[str, ...]
    result: Callable[[Backend, Array, Totals], Array]
    settings: dtypes.Settings
    additive: bool = True
    adds_terms: bool = True
    takes_lists: bool = True

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Any) -> Array:
        return backend.full(shape, neutral(running), running, [like])

    def update(self, backend: Backend, a: Array, x: Array, weight: Weight, totals: Totals) -> Array:
        return backend.add(a, self.term(backend, a, x, weight))

    def term(self, backend: Backend, a: Array, x: Array, weight: Weight) -> Array:
        """The addend of a contribution: ``w * x`` in the accumulator's dtype."""
        running = backend.dtype(a)
        if weight.known != 1:
            x = weighted(self.name, backend, x, weight, running)
        return backend.cast(x, running)

    def merge(self, backend: Backend, a: Array, b: Array, a_totals: Totals, b_totals: Totals) -> Array:
        return backend.add(a, b)

    def finish(self, backend: Backend, a: Array, totals: Totals, output: np.dtype) -> Array:
        return backend.cast(self.result(backend, a, totals), output)

    def takes_many(self, weights: Sequence[Weight]) -> bool:
        """Whether all weights are known: one that is traced may be 0, and then it must leave no trace, not even +0."""
        return None not in [weight.known for weight in weights]

    def update_many(
        self,
        backend: Backend,
        a: Array,
        xs: Sequence[Array | None],
        weights: Sequence[Weight],
        totals: Totals,
        order: Order,
    ) -> Array:
        running = backend.dtype(a)
        if backend.prefers_rows(shape_of(a), len(xs)):
            rows = self._rows(backend, running, xs, weights)
            return backend.traced_once(_added_rows, (order,), [a, rows])[0]
        factors = [None if w.known == 1 else factor(self.name, backend, w, running) for w in weights]
        pairs = list(zip(xs, factors, strict=True))

        def added(total: Array, part: Sequence[tuple[Array | None, Array | None]]) -> Array:
            plan: tuple[bool | None, ...] = ()
            arrays: list[Array] = []
            scalars: list[Array] = []
            for x, f in part:
                plan += (None if x is None else f is not None,)
                if x is not None:
                    arrays.append(x)
                    scalars += [] if f is None else [f]
            return backend.fused(_added, (running, order, plan), [total, *arrays, *scalars])[0] if arrays else total

        blocks = [pairs[i : i + _BLOCK] for i in range(0, len(pairs), _BLOCK)]
        if order == "sequential" or len(blocks) == 1:
            return reduce(added, blocks, a)
        # Each is a node of the tree. An accumulator of nothing adds nothing to it.
        nodes = [added(self.empty(backend, shape_of(a), running, a), block) for block in blocks]
        return backend.add(a, fold_pairwise(backend.add, nodes))

    def _rows(
        self, backend: Backend, running: np.dtype, xs: Sequence[Array | None], weights: Sequence[Weight]
    ) -> Array:
        """The terms along a first axis. What is missing keeps its place in the tree, and adds nothing."""
        first = next(x for x in xs if x is not None)
        dtype = backend.dtype(first)
        nothing = backend.full(shape_of(first), neutral(dtype), dtype, [first])
        rows = backend.stack([nothing if x is None else x for x in xs])
        if not all(weight.is_one for weight, x in zip(weights, xs, strict=True) if x is not None):
            factors = [factor(self.name, load("numpy"), weight, running) for weight in weights]
            column = np.asarray([1 if f is None else f for f in factors], dtypes.part(dtypes.working(running)))
            column = np.reshape(column, (-1, *(1 for _ in shape_of(first))))
            rows = scaled(backend, rows, backend.asarray(column), running)
        return backend.cast(rows, running)

    def add_weights(self, backend: Backend, total: Array, weights: Sequence[Weight], order: Order) -> Array:
        dtype, known = backend.dtype(total), backend.concrete(total)
        if known is None:
            return _summed(backend.add, total, [weight.cast(backend, dtype) for weight in weights], order)
        # A total that is known stays known: compiled code need not add up numbers.
        with np.errstate(over="ignore"):
            summed = _summed(np.add, np.asarray(known), [weight.number(dtype) for weight in weights], order)
        return backend.full((), summed, dtype, [total])


def _summed(add: Callable[[Array, Array], Array], start: Array, values: list[Array], order: Order) -> Array:
    return reduce(add, [fold_pairwise(add, values)] if order == "tree" else values, start)


def _added(
    backend: Backend, running: np.dtype, order: Order, plan: tuple[bool | None, ...], total: Array, *arrays: Array
) -> tuple[Array]:
    """The kernel of `Added.update_many`.

    Args:
      backend: of the arrays.
      running: the accumulator's dtype.
      order: of the additions.
      plan: for each contribution whether it has a factor; None where there is no contribution, which keeps its place.
      total: the accumulator.
      arrays: the contributions that there are, then the factors that they have.
    """
    count = len(plan) - plan.count(None)
    contributions, factors = iter(arrays[:count]), iter(arrays[count:])
    # A term is a tuple of one array or of none: None would be a free place in the tree.
    terms: list[tuple[Array, ...]] = []
    for has in plan:
        if has is None:
            terms.append(())
            continue
        x = next(contributions)
        terms.append((backend.cast(scaled(backend, x, next(factors), running) if has else x, running),))
    if order == "tree":
        terms = [fold_pairwise(lambda a, b: (backend.add(*a, *b),) if a and b else a or b, terms)]
    for term in terms:
        total = backend.add(total, *term) if term else total
    return (total,)


def _added_rows(backend: Backend, order: Order, total: Array, rows: Array) -> tuple[Array]:
    """The kernel for terms that are the rows of one array: the total and they, added in this order."""
    count = shape_of(rows)[0]
    if order == "tree":
        while count > 1:  # all nodes of a level at once
            even = count - count % 2
            nodes = backend.add(rows[0:even:2], rows[1:even:2])
            rows = nodes if even == count else backend.concat([nodes, rows[even:]])
            count = shape_of(rows)[0]
        return (backend.add(total, rows[0]),)
    whole = count - count % _ROWS_A_TURN

    def goes_on(i: Array, _: Array) -> Array:
        return i < whole

    def turn(i: Array, total: Array) -> tuple[Array, Array]:
        block = (backend.slice_at(rows, i + j) for j in range(_ROWS_A_TURN))
        return i + _ROWS_A_TURN, reduce(backend.add, block, total)

    _, total = backend.loop(goes_on, turn, backend.full((), 0, dtypes.INT32), total)
    return (reduce(backend.add, [rows[i] for i in range(whole, count)], total),)


def neutral(dtype: np.dtype) -> Any:
    """-0, which leaves every addend as it is: 0 + -0 would lose the sign."""
    return 0 if dtype.kind in "iu" else -0.0


def over_weight(backend: Backend, total: Array, totals: Totals) -> Array:
    """``total / weight`` in at least float32, correctly rounded; +0 where nothing was added.

    NaN where the sum of weights has overflowed: the quotient by infinity would be 0, a wrong number.
    """
    running = backend.dtype(total)
    working = dtypes.working(running)
    part = dtypes.part(working)

    def divisor() -> Array:
        weight = backend.cast(totals.weight, part)
        one, infinity = (backend.full((), value, part) for value in (1, np.inf))
        # No array: JAX looks for NaN where one is made, if it is asked to.
        weight = backend.where(weight == infinity, part.type(np.nan), weight)
        return backend.where(_empty(totals), one, weight)

    quotient = backend.divide(backend.cast(total, working), totals.once(("divisor", part), divisor))
    return zero_if_empty(backend, backend.cast(quotient, running), totals)


def zero_if_empty(backend: Backend, x: Array, totals: Totals) -> Array:
    """+0 where nothing was added."""
    count = backend.concrete(totals.count)
    if count is not None and count != 0:
        return x
    dtype = backend.dtype(x)
    zero = totals.once(("zero", dtype), lambda: backend.full((), 0, dtype))
    return backend.where(_empty(totals), zero, x)


def _empty(totals: Totals) -> Array:
    # No ==, by which a graph of TensorFlow 1 compares objects: Horovod's aggregation runs there.
    return totals.once("empty", lambda: totals.count < 1)


class Pair(NamedTuple):
    """An accumulator: ``high + low`` is the sum, and ``high`` alone its rounded value."""

    high: Array
    low: Array


@dataclass(frozen=True)
class Compensated(Cell):
    """The cell of compensated sums and means.

    TwoSum gives the rounding error of an addition exactly; the errors are added up in ``low``. The result of n terms is
    off by at most ``u |S| + gamma(n - 1)**2 * sum |x|``, with u = 2**-24 and gamma(n) = n u / (1 - n u): as if the sum
    had been formed in twice the precision and rounded once.

    References: D. E. Knuth, *The Art of Computer Programming* 2, 4.2.2; A. Neumaier, `Rundungsfehleranalyse einiger
    Verfahren zur Summation endlicher Summen <https://doi.org/10.1002/zamm.19740540106>`_, 1974; T. Ogita, S. M. Rump
    and S. Oishi, `Accurate sum and dot product <https://doi.org/10.1137/030601818>`_, 2005, Sum2.
    """

    name: str
    settings: dtypes.Settings
    divides: bool
    kinds: tuple[str, ...] = ("float", "complex")

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Any) -> Pair:
        return Pair(*(backend.full(shape, 0, running, [like]) for _ in range(2)))

    def update(self, backend: Backend, a: Pair, x: Array, weight: Weight, totals: Totals) -> Pair:
        running = backend.dtype(a.high)
        high, error = two_sum(backend, a.high, backend.cast(weighted(self.name, backend, x, weight, running), running))
        return Pair(high, backend.add(a.low, error))

    def merge(self, backend: Backend, a: Pair, b: Pair, a_totals: Totals, b_totals: Totals) -> Pair:
        high, error = two_sum(backend, a.high, b.high)
        return Pair(high, backend.add(backend.add(a.low, b.low), error))

    def finish(self, backend: Backend, a: Pair, totals: Totals, output: np.dtype) -> Array:
        # What an infinite value has "lost" is NaN, and means nothing.
        finite = backend.add(a.high, -a.high) == backend.full((), 0, backend.dtype(a.high))
        total = backend.where(finite, backend.add(a.high, a.low), a.high)
        return backend.cast(over_weight(backend, total, totals) if self.divides else total, output)


def two_sum(backend: Backend, a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum, and exactly what the rounding has lost: no order of the operands' sizes is assumed.

    Compilers keep it: with operands that are not constants, no framework here reassociates floating additions.
    """
    total = backend.add(a, b)
    b_part = backend.add(total, -a)
    a_part = backend.add(total, -b_part)
    return total, backend.add(backend.add(a, -a_part), backend.add(b, -b_part))
