"""Measures the rounding bound of a step.

Distances are root mean squares over a leaf. Their bound is measured on the step itself::

    allowed = 16 * noise + (2 n + 5) u max_e |g_e|

- noise: the change of one batch's result if each parameter and each number in the batch changes at random by up to two
  units of rounding; in float64, where it includes no other rounding, if the step runs in it. The unit roundoff u is
  that of the narrowest operands of the step's matrix products. New parameters add v |p|, because they are stored with
  the unit roundoff v of their dtype.
- m u bounds the relative error of m roundings in a sum of the n examples' gradients g_e in any order, for any u (C.-P.
  Jeannerod and S. M. Rump, *Improved error bounds for inner products in floating-point arithmetic*, 2013).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module

import numpy as np

from gradcombine.types import Tree
from gradcombine.verify.check import step_program
from gradcombine.verify.check.leaves import ZERO, as_floats, constant, flat, is_quantized, over, perturbation, rms
from gradcombine.verify.check.running import ONE_BATCH, Floats, NotFiniteError, NotWide, Result, Rows, Split, Subject
from gradcombine.verify.check.step_program import UNIT64
from gradcombine.verify.compare.ulp import rounding_unit

EACH = 64
"""Number of examples up to which each is run alone; larger batches are run in that many groups."""

TIMES = 16
"""Multiple of the measured noise that is allowed."""

SAMPLES = 3
"""Number of noise measurements, of which the largest is used."""

AGAIN, RARE = 15, 4
"""Number of samples of a second measurement, for new parameters of narrow steps, and the multiple of the noise from
which it counts: Adam enlarges single gradients that are rounding, which few samples may not show."""

STORED = 2.0**-7
"""Fraction of a parameter's change that rounding of the stored parameter may hide in PyTorch, where float64 is slow."""

MORE = 8
"""Multiple of the error of one batch that the error of a division may have."""

OBSERVED = "['gradients']['"
"""Is in the paths of gradients that PyTorch optimizers receive in a result, before the name of the parameter."""

FLOAT32_UNIT = rounding_unit(np.dtype(np.float32))
WIDE_TIMES = 64
"""Factor by which the float64 bound is wider; it is still a millionth of the float32 bound."""


class Measured:
    """The result of a step on one batch and on single examples, and its measured rounding bound.

    Attributes:
      subject: the step.
      examples: number of examples.
      names: paths of the leaves of a result.
      native: the result of one batch in the step's native precision.
      wide: the result of one batch in float64, or None.
      not_wide: the reason why there is no float64 result.
      unit: the unit roundoff.
      roundoffs: the unit roundoff of each leaf, which may have a narrower dtype.
      draws: whether the step may draw random numbers.
      in_both: whether divisions are compared in float64, too: the step is narrow, or parameters hide their change.
      noise: the measured rounding noise of each leaf.
      gradient_examined: whether the gradient that reaches an optimizer has been examined.
      is_coarse: whether a division of a step with narrow dtypes could not be compared in float64.
      not_compared: leaves that an explanation by design allows to differ, but does not predict.
    """

    gradient_examined, is_coarse, not_compared, _is_measured_again = False, False, "", False

    def __init__(self, subject: Subject, unit: float | None) -> None:
        self.subject, self.examples = subject, subject.examples
        self._rows: dict[Rows, Result | None] = {}
        self.native = subject.run(ONE_BATCH, subject.batch)
        self.names = subject.names
        facts = step_program.read(subject)
        dtypes = [*self.native.dtypes, *(x.dtype for _, x in subject.param_leaves)]
        self.unit = unit or facts.unit or max(map(rounding_unit, dtypes))
        leaves = np.array([rounding_unit(x) for x in self.native.dtypes])
        self.roundoffs = np.maximum(self.unit, leaves) if unit is None else np.full(len(leaves), unit)
        self.draws = facts.draws
        self.wide, self.not_wide = self._in_float64(facts.differs)
        best, native = self._noise(self.wide is not None), self._noise(False)
        sizes = np.array([rms(x) for x in self.best.floats])
        # A leaf that is 0 in exact arithmetic, such as the key bias of attention, is the rounding of terms that cancel.
        # If the loss is piecewise linear, no change of the inputs shows it: it is measured against the largest leaf.
        largest = sizes[self.gradients].max(initial=0)
        is_zero = sizes <= ZERO * largest
        if subject.framework == "torch" and subject.returns_params:
            by_rounding = import_module("gradcombine.verify.check.torch_steps").updates_by_rounding(self, sizes)
            is_zero, native = is_zero | (by_rounding > 0), np.maximum(native, by_rounding)
        native = np.where(is_zero, np.maximum(native, self.unit * largest), native)
        self.noise = np.where(is_zero, native, best)
        stored = np.zeros(len(sizes))
        if subject.returns_params:
            params = [rms(as_floats(x)) for _, x in subject.param_leaves]
            stored[: len(params)] = (self.roundoffs if unit else leaves)[: len(params)] * params
        columns = [self.best.floats, *(x.floats for x in self.columns if x is not None)]
        largest = np.array([rms(np.max(np.abs(column), axis=0)) for column in zip(*columns, strict=True)])
        sums = (2 * min(subject.examples, EACH) + 5) * self.unit * largest
        of_change = TIMES * self.noise + sums
        self.noise = self.noise + stored
        self._accurate = of_change + TIMES * stored
        # A result that is inaccurate by its noise in native precision also varies by it between divisions.
        self._allowed = TIMES * np.maximum(best + stored, native) + sums
        self._of_change = of_change if subject.returns_params else self._allowed
        hides = 2 * TIMES * stored > (STORED if subject.framework == "torch" else 0.0) * sizes
        self.in_both = self.is_narrow or (self.wide is not None and bool(np.any(hides)))

    @cached_property
    def params(self) -> dict[int, np.ndarray]:
        """The parameter of each leaf of the result, matched by order or by path if possible."""
        params = [(path, as_floats(x)) for path, x in self.subject.param_leaves]
        shapes = [x.shape for x in self.native.floats]
        if shapes == [x.shape for _, x in params]:
            return dict(enumerate(x for _, x in params))
        return {
            i: p
            for i, (name, shape) in enumerate(zip(self.names, shapes, strict=True))
            for path, p in params
            if name.endswith(path) and p.shape == shape
        }

    @property
    def gradients(self) -> list[int]:
        """Indices of the leaves that belong to parameters, unlike metrics; all leaves if none are known."""
        return sorted(self.params) or [*range(len(self.names))]

    @cached_property
    def observed(self) -> list[int]:
        """Leaves that are gradients which PyTorch optimizers received; empty if there are none."""
        if self.subject.framework != "torch" or not self.subject.returns_params:
            return []
        return [i for i, name in enumerate(self.names) if OBSERVED in name]

    @property
    def is_narrow(self) -> bool:
        """Whether the step has a dtype narrower than float32."""
        return float(self.roundoffs.max()) > FLOAT32_UNIT

    @property
    def best(self) -> Result:
        """The result of one batch, in float64 if possible."""
        return self.wide or self.native

    @cached_property
    def units(self) -> list[Rows]:
        """The examples, or contiguous groups of them if there are more than `EACH`."""
        n = self.examples
        return [tuple(x.tolist()) for x in np.array_split(np.arange(n), min(n, EACH))]

    @cached_property
    def columns(self) -> list[Result | None]:
        """The results of the units; None where one is not finite."""
        return [self.repeated(rows) for rows in self.units]

    def one(self, rows: Sequence[int]) -> Result | None:
        """Runs one batch of these examples in the best precision; None as by `tried`, as for a masked example."""
        key = tuple(rows)
        if key not in self._rows:
            self._rows[key] = self.subject.tried(ONE_BATCH, self.subject.rows(rows), self.wide is not None)
        return self._rows[key]

    def repeated(self, rows: Sequence[int]) -> Result | None:
        """Runs one batch of copies of these examples, of the full size if possible, which is already compiled."""
        return self.one(self.copies(rows))

    def copies(self, rows: Sequence[int]) -> Sequence[int]:
        n = self.examples
        return [*rows] * (n // len(rows)) if n % len(rows) == 0 else rows

    def allowed(self, wide: bool) -> np.ndarray:
        """Rounding bound of one result, one number per leaf."""
        if not wide:
            return self._allowed
        return np.maximum(self._allowed * WIDE_TIMES * UNIT64 / self.roundoffs, self._jumps)

    def shares(self, a: Floats, b: Floats, wide: bool, sides: float = 2) -> np.ndarray:
        """Returns the distance of each leaf divided by the rounding bound of ``sides`` results."""
        return np.array([over(rms(x - y), sides * z) for x, y, z in zip(a, b, self.allowed(wide), strict=True)])

    def float32_shares(self, floats: Floats, one: Floats) -> np.ndarray:
        """Returns the distance of each leaf of float64 results, over the float32 bound without stored parameters'."""
        allowed = 2 * (self._of_change * FLOAT32_UNIT + self._allowed * WIDE_TIMES * UNIT64) / self.roundoffs
        far = np.array([rms(x - y) for x, y in zip(floats, one, strict=True)])
        if np.any(far > allowed):
            allowed = np.maximum(allowed, 2 * self._jumps)
        return np.array([over(*x) for x in zip(far.tolist(), allowed.tolist(), strict=True)])

    @cached_property
    def _jumps(self) -> np.ndarray:
        """Bound of float64 rounding; large for discontinuities such as the sign of a gradient that is only rounding."""
        if self.wide is None:
            return np.zeros_like(self._allowed)
        results = [self.wide.floats]
        with suppress(NotWide, NotFiniteError):
            results.extend(x.floats for x in self._perturbed(True, UNIT64))
        columns = zip(*results, strict=True)
        return TIMES * np.array([max(rms(x - column[0]) for x in column) for column in columns])

    def hidden_fraction(self, floats: Floats) -> float:
        """Returns the size of the largest differences that pass, relative to the size of these arrays."""
        sizes = np.array([self.native.floats[i].size for i in self.gradients])
        allowed = float(np.sqrt(sizes @ (2 * self._allowed[self.gradients]) ** 2))
        return over(allowed, float(np.linalg.norm(flat(floats))))

    def distance(self, split: Split, batch: Tree, result: Result, reverse: bool = False) -> float:
        """Returns a division's distance from one batch over the bound, also in float64 if `in_both`.

        It is infinite if integers differ. Sets `is_coarse` if a narrow step does not run in float64.

        Args:
          batch: the batch, possibly padded, or in ``reverse`` order.
        """
        reordered, one = reverse and self.depends_on_order, self.one_reversed if reverse else self.native
        if result.differs_in_integers(self.native) and not self._are_rounded(split, batch, result):
            return float("inf")
        far = float(self.shares(result.floats, one.floats, wide=False).max())
        if far > 1 and self._measured_again():
            far = float(self.shares(result.floats, one.floats, wide=False).max())
        if far > 1 or not self.in_both:
            return far
        try:
            wide_one = self.in_float64(ONE_BATCH, batch) if reordered else self.wide
            wide = None if wide_one is None else self.in_float64(split, batch)
        except NotWide:
            wide_one = wide = None
        if wide_one is None or wide is None:
            self.is_coarse = self.in_both = self.is_narrow
            return far
        if self.is_narrow and not reordered and self._rounds_more(result, wide.floats):
            return float("inf")
        return float(self.float32_shares(wide.floats, wide_one.floats).max())

    def _are_rounded(self, split: Split, batch: Tree, result: Result) -> bool:
        """Whether integers differ by rounding alone: quantized numbers by at most 1, and not at all in float64."""
        for x, y in zip(result.integers, self.native.integers, strict=True):
            if np.any(x != y) and not (is_quantized(y) and np.abs(x.astype(np.int64) - y).max() <= 1):
                return False
        try:
            return self.wide is not None and not self.in_float64(split, batch).differs_in_integers(self.wide)
        except NotWide:
            return False

    def _rounds_more(self, result: Result, wide: Floats) -> bool:
        """Whether a division is much further from its own float64 result than one batch, and than its noise."""
        if self.wide is None:
            return False
        far, own = (
            np.array([rms(x - y) for x, y in zip(a, b, strict=True)])
            for a, b in ((result.floats, wide), (self.native.floats, self.wide.floats))
        )

        def is_far() -> bool:
            return bool(np.any((far > TIMES * self.noise) & (far > MORE * own)))

        return is_far() and not (self._measured_again() and not is_far())

    def narrow_sums(self, split: Split) -> str:
        """Returns the dtype of a division's additions that round gradients more than one batch's; empty if none do.

        They are found in steps with narrow products, too, whose rounding hides theirs.
        """
        if not self.is_narrow or self.wide is None:
            return ""
        dtype, shares = self._rounding_of_sums(split)
        _, of_one = self._sums_of_one
        return dtype if np.any((shares > 1) & (shares > MORE * of_one)) else ""

    @cached_property
    def _sums_of_one(self) -> tuple[str, np.ndarray]:
        return self._rounding_of_sums(ONE_BATCH)

    def _rounding_of_sums(self, split: Split) -> tuple[str, np.ndarray]:
        """Returns the dtype of narrow additions, and their effect on float32 gradients over the bound of float32."""
        dtype, results = step_program.rounded_sums(self.subject, split)
        effect = np.zeros(len(self.names))
        if results:
            leaves, dtypes = {*self.gradients, *self.observed}, self.native.dtypes
            of_float32 = [i for i in leaves if rounding_unit(dtypes[i]) <= FLOAT32_UNIT]
            exact, rounded = results
            effect[of_float32] = self.float32_shares(rounded.floats, exact.floats)[of_float32]
        return dtype, effect

    def accuracy(self, result: Result, reference: Floats) -> tuple[float, float]:
        """Returns the largest distance of a leaf from a reference, divided by the bound, and divided by the noise."""
        far = [rms(x - y) for x, y in zip(result.floats, reference, strict=True)]
        if np.any(np.array(far) > self._accurate):
            self._measured_again()
        if np.any(np.array(far) > self._accurate):
            self.noise, self._accurate = self._with_zeros
        of_bound, noises = (max(map(over, far, y.tolist())) for y in (self._accurate, self.noise))
        return of_bound, noises

    def run(self, split: Split, batch: Tree, wide: bool) -> Result:
        """Runs a division in its native precision or, as `in_float64` does, in float64."""
        return self.in_float64(split, batch) if wide else self.subject.run(split, batch)

    @cached_property
    def reversed_batch(self) -> Tree:
        """The batch with its examples in reverse order."""
        return self.subject.rows(range(self.examples)[::-1])

    @cached_property
    def one_reversed(self) -> Result:
        """The result of one batch with the examples in reverse order."""
        return self.subject.run(ONE_BATCH, self.reversed_batch)

    @cached_property
    def order_dependent(self) -> list[int]:
        """Indices of the leaves of one batch that change if its examples are reversed."""
        return np.flatnonzero(self.shares(self.one_reversed.floats, self.native.floats, wide=False) > 1).tolist()

    @cached_property
    def depends_on_order(self) -> bool:
        """Whether the result of one batch changes if its examples are reversed."""
        if self.order_dependent or self.wide is None or not self.in_both:
            return bool(self.order_dependent)
        result = self.one(range(self.examples)[::-1])
        return result is not None and bool(np.any(self.float32_shares(result.floats, self.wide.floats) > 1))

    def in_float64(self, split: Split, batch: Tree) -> Result:
        """Runs a division in float64.

        Raises:
          NotWide: if the step does not run in float64.
        """
        if self.is_retyped(split, batch):
            return self.subject.run(split, batch, wide=True)
        return step_program.run_unread(self.subject, split, batch)

    def is_retyped(self, split: Split, batch: Tree) -> bool:
        """Whether float64 runs use the step's own program with the same constants."""
        program = self.subject.program(self.subject.step(split), batch)
        return self.subject.framework == "torch" or (program is not None and not program.problem)

    def _in_float64(self, differs: bool) -> tuple[Result | None, str]:
        if differs:
            return None, "the step draws random numbers, which differ in float64"
        try:
            return self.in_float64(ONE_BATCH, self.subject.batch), ""
        except NotWide as reason:
            return None, str(reason)

    def _perturbed(self, wide: bool, unit: float, samples: int = SAMPLES) -> Iterator[Result]:
        """Yields results for inputs that are perturbed at random by up to two units of rounding."""
        for seed in range(samples):
            of_params, of_batch = perturbation(seed, 2 * unit), perturbation(seed + SAMPLES, 2 * unit)
            yield self.subject.run(ONE_BATCH, self.subject.batch, wide, noise=of_params, batch_noise=of_batch)

    def _measured_again(self) -> bool:
        """Measures the noise of a narrow step's new parameters again, once; returns whether this raises the bounds."""
        if self._is_measured_again or not (self.is_narrow and self.subject.returns_params):
            return False
        self._is_measured_again = True
        noise = self._noise(self.wide is not None, samples=AGAIN)
        more = np.where(noise > RARE * self.noise, noise - self.noise, 0)
        self.noise = self.noise + more
        self._accurate, self._allowed = self._accurate + TIMES * more, self._allowed + TIMES * more
        self._of_change = self._of_change + TIMES * more
        return bool(np.any(more))

    def _noise(self, wide: bool, chosen: Sequence[np.ndarray] | None = None, samples: int = SAMPLES) -> np.ndarray:
        """Measures the change of each leaf, or of the chosen elements, by rounding of the inputs."""
        base = self.best if wide else self.native
        masks = chosen or [np.array(True)] * len(base.floats)
        noise = self.roundoffs * [rms(x * mask) for x, mask in zip(base.floats, masks, strict=True)]
        for result in self._perturbed(wide, self.unit, samples):
            changes = [rms((x - y) * mask) for x, y, mask in zip(result.floats, base.floats, masks, strict=True)]
            noise = np.maximum(noise, changes)
        return noise

    @cached_property
    def _with_zeros(self) -> tuple[np.ndarray, np.ndarray]:
        """The noise and the accuracy bound, including the native noise of elements that are 0 in exact arithmetic.

        For example, the gradients of the key biases of attention (alone or a part of a leaf) are pure rounding, also in
        float64, and Adam turns them into updates as large as those of other parameters, or, in float64, into none but
        the decay of the weights.
        """
        if self.wide is None:
            return self.noise, self._accurate
        base, columns = self.wide.floats, self.columns if self.subject.returns_params else []
        zeros = constant(base, [x.floats for x in columns if x is not None], self.gradients)
        with suppress(NotWide, NotFiniteError):
            for result in self._perturbed(True, UNIT64, 2 * SAMPLES):
                pairs = zip(zeros, result.floats, base, strict=True)
                zeros = [zero | (np.abs(x - y) > 2.0**-10 * np.abs(y)) for zero, x, y in pairs]
        noise = self._noise(False, zeros)
        return np.hypot(self.noise, noise), self._accurate + TIMES * noise
