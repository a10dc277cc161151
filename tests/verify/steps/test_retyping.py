"""Programs that pin a narrow dtype, retyped to float64, give the results of the same functions written in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.verify import Cause, Verdict, check_step
from gradcombine.verify.check.divided_terms import measured
from gradcombine.verify.check.retyping import Program, wide
from gradcombine.verify.check.running import Subject
from gradcombine.verify.check.standard import Standard
from gradcombine.verify.check.terms import Terms
from tests.verify.steps.dividing import stacked

RNG = np.random.default_rng(0)
W, X = (RNG.normal(size=shape).astype(np.float32) for shape in ((6, 6), (8, 6)))
P = jax.sharding.PartitionSpec
Function = Callable[[Any, Any, Any], Any]


def products(w: Any, x: Any, dtype: Any) -> Any:
    y = jnp.dot(x.astype(dtype), w.astype(dtype), preferred_element_type=dtype)
    return jnp.einsum("ij,kj->ik", y, w.astype(dtype), precision="highest").sum(dtype=dtype)


def softmax(w: Any, x: Any, dtype: Any) -> Any:
    """A softmax in float32 or wider after narrow products."""
    logits = (x.astype(dtype) @ w.astype(dtype)).astype(jnp.promote_types(dtype, jnp.float32))
    return -jax.nn.log_softmax(logits)[:, 0].mean() + jax.nn.logsumexp(logits)


def layers(w: Any, x: Any, dtype: Any) -> Any:
    """A scan over rematerialized layers with a narrow carry."""

    @jax.checkpoint
    def layer(y: Any, row: Any) -> tuple[Any, Any]:
        return jnp.tanh(y @ w.astype(dtype)) + row.astype(dtype), y.sum()

    y, sums = jax.lax.scan(layer, x.astype(dtype), w[:4], reverse=True, unroll=2)
    return (y**2).mean() + sums.astype(dtype).sum()


def loops(w: Any, x: Any, dtype: Any) -> Any:
    def body(state: Any) -> Any:
        i, y = state
        return i + 1, jax.lax.cond(i % 2 == 0, lambda z: jnp.tanh(z), lambda z: z * dtype(0.5), y)

    _, y = jax.lax.while_loop(lambda state: state[0] < 3, body, (0, jax.lax.stop_gradient(x.astype(dtype))))
    y = jax.lax.fori_loop(0, 3, lambda i, z: z + y[i], jnp.zeros(6, dtype))
    return (y @ w.astype(dtype)).sum()


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g.astype(g.dtype),))


def rules(w: Any, x: Any, dtype: Any) -> Any:
    """Functions with custom derivatives: relu, logaddexp, clip, silu, and a custom_vjp."""
    y = jax.nn.relu(doubled(x.astype(dtype)) @ w.astype(dtype))
    return jnp.logaddexp(y, dtype(0.5)).sum() + jnp.clip(y, 0.125, 0.875).sum() + jax.nn.silu(y).mean()


def rows(w: Any, x: Any, dtype: Any) -> Any:
    """A gather, whose gradient is a scatter; top_k, sort and cumsum."""
    y = w.astype(dtype)[jnp.array([0, 3, 3, 5])] * x.astype(dtype)[:4]
    top, places = jax.lax.top_k(y, 2)
    return top.sum() + jnp.sort(y, axis=0)[0].sum() + jnp.cumsum(y).max() + jax.nn.one_hot(places, 6, dtype=dtype).sum()


def windows(w: Any, x: Any, dtype: Any) -> Any:
    y = jax.lax.conv(x.astype(dtype)[None, None], w.astype(dtype)[None, None, :3, :3], (1, 1), "SAME")
    pooled = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    whole = jax.lax.reduce(jax.lax.stop_gradient(y), dtype(1), lambda a, b: a * (1 + b), (3,))
    return pooled.sum() + whole.sum()


def solves(w: Any, x: Any, dtype: Any) -> Any:
    """A linear system and a determinant, in float32 or wider after a narrow product."""
    a = (w.astype(dtype) @ w.T.astype(dtype)).astype(jnp.promote_types(dtype, jnp.float32)) + jnp.eye(6, dtype=w.dtype)
    return (jnp.linalg.solve(a, x.T.astype(a.dtype)) ** 2).sum() + jnp.linalg.slogdet(a)[1]


def counted(w: Any, x: Any, dtype: Any) -> Any:
    """Conversions from integers to floats and back."""
    places = jnp.arange(6, dtype=dtype) / dtype(8)
    bins = jnp.floor(x * 2).astype(jnp.int32)
    return (w.astype(dtype) * places).sum() * (bins > 0).sum().astype(dtype) / bins.size


def rounded(w: Any, x: Any, dtype: Any) -> Any:
    bits = jnp.finfo(dtype)
    return (jax.lax.reduce_precision(x @ w, bits.nexp, bits.nmant).astype(dtype) ** 2).mean()


def on_devices(w: Any, x: Any, dtype: Any, check_vma: bool) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))

    def on_each(w: Any, x: Any) -> Any:
        y = jax.lax.scan(lambda c, row: (c + row @ w.astype(dtype), None), x[0].astype(dtype), x.astype(dtype))[0]
        return jax.lax.psum((y**2).sum(), "data")

    return jax.shard_map(on_each, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)(w, x)


FUNCTIONS: dict[str, Function] = {
    "products": products,
    "softmax": softmax,
    "layers": layers,
    "loops": loops,
    "rules": rules,
    "rows": rows,
    "windows": windows,
    "solves": solves,
    "counted": counted,
    "rounded": rounded,
    "on devices": partial(on_devices, check_vma=False),
    "on devices that vary": partial(on_devices, check_vma=True),
}


def both(function: Function, dtype: Any) -> Any:
    """The value and gradients as a jitted function from a list of arrays to a list of arrays."""

    def run(arrays: list[Any]) -> list[Any]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            value, grads = jax.value_and_grad(lambda w, x: function(w, x, dtype), argnums=(0, 1))(*arrays)
            return [value, *grads]

    return jax.jit(run)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_of_any_precision_runs_in_float64(name: str, dtype: Any) -> None:
    program = Program(both(FUNCTIONS[name], dtype), [W, X])
    assert not program.problem
    with wide():
        entered = [W.astype(np.float64), X.astype(np.float64)]
        made, expected = program(entered), both(FUNCTIONS[name], jnp.float64)(entered)
    for x, y in zip(made, expected, strict=True):
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


DRAWS = [jax.random.uniform, jax.random.normal, jax.random.gumbel, partial(jax.random.gamma, a=2)]


@pytest.mark.full
@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_stay_those_of_the_program(draw: Any) -> None:
    def run(arrays: list[Any]) -> list[Any]:
        key, x = arrays
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return [draw(key, shape=x.shape, dtype=x.dtype), jnp.where(kept, x, 0), jax.random.permutation(key, 8)]

    entered = [jax.random.key(0), X]
    program, expected = Program(run, entered), run(entered)
    with wide():
        made = program([jax.random.key(0), X.astype(np.float64)])
    np.testing.assert_allclose(made[0], expected[0], rtol=2e-6, atol=1e-7)
    np.testing.assert_array_equal(made[1], expected[1])
    np.testing.assert_array_equal(made[2], expected[2])


def test_what_calls_back_to_python_is_not_retyped() -> None:
    def run(arrays: list[Any]) -> list[Any]:
        return [jax.pure_callback(np.sin, jax.ShapeDtypeStruct(X.shape, X.dtype), arrays[0])]

    assert "pure_callback computes in float32" in Program(run, [X]).problem


def words(k: int, defect: str, optimizer: Any = None, dtype: Any = jnp.bfloat16) -> Any:
    """A step with products in bfloat16, and its softmax, parameters and accumulator in float32."""

    def loss(params: Any, part: Any, key: Any) -> Any:
        y = jnp.tanh(params["embedding"].astype(dtype)[part["tokens"][:, :-1]])
        if defect == "drop":
            y = jnp.where(jax.random.bernoulli(key, 0.5, y.shape), 2 * y, 0)
        logits = jnp.dot(y, params["kernel"].astype(dtype)).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, part["tokens"][:, 1:])
        return (each * part["mask"][:, 1:]).sum(), part["mask"][:, 1:].sum()

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params = state if optimizer is None else state[0]

        def body(total: Any, numbered: Any) -> Any:
            i, part = numbered
            key = jax.random.fold_in(jax.random.key(0), i)
            (_, count), grads = jax.value_and_grad(loss, has_aux=True)(params, part, key)
            grads = jax.tree.map(lambda x: x / (count * k) if defect == "mean of means" else x, grads)
            return jax.tree.map(jnp.add, total, (grads, count)), None

        start = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
        (grads, count), _ = jax.lax.scan(body, start, (jnp.arange(k), stacked(batch, k)))
        grads = jax.tree.map(lambda x: x if defect == "mean of means" else x / count, grads)
        if optimizer is None:
            return grads
        updates, new = optimizer.update(grads, state[1], params)
        return optax.apply_updates(params, updates), new

    return step


TOKENS = RNG.integers(1, 12, (8, 6)).astype(np.int32)
WORDS = {"tokens": TOKENS, "mask": (np.arange(6) < np.array([6, 6, 5, 6, 3, 2, 3, 2])[:, None]).astype(np.float32)}
NET = {"embedding": RNG.normal(size=(12, 8)).astype(np.float32), "kernel": RNG.normal(size=(8, 12)).astype(np.float32)}
SGD = optax.sgd(0.1, momentum=0.5, accumulator_dtype=jnp.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [None, SGD])
@pytest.mark.parametrize(
    ("defect", "causes"), [("none", []), ("mean of means", [Cause.MEAN_OF_MEANS]), ("drop", [Cause.RANDOM])]
)
def test_a_net_of_bfloat16_is_compared_in_float64(defect: str, causes: list[Cause], optimizer: Any) -> None:
    state = NET if optimizer is None else (NET, optimizer.init(NET))
    returns = "gradients" if optimizer is None else "params"
    with jax.numpy_dtype_promotion("standard"):
        make = partial(words, defect=defect, optimizer=optimizer)
        report = check_step(make, state, WORDS, microbatches=(4,), returns=returns)
    assert [fault.cause for fault in report.faults] == causes, str(report)
    assert report.verdict is (Verdict.FAILS if causes else Verdict.PASSES), str(report)
    assert report.runs[0].accuracy is not None and report.runs[0].accuracy <= 1


def eight_bits(k: int, dtype: Any, right: bool) -> Any:
    """A step with products of 8-bit floats, added in float32."""

    def loss(w: Any, part: Any) -> Any:
        narrow = part["x"].astype(dtype), w.astype(dtype)
        y = jnp.einsum("ij,jk->ik", *narrow, preferred_element_type=jnp.float32)
        return (jnp.tanh(y) ** 2 * part["real"][:, None]).sum()

    @jax.jit
    def step(w: Any, batch: Any) -> Any:
        total, real = jnp.zeros_like(w), batch["real"].sum()
        for x, mask in zip(jnp.split(batch["x"], k), jnp.split(batch["real"], k), strict=True):
            total += jax.grad(loss)(w, {"x": x, "real": mask}) / (real if right else mask.sum() * k)
        return total

    return step


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("right", [True, False])
def test_what_8_bits_may_hide_is_seen_in_float64(dtype: Any, right: bool) -> None:
    """The rounding bound of a sum of 16 terms with a unit roundoff of 1/16 exceeds the sum."""
    rows = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    batch = {"x": rows, "real": np.float32(np.arange(16) < 13)}
    report = check_step(partial(eight_bits, dtype=dtype, right=right), W, batch)
    assert report.cause is (None if right else Cause.MEAN_OF_MEANS), str(report)
    assert report.verdict is (Verdict.PASSES if right else Verdict.FAILS)


@pytest.mark.parametrize("x", [X, jnp.asarray(X)], ids=["NumPy", "JAX"])
def test_the_program_that_shows_whether_it_runs_in_float64_is_the_one_that_runs(
    x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []
    original = Program._evaluate
    monkeypatch.setattr(Program, "_evaluate", lambda self, *args: traced.append(args) or original(self, *args))
    program = Program(lambda leaves: leaves[0] @ leaves[0].T, [x])
    with wide():
        result = program([x.astype(np.float64)])
    assert result.dtype == np.float64 and not program.problem
    assert len(traced) == 1


def test_terms_of_a_loss_are_traced_once_for_each_number_of_examples() -> None:
    counts: list[int] = []

    def gradient(w: Any, batch: Any) -> Any:
        return jax.grad(lambda w: jnp.sum((batch["x"] @ w) ** 2))(w)

    def terms(w: Any, batch: Any) -> dict[str, Any]:
        counts.append(len(batch["x"]))
        return {"squares": (gradient(w, batch), jnp.count_nonzero(batch["x"][:, 0] > 0))}

    w = W[0]
    standard = Standard(Subject(lambda k: gradient, w, {"x": X}, False), None, Terms(terms))
    for rows in (range(8), range(4), range(4, 8), range(8)):
        part = measured(standard, tuple(rows))
        x = X[rows].astype(np.float64)
        np.testing.assert_allclose(part.sums["squares"], [2 * x.T @ (x @ w)], rtol=1e-12)
        assert part.weights == {"squares": (x[:, 0] > 0).sum()}
    assert counts == [8, 4]
