"""Fragments of parameters, which islands of replicas exchange in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcombine.types import Array


def divided(nbytes: Sequence[int | None], fragments: int) -> list[list[int]]:
    """The numbers of the leaves of each fragment: the largest leaves first, each to the fragment that has the least.

    Args:
      nbytes: bytes of each leaf; None for one that is in no fragment.
      fragments: their number.

    >>> divided([4, None, 16, 8], 2)
    [[2], [0, 3]]
    """
    parts: list[list[int]] = [[] for _ in range(fragments)]
    totals = [0] * fragments
    sizes = {i: size for i, size in enumerate(nbytes) if size is not None}
    for i in sorted(sizes, key=lambda i: -sizes[i]):
        f = totals.index(min(totals))
        parts[f].append(i)
        totals[f] += sizes[i]
    return [sorted(part) for part in parts]


def due(step: Array, every: int, fragments: int) -> Array:
    """The fragments that are exchanged after a step, as booleans: each every so many steps, evenly in turn.

    Args:
      step: int32 scalar, the number of steps so far, from 1.
      every: steps between two exchanges of a fragment.
      fragments: their number, ``every`` at most.

    >>> [due(np.int32(step), 4, 2).tolist() for step in (1, 2, 3, 4)]
    [[False, False], [False, True], [False, False], [True, False]]
    """
    return (step + np.array([f * every // fragments for f in range(fragments)], np.int32)) % every == 0
