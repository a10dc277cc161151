"""Nested wrappers: every pair and triple in each nesting order, in each place and integration."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import ledger, reductions
from gradcombine.reductions import Numbered, Ratio

F32 = np.float32
MOST = 5.0
GRADS = [F32([3, 4]), F32([np.inf, 1]), F32([12, 16]), F32([6, -8])]
"""Norms are 5 times a power of two, so that clipping to 5 and all sums are exact."""
WEIGHTS = [2, 1, 1, 4]

WRAPPERS: dict[str, Callable[[gc.Reduction], gc.Reduction]] = {
    "clipped": lambda r: reductions.clipped(r, MOST),
    "zeroed": reductions.zeroed,
    "checked": reductions.checked,
    "measured": reductions.measured,
    "numbered": lambda r: reductions.numbered(r, len(GRADS)),
    "ratio": reductions.ratio,
}
NAMES = [names for size in (1, 2, 3) for names in itertools.permutations(WRAPPERS, size)]
"""From the outermost wrapper to the innermost."""


def has_meaning(names: tuple[str, ...]) -> bool:
    """Whether a composition is allowed: wrappers that record something go around a ratio, not inside it."""
    inside = names[names.index("ratio") + 1 :] if "ratio" in names else ()
    return not {"measured", "numbered"} & set(inside)


MEANINGFUL = list(filter(has_meaning, NAMES))
FOR_GRADIENTS = [names for names in MEANINGFUL if not {"measured", "ratio"} & set(names)]
"""Compositions from gradients to gradients, as integrations need them."""
COMPILED_BY_JAX = [names for names in FOR_GRADIENTS if "checked" not in names]
"""In JAX, compiled checks need jax.experimental.checkify."""


def composed(names: tuple[str, ...], base: gc.Reduction) -> gc.Reduction:
    for name in reversed(names):
        base = WRAPPERS[name](base)
    return base


def contribution(names: tuple[str, ...], i: int, grad: Any = None) -> Any:
    """The input of the outermost wrapper: number and denominator are nested in the order of the wrappers."""
    value = GRADS[i] if grad is None else grad
    for name in reversed(names):
        value = Numbered(value, i) if name == "numbered" else Ratio(value, WEIGHTS[i]) if name == "ratio" else value
    return value


def expected(names: tuple[str, ...], weights: list[int] = WEIGHTS) -> list[float]:
    """The expected mean. All numbers are small multiples of 1/8, so that only the division rounds."""
    total, weight = [0.0, 0.0], 0
    for grad, w in zip(GRADS, weights, strict=True):
        value = [float(x) for x in grad]
        for name in names:
            if name == "zeroed" and not np.isfinite(value).all():
                w = 0
            if name == "clipped":
                norm = float(np.hypot(*value))
                value = [x * min(1.0, MOST / norm) if np.isfinite(norm) else np.nan for x in value]
        if w:
            # The numerators of a ratio are not multiplied by their denominators.
            total = [t + x * (1 if "ratio" in names else w) for t, x in zip(total, value, strict=True)]
            weight += w
    return [float(F32(t / weight)) for t in total]


def value_of(result: Any) -> list[float]:
    while hasattr(result, "metrics"):
        result = result.value
    return np.asarray(result).tolist()


def assert_holds_all(names: tuple[str, ...], state: Any) -> None:
    if "numbered" in names:
        assert ledger.read(state).held == tuple(range(len(GRADS)))


@pytest.mark.parametrize(
    ("names", "precision"),
    [
        pytest.param(names, precision, marks=[pytest.mark.full] * (len(names) > 2), id="-".join([*names, precision]))
        for names in MEANINGFUL
        for precision in ("fast", "exact")
    ],
)
def test_a_composition_means_the_same_in_every_place(names: tuple[str, ...], precision: Any) -> None:
    reduction = composed(names, reductions.mean(precision))
    values = [contribution(names, i) for i in range(len(GRADS))]
    weights = [1] * len(GRADS) if "ratio" in names else WEIGHTS
    like = contribution(names, 0, np.zeros(2, F32))
    want = pytest.approx(expected(names), rel=0, abs=0, nan_ok=True)
    for order in ("sequential", "tree"):
        assert value_of(gc.combine(reduction, values, weights, order)) == want
        acc = gc.accumulate(reduction, every=len(GRADS), order=order)
        state = acc.init(like)
        for value, weight in zip(values, weights, strict=True):
            state = acc.update(value, state, weight)
        gc.check_state(reduction, state)
        assert value_of(acc.value(state)) == want
        assert value_of(acc.value(gc.merge_replicas(reduction, state, gc.LOCAL, order))) == want
        assert_holds_all(names, state)
    halves = [reduction.init(like), reduction.init(like)]
    for i, (value, weight) in enumerate(zip(values, weights, strict=True)):
        halves[i // 2] = reduction.update(halves[i // 2], value, weight)
    assert value_of(reduction.finalize(reduction.merge(*halves))) == want


@pytest.mark.parametrize("names", [names for names in NAMES if not has_meaning(names)], ids="-".join)
def test_a_composition_without_a_meaning_is_an_error(names: tuple[str, ...]) -> None:
    with pytest.raises(gc.GradCombineError, match="ratio: expected a mean"):
        composed(names, reductions.mean())


@pytest.mark.parametrize("wrap", [lambda r: reductions.clipped(r, 1), reductions.measured])
def test_one_norm_of_several_denominators_is_an_error(wrap: Any) -> None:
    reduction = wrap(reductions.ratios(["tokens", "rows"]))
    value = {"tokens": Ratio(GRADS[0], 2), "rows": Ratio(GRADS[0], 1)}
    with pytest.raises(gc.GradCombineError, match=r"(ratios|clipped).*: .*wrap the mean: ratios\(names, clipped"):
        gc.combine(reduction, [value])


def test_metrics_and_norms_do_not_see_numbers_and_denominators() -> None:
    values = [Numbered(Ratio(F32([3, 4]), 1000.5), 3), Numbered(Ratio(F32([6, 8]), 2000.5), 1)]
    result = gc.combine(composed(("measured", "numbered", "ratio"), reductions.mean()), values)
    assert float(result.metrics.norm_max) == 10
    assert int(result.metrics.count) == 2


@pytest.mark.parametrize(
    ("wrap", "member"), [(reductions.ratio, Ratio), (lambda r: reductions.numbered(r, 4), Numbered)]
)
def test_norms_over_several_reductions_do_not_see_numbers_and_denominators(wrap: Any, member: Any) -> None:
    reduction = reductions.per_leaf({"a": wrap(reductions.mean()), "b": reductions.sum()})
    value = {"a": member(F32([0, 8]), 2), "b": F32([6, 0])}
    clipped, metrics = gc.combine(reductions.measured(reductions.clipped(reduction, 5)), [value])
    assert float(metrics.norm_max) == 10
    assert clipped["a"].tolist() == [0, 4 / (2 if member is Ratio else 1)]
    assert clipped["b"].tolist() == [3, 0]


def quick(names: list[tuple[str, ...]]) -> list[Any]:
    """Test parameters: pairs with a ledger are quick; all others run in the full suite."""
    selected = [[] if len(each) == 2 and "numbered" in each else [pytest.mark.full] for each in names]
    return [pytest.param(each, marks=marks, id="-".join(each)) for each, marks in zip(names, selected, strict=True)]


def jax_loss(params: Any, rows: Any) -> Any:
    """A loss whose gradient is the row; a microbatch has one row, and its last column is the weight."""
    import jax.numpy as jnp

    from gradcombine.integrations.jax import LossOutput

    row = rows[0]
    return LossOutput(jnp.sum(params * row[:2]), weight=row[2])


def batch() -> Any:
    return np.stack([np.append(grad, F32(w)) for grad, w in zip(GRADS, WEIGHTS, strict=True)])


@pytest.mark.needs("jax")
@pytest.mark.parametrize("names", quick(COMPILED_BY_JAX))
def test_gradients_of_jax(names: tuple[str, ...]) -> None:
    import jax
    import jax.numpy as jnp

    from gradcombine.integrations.jax import value_and_grad

    step = value_and_grad(jax_loss, microbatches=4, reduction=composed(names, reductions.mean()))
    _, grads = jax.jit(step)(jnp.zeros(2), jnp.asarray(batch()))
    np.testing.assert_array_equal(grads, F32(expected(names)))


@pytest.mark.needs("jax", "optax")
@pytest.mark.parametrize("over_calls", [True, False], ids=["calls", "scan"])
@pytest.mark.parametrize("names", quick(COMPILED_BY_JAX))
def test_steps_of_jax(names: tuple[str, ...], over_calls: bool) -> None:
    import jax.numpy as jnp
    import optax

    from gradcombine.integrations.jax import train_step

    reduction = composed(names, reductions.mean())
    step = train_step(jax_loss, optax.sgd(1.0), reduction=reduction, **{"every" if over_calls else "microbatches": 4})
    params = jnp.zeros(2)
    state = step.init(params)
    for rows in batch()[:, None] if over_calls else [batch()]:
        params, state, _ = step(params, state, jnp.asarray(rows))
    np.testing.assert_array_equal(params, -F32(expected(names)))


@pytest.mark.needs("jax", "optax")
@pytest.mark.parametrize("names", quick(COMPILED_BY_JAX))
def test_a_transformation_of_optax(names: tuple[str, ...]) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    from gradcombine.integrations.optax import accumulate

    tx = accumulate(optax.sgd(1.0), every=4, reduction=composed(names, reductions.mean()))
    params = jnp.zeros(2)
    state = tx.init(params)
    update = jax.jit(lambda grads, state, weight: tx.update(grads, state, params, weight=weight))
    for grad, weight in zip(GRADS, WEIGHTS, strict=True):
        updates, state = update(jnp.asarray(grad), state, jnp.float32(weight))
    np.testing.assert_array_equal(updates, -F32(expected(names)))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("names", quick(FOR_GRADIENTS))
def test_a_step_of_tensorflow(names: tuple[str, ...]) -> None:
    import keras
    import tensorflow as tf

    from gradcombine.integrations.tensorflow import AccumulatedStep

    variable = tf.Variable([0.0, 0.0])
    reduction = composed(names, reductions.mean())
    step = AccumulatedStep(
        lambda grad, weight: ([grad], weight), [variable], keras.optimizers.SGD(1.0), every=4, reduction=reduction
    )
    train = tf.function(step)
    for grad, weight in zip(GRADS, WEIGHTS, strict=True):
        train(tf.constant(grad), tf.constant(weight))
    np.testing.assert_array_equal(variable, -F32(expected(names)))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("names", quick(FOR_GRADIENTS))
def test_passes_of_horovod(names: tuple[str, ...]) -> None:
    """Passes have no weights, so each counts once."""
    import tensorflow as tf

    from gradcombine.integrations.horovod import LocalGradientAggregation

    variables = [tf.Variable([0.0, 0.0])]
    reduction = composed(names, reductions.mean())
    helper = LocalGradientAggregation(4, lambda grads, variables: grads, mode="eager", reduction=reduction)
    for grad in GRADS:
        (received,) = helper.compute_gradients([tf.constant(grad)], variables)
    np.testing.assert_array_equal(received, F32(expected(names, [1] * len(GRADS))))
