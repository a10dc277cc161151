"""Contributions that are added to a window where it lies, without a second buffer of its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gradcombine.backends.tensorflow_backend import TensorflowBackend
from gradcombine.reductions.added import neutral, over_weight, zero_if_empty
from gradcombine.reductions.cell import Totals
from gradcombine.reductions.sums import MeanState, SumState
from gradcombine.reductions.weights import parse, weighted
from gradcombine.types import Array, State


class InPlace(NamedTuple):
    """One more contribution to a window whose accumulators stay where they are.

    Attributes:
      full: whether the window is full, so that the contribution takes its place; a boolean scalar.
      terms: what is added to each accumulator, in its dtype; None for nothing.
      totals: the other leaves of the state after it.
      step: as in `gradcombine.types.AccumulateState`.
      index: likewise.
    """

    full: Array
    terms: list[Any]
    totals: list[Any]
    step: Array
    index: Array


def is_sum(levels: Sequence[State]) -> bool:
    """Whether the state is one plain running sum, to which a contribution adds its weighted value and nothing else."""
    return len(levels) == 1 and type(levels[0]) in (SumState, MeanState)


def pays() -> bool:
    """Whether writing in place is the fast way here: in a graph that XLA does not compile.

    XLA copies a buffer that a conditional writes, and needs no second one for a plain assignment. Eagerly, the general
    way has the same operations. Either way gives the same bits.
    """
    return not tf.executing_eagerly() and tf.__internal__.get_enclosing_xla_context() is None


def terms(operation: str, gradients: Sequence[Any], weight: Any, accumulators: Sequence[Any]) -> list[Any]:
    """What the gradients add to the accumulators: ``weight * gradient`` in the accumulator's dtype, -0 for weight 0."""
    parsed = parse(operation, _BACKEND, weight)
    pairs = list(zip(gradients, accumulators, strict=True))

    def nothing() -> list[tf.Tensor]:
        return [empty(accumulator) for gradient, accumulator in pairs if gradient is not None]

    def products() -> list[tf.Tensor]:
        made = []
        for gradient, accumulator in pairs:
            if gradient is not None:
                running = _BACKEND.dtype(accumulator)
                made.append(_BACKEND.cast(weighted(operation, _BACKEND, gradient, parsed, running), running))
        return made

    zero = parsed.is_zero(_BACKEND)
    if zero is True:
        return [None] * len(pairs)
    found = iter(products() if zero is False else tf.cond(zero, nothing, products))
    return [None if gradient is None else next(found) for gradient, _ in pairs]


def empty(accumulator: Any) -> tf.Tensor:
    """An accumulator to which nothing was added."""
    dtype = _BACKEND.dtype(accumulator)
    return _BACKEND.full(tuple(accumulator.shape), neutral(dtype), dtype)


def write(pending: InPlace, accumulators: Sequence[Any]) -> None:
    """Adds the terms to the variables, or puts them in their place where the window is full."""
    pairs = [(x, term) for x, term in zip(accumulators, pending.terms, strict=True) if isinstance(x, tf.Variable)]

    def replace() -> None:
        for x, term in pairs:
            x.assign(empty(x) if term is None else term)

    def add() -> None:
        for x, term in pairs:
            if term is not None:
                x.assign_add(term)

    tf.cond(pending.full, replace, add)


def value(state: Any, outputs: Sequence[np.dtype]) -> list[Any]:
    """The result of a running sum, as its reduction finalizes it, in these dtypes."""
    result = over_weight if type(state) is MeanState else zero_if_empty

    def empty() -> list[tf.Tensor]:
        return [tf.zeros(x.shape, output) for x, output in zip(state.value, outputs, strict=True)]

    def finished() -> list[tf.Tensor]:
        # The count is known to be positive here, which spares a pass over every leaf.
        totals = Totals(state.weight, np.int32(1))
        pairs = zip(state.value, outputs, strict=True)
        return [_BACKEND.cast(result(_BACKEND, x, totals), output) for x, output in pairs]

    return tf.cond(state.count == 0, empty, finished)


class _Kernels(TensorflowBackend):
    """The operations that are fast as kernels of their own.

    In place of the selects that keep XLA from fusing products and from dividing by reciprocals there are conditionals,
    which do the same, and which cost nothing where every operation is a kernel anyway.
    """

    def scale(self, array: Any, weight: Any) -> Any:
        # The addition is made in a conditional, and a product outside of it is not fused with it.
        return super().scale(array, weight) if array.dtype.is_complex else tf.multiply(array, weight)

    def divide(self, array: Any, divisor: Any) -> Any:
        if array.dtype.is_complex:
            return super().divide(array, divisor)
        spread = tf.cond(divisor == 1, lambda: tf.ones_like(array), lambda: tf.fill(tf.shape(array), divisor))
        return tf.divide(array, spread)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return super().where(condition, a, b) if tf.is_tensor(condition) or condition else b


_BACKEND = _Kernels()
