"""A small transformer in flax: twelve defects are named, twelve variations are not accused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcombine.verify import Cause, StepReport, check_step
from tests.verify.steps import defects
from tests.verify.steps.transformer import Transformer, gradients, problem, summed

pytestmark = pytest.mark.full


def check(make_step: Callable[..., Any], **options: Any) -> StepReport:
    params, batch = problem()
    return check_step(make_step, params, options.pop("batch", batch), **{"microbatches": (4,)} | options)


def of(make: Any, **options: Any) -> Any:
    """A step of the transformer with these options."""
    return partial(make, gradients(**options))


def with_keys(key_of: Callable[[Any, int], Any]) -> Any:
    """Dropout, with a key for each microbatch."""

    def make_step(k: int) -> Any:
        def step(params: Any, batch: Any) -> Any:
            made = []
            for i, part in enumerate(defects.pieces(batch, k)):
                keys = part.get("keys")
                part = {name: x for name, x in part.items() if name != "keys"}
                made.append(gradients(dropout=True)(params, part, key_of(keys, i)))
            return defects.over(defects.added([g for g, _ in made]), sum(w for _, w in made))

        return step

    return make_step


KEY = jax.random.key(0)


def bfloat16_sums(sums: Any, k: int) -> Any:
    """A narrow accumulator, of more than one microbatch."""
    if k == 1:
        return defects.right(sums, k)
    return lambda params, batch: defects.narrow(lambda leaves, part: sums(params, part), k, jnp.bfloat16)(
        jax.tree.leaves(params), batch
    )


def decayed(sums: Any, k: int) -> Any:
    return lambda params, batch: [
        g + np.float32(1e-4 * k) * p
        for g, p in zip(defects.right(sums, k)(params, batch), jax.tree.leaves(params), strict=True)
    ]


def updated(sums: Any, k: int, each: bool = False) -> Any:
    """New parameters, of one update, or of one at each microbatch; the old ones are donated."""
    treedef = jax.tree.structure(problem()[0])
    apply = jax.jit(lambda p, g: jax.tree.map(lambda x, y: x - y.astype(x.dtype) / 8, p, g), donate_argnums=0)

    def step(params: Any, batch: Any) -> Any:
        params = jax.tree.map(jnp.asarray, params)
        for part in defects.pieces(batch, k) if each else [batch]:
            made = (defects.right(sums, k) if not each else partial(defects.mean, sums))(params, part)
            params = apply(params, jax.tree.unflatten(treedef, made))
        return params

    return step


DEFECTS: dict[str, tuple[Any, dict[str, Any], Cause]] = {
    "mean of means": (of(defects.mean_of_means), {}, Cause.MEAN_OF_MEANS),
    "sum": (of(defects.sum_of_means), {}, Cause.SUM),
    "the last dropped": (of(defects.drops_the_last), {}, Cause.LOST),
    "the rest dropped": (of(defects.drops_the_rest), {"microbatches": (3,)}, Cause.LOST),
    "doubled": (of(defects.doubles), {}, Cause.DOUBLED),
    "clipped each": (of(defects.clips_each), {}, Cause.CHANGED_BEFORE),
    "schedule each": (of(defects.scheduled_each), {}, Cause.BY_PLACE),
    "decay each": (of(decayed), {}, Cause.ADDED),
    "an update each": (of(partial(updated, each=True)), {"returns": "params"}, Cause.MOVED_EACH),
    "a narrow accumulator": (of(bfloat16_sums), {}, Cause.PRECISION),
    "a key used again": (with_keys(lambda keys, i: KEY), {}, Cause.KEY),
    "a key for each microbatch": (with_keys(lambda keys, i: jax.random.fold_in(KEY, i)), {}, Cause.RANDOM),
    "batch normalization": (of(defects.weighted_means, batch_norm=True), {}, Cause.STATISTICS),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_named(name: str) -> None:
    make_step, options, cause = DEFECTS[name]
    report = check(make_step, **options)
    assert report.cause is cause, str(report)


def padded(batch: Any, n: int) -> Any:
    return jax.tree.map(lambda x: np.concatenate([x, np.zeros((n, *x.shape[1:]), x.dtype)]), batch)


def in_a_scan(k: int) -> Any:
    """Compiled as a whole, with a scan over microbatches."""
    loss = partial(summed, model=Transformer())

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
            total = jax.lax.map(lambda part: jax.grad(loss, has_aux=True)(params, part), parts)
            grads, tokens = jax.tree.map(lambda x: x.sum(0), total)
            return jax.tree.map(lambda x: x / tokens.astype(x.dtype), grads)

    return step


ONE_KEY_EACH = {"keys": jax.random.split(jax.random.key(3), 8)}
HARMLESS: dict[str, tuple[Any, dict[str, Any]]] = {
    "the same": (of(defects.right), {}),
    "order of additions": (of(defects.backwards), {}),
    "a tree": (of(defects.in_a_tree), {}),
    "weighted means": (of(defects.weighted_means), {}),
    "uneven": (of(defects.right), {"microbatches": (3,)}),
    "an example each": (of(defects.right), {"microbatches": (8,)}),
    "padding with a mask": (of(defects.right), {"pad": padded}),
    "donation": (of(updated), {"returns": "params"}),
    "bfloat16 products": (of(defects.right, dtype=jnp.bfloat16), {}),
    "recomputed activations": (of(defects.right, remat=True), {}),
    "a key for each example": (with_keys(lambda keys, i: keys), {"batch": problem()[1] | ONE_KEY_EACH}),
    "a scan": (in_a_scan, {}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_variation_is_not_accused(name: str) -> None:
    make_step, options = HARMLESS[name]
    with jax.numpy_rank_promotion("allow"):
        report = check(make_step, **options)
    assert report.passes, str(report)
