"""Reductions that a user defines by elementwise functions."""

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


class ElementwiseState(TreewiseState):
    """A partial result of `elementwise`; each reduction has its own subclass."""


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
    """A reduction from functions that apply to each leaf, element by element.

    The first argument ``xp`` of the functions has the operations of the arrays' framework, so that one definition runs
    in all frameworks. They may use ``add``, ``product``, ``scale`` and ``divide`` (by a scalar), ``maximum``, ``sqrt``,
    ``where``, ``cast``, ``full``, ``dtype`` and ``shape`` of `gradcombine.backends.protocol.Backend`, and the operators
    ``+ - * / abs`` and comparisons. They must be pure.

    An *accumulator* is an array of the leaf's shape, or a tuple or NamedTuple of such arrays, all of one dtype.

    Args:
      name: the name in error messages and state files.
      empty: the elements of an empty accumulator: a number, or a tuple or NamedTuple of numbers; or a function from the
        accumulator dtype to them.
      update: ``update(xp, a, x, weight) -> a``: adds the contribution ``x``, in the accumulator dtype. The weight is a
        scalar of the real accumulator dtype; float32 if that is an integer dtype and the weight is not known to be
        integral. The result for weight 0 is discarded.
      merge: ``merge(xp, a, b) -> a``: merges two accumulators; ``a`` has the earlier contributions.
      finalize: ``finalize(xp, a, totals) -> result``: an array, or a tuple or NamedTuple of arrays, in place of the
        leaf. ``totals.weight`` is the sum of weights, a scalar of the real accumulator dtype (a float for integer
        dtypes), and ``totals.count`` the int32 number of contributions of nonzero weight, which may be 0. None: returns
        the accumulator.
      kinds: the kinds of dtypes that it accepts: any of "float", "complex", "integer" and "bool".
      dtype: the accumulator dtype. None: that of the contributions, but float32 for narrower floats and 32 bits for
        narrower integers.
      output_dtype: the dtype of the result. None: that of the contributions; for integers, that of the accumulator.
      scales_by_weight: see `gradcombine.Reduction`.

    Returns:
      A reduction over list, time and replicas. A leaf that is None does not change its accumulator.

    Raises:
      GradCombineError: for invalid settings; in the methods of the reduction as for other ones, and for a function that
        returns an accumulator of another shape, dtype or structure than its argument.

    Bits: those of the functions. Over replicas, states are gathered and merged in the canonical tree over the ranks.

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
    finalize = (lambda xp, a, totals: a) if finalize is None else finalize
    check(update=update, merge=merge, finalize=finalize)
    if not callable(empty) and not all(isinstance(x, Number) for x in parts(empty)):
        raise invalid("a number, a tuple of numbers or a function as empty", shown(empty))
    expected = f"kinds among {list(dtypes.KINDS)}"
    accepted = [] if isinstance(kinds, str) else require_items(expected, kinds)
    if not accepted:
        raise invalid(expected, shown(kinds))
    for kind in accepted:
        require_one_of(expected, kind, dtypes.KINDS)
    settings = dtypes.Settings(dtype, output_dtype)
    cell = _UserCell(name, tuple(accepted), settings, empty, update, merge, finalize)
    return Treewise(cell, _state_class(name), scales_by_weight=valid("scales_by_weight", scales_by_weight))


@cache
def _state_class(name: str) -> type[ElementwiseState]:
    """The class of states of reductions of this name; cached, so that a reduction may be defined twice."""
    words = "".join(character if character.isalnum() else " " for character in name).split()
    prefix = "".join(word[0].upper() + word[1:] for word in words)

    def reduce(self: ElementwiseState) -> Any:
        return _rebuilt, (name, *self)

    return type(f"{prefix}State", (ElementwiseState,), {"__reduce__": reduce})


def _rebuilt(name: str, *fields: Any) -> ElementwiseState:
    return _state_class(name)(*fields)


@dataclass(frozen=True)
class _UserCell(Cell):
    name: str
    kinds: tuple[str, ...]
    settings: dtypes.Settings
    identity: Any
    user_update: Callable[[Backend, Accumulator, Array, Array], Accumulator]
    user_merge: Callable[[Backend, Accumulator, Accumulator], Accumulator]
    user_finalize: Callable[[Backend, Accumulator, Totals], Leaf]

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> Accumulator:
        identity = self.identity(running) if callable(self.identity) else self.identity
        for number in parts(identity):
            if not dtypes.holds(running, number):
                raise invalid(f"a number of {running} as empty", shown(number))
        with np.errstate(over="ignore"):  # infinite above the range of the dtype
            numbers: list[Any] = [np.asarray(number, running)[()] for number in parts(identity)]
        return refilled(identity, [backend.full(shape, number, running, [like]) for number in numbers])

    def update(self, backend: Backend, a: Accumulator, x: Array, weight: Weight, totals: Totals) -> Accumulator:
        running = backend.dtype(parts(a)[0])
        is_fractional = dtypes.kind(running) == "integer" and not weight.is_integral
        factor = weight.cast(backend, dtypes.FLOAT32 if is_fractional else dtypes.part(running))
        updated = self.user_update(backend, a, backend.cast(x, running), factor)
        return self._checked("update", backend, a, updated)

    def merge(
        self, backend: Backend, a: Accumulator, b: Accumulator, a_totals: Totals, b_totals: Totals
    ) -> Accumulator:
        return self._checked("merge", backend, a, self.user_merge(backend, a, b))

    def finish(self, backend: Backend, a: Accumulator, totals: Totals, output: np.dtype) -> Leaf:
        running = dtypes.part(backend.dtype(parts(a)[0]))
        if dtypes.kind(running) != "integer":
            totals = Totals(backend.cast(totals.weight, running), totals.count)
        result = self.user_finalize(backend, a, totals)
        if any(owner(x) is None for x in parts(result)):
            raise invalid("an array, or a tuple of arrays, from finalize", shown(result))
        return refilled(result, [backend.cast(x, output) for x in parts(result)])

    def _checked(self, function: str, backend: Backend, expected: Accumulator, received: Accumulator) -> Accumulator:
        """Returns the result of a user's function; raises if its structure, shape or dtype is not the expected one."""
        wanted, got = _summary(backend, expected), _summary(backend, received)
        if wanted != got:
            raise invalid(f"{wanted} from {function}", got)
        return received


def _summary(backend: Backend, a: Accumulator) -> str:
    """Describes the structure, dtypes and shapes of an accumulator for error messages."""
    if not isinstance(a, tuple):
        return f"{backend.dtype(a)} of shape {backend.shape(a)}" if backend.owns(a) else shown(a)
    fields = cast("tuple[Any, ...]", a)
    return f"{type(fields).__name__} of {', '.join(_summary(backend, x) for x in fields)}"
