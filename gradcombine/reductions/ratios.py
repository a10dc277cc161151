"""Ratios of sums, whose contributions have their own denominators, for losses with one or several denominators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

from gradcombine import tree
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import invalid, operation, require_items, require_type, shown, within
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, Wrapper
from gradcombine.reductions.numbered import numbered, without_numbers
from gradcombine.reductions.per_leaf import per_leaf
from gradcombine.reductions.sums import mean as mean_
from gradcombine.reductions.weights import parse, where
from gradcombine.settings import check
from gradcombine.sparse import is_row_sparse
from gradcombine.types import Scalar, State, Tree


class Ratio(NamedTuple):
    """One contribution to a ratio of sums.

    Attributes:
      numerator: a tree of sums, for instance the gradient of a loss that is summed over tokens.
      denominator: a scalar weight, for instance the number of these tokens.

    >>> import numpy as np
    >>> Ratio(np.float32([6, 3]), 3).denominator
    3
    """

    numerator: Tree
    denominator: Scalar


@operation("ratio")
def ratio(mean: Reduction | None = None) -> Reduction:
    """The ratio of sums ``(n_1 + n_2 + ...) / (d_1 + d_2 + ...)`` of contributions ``Ratio(n, d)``, divided once.

    This is the mean of ``n / d`` weighted by ``d``, without dividing and multiplying the contributions. A contribution
    with denominator 0 changes nothing, even if its numerator is NaN.

    Args:
      mean: the reduction that sums and divides: `mean` of any precision, or `row_mean`, possibly wrapped (wrappers
        apply to the numerator). None: ``mean()``.

    Returns:
      A reduction of `Ratio`, with the states of ``mean``. All nonzero weights count as 1, as for `max`. Without
      contributions, and if all denominators are 0, the result is 0.

    Raises:
      GradCombineError: for another reduction; in ``update`` for a denominator that is not a weight, and as ``mean``.

    Bits: those of ``mean``, without products with weights.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.reductions import Ratio, ratio
    >>> gc.combine(ratio(), [Ratio(np.float32([6, 3]), 3), Ratio(np.float32([2, 5]), 1), Ratio(np.float32([9, 9]), 0)])
    array([2., 2.], dtype=float32)
    """
    return _ratio(mean_() if mean is None else mean)


def _ratio(mean: Reduction) -> Reduction:
    check(reduction=mean)
    if not mean.divides:
        raise invalid("a mean, from reductions.mean or reductions.row_mean", mean.name)
    return RatioReduction(mean)


class RatioReduction(Wrapper):
    """See `ratio`."""

    call = "ratio"

    def __init__(self, of: Reduction) -> None:
        super().__init__(of)
        self.name, self.scales_by_weight = "ratio", False

    def init(self, like: Ratio) -> State:
        return self.of.init(_require_ratio(like).numerator)

    def update(self, state: State, value: Ratio, weight: Scalar = 1) -> State:
        numerator, denominator = _require_ratio(value)
        leaves = tree.flatten(numerator)[0]
        backend = resolve([*leaves, denominator, weight])
        with within(".denominator"):
            parse(backend, denominator)
        absent = parse(backend, weight).zero
        if absent is True:
            denominator = 0
        elif absent is not False:
            wide = any(not is_absent(x) and dtypes.is_wide(backend.dtype(x)) for x in leaves)
            denominator = where(backend, ~absent, denominator, wide)
        return self.of.add_weighted(state, numerator, denominator)

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        numerator, denominator = _require_ratio(value)
        gradients, inner = self.of.gradients(numerator)
        return gradients, lambda changed: Ratio(inner(changed), denominator)


@operation("ratios")
def ratios(denominators: Iterable[str], mean: Reduction | None = None) -> Reduction:
    """The sum of several ratios of sums: ``sum_j (n_1j + n_2j + ...) / (d_1j + d_2j + ...)``.

    The gradient of a loss with several denominators j whose totals are not known before all contributions are computed:
    for instance tokens for the cross entropy, sequences for a preference loss, microbatches for the load balancing of
    experts. It has an accumulator per denominator. If the totals are known, divide the contributions by them and use
    `sum`, which has one accumulator for all.

    Args:
      denominators: the distinct names of the denominators.
      mean: as for `ratio`. If it is `numbered`, contributions are ``Numbered({name: Ratio(...)}, number)``, with one
        ledger.

    Returns:
      A reduction of ``{name: Ratio(numerator, denominator)}``; all numerators are trees of the same structure. The
      ratio of a denominator whose total is 0 is 0. A leaf that is None under all names is None.

    Raises:
      GradCombineError: for no names or duplicates; and as `ratio` and `per_leaf`, naming the denominator.

    Bits: those of the ratios, which are added in the sorted order of their names, in at least float32 (after they were
    rounded to narrower floats, if the result dtype is one).

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.reductions import Ratio, ratios
    >>> first = {"tokens": Ratio(np.float32([6, 3]), 3), "sequences": Ratio(np.float32([1, 0]), 1)}
    >>> second = {"tokens": Ratio(np.float32([2, 5]), 1), "sequences": Ratio(np.float32([2, 2]), 1)}
    >>> gc.combine(ratios(["tokens", "sequences"]), [first, second])
    array([3.5, 3. ], dtype=float32)
    """
    return ratios_of(denominators, mean)


def ratios_of(denominators: Iterable[str], mean: Reduction | None = None) -> Reduction:
    """`ratios` for other public functions, which add their own names to errors."""
    mean = mean_() if mean is None else mean
    check(reduction=mean)
    combined = Ratios(per_leaf({name: _ratio(without_numbers(mean)) for name in _names(denominators)}))
    return combined if mean.microbatches is None else numbered(combined, mean.microbatches)


class Ratios(Wrapper):
    """Sums the results of a `per_leaf` dict of ratios. See `ratios`."""

    def __init__(self, of: Reduction) -> None:
        super().__init__(of)
        self.name, self.scales_by_weight = "ratios", False

    def finalize(self, state: State) -> Tree:
        results = self.of.finalize(state)
        first, *others = (results[name] for name in sorted(results))
        leaves, structure = tree.flatten(first, is_row_sparse)
        columns = [leaves, *(tree.flatten_as(structure, value, is_row_sparse) for value in others)]
        sums = (_sum(row, path) for row, path in zip(zip(*columns, strict=True), structure.paths(), strict=True))
        return tree.unflatten(structure, sums)

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        expected = "a contribution of one gradient (for several, wrap the mean: ratios(names, clipped(mean(), 1)))"
        raise invalid(expected, "one for each denominator")


def _sum(values: tuple[Any, ...], path: str) -> Any:
    present = [x for x in values if not is_absent(x)]
    if len(present) < 2:
        return present[0] if present else values[0]
    if any(map(is_row_sparse, present)):
        raise invalid("dense leaves, or a single denominator", "row-sparse leaves", path)
    backend = resolve(present)
    dtype = backend.dtype(present[0])
    return backend.cast(reduce(backend.add, (backend.cast(x, dtypes.working(dtype)) for x in present)), dtype)


def _require_ratio(value: Tree) -> Ratio:
    return require_type("a Ratio(numerator, denominator)", value, Ratio)


def _names(denominators: Any) -> list[str]:
    expected = "distinct names of denominators"
    names = [] if isinstance(denominators, str) else require_items(expected, denominators)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise invalid(expected, shown(denominators))
    return names
