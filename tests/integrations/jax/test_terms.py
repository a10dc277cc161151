"""Losses with several denominators against float64 sums, over microbatches and replicas.

Both JAX integrations are tested: `value_and_grad` and `train_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import Loss, LossOutput, train_step, value_and_grad
from gradcombine.verify.compare.ulp import equal_bits
from tests.integrations.jax.replicas import collectives, mesh
from tests.spec.selection import FULL, cases

TERMS = {"ce": "tokens", "z": "tokens", "preference": "sequences", "balance": "microbatches"}
PARAMS = {"w": np.float32([2, -1, 3]), "b": np.float32(-2), "frozen": None}
ROWS = 16
"""Examples per replica."""


def data(replicas: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integer data; half of the tokens and a quarter of the sequences count, so that both counts are powers of two."""
    rng = np.random.default_rng(seed)
    n = ROWS * replicas
    x = rng.integers(-8, 9, (n, 4)).astype(np.float32)
    mask = rng.permutation(np.arange(4 * n) % 2).reshape(n, 4).astype(np.float32)
    chosen = rng.permutation(np.arange(n) % 4 == 0).astype(np.float32)
    return x, mask, chosen


def loss(params: Any, x: Any, mask: Any, chosen: Any) -> LossOutput:
    w, b = params["w"], params["b"]
    values = {
        "ce": jnp.sum(w[0] * x * mask + b * mask),
        "z": jnp.sum(w[1] * x * x * mask),
        "preference": jnp.sum((w[2] * x[:, 0] - b * x[:, 1]) * chosen),
        "balance": w[0] * w[2] * jnp.max(x),
    }
    return LossOutput(values, {"tokens": mask.sum(), "sequences": chosen.sum(), "microbatches": 1})


def expected(k: int, x: Any, mask: Any, chosen: Any, replicas: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Terms and gradients in float64 by the formula: the total sum of each term over its total weight."""
    (w0, w1, w2), b = PARAMS["w"].astype(np.float64), float(PARAMS["b"])
    size = -(-ROWS // k)
    x, mask, chosen = (a.astype(np.float64).reshape(replicas, ROWS, *a.shape[1:]) for a in (x, mask, chosen))
    largest = [x[r, i : i + size].max() for r in range(replicas) for i in range(0, ROWS, size)]
    tokens, sequences, microbatches = mask.sum(), chosen.sum(), len(largest)
    sums = {"x": (x * mask).sum(), "xx": (x * x * mask).sum()}
    a, c, top = (x[:, :, 0] * chosen).sum(), (x[:, :, 1] * chosen).sum(), sum(largest) / microbatches
    values = {
        "ce": (w0 * sums["x"] + b * tokens) / tokens,
        "z": w1 * sums["xx"] / tokens,
        "preference": (w2 * a - b * c) / sequences,
        "balance": w0 * w2 * top,
    }
    w = [sums["x"] / tokens + w2 * top, sums["xx"] / tokens, a / sequences + w0 * top]
    return values, {"w": np.array(w), "b": 1 - c / sequences}


def totals_of(k: int, replicas: int, mask: Any, chosen: Any) -> dict[str, Any]:
    return {"tokens": mask.sum(), "sequences": chosen.sum(), "microbatches": k * replicas}


QUICK = [(2, 2, None), (2, 2, "counted")]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("k", "replicas", "totals"),
    cases(QUICK, (1, 2, 3, 4, 8, 16), (1, 2, 4, 8), (None, "counted", "given"), pairwise=True),
)
def test_a_window_is_the_formula(k: int, replicas: int, totals: Any) -> None:
    batch = data(replicas)
    values, grads = expected(k, *batch, replicas)
    over = gc.jax_axis("data") if replicas > 1 else gc.LOCAL
    function = jax.jit(value_and_grad(Loss(loss, terms=TERMS, totals=totals), k, over=over))
    given = {"totals": totals_of(-(-ROWS // -(-ROWS // k)), replicas, *batch[1:])} if totals == "given" else {}
    with jax.set_mesh(mesh(replicas, "data")):
        output, received = function(PARAMS, *batch, **given)
    # All sums are exact; the quotients too, if the number of microbatches is a power of two.
    same = np.testing.assert_array_equal if k != 3 else partial(np.testing.assert_allclose, rtol=1e-6)
    for name, value in values.items():
        same(output.value[name], value, err_msg=name)
    same(received["w"], grads["w"])
    same(received["b"], grads["b"])
    assert received["frozen"] is None
    assert {name: float(x) for name, x in output.weight.items()} == {
        name: float(x) for name, x in totals_of(-(-ROWS // -(-ROWS // k)), replicas, *batch[1:]).items()
    }


def uneven(seed: int = 1) -> tuple[np.ndarray, ...]:
    """Normal random data with and without tokens and sequences in a microbatch, and NaN in the padding."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, 4)).astype(np.float32)
    mask = np.zeros((8, 4), np.float32)
    mask[:2], mask[2, :1], mask[4:6, 1:3] = 1, 1, 1
    chosen = np.float32([1, 1, 0, 1, 0, 0, 0, 0])
    x[6:] = np.nan
    return x, mask, chosen


def masked(params: Any, x: Any, mask: Any, chosen: Any) -> LossOutput:
    """`loss` with NaN entries masked; the last microbatch is padding and has weight 0."""
    real = jnp.isfinite(x)
    output = loss(params, jnp.where(real, x, 0), mask, chosen)
    return output._replace(weight=output.weight | {"microbatches": real.any().astype(jnp.int32)})


REDUCTIONS = {
    "fast": (reductions.mean(), reductions.sum()),
    "compensated": (reductions.mean("compensated"), reductions.sum("compensated")),
    "exact": (reductions.mean("exact"), reductions.sum("exact")),
    "zeroed": (reductions.zeroed(reductions.mean()), reductions.zeroed(reductions.sum())),
}


@pytest.mark.full
@pytest.mark.parametrize("orders", [("sequential", "tree"), ("tree", "sequential")], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_both_ways_and_both_doors_agree(name: str, orders: Any) -> None:
    """The first order runs without totals, the second with them."""
    x, mask, chosen = batch = uneven()
    given = {"totals": {"tokens": mask.sum(), "sequences": chosen.sum(), "microbatches": 3}}
    grads = []
    for totals, reduction, order in zip((None, "given"), REDUCTIONS[name], orders, strict=True):
        settings, of_loss = {"reduction": reduction, "order": order}, Loss(masked, terms=TERMS, totals=totals)
        kwargs = given if totals else {}
        grads.append(jax.jit(value_and_grad(of_loss, 4, **settings))(PARAMS, *batch, **kwargs)[1])
        step = train_step(of_loss, optax.sgd(1.0), every=4, **settings)
        params = jax.tree.map(jnp.asarray, PARAMS)
        state = step.init(params, *(a[:2] for a in batch), **kwargs)
        for i in range(0, 8, 2):
            params, state, metrics = step(params, state, *(a[i : i + 2] for a in batch), **kwargs)
        assert bool(metrics.applied)
        assert float(metrics.weight["tokens"]) == mask.sum()
        for key in ("w", "b"):
            np.testing.assert_allclose(params[key], PARAMS[key] - grads[-1][key], rtol=3e-7)
    np.testing.assert_allclose(grads[0]["w"], grads[1]["w"], rtol=1e-6)
    x = np.where(np.isfinite(x), x, 0).astype(np.float64)
    top = np.mean([x[i : i + 2].max() for i in (0, 2, 4)])
    exact = [(x * mask).sum() / mask.sum() + 3 * top, (x[:, 0] * chosen).sum() / 3 + 2 * top]
    np.testing.assert_allclose(np.asarray(grads[0]["w"])[[0, 2]], exact, rtol=1e-6)


@pytest.mark.parametrize("totals", [None, pytest.param("counted", marks=FULL)])
def test_a_denominator_of_0_has_a_value_and_a_gradient_of_0(totals: Any) -> None:
    x, mask, _ = data(1)

    def undefined(params: Any, x: Any, mask: Any) -> LossOutput:
        return LossOutput(
            {"ce": jnp.sum(params * x * mask), "none": params * jnp.log(mask[0, 0] * 0)},
            {"n": mask.sum(), "m": 0 * mask.sum()},
        )

    output, grad = jax.jit(value_and_grad(Loss(undefined, terms={"ce": "n", "none": "m"}, totals=totals), 2))(
        np.float32(1), x, mask
    )
    assert (float(output.value["none"]), float(output.weight["m"])) == (0, 0)
    if totals is None:  # a pass of its own, left out with what it holds
        assert float(grad) == (x * mask).sum() / mask.sum()


def test_what_belongs_to_other_denominators_is_not_run_through() -> None:
    def loss(w: Any, x: Any) -> LossOutput:
        # The derivative of sqrt is infinite at 0; times a cotangent of 0 it would be NaN.
        return LossOutput({"a": jnp.sum(w * x), "b": jnp.sum(jnp.sqrt(w - 1))}, {"n": x.size, "m": 0})

    _, grad = value_and_grad(Loss(loss, terms={"a": "n", "b": "m"}), 2)(jnp.float32(1), jnp.float32([1, 2, 3, 6]))
    assert float(grad) == 3


@pytest.mark.full
def test_aux_carry_and_weights_of_an_argument() -> None:
    def loss(w: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        return {"a": jnp.sum(w * x), "b": w}, {"largest": x.max()}

    def carried(w: Any, carry: Any, x: Any) -> LossOutput:
        values, aux = loss(w, carry, x)
        return LossOutput(values, aux=aux, carry=carry + 1)

    x, terms = jnp.float32([1, 2, 3, 8, 4, 6]), {"a": "n", "b": "m"}
    settings = {"terms": terms, "aux_reduction": {"largest": reductions.max()}}

    def weight(x: Any) -> Any:
        return {"n": x.size, "m": 1}

    for totals in (None, "counted"):
        output, grad = value_and_grad(Loss(carried, carry_argnum=1, totals=totals, **settings), 3, weight=weight)(
            jnp.float32(2), jnp.int32(0), x
        )
        assert (float(output.value["a"]), float(output.value["b"]), float(grad)) == (8, 2, 5)
        assert (int(output.carry), float(output.aux["largest"])) == (3, 8)
        apart = Loss(loss, has_aux=True, batch_argnums=2, totals=totals, **settings)
        (values, aux), _ = value_and_grad(apart, 3, weight=weight)(jnp.float32(2), jnp.float32(0), x)
        assert (float(values["a"]), float(aux["largest"])) == (8, 8)


@pytest.mark.full
def test_the_optimizer_is_told_the_whole_loss() -> None:
    seen = []

    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        seen.append(float(value))
        return updates, state

    watching = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = train_step(Loss(loss, terms=TERMS), watching, microbatches=4)
    params = jax.tree.map(jnp.asarray, PARAMS)
    batch = data(1)
    _, _, metrics = step.function(params, step.init(params), *batch)
    values, _ = expected(4, *batch, 1)
    assert seen == [sum(values.values())]
    assert {name: float(x) for name, x in metrics.value.items()} == values


@pytest.mark.full
def test_a_flush_divides_what_is_there() -> None:
    batch = data(1)
    step = train_step(Loss(loss, terms=TERMS), optax.sgd(1.0), every=9)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = step.init(params, *(a[:4] for a in batch))
    for i in range(0, ROWS, 4):
        params, state, _ = step(params, state, *(a[i : i + 4] for a in batch))
    params, _, metrics = step.flush(params, state)
    assert np.array_equal(params["w"], PARAMS["w"] - expected(4, *batch, 1)[1]["w"])
    assert float(metrics.weight["microbatches"]) == 4


@pytest.mark.full
@pytest.mark.parametrize("totals", [pytest.param(None, marks=FULL), "counted"])
def test_known_totals_are_one_exchange_more(totals: Any) -> None:
    def one(params: Any, x: Any, mask: Any, chosen: Any) -> LossOutput:
        return LossOutput(loss(params, x, mask, chosen).value["ce"] / mask.sum(), mask.sum())

    over, batch = gc.jax_axis("data"), data(2)
    with jax.set_mesh(mesh(2, "data")):
        single, several = (
            collectives(jax.jit(value_and_grad(function, 4, over=over)).lower(PARAMS, *batch).compile())
            for function in (one, Loss(loss, terms=TERMS, totals=totals))
        )
    assert single == ["all-reduce"]
    assert several == ["all-reduce"] * (1 if totals is None else 2)


def returning(value: Any, weight: Any = None) -> Callable[..., Any]:
    return lambda w, x: LossOutput(value(w, x) if callable(value) else value, weight)


TWO = {"a": "n", "b": "m"}


def good(w: Any, x: Any) -> Any:
    return {"a": jnp.sum(w * x), "b": w}


def changing(w: Any, x: Any) -> LossOutput:
    values = good(w, x) if x.size > 1 else {"a": jnp.sum(w * x)}
    return LossOutput(values, {"n": x.size, "m": 1})


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (changing, {}, r"\['b'\]: expected a value of each term, as a dict of \['a', 'b'\], received none"),
        (returning(lambda w, x: good(w, x) | {"c": w}, {"n": 1, "m": 1}), {}, r"\['c'\].* only, received another name"),
        (returning(lambda w, x: {"a": w * x, "b": w}, {"n": 1, "m": 1}), {}, r"\['a'\].*real floating scalar.*shape"),
        (returning(lambda w, x: w, {"n": 1, "m": 1}), {}, r"a value of each term, as a dict"),
        (returning(good), {}, r"a weight of each denominator, as a dict of \['m', 'n'\], received NoneType"),
        (returning(good, {"n": 1}), {}, r"\['m'\]: expected a weight of each denominator"),
        (returning(good, {"n": 1, "m": -2}), {}, r"\['m'\]: expected a finite weight that is not negative, "),
        (returning(good, {"n": 1, "m": float("nan")}), {}, r"\['m'\]: expected a finite weight"),
        (returning(good, {"n": 1, "m": 1}), {"totals": "given"}, r"totals=\{\.\.\.\} of the window's denominators"),
        (returning(good, {"n": 1, "m": 1}), {"totals": "guessed"}, r"totals of \['counted', 'given'\]"),
        (returning(good, {"n": 1, "m": 1}), {"terms": {"a": "n", "b": None}}, r"\['b'\]: expected the name of"),
        (returning(good, {"n": 1, "m": 1}), {"terms": {}}, r"terms as a dict"),
        (returning(good, {"n": 1, "m": 1}), {"reduction": reductions.sum()}, r"a mean, from reductions.mean"),
        (returning(good, {"n": 1, "m": 1}), {"reduction": reductions.mean(), "totals": "counted"}, r"a sum, for terms"),
        (good, {"terms": None, "totals": "counted"}, r"expected terms, for totals, received none"),
    ],
)  # fmt: skip
def test_refused(function: Any, settings: dict[str, Any], message: str) -> None:
    rest = {"reduction": settings["reduction"]} if "reduction" in settings else {}
    of_loss = Loss(function, **{"terms": TWO} | {name: x for name, x in settings.items() if name != "reduction"})
    with pytest.raises(gc.GradCombineError, match=message) as caught:
        value_and_grad(of_loss, 2, **rest)(jnp.float32(1), jnp.float32([1, 2, 3]))
    assert str(caught.value).startswith("value_and_grad")


@pytest.mark.parametrize(
    ("totals", "path"), [({"n": 1}, "m"), ({"n": 1, "m": 1, "x": 1}, "x"), ({"n": 1, "m": -1}, "m")]
)
def test_refused_totals(totals: Any, path: str) -> None:
    function = value_and_grad(Loss(returning(good, {"n": 1, "m": 1}), terms=TWO, totals="given"), 2)
    with pytest.raises(gc.GradCombineError, match=rf"value_and_grad: leaf \['{path}'\]"):
        function(jnp.float32(1), jnp.float32([1, 2]), totals=totals)


def test_refused_steps() -> None:
    terms = returning(good, {"n": 1, "m": 1})
    with pytest.raises(gc.GradCombineError, match="microbatches, for totals that are counted"):
        train_step(Loss(terms, terms=TWO, totals="counted"), optax.sgd(1.0), every=2)
    with pytest.raises(gc.GradCombineError, match="a loss to differentiate"):
        train_step(Loss(terms, terms=TWO, differentiate=False), optax.sgd(1.0))
    step = train_step(Loss(terms, terms=TWO), optax.sgd(1.0))
    with pytest.raises(gc.GradCombineError, match=r"step.init\(params, \*example\)"):
        step.function(jnp.float32(1), step.init(jnp.float32(1)), jnp.float32([1]))


@pytest.mark.parametrize("totals", [None, pytest.param("counted", marks=FULL)])
def test_a_bad_weight_that_is_traced_is_nan(totals: Any) -> None:
    def loss(w: Any, x: Any) -> LossOutput:
        return LossOutput({"a": jnp.sum(w * x)}, {"n": x.sum()})

    _, grad = jax.jit(value_and_grad(Loss(loss, terms={"a": "n"}, totals=totals), 2))(
        jnp.float32(1), jnp.float32([3, -1])
    )
    assert np.isnan(grad)


@pytest.mark.full
def test_bits_do_not_depend_on_division() -> None:
    x, mask, chosen = (np.float32(a) for a in uneven(3))
    terms = {"ce": "tokens", "preference": "sequences"}

    def of_rows(params: Any, x: Any, mask: Any, chosen: Any) -> LossOutput:
        output = masked(params, x, mask, chosen)
        return LossOutput(
            {name: output.value[name] for name in terms}, {"tokens": mask.sum(), "sequences": chosen.sum()}
        )

    def gradient(k: int) -> Any:
        return jax.jit(value_and_grad(Loss(of_rows, terms=terms), k, order="tree"))(PARAMS, x, mask, chosen)[1]["w"]

    assert np.isfinite(gradient(8)).all()
    with jax.set_mesh(mesh(4, "data")):
        sharded = jax.jit(value_and_grad(Loss(of_rows, terms=terms), 2, order="tree", over=gc.jax_axis("data")))
        assert equal_bits(sharded(PARAMS, x, mask, chosen)[1]["w"], gradient(8))


@pytest.mark.parametrize("zero", [0, 0.0, jnp.float32(0)])
def test_a_total_of_zero_gives_zero(zero: Any) -> None:
    """Even if the weights are nonzero; its gradient is 0 too."""
    function = value_and_grad(Loss(returning(good, {"n": 3, "m": 2}), terms=TWO, totals="given"), 2)
    output, grad = jax.jit(function)(jnp.float32(1), jnp.float32([1, 2, 3, 4]), totals={"n": zero, "m": 4})
    assert {name: float(x) for name, x in output.value.items()} == {"a": 0, "b": 0.5}
    assert float(grad) == 0.5


@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: reductions.clipped(r, 1e6)], ids=["plain", "clipped"])
def test_terms_with_a_ledger(wrap: Any) -> None:
    """All denominators share one ledger, which does not change the gradients."""

    def loss(w: Any, x: Any) -> LossOutput:
        return LossOutput(good(w, x), {"n": x.size, "m": 1})

    reduction = wrap(reductions.numbered(reductions.mean(), 2))
    step = train_step(Loss(loss, terms=TWO), optax.sgd(1.0), every=2, reduction=reduction)
    w, rows = jnp.float32(2), jnp.arange(8, dtype=jnp.float32).reshape(2, 4)
    state = step.init(w, rows[0])
    for i, row in enumerate(rows):
        w, state, _ = step(w, state, row)
        assert gc.ledger.read(state.window).held == tuple(range(i + 1))
    assert float(w) == 2 - 28 / 8 - 1
