"""Trains a next-token model on sentences of different lengths, with the mean over tokens and with the mean of means."""

from __future__ import annotations

import re
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcombine.integrations.jax import LossOutput, train_step, value_and_grad

WIDTH, LONGEST, WORDS = 32, 64, 500
PAD, RARE = 0, 1


def sentences() -> list[list[str]]:
    """The sentences of Python's help texts, of 2 to 64 words."""
    text = " ".join(topics[name] for name in sorted(topics))
    split = (re.findall(r"[a-z]+", part.lower()) for part in re.split(r"[.:!?]\s|\n\n", text))
    return [words for words in split if 1 < len(words) <= LONGEST]


def encode(texts: list[list[str]]) -> np.ndarray:
    """Word ids, padded at the end, of shape (sentences, LONGEST)."""
    words, counts = np.unique([word for text in texts for word in text], return_counts=True)
    frequent = words[np.argsort(-counts, kind="stable")][: WORDS - 2]
    ids = {word: i + 2 for i, word in enumerate(frequent.tolist())}
    tokens = np.full((len(texts), LONGEST), PAD, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = [ids.get(word, RARE) for word in text]
    return tokens


def init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    embedding = jax.random.normal(first, (WORDS, WIDTH)) / WIDTH**0.5
    return {"embedding": embedding, "output": jax.random.normal(second, (WIDTH, WORDS)) / WIDTH**0.5}


def summed(params: dict[str, jax.Array], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses over all next tokens except padding, and the number of these tokens."""
    logits = params["embedding"][tokens[:, :-1]] @ params["output"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    mask = tokens[:, 1:] != PAD
    return jnp.sum(jnp.where(mask, losses, 0)), jnp.sum(mask)


def main(batch: int = 64) -> None:
    texts = sentences()
    lengths = [len(text) for text in texts]
    print(f"{len(texts)} sentences of {min(lengths)} to {max(lengths)} words")
    # Within each batch the shortest come first, as with a loader that sorts by length.
    tokens = encode(texts)[np.random.default_rng(0).permutation(len(texts))]
    batches = tokens[: len(texts) // batch * batch].reshape(-1, batch, LONGEST)
    batches = np.stack([rows[np.argsort((rows != PAD).sum(axis=1), kind="stable")] for rows in batches])
    per_token = jax.jit(lambda params, rows: jnp.divide(*map(jnp.float32, summed(params, rows))))
    full_batch = jax.jit(jax.grad(per_token))

    # quickstart: begin
    def mean_loss(params, tokens):
        total, count = summed(params, tokens)  # over the unpadded tokens of a microbatch
        return LossOutput(total / count, weight=count)

    def unweighted_loss(params, tokens):
        return mean_loss(params, tokens).value  # all microbatches get the same weight, regardless of their tokens

    for name, loss in {"mean over tokens": mean_loss, "mean of means": unweighted_loss}.items():
        # The distance from the full-batch gradient:
        params = init(jax.random.key(0))
        _, grads = jax.jit(value_and_grad(loss, microbatches=8))(params, batches[0])
        off = distance(grads, full_batch(params, batches[0]))

        step = train_step(loss, optax.adam(0.01), microbatches=8)  # a scan over 8 microbatches, then Adam
        state = step.init(params)
        for rows in batches:
            params, state, _ = step(params, state, rows)  # params and state are donated
        print(f"{name:16}  gradient off by {off:.1e}, loss per token {per_token(params, tokens[:1024]):.4f}")
    # quickstart: end


def distance(tree: dict[str, jax.Array], other: dict[str, jax.Array]) -> float:
    """The norm of the difference, relative to the norm of the second tree."""
    difference = optax.tree.norm(optax.tree.sub(tree, other))
    return float(difference / optax.tree.norm(other))


if __name__ == "__main__":
    main()
