"""JAX: compilation changes no bits, and shard_map's types (vma) tell which values are already reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import gradcombine as gc
from gradcombine import reductions
from tests.integrations.jax.replicas import mesh

AXIS = "data"
OWN, SAME = PartitionSpec(AXIS), PartitionSpec()


def sharded(function: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool) -> Any:
    over = mesh(4, AXIS)
    return jax.jit(jax.shard_map(function, mesh=over, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def loss(w: Any, x: Any) -> Any:
    return (w * x).sum() / x.shape[0]


X = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_an_already_summed_gradient_is_refused(reduction: str) -> None:
    """With check_vma, shard_map sums the gradient of a replicated parameter, so summing it again would be wrong."""

    def step(w: Any, x: Any) -> Any:
        return gc.all_reduce(getattr(reductions, reduction)(), {"w": jax.grad(loss)(w, x)}, over=gc.jax_axis(AXIS))

    with pytest.raises(gc.GradCombineError, match=r"all_reduce: leaf \['w'\]: expected a value that varies"):
        sharded(step, (SAME, OWN), SAME, check_vma=True)(np.float32(1), X)
    # Without check_vma, gradients are local, and the same code is correct.
    expected = X.reshape(4, 2).sum(1) / 2
    result = sharded(step, (SAME, OWN), SAME, check_vma=False)(np.float32(1), X)
    assert result["w"] == (expected.sum() if reduction == "sum" else expected.mean())


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("order", ["sequential", "tree"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "first"])
def test_a_gradient_by_pcast_parameters_is_combined_once(reduction: str, order: Any, check_vma: bool) -> None:
    """The result is equal on all replicas and has an invariant type: ``out_specs=P()`` accepts it."""

    def step(w: Any, x: Any) -> Any:
        if check_vma:
            w = jax.lax.pcast(w, AXIS, to="varying")
        weight = 1 + jax.lax.axis_index(AXIS)
        made = getattr(reductions, reduction)()
        return gc.all_reduce(made, jax.grad(loss)(w, x), over=gc.jax_axis(AXIS), weight=weight, order=order)

    result = sharded(step, (SAME, OWN), SAME, check_vma)(np.float32(1), X)
    local, weights = X.reshape(4, 2).sum(1) / 2, np.arange(1, 5)
    weighted = (local * weights).sum()
    expected = {"sum": weighted, "mean": weighted / 10, "max": local.max(), "first": local[0]}
    assert result == np.float32(expected[reduction])


@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_a_merged_window_is_typed_as_the_same_everywhere(order: Any) -> None:
    acc = gc.accumulate(reductions.mean(), every=4, order=order)

    def step(x: Any) -> Any:
        state = acc.update(x, acc.init(x))
        return acc.value(gc.merge_replicas(reductions.mean(), state, over=gc.jax_axis(AXIS), order=order))

    np.testing.assert_array_equal(sharded(step, OWN, SAME, check_vma=True)(X), X.reshape(4, 2).mean(0))


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_several_axes_rank_in_row_major_order(order: Any, check_vma: bool) -> None:
    both_axes = jax.make_mesh((2, 4), ("replica", AXIS), axis_types=(AxisType.Auto,) * 2)
    both = ("replica", AXIS)

    def step(x: Any) -> Any:
        over = gc.jax_axis(both)
        last = gc.all_reduce(reductions.last(), x, over=over, order=order)
        return last, gc.all_reduce(reductions.sum(), x, over=over, order=order)

    run = jax.shard_map(
        step, mesh=both_axes, in_specs=PartitionSpec(both), out_specs=PartitionSpec(), check_vma=check_vma
    )
    last, total = jax.jit(run)(X)
    assert (last, total) == (7, 28)
    nested = jax.vmap(jax.vmap(step, axis_name=AXIS), axis_name="replica")(X.reshape(2, 4))
    np.testing.assert_array_equal(nested, np.float32([np.full((2, 4), 7), np.full((2, 4), 28)]))


def test_compiled_products_and_quotients_round_as_uncompiled_ones() -> None:
    """By default, XLA would fuse products into additions and divide by multiplying with a reciprocal."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=4096).astype(np.float32) for _ in range(3)]
    weights = np.float32([0.3, 0.7, 7.1])
    expected = gc.mean(values, weights)
    np.testing.assert_array_equal(jax.jit(gc.mean)(values, list(weights)), expected)
    np.testing.assert_array_equal(jax.jit(lambda v: gc.mean(v, weights))(values), expected)
    plain = jax.jit(lambda v, w: sum(x * y for x, y in zip(v, w, strict=True)) / w.sum())(values, weights)
    assert (np.asarray(plain) != expected).mean() > 0.1


def test_complex_weights_do_not_touch_the_other_part() -> None:
    """A complex product would turn an infinite part into NaN."""
    value = np.array([complex(np.inf, 1)], np.complex64)
    for run in (gc.mean, jax.jit(gc.mean)):
        result = np.asarray(run([value, value], [np.float32(2), np.float32(2)]))
        assert result.real[0] == np.inf
        assert result.imag[0] == 1
