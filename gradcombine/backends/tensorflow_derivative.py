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
    inputs = [tf.convert_to_tensor(leaves[i]) for i in moving]

    def replaced(arrays: Sequence[Array]) -> list[Any]:
        given = dict(zip(moving, arrays, strict=True))
        return [given.get(i, leaf) for i, leaf in enumerate(leaves)]

    def value(arrays: Sequence[Array]) -> list[Array]:
        # What becomes of these arrays is nothing for a tape to remember.
        return list(function(*replaced([tf.stop_gradient(x) for x in arrays])))

    @tf.custom_gradient
    def call(*arrays: Array) -> tuple[list[Array], Callable[..., Any]]:
        def gradient(*upstream: Array) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(arrays)
                results = surrogate(*replaced(arrays))
            pairs = [(x, dx) for x, dx in zip(results, upstream, strict=True) if _smooth(x)]
            return tape.gradient([x for x, _ in pairs], list(arrays), [dx for _, dx in pairs])

        return value(arrays), gradient

    if not _in_forward_mode(inputs):
        return list(call(*inputs))
    if not tf.executing_eagerly():
        expected = "a tf.autodiff.ForwardAccumulator around the tf.function"
        raise GradCombineError("tensorflow", expected, "one inside of it, to which custom gradients are unknown")
    # It finds no derivative through a tape within a custom gradient, but through the surrogate itself.
    return [_joined(x, other) for x, other in zip(value(inputs), surrogate(*replaced(inputs)), strict=True)]


def _joined(value: Array, surrogate: Array) -> Array:
    """The value, with the derivative of the surrogate."""
    if not _smooth(value):
        return value
    return tf.custom_gradient(lambda _: (tf.identity(value), lambda upstream: upstream))(surrogate)


def _in_forward_mode(arrays: Sequence[Array]) -> bool:
    """Whether a ForwardAccumulator follows one of the arrays: then it asks at once for a derivative that is refused."""
    try:
        for x in arrays:
            tf.raw_ops.PreventGradient(input=x, message="")
    except LookupError:
        return True
    return False


def _smooth(array: Array) -> bool:
    return array.dtype.is_floating or array.dtype.is_complex
