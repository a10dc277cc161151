"""Known defects of optax, Keras and other accumulators, as cases that this library handles correctly.

Docstrings describe the behavior of optax 0.2.8 and Keras 3.15.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from tests.spec import modes
from tests.spec.programs import rows

needs_jax = pytest.mark.needs("jax")


def window(every: Any, grads: list[Any], weights: Any = None) -> list[Any]:
    """The values of all windows; the last one may be partial."""
    acc = gc.accumulate(reductions.mean(), every=every)
    state, values = acc.init(grads[0]), []
    for i, grad in enumerate(grads):
        state = acc.update(grad, state, weight=1 if weights is None else weights[i])
        if bool(acc.ready(state)) or i + 1 == len(grads):
            values.append(np.asarray(acc.value(state)))
    return values


def test_a_nan_gradient_does_not_poison_later_windows() -> None:
    """optax.MultiSteps resets by multiplying by zero, which keeps the NaN in all later windows."""
    grads = [np.float32([x]) for x in (1, np.nan, 2, 4)]
    first, second = window(2, grads)
    assert np.isnan(first)
    assert second == 3


def test_complex_gradients_keep_their_imaginary_part() -> None:
    """optax.MultiSteps accumulates in float32 for gradients of any dtype."""
    grads = [np.complex64([1 + 2j]), np.complex64([3 + 6j])]
    assert window(2, grads)[0] == np.complex64(2 + 4j)


@pytest.mark.parametrize("every", [np.int32(2), np.int64(2), np.array(2)])
def test_the_window_length_may_be_a_numpy_integer(every: Any) -> None:
    """optax.MultiSteps raises TypeError."""
    assert [v.item() for v in window(every, [np.float32([x]) for x in (1, 3, 5, 9)])] == [2, 7]


@needs_jax
def test_the_window_length_may_be_a_jax_integer() -> None:
    import jax.numpy as jnp

    assert [v.item() for v in window(jnp.asarray(2), [np.float32([x]) for x in (1, 3)])] == [2]


def test_a_window_length_of_0_is_refused() -> None:
    """optax.MultiSteps silently never updates."""
    with pytest.raises(gc.GradCombineError, match="received 0"):
        gc.accumulate(reductions.mean(), every=0)


def test_a_partial_window_at_the_end_is_whole_and_does_not_leak() -> None:
    """Other libraries drop it, divide it by the full length, or carry it into the next epoch."""
    grads = [np.float32([x]) for x in (1, 3, 8, 10)]
    assert [v.item() for v in window(3, grads)] == [4, 10]
    acc = gc.accumulate(reductions.mean(), every=3)
    state = acc.restart(acc.update(grads[3], acc.init(grads[0])))
    assert acc.value(acc.update(grads[0], state)).item() == 1


def test_300_ones_in_bfloat16() -> None:
    """A bfloat16 accumulator stops at 256; Keras' running mean ends at 0.85."""
    ones = [np.ones(1, ml_dtypes.bfloat16)] * 300
    assert float(gc.add_n(ones)[0]) == 300
    assert float(gc.mean(ones)[0]) == 1
    assert float(window(300, ones)[0][0]) == 1


def token_mean(env: modes.Env, data: Any) -> Any:
    """Combines two microbatches per replica, each with its mean gradient over tokens and its number of tokens."""
    acc = gc.accumulate(reductions.mean(), every=2)
    grads, tokens = rows(data["grads"]), rows(data["tokens"])
    state = acc.init(grads[0])
    for grad, count in zip(grads, tokens, strict=True):
        state = acc.update(grad, state, weight=count)
    merged = gc.merge_replicas(reductions.mean(), state, env.collective)
    return {"true": acc.value(merged), "of means": gc.all_reduce(reductions.mean(), gc.mean(grads), env.collective)}


def test_the_mean_over_tokens_is_not_the_mean_of_means(replicated: modes.Mode) -> None:
    """For microbatches of 1, 3, 2 and 10 tokens on 2 replicas, gives the gradient of the full batch."""
    counts = np.int32([[1, 3], [2, 10]])
    per_token = np.arange(16, dtype=np.float32) ** 2 - 40
    parts = np.split(per_token, np.cumsum(counts.ravel())[:-1])
    means = np.float32([[part.sum() / len(part)] for part in parts]).reshape(2, 2, 1)
    exactly = np.float32(sum(float(m) * len(p) for m, p in zip(means.ravel(), parts, strict=True)) / 16)
    for result in replicated.run(token_mean, [{"grads": means[r], "tokens": counts[r]} for r in range(2)]):
        assert abs(result["true"][0] - exactly) <= np.spacing(exactly)
        assert abs(result["of means"][0] - exactly) > 10
