"""Narrow exchanges: their error by number of replicas, and their effect on the loss of a small language model.

    python benchmarks/wires.py [--error] [--loss] [--store]

Both run on virtual CPU devices, one replica each. Error: the root mean square error of the sum of N normal gradients,
relative to that of the float64 sum, next to "bfloat16 at each hop", an all-reduce that rounds N - 1 times like a ring
on GPUs, and "cast, psum", XLA's psum of bfloat16 on this machine. Loss: a causal model with one attention layer on text
of a Markov chain, Adam, 8 replicas, three seeds; the mean over the tokens of held-out text after the last step, and its
ratio to the loss without a wire. Local steps of Adam with an outer optimizer (SGD with Nesterov momentum) use the same
tokens; drjax, if installed, runs the same algorithm in MapReduce form. `--store` writes benchmarks/wires.json, from
which `python docs/draw_wires.py` draws the picture and writes the tables of docs/performance.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=64".strip()

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions, wires
from gradcombine.integrations.jax import outer

STORED = Path(__file__).parent / "wires.json"
OVER = gc.jax_axis("data")
WIRES = {
    'cast("bfloat16")': wires.cast("bfloat16"),
    'cast("float8_e4m3")': wires.cast("float8_e4m3"),
    "blocks(8)": wires.blocks(8),
    "blocks(4)": wires.blocks(4),
}
ELEMENTS = 1 << 16
REPLICAS, SEEDS, STEPS, EVERY = 8, (0, 1, 2), 800, 10
SYMBOLS, LENGTH, WIDTH, ROWS, HELD_OUT = 32, 16, 32, 8, 1024


def on_replicas(function: Callable[..., Any], n: int) -> Callable[..., Any]:
    """Maps a function over n devices. Arguments and results have a first axis of replicas."""

    def one(*arguments: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], arguments)))

    mesh = jax.make_mesh((n,), ("data",), (AxisType.Auto,), devices=jax.devices()[:n])
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return jax.jit(mapped)


def hops(gradients: np.ndarray) -> np.ndarray:
    """The sum as computed by a ring in bfloat16."""
    total = gradients[0].astype(ml_dtypes.bfloat16)
    for x in gradients[1:]:
        total = total + x.astype(ml_dtypes.bfloat16)
    return total.astype(np.float32)


def errors() -> dict[str, dict[int, float]]:
    """The relative error of each exchange by number of replicas."""
    rng, found = np.random.default_rng(0), dict[str, dict[int, float]]()
    for n in (2, 4, 8, 16, 32, 64):
        gradients = rng.standard_normal((n, 256, ELEMENTS // 256)).astype(np.float32)
        truth = gradients.astype(np.float64).sum(0)
        sums = {
            "bfloat16 at each hop": hops(gradients),
            "cast, psum": on_replicas(lambda x: jax.lax.psum(x.astype(jnp.bfloat16), "data"), n)(gradients)[0],
        }
        for name, wire in WIRES.items():
            reduction = reductions.sum(wire=wire)
            sums[name] = on_replicas(lambda x, r=reduction: gc.all_reduce(r, x, over=OVER), n)(gradients)[0]
        for name, x in sums.items():
            error = np.sqrt(np.mean((np.asarray(x, np.float64) - truth) ** 2) / np.mean(truth**2))
            found.setdefault(name, {})[n] = float(error)
    return found


def text(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Rows of a Markov chain over symbols, in which each pair has four possible successors."""
    after = np.random.default_rng(7).integers(0, SYMBOLS, (SYMBOLS, SYMBOLS, 4))
    out = rng.integers(0, SYMBOLS, (rows, LENGTH + 1))
    choices = rng.integers(0, 4, (rows, LENGTH + 1))
    for i in range(2, LENGTH + 1):
        out[:, i] = after[out[:, i - 2], out[:, i - 1], choices[:, i]]
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
    """The mean loss per token, in nats."""
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


ADAM, NESTEROV = optax.adam(3e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)


def adam_step(params: Any, state: Any, tokens: jax.Array, exchange: Callable[[Any], Any] = lambda grads: grads) -> Any:
    updates, state = ADAM.update(exchange(jax.grad(loss)(params, tokens)), state, params)
    return optax.apply_updates(params, updates), state


Train = Callable[[Any, jax.Array], Any]
"""Maps parameters and tokens of shape (steps, rows, length) to trained parameters, on one replica."""


def exchanging(exchange: Callable[[Any], Any]) -> Train:
    """Trains with gradients that are exchanged in each step."""

    def train(params: Any, tokens: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, x: (adam_step(*carry, x, exchange), ()), (params, ADAM.init(params)), tokens)[
            0
        ][0]

    return train


def through(wire: wires.Wire | None) -> Train:
    return exchanging(lambda grads: gc.all_reduce(reductions.mean(wire=wire), grads, OVER))


def fed_back(wire: wires.Wire) -> Train:
    reduction = reductions.fed_back(reductions.mean(wire=wire))
    acc = gc.accumulate(reduction, every=1)

    def train(params: Any, tokens: jax.Array) -> Any:
        def step(carry: Any, tokens: jax.Array) -> tuple[Any, tuple[()]]:
            params, state, window = carry
            window = gc.merge_replicas(reduction, acc.update(jax.grad(loss)(params, tokens), window), OVER)
            updates, state = ADAM.update(acc.value(window), state, params)
            return (optax.apply_updates(params, updates), state, window), ()

        return jax.lax.scan(step, (params, ADAM.init(params), acc.init(params)), tokens)[0][0]

    return train


def each_hop(grads: Any) -> Any:
    """The mean as computed by a ring in bfloat16, in the order of ranks."""

    def ring(g: jax.Array) -> jax.Array:
        rows = jax.lax.all_gather(g.astype(jnp.bfloat16), "data")
        total = rows[0]
        for one in rows[1:]:
            # Without the cast, XLA would keep float32 between the additions.
            total = jax.lax.reduce_precision(total + one, 8, 7)
        return total.astype(jnp.float32) / REPLICAS

    return jax.tree.map(ring, grads)


def cast_psum(grads: Any) -> Any:
    return jax.tree.map(lambda g: jax.lax.pmean(g.astype(jnp.bfloat16), "data").astype(jnp.float32), grads)


def islands(wire: wires.Wire | None = None, fragments: int = 1) -> Train:
    """Trains with local steps and an outer optimizer."""
    apart = outer(NESTEROV, EVERY, OVER, reduction=reductions.mean(wire=wire), fragments=fragments)

    def train(params: Any, tokens: jax.Array) -> Any:
        def step(carry: Any, tokens: jax.Array) -> tuple[Any, tuple[()]]:
            params, inner, state = carry
            params, inner = adam_step(params, inner, tokens)
            params, state = apart.update(params, state)
            return (params, inner, state), ()

        return jax.lax.scan(step, (params, ADAM.init(params), apart.init(params)), tokens)[0][2].params

    return train


def by_drjax(params: Any, tokens: jax.Array) -> Any:
    """The algorithm of `islands` in MapReduce form, for tokens of all islands, (islands, steps, ...), on one device."""
    import drjax

    logging.getLogger("absl").setLevel(logging.ERROR)  # warnings about missing meshes

    @drjax.program(placements={"islands": REPLICAS})
    def window(params: Any, inner: Any, momentum: Any, tokens: Any) -> Any:
        def local(params: Any, inner: Any, tokens: Any) -> Any:
            (moved, inner), _ = jax.lax.scan(lambda carry, x: (adam_step(*carry, x), ()), (params, inner), tokens)
            return jax.tree.map(jnp.subtract, params, moved), inner

        moved, inner = drjax.map_fn(local, (drjax.broadcast(params), inner, tokens))
        updates, momentum = NESTEROV.update(drjax.reduce_mean(moved), momentum, params)
        return optax.apply_updates(params, updates), inner, momentum

    windows = jnp.moveaxis(tokens.reshape(REPLICAS, STEPS // EVERY, EVERY, *tokens.shape[2:]), 1, 0)
    inner = jax.vmap(lambda _: ADAM.init(params))(jnp.arange(REPLICAS))
    carry = params, inner, NESTEROV.init(params)
    return jax.lax.scan(lambda carry, x: (window(*carry, x), ()), carry, windows)[0][0]


FORMS: dict[str, Train] = {
    "no wire": through(None),
    "bfloat16 at each hop": exchanging(each_hop),
    "cast, psum": exchanging(cast_psum),
    **{name: through(wire) for name, wire in WIRES.items()},
    'cast("float8_e4m3", wide=False)': through(wires.cast("float8_e4m3", wide=False)),
    "blocks(4, wide=False)": through(wires.blocks(4, wide=False)),
    "fed_back, blocks(4)": fed_back(wires.blocks(4)),
    "fed_back, blocks(4, wide=False)": fed_back(wires.blocks(4, wide=False)),
    f"outer, every={EVERY}": islands(),
    f"outer, every={EVERY}, 5 fragments": islands(fragments=5),
    f"outer, every={EVERY}, blocks(4)": islands(wires.blocks(4)),
}
DRJAX = f"drjax, every={EVERY}"


def losses() -> dict[str, list[float]]:
    """The loss on held-out text after training, by method and seed."""
    data = {
        seed: text(np.random.default_rng(seed), REPLICAS * STEPS * ROWS).reshape(REPLICAS, STEPS, ROWS, LENGTH + 1)
        for seed in SEEDS
    }
    held_out = text(np.random.default_rng(99), HELD_OUT)
    programs = {name: on_replicas(train, REPLICAS) for name, train in FORMS.items()}
    if importlib.util.find_spec("drjax"):
        programs[DRJAX] = jax.jit(lambda params, x: jax.tree.map(lambda x: x[None], by_drjax(params, x)))
    else:
        print("drjax is not installed: pip install drjax")
    found = dict[str, list[float]]()
    print(f"{'nats a token':<34}" + "".join(f"{f'seed {seed}':>12}" for seed in SEEDS))
    for name, program in programs.items():
        before = time.perf_counter()
        for seed in SEEDS:
            params = init(seed)
            if name != DRJAX:
                params = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), params)
            trained = jax.tree.map(lambda x: np.asarray(x[0]), program(params, data[seed]))
            found.setdefault(name, []).append(float(jax.jit(loss)(trained, held_out)))
        over = [100 * (x / base - 1) for x, base in zip(found[name], found["no wire"], strict=True)]
        shown = (
            "".join(f"{x:>12.4f}" for x in found[name])
            if name == "no wire"
            else "".join(f"{x:>+10.2f} %" for x in over)
        )
        print(f"{name:<34}{shown}   {time.perf_counter() - before:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--error", action="store_true")
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--store", action="store_true")
    asked = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    if asked.error or not asked.loss:
        stored["error"] = found = errors()
        print("replicas" + "".join(f"{name:>22}" for name in found))
        for n in next(iter(found.values())):
            print(f"{n:>8}" + "".join(f"{column[n]:>22.1e}" for column in found.values()), flush=True)
    if asked.loss or not asked.error:
        stored["loss"] = losses()
    if asked.store:
        STORED.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
