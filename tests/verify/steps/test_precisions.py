"""Steps whose leaves have several dtypes or very different sizes: defects are found, and rounding is not accused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.verify import Cause, StepReport, Verdict, check_step
from tests.verify.steps.defects import pieces
from tests.verify.steps.dividing import eager, jitted, stacked

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 5)).astype(np.float32)
BATCH = {"x": X, "y": RNG.normal(size=8).astype(np.float32), "mask": np.float32([1, 1, 1, 0, 1, 0, 0, 1])}
W = np.float32([1, 2, 3, 4, 5])
NARROW = jnp.bfloat16


def loss(w: Any, part: Any, dtype: Any = jnp.float32) -> Any:
    """Sum over the real examples, with products in a dtype."""
    y = (part["x"].astype(dtype) @ w.astype(dtype)).astype(jnp.float32)
    return ((y - part["y"]) ** 2 * part["mask"]).sum()


def right(w: Any, batch: Any, k: int, dtype: Any = jnp.float32) -> Any:
    return sum(jax.grad(loss)(w, part, dtype) for part in pieces(batch, k)) / batch["mask"].sum()


def mean_of_means(w: Any, batch: Any, k: int) -> Any:
    return sum(jax.grad(loss)(w, x) / x["mask"].sum() for x in pieces(batch, k)) / k


def first_half(w: Any, batch: Any, k: int) -> Any:
    return right(w, pieces(batch, k)[0], 1)


def updated(optimizer: Any, gradient: Any) -> Callable[[int], Any]:
    def step(state: Any, batch: Any, k: int) -> Any:
        updates, new = optimizer.update(gradient(state[0], batch, k), state[1], state[0])
        return optax.apply_updates(state[0], updates), new

    return jitted(step)


def narrow_sum(k: int, scale: float = 1.0, dtype: Any = NARROW) -> Any:
    """Narrow products, as in one batch, and in a division also a narrow accumulator."""

    @jax.jit
    def step(w: Any, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return total + (jax.grad(loss)(w, part, NARROW) * scale).astype(total.dtype), None

        total, _ = jax.lax.scan(add, jnp.zeros(5, jnp.float32 if k == 1 else dtype), stacked(batch, k))
        return total.astype(jnp.float32) / batch["mask"].sum()

    return step


def stores(w: Any, batch: Any, k: int, rounds: Callable[[int], bool]) -> Any:
    """Float32 parameters beside narrow products, which some divisions round to the narrow dtype."""
    new = w - 1e-3 * right(w, batch, k, NARROW)
    return new.astype(NARROW).astype(w.dtype) if rounds(k) else new


THIRDS = {"params": W / 3, "returns": "params"}
MANY = {"x": np.tile(X, (64, 1)), "y": np.tile(BATCH["y"] + 9, 64), "mask": np.ones(512, np.float32)}
NO_MASK = BATCH | {"mask": np.ones(8, np.float32)}
ADAM = optax.adam(1e-2, mu_dtype=NARROW)

DEFECTS: dict[str, tuple[Callable[[int], Any], Any, dict[str, Any], Cause]] = {
    "beside a large metric": (
        jitted(lambda w, b, k: (first_half(w, b, k), jnp.float32(1e15))), BATCH, {}, Cause.LOST,
    ),
    "narrow products and many narrow additions": (narrow_sum, MANY, {"microbatches": (512,)}, Cause.PRECISION),
    "narrow products and few narrow additions": (narrow_sum, BATCH, {}, Cause.PRECISION),
    "narrow products and underflow": (
        partial(narrow_sum, scale=1e-9, dtype=jnp.float16), BATCH, {}, Cause.PRECISION,
    ),
    "narrow products and narrow parameters": (
        jitted(partial(stores, rounds=lambda k: True)), BATCH, THIRDS, Cause.INACCURATE,
    ),
    "narrow products and narrow parameters in divisions": (
        jitted(partial(stores, rounds=lambda k: k > 1)), BATCH, THIRDS, Cause.PRECISION,
    ),
    "a narrower result": (
        lambda k: lambda w, b: right(w, b, k).astype(jnp.float32 if k == 1 else NARROW), BATCH, {}, Cause.PRECISION,
    ),
    "in a division that is not the last": (
        updated(optax.adam(1e-3), mean_of_means), NO_MASK,
        {"params": (W, optax.adam(1e-3).init(W)), "microbatches": (3, 2), "returns": "params"}, Cause.MEAN_OF_MEANS,
    ),
}  # fmt: skip


def checked(make: Any, batch: Any, params: Any = W, **options: Any) -> StepReport:
    return check_step(make, params, batch, **options)


@pytest.mark.sampled
@pytest.mark.needs("jax", "optax")
@pytest.mark.usefixtures("as_users_do")
@pytest.mark.parametrize("name", DEFECTS)
def test_what_rounding_or_a_large_leaf_could_hide_is_found(name: str) -> None:
    make, batch, options, cause = DEFECTS[name]
    report = checked(make, batch, **options)
    assert report.cause is cause, str(report)


@eager
def in_float64(w: Any, batch: Any, k: int) -> Any:
    """Weights in float64, so that the result is, too."""
    parts = [x for x in pieces(batch, k) if x["mask"].sum()]
    sums = [2 * x["x"].T @ ((x["x"] @ w - x["y"]) * x["mask"]) for x in parts]
    counts = np.array([x["mask"].sum() for x in parts], np.float64)
    return sum(g * a for g, a in zip(sums, 1 / counts * (counts / counts.sum()), strict=True))


RIGHT: dict[str, tuple[Callable[[int], Any], dict[str, Any]]] = {
    "a moment in bfloat16": (updated(ADAM, right), {"params": (W, ADAM.init(W)), "returns": "params"}),
    "parameters in bfloat16": (
        jitted(lambda w, b, k: right(w.astype(jnp.float32), b, k).astype(NARROW)), {"params": W.astype(NARROW) * 1.3},
    ),
    "a metric in bfloat16": (jitted(lambda w, b, k: (right(w, b, k), loss(w, b).astype(NARROW))), {}),
    "weights in float64": (in_float64, {}),
    "narrow products": (jitted(partial(right, dtype=NARROW)), {}),
    "narrow products and new parameters": (jitted(partial(stores, rounds=lambda k: False)), THIRDS),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.needs("jax", "optax")
@pytest.mark.usefixtures("as_users_do")
@pytest.mark.parametrize("name", RIGHT)
def test_the_rounding_of_each_dtype_is_not_accused(name: str) -> None:
    make, options = RIGHT[name]
    report = checked(make, BATCH, **options)
    assert report.passes, str(report)


# --- accumulators beside narrow products ---


def added_by(how: str, add: Callable[[Any, Any], Any], start: Any, gradient: Callable[[Any], Any], parts: Any) -> Any:
    if how == "scan":
        return jax.lax.scan(lambda total, part: (add(total, gradient(part)), None), start, parts)[0]
    if how == "fori_loop":
        return jax.lax.fori_loop(0, len(parts), lambda i, total: add(total, gradient(parts[i])), start)
    for i in range(len(parts)):
        if how == "cond":
            start = jax.lax.cond(parts[i].any(), lambda x, i=i: add(x, gradient(parts[i])), lambda x: x, start)
        else:
            start = add(start, gradient(parts[i]))
    return start


def shared(p: Any, x: Any) -> Any:
    """The loss of narrow products that share a weight, whose gradients JAX adds in the narrow dtype."""
    narrow = jax.tree.map(lambda a: a.astype(NARROW), p)
    y = jnp.tanh(x.astype(NARROW) @ narrow["shared"]) @ narrow["own"]
    return ((y @ narrow["shared"].T).astype(jnp.float32) ** 2).sum()


@pytest.mark.sampled
@pytest.mark.needs("jax")
@pytest.mark.usefixtures("as_users_do")
@pytest.mark.parametrize("how", ["scan", "loop", "fori_loop", "cond"])
@pytest.mark.parametrize("of_narrow", [True, False], ids=["narrow gradients", "float32 gradients"])
@pytest.mark.parametrize("optimizer", [None, optax.adamw(1e-3), optax.lion(1e-3)], ids=["none", "adamw", "lion"])
def test_a_narrow_accumulator_is_found_beside_narrow_products(how: str, of_narrow: bool, optimizer: Any) -> None:
    params: Any = {
        "shared": RNG.normal(size=(5, 6)).astype(np.float32),
        "own": RNG.normal(size=(6, 6)).astype(np.float32),
    }

    def make(k: int, dtype: Any) -> Any:
        def step(p: Any, batch: Any) -> Any:
            def gradient(part: Any) -> Any:
                return jax.grad(shared)(jax.tree.map(lambda a: a.astype(NARROW), p) if of_narrow else p, part)

            def add(total: Any, grads: Any) -> Any:
                return jax.tree.map(lambda a, b: a + b.astype(dtype), total, grads)

            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, dtype), p)
            total = added_by(how, add, zeros, gradient, batch.reshape(k, -1, 5))
            return jax.tree.map(lambda a: a.astype(jnp.float32) / 8, total)

        def updating(state: Any, batch: Any) -> Any:
            updates, new = optimizer.update(step(state[0], batch), state[1], state[0])
            return optax.apply_updates(state[0], updates), new

        return jax.jit(updating if optimizer else step)

    options: dict[str, Any] = {"returns": "gradients"}
    if optimizer is not None:
        params, options = (params, optimizer.init(params)), {"returns": "params"}
    causes = [checked(partial(make, dtype=x), jnp.asarray(X), params, **options).cause for x in (jnp.float32, NARROW)]
    assert causes == [None, Cause.PRECISION]


# --- in NumPy ---


def gradient(w: Any, part: Any) -> Any:
    return 2 * part["x"].T @ ((part["x"] @ w - part["y"]) * part["mask"]) / part["mask"].sum()


def weighted(w: Any, batch: Any, k: int) -> Any:
    return sum(gradient(w, x) * (x["mask"].sum() / batch["mask"].sum()) for x in pieces(batch, k) if x["mask"].any())


@eager
def in_place(w: Any, batch: Any, k: int) -> Any:
    w -= w.dtype.type(0.1) * gradient(w, pieces(batch, k)[0])
    return w


@eager
def labeled(w: Any, batch: Any, k: int) -> Any:
    """A mean of means over the examples whose label is not -1."""
    parts = [x | {"mask": (x["label"] != -1).astype(w.dtype)} for x in pieces(batch, k)]
    return w - w.dtype.type(0.1) * (sum(gradient(w, x) for x in parts) / w.dtype.type(k))


LABELED = BATCH | {"label": np.float32([0.3, 1.7, 2, -1, 0, -1, -1, 1])}


@pytest.mark.parametrize(
    ("make", "batch", "cause"), [(in_place, BATCH, Cause.LOST), (labeled, LABELED, Cause.MEAN_OF_MEANS)]
)
def test_steps_of_numpy_that_return_parameters(make: Any, batch: Any, cause: Cause) -> None:
    report = check_step(make, W, batch, returns="params")
    assert report.cause is cause, str(report)


def padded(batch: Any, n: int) -> Any:
    return {name: np.concatenate([x, np.zeros_like(x[:n])]) for name, x in batch.items()}


def counting(count: Callable[[Any], Any]) -> Any:
    return lambda k: lambda w, batch: (weighted(w, batch, k), np.int32(count(batch)))


@pytest.mark.parametrize(
    ("count", "cause"),
    [(lambda x: x["mask"].sum(), None), (lambda x: len(x["mask"]), Cause.PLACEHOLDERS)],
)
def test_an_integer_metric_counts_no_padding(count: Any, cause: Cause | None) -> None:
    report = check_step(counting(count), W, BATCH, pad=padded, microbatches=(4,))
    assert report.cause is cause, str(report)


def unguarded(k: int) -> Any:
    return lambda w, batch: sum(
        gradient(w, x) * (x["mask"].sum() / batch["mask"].sum()) for x in pieces(batch, k)
    )  # NaN for a microbatch of padding


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:divide by zero:RuntimeWarning")
def test_a_result_that_is_not_finite_with_padding_is_named() -> None:
    report = check_step(unguarded, W, BATCH, pad=padded, microbatches=(4,))
    assert report.cause is Cause.NOT_FINITE, str(report)
    assert "padding" in report.faults[0].run


def test_an_example_that_cannot_run_alone_is_left_out() -> None:
    """The step raises if no example is real."""

    @eager
    def make_step(w: Any, batch: Any, k: int) -> Any:
        parts = [gradient(w, x) * x["mask"].sum() for x in pieces(batch, k) if x["mask"].any()]
        return (parts[0] + sum(parts[1:])) / batch["mask"].sum()

    assert check_step(make_step, W, BATCH).passes


def test_gradients_of_one_size_are_compared() -> None:
    """Only a change of parameters of one size hides the sizes of gradients."""
    report = check_step(lambda k: lambda w, batch: np.full(5, np.float32(batch["y"].mean())) + 0 * w, W, BATCH)
    assert report.passes, str(report)


@pytest.mark.full
@pytest.mark.needs("jax", "optax")
@pytest.mark.usefixtures("as_users_do")
def test_adam_in_multi_steps_is_not_accused_but_hides_the_gradients() -> None:
    """The state is created inside of the step, so the parameters are all that it shows."""

    @jitted
    def make_step(w: Any, batch: Any, k: int) -> Any:
        tx = optax.MultiSteps(optax.adam(1e-2), k)
        state = tx.init(w)
        for part in pieces(batch, k):
            updates, state = tx.update(jax.grad(loss)(w, part) / len(part["x"]), state, w)
            w = optax.apply_updates(w, updates)
        return w

    report = check_step(make_step, W, NO_MASK, returns="params")
    assert report.verdict is Verdict.CANNOT_TELL, str(report)
    assert not report.faults
