"""One parameter in two shapes: attention that one framework packs and another splits; heads as an axis, or in another.

PyTorch's MultiheadAttention has one ``in_proj_weight`` of shape (3 d, d), flax and Keras have ``query/kernel``,
``key/kernel`` and ``value/kernel`` of shape (d, heads, d / heads), and ``out/kernel`` of (heads, d / heads, d).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from gradcombine.formats import Entry, from_array
from gradcombine.verify.dumps import Dump

_PACKED = re.compile(r"(.*?)(?:in_proj|qkv|qkv_proj|c_attn)[_./](weight|bias|kernel)")
_PARTS = "qkv"


def common(
    a: Dump, b: Dump, canonical: Callable[[str], tuple[str, ...]], fixed: Callable[[str], bool]
) -> tuple[Dump, Dump]:
    """Both dumps, where one of them splits or merges what the other does not.

    ``attn.in_proj_weight`` becomes ``attn.q_proj_weight``, ``attn.k_proj_weight`` and ``attn.v_proj_weight`` if the
    other dump packs nothing; and two axes side by side become one if only then the shape is that of the other's leaf of
    this name, or of any leaf. Elements stay in their order.

    Args:
      a, b: the dumps.
      canonical: what tells which names are alike.
      fixed: whether a leaf stays as it is, for instance since a rule names it.
    """
    a, b = _split(a, b, fixed), _split(b, a, fixed)
    return _merged(a, b, canonical, fixed), _merged(b, a, canonical, fixed)


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
            parts[name] = from_array(leaf.operation, name, shape, leaf.dtype, load)
    return dump if len(parts) == len(dump) else parts


def _packed_axis(shape: tuple[int, ...]) -> int | None:
    """Which axis holds queries, keys and values one after another; None if none does."""
    if len(shape) == 1 and shape[0] % 3 == 0:
        return 0
    if len(shape) == 2 and 3 * min(shape) == max(shape):
        return shape.index(max(shape))
    return None


def _merged(dump: Dump, other: Dump, canonical: Callable[[str], tuple[str, ...]], fixed: Callable[[str], bool]) -> Dump:
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
