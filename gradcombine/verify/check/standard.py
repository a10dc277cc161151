"""The right result, the results of single examples, and the distance of other results from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from gradcombine.verify.check.leaves import perturbation
from gradcombine.verify.check.running import WHOLE, NotFiniteError, Result, Rows, Split, Subject

EACH = 64
"""Up to how many examples each is looked at by itself; more are looked at in groups."""

SAME = 0.01
"""How far fitted coefficients may be from those of a hypothesis, which is then tried itself."""

POINTS = 48
"""At how many other parameters, at most, examples are looked at where a result has few elements."""

OVERDETERMINED = 2
"""How many elements have to agree, at least, for each coefficient that is fitted to them."""

CERTAIN = 1e3
"""By how many times rounding an example has to show in the gradient for its coefficient to be fitted."""

Floats = Sequence[np.ndarray]


class Standard(ABC):
    """The right result of a step, the results of single examples, and the rounding allowed to results.

    Attributes:
      subject: the step.
      examples: how many.
      names: of the leaves.
      own: the right result, in its own precision.
      wide: the same in float64; None where there is none.
    """

    names: Sequence[str]
    own: Result
    wide: Result | None

    def __init__(self, subject: Subject) -> None:
        self.subject, self.examples = subject, subject.examples
        self._rows: dict[Rows, Result | None] = {}
        self._elsewhere_made: dict[tuple[int, Split, Rows | None, bool], Result | None] = {}

    @property
    def best(self) -> Result:
        """In float64 where that is possible."""
        return self.wide or self.own

    @abstractmethod
    def allowed(self, wide: bool) -> np.ndarray:
        """How far rounding may move one result, a number a leaf."""

    def one(self, rows: Sequence[int]) -> Result | None:
        """One batch of these examples, in the best precision; None where it is not finite, as a mean of nothing is."""
        key = tuple(rows)
        if key not in self._rows:
            batch = self.subject.rows(rows)
            try:
                made = self.subject.run(WHOLE, batch) if self.wide is None else self.subject.wide(WHOLE, batch)
            except NotFiniteError:
                made = None
            self._rows[key] = made
        return self._rows[key]

    def repeated(self, rows: Sequence[int]) -> Result | None:
        """Result of copies of these examples in a batch of the full size, whose program is compiled already."""
        return self.one(self.copies(rows))

    def copies(self, rows: Sequence[int]) -> Sequence[int]:
        n = self.examples
        return [*rows] * (n // len(rows)) if n % len(rows) == 0 else rows

    def counts(self) -> Iterator[np.ndarray]:
        """All the same; or what a leaf of the batch holds, as a mask or a number of tokens does; each once."""
        found = [np.ones(self.examples)]
        for leaf in self.subject.arrays():
            each = leaf.reshape(self.examples, -1)
            # The first word of a sequence is not predicted, and the last predicts nothing.
            found += [np.count_nonzero(x, axis=1).astype(np.float64) for x in (each, each[:, 1:], each[:, :-1])]
            if leaf.dtype.kind in "fiub":
                found.append(each.sum(axis=1, dtype=np.float64))
        different: dict[bytes, np.ndarray] = {}
        for counts in found:
            different.setdefault((counts / (counts.sum() or 1)).tobytes(), counts)
        yield from different.values()

    def elsewhere(self, seed: int, split: Split, rows: Rows | None, wide: bool) -> Result | None:
        """Result of a division, or of one batch of some examples, at other parameters; None where it is not known."""
        key = seed, split, rows, wide
        if key not in self._elsewhere_made:
            subject = self.subject
            batch = subject.batch if rows is None else subject.rows(self.copies(rows))
            try:
                made = subject.run(split, batch, wide, noise=perturbation(seed, 0.5, 0.5))
            except Exception:  # whatever a foreign step raises there
                made = None
            self._elsewhere_made[key] = made
        return self._elsewhere_made[key]

    def resolution(self, floats: Floats) -> list[np.ndarray]:
        """How far from a result, elementwise, another one may be that is called the same."""
        return [np.full(x.shape, 2 * one) for x, one in zip(floats, self.allowed(False), strict=True)]

    def shares(self, a: Floats, b: Floats, wide: bool, sides: float = 2) -> np.ndarray:
        """The distance of each leaf over what is allowed to so many results."""
        return np.array([over(rms(x - y), sides * z) for x, y, z in zip(a, b, self.allowed(wide), strict=True)])

    def units(self) -> list[Rows]:
        """The examples, or groups of neighbours where there are many."""
        n = self.examples
        return [tuple(x.tolist()) for x in np.array_split(np.arange(n), min(n, EACH))]

    def columns(self) -> list[Result | None]:
        """Results of one batch of each of the units."""
        return [self.repeated(rows) for rows in self.units()]

    @cached_property
    def combination(self) -> tuple[np.ndarray | None, list[int]]:
        """The weights of the units in one batch, and the leaves that are their mean with these weights.

        The weights are None where no leaf is one, and where its elements do not determine them.
        """
        every = list(range(len(self.best.floats)))
        for c, leaves in self._proposed(every):
            near = self._distances_from(c)
            means = [i for i in every if near[i] <= 1]
            if set(leaves) <= set(means):
                return c, means
        return None, []

    def _proposed(self, every: list[int]) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Weights of the units that one batch may have, and the leaves that have to show them."""
        whole, wide = self.best.floats, self.wide is not None
        for leaves in [every, *([i] for i in sorted(every, key=lambda i: -whole[i].size))]:
            c = self._solved(whole, leaves, wide)
            if c is not None and abs(c.sum() - 1) <= SAME:
                yield c, leaves
        for counts in self.counts():
            if counts.min() >= 0 and counts.any():
                c = np.array([counts[list(rows)].sum() for rows in self.units()]) / counts.sum()
                yield c, every
        c = self._solved(whole, every, wide, elsewhere=True)
        if c is not None and abs(c.sum() - 1) <= SAME:
            yield c, every

    @cached_property
    def excluded(self) -> bool:
        """Whether one batch is no combination of its examples, whatever they weigh."""
        every = range(len(self.best.floats))
        if self.combination[0] is not None:
            return len(self.combination[1]) < len(every)
        floats, terms, _ = self._system(self.best.floats, every, self.wide is not None, elsewhere=True)
        matrix, target = self._scaled(floats, terms, every, self.wide is not None)
        # Weights are no longer than 1, and so are the shortest that fit; what rounding hides is left out.
        largest = float(np.linalg.norm(matrix, 2)) if matrix.size else 0.0
        coefficients = np.linalg.lstsq(matrix.T, target, rcond=1 / max(largest, 1))[0]
        off = np.linalg.norm(coefficients @ matrix - target)
        return bool(np.linalg.norm(coefficients) > 2 or off > (2 + np.abs(coefficients).sum()) * len(every))

    @cached_property
    def total(self) -> float | None:
        """The sum of the weights of all units in one batch; None where it is not their combination."""
        c = self._solved(self.best.floats, range(len(self.best.floats)), self.wide is not None)
        return float(c.sum()) if c is not None and self._distances_from(c).max() <= 1 else None

    @property
    def weights(self) -> np.ndarray | None:
        return self.combination[0]

    def fitted(
        self, result: Result, split: Split, wide: bool, leaves: Sequence[int] | None = None
    ) -> np.ndarray | None:
        """The weights of the units in a division's result, by least squares over leaves; None: all that are means."""
        leaves = self.combination[1] if leaves is None else leaves
        x = self._solved(result.floats, leaves, wide)
        return self._solved(result.floats, leaves, wide, split=split, elsewhere=True) if x is None else x

    def _distances_from(self, weights: np.ndarray) -> np.ndarray:
        used = [(a, x.floats) for a, x in zip(weights, self.columns(), strict=True) if x is not None]
        if not used:  # a variance of one example is 0, and the derivative of its root is not finite
            return np.full(len(self.best.floats), np.inf)
        made = [np.tensordot([a for a, _ in used], np.stack(x), 1) for x in zip(*(x for _, x in used), strict=True)]
        return self.shares(self.best.floats, made, self.wide is not None, 2 + float(np.abs(weights).sum()))

    @cached_property
    def likely(self) -> np.ndarray | None:
        """The weights, or where rounding leaves them open the nearest ones: for what proves itself in any case."""
        if self.weights is not None:
            return self.weights
        return self._solved(self.best.floats, range(len(self.best.floats)), self.wide is not None, certain=0)

    @property
    def totals(self) -> list[float]:
        """Of how many tokens the weights can be the parts: the smallest numbers that make integers of all of them."""
        if self.likely is None:
            return []
        totals = np.arange(1, 2049)
        parts = totals[:, None] * self.likely
        return [float(x) for x in totals[np.abs(parts - np.round(parts)).max(axis=1) < 0.02][:3]]

    def _solved(
        self,
        floats: Floats,
        leaves: Sequence[int],
        wide: bool,
        certain: float = CERTAIN,
        split: Split = WHOLE,
        elsewhere: bool = False,
    ) -> np.ndarray | None:
        """The combination of the units that is nearest to a result; None where rounding leaves it open."""
        together, terms, shown = self._system(floats, leaves, wide, split, elsewhere)
        solved = self.nearest(together, terms, wide, leaves, certain)
        if solved is None:
            return None
        weights = np.zeros(len(self.units()))
        weights[shown] = solved
        return weights

    def _system(
        self, floats: Floats, leaves: Sequence[int], wide: bool, split: Split = WHOLE, elsewhere: bool = False
    ) -> tuple[Floats, Sequence[Floats], list[int]]:
        """A result, and what the units give that show in it; at other parameters as well, where that is asked for."""
        columns = dict(enumerate(self.columns()))
        shown = {i: x.floats for i, x in columns.items() if x is not None and any(np.any(x.floats[j]) for j in leaves)}
        points: list[tuple[Floats, list[Floats]]] = [(floats, list(shown.values()))]
        needed = OVERDETERMINED * len(shown) / max(sum(floats[j].size for j in leaves), 1)
        for seed in range(min(int(np.ceil(needed)), POINTS) if elsewhere and needed > 1 else 0):
            made = self.elsewhere(seed, split, None, wide)
            parts = [self.elsewhere(seed, WHOLE, self.units()[i], self.wide is not None) for i in shown]
            if made is not None and None not in parts:
                points.append((made.floats, [x.floats for x in parts if x is not None]))
        together = [np.stack(x) for x in zip(*(result for result, _ in points), strict=True)]
        terms = [[np.stack(x) for x in zip(*term, strict=True)] for term in zip(*(x for _, x in points), strict=True)]
        return together, terms, list(shown)

    def nearest(
        self,
        floats: Floats,
        terms: Sequence[Floats],
        wide: bool,
        leaves: Sequence[int] | None = None,
        certain: float = CERTAIN,
    ) -> np.ndarray | None:
        """The coefficients of least squares that make a result of terms; None where rounding leaves them open."""
        leaves = range(len(floats)) if leaves is None else leaves
        matrix, target = self._scaled(floats, terms, leaves, wide)
        equations = int(np.count_nonzero(np.any(matrix != 0, axis=0)))
        if not matrix.size or equations < OVERDETERMINED * len(terms):
            return None
        if np.linalg.svd(matrix, compute_uv=False)[-1] < certain * np.sqrt(len(leaves)):
            return None
        return np.linalg.lstsq(matrix.T, target, rcond=None)[0]

    def _scaled(
        self, floats: Floats, terms: Sequence[Floats], leaves: Sequence[int], wide: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Terms as rows, and a result, in units of what rounding allows to each leaf."""
        allowed = self.allowed(wide)
        scales = {j: 1 / (allowed[j] * np.sqrt(max(floats[j].size, 1))) for j in leaves if allowed[j] > 0}
        rows = [np.concatenate([np.zeros(0), *(x[j].ravel() * a for j, a in scales.items())]) for x in (floats, *terms)]
        return np.stack(rows[1:]) if terms else np.zeros((0, len(rows[0]))), rows[0]


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def flat(floats: Floats) -> np.ndarray:
    """All elements in one float64 array."""
    return np.concatenate([x.ravel() for x in floats] or [np.zeros(0)]).astype(np.float64)


def over(distance: float, allowed: float) -> float:
    if distance == 0:
        return 0.0
    return distance / allowed if allowed else float("inf")


def gamma(roundings: int, unit: float) -> float:
    """By how much so many roundings change a number, at most, relative to it."""
    return roundings * unit / (1 - roundings * unit)
