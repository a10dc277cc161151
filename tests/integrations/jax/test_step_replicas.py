"""Training steps on replicas with different data, under each of JAX's mapping transformations."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax import Loss, LossOutput, TrainState, on_replicas, train_step
from tests.integrations.jax.test_value_and_grad_replicas import MESH, MODES, R
from tests.spec.selection import cases

pytestmark = pytest.mark.needs("jax")

NEGATE = optax.sgd(1.0)

X = np.float32([[1, 5, 9, -4], [3, -7, 2, 8], [6, 4, 4, 2], [-1, 3, 8, 16]])
TOKENS = np.float32([[1, 3, 2, 2], [4, 0, 1, 3], [2, 1, 4, 1], [2, 3, 1, 2]])
"""Rows are replicas, columns microbatches of one example. Each window of two columns holds 16 tokens."""


def token_mean(columns: slice) -> float:
    """The exact mean over the tokens of the selected microbatches on all replicas."""
    pairs = zip(X[:, columns].flat, TOKENS[:, columns].flat, strict=True)
    return float(Fraction(sum(Fraction(float(x)) * int(n) for x, n in pairs), int(TOKENS[:, columns].sum())))


MEANS = [token_mean(slice(0, 2)), token_mean(slice(2, 4))]
PARAMS = {"w": jnp.zeros(())}


def loss(params: Any, x: Any, tokens: Any) -> Any:
    """The gradient is the mean of x over tokens; 0 / 0 for a microbatch without tokens."""
    return LossOutput(params["w"] * jnp.sum(x * tokens) / jnp.sum(tokens), jnp.sum(tokens))


EVERY = train_step(loss, NEGATE, every=2, over=gc.jax_axis("d"))
WHOLE = train_step(loss, NEGATE, microbatches=2, over=gc.jax_axis("d"))


def every(params: Any, x: Any, tokens: Any) -> Any:
    """The parameters and metrics after each call with one microbatch, on one replica."""

    def body(carry: Any, batch: Any) -> Any:
        params, state, metrics = EVERY.function(*carry, *jax.tree.map(lambda leaf: leaf[None], batch))
        return (params, state), (params["w"], metrics)

    return jax.lax.scan(body, (params, EVERY.init(params)), (x, tokens))[1]


def whole(params: Any, x: Any, tokens: Any) -> Any:
    """The parameters and metrics after each call with a full window, on one replica."""

    def body(carry: Any, batch: Any) -> Any:
        params, state, metrics = WHOLE.function(*carry, *batch)
        return (params, state), (params["w"], metrics)

    return jax.lax.scan(body, (params, WHOLE.init(params)), (x.reshape(2, 2), tokens.reshape(2, 2)))[1]


@MODES
@pytest.mark.parametrize("program", [every, whole])
def test_an_update_is_the_mean_over_all_tokens_of_all_replicas(mode: Any, program: Any) -> None:
    params, metrics = mode(program, PARAMS, X, TOKENS)
    ends = [-MEANS[0], -MEANS[0] - MEANS[1]]
    expected = [0, ends[0], ends[0], ends[1]] if program is every else ends
    applied = [False, True] * 2 if program is every else [True, True]
    np.testing.assert_array_equal(params, [expected] * R)
    np.testing.assert_array_equal(metrics.applied, [applied] * R)
    np.testing.assert_array_equal(metrics.weight, [np.where(applied, 16, 0)] * R)
    # The loss of the second window at the parameters after the first.
    np.testing.assert_array_equal(metrics.value[:, -1], [ends[0] * MEANS[1]] * R)


@pytest.mark.parametrize(
    ("check_vma", "alone"),
    cases([(False, 0), (True, on_replicas.SEPARATE_BYTES)], (True, False), (0, on_replicas.SEPARATE_BYTES)),
)
def test_a_window_outlives_calls_and_is_exchanged_once_at_its_end(
    check_vma: bool, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_replicas, "SEPARATE_BYTES", alone)
    specs = TrainState(gc.AccumulateState(levels=P("d"), step=P(), index=P()), opt_state=P(), carry=P("d"))
    traces: list[int] = []

    def levels(state: TrainState, function: Callable[[Any], Any]) -> TrainState:
        return state._replace(window=state.window._replace(levels=jax.tree.map(function, state.window.levels)))

    def begin(params: Any) -> Any:
        return levels(EVERY.init(params), lambda leaf: leaf[None])

    def call(params: Any, state: Any, x: Any, tokens: Any) -> Any:
        traces.append(1)
        params, state, metrics = EVERY.function(params, levels(state, lambda leaf: leaf[0]), x, tokens)
        return params, levels(state, lambda leaf: leaf[None]), metrics

    def end(params: Any, state: Any) -> Any:
        params, state, metrics = EVERY.flush_function(params, levels(state, lambda leaf: leaf[0]))
        return params, levels(state, lambda leaf: leaf[None]), metrics

    mapped = {"mesh": MESH, "check_vma": check_vma}
    init = jax.jit(jax.shard_map(begin, in_specs=P(), out_specs=specs, **mapped))
    step = jax.jit(
        jax.shard_map(call, in_specs=(P(), specs, P("d"), P("d")), out_specs=(P(), specs, P()), **mapped),
        donate_argnums=(0, 1),
    )
    flush = jax.jit(jax.shard_map(end, in_specs=(P(), specs), out_specs=(P(), specs, P()), **mapped))
    # A new array, since the buffers are donated.
    params = jax.device_put({"w": jnp.zeros(())}, NamedSharding(MESH, P()))
    state, history = init(params), []
    text = step.lower(params, state, X[:, 0], TOKENS[:, 0]).compile().as_text()
    assert text.count(" all-reduce(") == 1
    assert not re.search(" all-reduce", text[text.index("ENTRY") :])  # it is in the conditional
    for i in range(3):
        params, state, _ = step(params, state, X[:, i], TOKENS[:, i])
        history.append(params["w"].item())
    params, state, metrics = flush(params, state)
    assert history == [0, -MEANS[0], -MEANS[0]]
    assert params["w"].item() == -MEANS[0] - token_mean(slice(2, 3))
    assert (bool(metrics.applied), float(metrics.weight)) == (True, 8)
    assert len(traces) == 1


def test_gradients_that_shard_map_has_summed_already_are_refused() -> None:
    def given(params: Any, x: Any) -> Any:
        return jnp.float32(0), jax.grad(lambda p: p["w"] * jnp.sum(x))(params)

    def summed(params: Any, x: Any) -> Any:
        grads = jax.lax.psum(given(params, x)[1], "d")
        return jnp.float32(0), grads

    step = train_step(Loss(summed, differentiate=False), NEGATE, over=gc.jax_axis("d"))
    mapped = jax.shard_map(
        lambda params, x: step.function(params, step.init(params), x)[0],
        mesh=MESH,
        in_specs=(P(), P("d")),
        out_specs=P(),
    )
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: expected a value that varies"):
        jax.jit(mapped)(PARAMS, X[:, 0])
