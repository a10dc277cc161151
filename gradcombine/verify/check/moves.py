"""Hypotheses about additions that do not come from gradients, and about parameters or state that move in a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from gradcombine.verify.check.case import Case, Prediction, split_by
from gradcombine.verify.check.inner import observers, updated_in_sequence
from gradcombine.verify.check.leaves import as_floats, changed, flat
from gradcombine.verify.check.running import ONE_BATCH, Floats, NotWide, Result, Rows
from gradcombine.verify.check.standard import SAME, Standard, combined
from gradcombine.verify.check.step_report import Cause

Simulation: TypeAlias = Callable[[Sequence[Rows], np.ndarray, float], list[np.ndarray]]
"""Function of microbatches, their weights and a factor that returns the change of the parameters."""


def added(case: Case) -> Iterator[Prediction]:
    """Tries additions that do not depend on the division of the examples, such as weight decay.

    They are also seen if all examples are copies of one.
    """
    standard, subject, one = case.standard, case.standard.subject, case.standard.best.floats
    copies = subject.rows([standard.heaviest] * standard.examples)
    of_split, of_one = (subject.tried(x, copies, case.wide) for x in (case.split, ONE_BATCH))
    if of_split is None or of_one is None:
        return
    divided, undivided = of_split.floats, of_one.floats
    params, difference = standard.params, [x - y for x, y in zip(case.result.floats, one, strict=True)]
    if subject.returns_params:
        new = {i: p + one[i] for i, p in params.items()}
        # New parameters are the updates if the old ones are 0, and any two numbers are multiples.
        differ = any(map(np.any, params.values())) and sum(map(np.count_nonzero, new.values())) > 1
        if differ and (factor := _factor(difference, new, sorted(new))) is not None:
            floats = [x + factor * new[i] if i in new else x for i, x in enumerate(one)]
            yield Prediction(Cause.ADDED, f"{factor:.6g} times the new parameters", floats, 4, sorted(new))
    addition = [x - y for x, y in zip(divided, undivided, strict=True)]
    changed = np.flatnonzero(standard.shares(divided, undivided, case.wide) > 1).tolist()
    for x in averaged(case._replace(leaves=tuple(changed)), by_all=True):
        yield x._replace(leaves=None, detail=f"{x.detail}; in {len(changed)} of {len(one)} leaves")
    scope = "" if len(changed) == len(one) else f", in {len(changed)} of {len(one)} leaves"
    multiples = [1.0]
    sizes = np.abs(flat([addition[i] for i in changed]))
    if np.count_nonzero(sizes > SAME * sizes.max(initial=0)) > 1:  # any two numbers are multiples
        if _factor(addition, dict(enumerate(undivided)), changed) is not None:
            return  # the gradient of the copied example, which may be dropped or counted twice
        # Divided by a count of examples or tokens, it is another multiple than for the copies.
        multiples += filter(None, [_factor(difference, dict(enumerate(addition)), changed)])
    for multiple in multiples:
        amounts = [multiple * x for x in addition]
        text = f"up to {np.abs(flat(amounts)).max(initial=0):.3g}, also if all examples are copies of one"
        if (factor := _factor(amounts, params, changed)) is not None:
            text = f"{factor:.6g} times the parameters"
        elif (i := next(iter(own := _times_itself(amounts, params, changed)), None)) is not None:
            text = f"leaf {standard.names[i]} by {own[i]:.6g} times itself"
        yield Prediction(Cause.ADDED, text + scope, [x + y for x, y in zip(one, amounts, strict=True)], 4)


def _times_itself(addition: Floats, of: Mapping[int, np.ndarray], changed: Sequence[int]) -> dict[int, float]:
    """Returns the factors of the leaves to which multiples of themselves are added, such as a momentum that decays.

    Empty if a changed leaf is a multiple neither of itself nor of one of these.
    """
    factors = ((i, _factor(addition, of, [i])) for i in changed if addition[i].size > 1)
    own = {i: x for i, x in factors if x is not None}
    for i in changed:
        like = [j for j in own if of[j].shape == addition[i].shape]
        if all(_factor(addition, {i: of[j]}, [i]) is None for j in like):
            return {}
    return own


def _factor(addition: Floats, of: Mapping[int, np.ndarray], leaves: Sequence[int]) -> float | None:
    """Returns the factor if the addition is a multiple of other arrays in these leaves, else None."""
    if not leaves or any(i not in of for i in leaves):
        return None
    x, y = flat([addition[i] for i in leaves]), flat([of[i] for i in leaves])
    factor = float(x @ y / max(float(y @ y), 1e-300))
    return factor if np.linalg.norm(x - factor * y) < SAME * np.linalg.norm(x) else None


def moved(case: Case) -> Iterator[Prediction]:
    """Tries one update per microbatch."""
    standard, subject = case.standard, case.standard.subject
    if not subject.returns_params:
        return
    start = subject.start
    count, others = len(start), standard.best.floats[len(start) :]
    leaves = [i for i in range(count) if i not in standard.order_dependent] or range(count)
    for name, pieces in case.partitions.items():
        for factor, text in ((1.0, ""), (1 / len(pieces), f", each divided by {len(pieces)}")):
            if (results := in_sequence(case, range(count), pieces, factor)) is None:
                continue
            floats = [*combined(np.full(len(pieces), factor), [x[:count] for x in results]), *others]
            if not case._replace(leaves=None).accounts_for(floats, len(pieces), leaves):
                continue  # only some leaves of the state are updated
            detail = f"{len(pieces)} updates in sequence{text}{split_by(name)}"
            yield Prediction(Cause.MOVED_EACH, detail, floats, len(pieces), range(count))
    for module in observers(subject):
        with suppress(Exception):  # the step cannot run eagerly
            one, divided = (module.updates(subject, x) for x in (ONE_BATCH, case.split))
            if divided != one:
                yield Prediction(Cause.MOVED_EACH, f"its optimizers make {divided} steps, and {one} in one batch")


def moved_by_shares(case: Case) -> Iterator[Prediction]:
    """Tries one optimizer step per microbatch, whose loss is divided by the batch's number of microbatches or tokens.

    Momentums and Adam's second moments show this divisor.
    """
    standard, subject = case.standard, case.standard.subject
    count = len(subject.param_leaves)
    if not subject.returns_params:
        return
    with suppress(Exception):  # the step cannot be traced, or not run like this
        for name, pieces in case.partitions.items():
            batches = [standard.copies(rows) for rows in pieces]
            detail = f"{len(pieces)} updates in sequence, each by its share of the gradient{split_by(name)}"
            for weights in case.weights_of(pieces):
                for changes in updated_in_sequence(case, batches, weights.tolist()):
                    floats = [*changes, *standard.best.floats[count:]]
                    yield Prediction(Cause.MOVED_EACH, detail, floats, len(pieces), range(count))


def in_loop(case: Case) -> Iterator[Prediction]:
    """Tries a PyTorch loop that clips gradients, or advances schedules, at each microbatch.

    If it clips once, or its optimizers have the settings of one batch, the result is that of one batch.
    """
    subject = case.standard.subject
    steps: list[Any] = [subject.step(x) for x in (ONE_BATCH, case.split)]
    if subject.framework != "torch" or not hasattr(steps[0], "corrected"):  # it ends before the update
        return
    one, divided = (step.observe(subject.params, subject.batch).settings for step in steps)
    text = "the accumulated gradients are clipped at each microbatch, not only at the end"
    tried = [(Cause.CHANGED_BEFORE, text, {"clips_once": True})]
    changed = [
        f"{name} of the optimizer is {_setting(y[name])} instead of {_setting(x[name])}"
        for groups in zip(one, divided, strict=False)
        for x, y in zip(*groups, strict=False)
        for name in x
        if name in y and x[name] != y[name]
    ]
    if changed:
        tried.append((Cause.COUNTED, changed[0], {"settings": one}))
    for cause, detail, corrections in tried:
        result = subject.tried(case.split, subject.batch, case.wide, steps[1].corrected(**corrections))
        if result is None:
            continue
        shares = case._replace(result=result).shares()
        if max(shares[i] for i in case.among(range(len(shares)))) <= 1:
            yield Prediction(cause, detail)


def _setting(x: Any) -> str:
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def advanced(case: Case) -> Iterator[Prediction]:
    """Tries a state that is updated at each microbatch regardless of its examples, as in spectral normalization.

    With this state fixed, the other leaves must be the mean of the microbatches' results.
    """
    standard, subject, one = case.standard, case.standard.subject, case.standard.best.floats
    if not subject.returns_params:
        return
    count = len(subject.param_leaves)
    rest = range(count, len(one))  # in PyTorch, gradients that reach optimizers
    for name, pieces, fixed in case.separate_results():
        shares = standard.shares(fixed[0], one, case.wide)
        moving = [i for i in range(count) if shares[i] <= 1 and np.any(one[i])]
        if not moving:
            return
        results = in_sequence(case, moving, [standard.copies(rows) for rows in pieces])
        if results is None:
            continue
        summed = {i: np.sum([x[i] for x in results], axis=0) for i in moving}
        compared = [[*range(len(one))], *([[*moving, *rest]] if subject.framework == "torch" else [])]
        for weights, leaves in product(case.weights_of(pieces), compared):
            means = standard.shares(combined(weights, fixed), one, case.wide)
            if len(leaves) > len(moving) and all(means[i] <= 1 for i in case.among(leaves) if i not in moving):
                floats = [summed.get(i, x) for i, x in enumerate(combined(weights, results))]
                yield _updated(standard, moving, pieces, name, floats, leaves)


def averaged(case: Case, by_all: bool) -> Iterator[Prediction]:
    """Tries leaves of the state that are updated at each microbatch, such as moving averages, unlike other leaves.

    Args:
      by_all: whether each update uses the full batch, or the examples of one microbatch (repeated to the size of the
        batch, or alone).
    """
    standard, subject = case.standard, case.standard.subject
    count = len(subject.param_leaves)
    moving = case.among(range(count))
    metrics = case.among(range(count, len(standard.names)))  # which a state does not change
    if not subject.returns_params or not 0 < len(moving) < count or (metrics and case.leaves is not None):
        return
    for name, pieces in case.partitions.items():
        all_rows = [range(subject.examples)] * len(pieces)
        for batches in [all_rows] if by_all else [[*map(standard.copies, pieces)], pieces]:
            if (results := in_sequence(case, moving, batches)) is None:
                continue
            floats = list(standard.best.floats)
            for i in moving:
                floats[i] = np.sum([x[i] for x in results], axis=0)
            yield _updated(standard, moving, pieces, name, floats, moving)
        if by_all and (followed := _following(case, moving, len(pieces))):
            floats = [followed.get(i, x) for i, x in enumerate(standard.best.floats)]
            yield _updated(standard, moving, pieces, name, floats, moving)


FITTED = 256
"""Number of elements of an average by which its parameter is found among those of its shape."""


def _following(case: Case, moving: Sequence[int], updates: int) -> dict[int, np.ndarray]:
    """Returns changes of averages that move towards the parameters: at last to the new ones, before that to the old.

    Each update is a mixture of average and parameter, which may depend on a count. Empty for other leaves.
    """
    subject, start, counts = case.standard.subject, case.standard.subject.start, None
    new, state = [x + y for x, y in zip(start, case.standard.best.floats, strict=False)], list(start)
    for update in range(updates):
        result = subject.tried(ONE_BATCH, subject.batch, case.wide, start=state, counts=counts)
        if result is None:
            return {}
        mixture, counts = np.zeros(2), _counts_after(case, moving, result)
        for i in sorted(moving, key=lambda i: -start[i].size):  # two numbers always fit small leaves
            some = slice(None, None, max(start[i].size // FITTED, 1))
            fits, change = list[tuple[float, int, np.ndarray]](), result.floats[i].ravel()[some]
            for j in (j for j in range(len(start)) if j not in moving and start[j].shape == start[i].shape):
                columns = np.stack([(start[j] + result.floats[j]).ravel()[some], state[i].ravel()[some]], axis=1)
                if not np.isfinite(columns).all():
                    continue
                fitted = np.linalg.lstsq(columns, change)[0] if change.size > len(mixture) else mixture
                fits.append((float(np.linalg.norm(columns @ fitted - change)), j, fitted))
            if not fits:
                return {}
            _, j, mixture = min(fits, key=lambda x: x[:2])
            by = mixture[0] * (new if update == updates - 1 else start)[j] + mixture[1] * state[i]
            state[i] = changed(state[i], by)
    return {i: state[i] - start[i] for i in moving}


def _counts_after(case: Case, moving: Sequence[int], result: Result) -> list[np.ndarray]:
    """Returns the state's integers after a batch: new ones if the division has others, or if all floats move."""
    subject, one, divided = case.standard.subject, case.standard.native.integers, case.native.integers
    rows = zip(subject.integers, result.integers, one, divided, strict=False)
    return [y if len(moving) == len(subject.start) or not np.array_equal(a, b) else x for x, y, a, b in rows]


def _updated(
    standard: Standard, moving: Sequence[int], pieces: Sequence[Rows], name: str, floats: Floats, leaves: Sequence[int]
) -> Prediction:
    detail = f"leaf {standard.names[moving[0]]} is updated {len(pieces)} times{split_by(name)}"
    return Prediction(Cause.ADVANCED, detail, floats, len(pieces), leaves)


def in_sequence(
    case: Case, moving: Sequence[int], batches: Sequence[Sequence[int]], factor: float = 1.0
) -> list[Floats] | None:
    """Runs one batch after the other; each starts with the moving leaves of the state that the batch before it returns.

    Integers of the state, such as step counts, move as `_counts_after` does. Returns None if a batch cannot run.

    Args:
      factor: of the changes of the state.
    """
    subject, results, counts = case.standard.subject, list[Floats](), None
    state = subject.start
    try:
        for rows in batches:
            result = subject.run(ONE_BATCH, subject.rows(rows), case.wide, start=state, counts=counts)
            results.append(result.floats)
            counts = _counts_after(case, moving, result)
            for i in moving:
                state[i] = changed(state[i], factor * result.floats[i])
    except (NotWide, ValueError):
        return None
    return results


def decayed(case: Case) -> Iterator[Prediction]:
    """Tries parameters that are multiplied by a constant at each microbatch, in addition to their updates.

    The update is either the mean of the updates computed at the decayed parameters, or split over the microbatches and
    computed at the parameters at the start of the window.
    """
    standard, subject = case.standard, case.standard.subject
    if not subject.returns_params:
        return
    start = [as_floats(x) for _, x in subject.param_leaves]
    result, others = case.result.floats[: len(start)], standard.best.floats[len(start) :]
    p, difference = flat(start), flat(result) - flat(standard.best.floats[: len(start)])

    def at_start(pieces: Sequence[Rows], weights: np.ndarray, factor: float) -> list[np.ndarray]:
        params = start
        for rows, weight in zip(pieces, weights, strict=True):
            update = standard.repeated(rows)
            if update is None:
                raise NotWide("the result of a microbatch is not finite")
            moves = (weight * (u - factor * x) for u, x in zip(update.floats, start, strict=False))
            params = [(1 + factor) * x + move for x, move in zip(params, moves, strict=True)]
        return [x - y for x, y in zip(params, start, strict=True)]

    # Updates by microbatch and factor, for the factors that all weights of a partition have in common.
    shared = dict[tuple[int, float], Floats | None]()

    def update_at(params: list[np.ndarray], rows: Rows, i: int, factor: float) -> Floats:
        key = (i, factor if i else 0.0)
        if (update := shared.get(key)) is None:
            update = subject.run(ONE_BATCH, subject.rows(standard.copies(rows)), case.wide, start=params).floats
            if key in shared:
                shared[key] = update
        return update

    def at_each(pieces: Sequence[Rows], weights: np.ndarray, factor: float) -> list[np.ndarray]:
        params, mean = start, [np.zeros_like(x) for x in start]
        for i, (rows, weight) in enumerate(zip(pieces, weights, strict=True)):
            params = [x * (1 + factor) for x in params] if i else params
            update = update_at(params, rows, i, factor)
            mean = [m + (u - factor * x) * weight for m, u, x in zip(mean, update, params, strict=False)]
        return [m + (1 + factor) * x - y for m, x, y in zip(mean, params, start, strict=True)]

    def solved(
        simulate: Simulation, pieces: Sequence[Rows], weights: np.ndarray, factor: float
    ) -> tuple[float, list[np.ndarray]] | None:
        """The factor and its result; None if the factor does not explain the difference, even to first order."""

        def missing(factor: float) -> np.ndarray:
            return flat(result) - flat(simulate(pieces, weights, factor))

        unexplained = float(np.linalg.norm(missing(0)))
        for _ in range(NEWTON_STEPS):
            left = missing(factor)
            slope = (left - missing(factor * NEARBY)) / (0.01 * factor or 1)
            step = float(left @ slope) / max(float(slope @ slope), 1e-300)
            if 2 * np.linalg.norm(left - step * slope) > unexplained:
                return None  # the weights explain the difference, not the factor
            factor += step
        predicted = simulate(pieces, weights, factor)
        return (factor, predicted) if 4 * np.linalg.norm(flat(result) - flat(predicted)) <= unexplained else None

    for name, pieces in case.partitions.items():
        first = float(difference @ p) / max(float(p @ p), 1e-300) / (len(pieces) - 1)
        shared = dict.fromkeys(product(range(len(pieces)), (0.0, first, first * NEARBY)))
        for weights, simulate in product(case.weights_of(pieces), (at_start, at_each)):
            try:
                found = solved(simulate, pieces, weights, first)
            except (NotWide, ValueError):
                continue
            if found is None:
                continue
            factor, predicted = found
            detail = f"by {factor:.6g} times themselves at each microbatch{split_by(name)}"
            yield Prediction(Cause.MOVED, detail, [*predicted, *others], len(pieces), range(len(start)))


NEWTON_STEPS = 3
"""Number of Newton iterations that find a factor to rounding."""

NEARBY = 1.01
"""Multiple of a factor at which the slope is measured."""
