"""Matching of the leaves of two dumps by rules, names, shapes and values."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np

from gradcombine.errors import invalid, operation
from gradcombine.verify.diff import similarity
from gradcombine.verify.diff.dumps import Dump
from gradcombine.verify.diff.rules import NO_RULES, Rules
from gradcombine.verify.diff.similarity import ALIKE, MAX_SIZE, Axes, closest, cosine

WRAPPERS = frozenset(
    (
        *("params", "param", "parameters", "weights", "vars", "variables", "trainable"),
        *("model", "module", "layers", "optimizer", "opt", "state", "dict", "raw", "target", "item"),
        *("batch", "stats", "running", "moving", "proj"),
    )
)
"""Words that do not distinguish leaves."""

SYNONYMS = {
    **dict.fromkeys(("w", "weight", "embeddings", "embedding", "depthwise"), "kernel"),
    **dict.fromkeys(("b", "beta", "offset"), "bias"),
    "gamma": "scale",
    "variance": "var",
    "attn": "attention",
    **dict.fromkeys(("q", "wq"), "query"),
    **dict.fromkeys(("k", "wk"), "key"),
    **dict.fromkeys(("v", "wv"), "value"),
    **dict.fromkeys(("o", "wo", "output"), "out"),
}


class Pair(NamedTuple):
    """Two corresponding leaves.

    Attributes:
      a, b: their names.
      axes: the order of b's axes that gives a; None if both have the same order.
      reason: what matched: ``"rule"`` (``"rule, axes by values"``), ``"name"``, ``"similar name"``, ``"shape"``,
        ``"values"`` or ``"gates"`` (`gradcombine.verify.diff.common_layout`).
      flipped: the axes of b that are reversed.
    """

    a: str
    b: str
    axes: Axes | None
    reason: str
    flipped: Axes = ()


class Matching(NamedTuple):
    """The pairs, and the leaves without a counterpart."""

    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


@operation("diff")
def match(
    a: Dump,
    b: Dump,
    rules: Rules = NO_RULES,
    reading: Callable[[str], None] = lambda name: None,
    known: Iterable[Pair] = (),
) -> Matching:
    """Pairs the leaves of two dumps.

    Leaves are matched, in this order, by rules; by equal names; by names that differ only in the frameworks'
    conventions (`canonical`), if unique in both dumps; by names without words that occur only in one dump; by shapes,
    transposed or not, that are unique in both dumps; by values, closest first, but no scale with a bias and no mean
    with a variance. Names that differ in their numbers from those of the other dump, such as ``2.weight`` and
    ``Dense_1/kernel``, or without words of both, match before values only if these are similar, and after otherwise.
    Values decide whether two leaves are transposed. Unreadable leaves are matched only by rule or name.

    Args:
      a, b: the dumps.
      rules: known correspondences by name.
      reading: called with the name of each leaf before its values are read.
      known: pairs that are known already.

    Raises:
      GradCombineError: for a rule that names a missing leaf, or one of another shape.
    """
    pairs: list[Pair] = []
    rest_a, rest_b = dict(a), {name: entry for name, entry in b.items() if not rules.ignores(name)}

    def pair(left: str, right: str, reason: str, axes: Axes | None = None) -> None:
        pairs.append(Pair(left, right, axes, reason))
        rest_a.pop(left)
        rest_b.pop(right)

    for each in known:
        pair(each.a, each.b, each.reason, each.axes)
    for name in list(rest_a):
        ruled = rules.find(name)
        if ruled is None:
            continue
        rule, other = ruled
        if other is None:
            rest_a.pop(name)
        elif other not in rest_b:
            raise invalid(f"a leaf {other} in the second dump, as a rule says", "none", name)
        else:
            axes = _ruled(a, b, name, other, rule.transpose)
            pair(name, other, "rule" if axes == rule.transpose else "rule, axes by values", axes)

    def by(key: Callable[[Dump, str], Hashable], reason: str, unlike: Container[Hashable] = ()) -> None:
        """Pairs leaves by unique keys, and with ``unlike`` keys only if their values are similar."""
        for left, right in _unique(rest_a, rest_b, key):
            if a[left].unread or b[right].unread:
                pair(left, right, reason)
            elif similarity.orders(a[left].shape, b[right].shape):
                reading(left)
                axes = _axes(a, b, left, right)
                if key(a, left) not in unlike or similarity.are_alike(a[left], b[right], axes):
                    pair(left, right, reason, axes)

    by(lambda dump, name: name, "name")
    keys: list[Callable[[Dump, str], Hashable]] = [
        lambda dump, name: canonical(name),
        lambda dump, name: _unified(name),
    ]
    for key in keys:
        by(key, "similar name", _numbered_otherwise(rest_a, rest_b, key))
    keys.append(_common_words(rest_a, rest_b))
    by(keys[-1], "similar name", _numbered_otherwise(rest_a, rest_b, keys[-1]) | _shortened(rest_a, rest_b, keys[-1]))
    unread = [{name: rest.pop(name) for name in list(rest) if rest[name].unread} for rest in (rest_a, rest_b)]
    by(lambda dump, name: tuple(sorted(dump[name].shape)), "shape")
    for left, right, axes in list(closest(rest_a, rest_b, reading, _fit(rest_a, rest_b))):
        pair(left, right, "values", axes if _expected(a, b, left, right) is None else _axes(a, b, left, right))
    for key in keys:
        by(key, "similar name")
    rest_a, rest_b = rest_a | unread[0], rest_b | unread[1]
    position = {name: i for i, name in enumerate(a)}
    return Matching(tuple(sorted(pairs, key=lambda each: position[each.a])), tuple(rest_a), tuple(rest_b))


_ROLES = {"kernel": "scale", "scale": "scale", "bias": "bias", "mean": "mean", "var": "var"}
"""Roles of vectors that values alone do not pair with another role, by the last word of a `canonical` name."""

_NUMBERED: dict[tuple[int, ...], tuple[str, ...]] = {
    (1, 1): ("scale", "bias"),
    (1, 1, 1, 1): ("scale", "bias", "mean", "var"),
}
"""Roles of the vectors of a normalization without names, by the numbers of axes of all its variables."""


def _fit(a: Dump, b: Dump) -> Callable[[str, str], bool]:
    """Whether the names of two leaves allow that they correspond: a scale is no bias, and a mean is no variance."""
    sides = roles(a), roles(b)

    def fit(left: str, right: str) -> bool:
        x, y = sides[0].get(left), sides[1].get(right)
        return x == y or x is None or y is None

    return fit


def roles(dump: Dump) -> dict[str, str]:
    """The role of each vector whose name implies one: scale, bias, mean or variance.

    Keras' .weights.h5 files number the variables of a layer: after a kernel comes a bias, four vectors are those of a
    batch normalization, and two are scale and bias. (Three may be those without a scale, or without a bias.)
    """
    found = dict[str, str]()
    for name, leaf in dump.items():
        layer, _, number = name.rpartition("/")
        if layer.endswith("vars") and number.isdecimal():
            ranks = tuple(len(dump[x].shape) for i in range(5) if (x := f"{layer}/{i}") in dump)
            order = _NUMBERED.get(ranks, ("", "bias") if ranks[1:] == (1,) else ())
            role = dict(zip("0123", order, strict=False)).get(number)
        else:
            role = _ROLES.get(next(iter(canonical(name)[-1:]), ""))
        if len(leaf.shape) == 1 and role is not None:
            found[name] = role
    return found


def canonical(name: str) -> tuple[str, ...]:
    """The words of a name that distinguish its leaf.

    Names are split at separators, at changes of case, and between letters and digits; `WRAPPERS` are dropped and
    `SYNONYMS` unified.

    >>> canonical("params/Dense_0/kernel") == canonical("model.layers.dense.0.weight")
    True
    """
    return tuple(SYNONYMS.get(word, word) for word in _words(name) if word not in WRAPPERS)


def _unified(name: str) -> tuple[str, ...]:
    """The `canonical` words, with "kernel" for a scale, as in PyTorch."""
    return tuple("kernel" if word == "scale" else word for word in canonical(name))


@lru_cache(maxsize=1 << 16)
def _words(name: str) -> tuple[str, ...]:
    """The words and numbers of a name, without the number of a TensorFlow output (":0") or a "value" at its end."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", re.sub(r":\d+(?=\W*$)", "", name))
    words: list[str] = re.findall(r"[a-z]+|\d+", spaced.lower())
    while words and words[-1] in ("value", "values"):  # elsewhere it is the value projection of an attention
        words.pop()
    return tuple(words)


def _common_words(a: Dump, b: Dump) -> Callable[[Dump, str], Hashable]:
    """A key function: `_unified` without words that occur only in one dump, such as a prefix with the model's name.

    A name with no common words but numbers is its own key.
    """
    words = [{word for name in dump for word in _unified(name)} for dump in (a, b)]
    common = {word for word in words[0] & words[1] if not word.isdecimal()}

    def key(dump: Dump, name: str) -> Hashable:
        kept = tuple(word for word in _unified(name) if word in common or word.isdecimal())
        return kept if common.intersection(kept) else name

    return key


def _numbered_otherwise(a: Dump, b: Dump, key: Callable[[Dump, str], Hashable]) -> set[Hashable]:
    """Keys whose numbers count differently in the two dumps, as in nn.Sequential and in flax, which skips activations.

    These are the keys with the same words, but other numbers in the other dump.
    """
    found: list[dict[Hashable, set[Hashable]]] = [{}, {}]
    for by_words, dump in zip(found, (a, b), strict=True):
        for each in (key(dump, name) for name in dump):
            if isinstance(each, tuple):
                words = [word for word in cast("tuple[str, ...]", each) if not word.isdecimal()]
                by_words.setdefault(tuple(words), set()).add(cast("Hashable", each))
    return {each for words, keys in found[0].items() if keys != found[1].get(words) for each in keys}


def _shortened(a: Dump, b: Dump, key: Callable[[Dump, str], Hashable]) -> set[Hashable]:
    """Keys that leave out words of some names in both dumps, as of post_attention_layernorm and attention_norm."""
    found = list[set[Hashable]]()
    for dump in (a, b):
        words = {name: {*_unified(name)} for name in dump}
        everywhere = set[str]().union(*words.values()).intersection(*words.values())
        kept = ((key(dump, name), each - everywhere) for name, each in words.items())
        found.append({x for x, each in kept if each.difference(cast("Iterable[str]", x))})
    return found[0] & found[1]


def last_word(name: str) -> str:
    """The last word of a name, which says what its leaf is; "kernel" for the "w" of Haiku and a layer's first variable.

    >>> last_word("dense_1.weight"), last_word("params/['dense/kernel:0']"), last_word("layers/dense/vars/0")
    ('weight', 'kernel', 'kernel')
    """
    words = _words(name) or ("",)
    if words[-2:] == ("vars", "0"):  # in Keras' files
        return "embeddings" if "embedding" in words else "kernel"
    return "kernel" if words[-1] == "w" else words[-1]


def words_of(pair: Pair) -> set[str]:
    """The `last_word` of each name: two if one is a PyTorch ``weight`` and the other a flax or Keras ``kernel``."""
    return {last_word(pair.a), last_word(pair.b)}


def conventional_axes(pair: Pair, a: tuple[int, ...], b: tuple[int, ...]) -> Axes | None:
    """The order of the second leaf's axes that gives the first leaf, by the conventions that the names imply.

    A ``kernel`` in flax and Keras is (..., in, out), a ``weight`` in PyTorch (out, in, ...); of a depthwise convolution
    (..., channels, 1) and (channels, 1, ...). None for other names, and if no convention gives the shape. Both shapes,
    ``a`` and ``b``, have at least two axes.
    """
    spatial, words = len(a) - 2, words_of(pair)
    if words != {"kernel", "weight"}:
        orders = [tuple(range(len(a)))] if words in ({"kernel"}, {"weight"}) else []
    elif last_word(pair.b) == "kernel":
        orders = [(spatial + 1, spatial, *range(spatial))]
        orders += [(spatial, spatial + 1, *range(spatial))] if a[1] == 1 else []
    else:
        orders = [(*range(2, len(a)), 1, 0)]
        orders += [(*range(2, len(a)), 0, 1)] if b[1] == 1 else []
    return next((order for order in orders if tuple(b[i] for i in order) == a), None)


def _axes(a: Dump, b: Dump, left: str, right: str) -> Axes | None:
    """The order of the second leaf's axes in which it is most similar; the conventional one of several equal ones."""
    return similarity.axes(a[left], b[right], _expected(a, b, left, right))


def _expected(a: Dump, b: Dump, left: str, right: str) -> Axes | None:
    shapes = a[left].shape, b[right].shape
    fits = len(shapes[0]) == len(shapes[1]) > 1
    return conventional_axes(Pair(left, right, None, "name"), *shapes) if fits else None


def _ruled(a: Dump, b: Dump, left: str, right: str, axes: Axes | None) -> Axes | None:
    if a[left].unread or b[right].unread:
        return None
    shapes = a[left].shape, b[right].shape
    if axes is None and similarity.orders(*shapes):
        return _axes(a, b, left, right)
    if axes is None or len(axes) != len(shapes[1]) or tuple(shapes[1][i] for i in axes) != shapes[0]:
        raise invalid(f"a leaf that fits {right} of shape {shapes[1]}", f"shape {shapes[0]}", left)
    return axes


def _unique(a: Dump, b: Dump, key: Callable[[Dump, str], Hashable]) -> Iterable[tuple[str, str]]:
    """Pairs of leaves with equal keys that are unique in both dumps."""
    left, right = ({name: key(dump, name) for name in dump} for dump in (a, b))
    counts = Counter(left.values()), Counter(right.values())
    others = {value: name for name, value in right.items()}
    return [(name, others[value]) for name, value in left.items() if counts[0][value] == counts[1][value] == 1]


# Kernels of transposed convolutions.

TRIED = 64
"""Number of leaves of the same shape that are tried as the flipped kernel of a transposed convolution."""


def with_flipped(a: Dump, b: Dump, matching: Matching) -> Matching:
    """Adds the pairs of transposed convolutions among the unmatched leaves."""
    pairs, rest = list(matching.pairs), dict.fromkeys(matching.only_b)
    by_shape: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in rest:
        by_shape[tuple(sorted(b[name].shape))].append(name)
    for x in matching.only_a:
        # A convolution's kernel has three axes or more.
        candidates = by_shape[tuple(sorted(a[x].shape))] if len(a[x].shape) > 2 else []
        flips = (flipped(a, b, Pair(x, y, None, "values")) for y in candidates[:TRIED])
        pair = next(filter(None, flips), None)
        if pair is not None:
            pairs.append(pair)
            candidates.remove(pair.b)
            rest.pop(pair.b)
    matched = {pair.a for pair in pairs}
    return Matching(tuple(pairs), tuple(x for x in matching.only_a if x not in matched), tuple(rest))


def flipped(a: Dump, b: Dump, pair: Pair) -> Pair | None:
    """The pair as the kernels of a transposed convolution; None if names, shapes or values are not of such kernels.

    flax lays them out as (H, W, I, O), PyTorch as (I, O, H, W) with H and W reversed.
    """
    left, right = a[pair.a], b[pair.b]
    axes = len(left.shape)
    if not 3 <= axes <= 5 or left.size > MAX_SIZE or words_of(pair) != {"kernel", "weight"}:
        return None
    if last_word(pair.b) == "kernel":
        order, spatial = (axes - 2, axes - 1, *range(axes - 2)), tuple(range(axes - 2))
    else:
        order, spatial = (*range(2, axes), 0, 1), tuple(range(2, axes))
    if tuple(right.shape[i] for i in order) != left.shape:
        return None
    alike = cosine(left.whole(), np.flip(right.whole(), spatial).transpose(order)) >= ALIKE
    return pair._replace(axes=order, flipped=spatial) if alike else None
