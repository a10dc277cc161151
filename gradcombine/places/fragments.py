"""Greedy division by size, and the turns of fragments of the parameters, as in Streaming DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

from gradcombine.types import Array


def divided(nbytes: Sequence[int | None], fragments: int) -> list[list[int]]:
    """Splits the leaves into fragments of similar sizes; returns the indices of the leaves of each fragment.

    Greedy: assigns the leaves from the largest to the smallest, each to the smallest fragment so far.

    Args:
      nbytes: the size of each leaf in bytes; None for a leaf that is in no fragment.
      fragments: the number of fragments.

    >>> divided([4, None, 16, 8], 2)
    [[2], [0, 3]]
    """
    parts: list[list[int]] = [[] for _ in range(fragments)]
    totals = [(0, f) for f in range(fragments)]  # a heap
    sizes = {i: size for i, size in enumerate(nbytes) if size is not None}
    for i in sorted(sizes, key=lambda i: -sizes[i]):
        total, f = totals[0]
        parts[f].append(i)
        heapreplace(totals, (total + sizes[i], f))
    return [sorted(part) for part in parts]


def due(step: Array, every: int, fragments: int) -> Array:
    """Whether each fragment is exchanged after a step; the exchanges are spread evenly over ``every`` steps.

    Args:
      step: int32 scalar, the number of steps so far, from 1.
      every: the number of steps between two exchanges of a fragment.
      fragments: the number of fragments, at most ``every``.

    >>> [due(np.int32(step), 4, 2).tolist() for step in (1, 2, 3, 4)]
    [[False, False], [False, True], [False, False], [True, False]]
    """
    return (step + np.array([f * every // fragments for f in range(fragments)], np.int32)) % every == 0
