"""Explains why a division differs from one batch, by predicting the result of each known defect.

A hypothesis is accepted if it explains the full difference: its prediction is within rounding of the division's result,
in float64 if the step runs in float64. A difference that no hypothesis predicts remains unexplained.

Most hypotheses are linear. The gradient of one batch is ``sum_e c_e g_e`` over its examples, with weights ``c_e`` that
add up to 1 and are fitted by least squares. The division's gradient is ``sum_e x_e g_e``: if it drops an example, its
``x_e`` is 0; in a mean of means, the ``x_e`` of each microbatch have the same sum, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.verify.check.case import (
    Case,
    Hypothesis,
    Prediction,
    case_of,
    explained,
    share_in,
    split_by,
)
from gradcombine.verify.check.combinations import linear, repeated, scaled, scaled_apart
from gradcombine.verify.check.divided_terms import are_right, divided
from gradcombine.verify.check.inner import CUTS, before_update, hidden_by_update
from gradcombine.verify.check.leaves import flat, is_quantized
from gradcombine.verify.check.moves import added, advanced, averaged, decayed, in_loop, moved, moved_by_shares
from gradcombine.verify.check.precision import narrow, rounded
from gradcombine.verify.check.running import ONE_BATCH, Floats, NotWide, Result, Split
from gradcombine.verify.check.separate import beside_statistics, microbatches, neighbors, not_predicted
from gradcombine.verify.check.standard import SAME, Standard, Terms
from gradcombine.verify.check.step_program import line_of
from gradcombine.verify.check.step_report import BY_DESIGN, Cause


def explain(standard: Standard, split: Split, native: Result) -> tuple[Cause, str, str]:
    """Returns the cause of a difference, its detail, and the source line.

    Tries hypotheses that explain all leaves, then all leaves that differ (a loss among them may be right), then most of
    these, and last hypotheses that leave a small part of the difference unexplained, as with two causes at once.
    """
    case = case_of(standard, split, native)
    shares = case.shares()
    differing = tuple(np.flatnonzero(shares > 1).tolist())
    order_dependent = standard.order_dependent
    if order_dependent and differing and all(_of_copies(case)):
        order_dependent = []
    order_free = tuple(i for i in differing if i not in order_dependent)
    leaves = order_free or differing
    in_leaves, part = f"in {len(leaves)} of {len(shares)} leaves", case._replace(leaves=leaves)

    def attempts() -> Iterator[tuple[Sequence[Hypothesis], Case, str]]:
        # Leaves that depend on the order of the examples, such as a queue in the state, are ignored if others differ.
        if not order_dependent or not order_free:
            yield HYPOTHESES, case, ""
        if 0 < len(leaves) < len(shares):
            yield HYPOTHESES, part, in_leaves
        yield [partial(_most, differing=leaves)], case, ""
        # Many combinations of the examples are close to a single number.
        if not standard.depends_on_order and sum(standard.best.floats[i].size for i in leaves) > 1:
            text = f"explains all but {UNEXPLAINED_PART:.0%} or less of the difference, {in_leaves}"
            yield SMOOTH, part._replace(unexplained=UNEXPLAINED_PART), text

    for hypotheses, tried, text in attempts():
        if (x := explained(tried, hypotheses)) is not None:
            line = line_of(x.cause, x.detail, standard.subject, split) if x.line is None else x.line
            if x.cause in BY_DESIGN.values() and not standard.not_compared:
                standard.not_compared = not_predicted(case, sorted({*differing} - {*leaves}))
            return x.cause, "; ".join(filter(None, (x.detail, text))), line
    worst, precision = int(shares.argmax()), "float64" if case.wide else "the step's precision"
    text = f"{shares[worst]:.3g} times the rounding bound in {precision}, in leaf {standard.names[worst]}"
    if integers := [text for _, text in _other_integers(case)]:
        text = integers[0] if shares[worst] <= 1 else f"{text}; {integers[0]}"
    if standard.subject.returns_params and not standard.depends_on_order:
        text += "; a step that returns gradients instead of new parameters may show more"
    if standard.subject.returns_params and standard.terms is not None:
        text += "; no gradient that reaches the optimizer equals the sum of the terms"
    return Cause.UNEXPLAINED, text, ""


UNEXPLAINED_PART = 0.03
"""Fraction of the difference that a hypothesis may leave unexplained if no exact one is found."""

MIN_ELEMENTS = 8
"""Minimal number of elements of a leaf that is explained alone; of those that differ, if only signs are left."""


def _most(case: Case, differing: Sequence[int]) -> Iterator[Prediction]:
    """Yields causes that explain most of the leaves that differ, each leaf alone."""
    standard = case.standard
    sizes, by_cause = [x.size for x in standard.best.floats], dict[Cause, list[tuple[int, str]]]()
    signs = standard.hides_sizes and not case.wide  # a few that differ may agree by chance
    for i in differing:
        one, change = standard.best.floats[i], case.result.floats[i] - standard.best.floats[i]
        shown = np.count_nonzero(np.abs(change) > SAME * np.abs(one).max(initial=0)) if signs else sizes[i]
        x = None if shown < MIN_ELEMENTS else explained(case._replace(leaves=(i,)), (microbatches, linear))
        if x is not None:
            by_cause.setdefault(x.cause, []).append((i, x.detail))
    for cause, seen in by_cause.items():
        if 2 * sum(sizes[i] for i, _ in seen) > sum(sizes[i] for i in differing):
            if cause is Cause.STATISTICS:
                yield from beside_statistics(case, differing, [i for i, _ in seen])
            names = ", ".join(standard.names[i] for i, _ in seen[:3])
            yield Prediction(cause, f"{seen[0][1]}; seen in {names}, not in all leaves")


# --- hypotheses that do not use the results of single examples ---


def counted(case: Case) -> Iterator[Prediction]:
    """Compares step counts in the result, which one update per microbatch also changes.

    A count matters if one batch that starts with a count as much larger returns the division's floats. Otherwise a
    count in the state is named only if nothing else differs: layers count calls, and random streams keys (uint32).
    """
    subject, one, divided = case.standard.subject, case.standard.native.integers, case.native.integers
    texts = [text for quantized, text in _other_integers(case) if not quantized]
    if not texts:
        return
    yield from moved(case)
    start = subject.integers
    if case.shares().max(initial=0) <= 1:
        if not subject.returns_params or any(np.any(a != b) for _, a, b in zip(start, one, divided, strict=False)):
            keys = all(a.dtype == np.uint32 for a, b in zip(one, divided, strict=True) if np.any(a != b))
            yield Prediction(Cause.ADVANCED if keys else Cause.COUNTED, texts[0])
        return
    rows = zip(start, one, divided, strict=False)
    ahead = [x if x.dtype == bool else x + (b - a) for x, a, b in rows if x.shape == a.shape]
    if not subject.returns_params or len(ahead) < len(start):
        return
    if (result := subject.tried(ONE_BATCH, subject.batch, case.wide, counts=ahead)) is not None:
        yield Prediction(Cause.COUNTED, texts[0], result.floats, 1)


def _other_integers(case: Case) -> Iterator[tuple[bool, str]]:
    """Yields whether they may be quantized numbers, and a description, for each leaf of integers that differs."""
    one = case.standard.native
    for name, a, b in zip(one.integer_names, one.integers, case.native.integers, strict=True):
        if np.any(a != b):
            at = np.unravel_index(np.argmax(a != b), a.shape)
            yield is_quantized(a), f"an integer in the result is {b[at]} instead of {a[at]}, in leaf {name}"


def in_order(case: Case) -> Iterator[Prediction]:
    """Runs copies of one microbatch: if all use the same key, the number of copies does not change the result."""
    standard, subject, k = case.standard, case.standard.subject, case.split.microbatches
    if case.leaves is not None or not standard.depends_on_order:
        return
    by_division, by_number = _of_copies(case)
    if not (by_division and by_number):  # otherwise each place in the batch has random numbers of its own
        yield from () if by_number else neighbors(case)
        return
    first = list(range(subject.examples // k if subject.examples % k == 0 else 1))
    result = standard.tried(case.split, subject.rows(first * (k * case.split.devices)), case.wide)
    for other in (x for x in (ONE_BATCH, Split(2), Split(k + 1)) if x.microbatches != k):
        if result is None:  # as of a step for one size of the batch
            break
        copies = standard.tried(other, subject.rows(first * other.microbatches), case.wide)
        if copies is not None and standard.shares(result.floats, copies.floats, case.wide).max() <= 1:
            text = f"{k} copies of a microbatch and {other.microbatches} draw the same random numbers"
            yield Prediction(Cause.KEY, text)
    yield Prediction(Cause.RANDOM, "such divisions cannot be compared; with a random key per example they can")


def _of_copies(case: Case) -> tuple[bool, bool]:
    """Whether a division of copies of one example, and half as many copies, differ from one batch of them.

    Both do if microbatches draw random numbers. Labels from neighboring rows do not differ, nor does a queue in the
    state.
    """
    standard = case.standard
    if not standard.draws:
        return False, False
    subject, n = standard.subject, standard.examples
    leaves = standard.order_dependent or range(len(standard.names))
    copies, half = (subject.rows([standard.heaviest] * m) for m in (n, n // 2))
    try:
        one, divided = (subject.run(x, copies, case.wide).floats for x in (ONE_BATCH, case.split))
        fewer = subject.run(ONE_BATCH, half, case.wide).floats
    except (NotWide, GradCombineError):
        return True, True

    def differs(x: Floats) -> bool:
        shares = standard.shares(one, x, case.wide)
        sizes = [max(map(np.linalg.norm, y)) for y in zip(one, standard.best.floats, strict=True)]  # copies may cancel
        return any(shares[i] > 1 and np.linalg.norm(x[i] - one[i]) > DRAWN * sizes[i] for i in leaves)

    return differs(divided), differs(fewer)


DRAWN = 2.0**-16
"""Smallest relative difference by other random numbers; float32 ones may round in a float64 run, too."""


def padded(case: Case) -> Iterator[Prediction]:
    """Tries rows of zeros that pad the last microbatch."""
    standard = case.standard
    n, subject = standard.examples, standard.subject
    padding = -n % (case.split.microbatches * case.split.devices)
    if not padding:
        return
    zeros = subject.tried(ONE_BATCH, subject.zeros(), standard.wide is not None)
    if zeros is None:
        return
    floats = [(n * x + padding * z) / (n + padding) for x, z in zip(standard.best.floats, zeros.floats, strict=True)]
    detail = f"the last microbatch is padded with {padding} rows of zeros"
    yield Prediction(Cause.PLACEHOLDERS, detail, floats, 2, standard.combination[1])


def ignored(case: Case) -> Iterator[Prediction]:
    """Tests whether the division depends on the contents of an example that one batch ignores."""
    standard = case.standard
    c, subject, n = standard.weights, standard.subject, standard.examples
    if c is None or len(c) != n or not np.any(c == 0):
        return
    real, unused = int(np.argmax(c)), int(np.argmax(c == 0))
    for batch in subject.with_row_of(unused, real):
        one, other = (subject.run(x, batch).floats for x in (ONE_BATCH, case.split))
        if (
            standard.shares(one, standard.native.floats, wide=False).max() <= 1
            and standard.shares(other, case.native.floats, wide=False).max() > 1
        ):
            text = f"one batch ignores the contents of example {unused}, this division does not"
            yield Prediction(Cause.PLACEHOLDERS, text)


# --- gradients that reach an optimizer ---


def at_optimizer(case: Case, early: bool) -> Iterator[Prediction]:
    """Explains a difference of gradients that reach an optimizer: early for terms, or if updates hide their sizes."""
    standard = case.standard
    of_params = standard.subject.returns_params and case.leaves is None
    if not of_params or early != (standard.terms is not None or standard.hides_sizes):
        return
    metrics = [i for i in range(len(standard.subject.param_leaves), len(standard.names)) if i not in standard.observed]
    for inner, others in islice(before_update(case), CUTS + 1):
        _, (cause, detail, line) = _explain_inner(inner, case.split, standard.terms)
        standard.gradient_examined |= not others or cause is Cause.STATISTICS
        if cause is Cause.STATISTICS:
            yield from beside_statistics(case, [*others, *metrics])
        elif cause is Cause.UNEXPLAINED or (others and any(True for _ in beside_statistics(case, others))):
            continue
        yield Prediction(cause, f"{detail}; in the gradient that reaches the optimizer", line=line)


def hidden(standard: Standard, split: Split) -> tuple[Cause, str, str] | None:
    """Explains a difference of gradients that the optimizer hides, so that results are equal.

    Returns None if there is no difference, or a factor by which the optimizer may divide again.
    """
    answer: tuple[Cause, str, str] | None = None
    for inner, may_rescale in hidden_by_update(standard, split):
        native, (cause, detail, line) = _explain_inner(inner, split, standard.terms)
        if cause in CERTAIN or (cause in (Cause.SUM, Cause.SCALED) and not may_rescale):
            return cause, f"{detail}; in the gradient that reaches the optimizer, which hides it in this step", line
        if not (may_rescale and _is_scaled(inner, native)):
            text = "a difference of the gradients that reach the optimizer, which hides it in this step"
            answer = Cause.UNEXPLAINED, text, ""
    return answer


def _explain_inner(inner: Standard, split: Split, terms: Terms | None) -> tuple[Result, tuple[Cause, str, str]]:
    """Returns the gradient of a division, and the explanation of its difference from that of one batch."""
    native = inner.subject.run(split, inner.subject.batch)
    inner.terms = terms
    if terms is not None and not are_right(inner):
        inner.terms = None
    return native, explain(inner, split, native)


CERTAIN = (Cause.MEAN_OF_MEANS, Cause.LOST, Cause.DOUBLED, Cause.NOT_EXCHANGED, Cause.DENOMINATOR)
"""Causes that predict a gradient to the last digit, and are no factor by which the optimizer may divide."""


def _is_scaled(inner: Standard, divided: Result) -> bool:
    one, other = flat(inner.native.floats), flat(divided.floats)
    factor = float(one @ other) / max(float(one @ one), 1e-300)
    return inner.shares(divided.floats, [factor * x for x in inner.native.floats], False, 1 + abs(factor)).max() <= 1


# --- single elements of a result ---


def scattered(case: Case) -> Iterator[Prediction]:
    """Tries rows of a leaf that keep one contribution out of several."""
    standard, units = case.standard, len(case.standard.units)
    c = np.full(units, 1 / units) if standard.weights is None else standard.weights
    columns: list[Floats] = [x.floats for x in standard.columns if x is not None]
    groups = [("examples", c, columns)] if len(columns) == units else []
    for name, pieces, floats in case.separate_results():
        weights = np.array([c @ share_in(standard.units, rows) for rows in pieces])
        groups.append((f"microbatches{split_by(name)}", weights, floats))
    shares, allowed = case.shares(), standard.allowed(case.wide)
    for name, weights, parts in groups:
        count = 0
        for i in np.flatnonzero(shares > 1).tolist():
            one, result = standard.best.floats[i], case.result.floats[i]
            if one.ndim < 2:
                break
            terms = [a * x[i] for a, x in zip(weights, parts, strict=True)]
            stack = np.stack(terms).reshape(len(terms), len(one), -1)
            errors = np.sqrt(np.mean(np.square(result.reshape(len(one), -1) - one.reshape(len(one), -1)), axis=1))
            wrong = errors > 4 * allowed[i]
            each = np.sqrt(np.mean(np.square(stack - result.reshape(1, len(one), -1)), axis=2)).min(axis=0)
            several = (np.abs(stack).max(axis=2) > 0).sum(axis=0) > 1
            if not wrong.any() or np.any(each[wrong] > 4 * allowed[i]) or not several[wrong].all():
                break
            count += int(wrong.sum())
        else:
            if count:
                yield Prediction(Cause.SCATTER, f"{count} rows keep one contribution out of several {name}")


HYPOTHESES: tuple[Hypothesis, ...] = (
    counted,
    rounded,
    in_order,
    in_loop,
    added,
    partial(at_optimizer, early=True),
    divided,
    microbatches,
    partial(averaged, by_all=True),
    scaled_apart,
    partial(linear, by_fit=False),
    padded,
    moved,
    advanced,
    decayed,
    ignored,
    partial(at_optimizer, early=False),
    partial(linear, by_fit=True),
    repeated,
    moved_by_shares,
    partial(averaged, by_all=False),
    scaled,
    partial(microbatches, copied=False),
    scattered,
    narrow,
)
"""In the order in which they are tried; the first one that explains the difference wins."""

SMOOTH: tuple[Hypothesis, ...] = (added, linear, moved, decayed)
"""Hypotheses that may leave a small part of the difference unexplained; Adam's first step hardly distinguishes rows."""
