"""The problem of every harness: mean cross entropy of a table of logits over the real words of a batch.

Its gradient has a closed form in float64 here, without the packages under test.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

WORDS, ROWS, LENGTH = map(int, os.environ.get("FIELD_SIZES", "12,8,10").split(","))  # others for audits
_RNG = np.random.default_rng(0)
TABLE = _RNG.normal(size=(WORDS, WORDS)).astype(np.float32)
LENGTHS = np.resize([9, 3, 10, 5, 2, 8, 6, 4], ROWS)
TOKENS = _RNG.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32)
MASK = (np.arange(LENGTH) < LENGTHS[:, None]).astype(np.float32)
BATCH = {"tokens": TOKENS, "mask": MASK}


def truth() -> np.ndarray:
    """The gradient with respect to the table, in closed form."""
    x, y, real = TOKENS[:, :-1].ravel(), TOKENS[:, 1:].ravel(), MASK[:, 1:].ravel().astype(np.float64)
    logits = TABLE.astype(np.float64)[x]
    likely = np.exp(logits - logits.max(-1, keepdims=True))
    likely /= likely.sum(-1, keepdims=True)
    likely[np.arange(len(y)), y] -= 1
    gradient = np.zeros((WORDS, WORDS))
    np.add.at(gradient, x, likely * (real / real.sum())[:, None])
    return gradient


def squares() -> np.ndarray:
    """The gradient of the mean square of the logits of all words but the last of each row."""
    counts = np.bincount(TOKENS[:, :-1].ravel(), minlength=WORDS)[:, None]
    return 2 * TABLE.astype(np.float64) * counts / (ROWS * (LENGTH - 1) * WORDS)


def loss(table: Any, tokens: Any, mask: Any) -> tuple[Any, Any]:
    """The sum over real words in JAX, and their number."""
    import jax
    import jax.numpy as jnp

    likely = jax.nn.log_softmax(table[tokens[:, :-1]])
    found = jnp.take_along_axis(likely, tokens[:, 1:, None], axis=-1)[..., 0]
    return -(found * mask[:, 1:]).sum(), mask[:, 1:].sum()


def mean(table: Any, tokens: Any, mask: Any) -> Any:
    total, count = loss(table, tokens, mask)
    return total / count


def terms(table: Any, batch: Any) -> Any:
    """The gradients of the sum over words and of each row's mean square, with their weights, in JAX."""
    import jax

    words = jax.grad(lambda t: loss(t, **batch)[0])(table)
    balance = jax.grad(lambda t: (t[batch["tokens"][:, :-1]] ** 2).mean((1, 2)).sum())(table)
    return {"words": (words, batch["mask"][:, 1:].sum()), "balance": (balance, len(batch["tokens"]))}


def part(batch: Any, k: int, i: int) -> Any:
    return {name: x[i * ROWS // k : (i + 1) * ROWS // k] for name, x in batch.items()}
