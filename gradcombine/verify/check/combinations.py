"""Divisions that are combinations of examples: weights that known defects give them, and weights that are fitted."""

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
    """Examples that weigh something else than they should."""
    c, leaves = standard.combination
    leaves = case.among(leaves)
    if c is None or not leaves or not np.isfinite(flat([*case.result.floats, *standard.best.floats])).all():
        return
    columns = [None if x is None else x.floats for x in standard.columns()]

    def accounts(x: np.ndarray) -> bool:
        used = [(a, floats) for a, floats in zip(x, columns, strict=True) if floats is not None]
        predicted = combined(np.array([a for a, _ in used]), [floats for _, floats in used])
        return accounts_for(standard, case, predicted, float(np.abs(x).sum()), leaves)

    some = "" if len(leaves) == len(standard.names) else f"; seen in {len(leaves)} leaves that are means"
    for cause, detail, x in _combinations(standard, case, c):
        if accounts(x):
            yield cause, detail + some
            return


def scaled(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """One batch times a factor where it is no mean of its examples, as a clipped gradient is none."""
    leaves = case.among(range(len(standard.names)))
    factor = _factor(standard, case, leaves) if standard.combination[0] is None else 1.0
    if abs(factor - 1) > EPSILON:
        predicted = [x * factor for x in standard.best.floats]
        if accounts_for(standard, case, predicted, 1 + abs(factor), leaves):
            yield Cause.SCALED, f"by {factor:.6g}"


def _factor(standard: StepStandard, case: Case, leaves: Sequence[int]) -> float:
    """The factor of one batch that is nearest to a division's result; 1 for a single number, which always has one."""
    allowed = standard.allowed(False)
    some = [i for i in leaves if allowed[i] > 0]
    whole, result = (flat([x[i] / allowed[i] for i in some]) for x in (standard.best.floats, case.result.floats))
    return float(result @ whole / (whole @ whole)) if np.count_nonzero(whole) > 1 else 1.0


EPSILON = 1e-5
"""By how much a factor may differ from 1 that is none: divisors have an epsilon beside the count."""


def _shares_in(standard: StepStandard, split: Split) -> dict[str, list[np.ndarray]]:
    """The part of each unit that is in each piece, for the ways to divide the examples."""
    units = standard.units()
    divided = {
        name: [share_in(units, rows) for rows in pieces]
        for name, pieces in partitions(standard.examples, split).items()
    }
    return {name: [p for p in pieces if p.any()] for name, pieces in divided.items()}


def _known(standard: StepStandard, split: Split, c: np.ndarray) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """The weights of the units where microbatches are combined as known defects do."""
    k, devices = split
    n = standard.examples
    counts = [(k, "microbatches"), (devices, "devices"), (k * devices, "microbatches of all devices")]
    counts += [(n, "examples"), *((total, "tokens") for total in standard.totals)]
    for count, name in counts:
        if count > 1:
            yield Cause.SUM, f"{count:g} times the mean: the number of {name}", c * count
            yield Cause.SCALED, f"by 1 / {count:g}: {BY_NUMBER} {name} too", c / count
    for filled in {n + (-n % k), n + (-n % (k * devices))} - {n}:
        yield Cause.PLACEHOLDERS, f"{filled - n} rows that fill up the last microbatch are counted", c * n / filled
    divided = _shares_in(standard, split)
    for name, pieces in divided.items():
        means, weights = _mean_of_means(c, pieces), [float(c @ p) for p in pieces]
        text = f"they weigh from {min(weights):.4g} to {max(weights):.4g} in one batch{split_by(name)}"
        yield Cause.MEAN_OF_MEANS, text, means
        yield Cause.SUM, f"of the {len(pieces)} means{split_by(name)}", means * len(pieces)
    for rows in on_devices(n, split):
        kept = share_in(standard.units(), rows)
        if 0 < c @ kept < c.sum():
            text = f"it is what examples {shown(rows)} give"
            yield Cause.NOT_EXCHANGED, f"{text}, divided by their weight", c * kept / (c @ kept)
            yield Cause.NOT_EXCHANGED, f"{text}, divided by the weight of all", c * kept
            yield Cause.NOT_EXCHANGED, f"{text}, divided by the number of devices", c * kept / (c @ kept) / devices
    for pieces in divided.values():
        for piece in pieces:
            for kept in (1 - piece, piece):
                if 0 < c @ kept < c.sum() and len(pieces) > 1:
                    lost = _named(standard, kept == 0)
                    if kept is piece and piece is pieces[-1]:
                        lost = f"all but the last microbatch: {lost}"
                    yield Cause.LOST, f"{lost}, divided by the rest", c * kept / (c @ kept)
                    yield Cause.LOST, f"{lost}, divided by all", c * kept
            more = 1 + piece
            yield Cause.DOUBLED, _named(standard, piece > 0), c * more / (c @ more)


def _combinations(standard: StepStandard, case: Case, c: np.ndarray) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """The weights of the units under each known combination."""
    yield from _known(standard, case.split, c)
    factor = _factor(standard, case, case.among(standard.combination[1]))
    if abs(factor - 1) > EPSILON:  # an epsilon in a divisor scales by almost 1
        yield Cause.SCALED, f"by {factor:.6g}", c * factor
    divided, k, devices = _shares_in(standard, case.split), *case.split
    x = standard.fitted(case.result, case.split, case.wide, case.among(standard.combination[1]))
    if x is not None:
        yield from _levels(standard, case, c, x, divided)
        return
    at = np.arange(len(c))
    for chosen in [*(at == i for i in at), *(at >= len(c) - i for i in range(2, k * devices))]:
        if (c * chosen).any() and (c * ~chosen).any():
            yield Cause.LOST, f"{_named(standard, chosen)}, divided by the rest", c * ~chosen / (c @ ~chosen)
            yield Cause.LOST, f"{_named(standard, chosen)}, divided by all", c * ~chosen
            yield Cause.DOUBLED, _named(standard, chosen), c * (1 + chosen) / (c @ (1 + chosen))


def _levels(
    standard: StepStandard, case: Case, c: np.ndarray, x: np.ndarray, divided: dict[str, list[np.ndarray]]
) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """Causes that the fitted coefficients show, with the weights that they predict."""
    real = np.abs(c) > 1e-6 * np.abs(c).max()
    if np.any(np.abs(x[~real]) > SAME * np.abs(c).max()):
        entering = ~real & (np.abs(x) > SAME * np.abs(c).max())
        pairs = zip(entering, standard.columns(), strict=True)
        counts_alone = any(yes and y is not None and any(map(np.any, y.floats)) for yes, y in pairs)
        cause = Cause.SELECTION if counts_alone else Cause.PLACEHOLDERS
        yield cause, f"of weight 0 in one batch: {_named(standard, entering)}", x
        return
    r = np.where(real, x / np.where(real, c, 1), 1)
    kept = r[real & (np.abs(r) > SAME)]
    if not len(kept):
        return
    for unit in {float(np.median(kept)), float(kept.min())}:
        times = np.round(r / unit)
        # Divided by all, or by what is there.
        by_all, by_these = abs(unit - 1) < SAME, abs(float(c[real] @ times[real]) * unit - 1) < SAME
        if (
            (by_all or by_these)
            and np.all(np.abs(r / unit - times)[real] < SAME)
            and np.any(times[real] != 1)
            and np.all(times[real] >= 0)
        ):
            lost, twice = _named(standard, real & (times == 0)), _named(standard, real & (times > 1))
            snapped = np.where(real, c * times * unit, 0)
            if lost:
                yield Cause.LOST, lost + (f"; {twice} count more than once" if twice else ""), snapped
            else:
                yield Cause.DOUBLED, twice, snapped
    for name, pieces in divided.items():
        if all(np.ptp(r[(p > 0) & real]) < SAME * np.abs(r).max() for p in pieces if (p > 0)[real].any()):
            by_place = [float(np.mean(r[(p > 0) & real])) for p in pieces]
            by_place = [a if abs(a) > 2.0**-20 * max(map(abs, by_place)) else 0.0 for a in by_place]
            snapped = np.where(real, c * sum(a * (p > 0) for a, p in zip(by_place, pieces, strict=True)), 0)
            places = ", ".join(f"{a:.4g}" for a in by_place)
            if np.ptp(by_place) > 2.0**-20 * max(by_place) and _turned(standard, case, c, by_place, pieces):
                yield (
                    Cause.BY_PLACE,
                    f"microbatches count {places} times, in reverse order too{split_by(name)}",
                    snapped,
                )
            cause = Cause.COEFFICIENTS if all(by_place) else Cause.LOST
            yield cause, f"microbatches count {places} times{split_by(name)}", snapped
    if not set(case.among(range(len(standard.names)))) - set(standard.combination[1]):
        yield Cause.COEFFICIENTS, f"from {r[real].min():.4g} to {r[real].max():.4g} times theirs", x


def _turned(
    standard: StepStandard, case: Case, c: np.ndarray, by_place: Sequence[float], pieces: Sequence[np.ndarray]
) -> bool:
    """Whether the examples in reverse order have the same factors, place by place."""
    result = standard.division(case.split, case.wide, backwards=True) if len(c) == standard.examples else None
    if result is None:
        return False
    x = c * sum(a * (p > 0)[::-1] for a, p in zip(by_place, pieces, strict=True))
    columns = [(a, y.floats) for a, y in zip(x, standard.columns(), strict=True) if y is not None]
    predicted = combined(np.array([a for a, _ in columns]), [y for _, y in columns])
    turned = case._replace(result=result)
    return accounts_for(standard, turned, predicted, float(np.abs(x).sum()), standard.combination[1])


def _mean_of_means(c: np.ndarray, pieces: Sequence[np.ndarray]) -> np.ndarray:
    weights = [float(c @ p) for p in pieces]
    return sum((c * p / w for p, w in zip(pieces, weights, strict=True) if w), np.zeros_like(c)) / len(pieces)


def _named(standard: StepStandard, chosen: np.ndarray) -> str:
    rows = [row for unit, yes in zip(standard.units(), chosen, strict=True) if yes for row in unit]
    return f"example{'s' if len(rows) > 1 else ''} {shown(rows)}" if rows else ""


def shown(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:6])) + (f" and {len(rows) - 6} more" if len(rows) > 6 else "")
