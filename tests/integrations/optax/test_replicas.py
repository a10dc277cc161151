"""The optax transformations on replicas with different data, under each of JAX's mapping transformations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.optax import AccumulateUpdatesState, accumulate, all_reduce
from tests.integrations.jax.replicas import (
    AXIS,
    GRADS,
    MODES,
    ORDERS,
    TOKENS,
    N,
    by_pmap,
    by_vmap,
    collectives,
    levels,
    mesh,
    token_mean,
)
from tests.spec.selection import cases

NEGATE = optax.sgd(1.0)
PARAMS = {"w": jnp.zeros(())}

EXPECTED = [0, -token_mean(slice(0, 2)), 0, -token_mean(slice(2, 4))]


def window(tx: Any, names: tuple[str, ...] = ("weight",)) -> Callable[..., Any]:
    """Scans over one replica's microbatches; returns the updates and the final inner state."""

    def program(grads: Any, *extra: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            updates, state = tx.update({"w": x[0]}, state, PARAMS, **dict(zip(names, x[1:], strict=True)))
            return state, updates["w"]

        state, updates = jax.lax.scan(step, tx.init(PARAMS), (grads, *extra))
        return updates, state.inner

    return program


SAME = -GRADS.reshape(N, 2, 2).mean(axis=(0, 2))


@MODES
@ORDERS
@pytest.mark.parametrize(
    ("weights", "expected"), [([TOKENS], EXPECTED), ([], [0, SAME[0], 0, SAME[1]])], ids=["tokens", "the same"]
)
def test_a_window_is_the_mean_over_all_replicas(mode: Any, order: Any, weights: Any, expected: Any) -> None:
    tx = accumulate(NEGATE, 2, over=AXIS, order=order)
    updates, _ = mode(window(tx, ("weight",)[: len(weights)]), GRADS, *weights)
    np.testing.assert_array_equal(updates, [expected] * N)


@MODES
def test_the_inner_state_is_the_same_on_all_replicas(mode: Callable[..., Any]) -> None:
    tx = accumulate(optax.sgd(lambda count: jnp.exp2(-count.astype(jnp.float32)), momentum=0.5), 2, over=AXIS)
    with jax.numpy_dtype_promotion("standard"):
        updates, state = mode(window(tx), GRADS, TOKENS)
    # The second update includes half of the first momentum and has half the learning rate.
    second = (EXPECTED[3] + EXPECTED[1] / 2) / 2
    np.testing.assert_array_equal(updates, [[0, EXPECTED[1], 0, second]] * N)
    np.testing.assert_array_equal(optax.tree.get(state, "count"), [2] * N)


@MODES
def test_a_flush_by_one_replica_is_a_flush_by_all(mode: Callable[..., Any]) -> None:
    flush = np.zeros((N, 4), np.bool_)
    flush[2, 1] = True
    updates, _ = mode(window(accumulate(NEGATE, 4, over=AXIS), ("weight", "flush")), GRADS, TOKENS, flush)
    np.testing.assert_array_equal(updates, [[0, EXPECTED[1], 0, 0]] * N)


@MODES
def test_local_windows_stay_apart(mode: Callable[..., Any]) -> None:
    def program(grads: Any, tokens: Any) -> Any:
        params = {"w": grads[0] * 0}  # differ between replicas
        tx = accumulate(NEGATE, 2)
        state = tx.init(params)
        for i in range(2):
            updates, state = tx.update({"w": grads[i]}, state, params, weight=tokens[i])
        return jax.lax.all_gather(updates["w"], "d") if mode in (by_pmap, by_vmap) else jax.lax.psum(updates["w"], "d")

    own = -(GRADS * TOKENS)[:, :2].sum(axis=1) / TOKENS[:, :2].sum(axis=1)
    expected = own if mode in (by_pmap, by_vmap) else own.sum()
    np.testing.assert_array_equal(mode(program, GRADS, TOKENS), np.stack([expected] * N))


@pytest.mark.parametrize(
    ("check_vma", "order"), cases([(True, "tree"), (False, "sequential")], (True, False), ("sequential", "tree"))
)
def test_a_window_outlives_calls_of_shard_map(check_vma: bool, order: Any) -> None:
    tx = accumulate(NEGATE, 2, over=AXIS, order=order)
    specs = AccumulateUpdatesState(gc.AccumulateState(levels=P("d"), step=P(), index=P()), inner=P(), applied=P())
    traces: list[int] = []

    def begin(params: Any) -> Any:
        return levels(tx.init(params), lambda x: x[None])

    def step(params: Any, state: Any, grads: Any, tokens: Any) -> Any:
        traces.append(1)
        updates, state = tx.update({"w": grads[0]}, levels(state, lambda x: x[0]), params, weight=tokens[0])
        return optax.apply_updates(params, updates), levels(state, lambda x: x[None])

    devices = mesh()
    mapped = {"mesh": devices, "check_vma": check_vma}
    init = jax.jit(jax.shard_map(begin, in_specs=P(), out_specs=specs, **mapped))
    train = jax.jit(jax.shard_map(step, in_specs=(P(), specs, P("d"), P("d")), out_specs=(P(), specs), **mapped))
    params = jax.device_put(PARAMS, NamedSharding(devices, P()))
    state, history = init(params), []
    for i in range(4):
        params, state = train(params, state, GRADS[:, i], TOKENS[:, i])
        history.append(params["w"].item())
    assert history == list(np.cumsum(EXPECTED))
    assert len(traces) == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_that_are_differentiated_inside_shard_map(check_vma: bool) -> None:
    tx = accumulate(NEGATE, 2, over=AXIS)

    def train(params: Any, xs: Any, tokens: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            params, state = carry
            own = jax.lax.pcast(params, "d", to="varying") if check_vma else params
            grads = jax.grad(lambda p: p["w"] * x[0])(own)
            updates, state = tx.update(grads, state, params, weight=x[1])
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), (xs[0], tokens[0]))
        return params

    mapped = jax.shard_map(train, mesh=mesh(), in_specs=(P(), P("d"), P("d")), out_specs=P(), check_vma=check_vma)
    assert jax.jit(mapped)(PARAMS, GRADS, TOKENS)["w"].item() == sum(EXPECTED)


def test_gradients_that_shard_map_has_summed_already_are_refused() -> None:
    def step(params: Any, x: Any) -> Any:
        tx = accumulate(NEGATE, 2, over=AXIS)
        return tx.update(jax.grad(lambda p: p["w"] * x[0, 0])(params), tx.init(params), params)[0]

    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P())
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: expected a value that varies"):
        jax.jit(mapped)(PARAMS, GRADS)


def test_an_unbound_axis_is_refused() -> None:
    tx = accumulate(NEGATE, 2, over=AXIS)
    with pytest.raises(gc.GradCombineError, match="an axis that the surrounding pmap, vmap or shard_map binds"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.full
def test_a_state_may_be_made_where_some_of_the_axes_are_bound() -> None:
    tx = accumulate(NEGATE, 1, over=gc.jax_axis(("outer", "inner")))

    def outer(rows: Any) -> Any:
        state = tx.init(jnp.float32(0))
        return jax.vmap(lambda x: tx.update(x, state)[0], axis_name="inner")(rows)

    updates = jax.vmap(outer, axis_name="outer")(jnp.float32([[1, 2], [3, 6]]))
    assert updates.tolist() == [[-3, -3], [-3, -3]]


def test_replicas_exchange_gradients_at_the_end_of_a_window_alone() -> None:
    program = window(accumulate(NEGATE, 2, over=AXIS))
    jaxpr = jax.make_jaxpr(program, axis_env=[("d", N)])(GRADS[0], TOKENS[0]).jaxpr
    (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    body = scan.params["jaxpr"].jaxpr
    calls = [eqn.params["call_jaxpr"].jaxpr for eqn in body.eqns if eqn.primitive.name == "custom_jvp_call"]
    (loop,) = [eqn for call in calls for eqn in call.eqns if eqn.primitive.name == "while"]
    assert 0 < str(loop.params["body_jaxpr"]).count("psum") == str(body).count("psum")


@pytest.mark.parametrize(
    "tx",
    [accumulate(NEGATE, 2, over=AXIS), optax.chain(all_reduce(over=AXIS), NEGATE)],
    ids=["accumulate", "all_reduce"],
)
def test_gradients_weight_and_count_are_one_exchange(tx: Any) -> None:
    def step(grads: Any, tokens: Any) -> Any:
        return tx.update({"w": grads[0, 0]}, tx.init(PARAMS), PARAMS, weight=tokens[0, 0])[0]

    mapped = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=P("d"), out_specs=P()))
    assert collectives(mapped.lower(GRADS, TOKENS).compile()) == ["all-reduce"]


@MODES
@ORDERS
@pytest.mark.parametrize(
    ("reduction", "expected"),
    [(None, token_mean(slice(3, 4))), (gc.reductions.sum(), 8 * token_mean(slice(3, 4))), (gc.reductions.min(), -4)],
    ids=["default", "sum", "min"],
)
def test_all_reduce(mode: Callable[..., Any], order: Any, reduction: Any, expected: float) -> None:
    tx = optax.chain(all_reduce(reduction, over=AXIS, order=order), NEGATE)

    def program(grads: Any, tokens: Any) -> Any:
        params = {"w": grads[3], "frozen": None}
        return tx.update(params, tx.init(params), weight=tokens[3])[0]["w"]

    np.testing.assert_array_equal(mode(program, GRADS, TOKENS), [-expected] * N)


@pytest.mark.parametrize("over", [None, "d"])
def test_all_reduce_wants_a_collective(over: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"all_reduce: expected a collective"):
        all_reduce(over=over)
