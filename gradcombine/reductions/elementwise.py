"""Reductions that a user defines by what happens to one array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Number
from typing import Any, cast

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import owner
from gradcombine.errors import invalid, operation, require_items, require_one_of, shown
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.cell import Accumulator, Cell, Totals, parts, refilled
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.reductions.weights import Weight
from gradcombine.settings import check, valid
from gradcombine.types import Array, DType, Leaf

_KINDS = (*dtypes.NUMERIC, "bool")


class ElementwiseState(TreewiseState):
    """A partial result of `elementwise`. Each name has a subclass of its own."""


@operation("elementwise")
def elementwise(
    name: str,
    *,
    empty: Any,
    update: Callable[[Backend, Accumulator, Array, Array], Accumulator],
    merge: Callable[[Backend, Accumulator, Accumulator], Accumulator],
    finalize: Callable[[Backend, Accumulator, Totals], Leaf] | None = None,
    kinds: Sequence[str] = ("float",),
    dtype: DType = None,
    output_dtype: DType = None,
    scales_by_weight: bool = False,
) -> Reduction:
    """A reduction that does the same to every leaf, element by element.

    The functions get ``xp`` first: the operations of the framework whose arrays they are given, so that one definition
    runs in all of them. They may use ``add``, ``product``, ``scale`` and ``divide`` (by a scalar), ``maximum``,
    ``sqrt``, ``where``, ``cast``, ``full``, ``dtype`` and ``shape`` of `gradcombine.backends.protocol.Backend`, beside
    the operators ``+ - * / abs`` and comparisons, which mean the same everywhere. They must be pure.

    An *accumulator* is an array of the leaf's shape, or a tuple or NamedTuple of such arrays, all of one dtype.

    Args:
      name: what error messages and state files call it.
      empty: what fills an accumulator that has had no contribution: a number, or a tuple or NamedTuple of numbers; or a
        function of the accumulator's dtype that returns this.
      update: ``update(xp, a, x, weight) -> a``: one more contribution ``x``, in the accumulator's dtype. The weight is
        a scalar of its real dtype; where that is an integer one and the weight not known to be whole, float32. What the
        function makes of a weight of 0 is discarded.
      merge: ``merge(xp, a, b) -> a``: two accumulators become one; ``a`` holds the earlier contributions.
      finalize: ``finalize(xp, a, totals) -> result``: an array, or a tuple or NamedTuple of arrays, which stands in the
        leaf's place. ``totals.weight`` is the sum of weights, a scalar of the accumulator's real dtype (of an integer
        one: of a float's), and ``totals.count`` the int32 number of contributions of nonzero weight, which may be 0.
        None: the accumulator as it is.
      kinds: which leaves it takes: any of "float", "complex", "integer" and "bool".
      dtype: of the accumulators. None: the contributions' own, float32 for narrower floats, 32 bits for narrower
        integers.
      output_dtype: of the result. None: the contributions' own; narrow integers stay as wide as their accumulator.
      scales_by_weight: see `gradcombine.Reduction`.

    Returns:
      A reduction over list, time and replicas. A contribution that is None leaves its accumulator as it is.

    Raises:
      GradCombineError: for settings that mean nothing; by the reduction, as any other, and where a function returns an
        accumulator of another shape, dtype or kind than it was given.

    Bits: whatever the functions' are. Over replicas states are gathered, and merged in the canonical tree over ranks.

    >>> import numpy as np, gradcombine as gc
    >>> amax = gc.reductions.elementwise(
    ...     "amax",
    ...     empty=0,
    ...     update=lambda xp, a, x, weight: xp.maximum(a, abs(x)),
    ...     merge=lambda xp, a, b: xp.maximum(a, b),
    ... )
    >>> gc.combine(amax, [np.float32([1, -5]), np.float32([-3, 4])])
    array([3., 5.], dtype=float32)
    """
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid("a name", shown(name))
    finalize = _as_it_is if finalize is None else finalize
    check(update=update, merge=merge, finalize=finalize)
    if not callable(empty) and not _are_numbers(empty):
        raise invalid("a number, a tuple of numbers or a function as empty", shown(empty))
    expected = f"kinds among {list(_KINDS)}"
    taken = [] if isinstance(kinds, str) else require_items(expected, kinds)
    if not taken:
        raise invalid(expected, shown(kinds))
    for kind in taken:
        require_one_of(expected, kind, _KINDS)
    settings = dtypes.Settings(dtype, output_dtype)
    cell = _Defined(name, tuple(taken), settings, empty, update, merge, finalize)
    return Treewise(cell, _state_of(name), scales_by_weight=valid("scales_by_weight", scales_by_weight))


def _are_numbers(empty: Any) -> bool:
    try:
        return all(isinstance(x, Number) for x in parts(empty))
    except RecursionError:  # tuples in tuples without an end
        return False


@cache
def _state_of(name: str) -> type[ElementwiseState]:
    """The class of the states of this name, which two definitions of one reduction share."""
    words = "".join(character if character.isalnum() else " " for character in name).split()
    kind = "".join(word[0].upper() + word[1:] for word in words)

    def reduce(self: ElementwiseState) -> Any:
        return _rebuilt, (name, *self)

    return type(f"{kind}State", (ElementwiseState,), {"__reduce__": reduce})


def _rebuilt(name: str, *fields: Any) -> ElementwiseState:
    return _state_of(name)(*fields)


def _as_it_is(xp: Backend, a: Accumulator, totals: Totals) -> Leaf:
    return a


@dataclass(frozen=True)
class _Defined(Cell):
    name: str
    kinds: tuple[str, ...]
    settings: dtypes.Settings
    identity: Any
    own_update: Callable[[Backend, Accumulator, Array, Array], Accumulator]
    own_merge: Callable[[Backend, Accumulator, Accumulator], Accumulator]
    own_finalize: Callable[[Backend, Accumulator, Totals], Leaf]

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> Accumulator:
        identity = self.identity(running) if callable(self.identity) else self.identity
        for number in parts(identity):
            if not dtypes.holds(running, number):
                raise invalid(f"a number of {running} as empty", shown(number))
        numbers: list[Any] = [np.asarray(number, running)[()] for number in parts(identity)]
        return refilled(identity, [backend.full(shape, number, running, [like]) for number in numbers])

    def update(self, backend: Backend, a: Accumulator, x: Array, weight: Weight, totals: Totals) -> Accumulator:
        running = backend.dtype(parts(a)[0])
        whole = dtypes.kind(running) == "integer" and not weight.is_integral
        factor = weight.cast(backend, dtypes.FLOAT32 if whole else dtypes.part(running))
        updated = self.own_update(backend, a, backend.cast(x, running), factor)
        return self._alike("update", backend, a, updated)

    def merge(
        self, backend: Backend, a: Accumulator, b: Accumulator, a_totals: Totals, b_totals: Totals
    ) -> Accumulator:
        return self._alike("merge", backend, a, self.own_merge(backend, a, b))

    def finish(self, backend: Backend, a: Accumulator, totals: Totals, output: np.dtype) -> Leaf:
        running = dtypes.part(backend.dtype(parts(a)[0]))
        if dtypes.kind(running) != "integer":
            totals = Totals(backend.cast(totals.weight, running), totals.count)
        result = self.own_finalize(backend, a, totals)
        if any(owner(x) is None for x in parts(result)):
            raise invalid("an array, or a tuple of arrays, from finalize", shown(result))
        return refilled(result, [backend.cast(x, output) for x in parts(result)])

    def _alike(self, function: str, backend: Backend, expected: Accumulator, received: Accumulator) -> Accumulator:
        """Returns the accumulator that a function made; raises if its structure, shape or dtype has changed."""
        wanted, got = _kind(backend, expected), _kind(backend, received)
        if wanted != got:
            raise invalid(f"{wanted} from {function}", got)
        return received


def _kind(backend: Backend, a: Accumulator) -> str:
    """The structure and dtypes of an accumulator, in words."""
    if not isinstance(a, tuple):
        return f"{backend.dtype(a)} of shape {backend.shape(a)}" if backend.owns(a) else shown(a)
    fields = cast("tuple[Any, ...]", a)
    return f"{type(fields).__name__} of {', '.join(_kind(backend, x) for x in fields)}"
