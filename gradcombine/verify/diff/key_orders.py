"""Parameters that frameworks lay out differently: packed or split, with or without a separate axis of heads.

PyTorch's MultiheadAttention has one ``in_proj_weight`` of shape (3 d, d); flax and Keras have ``query/kernel``,
``key/kernel`` and ``value/kernel`` of shape (d, heads, d / heads), and ``out/kernel`` of (heads, d / heads, d). The
kernels of transposed convolutions are flipped between PyTorch and flax.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from gradcombine.formats import Entry
from gradcombine.verify.diff.dumps import Dump
from gradcombine.verify.diff.mapping import Pair, canonical, last_word, words_of
from gradcombine.verify.diff.recurrent import gates, parts
from gradcombine.verify.diff.similarity import ALIKE, MAX_SIZE, cosine

_PACKED = re.compile(r"(.*?)(?:in_proj|qkv|qkv_proj|c_attn)[_./](weight|bias|kernel)")
_PARTS = "qkv"


def common(
    a: Dump, b: Dump, fixed: Callable[[str], bool], gradients: bool | None = None
) -> tuple[Dump, Dump, tuple[Pair, ...]]:
    """Brings two dumps into a common layout. Also returns the pairs of leaves that this determines.

    ``attn.in_proj_weight`` is split into ``attn.q_proj_weight``, ``attn.k_proj_weight`` and ``attn.v_proj_weight``
    unless the other dump packs them, too. Axes of length 1 are left out, or two adjacent axes merged, if only then the
    shape is that of the other dump's leaf of this name, or of any leaf there. Recurrent cells are split into gates if
    the dumps lay them out differently (`gradcombine.verify.diff.recurrent`). The order of elements does not change.

    Args:
      a, b: the dumps.
      fixed: whether a leaf must not be changed, for instance because a rule names it.
      gradients: whether the dumps contain gradients; None to decide from names and values.
    """
    a, b, pairs = gates(a, b, fixed, gradients)
    paired = {name for pair in pairs for name in pair[:2]}

    def unchanged(name: str) -> bool:
        return name in paired or fixed(name)

    a, b = _split(a, b, unchanged), _split(b, a, unchanged)
    return _merged(a, b, unchanged), _merged(b, a, unchanged), pairs


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


def _split(dump: Dump, other: Dump, fixed: Callable[[str], bool]) -> Dump:
    """Splits packed queries, keys and values, unless the other dump packs them, too, by its names or shapes."""
    if any(_PACKED.fullmatch(name) for name in other):
        return dump
    shapes = Counter(tuple(sorted(leaf.shape)) for leaf in other.values())
    shapes.subtract(tuple(sorted(leaf.shape)) for leaf in dump.values())
    leaves: dict[str, Entry] = {}
    for name, leaf in dump.items():
        packed = _PACKED.fullmatch(name)
        axis = _packed_axis(leaf.shape)
        names = [] if packed is None else [f"{packed[1]}{part}_proj_{packed[2]}" for part in _PARTS]
        fits = shapes[tuple(sorted(leaf.shape))] >= 0  # as many leaves have this shape there
        if not names or axis is None or fits or leaf.unread or fixed(name) or any(x in dump for x in names):
            leaves[name] = leaf
        else:
            leaves |= zip(names, parts(leaf, axis, names), strict=True)
    return dump if len(leaves) == len(dump) else leaves


def _packed_axis(shape: tuple[int, ...]) -> int | None:
    """The axis along which queries, keys and values are packed, or None."""
    if len(shape) == 1 and shape[0] % 3 == 0:
        return 0
    if len(shape) == 2 and 3 * min(shape) == max(shape):
        return shape.index(max(shape))
    return None


def _merged(dump: Dump, other: Dump, fixed: Callable[[str], bool]) -> Dump:
    """Merges axes of each leaf whose shape only then occurs in the other dump."""
    counts = Counter(map(canonical, other))
    by_name = {canonical(name): leaf.shape for name, leaf in other.items() if counts[canonical(name)] == 1}
    all_shapes = {tuple(sorted(leaf.shape)) for leaf in other.values()} - {()}

    def merged(name: str, leaf: Entry) -> Entry:
        shape = by_name.get(canonical(name))
        targets = all_shapes if shape is None else {tuple(sorted(shape))}
        if leaf.unread or fixed(name) or tuple(sorted(leaf.shape)) in targets:
            return leaf
        fitting = (merge for merge in _merges(leaf.shape) if tuple(sorted(merge)) in targets)
        return leaf._replace(shape=next(fitting, leaf.shape))

    return {name: merged(name, leaf) for name, leaf in dump.items()}


def _merges(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The possible shapes without axes of length 1, or with two adjacent axes merged: heads, or channels."""
    yield tuple(n for n in shape if n > 1)
    for i in range(len(shape) - 1 if len(shape) in (2, 3) else 0):
        yield (*shape[:i], math.prod(shape[i : i + 2]), *shape[i + 2 :])
    if len(shape) >= 3:  # channels and multiplier of Keras' depthwise convolution
        yield (*shape[:-2], 1, math.prod(shape[-2:]))
