"""Narrow exchanges: their error over the number of replicas, and what they do to the loss of a small language model.

    python benchmarks/wires.py [--error] [--loss]

Both run on the CPU, with replicas that are an axis of vmap. Error: of the sum of N normal gradients, its root mean
square over that of the float64 sum. "all-reduce in bfloat16" rounds at each of its N - 1 hops, as a ring does. Loss: a
causal model of one attention layer on text of a Markov chain, data parallel over 8 replicas, Adam, three seeds; the
mean loss of the last 50 steps, over that without a wire.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import gradcombine as gc
from gradcombine import reductions, wires

OVER = gc.jax_axis("data")
WIRES = {
    "bfloat16": wires.cast("bfloat16"),
    "float8_e4m3": wires.cast("float8_e4m3"),
    "blocks(8)": wires.blocks(8),
    "blocks(4)": wires.blocks(4),
}
ELEMENTS = 1 << 16
SYMBOLS, LENGTH, WIDTH, ROWS, STEPS = 32, 16, 32, 8, 200


def hops(gradients: np.ndarray) -> np.ndarray:
    """The sum as a ring of bfloat16 makes it."""
    total = gradients[0].astype(ml_dtypes.bfloat16)
    for x in gradients[1:]:
        total = total + x.astype(ml_dtypes.bfloat16)
    return total.astype(np.float64)


def errors() -> None:
    rng = np.random.default_rng(0)
    print(f"{'replicas':>8}  {'all-reduce in bfloat16':>22}" + "".join(f"{name:>14}" for name in WIRES))
    for n in (2, 4, 8, 16, 32, 64):
        gradients = rng.standard_normal((n, 256, ELEMENTS // 256)).astype(np.float32)
        truth = gradients.astype(np.float64).sum(0)
        columns = [hops(gradients)]
        for wire in WIRES.values():
            reduction = reductions.sum(wire=wire)
            summed = jax.jit(jax.vmap(lambda x, r=reduction: gc.all_reduce(r, x, over=OVER), axis_name="data"))(
                gradients
            )
            columns.append(np.asarray(summed[0], np.float64))
        figures = [np.sqrt(np.mean((x - truth) ** 2) / np.mean(truth**2)) for x in columns]
        print(f"{n:>8}  {figures[0]:>22.1e}" + "".join(f"{x:>14.1e}" for x in figures[1:]))


def text(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Rows of a Markov chain over the symbols, each of which has four successors."""
    after = np.random.default_rng(7).integers(0, SYMBOLS, (SYMBOLS, 4))
    out = rng.integers(0, SYMBOLS, (rows, LENGTH + 1))
    choices = rng.integers(0, 4, (rows, LENGTH + 1))
    for i in range(1, LENGTH + 1):
        out[:, i] = after[out[:, i - 1], choices[:, i]]
    return out


def init(seed: int) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    return {
        "embed": normal(SYMBOLS, WIDTH),
        "place": normal(LENGTH, WIDTH),
        "qkv": normal(WIDTH, 3 * WIDTH),
        "out": normal(WIDTH, WIDTH),
        "up": normal(WIDTH, 4 * WIDTH),
        "up_bias": jnp.zeros(4 * WIDTH),
        "down": normal(4 * WIDTH, WIDTH),
        "norm_scale": jnp.ones(WIDTH),
        "head": normal(WIDTH, SYMBOLS),
    }


def loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens[:, :-1]] + params["place"][None, :, :]
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(WIDTH)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    x = x + jax.nn.softmax(jnp.where(mask[None], scores, -1e9)) @ v @ params["out"]
    hidden = x @ params["up"] + params["up_bias"][None, None, :]
    x = x + jax.nn.gelu(hidden) @ params["down"]
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * params["norm_scale"][None, None, :]
    log_p = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1))


FORMS: dict[str, Any] = {
    "no wire": reductions.mean(),
    "all-reduce in bfloat16": None,
    "bfloat16": reductions.mean(wire=WIRES["bfloat16"]),
    "float8_e4m3": reductions.mean(wire=WIRES["float8_e4m3"]),
    "blocks(8)": reductions.mean(wire=wires.blocks(8)),
    "blocks(4)": reductions.mean(wire=wires.blocks(4)),
    "blocks(4), nothing wide": reductions.mean(wire=wires.blocks(4, wide=False)),
    "blocks(4), fed back": reductions.fed_back(reductions.mean(wire=wires.blocks(4))),
}


def trained(name: str, seed: int, replicas: int = 8) -> float:
    reduction, tx = FORMS[name], optax.adam(3e-3)
    acc = gc.accumulate(reduction or reductions.mean(), every=1)

    def exchanged(grads: Any, window: Any) -> tuple[Any, Any]:
        if reduction is None:  # a ring of 8, in ranks' order
            rows = jax.tree.map(lambda g: jax.lax.all_gather(g.astype(jnp.bfloat16), "data"), grads)

            def ring(g: jax.Array) -> jax.Array:
                total = g[0]
                for one in g[1:]:
                    total = total + one
                return total.astype(jnp.float32) / replicas

            return jax.tree.map(ring, rows), window
        window = gc.merge_replicas(reduction, acc.update(grads, window), OVER)
        return acc.value(window), window

    def step(carry: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, state, window = carry
        value, grads = jax.value_and_grad(loss)(params, tokens)
        grads, window = exchanged(grads, window)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, window), jax.lax.pmean(value, "data")

    def train(tokens: jax.Array) -> jax.Array:
        params = init(seed)
        return jax.lax.scan(step, (params, tx.init(params), acc.init(params)), tokens)[1]

    data = text(np.random.default_rng(seed), replicas * STEPS * ROWS).reshape(replicas, STEPS, ROWS, LENGTH + 1)
    losses = jax.jit(jax.vmap(train, axis_name="data"))(data)
    return float(np.mean(np.asarray(losses[0, -50:], np.float64)))


def curves() -> None:
    seeds = (0, 1, 2)
    base = [trained("no wire", seed) for seed in seeds]
    print(f"{'no wire':<28}{np.mean(base):>9.4f}")
    for name in list(FORMS)[1:]:
        over = [100 * (trained(name, seed) / one - 1) for seed, one in zip(seeds, base, strict=True)]
        print(f"{name:<28}" + "".join(f"{x:>+9.2f} %" for x in over), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--error", action="store_true")
    parser.add_argument("--loss", action="store_true")
    asked = parser.parse_args()
    if asked.error or not asked.loss:
        errors()
    if asked.loss or not asked.error:
        curves()


if __name__ == "__main__":
    main()
