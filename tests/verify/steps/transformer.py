"""A small transformer in flax, its loss over tokens, and a step that accumulates, right or with one defect."""

from __future__ import annotations

from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 24, 8, 6, 8


class Transformer(nn.Module):
    """One block, with the embedding as its last layer too; the options are what the tests vary."""

    dtype: Any = None
    dropout: bool = False
    batch_norm: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        x = embed(tokens)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(y, y, mask=mask)
        y = nn.gelu(nn.Dense(2 * WIDTH, dtype=self.dtype)(x))
        if self.batch_norm:
            y = (y - y.mean((0, 1), keepdims=True)) / jnp.sqrt(y.var((0, 1), keepdims=True) + 0.1)
        if keys is not None:
            kept = keys.ndim == 0  # one key, or one for each example
            draw = (
                jax.random.bernoulli(keys, 0.8, y.shape)
                if kept
                else jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, y.shape[1:]))(keys)
            )
            y = jnp.where(draw, y / 0.8, 0)
        return embed.attend(x + nn.Dense(WIDTH, dtype=self.dtype)(y))


@cache
def problem() -> tuple[Any, Any]:
    """Parameters, and sentences of different lengths."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCABULARY, (EXAMPLES, LENGTH)).astype(np.int32)
    lengths = np.array([6, 6, 5, 6, 3, 2, 3, 2])
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
    made = Transformer().init(jax.random.key(0), jnp.asarray(tokens[:1]))["params"]
    return jax.tree.map(np.asarray, made), {"tokens": tokens, "mask": mask}


def summed(params: Any, batch: Any, model: Any = None, keys: Any = None) -> tuple[Any, Any]:
    """The cross entropy of the real tokens, summed, and their number."""
    tokens, mask = batch["tokens"], batch["mask"]
    logits = (model or Transformer()).apply({"params": params}, tokens, keys)
    of_next = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(of_next * mask[:, 1:].astype(of_next.dtype)), jnp.sum(mask[:, 1:])


@cache
def gradients(**options: Any) -> Any:
    """Compiled once for all tests: from parameters, a batch and perhaps keys to summed gradients and tokens."""
    remat = options.pop("remat", False)
    model = Transformer(**options)

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return summed(params, batch, model, keys)

    differentiated = jax.jit(jax.grad(jax.checkpoint(loss) if remat else loss, has_aux=True))

    def sums(params: Any, batch: Any, keys: Any = None) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            grads, tokens = differentiated(params, batch, keys)
        leaves, _ = jax.tree.flatten(grads)
        return leaves, tokens

    return sums
