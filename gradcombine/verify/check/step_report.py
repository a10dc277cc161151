"""Reports of `check_step` and `check_microbatches`, and the causes that they name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from gradcombine.errors import operation, require_one_of


class Cause(StrEnum):
    """Cause of a difference between a divided batch and one batch."""

    MEAN_OF_MEANS = "mean of means: the microbatches' weights are ignored"
    SUM = "a sum instead of the mean"
    SCALED = "the mean is multiplied by a constant"
    COEFFICIENTS = "the microbatches are combined with the wrong weights"
    CHANGED_BEFORE = "each microbatch's gradient is changed before it is accumulated, for example clipped"
    CHANGED_MEAN = "the mean gradient is changed before it reaches the inner optimizer, for example clipped"
    ADDED = "something other than gradients is added, for example weight decay before the accumulation"
    CHANGED_AFTER = "the updates are changed after the accumulation, for example by a schedule outside of it"
    MOVED = "the parameters move within a window, for example by weight decay outside of the accumulation"
    COUNTED = "the inner optimizer counts microbatches, so schedules and bias corrections advance too fast"
    PRECISION = "the dtype of the accumulator is too narrow"
    WINDOW = "the optimizer does not run exactly at the end of a window"
    PARTIAL_DROPPED = "a partial window is dropped"
    LEAKS = "a window leaks into the next one"
    PARTIAL_SCALED = "a partial window is divided by the length of a full one"
    NAN_LEAKS = "a NaN in one window reaches later windows"
    LOST = "examples are dropped, for example by a reshape"
    DOUBLED = "examples are counted more than once"
    PLACEHOLDERS = "padding rows count as examples"
    DENOMINATOR = "a term of the loss has the wrong denominator"
    BY_PLACE = "microbatches are weighted by their position, for example by a schedule or decay at each microbatch"
    MOVED_EACH = "the parameters are updated at each microbatch"
    ADVANCED = "a state is updated at each microbatch, by design or not, as by the power iteration of a spectral norm"
    KEY = "a random key is reused for every microbatch"
    RANDOM = "the result depends on the order of the examples, for example because microbatches draw random numbers"
    NOT_EXCHANGED = "the devices' gradients are not combined; a psum or pmean may be missing"
    NEIGHBOURS = "examples depend on their neighbors, for example if labels are rolled over a flattened microbatch"
    STATISTICS = "the examples of a microbatch affect each other, by design or not, as by batch statistics or negatives"
    SELECTION = "examples are selected within each microbatch, for example by a top-k, a quantile or a filter"
    SCATTER = "rows are overwritten instead of added, for example by a scatter that sets"
    STATE = "a repeated call returns a different result: hidden state or a side effect"
    NOT_FINITE = "the result is not finite although one batch's is, for example a mean over no tokens of a microbatch"
    INACCURATE = "the result of one batch is further from float64 than its rounding noise explains"
    UNEXPLAINED = "no known cause explains the difference"


_SUMS = "return sums and counts from each microbatch, add up both, and divide once at the end"
_RATE = "if the learning rate depends on the number of microbatches, change that"
_AT_THE_END = "apply it once, to the combined gradient at the end of a window"

REMEDIES = {
    Cause.MEAN_OF_MEANS: f"{_SUMS}; or weight each mean by its number of tokens or examples",
    Cause.SUM: f"{_SUMS}; or average means of equal weights; {_RATE}",
    Cause.SCALED: f"divide once, by the sum of the weights, not also by numbers of microbatches or devices; {_RATE}",
    Cause.COEFFICIENTS: "weight each microbatch by the number of tokens or examples that its loss is a mean over",
    Cause.DENOMINATOR: "divide each term of the loss by its own total count over the window (docs/losses.md)",
    Cause.CHANGED_BEFORE: _AT_THE_END,
    Cause.ADDED: _AT_THE_END,
    Cause.MOVED: _AT_THE_END,
    Cause.MOVED_EACH: "keep the parameters fixed until the end of a window, and update them once",
    Cause.PRECISION: "accumulate in float32, whatever the dtype of the gradients",
    Cause.LOST: "split the batch so that each example is in exactly one part; a shorter last part has a smaller weight",
    Cause.DOUBLED: "split the batch so that each example is in exactly one part",
    Cause.PLACEHOLDERS: "give padding rows the weight 0, and count only real rows in the divisor",
    Cause.KEY: "fold the index of each example into its random key; that of the microbatch cannot be compared",
    Cause.RANDOM: "derive the random numbers of an example from its index, or check the step without randomness",
    Cause.NOT_EXCHANGED: "sum numerators and weights over the devices (psum), then divide",
    Cause.NEIGHBOURS: "shift labels, count positions and mask attention within each row, even of flattened batches",
    Cause.SELECTION: "select from the full batch, before it is divided",
    Cause.STATISTICS: "synchronize the statistics over the batch; or, if this is intended, use `--allow statistics` or "
    "`report.allowing('statistics')`",
    Cause.ADVANCED: "update it once per window; or, if this is intended, use `--allow state` or "
    "`report.allowing('state')`",
    Cause.SCATTER: "add rows that share an index (`.at[i].add`) instead of setting them",
    Cause.STATE: "seed random numbers in each call, pass state in as an argument, and clear accumulators",
    Cause.NOT_FINITE: "guard the divisor of a microbatch without tokens; sums and counts need no guard",
    Cause.INACCURATE: "look for a narrow dtype inside the step; if it is intended, pass its unit roundoff as unit",
    Cause.COUNTED: "advance schedules and step counts once per window, when the optimizer runs",
    Cause.BY_PLACE: "advance schedules and decay once per window, not at each microbatch",
}
"""Remedies by cause: what to write instead."""

BY_DESIGN = {"statistics": Cause.STATISTICS, "state": Cause.ADVANCED}
"""Causes that may be intended, by the names that `StepReport.allowing` takes."""


class Verdict(StrEnum):
    """The outcome of a check; only `PASSES` is a pass."""

    PASSES = "passes"
    FAILS = "fails"
    CANNOT_TELL = "cannot tell"


class Fault(NamedTuple):
    """A cause and the first division that shows it.

    Attributes:
      cause: a `Cause`.
      run: the division, and the window if there are several, in words.
      detail: measured numbers; may be empty.
      line: the source line that causes it, as "step.py:12"; empty if unknown.
    """

    cause: Cause
    run: str
    detail: str = ""
    line: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.run}: {self.cause}{detail}" + (f", at {self.line}" if self.line else "")


class StepRun(NamedTuple):
    """Distances of one division's result.

    Attributes:
      name: the division.
      invariance: the largest distance of a leaf from one batch, divided by the rounding bound; passes if at most 1.
      accuracy: the largest distance of a leaf from the reference, divided by the rounding bound; passes if at most 1.
        None without a reference.
      noises: the largest distance of a leaf from the reference, divided by the measured rounding noise of the step.
      leaf: path of the leaf that is furthest from one batch.
      shares: `invariance` of each leaf, by path.
    """

    name: str
    invariance: float
    accuracy: float | None
    noises: float | None
    leaf: str
    shares: Mapping[str, float] = MappingProxyType({})

    def __str__(self) -> str:
        text = f"{self.name}: distance from one batch {self.invariance:.2g} of the rounding bound"
        if self.accuracy is None:
            return text
        return f"{text}; from the reference {self.accuracy:.2g} of the bound, {self.noises:.2g} times the noise"


class StepReport(NamedTuple):
    """The result of `check_step` or `check_microbatches`; prints as sentences.

    Attributes:
      faults: each cause once, in the order of the runs.
      runs: one batch and every division; empty if repeated calls on one batch return different results.
      reference: what accuracy is measured against; empty if it was not measured.
      not_checked: comparisons that were impossible, and why. They may hide a defect, so the report does not pass.
      not_asked: comparisons without which a report may pass: optional ones that the call did not request, and the step
        at other parameters, if it raises there.
      allowed: faults that `allowing` accepted as intended.
    """

    faults: tuple[Fault, ...]
    runs: tuple[StepRun, ...]
    reference: str
    not_checked: tuple[str, ...] = ()
    not_asked: tuple[str, ...] = ()
    allowed: tuple[Fault, ...] = ()

    @operation("check_step")
    def allowing(self, *causes: str) -> StepReport:
        """Returns the report of a step that depends on how its batch is divided by design.

        Args:
          causes: ``"statistics"``: the examples of a microbatch affect each other, as in batch normalization, in-batch
            negatives or expert balance per microbatch. Everything else has been compared: the result is the mean of the
            microbatches' separate results, and running statistics among the parameters are those of a sequence of
            microbatches; if they are returned as metrics, the answer is "cannot tell". Whether the mean should
            weigh the microbatches equally or by counts is not compared: the fault's detail names the weights.
            ``"state"``: a state that does not depend on the examples is updated at each microbatch, as in the power
            iteration of a spectral norm; everything else is the mean of the microbatches' results with that state.

        Raises:
          GradCombineError: for any other name: other causes are defects, or hide what was not compared.
        """
        for name in causes:
            require_one_of(f"causes among {', '.join(BY_DESIGN)} to allow", name, tuple(BY_DESIGN))
        intended = {BY_DESIGN[name] for name in causes}
        allowed = tuple(fault for fault in self.faults if fault.cause in intended)
        remaining = tuple(fault for fault in self.faults if fault.cause not in intended)
        return self._replace(faults=remaining, allowed=(*self.allowed, *allowed))

    @property
    def verdict(self) -> Verdict:
        """The outcome; `Verdict.CANNOT_TELL` if a comparison was impossible or one batch is not repeatable."""
        if self.faults and self.runs:
            return Verdict.FAILS
        return Verdict.PASSES if self.runs and not self.not_checked else Verdict.CANNOT_TELL

    @property
    def passes(self) -> bool:
        """Whether everything was compared without finding a fault."""
        return self.verdict is Verdict.PASSES

    @property
    def cause(self) -> Cause | None:
        """The cause of the first fault, or None."""
        return self.faults[0].cause if self.faults else None

    def __str__(self) -> str:
        by_design = self.verdict is Verdict.PASSES and self.allowed
        lines = [_BY_DESIGN_ALONE if by_design else _ANSWERS[self.verdict]]
        lines += [f"  {fault}" for fault in self.faults]
        lines += [f"  allowed: {fault}" for fault in self.allowed]
        lines += [f"  {run}" for run in self.runs]
        lines += [f"  not checked: {text}" for text in self.not_checked]
        lines += [f"  not included: {text}" for text in self.not_asked]
        return "\n".join(lines)


_ANSWERS = {
    Verdict.PASSES: "the step does not depend on how its batch is divided",
    Verdict.FAILS: "the step depends on how its batch is divided, or is inaccurate",
    Verdict.CANNOT_TELL: "cannot tell whether the step depends on how its batch is divided",
}

_BY_DESIGN_ALONE = "the step depends on how its batch is divided by an allowed cause alone"


def headline(report: StepReport) -> str:
    """Returns the verdict as one sentence."""
    if report.verdict is Verdict.PASSES:
        divisions = [run.name for run in report.runs[1:] if "reverse" not in run.name and "padding" not in run.name]
        names = " and ".join(filter(None, (", ".join(divisions[:-1]), divisions[-1])))
        allowed = "".join(f", except for an allowed cause: {x.cause}" for x in report.allowed[:1])
        return f"the same: {names} give the result of one batch{allowed}"
    if not report.runs:
        return f"cannot tell: {report.faults[0]}: {REMEDIES[report.faults[0].cause]}"
    if report.verdict is Verdict.CANNOT_TELL:
        return f"cannot tell: not compared: {report.not_checked[0]}"
    return f"not the same: {report.faults[0]}"
