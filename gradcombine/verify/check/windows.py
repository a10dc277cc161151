"""Windows of microbatches: the exact mean of their gradients, what an accumulation makes of them, and why it differs.

The exact mean is ``sum(c_i g_i)``, computed in float64. A float32 accumulator of unit roundoff u = 2**-24, in whatever
order and form (sums divided at the end, terms scaled first, Welford's running mean), is within
``gamma(2 n + 5) * max|g_i|`` of it, elementwise, with ``gamma(m) = m u / (1 - m u)``:

- a sum takes n - 1 additions and a product a term, n - 1 additions of weights, and a division: 2 n roundings;
- Welford's step ``m + (g - m) / i`` adds at most ``(4 / i + 1) u max|g|``, of which later steps leave the part i / n:
  all of them ``((n + 1) / 2 + 4) u max|g|``.

One rounding to the gradients' dtype is added if that is narrower, and 2 n + 1 times the smallest normal number for
results that are flushed to zero.

References: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 2002, sections 3.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.types import Tree
from gradcombine.verify.check import elements
from gradcombine.verify.check.case import Answer, Case, accounts_for, combined
from gradcombine.verify.check.combinations import linear
from gradcombine.verify.check.running import Result, Split
from gradcombine.verify.check.standard import Floats, Standard, gamma, rms
from gradcombine.verify.check.step_report import Cause, Fault
from gradcombine.verify.compare.ulp import finfo, rounding_unit

OPERATION = "check_microbatches"
FLOAT32 = np.dtype(np.float32)

Leaves: TypeAlias = list[np.ndarray | None]
"""The leaves of a tree, None for no gradient."""


def leaves(value: Tree) -> Leaves:
    """The leaves as NumPy arrays."""
    return [None if is_absent(x) else np.asarray(x) for x in tree.flatten(value)[0]]


# --- a training, step by step ---


class Outcome(NamedTuple):
    """Result of an update.

    Attributes:
      moved: whether it moved a parameter.
      calls: by how much the inner optimizer's count of steps grew.
      reached: the gradient that the inner optimizer received, if it ran.
      changed: whether the updates differ from the inner optimizer's.
    """

    moved: bool
    calls: int
    reached: Leaves | None
    changed: bool


class Step(NamedTuple):
    """A microbatch: its weight, its gradient, and its outcome."""

    weight: float
    gradient: Leaves
    outcome: Outcome


Trace: TypeAlias = list[list[Step]]
"""The steps of every window."""


class Run(Protocol):
    """One training."""

    @property
    def params(self) -> Any: ...

    def step(self, gradient: Leaves, weight: float, last: bool) -> Outcome: ...


def trained(run: Run, weights: Sequence[Sequence[float]], gradient: Callable[[int, int], Leaves]) -> Trace:
    """Trains over windows, on the gradient of each number of a window and of a microbatch in it."""
    trace: Trace = []
    for w, scales in enumerate(weights):
        trace.append([])
        for i, weight in enumerate(scales):
            given = gradient(w, i)
            trace[-1].append(Step(weight, given, run.step(given, weight, i + 1 == len(scales))))
    return trace


Change: TypeAlias = Callable[[int, int, int, np.ndarray], np.ndarray]
"""From the numbers of window, microbatch and leaf, and the leaf, to another one of the same shape and dtype."""

Replay: TypeAlias = Callable[[Change], Trace]
"""Accumulates the trace's gradients again, changed."""


# --- the mean of a window, as a standard ---


class Window(Standard):
    """A window's gradients, and what came of them.

    Args:
      weights: of the microbatches.
      gradients: of each; a leaf that is None in some counts as zero there, one that is None in all is left out.
      made: what came of them.
      bound: of all elements; None: that of the module's docstring.
    """

    what, wide, overdetermined = "microbatch", None, 1.2

    def __init__(
        self, weights: Sequence[float], gradients: Sequence[Leaves], made: Leaves, bound: float | None = None
    ) -> None:
        columns: list[tuple[np.dtype, list[np.ndarray], np.ndarray]] = []
        for column, result in zip(zip(*gradients, strict=True), made, strict=True):
            like = next((x for x in column if x is not None), None)
            if like is not None and result is not None:
                rows = [np.zeros(like.shape) if x is None else x.astype(np.float64) for x in column]
                columns.append((like.dtype, rows, result.astype(np.float64)))
        dtypes = tuple(dtype for dtype, _, _ in columns)
        self.sizes = np.array(weights, np.float64)
        self.mean = self.given = self.sizes / self.sizes.sum()
        self.examples, self.names = len(gradients), [str(i) for i in range(len(columns))]
        self._terms = [Result(tuple(rows[i] for _, rows, _ in columns), (), dtypes) for i in range(len(gradients))]
        self.own, self.made = self._mean(range(self.examples)), Result(tuple(x for *_, x in columns), (), dtypes)
        self._bounds = [np.full(x.shape, bound) if bound else self._bound(i) for i, x in enumerate(self.made.floats)]

    @property
    def case(self) -> Case:
        return Case(Split(self.examples), self.made, self.made, wide=False)

    @property
    def share(self) -> float:
        """The largest distance of what was made from the mean, over its bound; infinite if it is not finite."""
        return float(self.shares(self.made.floats, self.own.floats, wide=False, sides=1).max(initial=0))

    def allowed(self, wide: bool) -> np.ndarray:
        del wide
        return np.array([rms(x) for x in self._bounds])

    def shares(self, a: Floats, b: Floats, wide: bool, sides: float = 2) -> np.ndarray:
        """Elementwise, in place of the root of the mean square."""
        del wide
        with np.errstate(all="ignore"):
            far = [np.abs(x - y) for x, y in zip(a, b, strict=True)]
            pairs = zip(far, self._bounds, strict=True)
            shares = [np.where(x == 0, 0, x / (sides * y)).max(initial=0) for x, y in pairs]
        return np.array([x if np.isfinite(x) else np.inf for x in shares])

    def resolution(self, floats: Floats) -> list[np.ndarray]:
        return [2.0**-22 * np.abs(x) for x in floats]

    def one(self, rows: Sequence[int]) -> Result:
        return self._terms[rows[0]] if len(rows) == 1 else self._mean(rows)

    def combined(self, coefficients: np.ndarray) -> list[np.ndarray]:
        return combined(coefficients, [x.floats for x in self._terms])

    def is_sum_of(self, parts: Sequence[Window | None]) -> bool:
        """Whether what came of the parts adds up to what came of this window, up to the rounding of each."""
        made = [part.made.floats for part in parts if part is not None]
        if len(made) < len(parts):
            return False
        total = combined(np.ones(len(made)), made)
        return bool((self.shares(self.made.floats, total, wide=False, sides=1 + len(parts)) <= 1).all())

    def _mean(self, rows: Sequence[int]) -> Result:
        weights = np.zeros(self.examples)
        weights[list(rows)] = self.sizes[list(rows)]
        return self._terms[0]._replace(floats=tuple(self.combined(weights / weights.sum())))

    def _bound(self, leaf: int) -> np.ndarray:
        output = self._terms[0].dtypes[leaf]
        # A gradient that is wider than float32 has an accumulator of its own dtype.
        used = min(FLOAT32, output, key=rounding_unit)
        roundings = 2 * self.examples + 5
        bound = gamma(roundings, rounding_unit(used)) * np.max([np.abs(x.floats[leaf]) for x in self._terms], axis=0)
        if rounding_unit(output) > rounding_unit(used):
            bound = bound * (1 + rounding_unit(output)) + rounding_unit(output) * np.abs(self.own.floats[leaf])
        return bound + roundings * max(float(finfo(x).smallest_normal) for x in (output, used))


def arrived(trace: Trace, w: int) -> Window | None:
    """A window with what reached the optimizer at its end, if anything did."""
    steps, reached = trace[w], trace[w][-1].outcome.reached
    return None if reached is None else Window([x.weight for x in steps], [x.gradient for x in steps], reached)


# --- causes, and what tells one from another in a trace ---

EVIDENCE = 64
"""How many elements are looked at before an accumulator is blamed."""

REPLAYS = 16
"""How many further gradients are made for that, at most, if a model has few parameters."""

TINY = 2.0**-20
"""Gradients scaled by this are too small to be clipped; the scaling is exact."""


def fault(cause: Cause, window: int, detail: str = "") -> Fault:
    return Fault(cause, f"window {window}", detail, window)


def faults(trace: Trace, replay: Replay) -> Iterator[Fault]:
    """The first fault of each window; windows after a partial one that was not applied are not checked."""
    every = max(len(steps) for steps in trace)
    for w, steps in enumerate(trace):
        if len(steps) < every and not any(step.outcome.calls for step in steps):
            yield fault(*_left_over(trace, w, replay))
            return
        answers = chain(_of_times(steps), _of_gradient(w, trace, every, replay), _of_updates(steps))
        for cause, detail in answers:
            yield fault(cause, w, detail)
            if cause is Cause.WINDOW:
                return
            break
    yield from _nan(trace, replay)


def _of_times(steps: Sequence[Step]) -> Iterator[Answer]:
    """Did the inner optimizer run, and did the parameters move, only at the window's end?"""
    ran = [step.outcome.calls for step in steps]
    early, moved = sum(ran[:-1]), [i for i, step in enumerate(steps[:-1], 1) if step.outcome.moved]
    if ran[-1] == 0 or (early and moved):
        times = [i for i, calls in enumerate(ran, 1) if calls]
        where = f"ran after microbatch {times[0]}" if times else "did not run"
        yield Cause.WINDOW, f"of {len(steps)} microbatches: it {where}"
    elif moved:
        yield Cause.MOVED, f"at microbatch {moved[0]} of {len(steps)}, where the inner optimizer did not run"
    elif early or ran[-1] > 1:
        yield Cause.COUNTED, f"its count grew by {sum(ran)} in a window of {len(steps)} microbatches"


def _of_updates(steps: Sequence[Step]) -> Iterator[Answer]:
    if steps[-1].outcome.changed:
        yield Cause.CHANGED_AFTER, ""


def _of_gradient(w: int, trace: Trace, every: int, replay: Replay) -> Iterator[Answer]:
    """Is the gradient that reached the inner optimizer the mean?"""
    window = arrived(trace, w)
    if window is None or window.share <= 1:
        return
    yield from _changed(w, window, trace, replay)
    yield from _added(w, replay)
    yield from _partial(window, every)
    yield from linear(window, window.case)
    yield from _narrow(w, window, replay)
    yield Cause.UNKNOWN, f"{window.share:.3g} times the bound of float32 away from the mean"


def _changed(w: int, window: Window, trace: Trace, replay: Replay) -> Iterator[Answer]:
    """Something acts on large gradients only, as clipping does: on each microbatch, or on their mean?"""
    small = arrived(replay(lambda i, j, _, x: (x * x.dtype.type(TINY)).astype(x.dtype)), w)
    if small is None or small.share > 1:
        return
    sizes = "gradients of a millionth of the size are averaged correctly"
    if window.examples > 1:
        # What acts on each microbatch gives the sum of what it makes of the first and of the others. What acts on the
        # mean does not see which microbatches it comes from.
        first = arrived(replay(lambda i, j, _, x: x if j == 0 else np.zeros_like(x)), w)
        others = arrived(replay(lambda i, j, _, x: np.zeros_like(x) if j == 0 else x), w)
        alike = arrived(replay(lambda i, j, leaf, x: _mean(trace[w], leaf, x) if i == w else x), w)
        each, mean = window.is_sum_of([first, others]), window.is_sum_of([alike])
        if each != mean:
            yield Cause.CHANGED_BEFORE if each else Cause.CHANGED_MEAN, sizes
    yield Cause.UNKNOWN, f"{sizes}, but not these"


def _mean(steps: Sequence[Step], leaf: int, like: np.ndarray) -> np.ndarray:
    total = sum(step.weight for step in steps)
    terms = ((step.weight / total, step.gradient[leaf]) for step in steps)
    return np.asarray(sum(c * x.astype(np.float64) for c, x in terms if x is not None)).astype(like.dtype)


def _added(w: int, replay: Replay) -> Iterator[Answer]:
    nothing = arrived(replay(lambda i, j, _, x: np.zeros_like(x)), w)
    largest = max((float(np.abs(x).max(initial=0)) for x in nothing.made.floats), default=0.0) if nothing else 0.0
    if 0 < largest < float("inf"):
        yield Cause.ADDED, f"up to {largest:.3g} reaches the inner optimizer when all gradients are 0"


def _partial(window: Window, every: int) -> Iterator[Answer]:
    """A partial window that is divided by the length of a full one."""
    n = window.examples
    for c in (window.mean * n / every, np.full(n, 1 / every)) if n < every else ():
        if accounts_for(window, window.case, window.combined(c), float(c.sum())):
            yield Cause.PARTIAL_SCALED, f"{n} microbatches, divided as if they were {every}"


def _narrow(w: int, window: Window, replay: Replay) -> Iterator[Answer]:
    """A narrow accumulator, by the bits of as many elements as it takes to tell."""
    rng = np.random.default_rng(0)
    samples = [window]
    for _ in range(REPLAYS):
        if sum(x.size for sample in samples for x in sample.made.floats) >= EVIDENCE:
            break
        other = arrived(replay(lambda i, j, _, x: (x * rng.uniform(0.5, 1, x.shape)).astype(x.dtype)), w)
        samples += [other] if other is not None else []
    yield from elements.narrow([(x, x.case) for x in samples])


def _left_over(trace: Trace, w: int, replay: Replay) -> tuple[Cause, int, str]:
    """A partial window was not applied: does the next update depend on it?"""
    left = f"of {len(trace[w])} microbatches"
    for v in range(w + 1, len(trace)):
        ends = [i for i, step in enumerate(trace[v], 1) if step.outcome.calls]
        if not ends:
            continue
        with_it, without = (replay(lambda i, j, _, x, n=n: x * n if i == w else x)[v] for n in (1, 0))
        if ends[0] < len(trace[v]) or _differ(with_it[ends[0] - 1], without[ends[0] - 1]):
            return Cause.PARTIAL_LEAKS, w, f"{left}; the next update came after microbatch {ends[0]}"
        break
    return Cause.PARTIAL_DROPPED, w, left


def _differ(a: Step, b: Step) -> bool:
    """Whether different gradients reached the optimizer."""
    pairs = zip(a.outcome.reached or [], b.outcome.reached or [], strict=True)
    return any(x is not None and y is not None and not np.array_equal(x, y) for x, y in pairs)


def _nan(trace: Trace, replay: Replay) -> Iterator[Fault]:
    """Whether a NaN in the very first microbatch is still there after its window."""
    poisoned = replay(lambda w, i, _, x: np.full_like(x, np.nan) if (w, i) == (0, 0) else x)
    for w, (before, steps) in enumerate(zip(trace, poisoned, strict=True)):
        if w > 0 and _finite(before) and not _finite(steps):
            yield fault(Cause.NAN_LEAKS, w, "one was put into the first microbatch of window 0")
            return


def _finite(steps: Sequence[Step]) -> bool:
    return all(np.isfinite(x).all() for step in steps for x in step.outcome.reached or [] if x is not None)
