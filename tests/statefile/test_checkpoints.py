"""Checkpoints of other libraries hold states unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions, sparse, statefile, tree
from gradcombine.integrations.optax import accumulate
from tests.statefile.states import contents

ROOT = Path(__file__).parents[2]
LIKE = {"w": jnp.zeros((2, 3)), "half": jnp.zeros(2, jnp.float16), "brain": jnp.zeros((), jnp.bfloat16), "none": None}
ROWS = {"embedding": sparse.row_sparse(jnp.int32([0, 1]), jnp.zeros((2, 3), jnp.bfloat16), rows=5), "none": None}
REDUCTIONS = {
    "mean": reductions.mean(),
    "exact mean": reductions.mean("exact"),
    "compensated mean": reductions.mean("compensated"),
    "moments": reductions.moments(),
    "per_leaf": reductions.per_leaf(
        {"w": reductions.mean("exact"), "half": reductions.max(), "brain": reductions.first(), "none": reductions.sum()}
    ),
    "row mean": reductions.row_mean(capacity=4),
}


def window(name: str, steps: int) -> Any:
    acc = gc.accumulate(REDUCTIONS[name], every=4, order="tree")
    like = ROWS if name == "row mean" else LIKE
    state = acc.init(like)
    for k in range(steps):
        state = acc.update(jax.tree.map(lambda x, k=k: x + jnp.asarray(k + 0.3, x.dtype), like), state, 1 + k)
    return state


def orbax(path: Path, state: Any, target: Any) -> Any:
    """The state from a checkpoint, in the form of the target."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, target)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("kind", ["standard", "pytree"])
def test_orbax(tmp_path: Path, kind: str, name: str) -> None:
    state, empty = window(name, 3), window(name, 0)
    if kind == "standard":
        restored = orbax(tmp_path / "state", state, empty)
    else:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            restored = checkpointer.restore(tmp_path / "state", item=empty)
    assert contents(restored) == contents(state)
    assert contents(state) != contents(empty)


@pytest.mark.full
def test_orbax_with_an_optimizer_around_the_window(tmp_path: Path) -> None:
    tx = accumulate(optax.sgd(0.1, momentum=0.9), every=4)
    params = {name: x for name, x in LIKE.items() if x is not None}
    grads = jax.tree.map(lambda x: x + jnp.asarray(0.3, x.dtype), params)
    _, state = tx.update(grads, tx.init(params), params, weight=3)
    restored = orbax(tmp_path / "state", state, tx.init(params))
    assert contents(restored) == contents(state)
    statefile.save(tmp_path / "window.npz", reductions.mean(), state.window)
    loaded = state._replace(window=statefile.load(tmp_path / "window.npz", reductions.mean(), params))
    for other in (restored, loaded):
        assert contents(tx.update(grads, other, params)) == contents(tx.update(grads, state, params))


@pytest.mark.sampled
@pytest.mark.parametrize("name", REDUCTIONS)
def test_tensorflow(tmp_path: Path, name: str) -> None:
    """Stores each array of the state in a variable."""

    def variables(state: Any) -> tf.train.Checkpoint:
        leaves = (x for x in tree.flatten(state)[0] if x is not None)
        return tf.train.Checkpoint(leaves=[tf.Variable(np.asarray(x), trainable=False) for x in leaves])

    state = window(name, 3)
    saved, restored = variables(state), variables(window(name, 0))
    restored.read(saved.write(str(tmp_path / "state"))).assert_consumed()
    values, structure = iter(restored.leaves), tree.flatten(state)[1]
    back = [None if x is None else next(values).numpy() for x in tree.flatten(state)[0]]
    assert contents(tree.unflatten(structure, back)) == contents(state)


SUM, MEAN = reductions.sum(), reductions.mean()
LEDGERS = {count: reductions.numbered(SUM, count) for count in (8, 16)}
PARAMS = {"w": jnp.zeros(())}


def through(folder: Path, way: str, before: Any, after: Any, begun: int) -> Any:
    """Restores a window of ``begun`` microbatches (k has gradient k, weight 1 + k) into another transformation."""
    (every, reduction), (new_every, new) = before, after
    tx, other = (
        accumulate(optax.sgd(-1.0), every, reduction=reduction),
        accumulate(optax.sgd(-1.0), new_every, reduction=new),
    )
    state, target = tx.init(PARAMS), other.init(PARAMS)
    for k in range(begun):
        _, state = tx.update({"w": jnp.float32(k)}, state, PARAMS, weight=1 + k)
    if way == "orbax":
        return orbax(folder / "state", state, target), other.update
    statefile.save(folder / "window.npz", reduction, state.window)
    return target._replace(window=statefile.load(folder / "window.npz", new, PARAMS)), other.update


WAYS = pytest.mark.parametrize("way", ["file", "orbax"])


@WAYS
@pytest.mark.parametrize(
    ("before", "begun", "after", "applied"),
    [(4, 3, 2, [20, 50, 98]), (4, 3, 3, [20, 92]), (2, 1, 4, [20, 148]), (4, 4, 2, [50, 98])],
)
@pytest.mark.parametrize("ledger", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_window_of_another_length_loses_nothing(
    tmp_path: Path, way: str, before: int, begun: int, after: int, applied: list[float], ledger: bool
) -> None:
    """A window of at least the new length ends with the next microbatch; a shorter one continues."""
    reduction = LEDGERS[8] if ledger else SUM
    state, update = through(tmp_path, way, (before, reduction), (after, reduction), begun)
    received, options = [], {}
    for k in range(begun, 8):
        if ledger:
            options["number"] = k
        updates, state = update({"w": jnp.float32(k)}, state, PARAMS, weight=1 + k, **options)
        if state.applied:
            received.append(float(updates["w"]))
    assert received == applied


@WAYS
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (SUM, LEDGERS[8], "states of 'sum'|tree structures do not match"),
        (MEAN, reductions.mean("exact"), r"states of mean\(precision=exact\), received|tree structures do not match"),
    ],
)
def test_a_window_of_another_kind_is_refused(tmp_path: Path, way: str, before: Any, after: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        through(tmp_path, way, (4, before), (4, after), 3)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8)])
def test_orbax_refuses_a_ledger_of_another_length(tmp_path: Path, before: int, after: int) -> None:
    """Runs in a separate process, as reads that Orbax abandons fail later, during another test."""
    names = f"Path({str(tmp_path)!r}), 'orbax', (4, LEDGERS[{before}]), (4, LEDGERS[{after}]), 3"
    code = f"from pathlib import Path; from tests.statefile.test_checkpoints import *; through({names})"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 1
    assert f"shape: ({after},) is not compatible with the stored shape: ({before},)" in ran.stderr


def test_orbax_keeps_the_fields_of_a_state_and_not_the_name_of_its_reduction(tmp_path: Path) -> None:
    """A mean has the fields of a sum, so Orbax restores one as the other; `statefile` raises."""
    state, update = through(tmp_path, "orbax", (4, MEAN), (4, SUM), 3)
    updates, _ = update({"w": jnp.float32(3)}, state, PARAMS, weight=4)
    assert float(updates["w"]) == sum(k * (1 + k) for k in range(4))
    with pytest.raises(gc.GradCombineError, match="expected states of 'sum', received states of 'mean'"):
        through(tmp_path, "file", (4, MEAN), (4, SUM), 3)
