"""First and second derivatives of combinations, in forward and reverse mode, equal those of the formula or raise."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import PartitionSpec

import gradcombine as gc
from gradcombine import noise, reductions, sparse
from tests.integrations.jax.replicas import mesh
from tests.integrations.tensorflow.strategies import mirrored, per_replica
from tests.spec.duals import derivatives
from tests.spec.selection import FULL, cases

N, SIZE = 3, 2
X = np.array([[1.5, -2], [0.25, 3], [7, 0.5]], np.float32)
W = np.array([1, 2.5, 4], np.float32)
ALONG_X = np.array([[1, 0.5], [-2, 1], [0.25, 3]], np.float32)
ALONG_W = np.array([0.5, -1, 2], np.float32)
SCALES = (3, 2)
FACTORS = np.array(SCALES, np.float32)
EXACT = {name: getattr(reductions, name)("exact") for name in ("sum", "mean")}


def total(xs: Any, ws: Any) -> Any:
    return sum(x * w for x, w in zip(xs, ws, strict=True))


def mean(xs: Any, ws: Any) -> Any:
    return total(xs, ws) / sum(ws)


def variance(xs: Any, ws: Any) -> Any:
    center = mean(xs, ws)
    return mean([(x - center) * (x - center) for x in xs], ws)


def elementwise(formula: Callable[..., Any]) -> Callable[..., Any]:
    return lambda rows, ws: [formula([row[k] for row in rows], ws) for k in range(SIZE)]


def adasum(rows: Any, ws: Any) -> Any:
    def dot(a: Any, b: Any) -> Any:
        return sum(x * y for x, y in zip(a, b, strict=True))

    def pair(a: Any, b: Any) -> Any:
        one, half = Fraction(1), Fraction(1, 2)
        left, right = (dot(a, b) / dot(own, own) * -half + one for own in (a, b))
        return [x * left + y * right for x, y in zip(a, b, strict=True)]

    return reduce(pair, rows)


def noise_formula(rows: Any, ws: Any) -> Any:
    """Scale, trace and squared norm, each repeated, as the losses multiply a scalar by both factors."""
    within = mean([sum(x * x for x in row) for row in rows], ws)
    between = sum(x * x for x in elementwise(mean)(rows, ws))
    error = (within - between) * Fraction(1, N - 1)
    trace, signal = error * sum(ws), between - error
    return [y for y in (trace / signal, trace, signal) for _ in SCALES]


FORMULAS = {"sum": elementwise(total), "mean": elementwise(mean)}
OTHERS: dict[str, tuple[gc.Reduction, Callable[..., Any]]] = {
    "sum": (reductions.sum(), FORMULAS["sum"]),
    "compensated": (reductions.mean("compensated"), FORMULAS["mean"]),
    "moments": (reductions.moments(), lambda rows, ws: elementwise(mean)(rows, ws) + elementwise(variance)(rows, ws)),
    "adasum": (reductions.adasum(), adasum),
    "product": (reductions.product(), elementwise(lambda xs, ws: reduce(lambda a, b: a * b, xs))),
    "max": (reductions.max(), elementwise(lambda xs, ws: max(xs))),
    "min": (reductions.min(), elementwise(lambda xs, ws: min(xs))),
    "first": (reductions.first(), elementwise(lambda xs, ws: xs[0])),
    "last": (reductions.last(), elementwise(lambda xs, ws: xs[-1])),
    "checked": (reductions.checked(EXACT["mean"]), FORMULAS["mean"]),
    "per_leaf": (
        reductions.per_leaf({"a": reductions.mean(), "b": reductions.max()}),
        lambda rows, ws: elementwise(mean)(rows, ws) + elementwise(lambda xs, ws: max(xs))(rows, ws),
    ),
}
QUICK = ("max", "moments")
"""Reductions for which the quick suite has first derivatives of a compiled function instead of second ones."""


def true_derivatives(formula: Callable[..., Any], x: np.ndarray = X, w: np.ndarray = W) -> tuple[float, float]:
    """Derivatives of ``sum(scale * result**2)`` along a direction in all contributions and weights."""

    def loss(numbers: list[Any]) -> Any:
        rows = [numbers[i * SIZE : (i + 1) * SIZE] for i in range(N)]
        results = formula(rows, numbers[N * SIZE :])
        return sum(y * y * Fraction(SCALES[k % SIZE]) for k, y in enumerate(results))

    return derivatives(loss, [*x.ravel().tolist(), *w.tolist()], [*ALONG_X.ravel().tolist(), *ALONG_W.tolist()])


def listed(reduction: gc.Reduction, xs: Any, ws: Any) -> Any:
    trees = [{"a": xs[i], "b": xs[i]} if reduction.name == "per_leaf" else xs[i] for i in range(N)]
    return gc.combine(reduction, trees, [ws[i] for i in range(N)])


def noise_listed(reduction: gc.Reduction, xs: Any, ws: Any) -> Any:
    mean_square = gc.combine(reduction, [noise.squared_norm(xs[i]) for i in range(N)], [ws[i] for i in range(N)])
    square_of_mean = noise.squared_norm(gc.combine(reduction, [xs[i] for i in range(N)], [ws[i] for i in range(N)]))
    return noise.noise_scale(mean_square, square_of_mean, sum(ws[i] for i in range(N)), N)


def rows_listed(reduction: gc.Reduction, xs: Any, ws: Any) -> Any:
    trees = [sparse.row_sparse(np.array([3, 1], np.int32), xs[i][:, None], rows=5) for i in range(N)]
    return gc.combine(reduction, trees, [ws[i] for i in range(N)]).values[::-1, 0]


def over_time(reduction: gc.Reduction, xs: Any, ws: Any, order: Any = "sequential") -> Any:
    acc = gc.accumulate(reduction, every=N, order=order)
    state = acc.init(xs[0])
    for i in range(N):
        state = acc.update(xs[i], state, ws[i])
    return acc.value(state)


def scanned(reduction: gc.Reduction, xs: Any, ws: Any, order: Any = "sequential") -> Any:
    acc = gc.accumulate(reduction, every=N, order=order)
    return acc.value(jax.lax.scan(lambda s, x: (acc.update(x[0], s, x[1]), None), acc.init(xs[0]), (xs, ws))[0])


def merged(reduction: gc.Reduction, xs: Any, ws: Any) -> Any:
    states = [reduction.update(reduction.init(xs[i]), xs[i], ws[i]) for i in range(N)]
    return reduction.finalize(reduce(reduction.merge, states))


def over_replicas(kind: str, through_a_state: bool = False) -> Callable[..., Any]:
    """Divides each replica's result by the number of replicas, so that their sum is one result."""
    axis = gc.jax_axis("data")

    def mapped(body: Any) -> Any:
        if kind == "vmap":
            return jax.vmap(body, axis_name="data")
        spec, check = PartitionSpec("data"), kind == "shard_map"
        return jax.shard_map(
            lambda x, w: body(x[0], w[0])[None], mesh=mesh(N, "data"), in_specs=spec, out_specs=spec, check_vma=check
        )

    def call(reduction: gc.Reduction, xs: Any, ws: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            if not through_a_state:
                return gc.all_reduce(reduction, x, axis, w)
            state = reduction.update(reduction.init(x), x, w)
            return reduction.finalize(gc.merge_replicas(reduction, state, axis))

        return mapped(body)(xs, ws).sum(0) / np.float32(N)

    return call


SECOND_ORDERS = {
    "forward over reverse": [("forward", "reverse")],
    "reverse over forward": [("reverse", "forward")],
    "each over itself": [("forward", "forward"), ("reverse", "reverse")],
}


def jax_derivatives(
    place: Callable[..., Any], reduction: gc.Reduction, second: str, x: np.ndarray = X
) -> list[list[float]]:
    """First derivatives by the inner mode of each of `SECOND_ORDERS`, second ones by the outer mode over it."""

    def loss(xs: Any, ws: Any) -> Any:
        return sum((y * y * FACTORS).sum() for y in jax.tree.leaves(place(reduction, xs, ws)))

    # Each returns a function's value and its derivative.
    def forward(function: Any) -> Any:
        return lambda xs, ws: jax.jvp(function, (xs, ws), (jnp.asarray(ALONG_X), jnp.asarray(ALONG_W)))

    def reverse(function: Any) -> Any:
        def value_and_slope(xs: Any, ws: Any) -> Any:
            value, (by_x, by_w) = jax.value_and_grad(function, (0, 1))(xs, ws)
            return value, (by_x * ALONG_X).sum() + (by_w * ALONG_W).sum()

        return value_and_slope

    ways = {"forward": forward, "reverse": reverse}

    def slope(mode: str) -> Any:
        return lambda xs, ws: ways[mode](loss)(xs, ws)[1]

    twice = jax.jit(lambda xs, ws: [ways[outer](slope(inner))(xs, ws) for outer, inner in SECOND_ORDERS[second]])
    return [list(map(float, order)) for order in zip(*twice(jnp.asarray(x), jnp.asarray(W)), strict=True)]


def tensorflow_derivatives(wrap: Any, place: Any, reduction: gc.Reduction, x: np.ndarray = X) -> list[list[float]]:
    """Derivatives by reverse mode, by reverse over reverse mode, and by forward mode around both."""
    along = [tf.constant(ALONG_X), tf.constant(ALONG_W)]

    def loss(*inputs: Any) -> Any:
        leaves = tf.nest.flatten(place(reduction, *inputs))
        return tf.add_n([tf.reduce_sum(y * y * tf.constant(SCALES, tf.float32)) for y in leaves])

    def slope(function: Any) -> Any:
        def call(*inputs: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                result = function(*inputs)
            # In some reductions, weights only select contributions.
            gradients: Any = tape.gradient(result, inputs, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return tf.add_n([tf.reduce_sum(g * u) for g, u in zip(gradients, along, strict=True)])

        return call

    inputs = [tf.constant(x), tf.constant(W)]
    with tf.autodiff.ForwardAccumulator(inputs, along) as accumulator:
        result = wrap(loss)(*inputs)
    first = [wrap(slope(loss))(*inputs), accumulator.jvp(result)]
    return [list(map(float, order)) for order in (first, [wrap(slope(slope(loss)))(*inputs)])]


def check(received: list[list[float]], expected: tuple[float, float]) -> None:
    for order, value in zip(received, expected, strict=True):
        np.testing.assert_allclose(order, value, rtol=2e-5)


SECOND = pytest.mark.parametrize(
    "second", ["forward over reverse", *(pytest.param(x, marks=FULL) for x in list(SECOND_ORDERS)[1:])]
)
JAX_PLACES = {"list": listed} | {kind: over_replicas(kind) for kind in ("vmap", "shard_map", "shard_map_unchecked")}
JAX_STATES: dict[str, Callable[..., Any]] = {
    "time": over_time,
    "time, order tree": partial(over_time, order="tree"),
    "scan": scanned,
    "merge": merged,
    "merge_replicas": over_replicas("shard_map", through_a_state=True),
}


@pytest.mark.full
@pytest.mark.parametrize("second", SECOND_ORDERS)
@pytest.mark.parametrize("place", JAX_PLACES)
def test_exact_in_one_call_in_jax(place: str, second: str) -> None:
    check(jax_derivatives(JAX_PLACES[place], EXACT["mean"], second), true_derivatives(FORMULAS["mean"]))


@pytest.mark.cpus
@SECOND
@pytest.mark.parametrize(
    "place", [pytest.param("time", marks=FULL), "scan", pytest.param("merge_replicas", marks=FULL)]
)
def test_exact_through_states_in_jax(place: str, second: str) -> None:
    reduction = reductions.differentiable(EXACT["mean"])
    check(jax_derivatives(JAX_STATES[place], reduction, second), true_derivatives(FORMULAS["mean"]))


def within_scan(reduction: gc.Reduction, xs: Any, ws: Any) -> Any:
    def body(total: Any, x: Any) -> Any:
        return total + gc.combine(reduction, [x, x * x, total * x]), None

    return jax.lax.scan(body, jnp.zeros(SIZE), xs)[0]


def within_scan_formula(xs: Any, ws: Any) -> Any:
    return reduce(lambda total, x: total + (x + x * x + total * x) * Fraction(1, 3), xs, Fraction(0))


@pytest.mark.parametrize(
    ("place", "reduction", "formula"),
    [
        (within_scan, EXACT["mean"], elementwise(within_scan_formula)),
        (partial(scanned, order="tree"), reductions.mean(), FORMULAS["mean"]),
    ],
    ids=["exact", "tree"],
)
def test_second_derivatives_in_the_body_of_a_scan(place: Any, reduction: gc.Reduction, formula: Any) -> None:
    """There JAX 0.10 replaces a function with a custom derivative by the function itself after the first derivative."""
    check(jax_derivatives(place, reduction, "each over itself"), true_derivatives(formula))


def test_a_derivative_changes_no_bits_of_the_result() -> None:
    """Each column is one kind of number, and the sums are rounded, so the surrogate has other bits."""
    huge, tiny = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    xs = np.float32(
        [[-0.0, tiny, huge, np.inf, np.nan, 1], [-0.0, tiny, huge, 1, 1, 2**-30], [-0.0, tiny, 1, 1, 1, -1]]
    )

    def result(xs: Any) -> Any:
        return gc.combine(EXACT["sum"], list(xs))

    plain, (primal, _) = jax.jit(result)(xs), jax.jit(lambda xs: jax.jvp(result, [xs], [jnp.ones_like(xs)]))(xs)
    assert np.asarray(plain).tobytes() == np.asarray(primal).tobytes()
    assert (float(plain[1]), float(plain[5])) == (3 * float(tiny), 2**-30)


@pytest.mark.cpus
@pytest.mark.sampled
@pytest.mark.parametrize("place", JAX_STATES)
@pytest.mark.parametrize("of", ["contributions", "weights"])
def test_a_derivative_through_integers_is_refused_in_jax(place: str, of: str) -> None:
    def loss(xs: Any, ws: Any) -> Any:
        return JAX_STATES[place](EXACT["mean"], xs, ws).sum()

    with pytest.raises(gc.GradCombineError, match=r"mean: expected reductions\.differentiable"):
        jax.eval_shape(jax.grad(loss, argnums=0 if of == "contributions" else 1), X, W)
    jax.eval_shape(loss, X, W)


def test_a_state_beside_a_derivative_is_no_derivative() -> None:
    acc = gc.accumulate(EXACT["sum"], every=2)

    def loss(x: Any) -> Any:
        return (x * x).sum(), acc.update(x, acc.init(x))

    gradient, state = jax.grad(loss, has_aux=True)(X)
    np.testing.assert_array_equal(gradient, 2 * X)
    np.testing.assert_array_equal(acc.value(state), X)


@pytest.mark.sampled
@SECOND
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=FULL if name in QUICK else ())
        for name in OTHERS
        if name != "checked"  # under jit it needs checkify
    ],
)
def test_other_reductions_in_jax(name: str, second: str) -> None:
    reduction, formula = OTHERS[name]
    check(jax_derivatives(listed, reduction, second), true_derivatives(formula))


@SECOND
def test_noise_scale_in_jax(second: str) -> None:
    received = jax_derivatives(noise_listed, reductions.mean(), second)
    check(received, true_derivatives(noise_formula))


def test_noise_scale_in_tensorflow() -> None:
    received = tensorflow_derivatives(TF_WRAPS["eager"], noise_listed, reductions.mean())
    check(received, true_derivatives(noise_formula))


def rows_loss(xs: Any, ws: Any) -> Any:
    result = rows_listed(reductions.row_mean(capacity=2), xs, ws)
    return (result * result * FACTORS).sum()


def test_rows_in_jax() -> None:
    """Forward mode works; reverse mode works eagerly only, as JAX raises for a loop in compiled code."""
    _, along = jax.jvp(jax.jit(rows_loss), (X, W), (ALONG_X, ALONG_W))
    np.testing.assert_allclose(along, true_derivatives(FORMULAS["mean"])[0], rtol=2e-5)
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.eval_shape(jax.jit(jax.grad(rows_loss)), X, W)


@pytest.mark.full
def test_rows_in_eager_reverse_mode() -> None:
    by_x, by_w = jax.grad(rows_loss, (0, 1))(X, W)
    along = (by_x * ALONG_X).sum() + (by_w * ALONG_W).sum()
    np.testing.assert_allclose(along, true_derivatives(FORMULAS["mean"])[0], rtol=2e-5)


AT_ZERO = np.array([[0, -2], [-1, 0], [-3, -1]], np.float32)


@pytest.mark.parametrize("name", ["max", "min"])
def test_extrema_at_zero_in_jax(name: str) -> None:
    sign = 1 if name == "max" else -1
    gradient = jax.grad(lambda xs: listed(OTHERS[name][0], xs, W).sum())(sign * AT_ZERO)
    np.testing.assert_array_equal(gradient, (AT_ZERO == 0).astype(np.float32))


TF_WRAPS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "function": tf.function,
    "xla": partial(tf.function, jit_compile=True),
}


@pytest.mark.sampled
@pytest.mark.parametrize("place", [listed, over_time])
@pytest.mark.parametrize("wrap", ["eager", "function", pytest.param("xla", marks=pytest.mark.slow)])
def test_exact_in_tensorflow(wrap: str, place: Any) -> None:
    reduction = EXACT["mean"] if place is listed else reductions.differentiable(EXACT["mean"])
    check(tensorflow_derivatives(TF_WRAPS[wrap], place, reduction), true_derivatives(FORMULAS["mean"]))


@pytest.mark.parametrize(
    ("wrap", "of"),
    cases(
        [("eager", "contributions"), ("eager", "weights"), ("function", "contributions")],
        ("eager", "function"),
        ("contributions", "weights"),
    ),
)
def test_a_derivative_through_integers_is_refused_in_tensorflow(wrap: str, of: str) -> None:
    def gradient(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs[of == "weights"])
            result = tf.reduce_sum(over_time(EXACT["mean"], *inputs))
        return tape.gradient(result, inputs[of == "weights"])

    with pytest.raises(gc.GradCombineError, match=r"mean: expected reductions\.differentiable"):
        TF_WRAPS[wrap](gradient)(tf.constant(X), tf.constant(W))


def test_forward_mode_within_a_graph_is_refused() -> None:
    @tf.function
    def along(xs: Any, ws: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(xs, tf.constant(ALONG_X)) as accumulator:
            result = listed(EXACT["mean"], xs, ws)
        return accumulator.jvp(result)

    with pytest.raises(gc.GradCombineError, match=r"around the tf\.function"):
        along(tf.constant(X), tf.constant(W))


@pytest.mark.sampled
@pytest.mark.parametrize("name", OTHERS)
def test_other_reductions_in_tensorflow(name: str) -> None:
    reduction, formula = OTHERS[name]
    check(tensorflow_derivatives(TF_WRAPS["eager"], listed, reduction), true_derivatives(formula))


@pytest.mark.sampled
@pytest.mark.parametrize("order", ["tree", "sequential"])
@pytest.mark.parametrize("reduction", [reductions.mean(), EXACT["mean"]], ids=["fast", "exact"])
def test_means_over_the_replicas_of_tensorflow(reduction: gc.Reduction, order: Any) -> None:
    strategy = mirrored(N)

    def slope(x: Any, w: Any, along_x: Any, along_w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            result = gc.all_reduce(reduction, x, gc.tf_replicas(), w, order)
            loss = tf.reduce_sum(result * result * tf.constant(SCALES, tf.float32)) / np.float32(N)
        by_x, by_w = tape.gradient(loss, [x, w])
        return tf.reduce_sum(by_x * along_x) + by_w * along_w

    inputs = [per_replica(strategy, a.__getitem__) for a in (X, W, ALONG_X, ALONG_W)]
    received = tf.function(lambda inputs: strategy.run(slope, inputs))(inputs)
    total_slope = sum(float(x) for x in strategy.experimental_local_results(received))
    np.testing.assert_allclose(total_slope, true_derivatives(FORMULAS["mean"])[0], rtol=2e-5)


# Every step is exact, as the weights sum to a power of two. Not Adasum, which divides; checked needs checkify.
DYADIC = np.array([[1, -2], [2, 3], [-1, 4]], np.float32), np.array([1, 3, 4], np.float32)
UNCHECKED = [name if name in QUICK else pytest.param(name, marks=FULL) for name in OTHERS if name != "checked"]


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_function_that_is_compiled_already_has_its_derivative(name: str) -> None:
    reduction, formula = OTHERS[name]

    @jax.jit
    def loss(xs: Any, ws: Any) -> Any:
        return sum((y * y * FACTORS).sum() for y in jax.tree.leaves(listed(reduction, xs, ws)))

    _, along = jax.jvp(loss, DYADIC, (ALONG_X, ALONG_W))
    by_x, by_w = jax.grad(loss, (0, 1))(*DYADIC)
    first, _ = true_derivatives(formula, *DYADIC)
    received = [float(along), float((by_x * ALONG_X).sum() + (by_w * ALONG_W).sum())]
    np.testing.assert_allclose(received, [first, first], rtol=1e-5 if name == "adasum" else 0)
