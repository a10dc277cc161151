"""Saving in TensorFlow after microbatch 3 of 8 on 4 replicas and resuming in JAX on 2 changes no bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import PartitionSpec

import gradcombine as gc
from gradcombine import reductions, statefile
from tests.integrations.jax.replicas import mesh
from tests.integrations.tensorflow.strategies import mirrored

REPLICAS, EVERY, SAVED = 4, 8, 3
LIKE = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float16), "none": None}
LIST = [(rank, k) for rank in range(REPLICAS) for k in range(EVERY)]
EXACT = reductions.per_leaf({"w": reductions.mean("exact"), "b": reductions.sum("exact"), "none": reductions.max()})
FAST = reductions.per_leaf({"w": reductions.mean(), "b": reductions.sum(), "none": reductions.max()})


def gradient(rank: int, k: int) -> Any:
    rng = np.random.default_rng([rank, k])
    return {"w": np.float32(rng.normal(size=(2, 3))), "b": np.float16(rng.normal(size=2)), "none": None}


def tokens(rank: int, k: int) -> np.float32:
    return np.float32((7 * rank + 3 * k) % 5)


def microbatch(rank: int, k: int) -> Any:
    gradients = gradient(rank, k)
    return gradients["w"], gradients["b"], tokens(rank, k)


def unbroken(reduction: gc.Reduction, order: Any) -> Any:
    return gc.combine(reduction, [gradient(*n) for n in LIST], [tokens(*n) for n in LIST], order)


def interrupted(path: Path, reduction: gc.Reduction, order: Any) -> None:
    """The interrupted run: every replica accumulates its microbatches, and all windows are saved."""
    acc = gc.accumulate(reduction, EVERY, order=order)

    def own(k: int) -> Any:
        return mirrored(REPLICAS).experimental_distribute_values_from_function(
            lambda context: tuple(map(tf.constant, microbatch(context.replica_id_in_sync_group, k)))
        )

    def update(w: Any, b: Any, weight: Any, state: Any) -> Any:
        return acc.update({"w": w, "b": b, "none": None}, state, weight)

    step = tf.function(lambda row, state: mirrored(REPLICAS).run(update, args=(*row, state)))
    state = tf.function(lambda: mirrored(REPLICAS).run(acc.init, args=(LIKE,)))()
    for k in range(SAVED):
        state = step(own(k), state)
    statefile.save_replicas(path, reduction, per_replica(state))


def per_replica(state: Any) -> list[Any]:
    """Splits the result of ``strategy.run`` into one state per replica."""
    leaves = tf.nest.flatten(state)
    columns = [[x] * REPLICAS if x is None else mirrored(REPLICAS).experimental_local_results(x) for x in leaves]
    return [tf.nest.pack_sequence_as(state, column) for column in zip(*columns, strict=True)]


def stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.stack(xs), *trees)


def equal(value: Any, expected: Any, replicas: int) -> None:
    for name in ("w", "b"):
        assert np.shape(value[name])[0] == replicas
        for one in np.asarray(value[name]):
            assert one.tobytes() == expected[name].tobytes()
    assert value["none"] is None


@pytest.mark.full
def test_exact_sums_on_two_replicas(tmp_path: Path) -> None:
    """Two replicas share the missing microbatches: 10 more calls each, in any order."""
    reduction = EXACT
    interrupted(tmp_path / "windows.npz", reduction, "sequential")
    states = statefile.resize(reduction, statefile.load_replicas(tmp_path / "windows.npz", reduction, LIKE), 2)
    acc = gc.accumulate(reduction, EVERY * 2)
    rest = [number for number in LIST if number[1] >= SAVED]
    assert len(rest) == 20
    update = jax.jit(jax.vmap(acc.update))
    state = stacked(states)
    for pair in zip(rest[::2], rest[1::2], strict=True):
        assert not acc.ready(states[0]._replace(step=state.step[0]))
        state = update(stacked([gradient(*n) for n in pair]), state, np.stack([tokens(*n) for n in pair]))
    assert state.step.tolist() == [16, 16]
    over = gc.jax_axis("data")
    value = jax.jit(jax.vmap(lambda s: acc.value(gc.merge_replicas(reduction, s, over)), axis_name="data"))
    equal(value(state), unbroken(reduction, "sequential"), 2)


@pytest.mark.full
def test_tree_order_on_two_devices_that_hold_two_parts_each(tmp_path: Path) -> None:
    """Five more calls, each feeding both parts; then the parts of a device are merged, then the devices."""
    reduction = FAST
    interrupted(tmp_path / "windows.safetensors", reduction, "tree")
    state = stacked(statefile.load_replicas(tmp_path / "windows.safetensors", reduction, LIKE))
    acc, wider = (gc.accumulate(reduction, every, order="tree") for every in (EVERY, EVERY * 2))
    spec, over = PartitionSpec("data"), gc.jax_axis("data")

    def step(gradients: Any, held: Any, weights: Any) -> Any:
        return jax.vmap(acc.update)(gradients, held, weights)

    def end(held: Any) -> Any:
        parts = [jax.tree.map(lambda x, i=i: x[i], held) for i in range(2)]
        (state,) = statefile.resize(reduction, parts, 1)
        value = wider.value(gc.merge_replicas(reduction, state, over, order="tree"))
        return jax.tree.map(lambda x: x[None], value)

    shared = [jax.jit(jax.shard_map(f, mesh=mesh(2, "data"), in_specs=spec, out_specs=spec)) for f in (step, end)]
    for k in range(SAVED, EVERY):
        ranks = range(REPLICAS)
        state = shared[0](stacked([gradient(r, k) for r in ranks]), state, np.stack([tokens(r, k) for r in ranks]))
    equal(shared[1](state), unbroken(reduction, "tree"), 2)
