"""Defects from public issues as small JAX steps: each is named, and the corrected step is not accused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcombine.verify import Cause, StepReport, check_step
from tests.verify.steps import defects
from tests.verify.steps.dividing import stacked

pytestmark = pytest.mark.full

WORDS, WIDTH, EXPERTS, LENGTH, EXAMPLES = 20, 6, 3, 6, 8
RNG = np.random.default_rng(0)
PARAMS = {
    "embed": RNG.normal(size=(WORDS, WIDTH)).astype(np.float32),
    "heads": RNG.normal(size=(2, WIDTH, WORDS)).astype(np.float32),
    "router": RNG.normal(size=(WIDTH, EXPERTS)).astype(np.float32),
}
BATCH = {
    "tokens": RNG.integers(0, WORDS, (EXAMPLES, LENGTH)).astype(np.int32),
    "mask": (np.arange(LENGTH) < np.array([6, 6, 5, 6, 3, 4, 3, 2])[:, None]).astype(np.float32),
}
FULL = BATCH | {"mask": np.ones_like(BATCH["mask"])}


def ahead(params: Any, batch: Any, by: int = 1) -> tuple[Any, Any]:
    """Summed cross entropy of the tokens `by` positions ahead, and their number."""
    tokens, mask = batch["tokens"], batch["mask"]
    logits = params["embed"][tokens[:, :-by]] @ params["heads"][by - 1]
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, by:, None], axis=-1)[..., 0]
    return -jnp.sum(log_probs * mask[:, by:]), jnp.sum(mask[:, by:])


def routed(params: Any, batch: Any) -> tuple[Any, Any]:
    """Per sequence, how often each expert is ranked first, and its mean probability."""
    probabilities = jax.nn.softmax(params["embed"][batch["tokens"]] @ params["router"])
    first = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), EXPERTS, dtype=probabilities.dtype)
    return jax.lax.stop_gradient(first.mean(axis=1)), probabilities.mean(axis=1)


def balance(params: Any, batch: Any) -> tuple[Any, Any]:
    """Load-balancing loss per sequence, summed over sequences, and the number of sequences."""
    first, probability = routed(params, batch)
    return EXPERTS * jnp.sum(first * probability), jnp.float32(len(batch["tokens"]))


def balance_of_all(params: Any, batch: Any) -> Any:
    """Load-balancing loss over all tokens of the microbatch, which is not a sum over sequences."""
    first, probability = routed(params, batch)
    return EXPERTS * jnp.sum(first.mean(0) * probability.mean(0))


Loss = Callable[[Any, list[Any]], Any]
"""``(params, microbatches) -> loss``; autodiff accumulates its gradient over the microbatches."""


def step_of(loss: Loss, k: int) -> Any:
    return jax.jit(jax.grad(lambda params, batch: loss(params, defects.pieces(batch, k))))


def ratio(term: Any, params: Any, parts: list[Any], by: Any = None) -> Any:
    """Sum of `term` over all microbatches, divided by the total count of `by` (default: of `term`)."""
    return sum(term(params, x)[0] for x in parts) / sum((by or term)(params, x)[1] for x in parts)


def right(*terms: Any) -> Loss:
    return lambda params, parts: sum(ratio(term, params, parts) for term in terms)


def of_terms(**named: Any) -> Any:
    """The `terms` argument of check_step."""
    return jax.jit(
        lambda params, batch: {name: jax.grad(term, has_aux=True)(params, batch) for name, term in named.items()}
    )


ahead_2 = partial(ahead, by=2)
WITH_EXPERTS = of_terms(words=ahead, balance=balance)
WITH_HEADS = of_terms(words=ahead, further=ahead_2)


def chunked(params: Any, batch: Any, k: int, dtype: Any) -> Any:
    """Gradient accumulated over chunks in an accumulator of type `dtype`."""
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), params)
    count = sum(ahead(params, x)[1] for x in defects.pieces(batch, k))
    for part in defects.pieces(batch, k):
        grads = jax.grad(lambda p, x: ahead(p, x)[0])(params, part)
        total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, grads)
    return jax.tree.map(lambda x, p: x.astype(p.dtype) / count.astype(p.dtype), total, params)


def in_chunks(k: int, dtype: Any = None) -> Any:
    used = dtype if k > 1 else None
    return jax.jit(lambda p, batch: chunked(p, batch, k, used or p["embed"].dtype))


def in_a_scan(k: int, set_rows: bool = False) -> Any:
    """Scatters the gradient of the embedding rows of each microbatch into the carry of a scan."""

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            rows, back = jax.vjp(lambda table: table[part["tokens"]], params["embed"])
            grads = back(jnp.cos(rows))[0]
            touched = jnp.any(grads != 0, axis=1, keepdims=True)
            return jnp.where(touched, grads, total) if set_rows else total + grads, None

        return jax.lax.scan(add, jnp.zeros_like(params["embed"]), stacked(batch, k))[0] / EXAMPLES

    return step


class Rolling:
    """Expert counts that persist between calls, as when a rematerialized forward pass counts again."""

    def __init__(self, k: int, kept: bool = True) -> None:
        self._kept, self._count, self._k = kept, np.zeros(EXPERTS), k
        self._of = jax.jit(jax.grad(lambda p, part, used: EXPERTS * jnp.sum(used * routed(p, part)[1].mean(0))))
        self._counts = jax.jit(lambda p, part: routed(p, part)[0].sum(0))

    def __call__(self, params: Any, batch: Any) -> Any:
        parts = defects.pieces(batch, self._k)
        if not self._kept:
            self._count = np.zeros(EXPERTS)
        self._count = self._count + sum(np.asarray(self._counts(params, x), np.float64) for x in parts)
        used = jnp.asarray(self._count / len(batch["tokens"]), params["router"].dtype)
        return jax.tree.map(lambda *x: sum(x) / len(x), *(self._of(params, x, used) for x in parts))


Case = tuple[Any, Any, dict[str, Any], Cause, str]


def loss_case(wrong: Loss, good: Loss, cause: Cause, detail: str, **options: Any) -> Case:
    """A case whose step is wrong for several microbatches only."""
    return lambda k: step_of(wrong if k > 1 else good, k), partial(step_of, good), options, cause, detail


def beside_words(divide: Callable[[Any, list[Any]], Any]) -> Loss:
    return lambda params, parts: ratio(ahead, params, parts) + divide(params, parts)


def joined(parts: list[Any]) -> Any:
    return {name: jnp.concatenate([x[name] for x in parts]) for name in parts[0]}


def of_each(params: Any, parts: list[Any], term: Any = balance, by: Any = None) -> Any:
    """Sum of the microbatches' means, each times its count of `by`."""
    return sum(ratio(term, params, [x]) * (by(params, x)[1] if by else 1) for x in parts)


def tokens(params: Any, parts: list[Any]) -> Any:
    return sum(ahead(params, x)[1] for x in parts)


CASES: dict[str, Case] = {
    # The balance loss of each microbatch is not divided by the number of microbatches.
    "NVIDIA-NeMo/Automodel#3359": loss_case(
        beside_words(of_each), right(ahead, balance),
        Cause.DENOMINATOR, "balance divided by the weight of balance in each microbatch, then summed",
        terms=WITH_EXPERTS,
    ),
    # The gradient of the balance loss is averaged over ranks once too often.
    "NVIDIA-NeMo/Automodel#1408": loss_case(
        beside_words(lambda params, parts: ratio(balance, params, parts) / len(parts)), right(ahead, balance),
        Cause.DENOMINATOR, "balance also divided by the number of microbatches", terms=WITH_EXPERTS,
    ),
    # A multi-token-prediction head has fewer tokens but is divided by those of the main head.
    "NVIDIA/Megatron-LM#3159": loss_case(
        beside_words(lambda params, parts: ratio(ahead_2, params, parts, by=ahead)), right(ahead, ahead_2),
        Cause.DENOMINATOR, "further divided by the weight of words", terms=WITH_HEADS,
    ),
    # The multi-token-prediction loss is a mean per microbatch, added to sums and divided by their tokens.
    "AI-Hypercomputer/maxtext#3311": loss_case(
        beside_words(lambda params, parts: of_each(params, parts, ahead_2) / tokens(params, parts)),
        right(ahead, ahead_2), Cause.DENOMINATOR,
        "further divided by the weight of further in each microbatch, then summed and divided by the weight of words",
        terms=WITH_HEADS,
    ),
    # The balance loss of a batch is not the mean of the balance losses of its microbatches.
    "pytorch/torchtitan#3000": loss_case(
        beside_words(lambda params, parts: sum(balance_of_all(params, x) for x in parts) / len(parts)),
        beside_words(lambda params, parts: balance_of_all(params, joined(parts))),
        Cause.STATISTICS, "equal weights", batch=FULL,
    ),
    # Expert counts advance with each pass over a microbatch.
    "pytorch/torchtitan#4772": (Rolling, partial(Rolling, kept=False), {}, Cause.STATE, ""),
    # Divided by the tokens of the window, then again by its number of microbatches.
    "modelscope/ms-swift#10116": loss_case(
        lambda params, parts: ratio(ahead, params, parts) / len(parts), right(ahead), Cause.SCALED, "by 1 / 4"
    ),
    # Each chunk's gradient of the weights is rounded to 16 bits when stored; float32 is wide enough.
    "RL-Align/RL-Kernel#270": (
        partial(in_chunks, dtype=jnp.bfloat16), in_chunks, {}, Cause.PRECISION, "in float64 it equals one batch",
    ),
    # Rows used by several microbatches keep only some of their contributions.
    "openxla/xla#49143": (
        partial(in_a_scan, set_rows=True), in_a_scan, {}, Cause.SCATTER, "rows keep one contribution",
    ),
    # A mean per microbatch, weighted by its tokens: correct only if all microbatches have equally many.
    "a balance weighed by tokens": loss_case(
        beside_words(lambda params, parts: of_each(params, parts, by=ahead) / tokens(params, parts)),
        right(ahead, balance), Cause.DENOMINATOR,
        "balance divided by the weight of balance in each microbatch, then averaged with the weights of words",
        terms=WITH_EXPERTS,
    ),
    # Everything is divided by the tokens of the window, including the balance loss.
    "a balance by tokens": loss_case(
        beside_words(lambda params, parts: ratio(balance, params, parts, by=ahead)), right(ahead, balance),
        Cause.DENOMINATOR, "balance divided by the weight of words", terms=WITH_EXPERTS,
    ),
}  # fmt: skip


def check(make_step: Any, options: dict[str, Any]) -> StepReport:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return check_step(make_step, PARAMS, options.pop("batch", BATCH), microbatches=(4,), **options)


@pytest.mark.parametrize("thread", CASES)
def test_the_defect_is_named(thread: str) -> None:
    make_step, _, options, cause, detail = CASES[thread]
    report = check(make_step, dict(options))
    assert report.cause is cause, str(report)
    assert detail in report.faults[0].detail


@pytest.mark.parametrize("thread", CASES)
def test_the_step_without_it_is_not_accused(thread: str) -> None:
    report = check(CASES[thread][1], dict(CASES[thread][2]))
    assert report.passes, str(report)
