"""TensorFlow: a function with the derivative of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gradcombine.errors import GradCombineError
from gradcombine.types import Array

Function = Callable[..., Sequence[Array]]


def custom_derivative(function: Function, surrogate: Function, leaves: Sequence[Any]) -> list[Array]:
    """See `gradcombine.backends.protocol.Backend.custom_derivative`."""
    moving = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (tf.Tensor, tf.Variable)) and _smooth(leaf)]
    if not moving:
        return list(function(*leaves))

    def replaced(arrays: Sequence[Array]) -> list[Any]:
        given = dict(zip(moving, arrays, strict=True))
        return [given.get(i, leaf) for i, leaf in enumerate(leaves)]

    @tf.custom_gradient
    def call(*arrays: Array) -> tuple[list[Array], Callable[..., Any]]:
        def gradient(*upstream: Array) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(arrays)
                results = list(surrogate(*replaced(arrays)))
            pairs = [(x, dx) for x, dx in zip(results, upstream, strict=True) if _smooth(x)]
            return tape.gradient([x for x, _ in pairs], list(arrays), [dx for _, dx in pairs])

        return list(function(*replaced([_cut(x) for x in arrays]))), gradient

    return list(call(*(tf.convert_to_tensor(leaves[i]) for i in moving)))


def _cut(array: Array) -> Array:
    """The array, of which no tape needs to remember what becomes of it."""
    if tf.executing_eagerly():
        return tf.stop_gradient(array)
    try:
        return tf.raw_ops.PreventGradient(input=array, message="")
    except LookupError:
        # In a graph, forward mode does not know of custom gradients: it would find 0.
        expected = "a tf.autodiff.ForwardAccumulator around the tf.function"
        raise GradCombineError("tensorflow", expected, "one inside of it") from None


def _smooth(array: Array) -> bool:
    return array.dtype.is_floating or array.dtype.is_complex
