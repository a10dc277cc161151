"""Memory traffic of a window of 8 with Adam on one H100, in bytes per parameter and call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import AccumulateState
from gradcombine.integrations.jax import Loss, TrainState, train_step, value_and_grad
from gradcombine.integrations.optax import MultiSteps, accumulate, accumulate_and_apply
from tests.targets.compile_for import compile_for, h100, mesh, spread, tpu

pytestmark = [pytest.mark.targets, pytest.mark.usefixtures("standard_promotion")]

ADAM = optax.adam(1e-3)
LEAVES, SHAPE = 8, (2048, 512)
N = LEAVES * SHAPE[0] * SHAPE[1]
"""Number of parameters: small enough to compile fast, without influence on the bytes per parameter."""

PARAMS = {f"w{i}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for i in range(LEAVES)}


class Form(NamedTuple):
    function: Callable[..., Any]
    init: Callable[[Any], Any]


def transformed(tx: Any) -> Form:
    def call(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Form(call, tx.init)


def applied() -> Form:
    tx = accumulate_and_apply(ADAM, 8)
    return Form(lambda params, state, grads: tx.apply(grads, state, params), tx.init)


def stepped(**settings: Any) -> Form:
    def given(params: Any, grads: Any) -> Any:
        return jnp.float32(0), grads

    step = train_step(Loss(given, differentiate=False), ADAM, every=8, weight=lambda grads: 1, **settings)
    return Form(step.function, step.init)


FORMS: dict[str, tuple[Callable[[], Form], float, float]] = {
    "optax.MultiSteps": (lambda: transformed(optax.MultiSteps(ADAM, 8)), 36, 36),
    "accumulate": (lambda: transformed(accumulate(ADAM, 8)), 36, 36),
    "MultiSteps": (lambda: transformed(MultiSteps(ADAM, 8)), 36, 36),
    "accumulate_and_apply": (applied, 12, 40),
    "train_step": (stepped, 12, 40),
}
"""Cases with the bytes of a call within a window and of the one at its end."""


def per_parameter(count: int) -> float:
    return round(count / N, 1)


@pytest.mark.parametrize("name", FORMS)
def test_bytes_of_a_call(name: str) -> None:
    make, within, end = FORMS[name]
    form = make()
    compiled = compile_for(h100(), form.function, PARAMS, jax.eval_shape(form.init, PARAMS), PARAMS, donate=(0, 1))
    moved = [per_parameter(compiled.program.bytes_moved(due)) for due in (False, True)]
    assert moved == [within, end]
    assert per_parameter(compiled.temporary) == 0
    assert compiled.program.copies() == 0


def test_where_the_host_knows_the_end_no_program_has_a_branch() -> None:
    tx, moved = accumulate_and_apply(ADAM, gc.UNTIL_FLUSH), []
    for flush in (False, True):

        def call(params: Any, state: Any, grads: Any, flush: bool = flush) -> Any:
            return tx.apply(grads, state, params, flush=flush)

        compiled = compile_for(h100(), call, PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS, donate=(0, 1))
        instructions = [x for of in compiled.program.computations.values() for x in of.values()]
        assert not {"while", "conditional"} & {x.opcode for x in instructions}
        assert (compiled.program.copies(), per_parameter(compiled.temporary)) == (0, 0)
        moved.append(per_parameter(compiled.program.bytes_moved(True)))
    # At the end, the addition and Adam are one pass, which is less than with a branch between them.
    assert moved == [12, 36]


def test_the_limit() -> None:
    """One addition in place; at the end, Adam is in place too."""

    def add(window: Any, grads: Any) -> Any:
        return jax.tree.map(jnp.add, window, grads)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    added = compile_for(h100(), add, PARAMS, PARAMS, donate=(0,))
    updated = compile_for(h100(), update, PARAMS, jax.eval_shape(ADAM.init, PARAMS), PARAMS, donate=(0, 1))
    within, end = (per_parameter(x.program.bytes_moved(True)) for x in (added, updated))
    assert [within, within + end] == [12, 40]
    assert [per_parameter(x.temporary) for x in (added, updated)] == [0, 0]


WINDOWS: dict[str, dict[str, Any]] = {
    "compensated": {"reduction": gc.reductions.mean(precision="compensated")},
    "exact": {"reduction": gc.reductions.mean(precision="exact")},
    "tree": {"order": "tree"},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_within_a_window_a_step_costs_what_accumulating_costs(name: str) -> None:
    settings = WINDOWS[name]
    form = stepped(**settings)
    acc = gc.accumulate(**{"reduction": gc.reductions.mean(), "every": 8} | settings)
    step = compile_for(h100(), form.function, PARAMS, jax.eval_shape(form.init, PARAMS), PARAMS, donate=(0, 1))
    alone = compile_for(h100(), acc.update, PARAMS, jax.eval_shape(acc.init, PARAMS), donate=(1,))

    def costs(of: Any) -> tuple[float, float, int]:
        return per_parameter(of.program.bytes_moved(False)), per_parameter(of.temporary), of.program.copies()

    assert costs(step) == costs(alone)


def test_a_flush_moves_nothing_where_no_window_is_open() -> None:
    def flush(params: Any, state: Any) -> Any:
        return train_step(Loss(lambda grads: (0.0, grads), differentiate=False), ADAM, every=8).flush_function(
            params, state
        )

    state = jax.eval_shape(stepped().init, PARAMS)
    compiled = compile_for(h100(), flush, PARAMS, state, donate=(0, 1))
    assert [per_parameter(compiled.program.bytes_moved(due)) for due in (False, True)] == [0, 28]
    assert (per_parameter(compiled.temporary), compiled.program.copies()) == (0, 0)


def test_a_step_needs_no_temporary_tree_on_a_tpu() -> None:
    form = stepped()
    compiled = compile_for(
        tpu("v5e:2x2"), form.function, PARAMS, jax.eval_shape(form.init, PARAMS), PARAMS, donate=(0, 1)
    )
    assert (per_parameter(compiled.temporary), compiled.program.conditionals()) == (0, 0)


@pytest.mark.parametrize("check_vma", [False, True])
def test_replicas_exchange_at_the_end_of_a_window_alone(check_vma: bool) -> None:
    """The exchange is in place, in the arrays of the window.

    Leaves have more than 30 MiB: XLA first copies smaller ones into one array.
    """
    devices = mesh(h100(8))
    form = stepped(over=gc.jax_axis("data"))
    params = {f"w{i}": jax.ShapeDtypeStruct((8192, 1024), jnp.float32) for i in range(3)}
    window = AccumulateState(P("data"), P(), P())
    specs = TrainState(window, P(), P())

    def call(params: Any, state: Any, grads: Any) -> Any:
        """Maps the step over the replicas; values that differ by replica have a leading axis outside."""
        levels, grads = jax.tree.map(lambda x: x[0], (state.window.levels, grads))
        state = state._replace(window=state.window._replace(levels=levels))
        params, state, metrics = form.function(params, state, grads)
        levels = jax.tree.map(lambda x: x[None], state.window.levels)
        return params, state._replace(window=state.window._replace(levels=levels)), metrics

    def of_each(values: Any) -> Any:
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), values)
        return spread(devices, P("data"), rows)

    state = jax.eval_shape(stepped().init, params)
    levels, rest = of_each(state.window.levels), spread(devices, P(), state)
    state = rest._replace(window=rest.window._replace(levels=levels))
    mapped = jax.shard_map(
        call, mesh=devices, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()), check_vma=check_vma
    )
    args = (spread(devices, P(), params), state, of_each(params))
    compiled = compile_for(devices.devices.flat, mapped, *args, donate=(0, 1))
    elements = 3 * 8192 * 1024
    moved = [round(compiled.program.bytes_moved(due) / elements, 1) for due in (False, True)]
    assert moved == [12, 48]
    assert round(compiled.temporary / elements, 1) == 0
    assert (compiled.program.copies(), compiled.program.conditionals()) == (0, 0)
    inside, outside = compiled.program.collectives()
    assert (inside, set(outside)) == ({}, {"all-reduce"})


@pytest.mark.parametrize("kind", ["h100", "tpu"])
def test_replicas_exchange_once_a_window_outside_of_the_loop(kind: str) -> None:
    def loss(params: Any, x: Any) -> Any:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    devices = mesh(h100(8) if kind == "h100" else tpu("v5e:2x4"))
    params = spread(devices, P(), {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(2)})
    batch = spread(devices, P("data"), jax.ShapeDtypeStruct((512, 256), jnp.float32))
    gradient = value_and_grad(loss, 8, over=gc.jax_axis("data"))
    mapped = jax.shard_map(gradient, mesh=devices, in_specs=(P(), P("data")), out_specs=P())
    inside, outside = compile_for(devices.devices.flat, mapped, params, batch).program.collectives()
    assert (inside, outside) == ({}, {"all-reduce": 1})
