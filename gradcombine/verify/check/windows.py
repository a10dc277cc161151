"""Feeds windows of gradients to an optimizer that accumulates, and finds causes of wrong responses.

An accumulation is linear: the gradient that reaches the inner optimizer is ``sum_i c_i g_i``. The coefficient ``c_i``
is the response to a small gradient in microbatch i and zeros in the others. With a float32 accumulator of unit roundoff
u = 2**-24, a right gradient and this sum agree elementwise within ``gamma(5 n + 10) sum_i |c_i g_i|``, where
``gamma(m) = m u / (1 - m u)``, for any order and form of accumulation: sums divided at the end, terms scaled first,
Welford's running mean. If the dtype of the gradients is narrower, one rounding to it is added.

References: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 2002, sections 3.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.types import Tree
from gradcombine.verify.check.leaves import as_numpy, flat
from gradcombine.verify.check.precision import NARROW
from gradcombine.verify.check.step_report import Cause
from gradcombine.verify.compare.ulp import finfo, rounding_unit

FLOAT32 = np.dtype(np.float32)

Leaves: TypeAlias = list[np.ndarray | None]
"""The leaves of a tree, None for no gradient."""

Answer: TypeAlias = tuple[Cause, int, str]
"""A cause, the index of the window that shows it, and its detail."""


class Outcome(NamedTuple):
    """Observations of one update.

    Attributes:
      moved: whether a parameter changed.
      calls: growth of the inner optimizer's step count.
      reached: the gradient that the inner optimizer received, if it ran.
      changed: whether the updates differ from those of the inner optimizer.
    """

    moved: bool
    calls: int
    reached: Leaves | None
    changed: bool


Run: TypeAlias = Callable[[Leaves, Mapping[str, Any]], Outcome]
"""A sequence of updates: function of the next gradient and keyword arguments."""


class Training(Protocol):
    """A loss and an optimizer that accumulates."""

    def gradient(self, params: Tree, microbatch: Tree) -> Tree:
        """Returns the gradient, a tree of arrays of the framework."""
        ...

    def start(self, microbatches: int, params: Tree, alone: bool) -> Run:
        """Starts a run; with ``alone``, the inner optimizer is replaced by the identity."""
        ...


def leaves(value: Tree) -> Leaves:
    return [None if is_absent(x) else as_numpy(x) for x in tree.flatten(value)[0]]


SMALL = 2.0**-20
"""Power of two that scales gradients so that they are too small to be clipped."""


class Windows:
    """Two full windows of gradients, optionally followed by a partial and another full window.

    The leaves of a gradient are concatenated to one vector.

    Args:
      training: the optimizer under test.
      params: a tree of arrays.
      gradients: gradients of the microbatches of the first window; other windows scale them element by element.
      extra: from the index of a microbatch, and whether it is the last of its window, to keyword arguments.
      partial: whether to include a partial window.

    Attributes:
      share: the largest distance of the gradient that reaches the inner optimizer from ``sum_i c_i g_i``, over the
        rounding bound.
    """

    share = 0.0

    def __init__(
        self,
        training: Training,
        params: Tree,
        gradients: Sequence[Leaves],
        extra: Callable[[int, bool], Mapping[str, Any]],
        partial: bool,
    ) -> None:
        self._training, self._params, self._extra, self._like = training, params, extra, gradients[0]
        # The accumulator of a gradient is float32, or has the dtype of the gradient if that is wider.
        accumulators = [None if x is None else min(FLOAT32, x.dtype, key=rounding_unit) for x in self._like]
        self._dtypes = [x.dtype if x is not None else None for x in self._like], accumulators
        self._output, self._used = [self._of_each(rounding_unit, x) for x in self._dtypes]
        self._tiny = np.max([self._of_each(lambda x: float(finfo(x).smallest_normal), x) for x in self._dtypes], axis=0)
        n, rng, first = len(gradients), np.random.default_rng(0), np.stack([flat(x) for x in gradients])
        lengths = (n, n - 1, n) if partial else (n,)
        scaled = [first[:length] * rng.uniform(0.5, 1, (length, first.shape[1])) for length in lengths]
        self._rows = [first, *(np.stack([flat(self._leaves(x)) for x in window]) for window in scaled)]

    def within_windows(self) -> Iterator[Answer]:
        """Yields causes within a window, except wrong coefficients."""
        for w, outcomes in enumerate(self._outcomes[:2]):
            yield from _timing(w, outcomes)
        largest = float(np.abs(self._reached([0 * x for x in self._rows])).max(initial=0))
        if 0 < largest < np.inf:
            yield Cause.ADDED, 0, f"up to {largest:.3g} reaches the inner optimizer when all gradients are 0"
            return
        reached = self._reached(self._rows)
        shares = [self._share(w, reached[w], self._combined(w)) for w in range(2)]
        self.share = max(shares)
        if self.share > 1:
            yield self._nonlinear(int(np.argmax(shares)), reached)

    def across_windows(self) -> Iterator[Answer]:
        """Yields causes that involve several windows, or the updates."""
        for w, outcomes in enumerate(self._outcomes[:2]):
            if outcomes[-1].changed:
                yield Cause.CHANGED_AFTER, w, ""
        if self._leaks(0):
            yield Cause.LEAKS, 0, "the next update depends on it"
        elif not _close(self._coefficients(1), self._coefficients(0)):
            yield Cause.COEFFICIENTS, 1, "the weights differ from those in the window before"
        if len(self._rows) > 2:
            yield from self._partial()
        poisoned = [x.copy() for x in self._rows]
        poisoned[0][0] = np.nan
        for w, window in enumerate(self._reached(poisoned)[1:], 1):
            if not np.isfinite(window).all():
                yield Cause.NAN_LEAKS, w, "from the first microbatch of window 0"

    def ends_at_last(self) -> bool:
        """Whether the gradients that reach the inner optimizer before the last microbatch of a window are 0."""
        reached = [x.reached for x in self._run(self._rows, alone=True)[0][:-1]]
        return not any(np.any(flat(x)) for x in reached if x is not None)

    @property
    def coefficients(self) -> list[Leaves]:
        """Coefficients of the first window's microbatches, element by element."""
        return [self._leaves(x, wide=True) for x in self._coefficients(0)]

    def _coefficients(self, w: int) -> np.ndarray:
        """Returns the coefficients of a window's microbatches at its end, as rows."""
        return self._responses[w][:, w]

    @cached_property
    def _outcomes(self) -> list[list[Outcome]]:
        return self._run(self._rows, alone=False)

    @cached_property
    def _responses(self) -> list[np.ndarray]:
        """For each window: responses at the ends of all windows to each of its microbatches, divided by the input."""
        # Small, so that nothing is clipped; a power of two, so that dividing by it is exact.
        unit = 2.0 ** -(10 + np.ceil(np.log2(max(self._rows[0].shape[1], 1)) / 2))

        def response(w: int, i: int) -> np.ndarray:
            rows = [0 * x for x in self._rows]
            rows[w][i] = unit
            return self._reached(rows, wide=True) / unit

        return [np.stack([response(w, i) for i in range(len(rows))]) for w, rows in enumerate(self._rows)]

    def _run(self, rows: Sequence[np.ndarray], alone: bool, wide: bool = False) -> list[list[Outcome]]:
        """Runs all windows on these gradients; with ``wide``, in the accumulators' dtypes."""
        params = self._params
        if wide and np.any(self._output != self._used):
            arrays, structure = tree.flatten(params)
            pairs = zip(arrays, self._dtypes[1], strict=True)
            params = tree.unflatten(
                structure, [x if dtype is None else as_numpy(x).astype(dtype) for x, dtype in pairs]
            )
        run = self._training.start(len(self._rows[0]), params, alone)
        return [
            [run(self._leaves(x, wide), self._extra(i, i + 1 == len(window))) for i, x in enumerate(window)]
            for window in rows
        ]

    def _reached(self, rows: Sequence[np.ndarray], wide: bool = False) -> np.ndarray:
        """Returns the gradient that reaches the optimizer at the end of each window; zeros if it does not run."""
        reached = [window[-1].reached for window in self._run(rows, alone=True, wide=wide)]
        zeros = [None if x is None else np.zeros(x.shape) for x in self._like]
        pairs = [zip(zeros if x is None else x, self._like, strict=True) for x in reached]
        return np.stack([flat([None if like is None else x for x, like in window]) for window in pairs])

    def _leaves(self, vector: np.ndarray, wide: bool = False) -> Leaves:
        sizes = [0 if x is None else x.size for x in self._like]
        pieces = zip(self._like, np.split(vector, np.cumsum(sizes)[:-1]), self._dtypes[wide], strict=True)
        return [None if like is None else x.reshape(like.shape).astype(dtype) for like, x, dtype in pieces]

    def _of_each(self, figure: Callable[[np.dtype], float], dtypes: Sequence[np.dtype | None]) -> np.ndarray:
        """Returns a property of each element's dtype."""
        pairs = zip(self._like, dtypes, strict=True)
        return flat([None if x is None or dtype is None else np.full(x.shape, figure(dtype)) for x, dtype in pairs])

    def _terms(self, w: int) -> np.ndarray:
        """Returns the contributions ``c_i g_i`` of all microbatches to the gradient at a window's end."""
        pairs = zip(self._responses[: w + 1], self._rows, strict=False)
        return np.concatenate([responses[:, w] * rows for responses, rows in pairs])

    def _combined(self, w: int) -> np.ndarray:
        return self._terms(w).sum(axis=0)

    def _share(self, w: int, result: np.ndarray, expected: np.ndarray, unit: float | None = None) -> float:
        """Returns the distance of a window's result from another one, over the bound; infinite if it is not finite."""
        roundings, sizes = 5 * len(self._rows[0]) + 10, np.abs(self._terms(w)).sum(axis=0)
        relative = roundings * (unit or self._used)
        bound = roundings * self._tiny + sizes * relative / (1 - relative)
        bound = bound + np.where(self._output > self._used, self._output * (bound + np.abs(expected)), 0)
        return float(np.nan_to_num(np.abs(result - expected) / bound, nan=np.inf).max(initial=0))

    def _nonlinear(self, w: int, reached: np.ndarray) -> Answer:
        """Returns why a window is no linear combination: each microbatch or their mean is changed, or sums round."""
        # A change of each microbatch is additive over microbatches. A change of the mean is the same for copies of it.
        n, rows, c = len(self._rows[w]), self._rows[w], self._coefficients(w)

        def with_window(other: np.ndarray) -> np.ndarray:
            return self._reached([other if v == w else x for v, x in enumerate(self._rows)])[w]

        separate = sum(with_window(np.where(np.arange(n)[:, None] == i, rows, 0)) for i in range(n))
        of_copies = with_window(np.tile(self._combined(w) / c.sum(axis=0), (n, 1)))
        changes_each = self._share(w, reached[w], np.asarray(separate)) <= 1 + n
        changes_mean = self._share(w, reached[w], of_copies) <= 2
        small = with_window(rows * SMALL) / SMALL
        # Clipping does not affect small gradients, whereas rounding to a narrow dtype does.
        by_size = self._share(w, small, self._combined(w)) <= 1 or not np.any(self._output > self._used)
        if changes_each != changes_mean and by_size:
            text = "small gradients are combined differently"
            return Cause.CHANGED_BEFORE if changes_each else Cause.CHANGED_MEAN, w, text
        distance = f"{self.share:.3g} times the float32 bound"
        if all(self._share(v, reached[v], self._combined(v), NARROW) <= 1 for v in range(2)):
            return Cause.PRECISION, w, f"the error is within 16-bit rounding, but {distance}"
        return Cause.UNEXPLAINED, w, f"{distance} from any linear combination"

    def _leaks(self, w: int) -> bool:
        """Whether a window's microbatches change what reaches the optimizer at the end of the next one."""
        return bool(np.any(self._responses[w][:, w + 1] != 0))

    def _partial(self) -> Iterator[Answer]:
        """Yields causes that involve the partial window."""
        *_, outcomes, after = self._outcomes
        n, ends = len(outcomes), [i for i, x in enumerate(after, 1) if x.calls]
        if not outcomes[-1].calls:
            leaks = self._leaks(2) or (ends and ends[0] < len(after))
            text = f"; the next update is after microbatch {ends[0]} of the next window" if ends else ""
            yield Cause.LEAKS if leaks else Cause.PARTIAL_DROPPED, 2, f"it has {n} microbatches" + text
            return
        yield from _timing(3, after)
        full, part = self._coefficients(0), self._coefficients(2)
        kept, total = full[:-1], full.sum(axis=0)
        if not _close(total, 1 + 0 * total) or _close(part, kept * total / kept.sum(axis=0)):
            return
        if _close(part, kept) or _close(part.sum(axis=0), n / len(full) + 0 * total):
            yield Cause.PARTIAL_SCALED, 2, f"{n} microbatches, divided as if they were {len(full)}"
        else:
            yield Cause.COEFFICIENTS, 2, f"{n} microbatches, whose weights differ from those in a full window"


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=2.0**-16, atol=0)


def _timing(w: int, outcomes: Sequence[Outcome]) -> Iterator[Answer]:
    """Yields causes if the inner optimizer runs, or the parameters move, elsewhere than at the window's end."""
    calls, n = [x.calls for x in outcomes], len(outcomes)
    early, moved = sum(calls[:-1]), [i for i, x in enumerate(outcomes[:-1], 1) if x.moved]
    if calls[-1] == 0 or (early and moved):
        ran = [i for i, count in enumerate(calls, 1) if count]
        yield Cause.WINDOW, w, f"it first runs after microbatch {ran[0]} of {n}" if ran else "it does not run"
    elif moved:
        yield Cause.MOVED, w, f"at microbatch {moved[0]} of {n}, where the inner optimizer does not run"
    elif early or calls[-1] > 1:
        yield Cause.COUNTED, w, f"its count grows by {sum(calls)} in a window of {n} microbatches"
