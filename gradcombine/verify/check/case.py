"""A division that differs from one batch, and the test whether a hypothesis explains the difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from gradcombine.verify.check.divided_terms import Terms
from gradcombine.verify.check.running import Result, Rows, Split
from gradcombine.verify.check.standard import Floats, Standard
from gradcombine.verify.check.step_report import Cause

Answer: TypeAlias = tuple[Cause, str]
"""A cause and its detail."""

BY_NUMBER = "divided by the number of"
"""Marks a detail that blames a division by the number of microbatches or devices."""

Located: TypeAlias = Answer | tuple[Cause, str, str]
"""A cause and its detail, optionally with the source line, which `lines.line_of` finds otherwise."""


class Case(NamedTuple):
    """A division whose result differs from one batch.

    Attributes:
      split: the division.
      result: its result, in float64 if possible.
      native: its result in the step's native precision.
      wide: whether `result` is in float64.
      terms: terms of the loss, if known.
      leaves: indices of the leaves that a hypothesis has to explain; None: all.
      unexplained: fraction of the difference that a hypothesis may leave unexplained, in addition to rounding.
    """

    split: Split
    result: Result
    native: Result
    wide: bool
    terms: Terms | None = None
    leaves: tuple[int, ...] | None = None
    unexplained: float = 2.0**-20

    def among(self, leaves: Iterable[int]) -> list[int]:
        """Returns those of these leaves that a hypothesis has to explain."""
        return [i for i in leaves if self.leaves is None or i in self.leaves]


def partitions(examples: int, split: Split) -> dict[str, list[Rows]]:
    """Returns the common partitions of examples into microbatches or devices, by name, without duplicates."""
    k, devices = split
    rows = np.arange(examples)
    named: dict[str, list[np.ndarray]] = {CONTIGUOUS: _chunks(rows, k)}
    if examples % k:
        named["split as numpy.array_split does"] = np.array_split(rows, k)
    if k > 1:
        named["microbatches of every k-th example"] = [rows[i::k] for i in range(k)]
    if devices > 1:
        blocks = _chunks(rows, devices)
        named["one part per device"] = blocks
        named["one part per device and microbatch"] = [x for block in blocks for x in _chunks(block, k)]
        named["microbatches across devices"] = [
            np.concatenate(x) for x in zip(*(_chunks(block, k) for block in blocks), strict=False)
        ]
        named["microbatches split over devices"] = [x for block in _chunks(rows, k) for x in _chunks(block, devices)]
    distinct: dict[str, list[Rows]] = {}
    for name, pieces in named.items():
        tuples = [tuple(x.tolist()) for x in pieces if len(x)]
        if len(tuples) > 1 and tuples not in distinct.values():
            distinct[name] = tuples
    return distinct


CONTIGUOUS = "contiguous microbatches"
"""Name of the usual partition."""


def on_devices(examples: int, split: Split) -> list[Rows]:
    """Returns the examples of each device, for both common layouts: a block, or a part of each microbatch."""
    k, devices = split
    rows = np.arange(examples)
    layouts = [[_chunks(block, devices) for block in blocks] for blocks in ([rows], _chunks(rows, k))]
    distinct = {
        tuple(np.concatenate([parts[d] for parts in layout]).tolist())
        for layout in layouts
        for d in range(devices)
        if all(d < len(parts) for parts in layout)
    }
    return sorted(distinct) if devices > 1 else []


def _chunks(rows: np.ndarray, count: int) -> list[np.ndarray]:
    size = -(-len(rows) // count)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def accounts_for(
    standard: Standard,
    case: Case,
    predicted: Floats,
    terms: float,
    leaves: Iterable[int] | None = None,
    tolerance: float = 1.0,
) -> bool:
    """Whether a prediction is within rounding of the result, and much closer to it than one batch is.

    Args:
      terms: the sum of the coefficients of the results that the prediction combines.
      leaves: indices of the leaves that it predicts; None: all.
      tolerance: largest distance from the result, in multiples of the rounding bound.
    """
    prediction, one_batch = distances(standard, case, predicted, terms, leaves)
    within = prediction <= max(tolerance, case.unexplained * one_batch)
    return bool(within and one_batch >= 4 * prediction and one_batch > 1)


def distances(
    standard: Standard, case: Case, predicted: Floats, terms: float, leaves: Iterable[int] | None = None
) -> tuple[float, float]:
    """Returns the distance of a prediction, and of one batch, from the result over the bound, in the worst leaf."""
    chosen = np.array(case.among(range(len(predicted)) if leaves is None else leaves), np.intp)
    near, far = (
        standard.shares(case.result.floats, x, case.wide, 2 + terms)[chosen] for x in (predicted, standard.best.floats)
    )
    return float(near.max(initial=0)), float(far.max(initial=0))


def combined(weights: np.ndarray, results: Sequence[Floats]) -> list[np.ndarray]:
    return [np.tensordot(weights, np.stack(column), 1) for column in zip(*results, strict=True)]


def weights_of(standard: Standard, pieces: Sequence[Rows]) -> list[np.ndarray]:
    """Returns plausible weights of microbatches: equal ones, then the total count of each microbatch's examples."""
    counted = [np.array([x[list(rows)].sum() for rows in pieces]) for x in standard.counts()]
    return [x / x.sum() for x in [np.ones(len(pieces)), *counted] if x.min() >= 0 and x.any()]


def share_in(units: Sequence[Rows], rows: Rows) -> np.ndarray:
    """Returns the fraction of each unit that is among these rows."""
    chosen = set(rows)
    return np.array([len(chosen.intersection(unit)) / len(unit) for unit in units])


def split_by(partition: str) -> str:
    """Returns the partition as the end of a detail; empty for the usual one."""
    return "" if partition == CONTIGUOUS else f"; {partition}"
