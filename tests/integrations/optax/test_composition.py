"""`accumulate` and `MultiSteps` inside and around other transformations of optax."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import gradcombine as gc
from gradcombine.integrations.jax import train_step
from gradcombine.integrations.optax import MultiSteps, accumulate, skip_not_finite

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"w": jnp.float32([1, -2]), "b": jnp.float32(3)}
GRADS = [{"w": jnp.float32([i + 1, 2 * i]), "b": jnp.float32(i - 5)} for i in range(4)]


def window_means(grads: list[Any]) -> list[Any]:
    return [gc.mean(grads[i : i + 2]) for i in range(0, len(grads), 2)]


def train(tx: Any, grads: list[Any], params: Any, **extra: Any) -> tuple[Any, Any]:
    """Parameters and state after all (compiled) steps."""
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, grad: Any) -> Any:
        updates, state = tx.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


assert_close = partial(chex.assert_trees_all_close, rtol=4e-6, atol=1e-7)
"""Equal up to the last digits, since the compiler fuses differently inside a conditional."""


def frozen_bias(inner: Any) -> Any:
    return optax.masked(inner, {"w": True, "b": False})


INNERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (lambda: optax.adamw(0.1), {}),
    "lion": (lambda: optax.lion(0.1), {}),
    "bfloat16 momentum": (lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16), {}),
    "clip, schedule": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.linear_schedule(1, 0, 4))),
        {},
    ),
    "inject_hyperparams": (lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1, 0, 4)), {}),
    "masked": (lambda: frozen_bias(optax.adam(0.1)), {}),
    "partition": (lambda: optax.partition({"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}), {}),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adam(0.1), 3), {}),
    "schedule_free": (lambda: contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1), {}),
    "prodigy": (lambda: contrib.prodigy(), {}),
    "dowg": (lambda: contrib.dowg(), {}),
    "dadapt_adamw": (lambda: contrib.dadapt_adamw(), {}),
    "momo": (lambda: contrib.momo(0.1), {"value": jnp.float32(2)}),
    "mechanize": (lambda: contrib.mechanize(optax.adam(0.1)), {}),
    "sam": (lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2), {}),
    "reduce_on_plateau": (lambda: optax.chain(optax.adam(0.1), contrib.reduce_on_plateau()), {"value": jnp.float32(2)}),
    "muon": (lambda: contrib.muon(0.1), {}),
}


ALIKE = (
    *("lion", "bfloat16 momentum", "prodigy", "dowg", "dadapt_adamw", "momo", "sam", "muon", "schedule_free"),
    *("mechanize", "partition", "inject_hyperparams", "adamw", "clip, schedule", "reduce_on_plateau"),
)
"""Run in the full tier only: their states and arguments are of types that the other cases cover."""


@pytest.mark.sampled
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.full) if x in ALIKE else x for x in INNERS])
def test_the_inner_transformation_takes_one_step_a_window(name: str) -> None:
    make, extra = INNERS[name]
    wrapped, state = train(accumulate(make(), 2, skip=skip_not_finite()), GRADS, PARAMS, **extra)
    plain, plain_state = train(optax.with_extra_args_support(make()), window_means(GRADS), PARAMS, **extra)
    assert_close(wrapped, plain)
    assert jax.tree.structure(state.inner) == jax.tree.structure(plain_state)
    assert jax.tree.map(lambda x: x.dtype, state.inner) == jax.tree.map(lambda x: x.dtype, plain_state)


@pytest.mark.full
def test_lookahead_around_and_inside() -> None:
    params = optax.LookaheadParams.init_synced(PARAMS)
    expected, _ = train(optax.lookahead(optax.sgd(0.1), 2, 0.5), window_means(GRADS), params)
    for tx in (
        accumulate(optax.lookahead(optax.sgd(0.1), 2, 0.5), 2),
        MultiSteps(optax.lookahead(optax.sgd(0.1), 2, 0.5), 2),
    ):
        assert_close(train(tx, GRADS, params)[0], expected)
    inside, _ = train(optax.lookahead(accumulate(optax.sgd(0.1), 2), 4, 0.5), GRADS, params)
    assert_close(inside, expected)


def test_hyperparameters_are_read_and_set_in_the_state() -> None:
    tx = accumulate(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5), 2)
    state = tx.init(PARAMS)
    assert optax.tree.get(state, "learning_rate") == state.inner.hyperparams["learning_rate"] == 0.5
    state = optax.tree.set(state, learning_rate=jnp.float32(0.25))
    for grad in GRADS[:2]:
        updates, state = jax.jit(tx.update)(grad, state, PARAMS)
    assert updates["b"] == 0.25 * 4.5


@pytest.mark.full
def test_it_is_masked_partitioned_and_conditional_from_outside() -> None:
    labels = {"w": "slow", "b": "fast"}
    tx = optax.partition(
        {"slow": accumulate(optax.sgd(1.0), 2), "fast": optax.sgd(1.0), "none": accumulate(optax.sgd(1.0), 2)}, labels
    )
    params, _ = train(tx, GRADS[:2], PARAMS)
    assert params["w"].tolist() == [1 - 1.5, -2 - 1] and params["b"] == 3 + 9
    params, _ = train(frozen_bias(accumulate(optax.sgd(1.0), 2)), GRADS[:2], PARAMS)
    assert params["w"].tolist() == [1 - 1.5, -2 - 1]
    params, _ = train(
        optax.apply_if_finite(accumulate(optax.sgd(1.0), 2), 3),
        [GRADS[0], {"w": jnp.full(2, jnp.nan), "b": jnp.float32(0)}, GRADS[1]],
        PARAMS,
    )
    assert params["w"].tolist() == [1 - 1.5, -2 - 1]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_tree_map_params_finds_the_accumulators(dtype: Any, order: Any) -> None:
    params = {"w": jnp.zeros((2, 3), dtype), "b": jnp.zeros((), dtype)}
    tx = optax.chain(accumulate(optax.adam(0.1), 4, skip=skip_not_finite(), order=order), optax.scale(1.0))
    state = tx.init(params)
    specs = {"w": "spec of w", "b": "spec of b"}
    mapped = optax.tree_map_params(tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: None)
    if order == "sequential":
        (level,) = mapped[0].window.levels
        assert (level.value, level.count, level.dtypes) == (specs, None, None)
    else:  # levels have one axis more than their parameter
        assert mapped[0].window.levels == (None, None)
    assert mapped[0].inner[0].mu == specs
    same = optax.tree_map_params(tx, lambda x: x, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)


def test_tree_map_params_of_multi_steps() -> None:
    for compat in (False, True):
        tx = MultiSteps(optax.adam(0.1), 2, compat=compat)
        mapped = optax.tree_map_params(tx, lambda _, spec: spec, tx.init(PARAMS), {"w": "w", "b": "b"})
        assert mapped.acc_grads == mapped.inner_opt_state[0].nu == {"w": "w", "b": "b"}


def test_tree_get_finds_the_counts() -> None:
    _, state = train(accumulate(optax.adam(0.1), 2, skip=skip_not_finite()), GRADS[:3], PARAMS)
    counters = {name: int(optax.tree.get(state, name)) for name in ("step", "index", "skipped", "num_not_finite")}
    assert counters == {"step": 1, "index": 1, "skipped": 0, "num_not_finite": 0}


@pytest.mark.parametrize("window", ["accumulate", "every", "microbatches"])
def test_a_snapshot_holds_the_norm_of_a_windows_gradient(window: str) -> None:
    tx = optax.chain(optax.snapshot("grad_norm", optax.tree.norm), optax.sgd(1.0))
    params, x = jnp.float32([0, 0]), jnp.float32([[1, 2], [5, 6]])

    def loss(w: Any, x: Any) -> Any:
        return (x @ w).mean()

    if window == "accumulate":
        wrapped = accumulate(tx, every=2)
        state = wrapped.init(params)
        for row in x:
            _, state = wrapped.update(row, state, params)
    elif window == "every":
        step = train_step(loss, tx, every=2)
        state = step.init(params)
        for row in x:
            params, state, _ = step(params, state, row[None])
    else:
        step = train_step(loss, tx, microbatches=2)
        _, state, _ = step(params, step.init(params), x)
    assert float(optax.tree.get(state, "grad_norm")) == 5.0  # of (3, 4)
