"""Explains why a division differs from one batch, by predicting the result of each known defect.

A hypothesis is accepted if it explains the full difference: its prediction is within rounding of the division's result,
in float64 if the step runs in float64. A difference that no hypothesis predicts remains unexplained.

Most hypotheses are linear. The gradient of one batch is ``sum_e c_e g_e`` over its examples, with weights ``c_e`` that
add up to 1 and are fitted by least squares. The division's gradient is ``sum_e x_e g_e``: if it drops an example, its
``x_e`` is 0; in a mean of means, the ``x_e`` of each microbatch have the same sum, and so on.
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
from gradcombine.verify.check.combinations import linear, listed, scaled
from gradcombine.verify.check.inner import HIDDEN, before_update, hidden_by_update
from gradcombine.verify.check.lines import dividing, line_of
from gradcombine.verify.check.measure import StepStandard
from gradcombine.verify.check.running import ONE_BATCH, NotWide, Result, Split
from gradcombine.verify.check.standard import SAME, Floats, flat, over
from gradcombine.verify.check.step_report import Cause


def explain(standard: StepStandard, case: Case) -> tuple[Cause, str, str]:
    """Returns the cause of a difference, its detail, and the source line.

    Tries hypotheses that explain all leaves, then all leaves that differ (a loss among them may be right), then most of
    these, and last hypotheses that leave a small part of the difference unexplained, as with two causes at once.
    """
    shares = standard.shares(case.result.floats, standard.best.floats, case.wide)
    differing = tuple(np.flatnonzero(shares > 1).tolist())
    order_dependent = () if standard.draws else standard.order_dependent
    order_free = tuple(i for i in differing if i not in order_dependent)
    # Leaves that depend on the order of the examples, such as a queue in the state, are ignored if others differ, too.
    ignores_leaves = bool(order_dependent and order_free)
    leaves = order_free or differing
    in_leaves, part = f"in {len(leaves)} of {len(shares)} leaves", case._replace(leaves=leaves)
    nearly = f"explains all but {UNEXPLAINED_PART:.0%} or less of the difference, {in_leaves}"
    for answers, text in (
        (() if ignores_leaves else _answers(standard, case), ""),
        (_answers(standard, part) if len(leaves) < len(shares) else (), in_leaves),
        (_most(standard, case, leaves), ""),
        (_nearly(standard, part._replace(unexplained=UNEXPLAINED_PART)), nearly),
    ):
        for cause, detail, *located in answers:
            line = located[0] if located else line_of(cause, detail, standard.subject, case.split)
            return cause, "; ".join(filter(None, (detail, text))), line
    text = _distance(standard, case)
    if standard.subject.returns_params and not standard.depends_on_order:
        text += "; a step that returns gradients instead of new parameters may show more"
    if standard.subject.returns_params and case.terms is not None:
        text += "; no gradient that reaches the optimizer equals the sum of the terms"
    return Cause.UNEXPLAINED, text, ""


def case_of(standard: StepStandard, split: Split, native: Result, loss_terms: terms.Terms | None) -> Case:
    """Returns the case of a division, in float64 if the division and one batch run in it."""
    if standard.wide is not None:
        try:
            return Case(split, standard.in_float64(split, standard.subject.batch), native, wide=True, terms=loss_terms)
        except NotWide:
            pass
    return Case(split, native, native, wide=False, terms=loss_terms)


def _nearly(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Tries hypotheses that may leave a small part unexplained.

    Hypotheses about single rows are excluded, because Adam's first step hardly distinguishes them.
    """
    if not standard.depends_on_order:
        for cause_of in (moves.added, linear, moves.moved, moves.decayed):
            yield from cause_of(standard, case)


UNEXPLAINED_PART = 0.03
"""Fraction of the difference that a hypothesis may leave unexplained if no exact one is found."""

MIN_ELEMENTS = 8
"""Minimal number of elements of a leaf that is explained alone."""


def _most(standard: StepStandard, case: Case, differing: Sequence[int]) -> Iterator[Answer]:
    """Yields causes that explain most of the leaves that differ, each leaf alone."""
    by_cause: dict[Cause, list[tuple[int, str]]] = {}
    for i in differing:
        alone = case._replace(leaves=(i,))
        if standard.best.floats[i].size >= MIN_ELEMENTS:
            for cause, detail, *_ in chain(_microbatches(standard, alone), linear(standard, alone)):
                by_cause.setdefault(cause, []).append((i, detail))
                break
    sizes = [x.size for x in standard.best.floats]
    for cause, seen in by_cause.items():
        if 2 * sum(sizes[i] for i, _ in seen) > sum(sizes[i] for i in differing):
            yield cause, f"{seen[0][1]}; seen in {', '.join(standard.names[i] for i, _ in seen[:3])}, not in all leaves"


def _answers(standard: StepStandard, case: Case) -> Iterator[Located]:
    yield from _counted(standard, case)
    if case.wide and standard.shares(case.result.floats, standard.best.floats, wide=True).max() <= 1:
        yield Cause.PRECISION, "in float64 it equals one batch, so its additions round too coarsely"
        return
    if standard.depends_on_order and case.leaves is None:
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


def _distance(standard: StepStandard, case: Case) -> str:
    shares = standard.shares(case.result.floats, standard.best.floats, case.wide)
    worst = int(shares.argmax())
    precision = "float64" if case.wide else "the step's precision"
    return f"{shares[worst]:.3g} times the rounding bound in {precision}, in leaf {standard.names[worst]}"


# --- hypotheses that do not use the results of single examples ---


def _counted(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Compares integers of the result, such as step counts."""
    for a, b in zip(standard.native.integers, case.native.integers, strict=True):
        if a.shape == b.shape and np.any(a != b):
            at = np.unravel_index(np.argmax(a != b), a.shape)
            yield Cause.COUNTED, f"an integer in the result is {b[at]} instead of {a[at]}"
            return


def _random(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Runs copies of one microbatch: if all use the same key, the number of copies does not change the result."""
    subject, k = standard.subject, case.split.microbatches
    if not standard.draws:
        yield Cause.NEIGHBOURS, "no random numbers are drawn"
        return
    size = subject.examples // k if subject.examples % k == 0 else 1
    first = list(range(size))
    others = [x for x in (ONE_BATCH, Split(2), Split(k + 1)) if x.microbatches != k]
    run = standard.in_float64 if case.wide else subject.divided
    result = run(case.split, subject.rows(first * (k * case.split.devices)))
    for other in others:
        try:
            copies = run(other, subject.rows(first * other.microbatches))
        except (NotWide, ValueError):
            continue
        if standard.shares(result.floats, copies.floats, case.wide).max() <= 1:
            yield Cause.KEY, f"{k} copies of a microbatch and {other.microbatches} draw the same random numbers"
            return
    yield Cause.RANDOM, "such divisions cannot be compared; with a random key per example they can"


def _divided(standard: StepStandard, case: Case) -> Iterator[Located]:
    """Tries known divisors of each term of the loss; the first of the closest predictions wins."""
    if case.terms is None or standard.subject.returns_params:
        return
    all_terms = terms.measured(standard, case.terms, tuple(range(standard.examples)))
    # Divisors may include an epsilon, whose effect is larger with the smaller count of a microbatch.
    right = case._replace(result=standard.best)
    epsilons = distances(standard, right, next(terms.divisions([all_terms])).floats, 4)[0]
    for name, pieces in partitions(standard.examples, case.split).items():
        candidates = list(terms.divisions([terms.measured(standard, case.terms, rows) for rows in pieces]))
        tolerance = max(1.0, 2 * len(pieces) * epsilons)
        near = [distances(standard, case, x.floats, len(pieces))[0] for x in candidates]
        best = next(x for x, distance in zip(candidates, near, strict=True) if distance <= max(1.0, 2 * min(near)))
        if best.text and accounts_for(standard, case, best.floats, len(pieces), tolerance=tolerance):
            yield Cause.DENOMINATOR, best.text + split_by(name), dividing(standard.subject, case.split, best.wrong)
            return


# --- combinations of microbatches ---


def _microbatches(standard: StepStandard, case: Case, copied: bool = True) -> Iterator[Answer]:
    """Tries the mean and the sum of one batch's results for each microbatch, for leaves that are no linear combination.

    Args:
      copied: whether a microbatch is repeated to the size of the batch, which is already compiled. If a divisor has a
        minimum, as in max(count, 1), this changes the result.
    """
    if not set(case.among(range(len(standard.names)))) - set(standard.combination[1]):
        return
    for name, pieces in partitions(standard.examples, case.split).items():
        parts = [standard.repeated(rows) if copied else standard.one(rows) for rows in pieces]
        if any(part is None for part in parts):
            continue
        floats = [part.floats for part in parts if part is not None]
        candidates = weights_of(standard, pieces)
        fitted = standard.fit(case.result.floats, floats, case.wide, case.leaves)
        if fitted is not None and abs(fitted.sum() - 1) < SAME:
            candidates.append(fitted / fitted.sum())
        candidates.append(np.ones(len(pieces)))
        for weights in candidates:
            if not accounts_for(standard, case, combined(weights, floats), float(weights.sum())):
                continue
            lost = [row for rows, weight in zip(pieces, weights, strict=True) if abs(weight) < SAME for row in rows]
            if lost:
                kept = tuple(row for row in range(standard.examples) if row not in lost)
                cause = Cause.NOT_EXCHANGED if kept in on_devices(standard.examples, case.split) else Cause.LOST
                yield cause, f"examples {listed(lost)} are missing{split_by(name)}"
                return
            norm = _common_norm(
                [standard.best.floats, *floats, *(x.floats for x in standard.columns() if x is not None)]
            )
            if norm is not None:
                yield Cause.CHANGED_BEFORE, f"several microbatches or examples have {norm}{split_by(name)}"
            elif weights.sum() > 1 + SAME:
                cause = Cause.CHANGED_BEFORE if standard.subject.returns_params else Cause.SUM
                yield cause, f"it is the sum of the microbatches' separate results{split_by(name)}"
            elif np.ptp(weights) < SAME and (total := standard.total) is not None:
                text = f"the weights of the single examples' results add up to {total:.4g} in one batch"
                yield Cause.MEAN_OF_MEANS, text + split_by(name)
            elif standard.excluded:
                low, high, best = weights.min(), weights.max(), flat(standard.best.floats)
                equal = "equal weights" if high - low < SAME else f"weights {low:.4g} to {high:.4g}"
                distance = over(float(np.linalg.norm(flat(case.result.floats) - best)), float(np.linalg.norm(best)))
                text = f"the mean of their separate results, with {equal}, is {distance:.2g} of one batch's norm away"
                yield Cause.STATISTICS, text + split_by(name)
            return


def _common_norm(results: Sequence[Floats]) -> str | None:
    """Describes the norm, or the largest element, that the largest results share although they differ: a clip bound."""
    vectors = [flat(floats) for floats in results]
    norms, maxima = [float(np.linalg.norm(x)) for x in vectors], [_repeated_maximum(np.abs(x)) for x in vectors]
    for values, text in ((norms, "a norm of {:.6g}"), (maxima, "a largest element of {:.6g}")):
        top = max(values)
        largest = [x for x, value in zip(vectors, values, strict=True) if value >= top * (1 - 1e-5)]
        if top > 0 and any(np.abs(x - largest[0]).max() > SAME * top for x in largest):
            return text.format(top)
    return None


def _repeated_maximum(sizes: np.ndarray) -> float:
    """Returns the maximum if several elements share it, as after clipping by value; else 0."""
    *_, second, first = np.sort(np.append(sizes, [0, 0]))
    return float(first) if second >= first * (1 - 1e-5) else 0.0


def _before_update(standard: StepStandard, case: Case) -> Iterator[Located]:
    """Explains the difference between the gradients that reach an optimizer."""
    if not standard.subject.returns_params or case.leaves is not None:
        return
    for inner in before_update(standard, case):
        native = inner.subject.divided(case.split, inner.subject.batch)
        loss_terms = case.terms if case.terms is not None and terms.are_right(inner, case.terms) else None
        cause, detail, line = explain(inner, case_of(inner, case.split, native, loss_terms))
        standard.gradient_examined = True
        if cause is not Cause.UNEXPLAINED:
            yield cause, f"{detail}; in the gradient that reaches the optimizer", line
            return


def hidden(standard: StepStandard, split: Split, loss_terms: terms.Terms | None) -> tuple[Cause, str, str] | None:
    """Explains a difference of gradients that the optimizer hides, so that results are equal.

    Returns None if there is no difference, or one that may be intended, such as a loss scale.
    """
    answer: tuple[Cause, str, str] | None = None
    for inner in hidden_by_update(standard, split):
        native = inner.subject.divided(split, inner.subject.batch)
        inner_terms = loss_terms if loss_terms is not None and terms.are_right(inner, loss_terms) else None
        cause, detail, line = explain(inner, case_of(inner, split, native, inner_terms))
        if cause in CERTAIN:
            return cause, f"{detail}; in the gradient that reaches the optimizer, which hides it in this step", line
        if not _is_scaled(flat(inner.best.floats), flat(native.floats)):
            text = "a difference of the gradients that reach the optimizer, which hides it in this step"
            answer = Cause.UNEXPLAINED, text, ""
    return answer


CERTAIN = (Cause.MEAN_OF_MEANS, Cause.LOST, Cause.DOUBLED, Cause.NOT_EXCHANGED, Cause.DENOMINATOR)
"""Causes that predict a gradient to the last digit, so they are not confused with a loss scale."""


def _is_scaled(one: np.ndarray, divided: np.ndarray) -> bool:
    factor = float(one @ divided) / max(float(one @ one), 1e-300)
    return float(np.linalg.norm(divided - factor * one)) <= HIDDEN * float(np.linalg.norm(divided))


# --- one batch with repeated or missing examples, for nonlinear steps ---

MOST_ROWS = 256
"""Maximal size of a batch in which examples are repeated."""


def _repeated(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Runs the full step on batches with repeated or missing examples, for Adam or clipping of the mean."""
    n = standard.examples
    if standard.gradient_examined or not set(case.among(range(len(standard.names)))) - set(standard.combination[1]):
        return  # explained by the gradient, at a lower cost: each number of rows needs a compilation
    examples = np.arange(n)
    for cause, detail, repeats in chain(_as_means(standard, case), _as_lost(n, case)):
        if repeats.sum() > MOST_ROWS:
            continue
        rows = np.repeat(examples, repeats.astype(int))
        result = standard.one(rows.tolist())
        if result is not None and accounts_for(standard, case, result.floats, 1):
            yield cause, f"{detail}; confirmed by one batch of {len(rows)} rows with these weights"
            return


def _as_lost(n: int, case: Case) -> Iterator[tuple[Cause, str, np.ndarray]]:
    for rows in on_devices(n, case.split):
        yield Cause.NOT_EXCHANGED, f"it is the result of rows {listed(rows)}", 1.0 * np.isin(np.arange(n), rows)
    for name, pieces in partitions(n, case.split).items():
        for rows in pieces:
            inside = np.isin(np.arange(n), rows)
            yield Cause.LOST, f"rows {listed(rows)}{split_by(name)}", 1 - inside
            yield Cause.DOUBLED, f"rows {listed(rows)}{split_by(name)}", 1 + inside


def _as_means(standard: StepStandard, case: Case) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """Gives microbatches equal weights, with counts of the examples from a leaf of the batch such as a mask."""
    n = standard.examples
    for counts in standard.counts():
        for name, pieces in partitions(n, case.split).items():
            weights = [int(counts[list(rows)].sum()) for rows in pieces]
            if np.all(counts == np.round(counts)) and min(weights) > 0 and len(set(weights)) > 1:
                repeats, multiple = np.zeros(n, object), lcm(*weights)  # may exceed 64 bits
                for rows, weight in zip(pieces, weights, strict=True):
                    repeats[list(rows)] = multiple // weight
                text = f"they weigh from {min(weights)} to {max(weights)} in one batch{split_by(name)}"
                yield Cause.MEAN_OF_MEANS, text, repeats


def _padded(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Tries rows of zeros that pad the last microbatch."""
    n, parts = standard.examples, case.split.microbatches * case.split.devices
    padding = -n % parts
    if not padding:
        return
    subject = standard.subject
    try:
        zeros = subject.wide(ONE_BATCH, subject.zeros()) if standard.wide else subject.run(ONE_BATCH, subject.zeros())
    except (NotWide, ValueError):
        return
    predicted = [(n * x + padding * z) / (n + padding) for x, z in zip(standard.best.floats, zeros.floats, strict=True)]
    if accounts_for(standard, case, predicted, 2, standard.combination[1]):
        yield Cause.PLACEHOLDERS, f"the last microbatch is padded with {padding} rows of zeros"


def _ignored(standard: StepStandard, case: Case) -> Iterator[Answer]:
    """Tests whether the division depends on the contents of an example that one batch ignores."""
    c, subject, n = standard.weights, standard.subject, standard.examples
    if c is None or len(c) != n or not np.any(c == 0):
        return
    real, ignored = int(np.argmax(c)), int(np.argmax(c == 0))
    for batch in subject.with_row_of(ignored, real):
        one, divided = subject.divided(ONE_BATCH, batch), subject.divided(case.split, batch)
        if (
            standard.shares(one.floats, standard.native.floats, wide=False).max() <= 1
            and standard.shares(divided.floats, case.native.floats, wide=False).max() > 1
        ):
            yield Cause.PLACEHOLDERS, f"one batch ignores the contents of example {ignored}, this division does not"
            return
