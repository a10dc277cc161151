"""The source line a fault points to, and defects that an optimizer, a discontinuity or rounding could hide."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from gradcombine.verify import Verdict, check_step
from gradcombine.verify.check.step_report import Cause
from tests.verify.steps.dividing import eager, jitted, parts, stacked

RNG = np.random.default_rng(0)
PARAMS = {"w": np.ones(5, np.float32)}
BATCH = jax.tree.map(
    np.float32,
    {"x": RNG.normal(size=(16, 5)), "y": RNG.normal(size=16), "mask": np.array([1, 1, 1, 0, 1, 0, 0, 1] * 2)},
)


def loss(params: Any, batch: Any) -> Any:
    errors = (batch["x"] @ params["w"] - batch["y"]) ** 2 * batch["mask"]
    return errors.sum() / batch["mask"].sum()


def mean_of_a_map(k: int, devices: int = 1) -> Any:
    def step(params: Any, batch: Any) -> Any:
        grads = jax.lax.map(lambda one: jax.grad(loss)(params, one), stacked(batch, k))
        return jax.tree.map(lambda x: x.mean(0), grads)  # here

    return jax.jit(step)


@eager
def loop(params: Any, batch: Any, k: int) -> Any:
    total = jax.tree.map(jnp.zeros_like, params)
    for part in parts(batch, k):
        total = jax.tree.map(jnp.add, total, jax.grad(loss)(params, part))
    return jax.tree.map(lambda x: x / k, total)  # here


@jitted
def reciprocal(params: Any, batch: Any, k: int) -> Any:
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, stacked(batch, k))
    scale = 1 / k
    return jax.tree.map(lambda x: x.sum(0) * scale, grads)  # here


@eager
def running(params: Any, batch: Any, k: int) -> Any:
    """Running mean as in optax.MultiSteps, but with constant divisors."""
    mean = jax.tree.map(jnp.zeros_like, params)
    for i, part in enumerate(parts(batch, k)):
        grads = jax.grad(loss)(params, part)
        mean = jax.tree.map(lambda m, g, i=i: m + (g - m) / (i + 1), mean, grads)  # here
    return mean


@jitted
def scaled_loss(params: Any, batch: Any, k: int) -> Any:
    """Four examples in each of four microbatches: the mean over examples divides by 4 too."""
    tx = optax.sgd(0.1)

    def body(total: Any, one: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss(p, one) / k)(params)  # here
        return jax.tree.map(jnp.add, total, grads), (value, one["x"].mean(0))

    total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), stacked(batch, k))
    updates, _ = tx.update(total, tx.init(params), params)
    return optax.apply_updates(params, updates)


def on_devices(k: int, devices: int = 1) -> Any:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))

    def each(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), batch)
        return jax.lax.pmean(grads, "data")  # here

    replicated, rows = PartitionSpec(), PartitionSpec("data")
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(replicated, rows), out_specs=replicated))


def of_an_nnx_module(k: int) -> Any:
    @nnx.jit
    def step(model: Any, batch: Any) -> Any:
        grads = [nnx.grad(lambda m, b: loss({"w": m.w[...]}, b))(model, part) for part in parts(batch, k)]
        return jax.tree.map(lambda *xs: sum(xs) / len(xs), *grads)  # here

    return step


def of_an_equinox_module(k: int) -> Any:
    @eqx.filter_jit
    def step(model: Any, batch: Any) -> Any:
        grads = eqx.filter_vmap(eqx.filter_grad(loss), in_axes=(None, 0))(model, stacked(batch, k))
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), grads)  # here

    return step


@jitted
def divided_too(params: Any, batch: Any, k: int) -> Any:
    """Divides the sum over all tokens by their number, and again by the number of microbatches."""
    weights = stacked(batch, k)["mask"].sum(1)
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, stacked(batch, k))
    mean = jax.tree.map(lambda x: (x * weights[:, None]).sum(0) / weights.sum(), grads)
    return jax.tree.map(lambda x: x / k, mean)  # here


@jitted
def narrow(params: Any, batch: Any, k: int) -> Any:
    def body(total: Any, one: Any) -> Any:
        weight = one["mask"].sum()
        grads = jax.tree.map(lambda g: (g * weight).astype(jnp.bfloat16), jax.grad(loss)(params, one))
        return jax.tree.map(lambda t, g: t + g, total, grads), weight  # here

    empty = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.bfloat16), params)
    total, weights = jax.lax.scan(body, empty, stacked(batch, k))
    return jax.tree.map(lambda x: x.astype(jnp.float32) / weights.sum(), total)


@jitted
def multi_steps(params: Any, batch: Any, k: int) -> Any:
    """optax divides by a counter that is part of its state."""
    tx = optax.MultiSteps(optax.sgd(1.0), k)
    state = tx.init(params)
    for part in parts(batch, k):
        grads = jax.grad(loss)(params, part)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state, params)  # here
    return optax.apply_updates(params, updates)


@jitted
def multi_steps_in_a_scan(params: Any, batch: Any, k: int) -> Any:
    tx = optax.MultiSteps(optax.sgd(1.0), k)

    def body(state: Any, one: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(jax.grad(loss)(params, one), state, params)  # here
        return state, updates

    updates = jax.lax.scan(body, tx.init(params), stacked(batch, k))[1]
    return optax.apply_updates(params, jax.tree.map(lambda x: x.sum(0), updates))


class Module(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(5))


STEPS: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "a map's mean": (mean_of_a_map, PARAMS, {}),
    "a loop": (loop, PARAMS, {}),
    "a running mean": (running, PARAMS, {"microbatches": (4,)}),
    "a reciprocal": (reciprocal, PARAMS, {}),
    "the loss": (scaled_loss, PARAMS, {"returns": "params", "microbatches": (4,)}),
    "devices": (on_devices, PARAMS, {"microbatches": (1,), "devices": (2, 4)}),
    "nnx": (of_an_nnx_module, Module(), {}),
    "equinox": (of_an_equinox_module, PARAMS, {}),
    "MultiSteps": (multi_steps, PARAMS, {"returns": "params", "microbatches": (4,)}),
    "MultiSteps in a scan": (multi_steps_in_a_scan, PARAMS, {"returns": "params", "microbatches": (4,)}),
    "divided too": (divided_too, PARAMS, {}),
    "narrow": (narrow, PARAMS, {"microbatches": (4,)}),
}

CAUSES = {"narrow": Cause.PRECISION, "divided too": Cause.SCALED}


@pytest.mark.sampled
@pytest.mark.parametrize("name", STEPS)
def test_the_line_is_named(name: str) -> None:
    make_step, params, settings = STEPS[name]
    source, first = inspect.getsourcelines(make_step)
    here = first + next(i for i, text in enumerate(source) if text.rstrip().endswith("# here"))
    fault = check_step(make_step, params, BATCH, **settings).faults[0]
    assert fault.cause is CAUSES.get(name, Cause.MEAN_OF_MEANS)
    assert fault.line == f"{Path(__file__).relative_to(Path.cwd())}:{here}"
    assert fault.line in str(fault)


@pytest.mark.full
def test_no_line_is_named_where_several_could_be_meant_or_none() -> None:
    @jitted
    def twice(params: Any, batch: Any, k: int) -> Any:
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, stacked(batch, k))
        first = jax.tree.map(lambda x: x.mean(0), grads)
        second = jax.tree.map(lambda x: x.sum(0) / k, grads)
        return jax.tree.map(lambda a, b: (a + b) / 2, first, second)

    def by_a_counter(k: int, every: int | None = None) -> Any:
        """Divides by a traced count; with `every`, also passes the mean through optax.MultiSteps."""
        tx = optax.sgd(1.0) if every is None else optax.MultiSteps(optax.sgd(1.0), every)

        def step(params: Any, batch: Any) -> Any:
            grads = [jax.grad(loss)(params, part) for part in parts(batch, k)]
            count = sum(batch["x"][0, 0] * 0 + 1 for _ in range(k))
            with jax.numpy_dtype_promotion("standard"):
                mean = jax.tree.map(lambda *x: sum(x) / count, *grads)
                return optax.apply_updates(params, tx.update(mean, tx.init(params), params)[0])

        return jax.jit(step)

    for make_step, returns in (
        (twice, "gradients"),
        (by_a_counter, "params"),
        (partial(by_a_counter, every=1), "params"),
    ):
        fault = check_step(make_step, PARAMS, BATCH, microbatches=(4,), returns=returns).faults[0]
        assert (fault.cause, fault.line) == (Cause.MEAN_OF_MEANS, "")


@pytest.mark.full
@pytest.mark.parametrize("weighted", [False, True], ids=["mean of means", "token mean"])
def test_a_mean_of_means_that_adams_first_step_hides(weighted: bool) -> None:
    """Adam's first update is the sign of the gradient, which the defect does not change."""

    @jitted
    def make_step(params: Any, batch: Any, k: int) -> Any:
        tx = optax.adamw(1e-2)
        weights = stacked(batch, k)["mask"].sum(1) if weighted else jnp.ones(k)
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, stacked(batch, k))
        grads = jax.tree.map(lambda x: (x * weights[:, None]).sum(0) / weights.sum(), grads)
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    far = BATCH | {"y": BATCH["y"] + 100, "x": np.abs(BATCH["x"])}
    far["mask"] = np.float32([1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0])
    report = check_step(make_step, PARAMS, far, returns="params")
    assert [x.cause for x in report.faults] == ([] if weighted else [Cause.MEAN_OF_MEANS])
    assert weighted or "hides it" in report.faults[0].detail


@pytest.mark.sampled
@pytest.mark.parametrize("tx", [optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1)), optax.adam(1e-2)])
@pytest.mark.parametrize("divided", ["never", "by a constant", "by a count"])
def test_a_sum_whose_scale_an_optimizer_hides(divided: str, tx: optax.GradientTransformation) -> None:
    even = BATCH | {"mask": np.ones_like(BATCH["mask"])}

    @jitted
    def make_step(params: Any, batch: Any, k: int) -> Any:
        def add(total: Any, part: Any) -> Any:
            return (jax.tree.map(jnp.add, total[0], jax.grad(loss)(params, part)), total[1] + 1), None

        start = jax.tree.map(jnp.zeros_like, params), jnp.float32(0)
        (grads, count), _ = jax.lax.scan(add, start, stacked(batch, k))
        divisor = {"never": 1, "by a constant": k, "by a count": count}[divided]
        grads = jax.tree.map(lambda x: x / divisor, grads)
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    report = check_step(make_step, PARAMS, even, returns="params")
    assert [x.cause for x in report.faults] == ([Cause.SUM] if divided == "never" else []), str(report)
    assert divided != "never" or "hides it" in report.faults[0].detail


def test_a_mask_that_is_cast_to_integers_hides_nothing() -> None:
    """Perturbing the mask to measure rounding noise would flip it, and the noise would be as large as the result."""

    def cast(params: Any, batch: Any) -> Any:
        return loss(params, batch | {"mask": batch["mask"].astype(jnp.int32).astype(jnp.float32)})

    @jitted
    def make_step(params: Any, batch: Any, k: int) -> Any:
        grads = jax.vmap(jax.grad(cast), (None, 0))(params, stacked(batch, k))
        return jax.tree.map(lambda x: x.mean(0), grads)

    assert check_step(make_step, PARAMS, BATCH).cause is Cause.MEAN_OF_MEANS


def test_a_step_that_jumps_cannot_be_told() -> None:
    """Where rounding decides between two values, the noise gives no usable tolerance."""

    @jitted
    def make_step(params: Any, batch: Any, k: int) -> Any:
        integers = jnp.floor(batch["x"] * 3)  # discontinuous exactly at multiples of 1/3
        return {"w": params["w"] * 0 + integers.mean(0)}

    thirds = {"x": np.float32(np.arange(1, 81).reshape(16, 5)) / np.float32(3)}
    report = check_step(make_step, PARAMS, thirds)
    assert report.verdict is Verdict.CANNOT_TELL
    assert "which rounding hides" in report.not_checked[0]


def test_a_step_that_is_made_for_one_division_alone_is_checked() -> None:
    """Finding the line needs no other number of microbatches, and complex constants are not taken for divisors."""

    def make_step(k: int) -> Any:
        if k not in (1, 4):
            raise ValueError("4 microbatches")

        def step(params: Any, batch: Any) -> Any:
            grads = jax.vmap(jax.grad(loss), (None, 0))(params, stacked(batch, k))
            rotated = jax.tree.map(lambda x: (x.astype(jnp.complex64) * 1j).imag, grads)
            return jax.tree.map(lambda x: x.mean(0), rotated)

        return jax.jit(step)

    assert check_step(make_step, PARAMS, BATCH, microbatches=(4,)).cause is Cause.MEAN_OF_MEANS


GATED = {"w": np.ones(5, np.float32), "g": np.full(5, 0.5, np.float32)}


def errors(p: Any, x: Any) -> tuple[Any, Any]:
    return (((x["x"] @ p["w"] - x["y"]) ** 2) * x["mask"]).sum(), x["mask"].sum()


def balance(p: Any, x: Any) -> tuple[Any, Any]:
    return (jax.nn.softmax(x["x"] * p["g"][None]) ** 2).sum(), jnp.float32(len(x["x"]))


def terms(p: Any, x: Any) -> Any:
    made = {f.__name__: jax.value_and_grad(f, has_aux=True)(p, x) for f in (errors, balance)}
    return {name: (grads, weight) for name, ((_, weight), grads) in made.items()}


@jitted
def by_tokens(p: Any, batch: Any, k: int) -> Any:
    """Adds a mean over rows to a sum over tokens, then divides both by the tokens of the window."""

    def total(p: Any, x: Any) -> tuple[Any, Any]:
        (s, count), (t, rows) = errors(p, x), balance(p, x)
        return (s / count if k == 1 else s) + t / rows, count

    def body(carry: Any, x: Any) -> Any:
        (_, count), grads = jax.value_and_grad(total, has_aux=True)(p, x)
        return jax.tree.map(jnp.add, carry, (grads, count)), None

    (grads, count), _ = jax.lax.scan(body, (jax.tree.map(jnp.zeros_like, p), 0.0), stacked(batch, k))
    return jax.tree.map(lambda x: x / count, grads) if k > 1 else grads  # here


@jitted
def by_each(p: Any, batch: Any, k: int) -> Any:
    """Divides the errors of each microbatch by its tokens, then averages over the microbatches."""

    def of_both(p: Any, x: Any) -> Any:
        (s, count), (t, rows) = errors(p, x), balance(p, x)
        mean = s / count  # here
        return mean + t / rows

    grads = jax.vmap(jax.grad(of_both), (None, 0))(p, stacked(batch, k))
    return jax.tree.map(lambda x: x.mean(0), grads)


def updated(make_gradient: Any, k: int) -> Any:
    tx = optax.adamw(1e-2)

    def step(p: Any, batch: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(p, tx.update(make_gradient(k)(p, batch), tx.init(p), p)[0])

    return jax.jit(step)


@pytest.mark.full
@pytest.mark.parametrize("make_step", [by_tokens, by_each])
@pytest.mark.parametrize("hides", [False, True], ids=["gradients", "Adam's first step"])
def test_the_line_that_divides_a_term(make_step: Any, hides: bool) -> None:
    source, first = inspect.getsourcelines(make_step)
    here = first + next(i for i, text in enumerate(source) if text.rstrip().endswith("# here"))
    step, returns = (partial(updated, make_step), "params") if hides else (make_step, "gradients")
    fault = check_step(step, GATED, BATCH, microbatches=(4,), returns=returns, terms=terms).faults[0]
    assert fault.cause is Cause.DENOMINATOR
    assert fault.line == f"{Path(__file__).relative_to(Path.cwd())}:{here}"


@pytest.mark.full
def test_means_by_two_counts_that_adams_first_step_hides_are_named() -> None:
    report = check_step(partial(updated, by_each), GATED, BATCH, microbatches=(4,), returns="params")
    assert report.cause is Cause.MEAN_OF_MEANS, report
    assert "different denominators" in report.faults[0].detail


@pytest.mark.full
def test_a_difference_without_a_cause_that_adams_first_step_hides_is_no_pass() -> None:
    @eager
    def mixed(p: Any, batch: Any, k: int) -> Any:
        """Adds to each element, for several microbatches, a part of another one's size, which changes no sign."""

        def mix(x: Any) -> Any:
            return x + 0.2 * jnp.sign(x) * jnp.abs(x[::-1])

        total, count = jax.grad(errors, has_aux=True)(p, batch)
        return jax.tree.map(lambda x: (x if k == 1 else mix(x)) / count, total)

    report = check_step(partial(updated, mixed), GATED, BATCH, microbatches=(4,), returns="params")
    assert report.verdict is Verdict.CANNOT_TELL, report
    assert "gradients that reach the optimizer" in report.not_checked[0]


@pytest.mark.sampled
@pytest.mark.parametrize("tx", [None, optax.sgd(0.1), optax.adamw(1e-2)], ids=["gradients", "sgd", "adamw"])
def test_a_divisor_that_is_the_largest_of_a_batch(tx: Any) -> None:
    """As with rows padded to the longest: in one batch, the weights of the examples sum to less than 1."""

    def padded(p: Any, x: Any) -> Any:
        return errors(p, x)[0] / (len(x["y"]) * jnp.abs(x["x"]).sum(1).max())

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        grads = jax.vmap(jax.grad(padded), (None, 0))(p, stacked(batch, k))
        grads = jax.tree.map(lambda x: x.mean(0), grads)
        with jax.numpy_dtype_promotion("standard"):
            return grads if tx is None else optax.apply_updates(p, tx.update(grads, tx.init(p), p)[0])

    wide = BATCH | {"x": np.float32(np.random.default_rng(1).normal(size=(16, 40)))}
    returns = "gradients" if tx is None else "params"
    report = check_step(make_step, {"w": np.ones(40, np.float32)}, wide, returns=returns)
    assert report.cause is Cause.MEAN_OF_MEANS, report


def test_a_microbatch_that_is_lost_among_means() -> None:
    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        grads = jax.vmap(jax.grad(loss), (None, 0))(p, stacked(batch, k))
        return jax.tree.map(lambda x: x[: max(k - 1, 1)].sum(0) / k, grads)

    uneven = BATCH | {"mask": np.float32([1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 1, 1])}
    assert check_step(make_step, PARAMS, uneven).cause is Cause.LOST


LAYER = {"a": RNG.normal(size=(5, 32)).astype(np.float32), "w": RNG.normal(size=32).astype(np.float32)}


def layer_norm(k: int, epsilon: float, guard: bool = False) -> Any:
    """A step through a layer norm with this epsilon; `guard`: whether its divisor is clamped from below."""

    def error(p: Any, x: Any) -> Any:
        h = x["x"] @ p["a"]
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + np.float32(epsilon))
        return ((h @ p["w"] - x["y"]) ** 2).mean()

    @jax.jit
    def step(p: Any, batch: Any) -> Any:
        total = jax.tree.map(lambda x: x.sum(0), jax.lax.map(lambda one: jax.grad(error)(p, one), stacked(batch, k)))
        count = jnp.maximum(jnp.float32(k), np.float32(1e-9)) if guard else jnp.float32(k)
        return jax.tree.map(lambda x: x / count, total)

    return step


@pytest.mark.full
def test_another_epsilon_is_told() -> None:
    report = check_step(lambda k: layer_norm(k, 1e-5 if k == 1 else 1e-6), LAYER, BATCH)
    assert report.verdict is Verdict.CANNOT_TELL, report
    assert report.not_checked == (
        "constants: 1e-05 in one batch but 1e-06 in 4 microbatches, a difference that rounding may hide",
    )


@pytest.mark.sampled
@pytest.mark.parametrize("guard", [False, True], ids=["same", "guarded"])
def test_the_same_epsilon_passes_with_a_guard_in_addition(guard: bool) -> None:
    report = check_step(lambda k: layer_norm(k, 1e-5, guard and k > 1), LAYER, BATCH)
    assert report.passes, report
