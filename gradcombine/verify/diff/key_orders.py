"""One parameter in two shapes: what one framework packs and another splits; heads as an axis, or in another.

PyTorch's MultiheadAttention has one ``in_proj_weight`` of shape (3 d, d), flax and Keras have ``query/kernel``,
``key/kernel`` and ``value/kernel`` of shape (d, heads, d / heads), and ``out/kernel`` of (heads, d / heads, d). Its
transposed convolutions are those of flax with the kernel flipped.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from gradcombine.formats import Entry, from_array
from gradcombine.verify.diff.dumps import Dump
from gradcombine.verify.diff.mapping import Pair, canonical, conventional, words_of
from gradcombine.verify.diff.recurrent import gates
from gradcombine.verify.diff.similarity import ALIKE, MAX_SIZE, Axes, cosine

_PACKED = re.compile(r"(.*?)(?:in_proj|qkv|qkv_proj|c_attn)[_./](weight|bias|kernel)")
_PARTS = "qkv"


def common(
    a: Dump, b: Dump, fixed: Callable[[str], bool], gradients: bool | None = None
) -> tuple[Dump, Dump, tuple[Pair, ...]]:
    """Both dumps, where one of them splits or merges what the other does not; and the pairs that are known by that.

    ``attn.in_proj_weight`` becomes ``attn.q_proj_weight``, ``attn.k_proj_weight`` and ``attn.v_proj_weight`` if the
    other dump packs nothing; and two axes side by side become one if only then the shape is that of the other's leaf of
    this name, or of any leaf. Elements stay in their order. Recurrent cells become gates, if they are laid out
    differently (`gradcombine.verify.diff.recurrent`). A leaf that is ``fixed``, for instance since a rule names it,
    stays as it is; ``gradients`` tells what the dumps hold, None if they themselves tell.
    """
    a, b, pairs = gates(a, b, fixed, gradients)
    paired = {name for pair in pairs for name in pair[:2]}

    def stays(name: str) -> bool:
        return name in paired or fixed(name)

    a, b = _split(a, b, stays), _split(b, a, stays)
    return _merged(a, b, stays), _merged(b, a, stays), pairs


def conventional_axes(pair: Pair, a: tuple[int, ...], b: tuple[int, ...]) -> Axes | None:
    """The order of the second leaf's axes that gives the first one, where both names say whose convention they follow.

    A ``kernel`` of flax and Keras is (..., in, out), a ``weight`` of PyTorch (out, in, ...); of a convolution over each
    channel (..., channels, 1) and (channels, 1, ...). None for other names, and where no convention gives the shape;
    both shapes, ``a`` and ``b``, have two axes or more.
    """
    spatial = len(a) - 2
    if not conventional(pair):
        orders = [tuple(range(len(a)))] if words_of(pair) in ({"kernel"}, {"weight"}) else []
    elif "kernel" in pair.b:
        orders = [(spatial + 1, spatial, *range(spatial))]
        orders += [(spatial, spatial + 1, *range(spatial))] if a[1] == 1 else []
    else:
        orders = [(*range(2, len(a)), 1, 0)]
        orders += [(*range(2, len(a)), 0, 1)] if b[1] == 1 else []
    return next((order for order in orders if tuple(b[i] for i in order) == a), None)


def transposed_convolution(pair: Pair, axes: int) -> tuple[Axes, Axes] | None:
    """How a transposed convolution of flax, (H, W, I, O), lies beside PyTorch's, (I, O, H, W): it is flipped besides.

    Returns:
      The order of the second leaf's axes that gives the first one, and its spatial axes; None if the names are not
      those of the two frameworks.
    """
    if not 3 <= axes <= 5 or not conventional(pair):
        return None
    if "kernel" in pair.b:
        return (axes - 2, axes - 1, *range(axes - 2)), tuple(range(axes - 2))
    return (*range(2, axes), 0, 1), tuple(range(2, axes))


def flipped(a: Dump, b: Dump, pair: Pair) -> Pair | None:
    """The pair as a `transposed_convolution`; None if the leaves are not alike in that way."""
    left, right = a[pair.a], b[pair.b]
    way = transposed_convolution(pair, len(left.shape))
    if way is None or tuple(right.shape[i] for i in way[0]) != left.shape or left.size > MAX_SIZE:
        return None
    alike = cosine(left.whole(), np.flip(right.whole(), way[1]).transpose(way[0])) >= ALIKE
    return pair._replace(axes=way[0], flipped=way[1]) if alike else None


def _split(dump: Dump, other: Dump, fixed: Callable[[str], bool]) -> Dump:
    if any(_PACKED.fullmatch(name) for name in other):
        return dump
    parts: dict[str, Entry] = {}
    for name, leaf in dump.items():
        packed = _PACKED.fullmatch(name)
        axis = _packed_axis(leaf.shape)
        if packed is None or axis is None or leaf.unread or fixed(name):
            parts[name] = leaf
            continue
        shape = tuple(n // 3 if i == axis else n for i, n in enumerate(leaf.shape))
        for number, part in enumerate(_PARTS):

            def load(leaf: Entry = leaf, axis: int = axis, number: int = number) -> np.ndarray:
                return np.split(leaf.whole(), 3, axis)[number]

            name = f"{packed[1]}{part}_proj_{packed[2]}"
            parts[name] = from_array(name, shape, leaf.dtype, load)
    return dump if len(parts) == len(dump) else parts


def _packed_axis(shape: tuple[int, ...]) -> int | None:
    """The axis along which queries, keys and values are packed; None if there is none."""
    if len(shape) == 1 and shape[0] % 3 == 0:
        return 0
    if len(shape) == 2 and 3 * min(shape) == max(shape):
        return shape.index(max(shape))
    return None


def _merged(dump: Dump, other: Dump, fixed: Callable[[str], bool]) -> Dump:
    times = Counter(map(canonical, other))
    named = {canonical(name): leaf.shape for name, leaf in other.items() if times[canonical(name)] == 1}
    sizes = {tuple(sorted(leaf.shape)) for leaf in other.values()}

    def merged(name: str, leaf: Entry) -> Entry:
        shape = named.get(canonical(name))
        wanted = sizes if shape is None else {tuple(sorted(shape))}
        if leaf.unread or fixed(name) or tuple(sorted(leaf.shape)) in wanted:
            return leaf
        fitting = (merge for merge in _merges(leaf.shape) if tuple(sorted(merge)) in wanted)
        return leaf._replace(shape=next(fitting, leaf.shape))

    return {name: merged(name, leaf) for name, leaf in dump.items()}


def _merges(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The shapes with two axes side by side made one: those of two or three axes alone have heads."""
    for i in range(len(shape) - 1 if len(shape) in (2, 3) else 0):
        yield (*shape[:i], math.prod(shape[i : i + 2]), *shape[i + 2 :])
    if len(shape) >= 3:  # channels and multiplier of Keras' convolution over each channel
        yield (*shape[:-2], 1, math.prod(shape[-2:]))
