"""A division that differs from one batch, and predictions of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np

from gradcombine.reporting import listed
from gradcombine.verify.check.running import Floats, NotWide, Result, Rows, Split
from gradcombine.verify.check.standard import Standard
from gradcombine.verify.check.step_report import Cause


class Case(NamedTuple):
    """A division whose result differs from one batch.

    Attributes:
      standard: the step, measured on one batch.
      split: the division.
      result: its result, in float64 if possible.
      native: its result in the step's native precision.
      wide: whether `result` is in float64.
      leaves: indices of the leaves that a hypothesis has to explain; None: all.
      unexplained: fraction of the difference that a hypothesis may leave unexplained, in addition to rounding.
    """

    standard: Standard
    split: Split
    result: Result
    native: Result
    wide: bool
    leaves: tuple[int, ...] | None = None
    unexplained: float = 2.0**-20

    def among(self, leaves: Iterable[int]) -> list[int]:
        """Returns those of these leaves that a hypothesis has to explain."""
        return [i for i in leaves if self.leaves is None or i in self.leaves]

    @property
    def all_are_means(self) -> bool:
        """Whether all leaves to explain are means of the examples' results in one batch."""
        return set(self.among(range(len(self.standard.names)))) <= set(self.standard.combination[1])

    @property
    def partitions(self) -> dict[str, list[Rows]]:
        """The common partitions of the examples into microbatches or devices, by name, without duplicates."""
        examples, (k, devices) = self.standard.examples, self.split
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
            named["microbatches split over devices"] = [
                x for block in _chunks(rows, k) for x in _chunks(block, devices)
            ]
        distinct: dict[str, list[Rows]] = {}
        for name, pieces in named.items():
            tuples = [tuple(x.tolist()) for x in pieces if len(x)]
            if len(tuples) > 1 and tuples not in distinct.values():
                distinct[name] = tuples
        return distinct

    @property
    def on_devices(self) -> list[Rows]:
        """The examples of each device, and of the devices along each axis of a mesh of two axes.

        The devices have a block of the batch, or a part of each microbatch.
        """
        k, devices = self.split
        rows, distinct = np.arange(self.standard.examples), set[Rows]()
        layouts = [[_chunks(block, devices) for block in blocks] for blocks in ([rows], _chunks(rows, k))]
        for n in (n for n in range(1, devices) if devices % n == 0):
            groups = [range(i, i + n) for i in range(0, devices, n)]
            groups += [range(i, devices, devices // n) for i in range(devices // n)]
            for group, layout in product(groups, layouts):
                parts = [parts[d] for parts in layout for d in group if d < len(parts)]
                distinct.add(tuple(sorted(int(x) for part in parts for x in part)))
        return sorted(distinct - {()}, key=lambda x: (len(x), x))

    def separate_results(self, copied: bool = True) -> Iterator[tuple[str, list[Rows], list[Floats]]]:
        """Yields the partitions with one batch's results for their microbatches, unless one cannot run.

        Args:
          copied: whether a microbatch is repeated to the size of the batch, which is already compiled. If a divisor has
            a minimum, as in max(count, 1), this changes the result.
        """
        run = self.standard.repeated if copied else self.standard.one
        for name, pieces in self.partitions.items():
            results: list[Floats] = [x.floats for x in map(run, pieces) if x is not None]
            if len(results) == len(pieces):
                yield name, pieces, results

    def weights_of(self, pieces: Sequence[Rows]) -> list[np.ndarray]:
        """Returns plausible weights of microbatches: equal ones, then those by counts of their examples."""
        return [np.full(len(pieces), 1 / len(pieces)), *self.standard.counted(pieces)]

    def shares(self, floats: Floats | None = None, sides: float = 2) -> np.ndarray:
        """Returns the distance of each leaf of the result from one batch, or from other floats, over the bound."""
        return self.standard.shares(
            self.result.floats, self.standard.best.floats if floats is None else floats, self.wide, sides
        )

    def distances(self, predicted: Floats, terms: float, leaves: Iterable[int] | None = None) -> tuple[float, float]:
        """Returns the distance of a prediction, and of one batch, from the result over the bound, in the worst leaf."""
        chosen = np.array(self.among(range(len(predicted)) if leaves is None else leaves), np.intp)
        near, far = (self.shares(x, 2 + terms)[chosen] for x in (predicted, None))
        return float(near.max(initial=0)), float(far.max(initial=0))

    def accounts_for(
        self, predicted: Floats, terms: float, leaves: Iterable[int] | None = None, tolerance: float = 1.0
    ) -> bool:
        """Whether a prediction is within ``tolerance`` bounds of the result, and much closer than one batch is."""
        prediction, one_batch = self.distances(predicted, terms, leaves)
        within = prediction <= max(tolerance, self.unexplained * one_batch)
        return bool(within and one_batch >= 4 * prediction and one_batch > 1)


def case_of(standard: Standard, split: Split, native: Result) -> Case:
    """Returns the case of a division, in float64 if the division and one batch run in it."""
    if standard.wide is not None:
        with suppress(NotWide):
            result = standard.in_float64(split, standard.subject.batch)
            return Case(standard, split, result, native, wide=True)
    return Case(standard, split, native, native, wide=False)


class Prediction(NamedTuple):
    """The result that a defect would produce.

    Attributes:
      cause: the defect.
      detail: measured numbers.
      floats: the result; None: the cause is certain without one.
      terms: the sum of the coefficients of the results that it combines.
      leaves: indices of the leaves that it predicts; None: all.
      line: the source line; None: as `step_program.line_of` finds it.
    """

    cause: Cause
    detail: str
    floats: Floats | None = None
    terms: float = 0
    leaves: Iterable[int] | None = None
    line: str | None = None


Hypothesis: TypeAlias = Callable[[Case], Iterator[Prediction]]


def explained(case: Case, hypotheses: Iterable[Hypothesis]) -> Prediction | None:
    """Returns the first prediction that is certain or accounts for the result."""
    for hypothesis in hypotheses:
        for x in hypothesis(case):
            if x.floats is None or case.accounts_for(x.floats, x.terms, x.leaves):
                return x
    return None


def _chunks(rows: np.ndarray, count: int) -> list[np.ndarray]:
    size = -(-len(rows) // count)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def share_in(units: Sequence[Rows], rows: Rows) -> np.ndarray:
    """Returns the fraction of each unit that is among these rows."""
    chosen = set(rows)
    return np.array([len(chosen.intersection(unit)) / len(unit) for unit in units])


CONTIGUOUS = "contiguous microbatches"
"""Name of the usual partition."""


def split_by(partition: str) -> str:
    """Returns the partition as the end of a detail; empty for the usual one."""
    return "" if partition == CONTIGUOUS else f"; {partition}"


def numbers(rows: Sequence[int]) -> str:
    """Returns the numbers of examples as text, shortened if there are many."""
    return listed([*map(str, rows)], 6)
