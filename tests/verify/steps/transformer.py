"""A small transformer in flax, its loss over tokens, and a step that accumulates, right or with one defect."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 24, 8, 6, 8


class Block(nn.Module):
    dtype: Any = None
    batch_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype)(x)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(y, y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        if self.batch_norm:
            y = (y - y.mean((0, 1), keepdims=True)) / jnp.sqrt(y.var((0, 1), keepdims=True) + 0.1)
        return x + nn.Dense(WIDTH, dtype=self.dtype)(nn.gelu(nn.Dense(2 * WIDTH, dtype=self.dtype)(y)))


class Transformer(nn.Module):
    dtype: Any = None
    batch_norm: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        x = embed(tokens)
        block = nn.remat(Block) if self.remat else Block
        for _ in range(1):
            x = block(self.dtype, self.batch_norm)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


@lru_cache
def problem() -> tuple[Any, Any]:
    """Parameters, and sentences of different lengths."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCABULARY, (EXAMPLES, LENGTH)).astype(np.int32)
    lengths = np.array([6, 6, 5, 6, 3, 2, 3, 2])
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
    params = Transformer().init(jax.random.key(0), jnp.asarray(tokens[:1]))["params"]
    return jax.tree.map(np.asarray, params), {"tokens": tokens, "mask": mask}


def summed(model: nn.Module) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The cross entropy of the real tokens, summed, and their number."""

    def loss(params: Any, batch: Any) -> tuple[Any, Any]:
        tokens, mask = batch["tokens"], batch["mask"]
        logits = model.apply({"params": params}, tokens)
        of_next = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
        weights = mask[:, 1:].astype(of_next.dtype)
        return -jnp.sum(of_next * weights), jnp.sum(weights)

    return loss


def pieces(batch: Any, k: int) -> list[Any]:
    size = -(-len(batch["tokens"]) // k)
    return [jax.tree.map(lambda x, i=i: x[i : i + size], batch) for i in range(0, len(batch["tokens"]), size)]
