"""How far two results of a step are apart, over what rounding allows.

The distance is the root of the mean square over a leaf. What rounding allows is measured on the step itself::

    allowed = 16 * noise + gamma(2 n + 5) * max_e |g_e|

- noise: how far the result on one batch moves if each parameter, and each number of the batch, moves by up to two
  units of rounding, at random; in float64 where the step runs in it, which leaves no other rounding in. The unit u is
  that of the narrowest operands of its products of matrices. New parameters have u |p| more, as they are stored.
- gamma(m) = m u / (1 - m u) bounds the sum of the n examples' gradients g_e in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from gradcombine.types import Tree
from gradcombine.verify.microbatches.combination import gamma
from gradcombine.verify.steps import precision
from gradcombine.verify.steps.running import WHOLE, NotFiniteError, NotWide, Result, Rows, Split, Subject, perturbation
from gradcombine.verify.ulp import rounding_unit

TIMES = 16
"""How many times the measured noise is allowed."""

SAMPLES = 3
"""How often the noise is measured; the largest counts."""

EACH = 64
"""Up to how many examples each is looked at by itself; more are looked at in groups."""

UNIT64 = rounding_unit(np.dtype(np.float64))
WIDE_TIMES = 64
"""In float64, so many times what is allowed: it is still a millionth of what float32 is allowed."""

SAME = 0.01
"""How far fitted coefficients may be from those of a hypothesis, which is then tried itself."""

CERTAIN = 1e3
"""By how many times rounding an example has to show in the gradient for its coefficient to be fitted."""

OVERDETERMINED = 2
"""At least so many elements have to agree for each coefficient that is fitted to them."""

Floats = Sequence[np.ndarray]


class Standard:
    """A step on one batch: what it gives, and what rounding may do to that.

    Attributes:
      subject: the step.
      own: the result, in the step's own precision.
      wide: the result in float64; None where there is none.
      not_wide: why not.
      unit: the unit roundoff.
      noise: how far rounding moves each leaf.
    """

    def __init__(self, subject: Subject, unit: float | None) -> None:
        self.subject = subject
        self.own = subject.divided(WHOLE, subject.batch)
        program = precision.read(subject)
        widths = [rounding_unit(x) for x in self.own.dtypes]
        self.unit = unit or program.unit or max(widths)
        self.wide, self.not_wide = self._in_float64(program.draws)
        self._rows: dict[Rows, Result | None] = {}
        exact, own = self._noise(self.wide is not None), self._noise(False)
        sizes = np.array([_rms(x) for x in self.best.floats])
        # A leaf that is 0 in exact arithmetic, as the bias of an attention's keys, has no other noise than its own.
        self.noise = np.where(sizes > 2.0**-40 * sizes.max(initial=0), exact, own)
        if subject.returns_params:
            stored = np.array([self.unit * _rms(x) for _, x in subject.param_leaves])
            self.noise, exact = self.noise + stored, exact + stored
        largest = np.array([_rms(x) for x in self._largest()])
        sums = gamma(2 * min(subject.examples, EACH) + 5, self.unit) * largest
        self._accurate = TIMES * self.noise + sums
        # What is no more accurate than its own noise is allowed to be no nearer to itself.
        self._allowed = TIMES * np.maximum(exact, own) + sums

    @property
    def best(self) -> Result:
        """In float64 where that is possible."""
        return self.wide or self.own

    def allowed(self, wide: bool) -> np.ndarray:
        """How far rounding may move one result, a number a leaf."""
        return self._allowed * (WIDE_TIMES * UNIT64 / self.unit if wide else 1.0)

    def accuracy(self, result: Result, reference: Floats) -> tuple[np.ndarray, np.ndarray]:
        """The distance of each leaf from a reference: over what is allowed, and over the noise."""
        far = [_rms(x - y) for x, y in zip(result.floats, reference, strict=True)]
        of_bound, noises = (
            np.array([_over(*x) for x in zip(far, y, strict=True)]) for y in (self._accurate, self.noise)
        )
        return of_bound, noises

    def shares(self, a: Floats, b: Floats, wide: bool, sides: float = 2) -> np.ndarray:
        """The distance of each leaf over what is allowed to so many results."""
        return np.array([_over(_rms(x - y), sides * z) for x, y, z in zip(a, b, self.allowed(wide), strict=True)])

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
        """The same, of copies of them in a batch of the full size, where they divide it: the program is compiled."""
        n = self.subject.examples
        return self.one([*rows] * (n // len(rows)) if n % len(rows) == 0 else rows)

    def units(self) -> list[Rows]:
        """The examples, or groups of neighbours where there are many."""
        n = self.subject.examples
        return [tuple(x.tolist()) for x in np.array_split(np.arange(n), min(n, EACH))]

    def columns(self) -> list[Result | None]:
        """What one batch of each of the units gives."""
        return [self.repeated(rows) for rows in self.units()]

    @cached_property
    def depends_on_places(self) -> bool:
        """Whether one batch of the same examples in reverse gives something else."""
        n, subject = self.subject.examples, self.subject
        turned = subject.run(WHOLE, subject.rows(range(n - 1, -1, -1)))
        return bool(self.shares(turned.floats, self.own.floats, wide=False).max() > 1)

    @cached_property
    def combination(self) -> tuple[np.ndarray | None, list[int]]:
        """The weights of the units in one batch, and the leaves that are their mean with these weights.

        The weights are None where no leaf is one, and where its elements do not determine them.
        """
        whole, every = self.best.floats, list(range(len(self.best.floats)))
        for leaves in [every, *([i] for i in sorted(every, key=lambda i: -whole[i].size))]:
            c = self._solved(whole, leaves, self.wide is not None)
            if c is None or abs(c.sum() - 1) > SAME:
                continue
            near = self._distances_from(c)
            means = [i for i in every if near[i] <= 1]
            if set(leaves) <= set(means):
                return c, means
        equal = np.full(len(self.units()), 1 / len(self.units()))
        near = self._distances_from(equal)
        means = [i for i in every if near[i] <= 1]
        return (equal, means) if len(means) == len(every) else (None, [])

    @property
    def weights(self) -> np.ndarray | None:
        return self.combination[0]

    def fitted(self, result: Result, wide: bool) -> np.ndarray | None:
        """The weights of the units in a division's result, by least squares over the leaves that are means."""
        return self._solved(result.floats, self.combination[1], wide)

    def _distances_from(self, weights: np.ndarray) -> np.ndarray:
        used = [(a, x.floats) for a, x in zip(weights, self.columns(), strict=True) if x is not None]
        made = [np.tensordot([a for a, _ in used], np.stack(x), 1) for x in zip(*(x for _, x in used), strict=True)]
        return self.shares(self.best.floats, made, self.wide is not None, 2 + float(np.abs(weights).sum()))

    @cached_property
    def likely(self) -> np.ndarray | None:
        """The weights, or where rounding leaves them open the nearest ones: for what proves itself in any case."""
        return self._solved(self.best.floats, range(len(self.best.floats)), self.wide is not None, certain=0)

    def _solved(self, floats: Floats, leaves: Sequence[int], wide: bool, certain: float = CERTAIN) -> np.ndarray | None:
        """The combination of the units that is nearest to a result; None where rounding leaves it open."""
        columns = dict(enumerate(self.columns()))
        shown = {i: x.floats for i, x in columns.items() if x is not None and any(np.any(x.floats[j]) for j in leaves)}
        solved = self.nearest(floats, list(shown.values()), wide, leaves, certain)
        if solved is None:
            return None
        weights = np.zeros(len(columns))
        weights[list(shown)] = solved
        return weights

    def nearest(
        self,
        floats: Floats,
        terms: Sequence[Floats],
        wide: bool,
        leaves: Sequence[int] | None = None,
        certain: float = CERTAIN,
    ) -> np.ndarray | None:
        """The coefficients of least squares that make a result of terms; None where rounding leaves them open."""
        leaves, allowed = range(len(floats)) if leaves is None else leaves, self.allowed(wide)
        scales = {j: 1 / (allowed[j] * np.sqrt(max(floats[j].size, 1))) for j in leaves if allowed[j] > 0}
        if not terms or not scales:
            return None
        matrix = np.stack([np.concatenate([x[j].ravel() * a for j, a in scales.items()]) for x in terms])
        target = np.concatenate([floats[j].ravel() * a for j, a in scales.items()])
        equations = int(np.count_nonzero(np.any(matrix != 0, axis=0)))
        if equations < OVERDETERMINED * len(terms):
            return None
        if np.linalg.svd(matrix, compute_uv=False)[-1] < certain * np.sqrt(len(leaves)):
            return None
        return np.linalg.lstsq(matrix.T, target, rcond=None)[0]

    def in_float64(self, split: Split, batch: Tree) -> Result:
        """A division's result in float64.

        Raises:
          NotWide: for a step that does not run in float64, or rounds to something narrower inside: where parameters
            move by little, its result moves by too much, or not at all.
        """
        subject = self.subject
        wide = subject.wide(split, batch)
        scales = 2.0**-44, 2.0**-24, 2.0**-6
        moved = [subject.wide(split, batch, noise=perturbation(0, scale, 2.0**-6)) for scale in scales]
        rounding = 2**6 * UNIT64 * max(_rms(x) for x in wide.floats)
        for i, name in enumerate(subject.names):
            distances = [_rms(x.floats[i] - wide.floats[i]) for x in moved]
            for j in range(len(scales) - 1):
                expected = distances[j + 1] * scales[j] / scales[j + 1]
                if distances[j] > 2**10 * expected + rounding or (distances[j] == 0 and expected > rounding):
                    raise NotWide(f"the step rounds to something narrower than float64 by itself, as {name} shows")
        return wide

    def _in_float64(self, draws: bool) -> tuple[Result | None, str]:
        subject = self.subject
        try:
            if draws:
                raise NotWide("the step draws random numbers, which are others in float64")
            return self.in_float64(WHOLE, subject.batch), ""
        except NotWide as reason:
            return None, str(reason)

    def _noise(self, wide: bool) -> np.ndarray:
        subject, unit, still = self.subject, 2 * self.unit, self.best if wide else self.own
        worst = np.array([self.unit * _rms(x) for x in still.floats])
        for seed in range(SAMPLES):
            of_params, of_batch = perturbation(seed, unit), perturbation(seed + SAMPLES, unit)
            moved = subject.run(WHOLE, subject.batch, wide, of_params, of_batch)
            worst = np.maximum(worst, [_rms(x - y) for x, y in zip(moved.floats, still.floats, strict=True)])
        return worst

    def _largest(self) -> list[np.ndarray]:
        """The largest magnitude of each element over the units."""
        largest = [np.abs(x) for x in self.best.floats]
        for column in self.columns():
            if column is not None:
                largest = [np.maximum(x, np.abs(y)) for x, y in zip(largest, column.floats, strict=True)]
        return largest


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _over(distance: float, allowed: float) -> float:
    if distance == 0:
        return 0.0
    return distance / allowed if allowed else float("inf")
