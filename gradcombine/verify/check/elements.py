"""Causes that single elements of a result show: overwritten rows, and a narrow accumulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from gradcombine.foreign_orders import welford
from gradcombine.verify.check.case import Answer, Case, combined, partitions, share_in, split_by
from gradcombine.verify.check.measure import StepStandard
from gradcombine.verify.check.running import Rows, Split
from gradcombine.verify.check.standard import Floats, flat, gamma, rms
from gradcombine.verify.check.step_report import Cause
from gradcombine.verify.compare.ulp import rounding_unit
from gradcombine.verify.explain.candidates import Order, orders


def scattered(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Rows of a leaf that keep one contribution of several."""
    units = len(standard.units())
    c = np.full(units, 1 / units) if standard.weights is None else standard.weights
    groups: list[tuple[str, list[Floats]]] = []
    columns = standard.columns()
    if all(x is not None for x in columns):
        groups.append(
            ("examples", [[a * y for y in x.floats] for a, x in zip(c, columns, strict=True) if x is not None])
        )
    for name, pieces in partitions(standard.examples, case.split).items():
        parts = [standard.repeated(rows) for rows in pieces]
        if all(x is not None for x in parts):
            sizes = [float(c @ share_in(standard.units(), rows)) for rows in pieces]
            groups.append(
                (
                    f"microbatches: {name}",
                    [[a * y for y in x.floats] for a, x in zip(sizes, parts, strict=True) if x is not None],
                )
            )
    shares = standard.shares(case.result.floats, standard.best.floats, case.wide)
    allowed = standard.allowed(case.wide)
    for name, terms in groups:
        found = 0
        for i, share in enumerate(shares):
            if share <= 1:
                continue
            whole, made = standard.best.floats[i], case.result.floats[i]
            if whole.ndim < 2:
                break
            stack = np.stack([term[i] for term in terms]).reshape(len(terms), len(whole), -1)
            off = np.sqrt(np.mean(np.square(made.reshape(len(whole), -1) - whole.reshape(len(whole), -1)), axis=1))
            wrong = off > 4 * allowed[i]
            each = np.sqrt(np.mean(np.square(stack - made.reshape(1, len(whole), -1)), axis=2)).min(axis=0)
            several = (np.abs(stack).max(axis=2) > 0).sum(axis=0) > 1
            if not wrong.any() or np.any(each[wrong] > 4 * allowed[i]) or not several[wrong].all():
                break
            found += int(wrong.sum())
        else:
            if found:
                yield Cause.SCATTER, f"{found} rows keep one contribution of those of several {name}"
                return


NARROW = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
"""Accumulators that are too narrow; what the first one can hold, the second one can, but for its exponent."""

TELLING = 16
"""How many elements have to tell two accumulators apart before one is blamed."""


ALIKE = 0.9
"""The correlation of two errors, from which on they are no roundings."""

LOOKED_AT = 1024
"""How many elements of a leaf are looked at, at most."""


def narrow(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Additions in a narrow accumulator, by the bits that they leave: in 99 of 100 elements those of the result."""
    for name, pieces in partitions(standard.examples, case.split).items():
        sample = _Sample.of(standard, case, pieces)
        if sample is None:
            continue
        for text, combine in _ways(standard, pieces):
            with np.errstate(over="ignore"):
                predicted = combine(sample.parts)
            hits, telling = sample.agreeing(predicted)
            if telling >= TELLING and hits >= 0.99 * telling:
                cause = sample.combination(predicted)
                yield cause, f"additions in {text}, give it{split_by(name)}"
                return
    yield from _on_the_grid(standard, case)
    yield from _growing(standard, case)


class _Sample(NamedTuple):
    """Some elements of each leaf.

    Attributes:
      made: by the division.
      whole: by one batch.
      resolution: how far from the one what is called the same may be.
      parts: what one batch of each microbatch gives, in its dtype.
      dtypes: of the results.
    """

    made: list[np.ndarray]
    whole: list[np.ndarray]
    resolution: list[np.ndarray]
    parts: list[list[np.ndarray]]
    dtypes: Sequence[np.dtype]

    @classmethod
    def of(cls, standard: StepStandard, case: Case, pieces: Sequence[Rows]) -> _Sample | None:
        results = [standard.narrow(rows) for rows in pieces]
        parts = [x for x in results if x is not None]
        if len(parts) < len(results):
            return None
        chosen: list[np.ndarray] = []
        for column in zip(*(x.floats for x in parts), strict=True):
            shown = np.flatnonzero(np.any([x.ravel() != 0 for x in column], axis=0))
            chosen.append(shown[:: -(-len(shown) // LOOKED_AT) or 1])

        def some(floats: Floats, dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
            return [x.ravel()[i].astype(dtype) for x, i, dtype in zip(floats, chosen, dtypes, strict=True)]

        # A result of one rounding is no sign of a narrow accumulator.
        of_parts = [np.dtype(np.float32) if x == np.float64 else x for x in parts[0].dtypes]
        resolution, wide = standard.resolution(case.own.floats), [np.dtype(np.float64)] * len(chosen)
        return cls(
            some(case.own.floats, wide),
            some(standard.best.floats, case.own.dtypes),
            some(resolution, wide),
            [some(part.floats, of_parts) for part in parts],
            case.own.dtypes,
        )

    def agreeing(self, predicted: Floats) -> tuple[int, int]:
        """How many elements are as predicted, of how many that either has away from one batch."""
        hits = telling = 0
        rows = zip(self.made, self.whole, predicted, self.resolution, self.dtypes, strict=True)
        for made, whole, x, resolution, dtype in rows:
            rounded = x.astype(dtype).astype(np.float64)
            away = np.maximum(np.abs(made - whole), np.abs(rounded - whole)) > resolution
            hits += int(np.count_nonzero(away & (np.abs(made - rounded) <= resolution)))
            telling += int(np.count_nonzero(away))
        return hits, telling

    def combination(self, predicted: Floats) -> Cause:
        """The combination that the narrow additions compute."""
        equal = [np.mean(np.array(column, np.float64), axis=0) for column in zip(*self.parts, strict=True)]
        x, whole = flat(predicted), flat(self.whole)
        if np.linalg.norm(x) > 1.5 * np.linalg.norm(whole):
            return Cause.SUM
        nearer = 2 * np.linalg.norm(x - flat(equal)) < np.linalg.norm(x - whole)
        return Cause.MEAN_OF_MEANS if nearer else Cause.PRECISION


def _on_the_grid(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Results that a narrow accumulator can hold, where one batch's are others."""
    made, whole = case.own.floats, standard.own.floats
    far = [i for i, x in enumerate(standard.shares(made, standard.best.floats, wide=False)) if x > 1]
    for dtype in NARROW:
        for times in {1.0, float(case.split.microbatches), *standard.totals}:
            values, others = (
                np.concatenate([x[i].ravel() * times for i in far] or [np.zeros(0)]) for x in (made, whole)
            )
            if np.count_nonzero(values) >= TELLING and _held(values, dtype) > 0.999 and _held(others, dtype) < 0.9:
                yield Cause.PRECISION, f"every element is a {dtype}" + (f" over {times:g}" if times > 1 else "")
                return


def _growing(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Errors of the size of a narrow accumulator's in each element, and others with another number of microbatches.

    What is added, as decay is, does not shrink with an element's gradients; what is added or scaled at each microbatch
    is the same for twice as many, but twice as large. Roundings are neither.
    """
    k, devices = case.split
    other = Split(2 * k if 2 * k * devices <= standard.examples else k // 2, devices)
    more = standard.division(other, wide=False) if other.microbatches > 1 else None
    columns = [x.floats for x in standard.columns() if x is not None]
    if more is None or len(columns) < len(standard.units()):
        return
    c = np.full(len(columns), 1 / len(columns)) if standard.likely is None else np.abs(standard.likely)
    sizes = flat(combined(c, [[np.abs(x) for x in floats] for floats in columns]))
    whole = standard.best.floats
    allowed = flat(standard.resolution(whole))
    off, of_more = (flat(x.floats) - flat(whole) for x in (case.own, more))
    alike = float(off @ of_more) / max(float(np.linalg.norm(off) * np.linalg.norm(of_more)), 1e-300)
    if np.count_nonzero(np.abs(off) > allowed) < TELLING or alike > ALIKE:
        return
    units = [gamma(2 * split.microbatches + 1, rounding_unit(NARROW[0])) for split in (case.split, other)]
    if all(np.all(np.abs(x) <= u * sizes + allowed) for x, u in zip((off, of_more), units, strict=True)):
        yield (
            Cause.PRECISION,
            f"each element is off by what 16 bits round, by {rms(off):.3g} on average; with {other} otherwise, by "
            f"{rms(of_more):.3g}",
        )


def _held(values: np.ndarray, dtype: np.dtype) -> float:
    values = values[values != 0]
    rounded = values.astype(np.float32).astype(dtype).astype(np.float64)
    return int(np.count_nonzero(np.abs(values - rounded) <= 2**-22 * np.abs(values))) / max(len(values), 1)


Combine: TypeAlias = Callable[[Sequence[Floats]], list[np.ndarray]]
"""From what each microbatch gives to their combination, in float64."""


def _ways(standard: StepStandard, pieces: Sequence[Rows]) -> Iterator[tuple[str, Combine]]:
    """Additions in narrow accumulators."""
    n, sizes = len(pieces), np.array([len(x) for x in pieces], np.float64)
    scales = [(np.ones(n), float(n)), (sizes / sizes.sum(), 1.0), (sizes, sizes.sum())]
    if standard.likely is not None:
        weights = np.array([standard.likely @ share_in(standard.units(), rows) for rows in pieces])
        scales += [(weights, 1.0), *((np.round(weights * total), total) for total in standard.totals)]
    for dtype in NARROW:
        for factors, divisor in scales:
            how = "" if divisor == 1 else ", divided at the end"
            for name, order in orders(n, ()):
                yield f"{dtype}, {name}{how}", partial(_added, order, dtype, factors, divisor)
            yield f"{dtype}, of wider terms, one after another{how}", partial(_stored, dtype, factors, divisor)
        yield f"{dtype}, as Welford's mean", partial(_running, dtype)


def _added(
    order: Order, dtype: np.dtype, factors: np.ndarray, divisor: float, parts: Sequence[Floats]
) -> list[np.ndarray]:
    terms = [
        [(a * np.float64(x)).astype(np.float32).astype(dtype) for x in part]
        for a, part in zip(factors, parts, strict=True)
    ]
    total: list[np.ndarray] = order(terms)
    return [x.astype(np.float64) / divisor for x in total]


def _stored(dtype: np.dtype, factors: np.ndarray, divisor: float, parts: Sequence[Floats]) -> list[np.ndarray]:
    """Sums of float32 that are rounded as they are stored."""
    total = [np.zeros(x.shape, dtype) for x in parts[0]]
    for a, part in zip(factors, parts, strict=True):
        total = [
            (x.astype(np.float32) + (a * np.float64(y)).astype(np.float32)).astype(dtype)
            for x, y in zip(total, part, strict=True)
        ]
    return [x.astype(np.float64) / divisor for x in total]


def _running(dtype: np.dtype, parts: Sequence[Floats]) -> list[np.ndarray]:
    mean: list[np.ndarray] = welford(list(parts), accumulator=dtype)
    return [x.astype(np.float64) for x in mean]
