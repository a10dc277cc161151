"""What the elements of a result tell: rows that were overwritten, and additions in a narrow accumulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gradcombine.verify.microbatches.causes import Cause
from gradcombine.verify.microbatches.combination import NARROW
from gradcombine.verify.steps.case import Answer, Case, partitions, share_in, split_by
from gradcombine.verify.steps.measure import Floats, Standard
from gradcombine.verify.steps.running import WHOLE, Rows


def scattered(standard: Standard, case: Case) -> Iterator[Answer]:
    """Rows of a leaf that keep one contribution of several."""
    units = len(standard.units())
    c = np.full(units, 1 / units) if standard.weights is None else standard.weights
    groups: list[tuple[str, list[Floats]]] = []
    columns = standard.columns()
    if all(x is not None for x in columns):
        groups.append(
            ("examples", [[a * y for y in x.floats] for a, x in zip(c, columns, strict=True) if x is not None])
        )
    for name, pieces in partitions(standard.subject.examples, case.split).items():
        parts = [standard.one(rows) for rows in pieces]
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
            if not wrong.any() or wrong.all() or np.any(each[wrong] > 4 * allowed[i]) or not several[wrong].all():
                break
            found += int(wrong.sum())
        else:
            if found:
                yield Cause.SCATTER, f"{found} rows keep one contribution of those of several {name}"
                return


TELLING = 32
"""How many elements have to agree before an accumulator is blamed."""


def narrow(standard: Standard, case: Case) -> Iterator[Answer]:
    """Additions in a narrow accumulator, by the bits that they leave: in 99 of 100 elements those of the result."""
    subject, allowed = standard.subject, standard.allowed(wide=False)
    made, whole = case.own.floats, standard.best.floats
    far = [i for i, x in enumerate(standard.shares(made, whole, wide=False)) if x > 1]
    for name, pieces in partitions(subject.examples, case.split).items():
        try:
            parts = [subject.run(WHOLE, subject.rows(rows)).floats for rows in pieces]
        except ValueError:
            continue
        for dtype in NARROW:
            for text, terms, divisor in _ways(standard, pieces):
                sums = [_chain([a * x[i] for a, x in zip(terms, parts, strict=True)], dtype) / divisor for i in far]
                hits = sum(_near(made[i], x, allowed[i]) for i, x in zip(far, sums, strict=True))
                total = sum(made[i].size for i in far)
                if total >= TELLING and hits >= 0.99 * total:
                    yield Cause.PRECISION, f"additions in {dtype} give it, {text}{split_by(name)}"
                    return
    for dtype in NARROW:
        for times in {1.0, float(case.split.microbatches), *_totals(standard)}:
            values = np.concatenate([made[i].ravel() * times for i in far] or [np.zeros(0)])
            values = values[values != 0]
            rounded = values.astype(np.float32).astype(dtype).astype(np.float64)
            if len(values) >= TELLING and np.mean(np.abs(values - rounded) <= 2**-22 * np.abs(values)) > 0.999:
                yield Cause.PRECISION, f"every element is a {dtype}" + (f" over {times:g}" if times > 1 else "")
                return


def _totals(standard: Standard) -> list[float]:
    """Of how many tokens the examples' weights can be the parts: numbers that make integers of all of them."""
    if standard.likely is None:
        return []
    totals = np.arange(1, 2049)
    parts = totals[:, None] * standard.likely
    return [float(x) for x in totals[np.abs(parts - np.round(parts)).max(axis=1) < 0.02][:3]]


def _ways(standard: Standard, pieces: Sequence[Rows]) -> Iterator[tuple[str, np.ndarray, float]]:
    """Names, factors of the terms, and what their sum is divided by."""
    sizes = np.array([len(x) for x in pieces], np.float64)
    yield "divided at the end", np.ones(len(pieces)), float(len(pieces))
    yield "of parts of the mean", sizes / sizes.sum(), 1.0
    yield "of sums, divided at the end", sizes, float(sizes.sum())
    if standard.likely is not None:
        parts = np.array([standard.likely @ share_in(standard.units(), rows) for rows in pieces])
        yield "of parts of the mean", parts, 1.0
        for total in _totals(standard):
            yield "of sums, divided at the end", np.round(parts * total), total


def _chain(terms: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    total = terms[0].astype(np.float32).astype(dtype)
    for term in terms[1:]:
        total = total + term.astype(np.float32).astype(dtype)
    return total.astype(np.float64)


def _near(x: np.ndarray, y: np.ndarray, allowed: float) -> int:
    return int(np.count_nonzero(np.abs(x - y) <= 2 * allowed))
