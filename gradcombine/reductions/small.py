"""Elementwise functions of NumPy arrays, of which many small ones are handled as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from gradcombine.reductions.cell import Accumulator, parts, refilled

SMALL = 1 << 12
"""Elements of the largest leaf that is joined with others."""


class Small:
    """Calls of an elementwise function, of which those on small leaves run as one at the end.

    The leaves of a call have one shape, which the result has too. No element depends on another one.

    Args:
      function: ``function(static, *leaves)``, of accumulators, arrays and None.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._calls: dict[tuple[Hashable, Hashable], list[_Call]] = {}

    def __call__(self, static: Hashable, *leaves: Accumulator | None) -> Any:
        """The result, or what `results` replaces by it."""
        held: list[tuple[np.ndarray, ...]] = [
            () if leaf is None else tuple(map(np.asarray, parts(leaf))) for leaf in leaves
        ]
        if held[0][0].size > SMALL:
            return self.function(static, *leaves)
        call = _Call(leaves, held)
        kinds = tuple(tuple(array.dtype for array in arrays) for arrays in held)
        self._calls.setdefault((static, kinds), []).append(call)
        return call

    def results(self, values: Sequence[Any]) -> list[Any]:
        """The values, with the results of the calls that were put off."""
        done: dict[_Call, Any] = {}
        for (static, _), calls in self._calls.items():
            done.update(zip(calls, self._joined(static, calls), strict=True))
        return [done[value] if isinstance(value, _Call) else value for value in values]

    def _joined(self, static: Hashable, calls: Sequence[_Call]) -> list[Any]:
        like = calls[0].leaves
        if len(calls) == 1:
            return [self.function(static, *like)]
        columns = zip(*(call.held for call in calls), strict=True)
        joined = [[_join(arrays) for arrays in zip(*column, strict=True)] for column in columns]
        pairs = zip(like, joined, strict=True)
        whole = self.function(static, *(None if leaf is None else refilled(leaf, arrays) for leaf, arrays in pairs))
        shapes = [call.held[0][0].shape for call in calls]
        pieces = [_split(array, shapes) for array in parts(whole)]
        return [refilled(whole, arrays) for arrays in zip(*pieces, strict=True)]


class _Call:
    """One leaf's arguments, and the arrays of each."""

    def __init__(self, leaves: tuple[Any, ...], held: list[tuple[np.ndarray, ...]]) -> None:
        self.leaves, self.held = leaves, held


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _split(array: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    # Copies: a leaf that is kept would keep all others.
    sizes = list(map(math.prod, shapes))
    rows = zip(shapes, sizes, accumulate(sizes), strict=True)
    return [array[end - size : end].reshape(shape).copy() for shape, size, end in rows]
