"""A division that differs from one batch, and what a hypothesis about it has to account for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from gradcombine.verify.check.divided_terms import Terms
from gradcombine.verify.check.running import Result, Rows, Split
from gradcombine.verify.check.standard import Floats, Standard
from gradcombine.verify.check.step_report import Cause

Answer: TypeAlias = tuple[Cause, str]
"""A cause, and figures."""

BY_NUMBER = "divided by the number of"
"""In the figures of what is divided by the number of microbatches or devices as well."""

Located: TypeAlias = Answer | tuple[Cause, str, str]
"""An answer, with the line of source that another than `lines.line_of` knows."""


class Case(NamedTuple):
    """A division that differs.

    Attributes:
      split: the division.
      result: what it gave, in float64 where there is such a result.
      own: the same in its own precision.
      wide: whether the result is in float64.
      terms: of the loss, if they are known.
      leaves: those that a hypothesis has to account for; None: all.
      rest: which part of the difference it may leave over, beside rounding.
    """

    split: Split
    result: Result
    own: Result
    wide: bool
    terms: Terms | None = None
    leaves: tuple[int, ...] | None = None
    rest: float = 2.0**-20

    def among(self, leaves: Iterable[int]) -> list[int]:
        """The leaves among these that are to be accounted for."""
        return [i for i in leaves if self.leaves is None or i in self.leaves]


def partitions(examples: int, split: Split) -> dict[str, list[Rows]]:
    """The ways to divide examples that steps use, by what they are called."""
    k, devices = split
    rows = np.arange(examples)
    made: dict[str, list[np.ndarray]] = {"neighbours": _chunks(rows, k)}
    if examples % k:
        made["as numpy.array_split divides"] = np.array_split(rows, k)
    if k > 1:
        made["every k-th"] = [rows[i::k] for i in range(k)]
    if devices > 1:
        on_each = _chunks(rows, devices)
        made["devices"] = on_each
        made["microbatches of devices"] = [x for block in on_each for x in _chunks(block, k)]
        made["microbatches over devices"] = [
            np.concatenate(x) for x in zip(*(_chunks(block, k) for block in on_each), strict=False)
        ]
        made["devices in microbatches"] = [x for block in _chunks(rows, k) for x in _chunks(block, devices)]
    found: dict[str, list[Rows]] = {}
    for name, pieces in made.items():
        tuples = [tuple(x.tolist()) for x in pieces if len(x)]
        if len(tuples) > 1 and tuples not in found.values():
            found[name] = tuples
    return found


def on_devices(examples: int, split: Split) -> list[Rows]:
    """The examples of each device, for the ways that steps use: a block, or a part of each microbatch."""
    k, devices = split
    rows = np.arange(examples)
    by_part = [[_chunks(block, devices) for block in blocks] for blocks in ([rows], _chunks(rows, k))]
    found = {
        tuple(np.concatenate([parts[d] for parts in way]).tolist())
        for way in by_part
        for d in range(devices)
        if all(d < len(parts) for parts in way)
    }
    return sorted(found) if devices > 1 else []


def _chunks(rows: np.ndarray, count: int) -> list[np.ndarray]:
    size = -(-len(rows) // count)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def accounts_for(
    standard: Standard,
    case: Case,
    predicted: Floats,
    terms: float,
    leaves: Iterable[int] | None = None,
    off: float = 1.0,
) -> bool:
    """Whether a prediction is within rounding of the result, and much nearer to it than one batch is.

    Args:
      terms: how many results it is made of, by the sum of their coefficients.
      leaves: those that it is about; None: all.
      off: how many times as far as rounding allows it may be.
    """
    nearest, furthest = distances(standard, case, predicted, terms, leaves)
    return bool(nearest <= max(off, case.rest * furthest) and furthest >= 4 * nearest and furthest > 1)


def distances(
    standard: Standard, case: Case, predicted: Floats, terms: float, leaves: Iterable[int] | None = None
) -> tuple[float, float]:
    """How far a prediction and one batch are from the result, over what rounding allows, in the worst leaf of each."""
    chosen = np.array(case.among(range(len(predicted)) if leaves is None else leaves), np.intp)
    near, far = (
        standard.shares(case.result.floats, x, case.wide, 2 + terms)[chosen] for x in (predicted, standard.best.floats)
    )
    return float(near.max(initial=0)), float(far.max(initial=0))


def combined(weights: np.ndarray, results: Sequence[Floats]) -> list[np.ndarray]:
    return [np.tensordot(weights, np.stack(column), 1) for column in zip(*results, strict=True)]


def weights_of(standard: Standard, pieces: Sequence[Rows]) -> list[np.ndarray]:
    """Weights that microbatches may have: equal ones first, then what the examples of each count together."""
    counted = [np.array([x[list(rows)].sum() for rows in pieces]) for x in standard.counts()]
    return [x / x.sum() for x in [np.ones(len(pieces)), *counted] if x.min() >= 0 and x.any()]


def share_in(units: Sequence[Rows], rows: Rows) -> np.ndarray:
    """The part of each unit that is among these rows."""
    chosen = set(rows)
    return np.array([len(chosen.intersection(unit)) / len(unit) for unit in units])


def split_by(partition: str) -> str:
    """A partition in a detail, unless it is the usual one."""
    return "" if partition == "neighbours" else f"; {partition}"
