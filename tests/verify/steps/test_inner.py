"""The gradient that reaches an optimizer is found in the program of a step that returns new parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.verify import Cause, StepReport, Verdict, check_step
from tests.verify.steps.dividing import jitted, stacked

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

    return jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, p), jnp.zeros(())), stacked(batch, k))[0]


def on_mesh(step: Step, devices: int, checks: bool = False) -> Step:
    """Maps a step of the state and the examples of one device."""
    mesh, specs = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), (jax.P(), jax.P("d"))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=checks))


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
                return jax.tree.map(lambda x: x[0], mapped(state, stacked(rows, devices)))

            return jax.jit(run)
        return on_mesh(step, devices, checks=how == "shard_map")

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


@pytest.mark.parametrize("combine", [jax.lax.pmean, jax.lax.psum])
def test_a_norm_that_devices_exchange_as_a_metric_hides_nothing(combine: Any) -> None:
    def update(state: Any, gradient: Any, loss: Any) -> Any:
        combined = combine(gradient, "d")
        return updated(CLIPPED_ADAM, state, combined), jax.lax.pmean(optax.tree.norm(combined), "d")

    report = checked_on_devices(update)
    assert report.passes == (combine is jax.lax.pmean), report


@pytest.mark.parametrize("tx", OPTIMIZERS)
def test_a_mean_times_a_number_that_a_loop_counts_is_not_hidden_by_clipping(tx: str) -> None:
    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        total, count = summed_in_loop(lambda p, rows: jnp.sum(squares(p, rows)), state[0], batch, k)
        return updated(OPTIMIZERS[tx], state, jax.tree.map(lambda x: x / len(batch["y"]) * count, total))

    state = PARAMS, OPTIMIZERS[tx].init(PARAMS)
    assert check_step(make_step, state, ROWS, microbatches=(2,), returns="params").cause is Cause.SUM


@pytest.mark.parametrize("right", [True, False])
def test_functions_and_settings_in_a_module_hide_no_gradient(right: bool) -> None:
    def make_step(k: int) -> Step:
        @eqx.filter_jit
        def step(state: Any, batch: Any) -> Any:
            def loss(model: Any, rows: Any) -> Any:
                total = jnp.sum((jax.vmap(model)(rows["x"]) - rows["y"]) ** 2 * rows["mask"][:, None])
                return total * k / batch["mask"].sum() if right else total / rows["mask"].sum()

            model, rows = state[0], stacked(batch, k)
            made = [eqx.filter_grad(loss)(model, jax.tree.map(lambda x: x[i], rows)) for i in range(k)]  # noqa: B023
            gradient = jax.tree.map(lambda *x: sum(x) / k, *made)
            with jax.numpy_dtype_promotion("standard"):
                updates, inner = CLIPPED_ADAM.update(gradient, state[1])
            return eqx.apply_updates(model, updates), inner

        return step

    first, last = (eqx.nn.Linear(5, n, key=jax.random.key(n)) for n in (5, 3))
    model = eqx.nn.Sequential([first, eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(inference=True), last])
    state = model, CLIPPED_ADAM.init(eqx.filter(model, eqx.is_inexact_array))
    report = check_step(make_step, state, MASKED, microbatches=(2,), returns="params")
    assert (report.verdict, report.cause) == ((Verdict.PASSES, None) if right else (Verdict.FAILS, Cause.MEAN_OF_MEANS))


def test_clipping_before_a_division_by_a_counted_number_is_named() -> None:
    """Beyond the division, the microbatches have no common norm."""

    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        def gradient(p: Any, rows: Any) -> Any:
            clipped = optax.clip_by_global_norm(0.3)
            return clipped.update(jax.grad(lambda p: jnp.sum(squares(p, rows)))(p), optax.EmptyState())[0]

        total, count = summed_in_loop(None, state[0], batch, k, gradient, lambda rows: jnp.sum(rows["mask"]))
        return updated(CLIPPED_ADAM, state, jax.tree.map(lambda x: x / count, total))

    state = PARAMS, CLIPPED_ADAM.init(PARAMS)
    report = check_step(make_step, state, MASKED, microbatches=(2,), returns="params")
    assert report.cause is Cause.CHANGED_BEFORE, report


def checked_on_devices(update: Callable[[Any, Any, Any], Any], state: Any = None) -> StepReport:
    """Checks a step that maps ``update(state, gradients of the mean on a device, loss)``."""

    def make_step(k: int, devices: int = 1) -> Step:
        def step(state: Any, rows: Any) -> Any:
            params = state["p"] if isinstance(state, dict) else state[0]
            loss, gradient = jax.value_and_grad(lambda p: jnp.mean(squares(p, rows)))(params)
            return update(state, gradient, loss)

        return on_mesh(step, devices)

    state = (PARAMS, CLIPPED_ADAM.init(PARAMS)) if state is None else state
    return check_step(make_step, state, ROWS, microbatches=(1,), devices=(2,), returns="params")


@pytest.mark.parametrize(("combine", "passes"), [(jax.lax.psum, True), (jax.lax.pmean, False)])
def test_a_sum_over_devices_of_a_constant_is_a_number_of_devices(combine: Any, passes: bool) -> None:
    def update(state: Any, gradient: Any, loss: Any) -> Any:
        number = jax.lax.psum(jnp.ones(()), "d")
        return updated(CLIPPED_ADAM, state, jax.tree.map(lambda g: combine(g, "d") / number, gradient))

    report = checked_on_devices(update)
    assert report.passes == passes and (passes or report.cause is Cause.SCALED), report


def kept(new: Any, old: Any, keeps: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(keeps, x, y), new, old)


@pytest.mark.parametrize("combine", [jax.lax.pmean, jax.lax.psum])
def test_a_step_may_be_skipped_by_its_loss(combine: Any) -> None:
    def update(state: Any, gradient: Any, loss: Any) -> Any:
        finite = jnp.isfinite(jax.lax.pmean(loss, "d"))
        return kept(updated(CLIPPED_ADAM, state, combine(gradient, "d")), state, finite)

    report = checked_on_devices(update)
    assert report.passes if combine is jax.lax.pmean else report.cause is Cause.SUM, report


def test_examples_after_the_optimizer_do_not_hide_a_sum() -> None:
    def update(state: Any, gradient: Any, loss: Any) -> Any:
        scale = jnp.where(jax.lax.pmean(loss, "d") < 1e9, 1.0, 0.5)
        params, inner = updated(CLIPPED_ADAM, state, jax.lax.psum(gradient, "d"))
        return jax.tree.map(lambda x, y: y + scale * (x - y), params, state[0]), inner

    report = checked_on_devices(update)
    assert report.cause is Cause.SUM, report


def test_a_scale_in_the_state_corrects_no_sum() -> None:
    """It is the same number in one batch."""

    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        total, _ = summed_in_loop(lambda p, rows: jnp.mean(squares(p, rows)) * state[2], state[0], batch, k)
        unscaled = jax.tree.map(lambda x: x * (1 / state[2]), total)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(unscaled)]))
        new = updated(CLIPPED_ADAM, state[:2], unscaled)
        return *kept(new, state[:2], finite), jnp.where(finite, state[2], state[2] / 2)

    state = PARAMS, CLIPPED_ADAM.init(PARAMS), np.float32(128)
    report = check_step(make_step, state, ROWS, microbatches=(2,), returns="params")
    assert report.cause is Cause.SUM, report


def test_a_skip_by_the_gradients_does_not_hide_the_cause() -> None:
    """Parameters and moments after the update have the shapes of the state, too, but are no gradients."""
    tokens = np.arange(24).reshape(8, 3) % 5
    batch = {"x": RNG.normal(size=(8, 3, 4)), "y": RNG.normal(size=(8, 3)), "mask": (tokens < 3) | (tokens == 4)}
    params, tx = {"w": RNG.normal(size=4).astype(np.float32), "b": np.float32(0.1)}, optax.lamb(0.01)

    def loss(p: Any, rows: Any, total: Any) -> Any:
        return jnp.sum((rows["x"] @ p["w"] + p["b"] - rows["y"]) ** 2 * rows["mask"]) / total

    def make_step(k: int) -> Step:
        @jax.jit
        def step(state: Any, batch: Any) -> Any:
            size, total = 8 // k, jnp.sum(batch["mask"])
            parts = [jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch) for i in range(k)]
            each = [jax.grad(loss)(state[0], x, total) for x in parts]
            gradient = jax.tree.map(lambda *x: sum(x), *each[: max(k - 1, 1)])
            finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(gradient)]))
            return kept(updated(tx, state, gradient), state, finite)

        return step

    report = check_step(make_step, (params, tx.init(params)), jax.tree.map(np.float32, batch), returns="params")
    assert report.cause is Cause.LOST, report


def test_an_average_of_the_loss_is_no_gradient() -> None:
    """All that follows the last use of the examples is this average."""
    state = {"p": PARAMS, "s": CLIPPED_ADAM.init(PARAMS), "z": np.float32(0)}

    def update(state: Any, gradient: Any, loss: Any) -> Any:
        new = updated(CLIPPED_ADAM, (state["p"], state["s"]), jax.lax.psum(gradient, "d"))
        return {"p": new[0], "s": new[1], "z": 0.9 * state["z"] + 0.1 * jax.lax.pmean(loss, "d")}

    report = checked_on_devices(update, state)
    assert not report.passes, report


def test_the_gradient_of_each_division_is_examined() -> None:
    """Gradients that are gathered cannot be, although those of two microbatches can."""

    def make_step(k: int, devices: int = 1) -> Step:
        def step(state: Any, rows: Any) -> Any:
            total, _ = summed_in_loop(lambda p, rows: jnp.mean(squares(p, rows)), state[0], rows, k)
            gradient = jax.tree.map(lambda x: x / k, total)
            if devices > 1:
                gradient = jax.tree.map(lambda x: jnp.sum(jax.lax.all_gather(x, "d"), axis=0), gradient)
            return updated(CLIPPED_ADAM, state, gradient)

        return jax.jit(step) if devices == 1 else on_mesh(step, devices)

    state = PARAMS, CLIPPED_ADAM.init(PARAMS)
    report = check_step(make_step, state, ROWS, microbatches=(1, 2), devices=(2, 1), returns="params")
    assert report.verdict is Verdict.CANNOT_TELL, report
