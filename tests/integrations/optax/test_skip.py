"""Microbatches that `accumulate` skips."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine import statefile
from gradcombine.integrations.optax import accumulate, skip_large, skip_not_finite
from gradcombine.places.window import OVER
from tests.integrations.jax.replicas import AXIS, GRADS, TOKENS, N
from tests.integrations.jax.replicas import MODES as REPLICATED
from tests.integrations.optax.test_accumulate import MODES, NEGATE, OPTAX_PROMOTES, PARAMS, SCAN, firsts, run, vectors
from tests.spec.selection import cases, named

NAN, INF = np.nan, np.inf


def negative(updates: Any, gradient_step: Any, params: Any) -> Any:
    """A skip function with optax's signature that uses the index of the window."""
    return (updates["w"] < 0).any(), {"step": gradient_step}


RULES: dict[str, tuple[Any, float]] = {
    "made": (skip_not_finite(), NAN),
    "the function": (skip_not_finite, INF),
    "large": (skip_large(6.5), 5.0),
    "negative": (negative, -1.0),
}
QUICK = [
    *(("scan", "tree", name) for name in ("made", "large")),
    *(("scan", "sequential", name) for name in ("the function", "negative")),
    ("eager", "sequential", "large"),
]


@pytest.mark.parametrize(
    ("mode", "order", "name"), cases(QUICK, ("eager", "scan"), ("sequential", "tree"), RULES, pairwise=True)
)
def test_what_is_left_out_has_no_weight_and_counts_as_a_step(mode: str, order: Any, name: str) -> None:
    skip, bad = RULES[name]
    grads, weights = vectors(1, bad, 3, bad, bad, 4), np.float32([1, 7, 3, 7, 7, 2])
    outputs, state = run(accumulate(NEGATE, 3, skip=skip, order=order), PARAMS, grads, mode, weight=weights)
    assert firsts(outputs) == [0, 0, -(1 * 1 + 3 * 3) / 4, 0, 0, -4]
    assert state.skip._fields == ("skipped", "in_a_row", "detail", "all_of_window")
    assert (int(state.skip.skipped), int(state.skip.in_a_row)) == (3, 0)
    assert (int(state.window.step), int(state.window.index)) == (OVER, 1)


@OPTAX_PROMOTES
@SCAN
def test_a_window_of_which_nothing_is_left_does_not_run_the_inner_transformation(mode: str) -> None:
    tx = accumulate(optax.sgd(1.0, momentum=0.5), 2, skip=skip_not_finite())
    outputs, state = run(tx, PARAMS, vectors(1, 3, NAN, INF, NAN, 4, NAN, NAN), mode)
    assert firsts(outputs) == [0, -2, 0, 0, 0, -5, 0, 0]
    assert (int(state.skip.skipped), int(state.skip.in_a_row), bool(state.applied)) == (5, 2, False)


@MODES
def test_flush_of_a_window_of_which_nothing_is_left(mode: str) -> None:
    extra = {"flush": [False, True, False, True]}
    outputs, state = run(
        accumulate(NEGATE, 4, skip=skip_not_finite()), PARAMS, vectors(NAN, NAN, 6, NAN), mode, **extra
    )
    assert firsts(outputs) == [0, 0, 0, -6]
    assert int(state.window.index) == 1


@SCAN
def test_a_microbatch_of_weight_0_is_not_left_out(mode: str) -> None:
    """Weight decay runs on a gradient of 0 if the window ends with it."""
    decay = optax.chain(optax.add_decayed_weights(0.5), NEGATE)
    extra = {"flush": [False, True], "weight": np.float32([1, 0])}
    outputs, state = run(accumulate(decay, 4, skip=skip_not_finite()), vectors(2)[0], vectors(NAN, 3), mode, **extra)
    assert (firsts(outputs), bool(state.applied)) == ([0, -1], True)


@MODES
def test_the_skip_function_sees_the_window_and_the_parameters(mode: str) -> None:
    def skip(updates: Any, gradient_step: Any, params: Any) -> Any:
        return (updates["w"] > params["w"] * gradient_step.astype(np.float32)).all(), {"step": gradient_step}

    outputs, state = run(accumulate(NEGATE, 1, skip=skip), vectors(2)[0], vectors(1, 2, 5, 6), mode)
    # The thresholds are 0, 2, 4, 6.
    assert firsts(outputs) == [0, -2, 0, -6]
    assert int(state.skip.detail["step"]) == 3


@REPLICATED
@pytest.mark.parametrize("skip", named(("not finite",), {"not finite": skip_not_finite(), "large": skip_large(1e3)}))
def test_a_microbatch_that_is_bad_on_one_replica_is_left_out_on_all(mode: Any, skip: Any) -> None:
    params, grads = {"w": jnp.zeros(())}, GRADS.copy()
    grads[2, 1] = NAN
    tx = accumulate(NEGATE, 2, over=AXIS, skip=skip)

    def program(grads: Any, tokens: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            updates, state = tx.update({"w": x[0]}, state, params, weight=x[1])
            return state, updates["w"]

        state, updates = jax.lax.scan(step, tx.init(params), (grads, tokens))
        return updates, state.skip.skipped

    updates, skipped = mode(program, grads, TOKENS)
    first = (GRADS[:, 0] * TOKENS[:, 0]).sum() / TOKENS[:, 0].sum()
    second = (GRADS[:, 2:] * TOKENS[:, 2:]).sum() / TOKENS[:, 2:].sum()
    np.testing.assert_array_equal(updates, [[0, -first, 0, -second]] * N)
    np.testing.assert_array_equal(skipped, [1] * N)


def test_flush_and_skip_share_one_exchange() -> None:
    tx = accumulate(NEGATE, 2, over=AXIS, skip=skip_not_finite())
    params = {"w": jnp.zeros(3)}

    def step(grads: Any, flush: Any) -> Any:
        return tx.update(grads, tx.init(params), params, flush=flush)[0]

    jaxpr = jax.make_jaxpr(step, axis_env=[("d", N)])(params, jnp.asarray(False)).jaxpr
    (exchange,) = [eqn for eqn in jaxpr.eqns if "psum" in eqn.primitive.name]
    assert [x.aval.shape for x in exchange.invars] == [(2,)]


@OPTAX_PROMOTES
def test_a_resized_window_keeps_its_microbatch_if_the_others_are_left_out() -> None:
    """One microbatch on one replica; on two, whose position is rounded down to 0, the rest of the window is skipped."""
    _, state = run(accumulate(NEGATE, 4, skip=skip_not_finite()), PARAMS, vectors(3), "eager")
    windows = statefile.resize(gc.reductions.mean(), [state.window], 2)
    tx = accumulate(NEGATE, 2, skip=skip_not_finite(), over=gc.jax_axis("replicas"))

    def resumed(window: Any) -> Any:
        state, outputs = tx.init(PARAMS)._replace(window=window), []
        for grads in vectors(NAN, NAN):
            updates, state = tx.update(grads, state, PARAMS)
            outputs.append(updates["w"][0])
        return outputs, state.window.step

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *windows)
    outputs, steps = jax.vmap(resumed, axis_name="replicas")(stacked)
    np.testing.assert_array_equal(outputs, [[0, 0], [-3, -3]])
    assert steps.tolist() == [OVER, OVER]


@OPTAX_PROMOTES
@pytest.mark.parametrize(("every", "position"), [(2, 1), (4, 5)])  # on twice as many replicas; with a shorter window
def test_a_resumed_window_with_the_state_of_its_skips_keeps_its_microbatch(every: int, position: int) -> None:
    """One microbatch, after which all are left out: more of them in a row than the new window has microbatches."""
    _, state = run(accumulate(NEGATE, 8, skip=skip_not_finite()), PARAMS, vectors(3, *[NAN] * 4), "eager")
    state = state._replace(window=state.window._replace(step=jnp.int32(position)))
    updates, state = accumulate(NEGATE, every, skip=skip_not_finite()).update(vectors(NAN)[0], state, PARAMS)
    assert (updates["w"][0], bool(state.applied), int(state.skip.in_a_row)) == (-3, True, 5)


def test_over_none_is_local() -> None:
    assert firsts(run(accumulate(NEGATE, 2, over=None), PARAMS, vectors(2, 4))[0]) == [0, -3]


@MODES
def test_integer_leaves_stay_exact(mode: str) -> None:
    params = {"w": jnp.zeros(2, np.int32)}
    tx = accumulate(optax.identity(), 3, reduction=gc.reductions.sum(), skip=negative)
    outputs, _ = run(tx, params, vectors(2**24, -1, 1, dtype=np.int32), mode)
    assert firsts(outputs) == [0, 0, 2**24 + 1]


@pytest.mark.full
def test_the_norm_is_over_all_leaves_and_formed_in_float32() -> None:
    tree = {"a": jnp.full(1, 300, np.float16), "b": jnp.complex64([400j]), "c": None}
    for bound, left_out in ((499.0, True), (500.0, False), (lambda step: 400 + 100 * step, False)):
        skipped, detail = skip_large(bound)(tree, jnp.int32(1), None)
        assert bool(skipped) == bool(detail["should_skip"]) == left_out
        assert detail["norm"] == 500 and detail["norm"].dtype == np.float32
    assert bool(skip_large(INF)({"a": jnp.float32([NAN])}, 0, None)[0])
    assert skip_not_finite({"a": jnp.int32(1), "b": jnp.bfloat16(INF)}, 0, None)[1]["num_not_finite"] == 1
    assert not skip_not_finite({}, 0, None)[0] and not skip_large(1)({}, 0, None)[0]


@pytest.mark.parametrize("bound", [0, -1.0, NAN, None, "1e"])
def test_bad_norms(bound: Any) -> None:
    with pytest.raises(gc.GradCombineError, match="skip_large: expected a norm above 0"):
        skip_large(bound)


def test_bad_skip_functions_and_states() -> None:
    with pytest.raises(gc.GradCombineError, match="accumulate: expected a skip function, or None, received True"):
        accumulate(NEGATE, 2, skip=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(gc.GradCombineError, match="boolean scalar first, received float32 of shape"):
        accumulate(NEGATE, 2, skip=lambda u, s, p: (u["w"], ())).init(PARAMS)
    with_skip, without = accumulate(NEGATE, 2, skip=skip_not_finite()), accumulate(NEGATE, 2)
    with pytest.raises(gc.GradCombineError, match="expected a state made with a skip function"):
        with_skip.update(PARAMS, without.init(PARAMS), PARAMS)
    with pytest.raises(gc.GradCombineError, match="expected a state made without a skip function"):
        without.update(PARAMS, with_skip.init(PARAMS), PARAMS)
    with pytest.raises(gc.GradCombineError, match="a finite weight that is not negative, received -1"):
        jax.jit(lambda g: with_skip.update(g, with_skip.init(PARAMS), PARAMS, weight=-1))(PARAMS)
