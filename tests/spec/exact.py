"""Expected results of combinations: rational arithmetic, rounded where the definition rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial, reduce
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import resolve
from gradcombine.reductions.cell import Totals, parts
from gradcombine.reductions.weights import parse

PRECISION = {"float32": 24, "float64": 53, "float16": 11, "bfloat16": 8}
SUBNORMAL = {"float32": 2.0**-149, "float64": 2.0**-1074, "float16": 2.0**-24, "bfloat16": 2.0**-133}
"""The smallest positive numbers."""

T = TypeVar("T")


def fold(join: Callable[[T, T], T], terms: Sequence[T], order: str, blocks: int = 1) -> T:
    """Joins the terms of each block (a replica) in ``order``, then the blocks in the canonical tree."""
    size = len(terms) // blocks
    within = _tree if order == "tree" else reduce
    return _tree(join, [within(join, terms[i : i + size]) for i in range(0, len(terms), size)])


def _tree(join: Callable[[T, T], T], terms: Sequence[T]) -> T:
    """The canonical tree: the left branch of n terms holds the largest power of two below n."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return join(_tree(join, terms[:half]), _tree(join, terms[half:]))


def round_to(value: Fraction, dtype: str = "float32") -> Fraction:
    """The nearest number of a binary format, ties to even, without overflow or underflow."""
    if value == 0:
        return value
    exponent = math.frexp(abs(value))[1] if abs(value) < 2**1000 else 0
    unit = Fraction(2) ** (exponent - PRECISION[dtype])
    # frexp of a Fraction goes through a rounded float, so the exponent may be one too high.
    if abs(value) / unit < 2 ** (PRECISION[dtype] - 1):
        unit /= 2
    return round(value / unit) * unit


def round_gradually(value: Fraction, dtype: str = "float32") -> Fraction:
    """Like `round_to`, to a subnormal number if the value underflows."""
    unit = Fraction(SUBNORMAL[dtype])
    is_normal = abs(value) >= unit * 2 ** (PRECISION[dtype] - 1)
    return round_to(value, dtype) if is_normal else round(value / unit) * unit


Term = tuple[Fraction, Fraction, bool]
"""A partial result of one element: value, weight, and whether it is empty."""

IDENTITY = {"sum": 0, "mean": 0, "product": 1, "min": None, "max": None, "first": 0, "last": 0}


def merge(name: str, a: Term, b: Term) -> Term:
    """Merges two partial results, rounding like float32 accumulators."""
    if a[2] or b[2]:
        return b if a[2] else a
    left, right = a[0], b[0]
    value = {
        "sum": lambda: round_to(left + right),
        "mean": lambda: round_to(left + right),
        "product": lambda: round_to(left * right),
        "min": lambda: min(left, right),
        "max": lambda: max(left, right),
        "first": lambda: left,
        "last": lambda: right,
    }[name]()
    return value, round_to(a[1] + b[1]), False


def combine(name: str, terms: Sequence[Term], order: str, blocks: int = 1) -> float:
    """The result for one element.

    Args:
      name: the reduction.
      terms: the contributions in order.
      order, blocks: as of `fold`.
    """
    value, weight, empty = fold(partial(merge, name), terms, order, blocks)
    if empty:
        return {"min": math.inf, "max": -math.inf}.get(name, IDENTITY[name])
    return float(round_to(value / weight) if name == "mean" else value)


def term(name: str, value: float, weight: float) -> Term:
    """One contribution to one element. It is empty if its weight is 0; ``value`` may then be NaN."""
    if weight == 0:
        return Fraction(0), Fraction(0), True
    scale = Fraction(float(np.float32(weight))) if name in ("sum", "mean") else 1
    return round_to(Fraction(float(value)) * scale), Fraction(float(np.float32(weight))), False


def elementwise(name: str, values: np.ndarray, weights: np.ndarray, order: str, blocks: int = 1) -> np.ndarray:
    """Applies `combine` to each element of stacked contributions of shape (n, ...)."""
    flat = values.reshape(len(values), -1)
    columns = [
        combine(name, [term(name, v, w) for v, w in zip(column, weights, strict=True)], order, blocks)
        for column in flat.T
    ]
    return np.asarray(columns, np.float32).reshape(values.shape[1:])


def bits(array: np.ndarray) -> np.ndarray:
    """Bit patterns as integers; every NaN maps to -1."""
    array = np.asarray(array)
    if array.dtype.kind == "c":
        return np.stack([bits(array.real), bits(array.imag)])
    patterns = array.view(f"u{array.dtype.itemsize}") if array.dtype.kind != "b" else array
    try:
        ml_dtypes.finfo(array.dtype)
    except ValueError:
        return patterns
    return np.where(np.isnan(array), np.array(-1).astype(patterns.dtype), patterns)


def at_once(reduction: Any, state: Any, trees: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Adds several contributions of known weights to a state in one pass, as `combine` does for a list."""
    flat, cell = reduction._flatten(state), reduction.cell
    rows = [tree.flatten_as(flat.structure, value) for value in trees]
    backend = resolve([*flat.arrays(), *(x for row in rows for x in row)])
    parsed, totals = [parse(backend, weight) for weight in weights], Totals(state.weight, state.count)

    def added(a: Any, xs: Sequence[Any]) -> Any:
        present = [(x, w) for x, w in zip(xs, parsed, strict=True) if x is not None and w.known != 0]
        if len(present) == 1:
            return cell.update(backend, a, *present[0], totals)
        return cell.update_many(backend, a, *zip(*present, strict=True), "sequential") if present else a

    values = [added(a, xs) for a, xs in zip(flat.values, zip(*rows, strict=True), strict=True)]
    total = state.weight
    for w in parsed:
        total = cell.add_weight(backend, total, w)
    count = state.count + np.int32(len([w for w in parsed if w.known != 0]))
    return flat.rebuild(state, values, total, count)


def patterns(n: int, size: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Named terms of exact sums, each of shape (n, size)."""
    rng, info = np.random.default_rng(n), np.finfo(dtype)
    bits = rng.integers(0, 2**info.bits, (n, size), f"u{info.bits // 8}").view(dtype)
    every_exponent = np.where(np.isfinite(bits), bits, dtype(1))
    full = np.full((n, size), np.nextafter(dtype(2**16), dtype(0)))
    normal = rng.normal(size=(n, size)).astype(dtype)
    cancelling = normal.copy()
    cancelling[n // 2 : 2 * (n // 2)] = -normal[: n // 2]
    cancelling[0] *= np.sqrt(info.eps)
    whole, decades = 2 ** (info.nmant + 1), 8 if dtype == np.float32 else 20
    return {
        "every exponent": every_exponent,
        "every exponent, rising": np.take_along_axis(every_exponent, np.argsort(np.abs(every_exponent), 0), 0),
        "all digits full": full,
        "all digits full, negative": -full,
        "normal": normal,
        "one magnitude": (1 + rng.random((n, size))).astype(dtype),
        "cancelling": cancelling,
        "subnormal": (rng.integers(-whole, whole, (n, size)) * float(info.smallest_subnormal)).astype(dtype),
        "many decades": (rng.normal(size=(n, size)) * 10.0 ** rng.integers(-decades, decades + 1, (n, size))).astype(
            dtype
        ),
    }


def specials(dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Contributions of shape (3, n), and the elements of their exact sum."""
    info = np.finfo(dtype)
    inf, nan, most, tie = np.inf, np.nan, float(info.max), 2.0 ** (info.nmant + 1)
    tiny, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    columns = {
        "+inf": ([1, inf, 2], inf),
        "-inf": ([-inf, 1, -inf], -inf),
        "both": ([inf, 1, -inf], nan),
        "NaN": ([1, nan, inf], nan),
        "overflow": ([most, most, 1], inf),
        "no overflow after all": ([most, most, -most], most),
        "-0": ([-0.0, -0.0, -0.0], 0.0),
        "cancelled": ([1.5, -1.5, -0.0], 0.0),
        "subnormal": ([tiny, tiny, 510 * tiny], 512 * tiny),
        "into the subnormal": ([normal, -normal / 2, tiny], normal / 2 + tiny),
        "a tie": ([tie, 1, 2.0**-10], tie + 2),
    }
    values, sums = zip(*columns.values(), strict=True)
    return np.asarray(values, dtype).T, np.asarray(sums, dtype)


def check_grouping(
    reduction: Any,
    folded: Callable[[Any], Any],
    x: np.ndarray,
    seeds: Iterable[int],
    settled: Callable[[Any], Any] = lambda state: state,
) -> None:
    """The sum of the rows of x is within its bound, and its words are those of any other order and grouping."""
    state = folded(x)
    assert_within_bound(reduction.finalize(state), x)
    expected = settled(state)
    for seed in seeds:
        other = settled(_merged(reduction, folded, x, np.random.default_rng(seed)))
        for a, b in zip(parts((expected.value, expected.weight)), parts((other.value, other.weight)), strict=True):
            np.testing.assert_array_equal(a, b)


def _merged(reduction: Any, folded: Callable[[Any], Any], x: np.ndarray, rng: np.random.Generator) -> Any:
    """The state of the rows of x, shuffled, folded in random groups and merged in random order."""
    groups = np.array_split(rng.permutation(x), min(len(x), int(rng.integers(1, 9))))
    states = [folded(group) for group in groups]
    while len(states) > 1:
        i, j = sorted(rng.choice(len(states), 2, replace=False))
        states = [s for k, s in enumerate(states) if k not in (i, j)] + [reduction.merge(states[j], states[i])]
    return states[0]


def assert_within_bound(result: np.ndarray, x: np.ndarray) -> None:
    """The error of an exact sum in words of w bits is at most (n - 1) 2**-w max |x| + ulp / 2."""
    info = np.finfo(x.dtype)
    assert result.dtype == x.dtype
    for column, received in zip(x.T, result, strict=True):
        terms = [Fraction(float(v)) for v in column]
        total, lost = sum(terms, Fraction(0)), (len(terms) - 1) * max(map(abs, terms)) / 2**info.bits
        if np.isfinite(received):
            half = Fraction(float(np.spacing(np.abs(received)))) / 2
            assert abs(Fraction(float(received)) - total) <= lost + half
        else:
            assert abs(total) + lost >= Fraction(float(info.max))
