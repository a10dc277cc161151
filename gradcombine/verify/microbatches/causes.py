"""Names what is wrong with a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gradcombine.verify.microbatches import combination
from gradcombine.verify.microbatches.combination import NARROW, Window
from gradcombine.verify.microbatches.report import Cause, Fault, WindowResult
from gradcombine.verify.microbatches.subject import Step, Trace

Replay = Callable[[Callable[[int, int, np.ndarray], np.ndarray]], Trace]
"""Accumulates the trace's gradients again, changed."""

TINY = 2.0**-20
"""At this part of their size, gradients are below what clipping clips; scaling by it is exact."""


def results(trace: Trace) -> tuple[WindowResult, ...]:
    """How near each window came."""
    found = []
    for w, steps in enumerate(trace):
        reached = steps[-1].outcome.reached
        weights = tuple(step.weight for step in steps)
        near = None if reached is None else combination.share(given := combination.window(steps, reached), given.mean)
        found.append(WindowResult(w, weights, near))
    return tuple(found)


def faults(trace: Trace, replay: Replay) -> Iterator[Fault]:
    """The first fault of each window; windows that come after a partial one that was not applied are not judged."""
    every = max(len(steps) for steps in trace)
    for w, steps in enumerate(trace):
        ran = [step.outcome.calls for step in steps]
        if len(steps) < every and not any(ran):
            yield _left_over(trace, w)
            return
        fault = _of_window(w, steps, ran) or _of_gradient(w, steps, every, replay)
        if fault is None and steps[-1].outcome.changed:
            fault = Fault(Cause.CHANGED_AFTER, w)
        if fault is not None:
            yield fault
            if fault.cause is Cause.WINDOW:
                return
    yield from _nan(trace, replay)


def _of_window(w: int, steps: Sequence[Step], ran: Sequence[int]) -> Fault | None:
    """When the inner optimizer ran, and when the parameters moved."""
    early, moved = sum(ran[:-1]), any(step.outcome.moved for step in steps[:-1])
    if ran[-1] == 0 or (early and moved):
        times = [i for i, calls in enumerate(ran, 1) if calls]
        where = f"ran after microbatch {times[0]}" if times else "did not run"
        return Fault(Cause.WINDOW, w, f"of {len(steps)} microbatches: the inner optimizer {where}")
    if moved:
        first = next(i for i, step in enumerate(steps, 1) if step.outcome.moved)
        return Fault(Cause.MOVED, w, f"at microbatch {first} of {len(steps)}, where the inner optimizer did not run")
    if early or ran[-1] > 1:
        return Fault(Cause.COUNTED, w, f"its count grew by {sum(ran)} in a window of {len(steps)} microbatches")
    return None


def _of_gradient(w: int, steps: Sequence[Step], every: int, replay: Replay) -> Fault | None:
    reached = steps[-1].outcome.reached
    if reached is None:
        return None
    given = combination.window(steps, reached)
    if combination.share(given, given.mean) <= 1:
        return None
    tiny = replay(lambda i, j, x: (x * x.dtype.type(TINY)).astype(x.dtype))[w]
    arrived = tiny[-1].outcome.reached
    if arrived is not None and combination.share(scaled := combination.window(tiny, arrived), scaled.mean) <= 1:
        return Fault(Cause.CHANGED_BEFORE, w, "gradients of a millionth of the size are averaged rightly")
    return _known(w, given, every) or _fitted(w, given) or _narrow(w, given, every) or Fault(Cause.UNKNOWN, w)


def _known(w: int, given: Window, every: int, accumulator: np.dtype = combination.FLOAT32) -> Fault | None:
    """The usual wrong combinations."""
    count = len(given.weights)
    ones = np.ones(count)
    options = [
        (
            ones / count,
            Fault(Cause.MEAN_OF_MEANS, w, f"weights from {given.weights.min():g} to {given.weights.max():g}"),
        ),
        (given.weights, Fault(Cause.SUM, w, "of weight times gradient")),
        (ones, Fault(Cause.SUM, w, "of the gradients")),
    ]
    if count < every:
        partial = Fault(Cause.PARTIAL_SCALED, w, f"{count} microbatches, divided as if they were {every}")
        options += [(given.mean * count / every, partial), (ones / every, partial)]
    return next((fault for c, fault in options if combination.share(given, c, accumulator) <= 1), None)


def _fitted(w: int, given: Window) -> Fault | None:
    scaled = combination.fitted(given, given.mean[:, None])
    if scaled is not None:
        return Fault(Cause.SCALED, w, f"by {scaled.sum():.6g}")
    free = combination.fitted(given, np.eye(len(given.weights)))
    if free is None:
        return None
    texts = (", ".join(f"{x:.4g}" for x in c) for c in (free, given.mean))
    return Fault(Cause.COEFFICIENTS, w, "they count {} in place of {}".format(*texts))


def _narrow(w: int, given: Window, every: int) -> Fault | None:
    for accumulator in NARROW:
        if combination.share(given, given.mean, accumulator) <= 1:
            off = f"{combination.share(given, given.mean):.3g} times the bound of float32"
            bits = combination.explained(given)
            able = " and ".join(str(x) for x in NARROW[NARROW.index(accumulator) :])
            return Fault(Cause.PRECISION, w, f"{off}; {bits or f'within what accumulators of {able} do'}")
        found = _known(w, given, every, accumulator)
        if found is not None:
            return found
    return None


def _left_over(trace: Trace, w: int) -> Fault:
    """What becomes of a partial window that was not applied: the next one tells."""
    left = f"{len(trace[w])} microbatches"
    for steps in trace[w + 1 :]:
        ends = [i for i, step in enumerate(steps) if step.outcome.calls]
        if not ends:
            continue
        reached = steps[ends[0]].outcome.reached
        own = combination.window(steps, reached) if reached is not None and ends[0] + 1 == len(steps) else None
        if own is None or combination.share(own, own.mean) > 1:
            return Fault(Cause.PARTIAL_LEAKS, w, f"of {left}; the next update came after microbatch {ends[0] + 1}")
        break
    return Fault(Cause.PARTIAL_DROPPED, w, f"of {left}")


def _nan(trace: Trace, replay: Replay) -> Iterator[Fault]:
    """Whether a NaN in the first microbatch of all is still there once its window is over."""

    def poisoned(w: int, i: int, x: np.ndarray) -> np.ndarray:
        return np.full_like(x, np.nan) if (w, i) == (0, 0) else x

    for w, steps in enumerate(replay(poisoned)):
        reached = [x for step in steps for x in step.outcome.reached or [] if x is not None]
        if w > 0 and not all(np.isfinite(x).all() for x in reached):
            yield Fault(Cause.NAN_LEAKS, w, "one was put into the first microbatch of window 0")
            return
