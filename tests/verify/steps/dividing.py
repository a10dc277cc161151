"""Divides batches into microbatches and combines the gradients of losses over them, in JAX."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp


def eager(step: Any) -> Any:
    """A factory of steps from ``step(params, batch, k)``."""

    @wraps(step)
    def make_step(k: int) -> Any:
        return partial(step, k=k)

    return make_step


def jitted(step: Any) -> Any:
    """A factory of compiled steps from ``step(params, batch, k)``."""

    @wraps(step)
    def make_step(k: int) -> Any:
        return jax.jit(partial(step, k=k))

    return make_step


def part(batch: Any, k: int, i: int) -> Any:
    """The i-th of k parts."""
    return jax.tree.map(lambda x: x[i * len(x) // k : (i + 1) * len(x) // k], batch)


def parts(batch: Any, k: int) -> list[Any]:
    return [part(batch, k, i) for i in range(k)]


def stacked(batch: Any, k: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)


def scaled(tree: Any, factor: Any) -> Any:
    return jax.tree.map(lambda x: x * factor, tree)


def plus(*trees: Any) -> Any:
    return jax.tree.map(lambda *x: sum(x[1:], x[0]), *trees)


def mean_gradient(loss: Any, p: Any, batch: Any, k: int) -> Any:
    """Mean of the gradients of ``loss(params, part)`` over k parts."""
    return scaled(plus(*(jax.grad(loss)(p, x) for x in parts(batch, k))), 1 / k)


def summed_gradient(loss: Any, p: Any, batch: Any, k: int) -> Any:
    """Sum of the gradients of ``loss(params, part, batch, k)`` over k parts."""
    return plus(*(jax.grad(loss)(p, x, batch, k) for x in parts(batch, k)))


def averaging(loss: Any) -> Any:
    """A factory of steps that return the `mean_gradient`."""
    return jitted(partial(mean_gradient, loss))


def adding(loss: Any) -> Any:
    """A factory of steps that return the `summed_gradient`."""
    return jitted(partial(summed_gradient, loss))


def in_a_scan(loss: Any, k: int, params: Any, batch: Any) -> Any:
    """Gradient of a loss that returns (sum, count): the summed gradients over the total count."""

    def body(carry: Any, x: Any) -> Any:
        (_, count), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        return plus(carry, (grads, count)), None

    zero = jax.tree.map(jnp.zeros_like, params), 0.0
    (grads, count), _ = jax.lax.scan(body, zero, stacked(batch, k))
    return jax.tree.map(lambda x: x / count, grads)


def by_counts(loss: Any) -> Any:
    """A factory of steps for a loss that returns (sum, count)."""
    return lambda k: jax.jit(partial(in_a_scan, loss, k))
