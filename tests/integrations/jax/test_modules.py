"""flax.nnx and equinox modules passed as parameters."""

from __future__ import annotations

from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gradcombine as gc
from gradcombine import losses, reductions
from gradcombine.integrations.jax import Loss, LossOutput, request_step, train_step, value_and_grad
from gradcombine.integrations.optax import accumulate
from gradcombine.verify.compare.ulp import equal_bits
from tests.integrations.jax.replicas import mesh

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
X, MASK = RNG.normal(size=(16, 3)).astype(np.float32), (RNG.random(16) < 0.6).astype(np.float32)


class Linear(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.offset = nnx.Variable(jnp.float32(0.5))  # a constant

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.linear(x)[:, 0] + self.offset)


class WithState(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.dropout = nnx.BatchNorm(3, momentum=0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(self.dropout(self.norm(x)))[:, 0]


class Drop(nnx.Module):
    def __init__(self) -> None:
        self.w, self.dropout = nnx.Param(jnp.ones(())), nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def loss(model: Any, x: Any, mask: Any) -> LossOutput:
    term = losses.token_mean(model(x) ** 2, mask)
    return LossOutput(term.numerator / term.denominator, weight=term.denominator)


def of_equinox(model: Any, x: Any, mask: Any) -> LossOutput:
    return loss(lambda x: jax.vmap(model)(x)[:, 0], x, mask)


def value_of(function: Any) -> Any:
    return lambda model, x, mask: function(model, x, mask).value


def same_bits(a: Any, b: Any) -> bool:
    return all(equal_bits(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def arrays(model: Any) -> list[Any]:
    return jax.tree.leaves(
        nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else eqx.filter(model, eqx.is_array)
    )


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(1))


@pytest.mark.sampled
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("k", [1, 4, 5])
def test_gradients_are_those_of_one_batch(k: int, jit: bool) -> None:
    model, module = Linear(nnx.Rngs(0)), mlp()
    for function, own, transform, plain in (
        (loss, model, nnx.jit, nnx.value_and_grad),
        (of_equinox, module, eqx.filter_jit, eqx.filter_value_and_grad),
    ):
        combined = value_and_grad(function, k)
        output, grads = (transform(combined) if jit else combined)(own, X, MASK)
        value, expected = plain(value_of(function))(own, X, MASK)
        assert jax.tree.structure(grads) == jax.tree.structure(expected)
        assert output.weight == MASK.sum()
        np.testing.assert_allclose(output.value, value, rtol=1e-5)
        chex.assert_trees_all_close(grads, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_statistics_are_the_mean_over_microbatches(k: int) -> None:
    model = WithState(nnx.Rngs(0))
    value_and_grad(Loss(lambda m, x: m(x).sum()), k)(model, X)
    parts = X.reshape(k, -1, 3).astype(np.float64)
    np.testing.assert_allclose(model.norm.mean[...], 0.5 * parts.mean(1).mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.norm.var[...], 0.5 + 0.5 * parts.var(1).mean(0), rtol=1e-5)
    assert model.dropout.rngs.count[...] == 1


@pytest.mark.full
def test_keys_of_random_streams_do_not_replace_a_missing_argument() -> None:
    def loss(model: Drop, x: Any, y: Any) -> Any:
        return jnp.mean(model.w[...] * model.dropout(x) - y)

    made, x = Loss(loss, batch_argnums=(1, 2)), np.ones(4, np.float32)
    for settings in ({"every": 1}, {"microbatches": 2}):
        step = train_step(made, optax.sgd(0.1), **settings)
        state = step.init(Drop(), x, x)
        with pytest.raises(
            gc.GradCombineError, match="train_step: expected 3 positional arguments or more, received 2"
        ):
            step(Drop(), state, x)
        step(Drop(), state, x, x)
    with pytest.raises(gc.GradCombineError, match="expected 3 positional arguments or more, received 2"):
        value_and_grad(made, 2)(Drop(), x)


@pytest.mark.full
def test_each_microbatch_has_keys_of_its_own() -> None:
    def dropped(model: Drop, x: Any, key: Any = None) -> tuple[Any, Any]:
        own = () if key is None else jax.random.uniform(key)
        return model.w[...] * 1.0, {"rows": model.dropout(x), "own": own}

    for rng in (None, 2):
        made = Loss(
            dropped, has_aux=True, aux_reduction={"rows": reductions.sum(), "own": reductions.sum()}, rng_argnum=rng
        )
        keys = () if rng is None else (jax.random.key(7),)
        model = Drop()
        masks = []
        for k in (1, 4, 4):
            (_, aux), _ = value_and_grad(made, k)(model, np.ones((4, 64 // k), np.float32), *keys)
            masks.append(aux["rows"])
        assert model.dropout.rngs.count[...] == 3
        assert set(np.unique(masks[0])) == {0, 2}  # one mask
        assert len(np.unique(masks[1])) > 2  # the sum of four different masks
        assert not equal_bits(masks[1], masks[2])  # the next call draws new masks
        (_, again), _ = value_and_grad(made, 4)(Drop(), np.ones((4, 16), np.float32), *keys)
        (_, twice), _ = value_and_grad(made, 4)(Drop(), np.ones((4, 16), np.float32), *keys)
        assert equal_bits(again["rows"], twice["rows"])


class Amax(nnx.Variable):
    combined_by = reductions.max()


class Scaled(nnx.Module):
    def __init__(self, kind: type[nnx.Variable]) -> None:
        self.w, self.amax = nnx.Param(jnp.float32(2)), kind(jnp.float32(0))

    def __call__(self, x: Any) -> Any:
        self.amax[...] = jnp.max(jnp.abs(x))
        return self.w * x


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_variable_is_combined_as_its_class_says(k: int) -> None:
    model = Scaled(Amax)
    value_and_grad(lambda m, x: m(x).sum(), k)(model, X)
    assert model.amax[...] == np.abs(X).max()


def steps(k: int, **settings: Any) -> Any:
    step = train_step(Loss(loss), optax.adam(0.1), **settings)
    model, state = Linear(nnx.Rngs(0)), None
    state = step.init(model)
    for _ in range(2):
        for x, mask in zip(np.split(X, k), np.split(MASK, k), strict=True):
            model, state, metrics = step(model, state, x, mask)
    return model, metrics


@pytest.mark.full
def test_train_steps_take_modules() -> None:
    over_calls, metrics = steps(4, every=4)
    in_a_scan, _ = steps(1, microbatches=4)
    assert isinstance(over_calls, Linear) and metrics.applied and metrics.weight == MASK.sum()
    assert same_bits(over_calls, in_a_scan)
    assert over_calls.offset[...] == 0.5  # neither differentiated nor optimized
    model, optimizer = Linear(nnx.Rngs(0)), nnx.Optimizer(Linear(nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(model, nnx.jit(value_and_grad(loss, 4))(model, X, MASK)[1])
    chex.assert_trees_all_close(arrays(model), arrays(in_a_scan), rtol=1e-6)


@pytest.mark.full
def test_state_changes_where_a_window_ends() -> None:
    step = train_step(lambda m, x: m(x).sum(), optax.sgd(0.0), every=4)
    model = WithState(nnx.Rngs(0))
    state = step.init(model, X[:4])
    for i, x in enumerate(np.split(X, 4)):
        assert equal_bits(model.norm.mean[...], np.zeros(3, np.float32))
        model, state, metrics = step(model, state, x)
        assert metrics.applied == (i == 3) and metrics.aux is None
    np.testing.assert_allclose(model.norm.mean[...], 0.5 * X.astype(np.float64).mean(0), rtol=1e-5)
    for x in np.split(X, 4)[:2]:
        model, state, metrics = step(model, state, x)
    before = np.array(model.norm.mean[...])
    model, state, metrics = step.flush(model, state)
    np.testing.assert_allclose(model.norm.mean[...], 0.5 * before + 0.5 * X[:8].astype(np.float64).mean(0), rtol=1e-5)


@pytest.mark.full
def test_steps_within_the_jit_of_their_library() -> None:
    step = train_step(loss, optax.sgd(0.1), every=2)
    models = []
    for function in (step, nnx.jit(step.function)):
        model = WithState(nnx.Rngs(0))
        state = step.init(model, X[:8], MASK[:8])
        for i in (0, 8):
            model, state, metrics = function(model, state, X[i : i + 8], MASK[i : i + 8])
        assert metrics.applied and model.dropout.rngs.count[...] == 1
        models.append([*arrays(model), model.norm.mean[...]])
    chex.assert_trees_all_close(*models, rtol=1e-5, atol=1e-6)
    step, modules = train_step(of_equinox, optax.sgd(0.1), every=2), []
    for function in (step, eqx.filter_jit(step.function)):
        module = jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, mlp())
        state = step.init(module)
        for i in (0, 8):
            module, state, _ = function(module, state, X[i : i + 8], MASK[i : i + 8])
        modules.append(arrays(module))
    chex.assert_trees_all_close(*modules, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_train_steps_take_equinox() -> None:
    step = train_step(of_equinox, optax.adam(0.1), every=2)
    model, expected = mlp(), mlp()
    state, tx = step.init(model), optax.adam(0.1)
    opt_state = tx.init(eqx.filter(expected, eqx.is_inexact_array))
    for x, mask in zip(np.split(X, 2), np.split(MASK, 2), strict=True):
        model, state, _ = step(model, state, x, mask)
    grads = eqx.filter_grad(value_of(of_equinox))(expected, X, MASK)
    updates, _ = tx.update(grads, opt_state)
    expected = eqx.apply_updates(expected, updates)
    assert model.activation is expected.activation
    chex.assert_trees_all_close(arrays(model), arrays(expected), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("by", ["mask", "zeroed"])
def test_a_window_in_which_nothing_counts_leaves_the_state(by: str) -> None:
    def of_value(model: Any, x: Any, factor: Any) -> Any:
        return (model(x) ** 2).mean() * factor

    if by == "mask":
        function, args, reduction = loss, (X, 0 * MASK), reductions.mean()
    else:
        args, reduction = (X, jnp.float32(jnp.inf)), reductions.zeroed(reductions.mean())
        function = Loss(of_value, batch_argnums=1)
    model = WithState(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    value_and_grad(function, 4, reduction=reduction)(model, *args)
    chex.assert_trees_all_equal(nnx.state(model), before)
    step = train_step(function, optax.sgd(0.1), microbatches=4, reduction=reduction)
    model, _, metrics = step(model, step.init(model), *args)
    assert metrics.applied
    chex.assert_trees_all_equal(nnx.state(model), before)
    step = train_step(function, optax.sgd(0.1), every=2, reduction=reduction)
    state = step.init(model, *args)
    for applied in (False, True):
        model, state, metrics = step(model, state, *args)
        assert metrics.applied == applied
        chex.assert_trees_all_equal(nnx.state(model), before)


class Normalized(nnx.Module):
    """Has a plain array, and a layer that writes its own kernel."""

    def __init__(self, wrapper: Any, rngs: nnx.Rngs) -> None:
        self.offset, linear = jnp.arange(3.0), nnx.Linear(3, 1, rngs=rngs)
        self.linear = linear if wrapper is None else wrapper(linear, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(x + self.offset[None])[:, 0]


def test_an_array_of_a_module_is_a_constant() -> None:
    model = Normalized(None, nnx.Rngs(0))
    _, grads = value_and_grad(loss, 4)(model, X, MASK)
    _, expected = nnx.value_and_grad(value_of(loss))(model, X, MASK)
    chex.assert_trees_all_close(grads, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("wrapper", [nnx.SpectralNorm, nnx.WeightNorm])
def test_a_parameter_that_the_loss_changes_raises(wrapper: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"\.kernel.*expected parameters that only the optimizer changes"):
        value_and_grad(loss, 2)(Normalized(wrapper, nnx.Rngs(0)), X, MASK)


@pytest.mark.full
def test_requests_take_modules() -> None:
    for function, model in ((loss, Linear(nnx.Rngs(0))), (of_equinox, mlp())):
        engine = request_step(function, optax.sgd(0.1), microbatches=2)
        state = engine.init({"a": model, "b": model})
        for n in (1, 0):
            state = engine.forward_backward(state, X[8 * n : 8 * n + 8], MASK[8 * n : 8 * n + 8], slot="a", number=n)
        state, _ = engine.optim_step(state, slot="a")
        step = train_step(function, optax.sgd(0.1), every=2)
        whole, opt = jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, model), step.init(model)
        for n in (1, 0):
            whole, opt, _ = step(whole, opt, X[8 * n : 8 * n + 8], MASK[8 * n : 8 * n + 8])
        assert same_bits(state["a"].params, whole)
        assert type(state["b"].params) is type(model)


@pytest.mark.full
def test_over_replicas() -> None:
    one, many = WithState(nnx.Rngs(0)), WithState(nnx.Rngs(0))
    with jax.set_mesh(mesh(4, "data")):
        nnx.jit(value_and_grad(lambda m, x: m(x).sum(), 2, over=gc.jax_axis("data")))(many, X)
    value_and_grad(lambda m, x: m(x).sum(), 8)(one, X)
    statistics = [[x.norm.mean[...], x.norm.var[...]] for x in (many, one)]
    chex.assert_trees_all_close(*statistics, rtol=1e-6)


@pytest.mark.full
def test_terms_of_a_module() -> None:
    def terms(m: Any, x: Any, mask: Any) -> LossOutput:
        terms = {"a": losses.token_mean(m(x), mask), "b": losses.token_mean(m(x) ** 2)}
        return LossOutput(terms, aux=jnp.mean(x))

    made = Loss(terms, terms={"a": "tokens", "b": "rows"})
    results = [value_and_grad(made, k)(Linear(nnx.Rngs(0)), X, MASK) for k in (1, 4)]
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


def test_optax_form() -> None:
    model = Linear(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, accumulate(optax.sgd(0.1), every=2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda m, x: m(x).mean())(model, x))

    before = np.array(model.linear.kernel[...])
    whole = nnx.grad(lambda m, x: m(x).mean())(model, X)
    step(model, optimizer, X[:8])
    assert equal_bits(model.linear.kernel[...], before)
    step(model, optimizer, X[8:])
    change = before - model.linear.kernel[...]  # the parameter below 1 was rounded by up to half a unit, 2**-25
    np.testing.assert_allclose(change, 0.1 * whole["linear"]["kernel"][...], rtol=2e-6, atol=2**-24)


REFUSED: dict[str, tuple[Any, str]] = {
    "a variable without a reduction": (
        lambda: value_and_grad(lambda m, x: m(x).sum(), 2)(Scaled(nnx.Variable), X),
        "leaf .amax: expected a reduction as the class attribute combined_by",
    ),
    "modules in a dict": (
        lambda: value_and_grad(lambda m, x: m["a"](x).sum(), 2)({"a": Linear(nnx.Rngs(0))}, X),
        "expected one module, or a tree of arrays, received a dict of modules",
    ),
    "another position": (
        lambda: value_and_grad(Loss(lambda x, m: m(x).sum(), argnums=1), 2)(X, Linear(nnx.Rngs(0))),
        "expected a loss of the module as its first argument, received argnums=1",
    ),
    "state in requests": (
        lambda: request_step(loss, optax.sgd(0.1), microbatches=2).init({"a": WithState(nnx.Rngs(0))}),
        "a module without state and random streams",
    ),
    "a window without an example": (
        lambda: train_step(lambda m, x: m(x).sum(), optax.sgd(0.1), every=2)(
            model := WithState(nnx.Rngs(0)),
            train_step(lambda m, x: m(x).sum(), optax.sgd(0.1), every=2).init(model),
            X,
        ),
        "whose example shows the loss's aux",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(gc.GradCombineError) as caught:
        call()
    assert message in str(caught.value)
