"""A PPO loss over microbatches, replicas and requests gives the update of the full batch in float64.

Five terms over four denominators: the tokens that a filter on the policy keeps, all tokens, sequences, microbatches.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import losses, reductions
from gradcombine.integrations.jax import Loss, LossOutput, request_step, train_step, value_and_grad, zero
from gradcombine.reductions import Ratio
from tests.integrations.jax.replicas import mesh

pytestmark = pytest.mark.usefixtures("standard_promotion")

ROWS, T, WIDTH, ACTIONS = 16, 9, 5, 3
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(ROWS, T, WIDTH)).astype(np.float32),
    "action": RNG.integers(0, ACTIONS, (ROWS, T)),
    "advantage": RNG.normal(size=(ROWS, T)).astype(np.float32),
    "result": RNG.normal(size=(ROWS, T)).astype(np.float32),
    "before": np.log(RNG.uniform(0.1, 0.9, (ROWS, T))).astype(np.float32),
    "mask": np.arange(T) < RNG.integers(0, T + 1, (ROWS, 1)),
}
PARAMS = {
    "policy": RNG.normal(size=(WIDTH, ACTIONS)).astype(np.float32) / 3,
    "value": RNG.normal(size=WIDTH).astype(np.float32) / 3,
}
OVER = {
    "policy": "kept tokens",
    "value": "sequences",
    "entropy": "tokens",
    "kl": "sequences",
    "balance": "microbatches",
}


def per_token(params: Any, batch: Any) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Values per token of each term, the mask of kept tokens, and the load-balancing loss of the actions."""
    logits = jax.nn.log_softmax(batch["x"] @ params["policy"])
    logp = jnp.take_along_axis(logits, batch["action"][..., None], -1)[..., 0]
    ratio = jnp.exp(logp - batch["before"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    values = {
        "policy": jnp.maximum(-batch["advantage"] * ratio, -batch["advantage"] * clipped),
        "value": jnp.square(batch["x"] @ params["value"] - batch["result"]),
        "entropy": 0.01 * jnp.sum(jnp.exp(logits) * logits, -1),
        "kl": jnp.exp(batch["before"] - logp) - (batch["before"] - logp) - 1,
    }
    return values, batch["mask"] & (ratio < 2), jnp.var(jnp.mean(jnp.exp(logits), (0, 1)))


def loss(params: Any, batch: Any) -> LossOutput:
    values, kept, balance = per_token(params, batch)
    mask = batch["mask"]
    terms = {
        "policy": losses.token_mean(values["policy"], kept),
        "value": losses.sequence_mean_of_token_mean(values["value"], mask),
        "entropy": losses.token_mean(values["entropy"], mask),
        "kl": losses.sequence_mean_of_token_sum(values["kl"], mask, normalizer=T),
        "balance": Ratio(balance, 1),
    }
    return LossOutput(terms, aux={"kl": losses.token_mean(values["kl"], kept), "kept": jnp.sum(kept)})


AUX = {"kl": reductions.ratio(), "kept": reductions.sum()}


@cache
def truth(microbatches: int) -> dict[str, Any]:
    """Results of the full batch in float64; only the balance term is computed per microbatch."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, (PARAMS, BATCH))

        def full_batch(params: Any) -> Any:
            (values, kept, _), mask = per_token(params, wide[1]), wide[1]["mask"]
            sums = {term: jnp.sum(jnp.where(mask, x, 0), 1) for term, x in values.items()}
            lengths, rows = mask.sum(1), (mask.sum(1) > 0).sum()
            terms = {
                "policy": jnp.sum(jnp.where(kept, values["policy"], 0)) / kept.sum(),
                "value": jnp.sum(sums["value"] / jnp.maximum(lengths, 1)) / rows,
                "entropy": jnp.sum(sums["entropy"]) / mask.sum(),
                "kl": jnp.sum(sums["kl"]) / T / rows,
                "balance": sum(per_token(params, part)[2] for part in parts(microbatches, wide[1])) / microbatches,
            }
            kl = jnp.sum(jnp.where(kept, values["kl"], 0)) / kept.sum()
            weights = {"kept tokens": kept.sum(), "tokens": mask.sum(), "sequences": rows, "microbatches": microbatches}
            return terms, weights, {"kl": kl, "kept": kept.sum()}

        jacobian = jax.jacrev(lambda params: full_batch(params)[0])(wide[0])
        norms = {}
        for name in set(OVER.values()):
            grads = [jacobian[term] for term in OVER if OVER[term] == name]
            norms[name] = norm(jax.tree.map(lambda *x: sum(x), *grads))
        grads = jax.tree.map(lambda *x: sum(x), *jacobian.values())
        terms, weights, aux = full_batch(wide[0])
        metrics = {"value": terms, "weight": weights, "aux": aux, "grad_norm": norm(grads), "grad_norms": norms}
        return jax.tree.map(np.asarray, metrics | {"grads": grads})


def norm(grads: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(grads)))


def parts(microbatches: int, batch: Any = BATCH) -> list[Any]:
    divided = jax.tree.map(lambda x: np.split(np.asarray(x), microbatches), batch)
    return [{name: x[i] for name, x in divided.items()} for i in range(microbatches)]


close = partial(chex.assert_trees_all_close, rtol=2e-5, atol=1e-6)


def taken(params: Any) -> Any:
    """Recovers the gradient from the parameters after one SGD step with learning rate 1."""
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), PARAMS, params)


def as_expected(metrics: Any, microbatches: int) -> None:
    for name in ("value", "weight", "aux", "grad_norm", "grad_norms"):
        close(getattr(metrics, name), truth(microbatches)[name])


def objective(**settings: Any) -> Loss:
    return Loss(loss, terms=OVER, aux_reduction=AUX, **settings)


@pytest.mark.full
@pytest.mark.parametrize("totals", [None, "counted"])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_in_a_scan(k: int, totals: Any) -> None:
    output, grads = jax.jit(value_and_grad(objective(totals=totals), k))(PARAMS, BATCH)
    close(grads, truth(k)["grads"])
    close([output.value, output.weight, output.aux], [truth(k)[name] for name in ("value", "weight", "aux")])


@pytest.mark.parametrize("k", [4])
def test_over_calls(k: int) -> None:
    step = train_step(objective(grad_norm=True), optax.sgd(1.0), every=k)
    params = jax.tree.map(jnp.array, PARAMS)
    state = step.init(params, BATCH)
    for part in parts(k):
        params, state, metrics = step(params, state, part)
    close(taken(params), truth(k)["grads"])
    as_expected(metrics, k)


@pytest.mark.full
@pytest.mark.parametrize("k", [1, 2])
def test_over_replicas(k: int) -> None:
    on = mesh(4, "data", AxisType.Explicit)
    batch = jax.device_put(BATCH, NamedSharding(on, P("data")))
    step = train_step(objective(grad_norm=True), optax.sgd(1.0), microbatches=k, over=gc.jax_axis("data"))
    params = jax.device_put(PARAMS, NamedSharding(on, P()))
    params, _, metrics = step(params, step.init(params), batch)
    close(taken(params), truth(4 * k)["grads"])
    as_expected(metrics, 4 * k)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_state_is_created_from_the_arguments_of_a_call_on_a_mesh(kind: AxisType) -> None:
    """Outside of the mapped function, a sort cannot take an argument that is sharded over explicit axes."""
    on = mesh(4, "data", kind)
    batch = jax.device_put(BATCH, NamedSharding(on, P("data")))
    params = jax.device_put(PARAMS, NamedSharding(on, P()))
    step = train_step(objective(grad_norm=True), optax.sgd(1.0), every=2, over=gc.jax_axis("data"))
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch)
    states = [step.init(params, x) for x in (batch, specs, BATCH)]
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), state) for state in states]
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.full
def test_over_requests() -> None:
    step = request_step(objective(grad_norm=True), optax.sgd(1.0), microbatches=4)
    state = step.init({"a": PARAMS})
    for n in (2, 0, 3, 0, 1):
        state = step.forward_backward(state, parts(4)[n], slot="a", number=n, window=0)
    state, metrics = step.optim_step(state, "a", window=0)
    close(taken(state["a"].params), truth(4)["grads"])
    as_expected(metrics, 4)
    again = step.optim_step(state, "a", window=0)[1]
    nothing = jax.tree.map(np.zeros_like, metrics._replace(aux=None))
    close(again, nothing)


@pytest.mark.full
def test_totals_that_are_known_have_one_norm() -> None:
    given = {name: np.float32(total) for name, total in truth(4)["weight"].items()}
    step = request_step(objective(grad_norm=True, totals="given"), optax.sgd(1.0), microbatches=4)
    state = step.init({"a": PARAMS})
    for n, part in enumerate(parts(4)):
        state = step.forward_backward(state, part, slot="a", number=n, totals=given)
    state, metrics = step.optim_step(state, "a", window=0)
    close(metrics.grad_norm, truth(4)["grad_norm"])
    assert metrics.grad_norms is None
    close(step.optim_step(state, "a", window=0)[1], jax.tree.map(np.zeros_like, metrics._replace(aux=None)))


def test_the_norm_of_one_term() -> None:
    step = train_step(Loss(lambda w, x: jnp.vdot(w, x[0]), grad_norm=True), optax.sgd(1.0), microbatches=2)
    w = jnp.float32([3, 4])
    _, _, metrics = step(w, step.init(w), np.float32([[2, 4], [4, 4]]))
    assert (metrics.grad_norm, metrics.grad_norms) == (5, None)


REFUSED: dict[str, tuple[Any, str]] = {
    "where gradients are returned": (
        lambda: value_and_grad(objective(grad_norm=True), 2),
        "no grad_norm, as the gradients are returned",
    ),
    "of shards": (
        lambda: train_step(
            Loss(lambda w, x: w, grad_norm=True),
            optax.sgd(1.0),
            reduction=zero.scattered(reductions.mean(), gc.jax_axis("data")),
        ),
        "a reduction of full gradients, for grad_norm",
    ),
    "another kind": (
        lambda: train_step(Loss(lambda w, x: w, grad_norm="all"), optax.sgd(1.0)),  # pyright: ignore
        "grad_norm",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(gc.GradCombineError) as caught:
        call()
    assert message in str(caught.value)
