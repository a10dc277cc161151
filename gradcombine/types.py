"""Shared types, and the mark that keeps TensorFlow's AutoGraph out of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

F = TypeVar("F", bound=Callable[..., object])

Array: TypeAlias = Any
"""A NumPy array, a JAX array or tracer, or a TensorFlow tensor.

Any, because no protocol of operators fits all three: NumPy declares them by dtype, TensorFlow's tensors declare none,
and JAX's functions ask for a type of JAX's own.
"""

Tree: TypeAlias = Any
"""Nested dicts, lists, tuples, NamedTuples and registered JAX nodes of arrays and None."""

Leaf: TypeAlias = Any
"""A leaf of a tree: an array, a Python number, a shape/dtype spec, or None for "no gradient"."""

Scalar: TypeAlias = Any
"""A number: Python's, NumPy's, or an array of shape (), traced or not."""

DType: TypeAlias = Any
"""A dtype as NumPy, ml_dtypes, JAX or TensorFlow spell it; None where there is a default."""

State: TypeAlias = Any
"""The partial result of a reduction: a NamedTuple tree of arrays."""

Order: TypeAlias = Literal["sequential", "tree"]
"""``"sequential"``: one running value. ``"tree"``: the canonical binary tree over the contributions' numbers."""

Precision: TypeAlias = Literal["fast", "compensated", "exact"]
"""Of a sum: see `gradcombine.reductions.sum`."""

Overflow: TypeAlias = Literal["error", "check"]
"""Handling of rows past the capacity: see `gradcombine.reductions.row_sum`."""

Totals: TypeAlias = Literal["counted", "given"]
"""How the totals of several denominators are known before the gradients."""


class BinaryCounter(NamedTuple):
    """Partial states of 1, 2, 4, 8 ... contributions.

    Attributes:
      stacked: a state of the reduction whose arrays have an extra leading axis, one entry per level. Level ``i`` holds
        2**i contributions where bit ``i`` of ``filled`` is set, and is undefined where it is not. The last level holds
        everything beyond.
      filled: int32 scalar, the contributions in the levels.
    """

    stacked: State
    filled: Array


class AccumulateState(NamedTuple):
    """A window of contributions over time.

    Attributes:
      levels: a tuple of one partial state of the reduction. Under order ``"tree"`` a `BinaryCounter` of several.
      step: int32 scalar, the contributions of this window so far, those of weight 0 counted.
      index: int32 scalar, the number of this window, from 0.
    """

    levels: tuple[State, ...] | BinaryCounter
    step: Array
    index: Array


def no_autograph(function: F) -> F:
    """Marks a function as ordinary Python, which a surrounding tf.function calls without rewriting its source.

    Nothing here branches on a tensor, so a rewrite could only slow the tracing down, tenfold as measured. The mark is
    the one that `tf.autograph.experimental.do_not_convert
    <https://www.tensorflow.org/api_docs/python/tf/autograph/experimental/do_not_convert>`_ leaves, set without
    importing TensorFlow.
    """
    function.autograph_info__ = {}  # pyright: ignore[reportFunctionMemberAccess]
    return function
