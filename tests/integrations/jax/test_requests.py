"""Windows over requests: every microbatch counts once, the order does not matter, and slots are independent."""

from __future__ import annotations

import cProfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import Loss, LossOutput, RequestStep, request_step, train_step
from gradcombine.integrations.jax.requests import Node
from tests.integrations.jax import request_histories as histories
from tests.integrations.jax.replicas import collectives, mesh

pytestmark = pytest.mark.usefixtures("standard_promotion")


RNG = np.random.default_rng(0)
BATCHES = [RNG.standard_normal((4, 3)).astype(np.float32) * np.float32(10.0**i) for i in range(7)]
WEIGHTS = [np.sum(x > 0) for x in BATCHES]
W = RNG.standard_normal(3).astype(np.float32)
TAKEN = optax.sgd(1.0)


def loss(w: jax.Array, x: jax.Array) -> LossOutput:
    return LossOutput(jnp.mean(jnp.square(x @ w)), weight=jnp.sum(x > 0))


def sent(step: RequestStep, state: Any, numbers: Any, *args: Any, batches: Any = BATCHES) -> Any:
    """The state after requests for the microbatches with these numbers."""
    for n in numbers:
        state = step.forward_backward(state, batches[n], *args, slot="a", number=n)
    return state


def applied(step: RequestStep, state: Any) -> np.ndarray:
    return np.asarray(step.optim_step(state, slot="a")[0]["a"].params)


def after(step: RequestStep, numbers: Any, *args: Any) -> np.ndarray:
    """The combined gradient, read off the update of zero parameters."""
    return -applied(step, sent(step, step.init({"a": np.zeros(3, np.float32)}), numbers, *args))


def given(w: jax.Array, x: jax.Array) -> LossOutput:
    """A loss whose gradient does not depend on the parameters."""
    return LossOutput(jnp.sum(x[0] * w), weight=jnp.sum(x > 0))


def combined(numbers: list[int], **settings: Any) -> np.ndarray:
    reduction = reductions.mean(settings.pop("precision", "fast"))
    return np.asarray(
        gc.combine(reduction, [BATCHES[n][0] for n in numbers], [WEIGHTS[n] for n in numbers], **settings)
    )


SHUFFLED = [4, 0, 6, 2, 1, 5, 3]


@pytest.mark.full
def test_the_bits_are_those_of_a_list() -> None:
    step = request_step(given, TAKEN, microbatches=8)
    np.testing.assert_array_equal(after(step, SHUFFLED), combined(SHUFFLED))


@pytest.mark.full
def test_no_order_of_requests_changes_exact_sums() -> None:
    step = request_step(given, TAKEN, microbatches=8, reduction=reductions.mean("exact"))
    np.testing.assert_array_equal(after(step, SHUFFLED), combined([*range(7)], precision="exact"))


@pytest.mark.parametrize("numbers", [SHUFFLED, [*range(7)], [2, 1, 0]], ids=str)
def test_in_order_tree_the_numbers_say_the_order(numbers: list[int]) -> None:
    step = request_step(given, TAKEN, microbatches=8, order="tree")
    np.testing.assert_array_equal(after(step, numbers), combined(sorted(numbers), order="tree"))


def test_in_order_tree_what_is_missing_is_left_out() -> None:
    step = request_step(given, TAKEN, microbatches=8, order="tree")
    mean = reductions.mean()
    one = {n: mean.update(mean.init(W), BATCHES[n][0], WEIGHTS[n]) for n in range(7)}
    expected = mean.merge(mean.merge(one[1], mean.merge(one[2], one[3])), one[6])
    np.testing.assert_array_equal(after(step, [6, 3, 1, 2]), mean.finalize(expected))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([Node(0, 6, "6"), Node(1, 1, "23"), Node(0, 1, "1")], "((1 23) 6)"),
        ([Node(2, 1, "4567"), Node(0, 3, "3"), Node(0, 12, "12")], "((3 4567) 12)"),
        ([Node(0, 5, "5")], "5"),
    ],
)
def test_missing_subtrees_do_not_change_the_canonical_order(nodes: list[Node], expected: str) -> None:
    assert recorded()._folded(tuple(nodes)) == expected


def test_the_end_of_a_window_is_linear_in_its_nodes() -> None:
    def calls(n: int) -> int:
        profile, nodes = cProfile.Profile(), tuple(Node(0, 2 * i, "") for i in range(n))
        profile.runcall(recorded()._folded, nodes)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(512) < 2.5 * calls(256)


def recorded() -> RequestStep:
    """A step whose merges write down their operands."""
    programs: Any = SimpleNamespace(merge=lambda a, b: f"({a} {b})")
    return RequestStep(programs, 1 << 20)


def test_a_number_counts_once() -> None:
    step = request_step(given, TAKEN, microbatches=8)
    np.testing.assert_array_equal(after(step, [0, 1, 0, 2, 1, 1]), combined([0, 1, 2]))


def test_a_request_of_several_is_divided() -> None:
    step = request_step(given, TAKEN, microbatches=8)
    state = step.init({"a": np.zeros(3, np.float32)})
    state = sent(step, state, [1])
    state = step.forward_backward(state, np.concatenate(BATCHES[:4]), slot="a", number=range(4))
    assert state["a"].held == {0, 1, 2, 3}
    np.testing.assert_array_equal(-applied(step, state), combined([1, 0, 2, 3]))


def test_a_request_for_a_window_that_has_ended_changes_nothing() -> None:
    step = request_step(loss, optax.adam(0.1), microbatches=8)
    state = step.forward_backward(step.init({"a": W}), BATCHES[0], slot="a", number=0, window=0)
    state, metrics = step.optim_step(state, "a", window=0)
    assert bool(metrics.applied) and state["a"].window == 1
    assert step.forward_backward(state, BATCHES[1], slot="a", number=1, window=0) is state
    again, metrics = step.optim_step(state, "a", window=0)
    assert again is state and not metrics.applied


def test_metrics_are_those_of_the_window() -> None:
    step = request_step(
        Loss(lambda w, x: (jnp.sum(w * x), {"n": jnp.float32(len(x))}), has_aux=True), TAKEN, microbatches=4
    )
    state = step.init({"a": np.float32(2)})
    for n, size in enumerate((1, 3)):
        state = step.forward_backward(state, np.ones(size, np.float32), slot="a", number=n)
    _, metrics = step.optim_step(state, "a")
    assert (float(metrics.value), float(metrics.weight)) == ((2 * 1 + 6 * 3) / 4, 4)
    assert float(metrics.aux["n"]) == (1 * 1 + 3 * 3) / 4


def test_slots_are_apart_and_share_what_is_compiled() -> None:
    chex.clear_trace_counter()
    step = request_step(
        chex.assert_max_traces(loss, 2), optax.adam(0.1), microbatches=8
    )  # the first trace, and one more
    alone = step.init({"a": W})
    state = step.init(dict.fromkeys("abcd", W))
    for n in range(3):
        alone = step.forward_backward(alone, BATCHES[n], slot="a", number=n)
        for slot in "abcd":
            x = np.where(np.eye(4, 3, dtype=bool) & (slot == "b"), np.float32(np.nan), BATCHES[n])
            state = step.forward_backward(state, x, slot=slot, number=n)
    state = step.add(state, "e", W)
    state = step.forward_backward(state, BATCHES[0], slot="e", number=0)
    state, _ = step.optim_step(step.remove(state, "c"), "b")
    assert np.isnan(state["b"].params).all() and set(state) == set("abde")
    expected, received = step.optim_step(alone, "a")[0]["a"], step.optim_step(state, "a")[0]["a"]
    chex.assert_trees_all_equal(expected.params, received.params)
    chex.assert_trees_all_equal(expected.opt_state, received.opt_state)


def test_a_discarded_window_leaves_nothing() -> None:
    step = request_step(given, TAKEN, microbatches=8)
    state = step.discard(sent(step, step.init({"a": np.zeros(3, np.float32)}), [6]), "a")
    assert state["a"].held == frozenset()
    state = sent(step, state, [0])
    np.testing.assert_array_equal(-applied(step, state), combined([0]))


def test_a_discard_that_comes_again_leaves_the_next_window() -> None:
    state = STEP.forward_backward(STEP.init({"a": W}), BATCHES[0], slot="a", number=0, window=0)
    assert STEP.discard(state, "a", window=0)["a"].held == frozenset()
    state, _ = STEP.optim_step(state, "a", window=0)
    state = STEP.forward_backward(state, BATCHES[1], slot="a", number=1, window=1)
    assert STEP.discard(state, "a", window=0) is state


@pytest.mark.full
def test_a_key_is_that_of_the_number() -> None:
    def noisy(w: Any, x: Any, key: Any) -> Any:
        return jnp.sum(w * jnp.mean(x, 0) * jax.random.normal(key, (3,)))

    step = request_step(Loss(noisy, rng_argnum=2), TAKEN, microbatches=8, reduction=reductions.mean("exact"))
    key = jax.random.key(0)
    np.testing.assert_array_equal(after(step, [0, 1, 2], key), after(step, [2, 0, 1], key))


def test_adapters_share_parameters_that_are_not_trained() -> None:
    def adapted(adapter: Any, x: Any, base: Any) -> Any:
        return jnp.mean(jnp.square(x @ (base + adapter)))

    step = request_step(adapted, TAKEN, microbatches=2)
    state = step.init({0: np.zeros(3, np.float32), 1: np.ones(3, np.float32)})
    base = jnp.asarray(W)
    for slot in (0, 1):
        state = step.forward_backward(state, BATCHES[0], slot=slot, number=0, base=base)
        expected = state[slot].params - jax.grad(adapted)(state[slot].params, BATCHES[0], base)
        state, _ = step.optim_step(state, slot)
        np.testing.assert_allclose(state[slot].params, expected, rtol=1e-6)


def on_mesh(kind: AxisType, *values: Any, spec: P | None = None) -> list[Any]:
    sharding = NamedSharding(mesh(4, "data", kind), P("data") if spec is None else spec)
    return [jax.device_put(x, sharding) for x in values]


@pytest.mark.full
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_replicas_exchange_in_optim_step_alone(kind: AxisType) -> None:
    settings: dict[str, Any] = {"over": gc.jax_axis("data"), "reduction": reductions.mean("exact")}
    step, whole = (
        request_step(loss, TAKEN, microbatches=8, **settings),
        train_step(loss, TAKEN, every=gc.UNTIL_FLUSH, **settings),
    )
    (w, v), batches = on_mesh(kind, W, W, spec=P()), on_mesh(kind, *BATCHES)
    state, expected = step.init({"a": w}), whole.init(v)
    for n, x in enumerate(batches):
        state = step.forward_backward(state, x, slot="a", number=n)
        v, expected, _ = whole(v, expected, x)
    node, index = state["a"].nodes[0].state, np.int32(0)
    more = step.programs.more.lower(node, state["a"].params, index, index, [batches[0]], {}).compile()
    assert collectives(more) == []
    state, _ = step.optim_step(state, "a")
    np.testing.assert_array_equal(state["a"].params, whole.flush(v, expected)[0])


@pytest.mark.full
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_a_window_goes_on_elsewhere(order: Any, tmp_path: Path) -> None:
    """A window moves from four replicas to one and back."""
    exact = reductions.mean("exact")
    one = request_step(loss, TAKEN, microbatches=8, reduction=exact, order=order)
    four = request_step(loss, TAKEN, microbatches=8, reduction=exact, order=order, over=gc.jax_axis("data"))
    (w,), batches = on_mesh(AxisType.Auto, W, spec=P()), on_mesh(AxisType.Auto, *BATCHES)
    expected, there = four.init({"a": w}), four.init({"a": w})
    expected = sent(four, expected, range(6), batches=batches)
    there = sent(four, there, range(3), batches=batches)
    four.save(tmp_path / "there.npz", there, "a")
    here = one.load(tmp_path / "there.npz", one.init({"a": W}), "a")
    assert here["a"].held == {0, 1, 2}
    one.save(tmp_path / "here.npz", here, "a")
    there = four.load(tmp_path / "here.npz", four.init({"a": w}), "a")
    there = sent(four, there, range(6), batches=batches)
    np.testing.assert_array_equal(applied(four, there), applied(four, expected))


@pytest.mark.full
@pytest.mark.parametrize("order", histories.PRECISION)
def test_random_histories_lose_nothing_and_count_nothing_twice(order: Any) -> None:
    among = histories.services(order)
    assert [histories.differences(among, f"0:{i}") for i in range(12)] == [[]] * 12


@pytest.mark.full
def test_histories_show_a_late_request_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestStep, "_is_open", lambda *_: True)
    among = [histories.service("sequential")]
    assert any(histories.differences(among, f"0:{i}") for i in range(12))


STEP = request_step(loss, TAKEN, microbatches=4)


TERMS = request_step(Loss(loss, terms={"fit": "rows"}), TAKEN, microbatches=4)


def requested(state: Any, number: Any, slot: str = "a", **options: Any) -> Any:
    return STEP.forward_backward(state, BATCHES[0], slot=slot, number=number, **options)


REFUSED: dict[str, tuple[Any, str]] = {
    "another slot": (lambda s: requested(s, 0, "b"), "a slot of ['a'], received 'b'"),
    "a list as a slot": (lambda s: STEP.discard(s, ["a"]), "a slot of ['a'], received ['a']"),
    "a late discard": (lambda s: STEP.discard(s, "a", window=1), "the window 0, or one that has ended"),
    "no example of terms": (
        lambda s: TERMS.load("x.npz", TERMS.init({"a": W}), "a"),
        "an example of the arguments, for a loss with aux or terms",
    ),
    "a number beyond": (lambda s: requested(s, 4), "from 0 to 3, received 4"),
    "a negative number": (lambda s: requested(s, -1), "from 0 to 3, received -1"),
    "a bool": (lambda s: requested(s, True), "from 0 to 3, received True"),
    "one twice": (lambda s: requested(s, [1, 1]), "each microbatch once"),
    "no number": (lambda s: requested(s, []), "each microbatch once"),
    "rows": (lambda s: requested(s, [0, 1, 2]), "that is divisible by 3 microbatches"),
    "a later window": (lambda s: requested(s, 0, window=1), "the window 0, or one"),
    "an empty slot": (lambda s: STEP.optim_step(s, "a"), "a slot that holds microbatches, received an empty one"),
    "nothing to save": (lambda s: STEP.save("x.npz", s, "a"), "a slot that holds microbatches"),
    "a slot again": (lambda s: STEP.add(s, "a", W), "a slot that does not exist"),
    "a new slot of no name": (lambda s: STEP.add(s, {}, W), "a hashable name"),
    "no slots": (lambda s: STEP.discard(None, "a"), "the slots, from init"),
    "a carry": (lambda s: request_step(Loss(loss, carry_argnum=1), TAKEN, microbatches=2), "a loss without a carry"),
    "a ledger": (
        lambda s: request_step(loss, TAKEN, microbatches=2, reduction=reductions.numbered(reductions.mean(), 2)),
        "a reduction without a ledger",
    ),
    "no microbatches": (lambda s: request_step(loss, TAKEN, microbatches=0), "from 1 to 2**24 microbatches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(gc.GradCombineError) as caught:
        call(STEP.init({"a": W}))
    assert message in str(caught.value) and caught.value.operation == "request_step"


def test_a_request_that_fails_leaves_the_slots_whole() -> None:
    state = STEP.forward_backward(STEP.init({"a": W}), BATCHES[0], slot="a", number=0)
    with pytest.raises((gc.GradCombineError, TypeError, ValueError)):
        STEP.forward_backward(state, BATCHES[1][:, :2], slot="a", number=1)
    state = STEP.forward_backward(state, BATCHES[1], slot="a", number=1)
    assert STEP.optim_step(state, "a")[0]["a"].window == 1
