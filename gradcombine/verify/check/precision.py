"""Explains a division that rounds more coarsely than one batch."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.verify.check.case import Case, Prediction
from gradcombine.verify.check.leaves import flat, perturbation
from gradcombine.verify.check.running import ONE_BATCH, Floats, Split, Subject
from gradcombine.verify.check.standard import Standard, combined
from gradcombine.verify.check.step_program import may_be_narrow
from gradcombine.verify.check.step_report import Cause
from gradcombine.verify.compare.ulp import rounding_unit


def rounded(case: Case) -> Iterator[Prediction]:
    """Compares the results in float64."""
    equal = all(map(np.array_equal, case.result.integers, case.standard.best.integers))
    if case.wide and equal and case.shares().max() <= 1:
        yield Prediction(Cause.PRECISION, "in float64 it equals one batch, so its additions round too coarsely")


NARROW, HALF = rounding_unit(np.dtype(ml_dtypes.bfloat16)), rounding_unit(np.dtype(np.float16))
"""Unit roundoff of the narrowest accumulators, and of float16."""

MIN_NARROW = 16
"""Minimal number of elements beyond the rounding bound at which an accumulator is blamed; also a 16th of those in
which float16 rounds by more than the bound."""

ELEMENTS, POINTS = 128, 32
"""Number of elements that are compared, at up to this number of parameters if a result has few of them."""

CORRELATED = 0.9
"""Correlation of two errors above which they are not due to rounding."""

NEARBY = 2.0**-4
"""Relative distance of inputs that round otherwise, but change smooth functions little."""


def narrow(case: Case) -> Iterator[Prediction]:
    """Tries 16-bit rounding in each element, uncorrelated with that of other numbers of microbatches or nearby inputs.

    Excludes other causes: an added term such as weight decay does not shrink with an element's gradients, a change at
    each microbatch is twice as large for twice as many microbatches, a threshold changes few elements, and others are
    smooth functions of the inputs.
    """
    standard, subject, (k, devices) = case.standard, case.standard.subject, case.split
    other = Split(2 * k if 2 * k * devices <= standard.examples else k // 2, devices)
    if other.microbatches < 2 or not any(standard.columns) or not may_be_narrow(subject, case.split):
        return
    points = min(-(-ELEMENTS // sum(x.size for x in standard.best.floats)), POINTS)
    rows = list[list[np.ndarray]]()
    try:
        for seed in range(points):
            here = standard.at(subject.perturbed(perturbation(seed, 0.5, 0.5))) if seed else standard
            errors = _errors(here, standard.estimated_weights, case.split, other)
            *both, _, sizes, allowed = errors
            limits = ((2 * x.microbatches + 1) * NARROW * sizes + allowed for x in (case.split, other))
            if any(np.any(np.abs(x) > limit) for x, limit in zip(both, limits, strict=True)):
                return
            rows.append(errors)
    except GradCombineError:
        return
    error, second, near, sizes, allowed = (np.concatenate(x) for x in zip(*rows, strict=True))
    norms = [max(float(np.linalg.norm(error) * np.linalg.norm(x)), 1e-300) for x in (second, near)]
    correlations = [float(error @ x) / norm for x, norm in zip((second, near), norms, strict=True)]
    beyond, expected = np.count_nonzero(np.abs(error) > allowed), np.count_nonzero(HALF * sizes > allowed)
    if beyond >= max(MIN_NARROW, expected / 16) and max(correlations) <= CORRELATED:
        size = f"{np.abs(error).max():.3g} at most, and {np.abs(second).max():.3g} with {other}"
        yield Prediction(Cause.PRECISION, f"errors are within 16-bit rounding: {size}")


def _errors(standard: Standard, weights: np.ndarray | None, split: Split, other: Split) -> list[np.ndarray]:
    """Returns the errors of a division, of another one, and of the division of nearby inputs.

    Beside them, the sizes of the sums and the allowed errors, for each element of the result.
    """
    subject, one = standard.subject, standard.best.floats
    results: list[Floats] = [subject.run(x, subject.batch).floats for x in (split, other)]
    near, near_one = (_nearby(subject, x) for x in (split, ONE_BATCH))
    columns = {i: x.floats for i, x in enumerate(standard.columns) if x is not None}
    c = np.full(len(columns), 1 / len(columns)) if weights is None else np.abs(weights[[*columns]])
    c = c / max(c.sum(), 1)  # weights fitted to the signs of Adam's first step may be large and cancel
    sizes = flat(combined(c, [[np.abs(x) for x in floats] for floats in columns.values()]))
    allowed = np.repeat(2 * standard.allowed(False), [x.size for x in one])
    return [*(flat(x) - flat(one) for x in results), near - near_one, sizes, allowed]


def _nearby(subject: Subject, split: Split) -> np.ndarray:
    """Returns the result of a division for nearby inputs, which are the same for all divisions."""
    noises = perturbation(0, NEARBY), perturbation(1, NEARBY)
    return flat(subject.run(split, subject.batch, noise=noises[0], batch_noise=noises[1]).floats)
