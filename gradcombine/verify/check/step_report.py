"""Results of `check_step` and `check_microbatches`, as a value and as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from gradcombine.errors import operation, require_one_of


class Cause(StrEnum):
    """Why microbatches do not equal one batch."""

    MEAN_OF_MEANS = "mean of means: the microbatches' weights are ignored"
    SUM = "a sum in place of the mean"
    SCALED = "the mean is scaled"
    COEFFICIENTS = "the microbatches are combined with other weights than their own"
    CHANGED_BEFORE = "something acts on each microbatch before it is accumulated, as clipping per microbatch does"
    CHANGED_MEAN = "something acts on the mean before it reaches the inner optimizer, as clipping outside of it does"
    ADDED = "something is added that does not come from the gradients, as weight decay before the accumulation is"
    CHANGED_AFTER = "something changes the updates after the accumulation, as a schedule outside of it does"
    MOVED = "the parameters move within a window, as with weight decay outside of the accumulation"
    COUNTED = "the inner optimizer counts microbatches, so schedules and bias corrections run too fast"
    PRECISION = "the accumulator is too narrow"
    WINDOW = "the optimizer does not run at the end of a window"
    PARTIAL_DROPPED = "a partial window is dropped"
    LEAKS = "a window leaks into the next one"
    PARTIAL_SCALED = "a partial window is divided by the length of a full one"
    NAN_LEAKS = "a NaN of one window reaches later ones"
    LOST = "examples are lost, as by a reshape"
    DOUBLED = "examples count more than once"
    PLACEHOLDERS = "placeholder rows count as examples"
    DENOMINATOR = "a term of the loss is divided by what does not count it"
    BY_PLACE = "microbatches weigh by their places, as where a schedule or a decay acts at each of them"
    MOVED_EACH = "the parameters move at each microbatch"
    ADVANCED = "a state moves at each microbatch, by design or not, as the power iteration of a spectral norm does"
    KEY = "a random key is used again for each microbatch"
    RANDOM = "the result depends on the places of the examples, as random numbers do that are drawn for each microbatch"
    NOT_EXCHANGED = "the devices' gradients are not added up, as where a psum or pmean is missing"
    NEIGHBOURS = "examples depend on those beside them, as where labels are rolled over a flattened microbatch"
    STATISTICS = "the examples of a microbatch act on each other, by design or not, as by batch statistics or negatives"
    SELECTION = "examples are chosen within each microbatch, as by a top-k, a quantile or a filter over the batch"
    SCATTER = "rows are overwritten where they should be added, as by a scatter that sets"
    STATE = "the same call gives something else the second time: a hidden state, or a side effect"
    NOT_FINITE = "a result that is not finite, though one batch's is, as a mean over no tokens of a microbatch"
    INACCURATE = "one batch itself is further from float64 than its rounding noise explains"
    UNEXPLAINED = "no known cause accounts for the difference"


BY_DESIGN = {"statistics": Cause.STATISTICS, "state": Cause.ADVANCED}
"""Causes that may be meant, by the names that `StepReport.allowing` takes."""


class Verdict(StrEnum):
    """The answer of a check, of which only `PASSES` is a pass."""

    PASSES = "passes"
    FAILS = "fails"
    CANNOT_TELL = "cannot tell"


class Fault(NamedTuple):
    """One cause, and where it shows.

    Attributes:
      cause: a `Cause`.
      run: the first division that shows it, and its window, in words.
      detail: figures; may be empty.
      line: the line of source that it comes from, as "step.py:12"; empty where that is not known.
    """

    cause: Cause
    run: str
    detail: str = ""
    line: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.run}: {self.cause}{detail}" + (f", at {self.line}" if self.line else "")


class StepRun(NamedTuple):
    """One division.

    Attributes:
      name: what was run.
      invariance: the largest distance of a leaf from one batch, over what rounding allows to both: at most 1.
      accuracy: the largest distance of a leaf from the reference, over what rounding allows: at most 1; None without
        a reference.
      noises: the same distance, as so many times the rounding noise of the step.
      leaf: where the result is furthest from one batch.
      shares: by leaf, the distance from one batch over the bound.
    """

    name: str
    invariance: float
    accuracy: float | None
    noises: float | None
    leaf: str
    shares: Mapping[str, float] = MappingProxyType({})

    def __str__(self) -> str:
        from_one = f"{self.invariance:.2g} of the bound from one batch"
        if self.accuracy is None:
            return f"{self.name}: {from_one}"
        from_reference = f"{self.noises:.2g} times its rounding noise from the reference"
        return f"{self.name}: {from_one}; {from_reference}, {self.accuracy:.2g} of the bound"


class StepReport(NamedTuple):
    """The result of `check_step` or `check_microbatches`; prints as sentences.

    Attributes:
      faults: each cause once, in the order of the runs.
      runs: one batch, and every division; none if one batch gives something else at each call.
      reference: what accuracy is measured by; empty if it was not measured.
      not_checked: what could not be compared, and why: a defect may hide there, so the report does not pass.
      not_asked: what the call left out.
      allowed: faults that are by design, as `allowing` was told.
    """

    faults: tuple[Fault, ...]
    runs: tuple[StepRun, ...]
    reference: str
    not_checked: tuple[str, ...] = ()
    not_asked: tuple[str, ...] = ()
    allowed: tuple[Fault, ...] = ()

    @operation("check_step")
    def allowing(self, *causes: str) -> StepReport:
        """The report for a step that depends on its batch by design.

        Args:
          causes: ``"statistics"``: the examples of a microbatch act on each other, as by batch normalization, in-batch
            negatives or a balance of experts by microbatch. Everything else about such a division has been compared: it
            is the mean of what its microbatches give by themselves. ``"state"``: a state that no example enters moves
            at each microbatch, as the power iteration of a spectral norm; the rest is the mean of what they give with
            it.

        Raises:
          GradCombineError: for another name; other causes are defects, or hide what was not compared.
        """
        for name in causes:
            require_one_of(f"causes among {', '.join(BY_DESIGN)} to allow", name, tuple(BY_DESIGN))
        meant = {BY_DESIGN[name] for name in causes}
        allowed = tuple(fault for fault in self.faults if fault.cause in meant)
        kept = tuple(fault for fault in self.faults if fault.cause not in meant)
        return self._replace(faults=kept, allowed=(*self.allowed, *allowed))

    @property
    def verdict(self) -> Verdict:
        """A step that is not repeatable on one batch has no runs: nothing can be compared."""
        if self.faults and self.runs:
            return Verdict.FAILS
        return Verdict.PASSES if self.runs and not self.not_checked else Verdict.CANNOT_TELL

    @property
    def passes(self) -> bool:
        """Whether everything was compared, and nothing found."""
        return self.verdict is Verdict.PASSES

    @property
    def cause(self) -> Cause | None:
        """The first one; None if there is none."""
        return self.faults[0].cause if self.faults else None

    def __str__(self) -> str:
        lines = [_ANSWERS[self.verdict]]
        lines += [f"  {fault}" for fault in self.faults]
        lines += [f"  allowed: {fault}" for fault in self.allowed]
        lines += [f"  {run}" for run in self.runs]
        lines += [f"  not checked: {text}" for text in self.not_checked]
        lines += [f"  not asked for: {text}" for text in self.not_asked]
        return "\n".join(lines)


_ANSWERS = {
    Verdict.PASSES: "the step does not depend on how its batch is divided",
    Verdict.FAILS: "the step depends on how its batch is divided, or is inaccurate",
    Verdict.CANNOT_TELL: "cannot tell whether the step depends on how its batch is divided: not all could be compared",
}
