"""Leaves whose names and values disagree about their counterpart, or that have none but are equal to another leaf."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product
from typing import TypeAlias

from gradcombine.verify.diff.dumps import Dump, Entry
from gradcombine.verify.diff.mapping import Pair, canonical
from gradcombine.verify.diff.similarity import CERTAIN, MAX_SIZE, align

Ranks: TypeAlias = tuple[int, ...]

UPSAMPLES = "transpos", "tconv", "convt", "deconv", "up", "dec", "unpool"
"""Beginnings of the words in names of modules that increase the resolution, such as transposed convolutions."""

MOST = 3
"""Most numbers in a name whose order is not known, as of experts in layers or of layers in experts."""


def crossed(a: Dump, b: Dump, pairs: Iterable[Pair]) -> Iterator[tuple[str, str, str]]:
    """Yields pairs matched by values that contradict their names, and the leaf of B that the names imply.

    Names that differ only in their numbers on either side, such as those of layers, imply the order of the numbers, or
    the reverse order of three or more, as of decoders. Modules of equal names in layers of equal names imply each
    other. Leaves that are equal may be exchanged.
    """
    by_words: defaultdict[object, list[Pair]] = defaultdict(list)
    by_module: defaultdict[object, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.reason not in ("values", "similar name") or a[pair.a].size > MAX_SIZE or a[pair.a].unread:
            continue
        shapes = a[pair.a].shape, b[pair.b].shape
        by_words[(shapes, *(tuple(words for words, _ in _numbered(name)) for name in pair[:2]))].append(pair)
        by_module[(shapes, *(_around_module(name) for name in pair[:2]))].append(pair)
    for group in by_words.values():
        left, right = _ranks([pair.a for pair in group]), _ranks([pair.b for pair in group])
        if not _have_one_order(left, right, any(upsamples(name) for pair in group for name in pair[:2])):
            by_a, by_b = (sorted(range(len(group)), key=ranks.__getitem__) for ranks in (left, right))
            implied = [(group[x], group[y].b) for x, y in zip(by_a, by_b, strict=True)]
            yield from _contradicting(a, b, implied)
    for group in by_module.values():
        named = {_module(pair.b): pair.b for pair in group}
        if {_module(pair.a) for pair in group} == named.keys() and len(named) == len(group):
            yield from _contradicting(a, b, ((pair, named[_module(pair.a)]) for pair in group))


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


def _numbered(name: str) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The words and the numbers of each part of a path."""
    parts: list[list[str]] = [re.findall(r"[a-z]+|\d+", part) for part in _segments(name)]
    words = (tuple(x for x in part if not x.isdecimal()) for part in parts)
    numbers = (tuple(int(x) for x in part if x.isdecimal()) for part in parts)
    return [*zip(words, numbers, strict=True)]


def upsamples(name: str) -> bool:
    """Whether a name has a word of `UPSAMPLES`."""
    return any(word.startswith(UPSAMPLES) for word in canonical(name))


def _contradicting(a: Dump, b: Dump, implied: Iterable[tuple[Pair, str]]) -> Iterator[tuple[str, str, str]]:
    for pair, other in implied:
        if other != pair.b and align(a[pair.a], b[other]).cosine < CERTAIN:
            yield pair.a, pair.b, other


def _segments(name: str) -> list[str]:
    return [x for x in re.split(r"[^A-Za-z0-9_]+", name.lower()) if x not in ("", "value")]


def _module(name: str) -> str:
    """The name of a leaf's module: "q_proj" of "layers.0.q_proj.weight"."""
    return next(iter(_segments(name)[-2:-1]), "")


def _around_module(name: str) -> tuple[str, ...]:
    """A name without its `_module`."""
    segments = _segments(name)
    return *segments[:-2], *segments[-1:]


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
