"""Hypotheses about single elements of a result: overwritten rows and a narrow accumulator."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from gradcombine.verify.check.case import Answer, Case, combined, partitions, share_in, split_by
from gradcombine.verify.check.measure import StepStandard
from gradcombine.verify.check.running import Split
from gradcombine.verify.check.standard import Floats, flat, gamma, rms
from gradcombine.verify.check.step_report import Cause
from gradcombine.verify.compare.ulp import rounding_unit


def scattered(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Tries rows of a leaf that keep one contribution out of several."""
    units = len(standard.units())
    c = np.full(units, 1 / units) if standard.weights is None else standard.weights
    groups: list[tuple[str, list[Floats]]] = []
    columns = [x.floats for x in standard.columns() if x is not None]
    if len(columns) == units:
        groups.append(("examples", [[a * y for y in floats] for a, floats in zip(c, columns, strict=True)]))
    for name, pieces in partitions(standard.examples, case.split).items():
        parts = [x.floats for rows in pieces if (x := standard.repeated(rows)) is not None]
        if len(parts) == len(pieces):
            weights = [float(c @ share_in(standard.units(), rows)) for rows in pieces]
            terms: list[Floats] = [[a * y for y in floats] for a, floats in zip(weights, parts, strict=True)]
            groups.append((f"microbatches{split_by(name)}", terms))
    shares = standard.shares(case.result.floats, standard.best.floats, case.wide)
    allowed = standard.allowed(case.wide)
    for name, terms in groups:
        count = 0
        for i, share in enumerate(shares):
            if share <= 1:
                continue
            one, result = standard.best.floats[i], case.result.floats[i]
            if one.ndim < 2:
                break
            stack = np.stack([term[i] for term in terms]).reshape(len(terms), len(one), -1)
            errors = np.sqrt(np.mean(np.square(result.reshape(len(one), -1) - one.reshape(len(one), -1)), axis=1))
            wrong = errors > 4 * allowed[i]
            each = np.sqrt(np.mean(np.square(stack - result.reshape(1, len(one), -1)), axis=2)).min(axis=0)
            several = (np.abs(stack).max(axis=2) > 0).sum(axis=0) > 1
            if not wrong.any() or np.any(each[wrong] > 4 * allowed[i]) or not several[wrong].all():
                break
            count += int(wrong.sum())
        else:
            if count:
                yield Cause.SCATTER, f"{count} rows keep one contribution out of several {name}"
                return


NARROW = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
"""Dtypes of narrow accumulators; the second one has more digits."""

MIN_ELEMENTS = 16
"""Minimal number of elements beyond the rounding bound at which an accumulator is blamed."""

CORRELATED = 0.9
"""Correlation of two errors above which they are not due to rounding."""


def narrow(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Tries 16-bit rounding in each element, uncorrelated with that under another number of microbatches.

    Excludes other causes: an added term such as weight decay does not shrink with an element's gradients, and a change
    at each microbatch is the same for twice as many microbatches, but twice as large.
    """
    k, devices = case.split
    other = Split(2 * k if 2 * k * devices <= standard.examples else k // 2, devices)
    second = standard.division(other, wide=False) if other.microbatches > 1 else None
    columns = [x.floats for x in standard.columns() if x is not None]
    if second is None or len(columns) < len(standard.units()):
        return
    weights = standard.estimated_weights
    c = np.full(len(columns), 1 / len(columns)) if weights is None else np.abs(weights)
    sizes = flat(combined(c, [[np.abs(x) for x in floats] for floats in columns]))
    one = standard.best.floats
    allowed = flat(standard.resolution(one))
    errors = [flat(x.floats) - flat(one) for x in (case.native, second)]
    norms = [float(np.linalg.norm(x)) for x in errors]
    correlation = float(errors[0] @ errors[1]) / max(norms[0] * norms[1], 1e-300)
    if np.count_nonzero(np.abs(errors[0]) > allowed) < MIN_ELEMENTS or correlation > CORRELATED:
        return
    units = [gamma(2 * split.microbatches + 1, rounding_unit(NARROW[0])) for split in (case.split, other)]
    if all(np.all(np.abs(x) <= u * sizes + allowed) for x, u in zip(errors, units, strict=True)):
        size, other_size = map(rms, errors)
        text = f"errors are within 16-bit rounding: {size:.3g} on average, and {other_size:.3g} with {other}"
        yield Cause.PRECISION, text
