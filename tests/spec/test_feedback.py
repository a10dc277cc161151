# pyright: standard
"""Error feedback: the sent value plus the new residual equals the input plus the old residual."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import statefile, tree
from gradcombine.reductions.feedback import residuals
from tests.spec import modes
from tests.spec.selection import unrolled
from tests.spec.test_wires import WIRES, rounded

NAMES = ("bfloat16", "8 bits")
SHAPE = (40, 50)
FED = {name: gc.reductions.fed_back(gc.reductions.sum(wire=WIRES[name])) for name in NAMES}
MEANS = {name: gc.reductions.fed_back(gc.reductions.mean(wire=WIRES[name])) for name in NAMES}
WEIGHTS = 64, 1
"""Weights of the microbatches of the two windows of a mean: powers of 2, which round nothing."""


class Windows:
    """Exchanges two consecutive windows of two microbatches each; returns both results and residuals."""

    def __call__(self, env: modes.Env, data: Any) -> Any:
        sums = {name: self.one(env, FED[name], data["w"], (1, 1)) for name in NAMES}
        return sums, {name: self.one(env, MEANS[name], data["w"], WEIGHTS) for name in NAMES}

    def one(self, env: modes.Env, reduction: gc.Reduction, xs: Any, weights: tuple[int, int]) -> Any:
        acc = gc.accumulate(reduction, every=2)
        state, seen = acc.init(xs[0]), []
        for i in range(4):
            state = acc.update(xs[i], state, weights[i // 2])
            if i % 2:
                state = gc.merge_replicas(reduction, state, env.collective)
                seen.append({"value": acc.value(state), "residual": state.levels[0].residual})
        return seen


WINDOWS = Windows()


def data_of(n: int) -> list[Any]:
    rng = np.random.default_rng(5)
    return [
        {"w": (rng.standard_normal((4, *SHAPE)) * 10.0 ** rng.integers(-3, 3, SHAPE)).astype(np.float32)}
        for _ in range(n)
    ]


def exchanged(wire: Any, inputs: list[np.ndarray], in_parts: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """The received sum and each replica's residual, computed with float64 roundings."""
    n = len(inputs)
    rows = [x.reshape(n if in_parts else 1, -1) for x in inputs]
    sent = [rounded(wire, x) for x in rows]
    left = [x - y for x, y in zip(rows, sent, strict=True)]
    for x, y, error in zip(rows, sent, left, strict=True):  # without rounding
        assert all(
            Fraction(float(a)) == Fraction(float(b)) + Fraction(float(c))
            for a, b, c in zip(x.flat, y.flat, error.flat, strict=True)
        )
    total = sent[0] + sent[1] if n == 2 else (sent[0] + sent[1]) + (sent[2] + sent[3])
    if in_parts:
        arrived = rounded(wire, total)
        for rank, error in enumerate(left):
            error[rank] += total[rank] - arrived[rank]
        total = arrived
    return total.reshape(SHAPE), [x.reshape(SHAPE) for x in left]


@pytest.mark.full
@unrolled
@pytest.mark.parametrize("n", [2, 4])
def test_nothing_is_lost(replicated: modes.Mode, n: int) -> None:
    """Holds bit for bit, on each replica, in both windows."""
    if replicated.framework == "tensorflow" and n == 4:
        n = 2  # in which 16-bit leaves are not narrowed
    data = data_of(n)
    results = replicated.run(WINDOWS, data)
    for name in NAMES:
        left = of_mean = [np.zeros(SHAPE, np.float32)] * n
        for window, weight in enumerate(WEIGHTS):
            pairs = [(x["w"][2 * window], x["w"][2 * window + 1]) for x in data]
            inputs = [x + y + r for r, (x, y) in zip(left, pairs, strict=True)]
            total, left = exchanged(WIRES[name], inputs, in_parts=n > 2)
            weights = np.float32(2 * n * weight)
            inputs = [(x + y) * np.float32(weight) + r * weights for r, (x, y) in zip(of_mean, pairs, strict=True)]
            total_of_mean, errors = exchanged(WIRES[name], inputs, in_parts=n > 2)
            of_mean = [x / weights for x in errors]
            for (of_sum, result), *expected in zip(results, left, of_mean, strict=True):
                np.testing.assert_array_equal(of_sum[name][window]["value"], total)
                np.testing.assert_array_equal(of_sum[name][window]["residual"], expected[0])
                np.testing.assert_array_equal(result[name][window]["value"], total_of_mean / weights)
                np.testing.assert_array_equal(result[name][window]["residual"], expected[1])


@pytest.mark.needs("jax")
@pytest.mark.parametrize("reduction", [FED["bfloat16"], MEANS["bfloat16"]], ids=["sum", "mean"])
def test_a_window_of_weight_0_leaves_the_residual(reduction: gc.Reduction) -> None:
    import jax

    acc, over = gc.accumulate(reduction, every=1), gc.jax_axis("data")

    def two_windows(x: Any) -> Any:
        first = gc.merge_replicas(reduction, acc.update(x, acc.init(x)), over)
        second = gc.merge_replicas(reduction, acc.update(x, first, 0), over)
        return [state.levels[0].residual for state in (first, second)], acc.value(second)

    grads = np.random.default_rng(1).standard_normal((2, 3, 5)).astype(np.float32)
    (first, second), value = jax.jit(jax.vmap(two_windows, axis_name="data"))(grads)
    assert np.any(first) and not np.any(value)
    np.testing.assert_array_equal(second, first)


@pytest.mark.needs("optax")
@pytest.mark.parametrize("reduction", [FED["bfloat16"], MEANS["bfloat16"]], ids=["sum", "mean"])
def test_a_skipped_window_leaves_the_residual(reduction: gc.Reduction) -> None:
    """Two replicas contribute 257 and 0, of which bfloat16 sends 256; 257 + 1 is sent exactly."""
    import jax
    import jax.numpy as jnp
    import optax

    from gradcombine.integrations.optax import accumulate, skip_not_finite

    tx = accumulate(optax.sgd(1.0), every=1, over=gc.jax_axis("data"), reduction=reduction, skip=skip_not_finite())

    def three_windows(x: Any) -> Any:
        params, state = jnp.zeros(SHAPE), tx.init(jnp.zeros(SHAPE))
        for factor in (1, np.nan, 1):
            updates, state = tx.update(x * factor, state, params, weight=1)
            params = optax.apply_updates(params, updates)
        return params

    grads = np.zeros((2, *SHAPE), np.float32)
    grads[0] = 257
    replicas = 1 if reduction is FED["bfloat16"] else 2
    params = jax.jit(jax.vmap(three_windows, axis_name="data"))(grads)
    np.testing.assert_array_equal(params, np.full((2, *SHAPE), -(256 + 258) / replicas, np.float32))


def one_replica(rank: int) -> Any:
    """A state after one exchange, with a different residual on each rank."""
    acc = gc.accumulate(FED["8 bits"], every=1)
    x = np.full(SHAPE, rank + 1, np.float32)
    state = acc.update(x, acc.init(x))
    level = state.levels[0]
    return state._replace(levels=(level._replace(residual=x / np.float32(16)),))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6])
def test_a_residual_moves_to_other_replicas(replicas: int) -> None:
    """Residuals saved in full windows of four replicas are all present in the next windows of the new replicas."""
    acc = gc.accumulate(FED["8 bits"], every=-(-4 // replicas))
    states = statefile.resize(FED["8 bits"], [one_replica(rank) for rank in range(4)], replicas, full=True)
    begun = [acc.update(np.zeros(SHAPE, np.float32), state) for state in states]
    total = sum(state.levels[0].residual + state.levels[0].state.value for state in begun)
    np.testing.assert_array_equal(total, np.full(SHAPE, (1 + 2 + 3 + 4) / 16, np.float32))


@pytest.mark.parametrize("replicas", [1, 2, 3, 6])
def test_a_residual_of_a_mean_moves_to_other_replicas(replicas: int) -> None:
    """The next window, of weight 2 on each replica, adds all residuals to its mean."""
    reduction = MEANS["8 bits"]
    acc, zeros = gc.accumulate(reduction, every=1), np.zeros(SHAPE, np.float32)
    empty = acc.init(zeros)
    levels = [empty.levels[0]._replace(residual=zeros + np.float32(rank)) for rank in (1, 2, 3, 4)]
    old = [empty._replace(levels=(level,)) for level in levels]
    new = statefile.resize(reduction, old, replicas)
    np.testing.assert_array_equal(sum(x.levels[0].residual for x in new), zeros + np.float32(10))
    if replicas == 1:
        merged = gc.merge_replicas(reduction, acc.update(zeros, new[0], 2), gc.LOCAL)
        np.testing.assert_array_equal(acc.value(merged), zeros + np.float32(10))
        np.testing.assert_array_equal(merged.levels[0].residual, zeros)


@pytest.mark.parametrize("fed", [FED["8 bits"], MEANS["8 bits"]], ids=["sum", "mean"])
@pytest.mark.parametrize(
    "around",
    [
        lambda r: gc.reductions.numbered(r, 4),
        gc.reductions.measured,
        lambda r: gc.reductions.per_leaf({"a": r}),
        lambda r: gc.reductions.per_leaf({"a": gc.reductions.measured(r)}),
    ],
    ids=["numbered", "measured", "per_leaf", "both"],
)
def test_a_new_replica_has_no_residual_of_an_old_one(
    around: Callable[[gc.Reduction], gc.Reduction], fed: gc.Reduction
) -> None:
    reduction = around(fed)
    x = {"a": np.full(SHAPE, 3, np.float32)}
    value = gc.reductions.Numbered(x, 0) if reduction.microbatches is not None else x
    state = reduction.update(reduction.init(x), value)
    leaves, structure = tree.flatten(state)
    kept = residuals(state)
    state = tree.unflatten(structure, [x["a"] if i in kept else leaf for i, leaf in enumerate(leaves)])
    old, new = statefile.resize(reduction, [state], 2)
    assert kept
    for part, residual in (old, 3), (new, 0):
        for i in kept:
            np.testing.assert_array_equal(tree.flatten(part)[0][i], np.full(SHAPE, residual, np.float32))


@pytest.mark.sampled
@pytest.mark.needs("jax")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_window_after_an_exact_exchange_begins_with_minus_0(n: int) -> None:
    """Integers of three bits are sent exactly, in rows or parts; contributions of -0 then sum to -0."""
    import jax

    acc = gc.accumulate(FED["bfloat16"], every=1)
    over = gc.jax_axis("data")

    def two_windows(x: Any) -> Any:
        state = gc.merge_replicas(FED["bfloat16"], acc.update(x, acc.init(x)), over)
        return acc.update(-0.0 * x, state).levels[0].state.value

    grads = np.arange(1, 1 + n * 6).reshape(n, 2, 3).astype(np.float32) % 8 + 1
    assert np.signbit(jax.jit(jax.vmap(two_windows, axis_name="data"))(grads)).all()


@pytest.mark.parametrize("reduction", [FED["8 bits"], MEANS["8 bits"]], ids=["sum", "mean"])
def test_an_unassigned_slot_of_a_replica_has_no_residual(reduction: gc.Reduction) -> None:
    """A replica of two logical replicas holds one; the merged window adds its residual once."""
    state = reduction.update(reduction.init(np.zeros(SHAPE, np.float32)), np.ones(SHAPE, np.float32))
    state = state._replace(residual=np.full(SHAPE, 3, np.float32))
    other = reduction.init(np.zeros(SHAPE, np.float32))
    merged = [gc.ledger.merge_held(reduction, x, [[0, 1]], over=gc.LOCAL) for x in ([state], [state, other])]
    for x in merged:
        np.testing.assert_array_equal(reduction.finalize(x), np.full(SHAPE, 4, np.float32))


@pytest.mark.needs("optax")
def test_a_step_by_requests_refuses_residuals() -> None:
    import jax.numpy as jnp
    import optax

    from gradcombine.integrations.jax import request_step

    step = request_step(lambda w, x: (w * x[0]).mean(), optax.sgd(1.0), microbatches=2, reduction=MEANS["8 bits"])
    state = step.init({"a": jnp.zeros(SHAPE)})
    with pytest.raises(gc.GradCombineError, match="request_step: expected a reduction without error feedback"):
        step.forward_backward(state, jnp.ones((1, *SHAPE)), slot="a", number=0)


def test_a_residual_is_saved(tmp_path: Path) -> None:
    state, path, like = one_replica(2), tmp_path / "window.npz", np.zeros(SHAPE, np.float32)
    statefile.save(path, FED["8 bits"], state)
    loaded = statefile.load(path, FED["8 bits"], like)
    np.testing.assert_array_equal(loaded.levels[0].residual, state.levels[0].residual)
    with pytest.raises(gc.GradCombineError):
        statefile.load(path, gc.reductions.fed_back(gc.reductions.sum(wire=WIRES["4 bits"])), like)


KEPT = {
    "a missing leaf": ("bfloat16", {"w": np.full(SHAPE, 3, np.float32), "none": None}),
    "a wide leaf": ("8 bits", {"w": np.full(SHAPE, 3, np.float32), "bias": np.ones(3, np.float32)}),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_state_without_a_residual_for_each_leaf_is_saved_and_resized(name: str, suffix: str, tmp_path: Path) -> None:
    wire, x = KEPT[name]
    reduction, path = FED[wire], tmp_path / f"window.{suffix}"
    acc = gc.accumulate(reduction, every=2)
    state = acc.update(x, acc.init(x))
    assert any(x is None for x in state.levels[0].residual.values())
    gc.check_state(reduction, state)
    statefile.save(path, reduction, state)
    first, second = statefile.resize(reduction, [statefile.load(path, reduction, x)], 2)
    np.testing.assert_array_equal(acc.value(first)["w"], x["w"])
    np.testing.assert_array_equal(acc.value(second)["w"], np.zeros(SHAPE, np.float32))


BAD: dict[str, Callable[[], Any]] = {
    "a window in the canonical order": lambda: gc.accumulate(FED["8 bits"], every=2, order="tree").init(
        np.ones(SHAPE, np.float32)
    ),
    "no wire": lambda: gc.reductions.fed_back(gc.reductions.sum()),
    "a product": lambda: gc.reductions.fed_back(gc.reductions.product(wire=WIRES["8 bits"])),
    "stochastic rounding": lambda: gc.reductions.fed_back(
        gc.reductions.sum(wire=gc.wires.cast("bfloat16", "stochastic"))
    ),
    "no window": lambda: gc.all_reduce(FED["8 bits"], np.ones(SHAPE, np.float32), gc.LOCAL),
    "the canonical order": lambda: gc.merge_replicas(FED["8 bits"], one_replica(0), gc.LOCAL, order="tree"),
    "a residual of another tree": lambda: gc.check_state(
        FED["8 bits"], one_replica(0).levels[0]._replace(residual=None)
    ),
    "a residual of another tree, of a mean": lambda: gc.check_state(
        MEANS["8 bits"], MEANS["8 bits"].init(np.ones(SHAPE, np.float32))._replace(residual=np.ones(3, np.float32))
    ),
    "a residual of another wire": lambda: FED["bfloat16"].merge(
        FED["bfloat16"].init({"b": np.zeros(3, np.float32)}), FED["8 bits"].init({"b": np.zeros(3, np.float32)})
    ),
    "another state": lambda: FED["8 bits"].finalize(gc.reductions.sum().init(np.float32(0))),
    "other states": lambda: gc.merge_replicas(FED["8 bits"], gc.reductions.sum().init(np.float32(0)), gc.LOCAL),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    with pytest.raises(gc.GradCombineError):
        BAD[name]()


@pytest.mark.full
def test_what_is_not_finite_leaves_no_residual() -> None:
    import jax
    import jax.numpy as jnp

    reduction = FED["bfloat16"]
    x = jnp.ones((2, *SHAPE)).at[0, 0, 0].set(jnp.nan).at[1, 0, 1].set(jnp.inf).at[:, 0, 2].set(3.4e38)

    def replica(one: Any) -> Any:
        state = reduction.update(reduction.init(one), one)
        merged = gc.merge_replicas(reduction, state, gc.jax_axis("data"))
        return reduction.finalize(merged), merged.residual

    total, residual = jax.vmap(replica, axis_name="data")(x)
    assert np.isnan(total[:, 0, 0]).all() and np.isinf(total[:, 0, 1]).all()
    np.testing.assert_array_equal(residual, np.zeros((2, *SHAPE), np.float32))


@pytest.mark.cpus
@pytest.mark.full
def test_a_training_step_keeps_the_residual() -> None:
    """`optax.accumulate` and `train_step` hold the wire's rounding error after each update."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import PartitionSpec as P

    from gradcombine.integrations.optax import accumulate
    from tests.integrations.jax.replicas import mesh

    n, over = 4, gc.jax_axis("data")
    tx = accumulate(optax.sgd(1.0), every=2, reduction=FED["8 bits"], over=over)
    data = np.stack([x["w"] for x in data_of(n)])

    def run(xs: Any) -> Any:
        params = jnp.zeros(SHAPE)
        state, seen = tx.init(params), []
        for i in range(4):
            updates, state = tx.update(jax.lax.pcast(xs[0, i], (), to="varying"), state, params)
            seen.append(updates[None])
        return seen[1], seen[3], tree_of(state)

    def tree_of(state: Any) -> Any:
        (residual,) = [x.residual for x in jax.tree.leaves(state, is_leaf=is_fed) if is_fed(x)]
        return residual[None]

    def is_fed(x: Any) -> bool:
        return type(x).__name__ == "FedBackState"

    first, second, residual = jax.jit(
        jax.shard_map(run, mesh=mesh(n, "data"), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    )(data)
    left = [np.zeros(SHAPE, np.float32)] * n
    for window, updates in enumerate((first, second)):
        inputs = [x[2 * window] + x[2 * window + 1] + r for r, x in zip(left, data, strict=True)]
        total, left = exchanged(WIRES["8 bits"], inputs, in_parts=True)
        np.testing.assert_array_equal(updates, np.stack([-total] * n))
    np.testing.assert_array_equal(residual, np.stack(left))
