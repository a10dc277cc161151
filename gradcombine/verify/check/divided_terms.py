"""Losses of several terms, each a sum with a denominator of its own: which is divided by what does not count it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradcombine.errors import GradCombineError, invalid
from gradcombine.types import Tree
from gradcombine.verify.check.measure import StepStandard
from gradcombine.verify.check.running import NotWide, Rows
from gradcombine.verify.check.standard import Floats

Terms: TypeAlias = Callable[[Any, Any], Mapping[str, tuple[Tree, Any]]]
"""From parameters and examples to the gradient of each term's sum over them, and the weight that the sum is over."""


class Part(NamedTuple):
    """The terms of some examples, by their names.

    Attributes:
      sums: the gradient of each.
      weights: what each is divided by.
    """

    sums: dict[str, Floats]
    weights: dict[str, float]


class Divided(NamedTuple):
    """One way to divide the terms.

    Attributes:
      text: what each is divided by, where it is not what it should be.
      floats: the gradient.
      wrong: the parts of it that are divided by something else.
    """

    text: str
    floats: list[np.ndarray]
    wrong: Sequence[Floats] = ()


def measured(standard: StepStandard, terms: Terms, rows: Rows) -> Part:
    """The terms of some examples, in float64 where one batch has been run in it.

    Raises:
      GradCombineError: for anything else than pairs by name, and gradients unlike what the step returns.
    """
    subject, weights = standard.subject, dict[str, float]()

    def gradients(params: Any, batch: Any) -> list[Tree]:
        made = terms(params, batch)
        weights.update({name: float(pair[1]) for name, pair in made.items()})
        return [pair[0] for pair in made.values()]

    try:
        made = subject.of(gradients, subject.rows(rows), wide=standard.wide is not None)
    except (AttributeError, TypeError, IndexError, NotWide) as error:
        expected = "terms(params, batch) -> {name: (gradient of the sum, weight)}"
        raise invalid(expected, f"{type(error).__name__}: {error}") from error
    like = [x for _, x in subject.param_leaves] if subject.returns_params else standard.best.floats
    count = len(like)
    if len(made) != count * len(weights) or [x.shape for x in made[:count]] != [x.shape for x in like]:
        raise invalid("gradients of terms like those of the step", "others")
    pairs = zip(weights, range(0, len(made), count), strict=True)
    return Part({name: made[i : i + count] for name, i in pairs}, weights)


def ways(parts: Sequence[Part]) -> Iterator[Divided]:
    """All ways to divide the terms, the right one first."""
    names, k = list(parts[0].weights), len(parts)

    def total(name: str) -> float:
        return sum(part.weights[name] for part in parts)

    def summed(name: str, divisors: Sequence[float]) -> list[np.ndarray]:
        columns = [list(column) for column in zip(*(part.sums[name] for part in parts), strict=True)]
        return [np.sum([x / d if d else 0 * x for x, d in zip(c, divisors, strict=True)], axis=0) for c in columns]

    def choices(name: str) -> Iterator[Divided]:
        yield Divided("", summed(name, [total(name)] * k))
        for other in names:
            if other != name:
                yield Divided(f"{name} by the weight of {other}", summed(name, [total(other)] * k))
        for other in [name, *(other for other in names if other != name)]:
            by_each = [part.weights[other] for part in parts]
            yield Divided(f"{name} by the weight of {other} in each microbatch", summed(name, [k * x for x in by_each]))
            yield Divided(f"{name} by the weight of {other} in each microbatch, added up", summed(name, by_each))
        for other in names:
            text = f"{name} by the weight of {name} in each microbatch, added up, and by the weight of {other}"
            yield Divided(text, summed(name, [part.weights[name] * total(other) for part in parts]))
        for other in names:
            if other != name:
                text = f"{name} by the weight of {name} in each microbatch, which weighs as {other} does"
                shares = [part.weights[other] / total(other) for part in parts]
                divisors = [part.weights[name] / x if x else np.inf for part, x in zip(parts, shares, strict=True)]
                yield Divided(text, summed(name, divisors))
        yield Divided(f"{name} by the number of microbatches too", summed(name, [k * total(name)] * k))
        yield Divided(f"{name} by the number of microbatches", summed(name, [float(k)] * k))
        yield Divided(f"{name} by nothing", summed(name, [1.0] * k))
        yield Divided(f"{name} left out", summed(name, [np.inf] * k))

    for chosen in product(*(list(choices(name)) for name in names)):
        columns = zip(*(x.floats for x in chosen), strict=True)
        wrong = [x for x in chosen if x.text]
        text = "; ".join(x.text for x in wrong)
        yield Divided(text, [np.sum(column, axis=0) for column in columns], [x.floats for x in wrong])


def require_right(standard: StepStandard, terms: Terms) -> None:
    """Raises for terms that are not of the right form, or whose sum is not the gradient that one batch gives."""
    part, shares = _compared(standard, terms)
    worst = int(shares.argmax())
    if shares[worst] > 1:
        raise invalid(
            f"terms that add up to one batch: {', '.join(part.weights)}",
            f"{shares[worst]:.3g} times what rounding allows",
            standard.names[worst],
        )


def are_right(standard: StepStandard, terms: Terms) -> bool:
    """Whether their sum is what one batch gives."""
    try:
        return bool(_compared(standard, terms)[1].max() <= 1)
    except GradCombineError:  # of other shapes
        return False


def _compared(standard: StepStandard, terms: Terms) -> tuple[Part, np.ndarray]:
    """The terms of all examples, and how far their sum is from one batch; new parameters do not tell."""
    part = measured(standard, terms, tuple(range(standard.examples)))
    if standard.subject.returns_params:
        return part, np.zeros(1)
    # In its own precision: a divisor has an epsilon beside the count, which float64 would show.
    return part, standard.shares(standard.best.floats, next(ways([part])).floats, wide=False, sides=4)
