"""The gradient that reaches an optimizer is found in the program of a step that returns new parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.verify import Cause, StepReport, Verdict, check_step

Step = Callable[[Any, Any], Any]
RNG = np.random.default_rng(0)
ROWS = {"x": RNG.normal(size=(8, 5)).astype(np.float32), "y": RNG.normal(size=(8, 3)).astype(np.float32)}
MASKED = ROWS | {"mask": np.float32([1, 1, 0, 1, 0, 0, 1, 1])}
PARAMS = {"w": RNG.normal(size=(5, 3)).astype(np.float32), "b": np.float32([0.1, 0.2, -0.3])}
CLIPPED_ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def squares(p: Any, rows: Any) -> Any:
    return jnp.sum((jnp.tanh(rows["x"] @ p["w"] + p["b"][None]) - rows["y"]) ** 2, axis=1)


def masked(p: Any, rows: Any) -> Any:
    return jnp.sum(squares(p, rows) * rows["mask"]) / jnp.sum(rows["mask"])


def updated(tx: optax.GradientTransformation, state: Any, gradient: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        updates, inner = tx.update(gradient, state[1], state[0])
    return optax.apply_updates(state[0], updates), inner


def summed_in_loop(
    loss: Any, p: Any, batch: Any, k: int, gradient: Any = None, counted: Callable[[Any], Any] = lambda rows: 1
) -> tuple[Any, Any]:
    """Sums of gradients, and of numbers that are counted, over microbatches in a loop."""

    def add(carry: Any, rows: Any) -> Any:
        total, count = carry
        new = gradient(p, rows) if gradient else jax.grad(loss)(p, rows)
        return (jax.tree.map(jnp.add, total, new), count + counted(rows)), None

    parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
    return jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, p), jnp.zeros(())), parts)[0]


def on_devices(how: str, defect: str = "", tx: Any = CLIPPED_ADAM) -> Callable[..., Step]:
    """A whole step on each device."""

    def make_step(k: int, devices: int = 1) -> Step:
        def step(state: Any, rows: Any) -> Any:
            p = jax.lax.pcast(state[0], "d", to="varying") if how == "shard_map" else state[0]
            gradient = jax.grad(lambda p: jnp.mean(squares(p, rows)))(p)
            if defect == "clipped":
                gradient, _ = optax.clip_by_global_norm(0.3).update(gradient, optax.EmptyState())
            mean = jax.lax.pmean(gradient, "d")
            if defect == "norm summed":
                norm = jnp.sqrt(jax.lax.psum(optax.tree.norm(mean, squared=True), "d"))
                mean = jax.tree.map(lambda x: x * 10 / norm, mean)
            return updated(tx, state, jax.lax.psum(mean, "d") if defect == "summed twice" else mean)

        if how == "pmap":
            mapped = jax.pmap(step, axis_name="d", in_axes=(None, 0), devices=jax.devices()[:devices])

            def run(state: Any, rows: Any) -> Any:
                stacked = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), rows)
                return jax.tree.map(lambda x: x[0], mapped(state, stacked))

            return jax.jit(run)
        mesh, spec = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P
        checks = how == "shard_map"
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec(), check_vma=checks))

    return make_step


def of_devices(how: str, defect: str = "", tx: Any = CLIPPED_ADAM) -> StepReport:
    make_step = on_devices(how, defect, tx)
    return check_step(make_step, (PARAMS, tx.init(PARAMS)), ROWS, microbatches=(1,), devices=(2,), returns="params")


HOW = ["shard_map", pytest.param("unchecked", marks=pytest.mark.full), "pmap"]


@pytest.mark.parametrize("how", HOW)
def test_a_right_step_on_devices_whose_optimizer_hides_sizes_passes(how: str) -> None:
    report = of_devices(how)
    assert report.passes, report


@pytest.mark.parametrize("how", HOW)
def test_gradients_clipped_on_each_device_before_adam_are_named(how: str) -> None:
    report = of_devices(how, "clipped")
    assert report.cause is Cause.CHANGED_BEFORE, report
    assert "in the gradient that reaches the optimizer" in report.faults[0].detail


GROUPS = {"w": optax.adam(1e-2), "b": optax.lion(1e-3)}
OPTIMIZERS = {
    "adam": CLIPPED_ADAM,
    "groups": optax.chain(optax.clip_by_global_norm(0.1), optax.partition(GROUPS, {"w": "w", "b": "b"})),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("tx", OPTIMIZERS)
def test_a_mean_that_is_summed_over_devices_again_is_not_hidden_by_clipping(how: str, tx: str) -> None:
    """All operations are those of one device, where the second sum changes nothing."""
    report = of_devices(how, "summed twice", OPTIMIZERS[tx])
    assert report.cause is Cause.SUM, report


@pytest.mark.parametrize("how", HOW)
def test_a_norm_that_devices_exchange_may_hide_the_gradient(how: str) -> None:
    """Clipping hides that the norm is that of all devices' equal gradients."""
    report = of_devices(how, "norm summed")
    assert report.verdict is Verdict.CANNOT_TELL, report


@pytest.mark.parametrize("tx", OPTIMIZERS)
def test_a_mean_times_a_number_that_a_loop_counts_is_not_hidden_by_clipping(tx: str) -> None:
    def make_step(k: int) -> Step:
        @jax.jit
        def step(state: Any, batch: Any) -> Any:
            total, count = summed_in_loop(lambda p, rows: jnp.sum(squares(p, rows)), state[0], batch, k)
            return updated(OPTIMIZERS[tx], state, jax.tree.map(lambda x: x / len(batch["y"]) * count, total))

        return step

    state = PARAMS, OPTIMIZERS[tx].init(PARAMS)
    assert check_step(make_step, state, ROWS, microbatches=(2,), returns="params").cause is Cause.SUM


def test_clipping_before_a_division_by_a_counted_number_is_named() -> None:
    """Beyond the division, the microbatches have no common norm."""

    def make_step(k: int) -> Step:
        @jax.jit
        def step(state: Any, batch: Any) -> Any:
            def gradient(p: Any, rows: Any) -> Any:
                clipped = optax.clip_by_global_norm(0.3)
                return clipped.update(jax.grad(lambda p: jnp.sum(squares(p, rows)))(p), optax.EmptyState())[0]

            total, count = summed_in_loop(None, state[0], batch, k, gradient, lambda rows: jnp.sum(rows["mask"]))
            return updated(CLIPPED_ADAM, state, jax.tree.map(lambda x: x / count, total))

        return step

    state = PARAMS, CLIPPED_ADAM.init(PARAMS)
    report = check_step(make_step, state, MASKED, microbatches=(2,), returns="params")
    assert report.cause is Cause.CHANGED_BEFORE, report
