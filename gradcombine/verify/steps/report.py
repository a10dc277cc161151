"""What `check_step` found, as a value and as sentences."""

from __future__ import annotations

from typing import NamedTuple

from gradcombine.verify.microbatches.causes import Cause


class StepFault(NamedTuple):
    """One cause, and where it shows.

    Attributes:
      cause: a `Cause`.
      run: the first division that shows it, in words.
      detail: figures; may be empty.
    """

    cause: Cause
    run: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.run}: {self.cause}" + (f" ({self.detail})" if self.detail else "")


class StepRun(NamedTuple):
    """One division.

    Attributes:
      name: what was run.
      invariance: the largest distance of a leaf from one batch, over what rounding allows to both: at most 1.
      accuracy: the largest distance of a leaf from the reference, over what rounding allows: at most 1; None without
        a reference.
      noises: the same distance, as so many times the rounding noise of the step.
      leaf: where the result is furthest from one batch.
    """

    name: str
    invariance: float
    accuracy: float | None
    noises: float | None
    leaf: str

    def __str__(self) -> str:
        from_one = f"{self.invariance:.2g} of the bound from one batch"
        if self.accuracy is None:
            return f"{self.name}: {from_one}"
        from_reference = f"{self.noises:.2g} times its rounding noise from the reference"
        return f"{self.name}: {from_one}; {from_reference}, {self.accuracy:.2g} of the bound"


class StepReport(NamedTuple):
    """The result of `check_step`; prints as sentences.

    Attributes:
      faults: each cause once, in the order of the runs.
      runs: one batch, and every division.
      reference: what accuracy is measured by; empty if it was not measured.
      not_checked: what was not, and why.
    """

    faults: tuple[StepFault, ...]
    runs: tuple[StepRun, ...]
    reference: str
    not_checked: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        return not self.faults

    @property
    def cause(self) -> Cause | None:
        """The first one; None if there is none."""
        return self.faults[0].cause if self.faults else None

    def __str__(self) -> str:
        lines = [
            "the step depends on how its batch is divided, or is inaccurate"
            if self.faults
            else "the step does not depend on how its batch is divided"
        ]
        lines += [f"  {fault}" for fault in self.faults]
        lines += [f"  {run}" for run in self.runs]
        lines += [f"  not checked: {text}" for text in self.not_checked]
        return "\n".join(lines)
