"""Losses of several terms, each a sum with its own denominator: finds terms with a wrong denominator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple, cast

import numpy as np

from gradcombine.errors import GradCombineError, invalid, translate_errors
from gradcombine.verify.check.case import Case, Prediction, split_by
from gradcombine.verify.check.leaves import as_floats, floats_in
from gradcombine.verify.check.running import Floats, Rows
from gradcombine.verify.check.standard import Standard
from gradcombine.verify.check.step_program import dividing
from gradcombine.verify.check.step_report import Cause
from gradcombine.verify.check.terms import Terms


class Part(NamedTuple):
    """The terms of some examples, by name.

    Attributes:
      sums: the gradient of each term's sum.
      weights: the weight that each sum has to be divided by.
    """

    sums: dict[str, Floats]
    weights: dict[str, float]


class Divided(NamedTuple):
    """The gradient under one choice of denominators.

    Attributes:
      text: the wrong denominators, in words.
      floats: the gradient.
      wrong: the contributions of terms with a wrong denominator.
    """

    text: str
    floats: list[np.ndarray]
    wrong: Sequence[Floats] = ()


def measured(standard: Standard, rows: Rows) -> Part:
    """Evaluates the terms on some examples, in float64 if one batch runs in float64.

    Raises:
      GradCombineError: unless the terms are pairs by name, with gradients like those that the step returns.
    """
    subject, terms = standard.subject, cast("Terms", standard.terms)
    with translate_errors("terms(params, batch) -> {name: (gradient of the sum, weight)}", Exception):
        gradients, divisors = subject.call(terms, subject.rows(rows), wide=standard.wide is not None)[0]
        leaves, weights = floats_in(gradients), dict(zip(terms.names, map(float, divisors), strict=True))
    if not np.isfinite(list(weights.values())).all():
        raise invalid("terms with finite weights", ", ".join(f"{name}: {weight:g}" for name, weight in weights.items()))
    like = [as_floats(x) for _, x in subject.param_leaves] if subject.returns_params else standard.best.floats
    count = len(like)
    if len(leaves) != count * len(weights) or [x.shape for x in leaves[:count]] != [x.shape for x in like]:
        raise invalid("gradients of terms like those of the step", "others")
    starts = zip(weights, range(0, len(leaves), count), strict=True)
    return Part({name: leaves[i : i + count] for name, i in starts}, weights)


def divisions(parts: Sequence[Part], whole: Part) -> Iterator[Divided]:
    """Yields the gradient for all choices of denominators, beginning with the right one.

    The weights of the parts add up to that of the whole, except for constants, such as 1 for a sum.
    """
    names, totals, k = list(whole.weights), whole.weights, len(parts)

    def weights(name: str) -> list[float]:
        return [part.weights[name] for part in parts]

    def summed(name: str, divisors: Sequence[float]) -> list[np.ndarray]:
        columns = [list(column) for column in zip(*(part.sums[name] for part in parts), strict=True)]
        return [np.sum([x / d if d else 0 * x for x, d in zip(c, divisors, strict=True)], axis=0) for c in columns]

    def choices(name: str) -> Iterator[tuple[str, list[float]]]:
        """Yields divisors of a term in each microbatch, with an explanation of wrong ones."""
        own, total, others = weights(name), totals[name], [x for x in names if x != name]
        yield "", [total] * k
        for other in others:
            yield f"{name} divided by the weight of {other}", [totals[other]] * k
        for other in [name, *others]:
            text = f"{name} divided by the weight of {other} in each microbatch"
            yield f"{text}, then averaged", [k * x for x in weights(other)]
            yield f"{text}, then summed", weights(other)
        text = f"{name} divided by the weight of {name} in each microbatch, then"
        for other in names:
            yield f"{text} summed and divided by the weight of {other}", [x * totals[other] for x in own]
        for other in others:
            divisors = [x * totals[other] / y if y else np.inf for x, y in zip(own, weights(other), strict=True)]
            yield f"{text} averaged with the weights of {other}", divisors
        yield f"{name} also divided by the number of microbatches", [k * total] * k
        yield f"{name} divided by the number of microbatches only", [float(k)] * k
        yield f"{name} not divided", [1.0] * k
        yield f"{name} left out", [np.inf] * k

    for chosen in product(*([Divided(text, summed(name, x)) for text, x in choices(name)] for name in names)):
        columns = zip(*(x.floats for x in chosen), strict=True)
        wrong = [x for x in chosen if x.text]
        text = "; ".join(x.text for x in wrong)
        yield Divided(text, [np.sum(column, axis=0) for column in columns], [x.floats for x in wrong])


def divided(case: Case) -> Iterator[Prediction]:
    """Tries known divisors of each term of the loss; the first of the closest predictions wins."""
    standard = case.standard
    if standard.terms is None or standard.subject.returns_params:
        return
    whole = measured(standard, tuple(range(standard.examples)))
    # Divisors may include an epsilon, whose effect is larger with the smaller count of a microbatch.
    right = case._replace(result=standard.best)
    epsilons = right.distances(next(divisions([whole], whole)).floats, 4)[0]
    for name, pieces in case.partitions.items():
        count, parts = len(pieces), [measured(standard, rows) for rows in pieces]
        candidates = list(divisions(parts, whole))
        near = [case.distances(x.floats, count)[0] for x in candidates]
        best = next(x for x, distance in zip(candidates, near, strict=True) if distance <= max(1.0, 2 * min(near)))
        tolerance = max(1.0, 2 * count * epsilons)
        if best.text and case.accounts_for(best.floats, count, tolerance=tolerance):
            line = dividing(standard.subject, case.split, best.wrong)
            yield Prediction(Cause.DENOMINATOR, best.text + split_by(name), line=line)


def require_right(standard: Standard) -> None:
    """Raises for malformed terms, and for terms that do not add up to the gradient of one batch."""
    part, shares = _compared(standard)
    worst = int(shares.argmax())
    if shares[worst] > 1:
        raise invalid(
            f"terms that add up to the gradient of one batch: {', '.join(part.weights)}",
            f"a sum that is {shares[worst]:.3g} times the rounding bound away",
            standard.names[worst],
        )


def are_right(standard: Standard) -> bool:
    try:
        return bool(_compared(standard)[1].max() <= 1)
    except GradCombineError:  # gradients of other shapes
        return False


def _compared(standard: Standard) -> tuple[Part, np.ndarray]:
    """Returns the terms of all examples, and the distance of their sum from one batch (0 for new parameters)."""
    part = measured(standard, tuple(range(standard.examples)))
    if standard.subject.returns_params:
        return part, np.zeros(1)
    # Not in float64, which would reveal an epsilon in a divisor.
    return part, standard.shares(standard.best.floats, next(divisions([part], part)).floats, wide=False, sides=4)
