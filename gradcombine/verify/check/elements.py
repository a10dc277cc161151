"""Causes that single elements of a result show: overwritten rows, and a narrow accumulator."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from gradcombine.verify.check.case import Answer, Case, combined, partitions, share_in
from gradcombine.verify.check.measure import StepStandard
from gradcombine.verify.check.running import Split
from gradcombine.verify.check.standard import Floats, flat, gamma, rms
from gradcombine.verify.check.step_report import Cause
from gradcombine.verify.compare.ulp import rounding_unit


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


def narrow(standard: StepStandard, case: Case) -> Iterator[Answer]:
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
