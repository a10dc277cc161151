"""`accumulate_and_apply` gives the parameters of the transformation followed by apply_updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine.integrations.optax import accumulate, accumulate_and_apply, skip_large

SGD = optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.5, momentum=0.5))
GRADS = [{"w": np.float32([x, 2 * x]), "frozen": None} for x in (1, 3, 1e4, 5, 7, 9)]
WEIGHTS = [1, 3, 1, 2, 2, 4]
PARAMS: dict[str, Any] = {"w": np.float32([8, 16]), "frozen": None}


def history(settings: dict[str, Any], flush: Any, jit: bool) -> tuple[list[Any], list[Any]]:
    """Parameters after each microbatch and whether they changed, by `accumulate` and by `accumulate_and_apply`."""
    tx, applying = accumulate(SGD, **settings), accumulate_and_apply(SGD, **settings)

    def transformed(updates: Any, state: Any, params: Any, weight: Any, flush: Any) -> Any:
        updates, state = tx.update(updates, state, params, weight=weight, flush=flush)
        return optax.apply_updates(params, updates), state

    def applied(updates: Any, state: Any, params: Any, weight: Any, flush: Any) -> Any:
        return applying.apply(updates, state, params, weight=weight, flush=flush)

    results = []
    for step, init in ((transformed, tx.init), (applied, applying.init)):
        step = jax.jit(step) if jit else step
        params, state, seen = PARAMS, init(PARAMS), []
        for grads, weight, last in zip(GRADS, WEIGHTS, flush, strict=True):
            params, state = step(grads, state, params, weight, last)
            seen.append((np.asarray(params["w"]).tolist(), params["frozen"], bool(state.applied)))
        results.append(seen)
    return results[0], results[1]


NONE = [False] * len(GRADS)
LAST = [*NONE[1:], True]
SETTINGS: dict[str, dict[str, Any]] = {
    "every": {"every": 2},
    "length": {"every": lambda index: 1 + index},
    "tree": {"every": 4, "order": "tree"},
    "exact": {"every": 3, "reduction": gc.reductions.mean(precision="exact")},
    "skip": {"every": 2, "skip": skip_large(1e3)},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("flush", [LAST, NONE], ids=["flush", ""])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_the_parameters_of_the_transformation(name: str, flush: list[bool], jit: bool) -> None:
    expected, received = history(SETTINGS[name], flush, jit)
    assert received == expected
    assert any(applied for *_, applied in received)


@pytest.mark.full
def test_a_host_that_knows_the_end_needs_no_branch() -> None:
    applying = accumulate_and_apply(SGD, gc.UNTIL_FLUSH)
    step = jax.jit(applying.apply, static_argnames="flush")
    params, state, seen = PARAMS, applying.init(PARAMS), []
    for i, (grads, weight) in enumerate(zip(GRADS, WEIGHTS, strict=True)):
        params, state = step(grads, state, params, weight=weight, flush=i % 2 == 1)
        seen.append((np.asarray(params["w"]).tolist(), params["frozen"], bool(state.applied)))
    assert seen == history({"every": 2}, NONE, jit=True)[0]
    program = str(jax.make_jaxpr(lambda *args: applying.apply(*args, flush=False))(GRADS[0], state, params))
    assert "while" not in program
    assert "cond" not in program


def test_in_the_body_of_a_scan() -> None:
    applying = accumulate_and_apply(SGD, 2)

    def step(carry: Any, x: Any) -> Any:
        params, state = carry
        return applying.apply({"w": x[0], "frozen": None}, state, params, weight=x[1]), None

    params = jax.tree.map(jnp.asarray, PARAMS)
    xs = jnp.stack([grads["w"] for grads in GRADS]), jnp.float32(WEIGHTS)
    (params, _), _ = jax.lax.scan(step, (params, applying.init(params)), xs)
    assert params["w"].tolist() == history({"every": 2}, NONE, jit=True)[0][-1][0]


def test_its_state_is_that_of_the_transformation() -> None:
    tx, applying = accumulate(SGD, 2), accumulate_and_apply(SGD, 2)
    _, state = tx.update(GRADS[0], tx.init(PARAMS), PARAMS, weight=1)
    params, _ = applying.apply(GRADS[1], state, PARAMS, weight=3)
    assert params["w"].tolist() == history({"every": 2}, NONE, jit=False)[0][1][0]


def test_errors_name_it() -> None:
    tx = accumulate_and_apply(SGD, 2)
    with pytest.raises(gc.GradCombineError, match="accumulate_and_apply: expected an AccumulateUpdatesState"):
        tx.apply(GRADS[0], (), PARAMS)
    with pytest.raises(gc.GradCombineError, match="accumulate_and_apply: expected the parameters to update"):
        tx.apply(GRADS[0], tx.init(PARAMS), None)


def optimizer(update: Any) -> optax.GradientTransformation:
    """A transformation with this update, whose state is a dict with one array of one element."""
    return optax.GradientTransformation(lambda params: {"n": jnp.zeros(1)}, update)


BAD_OPTIMIZERS = {
    "a state that grows": (lambda u, s, p: (u, {"n": jnp.concatenate([s["n"]] * 2)}), r"leaf \['n'\].*shape \(2,\)"),
    "a state with another key": (lambda u, s, p: (u, {**s, "m": s["n"]}), "whose structure and shapes do not change"),
    "a dict": (lambda u, s, p: {"updates": u, "state": s}, "a tuple of updates and state, received dict"),
    "updates of another structure": (lambda u, s, p: (u["w"], s), r"leaf \(root\)"),
    "updates of another shape": (lambda u, s, p: ({"w": u["w"][:1]}, s), r"leaf \['w'\].* \(3,\), received \(1,\)"),
}


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("name", BAD_OPTIMIZERS)
def test_what_an_optimizer_may_not_do(name: str, jit: bool) -> None:
    update, message = BAD_OPTIMIZERS[name]
    tx, params = accumulate_and_apply(optimizer(update), 1), {"w": jnp.zeros(3)}
    apply = jax.jit(tx.apply) if jit else tx.apply
    with pytest.raises(gc.GradCombineError, match=f"^accumulate_and_apply: .*{message}"):
        apply(params, tx.init(params), params)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("params", [{"v": jnp.zeros(3)}, {"w": jnp.zeros(4)}, {"w": jnp.zeros(1)}], ids=str)
def test_parameters_that_the_window_was_not_made_for(params: Any, jit: bool) -> None:
    tx = accumulate_and_apply(optax.sgd(1.0), 1)
    state, grads = tx.init({"w": jnp.zeros(3)}), {"w": jnp.zeros(3)}
    with pytest.raises(gc.GradCombineError, match=r"^accumulate_and_apply: leaf \['[vw]'\]"):
        (jax.jit(tx.apply) if jit else tx.apply)(grads, state, params)
