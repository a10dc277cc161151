"""Steps that accumulate microbatches, correct and with the usual bugs, for arrays of any framework.

Each is built from ``sums(params, batch)``, which returns the gradients of the summed loss (a list of arrays) and the
number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np

Sums = Callable[[Any, Any], tuple[list[Any], Any]]


def length(batch: Any) -> int:
    return len(next(iter(batch.values())))


def rows(batch: Any, start: int, stop: int) -> Any:
    return {name: x[start:stop] for name, x in batch.items()}


def pieces(batch: Any, k: int) -> list[Any]:
    """Divides a batch into k parts or fewer, of which the last may be smaller."""
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


def of_sums(step: Any) -> Any:
    """A factory ``make(sums, k, **settings)`` of steps from ``step(sums, params, batch, k, **settings)``."""

    @wraps(step)
    def make(sums: Sums, k: int, **settings: Any) -> Any:
        return partial(step, sums, k=k, **settings)

    return make


def combining(combine: Callable[[list[Any]], list[Any]]) -> Any:
    """A factory of steps that combine the (gradients, tokens) of the microbatches."""
    return lambda sums, k: lambda p, batch: combine([sums(p, part) for part in pieces(batch, k)])


# --- right ----------------------------------------------------------------------------------------------------------


def total(made: list[Any]) -> list[Any]:
    return over(added([g for g, _ in made]), sum(w for _, w in made))


def in_pairs(made: list[Any]) -> Any:
    if len(made) == 1:
        return made[0]
    (a, v), (b, w) = in_pairs(made[: len(made) // 2]), in_pairs(made[len(made) // 2 :])
    return added([a, b]), v + w


def weighted(made: list[Any]) -> list[Any]:
    tokens = sum(w for _, w in made)
    return added([[x * as_dtype(w / tokens, x) for x in over(g, w)] for g, w in made])


right = combining(total)
backwards = combining(lambda made: total(made[::-1]))
in_a_tree = combining(lambda made: over(*in_pairs(made)))
weighted_means = combining(weighted)


# --- wrong ----------------------------------------------------------------------------------------------------------


mean_of_means = combining(lambda made: over(added([over(*x) for x in made]), len(made)))


def sum_of_means(sums: Sums, k: int) -> Any:
    """`k` times the mean; the weights of the examples are right."""
    return lambda p, batch: [x * k for x in right(sums, k)(p, batch)]


def drops_the_rest(sums: Sums, k: int) -> Any:
    return lambda p, batch: right(sums, k)(p, rows(batch, 0, length(batch) // k * k))


drops_the_last = combining(
    lambda made: over(added([g for g, _ in made[: max(1, len(made) - 1)]]), sum(w for _, w in made))
)
"""Loop with an off-by-one error: omits the last microbatch but divides by all tokens."""


only_the_last = combining(lambda made: over(*made[-1]))
"""Overwrites the gradient instead of accumulating it."""


@of_sums
def doubles(sums: Sums, p: Any, batch: Any, k: int) -> Any:
    """Microbatches that overlap by one row."""
    n, size = length(batch), length(batch) // k
    return total([sums(p, rows(batch, max(0, i - (k > 1)), i + size)) for i in range(0, n, size)])


def clips_each(sums: Sums, k: int, norm: float = 0.05) -> Any:
    def clipped(grads: list[Any]) -> list[Any]:
        squares = sum(float(np.sum(np.square(np.asarray(x)))) for x in grads)
        factor = min(1.0, norm / squares**0.5)
        return [x * as_dtype(factor, x) for x in grads]

    return lambda p, batch: over(added([clipped(mean(sums, p, part)) for part in pieces(batch, k)]), k)


@of_sums
def decays_each(
    sums: Sums, p: Any, batch: Any, k: int, rate: float = 1e-3, of: Callable[[Any], Any] = lambda p: p
) -> Any:
    """Adds ``rate * of(params)`` to the gradient at each microbatch but the first."""
    grads = right(sums, k)(p, batch)
    return [g + of(x).astype(g.dtype) * as_dtype(rate * (k - 1), g) for g, x in zip(grads, p, strict=True)]


@of_sums
def penalizes_each(sums: Sums, p: Any, batch: Any, k: int, rate: float = 0.1) -> Any:
    """Adds the gradient of a penalty to the sum of each microbatch, before the division by all tokens."""
    made = [sums(p, part) for part in pieces(batch, k)]
    penalty = [x * as_dtype(rate, x) for x in p]
    return total([(added([g, penalty]), w) for g, w in made])


def scheduled_each(sums: Sums, k: int, factor: float = 0.5) -> Any:
    """Multiplies the learning rate by a factor at each microbatch instead of once per window."""

    def combine(made: list[Any]) -> list[Any]:
        scaled = [[x * as_dtype(factor**i, x) for x in g] for i, (g, _) in enumerate(made)]
        return over(added(scaled), sum(w for _, w in made))

    return combining(combine)(sums, k)


def averages_each(sums: Sums, k: int, decay: float = 0.5) -> Any:
    """Takes moving averages of the gradients and of the tokens, which start with those of the first microbatch."""

    def combine(made: list[Any]) -> list[Any]:
        factors = [decay ** (len(made) - max(i, 1)) * (1 if i == 0 else (1 - decay) / decay) for i in range(len(made))]
        scaled = [[x * as_dtype(a, x) for x in g] for a, (g, _) in zip(factors, made, strict=True)]
        return over(added(scaled), sum(a * w for a, (_, w) in zip(factors, made, strict=True)))

    return combining(combine)(sums, k)


@of_sums
def updates_each(sums: Sums, p: Any, batch: Any, k: int, rate: float = 0.1) -> Any:
    """Updates the parameters at each microbatch; returns the new parameters."""
    for part in pieces(batch, k):
        p = [x - y * as_dtype(rate, y) for x, y in zip(p, mean(sums, p, part), strict=True)]
    return p


def in_order(sums: list[Any], dtype: Any) -> list[Any]:
    return added([[x.astype(dtype) for x in g] for g in sums])


def narrow(sums: Sums, k: int, dtype: Any = np.float16, add: Callable[[Any, Any], Any] = in_order) -> Any:
    """Adds the microbatches in a narrow dtype."""

    def combine(made: list[Any]) -> list[Any]:
        summed = add([g for g, _ in made], dtype)
        return over([x.astype(np.float32) for x in summed], sum(w for _, w in made))

    return combining(combine)(sums, k) if k > 1 else right(sums, 1)


def overwrites_rows(sums: Sums, k: int) -> Any:
    """Sets the rows of the embedding gradient instead of adding to them."""

    def combine(made: list[Any]) -> list[Any]:
        summed, rows_of = added([g for g, _ in made]), np.asarray(made[0][0][0])
        for g, _ in made[1:]:
            new = np.asarray(g[0])
            rows_of = np.where(np.any(new != 0, axis=1, keepdims=True), new, rows_of)
        return over([rows_of.astype(summed[0].dtype), *summed[1:]], sum(w for _, w in made))

    return combining(combine)(sums, k)


@of_sums
def pads_with_zeros(sums: Sums, p: Any, batch: Any, k: int) -> Any:
    """Pads the last microbatch with zeros and counts the padding as examples."""
    more = -length(batch) % k
    filled = {name: np.concatenate([x, np.zeros((more, *x.shape[1:]), x.dtype)]) for name, x in batch.items()}
    factor = length(batch) / (length(batch) + more)
    return [x * as_dtype(factor, x) for x in right(sums, k)(p, filled)]


def trains_on_padding(sums: Sums, k: int) -> Any:
    """Ignores the padding mask, except with a single batch."""
    return lambda p, batch: right(sums, k)(p, batch if k == 1 else batch | {"mask": np.ones_like(batch["mask"])})


class Stateful:
    """Never resets its accumulator between calls."""

    def __init__(self, sums: Sums, k: int) -> None:
        self._sums, self._k, self._total = sums, k, None

    def __call__(self, p: Any, batch: Any) -> Any:
        made = right(self._sums, self._k)(p, batch)
        self._total = made if self._total is None else added([self._total, made])
        return self._total
