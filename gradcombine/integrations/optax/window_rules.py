"""What MultiSteps keeps of a window's gradients: sums that are divided once, or optax's own running mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.registry import load
from gradcombine.integrations.optax.contribution import cast_as, keep_dtypes
from gradcombine.integrations.optax.placeholder import init_for
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.dtypes import Settings
from gradcombine.tree import is_static
from gradcombine.types import Array, State, Tree

Transform: TypeAlias = Callable[[Tree], tuple[Tree, Any]]
"""Combined gradients to the inner transformation's updates and next state."""


class WindowRule(Protocol):
    """How ``acc_grads`` is made, grows, and becomes the gradients of the inner transformation."""

    def init(self, params: Tree) -> Tree:
        """The accumulators of no gradients: zeros."""
        ...

    def add(self, grads: Tree, accumulators: Tree, mini_step: Array, emit: Array) -> tuple[Any, Tree]:
        """The gradients number ``mini_step``, from 0; ``emit`` says that they are the window's last.

        Returns:
          What `boundary` needs to know of the window, and the accumulators that the state holds afterwards.
        """
        ...

    def boundary(self, window: Any, grads: Tree, inner: Any, emit: Array, transform: Transform) -> tuple[Tree, Any]:
        """Runs the transformation on the combined gradients, in the dtypes of ``grads``; in the conditional's branch.

        Returns:
          Its updates and its next state, in the dtypes of ``inner``, the last one.
        """
        ...


class Sums:
    """Running sums by a reduction of the library, divided once; ``acc_grads`` is the accumulators of its state."""

    def __init__(self, mean: bool, dtype: Any) -> None:
        self._reduction: Reduction = gc.reductions.mean(dtype=dtype) if mean else gc.reductions.sum(dtype=dtype)

    def init(self, params: Tree) -> Tree:
        return jax.tree.map(jnp.zeros_like, init_for(self._reduction.init, params).value)

    def add(self, grads: Tree, accumulators: Tree, mini_step: Array, emit: Array) -> tuple[Any, Tree]:
        del emit
        window = self._open(grads, accumulators, mini_step)
        # The full window is left where it is; the next one begins with an empty one in its place.
        window = tree.select(load("jax"), mini_step == 0, self._reduction.clear(window), window)
        window = self._reduction.update(window, grads)
        return window, window.value

    def boundary(self, window: Any, grads: Tree, inner: Any, emit: Array, transform: Transform) -> tuple[Tree, Any]:
        del emit
        updates, state = transform(cast_as(self._reduction.finalize(window), grads))
        return updates, keep_dtypes(state, inner)

    def _open(self, grads: Tree, accumulators: Tree, mini_step: Array) -> State:
        def present(g: Any, acc: Any) -> Any:
            # A gradient that is missing for once does not make its accumulator one of no gradient.
            return acc if g is None and not is_static(acc) else g

        like = jax.tree.map(present, grads, accumulators, is_leaf=lambda g: g is None)
        spec = jax.eval_shape(self._reduction.init, like)
        return spec._replace(value=accumulators, weight=mini_step.astype(spec.weight.dtype), count=mini_step)


class OptaxOrder:
    """The arithmetic of optax.MultiSteps, as XLA is given it: ``acc + (g - acc) / (n + 1)``, or ``g + acc``.

    `gradcombine.foreign_orders.welford` has the bits of that mean from operations that every backend rounds alike. But
    which products of the inner transformation XLA fuses into additions depends on all that it compiles with them. So
    the whole expression goes to the compiler as optax gives it, the mean and the masks around the transformation
    included.
    """

    def __init__(self, mean: bool, dtype: Any) -> None:
        self._mean, self._dtype = mean, dtype

    def init(self, params: Tree) -> Tree:
        def zeros(x: Array) -> Array:
            if self._dtype is None or not jnp.iscomplexobj(x):
                return jnp.zeros_like(x, dtype=self._dtype)
            return jnp.zeros_like(x, dtype=Settings(self._dtype).running(x.dtype))

        return jax.tree.map(zeros, params)

    def add(self, grads: Tree, accumulators: Tree, mini_step: Array, emit: Array) -> tuple[Any, Tree]:
        return (accumulators, mini_step), _kept(grads, accumulators, mini_step, emit, mean=self._mean)

    def boundary(self, window: Any, grads: Tree, inner: Any, emit: Array, transform: Transform) -> tuple[Tree, Any]:
        combined = _combined(grads, *window, mean=self._mean)
        updates, state = transform(optax.tree.cast_like(combined, grads))
        # True in this branch, but the compiler does not know, and fuses as it does in optax.
        state = jax.tree.map(lambda old, new: jnp.where(emit, new, old).astype(old.dtype), inner, state)
        return jax.tree.map(lambda x: emit.astype(x.dtype) * x, updates), state


def _combined(grads: Tree, accumulators: Tree, n: Array, *, mean: bool) -> Tree:
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda g, acc: acc + (g - acc) / (n + 1) if mean else g + acc, grads, accumulators)


# Compiled by itself outside of jit too, as optax's conditional is: the product with 1 / (n + 1) is fused into the sum.
@partial(jax.jit, static_argnames="mean")
def _kept(grads: Tree, accumulators: Tree, n: Array, emit: Array, *, mean: bool) -> Tree:
    combined = _combined(grads, accumulators, n, mean=mean)
    return jax.tree.map(lambda x, acc: jnp.where(emit, _zero(x), x).astype(acc.dtype), combined, accumulators)


def _zero(x: Array) -> Array:
    """The zero of each element's sign, which optax's multiplication by 0 leaves; of infinities and NaN too."""
    zero = jnp.zeros_like(x)
    return jnp.copysign(zero, x) if jnp.issubdtype(x.dtype, jnp.floating) else zero
