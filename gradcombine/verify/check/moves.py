"""Additions to a result that do not come from gradients, and parameters that move within a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from gradcombine.verify.check.case import Answer, Case, accounts_for, combined, partitions, split_by, weights_of
from gradcombine.verify.check.leaves import as_floats, widened
from gradcombine.verify.check.measure import StepStandard
from gradcombine.verify.check.running import WHOLE, NotWide, Rows
from gradcombine.verify.check.standard import SAME, Floats, flat
from gradcombine.verify.check.step_report import Cause

Simulation: TypeAlias = Callable[[Sequence[Rows], np.ndarray, float], list[np.ndarray]]
"""By how much the parameters move with these microbatches, their weights, and the factor of the parameters less 1."""


def added(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Additions that do not come from the gradients, as decay: also there where all examples are copies of one."""
    subject, one = standard.subject, standard.best.floats
    weights = standard.weights
    row = 0 if weights is None else standard.units()[int(np.argmax(weights))][0]
    copies = subject.rows([row] * standard.examples)
    try:
        run = subject.wide if case.wide else subject.divided
        divided, whole = run(case.split, copies), run(WHOLE, copies)
    except (NotWide, ValueError):
        return
    added = [x - y for x, y in zip(divided.floats, whole.floats, strict=True)]
    params = _params_of(standard)
    moved = {i: p + one[i] for i, p in params.items()} if subject.returns_params else {}
    if moved:
        factor = _factor([x - y for x, y in zip(case.result.floats, one, strict=True)], moved, sorted(moved))
        if factor is not None:
            predicted = [x + factor * moved[i] if i in moved else x for i, x in enumerate(one)]
            if accounts_for(standard, case, predicted, 4, sorted(moved)):
                yield Cause.ADDED, f"{factor:.6g} times the new parameters"
                return
    if not accounts_for(standard, case, [x + y for x, y in zip(one, added, strict=True)], 4):
        return
    differ = [i for i, share in enumerate(standard.shares(divided.floats, whole.floats, case.wide)) if share > 1]
    some = "" if len(differ) == len(one) else f", in {len(differ)} of {len(one)} leaves"
    size = max(float(np.abs(x).max(initial=0)) for x in added)
    text = f"up to {size:.3g}, where all examples are copies of one, too"
    factor = _factor(added, params, differ)
    if factor is not None:
        text = f"{factor:.6g} times the parameters"
    yield Cause.ADDED, text + some


def _factor(added: Floats, params: Mapping[int, np.ndarray], leaves: Sequence[int]) -> float | None:
    """By what the parameters are multiplied in what is added to these leaves; None where they are not."""
    if not leaves or any(i not in params for i in leaves):
        return None
    off, p = flat([added[i] for i in leaves]), flat([params[i] for i in leaves])
    factor = float(off @ p / max(float(p @ p), 1e-300))
    return factor if np.linalg.norm(off - factor * p) < SAME * np.linalg.norm(off) else None


def _params_of(standard: StepStandard) -> dict[int, np.ndarray]:
    """The parameters that leaves of the result belong to, as far as order or paths tell."""
    params = [(path, as_floats(x)) for path, x in standard.subject.param_leaves]
    shapes = [x.shape for x in standard.best.floats]
    if shapes == [x.shape for _, x in params]:
        return dict(enumerate(x for _, x in params))
    return {
        i: p
        for i, (name, shape) in enumerate(zip(standard.names, shapes, strict=True))
        for path, p in params
        if name.endswith(path) and p.shape == shape
    }


def moved(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """One update after the other."""
    subject = standard.subject
    if not subject.returns_params:
        return
    start = [widened(x) for _, x in subject.param_leaves]
    for name, pieces in partitions(subject.examples, case.split).items():
        for factor, text in ((1.0, ""), (1 / len(pieces), " of a part of its length")):
            moved = [np.zeros_like(x) for x in standard.best.floats[: len(start)]]
            at = list(start)
            try:
                for rows in pieces:
                    batch = subject.rows(rows)
                    made = subject.wide(WHOLE, batch, start=at) if case.wide else subject.run(WHOLE, batch, start=at)
                    moved = [x + factor * y for x, y in zip(moved, made.floats, strict=False)]
                    at = [x + y.reshape(x.shape) for x, y in zip(start, moved, strict=True)]
            except (NotWide, ValueError):
                continue
            others = standard.best.floats[len(start) :]
            if accounts_for(standard, case, [*moved, *others], len(pieces), range(len(start))):
                yield (
                    Cause.MOVED_EACH,
                    f"{len(pieces)} updates{text}, one after the other, give it{split_by(name)}",
                )
                return
    if subject.framework == "torch":
        steps: Any = [subject.step(x) for x in (WHOLE, case.split)]
        one, made = (step.read(subject.params, subject.batch).updates for step in steps)
        if made != one:
            yield Cause.MOVED_EACH, f"its optimizers make {made} steps, and {one} in one batch"


def advanced(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """A state that moves at each microbatch whatever its examples are, as the power iteration of a spectral norm.

    Where it does not move, the other leaves are the mean of what the microbatches give.
    """
    subject, one = standard.subject, standard.best.floats
    if not subject.returns_params:
        return
    count = len(subject.param_leaves)
    rest = range(count, len(one))  # of PyTorch's optimizers, the gradients that reach them
    for name, pieces in partitions(subject.examples, case.split).items():
        still = [part.floats for rows in pieces if (part := standard.repeated(rows)) is not None]
        if len(still) < len(pieces):
            continue
        shares = standard.shares(still[0], one, case.wide)
        moving = [i for i in range(count) if shares[i] <= 1 and np.any(one[i])]
        if not moving:
            return
        try:
            made = _one_by_one(standard, case, moving, [standard.copies(rows) for rows in pieces])
        except (NotWide, ValueError):
            continue
        summed = {i: np.sum([x[i] for x in made], axis=0) for i in moving}
        for weights, others in product(weights_of(standard, pieces), ([*range(len(one))], [*moving, *rest])):
            means = standard.shares(combined(weights, still), one, case.wide)
            predicted = [summed.get(i, x) for i, x in enumerate(combined(weights, made))]
            if (
                len(others) > len(moving)
                and all(means[i] <= 1 for i in case.among(others) if i not in moving)
                and accounts_for(standard, case, predicted, len(pieces), others)
            ):
                yield Cause.ADVANCED, f"{standard.names[moving[0]]} moves {len(pieces)} times{split_by(name)}"
                return


def averaged(standard: StepStandard, case: Case, by_all: bool) -> Iterator[Answer]:
    """Leaves of the state that move at each microbatch beside others that move once, as moving averages do.

    Args:
      by_all: whether by what the whole batch gives, or by what each microbatch gives: copies that fill a batch, or it
        alone.
    """
    subject, one = standard.subject, standard.best.floats
    count = len(subject.param_leaves)
    moving = case.among(range(count))
    if not subject.returns_params or len(moving) == count:
        return
    whole = range(subject.examples)
    for name, pieces in partitions(subject.examples, case.split).items():
        for batches in [[whole] * len(pieces)] if by_all else [[*map(standard.copies, pieces)], pieces]:
            try:
                made = _one_by_one(standard, case, moving, batches)
            except (NotWide, ValueError):
                continue
            predicted = [np.sum([x[i] for x in made], axis=0) if i in moving else x for i, x in enumerate(one)]
            if accounts_for(standard, case, predicted, len(pieces), moving):
                yield Cause.ADVANCED, f"{standard.names[moving[0]]} moves {len(pieces)} times{split_by(name)}"
                return


def _one_by_one(
    standard: StepStandard, case: Case, moving: Sequence[int], batches: Sequence[Sequence[int]]
) -> list[Floats]:
    """Results of one batch of each of these rows, each with these leaves of the state as the one before leaves them."""
    subject = standard.subject
    run = subject.wide if case.wide else subject.run
    at, made = [widened(x) for _, x in subject.param_leaves], list[Floats]()
    for rows in batches:
        made.append(run(WHOLE, subject.rows(rows), start=at).floats)
        at = [x + made[-1][i].reshape(x.shape) if i in moving else x for i, x in enumerate(at)]
    return made


def decayed(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Parameters that are multiplied at each microbatch, and moved by what the microbatches give.

    Either by the mean of what they give there, or at each by a part of what they give where the window began.
    """
    subject = standard.subject
    if not subject.returns_params:
        return
    start = [widened(x) for _, x in subject.param_leaves]
    made, others = case.result.floats[: len(start)], standard.best.floats[len(start) :]
    p, off = flat(start), flat(made) - flat(standard.best.floats[: len(start)])

    def at_each(pieces: Sequence[Rows], weights: np.ndarray, factor: float) -> list[np.ndarray]:
        at = start
        for rows, weight in zip(pieces, weights, strict=True):
            given = standard.repeated(rows)
            if given is None:
                raise NotWide("a microbatch gives nothing finite")
            moves = (weight * (u - factor * x) for u, x in zip(given.floats, start, strict=False))
            at = [(1 + factor) * x + move for x, move in zip(at, moves, strict=True)]
        return [x - y for x, y in zip(at, start, strict=True)]

    def simulated(pieces: Sequence[Rows], weights: np.ndarray, factor: float) -> list[np.ndarray]:
        run = subject.wide if case.wide else subject.run
        at, mean = start, [np.zeros_like(x) for x in start]
        for i, (rows, weight) in enumerate(zip(pieces, weights, strict=True)):
            at = [x * (1 + factor) for x in at] if i else at
            given = run(WHOLE, subject.rows(standard.copies(rows)), start=at).floats
            mean = [m + (u - factor * x) * weight for m, u, x in zip(mean, given, at, strict=False)]
        return [m + (1 + factor) * x - y for m, x, y in zip(mean, at, start, strict=True)]

    def solved(run: Simulation, pieces: Sequence[Rows], weights: np.ndarray) -> tuple[float, list[np.ndarray]]:
        factor = float(off @ p) / max(float(p @ p), 1e-300) / (len(pieces) - 1)
        for _ in range(SOLVED):
            predicted = flat(run(pieces, weights, factor))
            slope = (flat(run(pieces, weights, factor * 1.01)) - predicted) / (0.01 * factor or 1)
            factor += float((flat(made) - predicted) @ slope) / max(float(slope @ slope), 1e-300)
        return factor, run(pieces, weights, factor)

    for name, pieces in partitions(subject.examples, case.split).items():
        for weights, run in product(weights_of(standard, pieces), (at_each, simulated)):
            try:
                factor, found = solved(run, pieces, weights)
            except (NotWide, ValueError):
                continue
            if accounts_for(standard, case, [*found, *others], len(pieces), range(len(start))):
                yield Cause.MOVED, f"by {factor:.6g} of them at each microbatch{split_by(name)}"
                return


SOLVED = 3
"""How many steps of Newton's it takes to find a factor to rounding."""
