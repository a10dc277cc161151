"""Leaves whose names and values disagree about their counterpart, or that have none but are equal to another leaf."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from gradcombine.verify.diff.dumps import Dump, Entry
from gradcombine.verify.diff.mapping import Pair, canonical
from gradcombine.verify.diff.similarity import CERTAIN, MAX_SIZE, align


def crossed(a: Dump, b: Dump, pairs: Iterable[Pair]) -> Iterator[tuple[str, str, str]]:
    """Yields pairs matched by values that contradict their names, and the leaf of B that the names imply.

    Names that differ only in their numbers on either side, such as those of layers, imply the order of the numbers.
    Modules of equal names in layers of equal numbers imply each other. Leaves that are equal may be exchanged.
    """
    by_numbers: defaultdict[object, list[Pair]] = defaultdict(list)
    by_module: defaultdict[object, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.reason not in ("values", "similar name") or a[pair.a].size > MAX_SIZE or a[pair.a].unread:
            continue
        shapes = a[pair.a].shape, b[pair.b].shape
        by_numbers[(shapes, *(tuple(_parts(name)[0]) for name in pair[:2]))].append(pair)
        by_module[(shapes, *(_around_module(name) for name in pair[:2]))].append(pair)
    for group in by_numbers.values():
        left = sorted(group, key=lambda pair: _parts(pair.a)[1])
        right = sorted(group, key=lambda pair: _parts(pair.b)[1])
        yield from _contradicting(a, b, ((x, y.b) for x, y in zip(left, right, strict=True)))
    for group in by_module.values():
        named = {_module(pair.b): pair.b for pair in group}
        if {_module(pair.a) for pair in group} == named.keys() and len(named) == len(group):
            yield from _contradicting(a, b, ((pair, named[_module(pair.a)]) for pair in group))


def _contradicting(a: Dump, b: Dump, implied: Iterable[tuple[Pair, str]]) -> Iterator[tuple[str, str, str]]:
    for pair, other in implied:
        if other != pair.b and align(a[pair.a], b[other]).cosine < CERTAIN:
            yield pair.a, pair.b, other


def _parts(name: str) -> tuple[list[str], list[int]]:
    """The words and the numbers of a name."""
    words = canonical(name)
    return [x for x in words if not x.isdecimal()], [int(x) for x in words if x.isdecimal()]


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
