"""Shared types, and the decorator that excludes functions from TensorFlow's AutoGraph."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])

Array: TypeAlias = Any
"""A NumPy array, a JAX array or tracer, or a TensorFlow tensor.

Any, because no protocol of operators fits all three: NumPy declares them by dtype, TensorFlow does not declare them,
and JAX's functions require JAX's own array type.
"""

Tree: TypeAlias = Any
"""A pytree: nested dicts, lists, tuples, NamedTuples and nodes registered with JAX, of arrays and None."""

Leaf: TypeAlias = Any
"""A leaf of a pytree: an array, a Python number, a shape/dtype spec, or None for "no gradient"."""

Scalar: TypeAlias = Any
"""A Python or NumPy number, or an array of shape (), traced or not."""

DType: TypeAlias = Any
"""A dtype as NumPy, ml_dtypes, JAX or TensorFlow spell it; None for the default, if there is one."""

State: TypeAlias = Any
"""The partial result of a reduction: a NamedTuple tree of arrays."""

Order: TypeAlias = Literal["sequential", "tree"]
"""``"sequential"``: a running value. ``"tree"``: the canonical binary tree over the indices of the contributions."""

Precision: TypeAlias = Literal["fast", "compensated", "exact"]
"""Precision of a sum: see `gradcombine.reductions.sum`."""

Overflow: TypeAlias = Literal["error", "check"]
"""Handling of rows past the capacity: see `gradcombine.reductions.row_sum`."""

Totals: TypeAlias = Literal["counted", "given"]
"""Whether the totals of several denominators are counted from the batch or passed by the user."""


class BinaryCounter(NamedTuple):
    """Partial states of 1, 2, 4, 8 ... contributions.

    Attributes:
      stacked: a state of the reduction whose arrays have an extra leading axis, one entry per level. Level ``i`` holds
        2**i contributions if bit ``i`` of ``filled`` is set, and is undefined otherwise. The last level holds all
        higher ones.
      filled: int32 scalar, the number of contributions in the levels.
    """

    stacked: State
    filled: Array


class AccumulateState(NamedTuple):
    """A window of contributions over time.

    Attributes:
      levels: a tuple of one partial state of the reduction; a `BinaryCounter` of several under order ``"tree"``.
      step: int32 scalar, the number of contributions to this window so far, including those of weight 0. -1 if it has
        contributions and `gradcombine.statefile.resize` rounded the number down to 0.
      index: int32 scalar, the index of this window, from 0.
    """

    levels: tuple[State, ...] | BinaryCounter
    step: Array
    index: Array


def no_autograph(function: F) -> F:
    """Makes a surrounding tf.function call the function, or the methods of a class, as they are, without AutoGraph.

    No code of the library branches on a tensor, and AutoGraph makes its tracing ten times slower. Sets the attribute
    that `tf.autograph.experimental.do_not_convert
    <https://www.tensorflow.org/api_docs/python/tf/autograph/experimental/do_not_convert>`_ sets, without importing
    TensorFlow.
    """
    marked: list[Any] = [function]
    if isinstance(function, type):
        marked += [x for x in vars(function).values() if isinstance(x, FunctionType)]
    for x in marked:
        x.autograph_info__ = {}
    return cast(F, function)
