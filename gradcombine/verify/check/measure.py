"""How far two results of a step are apart, over what rounding allows.

The distance is the root of the mean square over a leaf. What rounding allows is measured on the step itself::

    allowed = 16 * noise + gamma(2 n + 5) * max_e |g_e|

- noise: how far the result on one batch moves if each parameter, and each number of the batch, moves by up to two
  units of rounding, at random; in float64 where the step runs in it, which leaves no other rounding in. The unit u is
  that of the narrowest operands of its products of matrices. New parameters have u |p| more, as they are stored.
- gamma(m) = m u / (1 - m u) bounds the sum of the n examples' gradients g_e in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np

from gradcombine.types import Tree
from gradcombine.verify.check import precision
from gradcombine.verify.check.leaves import perturbation
from gradcombine.verify.check.running import WHOLE, NotFiniteError, NotWide, Result, Split, Subject
from gradcombine.verify.check.standard import EACH, Floats, Standard, flat, gamma, over, rms
from gradcombine.verify.compare.ulp import rounding_unit

TIMES = 16
"""How many times the measured noise is allowed."""

SAMPLES = 3
"""How often the noise is measured; the largest counts."""

FLOAT32_UNIT = rounding_unit(np.dtype(np.float32))
UNIT64 = rounding_unit(np.dtype(np.float64))
WIDE_TIMES = 64
"""In float64, so many times what is allowed: it is still a millionth of what float32 is allowed."""


class StepStandard(Standard):
    """A step on one batch: what it gives, and what rounding may do to that.

    Attributes:
      not_wide: why there is no result in float64.
      unit: the unit roundoff.
      draws: whether it may draw random numbers.
      noise: how far rounding moves each leaf.
      reached: whether the gradient that reaches an optimizer has been looked at.
    """

    reached = False

    def __init__(self, subject: Subject, unit: float | None) -> None:
        super().__init__(subject)
        self.own = subject.divided(WHOLE, subject.batch)
        self.names = subject.names
        program = precision.read(subject)
        widths = [rounding_unit(x) for x in self.own.dtypes]
        self.unit = unit or program.unit or max(widths)
        self.draws = program.random
        self.wide, self.not_wide = self._in_float64(program.draws)
        exact, own = self._noise(self.wide is not None), self._noise(False)
        sizes = np.array([rms(x) for x in self.best.floats])
        # A leaf that is 0 in exact arithmetic, as the bias of an attention's keys, has no other noise than its own.
        self.noise = np.where(sizes > 2.0**-40 * sizes.max(initial=0), exact, own)
        if subject.returns_params:
            stored = np.zeros_like(self.noise)
            stored[: len(subject.param_leaves)] = [self.unit * rms(x) for _, x in subject.param_leaves]
            self.noise, exact = self.noise + stored, exact + stored
        columns = [self.best.floats, *(x.floats for x in self.columns() if x is not None)]
        largest = np.array([rms(np.max(np.abs(column), axis=0)) for column in zip(*columns, strict=True)])
        sums = gamma(2 * min(subject.examples, EACH) + 5, self.unit) * largest
        self._accurate = TIMES * self.noise + sums
        # What is no more accurate than its own noise is allowed to be no nearer to itself.
        self._allowed = TIMES * np.maximum(exact, own) + sums

    def allowed(self, wide: bool) -> np.ndarray:
        """How far rounding may move one result, a number a leaf."""
        if not wide:
            return self._allowed
        return np.maximum(self._allowed * WIDE_TIMES * UNIT64 / self.unit, self._jumps)

    def shown(self, floats: Floats, whole: Floats) -> float:
        """The distance of a division in float64 from one batch, over what the rounding of float32 would allow."""
        allowed = 2 * self._allowed * FLOAT32_UNIT / self.unit
        far = np.array([rms(x - y) for x, y in zip(floats, whole, strict=True)])
        if np.any(far > allowed):
            allowed = np.maximum(allowed, 2 * self._jumps)
        return max(over(*x) for x in zip(far, allowed, strict=True))

    @cached_property
    def _jumps(self) -> np.ndarray:
        """How far rounding of float64 moves each leaf, times `TIMES`: the sign of a gradient that is 0 but for it."""
        if self.wide is None:
            return np.zeros_like(self._allowed)
        moved = [self.wide.floats]
        with suppress(NotWide, NotFiniteError):
            moved.extend(x.floats for x in self._moved(True, UNIT64))
        return TIMES * np.array(
            [max(rms(x - y) for x in column) for column, y in zip(zip(*moved, strict=True), moved[0], strict=True)]
        )

    def hidden(self, floats: Floats) -> float:
        """Up to what size differences pass, over that of such arrays."""
        sizes = np.array([x.size for x in self.own.floats])
        allowed = float(np.sqrt(sizes @ (2 * self._allowed) ** 2))
        return over(allowed, float(np.linalg.norm(flat(floats))))

    def accuracy(self, result: Result, reference: Floats) -> tuple[np.ndarray, np.ndarray]:
        """The distance of each leaf from a reference: over what is allowed, and over the noise."""
        far = [rms(x - y) for x, y in zip(result.floats, reference, strict=True)]
        if np.any(np.array(far) > self._accurate):
            self.noise, self._accurate = self._with_zeros
        of_bound, noises = (
            np.array([over(*x) for x in zip(far, y, strict=True)]) for y in (self._accurate, self.noise)
        )
        return of_bound, noises

    def division(self, split: Split, wide: bool, backwards: bool = False) -> Result | None:
        """Result of another division, or of the examples in reverse order; None where it cannot be known."""
        if backwards and not self.subject.turns:
            return None
        batch = self.subject.rows(range(self.examples)[:: -1 if backwards else 1])
        try:
            return self.in_float64(split, batch) if wide else self.subject.divided(split, batch)
        except (NotWide, ValueError):  # or one that it cannot take
            return None

    @cached_property
    def turned(self) -> Tree:
        """The batch with its examples in reverse."""
        return self.subject.rows(range(self.subject.examples - 1, -1, -1))

    @cached_property
    def backwards(self) -> Result:
        """One batch of the examples in reverse."""
        return self.subject.run(WHOLE, self.turned)

    @cached_property
    def by_places(self) -> list[int]:
        """Leaves that change when one batch has the same examples in reverse order."""
        return np.flatnonzero(self.shares(self.backwards.floats, self.own.floats, wide=False) > 1).tolist()

    @cached_property
    def depends_on_places(self) -> bool:
        """Whether one batch of the same examples in reverse gives something else."""
        if self.by_places:
            return True
        if self.wide is None or self.unit <= FLOAT32_UNIT:
            return False
        return self.shown(self.in_float64(WHOLE, self.turned).floats, self.wide.floats) > 1

    def in_float64(self, split: Split, batch: Tree) -> Result:
        """A division's result in float64.

        Raises:
          NotWide: for a step that does not run in float64. One whose program cannot be read must not round to something
            narrower inside: where parameters move by little, its result moves by too much, or not at all.
        """
        subject = self.subject
        if self.is_retyped(split, batch):
            return subject.wide(split, batch)
        scales = 2.0**-44, 2.0**-24, 2.0**-6
        zero = 0.0 if any(np.any(x) for _, x in subject.param_leaves) else 2.0**-6
        try:
            wide = subject.wide(split, batch)
            moved = [subject.wide(split, batch, noise=perturbation(0, scale, zero)) for scale in scales]
        except NotFiniteError as error:
            raise NotWide(f"{error.path} is not finite there, or where the parameters are a little different") from None
        rounding = 2**6 * UNIT64 * max(rms(x) for x in wide.floats)
        for i, name in enumerate(subject.names):
            distances = [rms(x.floats[i] - wide.floats[i]) for x in moved]
            for j in range(len(scales) - 1):
                expected = distances[j + 1] * scales[j] / scales[j + 1]
                if distances[j] > 2**10 * expected + rounding or (distances[j] == 0 and expected > rounding):
                    raise NotWide(f"the step rounds to something narrower than float64 by itself, as {name} shows")
        return wide

    def is_retyped(self, split: Split, batch: Tree) -> bool:
        """Whether float64 runs are those of the step's own program, with its constants."""
        program = self.subject.program(self.subject.step(split), batch)
        return self.subject.framework == "torch" or (program is not None and not program.retyped.problem)

    def _in_float64(self, draws: bool) -> tuple[Result | None, str]:
        subject = self.subject
        try:
            if draws:
                raise NotWide("the step draws random numbers, which are others in float64")
            return self.in_float64(WHOLE, subject.batch), ""
        except NotWide as reason:
            return None, str(reason)

    def _moved(self, wide: bool, unit: float, samples: int = SAMPLES) -> Iterator[Result]:
        """Results where the inputs are moved by two units of rounding, at random."""
        run = self.subject.wide if wide else self.subject.run
        for seed in range(samples):
            of_params, of_batch = perturbation(seed, 2 * unit), perturbation(seed + SAMPLES, 2 * unit)
            yield run(WHOLE, self.subject.batch, noise=of_params, batch_noise=of_batch)

    def _noise(self, wide: bool, chosen: Sequence[np.ndarray] | None = None) -> np.ndarray:
        """How far rounding of the inputs moves each leaf, or these of its elements."""
        still = self.best if wide else self.own
        of = chosen or [np.array(True)] * len(still.floats)
        worst = np.array([self.unit * rms(x * y) for x, y in zip(still.floats, of, strict=True)])
        for moved in self._moved(wide, self.unit):
            off = [rms((x - y) * z) for x, y, z in zip(moved.floats, still.floats, of, strict=True)]
            worst = np.maximum(worst, off)
        return worst

    @cached_property
    def _with_zeros(self) -> tuple[np.ndarray, np.ndarray]:
        """The noise, and the bound of accuracy, with the own noise of elements that are 0 in exact arithmetic.

        Such are the biases of an attention's keys, alone or as a part of a leaf: in float64, too, they are nothing but
        rounding, and Adam makes as large an update of it as of any gradient.
        """
        if self.wide is None:
            return self.noise, self._accurate
        still = self.wide.floats
        zeros = [np.zeros(x.shape, bool) for x in still]
        try:
            for moved in self._moved(True, UNIT64, 2 * SAMPLES):
                pairs = zip(zeros, moved.floats, still, strict=True)
                zeros = [zero | (np.abs(x - y) > 2.0**-10 * np.abs(y)) for zero, x, y in pairs]
        except (NotWide, NotFiniteError):
            return self.noise, self._accurate
        own = self._noise(False, zeros)
        return np.hypot(self.noise, own), self._accurate + TIMES * own
