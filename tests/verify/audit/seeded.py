"""Steps with a known defect and their defect-free twins, for any devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax import train_step, value_and_grad
from gradcombine.integrations.optax import accumulate

K, ROWS, WIDTH, LAYERS = 4, 256, 64, 3
"""Number of microbatches, rows in the global batch, width of a square layer, and number of layers."""


Devices = Sequence[Any]


def data(devices: Devices, kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(devices), ("data",), axis_types=(kind,))


def spec(mesh: Mesh, where: P, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))


def forward(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return x.astype(jnp.float32)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(forward(params, x) ** 2)


WHOLE = P()


def params(mesh: Mesh, where: P = WHOLE, dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    return [spec(mesh, where, WIDTH, WIDTH, dtype=dtype)] * LAYERS


def scanned(gradient: Callable[..., Any], dtype: Any = jnp.float32, after: Callable[..., Any] = lambda g: g) -> Any:
    """A window in one call: accumulates gradients over microbatches, then takes a step of gradient descent."""

    def step(params: Any, batch: Any) -> Any:
        def body(sums: Any, x: Any) -> Any:
            return jax.tree.map(lambda a, g: (a + g).astype(dtype), sums, gradient(params, x)), None

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, dtype), params)
        sums, _ = jax.lax.scan(body, zeros, batch.reshape(K, -1, WIDTH))
        return jax.tree.map(lambda w, g: w - (0.1 / K * g).astype(w.dtype), params, after(sums))

    return step


def mean(x: Any) -> Any:
    return jax.lax.pmean(x, "data")


def mapped(function: Callable[..., Any], mesh: Mesh, replicated: int = 1) -> Any:
    """The function of replicated arguments and a batch, on each device."""
    specs = *[P()] * replicated, P("data")
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


class Case(NamedTuple):
    """A jitted step and its arguments."""

    step: Any
    args: tuple[Any, ...]


def window(function: Callable[..., Any], mesh: Mesh, **settings: Any) -> Case:
    return Case(jax.jit(function, donate_argnums=0), (params(mesh, **settings), spec(mesh, P("data"), ROWS, WIDTH)))


def on_replicas(function: Callable[..., Any], devices: Devices) -> Case:
    mesh = data(devices)
    return window(mapped(function, mesh), mesh)


def replicated(step: Callable[..., Any]) -> Callable[[Devices, bool], Case]:
    """A factory of cases on replicas from ``step(params, batch, defect)``."""
    return lambda devices, defect: on_replicas(lambda params, batch: step(params, batch, defect), devices)


def reduced_in_shard_map(devices: Devices, defect: bool) -> Case:
    gradient = jax.grad(loss)
    inside = (lambda w, x: mean(gradient(w, x))) if defect else gradient
    return on_replicas(scanned(inside, after=(lambda g: g) if defect else mean), devices)


def reduced_with_a_metric(devices: Devices, defect: bool) -> Case:
    """Clipping each microbatch's gradient by its norm needs the all-reduce in the loop."""

    def clipped(w: Any, x: Any) -> Any:
        grads = mean(jax.grad(loss)(w, x))
        scale = jnp.minimum(1, 1 / optax.tree.norm(grads)) if not defect else 1
        return jax.tree.map(lambda g: scale * g, grads)

    return on_replicas(scanned(clipped), devices)


def reduced_and_weighed(devices: Devices, defect: bool) -> Case:
    """If the factors differ between devices and microbatches, the all-reduce has to stay in the loop."""

    def weighed(w: Any, x: Any) -> Any:
        factor = 0.5 if defect else jnp.mean(x)
        return jax.tree.map(lambda g: factor * g, mean(jax.grad(loss)(w, x)))

    return on_replicas(scanned(weighed), devices)


@replicated
def reduced_to_maxima(params: Any, batch: Any, defect: bool) -> Any:
    """A sum of means could be exchanged as one; a sum of maxima is not the maximum of sums."""
    reduce = mean if defect else partial(jax.lax.pmax, axis_name="data")
    return scanned(lambda w, x: reduce(jax.grad(loss)(w, x)))(params, batch)


@replicated
def selected_in_turn(params: Any, batch: Any, defect: bool) -> Any:
    """A Python loop over microbatches with constant factors, or with factors that differ between devices."""
    parts = batch.reshape(K, -1, WIDTH)
    reduced = [mean(jax.grad(loss)(params, x)) for x in parts]
    kept = [jnp.float32(n % 2) if defect else jnp.mean(x) for n, x in enumerate(parts)]
    return jax.tree.map(lambda w, *g: w - 0.1 * sum(map(jnp.multiply, kept, g)), params, *reduced)


@replicated
def reduced_in_turn(params: Any, batch: Any, defect: bool) -> Any:
    """A Python loop, whose all-reduces XLA merges into one; those that are multiplied cannot be one of the sum."""
    reduced = [mean(jax.grad(loss)(params, x)) for x in batch.reshape(K, -1, WIDTH)]
    return jax.tree.map(lambda w, *g: w - 0.1 * (sum(g) if defect else math.prod(g)), params, *reduced)


@replicated
def reduced_and_stacked(params: Any, batch: Any, defect: bool) -> Any:
    """Stacked gradients whose mean could be exchanged, and whose squares could not."""
    rows = batch.reshape(K, -1, WIDTH)
    grads = jax.lax.map(lambda x: mean(jax.grad(loss)(params, x)), rows)
    power = 1 if defect else 2
    return jax.tree.map(lambda w, g: w - 0.1 * jnp.mean(g**power, axis=0), params, grads)


@replicated
def reduced_at_the_end(params: Any, batch: Any, defect: bool) -> Any:
    """A branch that exchanges is taken in the last iteration, or decided by data."""

    def body(sums: Any, x: Any) -> Any:
        number, rows = x
        sums = jax.tree.map(jnp.add, sums, jax.grad(loss)(params, rows))
        return jax.lax.cond(mean(rows[0, 0]) > 0 if defect else number == K - 1, mean, lambda sums: sums, sums), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    sums, _ = jax.lax.scan(body, zeros, (jnp.arange(K), batch.reshape(K, -1, WIDTH)))
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, sums)


@replicated
def reduced_beside_a_loss(params: Any, batch: Any, defect: bool) -> Any:
    """XLA merges the all-reduces of gradients and stacked loss; a norm of the reduced gradients needs both."""

    def body(sums: Any, x: Any) -> Any:
        value, grads = mean(jax.value_and_grad(loss)(params, x))
        return jax.tree.map(jnp.add, sums, grads), value if defect else value * optax.tree.norm(grads)

    zeros = jax.tree.map(jnp.zeros_like, params)
    sums, values = jax.lax.scan(body, zeros, batch.reshape(K, -1, WIDTH))
    return jax.tree.map(lambda w, g: w - 0.1 / K * g + jnp.sum(values), params, sums)


def reduced_by_explicit_axes(devices: Devices, defect: bool) -> Case:
    """Gradients are reduced where they arise unless their parameters are marked for a later reduction."""
    mesh = data(devices, AxisType.Explicit)

    def at(where: P) -> NamedSharding:
        return NamedSharding(mesh, where)

    def step(params: Any, batch: Any) -> Any:
        rows = jnp.swapaxes(batch.reshape(-1, K, WIDTH, out_sharding=at(P("data", None, None))), 0, 1)
        late = P(None, None) if defect else P(None, None, reduced={"data"})
        later = [jax.reshard(w, at(late)) for w in params]
        place = P(None, None) if defect else P(None, None, unreduced={"data"})
        zeros = [jax.reshard(jnp.zeros_like(w), at(place)) for w in params]

        def body(sums: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(later, x)), None

        sums, _ = jax.lax.scan(body, zeros, rows)
        return [w - 0.1 / K * jax.reshard(g, at(P(None, None))) for w, g in zip(params, sums, strict=True)]

    shapes = [spec(mesh, P(None, None), WIDTH, WIDTH)] * LAYERS
    return Case(jax.jit(step, donate_argnums=0), (shapes, spec(mesh, P("data", None), ROWS, WIDTH)))


def reduced_in_nested_scans(devices: Devices, defect: bool) -> Case:
    """A scan over layers inside the scan over microbatches."""
    mesh = data(devices)

    def deep(w: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return jnp.mean(x**2)

    def step(w: Any, batch: Any) -> Any:
        def body(sums: Any, x: Any) -> Any:
            grads = jax.grad(deep)(w, x)
            return sums + (mean(grads) if defect else grads), None

        sums, _ = jax.lax.scan(body, jnp.zeros_like(w), batch.reshape(K, -1, WIDTH))
        return w - 0.1 / K * (sums if defect else mean(sums))

    args = spec(mesh, P(), LAYERS, WIDTH, WIDTH), spec(mesh, P("data"), ROWS, WIDTH)
    return Case(jax.jit(mapped(step, mesh), donate_argnums=0), args)


@replicated
def reduced_in_steps(params: Any, batch: Any, defect: bool) -> Any:
    """A scan over full training steps has to reduce in each step, since the next one reads the parameters."""

    def body(carry: Any, x: Any) -> Any:
        now, total = carry
        grads = mean(jax.grad(loss)(params if defect else now, x))
        total = jax.tree.map(jnp.add, total, grads)
        now = now if defect else jax.tree.map(lambda w, g: w - 0.1 * g, now, grads)
        return (now, total if defect else grads), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    (now, total), _ = jax.lax.scan(body, (params, zeros), batch.reshape(K, -1, WIDTH))
    return jax.tree.map(lambda w, g: w - 0.1 * g, now, total) if defect else now


def gathered(devices: Devices, defect: bool) -> Case:
    """Microbatches cut across the devices' rows need a gather; those made of each device's rows do not."""
    if not defect:
        return on_replicas(scanned(jax.grad(loss), after=mean), devices)
    return window(scanned(jax.grad(loss)), data(devices))


def repeated_over_model(devices: Devices, defect: bool) -> Case:
    """Replicating the parameters over the second mesh axis repeats the computation along that axis."""
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    where = P() if defect else P(None, "model")

    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))

    return window(step, mesh, where=where)


@replicated
def averaged_twice(params: Any, batch: Any, defect: bool) -> Any:
    grads = mean(jax.grad(loss)(params, batch))
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, mean(grads) if defect else grads)


def exchanged_wider(devices: Devices, defect: bool) -> Case:
    def step(params: Any, grads: Any) -> Any:
        own = grads[0]
        whole = mean(own.astype(jnp.float32)) if defect else mean(own).astype(jnp.float32)
        return params - 0.1 * whole

    mesh = data(devices)
    args = spec(mesh, P(), WIDTH, WIDTH), spec(mesh, P("data"), 8, WIDTH, WIDTH, dtype=jnp.bfloat16)
    return Case(jax.jit(mapped(step, mesh), donate_argnums=0), args)


def accumulated_in_bfloat16(devices: Devices, defect: bool) -> Case:
    mesh = data(devices)
    step = mapped(scanned(jax.grad(loss), jnp.bfloat16 if defect else jnp.float32, mean), mesh)
    return window(step, mesh, dtype=jnp.bfloat16)


def donated_in_another_type(devices: Devices, defect: bool) -> Case:
    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        updated = jax.tree.map(lambda w, g: w - jnp.float32(0.1) * g.astype(jnp.float32), params, grads)
        return updated if defect else jax.tree.map(lambda w: w.astype(jnp.bfloat16), updated)

    return window(step, data(devices), dtype=jnp.bfloat16)


def logged_in_every_layer(devices: Devices, defect: bool) -> Case:
    layers = 24

    def step(w: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            x = jnp.tanh(x @ w)
            norm = jnp.mean(x**2)
            return x, mean(norm) if defect else norm

        x, norms = jax.lax.scan(body, x, w)
        return w - 0.1 * mean(jnp.mean(x)), norms if defect else mean(norms)

    mesh = data(devices)
    args = spec(mesh, P(), layers, WIDTH, WIDTH), spec(mesh, P("data"), ROWS, WIDTH)
    return Case(jax.jit(mapped(step, mesh), donate_argnums=0), args)


def exchanged_leaf_by_leaf(devices: Devices, defect: bool) -> Case:
    """As in programs with a hand-written order, so that XLA cannot merge the collectives."""

    def step(biases: Any, batch: Any) -> Any:
        grads = [jnp.sum(batch, 0) * (i + 1) for i in range(len(biases))]
        each = [jax.lax.all_gather(g, "data").sum(0) for g in grads] if defect else ()
        summed = each or list(mean(jnp.stack(grads)))
        return [b - 0.1 * g for b, g in zip(biases, summed, strict=True)]

    mesh = data(devices)
    args = [spec(mesh, P(), WIDTH)] * 20, spec(mesh, P("data"), ROWS, WIDTH)
    return Case(jax.jit(mapped(step, mesh), donate_argnums=0), args)


def until_converged(devices: Devices, defect: bool) -> Case:
    def step(w: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            w, i = carry
            return w - 0.1 * jax.grad(loss)([w], x)[0], i + 1

        def more(carry: Any) -> Any:
            return (loss([carry[0]], x) > 1e-3) & (carry[1] < 9) if defect else carry[1] < 9

        return jax.lax.while_loop(more, body, (w, 0))

    return Case(jax.jit(step, donate_argnums=0), (jnp.ones((WIDTH, WIDTH)), jnp.ones((8, WIDTH))))


def decided_by_select(devices: Devices, defect: bool) -> Case:
    """A select as XLA makes of a conditional on GPUs, and a select on the gradients themselves."""
    adam = optax.adam(1e-3)

    def step(state: Any, params: Any, grads: Any) -> Any:
        count, inner = state
        updates, new = adam.update(grads, inner, params)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in grads]))
        keep = (count + 1) % K == 0 if defect else finite
        params = [jnp.where(keep, w + u, w) for w, u in zip(params, updates, strict=True)]
        inner = jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, inner)
        return (count + 1, inner), params

    leaves = [jnp.ones((WIDTH, WIDTH))] * LAYERS
    return Case(jax.jit(step, donate_argnums=(0, 1)), ((jnp.int32(0), adam.init(leaves)), leaves, leaves))


def decided_by_its_number(devices: Devices, defect: bool) -> Case:
    """A scan over the numbers of the microbatches, in place of a counter."""
    adam = optax.adam(1e-3)

    def step(state: Any, params: Any, batch: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            (inner, params), (n, x) = carry, row
            grads = jax.grad(loss)(params, x)
            updates, new = adam.update(grads, inner, params)
            keep = (n + 1) % 2 == 0 if defect else jnp.all(jnp.isfinite(grads[0]))
            params = [jnp.where(keep, w + u, w) for w, u in zip(params, updates, strict=True)]
            return (jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, inner), params), None

        rows = jnp.arange(K), batch.reshape(K, -1, WIDTH)
        return jax.lax.scan(body, (state, params), rows)[0]

    leaves = [jnp.ones((WIDTH, WIDTH))] * LAYERS
    return Case(jax.jit(step, donate_argnums=(0, 1)), (adam.init(leaves), leaves, jnp.ones((ROWS, WIDTH))))


CLEARED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "to the gradient": lambda n, a, g: jnp.where(n == 0, g, a + g),
    "by a modulus": lambda n, a, g: jnp.where(n % K == 0, g, a + g),
    "after the first": lambda n, a, g: jnp.where(n > 0, a + g, g),
    "by a flag": lambda n, a, g: jnp.where(n.astype(bool), a + g, g),
    "a running mean": lambda n, a, g: jnp.where(n == 0, g, a + (g - a) / (n + 1)),
    "to zeros, before": lambda n, a, g: jnp.where(n % K == 0, jnp.zeros_like(a), a) + g,
    "to zeros, behind": lambda n, a, g: jnp.where((n + 1) % K == 0, jnp.zeros_like(a), a + g),
}
"""Functions ``(microbatches held, accumulator, gradient) -> accumulator`` that clear the accumulator."""


def cleared(of: Callable[[Any, Any, Any], Any], donated: bool) -> Case:
    def step(state: Any, grads: Any) -> Any:
        count, sums = state
        return count + 1, [of(count, a, g) for a, g in zip(sums, grads, strict=True)]

    leaves = [jnp.ones((WIDTH, WIDTH))] * LAYERS
    return Case(jax.jit(step, donate_argnums=(0,) if donated else ()), ((jnp.int32(0), leaves), leaves))


def decided_or_cleared(devices: Devices, defect: bool) -> Case:
    """Without donation, state arguments cannot be told from gradients."""

    def root(n: Any, a: Any, g: Any) -> Any:
        return jnp.where(n % 2 == 0, a, a - g / jnp.sqrt(g * g + 1e-8))

    return cleared(root if defect else CLEARED["to the gradient"], donated=False)


def narrow_over_calls(devices: Devices, defect: bool) -> Case:
    """Each call adds to an accumulator, which a counter clears; bfloat16 parameters change in each call."""
    leaves = [jnp.ones((WIDTH, WIDTH), jnp.bfloat16)] * LAYERS

    def step(params: Any, state: Any, batch: Any) -> Any:
        count, sums = state
        grads = jax.grad(loss)(params, batch)
        if not defect:
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), (count + 1, sums)
        sums = jax.tree.map(jnp.add, sums, grads)

        def applied() -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 / K * g, params, sums), jax.tree.map(jnp.zeros_like, sums)

        params, sums = jax.lax.cond((count + 1) % K == 0, applied, lambda: (params, sums))
        return params, (count + 1, sums)

    args = leaves, (jnp.int32(0), [0 * x for x in leaves]), jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    return Case(jax.jit(step, donate_argnums=(0, 1)), args)


def transformed(tx: Any) -> Case:
    leaves = [jnp.ones((WIDTH, WIDTH))] * LAYERS

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Case(jax.jit(step, donate_argnums=(0, 1)), (leaves, tx.init(leaves), leaves))


def accumulated_by_optax(devices: Devices, defect: bool) -> Case:
    """MultiSteps computes every update and discards most of them by ``where``; plain Adam uses every update."""
    return transformed(optax.MultiSteps(optax.adam(1e-3), K) if defect else optax.adam(1e-3))


def read_after_the_loop(devices: Devices, defect: bool) -> Case:
    """A loop updates a donated argument whose old value is still needed after the loop."""

    def step(w: Any, x: Any) -> Any:
        after = jax.lax.fori_loop(0, K, lambda _, w: w + jnp.roll(w, 1, 0) * x, w)
        return after + w if defect else after

    return Case(jax.jit(step, donate_argnums=0), (jnp.ones((WIDTH, WIDTH)), jnp.float32(0.5)))


def pmapped(devices: Devices, defect: bool) -> Case:
    gradient = jax.grad(loss)
    inside = (lambda w, x: mean(gradient(w, x))) if defect else gradient
    step = jax.pmap(scanned(inside, after=(lambda g: g) if defect else mean), axis_name="data", in_axes=(None, 0))
    return Case(step, ([jnp.ones((WIDTH, WIDTH))] * LAYERS, jnp.ones((8, 32, WIDTH))))


def reshaped_and_constrained(devices: Devices, defect: bool) -> Case:
    """Accumulation as in MaxText: a scan over microbatches sums losses and weights, with one division at the end.

    The constraint shards each microbatch over all devices; the compiler places the reductions.
    """
    mesh = data(devices)

    def total(w: Any, x: Any) -> Any:
        mask = (jnp.sum(x, -1) > 0).astype(jnp.float32)
        return jnp.sum(jnp.mean(forward(w, x) ** 2, -1) * mask), jnp.sum(mask)

    def accumulated(params: Any, rows: Any) -> Any:
        def body(sums: Any, x: Any) -> Any:
            (value, weight), grads = jax.value_and_grad(total, has_aux=True)(params, x)
            return jax.tree.map(jnp.add, sums, (grads, value, weight)), None

        start = jax.tree.map(jnp.zeros_like, params), jnp.float32(0), jnp.float32(0)
        return jax.lax.scan(body, start, rows)[0]

    def step(params: Any, batch: Any) -> Any:
        if defect:
            rows = batch.reshape(K, -1, WIDTH)
            rows = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, P(None, "data")))
            grads, value, weight = accumulated(params, rows)
        else:
            own = mapped(lambda w, x: jax.lax.psum(accumulated(w, x.reshape(K, -1, WIDTH)), "data"), mesh)
            grads, value, weight = own(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g / weight, params, grads), value / weight

    return window(step, mesh)


def in_each_call(devices: Devices, defect: bool, by_compiler: bool) -> Case:
    """Each call is a microbatch, as in optax's documentation, or a full step; the compiler or pmean averages."""
    mesh, adam = data(devices), optax.adam(1e-3)
    chosen: Any = optax.MultiSteps(adam, K) if defect else adam

    def step(params: Any, state: Any, batch: Any) -> Any:
        found = jax.value_and_grad(loss)(params, batch)
        value, grads = found if by_compiler else mean(found)
        updates, state = chosen.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.tree.map(lambda x: spec(mesh, P(), *x.shape, dtype=x.dtype), jax.eval_shape(chosen.init, params(mesh)))
    function = step if by_compiler else mapped(step, mesh, 2)
    return Case(jax.jit(function, donate_argnums=(0, 1)), (params(mesh), state, spec(mesh, P("data"), ROWS, WIDTH)))


IN_EACH_CALL = {"optimizer-every-microbatch", "reduced-in-loop"}


def clip(grads: Any) -> Any:
    return jax.tree.map(lambda g: g / optax.tree.norm(grads), grads)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "in each call": (mean, lambda sums: sums, True),
    "at the boundary": (lambda grads: grads, mean, False),
    "clipped by what is exchanged": (lambda grads: clip(mean(grads)), lambda sums: sums, False),
    "clipped before": (lambda grads: mean(clip(grads)), lambda sums: sums, True),
}
"""Function of a microbatch's gradients, function of the window's sums, whether the all-reduce could be deferred."""


def window_over_calls(devices: Devices, each: Callable[..., Any], whole: Callable[..., Any], by_branch: bool) -> Case:
    """A window over calls that a counter ends, by a branch or by selects."""
    mesh = data(devices)

    def step(state: Any, params: Any, batch: Any) -> Any:
        count, sums = state
        sums = jax.tree.map(jnp.add, sums, each(jax.grad(loss)(params, batch)))
        full = (count + 1) % K == 0

        def apply() -> Any:
            return [w - 0.1 * g / jnp.sqrt(g * g + 1e-8) for w, g in zip(params, whole(sums), strict=True)]

        if by_branch:
            params = jax.lax.cond(full, apply, lambda: params)
        else:
            params = [jnp.where(full, new, w) for w, new in zip(params, apply(), strict=True)]
        return (count + 1, [jnp.where(full, 0.0, a) for a in sums]), params

    own = mapped(step, mesh, 2)
    state = spec(mesh, P(), dtype=jnp.int32), params(mesh)
    return Case(jax.jit(own, donate_argnums=(0, 1)), (state, params(mesh), spec(mesh, P("data"), ROWS, WIDTH)))


CASES: dict[str, tuple[Callable[[Devices, bool], Case], set[str]]] = {
    "reduced in a shard_map": (reduced_in_shard_map, {"reduced-in-loop"}),
    "reduced, or clipped": (reduced_with_a_metric, {"reduced-in-loop"}),
    "reduced at the end": (reduced_at_the_end, {"reduced-in-loop"}),
    "reduced beside a loss": (reduced_beside_a_loss, {"reduced-in-loop"}),
    "reduced by explicit axes": (reduced_by_explicit_axes, {"reduced-in-loop"}),
    "reduced in nested scans": (reduced_in_nested_scans, {"reduced-in-loop"}),
    "reduced in microbatches, or in steps": (reduced_in_steps, {"reduced-in-loop"}),
    "reduced in turn": (reduced_in_turn, {"reduced-in-loop"}),
    "reduced and weighed": (reduced_and_weighed, {"reduced-in-loop"}),
    "reduced to maxima": (reduced_to_maxima, {"reduced-in-loop"}),
    "selected in turn": (selected_in_turn, {"reduced-in-loop"}),
    "reduced and stacked": (reduced_and_stacked, {"reduced-in-loop"}),
    "reduced in a pmap": (pmapped, {"reduced-in-loop"}),
    "batch gathered": (gathered, {"batch-gathered", "repeated-work", "reduced-in-loop"}),
    "repeated over an axis": (repeated_over_model, {"repeated-work"}),
    "averaged twice": (averaged_twice, {"repeated-collective"}),
    "exchanged wider": (exchanged_wider, {"wider-exchange"}),
    "accumulated in bfloat16": (accumulated_in_bfloat16, {"narrow-accumulator"}),
    "accumulated in bfloat16 over calls": (narrow_over_calls, {"narrow-accumulator"}),
    "donated in another type": (donated_in_another_type, {"donation-lost"}),
    "logged in every layer": (logged_in_every_layer, {"many-small-collectives"}),
    "exchanged leaf by leaf": (exchanged_leaf_by_leaf, {"many-small-collectives"}),
    "until converged": (until_converged, {"unknown-trip-count"}),
    "optax.MultiSteps": (accumulated_by_optax, {"optimizer-every-microbatch"}),
    "reshaped and constrained": (reshaped_and_constrained, {"reduced-in-loop"}),
    "an example of optax": (partial(in_each_call, by_compiler=True), IN_EACH_CALL),
    "reduced in each call": (partial(in_each_call, by_compiler=False), IN_EACH_CALL),
    "read after the loop": (read_after_the_loop, {"copies-at-boundary"}),
    "decided by select": (decided_by_select, {"optimizer-every-microbatch"}),
    "decided by its number": (decided_by_its_number, {"optimizer-every-microbatch"}),
    "decided, or cleared": (decided_or_cleared, {"optimizer-every-microbatch"}),
}
"""Each step's factory and the findings expected with the defect; the twin has none."""


def library_step(mesh: Mesh, **settings: Any) -> Case:
    step = train_step(loss, optax.adam(1e-3), **settings)
    state = jax.eval_shape(step.init, params(mesh))
    placed = jax.tree.map(lambda x: spec(mesh, P(), *x.shape, dtype=x.dtype), state)
    batch = spec(mesh, P("data"), ROWS, WIDTH)
    return Case(jax.jit(step.function, donate_argnums=(0, 1)), (params(mesh), placed, batch))


OURS: dict[str, Callable[[Devices], Case]] = {
    "a window in one call": lambda devices: library_step(data(devices), microbatches=K, over=gc.jax_axis("data")),
    "a window in one call, explicit axes": lambda devices: library_step(
        data(devices, AxisType.Explicit), microbatches=K, over=gc.jax_axis("data")
    ),
    "a microbatch in each call": lambda devices: library_step(data(devices), every=K),
    "gradients in a shard_map": lambda devices: on_replicas(ours, devices),
    "accumulate": lambda devices: transformed(accumulate(optax.adam(1e-3), K)),
}


def ours(params: Any, batch: Any) -> Any:
    return value_and_grad(loss, K, over=gc.jax_axis("data"))(params, batch)[1]
