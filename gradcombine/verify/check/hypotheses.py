"""Why a division does not give what one batch gives: what each known defect would give is computed, and compared.

A hypothesis is accepted where it accounts for the whole difference: what it predicts is within rounding of what the
division gives, in float64 where the step runs in it. None of them is a guess; what no hypothesis accounts for stays
unexplained.

Most are linear. The gradient of one batch is ``sum_e c_e g_e`` over its examples, with weights ``c_e`` that add up to 1
and are found by least squares; of a division that has lost an example its ``x_e`` is 0, of a mean of means the ``x_e``
add up to the same in each microbatch, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import lcm

import numpy as np

from gradcombine.verify.check import divided_terms as terms
from gradcombine.verify.check import elements, moves
from gradcombine.verify.check.case import (
    Answer,
    Case,
    Located,
    accounts_for,
    combined,
    distances,
    on_devices,
    partitions,
    split_by,
    weights_of,
)
from gradcombine.verify.check.combinations import linear, scaled, shown
from gradcombine.verify.check.inner import HIDDEN, before_update, hidden_by_update
from gradcombine.verify.check.lines import dividing, line_of
from gradcombine.verify.check.measure import StepStandard
from gradcombine.verify.check.running import WHOLE, NotWide, Result, Split
from gradcombine.verify.check.standard import SAME, Floats, flat, over
from gradcombine.verify.check.step_report import Cause


def explain(standard: StepStandard, case: Case) -> tuple[Cause, str, str]:
    """The cause of a difference, figures, and the line of source that it comes from.

    What accounts for all leaves goes first, then what does for all that differ, as where a loss beside them is right,
    then what does for most of these; then what leaves a little of the difference over, as two causes at once do.
    """
    shares = standard.shares(case.result.floats, standard.best.floats, case.wide)
    differ = tuple(np.flatnonzero(shares > 1).tolist())
    by_order = () if standard.draws else standard.by_places
    steady = tuple(i for i in differ if i not in by_order)
    # Leaves that depend on the order of the examples, as a queue in the state does, are no cause where others differ.
    apart = bool(by_order and steady)
    rest = steady or differ
    some, parts = f"in {len(rest)} of {len(shares)} leaves", case._replace(leaves=rest)
    for answers, text in (
        (() if apart else _answers(standard, case), ""),
        (_answers(standard, parts) if len(rest) < len(shares) else (), some),
        (_most(standard, case, rest), ""),
        (_nearly(standard, parts._replace(rest=REST)), f"but for {REST:.0%} of the difference at most, {some}"),
    ):
        for cause, detail, *located in answers:
            line = located[0] if located else line_of(cause, detail, standard.subject, case.split)
            return cause, "; ".join(filter(None, (detail, text))), line
    text = _far(standard, case)
    if standard.subject.returns_params and not standard.depends_on_places:
        text += "; gradients in place of new parameters would show more"
    if standard.subject.returns_params and case.terms is not None:
        text += "; no gradient that reaches the optimizer was found that is the sum of the terms"
    return Cause.UNEXPLAINED, text, ""


def case_of(standard: StepStandard, split: Split, own: Result, given: terms.Terms | None) -> Case:
    """In float64, where the division and one batch run in it."""
    if standard.wide is not None:
        try:
            return Case(split, standard.in_float64(split, standard.subject.batch), own, wide=True, terms=given)
        except NotWide:
            pass
    return Case(split, own, own, wide=False, terms=given)


def _nearly(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Hypotheses that may leave a little over: not those of single rows, which Adam's first step hardly tells apart."""
    if not standard.depends_on_places:
        for cause_of in (moves.added, linear, moves.moved, moves.decayed):
            yield from cause_of(standard, case)


REST = 0.03
"""Part of the difference that a hypothesis may leave over where no exact one is found."""

TOLD = 8
"""How many elements a leaf has that tells a cause by itself."""


def _most(standard: StepStandard, case: Case, differ: Sequence[int]) -> Iterator[Answer]:
    """Hypotheses that account for most of the leaves that differ, each by itself."""
    found: dict[Cause, list[tuple[int, str]]] = {}
    for i in differ:
        alone = case._replace(leaves=(i,))
        if standard.best.floats[i].size >= TOLD:
            for cause, detail, *_ in chain(_microbatches(standard, alone), linear(standard, alone)):
                found.setdefault(cause, []).append((i, detail))
                break
    sizes = [x.size for x in standard.best.floats]
    for cause, where in found.items():
        if 2 * sum(sizes[i] for i, _ in where) > sum(sizes[i] for i in differ):
            yield cause, f"{where[0][1]}; seen in {', '.join(standard.names[i] for i, _ in where[:3])}, not in all"


def _answers(standard: StepStandard, case: Case) -> Iterator[Located]:
    yield from _counted(standard, case)
    if case.wide and standard.shares(case.result.floats, standard.best.floats, wide=True).max() <= 1:
        yield Cause.PRECISION, "in float64 it equals one batch: its own additions round by more than one batch's do"
        return
    if standard.depends_on_places and case.leaves is None:
        yield from _random(standard, case)
        return
    yield from moves.added(standard, case)
    if case.terms is not None and standard.subject.returns_params:
        yield from _before_update(standard, case)
    yield from _divided(standard, case)
    yield from _microbatches(standard, case)
    yield from moves.averaged(standard, case, by_all=True)
    yield from linear(standard, case)
    yield from _padded(standard, case)
    yield from moves.moved(standard, case)
    yield from moves.advanced(standard, case)
    yield from moves.decayed(standard, case)
    yield from _ignored(standard, case)
    yield from _before_update(standard, case)
    yield from _repeated(standard, case)
    yield from moves.averaged(standard, case, by_all=False)
    yield from scaled(standard, case)
    yield from _microbatches(standard, case, copied=False)
    yield from elements.scattered(standard, case)
    yield from elements.narrow(standard, case)


def _far(standard: StepStandard, case: Case) -> str:
    shares = standard.shares(case.result.floats, standard.best.floats, case.wide)
    worst = int(shares.argmax())
    kind = "float64" if case.wide else "its own precision"
    return f"{shares[worst]:.3g} times what rounding allows, in {kind}, in {standard.names[worst]}"


# --- what needs no examples ---


def _counted(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Integers of the result, as counts of steps are."""
    for a, b in zip(standard.own.integers, case.own.integers, strict=True):
        if a.shape == b.shape and np.any(a != b):
            at = np.unravel_index(np.argmax(a != b), a.shape)
            yield Cause.COUNTED, f"an integer of the result is {b[at]} in place of {a[at]}"
            return


def _random(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Copies of one microbatch: with one key for all of them they give what fewer copies give."""
    subject, k = standard.subject, case.split.microbatches
    if not standard.draws:
        yield Cause.NEIGHBOURS, "no random numbers are drawn"
        return
    size = subject.examples // k if subject.examples % k == 0 else 1
    first = list(range(size))
    others = [x for x in (WHOLE, Split(2), Split(k + 1)) if x.microbatches != k]
    run = standard.in_float64 if case.wide else subject.divided
    made = run(case.split, subject.rows(first * (k * case.split.devices)))
    for other in others:
        try:
            copies = run(other, subject.rows(first * other.microbatches))
        except (NotWide, ValueError):
            continue
        if standard.shares(made.floats, copies.floats, case.wide).max() <= 1:
            text = (
                f"{k} copies of a microbatch give what {other.microbatches} give: no other numbers are drawn for them"
            )
            yield Cause.KEY, text
            return
    yield Cause.RANDOM, "so divisions cannot be compared; keys that belong to the examples can be"


def _divided(standard: StepStandard, case: Case) -> Iterator[Located]:
    """The terms of the loss, each divided by something that is known: the nearest of these, the first of equals."""
    if case.terms is None or standard.subject.returns_params:
        return
    whole = terms.measured(standard, case.terms, tuple(range(standard.examples)))
    # Beside each count stands an epsilon, which weighs more where the count is that of a microbatch.
    right = case._replace(result=standard.best)
    epsilons = distances(standard, right, next(terms.ways([whole])).floats, 4)[0]
    for name, pieces in partitions(standard.examples, case.split).items():
        ways = list(terms.ways([terms.measured(standard, case.terms, rows) for rows in pieces]))
        off = max(1.0, 2 * len(pieces) * epsilons)
        near = [distances(standard, case, way.floats, len(pieces))[0] for way in ways]
        way = next(way for way, x in zip(ways, near, strict=True) if x <= max(1.0, 2 * min(near)))
        if way.text and accounts_for(standard, case, way.floats, len(pieces), off=off):
            yield Cause.DENOMINATOR, way.text + split_by(name), dividing(standard.subject, case.split, way.wrong)
            return


# --- what is a combination of microbatches ---


def _microbatches(standard: StepStandard, case: Case, copied: bool = True) -> Iterator[Answer]:
    """The mean, or the sum, of what one batch makes of each microbatch, where it makes something else of all.

    Args:
      copied: whether a microbatch is copied to the size of the batch, whose program is compiled already. Where a
        divisor has a floor, as max(count, 1), the copies give something else.
    """
    if not set(case.among(range(len(standard.names)))) - set(standard.combination[1]):
        return
    for name, pieces in partitions(standard.examples, case.split).items():
        parts = [standard.repeated(rows) if copied else standard.one(rows) for rows in pieces]
        if any(part is None for part in parts):
            continue
        floats = [part.floats for part in parts if part is not None]
        weighed = weights_of(standard, pieces)
        free = standard.nearest(case.result.floats, floats, case.wide, case.leaves)
        if free is not None and abs(free.sum() - 1) < SAME:
            weighed.append(free / free.sum())
        weighed.append(np.ones(len(pieces)))
        for weights in weighed:
            if not accounts_for(standard, case, combined(weights, floats), float(weights.sum())):
                continue
            lost = [row for rows, weight in zip(pieces, weights, strict=True) if abs(weight) < SAME for row in rows]
            if lost:
                kept = tuple(row for row in range(standard.examples) if row not in lost)
                cause = Cause.NOT_EXCHANGED if kept in on_devices(standard.examples, case.split) else Cause.LOST
                yield cause, f"examples {shown(lost)} are missing{split_by(name)}"
                return
            norm = _one_norm([standard.best.floats, *floats, *(x.floats for x in standard.columns() if x is not None)])
            if norm is not None:
                yield Cause.CHANGED_BEFORE, f"several microbatches or examples have {norm}{split_by(name)}"
            elif weights.sum() > 1 + SAME:
                cause = Cause.CHANGED_BEFORE if standard.subject.returns_params else Cause.SUM
                yield cause, f"it is the sum of what each microbatch gives by itself{split_by(name)}"
            elif np.ptp(weights) < SAME and (total := standard.total) is not None:
                text = f"examples by themselves weigh {total:.4g} together in one batch"
                yield Cause.MEAN_OF_MEANS, text + split_by(name)
            elif standard.excluded:
                low, high, best = weights.min(), weights.max(), flat(standard.best.floats)
                equal = "equal weights" if high - low < SAME else f"weights {low:.4g} to {high:.4g}"
                part = over(float(np.linalg.norm(flat(case.result.floats) - best)), float(np.linalg.norm(best)))
                text = f"the mean of what each gives by itself, with {equal}; {part:.2g} of one batch's norm away"
                yield Cause.STATISTICS, text + split_by(name)
            return


def _one_norm(results: Sequence[Floats]) -> str | None:
    """The norm, or the largest element, that the longest results have in common, different as they are."""
    vectors = [flat(floats) for floats in results]
    norms, highest = [float(np.linalg.norm(x)) for x in vectors], [_bound(np.abs(x)) for x in vectors]
    for values, text in ((norms, "a norm of {:.6g}"), (highest, "a largest element of {:.6g}")):
        top = max(values)
        longest = [x for x, value in zip(vectors, values, strict=True) if value >= top * (1 - 1e-5)]
        if top > 0 and any(np.abs(x - longest[0]).max() > SAME * top for x in longest):
            return text.format(top)
    return None


def _bound(sizes: np.ndarray) -> float:
    """The largest one, if several are as large, as clipped elements are; else 0."""
    *_, second, first = np.sort(np.append(sizes, [0, 0]))
    return float(first) if second >= first * (1 - 1e-5) else 0.0


def _before_update(standard: StepStandard, case: Case) -> Iterator[Located]:
    """The cause of the difference between the gradients that reach an optimizer."""
    if not standard.subject.returns_params or case.leaves is not None:
        return
    for inner in before_update(standard, case):
        own = inner.subject.divided(case.split, inner.subject.batch)
        known = case.terms if case.terms is not None and terms.are_right(inner, case.terms) else None
        cause, detail, line = explain(inner, case_of(inner, case.split, own, known))
        standard.reached = True
        if cause is not Cause.UNEXPLAINED:
            yield cause, f"{detail}; in the gradient that reaches the optimizer", line
            return


def hidden(standard: StepStandard, split: Split, given: terms.Terms | None) -> tuple[Cause, str, str] | None:
    """The cause of a difference of gradients that the optimizer hides; results are equal.

    None where there is no difference, or one that may be meant, as by a loss scale.
    """
    found: tuple[Cause, str, str] | None = None
    for inner in hidden_by_update(standard, split):
        own = inner.subject.divided(split, inner.subject.batch)
        known = given if given is not None and terms.are_right(inner, given) else None
        cause, detail, line = explain(inner, case_of(inner, split, own, known))
        if cause in CERTAIN:
            return cause, f"{detail}; in the gradient that reaches the optimizer, which hides it in this step", line
        if not _is_scaled(flat(inner.best.floats), flat(own.floats)):
            found = Cause.UNEXPLAINED, "a difference of the gradients that reach the optimizer, which hides it here", ""
    return found


CERTAIN = (Cause.MEAN_OF_MEANS, Cause.LOST, Cause.DOUBLED, Cause.NOT_EXCHANGED, Cause.DENOMINATOR)
"""Causes of which the division's gradient is what they predict to the last digits: no loss scale looks like them."""


def _is_scaled(whole: np.ndarray, made: np.ndarray) -> bool:
    """Whether one gradient is the other one times a factor."""
    factor = float(whole @ made) / max(float(whole @ whole), 1e-300)
    return float(np.linalg.norm(made - factor * whole)) <= HIDDEN * float(np.linalg.norm(made))


# --- what one batch gives of other numbers of its examples, where nothing is linear ---

MOST_ROWS = 256
"""Of a batch in which examples are repeated."""


def _repeated(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """The whole step on a batch of other numbers of its examples, as Adam or clipping of the mean make it necessary."""
    n = standard.examples
    if standard.reached or not set(case.among(range(len(standard.names)))) - set(standard.combination[1]):
        return  # of the gradient it has been seen, at less cost: each number of rows is compiled by itself
    units = np.arange(n)
    for cause, detail, times in chain(_as_means(standard, case), _as_lost(n, case)):
        if times.sum() > MOST_ROWS:
            continue
        rows = np.repeat(units, times.astype(int))
        made = standard.one(rows.tolist())
        if made is not None and accounts_for(standard, case, made.floats, 1):
            yield cause, f"{detail}: one batch of {len(rows)} rows that holds them so gives it"
            return


def _as_lost(n: int, case: Case) -> Iterator[tuple[Cause, str, np.ndarray]]:
    for rows in on_devices(n, case.split):
        yield Cause.NOT_EXCHANGED, f"it is what rows {shown(rows)} give", 1.0 * np.isin(np.arange(n), rows)
    for name, pieces in partitions(n, case.split).items():
        for rows in pieces:
            inside = np.isin(np.arange(n), rows)
            yield Cause.LOST, f"rows {shown(rows)}{split_by(name)}", 1 - inside
            yield Cause.DOUBLED, f"rows {shown(rows)}{split_by(name)}", 1 + inside


def _as_means(standard: StepStandard, case: Case) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """Microbatches of the same weight, if an example counts as much as a leaf of the batch says, as masks do."""
    n = standard.examples
    for counts in standard.counts():
        for name, pieces in partitions(n, case.split).items():
            weights = [int(counts[list(rows)].sum()) for rows in pieces]
            if np.all(counts == np.round(counts)) and min(weights) > 0 and len(set(weights)) > 1:
                times, least = np.zeros(n, object), lcm(*weights)  # of many counts it is beyond 64 bits
                for rows, weight in zip(pieces, weights, strict=True):
                    times[list(rows)] = least // weight
                text = f"they count {min(weights)} to {max(weights)} in one batch{split_by(name)}"
                yield Cause.MEAN_OF_MEANS, text, times


def _padded(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Rows of zeros that fill up the last microbatch."""
    n, k = standard.examples, case.split.microbatches * case.split.devices
    more = -n % k
    if not more:
        return
    subject = standard.subject
    try:
        zeros = subject.wide(WHOLE, subject.zeros()) if standard.wide else subject.run(WHOLE, subject.zeros())
    except (NotWide, ValueError):
        return
    predicted = [(n * x + more * z) / (n + more) for x, z in zip(standard.best.floats, zeros.floats, strict=True)]
    if accounts_for(standard, case, predicted, 2, standard.combination[1]):
        yield Cause.PLACEHOLDERS, f"{more} rows of zeros fill up the last microbatch, and count as examples"


def _ignored(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Whether the division depends on an example that one batch ignores, whatever it holds."""
    c, subject, n = standard.weights, standard.subject, standard.examples
    if c is None or len(c) != n or not np.any(c == 0):
        return
    real, ignored = int(np.argmax(c)), int(np.argmax(c == 0))
    for batch in subject.with_row_of(ignored, real):
        whole, other = standard.subject.divided(WHOLE, batch), standard.subject.divided(case.split, batch)
        if (
            standard.shares(whole.floats, standard.own.floats, wide=False).max() <= 1
            and standard.shares(other.floats, case.own.floats, wide=False).max() > 1
        ):
            yield Cause.PLACEHOLDERS, f"one batch ignores what example {ignored} holds, this division does not"
            return
