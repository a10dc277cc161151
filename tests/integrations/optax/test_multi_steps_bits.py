"""MultiSteps(compat=True) has the updates and states of optax.MultiSteps at every step, bit for bit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcombine import foreign_orders
from gradcombine.integrations.optax import MultiSteps
from tests.spec.selection import FULL

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPES = {"a": (7, 3), "b": (1,), "c": ((), (65,))}
STEPS = 7
INNER = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100))),
    "identity": optax.identity,
}
SKIP: dict[str, Any] = {
    "none": None,
    "not finite": optax.skip_not_finite,
    "large": functools.partial(optax.skip_large_updates, max_squared_norm=1e4),
}
KINDS = [
    ("adamw", 3, True, "none", np.float32),
    ("adamw", 2, True, "not finite", np.float32),
    ("sgd", lambda step: 1 + step % 3, True, "large", np.float32),
    ("adamw", 3, False, "not finite", jnp.bfloat16),
    ("sgd", 2, True, "none", jnp.bfloat16),
    ("identity", 4, False, "none", np.float32),
]


def random_tree(seed: int, dtype: Any, fill: float | None = None) -> Any:
    """Normal numbers of widely varying magnitude, including zeros of both signs; or all ``fill``."""
    rng = np.random.default_rng(seed)

    def leaf(shape: tuple[int, ...]) -> Any:
        values = rng.normal(size=shape) * 2.0 ** rng.integers(-6, 3, shape) * rng.choice([1, 1, 1, 0], shape)
        return jnp.asarray(values if fill is None else np.full(shape, fill), dtype)

    return jax.tree.map(leaf, SHAPES, is_leaf=lambda x: x == () or (isinstance(x, tuple) and isinstance(x[0], int)))


@functools.cache
def stepper(kind: int, ours: bool) -> tuple[Any, Callable[..., Any]]:
    """The transformation, and its update compiled once for all examples."""
    inner, k, mean, skip, _ = KINDS[kind]
    tx: Any = (functools.partial(MultiSteps, compat=True) if ours else optax.MultiSteps)(
        INNER[inner](), k, mean, SKIP[skip]
    )
    return tx, jax.jit(tx.update)


def bits(x: Any) -> Any:
    return x.dtype, x.shape, np.asarray(x).tobytes()


def assert_same_steps(ours: Any, theirs: Any, path: str) -> None:
    """Equal bits, except that the zero updates of optax between windows may be negative."""
    (updates, state), (their_updates, their_state) = ours, theirs
    assert jax.tree.structure(state) == jax.tree.structure(their_state)
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(their_state), strict=True)
    assert [jax.tree_util.keystr(at) for (at, x), y in pairs if bits(x) != bits(y)] == [], path
    between = state.mini_step != 0
    for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(their_updates), strict=True):
        assert bits(x + 0 if between else x) == bits(y + 0 if between else y), path
        assert not (between and np.any(x)), path


QUICK = (1, 4)
"""Clipping, weight decay, a schedule and a skip rule; and bfloat16."""


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(i, id=f"{inner}-{mean}-{skip}-{np.dtype(dtype)}", marks=() if i in QUICK else FULL)
        for i, (inner, _, mean, skip, dtype) in enumerate(KINDS)
    ],
)
@given(seed=st.integers(0, 2**32 - 1), bad=st.sets(st.integers(0, STEPS - 1), max_size=3))
@settings(max_examples=4)
def test_compiled_step_by_step(kind: int, seed: int, bad: set[int]) -> None:
    skip, dtype = KINDS[kind][3:]
    params = random_tree(seed, dtype)
    (tx, ours), (other, theirs) = stepper(kind, True), stepper(kind, False)
    state, their_state = tx.init(params), other.init(params)
    assert_same_steps((params, state), (params, their_state), "init")
    for i in range(STEPS):
        fill = {"none": None, "not finite": np.nan, "large": 1e6}[skip] if i in bad else None
        grads = random_tree(seed + 1 + i, dtype, fill)
        (updates, state), (their_updates, their_state) = ours(grads, state, params), theirs(grads, their_state, params)
        assert_same_steps((updates, state), (their_updates, their_state), f"step {i}")


def steps(tx: Any, mode: str, grads: list[Any], params: Any) -> list[Any]:
    if mode == "scan":

        def body(state: Any, grad: Any) -> Any:
            updates, state = tx.update(grad, state, params)
            return state, (updates, state)

        _, stacked = jax.jit(lambda state, xs: jax.lax.scan(body, state, xs))(
            tx.init(params), jax.tree.map(lambda *xs: jnp.stack(xs), *grads)
        )
        return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(len(grads))]
    state, steps = tx.init(params), []
    update = jax.jit(tx.update) if mode == "jit" else tx.update
    for grad in grads:
        updates, state = update(grad, state, params)
        steps.append((updates, state))
    return steps


OTHER_MODES = [("eager", 0), ("eager", 5), ("scan", 1), ("scan", 3), ("disable_jit", 4)]


@pytest.mark.full
@pytest.mark.parametrize(("mode", "kind"), [("scan", 5), *(pytest.param(*x, marks=FULL) for x in OTHER_MODES)])
def test_other_modes(mode: str, kind: int) -> None:
    dtype = KINDS[kind][4]
    params, grads = random_tree(0, dtype), [random_tree(i, dtype) for i in range(1, 4)]
    with jax.disable_jit(mode == "disable_jit"):
        pairs = [steps(stepper(kind, ours)[0], mode, grads, params) for ours in (True, False)]
    for i, (ours, theirs) in enumerate(zip(*pairs, strict=True)):
        assert_same_steps(ours, theirs, f"step {i}")


@FULL
def test_the_mean_is_the_welford_mean_of_foreign_orders() -> None:
    grads = [random_tree(i, np.float32) for i in range(5)]
    tx = MultiSteps(optax.identity(), 5, compat=True)
    state, updates, update = tx.init(grads[0]), None, jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state)
    assert jax.tree.map(bits, updates) == jax.tree.map(bits, foreign_orders.welford(grads))


@FULL
def test_without_compat_the_bits_are_others() -> None:
    """The comparisons above can fail."""
    grads = [random_tree(i, np.float32) for i in range(5)]
    updates = [
        steps(tx, "jit", grads, grads[0])[-1][0]
        for tx in (optax.MultiSteps(INNER["identity"](), 5), MultiSteps(INNER["identity"](), 5))
    ]
    assert bits(updates[0]["a"]) != bits(updates[1]["a"])
