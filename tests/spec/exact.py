"""Expected results of combinations: rational arithmetic, rounded where the definition rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import resolve
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions.cell import Totals
from gradcombine.reductions.weights import parse

PRECISION = {"float32": 24, "float64": 53, "float16": 11, "bfloat16": 8}


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
      order: order of summation within a block.
      blocks: number of replicas, each of which holds one block; blocks are merged in the canonical tree.
    """
    fold: Callable[..., Term] = fold_pairwise if order == "tree" else _chain
    size = len(terms) // blocks
    partial = [fold(lambda a, b: merge(name, a, b), terms[i : i + size]) for i in range(0, len(terms), size)]
    value, weight, empty = fold_pairwise(lambda a, b: merge(name, a, b), partial)
    if empty:
        return {"min": math.inf, "max": -math.inf}.get(name, IDENTITY[name])
    return float(round_to(value / weight) if name == "mean" else value)


def term(name: str, value: float, weight: float) -> Term:
    """One contribution to one element. It is empty if its weight is 0; ``value`` may then be NaN."""
    if weight == 0:
        return Fraction(0), Fraction(0), True
    scale = Fraction(float(np.float32(weight))) if name in ("sum", "mean") else 1
    return round_to(Fraction(float(value)) * scale), Fraction(float(np.float32(weight))), False


def _chain(function: Callable[[Term, Term], Term], terms: Sequence[Term]) -> Term:
    total = terms[0]
    for nxt in terms[1:]:
        total = function(total, nxt)
    return total


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
