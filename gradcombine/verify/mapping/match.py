"""Pairs of leaves: by rule, by name, by shape, by values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from gradcombine.errors import GradCombineError
from gradcombine.verify.dumps import Dump
from gradcombine.verify.mapping import alignment
from gradcombine.verify.mapping.alignment import Axes
from gradcombine.verify.mapping.closest import closest
from gradcombine.verify.mapping.rules import NO_RULES, Rules

WRAPPERS = frozenset(
    (
        *("params", "param", "parameters", "weights", "vars", "variables", "value", "values", "trainable"),
        *("model", "module", "layers", "optimizer", "opt", "state", "dict", "raw", "target", "item"),
    )
)
"""Words that say nothing about which leaf it is."""

SYNONYMS = {
    "w": "kernel",
    "weight": "kernel",
    "embeddings": "kernel",
    "embedding": "kernel",
    "depthwise": "kernel",
    "b": "bias",
    "beta": "bias",
    "gamma": "scale",
    "moving": "running",
    "variance": "var",
}


class Pair(NamedTuple):
    """Two leaves that are the same one.

    Attributes:
      a, b: their names.
      axes: the order of b's axes that gives a; None where they are in a's order.
      reason: how the pair was found: ``"rule"`` (``"rule, axes by values"``), ``"name"``, ``"similar name"``,
        ``"shape"`` or ``"values"``.
    """

    a: str
    b: str
    axes: Axes | None
    reason: str


class Matching(NamedTuple):
    """All pairs, and the leaves without a counterpart."""

    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def match(a: Dump, b: Dump, rules: Rules = NO_RULES, reading: Callable[[str], None] = lambda name: None) -> Matching:
    """Pairs the leaves of two dumps.

    In this order, each step for what those before have left over: the rules; equal names; names that differ only in
    their framework's conventions (`canonical`), if only one leaf of each dump has such a name; shapes, transposed
    or not, that only one leaf of each dump has; values, the closest first. Where two leaves may be transposed, the
    values tell. A leaf that cannot be read has a counterpart by rule or by name alone.

    Args:
      a, b: the dumps.
      rules: what is known beforehand.
      reading: called with the name of each leaf before its values are read.

    Raises:
      GradCombineError: for a rule that names a leaf that is not there, or of another shape.
    """
    pairs: list[Pair] = []
    rest_a, rest_b = dict(a), {name: entry for name, entry in b.items() if not rules.ignores(name)}

    def pair(left: str, right: str, reason: str, axes: Axes | None = None) -> None:
        pairs.append(Pair(left, right, axes, reason))
        rest_a.pop(left)
        rest_b.pop(right)

    for name in list(rest_a):
        found = rules.find(name)
        if found is None:
            continue
        rule, other = found
        if other is None:
            rest_a.pop(name)
        elif other not in rest_b:
            raise GradCombineError("diff", f"a leaf {other} in the second dump, as a rule says", "none", name)
        else:
            axes = _ruled(a, b, name, other, rule.transpose)
            pair(name, other, "rule" if axes == rule.transpose else "rule, axes by values", axes)

    def by(key: Callable[[Dump, str], Hashable], reason: str) -> None:
        for left, right in _unique(rest_a, rest_b, key):
            if a[left].unread or b[right].unread:
                pair(left, right, reason)
            elif alignment.orders(a[left].shape, b[right].shape):
                reading(left)
                pair(left, right, reason, alignment.axes(a[left], b[right]))

    by(lambda dump, name: name, "name")
    by(lambda dump, name: canonical(name), "similar name")
    unread = [{name: rest.pop(name) for name in list(rest) if rest[name].unread} for rest in (rest_a, rest_b)]
    by(lambda dump, name: tuple(sorted(dump[name].shape)), "shape")
    for left, right, axes in list(closest(rest_a, rest_b, reading)):
        pair(left, right, "values", axes)
    rest_a, rest_b = rest_a | unread[0], rest_b | unread[1]
    position = {name: i for i, name in enumerate(a)}
    return Matching(tuple(sorted(pairs, key=lambda found: position[found.a])), tuple(rest_a), tuple(rest_b))


def canonical(name: str) -> tuple[str, ...]:
    """The words of a name that tell its leaf from others.

    Words are cut at separators, at changes of case and between letters and digits; wrappers are dropped, synonyms
    unified.

    >>> canonical("params/Dense_0/kernel") == canonical("model.layers.dense.0.weight")
    True
    """
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    words: list[str] = re.findall(r"[a-z]+|\d+", spaced.lower())
    return tuple(SYNONYMS.get(word, word) for word in words if word not in WRAPPERS)


def _ruled(a: Dump, b: Dump, left: str, right: str, axes: Axes | None) -> Axes | None:
    if a[left].unread or b[right].unread:
        return None
    shapes = a[left].shape, b[right].shape
    if axes is None and alignment.orders(*shapes):
        return alignment.axes(a[left], b[right])
    if axes is None or len(axes) != len(shapes[1]) or tuple(shapes[1][i] for i in axes) != shapes[0]:
        raise GradCombineError("diff", f"a leaf that fits {right} of shape {shapes[1]}", f"shape {shapes[0]}", left)
    return axes


def _unique(a: Dump, b: Dump, key: Callable[[Dump, str], Hashable]) -> Iterable[tuple[str, str]]:
    """The pairs of one leaf each with the same key, where no other leaf has it."""
    counts = Counter(key(a, name) for name in a), Counter(key(b, name) for name in b)
    others = {key(b, name): name for name in b}
    return [
        (name, others[key(a, name)]) for name in a if counts[0][key(a, name)] == 1 and counts[1].get(key(a, name)) == 1
    ]
