"""The optax transformations on small dyadic numbers, for which every float32 result is exact."""

import functools
import operator
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine.integrations.optax import MultiSteps, accumulate, accumulate_and_apply
from tests.spec.selection import FULL, cases, named

NEGATE = optax.sgd(1.0)


OPTAX_PROMOTES = pytest.mark.usefixtures("standard_promotion")


def run(tx: Any, params: Any, grads: list[Any], mode: str = "eager", **extra: list[Any]) -> tuple[list[Any], Any]:
    """The updates of all steps and the final state. ``extra``: values of a keyword argument, one per step."""
    rows = [{name: jnp.asarray(values[i]) for name, values in extra.items()} for i in range(len(grads))]

    def step(state: Any, x: Any) -> Any:
        updates, state = tx.update(x[0], state, params, **x[1])
        return state, updates

    state, steps = tx.init(params), list(zip(grads, rows, strict=True))
    if mode == "scan":
        state, stacked = jax.lax.scan(step, state, jax.tree.map(lambda *xs: jnp.stack(xs), *steps))
        return [jax.tree.map(operator.itemgetter(i), stacked) for i in range(len(grads))], state
    step = jax.jit(step) if mode == "jit" else step
    outputs = []
    for x in steps:
        state, updates = step(state, x)
        outputs.append(updates)
    return outputs, state


def vectors(*values: Any, dtype: Any = np.float32) -> list[Any]:
    return [{"w": jnp.full((2,), value, dtype)} for value in values]


def firsts(outputs: list[Any]) -> list[Any]:
    """The first element of each update of `vectors`."""
    return [update["w"][0].item() for update in outputs]


PARAMS = vectors(0)[0]
MODES = pytest.mark.parametrize("mode", ["eager", "scan"])
SCAN = pytest.mark.parametrize("mode", [pytest.param("eager", marks=FULL), "scan"])
BFLOAT16 = accumulate(NEGATE, 2).init(vectors(0, dtype=jnp.bfloat16)[0])
MEANS = [Fraction(1 * 2 + 3 * 6, 4), Fraction(2 * -1 + 2 * 8, 4)]


REDUCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "default": (None, MEANS),
    "sum": (gc.reductions.sum(), [1 * 2 + 3 * 6, 2 * -1 + 2 * 8]),
    "max": (gc.reductions.max(), [6, 8]),
    "per_leaf": (gc.reductions.per_leaf({"w": gc.reductions.mean()}), MEANS),
}
QUICK = [
    *(("scan", "sequential", name) for name in ("sum", "per_leaf")),
    *(("scan", "tree", name) for name in ("default", "max")),
    *(("eager", "sequential", name) for name in ("default", "max")),
]


@pytest.mark.parametrize(
    ("mode", "order", "name"), cases(QUICK, ("eager", "scan"), ("sequential", "tree"), REDUCTIONS, pairwise=True)
)
def test_the_boundary_applies_the_combined_gradient(mode: str, order: Any, name: str) -> None:
    reduction, expected = REDUCTIONS[name]
    tx = accumulate(NEGATE, 2, reduction=reduction, order=order)
    outputs, state = run(tx, PARAMS, vectors(2, 6, -1, 8), mode, weight=np.float32([1, 3, 2, 2]))
    assert firsts(outputs) == [0, -expected[0], 0, -expected[1]]
    assert bool(state.applied)


@OPTAX_PROMOTES
@SCAN
def test_it_composes_and_momentum_schedules_and_clipping_see_windows(mode: str) -> None:
    halving = optax.sgd(lambda count: jnp.exp2(-count.astype(jnp.float32)), momentum=0.5)
    tx = optax.chain(optax.scale(2.0), accumulate(optax.chain(optax.clip(4.0), halving), 2), optax.scale(-1.0))
    outputs, (_, state, _) = run(tx, PARAMS, vectors(5, -3, 8, 8, 1, 1), mode)
    # Scaled and averaged: 2, 16, 2; clipped: 2, 4, 2; with momentum: 2, 5, 4.5; times 1, 1/2, 1/4.
    assert firsts(outputs) == [0, 2, 0, 2.5, 0, 1.125]
    assert int(optax.tree.get(state.inner, "count")) == 3


WRAPPERS = {
    "accumulate": accumulate,
    "MultiSteps": MultiSteps,
    "MultiSteps compat": functools.partial(MultiSteps, compat=True),
}
ALL = pytest.mark.parametrize("wrap", named(("accumulate", "MultiSteps compat"), WRAPPERS))
"""None of these has the defects of optax.MultiSteps, which test_multi_steps shows."""


@OPTAX_PROMOTES
@MODES
@ALL
def test_nan_does_not_outlive_its_window(wrap: Any, mode: str) -> None:
    outputs, _ = run(wrap(NEGATE, 2), PARAMS, vectors(np.nan, 1, 2, 4, np.inf, 1, 3, 5), mode)
    assert not np.isfinite([outputs[1]["w"], outputs[5]["w"]]).any()
    assert [x for x in firsts(outputs) if np.isfinite(x)] == [0, 0, -3, 0, 0, -4]


@OPTAX_PROMOTES
@SCAN
@ALL
def test_complex_gradients_keep_their_imaginary_part(wrap: Any, mode: str) -> None:
    grads = vectors(1 + 2j, 3 - 4j, dtype=np.complex64)
    outputs, _ = run(wrap(NEGATE, 2), vectors(0, dtype=np.complex64)[0], grads, mode)
    assert firsts(outputs) == [0, -2 + 1j]
    assert outputs[0]["w"].dtype == outputs[1]["w"].dtype == np.complex64


EVERY = {"int": 2, "np.int64": np.int64(2), "np.array": np.array(2), "jax.Array": jnp.int32(2), "function": lambda _: 2}


@pytest.mark.parametrize("every", named(("int", "np.array", "function"), EVERY))
@ALL
def test_every_is_any_integer(wrap: Any, every: Any) -> None:
    assert firsts(run(wrap(NEGATE, every), PARAMS, vectors(2, 4), "jit")[0]) == [0, -3]


@MODES
def test_every_may_depend_on_the_window(mode: str) -> None:
    outputs, _ = run(accumulate(NEGATE, lambda index: index + 1), PARAMS, vectors(2, 4, 6, 1, 2, 6), mode)
    assert firsts(outputs) == [-2, 0, -5, 0, 0, -3]


@MODES
def test_extra_arguments_reach_the_inner_transformation(mode: str) -> None:
    def scale(updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        assert not extra
        return jax.tree.map(lambda g, p: g * value + p, updates, params), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scale)
    tx = optax.chain(optax.identity(), accumulate(inner, 2))
    extra = {"value": np.float32([7, 2]), "weight": np.float32([1, 3]), "flush": [False, False]}
    assert firsts(run(tx, vectors(10)[0], vectors(4, 8), mode, **extra)[0]) == [0, 7 * 2 + 10]


@OPTAX_PROMOTES
@ALL
def test_the_inner_transformation_runs_at_the_boundary_alone(wrap: Any) -> None:
    runs: list[int] = []

    def count(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.callback(lambda: runs.append(1))
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), count)
    run(wrap(inner, 3), PARAMS, vectors(*range(6)), "jit")
    jax.effects_barrier()
    assert len(runs) == 2


def full_batch(x: Any) -> Any:
    """The gradient at each w of the mean loss per token, ``w * x``."""
    return jax.grad(lambda w: jnp.mean(w * x))(jnp.float32(1))


def test_the_mean_over_tokens_is_the_gradient_of_the_full_batch_and_a_mean_of_means_is_not() -> None:
    batch = np.float32([1, 2, 3, 4, 5, 6, 7, 16])
    parts = [batch[:1], batch[1:3], batch[3:8]]
    grads, tokens = [full_batch(x) for x in parts], [len(x) for x in parts]
    weighted, _ = run(accumulate(NEGATE, 3), jnp.float32(1), grads, weight=tokens)
    unweighted, _ = run(accumulate(NEGATE, 3), jnp.float32(1), grads)
    assert -weighted[-1] == full_batch(batch) == 44 / 8
    assert -unweighted[-1] != full_batch(batch)


@MODES
@pytest.mark.parametrize("flush", [[0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0]], ids=["partial", "full too"])
def test_flush_ends_a_partial_window(mode: str, flush: list[int]) -> None:
    grads = vectors(2, 2, 2, 6, 5, 4, 4, 4)
    outputs, state = run(accumulate(NEGATE, 4), PARAMS, grads, mode, flush=np.bool_(flush), weight=[1] * 8)
    assert firsts(outputs) == [0, 0, 0, -3, -5, 0, 0, 0]
    assert (int(state.window.step), int(state.window.index)) == (3, 2)


@pytest.mark.parametrize(
    ("mode", "order"), cases([("eager", "sequential"), ("scan", "tree")], ("eager", "scan"), ("sequential", "tree"))
)
def test_flush_with_weight_zero_applies_what_is_there(mode: str, order: Any) -> None:
    extra = {"weight": np.float32([1, 3, 0, 1]), "flush": [False, False, True, False]}
    outputs, _ = run(accumulate(NEGATE, 4, order=order), PARAMS, vectors(2, 6, np.nan, 7), mode, **extra)
    assert firsts(outputs) == [0, 0, -5, 0]


@MODES
@pytest.mark.parametrize("flush", [False, True, np.bool_(True)])
def test_flush_known_while_tracing(mode: str, flush: Any) -> None:
    tx = accumulate(NEGATE, 2)
    fixed = tx._replace(update=lambda *args: tx.update(*args, flush=flush))
    assert firsts(run(fixed, PARAMS, vectors(2, 4), mode)[0]) == ([-2, -4] if flush else [0, -3])


@pytest.mark.parametrize(
    ("mode", "narrow"),
    cases([("scan", jnp.bfloat16), ("eager", np.float16)], ("eager", "scan"), (jnp.bfloat16, np.float16)),
)
def test_narrow_gradients_accumulate_in_the_parameters_dtype(mode: str, narrow: Any) -> None:
    top = 2 / jnp.finfo(narrow).eps.item()
    outputs, _ = run(
        accumulate(NEGATE, 3, reduction=gc.reductions.sum()), PARAMS, vectors(top, 1, 1, dtype=narrow), mode
    )
    assert firsts(outputs) == [0, 0, -top - 2]
    assert {update["w"].dtype for update in outputs} == {np.dtype(narrow)}


def test_an_output_dtype_reaches_the_inner_transformation() -> None:
    params = vectors(0, dtype=jnp.bfloat16)[0]
    tx = accumulate(NEGATE, 2, reduction=gc.reductions.mean(output_dtype=np.float32))
    outputs, _ = run(tx, params, vectors(256, 257 + 1, dtype=jnp.bfloat16), "jit")
    assert firsts(outputs) == [0, -257]
    assert {update["w"].dtype for update in outputs} == {np.dtype(np.float32)}


@OPTAX_PROMOTES
@MODES
def test_none_stays_in_its_place(mode: str) -> None:
    params = {"w": jnp.zeros(2), "frozen": None}
    outputs, _ = run(accumulate(optax.adamw(1.0), 2), params, [g | {"frozen": None} for g in vectors(1, 3)], mode)
    assert jax.tree.structure(outputs) == jax.tree.structure([params, params])


@pytest.mark.parametrize("wrap", [accumulate, MultiSteps])
def test_a_gradient_missing_at_the_boundary_does_not_lose_its_window(wrap: Any) -> None:
    params = PARAMS | {"b": jnp.zeros(())}
    biases = [None, jnp.float32(6), jnp.float32(8), None]
    grads = [{"w": jnp.ones(2), "b": bias} for bias in biases]
    outputs, _ = run(wrap(NEGATE, 2), params, grads)
    assert [update["b"].item() for update in outputs] == [0, -3, 0, -4]


@OPTAX_PROMOTES
def test_one_trace_serves_all_steps_and_adam_counts_windows() -> None:
    traces: list[int] = []
    tx = accumulate(optax.adam(0.1), 2)

    @jax.jit
    def step(params: Any, state: Any, grads: Any, weight: Any) -> Any:
        traces.append(1)
        updates, state = tx.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for i, grads in enumerate(vectors(*range(5))):
        params, state = step(params, state, grads, jnp.float32(i + 1))
    assert len(traces) == 1
    assert (int(state.inner[0].count), int(state.window.step), bool(state.applied)) == (2, 1, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "expected a window length that is an integer of 1 or more, or a function .*, received 0"),
        ({"every": jnp.int32(-1)}, "received -1"),
        ({"every": 2.5}, "received 2.5"),
        ({"inner": optax.sgd}, "expected an optax.GradientTransformation, received function"),
        ({"reduction": gc.reductions.mean}, "expected a Reduction, .*, received mean, not called"),
        ({"over": "d"}, "expected a collective.*, received 'd'"),
        ({"order": "ring"}, "expected order 'sequential' or 'tree', received 'ring'"),
        ({"every": lambda index: 2, "order": "tree"}, "expected max_every"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(gc.GradCombineError, match=message):
        accumulate(**({"inner": NEGATE, "every": 2} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"updates": {"v": jnp.zeros(2)}},
            r"leaf \['w'\]: expected the structure to have a leaf here, received nothing",
        ),
        ({"updates": {"w": jnp.zeros(3)}}, r"leaf \['w'\]: expected shape \(2,\), received \(3,\)"),
        ({"updates": {"w": jnp.zeros(2, np.int32)}}, r"leaf \['w'\]: expected .*float.*, received int32"),
        ({"state": BFLOAT16}, r"leaf \['w'\]: expected dtype bfloat16, .* received float32"),
        ({"weight": -1}, "expected a finite weight that is not negative, received -1"),
        ({"weight": jnp.ones(2)}, r"expected a weight of shape \(\)"),
        ({"flush": 1}, "expected flush as a boolean scalar, received 1"),
        ({"flush": jnp.array([True])}, "expected flush as a boolean scalar"),
        ({"state": optax.EmptyState()}, "expected an AccumulateUpdatesState, received EmptyState"),
    ],
)
def test_bad_updates(arguments: dict[str, Any], message: str) -> None:
    tx = accumulate(NEGATE, 2)
    with pytest.raises(gc.GradCombineError, match=message):
        tx.update(**({"updates": PARAMS, "state": tx.init(PARAMS), "params": PARAMS} | arguments))


@pytest.mark.sampled
@pytest.mark.parametrize("door", [accumulate, accumulate_and_apply])
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_a_ledger_has_the_number_of_the_place_or_the_one_that_is_given(door: Any, order: Any) -> None:
    tx = door(NEGATE, 4, reduction=gc.reductions.numbered(gc.reductions.mean(), 4), order=order)
    eagerly = tx.update if hasattr(tx, "update") else tx.apply
    call = jax.jit(eagerly)
    state, grads = tx.init(PARAMS), jax.tree.map(jnp.ones_like, PARAMS)
    for given in ({}, {}, {"number": 3}, {"number": 1}):
        _, state = call(grads, state, PARAMS, **given)
    assert gc.ledger.read(state) == gc.ledger.Ledger((0, 1, 3), (2,), (1,))
    state = tx.init(PARAMS)
    _, state = call(grads, state, PARAMS, number=1)
    with pytest.raises(gc.GradCombineError):
        eagerly(grads, state, PARAMS, number=1)
    with pytest.raises(gc.GradCombineError, match="no number, or a reduction that is numbered"):
        accumulate(NEGATE, 4).update(grads, accumulate(NEGATE, 4).init(PARAMS), PARAMS, number=0)


def test_a_window_in_a_tree_continues_with_a_length_of_as_many_bits() -> None:
    """Of 4 microbatches, saved after 2; with 8, only if `max_every` sizes both, which takes a function."""
    _, state = run(accumulate(NEGATE, 4, order="tree"), PARAMS, vectors(1, 2))
    with pytest.raises(gc.GradCombineError, match="expected a state of 4 levels, received 3"):
        accumulate(NEGATE, 8, order="tree").update(vectors(3)[0], state, PARAMS)
    updates = PARAMS
    for grads in vectors(3, 4, 5):
        updates, state = accumulate(NEGATE, 5, order="tree").update(grads, state, PARAMS)
    assert updates["w"].tolist() == [-3, -3]

    before, after = (accumulate(NEGATE, lambda _, n=n: n, order="tree", max_every=8) for n in (4, 8))
    _, state = run(before, PARAMS, vectors(1, 2))
    for grads in vectors(3, 4, 5, 6, 7, 8):
        updates, state = after.update(grads, state, PARAMS)
    assert updates["w"].tolist() == [-4.5, -4.5]
