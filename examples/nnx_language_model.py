"""A flax nnx language model, from text to a half-full window that is saved and resumed elsewhere.

Sentences of 2 to 32 words are padded, so microbatches have different numbers of tokens. One batch, four microbatches in
a scan, and four requests between which the window is saved and loaded train the same model up to rounding.

    python examples/nnx_language_model.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from gradcombine import losses
from gradcombine.integrations.jax import LossOutput, request_step, value_and_grad

VOCABULARY, LENGTH, WIDTH = 64, 32, 32
OPTIMIZER = optax.sgd(0.5, momentum=0.9)


class LanguageModel(nnx.Module):
    """One block of causal attention."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.position = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.norm, self.out = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, words: Any) -> Any:
        x = self.embed(words) + self.position(jnp.arange(words.shape[1]))
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(words))
        return self.out(x)


# quickstart: begin
def loss(model: LanguageModel, words: Any, mask: Any) -> LossOutput:
    logits = model(words[:, :-1])
    values = optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:])
    term = losses.token_mean(values, mask[:, 1:])
    return LossOutput(term.numerator / jnp.maximum(term.denominator, 1), weight=term.denominator)


@nnx.jit
def train(model: LanguageModel, optimizer: nnx.Optimizer, words: Any, mask: Any) -> Any:
    output, grads = value_and_grad(loss, microbatches=4)(model, words, mask)
    optimizer.update(model, grads)
    return output.value


# quickstart: end


def batches(number: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sentences, shortest first, in which a word is mostly its predecessor plus 3; and the mask of their words."""
    rng, data = np.random.default_rng(0), []
    for _ in range(number):
        steps = np.where(rng.random((16, LENGTH)) < 0.9, 3, rng.integers(0, VOCABULARY, (16, LENGTH)))
        words = np.cumsum(steps, axis=1) % VOCABULARY
        lengths = np.sort(rng.integers(2, LENGTH + 1, 16))
        data.append((words.astype(np.int32), np.arange(LENGTH) < lengths[:, None]))
    return data


def mean_of_means(model: LanguageModel, optimizer: nnx.Optimizer, words: Any, mask: Any) -> Any:
    value, grads = value_and_grad(lambda *args: loss(*args).value, 4)(model, words, mask)
    optimizer.update(model, grads)
    return value


def one_batch(model: LanguageModel, optimizer: nnx.Optimizer, words: Any, mask: Any) -> Any:
    value, grads = nnx.value_and_grad(lambda *args: loss(*args).value)(model, words, mask)
    optimizer.update(model, grads)
    return value


def trained(step: Callable[..., Any], data: list[tuple[np.ndarray, np.ndarray]]) -> tuple[LanguageModel, list[float]]:
    model = LanguageModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    return model, [float(step(model, optimizer, words, mask)) for words, mask in data]


def over_requests(data: list[tuple[np.ndarray, np.ndarray]], folder: Path) -> LanguageModel:
    """Trains by four requests per window; the last window is saved after two of them and loaded by another engine."""
    engine = request_step(loss, OPTIMIZER, microbatches=4)
    state = engine.init({"model": LanguageModel(nnx.Rngs(0))})
    for i, (words, mask) in enumerate(data):
        for n, rows in enumerate(np.split(np.arange(16), 4)):
            if (i, n) == (len(data) - 1, 2):
                engine.save(folder / "window.safetensors", state, "model")
                engine = request_step(loss, OPTIMIZER, microbatches=4)
                state = engine.load(folder / "window.safetensors", engine.discard(state, "model"), "model")
                print(f"resumed: the window holds the microbatches {sorted(state['model'].held)}")
            state = engine.forward_backward(state, words[rows], mask[rows], slot="model", number=n)
        state, _ = engine.optim_step(state, "model")
    return state["model"].params


def distance(a: LanguageModel, b: LanguageModel) -> float:
    pairs = zip(*(jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (a, b)), strict=True)
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in pairs)


def main() -> None:
    data = batches(40)
    reference, values = trained(nnx.jit(one_batch), data)
    models = {
        "four microbatches in a scan": trained(train, data)[0],
        "mean of means": trained(nnx.jit(mean_of_means), data)[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        models["four requests"] = over_requests(data, Path(folder))
    print(f"loss {values[0]:.2f} -> {values[-1]:.2f} in {len(data)} updates")
    for name, model in models.items():
        print(f"{name:<28} off by {distance(model, reference):.0e}")


if __name__ == "__main__":
    main()
