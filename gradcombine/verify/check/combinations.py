"""Hypotheses that a division is a linear combination of examples, with the weights of known defects or fitted ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gradcombine.verify.check.case import (
    BY_NUMBER,
    Answer,
    Case,
    accounts_for,
    combined,
    on_devices,
    partitions,
    share_in,
    split_by,
)
from gradcombine.verify.check.measure import StepStandard
from gradcombine.verify.check.running import Split
from gradcombine.verify.check.standard import SAME, flat
from gradcombine.verify.check.step_report import Cause


def linear(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Tries weights of the examples that differ from those in one batch."""
    c, leaves = standard.combination
    leaves = case.among(leaves)
    if c is None or not leaves or not np.isfinite(flat([*case.result.floats, *standard.best.floats])).all():
        return
    columns = [None if x is None else x.floats for x in standard.columns()]

    def accounts(x: np.ndarray) -> bool:
        used = [(a, floats) for a, floats in zip(x, columns, strict=True) if floats is not None]
        predicted = combined(np.array([a for a, _ in used]), [floats for _, floats in used])
        return accounts_for(standard, case, predicted, float(np.abs(x).sum()), leaves)

    count, total = len(leaves), len(standard.names)
    scope = "" if count == total else f"; seen in the leaves that are means: {count} of {total}"
    for cause, detail, x in _combinations(standard, case, c):
        if accounts(x):
            yield cause, detail + scope
            return


def scaled(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Tries a multiple of one batch if that is no mean of its examples, such as a clipped gradient."""
    leaves = case.among(range(len(standard.names)))
    factor = _factor(standard, case, leaves) if standard.combination[0] is None else 1.0
    if abs(factor - 1) > EPSILON:
        predicted = [x * factor for x in standard.best.floats]
        if accounts_for(standard, case, predicted, 1 + abs(factor), leaves):
            yield Cause.SCALED, f"by {factor:.6g}"


def _factor(standard: StepStandard, case: Case, leaves: Sequence[int]) -> float:
    """Fits a division's result by a multiple of one batch; returns 1 for a single number, which always fits."""
    allowed = standard.allowed(False)
    used = [i for i in leaves if allowed[i] > 0]
    one, result = (flat([x[i] / allowed[i] for i in used]) for x in (standard.best.floats, case.result.floats))
    return float(result @ one / (one @ one)) if np.count_nonzero(one) > 1 else 1.0


EPSILON = 1e-5
"""Difference of a factor from 1 that is ignored: divisors add an epsilon to the count."""


def _shares_in(standard: StepStandard, split: Split) -> dict[str, list[np.ndarray]]:
    """Returns the fraction of each unit in each part, for each partition of the examples."""
    units = standard.units()
    divided = {
        name: [share_in(units, rows) for rows in pieces]
        for name, pieces in partitions(standard.examples, split).items()
    }
    return {name: [p for p in pieces if p.any()] for name, pieces in divided.items()}


def _known(standard: StepStandard, split: Split, c: np.ndarray) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """Yields the weights of the units under known defects."""
    k, devices = split
    n = standard.examples
    counts = [(k, "microbatches"), (devices, "devices"), (k * devices, "microbatches on all devices")]
    counts += [(n, "examples"), *((total, "tokens") for total in standard.token_totals)]
    for count, name in counts:
        if count > 1:
            yield Cause.SUM, f"{count:g} times the mean; there are {count:g} {name}", c * count
            yield Cause.SCALED, f"by 1 / {count:g}: also {BY_NUMBER} {name}", c / count
    for padded in {n + (-n % k), n + (-n % (k * devices))} - {n}:
        yield Cause.PLACEHOLDERS, f"the last microbatch is padded with {padded - n} rows", c * n / padded
    divided = _shares_in(standard, split)
    for name, pieces in divided.items():
        means, weights = _mean_of_means(c, pieces), [float(c @ p) for p in pieces]
        text = f"they weigh from {min(weights):.4g} to {max(weights):.4g} in one batch{split_by(name)}"
        yield Cause.MEAN_OF_MEANS, text, means
        yield Cause.SUM, f"of the {len(pieces)} means{split_by(name)}", means * len(pieces)
    for rows in on_devices(n, split):
        kept = share_in(standard.units(), rows)
        if 0 < c @ kept < c.sum():
            text = f"it is the sum over examples {listed(rows)}"
            yield Cause.NOT_EXCHANGED, f"{text}, divided by their weight", c * kept / (c @ kept)
            yield Cause.NOT_EXCHANGED, f"{text}, divided by the weight of all examples", c * kept
            text += ", divided by their weight and the number of devices"
            yield Cause.NOT_EXCHANGED, text, c * kept / (c @ kept) / devices
    for pieces in divided.values():
        for piece in pieces:
            for kept in (1 - piece, piece):
                if 0 < c @ kept < c.sum() and len(pieces) > 1:
                    lost = _examples(standard, kept == 0)
                    if kept is piece and piece is pieces[-1]:
                        lost = f"all but the last microbatch: {lost}"
                    yield Cause.LOST, f"{lost}{DIVIDED_BY_REST}", c * kept / (c @ kept)
                    yield Cause.LOST, f"{lost}{DIVIDED_BY_ALL}", c * kept
            times = 1 + piece
            yield Cause.DOUBLED, _examples(standard, piece > 0), c * times / (c @ times)


DIVIDED_BY_REST = "; the rest is divided by its own weight"
DIVIDED_BY_ALL = "; the rest is divided by the weight of all examples"


def _combinations(standard: StepStandard, case: Case, c: np.ndarray) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """Yields the weights of the units under known defects, then those that are fitted to the result."""
    yield from _known(standard, case.split, c)
    factor = _factor(standard, case, case.among(standard.combination[1]))
    if abs(factor - 1) > EPSILON:
        yield Cause.SCALED, f"by {factor:.6g}", c * factor
    divided, k, devices = _shares_in(standard, case.split), *case.split
    x = standard.fit_units(case.result, case.split, case.wide, case.among(standard.combination[1]))
    if x is not None:
        yield from _levels(standard, case, c, x, divided)
        return
    index = np.arange(len(c))
    for chosen in [*(index == i for i in index), *(index >= len(c) - i for i in range(2, k * devices))]:
        if (c * chosen).any() and (c * ~chosen).any():
            yield Cause.LOST, f"{_examples(standard, chosen)}{DIVIDED_BY_REST}", c * ~chosen / (c @ ~chosen)
            yield Cause.LOST, f"{_examples(standard, chosen)}{DIVIDED_BY_ALL}", c * ~chosen
            yield Cause.DOUBLED, _examples(standard, chosen), c * (1 + chosen) / (c @ (1 + chosen))


def _levels(
    standard: StepStandard, case: Case, c: np.ndarray, x: np.ndarray, divided: dict[str, list[np.ndarray]]
) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """Yields causes that the fitted weights suggest, with the exact weights that they predict."""
    real = np.abs(c) > 1e-6 * np.abs(c).max()
    if np.any(np.abs(x[~real]) > SAME * np.abs(c).max()):
        entering = ~real & (np.abs(x) > SAME * np.abs(c).max())
        pairs = zip(entering, standard.columns(), strict=True)
        counts_alone = any(yes and y is not None and any(map(np.any, y.floats)) for yes, y in pairs)
        cause = Cause.SELECTION if counts_alone else Cause.PLACEHOLDERS
        yield cause, f"of weight 0 in one batch: {_examples(standard, entering)}", x
        return
    r = np.where(real, x / np.where(real, c, 1), 1)
    kept = r[real & (np.abs(r) > SAME)]
    if not len(kept):
        return
    for unit in {float(np.median(kept)), float(kept.min())}:
        times = np.round(r / unit)
        # Divided by the weight of all examples, or of those that are counted, as often as they are.
        by_all, by_counted = abs(unit - 1) < SAME, abs(float(c[real] @ times[real]) * unit - 1) < SAME
        if (
            (by_all or by_counted)
            and np.all(np.abs(r / unit - times)[real] < SAME)
            and np.any(times[real] != 1)
            and np.all(times[real] >= 0)
        ):
            lost, twice = _examples(standard, real & (times == 0)), _examples(standard, real & (times > 1))
            exact = np.where(real, c * times * unit, 0)
            if lost:
                yield Cause.LOST, lost + (f"; {twice} counted more than once" if twice else ""), exact
            else:
                yield Cause.DOUBLED, twice, exact
    for name, pieces in divided.items():
        if all(np.ptp(r[(p > 0) & real]) < SAME * np.abs(r).max() for p in pieces if (p > 0)[real].any()):
            factors = [float(np.mean(r[(p > 0) & real])) for p in pieces]
            factors = [a if abs(a) > 2.0**-20 * max(map(abs, factors)) else 0.0 for a in factors]
            exact = np.where(real, c * sum(a * (p > 0) for a, p in zip(factors, pieces, strict=True)), 0)
            text = f"the right weights are multiplied by {', '.join(f'{a:.4g}' for a in factors)}"
            if np.ptp(factors) > 2.0**-20 * max(factors) and _same_reversed(standard, case, c, factors, pieces):
                yield Cause.BY_PLACE, f"{text}, also with the examples reversed{split_by(name)}", exact
            cause = Cause.COEFFICIENTS if all(factors) else Cause.LOST
            yield cause, text + split_by(name), exact
    if not set(case.among(range(len(standard.names)))) - set(standard.combination[1]):
        yield Cause.COEFFICIENTS, f"{r[real].min():.4g} to {r[real].max():.4g} times the right ones", x


def _same_reversed(
    standard: StepStandard, case: Case, c: np.ndarray, factors: Sequence[float], pieces: Sequence[np.ndarray]
) -> bool:
    """Whether the weights have the same factors, position by position, with the examples in reverse order."""
    result = standard.division(case.split, case.wide, reverse=True) if len(c) == standard.examples else None
    if result is None:
        return False
    x = c * sum(a * (p > 0)[::-1] for a, p in zip(factors, pieces, strict=True))
    columns = [(a, y.floats) for a, y in zip(x, standard.columns(), strict=True) if y is not None]
    predicted = combined(np.array([a for a, _ in columns]), [y for _, y in columns])
    in_reverse = case._replace(result=result)
    return accounts_for(standard, in_reverse, predicted, float(np.abs(x).sum()), standard.combination[1])


def _mean_of_means(c: np.ndarray, pieces: Sequence[np.ndarray]) -> np.ndarray:
    weights = [float(c @ p) for p in pieces]
    return sum((c * p / w for p, w in zip(pieces, weights, strict=True) if w), np.zeros_like(c)) / len(pieces)


def _examples(standard: StepStandard, chosen: np.ndarray) -> str:
    rows = [row for unit, yes in zip(standard.units(), chosen, strict=True) if yes for row in unit]
    return f"example{'s' if len(rows) > 1 else ''} {listed(rows)}" if rows else ""


def listed(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:6])) + (f" and {len(rows) - 6} more" if len(rows) > 6 else "")
