"""Microbatched gradients on one replica: the bits of `gradcombine.combine`, weights, and the roles of arguments."""

from dataclasses import fields
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
from tests.spec.selection import FULL, cases, named

X = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
W = {"w": jnp.ones(4), "frozen": None}


def linear(params: Any, x: Any) -> Any:
    """The gradient is a quarter of the mean of x over examples: for one or two examples it rounds once."""
    return jnp.mean(params["w"][None] * x)


gradient = jax.jit(jax.grad(linear))


def parts_of(x: Any, size: int) -> list[Any]:
    return [x[i : i + size] for i in range(0, len(x), size)]


SIZES = [(8, 4, 2), (8, 8, 1), (2, 1, 2), (3, 8, 1), (7, 4, 2), (5, 3, 2), (6, 4, 2)]
"""Number of examples, of microbatches, and of examples in a microbatch."""
QUICK = [*(("sequential", sizes) for sizes in SIZES[1:5]), ("tree", (7, 4, 2))]


@pytest.mark.parametrize(("order", "sizes"), cases(QUICK, ("sequential", "tree"), SIZES))
def test_the_bits_are_those_of_combine(order: Any, sizes: tuple[int, int, int]) -> None:
    n, microbatches, size = sizes
    parts = parts_of(X[:n], size)
    weights = [len(x) for x in parts] if n % size else None
    expected = gc.combine(reductions.mean(), [gradient(W, x) for x in parts], weights, order)
    value, grads = jax.jit(value_and_grad(linear, microbatches, order=order))(W, X[:n])
    assert equal_bits(grads["w"], expected["w"])
    assert grads["frozen"] is None
    np.testing.assert_allclose(value, X[:n].mean(dtype=np.float64), rtol=1e-6, atol=1e-7)


OTHERS = {
    "sum": reductions.sum(),
    "exact": reductions.mean("exact"),
    "compensated": reductions.mean("compensated"),
    "max": reductions.max(),
}


@pytest.mark.parametrize("reduction", named(("sum", "compensated", "max"), OTHERS))
def test_other_reductions(reduction: gc.Reduction) -> None:
    parts = parts_of(X[:7], 2)
    weights = [len(x) for x in parts] if reduction.scales_by_weight else None
    expected = gc.combine(reduction, [gradient(W, x) for x in parts], weights)
    _, grads = jax.jit(value_and_grad(linear, 4, reduction=reduction))(W, X[:7])
    assert equal_bits(grads["w"], expected["w"])


@pytest.mark.full
def test_a_sum_takes_the_weights_that_are_given() -> None:
    summed = value_and_grad(linear, 2, reduction=reductions.sum(), weight=lambda x: x.shape[0])
    value, grads = summed({"w": jnp.ones(4)}, jnp.float32([[4] * 4, [8] * 4, [1] * 4]))
    assert (float(value), grads["w"].tolist()) == (13.0, [13 / 4] * 4)


TOKENS = np.float32([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
TEXT = np.float32([[1, 2, 3, 4, 5, 9], [6, 2, np.nan, 0, 0, 0], [3, 0, 0, 0, 0, 0], [np.nan] * 6])
"""Nine tokens that sum to 35; a microbatch of padding alone has a loss of NaN."""


def token_mean(w: Any, text: Any, mask: Any) -> Any:
    return jnp.sum(w * jnp.where(mask > 0, text, 0)) / jnp.sum(mask)


def weighing(w: Any, text: Any, mask: Any) -> Any:
    return LossOutput(token_mean(w, text, mask), weight=jnp.sum(mask))


@pytest.mark.parametrize("microbatches", [pytest.param(2, marks=FULL), 4])
def test_the_mean_over_tokens_is_that_of_the_full_batch(microbatches: int) -> None:
    batch = jnp.float32(9), TEXT, TOKENS
    value, grad = jax.jit(value_and_grad(token_mean, microbatches, weight=lambda _, mask: mask.sum()))(*batch)
    assert (value, grad) == (np.float32(9 * 35 / 9), np.float32(35 / 9))
    output, same = jax.jit(value_and_grad(weighing, microbatches))(*batch)
    assert (output.value, output.weight, same) == (value, 9, grad)
    assert (output.aux, output.carry) == (None, None)
    unweighted, _ = value_and_grad(token_mean, microbatches)(*batch)
    assert unweighted != value


def with_aux(w: Any, x: Any) -> Any:
    aux = {"mean": x.mean(), "sum": jnp.int32(x.shape[0]), "max": x.max(), "last": x[-1], "spread": x.mean()}
    return jnp.mean(w * x), aux


def test_aux_is_combined_leaf_by_leaf() -> None:
    by = {
        "mean": reductions.mean(),
        "sum": reductions.sum(),
        "max": reductions.max(),
        "last": reductions.last(),
        "spread": reductions.moments(),
    }
    x = jnp.float32([1, 7, 3, 5, 9])
    (value, aux), _ = jax.jit(value_and_grad(Loss(with_aux, has_aux=True, aux_reduction=by), 3))(jnp.float32(1), x)
    moments = aux.pop("spread")
    assert jax.tree.map(float, aux) == {"mean": 5.0, "sum": 5.0, "max": 9.0, "last": 9.0}
    assert aux["sum"].dtype == np.int32
    # The microbatch means are 4, 4, 9, with weights 2, 2, 1.
    assert (float(value), float(moments.mean), float(moments.variance)) == (5.0, 5.0, 4.0)


@pytest.mark.full
def test_aux_is_averaged_by_default_and_integers_ask_for_a_reduction() -> None:
    f = value_and_grad(Loss(lambda w, x: (jnp.mean(w * x), {"x": x[0]}), has_aux=True), 3)
    assert float(f(jnp.float32(1), jnp.float32([1, 7, 3, 5, 9]))[0][1]["x"]) == np.float32((2 * 1 + 2 * 3 + 9) / 5)
    with pytest.raises(gc.GradCombineError, match=r"leaf .*\['sum'\]: expected a dtype that is float or complex"):
        value_and_grad(Loss(with_aux, has_aux=True), 3)(jnp.float32(1), X[:, 0])


@pytest.mark.parametrize("leaf", [np.int32(2), jax.random.key(0)], ids=["counter", "key"])
def test_parameters_without_a_gradient_are_named(leaf: Any) -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(x @ params["w"])

    with pytest.raises(gc.GradCombineError, match=r"value_and_grad: leaf \['more'\]: expected floats or complex"):
        value_and_grad(loss, 2)({"w": jnp.ones(3), "more": leaf}, jnp.ones((4, 3)))


def drawing(w: Any, seen: Any, key: Any, x: Any) -> Any:
    i, keys = seen
    return LossOutput(jnp.mean(w * x), carry=(i + 1, keys.at[i].set(jax.random.key_data(key))))


@pytest.mark.parametrize("key", named(("typed",), {"typed": jax.random.key(3), "raw": jax.random.PRNGKey(3)}))
def test_each_microbatch_has_a_key_of_its_own_and_the_carry_goes_through_all(key: Any) -> None:
    keys = jnp.zeros((4, 2), np.uint32)
    f = jax.jit(value_and_grad(Loss(drawing, carry_argnum=1, rng_argnum=2), 4))
    output, _ = f(jnp.float32(1), (jnp.int32(0), keys), key, X[:7, 0])
    count, keys = output.carry
    assert int(count) == 4
    expected = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(4)]
    np.testing.assert_array_equal(keys, expected)
    assert len({tuple(row) for row in np.asarray(keys).tolist()}) == 4


def test_batch_statistics_are_those_of_the_last_microbatch() -> None:
    def loss(w: Any, running: Any, x: Any) -> Any:
        return LossOutput(jnp.mean(w * x), carry=running / 2 + x.mean())

    output, _ = value_and_grad(Loss(loss, carry_argnum=1), 3)(
        jnp.float32(1), jnp.float32(8), jnp.float32([2, 4, 6, 8, 1])
    )
    assert float(output.carry) == ((8 / 2 + 3) / 2 + 7) / 2 + 1


@pytest.mark.full
def test_arguments_keep_their_roles() -> None:
    def loss(scale: Any, w: Any, batch: Any, b: Any, *, power: Any) -> Any:
        return jnp.mean(scale * (w["w"] * batch["x"] + batch["y"][:, 0] + b) ** power)

    f = value_and_grad(Loss(loss, argnums=(1, 3), batch_argnums=2), 2)
    args = (
        jnp.float32(2),
        {"w": jnp.float32(3)},
        {"x": jnp.float32([1, 2, 3, 4]), "y": jnp.ones((4, 1))},
        jnp.float32(1),
    )
    assert f(*args, power=1) == jax.value_and_grad(loss, (1, 3))(*args, power=1)


def test_interleaved_microbatches_hold_every_mth_example() -> None:
    def last(w: Any, x: Any) -> Any:
        return jnp.mean(w * x), x

    f = value_and_grad(Loss(last, has_aux=True, aux_reduction=reductions.last()), 3, interleaved=True)
    (_, x), grad = f(jnp.float32(1), jnp.arange(6.0))
    assert (x.tolist(), float(grad)) == ([2, 5], 2.5)


def test_narrow_gradients_are_accumulated_in_float32() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(w * x)

    f = jax.jit(value_and_grad(loss, 300, reduction=reductions.sum(output_dtype=np.float32)))
    value, grad = f(jnp.bfloat16(1), jnp.ones((300,), jnp.bfloat16))
    assert (float(value), float(grad), grad.dtype) == (300.0, 300.0, np.float32)
    _, mean = jax.jit(value_and_grad(loss, 300))(jnp.bfloat16(1), jnp.ones((300,), jnp.bfloat16))
    assert (float(mean), mean.dtype) == (1.0, jnp.bfloat16)


def test_the_loss_is_traced_as_often_for_many_microbatches_as_for_few() -> None:
    def traces(microbatches: int) -> int:
        seen: list[int] = []
        jax.make_jaxpr(value_and_grad(lambda w, x: (seen.append(1), linear(w, x))[1], microbatches))(W, X[:8])
        return len(seen)

    assert 0 < traces(8) == traces(2)


Y, ONES = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32), jnp.ones(4)
"""Microbatches whose weights are applied by scaling the loss."""
MEAN_AND_SUM = {"mean": reductions.mean(), "sum": reductions.sum()}
REDUCTIONS = pytest.mark.parametrize("reduction", named(("mean",), MEAN_AND_SUM))


def weighed(w: Any, x: Any, weight: Any) -> Any:
    """For weight 0 the loss is 0 / 0 and its gradient NaN."""
    return LossOutput(jnp.sum(w[None] * x * weight) / jnp.sum(weight), jnp.sum(weight))


def rows(w: Any, x: Any, weight: Any) -> Any:
    return jnp.mean(w[None] * x)


@pytest.mark.parametrize("reduction", MEAN_AND_SUM.values(), ids=MEAN_AND_SUM)
@pytest.mark.parametrize(
    "weights",
    [pytest.param([1, 2, 4, 8, 16, 1], marks=FULL), [0, 2, 4, 0, 16, 0], pytest.param([0, 0, 0, 0, 0, 1], marks=FULL)],
)
def test_powers_of_two_have_the_bits_of_combine(reduction: gc.Reduction, weights: list[float]) -> None:
    array = np.float32(weights)[:, None]
    output, grad = jax.jit(value_and_grad(weighed, 6, reduction=reduction))(ONES, Y, array)
    parts = [x for x, weight in zip(Y, weights, strict=True) if weight]
    assert equal_bits(grad, gc.combine(reduction, parts, [weight for weight in weights if weight]))
    assert float(output.weight) == sum(weights)


@pytest.mark.full
@REDUCTIONS
def test_no_microbatch_that_counts_gives_zeros(reduction: gc.Reduction) -> None:
    zeros = np.zeros((2, 6, 1), np.float32)
    _, grad = jax.jit(value_and_grad(weighed, 6, reduction=reduction))(ONES, Y, zeros[0])
    np.testing.assert_array_equal(grad, 0)
    # If all weights of one replica are 0, the result is that of the other replica.
    both = np.stack([Y, Y]), np.stack([zeros[0], zeros[0] + 1])
    f = value_and_grad(weighed, 6, reduction=reduction, over=gc.jax_axis("d"))
    _, grads = jax.jit(jax.vmap(f, in_axes=(None, 0, 0), axis_name="d"))(ONES, *both)
    expected = gc.combine(reduction, list(Y))
    assert equal_bits(grads[0], expected) and equal_bits(grads[1], expected)


@REDUCTIONS
@pytest.mark.parametrize(
    "weight", [np.float32(-1), np.float32(np.nan), pytest.param(np.float32(np.inf), marks=FULL), np.int32(-1)]
)
def test_a_traced_weight_that_is_none_makes_all_of_it_nan(reduction: gc.Reduction, weight: Any) -> None:
    weights = np.array([1, 1, weight, 1, 1, 1], weight.dtype)[:, None]
    f = jax.jit(value_and_grad(rows, 6, weight=lambda x, weight: weight.sum(), reduction=reduction))
    assert np.isnan(f(ONES, Y, weights)[1]).all()


@pytest.mark.parametrize(("dtype", "largest"), [(jnp.float16, 40_000), (jnp.float8_e4m3fn, 448)])
def test_a_loss_in_a_dtype_of_small_range_is_not_scaled(dtype: Any, largest: int) -> None:
    """Twice these numbers would overflow."""

    def narrow(w: Any, x: Any, weight: Any) -> Any:
        return jnp.sum(w.astype(dtype).astype(jnp.float32) * largest) + 0 * x.sum()

    f = jax.jit(value_and_grad(narrow, 6, weight=lambda x, weight: weight.sum()))
    expected = float(dtype(largest))
    assert np.asarray(f(ONES, Y, np.full((6, 1), 2, np.float32))[1]).tolist() == [expected] * 4


def test_a_parameter_of_small_range_does_not_get_a_scaled_gradient() -> None:
    """The loss computes in float32, but 10,000 times the gradient of 30 overflows in the parameter's float16."""

    def loss(w: Any, x: Any, weight: Any) -> Any:
        return jnp.sum(w.astype(jnp.float32) * 30) + 0 * x.sum()

    for k in (6, 4):  # 4: microbatches of two sizes
        f = jax.jit(value_and_grad(loss, k, weight=lambda x, weight: weight.sum()))
        grad = f(ONES.astype(jnp.float16), Y, np.full((6, 1), 1e4, np.float32))[1]
        assert grad.dtype == jnp.float16 and np.asarray(grad).tolist() == [30] * 4


@pytest.mark.parametrize("exponent_bits", [4, 5, 8])
def test_a_loss_of_reduced_range_is_not_scaled(exponent_bits: int) -> None:
    """The derivative of a reduction of precision reduces that of the gradient, which its weight would overflow."""

    def loss(w: Any, x: Any, weight: Any) -> Any:
        return jnp.sum(jax.lax.reduce_precision(w, exponent_bits, 7) * 30) + 0 * x.sum()

    f = jax.jit(value_and_grad(loss, 6, weight=lambda x, weight: weight.sum()))
    assert np.asarray(f(ONES, Y, np.full((6, 1), 2**13, np.float32))[1]).tolist() == [30] * 4


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def in_scan(x: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (clipped(carry), None), x, None, length=1)[0]


def by_linear_call(x: Any) -> Any:
    return jax.custom_derivatives.linear_call(lambda _, x: x, lambda _, g: jnp.clip(g, -1, 1), (), x)


@pytest.mark.parametrize("bounded", [clipped, jax.jit(clipped), jax.checkpoint(clipped), in_scan, by_linear_call])
def test_a_backward_pass_that_clips_gets_cotangents_of_the_loss(bounded: Any) -> None:
    """A gradient of 0.25 is below the bound; 100 times it is not."""

    def loss(w: Any, x: Any, weight: Any) -> Any:
        return jnp.sum(bounded(w)) * 0.25 + 0 * x.sum()

    for k, weight in ((6, 100.0), (4, 1.0)):
        f = jax.jit(value_and_grad(loss, k, weight=lambda x, weight: weight.sum()))
        assert np.asarray(f(ONES, Y, np.full((6, 1), weight, np.float32))[1]).tolist() == [0.25] * 4


def test_a_carry_goes_through_microbatches_of_weight_0() -> None:
    def counting(w: Any, seen: Any, x: Any, weight: Any) -> Any:
        return LossOutput(jnp.sum(w[None] * x * weight) / jnp.sum(weight), jnp.sum(weight), carry=seen + 1)

    weights = np.float32([1, 0, 1, 0, 1, 1])[:, None]
    output, grad = jax.jit(value_and_grad(Loss(counting, carry_argnum=1), 6))(ONES, jnp.int32(0), Y, weights)
    assert int(output.carry) == 6
    assert equal_bits(grad, gc.combine(reductions.mean(), [Y[i] for i in (0, 2, 4, 5)]))


ONE = jnp.float32(1)
ROLES = {x.name for x in fields(Loss)} - {"function"}


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({"microbatches": 0}, (), "expected from 1 to 2\\*\\*24 microbatches, received 0"),
        ({"microbatches": 2.0}, (), "received 2.0"),
        ({"loss": 3}, (), "expected a function as loss, received 3"),
        ({"weight": 3}, (), "expected a function as weight, received 3"),
        ({"reduction": reductions.mean}, (), "expected a Reduction, .*, received mean, not called"),
        ({"over": "data"}, (), "expected a collective: LOCAL, jax_axis"),
        ({"order": "ring"}, (), "expected order 'sequential' or 'tree'"),
        ({"rng_argnum": 0}, (), r"expected argument positions, .* received \[0, 0\]"),
        ({"argnums": -1}, (), "expected argument positions"),
        ({}, (ONE,), "expected a batch argument with an array, received none"),
        ({"batch_argnums": ()}, (ONE, X), "expected a batch argument with an array, received none"),
        ({"argnums": ()}, (), "expected a batch argument with an array, received none"),
        ({"batch_argnums": 2}, (ONE, X), "expected 3 positional arguments or more, received 2"),
        ({}, (ONE, X, ONE), r"leaf \[1\]: expected a batch argument with a first axis of examples, received a scalar"),
        ({}, (ONE, X, X[:3]), r"leaf \[1\]: expected 10 examples, as in \[0\], received 3"),
        ({}, (ONE, {"{0}": X, "{x}": X[:3]}), r"\['\{x\}'\]: expected 10 examples, as in \[0\]\['\{0\}'\], received 3"),
        ({}, (ONE, X[:0]), "expected a batch of one example or more, received an empty one"),
        ({"loss": lambda w, x: w * x}, (ONE, X[:, 0]), r"real floating scalar, received float32 of shape \(5,\)"),
        ({"loss": lambda w, x: jnp.int32(1)}, (ONE, X), "real floating scalar, received int32"),
        ({"has_aux": True}, (ONE, X), r"expected a loss that returns \(value, aux\) or a LossOutput, received"),
        ({"loss": lambda w, x: (w, x)}, (ONE, X), "expected a loss that returns a scalar .* received tuple of 2"),
        ({"loss": lambda w, x: LossOutput(w, 1), "weight": len}, (ONE, X), "received both"),
        ({"loss": lambda w, x: LossOutput(w, -1)}, (ONE, X), "a finite weight that is not negative, received -1"),
        ({"weight": lambda x: x}, (ONE, X), r"expected a weight of shape \(\)"),
        ({"loss": lambda w, x: LossOutput(w, carry=w)}, (ONE, X), "expected carry_argnum, for a loss that returns"),
        ({"carry_argnum": 2}, (ONE, X, ONE), r"expected a loss that returns LossOutput\(carry=...\), for carry_argnum"),
        ({"loss": lambda w, x: LossOutput(w, aux={"a": "s"})}, (ONE, X), r"leaf \['aux'\]\['a'\]: .* received 's'"),
        ({"loss": lambda w, x, c: LossOutput(w, carry="s"), "carry_argnum": 2}, (ONE, X, ONE), r"\['carry'\]: .* 's'"),
    ],
)
def test_bad_input(options: dict[str, Any], args: tuple[Any, ...], message: str) -> None:
    settings = {"loss": lambda w, *batch: w, "microbatches": 2} | options
    of_loss = {name: settings.pop(name) for name in options if name in ROLES}
    if of_loss:
        settings["loss"] = Loss(settings["loss"], **of_loss)
    with pytest.raises(gc.GradCombineError, match=f"value_and_grad.*{message}"):
        value_and_grad(**settings)(*args)


def test_a_microbatch_that_is_zeroed_counts_in_no_result() -> None:
    def loss(w: Any, x: Any) -> Any:
        return LossOutput(jnp.mean((w - x) ** 2), aux={"sum": x.sum(), "largest": x.max()})

    aux = {"sum": reductions.sum(), "largest": reductions.max()}
    wrapped = Loss(loss, aux_reduction=aux)
    x, reduction = jnp.float32([1, 2, jnp.nan, 40, 5, 6]), reductions.zeroed(reductions.mean())
    output, grad = jax.jit(value_and_grad(wrapped, 3, reduction=reduction))(jnp.float32(1), x)
    assert (float(output.value), float(grad), float(output.weight)) == (10.5, -5.0, 2.0)
    assert {name: float(a) for name, a in output.aux.items()} == {"sum": 14.0, "largest": 6.0}
    step = train_step(wrapped, optax.sgd(0.125), every=3, reduction=reduction)
    params, state = jnp.float32(1), step.init(jnp.float32(1), x[:2])
    for i in (0, 2, 4):
        params, state, metrics = step(params, state, x[i : i + 2])
    assert (float(metrics.value), float(metrics.weight), float(params)) == (10.5, 4.0, 1.625)


def test_a_microbatch_without_a_norm_counts_in_no_result() -> None:
    def loss(w: Any, x: Any) -> Any:
        return (w * x).mean()

    x = jnp.float32([1, 2, 1e25, 1e25, 3, 4])  # the square of the second gradient's norm overflows
    reduction = reductions.clipped(reductions.zeroed(reductions.mean()), 100)
    assert jax.jit(value_and_grad(loss, 3, reduction=reduction))(jnp.float32(1), x) == (2.5, 2.5)


def at_indices(p: Any, x: Any, table: Any) -> Any:
    return jnp.mean((table[x] @ p) ** 2)


def at_indices_weighed(p: Any, x: Any, table: Any) -> LossOutput:
    return LossOutput(at_indices(p, x, table), weight=jnp.sum(x >= 0))


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_numpy_arrays_are_indexed_by_the_batch(by_name: bool, weighed: bool) -> None:
    """A call that is not compiled indexes NumPy arrays, shared by all microbatches, with traced integers."""
    table, x = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4)
    loss = Loss(at_indices_weighed if weighed else at_indices, batch_argnums=1)
    others = ((), {"table": table}) if by_name else ((table,), {})
    value, grads = value_and_grad(loss, 2)(np.ones(2, np.float32), x, *others[0], **others[1])
    assert float(value.value if weighed else value) == (1 + 25 + 81 + 169) / 4
    assert grads.tolist() == [(0 * 1 + 2 * 5 + 4 * 9 + 6 * 13) / 2, (1 * 1 + 3 * 5 + 5 * 9 + 7 * 13) / 2]


@pytest.mark.parametrize("weighed", [False, True])
def test_numpy_parameters_are_indexed_by_the_batch(weighed: bool) -> None:
    def loss(p: Any, x: Any) -> Any:
        value = jnp.mean(p[x] ** 2)
        return LossOutput(value, weight=jnp.sum(x >= 0)) if weighed else value

    _, grads = value_and_grad(loss, 2)(np.arange(4, dtype=np.float32), np.arange(4))
    assert grads.tolist() == [0, 0.5, 1, 1.5]
