"""Training steps on replicas with different data, under each of JAX's mapping transformations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax import Loss, LossOutput, TrainState, jax_window, train_step
from tests.integrations.jax.replicas import (
    AXIS,
    GRADS,
    MODES,
    TOKENS,
    N,
    collectives,
    levels,
    mesh,
    token_mean,
)
from tests.spec.selection import cases

NEGATE = optax.sgd(1.0)

MEANS = [token_mean(slice(0, 2)), token_mean(slice(2, 4))]
PARAMS = {"w": jnp.zeros(())}


def loss(params: Any, x: Any, tokens: Any) -> Any:
    """The gradient is the mean of x over tokens; 0 / 0 for a microbatch without tokens."""
    return LossOutput(params["w"] * jnp.sum(x * tokens) / jnp.sum(tokens), jnp.sum(tokens))


STEPS = {form: train_step(loss, NEGATE, **{form: 2}, over=AXIS) for form in ("every", "microbatches")}


def calls(form: str, params: Any, *columns: Any) -> Any:
    """The parameters and metrics after each call, with one microbatch or a full window, on one replica."""
    step, shape = STEPS[form], (4, 1) if form == "every" else (2, 2)

    def body(carry: Any, batch: Any) -> Any:
        params, state, metrics = step.function(*carry, *batch)
        return (params, state), (params["w"], metrics)

    return jax.lax.scan(body, (params, step.init(params)), tuple(x.reshape(shape) for x in columns))[1]


@MODES
@pytest.mark.parametrize("form", STEPS)
def test_an_update_is_the_mean_over_all_tokens_of_all_replicas(mode: Any, form: str) -> None:
    params, metrics = mode(partial(calls, form, PARAMS), GRADS, TOKENS)
    ends = [-MEANS[0], -MEANS[0] - MEANS[1]]
    expected = [0, ends[0], ends[0], ends[1]] if form == "every" else ends
    applied = [False, True] * 2 if form == "every" else [True, True]
    np.testing.assert_array_equal(params, [expected] * N)
    np.testing.assert_array_equal(metrics.applied, [applied] * N)
    np.testing.assert_array_equal(metrics.weight, [np.where(applied, 16, 0)] * N)
    # The loss of the second window at the parameters after the first.
    np.testing.assert_array_equal(metrics.value[:, -1], [ends[0] * MEANS[1]] * N)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("check_vma", "alone"),
    cases([(False, 0), (True, jax_window.SEPARATE_BYTES)], (True, False), (0, jax_window.SEPARATE_BYTES)),
)
def test_a_window_outlives_calls_and_is_exchanged_once_at_its_end(
    check_vma: bool, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_window, "SEPARATE_BYTES", alone)
    specs = TrainState(gc.AccumulateState(levels=P("d"), step=P(), index=P()), opt_state=P(), carry=P("d"))
    traces: list[int] = []

    def begin(params: Any) -> Any:
        return levels(STEPS["every"].init(params), lambda x: x[None])

    def call(params: Any, state: Any, x: Any, tokens: Any) -> Any:
        traces.append(1)
        params, state, metrics = STEPS["every"].function(params, levels(state, lambda x: x[0]), x, tokens)
        return params, levels(state, lambda x: x[None]), metrics

    def end(params: Any, state: Any) -> Any:
        params, state, metrics = STEPS["every"].flush_function(params, levels(state, lambda x: x[0]))
        return params, levels(state, lambda x: x[None]), metrics

    mapped = {"mesh": mesh(), "check_vma": check_vma}
    init = jax.jit(jax.shard_map(begin, in_specs=P(), out_specs=specs, **mapped))
    step = jax.jit(
        jax.shard_map(call, in_specs=(P(), specs, P("d"), P("d")), out_specs=(P(), specs, P()), **mapped),
        donate_argnums=(0, 1),
    )
    flush = jax.jit(jax.shard_map(end, in_specs=(P(), specs), out_specs=(P(), specs, P()), **mapped))
    # A new array, since the buffers are donated.
    params = jax.device_put({"w": jnp.zeros(())}, NamedSharding(mesh(), P()))
    state, history = init(params), []
    compiled = step.lower(params, state, GRADS[:, 0], TOKENS[:, 0]).compile()
    assert collectives(compiled) == collectives(compiled, looped=True) == ["all-reduce"]  # it is in the conditional
    for i in range(3):
        params, state, _ = step(params, state, GRADS[:, i], TOKENS[:, i])
        history.append(params["w"].item())
    params, state, metrics = flush(params, state)
    assert history == [0, -MEANS[0], -MEANS[0]]
    assert params["w"].item() == -MEANS[0] - token_mean(slice(2, 3))
    assert (bool(metrics.applied), float(metrics.weight)) == (True, 8)
    assert len(traces) == 1


def test_a_flush_applies_a_window_of_fewer_microbatches_than_replicas() -> None:
    """After one microbatch on one replica, the position on two is rounded down to 0."""
    one = train_step(loss, NEGATE, every=4)
    params, state, _ = one.function(PARAMS, one.init(PARAMS), GRADS[0, 0], TOKENS[0, 0])
    members = {"grads": gc.reductions.mean(), "value": gc.reductions.mean(), "weight": gc.reductions.sum()}
    windows = gc.statefile.resize(gc.reductions.per_leaf(members), [state.window], 2)

    def flush(window: Any) -> Any:
        resumed = STEPS["every"].init(params)._replace(window=window)
        params_after, _, metrics = STEPS["every"].flush_function(params, resumed)
        return params_after["w"], metrics.applied

    expected = one.flush_function(params, state)[0]["w"]
    found, applied = jax.vmap(flush, axis_name="d")(jax.tree.map(lambda *x: jnp.stack(x), *windows))
    assert expected != 0 and found.tolist() == [expected] * 2 and applied.tolist() == [True, True]


def test_gradients_that_shard_map_has_summed_already_are_refused() -> None:
    def given(params: Any, x: Any) -> Any:
        return jnp.float32(0), jax.grad(lambda p: p["w"] * jnp.sum(x))(params)

    def summed(params: Any, x: Any) -> Any:
        grads = jax.lax.psum(given(params, x)[1], "d")
        return jnp.float32(0), grads

    step = train_step(Loss(summed, differentiate=False), NEGATE, over=AXIS)
    mapped = jax.shard_map(
        lambda params, x: step.function(params, step.init(params), x)[0],
        mesh=mesh(),
        in_specs=(P(), P("d")),
        out_specs=P(),
    )
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: expected a value that varies"):
        jax.jit(mapped)(PARAMS, GRADS[:, 0])
