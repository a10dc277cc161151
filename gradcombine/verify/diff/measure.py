"""Measures the pairs of two dumps, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.verify.comparison import LeafDifference, Meter
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

    def passes(self, found: LeafDifference) -> bool:
        """Whether a leaf is within either of the two."""
        if self.ulp is None and self.relative is None:
            return found.equal_bits and found.same_dtype
        close = self.relative is not None and found.relative <= self.relative and _same_specials(found)
        return close or (self.ulp is not None and found.max_ulp <= self.ulp)


EQUAL_BITS = Allowed()


class Row(NamedTuple):
    """One pair of leaves: how it was found, how far apart they are, and whether that is allowed."""

    pair: Pair
    found: LeafDifference
    passes: bool


class DiffReport(NamedTuple):
    """What was found about two dumps.

    Attributes:
      rows: every pair, the worst first.
      only_a, only_b: leaves without a counterpart.
      elements: how many were compared.
    """

    rows: tuple[Row, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    elements: int

    @property
    def passes(self) -> bool:
        return not self.only_a and not self.only_b and all(row.passes for row in self.rows)


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
      GradCombineError: for damaged files, rules that do not fit, and leaves of kinds without a common measure.

    >>> import numpy as np
    >>> from gradcombine.verify.dumps.entry import from_array
    >>> def dump(**arrays):
    ...     return {n: from_array(n, lambda x=x: x, x.shape, x.dtype) for n, x in arrays.items()}
    >>> a = dump(kernel=np.float32([[1, 2, 3], [4, 5, 6]]))
    >>> report = diff(a, dump(w=np.float32([[1, 4], [2, 5], [3, 6]])))
    >>> report.passes, report.rows[0].pair.axes
    (True, (1, 0))
    """
    matching = match(a, b, rules)
    total, done, rows = sum(a[pair.a].size for pair in matching.pairs), 0, []
    for pair in matching.pairs:
        progress(pair.a, done, total)
        found = _measured(a[pair.a], b[pair.b], pair)
        rows.append(Row(pair, found, allowed.passes(found)))
        done += a[pair.a].size
    progress("", done, total)
    rows.sort(key=lambda row: (row.passes, *badness(row.found)))
    return DiffReport(tuple(rows), matching.only_a, matching.only_b, done)


def _measured(a: Entry, b: Entry, pair: Pair) -> LeafDifference:
    name = pair.a if pair.a == pair.b else f"{pair.a} = {pair.b}"
    meter = Meter(name, a.shape, a.dtype, b.dtype)
    try:
        if pair.axes is None:
            for left, right in _in_step(a.pieces(), b.pieces()):
                meter.add(left, right)
        else:
            meter.add(a.whole(), b.whole().transpose(pair.axes))
        return meter.result()
    except GradCombineError:
        raise
    except Exception as error:
        # A damaged file shows as it is read, by a class of its format's own.
        raise GradCombineError("diff", "a leaf that can be read", f"{type(error).__name__}: {error}", name) from error


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


def _same_specials(found: LeafDifference) -> bool:
    """Whether NaN and infinity stand in the same numbers on both sides, which a relative difference leaves out."""
    return found.nans[0] == found.nans[1] and found.infs[0] == found.infs[1] and found.ulp_counts[-1] == 0
