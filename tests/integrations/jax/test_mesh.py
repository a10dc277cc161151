"""Plain jit on a mesh: the library maps over the axes of ``over`` and leaves the other axes to the compiler."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import Loss, LossOutput, jax_window, train_step, value_and_grad
from gradcombine.integrations.optax import accumulate, map_replicas
from gradcombine.verify.compare.ulp import equal_bits
from tests.integrations.jax.replicas import collectives, grid
from tests.integrations.jax.replicas import mesh as one_axis
from tests.spec.selection import FULL, cases

OVER = gc.jax_axis("data")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((48, 8)).astype(np.float32)
W = RNG.standard_normal((8, 8)).astype(np.float32)

AUTO, EXPLICIT = KINDS = (AxisType.Auto, AxisType.Explicit)
SPECS = {"whole": P(), "model": P(None, "model"), "fsdp": P("data", "model"), "rows": P("data")}


def put(on: Mesh, spec: P, value: Any) -> Any:
    return jax.device_put(value, NamedSharding(on, spec))


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w))


def tokens(w: Any, x: Any) -> Any:
    """Mean over the positive rows, weighted by their number; without any, the loss is 0 / 0 and the weight 0."""
    count = jnp.sum(x[:, 0] > 0).astype(jnp.float32)
    return LossOutput(jnp.sum(jnp.where(x[:, :1] > 0, jnp.tanh(x @ w), 0)) / count, count)


GRADIENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mean": (loss, {}),
    "tokens": (tokens, {}),
    "tree": (loss, {"order": "tree"}),
    "exact": (loss, {"reduction": reductions.mean("exact")}),
}
QUICK = [("tokens", "model", AUTO), ("tree", "fsdp", AUTO)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "at", "kind"), cases(QUICK, GRADIENTS, ("whole", "model", "fsdp"), KINDS, pairwise=True)
)
def test_the_bits_are_those_of_shard_map(name: str, at: str, kind: AxisType) -> None:
    on, spec, (given, options) = grid(kind), SPECS[at], GRADIENTS[name]
    w, x = put(on, spec, W), put(on, P("data"), X)
    gradient = value_and_grad(given, 3, over=OVER, **options)
    whole = P(None, *spec[1:])
    mapped = jax.shard_map(
        gradient, mesh=on, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    expected = jax.jit(mapped)(put(on, whole, W), x)[1]
    assert equal_bits(jax.jit(gradient)(w, x)[1], expected)


@FULL
@pytest.mark.parametrize("kind", KINDS)
def test_check_vma_beside_an_axis_of_the_compiler(kind: AxisType) -> None:
    on = grid(kind)
    gradient = value_and_grad(tokens, 3, over=OVER)
    w, x = put(on, P(None, "model"), W), put(on, P("data"), X)
    mapped = jax.shard_map(gradient, mesh=on, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"})
    assert equal_bits(jax.jit(mapped)(w, x)[1], jax.jit(gradient)(w, x)[1])


def test_check_vma_of_a_loop_in_a_weighted_loss() -> None:
    """The loop's carry begins as the parameters, and varies over the replicas with the rows."""

    def looped(w: Any, x: Any) -> LossOutput:
        return LossOutput(
            jax.lax.scan(lambda carry, row: (carry + row.sum() * carry, None), w, x)[0].sum(), weight=x.sum()
        )

    on, x = grid(), np.full((24, 2), 0.125, np.float32)
    gradient = value_and_grad(looped, 3, over=OVER)
    mapped = jax.shard_map(gradient, mesh=on, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"})
    assert float(jax.jit(mapped)(jnp.float32(1), x)[1]) == 1.25**2


@pytest.mark.parametrize(("at", "kind"), cases([("rows", AUTO)], ("whole", "rows"), KINDS))
def test_replicas_exchange_outside_of_the_loop_alone(at: str, kind: AxisType) -> None:
    on, spec = grid(kind, 8, 1), SPECS[at]
    step = train_step(tokens, optax.sgd(1.0, momentum=0.5), microbatches=3, over=OVER)
    params, x = put(on, spec, W), put(on, P("data"), X)
    state = step.init(params)
    compiled = step.compiled.lower(params, state, x).compile()
    assert collectives(compiled, looped=True) == []
    assert collectives(compiled) == (["all-gather"] if spec else []) + ["all-reduce"]
    params, state, metrics = step(params, state, x)
    assert params.sharding.is_equivalent_to(NamedSharding(on, spec), 2)
    assert float(metrics.weight) == (X[:, 0] > 0).sum()


@pytest.mark.full
def test_gradients_are_split_as_explicit_axes_split_their_parameters() -> None:
    on = grid(EXPLICIT)
    split = {"a": P("data", "model"), "b": P(None, "data"), "c": P(None, "model")}
    params = {name: put(on, spec, W) for name, spec in split.items()}

    def given(params: Any, x: Any) -> Any:
        return sum(loss(jax.sharding.reshard(w, P()), x) for w in params.values())

    gradient = value_and_grad(given, 3, over=OVER)
    grads = jax.jit(gradient)(params, put(on, P("data"), X))[1]
    assert {name: grad.sharding.spec for name, grad in grads.items()} == split
    assert equal_bits(grads["a"], grads["c"])


def product(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w)


@pytest.mark.full
@pytest.mark.parametrize(
    ("order", "at", "kind"),
    cases([("sequential", "fsdp", EXPLICIT)], ("sequential", "tree"), ("whole", "fsdp"), KINDS, pairwise=True),
)
def test_a_window_over_calls(order: Any, at: str, kind: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integer inputs make the sums exact; the last window is partial."""
    monkeypatch.setattr(jax_window, "SEPARATE_BYTES", 64)  # the all-reduce reuses the buffer of the window's matrix
    on, spec = grid(kind), SPECS[at]
    step = train_step(product, optax.sgd(1.0, momentum=0.5), every=3, over=OVER, order=order)
    xs = RNG.integers(-8, 9, (5, 16, 8)).astype(np.float32)
    params = put(on, spec, W)
    state = step.init(params)
    places = [x.sharding for x in jax.tree.leaves(state)]
    for x in xs:
        params, state, metrics = step(params, state, put(on, P("data"), x))
    assert not metrics.applied
    assert all(x.sharding.is_equivalent_to(at, x.ndim) for x, at in zip(jax.tree.leaves(state), places, strict=True))
    params, state, metrics = step.flush(params, state)
    assert float(metrics.weight) == 32
    # The gradient of each column of w is the mean of x, divided by 8.
    means = [xs[:3].mean((0, 1), dtype=np.float64) / 8, xs[3:].mean((0, 1), dtype=np.float64) / 8]
    first = np.float32(W - np.float32(means[0])[:, None])
    np.testing.assert_allclose(params, first - np.float32(means[1] + 0.5 * means[0])[:, None], 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("over", [gc.LOCAL, OVER], ids=["local", "data"])
@pytest.mark.parametrize("every", [2, gc.UNTIL_FLUSH], ids=["two", "until flush"])
def test_metrics_of_a_window_lie_on_explicit_axes(over: Any, every: Any) -> None:
    """The initial zeros are created outside of any program and of jax.set_mesh."""
    on = grid(EXPLICIT, 4, 1)

    def measured(w: Any, x: Any) -> Any:
        made = jnp.tanh(x @ w)
        return made.mean(), {"mean": made.mean(), "column": made.mean(0)}

    step = train_step(Loss(measured, has_aux=True), optax.sgd(0.0), every=every, over=over)
    w = put(on, P(), W)
    state = step.init(w, put(on, P("data"), X))
    for _ in range(2):
        w, state, metrics = step(w, state, put(on, P("data"), X))
    if every == gc.UNTIL_FLUSH:
        w, state, metrics = step.flush(w, state)
    expected = np.tanh(X.astype(np.float64) @ W).mean(0)
    np.testing.assert_allclose(metrics.aux["column"], expected, atol=1e-6)
    np.testing.assert_allclose(metrics.aux["mean"], expected.mean(), atol=1e-6)


@pytest.mark.full
def test_the_mesh_may_be_the_one_in_scope() -> None:
    on = grid()
    gradient = value_and_grad(loss, 3, over=OVER)
    with jax.set_mesh(on):
        in_scope = jax.jit(gradient)(W, X)[1]
    assert equal_bits(in_scope, jax.jit(gradient)(put(on, P(), W), X)[1])
    assert equal_bits(in_scope, gradient(put(on, P(), W), X)[1])


def test_a_state_may_be_created_in_jit_where_the_mesh_is_in_scope() -> None:
    on = grid()
    params = put(on, P(), W)
    tx = accumulate(optax.sgd(1.0), every=2, over=OVER)
    for init in (train_step(loss, optax.sgd(1.0), every=2, over=OVER).init, map_replicas(tx.init, OVER)):
        with jax.set_mesh(on):
            state = jax.jit(init)(params)
        eager = init(params)
        assert all(equal_bits(x, y) for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(eager), strict=True))
        leaves = jax.tree.leaves(state.window.levels)
        assert leaves and all(x.sharding.is_equivalent_to(NamedSharding(on, P("data")), x.ndim) for x in leaves)


def test_the_carry_has_an_axis_of_replicas() -> None:
    on = grid()

    def counting(w: Any, seen: Any, x: Any) -> Any:
        return LossOutput(jnp.mean(x @ w), carry=seen + jnp.sum(x[:, 0]))

    step = train_step(Loss(counting, carry_argnum=1), optax.sgd(1.0), microbatches=3, over=OVER)
    ones = np.arange(48, dtype=np.float32)[:, None] * np.ones(8, np.float32)
    params = put(on, P(), W)
    state = step.init(params, carry=jnp.float32(1))
    assert state.carry.shape == (4,)
    _, state, _ = step(params, state, put(on, P("data"), ones))
    np.testing.assert_array_equal(state.carry, 1 + ones[:, 0].reshape(4, 12).sum(1))


@pytest.mark.full
@pytest.mark.parametrize(("given", "kind"), cases([(tokens, AUTO)], (loss, tokens), KINDS))
def test_a_batch_that_is_split_over_devices_is_divided_where_it_lies(given: Any, kind: AxisType) -> None:
    on = grid(kind, 8, 1)
    gradient = value_and_grad(given, 3)
    w, x = put(on, P(), W), put(on, P("data"), X)
    compiled = jax.jit(gradient).lower(w, x).compile()
    assert set(collectives(compiled)) <= {"all-reduce"}
    # The same microbatches: two of each device's six examples.
    blocks = [X.reshape(8, 6, 8)[:, 2 * i : 2 * i + 2].reshape(16, 8) for i in range(3)]
    np.testing.assert_allclose(compiled(w, x)[1], value_and_grad(given, 3)(W, np.concatenate(blocks))[1], 1e-5, 1e-6)


def last(w: Any, x: Any) -> Any:
    return jnp.sum(w) * 0 + jnp.mean(x), x


@pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=FULL)])
@pytest.mark.parametrize(
    ("n", "interleaved", "expected"),
    [(16, False, [1, 3, 5, 7, 9, 11, 13, 15]), (24, True, [2, 5, 8, 11, 14, 17, 20, 23]), (40, False, None)],
)
def test_a_microbatch_has_a_part_of_every_block(kind: AxisType, n: int, interleaved: bool, expected: Any) -> None:
    """One block per device; five examples per device make microbatches of three and two."""
    on = grid(kind, 8, 1)
    x = put(on, P("data"), np.arange(n, dtype=np.float32))
    gradient = value_and_grad(
        Loss(last, has_aux=True, aux_reduction=reductions.last() if expected else reductions.max()),
        3 if interleaved else 2,
        interleaved=interleaved,
    )
    if expected is None:
        gradient = value_and_grad(lambda w, x: jnp.sum(w * x), 2, reduction=reductions.sum())
        assert float(jax.jit(gradient)(jnp.float32(1), x)[1]) == n * (n - 1) / 2
    else:
        (_, examples), _ = jax.jit(gradient)(jnp.float32(1), x)
        assert np.asarray(examples).tolist() == expected


def other_devices() -> Any:
    on = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[4:])
    return put(on, P("data"), X)


@pytest.mark.parametrize(
    ("over", "x", "message"),
    [
        (gc.jax_axis("replica"), X, r"expected axes of a mesh of data=4, model=2, .* received jax_axis\('replica'\)"),
        (OVER, X[:6], "expected a number of examples that is divisible by the 4 replicas .*, received 6"),
        (OVER, jnp.float32(1), "expected a number of examples that is divisible by .*, received a scalar"),
        (OVER, 1.0, "expected a number of examples that is divisible by .*, received a scalar"),
        (OVER, other_devices, "expected arguments on a mesh of data=4, model=2, as .* received a mesh of data=2"),
    ],
)
def test_what_cannot_be_mapped_is_refused(over: Any, x: Any, message: str) -> None:
    w = put(grid(), P(), W)
    with pytest.raises(gc.GradCombineError, match=f"value_and_grad.*{message}"):
        value_and_grad(loss, 2, over=over)(w, x() if callable(x) else x)


@pytest.mark.parametrize("settings", [{"microbatches": 2}, {"every": 2}])
def test_shards_of_parameters_are_refused(settings: dict[str, int]) -> None:
    """If shard_map's types show it: the gradients of the replicas belong to different parameters."""
    step = train_step(lambda w, x: jnp.mean(x * w), optax.sgd(1.0), over=OVER, **settings)

    def call(w: Any, x: Any) -> Any:
        return step.function(w, step.init(w), x)[0]

    mapped = jax.shard_map(call, mesh=grid(), in_specs=(P("data"), P("data")), out_specs=P("data"))
    with pytest.raises(gc.GradCombineError, match=r"train_step: expected parameters that are the same .* over data"):
        jax.jit(mapped)(W[:, 0], X)


def test_no_mesh_at_all_is_refused() -> None:
    with pytest.raises(gc.GradCombineError, match=r"expected an axis that the surrounding pmap, .* and no mesh"):
        jax.jit(value_and_grad(loss, 2, over=OVER))(W, X)


def test_arguments_on_other_devices_are_named() -> None:
    step = train_step(loss, optax.sgd(1.0), microbatches=2)
    w = put(grid(AUTO, 2, 2), P(), W)
    with pytest.raises(
        gc.GradCombineError, match=r"leaf \[0\]: expected arguments on the same devices, .*\[4, 5, 6, 7\]"
    ):
        step(w, step.init(w), other_devices())


def test_a_donated_buffer_is_named() -> None:
    step = train_step(lambda params, x: loss(params["w"], x), optax.sgd(1.0), every=2)
    params = {"w": jnp.asarray(W)}
    state = step.init(params)
    step(params, state, X)
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: .* that the last call returned.* a donated buffer"):
        step(params, state, X)


@pytest.mark.parametrize("batch", [X, jnp.asarray(X)], ids=["numpy", "one device"])
@pytest.mark.parametrize("in_scope", [True, False])
def test_a_batch_that_is_not_on_the_mesh_is_put_there(batch: Any, in_scope: bool) -> None:
    """Explicit mesh axes behave like automatic ones."""
    on = one_axis(4, "data", EXPLICIT)
    params = put(on, P(), jnp.asarray(W))
    step = train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.5), microbatches=3, over=OVER)
    with jax.set_mesh(on) if in_scope else contextlib.nullcontext():
        received, _, _ = step(params, step.init(params), batch)
    expected = W - 0.5 * np.asarray(jax.grad(lambda w: jnp.mean((X @ w) ** 2))(jnp.asarray(W)))
    np.testing.assert_allclose(received, expected, rtol=0, atol=2e-6)


def test_order_tree_of_windows_that_a_flush_ends_asks_for_the_longest() -> None:
    with pytest.raises(gc.GradCombineError, match="train_step: expected max_every, the longest window, for windows"):
        train_step(jnp.sum, optax.sgd(1.0), every=gc.UNTIL_FLUSH, order="tree")
