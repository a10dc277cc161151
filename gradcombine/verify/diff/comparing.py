"""Comparison of two dumps, leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gradcombine.errors import invalid, operation, require_integer, require_number, shown
from gradcombine.formats import Entry
from gradcombine.verify.compare.meter import LeafDifference, Meter
from gradcombine.verify.compare.reference import Errors, Judgement, errors, judge, require_roundings, unfit
from gradcombine.verify.compare.ulp import comparable
from gradcombine.verify.diff.common_layout import common
from gradcombine.verify.diff.conflicts import crossed, tied, upsamples
from gradcombine.verify.diff.dumps import Dump, require_dump
from gradcombine.verify.diff.mapping import Pair, conventional_axes, flipped, last_word, match, with_flipped, words_of
from gradcombine.verify.diff.rules import NO_RULES, Rules
from gradcombine.verify.diff.similarity import ALIKE, are_alike, closest


class Allowed(NamedTuple):
    """The largest allowed difference between two leaves. Without limits, only equal bits and dtypes pass.

    Attributes:
      ulp: the largest distance, in units in the last place.
      relative: the largest difference, relative to the largest magnitude in the second leaf.
      absolute: the largest difference in the unit of the leaf, for gradients that are 0 in exact arithmetic, such as
        that of a bias before a normalization.
    """

    ulp: int | None = None
    relative: float | None = None
    absolute: float | None = None

    def passes(self, difference: LeafDifference) -> bool:
        """Whether a leaf is within at least one limit."""
        if self == EQUAL_BITS:
            return difference.equal_bits and difference.same_dtype
        limits = (difference.relative, self.relative), (difference.absolute, self.absolute)
        close = any(limit is not None and found <= limit for found, limit in limits) and difference.same_specials
        return close or (self.ulp is not None and difference.max_ulp <= self.ulp)


EQUAL_BITS = Allowed()


def require_allowed(allowed: object) -> None:
    """Raises for anything but an `Allowed` with valid limits."""
    if not isinstance(allowed, Allowed):
        raise invalid("Allowed(ulp, relative, absolute)", shown(allowed))
    if allowed.ulp is not None:
        require_integer("an ulp of 0 or more", allowed.ulp, 0, 2**64)
    for kind, limit in (("a relative", allowed.relative), ("an absolute", allowed.absolute)):
        if limit is not None and limit != math.inf:
            require_number(f"{kind} difference of 0 or more", limit, 0)


def require_rules(rules: object) -> None:
    """Raises unless ``rules`` are `Rules`."""
    if not isinstance(rules, Rules):
        raise invalid("rules, as read_rules returns them", shown(rules))


class Row(NamedTuple):
    """A pair of leaves: how they were matched, their difference, whether it passes, and which side is off."""

    pair: Pair
    difference: LeafDifference
    passes: bool
    judgement: Judgement | None = None
    reshaped: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The shapes of both leaves in their files, if axes of one were merged, or left out, for the comparison."""
    unlike_others: bool = False
    """Whether a square kernel follows its name, although no other kernel does, as in GPT-2."""

    @property
    def transposed(self) -> bool:
        """Whether the leaves agree only with their axes in a different order than shapes and names imply.

        Typical of a kernel that was transposed by mistake, or should have been and was not. Not so if a rule gives the
        order, or the names do: a PyTorch ``weight`` and a flax or Keras ``kernel`` have different orders.
        """
        axes, shape = self.pair.axes, self.difference.shape
        if self.unlike_others:
            return True
        if self.pair.reason == "rule" or self.pair.reason.startswith("gates") or self.pair.flipped:
            return False
        if len(shape) < 2 or not words_of(self.pair) <= {"kernel", "weight"}:
            return axes is not None and tuple(shape[i] for i in axes) == shape
        if (expected := self.conventional) is None:
            return self.difference.cosine >= ALIKE
        # The position of axes of length 1 does not matter.
        orders = expected, axes or tuple(range(len(shape)))
        conventional, found = ([i for i, n in zip(order, shape, strict=True) if n != 1] for order in orders)
        return conventional != found and self.difference.cosine >= ALIKE

    @property
    def conventional(self) -> tuple[int, ...] | None:
        """The order of the second leaf's axes that the names imply, if it gives the shape of the first leaf."""
        shape = self.difference.shape
        actual = self.pair.axes or tuple(range(len(shape)))
        second = tuple(shape[actual.index(i)] for i in range(len(shape)))
        return conventional_axes(self.pair, shape, second) if len(shape) > 1 else None


class LeftOut(NamedTuple):
    """A leaf or pair of leaves that could not be compared, and the reason."""

    name: str
    reason: str


class DiffReport(NamedTuple):
    """The differences between two dumps, leaf by leaf.

    Attributes:
      rows: all compared pairs, worst first.
      only_a, only_b: leaves without a counterpart.
      elements: the number of compared elements.
      left_out: leaves that could not be compared, since they contain no numbers or have incompatible dtypes.
      mixed_up: leaves of A that have no counterpart or do not resemble it, each with the leaf of B that it does
        resemble, as if names were swapped.
      tied: leaves without a counterpart that have the bits of another leaf on the same side, each with that leaf.
      crossed: pairs matched by values that fail because their names imply another pair, with that leaf of B.
    """

    rows: tuple[Row, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    elements: int
    left_out: tuple[LeftOut, ...] = ()
    mixed_up: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    crossed: tuple[tuple[str, str, str], ...] = ()

    @property
    def passes(self) -> bool:
        """Whether there are leaves, and all were compared with their counterparts and pass."""
        missing = self.only_a or self.only_b or self.left_out
        return bool(self.rows) and not missing and all(row.passes for row in self.rows)


@operation("diff")
def diff(
    a: Dump,
    b: Dump,
    *,
    allowed: Allowed = EQUAL_BITS,
    rules: Rules = NO_RULES,
    reference: Dump | None = None,
    roundings: float | None = None,
    gradients: bool | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> DiffReport:
    """Compares two dumps leaf by leaf, in chunks; only leaves that may be transposed are loaded entirely.

    Args:
      a, b: from `gradcombine.verify.diff.dumps.open_dump`.
      allowed: the largest allowed difference. A kernel whose axes could have the order that its name implies, but have
        another, fails in any case if only spatial axes are swapped, or if the other kernels follow their names; one
        that has this order fails if its shape also allows another, and no other kernel follows its name.
      rules: which leaves correspond, where names, shapes and values do not decide.
      reference: the same leaves in float64, to find out which side is off (`gradcombine.verify.compare.reference`).
        A leaf then passes if both sides are within their rounding noise, regardless of ``allowed``; leaves missing from
        the reference are left out.
      roundings: with a reference, the number of successive roundings in the noise; None to estimate it.
      gradients: whether the dumps contain gradients rather than values. Where two biases on one side are one on the
        other, the values of the two add up to the value of the one, but each has the gradient of the one. None to
        decide by names (``gradients/...``) and by biases that differ; biases are left out if neither decides.
      progress: called before each leaf and after the last, with its name, the compared elements and their total.

    Raises:
      GradCombineError: for other arguments, damaged files, and rules that do not fit.

    >>> import numpy as np
    >>> from gradcombine.formats import from_array
    >>> def dump(**arrays):
    ...     return {n: from_array(n, x.shape, x.dtype, lambda x=x: x) for n, x in arrays.items()}
    >>> a = dump(kernel=np.float32([[1, 2, 3], [4, 5, 6]]))
    >>> report = diff(a, dump(w=np.float32([[1, 4], [2, 5], [3, 6]])))
    >>> report.passes, report.rows[0].pair.axes
    (True, (1, 0))
    """
    require_allowed(allowed)
    require_rules(rules)
    if roundings is not None:
        require_roundings(roundings, reference)
    for dump in (a, b, reference or {}):
        require_dump(dump)
    originals = a, b
    ruled = {rule[1] for rule in map(rules.find, a) if rule is not None}

    def fixed(name: str) -> bool:
        return name in ruled or rules.find(name) is not None or rules.ignores(name)

    named_as_b = reference is not None and sum(name in b for name in reference) > sum(name in a for name in reference)
    if reference is not None:  # in the layout of the side whose names it uses
        sides = (a, reference) if named_as_b else (reference, b)
        first, second, _ = common(*sides, fixed, gradients)
        reference = second if named_as_b else first
    a, b, known = common(a, b, fixed, gradients)
    elements = sum(entry.size for entry in a.values())
    matching = with_flipped(a, b, match(a, b, rules, lambda name: progress(f"matching {name}", 0, elements), known))
    total, done = sum(a[pair.a].size for pair in matching.pairs), 0
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for pair in matching.pairs:
        progress(pair.a, done, total)
        reason = _incomparable(a[pair.a], b[pair.b])
        if reason:
            left_out.append(LeftOut(_name(pair), reason))
        else:
            difference = _measured(a[pair.a], b[pair.b], pair)
            if difference.cosine < ALIKE and (convolution := flipped(a, b, pair)) is not None:
                pair, difference = convolution, _measured(a[pair.a], b[pair.b], convolution)
            reshaped = None  # also for parts and sums of leaves, which have no shape in the files
            if pair.a in originals[0] and pair.b in originals[1]:
                shapes = originals[0][pair.a].shape, originals[1][pair.b].shape
                reshaped = None if shapes == (a[pair.a].shape, b[pair.b].shape) else shapes
            rows.append(Row(pair, difference, allowed.passes(difference), reshaped=reshaped))
            done += a[pair.a].size
    progress("", done, total)
    only_a, only_b = (
        tuple(name for name in names if not dump[name].unread)
        for dump, names in ((a, matching.only_a), (b, matching.only_b))
    )
    for side, dump, names in (("A", a, matching.only_a), ("B", b, matching.only_b)):
        left_out += [LeftOut(name, f"{side}: {dump[name].unread}") for name in names if dump[name].unread]
    if reference is not None:
        rows, unjudged = _judged(rows, a, b, reference, roundings, named_as_b)
        left_out += unjudged
    follow, contradicting = _follow_names(rows), tuple(dict.fromkeys(crossed(a, b, (x.pair for x in rows))))
    otherwise = {pair[:2] for pair in contradicting}
    has_flipped = any(row.pair.flipped and not _may_be_depthwise(row) for row in rows)
    for i, row in enumerate(rows):
        transposed = row.transposed and (_swaps_spatial_axes(row) or (follow and _is_ambiguous(row)))
        if follow is False and row.pair.axes == row.conventional is not None and _is_ambiguous(row):
            # A symmetric kernel also agrees with its axes swapped; a rule states the axes.
            transposed = row.pair.reason != "rule" and not are_alike(a[row.pair.a], b[row.pair.b], None)
            rows[i] = row = row._replace(unlike_others=transposed)
        flips = row.pair.flipped and not has_flipped and _may_be_depthwise(row)
        if transposed or flips or row.pair[:2] in otherwise:
            rows[i] = row._replace(passes=False)
    rows.sort(key=lambda row: (row.passes, *row.difference.badness))
    twins, mixed_up = (*tied(a, only_a), *tied(b, only_b)), _mixed_up(a, b, rows, only_a, only_b)
    return DiffReport(tuple(rows), only_a, only_b, done, tuple(left_out), mixed_up, twins, contradicting)


def _follow_names(rows: Sequence[Row]) -> bool | None:
    """Whether all kernels whose shape determines the order of axes follow their names, or any square one if all are.

    Square kernels then have to, too. False if none does, as in GPT-2, where a ``weight`` is laid out like a ``kernel``:
    square ones then must not. None if only some do. Kernels of recurrent cells are found by names that imply a layout.
    """
    alike = (row for row in rows if words_of(row.pair) <= {"kernel", "weight"} and row.difference.cosine >= ALIKE)
    kernels = [row for row in alike if min(row.difference.shape[:2], default=1) > 1 and len(row.difference.shape) > 1]
    follow = [not row.transposed for row in kernels if not _is_ambiguous(row)]
    follow += [True for row in rows if row.pair.reason == "gates" and len(row.difference.shape) > 1]
    if not follow:
        return any(not row.transposed for row in kernels) or None
    return follow[0] if len(set(follow)) == 1 else None


def _swaps_spatial_axes(row: Row) -> bool:
    """Whether a transposed convolution kernel has its spatial axes alone in an order that no framework has."""
    expected, found = row.conventional, row.pair.axes
    if expected is None or found is None or len(found) < 4:
        return False
    channels = slice(-2, None) if _is_kernel(row) else slice(2)
    return expected[channels] == found[channels]


def _may_be_depthwise(row: Row) -> bool:
    """Whether a kernel of a transposed convolution may be one of a depthwise convolution, by its shape and names."""
    shape = row.difference.shape
    outputs, spatial = (shape[-1], shape[:-2]) if _is_kernel(row) else (shape[1], shape[2:])
    return outputs == 1 and all(n % 2 for n in spatial) and not any(map(upsamples, row.pair[:2]))


def _is_kernel(row: Row) -> bool:
    return last_word(row.pair.a) == "kernel"


def _is_ambiguous(row: Row) -> bool:
    """Whether a shape does not determine the order of axes, as for a kernel of equally many inputs and outputs."""
    shape, axes = row.difference.shape, row.pair.axes
    if (axes is not None and tuple(shape[i] for i in axes) == shape) or (
        row.transposed and row.conventional is not None
    ):
        return True
    return len(shape) > 1 and (shape[-1] == shape[-2] if _is_kernel(row) else shape[0] == shape[1])


def _mixed_up(
    a: Dump, b: Dump, rows: list[Row], only_a: Sequence[str], only_b: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """The leaves that do not resemble their counterpart, or have none, with those that they resemble."""
    counterpart = {row.pair.a: row.pair.b for row in rows if not row.passes and not row.difference.cosine >= ALIKE}
    left = {name: a[name] for name in (*counterpart, *only_a)}
    right = {name: b[name] for name in (*counterpart.values(), *only_b)}
    return tuple((x, y) for x, y, _ in closest(left, right) if counterpart.get(x) != y and a[x].size > 1)


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
    for left, right in _of_equal_length(_pieces(a), _pieces(b, pair)):
        meter.add(left, right)
    return meter.result()


def _pieces(entry: Entry, *pairs: Pair) -> Iterator[np.ndarray]:
    """The elements of a leaf in chunks, brought into the order of axes of each pair's first leaf in turn.

    Only transposed leaves are loaded entirely.
    """
    if not any(pair.axes for pair in pairs):
        return entry.pieces()
    array = entry.whole()
    for pair in pairs:
        array = np.flip(array, pair.flipped).transpose(pair.axes or range(array.ndim))
    return iter([array.reshape(-1)])


def _of_equal_length(*sides: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
    """The chunks of all sides, split further to equal lengths."""
    rests = [np.empty(0) for _ in sides]
    while True:
        rests = [next(side, rest) if rest.size == 0 else rest for side, rest in zip(sides, rests, strict=True)]
        size = min(rest.size for rest in rests)
        if size == 0:
            return
        yield tuple(rest[:size] for rest in rests)
        rests = [rest[size:] for rest in rests]


def _judged(
    rows: list[Row], a: Dump, b: Dump, reference: Dump, roundings: float | None, named_as_b: bool
) -> tuple[list[Row], list[LeftOut]]:
    """Judges the rows by the reference, which has the names of A or B; leaves out rows that cannot be judged."""
    base = {row.pair.b: b[row.pair.b] for row in rows} if named_as_b else {row.pair.a: a[row.pair.a] for row in rows}
    references = {pair.a: pair for pair in match(base, reference).pairs}
    judged: list[Row] = []
    measured: list[Errors] = []
    left_out: list[LeftOut] = []
    for row in rows:
        left, right, name = a[row.pair.a], b[row.pair.b], _name(row.pair)
        pair = references.get(row.pair.b if named_as_b else row.pair.a)
        if pair is None:
            left_out.append(LeftOut(name, "not in the reference, or not in this shape"))
            continue
        exact = reference[pair.b]
        problem = exact.unread or unfit(left.dtype, exact.dtype) or unfit(right.dtype, exact.dtype)
        if problem:
            left_out.append(LeftOut(name, f"reference of {exact.dtype}: {problem}"))
            continue
        # The axes of a reference with B's names are brought into B's order, then into A's.
        to_a = (pair, row.pair) if named_as_b else (pair,)

        def pieces(
            row: Row = row, exact: Entry = exact, to_a: tuple[Pair, ...] = to_a
        ) -> Iterator[tuple[np.ndarray, ...]]:
            return _of_equal_length(_pieces(a[row.pair.a]), _pieces(b[row.pair.b], row.pair), _pieces(exact, *to_a))

        judged.append(row)
        measured.append(errors(name, (left.dtype, right.dtype), pieces))
    pairs = zip(judged, judge(measured, roundings), strict=True)
    return [row._replace(judgement=each, passes=each.passes) for row, each in pairs], left_out
