"""What a check of microbatches finds, in sentences."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """Why microbatches do not equal one batch."""

    LOSS = "the loss of a window is not the weighted mean of its microbatches' losses"
    MEAN_OF_MEANS = "mean of means: the microbatches' weights are forgotten"
    SUM = "a sum stands in place of the mean"
    SCALED = "the mean is scaled"
    COEFFICIENTS = "the microbatches count with other weights than their own"
    CHANGED_BEFORE = "something acts on each microbatch before it is accumulated, as clipping per microbatch does"
    CHANGED_MEAN = "something acts on the mean before it reaches the inner optimizer, as clipping outside of it does"
    ADDED = "something is added that does not come from the gradients, as weight decay before the accumulation is"
    CHANGED_AFTER = "something changes the updates after the accumulation, as a schedule outside of it does"
    MOVED = "the parameters move within a window, as with weight decay outside of the accumulation"
    COUNTED = "the inner optimizer counts microbatches, so schedules and bias corrections run too fast"
    PRECISION = "the accumulator is too narrow"
    WINDOW = "the windows end elsewhere"
    PARTIAL_DROPPED = "a partial window is dropped"
    PARTIAL_LEAKS = "a partial window leaks into the next one"
    PARTIAL_SCALED = "a partial window is divided by the length of a full one"
    NAN_LEAKS = "a NaN of one window reaches later ones"
    UNKNOWN = "another gradient than the mean reaches the inner optimizer"


class Fault(NamedTuple):
    """One cause.

    Attributes:
      cause: a `Cause`.
      window: the first window that shows it, counted from 0.
      detail: figures, in a sentence or less; may be empty.
    """

    cause: Cause
    window: int
    detail: str = ""

    def __str__(self) -> str:
        return f"window {self.window}: {self.cause}" + (f" ({self.detail})" if self.detail else "")


class WindowResult(NamedTuple):
    """How near a window's gradient came.

    Attributes:
      window: its number, counted from 0.
      weights: of its microbatches.
      share: the largest distance of the gradient that reached the inner optimizer from the exact weighted mean, over
        what rounding allows: at most 1. None where no gradient reached it at the window's end.
    """

    window: int
    weights: tuple[float, ...]
    share: float | None


class MicrobatchReport(NamedTuple):
    """What `check_microbatches` finds; prints as sentences.

    Attributes:
      faults: the first fault of every window that has one, each cause once, the first window first.
      windows: how near each came. After a partial last window the first one is run again, and is in here again.
      full_batch: the largest distance of a full batch's gradient from the microbatches' mean, both in float64, over
        what is allowed; None where it was not judged.
      not_judged: why not; empty where it was.
    """

    faults: tuple[Fault, ...]
    windows: tuple[WindowResult, ...]
    full_batch: float | None = None
    not_judged: str = ""

    @property
    def passes(self) -> bool:
        return not self.faults

    @property
    def cause(self) -> Cause | None:
        """The first one, None where all is well."""
        return self.faults[0].cause if self.faults else None

    def __str__(self) -> str:
        if self.faults:
            lines = ["microbatches do not equal one batch", *(f"  {fault}" for fault in self.faults)]
        else:
            shares = [window.share for window in self.windows if window.share is not None]
            worst = f"{max(shares):.2f} of the rounding bound at most" if shares else "no gradient"
            lines = [f"microbatches equal one batch: {len(self.windows)} windows, {worst}"]
        if self.full_batch is not None:
            lines.append(f"  full batch against microbatches in float64: {self.full_batch:.1e} of what is allowed")
        if self.not_judged:
            lines.append(f"  full batch against microbatches: not judged, since {self.not_judged}")
        return "\n".join(lines)
