"""Batches calls of an elementwise function on many small leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.cell import Accumulator, parts, refilled
from gradcombine.types import Array


class Small:
    """Calls an elementwise function; defers calls on small leaves, to run them on the concatenated leaves.

    The leaves of a call and its result have the same shape.

    Args:
      backend: the backend of the leaves.
      function: ``function(static, *leaves)``, of accumulators, arrays and None.
    """

    def __init__(self, backend: Backend, function: Callable[..., Accumulator]) -> None:
        self.backend, self.function = backend, function
        self._calls: dict[tuple[Hashable, Hashable], list[_Call]] = {}

    def __call__(self, static: Hashable, *leaves: Accumulator | None) -> Accumulator:
        """The result, or a deferred call that `results` replaces by it."""
        if not self.backend.prefers_joined(parts(leaves[0])[0]):
            return self.function(static, *leaves)
        held = [() if leaf is None else tuple(map(self.backend.asarray, parts(leaf))) for leaf in leaves]
        call = _Call(leaves, held)
        dtypes = tuple(tuple(array.dtype for array in arrays) for arrays in held)
        self._calls.setdefault((static, dtypes), []).append(call)
        return call

    def results(self, values: Sequence[Accumulator]) -> list[Accumulator]:
        """Runs the deferred calls, and replaces them among ``values`` by their results."""
        done: dict[_Call, Accumulator] = {}
        for (static, _), calls in self._calls.items():
            done.update(zip(calls, self._run(static, calls), strict=True))
        return [done[value] if isinstance(value, _Call) else value for value in values]

    def _run(self, static: Hashable, calls: Sequence[_Call]) -> list[Accumulator]:
        backend, like = self.backend, calls[0].leaves
        if len(calls) == 1:
            return [self.function(static, *like)]
        columns = zip(*(call.held for call in calls), strict=True)
        joined = [[self._join(arrays) for arrays in zip(*column, strict=True)] for column in columns]
        pairs = zip(like, joined, strict=True)
        leaves = (None if leaf is None else refilled(leaf, arrays) for leaf, arrays in pairs)
        result = backend.joined(self.function, static, *leaves)
        shapes = [backend.shape(call.held[0][0]) for call in calls]
        pieces = [backend.unpack(array, shapes) for array in parts(result)]
        return [refilled(result, arrays) for arrays in zip(*pieces, strict=True)]

    def _join(self, arrays: Sequence[Array]) -> Array:
        return self.backend.concat([self.backend.flat(array) for array in arrays])


class _Call:
    """A deferred call: its arguments, and the arrays of each."""

    def __init__(self, leaves: tuple[Accumulator | None, ...], held: list[tuple[Array, ...]]) -> None:
        self.leaves, self.held = leaves, held
