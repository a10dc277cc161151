"""Microbatch weights applied by scaling the loss: the result is the weighted mean, and weight 0 masks even NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import Loss, LossOutput, value_and_grad
from gradcombine.verify.compare.ulp import equal_bits
from tests.spec.selection import FULL, named

pytestmark = pytest.mark.needs("jax")

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
W = jnp.ones(4)
MEAN_AND_SUM = {"mean": reductions.mean(), "sum": reductions.sum()}
REDUCTIONS = pytest.mark.parametrize("reduction", named(("mean",), MEAN_AND_SUM))


def weighed(w: Any, x: Any, weight: Any) -> Any:
    """For weight 0 the loss is 0 / 0 and its gradient NaN."""
    return LossOutput(jnp.sum(w[None] * x * weight) / jnp.sum(weight), jnp.sum(weight))


def rows(w: Any, x: Any, weight: Any) -> Any:
    return jnp.mean(w[None] * x)


@pytest.mark.parametrize("reduction", MEAN_AND_SUM.values(), ids=MEAN_AND_SUM)
@pytest.mark.parametrize(
    "weights",
    [pytest.param([1, 2, 4, 8, 16, 1], marks=FULL), [0, 2, 4, 0, 16, 0], pytest.param([0, 0, 0, 0, 0, 1], marks=FULL)],
)
def test_powers_of_two_have_the_bits_of_combine(reduction: gc.Reduction, weights: list[float]) -> None:
    array = np.float32(weights)[:, None]
    output, grad = jax.jit(value_and_grad(weighed, 6, reduction=reduction))(W, X, array)
    parts = [x for x, weight in zip(X, weights, strict=True) if weight]
    assert equal_bits(grad, gc.combine(reduction, parts, [weight for weight in weights if weight]))
    assert float(output.weight) == sum(weights)


@REDUCTIONS
def test_no_microbatch_that_counts_gives_zeros(reduction: gc.Reduction) -> None:
    zeros = np.zeros((2, 6, 1), np.float32)
    _, grad = jax.jit(value_and_grad(weighed, 6, reduction=reduction))(W, X, zeros[0])
    np.testing.assert_array_equal(grad, 0)
    # If all weights of one replica are 0, the result is that of the other replica.
    both = np.stack([X, X]), np.stack([zeros[0], zeros[0] + 1])
    f = value_and_grad(weighed, 6, reduction=reduction, over=gc.jax_axis("d"))
    _, grads = jax.jit(jax.vmap(f, in_axes=(None, 0, 0), axis_name="d"))(W, *both)
    expected = gc.combine(reduction, list(X))
    assert equal_bits(grads[0], expected) and equal_bits(grads[1], expected)


@REDUCTIONS
@pytest.mark.parametrize(
    "weight", [np.float32(-1), np.float32(np.nan), pytest.param(np.float32(np.inf), marks=FULL), np.int32(-1)]
)
def test_a_traced_weight_that_is_none_makes_all_of_it_nan(reduction: gc.Reduction, weight: Any) -> None:
    weights = np.array([1, 1, weight, 1, 1, 1], weight.dtype)[:, None]
    f = jax.jit(value_and_grad(rows, 6, weight=lambda x, weight: weight.sum(), reduction=reduction))
    assert np.isnan(f(W, X, weights)[1]).all()


def test_a_loss_in_float16_is_not_scaled() -> None:
    """Twice 40,000 would overflow float16."""

    def half(w: Any, x: Any, weight: Any) -> Any:
        return jnp.sum(w.astype(jnp.float16) * jnp.float16(40_000)).astype(jnp.float32) + 0 * x.sum()

    f = jax.jit(value_and_grad(half, 6, weight=lambda x, weight: weight.sum()))
    assert np.asarray(f(W, X, np.full((6, 1), 2, np.float32))[1]).tolist() == [40_000.0] * 4


def test_a_carry_goes_through_microbatches_of_weight_0() -> None:
    def counting(w: Any, seen: Any, x: Any, weight: Any) -> Any:
        return LossOutput(jnp.sum(w[None] * x * weight) / jnp.sum(weight), jnp.sum(weight), carry=seen + 1)

    weights = np.float32([1, 0, 1, 0, 1, 1])[:, None]
    output, grad = jax.jit(value_and_grad(Loss(counting, carry_argnum=1), 6))(W, jnp.int32(0), X, weights)
    assert int(output.carry) == 6
    assert equal_bits(grad, gc.combine(reductions.mean(), [X[i] for i in (0, 2, 4, 5)]))
