"""Steps that accumulate microbatches, correct and with the usual bugs, for arrays of any framework.

Each is built from ``sums(params, batch)``, which returns the gradients of the summed loss (a list of arrays) and the
number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Sums = Callable[[Any, Any], tuple[list[Any], Any]]


def length(batch: Any) -> int:
    return len(batch["tokens"])


def rows(batch: Any, start: int, stop: int) -> Any:
    return {name: x[start:stop] for name, x in batch.items()}


def pieces(batch: Any, k: int) -> list[Any]:
    n = length(batch)
    size = -(-n // k)
    return [rows(batch, i, min(i + size, n)) for i in range(0, n, size)]


def added(many: list[list[Any]]) -> list[Any]:
    total = many[0]
    for other in many[1:]:
        total = [x + y for x, y in zip(total, other, strict=True)]
    return total


def over(grads: list[Any], divisor: Any) -> list[Any]:
    return [x / as_dtype(divisor, x) for x in grads]


def as_dtype(number: Any, like: Any) -> Any:
    """`number` in the dtype of `like`; Python numbers are left to the promotion rules of TensorFlow and JAX."""
    if isinstance(number, (int, float, np.number)):
        return like.dtype.type(number) if isinstance(like, np.ndarray) else number
    return number.astype(like.dtype) if hasattr(number, "astype") else number


def mean(sums: Sums, p: Any, batch: Any) -> list[Any]:
    return over(*sums(p, batch))


# --- right ----------------------------------------------------------------------------------------------------------


def right(sums: Sums, k: int) -> Any:
    def step(p: Any, batch: Any) -> Any:
        made = [sums(p, part) for part in pieces(batch, k)]
        return over(added([g for g, _ in made]), sum(w for _, w in made))

    return step


def backwards(sums: Sums, k: int) -> Any:
    """Adds the microbatches in reverse order."""

    def step(p: Any, batch: Any) -> Any:
        made = [sums(p, part) for part in reversed(pieces(batch, k))]
        return over(added([g for g, _ in made]), sum(w for _, w in made))

    return step


def in_a_tree(sums: Sums, k: int) -> Any:
    def combine(made: list[Any]) -> Any:
        if len(made) == 1:
            return made[0]
        (a, v), (b, w) = combine(made[: len(made) // 2]), combine(made[len(made) // 2 :])
        return added([a, b]), v + w

    return lambda p, batch: over(*combine([sums(p, part) for part in pieces(batch, k)]))


def weighted_means(sums: Sums, k: int) -> Any:
    def step(p: Any, batch: Any) -> Any:
        made = [sums(p, part) for part in pieces(batch, k)]
        total = sum(w for _, w in made)
        return added([[x * as_dtype(w / total, x) for x in over(g, w)] for g, w in made])

    return step


# --- wrong ----------------------------------------------------------------------------------------------------------


def mean_of_means(sums: Sums, k: int) -> Any:
    return lambda p, batch: over(added([mean(sums, p, part) for part in pieces(batch, k)]), len(pieces(batch, k)))


def sum_of_means(sums: Sums, k: int) -> Any:
    """`k` times the mean; the weights of the examples are right."""
    return lambda p, batch: [x * k for x in right(sums, k)(p, batch)]


def drops_the_rest(sums: Sums, k: int) -> Any:
    def step(p: Any, batch: Any) -> Any:
        size = length(batch) // k
        return right(sums, k)(p, rows(batch, 0, size * k))

    return step


def drops_the_last(sums: Sums, k: int) -> Any:
    """Loop with an off-by-one error: omits the last microbatch but divides by all tokens."""

    def step(p: Any, batch: Any) -> Any:
        made = [sums(p, part) for part in pieces(batch, k)]
        return over(added([g for g, _ in made[: max(1, k - 1)]]), sum(w for _, w in made))

    return step


def only_the_last(sums: Sums, k: int) -> Any:
    """Overwrites the gradient instead of accumulating it."""
    return lambda p, batch: mean(sums, p, pieces(batch, k)[-1])


def doubles(sums: Sums, k: int) -> Any:
    """Microbatches that overlap by one row."""

    def step(p: Any, batch: Any) -> Any:
        n, size = length(batch), length(batch) // k
        made = [sums(p, rows(batch, max(0, i - (k > 1)), i + size)) for i in range(0, n, size)]
        return over(added([g for g, _ in made]), sum(w for _, w in made))

    return step


def clips_each(sums: Sums, k: int, norm: float = 0.05) -> Any:
    def clipped(grads: list[Any]) -> list[Any]:
        squares = sum(float(np.sum(np.square(np.asarray(x)))) for x in grads)
        factor = min(1.0, norm / squares**0.5)
        return [x * as_dtype(factor, x) for x in grads]

    return lambda p, batch: over(added([clipped(mean(sums, p, part)) for part in pieces(batch, k)]), k)


def decays_each(sums: Sums, k: int, rate: float = 1e-3) -> Any:
    """Adds the weight decay at each microbatch."""
    return lambda p, batch: [g + x * as_dtype(rate * k, x) for g, x in zip(right(sums, k)(p, batch), p, strict=True)]


def scheduled_each(sums: Sums, k: int) -> Any:
    """Halves the learning rate at each microbatch instead of once per window."""

    def step(p: Any, batch: Any) -> Any:
        made = [sums(p, part) for part in pieces(batch, k)]
        total = sum(w for _, w in made)
        return over(added([[x * as_dtype(0.5**i, x) for x in g] for i, (g, _) in enumerate(made)]), total)

    return step


def updates_each(sums: Sums, k: int, rate: float = 0.1) -> Any:
    """Updates the parameters at each microbatch; returns the new parameters."""

    def step(p: Any, batch: Any) -> Any:
        for part in pieces(batch, k):
            p = [x - y * as_dtype(rate, y) for x, y in zip(p, mean(sums, p, part), strict=True)]
        return p

    return step


def narrow(sums: Sums, k: int, dtype: Any = np.float16) -> Any:
    def step(p: Any, batch: Any) -> Any:
        made = [sums(p, part) for part in pieces(batch, k)]
        total = added([[x.astype(dtype) for x in g] for g, _ in made])
        return over([x.astype(y.dtype) for x, y in zip(total, p, strict=True)], sum(w for _, w in made))

    return step


def overwrites_rows(sums: Sums, k: int) -> Any:
    """Sets the rows of the embedding gradient instead of adding to them."""

    def step(p: Any, batch: Any) -> Any:
        made = [sums(p, part) for part in pieces(batch, k)]
        total = added([g for g, _ in made])
        rows_of = np.asarray(made[0][0][0])
        for g, _ in made[1:]:
            new = np.asarray(g[0])
            rows_of = np.where(np.any(new != 0, axis=1, keepdims=True), new, rows_of)
        return over([rows_of.astype(total[0].dtype), *total[1:]], sum(w for _, w in made))

    return step


def pads_with_zeros(sums: Sums, k: int) -> Any:
    """Pads the last microbatch with zeros and counts the padding as examples."""

    def step(p: Any, batch: Any) -> Any:
        more = -length(batch) % k
        filled = {name: np.concatenate([x, np.zeros((more, *x.shape[1:]), x.dtype)]) for name, x in batch.items()}
        made = [sums(p, part) for part in pieces(filled, k)]
        factor = length(batch) / (length(batch) + more)
        return [x * as_dtype(factor, x) for x in over(added([g for g, _ in made]), sum(w for _, w in made))]

    return step


def trains_on_padding(sums: Sums, k: int) -> Any:
    """Ignores the padding mask, except with a single batch."""

    def step(p: Any, batch: Any) -> Any:
        used = batch if k == 1 else batch | {"mask": np.ones_like(batch["mask"])}
        return right(sums, k)(p, used)

    return step


class Stateful:
    """Never resets its accumulator between calls."""

    def __init__(self, sums: Sums, k: int) -> None:
        self._sums, self._k, self._total = sums, k, None

    def __call__(self, p: Any, batch: Any) -> Any:
        made = right(self._sums, self._k)(p, batch)
        self._total = made if self._total is None else added([self._total, made])
        return self._total
