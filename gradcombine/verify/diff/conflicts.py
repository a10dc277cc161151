"""Leaves whose names and values disagree about their counterpart, or that have none but are equal to another leaf."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice, permutations, product
from typing import TypeAlias

from gradcombine.formats import Entry
from gradcombine.verify.diff.dumps import Dump
from gradcombine.verify.diff.mapping import Pair, canonical, roles
from gradcombine.verify.diff.similarity import MAX_SIZE, align, orders

Ranks: TypeAlias = tuple[int, ...]
Words: TypeAlias = tuple[tuple[str, ...], ...]

UPSAMPLES = "transpos", "tconv", "convt", "deconv", "up", "dec", "unpool"
"""Beginnings of the words in names of modules that increase the resolution, such as transposed convolutions."""

PROJECTIONS = "query", "key", "value"
"""Modules of an attention that have these names, or synonyms, almost everywhere."""

EQUAL = 1e-12
"""Distance of a cosine from 1, up to which leaves are equal up to roundings to float32."""

MOST = 3
"""Most numbers in a name whose order is not known, as of experts in layers or of layers in experts."""


def crossed(a: Dump, b: Dump, pairs: Iterable[Pair]) -> Iterator[tuple[str, str, str]]:
    """Yields pairs matched by values that contradict their names, and the leaf of B that the names imply.

    Names that differ only in their numbers on either side, such as those of layers, imply the order of the numbers, or
    the reverse order of three or more, as of decoders. Modules of equal names in layers of equal names imply each
    other, and so do the query, key and value of an attention. Leaves of one module imply that their counterparts are in
    one module, too, and those of most layers say which modules correspond. Leaves that are equal may be exchanged.
    """
    by_words: defaultdict[object, list[Pair]] = defaultdict(list)
    by_module: defaultdict[object, list[Pair]] = defaultdict(list)
    pairs = [pair for pair in pairs if a[pair.a].size <= MAX_SIZE]
    for pair in pairs:
        if pair.reason not in ("shape", "values", "similar name"):
            continue
        shapes = a[pair.a].shape, b[pair.b].shape
        by_words[(shapes, *map(_words, pair[:2]))].append(pair)
        by_module[(shapes, *(_module(name)[1] for name in pair[:2]))].append(pair)
    if not by_words:
        return
    for group in by_words.values():
        left, right = _ranks([pair.a for pair in group]), _ranks([pair.b for pair in group])
        if not _have_one_order(left, right, any(upsamples(name) for pair in group for name in pair[:2])):
            by_a, by_b = (sorted(range(len(group)), key=ranks.__getitem__) for ranks in (left, right))
            implied = [(group[x], group[y].b) for x, y in zip(by_a, by_b, strict=True)]
            yield from _contradicting(a, b, implied)
    for group in by_module.values():
        named = {_module(pair.b)[0]: pair.b for pair in group}
        if {_module(pair.a)[0] for pair in group} == named.keys() and len(named) == len(group):
            yield from _contradicting(a, b, ((pair, named[_module(pair.a)[0]]) for pair in group))
    by_values = [pair for group in by_words.values() for pair in group]
    for words, margin in ((_words, 1), (_role, 0)):
        yield from _against_others(a, b, by_values, pairs, words, margin)
    yield from _exchanged(a, b, by_values, pairs)


def _against_others(
    a: Dump,
    b: Dump,
    by_values: Sequence[Pair],
    pairs: Sequence[Pair],
    words: Callable[[str], Hashable],
    margin: int,
) -> Iterator[tuple[str, str, str]]:
    """Yields leaves that are exchanged in a few of several layers: in the others, their words have other counterparts.

    If most leaves with the words P are matched with those with the words X, and most with Q with those with Y, a match
    of P and Y and one of Q and X contradict them. "Most" is at least a ``margin`` more.
    """
    counts, groups = Counter[tuple[Hashable, Hashable]](), defaultdict[tuple[Hashable, Hashable], list[Pair]](list)
    counts.update((words(pair.a), words(pair.b)) for pair in pairs)
    ambiguous = Counter(p for p, _ in counts)
    for pair in by_values:
        if ambiguous[words(pair.a)] > 1:
            groups[words(pair.a), words(pair.b)].append(pair)
    for ((p, y), group), ((q, x), others) in permutations(groups.items(), 2):
        if p != q and x != y and min(counts[p, x], counts[q, y]) >= max(counts[p, y], counts[q, x]) + margin:
            fitting = ((one, two.b) for one, two in product(group, others) if a[one.a].shape == a[two.a].shape)
            yield from _contradicting(a, b, islice(fitting, 1))


def _exchanged(a: Dump, b: Dump, by_values: Sequence[Pair], pairs: Sequence[Pair]) -> Iterator[tuple[str, str, str]]:
    """Yields leaves that are exchanged between two modules while other leaves of these modules are not.

    If the kernels of modules P and Q are matched with those of X and Y, but their biases with those of Y and X, one of
    the two pairs is exchanged: that of which the numbers in the names are not in order, if the others are.
    """
    kinds: defaultdict[object, list[Pair]] = defaultdict(list)
    modules: defaultdict[tuple[str, ...], list[tuple[Pair, bool]]] = defaultdict(list)
    words, known = {pair: (canonical(pair.a), canonical(pair.b)) for pair in pairs}, (roles(a), roles(b))
    parents = {pair: (left[:-1], right[:-1]) for pair, (left, right) in words.items()}
    for pair, sides in words.items():
        kind = (x.get(name, side[-1:]) for x, name, side in zip(known, pair[:2], sides, strict=True))
        kinds[a[pair.a].shape, b[pair.b].shape, *kind].append(pair)
    chosen, groups = set(by_values), [(group, _is_in_order(group)) for group in kinds.values()]
    for group, follows in groups:
        for pair in group:
            modules[parents[pair][0]].append((pair, follows))
    for group, follows in groups:
        back = {parents[pair][1]: pair for pair in group}
        for pair in filter(chosen.__contains__, group):
            for other, other_follows in modules[parents[pair][0]]:
                implied = back.get(parents[other][1], pair)
                if implied is pair or (follows and not other_follows):
                    continue
                others = (x for x, _ in modules[parents[implied][0]] if x is not implied)
                beside = next((x for x in others if parents[x][1] == parents[pair][1]), None)
                if beside is None or not [*_contradicting(a, b, [(other, beside.b)])]:
                    continue
                yield from _contradicting(a, b, [(pair, implied.b)])
                break


def _is_in_order(group: Sequence[Pair]) -> bool:
    """Whether the names differ only in numbers, which increase on both sides together."""
    sides = [pair.a for pair in group], [pair.b for pair in group]
    if any(len(set(map(_words, names))) > 1 for names in sides):
        return False
    left, right = map(_ranks, sides)
    return next(_orders(left, False)) == next(_orders(right, False))


def _have_one_order(left: Sequence[Ranks], right: Sequence[Ranks], decreases: bool) -> bool:
    """Whether pairs have the same order on both sides, for some order of their numbers.

    Args:
      decreases: whether two numbers may decrease, too, as three or more may.
    """
    orders = _orders(left, decreases), _orders(right, decreases)
    first = next(orders[0]), next(orders[1])
    return first[0] == first[1] or not {first[0], *orders[0]}.isdisjoint({first[1], *orders[1]})


def _orders(ranks: Sequence[Ranks], decreases: bool) -> Iterator[tuple[int, ...]]:
    """Yields the possible orders of names by the ranks of their numbers; first that of the paths."""
    columns = [*zip(*ranks, strict=True)]
    signs = [(1, -1) if max(column) >= 2 or decreases else (1,) for column in columns]
    for positions in permutations(range(len(columns))) if len(columns) <= MOST else [range(len(columns))]:
        for chosen in product(*(signs[i] for i in positions)) if len(columns) <= MOST else [(1,) * len(columns)]:
            keys = [tuple(sign * rank[i] for i, sign in zip(positions, chosen, strict=True)) for rank in ranks]
            yield tuple(sorted(range(len(keys)), key=keys.__getitem__))


def _ranks(names: Sequence[str]) -> list[Ranks]:
    """The ranks of the numbers in each part of the names in which they differ; a part without a number is first."""
    columns = [*zip(*([numbers for _, numbers in _numbered(name)] for name in names), strict=True)]
    ranks = [{x: i for i, x in enumerate(sorted(set(column)))} for column in columns]
    differing = [[each[x] for x in column] for column, each in zip(columns, ranks, strict=True) if len(each) > 1]
    return [*zip(*differing, strict=True)] if differing else [()] * len(names)


def _role(name: str) -> str:
    """The module of `PROJECTIONS` that a leaf belongs to; empty for others."""
    module, _ = _module(name)
    return module if module in PROJECTIONS else ""


def _words(name: str) -> Words:
    return tuple(words for words, _ in _numbered(name))


def _numbered(name: str) -> list[tuple[tuple[str, ...], tuple[tuple[int, str], ...]]]:
    """The words and the numbers of each part of a path; numbers as their lengths and digits, which may be thousands."""
    parts: list[list[str]] = [re.findall(r"[a-z]+|\d+", part) for part in _segments(name)]
    words = (tuple(x for x in part if not x.isdecimal()) for part in parts)
    digits = ([x.lstrip("0") for x in part if x.isdecimal()] for part in parts)
    numbers = (tuple((len(x), x) for x in part) for part in digits)
    return [*zip(words, numbers, strict=True)]


def upsamples(name: str) -> bool:
    """Whether a name has a word of `UPSAMPLES`."""
    return any(word.startswith(UPSAMPLES) for word in canonical(name))


def _contradicting(a: Dump, b: Dump, implied: Iterable[tuple[Pair, str]]) -> Iterator[tuple[str, str, str]]:
    """Yields the pairs whose leaf of A differs clearly more from the implied leaf than from its match.

    Scales near 1 have a cosine near 1 with each other, so that a constant limit does not tell them apart.
    """
    for pair, other in implied:
        left = a[pair.a]
        if other == pair.b:
            continue
        if not orders(left.shape, b[other].shape) or (
            1 - align(left, b[other]).cosine > 16 * (1 - align(left, b[pair.b]).cosine) + EQUAL
        ):
            yield pair.a, pair.b, other


def _segments(name: str) -> list[str]:
    return [x for x in re.split(r"[^A-Za-z0-9_]+", name.lower()) if x not in ("", "value")]


def _module(name: str) -> tuple[str, tuple[str, ...]]:
    """The name of a leaf's module and the rest of the name: "query" and ("0", "kernel") of "layers.0.q_proj.weight"."""
    words, segments = canonical(name), _segments(name)
    last = max((i for i, word in enumerate(words) if word in PROJECTIONS), default=None)
    if last is not None:
        return words[last], (*words[:last], *words[last + 1 :])
    return next(iter(segments[-2:-1]), ""), (*segments[:-2], *segments[-1:])


def tied(dump: Dump, unmatched: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Unmatched leaves that have the bits of a matched one, such as output weights tied to an embedding."""
    rest = set(unmatched)
    types = {(dump[name].shape, dump[name].dtype) for name in unmatched if dump[name].size > 1}
    matched: dict[tuple[object, ...], str] = {}
    for name, leaf in dump.items():
        if name not in rest and (leaf.shape, leaf.dtype) in types and not leaf.unread:
            matched.setdefault(_bits_of(leaf), name)
    for name in unmatched if matched else ():
        if dump[name].size > 1 and (twin := matched.get(_bits_of(dump[name]))) is not None:
            yield name, twin


def _bits_of(leaf: Entry) -> tuple[object, ...]:
    """Shape, dtype and SHA-256 of a leaf."""
    digest = hashlib.sha256()
    for piece in leaf.pieces():
        digest.update(piece.tobytes())
    return leaf.shape, leaf.dtype, digest.digest()
