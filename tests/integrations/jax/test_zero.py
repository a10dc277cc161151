"""Sharded accumulation gives the values of replicated accumulation, with one shard per replica; costs of both."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import train_step, value_and_grad, zero
from tests.integrations.jax.replicas import AXIS, MODES, N, by_vmap, mesh

K = 3
LIKE = {
    "w": jax.ShapeDtypeStruct((3, 5), jnp.float32),
    "half": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
    "b": jax.ShapeDtypeStruct((), jnp.float32),
    "none": None,
}
"""Leaves whose size is not divisible by the number of replicas, one whose size is, and a scalar."""

RNG = np.random.default_rng(0)
GRADS = {
    name: RNG.integers(-8, 9, (N, K, *spec.shape)).astype(spec.dtype) for name, spec in LIKE.items() if spec is not None
}
TOKENS = np.float32([[1, 3, 0], [2, 2, 4], [0, 5, 3], [4, 4, 4]])
"""32 in total, so that every sum and quotient is exact."""


def window(reduction: Any) -> Callable[..., Any]:
    """A program that scans over a replica's microbatches and gathers the shards."""
    acc = gc.accumulate(zero.scattered(reduction, AXIS), every=K)

    def program(grads: Any, tokens: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            return acc.update({**x[0], "none": None}, state, x[1]), None

        state, _ = jax.lax.scan(step, acc.init(LIKE), (grads, tokens))
        return zero.gather(acc.value(state), LIKE, AXIS)

    return program


@MODES
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_gathered_shards_are_the_whole_window(mode: Any, name: str) -> None:
    result = mode(window(getattr(reductions, name)()), GRADS, TOKENS)
    assert result["none"] is None
    for leaf, grads in GRADS.items():
        weights = TOKENS.reshape(N, K, *([1] * (grads.ndim - 2)))
        total = (grads.astype(np.float32) * weights).sum((0, 1))
        expected = (total if name == "sum" else total / TOKENS.sum()).astype(LIKE[leaf].dtype)
        assert result[leaf].dtype == LIKE[leaf].dtype
        np.testing.assert_array_equal(result[leaf], np.stack([expected] * N))


@pytest.mark.full
@MODES
def test_a_contribution_of_weight_0_is_masked(mode: Any) -> None:
    """The last microbatch of one replica holds NaN and has weight 0; those of the other replicas count."""
    grads = {name: x.copy() for name, x in GRADS.items()}
    for x in grads.values():
        x[0, 2] = np.nan
    plain, masked = (mode(window(reductions.mean()), data, TOKENS) for data in (GRADS, grads))
    for leaf in GRADS:
        np.testing.assert_array_equal(masked[leaf], plain[leaf])


@MODES
def test_shards_are_rows_of_the_flat_leaf(mode: Any) -> None:
    values = {"w": np.arange(15, dtype=np.float32).reshape(3, 5), "none": None, "b": np.float32(7)}

    def program(rank: Any) -> Any:
        parts = zero.shard(jax.tree.map(jnp.asarray, values), AXIS)
        assert parts["none"] is None
        stacks = AXIS.all_gather([parts["w"], parts["b"]])
        return stacks, zero.gather(parts, values, AXIS)

    (w, b), whole = mode(program, np.arange(N))
    np.testing.assert_array_equal(w, [np.append(np.arange(15), 0).reshape(4, 4)] * N)
    np.testing.assert_array_equal(b, [[[7], [0], [0], [0]]] * N)
    np.testing.assert_array_equal(whole["w"], [values["w"]] * N)
    np.testing.assert_array_equal(whole["b"], [7] * N)


@pytest.mark.parametrize("check_vma", [True, False])
def test_parameters_that_are_sharded_over_another_axis(check_vma: bool) -> None:
    """Windows of several replica groups (axis 'replica') are merged at the end."""
    axes = ("replica", "d", "model")
    devices = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    reduction = zero.scattered(reductions.mean(), AXIS)

    def program(w: Any, x: Any) -> Any:
        own = jax.lax.pcast(w, ("replica", "d"), to="varying") if check_vma else w
        state = reduction.init(own)
        for i in range(2):
            state = reduction.update(state, jax.grad(lambda w, i=i: (x[i] @ w).sum())(own))
        state = reduction.all_merge(state, gc.jax_axis("replica"), "sequential")
        return zero.gather(reduction.finalize(state), w, AXIS)

    specs = {"in_specs": (P(None, "model"), P(None, ("replica", "d"))), "out_specs": P(None, "model")}
    run = jax.jit(jax.shard_map(program, mesh=devices, check_vma=check_vma, **specs))
    x = RNG.integers(-4, 5, (2, 4, 3)).astype(np.float32)
    np.testing.assert_array_equal(run(np.ones((3, 6), np.float32), x), np.stack([x.sum((0, 1)) / 8] * 6, axis=1))


def test_a_window_that_is_summed_already_is_not_merged_again() -> None:
    def program(x: Any, over: Any = AXIS) -> Any:
        reduction = zero.scattered(reductions.sum(), AXIS)
        return gc.merge_replicas(reduction, reduction.update(reduction.init(x), x), over=over).value

    x = np.ones((N, N), np.float32)
    np.testing.assert_array_equal(by_vmap(program, x), [[N]] * N)
    with pytest.raises(gc.GradCombineError, match=r"sum: expected all axes of jax_axis\('d'\), which updates"):
        by_vmap(lambda x: program(x, gc.jax_axis(("d", "other"))), x)


@pytest.mark.parametrize("over", [AXIS, gc.LOCAL], ids=repr)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_microbatches_as_shards(check_vma: bool, over: Any) -> None:
    """The loss is combined over the replicas if ``over`` is."""
    function = value_and_grad(
        lambda w, x: jnp.sum(x @ w) / len(x), 2, over=over, reduction=zero.scattered(reductions.mean(), AXIS)
    )

    def body(w: Any, x: Any) -> Any:
        value, grads = function(w, x)
        return zero.gather(grads, w, AXIS), value[None]

    specs = {"in_specs": (P(), P("d")), "out_specs": (P(), P("d"))}
    run = jax.jit(jax.shard_map(body, mesh=mesh(), check_vma=check_vma, **specs))
    x = RNG.integers(-4, 5, (4 * N, 5)).astype(np.float32)
    grads, values = run(jnp.ones(5), x)
    np.testing.assert_array_equal(grads, x.mean(0))
    own = x.reshape(N, 4, 5).sum(2).mean(1)
    np.testing.assert_array_equal(values, np.full(N, own.mean()) if over is AXIS else own)


@pytest.mark.parametrize("optimizer", [optax.sgd(1.0), optax.adamw(1.0)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("settings", [{"microbatches": 2}, {"every": 1}, {"every": 1, "over": AXIS}], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_of_shards_asks_for_an_optimizer_that_gathers(check_vma: bool, settings: Any, optimizer: Any) -> None:
    reduction = zero.scattered(reductions.mean(), AXIS)
    step = train_step(lambda w, x: jnp.mean(x @ w), optimizer, reduction=reduction, **settings)

    def body(w: Any, x: Any) -> Any:
        return step.function(w, step.init(w), x)[0]

    specs = {"in_specs": (P(), P("d")), "out_specs": P()}
    with pytest.raises(gc.GradCombineError, match="train_step: expected an optimizer that gathers its updates"):
        jax.jit(jax.shard_map(body, mesh=mesh(), check_vma=check_vma, **specs))(jnp.ones(5), jnp.ones((4 * N, 5)))


SCATTERED = zero.scattered(reductions.mean(), AXIS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zero.scattered(reductions.mean("exact"), AXIS), "scattered: expected reductions.sum"),
        (lambda: zero.scattered(reductions.max(), AXIS), "scattered: expected reductions.sum"),
        (lambda: zero.scattered(reductions.mean(), gc.LOCAL), "scattered: expected a collective of gradcombine.jax"),
        (lambda: zero.shard(np.ones(2), gc.LOCAL), "shard: expected a collective of gradcombine.jax_axis"),
        (
            lambda: by_vmap(lambda x: zero.gather({"w": x}, {"w": np.zeros(9, np.float32)}, AXIS), np.ones((N, 2))),
            r"gather: leaf \['w'\]: expected a shard of shape \(3,\)",
        ),
        (
            lambda: value_and_grad(jnp.sum, 2, reduction=SCATTERED, over=gc.jax_axis("b")),
            r"over=jax_axis\('d'\), whose",
        ),
        (
            lambda: value_and_grad(lambda w, x: jnp.sum(x @ w), 2, reduction=SCATTERED)(jnp.ones(2), jnp.ones((4, 2))),
            r"value_and_grad: expected a call inside jax\.shard_map over jax_axis\('d'\)",
        ),
    ],
)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(gc.GradCombineError, match=message):
        call()


WIDE = np.ones(3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: zero.scattered(reductions.sum(), AXIS).init({"w": WIDE}),
        lambda: zero.gather({"w": WIDE[:1]}, {"w": WIDE}, AXIS),
        lambda: zero.shard({"w": WIDE}, AXIS),
    ],
)
def test_float64_is_not_truncated(call: Callable[[], Any]) -> None:
    with pytest.raises(gc.GradCombineError, match=r"expected float64 \(set jax_enable_x64.*, received float32"):
        jax.vmap(lambda _: call(), axis_name=AXIS.names[0])(jnp.arange(N))


def test_python_numbers_have_the_dtypes_of_jax() -> None:
    def total(x: Any) -> Any:
        scattered = zero.scattered(reductions.sum(), AXIS)
        return scattered.finalize(scattered.update(scattered.init(1.0), x))

    np.testing.assert_array_equal(by_vmap(total, np.arange(N, dtype=np.float32)), [[sum(range(N))]] + [[0]] * (N - 1))


SIZES = [jax.ShapeDtypeStruct((40_000,), jnp.float32), jax.ShapeDtypeStruct((1000,), jnp.float32)]
"""One leaf exchanged alone and one in a bucket. float32, since XLA on CPU sends bfloat16 as float32."""


def moved(compiled: Any) -> int:
    """Bytes per device that the collectives of a compiled program send over a ring, excluding scalars."""
    total = 0
    for shapes, kind in re.findall(r" = (.*?) (all-reduce|all-gather|reduce-scatter)\(", compiled.as_text()):
        for dims in re.findall(r"[fs]32\[([\d,]+)\]", shapes):
            received = 4 * math.prod(int(d) for d in dims.split(","))
            # The result of an all-gather is full-size, that of a reduce-scatter a shard; an all-reduce is both.
            factor = {"all-reduce": 2 * (N - 1) / N, "all-gather": (N - 1) / N, "reduce-scatter": N - 1}[kind]
            total += round(received * factor)
    return total


@pytest.mark.parametrize("choice", ["all_reduce", "reduce_scatter"])
def test_costs_are_those_of_the_compiled_program(choice: str) -> None:
    reduction = reductions.mean()
    cost = zero.exchange_costs(reduction, SIZES, every=1, replicas=N)[choice]
    sharded = choice == "reduce_scatter"
    acc = gc.accumulate(zero.scattered(reduction, AXIS) if sharded else reduction, every=1)

    def program(grads: Any) -> Any:
        state = acc.update(grads, acc.init(grads))
        if sharded:
            return zero.gather(acc.value(state), SIZES, AXIS)
        return acc.value(gc.merge_replicas(reduction, state, over=AXIS))

    def held(grads: Any) -> Any:
        return acc.init(grads).levels[0].value

    specs = {"mesh": mesh(), "in_specs": P("d"), "check_vma": False}
    stacked = [jax.ShapeDtypeStruct((N * x.shape[0],), x.dtype) for x in SIZES]
    compiled = jax.jit(jax.shard_map(program, out_specs=P(), **specs)).lower(stacked).compile()
    # Besides the gradients, the sum of weights and three digits of the count are sent, each a float32.
    assert abs(moved(compiled) - cost.sent) <= 24
    state = jax.jit(jax.shard_map(held, out_specs=P("d"), **specs)).lower(stacked).compile()
    # The analysis is per device and includes the pointer table of the tuple's two buffers.
    assert 0 <= state.memory_analysis().output_size_in_bytes - cost.accumulators <= 64


def test_costs_count_windows_and_replicas() -> None:
    costs = zero.exchange_costs(reductions.sum(), {"w": LIKE["w"], "half": LIKE["half"], "none": None}, 8, 4)
    # 15 float32 values and 8 bfloat16 values accumulated in float32, padded to 16 and 8.
    assert costs["all_reduce"] == zero.ExchangeCost(sent=2 * 3 * (15 + 8) * 4 // 4, accumulators=(15 + 8) * 4)
    assert costs["reduce_scatter"].accumulators == (4 + 2) * 4
    assert costs["reduce_scatter"].sent == 3 * (8 * (4 + 2) * 4 + 4 * 4 + 2 * 2)
