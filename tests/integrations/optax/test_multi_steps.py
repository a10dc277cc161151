"""MultiSteps has the interface of optax.MultiSteps but not its defects, each of which is shown."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine.integrations.optax import MultiSteps, accumulate, skip_large, skip_not_finite
from tests.spec.selection import FULL, cases, named

pytestmark = pytest.mark.usefixtures("standard_promotion")

NEGATE = optax.sgd(1.0)
PARAMS = {"w": jnp.zeros(2)}
BOTH = pytest.mark.parametrize("compat", [False, True], ids=["sums", "compat"])
COMPAT = pytest.mark.parametrize("compat", named(("compat",), {"sums": False, "compat": True}))
"""The quick tier has only optax's mean: windows of sums are those of `accumulate`, which has its own quick tests."""


def run(tx: Any, grads: Any, params: Any = None, **extra: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """The first element of the updates, the state, and `has_updated`, for each step."""
    params = PARAMS if params is None else params
    state, firsts, states = tx.init(params), [], []
    update = jax.jit(functools.partial(tx.update, **extra))
    for grad in grads:
        updates, state = update({"w": jnp.full_like(params["w"], grad)}, state, params)
        firsts.append(updates["w"][0].item())
        states.append(state)
    return firsts, states, [bool(tx.has_updated(s)) for s in states] if hasattr(tx, "has_updated") else []


@functools.cache
def by_optax(*grads: Any, k: Any = 2, mean: bool = True, skip: Any = None) -> tuple[list[Any], list[Any], list[bool]]:
    """`run` with optax.MultiSteps, cached for all tests that compare with it."""
    return run(optax.MultiSteps(NEGATE, k, mean, skip), grads)


@pytest.mark.parametrize(
    ("compat", "mean", "expected"),
    [
        (False, True, [0, -4, 0, -3]),
        pytest.param(False, False, [0, -8, 0, -6], marks=FULL),
        pytest.param(True, True, [0, -4, 0, -3], marks=FULL),
        (True, False, [0, -8, 0, -6]),
    ],
)
def test_a_window_and_its_state(compat: bool, mean: bool, expected: list[float]) -> None:
    firsts, states, updated = run(MultiSteps(NEGATE, 2, mean, compat=compat), [2, 6, 8, -2])
    theirs, their_states, their_updated = by_optax(2, 6, 8, -2, mean=mean)
    assert firsts == theirs == expected
    assert updated == their_updated == [False, True, False, True]
    for ours, other in zip(states, their_states, strict=True):
        assert jax.tree.structure(ours) == jax.tree.structure(other)
        assert jax.tree.map(lambda x: x.dtype, ours) == jax.tree.map(lambda x: x.dtype, other)
        assert (ours.mini_step, ours.gradient_step) == (other.mini_step, other.gradient_step)
    assert [s.acc_grads["w"][0].item() for s in states] == ([2, 0, 8, 0] if compat else [2, 8, 8, 6])


def test_the_interface() -> None:
    tx = MultiSteps(NEGATE, every_k_schedule=2, use_grad_mean=True, should_skip_update_fn=None, accumulator_dtype=None)
    assert tx.inner_opt.init is NEGATE.init
    assert type(tx.init(jnp.zeros(2))) is optax.MultiStepsState
    assert isinstance(tx.gradient_transformation(), optax.GradientTransformationExtraArgs)
    assert tx.init({"w": jnp.zeros(2, jnp.bfloat16)}).acc_grads["w"].dtype == jnp.float32


@pytest.mark.filterwarnings("ignore:Casting from complex to real:DeprecationWarning")  # from optax
def test_defects_of_optax() -> None:
    """`MultiSteps` has none of them: see test_accumulate."""
    firsts, _, _ = by_optax(np.nan, 1, 2, 4)
    assert np.isnan(firsts[3])  # a NaN of the window before
    params = {"w": jnp.zeros(2, np.complex64)}
    assert optax.MultiSteps(NEGATE, 2).init(params).acc_grads["w"].dtype == np.float32
    assert run(optax.MultiSteps(NEGATE, 2), [1 + 2j, 3 - 4j], params)[0][1] != -2 + 1j
    assert MultiSteps(NEGATE, 2).init(params).acc_grads["w"].dtype == np.complex64
    for k in (np.int64(2), np.array(2), jnp.int32(2)):
        with pytest.raises(TypeError):
            run(optax.MultiSteps(NEGATE, k), [2, 4])
    calls: list[int] = []

    def count(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    run(optax.MultiSteps(optax.GradientTransformation(optax.init_empty_state, count), 3), range(6))
    jax.effects_barrier()
    assert len(calls) == 6  # not once a window


DETAILS: dict[str, Any] = {
    "tuple": optax.ScaleByScheduleState(jnp.int32(7)),
    "array": jnp.int32(7),
    "dict": {"a": jnp.int32(7)},
    "empty": (),
}
FUNCTIONS = {name: lambda u, step, params, d=d: (jnp.isnan(u["w"]).any(), d) for name, d in DETAILS.items()}
SKIP = (optax.skip_not_finite, skip_not_finite, skip_not_finite(), *DETAILS)
QUICK = [*((True, skip) for skip in ("tuple", "dict")), *((False, skip) for skip in (*SKIP[1:3], "array"))]


@pytest.mark.parametrize(("compat", "skip"), cases(QUICK, (True, False), SKIP))
def test_has_updated_is_false_after_a_microbatch_that_was_left_out(compat: bool, skip: Any) -> None:
    grads = [2, 4, np.nan, 6, np.nan, 8]
    function, detail = FUNCTIONS.get(skip, skip), DETAILS.get(skip)
    tx = MultiSteps(NEGATE, 2, True, function, compat=compat)
    firsts, states, updated = run(tx, grads)
    theirs, their_states, their_updated = by_optax(*grads, skip=function)
    assert firsts == theirs == [0, -3, 0, 0, 0, -7]
    assert their_updated == [False, True, True, False, False, True]
    # `has_updated` sees only the state.
    silent = skip in ("tuple", "array") or (isinstance(skip, str) and compat)
    assert updated == (their_updated if silent else [False, True, False, False, False, True])
    if detail:
        kept = states[0].skip_state
        assert (kept["a"] if skip == "dict" else kept if skip == "array" else kept.count) == 7
    if compat or not isinstance(skip, str) or skip in ("tuple", "array"):
        assert jax.tree.structure(states) == jax.tree.structure(their_states)


def following(gradient_step: Any) -> Any:
    return gradient_step + 1


@COMPAT
def test_k_may_depend_on_the_window(compat: bool) -> None:
    grads = [2, 4, 6, 1, 2, 6, 7]
    firsts, _, updated = run(MultiSteps(NEGATE, following, compat=compat), grads)
    theirs, _, their_updated = by_optax(*grads, k=following)
    assert firsts == theirs == [-2, 0, -5, 0, 0, -3, 0]
    assert updated == their_updated


def test_k_0_is_refused() -> None:
    assert not any(run(optax.MultiSteps(NEGATE, 0), [1, 2, 3])[2])
    for k in (0, -1, True, 2.5):
        with pytest.raises(gc.GradCombineError, match="MultiSteps: expected a window length that is an integer"):
            MultiSteps(NEGATE, k)  # pyright: ignore[reportArgumentType]


def scaled_by_value() -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda g: g * value, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


@COMPAT
def test_extra_arguments_pass_through_gradient_transformation(compat: bool) -> None:
    theirs = optax.chain(optax.MultiSteps(scaled_by_value(), 2).gradient_transformation())
    with pytest.raises(TypeError, match="value"):
        run(theirs, [2, 4], value=jnp.float32(5))
    ours = optax.chain(MultiSteps(scaled_by_value(), 2, compat=compat).gradient_transformation())
    assert run(ours, [2, 4], value=jnp.float32(5))[0] == [0, 15]
    assert run(MultiSteps(scaled_by_value(), 2, compat=compat), [2, 4], value=jnp.float32(5))[0] == [0, 15]


def test_the_mean_is_that_of_combine() -> None:
    grads = list(np.random.default_rng(0).normal(size=7).astype(np.float32))
    for mean, reduction in ((True, gc.reductions.mean()), (False, gc.reductions.sum())):
        firsts, _, _ = run(MultiSteps(NEGATE, 7, mean), grads)
        assert firsts[-1] == -gc.combine(reduction, grads).item()


def test_300_ones_in_bfloat16() -> None:
    params = {"w": jnp.zeros(2, jnp.bfloat16)}
    tx = MultiSteps(NEGATE, 300, False)
    grads = {"w": jnp.ones((300, 2), jnp.bfloat16)}
    _, updates = jax.lax.scan(lambda s, g: tx.update(g, s, params)[::-1], tx.init(params), grads)
    assert updates["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(updates["w"].astype(np.float32)[-1], [-300, -300])


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("done", [pytest.param(1, marks=FULL), 2, pytest.param(3, marks=FULL)])
def test_a_state_that_optax_made_is_taken_over(compat: bool, done: int) -> None:
    """After 1 and 3 microbatches within a window and after 2 between windows, with a NaN that optax leaves behind."""
    grads = [np.nan if done == 2 else 8, 2, 6, 4]
    _, states, _ = by_optax(*grads[:done])
    tx = MultiSteps(NEGATE, 2, compat=compat)
    state, firsts = tx.adopt(states[-1]), []
    for grad in grads[done:]:
        updates, state = tx.update({"w": jnp.full(2, grad, np.float32)}, state, PARAMS)
        firsts.append(updates["w"][0].item())
    assert firsts == [0, -5, 0, -5][done:]


@BOTH
@pytest.mark.parametrize("detail", [(), {"norm": jnp.float32(0)}])
def test_an_adopted_state_is_the_carry_of_a_scan(compat: bool, detail: Any) -> None:
    def skip(updates: Any, step: Any, params: Any) -> tuple[Any, Any]:
        return jnp.isnan(updates["w"][0]), detail

    _, states, _ = run(optax.MultiSteps(NEGATE, 2, True, skip), [8])
    tx = MultiSteps(NEGATE, 2, True, skip, compat=compat)
    grads = {"w": jnp.float32([[np.nan] * 2, [2, 2]])}
    _, updates = jax.lax.scan(lambda s, g: tx.update(g, s, PARAMS)[::-1], tx.adopt(states[-1]), grads)
    assert updates["w"][:, 0].tolist() == [0, -5]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda u, s, p: (jnp.zeros(2, bool), ()), "expected a skip function that returns a boolean scalar first"),
        (lambda u, s, p: (jnp.int32(0), ()), "received int32 of shape"),
        (lambda u, s, p: jnp.asarray(False), "expected a skip function that returns \\(boolean scalar, state\\)"),
        ("nan", "expected a skip function, or None, received 'nan'"),
        (skip_large, r"expected a skip function of \(updates, gradient_step, params\), received <function skip_large"),
    ],
)
def test_bad_skip_functions(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiSteps(NEGATE, 2, should_skip_update_fn=function).init(PARAMS)


def test_a_mean_of_integers_and_another_optimizer_are_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="expected a dtype that is float or complex, received int32"):
        MultiSteps(NEGATE, 2).init({"w": jnp.zeros(2, jnp.int32)})
    with pytest.raises(gc.GradCombineError, match=r"expected an optax.GradientTransformation, received function"):
        MultiSteps(optax.sgd, 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("compat", [False, True])
def test_the_state_of_another_optimizer_is_named(compat: bool) -> None:
    one, other = (MultiSteps(x, 1, compat=compat) for x in (optax.adam(0.1), optax.sgd(0.1)))
    message = r"MultiSteps: leaf \[0\]: expected a state of this optimizer: .* ScaleByAdamState of 3 here"
    with pytest.raises(gc.GradCombineError, match=message):
        one.update(jnp.ones(2), other.init(jnp.ones(2)))


@BOTH
@pytest.mark.parametrize("shape", [(), (1,), (2, 2)], ids=str)
def test_gradients_of_another_shape_are_not_broadcast(compat: bool, shape: tuple[int, ...]) -> None:
    tx = MultiSteps(NEGATE, 2, compat=compat)
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: expected shape \(2,\), received \("):
        tx.update({"w": jnp.ones(shape)}, tx.init(PARAMS))


def test_an_error_of_an_optimizer_whose_init_cannot_be_traced_is_its_own() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        raise KeyError("of the optimizer")

    tx = accumulate(optax.GradientTransformation(lambda params: [float(params)], update), every=1)
    with pytest.raises(KeyError, match="of the optimizer"):
        tx.update(jnp.float32(1), tx.init(jnp.float32(1)))


@pytest.mark.full
def test_skip_large_has_the_rule_of_optax_below_and_above_its_bound() -> None:
    for bound in (4.5, 5.5):
        ours = skip_large(bound)({"w": jnp.float32([3, 4])}, 0, None)
        theirs = optax.skip_large_updates({"w": jnp.float32([3, 4])}, 0, None, bound**2)
        assert ours[0] == theirs[0] == ours[1]["should_skip"] == (bound < 5)
    squares = jnp.full(2, 300, np.float16)
    assert optax.skip_large_updates({"w": squares}, 0, None, 1e6)[0]  # 300 squared overflows float16
    assert not skip_large(1e3)({"w": squares}, 0, None)[0]
    assert skip_large(4.5)({"w": jnp.complex64([3 + 4j])}, 0, None)[0]


def test_what_is_too_large_is_left_out_of_a_window() -> None:
    tx = MultiSteps(NEGATE, 2, should_skip_update_fn=skip_large(4.5))
    params, state = jnp.zeros(2), tx.init(jnp.zeros(2))
    for gradient in ([3.0, 4.0], [1.0, 2.0], [3.0, 0.0]):
        updates, state = tx.update(jnp.float32(gradient), state, params)
    assert updates.tolist() == [-2.0, -1.0]


@pytest.mark.parametrize("extra", [{"weight": 2.0}, {"flush": True}, {"number": 0}], ids=str)
def test_what_means_something_elsewhere_is_not_dropped(extra: dict[str, Any]) -> None:
    """optax.MultiSteps also passes extra arguments to transformations that may not accept them."""
    tx = MultiSteps(optax.sgd(1.0), 2)
    with pytest.raises(gc.GradCombineError, match=f"MultiSteps: expected no {next(iter(extra))}, .*accumulate does"):
        tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}), **extra)
