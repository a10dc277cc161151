"""Sums over their own weights, several in one contribution: for losses that have more than one denominator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

from gradcombine import tree
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import invalid, operation, require_items, require_type, shown, within
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, Wrapper, described
from gradcombine.reductions.numbered import numbered, without_numbers
from gradcombine.reductions.per_leaf import per_leaf
from gradcombine.reductions.sums import mean as mean_
from gradcombine.reductions.weights import parse, where
from gradcombine.settings import check
from gradcombine.sparse import is_row_sparse
from gradcombine.types import Leaf, Scalar, State, Tree


class Ratio(NamedTuple):
    """One contribution to a ratio of sums.

    Attributes:
      numerator: a tree that is a sum already: the gradient of a loss summed over tokens, say.
      denominator: what it is a sum over, a scalar weight: the number of these tokens.

    >>> import numpy as np
    >>> Ratio(np.float32([6, 3]), 3).denominator
    3
    """

    numerator: Tree
    denominator: Scalar


@operation("ratio")
def ratio(mean: Reduction | None = None) -> Reduction:
    """The ratio of sums ``(n_1 + n_2 + ...) / (d_1 + d_2 + ...)`` of contributions ``Ratio(n, d)``, divided once.

    It is the mean of the ``n / d`` weighted by ``d``, but no contribution is divided and multiplied again, and one of
    denominator 0 changes nothing, whatever its numerator holds.

    Args:
      mean: how numerators and denominators are summed and divided: `mean` of any precision, or `row_mean`, as they are
        or wrapped (a wrapper sees the numerator). None: ``mean()``.

    Returns:
      A reduction of `Ratio`, with the states of ``mean``. The weight of a contribution says only whether it is present,
      as for `max`: it brings its own. No contribution, or denominators of 0 alone: zeros.

    Raises:
      GradCombineError: for another reduction; in ``update`` for a denominator that is no weight, and as ``mean``.

    Bits: those of ``mean`` over numerators that are not multiplied.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.reductions import Ratio, ratio
    >>> gc.combine(ratio(), [Ratio(np.float32([6, 3]), 3), Ratio(np.float32([2, 5]), 1), Ratio(np.float32([9, 9]), 0)])
    array([2., 2.], dtype=float32)
    """
    mean = mean_() if mean is None else mean
    return _ratio(mean)


def _ratio(mean: Reduction) -> Reduction:
    check(reduction=mean)
    if not mean.divides:
        raise invalid("a mean, as reductions.mean or reductions.row_mean makes it", mean.name)
    return RatioReduction(mean)


class RatioReduction(Wrapper):
    """A reduction of `Ratio`. See `ratio`."""

    def __init__(self, of: Reduction) -> None:
        super().__init__(of)
        self.name, self.scales_by_weight = "ratio", False

    @property
    def description(self) -> str:
        return described("ratio", self.of.description)

    @operation()
    def init(self, like: Ratio) -> State:
        return self.of.init(_opened(like).numerator)

    @operation()
    def update(self, state: State, value: Ratio, weight: Scalar = 1) -> State:
        numerator, denominator = _opened(value)
        backend = resolve([*tree.flatten(numerator)[0], denominator, weight])
        with within(".denominator"):
            parse(backend, denominator)
        absent = parse(backend, weight).zero
        if absent is True:
            denominator = 0
        elif absent is not False:
            wide = any(not is_absent(x) and dtypes.is_wide(backend.dtype(x)) for x in _leaves(numerator))
            denominator = where(backend, ~absent, denominator, wide)
        return self.of.add_weighted(state, numerator, denominator)

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        numerator, denominator = _opened(value)
        gradients, inner = self.of.gradients(numerator)
        return gradients, lambda changed: Ratio(inner(changed), denominator)


@operation("ratios")
def ratios(denominators: Iterable[str], mean: Reduction | None = None) -> Reduction:
    """The sum of several ratios of sums: ``sum_j (n_1j + n_2j + ...) / (d_1j + d_2j + ...)``.

    The gradient of a loss that has several denominators j, which are not known before all contributions are there:
    tokens for the cross entropy, sequences for a preference, microbatches for what balances experts. One accumulator
    for each denominator; where their totals are known before, `sum` of contributions that are divided by them takes one
    for all.

    Args:
      denominators: their names, each once.
      mean: as for `ratio`. Of a `numbered` one, contributions are ``Numbered`` as a whole: one ledger for all.

    Returns:
      A reduction of ``{name: Ratio(numerator, denominator)}``; all numerators are trees of one structure. Of a
      denominator whose total is 0 the ratio is 0. A leaf that is None under every name is None.

    Raises:
      GradCombineError: for no names; and as `ratio` and `per_leaf`, naming the denominator.

    Bits: those of the ratios, added in the sorted order of their names, in float32 at least. (A ratio of narrower
    floats has been rounded to them.)

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.reductions import Ratio, ratios
    >>> first = {"tokens": Ratio(np.float32([6, 3]), 3), "sequences": Ratio(np.float32([1, 0]), 1)}
    >>> second = {"tokens": Ratio(np.float32([2, 5]), 1), "sequences": Ratio(np.float32([2, 2]), 1)}
    >>> gc.combine(ratios(["tokens", "sequences"]), [first, second])
    array([3.5, 3. ], dtype=float32)
    """
    return ratios_of(denominators, mean)


def ratios_of(denominators: Iterable[str], mean: Reduction | None = None) -> Reduction:
    """`ratios`, for functions that give errors a name of their own."""
    own = mean_() if mean is None else mean
    check(reduction=own)
    combined = Ratios(per_leaf({name: _ratio(without_numbers(own)) for name in _names(denominators)}))
    return combined if own.microbatches is None else numbered(combined, own.microbatches)


class Ratios(Wrapper):
    """A reduction whose result is the sum of the values of a dict of results. See `ratios`."""

    def __init__(self, of: Reduction) -> None:
        super().__init__(of)
        self.name, self.scales_by_weight = "ratios", False

    @operation()
    def finalize(self, state: State) -> Tree:
        results = self.of.finalize(state)
        first, *others = (results[name] for name in sorted(results))
        leaves, structure = tree.flatten(first, is_row_sparse)
        columns = [leaves, *(tree.flatten_as(structure, value, is_row_sparse) for value in others)]
        added = (_added(row, path) for row, path in zip(zip(*columns, strict=True), structure.paths(), strict=True))
        return tree.unflatten(structure, added)

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        expected = "a contribution of one gradient (for several, wrap the mean: ratios(names, clipped(mean(), 1)))"
        raise invalid(expected, "one for each denominator")


def _added(values: tuple[Any, ...], path: str) -> Any:
    present = [x for x in values if not is_absent(x)]
    if len(present) < 2:
        return present[0] if present else values[0]
    if any(map(is_row_sparse, present)):
        raise invalid("dense leaves, or one denominator", "rows", path)
    backend = resolve(present)
    dtype = backend.dtype(present[0])
    return backend.cast(reduce(backend.add, (backend.cast(x, dtypes.working(dtype)) for x in present)), dtype)


def _leaves(value: Tree) -> list[Leaf]:
    return tree.flatten(value)[0]


def _opened(value: Tree) -> Ratio:
    return require_type("a Ratio(numerator, denominator)", value, Ratio)


def _names(denominators: Any) -> list[str]:
    expected = "names of denominators, each once"
    names = [] if isinstance(denominators, str) else require_items(expected, denominators)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise invalid(expected, shown(denominators))
    return names
