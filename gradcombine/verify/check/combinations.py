"""Hypotheses that a division is a linear combination of examples or of microbatches, or one batch of other examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import lcm

import numpy as np

from gradcombine.verify.check.case import Case, Prediction, numbers, share_in, split_by
from gradcombine.verify.check.leaves import as_floats, flat
from gradcombine.verify.check.running import ONE_BATCH, Result, Rows
from gradcombine.verify.check.standard import SAME, Standard, combined
from gradcombine.verify.check.step_program import BY_NUMBER
from gradcombine.verify.check.step_report import Cause

Weighted = Iterator[tuple[Cause, str, np.ndarray]]
"""Causes with their details and the weights of the examples that they predict."""


def linear(case: Case, by_fit: bool | None = None) -> Iterator[Prediction]:
    """Tries weights of the examples that differ from those in one batch.

    Args:
      by_fit: whether weights are fitted to some leaves alone, which a running mean, itself a mean of the examples,
        allows beside gradients that statistics change; None: all weights.
    """
    standard = case.standard
    c, means = standard.combination
    leaves = case.among(means)
    if c is None or not leaves:
        return
    count, total = len(leaves), len(standard.names)
    scope = "" if count == total else f"; seen in the leaves that are means: {count} of {total}"
    for cause, detail, x in _combinations(case, c):
        fitted = count < total and cause in (Cause.BY_PLACE, Cause.COEFFICIENTS)
        if by_fit is not None and by_fit != fitted:
            continue
        if fitted and _are_separate(case, sorted(set(standard.gradients) - set(means))):
            return
        yield Prediction(cause, detail + scope, standard.mixed(x), float(np.abs(x).sum()), leaves)


def _are_separate(case: Case, leaves: Sequence[int]) -> bool:
    """Whether those of these leaves that have to be explained are the mean of the microbatches' separate results."""
    return any(
        case.accounts_for(combined(weights, floats), 1, leaves)
        for _, pieces, floats in case.separate_results()
        for weights in case.weights_of(pieces)
    )


def scaled(case: Case) -> Iterator[Prediction]:
    """Tries a multiple of one batch if that is no mean of its examples, such as a clipped gradient."""
    standard = case.standard
    leaves = case.among(range(len(standard.names)))
    factor = _factor(case, leaves) if standard.combination[0] is None else 1.0
    if abs(factor - 1) > EPSILON:
        floats = [x * factor for x in standard.best.floats]
        yield Prediction(Cause.SCALED, f"by {factor:.6g}", floats, 1 + abs(factor), leaves)


def scaled_apart(case: Case) -> Iterator[Prediction]:
    """Tries an update whose gradients are multiplied, but whose weight decay is not: ``a * update + b * params``."""
    standard, subject = case.standard, case.standard.subject
    if not subject.returns_params:
        return
    params = [as_floats(x) for _, x in subject.param_leaves]
    leaves, allowed = case.among(range(len(params))), standard.allowed(case.wide)
    one, result, start = (
        flat([x[i].ravel() / allowed[i] for i in leaves if allowed[i] > 0])
        for x in (standard.best.floats, case.result.floats, params)
    )
    if np.count_nonzero(one) <= FITTED:  # always fits
        return
    (a, b), _, rank, _ = np.linalg.lstsq(np.stack([one, start], axis=1), result)
    if rank < FITTED or min(abs(a), abs(a - 1)) <= EPSILON or np.abs(b * start).max() <= 1:
        return  # without an addition beyond rounding, another hypothesis names the factor
    counts = {case.split.microbatches: "microbatches", case.split.devices: "devices"}
    number = next((n for n in counts if n > 1 and abs(a - n) <= EPSILON * n), None)
    size = f"by {a:.6g}" if number is None else f"{number} times the mean; there are {number} {counts[number]}"
    text = f"{size}; all but {b / (1 - a):.3g} times the parameters, as of weight decay"
    floats = [*(a * x + b * y for x, y in zip(standard.best.floats, params, strict=False))]
    cause = Cause.SCALED if number is None else Cause.SUM
    yield Prediction(cause, text, [*floats, *standard.best.floats[len(params) :]], 1 + abs(a), leaves)


FITTED = 2
"""Number of coefficients of `scaled_apart`."""


def _factor(case: Case, leaves: Sequence[int]) -> float:
    """Fits a division's result by a multiple of one batch; returns 1 for a single number, which always fits."""
    allowed = case.standard.allowed(False)
    used = [i for i in leaves if allowed[i] > 0]
    one, result = (flat([x[i] / allowed[i] for i in used]) for x in (case.standard.best.floats, case.result.floats))
    factor = float(result @ one / (one @ one)) if np.count_nonzero(one) > 1 else 1.0
    return 0.0 if abs(factor) <= EPSILON else factor


EPSILON = 1e-5
"""Difference of a factor from 1 or 0 that is ignored: divisors add an epsilon to the count."""


def _shares_in(case: Case) -> dict[str, list[np.ndarray]]:
    """Returns the fraction of each unit in each part, for each partition of the examples."""
    units = case.standard.units
    return {name: [share_in(units, rows) for rows in pieces] for name, pieces in case.partitions.items()}


def _known(case: Case, c: np.ndarray) -> Weighted:
    """Yields the weights of the units under known defects."""
    standard, (k, devices) = case.standard, case.split
    n = standard.examples
    counts = [(k, "microbatches"), (devices, "devices"), (k * devices, "microbatches on all devices")]
    counts += [(n, "examples"), *((total, "tokens") for total in standard.token_totals)]
    for count, name in counts:
        if count > 1:
            yield Cause.SUM, f"{count:g} times the mean; there are {count:g} {name}", c * count
            yield Cause.SCALED, f"by 1 / {count:g}: also {BY_NUMBER} {name}", c / count
    for padded in {n + (-n % k), n + (-n % (k * devices))} - {n}:
        yield Cause.PLACEHOLDERS, f"the last microbatch is padded with {padded - n} rows", c * n / padded
    divided = _shares_in(case)
    for name, pieces in divided.items():
        weights = [float(c @ p) for p in pieces]
        means = sum((c * p / w for p, w in zip(pieces, weights, strict=True) if w), np.zeros_like(c)) / len(pieces)
        text = f"they weigh from {min(weights):.4g} to {max(weights):.4g} in one batch{split_by(name)}"
        yield Cause.MEAN_OF_MEANS, text, means
        yield Cause.SUM, f"of the {len(pieces)} means{split_by(name)}", means * len(pieces)
    for rows in case.on_devices:
        kept = share_in(standard.units, rows)
        if 0 < c @ kept < c.sum():
            text = f"it is the sum over examples {numbers(rows)}"
            yield Cause.NOT_EXCHANGED, f"{text}, divided by their weight", c * kept / (c @ kept)
            yield Cause.NOT_EXCHANGED, f"{text}, divided by the weight of all examples", c * kept
            text += ", divided by their weight and the number of devices"
            yield Cause.NOT_EXCHANGED, text, c * kept / (c @ kept) / devices
    for pieces in divided.values():
        for piece in pieces:
            for kept in (1 - piece, piece):
                if 0 < c @ kept < c.sum():
                    lost = _examples(standard, kept == 0)
                    if kept is piece and piece is pieces[-1]:
                        lost = f"all but the last microbatch: {lost}"
                    yield Cause.LOST, f"{lost}{DIVIDED_BY_REST}", c * kept / (c @ kept)
                    yield Cause.LOST, f"{lost}{DIVIDED_BY_ALL}", c * kept
            times = 1 + piece
            yield Cause.DOUBLED, _examples(standard, piece > 0), c * times / (c @ times)


DIVIDED_BY_REST = "; the rest is divided by its own weight"
DIVIDED_BY_ALL = "; the rest is divided by the weight of all examples"


def _combinations(case: Case, c: np.ndarray) -> Weighted:
    """Yields the weights of the units under known defects, then those that are fitted to the result."""
    yield from _known(case, c)
    standard = case.standard
    leaves = case.among(standard.combination[1])
    factor = _factor(case, leaves)
    if abs(factor - 1) > EPSILON:
        yield Cause.SCALED, f"by {factor:.6g}", c * factor
    divided, k, devices = _shares_in(case), *case.split
    x = standard.fit_units(case.result, case.split, case.wide, leaves)
    if x is not None:
        yield from _levels(case, c, x, divided)
        return
    index = np.arange(len(c))
    for chosen in [*(index == i for i in index), *(index >= len(c) - i for i in range(2, k * devices))]:
        if (c * chosen).any() and (c * ~chosen).any():
            yield Cause.LOST, f"{_examples(standard, chosen)}{DIVIDED_BY_REST}", c * ~chosen / (c @ ~chosen)
            yield Cause.LOST, f"{_examples(standard, chosen)}{DIVIDED_BY_ALL}", c * ~chosen
            yield Cause.DOUBLED, _examples(standard, chosen), c * (1 + chosen) / (c @ (1 + chosen))


def _levels(case: Case, c: np.ndarray, x: np.ndarray, divided: dict[str, list[np.ndarray]]) -> Weighted:
    """Yields causes that the fitted weights suggest, with the exact weights that they predict."""
    standard = case.standard
    real = np.abs(c) > 1e-6 * np.abs(c).max()
    if np.any(np.abs(x[~real]) > SAME * np.abs(c).max()):
        entering = ~real & (np.abs(x) > SAME * np.abs(c).max())
        pairs = zip(entering, standard.columns, strict=True)
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
            elif len(np.unique(times[real])) <= 2:  # more are the powers of a decay, below
                yield Cause.DOUBLED, twice, exact
    for name, pieces in divided.items():
        counted = [(p > 0) & real for p in pieces]
        if all(x.any() and np.ptp(r[x]) < SAME * np.abs(r).max() for x in counted):
            factors = [float(np.mean(r[x])) for x in counted]
            factors = [a if abs(a) > 2.0**-20 * max(map(abs, factors)) else 0.0 for a in factors]
            exact = np.where(real, c * sum(a * (p > 0) for a, p in zip(factors, pieces, strict=True)), 0)
            text = f"the right weights are multiplied by {', '.join(f'{a:.4g}' for a in factors)}"
            if np.ptp(factors) > 2.0**-20 * max(factors) and _same_reversed(case, c, factors, pieces):
                yield Cause.BY_PLACE, f"{text}, also with the examples reversed{split_by(name)}", exact
            # Means whose divisors single examples do not show, as max(count, 1) for an example without tokens.
            shares = [1 / (len(factors) * a) if a else 0.0 for a in factors]
            if min(shares) > 0 and np.ptp(shares) > EPSILON and abs(sum(shares) - 1) < EPSILON:
                seen = f"they weigh from {min(shares):.4g} to {max(shares):.4g} in one batch"
                yield Cause.MEAN_OF_MEANS, seen + split_by(name), exact
            cause = Cause.COEFFICIENTS if all(factors) else Cause.LOST
            yield cause, text + split_by(name), exact
    if case.all_are_means and r[real].min() > -SAME:
        yield Cause.COEFFICIENTS, f"{r[real].min():.4g} to {r[real].max():.4g} times the right ones", x


def _same_reversed(case: Case, c: np.ndarray, factors: Sequence[float], pieces: Sequence[np.ndarray]) -> bool:
    """Whether the weights have the same factors, up to a common one, with the examples in reverse order."""
    standard = case.standard
    if len(c) != standard.examples or (result := standard.in_reverse(case.split, case.wide)) is None:
        return False
    by_place = np.sum([a * (p > 0) for a, p in zip(factors, pieces, strict=True)], axis=0)
    x, in_reverse = c * by_place[::-1], case._replace(result=result)
    # Divided as before, or by the sum of the weights.
    return any(
        in_reverse.accounts_for(standard.mixed(a * x), abs(a) * float(np.abs(x).sum()), standard.combination[1])
        for a in (1.0, float(c @ by_place) / (float(x.sum()) or 1.0))
    )


def _examples(standard: Standard, chosen: np.ndarray) -> str:
    rows = [row for unit, yes in zip(standard.units, chosen, strict=True) if yes for row in unit]
    return f"example{'s' if len(rows) > 1 else ''} {numbers(rows)}" if rows else ""


# --- one batch with repeated or missing examples, for nonlinear steps ---

MOST_ROWS = 256
"""Maximal size of a batch in which examples are repeated."""

CONFIRMATIONS = 2
"""Number of perturbed parameters at which a cause is confirmed."""


def repeated(case: Case) -> Iterator[Prediction]:
    """Runs the full step on batches with repeated or missing examples, for Adam or clipping of the mean."""
    standard = case.standard
    if standard.gradient_examined or case.all_are_means:
        return  # explained by the gradient, at a lower cost: each number of rows needs a compilation
    for cause, detail, repeats in chain(_as_means(case), _as_lost(case)):
        if repeats.sum() <= MOST_ROWS:
            rows = np.repeat(np.arange(standard.examples), repeats.astype(int)).tolist()
            result = standard.one(rows)
            if result is not None and (not standard.hides_sizes or _holds_elsewhere(case, tuple(rows), result)):
                text = f"{detail}; confirmed by one batch of {len(rows)} rows with these weights"
                yield Prediction(cause, text, result.floats, 1)


def _holds_elsewhere(case: Case, rows: Rows, result: Result) -> bool:
    """Whether one batch of these rows also is the division at other parameters: a few signs may agree by chance."""
    standard = case.standard
    if not case.accounts_for(result.floats, 1):
        return False
    for seed in range(CONFIRMATIONS):
        one = standard.elsewhere(seed, ONE_BATCH, rows, standard.wide is not None)
        divided = standard.elsewhere(seed, case.split, None, case.wide)
        if one is None or divided is None or standard.shares(divided.floats, one.floats, case.wide).max() > 1:
            return False
    return True


def _as_lost(case: Case) -> Weighted:
    every = np.arange(case.standard.examples)
    for rows in case.on_devices:
        yield Cause.NOT_EXCHANGED, f"it is the result of rows {numbers(rows)}", 1.0 * np.isin(every, rows)
    for name, pieces in case.partitions.items():
        for rows in pieces:
            inside = np.isin(every, rows)
            yield Cause.LOST, f"rows {numbers(rows)}{split_by(name)}", 1 - inside
            yield Cause.DOUBLED, f"rows {numbers(rows)}{split_by(name)}", 1 + inside


def _as_means(case: Case) -> Weighted:
    """Gives microbatches equal weights, with counts of the examples from a leaf of the batch such as a mask."""
    for counts in case.standard.counts():
        for name, pieces in case.partitions.items():
            weights = [int(counts[list(rows)].sum()) for rows in pieces]
            if np.all(counts == np.round(counts)) and min(weights) > 0 and len(set(weights)) > 1:
                repeats, multiple = np.zeros(len(counts), object), lcm(*weights)  # may exceed 64 bits
                for rows, weight in zip(pieces, weights, strict=True):
                    repeats[list(rows)] = multiple // weight
                text = f"they weigh from {min(weights)} to {max(weights)} in one batch{split_by(name)}"
                yield Cause.MEAN_OF_MEANS, text, repeats
