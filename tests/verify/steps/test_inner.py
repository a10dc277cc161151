"""The gradient that reaches an optimizer is found in the program of a step that returns new parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.verify import Cause, StepReport, check_step

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


def on_devices(how: str, clips: bool) -> Callable[..., Step]:
    """A whole step on each device, the gradient of which is clipped there, or only by the optimizer."""

    def make_step(k: int, devices: int = 1) -> Step:
        def step(state: Any, rows: Any) -> Any:
            p = jax.lax.pcast(state[0], "d", to="varying") if how == "shard_map" else state[0]
            gradient = jax.grad(lambda p: jnp.mean(squares(p, rows)))(p)
            if clips:
                gradient, _ = optax.clip_by_global_norm(0.3).update(gradient, optax.EmptyState())
            if how == "gathered":
                mean = jax.tree.map(lambda x: jnp.mean(jax.lax.all_gather(x, "d"), axis=0), gradient)
            else:
                mean = jax.lax.pmean(gradient, "d")
            return updated(CLIPPED_ADAM, state, mean)

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


def of_devices(how: str, clips: bool) -> StepReport:
    state = PARAMS, CLIPPED_ADAM.init(PARAMS)
    return check_step(on_devices(how, clips), state, ROWS, microbatches=(1,), devices=(2,), returns="params")


HOW = ["shard_map", *(pytest.param(how, marks=pytest.mark.full) for how in ("unchecked", "gathered")), "pmap"]


@pytest.mark.parametrize("how", HOW)
def test_a_right_step_on_devices_whose_optimizer_hides_sizes_passes(how: str) -> None:
    report = of_devices(how, clips=False)
    assert report.passes, report


@pytest.mark.parametrize("how", HOW)
def test_gradients_clipped_on_each_device_before_adam_are_named(how: str) -> None:
    report = of_devices(how, clips=True)
    assert report.cause is Cause.CHANGED_BEFORE, report
    assert "in the gradient that reaches the optimizer" in report.faults[0].detail


def test_a_learning_rate_times_the_number_of_microbatches_is_not_in_the_gradient() -> None:
    def make_step(k: int) -> Step:
        tx = optax.adamw(k * 1e-2)
        return jax.jit(lambda s, rows: updated(tx, s, jax.grad(lambda p: jnp.mean(squares(p, rows)))(s[0])))

    report = check_step(make_step, (PARAMS, optax.adamw(1).init(PARAMS)), ROWS, microbatches=(4,), returns="params")
    assert report.cause is Cause.SCALED, report
    assert "in the updates that are added to the parameters" in report.faults[0].detail


@pytest.mark.parametrize("batch", [ROWS, MASKED], ids=["equal", "masked"])
def test_a_division_by_a_number_that_a_loop_counts_is_not_the_optimizer(batch: Any) -> None:
    loss = masked if "mask" in batch else lambda p, rows: jnp.mean(squares(p, rows))
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(1e-2))

    def make_step(k: int) -> Step:
        @jax.jit
        def step(state: Any, batch: Any) -> Any:
            def add(carry: Any, rows: Any) -> Any:
                total, count = carry
                return (jax.tree.map(jnp.add, total, jax.grad(loss)(state[0], rows)), count + 1), None

            parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
            start = jax.tree.map(jnp.zeros_like, state[0]), jnp.zeros(())
            (total, count), _ = jax.lax.scan(add, start, parts)
            return updated(tx, state, jax.tree.map(lambda x: x / count, total))

        return step

    report = check_step(make_step, (PARAMS, tx.init(PARAMS)), batch, microbatches=(2,), returns="params")
    assert [x.cause for x in report.faults] == ([Cause.MEAN_OF_MEANS] if "mask" in batch else []), report
    assert report.passes != ("mask" in batch), report
