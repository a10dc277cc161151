"""Windows of gradients in an optimizer that accumulates, and what its responses to them show.

An accumulation is linear: the gradient that reaches the optimizer behind it is ``sum_i c_i g_i``. Its coefficients are
its response to a small gradient in one microbatch and zeros in the others. In a float32 accumulator of unit roundoff
u = 2**-24, whatever its order and form (sums divided at the end, terms scaled first, Welford's running mean), responses
and gradients agree elementwise within ``gamma(5 n + 10) sum_i |c_i g_i|``, with ``gamma(m) = m u / (1 - m u)``. One
rounding to the gradients' dtype is added if that is narrower.

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
from gradcombine.verify.check.elements import NARROW
from gradcombine.verify.check.step_report import Cause
from gradcombine.verify.compare.ulp import finfo, rounding_unit

FLOAT32 = np.dtype(np.float32)

Leaves: TypeAlias = list[np.ndarray | None]
"""The leaves of a tree, None for no gradient."""

Answer: TypeAlias = tuple[Cause, int, str]
"""A cause, the window that shows it, and figures."""


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


class Run(Protocol):
    """One training."""

    def step(self, gradient: Leaves, extra: Mapping[str, Any]) -> Outcome: ...


class Training(Protocol):
    """A loss with an optimizer that accumulates."""

    def gradient(self, params: Tree, microbatch: Tree) -> Tree:
        """A tree of arrays of the framework."""
        ...

    def start(self, microbatches: int, params: Tree, alone: bool) -> Run:
        """A new run; alone: of the accumulation without an optimizer."""
        ...


def leaves(value: Tree) -> Leaves:
    """The leaves as NumPy arrays."""
    return [None if is_absent(x) else np.asarray(x) for x in tree.flatten(value)[0]]


SMALL = 2.0**-20
"""Gradients scaled by this are too small to be clipped; the scaling is exact."""


class Windows:
    """Two windows of gradients, and perhaps a partial one and a full one after them.

    All leaves of a gradient are one vector here.

    Args:
      training: of the optimizer.
      params: a tree of arrays.
      gradients: of the microbatches of the first window; in the others they are scaled, element by element.
      extra: from the number of a microbatch, and whether it is its window's last, to keyword arguments.
      partial: whether there is a partial window.

    Attributes:
      share: the largest distance of the gradient that reached the optimizer from what its responses make of the
        microbatches' gradients, over what rounding allows.
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
        # A gradient that is wider than float32 has an accumulator of its own dtype.
        used = [None if x is None else min(FLOAT32, x.dtype, key=rounding_unit) for x in self._like]
        self._dtypes = [x.dtype if x is not None else None for x in self._like], used
        self._output, self._used = [self._of_each(rounding_unit, x) for x in self._dtypes]
        self._tiny = np.max([self._of_each(lambda x: float(finfo(x).smallest_normal), x) for x in self._dtypes], axis=0)
        n, rng, first = len(gradients), np.random.default_rng(0), np.stack([flat(x) for x in gradients])
        lengths = (n, n - 1, n) if partial else (n,)
        scaled = [first[:length] * rng.uniform(0.5, 1, (length, first.shape[1])) for length in lengths]
        self._rows = [first, *(np.stack([flat(self._leaves(x)) for x in window]) for window in scaled)]

    def first(self) -> Iterator[Answer]:
        """Causes in a window, apart from its coefficients."""
        for w, outcomes in enumerate(self._outcomes[:2]):
            yield from _of_times(w, outcomes)
        largest = float(np.abs(self._reached([0 * x for x in self._rows])).max(initial=0))
        if 0 < largest < np.inf:
            yield Cause.ADDED, 0, f"up to {largest:.3g} reaches the inner optimizer when all gradients are 0"
            return
        made = self._reached(self._rows)
        shares = [self._share(w, made[w], self._combined(w)) for w in range(2)]
        self.share = max(shares)
        if self.share > 1:
            yield self._nonlinear(int(np.argmax(shares)), made)

    def then(self) -> Iterator[Answer]:
        """Causes that show from one window to the next."""
        for w, outcomes in enumerate(self._outcomes[:2]):
            if outcomes[-1].changed:
                yield Cause.CHANGED_AFTER, w, ""
        if self._leaks(0, 1):
            yield Cause.LEAKS, 0, "the next update depends on it"
        elif not _alike(self._own(1), self._own(0)):
            yield Cause.COEFFICIENTS, 1, "they count otherwise than in the window before"
        if len(self._rows) > 2:
            yield from self._partial()
        poisoned = [x.copy() for x in self._rows]
        poisoned[0][0] = np.nan
        for w, window in enumerate(self._reached(poisoned)[1:], 1):
            if not np.isfinite(window).all():
                yield Cause.NAN_LEAKS, w, "one was put into the first microbatch of window 0"

    @property
    def coefficients(self) -> list[Leaves]:
        """Of the microbatches in the gradient at the end of their window, element by element."""
        return [self._leaves(x, wide=True) for x in self._own(0)]

    def _own(self, w: int) -> np.ndarray:
        """The coefficients of a window's microbatches at its end, as rows."""
        return self._responses[w][:, w]

    @cached_property
    def _outcomes(self) -> list[list[Outcome]]:
        """Outcomes with the optimizer itself."""
        return self._run(self._rows, alone=False)

    @cached_property
    def _responses(self) -> list[np.ndarray]:
        """For each window, by microbatch: what reaches the optimizer at the ends of all, over what was put in."""
        # Small, so that nothing is clipped; a power of 2, so that dividing by it is exact.
        unit = 2.0 ** -(10 + np.ceil(np.log2(max(self._rows[0].shape[1], 1)) / 2))

        def response(w: int, i: int) -> np.ndarray:
            rows = [0 * x for x in self._rows]
            rows[w][i] = unit
            return self._reached(rows, wide=True) / unit

        return [np.stack([response(w, i) for i in range(len(rows))]) for w, rows in enumerate(self._rows)]

    def _run(self, rows: Sequence[np.ndarray], alone: bool, wide: bool = False) -> list[list[Outcome]]:
        """Outcomes for other gradients; wide: with parameters and gradients in float32 at least."""
        params = self._params
        if wide and np.any(self._output != self._used):
            arrays, structure = tree.flatten(params)
            pairs = zip(arrays, self._dtypes[1], strict=True)
            params = tree.unflatten(structure, [x if to is None else np.asarray(x).astype(to) for x, to in pairs])
        run = self._training.start(len(self._rows[0]), params, alone)
        return [
            [run.step(self._leaves(x, wide), self._extra(i, i + 1 == len(window))) for i, x in enumerate(window)]
            for window in rows
        ]

    def _reached(self, rows: Sequence[np.ndarray], wide: bool = False) -> np.ndarray:
        """The gradient that reaches the optimizer at the end of each window, zeros where none does."""
        made = [window[-1].reached for window in self._run(rows, alone=True, wide=wide)]
        nothing = [None if x is None else np.zeros(x.shape) for x in self._like]
        pairs = [zip(nothing if x is None else x, self._like, strict=True) for x in made]
        return np.stack([flat([None if like is None else x for x, like in window]) for window in pairs])

    def _leaves(self, vector: np.ndarray, wide: bool = False) -> Leaves:
        sizes = [0 if x is None else x.size for x in self._like]
        pieces = zip(self._like, np.split(vector, np.cumsum(sizes)[:-1]), self._dtypes[wide], strict=True)
        return [None if like is None else x.reshape(like.shape).astype(dtype) for like, x, dtype in pieces]

    def _of_each(self, figure: Callable[[np.dtype], float], dtypes: Sequence[np.dtype | None]) -> np.ndarray:
        """A figure of the dtype of each element."""
        pairs = zip(self._like, dtypes, strict=True)
        return flat([None if x is None or dtype is None else np.full(x.shape, figure(dtype)) for x, dtype in pairs])

    def _terms(self, w: int) -> np.ndarray:
        """The part of each microbatch, up to a window's end, in the gradient that reaches the optimizer there."""
        pairs = zip(self._responses[: w + 1], self._rows, strict=False)
        return np.concatenate([responses[:, w] * rows for responses, rows in pairs])

    def _combined(self, w: int) -> np.ndarray:
        return self._terms(w).sum(axis=0)

    def _share(self, w: int, made: np.ndarray, other: np.ndarray, unit: float | None = None) -> float:
        """The distance of a window's result from another one, over what is allowed; infinite if it is not finite."""
        roundings, sizes = 5 * len(self._rows[0]) + 10, np.abs(self._terms(w)).sum(axis=0)
        times = roundings * (unit or self._used)
        bound = roundings * self._tiny + sizes * times / (1 - times)
        bound = bound + np.where(self._output > self._used, self._output * (bound + np.abs(other)), 0)
        return float(np.nan_to_num(np.abs(made - other) / bound, nan=np.inf).max(initial=0))

    def _nonlinear(self, w: int, made: np.ndarray) -> Answer:
        """Something acts on each microbatch, or on their mean; or the additions round."""
        # What acts on each microbatch gives the sum of what it makes of each. What acts on the mean does not see which
        # microbatches it comes from.
        n, rows, c = len(self._rows[w]), self._rows[w], self._own(w)

        def instead(other: np.ndarray) -> np.ndarray:
            return self._reached([other if v == w else x for v, x in enumerate(self._rows)])[w]

        total = sum(instead(np.where(np.arange(n)[:, None] == i, rows, 0)) for i in range(n))
        alike = instead(np.tile(self._combined(w) / c.sum(axis=0), (n, 1)))
        each, mean = self._share(w, made[w], np.asarray(total)) <= 1 + n, self._share(w, made[w], alike) <= 2
        small = instead(rows * SMALL) / SMALL
        # One rounding to a narrow dtype is told from what clips by the sizes, which rounding does not depend on.
        by_size = self._share(w, small, self._combined(w)) <= 1 or not np.any(self._output > self._used)
        if each != mean and by_size:
            text = "small gradients are added up otherwise than these"
            return Cause.CHANGED_BEFORE if each else Cause.CHANGED_MEAN, w, text
        if all(self._share(v, made[v], self._combined(v), rounding_unit(NARROW[0])) <= 1 for v in range(2)):
            return Cause.PRECISION, w, f"off by what 16 bits round, {self.share:.3g} times what float32 may be"
        return Cause.UNEXPLAINED, w, f"{self.share:.3g} times what float32 may be off by, of no linear combination"

    def _leaks(self, w: int, later: int) -> bool:
        return bool(np.any(self._responses[w][:, later] != 0))

    def _partial(self) -> Iterator[Answer]:
        """The partial window: is it applied, does the next one depend on it, what is it divided by?"""
        *_, outcomes, after = self._outcomes
        n, ends = len(outcomes), [i for i, x in enumerate(after, 1) if x.calls]
        if not outcomes[-1].calls:
            leaks = self._leaks(2, 3) or (ends and ends[0] < len(after))
            where = f"; the next update came after microbatch {ends[0]}" if ends else ""
            yield Cause.LEAKS if leaks else Cause.PARTIAL_DROPPED, 2, f"of {n} microbatches" + where
            return
        yield from _of_times(3, after)
        full, part = self._own(0), self._own(2)
        kept, total = full[:-1], full.sum(axis=0)
        if not _alike(total, 1 + 0 * total) or _alike(part, kept * total / kept.sum(axis=0)):
            return
        if _alike(part, kept) or _alike(part.sum(axis=0), n / len(full) + 0 * total):
            yield Cause.PARTIAL_SCALED, 2, f"{n} microbatches, divided as if they were {len(full)}"
        else:
            yield Cause.COEFFICIENTS, 2, f"of {n} microbatches, which count otherwise than in a full one"


def flat(leaves: Leaves) -> np.ndarray:
    """All elements in one float64 array."""
    return np.concatenate([np.zeros(0), *(x.ravel().astype(np.float64) for x in leaves if x is not None)])


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=2.0**-16, atol=0)


def _of_times(w: int, outcomes: Sequence[Outcome]) -> Iterator[Answer]:
    """Did the inner optimizer run, and did the parameters move, only at the window's end?"""
    ran, n = [x.calls for x in outcomes], len(outcomes)
    early, moved = sum(ran[:-1]), [i for i, x in enumerate(outcomes[:-1], 1) if x.moved]
    if ran[-1] == 0 or (early and moved):
        times = [i for i, calls in enumerate(ran, 1) if calls]
        where = f"ran after microbatch {times[0]}" if times else "did not run"
        yield Cause.WINDOW, w, f"of {n} microbatches: it {where}"
    elif moved:
        yield Cause.MOVED, w, f"at microbatch {moved[0]} of {n}, where the inner optimizer did not run"
    elif early or ran[-1] > 1:
        yield Cause.COUNTED, w, f"its count grew by {sum(ran)} in a window of {n} microbatches"
