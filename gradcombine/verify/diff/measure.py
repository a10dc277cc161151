"""Measures the pairs of two dumps, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from gradcombine.verify.comparison import LeafDifference, Meter
from gradcombine.verify.comparison.distance import comparable
from gradcombine.verify.comparison.trees import badness
from gradcombine.verify.dumps import Dump, Entry
from gradcombine.verify.mapping import Pair, Rules, match
from gradcombine.verify.mapping.rules import NO_RULES


class Allowed(NamedTuple):
    """What may differ.

    Attributes:
      ulp: the largest distance in units in the last place; None: only equal bits and dtypes pass.
      relative: the largest difference, over the largest magnitude of the second leaf.
    """

    ulp: int | None = None
    relative: float | None = None

    def passes(self, difference: LeafDifference) -> bool:
        """Whether a leaf is within either of the two."""
        if self.ulp is None and self.relative is None:
            return difference.equal_bits and difference.same_dtype
        close = self.relative is not None and difference.relative <= self.relative and difference.same_specials
        return close or (self.ulp is not None and difference.max_ulp <= self.ulp)


EQUAL_BITS = Allowed()


class Row(NamedTuple):
    """One pair of leaves: how it was found, how far apart they are, and whether that is allowed."""

    pair: Pair
    difference: LeafDifference
    passes: bool

    @property
    def turned(self) -> bool:
        """Whether the second leaf is like the first with its axes in another order, though the shapes agree.

        A kernel that is transposed by mistake looks like that; where it is none, a rule can say so.
        """
        axes, shape = self.pair.axes, self.difference.shape
        return axes is not None and self.pair.reason != "rule" and tuple(shape[i] for i in axes) == shape


class LeftOut(NamedTuple):
    """A leaf, or a pair of leaves, that could not be compared, and why."""

    name: str
    reason: str


class DiffReport(NamedTuple):
    """What was found about two dumps.

    Attributes:
      rows: every pair that was compared, the worst first.
      only_a, only_b: leaves without a counterpart.
      elements: how many were compared.
      left_out: leaves that could not be: they hold no numbers, or numbers without a common measure.
    """

    rows: tuple[Row, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    elements: int
    left_out: tuple[LeftOut, ...] = ()

    @property
    def passes(self) -> bool:
        """Whether there are leaves, each has been compared with its counterpart, and all are within what is allowed."""
        missing = self.only_a or self.only_b or self.left_out
        return bool(self.rows) and not missing and all(row.passes for row in self.rows)


def diff(
    a: Dump,
    b: Dump,
    *,
    allowed: Allowed = EQUAL_BITS,
    rules: Rules = NO_RULES,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> DiffReport:
    """Compares two dumps leaf by leaf; of a leaf that is not transposed, a piece of a few megabytes is in memory.

    Args:
      a, b: from `gradcombine.verify.dumps.open_dump`.
      allowed: what passes.
      rules: which leaf is which, where names, shapes and values cannot tell.
      progress: called before each leaf, and after the last, with its name, the elements so far and all elements.

    Raises:
      GradCombineError: for damaged files, and rules that do not fit.

    >>> import numpy as np
    >>> from gradcombine.formats import from_array
    >>> def dump(**arrays):
    ...     return {n: from_array("diff", n, x.shape, x.dtype, lambda x=x: x) for n, x in arrays.items()}
    >>> a = dump(kernel=np.float32([[1, 2, 3], [4, 5, 6]]))
    >>> report = diff(a, dump(w=np.float32([[1, 4], [2, 5], [3, 6]])))
    >>> report.passes, report.rows[0].pair.axes
    (True, (1, 0))
    """
    everything = sum(entry.size for entry in a.values())
    matching = match(a, b, rules, lambda name: progress(f"matching {name}", 0, everything))
    total, done, rows, left_out = sum(a[pair.a].size for pair in matching.pairs), 0, [], []
    for pair in matching.pairs:
        progress(pair.a, done, total)
        reason = _incomparable(a[pair.a], b[pair.b])
        if reason:
            left_out.append(LeftOut(_name(pair), reason))
        else:
            difference = _measured(a[pair.a], b[pair.b], pair)
            rows.append(Row(pair, difference, allowed.passes(difference)))
            done += a[pair.a].size
    progress("", done, total)
    only_a, only_b = (
        tuple(name for name in names if not dump[name].unread)
        for dump, names in ((a, matching.only_a), (b, matching.only_b))
    )
    for side, dump, names in (("A", a, matching.only_a), ("B", b, matching.only_b)):
        left_out += [LeftOut(name, f"{side}: {dump[name].unread}") for name in names if dump[name].unread]
    rows.sort(key=lambda row: (row.passes, *badness(row.difference)))
    return DiffReport(tuple(rows), only_a, only_b, done, tuple(left_out))


def _name(pair: Pair) -> str:
    return pair.a if pair.a == pair.b else f"{pair.a} = {pair.b}"


def _incomparable(a: Entry, b: Entry) -> str:
    """Why two leaves cannot be compared; empty if they can."""
    unread = [f"{side}: {entry.unread}" for side, entry in (("A", a), ("B", b)) if entry.unread]
    if unread:
        return "; ".join(unread)
    return "" if comparable(a.dtype, b.dtype) else f"{a.dtype} against {b.dtype}: no common measure"


def _measured(a: Entry, b: Entry, pair: Pair) -> LeafDifference:
    meter = Meter(_name(pair), a.shape, a.dtype, b.dtype)
    if pair.axes is None:
        for left, right in _in_step(a.pieces(), b.pieces()):
            meter.add(left, right)
    else:
        meter.add(a.whole(), b.whole().transpose(pair.axes))
    return meter.result()


def _in_step(a: Iterator[np.ndarray], b: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pieces of both, cut to equal lengths."""
    left, right = (np.empty(0), np.empty(0))
    while True:
        left = next(a, left) if left.size == 0 else left
        right = next(b, right) if right.size == 0 else right
        size = min(left.size, right.size)
        if size == 0:
            return
        yield left[:size], right[:size]
        left, right = left[size:], right[size:]
