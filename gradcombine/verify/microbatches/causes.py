"""Why microbatches do not equal one batch: the known causes, and what tells one from another in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np

from gradcombine.verify.microbatches import combination
from gradcombine.verify.microbatches.combination import NARROW, Window
from gradcombine.verify.microbatches.subject import Change, Step, Trace


class Cause(StrEnum):
    """Why microbatches do not equal one batch."""

    LOSS = "the loss of a window is not the weighted mean of its microbatches' losses"
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
    PARTIAL_LEAKS = "a partial window leaks into the next one"
    PARTIAL_SCALED = "a partial window is divided by the length of a full one"
    NAN_LEAKS = "a NaN of one window reaches later ones"
    LOST = "examples are lost, as by a reshape"
    DOUBLED = "examples count more than once"
    PLACEHOLDERS = "placeholder rows count as examples"
    DENOMINATOR = "a term of the loss is divided by what does not count it"
    BY_PLACE = "microbatches weigh by their places, as where a schedule or a decay acts at each of them"
    MOVED_EACH = "the parameters move at each microbatch"
    KEY = "a random key is used again for each microbatch"
    RANDOM = "the result depends on the places of the examples, as random numbers do that are drawn for each microbatch"
    STATISTICS = "examples of a microbatch depend on each other, as by the statistics of batch normalization"
    SCATTER = "rows are overwritten where they should be added, as by a scatter that sets"
    STATE = "the same call gives something else the second time: a hidden state, or a side effect"
    NOT_FINITE = "a result that is not finite, though one batch's is, as a mean over no tokens of a microbatch"
    INACCURATE = "one batch itself is further from float64 than its rounding noise explains"
    UNEXPLAINED = "no known cause accounts for the difference"
    UNKNOWN = "a gradient that is not the mean reaches the inner optimizer"


class Fault(NamedTuple):
    """One cause, and where it shows.

    Attributes:
      cause: a `Cause`.
      window: the first window that shows it, counted from 0.
      detail: figures, in a sentence at most; may be empty.
    """

    cause: Cause
    window: int
    detail: str = ""

    def __str__(self) -> str:
        return f"window {self.window}: {self.cause}" + (f" ({self.detail})" if self.detail else "")


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
      not_checked: why not; empty if it was.
    """

    faults: tuple[Fault, ...]
    windows: tuple[WindowResult, ...]
    full_batch: float | None = None
    not_checked: str = ""

    @property
    def passes(self) -> bool:
        return not self.faults

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
            lines = [f"microbatches equal one batch: {len(self.windows)} windows, {worst}"]
        if self.full_batch is not None:
            lines.append(f"  full batch against microbatches in float64: {self.full_batch:.1e} of what is allowed")
        if self.not_checked:
            lines.append(f"  full batch against microbatches: not checked, since {self.not_checked}")
        return "\n".join(lines)


Replay: TypeAlias = Callable[[Change], Trace]
"""Accumulates the trace's gradients again, changed."""

EVIDENCE = 32
"""How many elements must agree to the bit before an accumulator is blamed."""

REPLAYS = 16
"""How many further gradients are made for that, at most, if a model has few parameters."""

TINY = 2.0**-20
"""Gradients scaled by this are too small to be clipped; the scaling is exact."""


def results(trace: Trace) -> tuple[WindowResult, ...]:
    """How near each window came."""
    near_each: list[WindowResult] = []
    for w, steps in enumerate(trace):
        reached = steps[-1].outcome.reached
        weights = tuple(step.weight for step in steps)
        near = None if reached is None else combination.share(window := combination.window(steps, reached), window.mean)
        near_each.append(WindowResult(w, weights, near))
    return tuple(near_each)


def faults(trace: Trace, replay: Replay) -> Iterator[Fault]:
    """The first fault of each window; windows after a partial one that was not applied are not checked."""
    every = max(len(steps) for steps in trace)
    for w, steps in enumerate(trace):
        ran = [step.outcome.calls for step in steps]
        if len(steps) < every and not any(ran):
            yield _left_over(trace, w, replay)
            return
        fault = _of_window(w, steps, ran) or _of_gradient(w, trace, every, replay)
        if fault is None and steps[-1].outcome.changed:
            fault = Fault(Cause.CHANGED_AFTER, w)
        if fault is not None:
            yield fault
            if fault.cause is Cause.WINDOW:
                return
    yield from _nan(trace, replay)


def _of_window(w: int, steps: Sequence[Step], ran: Sequence[int]) -> Fault | None:
    """Did the inner optimizer run, and did the parameters move, only at the window's end?"""
    early, moved = sum(ran[:-1]), any(step.outcome.moved for step in steps[:-1])
    if ran[-1] == 0 or (early and moved):
        times = [i for i, calls in enumerate(ran, 1) if calls]
        where = f"ran after microbatch {times[0]}" if times else "did not run"
        return Fault(Cause.WINDOW, w, f"of {len(steps)} microbatches: it {where}")
    if moved:
        first = next(i for i, step in enumerate(steps, 1) if step.outcome.moved)
        return Fault(Cause.MOVED, w, f"at microbatch {first} of {len(steps)}, where the inner optimizer did not run")
    if early or ran[-1] > 1:
        return Fault(Cause.COUNTED, w, f"its count grew by {sum(ran)} in a window of {len(steps)} microbatches")
    return None


def _of_gradient(w: int, trace: Trace, every: int, replay: Replay) -> Fault | None:
    window = _arrived(trace, w)
    if window is None or combination.share(window, window.mean) <= 1:
        return None
    return (
        _changed(w, window, trace, replay)
        or _added(w, replay)
        or _known(w, window, every)
        or _fitted(w, window)
        or _narrow(w, window, every, replay)
        or Fault(Cause.UNKNOWN, w, f"{_times(window)}; no known combination, order or precision gives it")
    )


def _arrived(trace: Trace, w: int) -> Window | None:
    """A window with what reached the optimizer at its end, if anything did."""
    reached = trace[w][-1].outcome.reached
    return None if reached is None else combination.window(trace[w], reached)


def _times(window: Window) -> str:
    return f"{combination.share(window, window.mean):.3g} times the float32 bound away from the mean"


def _changed(w: int, window: Window, trace: Trace, replay: Replay) -> Fault | None:
    """Something acts on large gradients only, as clipping does: on each microbatch, or on their mean?"""
    small = _arrived(replay(lambda i, j, _, x: (x * x.dtype.type(TINY)).astype(x.dtype)), w)
    if small is None or combination.share(small, small.mean) > 1:
        return None
    sizes = "gradients of a millionth of the size are averaged correctly"
    if len(window.weights) > 1:
        # What acts on each microbatch gives the sum of what it makes of the first and of the others. What acts on the
        # mean does not see which microbatches it comes from.
        first = _arrived(replay(lambda i, j, _, x: x if j == 0 else np.zeros_like(x)), w)
        others = _arrived(replay(lambda i, j, _, x: np.zeros_like(x) if j == 0 else x), w)
        each = first is not None and others is not None and combination.adds_up(window, [first, others])
        alike = _arrived(replay(lambda i, j, leaf, x: _mean(trace[w], leaf, x) if i == w else x), w)
        mean = alike is not None and combination.adds_up(window, [alike])
        if each != mean:
            return Fault(Cause.CHANGED_BEFORE if each else Cause.CHANGED_MEAN, w, sizes)
    return Fault(Cause.UNKNOWN, w, f"{sizes}, but not these")


def _mean(steps: Sequence[Step], leaf: int, like: np.ndarray) -> np.ndarray:
    total = sum(step.weight for step in steps)
    terms = ((step.weight / total, step.gradient[leaf]) for step in steps)
    return np.asarray(sum(c * x.astype(np.float64) for c, x in terms if x is not None)).astype(like.dtype)


def _added(w: int, replay: Replay) -> Fault | None:
    nothing = _arrived(replay(lambda i, j, _, x: np.zeros_like(x)), w)
    if nothing is None:
        return None
    largest = max((float(np.abs(x).max(initial=0)) for x in nothing.reached), default=0.0)
    if not 0 < largest < float("inf"):
        return None
    return Fault(Cause.ADDED, w, f"up to {largest:.3g} reaches the inner optimizer when all gradients are 0")


def _known(w: int, window: Window, every: int, accumulator: np.dtype = combination.FLOAT32) -> Fault | None:
    """The usual wrong combinations."""
    count = len(window.weights)
    ones = np.ones(count)
    options = [
        (
            ones / count,
            Fault(Cause.MEAN_OF_MEANS, w, f"weights from {window.weights.min():g} to {window.weights.max():g}"),
        ),
        (window.weights, Fault(Cause.SUM, w, "of weight times gradient")),
        (ones, Fault(Cause.SUM, w, "of the gradients")),
    ]
    if count < every:
        partial = Fault(Cause.PARTIAL_SCALED, w, f"{count} microbatches, divided as if they were {every}")
        options += [(window.mean * count / every, partial), (ones / every, partial)]
    return next((fault for c, fault in options if combination.share(window, c, accumulator) <= 1), None)


def _fitted(w: int, window: Window) -> Fault | None:
    scaled = combination.fitted(window, window.mean[:, None])
    if scaled is not None:
        return Fault(Cause.SCALED, w, f"by {scaled.sum():.6g}")
    free = combination.fitted(window, np.eye(len(window.weights)))
    if free is None:
        return None
    texts = (", ".join(f"{x:.4g}" for x in c) for c in (free, window.mean))
    return Fault(Cause.COEFFICIENTS, w, "{} in place of {}".format(*texts))


def _narrow(w: int, window: Window, every: int, replay: Replay) -> Fault | None:
    """A narrower accumulator, if known additions in it give what arrived, to the bit."""
    samples, rng = [window], np.random.default_rng(0)
    for _ in range(REPLAYS):
        if combination.telling(samples) >= EVIDENCE:
            break
        other = _arrived(replay(lambda i, j, _, x: (x * rng.uniform(0.5, 1, x.shape)).astype(x.dtype)), w)
        if other is None:
            return None
        samples.append(other)
    candidate = combination.explained(samples) if combination.telling(samples) >= EVIDENCE else None
    if candidate is None:
        return None
    accumulator = next(x for x in NARROW if str(x) == candidate.accumulator)
    if combination.share(window, window.mean, accumulator) > 1:
        return _known(w, window, every, accumulator)
    return Fault(Cause.PRECISION, w, f"{_times(window)}; to the bit: {candidate}")


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
            return Fault(Cause.PARTIAL_LEAKS, w, then)
        break
    return Fault(Cause.PARTIAL_DROPPED, w, f"of {left}")


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
            yield Fault(Cause.NAN_LEAKS, w, "one was put into the first microbatch of window 0")
            return


def _finite(steps: Sequence[Step]) -> bool:
    return all(np.isfinite(x).all() for step in steps for x in step.outcome.reached or [] if x is not None)
