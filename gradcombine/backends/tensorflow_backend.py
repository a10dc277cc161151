# pyright: standard
"""TensorFlow: eager, tf.function, XLA, and the replicas of tf.distribute."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import ml_dtypes
import numpy as np
import tensorflow as tf

from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.numpy_backend import NARROW
from gradcombine.backends.protocol import Backend, Kernel, RowSlices
from gradcombine.backends.tensorflow_functions import compiles, function, in_loop, totals
from gradcombine.errors import GradCombineError, invalid
from gradcombine.types import Array, DType, Leaf, Tree


class TensorflowBackend(Backend):
    name = "tensorflow"
    differentiates = True
    total = staticmethod(cast("Any", tf.reduce_sum))
    sqrt = staticmethod(cast("Any", tf.sqrt))
    argsort = staticmethod(partial(tf.argsort, stable=True))
    cumsum = staticmethod(tf.cumsum)
    search_sorted = staticmethod(tf.searchsorted)
    stack = staticmethod(tf.stack)
    reshape = staticmethod(cast("Any", tf.reshape))
    largest = staticmethod(cast("Any", partial(tf.reduce_max, axis=-1, keepdims=True)))
    slice_at = take = staticmethod(tf.gather)

    def owns(self, leaf: Leaf) -> bool:
        return isinstance(leaf, (tf.Tensor, tf.Variable, tf.TensorSpec, tf.IndexedSlices))

    def asarray(self, leaf: Leaf) -> Array:
        if isinstance(leaf, tf.TensorSpec):
            raise invalid("a tensor", f"the shape/dtype spec {leaf}")
        try:
            tensor = tf.convert_to_tensor(leaf if self.owns(leaf) else NUMPY.asarray(leaf))
        except GradCombineError:
            raise
        except (TypeError, ValueError):
            raise invalid("a dense tensor of numbers", type(leaf).__name__) from None
        if tensor.dtype.name in _STORED:
            raise _no_kernels(tensor.dtype.name)
        return tensor

    def dtype(self, leaf: Leaf) -> np.dtype:
        if not self.owns(leaf):
            return NUMPY.dtype(leaf)
        try:
            return np.dtype(leaf.dtype.as_numpy_dtype)
        except KeyError:  # of handles
            raise invalid("a dtype of numbers", leaf.dtype.name) from None

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        if not self.owns(leaf):
            return NUMPY.shape(leaf)
        if not leaf.shape.is_fully_defined():
            expected = "a shape that is known while tracing (tf.ensure_shape states it, and checks it)"
            raise invalid(expected, leaf.shape)
        return tuple(leaf.shape)

    def concrete(self, array: Array) -> np.ndarray | None:
        if isinstance(array, (tf.Tensor, tf.Variable)):
            if tf.executing_eagerly() and hasattr(array, "numpy"):
                return array.numpy()
            # In a graph, a scalar that is a constant, or folded from constants.
            return tf.get_static_value(array) if isinstance(array, tf.Tensor) and array.shape.rank == 0 else None
        return np.asarray(array)

    def full(self, shape: tuple[int, ...], fill: float, dtype: np.dtype, like: Sequence[Leaf] = ()) -> Array:
        if dtype not in _COMPUTED:
            raise _no_kernels(dtype)
        filling = tf.constant(np.asarray(fill, dtype))
        try:
            return tf.fill(shape, filling) if shape else filling
        except ValueError:
            raise invalid("a shape that an array can have", shape) from None

    def cast(self, array: Array, dtype: np.dtype) -> Array:
        if dtype not in _COMPUTED and dtype.name not in _CAST:
            raise _no_kernels(dtype)
        return tf.cast(array, tf.as_dtype(dtype))

    def add(self, a: Array, b: Array) -> Array:
        if a.dtype.name in _CAST:  # of a state that began with arrays of NumPy
            raise _no_kernels(a.dtype.name)
        return _in_order(tf.add(a, b))

    def product(self, a: Array, b: Array) -> Array:
        return _in_order(tf.multiply(a, b))

    def scale(self, array: Array, weight: Array) -> Array:
        if array.dtype.is_complex:
            return tf.complex(self.scale(tf.math.real(array), weight), self.scale(tf.math.imag(array), weight))
        product = tf.multiply(array, weight)
        if not array.dtype.is_floating or _UNGUARDED.now:
            return product
        # Under jit_compile a product and the addition after it are contracted into one fused multiply-add; a select
        # between them keeps the product's own rounding.
        return tf.where(tf.math.is_nan(product), product + tf.ones((), product.dtype), product)

    def divide(self, array: Array, divisor: Array) -> Array:
        if array.dtype.is_complex:
            return tf.complex(self.divide(tf.math.real(array), divisor), self.divide(tf.math.imag(array), divisor))
        if _UNGUARDED.now:
            return tf.divide(array, divisor)
        # XLA turns a constant scalar divisor into a multiplication by its reciprocal, which rounds twice.
        return tf.divide(array, tf.where(tf.math.is_nan(array), tf.ones((), array.dtype), divisor))

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        if tf.executing_eagerly() and self.shape(condition) == ():
            known = self.concrete(condition)
            # Spares two passes; and DTensor has no select by a scalar between sharded tensors.
            chosen = tf.convert_to_tensor(a if known else b)
            shape = tf.broadcast_static_shape(tf.convert_to_tensor(a).shape, tf.convert_to_tensor(b).shape)
            return chosen if chosen.shape == shape else tf.broadcast_to(chosen, shape)
        if isinstance(condition, bool) and not tf.inside_function():
            # There a == b is no tensor, but whether both are one object.
            received = "a tf.Graph of TensorFlow 1, whose tensors are compared by identity"
            raise invalid("eager execution or a tf.function", received)
        return tf.where(condition, a, b)

    def bitcast(self, array: Array, dtype: np.dtype) -> Array:
        if array.dtype.is_complex:
            array = tf.stack([tf.math.real(array), tf.math.imag(array)], axis=-1)
        if array.dtype.name in _CAST:
            raise _no_kernels(array.dtype.name)
        return tf.bitcast(array, tf.as_dtype(dtype))

    def shift_left(self, a: Array, amount: Array | int) -> Array:
        return tf.bitwise.left_shift(a, tf.convert_to_tensor(amount, a.dtype))

    def shift_right(self, a: Array, amount: Array | int) -> Array:
        return tf.bitwise.right_shift(a, tf.convert_to_tensor(amount, a.dtype))

    def maximum(self, a: Array, b: Array) -> Array:
        # XLA on CPU drops a NaN in its own maximum, so the comparison is spelled out.
        larger = tf.where(a > b, a, b)
        if not larger.dtype.is_floating:
            return larger
        return tf.where(tf.math.is_nan(a), a, tf.where(tf.math.is_nan(b), b, larger))

    def fused(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        if _LOOPED.now:
            return in_loop(function(self, kernel, static, False), arrays)
        shape = max((tuple(array.shape) for array in arrays), key=len)
        sharded = tf.executing_eagerly() and any("CUSTOM" in array.device for array in arrays)  # by DTensor
        if math.prod(shape) < _WORTH_COMPILING or sharded or not compiles():
            inline = tf.executing_eagerly() or len(arrays) < _WORTH_A_FUNCTION
            return tuple(kernel(self, *static, *arrays)) if inline else self.traced_once(kernel, static, arrays)
        # One compilation for all shapes of a size.
        flat = (tf.reshape(array, [-1]) if array.shape.rank else array for array in arrays)
        return tuple(tf.reshape(result, shape) for result in function(self, kernel, static, True)(*flat))

    def fused_totals(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        size = arrays[0].shape.num_elements()
        sharded = tf.executing_eagerly() and "CUSTOM" in arrays[0].device  # by DTensor
        if size is None or size < _WORTH_COMPILING or sharded or not compiles():
            return tuple(map(tf.reduce_sum, kernel(self, *static, *arrays)))
        return tuple(totals(self, kernel, static)(*(tf.reshape(array, [-1]) for array in arrays)))

    def traced_once(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(function(self, kernel, static, False)(*arrays))

    def prefers_rows(self, shape: tuple[int, ...], count: int) -> bool:
        return math.prod(shape) <= _WORTH_STACKING and count >= _WORTH_A_FUNCTION and in_plain_graph()

    def prefers_joined(self, array: Array) -> bool:
        if not self.owns(array) or math.prod(self.shape(array)) >= _WORTH_COMPILING:
            return False
        return not (tf.executing_eagerly() and "CUSTOM" in array.device)  # DTensor would gather what is sharded

    def joined(self, function: Callable[..., Tree], *arguments: Tree) -> Tree:
        before, _LOOPED.now = _LOOPED.now, not (tf.executing_eagerly() or in_plain_graph())
        try:
            return function(*arguments)
        finally:
            _LOOPED.now = before

    def apply_if_rare(
        self, condition: Array, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]
    ) -> tuple[Array, ...]:
        known = self.concrete(condition)
        if known is not None:
            return super().apply_if_rare(known, kernel, static, arrays)

        def turn(_: Array, *carried: Array) -> tuple[Array, ...]:
            return tf.constant(False), *self.fused(kernel, static, carried)

        # Under jit_compile a conditional would copy all of the arrays; a loop of no turns leaves them where they are.
        return tf.while_loop(lambda due, *_: due, turn, (condition, *arrays))[1:]

    def custom_derivative(
        self,
        function: Callable[..., Sequence[Array]],
        surrogate: Callable[..., Sequence[Array]],
        leaves: Sequence[Leaf],
    ) -> list[Array]:
        moving = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (tf.Tensor, tf.Variable)) and _smooth(leaf)]
        if not moving:
            return super().custom_derivative(function, surrogate, leaves)
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
            raise invalid(expected, "one inside of it, to which custom gradients are unknown")
        # It finds no derivative through a tape within a custom gradient, but through the surrogate itself.
        return [_joined(x, other) for x, other in zip(value(inputs), surrogate(*replaced(inputs)), strict=True)]

    def row_slices(self, leaf: Leaf) -> RowSlices | None:
        if not isinstance(leaf, tf.IndexedSlices):
            return None
        shape = None if leaf.dense_shape is None else tf.get_static_value(leaf.dense_shape)
        return RowSlices(leaf.indices, leaf.values, None if shape is None else int(shape[0]))

    def flat(self, array: Array) -> Array:
        return tf.reshape(array, [-1])

    def row_numbers(self, array: Array) -> Array:
        return tf.range(tf.size(array)) // tf.shape(array)[-1]

    def loop(
        self, condition: Callable[..., Array], body: Callable[..., tuple[Array, ...]], *carry: Array
    ) -> tuple[Array, ...]:
        return tf.while_loop(condition, body, carry)

    def repeat(
        self,
        turns: Array,
        body: Callable[[Array, list[Array], list[Array]], list[Array]],
        carry: Sequence[Array],
        constants: Sequence[Array],
        most: int,
    ) -> list[Array]:
        known = self.concrete(turns)
        if known is not None:
            return super().repeat(known, body, carry, constants, most)

        def turn(i: Array, *carried: Array) -> tuple[Array, ...]:
            return i + 1, *body(i, list(carried), list(constants))

        start = (tf.constant(0), *map(tf.convert_to_tensor, carry))
        return list(tf.while_loop(lambda i, *_: i < turns, turn, start, maximum_iterations=most)[1:])

    def update_at(self, array: Array, i: Array | int, row: Array) -> Array:
        if array.shape.num_elements() == 0:  # which TensorFlow refuses to write to
            return array
        return tf.tensor_scatter_nd_update(array, tf.reshape(i, [1, 1]), tf.convert_to_tensor(row)[tf.newaxis])

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        return tf.concat(list(arrays), axis=axis)

    def unpack(self, array: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        parts = tf.split(array, list(map(math.prod, shapes)))
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def put(self, array: Array, positions: Array, rows: Array) -> Array:
        if array.shape.num_elements() == 0:
            return array
        # On CPU a position past the end is an error, so there is one more row for all of them.
        longer = tf.concat([array, tf.zeros_like(array[:1])], axis=0)
        inside = tf.minimum(positions, array.shape[0])
        return tf.tensor_scatter_nd_update(longer, inside[:, tf.newaxis], rows)[:-1]

    def check(self, condition: Array, operation: str, expected: str, received: str) -> None:
        value = self.concrete(condition)
        if value is None:
            tf.debugging.Assert(tf.reduce_all(condition), [str(GradCombineError(operation, expected, received))])
        else:
            super().check(value, operation, expected, received)


_COMPUTED = frozenset(map(np.dtype, "?bhiqBHIQefdFD")) | {np.dtype(ml_dtypes.bfloat16)}
"""The dtypes that TensorFlow has kernels for."""

_CAST = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Dtypes that TensorFlow casts, and does nothing else with."""

_STORED = frozenset(dtype.name for dtype in NARROW - _COMPUTED) - _CAST
"""Dtypes that TensorFlow holds, and nothing more."""


def _no_kernels(dtype: DType) -> GradCombineError:
    return invalid("a dtype that TensorFlow computes with", dtype)


_WORTH_COMPILING = 1 << 14
"""Elements of an array; a compilation takes some tenths of a second."""

_WORTH_A_FUNCTION = 32
"""Arrays of a kernel; traced once it is one operation wherever it is called."""

_WORTH_STACKING = 1 << 8
"""Elements of an array up to which an operation costs more than the elements that are copied."""


class _Flag(threading.local):
    now = False


_UNGUARDED, _LOOPED = _Flag(), _Flag()


@contextmanager
def unguarded() -> Iterator[None]:
    """Leaves out what keeps XLA from changing bits, in what this thread traces inside of a with statement.

    That is sound, also where XLA compiles the graph later, for products that are added inside of a conditional but made
    outside, and for divisors that no compiler knows, as those in variables. It spares passes over memory, and most of
    what there is to trace.
    """
    before, _UNGUARDED.now = _UNGUARDED.now, True
    try:
        yield
    finally:
        _UNGUARDED.now = before


def in_plain_graph() -> bool:
    """Whether this is being traced for TensorFlow's own executor: not eager, and not for XLA."""
    return not tf.executing_eagerly() and tf.__internal__.get_enclosing_xla_context() is None


def _in_order(result: Array) -> Array:
    """Keeps Grappler from reordering operations of one kind in a graph.

    It rewrites a tree or chain of additions into one AddN, which adds in another order, and moves constants through a
    chain of products; but not across an operation of another kind, and this one passes its buffer on.
    """
    return result if tf.executing_eagerly() else tf.ensure_shape(result, result.shape)


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


BACKEND = TensorflowBackend()
