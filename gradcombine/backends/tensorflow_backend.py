# pyright: standard
"""The TensorFlow backend: eager, under tf.function and under XLA."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.numpy_backend import NARROW
from gradcombine.backends.protocol import Backend, Iteration, Kernel, RowSlices, ToArrays, primitive
from gradcombine.backends.tensorflow_functions import compiles, function, in_float32, in_loop, totals
from gradcombine.errors import GradCombineError, invalid
from gradcombine.types import Array, DType, Leaf, Tree


class TensorflowBackend(Backend):
    name = "tensorflow"
    differentiates = True
    total = primitive(tf.reduce_sum)
    sqrt = primitive(tf.sqrt)
    argsort = primitive(partial(tf.argsort, stable=True))
    cumsum = primitive(tf.cumsum)
    search_sorted = primitive(tf.searchsorted)
    stack = primitive(tf.stack)
    reshape = primitive(tf.reshape)
    largest = primitive(partial(tf.reduce_max, axis=-1, keepdims=True))
    slice_at = take = primitive(tf.gather)

    def owns(self, leaf: Leaf) -> bool:
        return isinstance(leaf, (tf.Tensor, tf.Variable, tf.TensorSpec, tf.IndexedSlices))

    def asarray(self, leaf: Leaf) -> Array:
        if isinstance(leaf, tf.TensorSpec):
            raise invalid("a tensor", f"the shape/dtype spec {leaf}")
        try:
            if isinstance(leaf, tf.IndexedSlices):
                tensor = tf.cast(tf.convert_to_tensor(in_float32(leaf)), leaf.dtype)
            else:
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
        except KeyError:  # resource and variant handles have no NumPy dtype
            raise invalid("a numeric dtype", leaf.dtype.name) from None

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        if not self.owns(leaf):
            return super().shape(leaf)
        if not leaf.shape.is_fully_defined():
            sparse, dense = "tf.IndexedSlices with a constant dense_shape", "a shape that is known while tracing"
            expected = sparse if isinstance(leaf, tf.IndexedSlices) else f"{dense} (tf.ensure_shape sets and checks it)"
            raise invalid(expected, leaf.shape)
        return tuple(leaf.shape)

    def concrete(self, array: Array) -> np.ndarray | None:
        if isinstance(array, (tf.Tensor, tf.Variable)):
            if tf.executing_eagerly() and hasattr(array, "numpy"):
                return array.numpy()
            # In a graph, only scalars that fold to a constant.
            return tf.get_static_value(array) if isinstance(array, tf.Tensor) and array.shape.rank == 0 else None
        return np.asarray(array)

    def full(self, shape: tuple[int, ...], fill: float, dtype: np.dtype, like: Sequence[Leaf] = ()) -> Array:
        if dtype not in _COMPUTED:
            raise _no_kernels(dtype)
        value = tf.constant(np.asarray(fill, dtype))
        try:
            return tf.fill(shape, value) if shape else value
        except ValueError:
            raise invalid("a shape that an array can have", shape) from None

    def cast(self, array: Array, dtype: np.dtype) -> Array:
        if dtype not in _COMPUTED and dtype.name not in _CAST:
            raise _no_kernels(dtype)
        return tf.cast(array, tf.as_dtype(dtype))

    def add(self, a: Array, b: Array) -> Array:
        if a.dtype.name in _CAST:  # possible for a state that was started with NumPy arrays
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
        # Under jit_compile, XLA contracts a product and a subsequent addition into a fused multiply-add. A select in
        # between keeps the rounding of the product.
        return tf.where(tf.math.is_nan(product), product + tf.ones((), product.dtype), product)

    def divide(self, array: Array, divisor: Array) -> Array:
        if array.dtype.is_complex:
            return tf.complex(self.divide(tf.math.real(array), divisor), self.divide(tf.math.imag(array), divisor))
        if _UNGUARDED.now:
            return tf.divide(array, divisor)
        if array.dtype == tf.float32 and _has_gpus():
            # XLA on GPUs divides float32 with errors of up to 2 units in the last place. A quotient of float32 rounded
            # to float64 and then to float32 is correctly rounded.
            return tf.cast(tf.divide(tf.cast(array, tf.float64), tf.cast(divisor, tf.float64)), tf.float32)
        # XLA turns division by a constant scalar into multiplication by its reciprocal, which rounds twice.
        return tf.divide(array, tf.where(tf.math.is_nan(array), tf.ones((), array.dtype), divisor))

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        if not tf.executing_eagerly():
            if isinstance(condition, bool) and not tf.inside_function():
                # In a TensorFlow 1 graph, a == b compares the identity of two tensors.
                received = "a tf.Graph of TensorFlow 1, whose tensors are compared by identity"
                raise invalid("eager execution or a tf.function", received)
        elif self.shape(condition) == () and (self.shape(a) or self.shape(b)):
            known = self.concrete(condition)
            # Saves two passes over memory; and DTensor cannot select between sharded tensors by a scalar.
            chosen = tf.convert_to_tensor(a if known else b)
            shape = tf.broadcast_static_shape(tf.convert_to_tensor(a).shape, tf.convert_to_tensor(b).shape)
            return chosen if chosen.shape == shape else tf.broadcast_to(chosen, shape)
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
        # Written as selects, because the maximum of XLA on CPU drops NaNs.
        larger = tf.where(a > b, a, b)
        if not larger.dtype.is_floating:
            return larger
        return tf.where(tf.math.is_nan(a), a, tf.where(tf.math.is_nan(b), b, larger))

    def fused(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        if _LOOPED.now:
            return tuple(in_loop(self, kernel, static)(*arrays))
        shape = max((tuple(array.shape) for array in arrays), key=len)
        if math.prod(shape) < _WORTH_COMPILING or any(map(_is_sharded, arrays)) or not compiles():
            inline = tf.executing_eagerly() or len(arrays) < _WORTH_A_FUNCTION
            return tuple(kernel(self, *static, *arrays)) if inline else self.traced_once(kernel, static, arrays)
        # Flattened, so that all shapes of the same size share a compilation.
        flat = (tf.reshape(array, [-1]) if array.shape.rank else array for array in arrays)
        return tuple(tf.reshape(result, shape) for result in function(self, kernel, static, True)(*flat))

    def fused_totals(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        size = arrays[0].shape.num_elements()
        if size is None or size < _WORTH_COMPILING or _is_sharded(arrays[0]) or not compiles():
            return tuple(map(tf.reduce_sum, kernel(self, *static, *arrays)))
        return tuple(totals(self, kernel, static)(*(tf.reshape(array, [-1]) for array in arrays)))

    def traced_once(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(function(self, kernel, static, False)(*arrays))

    def traced(self, function: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
        return function if tf.executing_eagerly() else tf.function(function, autograph=False)

    def prefers_rows(self, shape: tuple[int, ...], count: int) -> bool:
        return math.prod(shape) <= _WORTH_STACKING and count >= _WORTH_A_FUNCTION and in_plain_graph()

    def prefers_joined(self, array: Array) -> bool:
        if not self.owns(array) or math.prod(self.shape(array)) >= _WORTH_COMPILING:
            return False
        return not _is_sharded(array)  # joining would gather it

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

        def body(_: Array, *carried: Array) -> tuple[Array, ...]:
            return tf.constant(False), *self.fused(kernel, static, carried)

        # Under jit_compile a conditional would copy all arrays; a loop of zero iterations leaves them in place.
        return tf.while_loop(lambda due, *_: due, body, (condition, *arrays))[1:]

    def custom_derivative(self, function: ToArrays, surrogate: ToArrays, leaves: Sequence[Leaf]) -> list[Array]:
        differentiable = [i for i, x in enumerate(leaves) if isinstance(x, (tf.Tensor, tf.Variable)) and _inexact(x)]
        if not differentiable:
            return super().custom_derivative(function, surrogate, leaves)
        inputs = [tf.convert_to_tensor(leaves[i]) for i in differentiable]

        def replaced(arrays: Sequence[Array]) -> list[Any]:
            new = dict(zip(differentiable, arrays, strict=True))
            return [new.get(i, leaf) for i, leaf in enumerate(leaves)]

        def value(arrays: Sequence[Array]) -> list[Array]:
            # Without stop_gradient, an outer tape would record the function.
            return list(function(*replaced([tf.stop_gradient(x) for x in arrays])))

        @tf.custom_gradient
        def call(*arrays: Array) -> tuple[list[Array], Callable[..., Any]]:
            def gradient(*upstream: Array) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(arrays)
                    results = surrogate(*replaced(arrays))
                pairs = [(x, dx) for x, dx in zip(results, upstream, strict=True) if _inexact(x)]
                return tape.gradient([x for x, _ in pairs], list(arrays), [dx for _, dx in pairs])

            return value(arrays), gradient

        if not _in_forward_mode(inputs):
            return list(call(*inputs))
        if not tf.executing_eagerly():
            expected = "a tf.autodiff.ForwardAccumulator around the tf.function"
            raise invalid(expected, "one inside of it, which ignores custom gradients")
        # A ForwardAccumulator cannot differentiate through the tape in a custom gradient: run the surrogate itself.
        pairs = zip(value(inputs), surrogate(*replaced(inputs)), strict=True)
        return [_with_derivative(x, differentiated) for x, differentiated in pairs]

    def row_slices(self, leaf: Leaf) -> RowSlices | None:
        if not isinstance(leaf, tf.IndexedSlices):
            return None
        shape = None if leaf.dense_shape is None else tf.get_static_value(leaf.dense_shape)
        return RowSlices(leaf.indices, leaf.values, None if shape is None else int(shape[0]))

    def row_numbers(self, array: Array) -> Array:
        return tf.range(tf.size(array)) // tf.shape(array)[-1]

    def loop(
        self, condition: Callable[..., Array], body: Callable[..., tuple[Array, ...]], *carry: Array
    ) -> tuple[Array, ...]:
        return tf.while_loop(condition, body, carry)

    def repeat(
        self, count: Array, body: Iteration, carry: Sequence[Array], constants: Sequence[Array], most: int
    ) -> list[Array]:
        known = self.concrete(count)
        if known is not None:
            return super().repeat(known, body, carry, constants, most)

        def step(i: Array, *carried: Array) -> tuple[Array, ...]:
            return i + 1, *body(i, list(carried), list(constants))

        start = (tf.constant(0), *map(tf.convert_to_tensor, carry))
        return list(tf.while_loop(lambda i, *_: i < count, step, start, maximum_iterations=most)[1:])

    def update_at(self, array: Array, i: Array | int, row: Array) -> Array:
        if array.shape.num_elements() == 0:  # TensorFlow cannot scatter into an empty tensor
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
        # On CPU a position past the end is an error: such rows go to an extra last row, which is then removed.
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
"""Dtypes that TensorFlow can cast, but not compute with."""

_STORED = frozenset(dtype.name for dtype in NARROW - _COMPUTED) - _CAST
"""Dtypes that TensorFlow can store, but neither cast nor compute with."""


def _no_kernels(dtype: DType) -> GradCombineError:
    return invalid("a dtype that TensorFlow computes with", dtype)


_WORTH_COMPILING = 1 << 14
"""Fewest elements of an array for which a kernel is compiled, which takes tenths of a second."""

_WORTH_A_FUNCTION = 32
"""Fewest arguments of a kernel that is traced once as a function, which makes each call a single operation."""

_WORTH_STACKING = 1 << 8
"""Most elements of an array whose copy costs less than one more operation."""


class _Flag(threading.local):
    now = False


_UNGUARDED, _LOOPED = _Flag(), _Flag()


@contextmanager
def unguarded() -> Iterator[None]:
    """Omits, in this thread, the selects that keep XLA from changing bits. They cost memory passes and tracing time.

    This is safe even if XLA compiles the graph later, as long as products are added inside a conditional but computed
    outside of it, and divisors are unknown to the compiler (held in variables, for instance).
    """
    before, _UNGUARDED.now = _UNGUARDED.now, True
    try:
        yield
    finally:
        _UNGUARDED.now = before


def in_plain_graph() -> bool:
    """Whether a graph is being traced for TensorFlow's executor: neither eager nor for XLA."""
    return not tf.executing_eagerly() and tf.__internal__.get_enclosing_xla_context() is None


def _is_sharded(array: Array) -> bool:
    """Whether an eager tensor is a DTensor."""
    return tf.executing_eagerly() and "CUSTOM" in array.device


@cache
def _has_gpus() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def _in_order(result: Array) -> Array:
    """Keeps Grappler from reordering additions and products in a graph.

    Grappler rewrites additions into one AddN, which adds in another order, and moves constants through a chain of
    products; but not across an operation of another type. EnsureShape is one that forwards its buffer.
    """
    return result if tf.executing_eagerly() else tf.ensure_shape(result, result.shape)


def _with_derivative(value: Array, surrogate: Array) -> Array:
    """Returns ``value`` with the derivative of ``surrogate``."""
    if not _inexact(value):
        return value
    return tf.custom_gradient(lambda _: (tf.identity(value), lambda upstream: upstream))(surrogate)


def _in_forward_mode(arrays: Sequence[Array]) -> bool:
    """Whether a ForwardAccumulator watches one of the arrays."""
    try:  # it would differentiate PreventGradient at once, which raises
        for x in arrays:
            tf.raw_ops.PreventGradient(input=x, message="")
    except LookupError:
        return True
    return False


def _inexact(array: Array) -> bool:
    return array.dtype.is_floating or array.dtype.is_complex


BACKEND = TensorflowBackend()
