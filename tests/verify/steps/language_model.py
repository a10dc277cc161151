"""A small language model weighted by its tokens, 50 to 2,000 a sequence, its trainer, and what is planted in it."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 12, 4, 2001, 8
Tree = Any


@cache
def problem(seed: int = 0) -> tuple[Tree, Tree]:
    """Parameters, and sentences of 50 to 2,000 tokens."""
    rng = np.random.default_rng(seed)
    shapes = {"embed": (VOCABULARY, WIDTH), "hidden": (WIDTH, WIDTH), "gate": (WIDTH,), "out": (WIDTH, VOCABULARY)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    lengths = rng.integers(50, 2001, EXAMPLES)
    tokens = rng.integers(1, VOCABULARY, (EXAMPLES, LENGTH)) * (np.arange(LENGTH) <= lengths[:, None])
    return params, {"tokens": tokens.astype(np.int32)}


def logits_of(p: Tree, tokens: Any) -> tuple[Any, Any]:
    x = jnp.tanh(p["embed"][tokens] @ p["hidden"])
    gate = jax.nn.sigmoid((x * p["gate"]).sum(-1))
    return (x * gate[..., None]) @ p["out"], gate


def sums(params: Tree, batch: Tree) -> Tree:
    """The cross entropy, summed, the auxiliary loss of the gate, summed over the sentences, and their counts."""
    tokens = batch["tokens"]
    logits, gate = logits_of(params, tokens[:, :-1])
    labels = tokens[:, 1:]
    mask = (labels > 0).astype(logits.dtype)
    of_next = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    sizes = mask.sum(1)
    aux = ((gate * mask).sum(1) / (sizes + 1e-6) - 0.5) ** 2
    return {"ce": (-(of_next * mask).sum(), mask.sum()), "aux": (aux.sum(), jnp.asarray(len(tokens), mask.dtype))}


def gradients(params: Tree, batch: Tree) -> dict[str, tuple[Tree, Any]]:
    """The gradient of each term's sum, and the weight that it is over."""

    def of(p: Tree, name: str) -> Any:
        return sums(p, batch)[name]

    return {name: jax.grad(of, has_aux=True)(params, name) for name in ("ce", "aux")}


def scaled(grads: Tree, factor: Any) -> Tree:
    return jax.tree.map(lambda x: x * factor, grads)


def plus(*trees: Tree) -> Tree:
    return jax.tree.map(lambda *x: sum(x[1:], x[0]), *trees)


def rows(batch: Tree, start: int, stop: int) -> Tree:
    return jax.tree.map(lambda x: x[start:stop], batch)


def microbatches(batch: Tree, k: int) -> list[Tree]:
    size = EXAMPLES // k if len(batch["tokens"]) == EXAMPLES else -(-len(batch["tokens"]) // k)
    return [rows(batch, i, i + size) for i in range(0, len(batch["tokens"]), size)]


def total(parts: list[Tree], name: str) -> tuple[Tree, Any]:
    return plus(*(part[name][0] for part in parts)), sum(part[name][1] for part in parts)


def over(pair: tuple[Tree, Any], divisor: Any = None) -> Tree:
    return scaled(pair[0], 1 / ((pair[1] if divisor is None else divisor) + 1e-8))


def both(parts: list[Tree], aux: float = 0.1) -> Tree:
    return plus(over(total(parts, "ce")), scaled(over(total(parts, "aux")), aux))
