"""A small token-weighted language model on sentences of 50 to 2,000 tokens, and its trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.verify.steps.dividing import plus, scaled, stacked

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 12, 4, 2001, 8
Tree = Any
P = jax.sharding.PartitionSpec


@cache
def problem(seed: int = 0) -> tuple[Tree, Tree]:
    """Returns the parameters and a batch of sentences of 50 to 2,000 tokens."""
    rng = np.random.default_rng(seed)
    shapes = {"embed": (VOCABULARY, WIDTH), "hidden": (WIDTH, WIDTH), "gate": (WIDTH,), "out": (WIDTH, VOCABULARY)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    lengths = rng.integers(50, 2000, EXAMPLES)
    lengths[1::4] = 2000  # full rows: rolled labels reach into the next row
    tokens = rng.integers(1, VOCABULARY, (EXAMPLES, LENGTH)) * (np.arange(LENGTH) <= lengths[:, None])
    return params, {"tokens": tokens.astype(np.int32), "id": np.arange(EXAMPLES, dtype=np.int32)}


class Model(NamedTuple):
    """The model and its loss.

    Attributes:
      dtype: dtype of the matrix products.
      rolled: whether the labels are made by rolling the flattened microbatch.
      keys: dropout keys. "": no dropout, "id": a key per sentence, "place": one key for every microbatch.
      onehot: whether the embedding lookup is a product with one-hot vectors.
    """

    dtype: Any = jnp.float32
    rolled: bool = False
    keys: str = ""
    onehot: bool = False

    def sums(self, params: Tree, batch: Tree) -> dict[str, tuple[Tree, Any]]:
        """Gradients of the summed cross entropy and of the gate's auxiliary loss, each with its denominator."""
        tokens = batch["tokens"]
        words, labels = tokens[:, :-1], tokens[:, 1:]
        mask = (labels > 0).astype(jnp.float32)
        if self.rolled:
            words, labels = tokens, jnp.roll(tokens.ravel(), -1).reshape(tokens.shape)
            mask = (labels > 0).astype(jnp.float32)
        sizes = mask.sum(1)

        def losses(p: Tree) -> Any:
            p = jax.tree.map(lambda x: x.astype(self.dtype), p)
            x = jax.nn.one_hot(words, VOCABULARY, dtype=self.dtype) @ p["embed"] if self.onehot else p["embed"][words]
            x = jnp.tanh(x @ p["hidden"]) * self.kept(batch["id"])[:, None]
            gate = jax.nn.sigmoid((x * p["gate"]).sum(-1)).astype(jnp.float32)
            logits = ((x * gate[..., None].astype(self.dtype)) @ p["out"]).astype(jnp.float32)
            each = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
            aux = ((gate * mask).sum(1) / (sizes + 1e-6) - 0.5) ** 2
            return (each * mask).sum(), aux.sum()

        made, backwards = jax.vjp(losses, params)
        one, zero = jnp.ones_like(made[0]), jnp.zeros_like(made[0])
        return {
            "ce": (backwards((one, zero))[0], mask.sum()),
            "aux": (backwards((zero, one))[0], jnp.float32(len(tokens))),
        }

    def kept(self, ids: Any) -> Any:
        if not self.keys:
            return jnp.ones((len(ids), WIDTH), self.dtype)
        key, shape = jax.random.key(7), (len(ids), WIDTH)
        if self.keys == "place":
            return 2 * jax.random.bernoulli(key, 0.5, shape).astype(self.dtype)
        each = jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (WIDTH,)))
        return 2 * each(ids).astype(self.dtype)


def total(parts: list[Tree], name: str) -> tuple[Tree, Any]:
    return plus(*(part[name][0] for part in parts)), sum(part[name][1] for part in parts)


def over(pair: tuple[Tree, Any], divisor: Any = None) -> Tree:
    return scaled(pair[0], 1 / ((pair[1] if divisor is None else divisor) + 1e-8))


def both(parts: list[Tree], aux: float) -> Tree:
    """Mean over all tokens, plus `aux` times the mean over all sentences."""
    mean = over(total(parts, "ce"))
    return plus(mean, scaled(over(total(parts, "aux")), aux)) if aux else mean


def at(stacked: Tree, i: int) -> Tree:
    return jax.tree.map(lambda x: x[i], stacked)


def strided(batch: Tree, k: int) -> Tree:
    """Splits the batch into microbatches of every k-th example."""
    return jax.tree.map(lambda x: x.reshape(-1, k, *x.shape[1:]).swapaxes(0, 1), batch)


AUX = 30.0


class Trainer(NamedTuple):
    """A training step of k microbatches on one device, or of one microbatch on each of several devices.

    Attributes:
      model: computes the sums of a microbatch.
      combine: ``(sums of each microbatch, k, aux) -> gradient``.
      divide: splits the batch into k stacked microbatches.
      loop: ``(function, microbatches) -> stacked results``.
      each: whether the optimizer runs at each microbatch.
      decay: relative weight decay applied at each microbatch but the first.
      aux: coefficient of the auxiliary loss.
      exchange: ``(sums of this device, aux) -> gradient`` inside `shard_map`; None on one device.
    """

    model: Model = Model()
    combine: Callable[[list[Tree], int, float], Tree] = lambda parts, k, aux: both(parts, aux)
    divide: Callable[[Tree, int], Tree] = stacked
    loop: Callable[[Callable[[Tree], Tree], Tree], Tree] = jax.lax.map
    each: bool = False
    decay: float = 0.0
    aux: float = 0.0
    exchange: Callable[[Tree, float], Tree] | None = None

    def gradient(self, params: Tree, batch: Tree, k: int) -> Tree:
        stacked = self.loop(lambda part: self.model.sums(params, part), self.divide(batch, k))
        return self.combine([at(stacked, i) for i in range(k)], k, self.aux)

    def exchanged(self, params: Tree, batch: Tree, devices: int) -> Tree:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
        on_each = jax.shard_map(
            lambda p, part: self.exchange(self.model.sums(p, part), self.aux),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )
        return on_each(params, batch)

    def in_turn(self, tx: Any, state: Any, params: Tree, batch: Tree, k: int) -> Tree:
        parts = self.divide(batch, k)
        for i in range(k):
            grads = both([self.model.sums(params, at(parts, i))], self.aux)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    def decayed(self, tx: Any, state: Any, params: Tree, batch: Tree, k: int) -> Tree:
        parts, made = self.divide(batch, k), []
        for i in range(k):
            params = scaled(params, 1 - self.decay) if i else params
            made.append(self.model.sums(params, at(parts, i)))
        updates, _ = tx.update(self.combine(made, k, self.aux), state, params)
        return plus(params, updates, scaled(params, -self.decay))

    def step(self, tx: Any, state: Any, k: int, devices: int = 1) -> Callable[[Tree, Tree], Tree]:
        def run(params: Tree, batch: Tree) -> Tree:
            if self.each:
                return self.in_turn(tx, state, params, batch, k)
            if self.decay:
                return self.decayed(tx, state, params, batch, k)
            grads = self.exchanged(params, batch, devices) if self.exchange else self.gradient(params, batch, k)
            updates, _ = tx.update(grads, state, params)
            return optax.apply_updates(params, updates)

        return jax.jit(run)
