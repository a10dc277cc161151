"""A next-token model in NumPy with a hand-written gradient, cheap enough to run with every defect.

An embedding, a linear layer and a softmax predict the next token. The loss is the mean over the real tokens of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 12, 5, 6, 8
LENGTHS = np.array([6, 6, 5, 6, 3, 2, 3, 2])

Floats = list[Any]


def batch(examples: int = EXAMPLES, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = np.resize(LENGTHS, examples)
    return {
        "tokens": rng.integers(1, VOCABULARY, (examples, LENGTH)).astype(np.int32),
        "mask": (np.arange(LENGTH) < lengths[:, None]).astype(np.float32),
    }


def params(seed: int = 1) -> Floats:
    rng = np.random.default_rng(seed)
    shapes = (VOCABULARY, WIDTH), (WIDTH, VOCABULARY), (VOCABULARY,)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def sums(p: Floats, part: Any) -> tuple[Floats, Any]:
    """The gradient of the summed loss, and the number of tokens."""
    embedding, kernel, bias = p
    tokens, mask = part["tokens"], part["mask"]
    x, weights = embedding[tokens[:, :-1]], mask[:, 1:]
    logits = x @ kernel + bias
    logits = np.exp(logits - logits.max(axis=-1, keepdims=True))
    cotangent = logits / logits.sum(axis=-1, keepdims=True)
    labels = tokens[:, 1:, None]
    np.put_along_axis(cotangent, labels, np.take_along_axis(cotangent, labels, -1) - 1, -1)
    cotangent = cotangent * weights[..., None]
    embedding_grad = np.zeros_like(embedding)
    np.add.at(embedding_grad, tokens[:, :-1], cotangent @ kernel.T)
    flat = cotangent.reshape(-1, VOCABULARY)
    return [embedding_grad, x.reshape(-1, WIDTH).T @ flat, flat.sum(axis=0)], weights.sum()
