"""Two dumps, or two runs of dumps, against each other: what `gradcombine diff` measures."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gradcombine.errors import invalid, operation, require_integer, require_number, shown
from gradcombine.verify.compare.meter import LeafDifference, Meter
from gradcombine.verify.compare.reference import Errors, Judgement, errors, judge, unfit
from gradcombine.verify.compare.ulp import comparable
from gradcombine.verify.diff.dumps import Dump, Entry
from gradcombine.verify.diff.key_orders import common, conventional_axes, flipped
from gradcombine.verify.diff.mapping import NO_RULES, Matching, Pair, Rules, match, require_rules, words_of
from gradcombine.verify.diff.similarity import ALIKE, closest


class Allowed(NamedTuple):
    """How far apart two leaves may be. With neither, only equal bits and dtypes pass.

    Attributes:
      ulp: the largest distance, in units in the last place.
      relative: the largest difference, over the largest magnitude of the second leaf.
    """

    ulp: int | None = None
    relative: float | None = None

    def passes(self, difference: LeafDifference) -> bool:
        """Whether a leaf is within either allowance."""
        if self.ulp is None and self.relative is None:
            return difference.equal_bits and difference.same_dtype
        close = self.relative is not None and difference.relative <= self.relative and difference.same_specials
        return close or (self.ulp is not None and difference.max_ulp <= self.ulp)


EQUAL_BITS = Allowed()


def require_allowed(allowed: object) -> None:
    """Refuses what is not an `Allowed` of two numbers, or of none."""
    if not isinstance(allowed, Allowed):
        raise invalid("Allowed(ulp, relative)", shown(allowed))
    if allowed.ulp is not None:
        require_integer("an ulp of 0 or more", allowed.ulp, 0, 2**64)
    if allowed.relative is not None and allowed.relative != math.inf:
        require_number("a relative difference of 0 or more", allowed.relative, 0)


class Row(NamedTuple):
    """One pair of leaves: how it was matched, how far apart the two are, whether that is allowed, and which is off."""

    pair: Pair
    difference: LeafDifference
    passes: bool
    judgement: Judgement | None = None
    reshaped: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The shapes of both leaves, where one of them was compared with two axes merged."""

    @property
    def transposed(self) -> bool:
        """Whether the leaves are alike only with their axes in another order than shapes and names say.

        A kernel that is transposed by mistake looks like that, or one that should have been; if it is meant, a rule can
        say so, or the names do: a ``weight`` of PyTorch has the axes of a ``kernel`` of flax or Keras in another order.
        """
        axes, shape = self.pair.axes, self.difference.shape
        if self.pair.reason == "rule" or self.pair.reason.startswith("gates") or self.pair.flipped:
            return False
        received = axes or tuple(range(len(shape)))
        if len(shape) < 2 or not words_of(self.pair) <= {"kernel", "weight"}:
            return axes is not None and tuple(shape[i] for i in axes) == shape
        second = tuple(shape[received.index(i)] for i in range(len(shape)))
        if (right := conventional_axes(self.pair, shape, second)) is None:
            return self.difference.cosine >= ALIKE
        # Axes of one element may be anywhere.
        own, other = ([i for i, n in zip(order, shape, strict=True) if n != 1] for order in (right, received))
        return own != other and self.difference.cosine >= ALIKE


class LeftOut(NamedTuple):
    """A leaf, or a pair of leaves, that could not be compared, and why."""

    name: str
    reason: str


class DiffReport(NamedTuple):
    """How far apart two dumps are, leaf by leaf.

    Attributes:
      rows: every pair that was compared, the worst first.
      only_a, only_b: leaves without a counterpart.
      elements: how many were compared.
      left_out: leaves that could not be compared, since they hold no numbers, or numbers of two kinds.
      mixed_up: leaves of A whose own counterpart is not like them, each with the leaf of B that is: names that were
        swapped, where the shapes fit.
      tied: leaves without a counterpart whose bits are those of another leaf on their side, each with that leaf.
    """

    rows: tuple[Row, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    elements: int
    left_out: tuple[LeftOut, ...] = ()
    mixed_up: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def passes(self) -> bool:
        """Whether there are leaves, each was compared with its counterpart, and all are as near as they have to be."""
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
    """Compares two dumps leaf by leaf; only leaves that may be transposed are loaded whole, others in pieces.

    Args:
      a, b: from `gradcombine.verify.diff.dumps.open_dump`.
      allowed: how far apart leaves may be. A square kernel that is alike in another order of axes than its name's
        convention says does not pass, where the other kernels of the two dumps follow theirs.
      rules: which leaf is which, if names, shapes and values cannot tell.
      reference: the same leaves in float64, which say of each side whether it is off
        (`gradcombine.verify.compare.reference`).
        Then a leaf passes if both sides are within their rounding noise, whatever is allowed; one that the reference
        lacks is left out.
      roundings: how many in a row the noise is that of; None to estimate.
      gradients: whether the dumps hold gradients, not values: of two biases that are one on the other side each has the
        gradient of that one, and their values add up to its. None to tell by the names (``gradients/...``), and by
        biases that differ; where neither tells, these are left out.
      progress: called before each leaf, and after the last, with its name, the elements so far and all elements.

    Raises:
      GradCombineError: for damaged files, and rules that do not fit.

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
    given = a, b
    ruled = {found[1] for found in map(rules.find, a) if found is not None}

    def fixed(name: str) -> bool:
        return name in ruled or rules.find(name) is not None or rules.ignores(name)

    named_as_b = reference is not None and sum(name in b for name in reference) > sum(name in a for name in reference)
    if reference is not None:  # laid out as the side that it is named as
        sides = (a, reference) if named_as_b else (reference, b)
        first, second, _ = common(*sides, fixed, gradients)
        reference = second if named_as_b else first
    a, b, known = common(a, b, fixed, gradients)
    everything = sum(entry.size for entry in a.values())
    matching = _with_flipped(a, b, match(a, b, rules, lambda name: progress(f"matching {name}", 0, everything), known))
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
            if difference.cosine < ALIKE and (turned := flipped(a, b, pair)) is not None:
                pair, difference = turned, _measured(a[pair.a], b[pair.b], turned)
            reshaped = None  # halves that were joined have no shape in their own files
            if pair.a in given[0] and pair.b in given[1]:
                shapes = given[0][pair.a].shape, given[1][pair.b].shape
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
    if _follow_names(rows):
        rows = [row._replace(passes=False) if row.transposed and _is_square(row) else row for row in rows]
    rows.sort(key=lambda row: (row.passes, *row.difference.badness))
    tied = (*_tied(a, only_a), *_tied(b, only_b))
    return DiffReport(tuple(rows), only_a, only_b, done, tuple(left_out), _mixed_up(a, b, rows), tied)


def _follow_names(rows: Sequence[Row]) -> bool:
    """Whether kernels whose shapes tell their order of axes have that of their names: all, and one at least.

    Then the names decide of square ones as well. (GPT-2's ``weight`` is laid out as a ``kernel``, and none decides.)
    """
    alike = (row for row in rows if words_of(row.pair) <= {"kernel", "weight"} and row.difference.cosine >= ALIKE)
    told = [not row.transposed for row in alike if len(row.difference.shape) > 1 and not _is_square(row)]
    return bool(told) and all(told)


def _is_square(row: Row) -> bool:
    """Whether a kernel has as many inputs as outputs, so that its shape does not tell the order of its axes."""
    shape = row.difference.shape
    is_kernel = row.pair.a.removesuffix("/value").endswith("kernel")
    return len(shape) > 1 and (shape[-1] == shape[-2] if is_kernel else shape[0] == shape[1])


def _tied(dump: Dump, alone: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Leaves without a counterpart that have the bits of another leaf, such as an embedding that is the last layer."""
    lonely = set(alone)
    forms = {(dump[name].shape, dump[name].dtype) for name in alone if dump[name].size > 1}
    twins: dict[tuple[object, ...], str] = {}
    for name, leaf in dump.items():
        if name not in lonely and (leaf.shape, leaf.dtype) in forms and not leaf.unread:
            twins.setdefault(_bits_of(leaf), name)
    for name in alone if twins else ():
        if dump[name].size > 1 and (twin := twins.get(_bits_of(dump[name]))) is not None:
            yield name, twin


def _bits_of(leaf: Entry) -> tuple[object, ...]:
    """Shape, dtype and a digest of the bits of a leaf, which is read once."""
    digest = hashlib.sha256()
    for piece in leaf.pieces():
        digest.update(piece.tobytes())
    return leaf.shape, leaf.dtype, digest.digest()


TRIED = 64
"""How many leaves of a shape are tried as the transposed convolution of another one."""


def _with_flipped(a: Dump, b: Dump, matching: Matching) -> Matching:
    """With the transposed convolutions among the leaves that are left."""
    pairs, rest = list(matching.pairs), dict.fromkeys(matching.only_b)
    by_shape: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in rest:
        by_shape[tuple(sorted(b[name].shape))].append(name)
    for x in matching.only_a:
        same = by_shape[tuple(sorted(a[x].shape))] if len(a[x].shape) > 2 else []  # a convolution has no fewer axes
        found = (flipped(a, b, Pair(x, y, None, "values")) for y in same[:TRIED])
        pair = next(filter(None, found), None)
        if pair is not None:
            pairs.append(pair)
            same.remove(pair.b)
            rest.pop(pair.b)
    taken = {pair.a for pair in pairs}
    return Matching(tuple(pairs), tuple(x for x in matching.only_a if x not in taken), tuple(rest))


def _mixed_up(a: Dump, b: Dump, rows: list[Row]) -> tuple[tuple[str, str], ...]:
    unlike = [row.pair for row in rows if not row.passes and not row.difference.cosine >= ALIKE]
    left, right = {pair.a: a[pair.a] for pair in unlike}, {pair.b: b[pair.b] for pair in unlike}
    own = {pair.a: pair.b for pair in unlike}
    return tuple((x, y) for x, y, _ in closest(left, right) if own[x] != y and a[x].size > 1)


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
    for left, right in _in_step(_pieces(a), _pieces(b, pair)):
        meter.add(left, right)
    return meter.result()


def _pieces(entry: Entry, *pairs: Pair) -> Iterator[np.ndarray]:
    """The elements of the second leaf of a pair as the first has them, by one pair after another.

    Only one that is transposed is loaded whole.
    """
    if not any(pair.axes for pair in pairs):
        return entry.pieces()
    whole = entry.whole()
    for pair in pairs:
        whole = np.flip(whole, pair.flipped).transpose(pair.axes or range(whole.ndim))
    return iter([whole.reshape(-1)])


def _in_step(*sides: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
    """The pieces of all sides, cut to equal lengths."""
    held = [np.empty(0) for _ in sides]
    while True:
        held = [next(side, left) if left.size == 0 else left for side, left in zip(sides, held, strict=True)]
        size = min(left.size for left in held)
        if size == 0:
            return
        yield tuple(left[:size] for left in held)
        held = [left[size:] for left in held]


def _judged(
    rows: list[Row], a: Dump, b: Dump, reference: Dump, roundings: float | None, named_as_b: bool
) -> tuple[list[Row], list[LeftOut]]:
    """The rows with their judgements; those without are left out. The reference is named as one of the sides is."""
    base = {row.pair.b: b[row.pair.b] for row in rows} if named_as_b else {row.pair.a: a[row.pair.a] for row in rows}
    found = {pair.a: pair for pair in match(base, reference).pairs}
    measured: dict[str, Errors] = {}
    left_out: list[LeftOut] = []
    for row in rows:
        left, right, name = a[row.pair.a], b[row.pair.b], _name(row.pair)
        pair = found.get(row.pair.b if named_as_b else row.pair.a)
        if pair is None:
            left_out.append(LeftOut(name, "not in the reference, or not in this shape"))
            continue
        exact = reference[pair.b]
        problem = exact.unread or unfit(left.dtype, exact.dtype) or unfit(right.dtype, exact.dtype)
        if problem:
            left_out.append(LeftOut(name, f"reference of {exact.dtype}: {problem}"))
            continue
        # Of a reference that is named as B is, the axes are brought into the order of B, then into that of A.
        ways = (pair, row.pair) if named_as_b else (pair,)

        def pieces(
            row: Row = row, exact: Entry = exact, ways: tuple[Pair, ...] = ways
        ) -> Iterator[tuple[np.ndarray, ...]]:
            return _in_step(_pieces(a[row.pair.a]), _pieces(b[row.pair.b], row.pair), _pieces(exact, *ways))

        measured[name] = errors(name, (left.dtype, right.dtype), pieces)
    judgements = {each.name: each for each in judge(list(measured.values()), roundings)}
    pairs = ((row, judgements[_name(row.pair)]) for row in rows if _name(row.pair) in judgements)
    return [row._replace(judgement=each, passes=each.passes) for row, each in pairs], left_out
