"""Training steps on one replica: the bits of `gradcombine.combine` and the optimizer, donation, windows and errors."""

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import Loss, LossOutput, train_step
from gradcombine.places.window import OVER
from gradcombine.verify.compare.ulp import equal_bits
from tests.spec.selection import FULL, cases

NEGATE = optax.sgd(1.0)
X = np.random.default_rng(0).standard_normal((8, 2, 4)).astype(np.float32)
"""Eight microbatches of two examples."""


OPTAX_PROMOTES = pytest.mark.usefixtures("standard_promotion")
"""optax's arithmetic mixes integers and floats; everything else here runs under strict promotion."""


def linear(params: Any, x: Any) -> Any:
    """The gradient is a quarter of the mean of x over examples: for two examples it rounds once in any program."""
    return jnp.mean(params["w"][None] * x)


gradient = jax.jit(jax.grad(linear))


def start(dtype: Any = np.float32) -> Any:
    return {"w": jnp.ones(4, dtype), "frozen": None}


def run(step: Any, params: Any, batches: Any, flush: bool = False) -> tuple[Any, Any, list[Any]]:
    state, history = step.init(params), []
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        history.append(metrics)
    if flush:
        params, state, metrics = step.flush(params, state)
        history.append(metrics)
    return params, state, history


@OPTAX_PROMOTES
@pytest.mark.parametrize(
    ("order", "form"),
    cases([("tree", "every"), ("sequential", "microbatches")], ("sequential", "tree"), ("every", "microbatches")),
)
def test_an_update_is_that_of_the_optimizer_on_the_combined_gradients(order: Any, form: str) -> None:
    # Factors of a half and one: the optimizer's arithmetic has no product that rounds, so fusion changes no bits.
    optimizer = optax.sgd(1.0, momentum=0.5)
    step = train_step(linear, optimizer, **{form: 4}, order=order)
    batches = list(X) if form == "every" else [X[:4].reshape(8, 4), X[4:].reshape(8, 4)]
    params, state, history = run(step, start(), batches)
    applied = [False, False, False, True] * 2 if form == "every" else [True, True]
    assert [bool(metrics.applied) for metrics in history] == applied

    @jax.jit
    def update(params: Any, inner: Any, grads: Any) -> Any:
        updates, inner = optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner

    expected, inner = start(), optimizer.init(start())
    for window in (X[:4], X[4:]):
        grads = gc.combine(reductions.mean(), [gradient(expected, x) for x in window], order=order)
        expected, inner = update(expected, inner, grads)
    assert jax.tree.all(jax.tree.map(equal_bits, (params, state.opt_state), (expected, inner)))


def ones(*values: float, dtype: Any = np.float32) -> list[Any]:
    """Microbatches of one example; the gradient of each is a quarter of its value."""
    return [jnp.full((1, 4), value, dtype) for value in values]


def weights(params: Any) -> float:
    (value,) = set(np.asarray(params["w"], np.float64).tolist())
    return value


def test_metrics_tell_of_the_window_that_was_applied() -> None:
    step = train_step(linear, NEGATE, every=2)
    params, state, history = run(step, start(), ones(2, 6, 8, 4))
    # Losses 2 and 6 at parameters 1; then 0 and 0, at parameters 1 - 4/4 = 0.
    assert [(float(m.value), float(m.weight), bool(m.applied)) for m in history] == [
        (0, 0, False),
        (4, 2, True),
        (0, 0, False),
        (0, 2, True),
    ]
    assert history[0].aux is None
    assert weights(params) == 0 - 6 / 4
    assert (int(state.window.step), int(state.window.index)) == (OVER, 1)


def test_the_weight_is_the_number_of_examples_unless_it_is_given() -> None:
    batches = [jnp.full((3, 4), 4.0), jnp.full((1, 4), 8.0)]
    assert weights(run(train_step(linear, NEGATE, every=2), start(), batches)[0]) == 1 - 20 / 4 / 4
    equal = train_step(linear, NEGATE, every=2, weight=lambda x: 1)
    assert weights(run(equal, start(), batches)[0]) == 1 - 12 / 2 / 4


def test_nan_does_not_outlive_its_window() -> None:
    fixed = optax.stateless(lambda updates, params: jax.tree.map(lambda g: jnp.where(g == g, -g, 0), updates))
    params, _, history = run(train_step(linear, fixed, every=2), start(), ones(np.nan, 1, 2, 4))
    assert weights(params) == 1 - 3 / 4
    assert np.isnan(history[1].value) and float(history[3].value) == 3


def test_flush_applies_what_a_partial_window_holds_by_its_true_weight() -> None:
    step = train_step(linear, NEGATE, every=4)
    params, state, history = run(step, start(), ones(2, 4), flush=True)
    assert (weights(params), bool(history[-1].applied), float(history[-1].weight)) == (1 - 3 / 4, True, 2)
    params, state, again = step.flush(params, state)
    assert (weights(params), bool(again.applied), float(again.weight)) == (1 - 3 / 4, False, 0)
    for x in ones(4, 4, 4, 4):
        params, state, metrics = step(params, state, x)
    assert (weights(params), bool(metrics.applied), int(state.window.index)) == (0.25 - 1, True, 1)
    params, state, metrics = step.flush(params, state)
    assert (weights(params), bool(metrics.applied)) == (-0.75, False)


def test_a_flush_of_nothing_changes_nothing() -> None:
    params, state, history = run(train_step(linear, NEGATE, every=4), start(), [], flush=True)
    assert (weights(params), bool(history[0].applied), int(state.window.step)) == (1, False, 0)


def test_a_host_that_knows_where_windows_end_needs_no_branch() -> None:
    optimizer = optax.sgd(0.5)
    step, expected = train_step(linear, optimizer, every=gc.UNTIL_FLUSH), train_step(linear, optimizer, every=4)
    params, state = start(), step.init(start())
    for i, x in enumerate(X):
        params, state, metrics = step(params, state, x)
        assert not metrics.applied
        if i % 4 == 3:
            params, state, metrics = step.flush(params, state)
            assert metrics.applied
    assert equal_bits(params["w"], run(expected, start(), X)[0]["w"])
    program = str(jax.make_jaxpr(step.function)(params, state, X[0]))
    assert "while[" not in program
    assert "cond[" not in program


@pytest.mark.full
def test_keys_of_a_window_without_a_length_differ() -> None:
    """They differ between replicas and between steps."""

    def drawn(w: Any, key: Any, x: Any) -> Any:
        return w * jax.random.uniform(key) * x.sum()

    step = train_step(
        Loss(drawn, rng_argnum=1), optax.sgd(1.0), every=gc.UNTIL_FLUSH, over=gc.jax_axis("d"), weight=lambda x: 1
    )

    def calls(x: Any) -> Any:
        params, state, sums = jnp.float32(0), step.init(jnp.float32(0)), []
        for _ in range(3):
            params, state, _ = step.function(params, state, jax.random.key(0), x)
            sums.append(state.window.levels[0].parts[0].value)
        return jnp.diff(jnp.stack(sums), prepend=0)

    drawn_numbers = jax.vmap(calls, axis_name="d")(jnp.ones((4, 1)))
    assert len(np.unique(np.asarray(drawn_numbers).round(5))) == 12


def test_every_may_depend_on_the_window() -> None:
    step = train_step(linear, NEGATE, every=lambda index: index + 1)
    _, _, history = run(step, start(), ones(*range(6)))
    assert [bool(m.applied) for m in history] == [True, False, True, False, False, True]


def test_one_trace_serves_all_steps() -> None:
    traces: list[int] = []

    def loss(params: Any, x: Any) -> Any:
        traces.append(1)
        return linear(params, x)

    step = train_step(loss, NEGATE, every=2)
    run(step, start(), list(X))
    assert (len(traces), step.compiled._cache_size()) == (1, 1)


@OPTAX_PROMOTES
def test_everything_is_donated_and_nothing_twice() -> None:
    # The initial state of schedule_free holds the parameters themselves.
    step = train_step(linear, optax.contrib.schedule_free_sgd(0.1), every=2)
    params = start()
    state = step.init(params)
    before = jax.tree.leaves((params, state))
    params, state, _ = step(params, state, X[0])
    big = [leaf for leaf in before if leaf.size > 1]
    assert len(big) >= 3 and all(leaf.is_deleted() for leaf in big)


LEAVES = 4


def memory(form: str, size: int = 2**16) -> tuple[int, Any]:
    """Bytes of one leaf, and XLA's memory analysis of a step whose gradient is as large as the parameters."""
    params = {f"w{i}": jnp.ones(size + i) for i in range(LEAVES)}

    def loss(params: Any, x: Any) -> Any:
        return sum(jnp.sum(w) for w in jax.tree.leaves(params)) * jnp.mean(x)

    step = train_step(loss, optax.adam(0.1), **{form: 4})
    return 4 * size, step.compiled.lower(params, step.init(params), X[:, 0, 0]).compile().memory_analysis()


@pytest.mark.full
@OPTAX_PROMOTES
def test_a_window_costs_one_accumulator_tree_and_a_call_the_mean_of_one_leaf() -> None:
    leaf, every = memory("every")
    # Parameters, two moments and the window, all updated in place.
    assert LEAVES * 4 * leaf < every.argument_size_in_bytes < LEAVES * 4 * leaf + 4096
    assert LEAVES * 4 * leaf < every.alias_size_in_bytes
    assert every.temp_size_in_bytes < 1.1 * leaf
    _, microbatches = memory("microbatches")
    # The window exists only during the call.
    assert LEAVES * 3 * leaf < microbatches.alias_size_in_bytes < LEAVES * 3 * leaf + 4096
    assert LEAVES * leaf < microbatches.temp_size_in_bytes < (LEAVES + 1.1) * leaf


@pytest.mark.parametrize("form", ["every", pytest.param("microbatches", marks=FULL)])
def test_narrow_gradients_are_accumulated_in_float32(form: str) -> None:
    step = train_step(linear, NEGATE, **{form: 64}, reduction=reductions.sum())
    # The sum of 64 quarters of 1 + 2**-7 is exact in float32; a bfloat16 sum would lose the last bit of each term.
    value = 1 + 2.0**-7
    batches = ones(*[value] * 64, dtype=jnp.bfloat16)
    params, state, _ = run(step, start(jnp.bfloat16), batches if form == "every" else [jnp.concatenate(batches)])
    assert params["w"].dtype == jnp.bfloat16
    assert weights(params) == float(jnp.bfloat16(1 - float(jnp.bfloat16(16 * value))))
    if form == "every":
        assert {leaf.dtype for leaf in jax.tree.leaves(state.window.levels) if leaf.size == 4} == {np.dtype(np.float32)}


@pytest.mark.parametrize("narrow", [jnp.bfloat16, np.float16])
def test_a_gradient_function_may_return_narrower_gradients(narrow: Any) -> None:
    def given(params: Any, x: Any) -> Any:
        return jnp.bfloat16(3), {"w": x[0], "frozen": None}

    step = train_step(Loss(given, differentiate=False), NEGATE, every=2)
    params, _, history = run(step, start(), ones(2, 4, dtype=narrow))
    assert (weights(params), params["w"].dtype, float(history[-1].value)) == (-2, np.float32, 3)


def noisy(params: Any, seen: Any, key: Any, x: Any) -> Any:
    drawn = jax.random.bits(key, (), np.uint32)
    aux = {"largest": jnp.max(x), "examples": jnp.int32(x.shape[0])}
    return LossOutput(linear(params, x), x.shape[0], aux, seen.at[1:].set(seen[:-1]).at[0].set(drawn))


@pytest.mark.parametrize("form", ["every", "microbatches"])
def test_keys_carry_and_aux(form: str) -> None:
    by = {"largest": reductions.max(), "examples": reductions.sum()}
    step = train_step(Loss(noisy, carry_argnum=1, rng_argnum=2, aux_reduction=by), NEGATE, **{form: 2})
    params, key = start(), jax.random.key(5)
    batches = ones(1, 7, 3, 5) if form == "every" else [jnp.concatenate(ones(1, 7)), jnp.concatenate(ones(3, 5))]
    state = step.init(params, key, batches[0], carry=jnp.zeros(4, np.uint32))
    aux = []
    for x in batches:
        params, state, metrics = step(params, state, key, x)
        aux += [jax.tree.map(float, metrics.aux)] if metrics.applied else []
    assert aux == [
        {"largest": 7, "examples": 2},
        {"largest": 5, "examples": 2},
    ]
    # Every call gets the same key, but every microbatch a different one.
    keys = [jax.random.fold_in(jax.random.fold_in(key, window), i) for window in range(2) for i in range(2)]
    drawn = [int(jax.random.bits(key, (), np.uint32)) for key in keys]
    assert state.carry.tolist() == drawn[::-1]
    assert len(set(drawn)) == 4


def test_the_optimizer_sees_the_combined_loss() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda g: jnp.full_like(g, value), updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params, _, _ = run(train_step(linear, optax.chain(optimizer), every=2), start(), ones(2, 6))
    assert weights(params) == 1 + 4


def test_a_step_runs_in_a_scan() -> None:
    step = train_step(linear, NEGATE, every=2)

    def body(carry: Any, x: Any) -> Any:
        params, state, metrics = step.function(*carry, x)
        return (params, state), metrics.applied

    (params, _), applied = jax.jit(lambda c, xs: jax.lax.scan(body, c, xs))(
        (start(), step.init(start())), jnp.stack(ones(2, 6, 4, 4))
    )
    assert (weights(params), applied.tolist()) == (1 - 1 - 1, [False, True, False, True])


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_losses_are_combined_in_the_width_of_the_parameters(dtype: Any) -> None:
    third = 1 / 3
    with jax.enable_x64(True):
        step = train_step(lambda params, x: jnp.mean(jnp.real(params) * x), NEGATE, every=2)
        params = jnp.array([1], dtype)
        state = step.init(params)
        for x in (third, 0.0):
            params, state, metrics = step(params, state, jnp.float64([x]))
        assert metrics.value.dtype == np.float64
        assert float(metrics.value) == third / 2


def test_a_ledger_of_the_window_has_the_numbers_of_its_places() -> None:
    step = train_step(linear, NEGATE, every=4, reduction=reductions.numbered(reductions.mean(), 4))
    _, state, _ = run(step, start(), ones(2, 6, 8))
    assert gc.ledger.read(state).held == (0, 1, 2)


def made(loss: Any = linear, optimizer: Any = NEGATE, **options: Any) -> Any:
    roles = {x.name for x in fields(Loss)} & set(options)
    of_loss = Loss(loss, **{name: options.pop(name) for name in roles}) if roles else loss
    return train_step(of_loss, optimizer, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "expected a window length that is an integer of 1 or more"),
        ({"every": 2.5}, "received 2.5"),
        ({"microbatches": 0}, r"expected from 1 to 2\*\*24 microbatches"),
        ({"every": 2, "microbatches": 2}, "expected every or microbatches, received both"),
        ({"every": 2, "interleaved": True}, "expected microbatches, for interleaved, received every"),
        ({"microbatches": 2, "max_every": 4}, "expected every, for max_every, received microbatches"),
        ({"optimizer": optax.sgd}, "expected an optax.GradientTransformation, received function"),
        ({"every": lambda index: 2, "order": "tree"}, "expected max_every"),
        ({"over": None}, "expected a collective"),
        ({"carry_argnum": 0}, "expected argument positions"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(gc.GradCombineError, match=message):
        made(**options)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (NEGATE, r"train_step: leaf \['w'\]: expected the structure to have a leaf here, received a Moments"),
        (optax.adam(1.0), "train_step: expected an optimizer for the results of the reduction"),
    ],
    ids=["sgd", "adam"],
)
def test_reductions_to_more_than_gradients_are_not_taken_for_shards(optimizer: Any, message: str) -> None:
    step, params = made(optimizer=optimizer, every=1, reduction=reductions.moments()), start()
    with pytest.raises(gc.GradCombineError, match=message):
        step(params, step.init(params), *ones(2))


@pytest.mark.parametrize(
    ("options", "state", "message"),
    [
        ({}, optax.EmptyState, "expected a TrainState, from step.init.*, received EmptyState"),
        (
            {"has_aux": True, "loss": lambda p, x: (linear(p, x), x[0])},
            None,
            "expected a state made by step.init.*, received one made without aux",
        ),
        ({"loss": lambda p, x: p["w"]}, None, "expected a loss that is a real floating scalar"),
        ({"weight": lambda x: -1}, None, "expected a finite weight that is not negative, received -1"),
        (
            {"differentiate": False},
            None,
            r"expected a function that returns \(value, gradients\), for differentiate=False",
        ),
        (
            {"differentiate": False, "loss": lambda p, x: (jnp.float32(0), {"w": x})},
            None,
            r"leaf \['grads'\]\['frozen'\]: expected .* a leaf here, received nothing",
        ),
    ],
)
def test_a_failed_call_damages_no_state(options: dict[str, Any], state: Any, message: str) -> None:
    step = made(**{"every": 2} | options)
    params = start()
    given = step.init(params) if state is None else state()
    with pytest.raises(gc.GradCombineError, match=message):
        step(params, given, X[0])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, given)))


def test_an_example_that_is_no_array_is_named() -> None:
    with pytest.raises(gc.GradCombineError, match=r"^train_step: leaf \[0\]\[1\]\['f'\]: expected .*arrays.*tanh"):
        train_step(linear, NEGATE).init(start(), {"f": jnp.tanh})


@pytest.mark.parametrize("settings", [{"every": 1}, {"microbatches": 2}])
def test_the_state_of_another_optimizer_is_named(settings: dict[str, Any]) -> None:
    params, x, optimizers = jnp.float32(1), jnp.ones(4), (optax.adam(0.1), optax.sgd(0.1))
    adam, sgd = (train_step(lambda w, x: jnp.mean(w * x), optimizer, **settings) for optimizer in optimizers)
    message = r"leaf \[0\]: expected a state of this optimizer: .* ScaleByAdamState of 3 here, received a EmptyState"
    with pytest.raises(gc.GradCombineError, match=message):
        adam(params, sgd.init(params), x)


def test_a_window_of_several_calls_is_not_lost_in_a_step_of_full_windows() -> None:
    params = start()
    _, state, _ = train_step(linear, NEGATE, every=4).function(params, train_step(linear, NEGATE).init(params), X[0])
    with pytest.raises(
        gc.GradCombineError, match=r"leaf .window.levels: expected \(\), .* received a window of a step with every"
    ):
        train_step(linear, NEGATE, microbatches=2)(params, state, X[0])


def test_a_carry_is_asked_for_and_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="expected no carry, received int"):
        train_step(linear, NEGATE).init(start(), carry=3)
    with pytest.raises(gc.GradCombineError, match=r"expected step.init\(params, carry=...\), for carry_argnum"):
        train_step(Loss(linear, carry_argnum=1), NEGATE).init(start())


@pytest.mark.parametrize("settings", [{"every": 2}, {"microbatches": 2}], ids=str)
def test_a_random_key_is_no_parameter(settings: dict[str, int]) -> None:
    step = train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(1.0), **settings)
    with pytest.raises(gc.GradCombineError, match=r"^train_step: leaf \['key'\]: .* numbers.*key<fry>"):
        step.init({"w": jnp.ones(3), "key": jax.random.key(0)})


def test_whole_windows_have_nothing_to_flush() -> None:
    step = train_step(linear, NEGATE, microbatches=2)
    with pytest.raises(gc.GradCombineError, match="expected a step with every, for flush"):
        step.flush(start(), step.init(start()))


CARRIES: dict[str, tuple[Any, str]] = {
    "grows": (lambda carry: jnp.concatenate([carry, carry]), r"leaf \.carry: .* shape \(4,\) after"),
    "nests": (lambda carry: (carry, carry), "a carry whose structure, shapes and dtypes do not change"),
    "is an integer": (lambda carry: carry.astype(jnp.int32), r"leaf \.carry: .* received int32"),
}


@pytest.mark.parametrize("settings", [{"every": 2}, {"microbatches": 1}, {"microbatches": 2}], ids=str)
@pytest.mark.parametrize("name", CARRIES)
def test_a_carry_keeps_its_form(name: str, settings: dict[str, int]) -> None:
    change, message = CARRIES[name]

    def loss(w: Any, x: Any, carry: Any) -> Any:
        return LossOutput(jnp.mean(x @ w), carry=change(carry))

    step = train_step(Loss(loss, carry_argnum=2), optax.sgd(1.0), **settings)
    params = jnp.ones(3)
    with pytest.raises(gc.GradCombineError, match=f"^train_step: .*{message}"):
        step(params, step.init(params, carry=jnp.zeros(2)), jnp.ones((4, 3)))


def test_an_array_that_is_passed_twice_cannot_be_donated() -> None:
    shared = jnp.zeros(3)
    step = train_step(lambda p, x: jnp.mean(x @ p["a"]) + p["b"].sum(), optax.sgd(1.0))
    params = {"a": shared, "b": shared}
    with pytest.raises(gc.GradCombineError, match=r"^train_step: leaf \['b'\]: expected another array than in \['a'\]"):
        step(params, step.init(params), jnp.ones((4, 3)))
