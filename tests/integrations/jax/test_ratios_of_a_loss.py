"""A loss that returns a Ratio per term is equivalent to one that returns sums and counts; steps: test_post_training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import losses, reductions
from gradcombine.integrations.jax import Loss, LossOutput, grads_by_denominator, value_and_grad
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.reductions import Ratio
from gradcombine.verify.compare.ulp import equal_bits

pytestmark = pytest.mark.needs("jax", "optax", "tensorflow")

TERMS = {"ce": "tokens", "norm": "tokens", "seq": "sequences"}
RNG = np.random.default_rng(0)
X, MASK = RNG.normal(size=(8, 6)).astype(np.float32), RNG.random((8, 6)) < 0.5


def ratios(w: Any, x: Any, mask: Any) -> dict[str, Ratio]:
    return {
        "ce": losses.token_mean(w * x, mask),
        "norm": losses.token_mean(w * w * x, mask),
        "seq": losses.sequence_mean_of_token_mean(w * x * x, mask),
    }


def apart(w: Any, x: Any, mask: Any) -> LossOutput:
    terms = ratios(w, x, mask)
    weights = {name: terms[term].denominator for term, name in TERMS.items()}
    return LossOutput({term: part.numerator for term, part in terms.items()}, weights)


def whole(w: Any, x: Any, mask: Any) -> LossOutput:
    return LossOutput(ratios(w, x, mask))


@pytest.mark.sampled
@pytest.mark.parametrize("form", [ratios, whole], ids=["a dict", "a LossOutput"])
@pytest.mark.parametrize("totals", [None, "counted"])
def test_ratios_are_sums_and_counts(form: Any, totals: Any) -> None:
    of = {"terms": TERMS, "totals": totals}
    output, grad = value_and_grad(Loss(form, **of), 4)(jnp.float32(2), X, MASK)
    expected = value_and_grad(Loss(apart, **of), 4)(jnp.float32(2), X, MASK)
    value = output.value if isinstance(output, LossOutput) else output
    assert equal_bits(grad, expected[1])
    assert all(equal_bits(value[term], expected[0].value[term]) for term in TERMS)


@pytest.mark.full
def test_gradients_by_denominator_of_ratios() -> None:
    output, grads = grads_by_denominator(ratios, TERMS)(jnp.float32(2), X, MASK)
    expected, others = grads_by_denominator(apart, TERMS)(jnp.float32(2), X, MASK)
    assert all(equal_bits(grads[name], others[name]) for name in others)
    assert int(output.weight["tokens"]) == int(expected.weight["tokens"])


def test_variables_take_them_too() -> None:
    steps, variables = [], []
    for form in (ratios, lambda *args: tuple(apart(*args))[:2]):
        w = tf.Variable(2.0)
        subtract = lambda gradients, of: of[0].assign_sub(gradients[0])  # noqa: E731
        steps.append(AccumulatedStep(lambda x, m, form=form, w=w: form(w, x, m), [w], subtract, every=4, terms=TERMS))
        variables.append(w)
    for step in steps:
        for n in range(4):
            step(tf.constant(X[2 * n : 2 * n + 2]), tf.constant(MASK[2 * n : 2 * n + 2]))
    assert equal_bits(variables[0], variables[1]) and float(variables[0]) != 2


@pytest.mark.full
def test_a_metric_has_its_own_denominator() -> None:
    def loss(w: Any, x: Any, mask: Any) -> LossOutput:
        kl = losses.sequence_mean_of_token_mean(x, mask)
        output = losses.token_mean(w * x, mask)
        return LossOutput(output.numerator, weight=output.denominator, aux={"kl": kl})

    of = Loss(loss, aux_reduction={"kl": reductions.ratio()})
    kl = [value_and_grad(of, k)(jnp.float32(2), X, MASK)[0].aux["kl"] for k in (1, 4)]
    expected = gc.combine(reductions.ratio(), [losses.sequence_mean_of_token_mean(X, MASK)])
    np.testing.assert_allclose(kl, expected, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_a_metric_counts_microbatches_of_weight_0_as_a_term_only(k: int) -> None:
    x, mask = np.float32([[1, 2], [3, 4]]), np.float32([[1, 1], [0, 0]])

    def loss(w: Any, x: Any, mask: Any) -> LossOutput:
        rows, squares = jnp.float32(len(x)), losses.token_mean(jax.lax.stop_gradient(w * x) ** 2)
        terms = {"pg": losses.token_mean(w * x, mask)}
        return LossOutput(terms | ({"squares": squares} if as_term else {}), aux={"squares": squares, "rows": rows})

    by = {"squares": reductions.ratio(), "rows": reductions.sum()}
    for as_term in (False, True):
        over = {"pg": "tokens"} | ({"squares": "all"} if as_term else {})
        output, gradient = value_and_grad(Loss(loss, terms=over, aux_reduction=by), k)(jnp.float32(1), x, mask)
        whole = as_term or k == 1
        assert (output.aux["rows"], output.aux["squares"]) == ((2, 7.5) if whole else (1, 2.5))
        assert float(gradient) == 1.5 and float(output.value.get("squares", 7.5)) == 7.5


@pytest.mark.parametrize("by", [None, {"kl": reductions.mean()}], ids=["none", "a mean"])
@pytest.mark.parametrize("terms", [None, TERMS], ids=["one term", "terms"])
def test_no_mean_is_taken_of_ratios(by: Any, terms: Any) -> None:
    def loss(w: Any, x: Any, mask: Any) -> LossOutput:
        aux = {"kl": losses.token_mean(x, mask)}
        return LossOutput(jnp.sum(w * x), aux=aux) if terms is None else LossOutput(ratios(w, x, mask), aux=aux)

    with pytest.raises(gc.GradCombineError, match=r"\['kl'\]: expected reductions.ratio\(\) in aux_reduction"):
        value_and_grad(Loss(loss, terms=terms, aux_reduction=by), 2)(jnp.float32(2), X, MASK)


REFUSED: dict[str, tuple[Any, str]] = {
    "weights besides": (
        lambda w, x, m: LossOutput(ratios(w, x, m), {"tokens": 1, "sequences": 1}),
        "a Ratio of each term, or weights, received both",
    ),
    "some alone": (lambda w, x, m: ratios(w, x, m) | {"ce": w}, "leaf ['ce']: expected a Ratio of each term"),
    "one missing": (lambda w, x, m: {"ce": Ratio(w, 1)}, "leaf ['norm']: expected a Ratio of each term"),
    "counts that differ": (
        lambda w, x, m: {"ce": Ratio(w, 1), "norm": Ratio(w, 2), "seq": Ratio(w, 1)},
        "leaf ['norm']: expected the denominator 1.0, as in other terms over 'tokens', received 2.0",
    ),
    "a count that is no scalar": (
        lambda w, x, m: {"ce": Ratio(w, np.array([3])), "norm": Ratio(w, 3), "seq": Ratio(w, 1)},
        "leaf ['tokens']: expected a weight of shape (), received one of shape (1,)",
    ),
    "a traced one of a later term": (
        lambda w, x, m: {"ce": Ratio(w, m.sum()), "norm": Ratio(w, m[:1, 0]), "seq": Ratio(w, 1)},
        "leaf ['tokens']: expected a weight of shape (), received one of shape (1,)",
    ),
    "a text": (
        lambda w, x, m: {"ce": Ratio(w, "three"), "norm": Ratio(w, 3), "seq": Ratio(w, 1)},
        "leaf ['tokens']: expected a finite weight that is not negative, received str",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name: str) -> None:
    loss, message = REFUSED[name]
    with pytest.raises(gc.GradCombineError) as caught:
        value_and_grad(Loss(loss, terms=TERMS), 1)(jnp.float32(2), X, MASK)
    assert message in str(caught.value)
