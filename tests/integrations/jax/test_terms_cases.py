"""Realistic losses with several denominators against the formula on the full batch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax import Loss, LossOutput, value_and_grad
from tests.integrations.jax.replicas import mesh

pytestmark = pytest.mark.full

WORDS, WIDTH, EXPERTS = 11, 6, 4
RNG = np.random.default_rng(7)
WORDS_OF = RNG.integers(0, WORDS, (16, 10))
LENGTHS = np.array([10, 9, 1, 2, 3, 10, 4, 4, 1, 1, 1, 1, 7, 2, 10, 5])
REAL = (np.arange(10) < LENGTHS[:, None]).astype(np.float32)
SHAPES = {"table": (WORDS, WIDTH), "next": (WIDTH, WORDS), "after": (WIDTH, WORDS), "router": (WIDTH, EXPERTS)}
PARAMS = {name: RNG.normal(0, 0.7, shape).astype(np.float32) for name, shape in SHAPES.items()}


def scores(table: Any, head: Any, words: Any, ahead: int) -> Any:
    logits = jax.nn.log_softmax(table[words[:, :-ahead]] @ head)
    return jnp.take_along_axis(logits, words[:, ahead:, None], axis=-1)[..., 0]


def multi_token_prediction(params: Any, words: Any, real: Any) -> LossOutput:
    """The token count differs per head: a short sequence has no target two positions ahead."""
    terms, weights = {}, {}
    for name, ahead in (("next", 1), ("after", 2)):
        mask = real[:, ahead:]
        terms[name] = -jnp.sum(scores(params["table"], params[name], words, ahead) * mask) / ahead
        weights[name] = mask.sum()
    return LossOutput(terms, weights)


def experts(params: Any, words: Any, real: Any) -> LossOutput:
    """Cross entropy per token, router z-loss per routed token, and balance, which is nonlinear, per microbatch."""
    routed = params["table"][words] @ params["router"]
    share = jnp.sum(jax.nn.softmax(routed) * real[..., None], axis=(0, 1)) / jnp.maximum(jnp.sum(real), 1)
    z = jnp.sum(jax.nn.logsumexp(routed, axis=-1) ** 2 * real)
    ce = -jnp.sum(scores(params["table"], params["next"], words, 1) * real[:, 1:])
    terms = {"ce": ce, "balance": EXPERTS * jnp.sum(share**2), "z": 0.1 * z}
    return LossOutput(terms, {"tokens": real[:, 1:].sum(), "microbatches": 1, "routed": real.sum()})


def preference(params: Any, words: Any, real: Any) -> LossOutput:
    """Pairs of rows: DPO on some, averaged over pairs, and SFT on the others, averaged over tokens."""
    of_rows = jnp.sum(scores(params["table"], params["next"], words, 1) * real[:, 1:], axis=1)
    is_pair = (words[::2, 0] % 2 == 0).astype(real.dtype)
    margin = jax.nn.log_sigmoid(0.1 * (of_rows[::2] - of_rows[1::2]))
    demonstrated = jnp.repeat(1 - is_pair, 2)
    terms = {"dpo": -jnp.sum(margin * is_pair), "sft": -jnp.sum(of_rows * demonstrated)}
    return LossOutput(terms, {"pairs": is_pair.sum(), "tokens": jnp.sum(real[:, 1:] * demonstrated[:, None])})


CASES: dict[str, tuple[Callable[..., LossOutput], dict[str, str]]] = {
    "multi-token prediction": (multi_token_prediction, {"next": "next", "after": "after"}),
    "experts": (experts, {"ce": "tokens", "balance": "microbatches", "z": "routed"}),
    "preference and demonstrations": (preference, {"dpo": "pairs", "sft": "tokens"}),
}


def in_one_piece(loss: Callable[..., LossOutput], terms: dict[str, str], parts: list[Any]) -> tuple[Any, Any, Any]:
    """The terms and their gradient on the full batch in float64, and the gradient of the mean of means."""
    with jax.enable_x64(True):
        wide = {name: jnp.float64(x) for name, x in PARAMS.items()}
        rows = [(words, np.float64(real)) for words, real in parts]

        def total(params: Any, each: bool) -> Any:
            outputs = [loss(params, *row) for row in rows]
            if each:
                means = [out.value[t] / jnp.maximum(out.weight[d], 1) for out in outputs for t, d in terms.items()]
                return sum(means) / len(outputs)
            return sum(sum(o.value[t] for o in outputs) / sum(o.weight[d] for o in outputs) for t, d in terms.items())

        value, grads = jax.value_and_grad(total)(wide, False)
        return float(value), jax.tree.map(np.asarray, grads), jax.tree.map(np.asarray, jax.grad(total)(wide, True))


def distance(a: Any, b: Any) -> float:
    return max(
        float(np.abs(np.float64(a[name]) - b[name]).max() / np.abs(b[name]).max()) for name in b if b[name].any()
    )


@pytest.mark.parametrize("totals", [None, "counted"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("replicas", [1, 4])
def test_as_in_one_piece(name: str, totals: Any, replicas: int) -> None:
    (loss, terms), size = CASES[name], 2
    k = 16 // size // replicas
    parts = [(WORDS_OF[i : i + size], REAL[i : i + size]) for i in range(0, 16, size)]
    value, grads, wrong = in_one_piece(loss, terms, parts)
    over = gc.jax_axis("data") if replicas > 1 else gc.LOCAL
    with jax.set_mesh(mesh(replicas, "data")):
        function = jax.jit(value_and_grad(Loss(loss, terms=terms, totals=totals), k, over=over))
        output, received = function(PARAMS, WORDS_OF.astype(np.int32), REAL)
    assert distance(received, grads) < 2e-5
    assert distance(received, wrong) > 1e-2
    np.testing.assert_allclose(sum(map(float, output.value.values())), value, rtol=1e-5)


@pytest.mark.parametrize("totals", [None, "counted"])
def test_context_parallel_token_counts(totals: Any) -> None:
    """Sequences split over replicas along time: the mean is over all tokens, even if a replica has none."""

    def loss(params: Any, words: Any, targets: Any, real: Any) -> LossOutput:
        logits = jax.nn.log_softmax(params["table"][words] @ params["next"])
        log_probs = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        z = jnp.sum(jnp.square(jnp.max(logits, axis=-1)) * real)
        return LossOutput({"ce": -jnp.sum(log_probs * real), "z": z}, {"tokens": real.sum()})

    terms = {"ce": "tokens", "z": "tokens"}
    words, targets, real = WORDS_OF[:, :8].astype(np.int32), WORDS_OF[:, 1:9].astype(np.int32), REAL[:, 1:9]
    split, over = P(None, "context"), gc.jax_axis("context")

    def one(params: Any, *batch: Any) -> Any:
        return value_and_grad(Loss(loss, terms=terms, totals=totals), 8, over=over)(params, *batch)

    mapped = jax.shard_map(one, mesh=mesh(4, "context"), in_specs=(P(), split, split, split), out_specs=P())
    output, received = jax.jit(mapped)(PARAMS, words, targets, real)
    with jax.enable_x64(True):
        wide = {name: jnp.float64(x) for name, x in PARAMS.items()}

        def whole(params: Any) -> Any:
            out = loss(params, words, targets, np.float64(real))
            return sum(out.value.values()) / real.sum(dtype=np.float64)

        grads = jax.tree.map(np.asarray, jax.grad(whole)(wide))
    assert distance(received, grads) < 2e-5
    assert float(output.weight["tokens"]) == real.sum()


@pytest.mark.parametrize("totals", [None, "counted"])
def test_large_counts_in_float64(totals: Any) -> None:
    """2**24 + 1 is no float32."""

    def loss(w: Any, x: Any, counts: Any) -> LossOutput:
        return LossOutput({"ce": jnp.sum(w * x * counts.astype(x.dtype))}, {"tokens": counts.sum()})

    with jax.enable_x64(True):
        counts = np.array([2**24 + 1, 3, 1, 1], np.int64)
        function = value_and_grad(Loss(loss, terms={"ce": "tokens"}, totals=totals), 4)
        assert float(function(jnp.float64(1), np.ones(4), counts)[1]) == 1
