# pyright: standard
"""Kernels as tf.functions: traced once, compiled by XLA, or run in a loop; sparse gradients in float32."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import tensorflow as tf

from gradcombine.backends.protocol import Backend, Kernel
from gradcombine.types import Array


@cache
def function(backend: Backend, kernel: Kernel, static: tuple[Hashable, ...], xla: bool) -> Any:
    """A tf.function of ``*arrays`` that computes ``kernel(backend, *static, *arrays)``."""

    def call(*arrays: Array) -> tuple[Array, ...]:
        return tuple(kernel(backend, *static, *arrays))

    return tf.function(call, autograph=False, jit_compile=xla or None)


@cache
def in_loop(backend: Backend, kernel: Kernel, static: tuple[Hashable, ...]) -> Any:
    """A tf.function that applies an elementwise kernel to vectors and scalars in two halves, in a loop.

    If the result of the kernel is sliced, XLA fuses a copy of the kernel into every slice; it does not fuse loops.
    """
    half = function(backend, kernel, static, False)
    return tf.function(lambda *arrays: _halves(half, arrays), autograph=False)


def _halves(function: Any, arrays: Sequence[Array]) -> tuple[Array, ...]:
    (size,) = max((array.shape for array in arrays), key=len)
    halves = [tf.reshape(tf.pad(x, [[0, size % 2]]), [2, -1]) if x.shape.rank else x for x in arrays]

    def body(i: Array, results: tuple[tf.TensorArray, ...]) -> tuple[Array, tuple[tf.TensorArray, ...]]:
        half = function(*(x[i] if x.shape.rank else x for x in halves))
        return i + 1, tuple(result.write(i, x) for result, x in zip(results, half, strict=True))

    outputs = function.get_concrete_function(*(x[0] if x.shape.rank else x for x in halves)).structured_outputs
    results = tuple(tf.TensorArray(x.dtype, 2, element_shape=x.shape) for x in outputs)
    _, results = tf.while_loop(lambda i, _: i < 2, body, (tf.constant(0), results))
    return tuple(tf.reshape(result.stack(), [-1])[:size] for result in results)


@cache
def totals(backend: Backend, kernel: Kernel, static: tuple[Hashable, ...]) -> Any:
    """A function, compiled by XLA, of ``*arrays`` that sums each result of the kernel."""
    variadic_reduce: Any = None
    with suppress(ImportError):  # it has no public name
        variadic_reduce = importlib.import_module("tensorflow.compiler.tf2xla.ops.gen_xla_ops").xla_variadic_reduce_v2

    def call(*arrays: Array) -> tuple[Array, ...]:
        terms = kernel(backend, *static, *arrays)
        if variadic_reduce is None:
            return tuple(map(tf.reduce_sum, terms))
        # A variadic reduction is one pass. And on CPU, XLA splits the reduction of a single array into windows, which
        # takes ten times as long.
        scalars = [tf.TensorSpec((), term.dtype) for term in terms]
        add = tf.function(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], autograph=False)
        zeros = [tf.zeros((), term.dtype) for term in terms]
        reducer = add.get_concrete_function(scalars, scalars)
        return tuple(variadic_reduce(list(terms), zeros, list(range(terms[0].shape.rank)), reducer))

    return tf.function(call, autograph=False, jit_compile=True)


@cache
def compiles() -> bool:
    """Whether this TensorFlow can compile for the CPU with XLA."""
    with tf.init_scope():
        try:
            tf.function(tf.negative, autograph=False, jit_compile=True)(tf.constant(1))
        except (tf.errors.OpError, ValueError):
            return False
    return True


def in_float32(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns slices with 16-bit values in float32, so that adding duplicate rows does not round each addition."""
    if slices.values.dtype not in (tf.float16, tf.bfloat16):
        return slices
    return tf.IndexedSlices(tf.cast(slices.values, tf.float32), slices.indices, slices.dense_shape)
