"""Why microbatches do not equal one batch: the known causes, and what tells one from another in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from gradcombine.verify.check import elements
from gradcombine.verify.check.case import accounts_for, combined
from gradcombine.verify.check.hypotheses import linear
from gradcombine.verify.check.step_report import Cause, Fault, Verdict
from gradcombine.verify.check.windows.subject import Change, Step, Trace
from gradcombine.verify.check.windows.window_standard import Window


class WindowResult(NamedTuple):
    """How near a window's gradient came to the mean.

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
    """The result of `check_microbatches`; prints as sentences.

    Attributes:
      faults: the first fault of every window that has one, each cause once, the first window first.
      windows: how near each came. After a partial last window the first one is run again, and is listed again.
      full_batch: the largest distance of a full batch's gradient from the microbatches' mean, both in float64, over
        what is allowed; None if it was not checked.
      not_checked: why not; empty if it was. Without it, the report does not pass.
    """

    faults: tuple[Fault, ...]
    windows: tuple[WindowResult, ...]
    full_batch: float | None = None
    not_checked: str = ""

    @property
    def verdict(self) -> Verdict:
        return Verdict.of(self.faults, self.not_checked)

    @property
    def passes(self) -> bool:
        """Whether everything was compared, and nothing found."""
        return self.verdict is Verdict.PASSES

    @property
    def cause(self) -> Cause | None:
        """The first one; None if there is none."""
        return self.faults[0].cause if self.faults else None

    def __str__(self) -> str:
        if self.faults:
            lines = ["microbatches do not equal one batch", *(f"  {fault}" for fault in self.faults)]
        else:
            shares = [window.share for window in self.windows if window.share is not None]
            worst = f"{max(shares):.2f} of the rounding bound at most" if shares else "no gradient"
            unsure = "cannot tell whether " if self.not_checked else ""
            lines = [f"{unsure}microbatches equal one batch: {len(self.windows)} windows, {worst}"]
        if self.full_batch is not None:
            lines.append(f"  full batch against microbatches in float64: {self.full_batch:.1e} of what is allowed")
        if self.not_checked:
            lines.append(f"  full batch against microbatches: not checked, since {self.not_checked}")
        return "\n".join(lines)


def fault(cause: Cause, window: int, detail: str = "") -> Fault:
    return Fault(cause, f"window {window}", detail, window)


Replay: TypeAlias = Callable[[Change], Trace]
"""Accumulates the trace's gradients again, changed."""

EVIDENCE = 64
"""How many elements are looked at before an accumulator is blamed."""

REPLAYS = 16
"""How many further gradients are made for that, at most, if a model has few parameters."""

TINY = 2.0**-20
"""Gradients scaled by this are too small to be clipped; the scaling is exact."""


def results(trace: Trace) -> tuple[WindowResult, ...]:
    """How near each window came."""
    windows = [_arrived(trace, w) for w in range(len(trace))]
    return tuple(
        WindowResult(w, tuple(step.weight for step in trace[w]), None if window is None else window.share)
        for w, window in enumerate(windows)
    )


def faults(trace: Trace, replay: Replay) -> Iterator[Fault]:
    """The first fault of each window; windows after a partial one that was not applied are not checked."""
    every = max(len(steps) for steps in trace)
    for w, steps in enumerate(trace):
        ran = [step.outcome.calls for step in steps]
        if len(steps) < every and not any(ran):
            yield _left_over(trace, w, replay)
            return
        found = _of_window(w, steps, ran) or _of_gradient(w, trace, every, replay)
        if found is None and steps[-1].outcome.changed:
            found = fault(Cause.CHANGED_AFTER, w)
        if found is not None:
            yield found
            if found.cause is Cause.WINDOW:
                return
    yield from _nan(trace, replay)


def _of_window(w: int, steps: Sequence[Step], ran: Sequence[int]) -> Fault | None:
    """Did the inner optimizer run, and did the parameters move, only at the window's end?"""
    early, moved = sum(ran[:-1]), any(step.outcome.moved for step in steps[:-1])
    if ran[-1] == 0 or (early and moved):
        times = [i for i, calls in enumerate(ran, 1) if calls]
        where = f"ran after microbatch {times[0]}" if times else "did not run"
        return fault(Cause.WINDOW, w, f"of {len(steps)} microbatches: it {where}")
    if moved:
        first = next(i for i, step in enumerate(steps, 1) if step.outcome.moved)
        return fault(Cause.MOVED, w, f"at microbatch {first} of {len(steps)}, where the inner optimizer did not run")
    if early or ran[-1] > 1:
        return fault(Cause.COUNTED, w, f"its count grew by {sum(ran)} in a window of {len(steps)} microbatches")
    return None


def _of_gradient(w: int, trace: Trace, every: int, replay: Replay) -> Fault | None:
    window = _arrived(trace, w)
    if window is None or window.share <= 1:
        return None
    return (
        _changed(w, window, trace, replay)
        or _added(w, replay)
        or _partial(w, window, every)
        or _combined(w, window, replay)
        or fault(Cause.UNKNOWN, w, f"{window.share:.3g} times the bound of float32 away from the mean")
    )


def _arrived(trace: Trace, w: int) -> Window | None:
    """A window with what reached the optimizer at its end, if anything did."""
    steps, reached = trace[w], trace[w][-1].outcome.reached
    return None if reached is None else Window([x.weight for x in steps], [x.gradient for x in steps], reached)


def _changed(w: int, window: Window, trace: Trace, replay: Replay) -> Fault | None:
    """Something acts on large gradients only, as clipping does: on each microbatch, or on their mean?"""
    small = _arrived(replay(lambda i, j, _, x: (x * x.dtype.type(TINY)).astype(x.dtype)), w)
    if small is None or small.share > 1:
        return None
    sizes = "gradients of a millionth of the size are averaged correctly"
    if window.examples > 1:
        # What acts on each microbatch gives the sum of what it makes of the first and of the others. What acts on the
        # mean does not see which microbatches it comes from.
        first = _arrived(replay(lambda i, j, _, x: x if j == 0 else np.zeros_like(x)), w)
        others = _arrived(replay(lambda i, j, _, x: np.zeros_like(x) if j == 0 else x), w)
        each = first is not None and others is not None and _adds_up(window, [first, others])
        alike = _arrived(replay(lambda i, j, leaf, x: _mean(trace[w], leaf, x) if i == w else x), w)
        mean = alike is not None and _adds_up(window, [alike])
        if each != mean:
            return fault(Cause.CHANGED_BEFORE if each else Cause.CHANGED_MEAN, w, sizes)
    return fault(Cause.UNKNOWN, w, f"{sizes}, but not these")


def _adds_up(window: Window, parts: Sequence[Window]) -> bool:
    """Whether the parts' sum is what reached the optimizer, up to the rounding of each."""
    total = combined(np.ones(len(parts)), [part.made.floats for part in parts])
    return bool((window.shares(window.made.floats, total, wide=False, sides=1 + len(parts)) <= 1).all())


def _mean(steps: Sequence[Step], leaf: int, like: np.ndarray) -> np.ndarray:
    total = sum(step.weight for step in steps)
    terms = ((step.weight / total, step.gradient[leaf]) for step in steps)
    return np.asarray(sum(c * x.astype(np.float64) for c, x in terms if x is not None)).astype(like.dtype)


def _added(w: int, replay: Replay) -> Fault | None:
    nothing = _arrived(replay(lambda i, j, _, x: np.zeros_like(x)), w)
    if nothing is None:
        return None
    largest = max((float(np.abs(x).max(initial=0)) for x in nothing.made.floats), default=0.0)
    if not 0 < largest < float("inf"):
        return None
    return fault(Cause.ADDED, w, f"up to {largest:.3g} reaches the inner optimizer when all gradients are 0")


def _partial(w: int, window: Window, every: int) -> Fault | None:
    """A partial window that is divided by the length of a full one."""
    n = window.examples
    for c in (window.mean * n / every, np.full(n, 1 / every)) if n < every else ():
        if accounts_for(window, window.case, window.combined(c), float(c.sum())):
            return fault(Cause.PARTIAL_SCALED, w, f"{n} microbatches, divided as if they were {every}")
    return None


def _combined(w: int, window: Window, replay: Replay) -> Fault | None:
    """Another combination of the same gradients, or the right one in a narrow accumulator."""
    rng = np.random.default_rng(0)
    samples = [window]
    for _ in range(REPLAYS):
        if sum(x.size for sample in samples for x in sample.made.floats) >= EVIDENCE:
            break
        other = _arrived(replay(lambda i, j, _, x: (x * rng.uniform(0.5, 1, x.shape)).astype(x.dtype)), w)
        samples += [other] if other is not None else []
    answers = chain(linear(window, window.case), elements.narrow([(x, x.case) for x in samples]))
    return next((fault(cause, w, detail) for cause, detail in answers), None)


def _left_over(trace: Trace, w: int, replay: Replay) -> Fault:
    """A partial window was not applied: does the next update depend on it?"""
    left = f"{len(trace[w])} microbatches"
    for v in range(w + 1, len(trace)):
        ends = [i for i, step in enumerate(trace[v], 1) if step.outcome.calls]
        if not ends:
            continue
        then = f"of {left}; the next update came after microbatch {ends[0]}"
        with_it, without = (replay(lambda i, j, _, x, n=n: x * n if i == w else x)[v] for n in (1, 0))
        if ends[0] < len(trace[v]) or _differ(with_it[ends[0] - 1], without[ends[0] - 1]):
            return fault(Cause.PARTIAL_LEAKS, w, then)
        break
    return fault(Cause.PARTIAL_DROPPED, w, f"of {left}")


def _differ(a: Step, b: Step) -> bool:
    """Whether different gradients reached the optimizer."""
    pairs = zip(a.outcome.reached or [], b.outcome.reached or [], strict=True)
    return any(x is not None and y is not None and not np.array_equal(x, y) for x, y in pairs)


def _nan(trace: Trace, replay: Replay) -> Iterator[Fault]:
    """Whether a NaN in the very first microbatch is still there after its window."""

    def poisoned(w: int, i: int, leaf: int, x: np.ndarray) -> np.ndarray:
        del leaf
        return np.full_like(x, np.nan) if (w, i) == (0, 0) else x

    for w, (before, steps) in enumerate(zip(trace, replay(poisoned), strict=True)):
        if w > 0 and _finite(before) and not _finite(steps):
            yield fault(Cause.NAN_LEAKS, w, "one was put into the first microbatch of window 0")
            return


def _finite(steps: Sequence[Step]) -> bool:
    return all(np.isfinite(x).all() for step in steps for x in step.outcome.reached or [] if x is not None)
