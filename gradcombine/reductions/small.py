"""Elementwise functions of leaves, of which many small ones are handled as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.cell import Accumulator, parts, refilled
from gradcombine.types import Array


class Small:
    """Calls of an elementwise function, of which those on leaves that the backend prefers joined run as one at the end.

    The leaves of a call have one shape, which the result has too. No element depends on another one.

    Args:
      backend: of the leaves.
      function: ``function(static, *leaves)``, of accumulators, arrays and None.
    """

    def __init__(self, backend: Backend, function: Callable[..., Accumulator]) -> None:
        self.backend, self.function = backend, function
        self._calls: dict[tuple[Hashable, Hashable], list[_Call]] = {}

    def __call__(self, static: Hashable, *leaves: Accumulator | None) -> Accumulator:
        """The result, or what `results` replaces by it."""
        if not self.backend.prefers_joined(parts(leaves[0])[0]):
            return self.function(static, *leaves)
        held = [() if leaf is None else tuple(map(self.backend.asarray, parts(leaf))) for leaf in leaves]
        call = _Call(leaves, held)
        kinds = tuple(tuple(array.dtype for array in arrays) for arrays in held)
        self._calls.setdefault((static, kinds), []).append(call)
        return call

    def results(self, values: Sequence[Accumulator]) -> list[Accumulator]:
        """The values, with the results of the calls that were put off."""
        done: dict[_Call, Accumulator] = {}
        for (static, _), calls in self._calls.items():
            done.update(zip(calls, self._joined(static, calls), strict=True))
        return [done[value] if isinstance(value, _Call) else value for value in values]

    def _joined(self, static: Hashable, calls: Sequence[_Call]) -> list[Accumulator]:
        backend, like = self.backend, calls[0].leaves
        if len(calls) == 1:
            return [self.function(static, *like)]
        columns = zip(*(call.held for call in calls), strict=True)
        joined = [[self._join(arrays) for arrays in zip(*column, strict=True)] for column in columns]
        pairs = zip(like, joined, strict=True)
        leaves = (None if leaf is None else refilled(leaf, arrays) for leaf, arrays in pairs)
        whole = backend.joined(self.function, static, *leaves)
        shapes = [backend.shape(call.held[0][0]) for call in calls]
        pieces = [backend.unpack(array, shapes) for array in parts(whole)]
        return [refilled(whole, arrays) for arrays in zip(*pieces, strict=True)]

    def _join(self, arrays: Sequence[Array]) -> Array:
        return self.backend.concat([self.backend.flat(array) for array in arrays])


class _Call:
    """One leaf's arguments, and the arrays of each."""

    def __init__(self, leaves: tuple[Accumulator | None, ...], held: list[tuple[Array, ...]]) -> None:
        self.leaves, self.held = leaves, held
