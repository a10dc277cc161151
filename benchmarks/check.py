"""Time of check_step relative to compiling one training step: ``python benchmarks/check.py [NAME ...]``.

Each step trains a small word-level transformer with AdamW, in one compiled function over four microbatches. Prints the
CPU time of ``check_step(..., microbatches=(2, 4))``, and its ratio to the time to compile the step; for PyTorch, which
compiles nothing, the ratio to the time of one run.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from gradcombine.verify import check_step

WORDS, WIDTH, LENGTH, ROWS, LAYERS = 64, 32, 17, 8, 2
TX = optax.adamw(1e-3)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, WORDS, (ROWS, LENGTH)) * (np.arange(LENGTH) < RNG.integers(5, LENGTH, ROWS)[:, None])
BATCH = {"tokens": TOKENS.astype(np.int32)}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        mask, h = nn.make_causal_mask(x), nn.Embed(WORDS, WIDTH)(x)
        for _ in range(LAYERS):
            h = h + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(h), mask=mask)
            h = h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(h))))
        return nn.Dense(WORDS)(h)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.out = nnx.Embed(WORDS, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WORDS, rngs=rngs)
        attention = partial(nnx.MultiHeadAttention, 2, WIDTH, decode=False, rngs=rngs)
        self.attention = nnx.List([attention() for _ in range(LAYERS)])
        self.up = nnx.List([nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.down = nnx.List([nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: Any) -> Any:
        mask, h = nnx.make_causal_mask(x), self.embed(x)
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            h = h + attention(h, mask=mask)
            h = h + down(nnx.gelu(up(h)))
        return self.out(h)


class Equinox(eqx.Module):
    embed: eqx.nn.Embedding
    attention: list[eqx.nn.MultiheadAttention]
    mlp: list[eqx.nn.MLP]
    out: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 2 + 2 * LAYERS)
        self.embed, self.out = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0]), eqx.nn.Linear(WIDTH, WORDS, key=keys[1])
        self.attention = [eqx.nn.MultiheadAttention(2, WIDTH, key=key) for key in keys[2 : 2 + LAYERS]]
        self.mlp = [eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, key=key) for key in keys[2 + LAYERS :]]

    def __call__(self, x: Any) -> Any:
        def row(tokens: Any) -> Any:
            h, mask = jax.vmap(self.embed)(tokens), jnp.tri(len(tokens), dtype=bool)
            for attention, mlp in zip(self.attention, self.mlp, strict=True):
                h = h + attention(h, h, h, mask)
                h = h + jax.vmap(mlp)(h)
            return jax.vmap(self.out)(h)

        return jax.vmap(row)(x)


def summed(logits: Callable[[Any], Any], batch: Any) -> tuple[Any, Any]:
    labels = batch["tokens"][:, 1:]
    each = optax.softmax_cross_entropy_with_integer_labels(logits(batch["tokens"][:, :-1]), labels)
    return (each * (labels > 0)).sum(), (labels > 0).sum().astype(jnp.float32)


def stepped(loss: Callable[[Any, Any], Any], k: int) -> Any:
    """A jitted step for a state of (params, optimizer state)."""

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt = state

        def body(carry: Any, part: Any) -> Any:
            (_, count), grads = jax.value_and_grad(loss, has_aux=True)(params, part)
            return jax.tree.map(jnp.add, carry, (grads, count)), None

        parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
        (grads, count), _ = jax.lax.scan(body, (jax.tree.map(jnp.zeros_like, params), 0.0), parts)
        updates, opt = TX.update(jax.tree.map(lambda x: x / count, grads), opt, params)
        return optax.apply_updates(params, updates), opt

    return step


def linen() -> tuple[Any, Any]:
    params = Linen().init(jax.random.key(0), TOKENS[:, :-1])
    return partial(stepped, lambda p, batch: summed(partial(Linen().apply, p), batch)), params


def of_nnx() -> tuple[Any, Any]:
    graph, params, rest = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)
    return partial(stepped, lambda p, batch: summed(nnx.merge(graph, p, rest), batch)), params


def equinox() -> tuple[Any, Any]:
    params, static = eqx.partition(Equinox(jax.random.key(0)), eqx.is_array)
    return partial(stepped, lambda p, batch: summed(eqx.combine(p, static), batch)), params


def of_keras() -> tuple[Any, Any]:
    """A step that assigns the variables of its model and optimizer."""
    import keras
    import tensorflow as tf

    tokens = keras.Input((LENGTH - 1,), dtype="int32")
    h = keras.layers.Embedding(WORDS, WIDTH)(tokens)
    for _ in range(LAYERS):
        x = keras.layers.LayerNormalization()(h)
        h = h + keras.layers.MultiHeadAttention(2, WIDTH // 2)(x, x, use_causal_mask=True)
        h = h + keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, "gelu")(keras.layers.LayerNormalization()(h)))
    model = keras.Model(tokens, keras.layers.Dense(WORDS)(h))
    params = [x.numpy() for x in model.trainable_variables]

    def make_step(k: int) -> Any:
        optimizer = keras.optimizers.AdamW(1e-3)
        optimizer.build(model.trainable_variables)
        empty = [x.numpy() for x in optimizer.variables]

        @tf.function
        def run(tokens: Any) -> None:
            total, count = [tf.zeros_like(x) for x in model.trainable_variables], 0.0
            for x in tf.split(tokens, k):
                real = tf.cast(x[:, 1:] > 0, tf.float32)
                with tf.GradientTape() as tape:
                    each = tf.nn.sparse_softmax_cross_entropy_with_logits(x[:, 1:], model(x[:, :-1]))
                    loss = tf.reduce_sum(each * real)
                grads = tape.gradient(loss, model.trainable_variables)
                total = [a + tf.convert_to_tensor(g) for a, g in zip(total, grads, strict=True)]
                count += tf.reduce_sum(real)
            optimizer.apply([x / count for x in total], model.trainable_variables)

        def step(params: Any, batch: Any) -> Any:
            pairs = zip([*model.trainable_variables, *optimizer.variables], [*params, *empty], strict=True)
            for variable, value in pairs:
                variable.assign(value)
            run(tf.constant(batch["tokens"]))
            return [x.numpy() for x in model.trainable_variables]

        return step

    return make_step, params


def pytorch() -> tuple[Any, Any]:
    """A step that changes its module in place."""
    import torch
    from torch.nn import functional

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS)
            layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, batch_first=True)
            self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

        def forward(self, x: Any) -> Any:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.out(self.layers(self.embed(x), mask=mask.to(self.out.weight.dtype), is_causal=True))

    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.as_tensor(batch["tokens"]).long()
            count = (tokens[:, 1:] > 0).sum()
            for x in tokens.chunk(k):
                logits = model(x[:, :-1]).flatten(0, 1)
                (
                    functional.cross_entropy(logits, x[:, 1:].flatten(), ignore_index=0, reduction="sum") / count
                ).backward()
            optimizer.step()

        return step

    return make_step, Model()


STEPS = {"flax linen": linen, "flax nnx": of_nnx, "equinox": equinox}
IN_PLACE = {"keras": ("tensorflow", of_keras), "pytorch": ("torch", pytorch)}
"""Steps with optimizer state, by the package they need."""
STEPS |= {name: make for name, (package, make) in IN_PLACE.items() if importlib.util.find_spec(package)}


def spent(call: Callable[[], Any]) -> float:
    began = time.process_time()
    jax.block_until_ready(call())
    return time.process_time() - began


def main(names: list[str]) -> None:
    print("step          compilation   check   compilations")
    for name in names or list(STEPS):
        make_step, params = STEPS[name]()
        state = params if name in IN_PLACE else jax.tree.map(np.asarray, (params, TX.init(params)))
        compiling = statistics.median(spent(lambda: make_step(4)(state, BATCH)) for _ in range(3))  # noqa: B023
        began = time.process_time()
        report = check_step(make_step, state, BATCH, returns="params")
        checking = time.process_time() - began
        assert not report.faults, report
        print(f"{name:12}  {compiling:9.2f} s  {checking:4.1f} s  {checking / compiling:12.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
