"""Defects of real trainers in minimal programs, each paired with a correct step of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.verify import Cause, check_step
from tests.verify.steps.dividing import averaging, by_counts, in_a_scan, jitted, part, parts, plus, scaled
from tests.verify.steps.right_forms import MASKED, masked_sum
from tests.verify.steps.right_losses import (
    LAYERS,
    LENGTH,
    LINE,
    LM,
    NORMALIZED,
    PAIRS,
    REWARDED,
    RIGHT,
    ROWS,
    TEXT,
    TOWERS,
    Model,
    P,
    advantages,
    contrasted,
    entropy,
    log_probabilities,
    normalized,
    on_each,
    policy,
    residual,
    shifted,
    words,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs("jax", "optax", "flax", "equinox", "tensorflow"),
    pytest.mark.usefixtures("as_users_do"),
]
Make = Callable[..., Any]
FULL = TEXT | {"tokens": words(*TEXT["tokens"].shape)}
ALTERNATING = REWARDED | {"group": np.tile(np.arange(2), 4).astype(np.int32)}


def whitened(p: Any, x: Any) -> Any:
    reward = x["reward"]
    return policy(p, x, (reward - reward.mean()) / (reward.std() + 1e-8))


def hardest(p: Any, x: Any) -> tuple[Any, Any]:
    """Summed mean loss of the less probable half of the sequences, and their number."""
    mask = x["mask"][:, 1:]
    means = (log_probabilities(p, x["tokens"]) * mask).sum(1) / mask.sum(1)
    kept = jax.lax.stop_gradient(means <= jnp.median(means))
    return -(means * kept).sum(), kept.sum().astype(jnp.float32)


def mean_of(loss: Any) -> Any:
    def mean(p: Any, x: Any) -> Any:
        total, count = loss(p, x)
        return total / jnp.maximum(count, 1)

    return averaging(mean)


def survivors(p: Any, x: Any) -> tuple[Any, Any]:
    mask = x["mask"][:, 1:] * (x["reward"] > -0.5)[:, None]
    return -(log_probabilities(p, x["tokens"]) * mask).sum(), mask.sum()


def by_a_constant(k: int) -> Any:
    """Divides each microbatch by its capacity in tokens, then sums."""

    def loss(p: Any, x: Any) -> Any:
        return -(log_probabilities(p, x["tokens"]) * x["mask"][:, 1:]).sum() / (len(x["mask"]) * LENGTH)

    return jax.jit(lambda p, batch: plus(*(jax.grad(loss)(p, x) for x in parts(batch, k))))


def divided_twice(k: int) -> Any:
    return averaging(lambda p, x: (residual(p, x) ** 2).mean() / k)(k)


@jitted
def penalty_each(p: Any, batch: Any, k: int) -> Any:
    """Adds the gradient of a penalty at each microbatch instead of once."""
    return plus(in_a_scan(LM, k, p, batch), scaled(p, 1e-2 * k))


@jitted
def last_statistics(state: Any, batch: Any, k: int) -> Any:
    """Accumulates the gradients but keeps the statistics of the last microbatch only."""
    p = state["line"]
    grads = averaging(lambda p, x: (residual(p, x) ** 2).mean())(k)(p, batch)
    mean = part(batch, k, k - 1)["x"].mean(0)
    return {"line": jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), "mean": mean}


def gradient_of(p: Any, batch: Any, k: int, i: int) -> Any:
    """The i-th microbatch's share in the gradient of the mean over all words."""
    return jax.grad(lambda p: LM(p, part(batch, k, i))[0] / shifted(batch)[2].sum())(p)


def erased(k: int) -> Any:
    """Each microbatch overwrites the gradient."""

    return jax.jit(lambda p, batch: gradient_of(p, batch, k, k - 1))


class Kept:
    """Never resets its accumulator between calls."""

    def __init__(self, k: int) -> None:
        self._step, self._total = by_counts(LM)(k), {}

    def __call__(self, p: Any, batch: Any) -> Any:
        grads = self._step(p, batch)
        dtype = jax.tree.leaves(grads)[0].dtype
        self._total[dtype] = plus(*(x for x in (self._total.get(dtype), grads) if x is not None))
        return self._total[dtype]


def transformed_each(tx: Any) -> Make:
    """Applies an optax transformation to each microbatch's gradient instead of to the sum."""

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        total = plus(*(tx.update(gradient_of(p, batch, k, i), tx.init(p), p)[0] for i in range(k)))
        return jax.tree.map(lambda x, y: x - 0.1 * y, p, total)

    return make_step


@jitted
def scheduled_each(p: Any, batch: Any, k: int) -> Any:
    tx = optax.sgd(optax.warmup_constant_schedule(0.1, 1.0, 4))
    state, total = tx.init(p), jax.tree.map(jnp.zeros_like, p)
    for i in range(k):
        updates, state = tx.update(gradient_of(p, batch, k, i), state, p)
        total = plus(total, updates)
    return plus(p, total)


@jitted
def decayed_each(p: Any, batch: Any, k: int) -> Any:
    at = p
    for i in range(k):
        at = jax.tree.map(lambda x, g: x * (1 - 1e-2) - 0.1 * g, at, gradient_of(p, batch, k, i))
    return at


def one_key(p: Any, batch: Any) -> Any:
    return entropy(Model(dropout=0.3), p, batch, train=True, rngs={"dropout": jax.random.key(0)})


@jitted
def keys_of_microbatches(p: Any, batch: Any, k: int) -> Any:
    def loss(p: Any, x: Any, i: int) -> Any:
        return entropy(Model(dropout=0.3), p, x, train=True, rngs={"dropout": jax.random.key(i)})[0]

    count = shifted(batch)[2].sum()
    return scaled(plus(*(jax.grad(loss)(p, part(batch, k, i), i) for i in range(k))), 1 / count)


@jitted
def narrow(p: Any, batch: Any, k: int) -> Any:
    total, count = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), p), shifted(batch)[2].sum()
    for x in parts(batch, k):
        grads = jax.grad(lambda p, x=x: LM(p, x)[0])(p)
        total = plus(total, jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads)) if k > 1 else grads
    return jax.tree.map(lambda x: x.astype(jnp.float32) / count, total)


def cut_short(k: int) -> Any:
    return jax.jit(lambda p, batch: in_a_scan(LM, k, p, jax.tree.map(lambda x: x[: len(x) // k * k], batch)))


@jitted
def reported(p: Any, batch: Any, k: int) -> Any:
    """Returns the correct gradient, and a loss that is a mean of means."""
    losses = [LM(p, x) for x in parts(batch, k)]
    return in_a_scan(LM, k, p, batch), {"loss": sum(x / n for x, n in losses) / k}


def means_of_devices(k: int, devices: int = 1) -> Any:
    del k

    def local(p: Any, batch: Any) -> Any:
        p = jax.lax.pcast(p, "d", to="varying")
        mean = jax.grad(lambda p: masked_sum(p, batch) / jnp.maximum(batch["mask"].sum(), 1))
        return jax.lax.pmean(mean(p), "d")

    return on_each(local, devices)


def summed_twice(k: int, devices: int = 1) -> Any:
    """Sums twice: the gradient with respect to replicated parameters is already a sum over the devices."""
    del k

    def local(p: Any, batch: Any) -> Any:
        grads, count = jax.grad(masked_sum)(p, batch), jax.lax.psum(batch["mask"].sum(), "d")
        return jax.tree.map(lambda x: jax.lax.psum(jax.lax.pcast(x, "d", to="varying"), "d") / count, grads)

    return on_each(local, devices)


def rolled_on_devices(k: int, devices: int = 1) -> Any:
    """Makes the labels by rolling the flattened rows of each device."""
    del k

    def local(p: Any, batch: Any) -> Any:
        x, p = batch["tokens"], jax.lax.pcast(p, "d", to="varying")
        labels, mask = jnp.roll(x.ravel(), -1).reshape(x.shape), (x > 0).astype(jnp.float32)

        def loss(p: Any) -> Any:
            logits = Model().apply({"params": p}, x)
            return (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * mask).sum()

        total, count = jax.lax.psum((jax.grad(loss)(p), mask.sum()), "d")
        return jax.tree.map(lambda x: x / count, total)

    return on_each(local, devices)


NEW, TWO, UNEVEN = {"returns": "params"}, {"microbatches": (1,), "devices": (2,)}, {"microbatches": (3,)}
STATISTICS = {"line": LINE, "mean": np.zeros(5, np.float32)}
Pair = tuple[Make, Any, Any, dict[str, Any], Cause, str, str]
PAIRED: dict[str, Pair] = {
    "groups cut apart": (
        by_counts(lambda p, x: policy(p, x, advantages(x["reward"], x["group"], 2))), LAYERS, ALTERNATING, {},
        Cause.STATISTICS, "", "groups not split by microbatches",
    ),
    "advantages of a microbatch": (
        by_counts(whitened), LAYERS, REWARDED, {}, Cause.STATISTICS, "", "advantages_before_the_division",
    ),
    "the hardest of a microbatch": (
        by_counts(hardest), LAYERS, REWARDED, {},
        Cause.SELECTION, "of weight 0 in one batch", "a mean of sequences' means",
    ),
    "a mean of policies' means": (
        mean_of(lambda p, x: policy(p, x, x["reward"])), LAYERS, REWARDED, {},
        Cause.MEAN_OF_MEANS, "", "advantages_before_the_division",
    ),
    "survivors of a filter": (mean_of(survivors), LAYERS, REWARDED, {}, Cause.MEAN_OF_MEANS, "", "two_denominators"),
    "a constant, added up": (by_a_constant, LAYERS, REWARDED, {}, Cause.SUM, "4 times", "two_denominators"),
    "divided twice": (divided_twice, LINE, ROWS, {}, Cause.SCALED, "by 1 / 4", "quantile"),
    "a penalty at each": (penalty_each, P, TEXT, {}, Cause.ADDED, "0.03 times the parameters", "penalty_added_once"),
    "negatives of a microbatch": (
        averaging(lambda p, x: contrasted(x["x"] @ p["x"], x["y"] @ p["y"])), TOWERS, PAIRS, {},
        Cause.STATISTICS, "", "embeddings_first",
    ),
    "statistics of a microbatch": (
        averaging(lambda p, x: ((normalized(p, x["x"]) - x["y"]) ** 2).mean()), NORMALIZED["params"], ROWS, {},
        Cause.STATISTICS, "", "statistics_over_microbatches",
    ),
    "the last statistics are kept": (
        last_statistics, STATISTICS, ROWS, NEW, Cause.LOST, "all but the last microbatch", "quantile",
    ),
    "each request erases the last": (erased, P, TEXT, {}, Cause.LOST, "all but the last", "words_counted_first"),
    "not cleared between calls": (Kept, P, TEXT, {}, Cause.STATE, "", "float32"),
    "clipped at each": (
        transformed_each(optax.clip_by_global_norm(0.05)), P, TEXT, NEW,
        Cause.CHANGED_BEFORE, "a norm of 0.05;", "adamw, clipped, with a schedule",
    ),
    "muon at each": (transformed_each(optax.contrib.muon(0.1)), P, TEXT, NEW, Cause.CHANGED_BEFORE, "", "muon"),
    "a schedule at each": (
        scheduled_each, P, TEXT, NEW, Cause.BY_PLACE,
        "multiplied by 1, 3.25, 5.5, 7.75, also with the examples reversed", "adamw, clipped, with a schedule",
    ),
    "decay at each": (decayed_each, P, TEXT, NEW, Cause.MOVED, "by -0.0099999", "sgd with momentum"),
    "noise at each": (
        transformed_each(optax.add_noise(0.01, 0.0, 0)), P, TEXT, NEW, Cause.ADDED, "copies of one", "noise once",
    ),
    "one key": (by_counts(one_key), P, TEXT, {}, Cause.KEY, "", "bfloat16 and dropout by sentence"),
    "keys of microbatches": (keys_of_microbatches, P, TEXT, {}, Cause.RANDOM, "", "bfloat16 and dropout by sentence"),
    "a narrow accumulator": (
        narrow, P, TEXT, {}, Cause.PRECISION, "", "bfloat16_parameters_and_float32_accumulator",
    ),
    "cut short": (cut_short, P, TEXT, UNEVEN, Cause.LOST, "examples 6, 7", "float32"),
    "a reported loss": (reported, P, TEXT, {}, Cause.MEAN_OF_MEANS, "in 1 of", "means_weighted_by_words"),
    "means of devices": (means_of_devices, LINE, MASKED, TWO, Cause.MEAN_OF_MEANS, "per device", "weighted rows"),
    "summed twice": (summed_twice, LINE, MASKED, TWO, Cause.SUM, "there are 2 devices", "weighted rows"),
    "rolled on devices": (rolled_on_devices, P, FULL, TWO, Cause.NEIGHBOURS, "", "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRED)
def test_the_defect_is_named(name: str) -> None:
    make_step, params, batch, options, cause, detail, _ = PAIRED[name]
    report = check_step(make_step, params, batch, **({"microbatches": (4,)} | options))
    assert report.cause is cause, report
    assert detail in report.faults[0].detail


def test_each_has_a_right_twin() -> None:
    """The twins are not accused: see tests/verify/steps/test_right.py."""
    assert {pair[-1] for pair in PAIRED.values()} <= set(RIGHT)
    assert len(PAIRED) >= 25
