"""A planning problem, a transformer with 1.0e9 parameters: the example of docs/plan.md. Nothing is executed or timed.

    gradcombine plan benchmarks.plan:transformer --target h100:8

Needs the extra `targets`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

WIDTH, LAYERS, HEADS, TOKENS, VOCABULARY = 2048, 18, 16, 2048, 50304
MICROBATCHES = 8


def shapes() -> Any:
    def spec(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = {
        "qkv": spec(LAYERS, WIDTH, 3 * WIDTH),
        "out": spec(LAYERS, WIDTH, WIDTH),
        "up": spec(LAYERS, WIDTH, 4 * WIDTH),
        "down": spec(LAYERS, 4 * WIDTH, WIDTH),
        "before": spec(LAYERS, WIDTH),
        "between": spec(LAYERS, WIDTH),
    }
    return {"embed": spec(VOCABULARY, WIDTH), "layers": layers, "norm": spec(WIDTH)}


def normed(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def loss(params: Any, tokens: Any) -> Any:
    """Cross entropy of the next token, with products in bfloat16 and rematerialized layers."""
    x = params["embed"][tokens[:, :-1]].astype(jnp.bfloat16)
    rows, length, _ = x.shape
    mask = jnp.tril(jnp.ones((length, length), bool))

    def layer(x: Any, weights: Any) -> Any:
        w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights)
        split = (normed(x, w["before"]) @ w["qkv"]).reshape(rows, length, HEADS, -1)
        q, k, v = jnp.split(split, 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / jnp.sqrt(float(q.shape[-1]))
        attention = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1).astype(x.dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", attention, v).reshape(rows, length, -1) @ w["out"]
        return x + jax.nn.gelu(normed(x, w["between"]) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = (normed(x, params["norm"]) @ params["embed"].T.astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def transformer(devices: Any) -> dict[str, Any]:
    """The problem, with one sequence of 2,048 tokens per microbatch and device."""
    tokens = jax.ShapeDtypeStruct((MICROBATCHES * len(devices), TOKENS + 1), jnp.int32)
    return {
        "loss": loss,
        "params": shapes(),
        "batch": tokens,
        "optimizer": optax.adamw(3e-4),
        "microbatches": MICROBATCHES,
    }
