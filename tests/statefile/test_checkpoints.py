"""Other libraries' checkpoints hold the states as well, as they are."""

from __future__ import annotations

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
from tests.spec.selection import cases
from tests.statefile.states import contents

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


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize(
    ("kind", "name"),
    cases(
        [("standard", "mean"), ("pytree", "per_leaf")],
        ("standard", "pytree"),
        REDUCTIONS,
    ),
)
def test_orbax(tmp_path: Path, kind: str, name: str) -> None:
    state, empty = window(name, 3), window(name, 0)
    target = empty
    if kind == "standard":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", target)
    else:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            restored = checkpointer.restore(tmp_path / "state", item=target)
    assert contents(restored) == contents(state)
    assert contents(state) != contents(empty)


def test_orbax_with_an_optimizer_around_the_window(tmp_path: Path) -> None:
    tx = accumulate(optax.sgd(0.1, momentum=0.9), every=4)
    params = {name: x for name, x in LIKE.items() if x is not None}
    grads = jax.tree.map(lambda x: x + jnp.asarray(0.3, x.dtype), params)
    _, state = tx.update(grads, tx.init(params), params, weight=3)
    target = tx.init(params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", target)
    assert contents(restored) == contents(state)
    statefile.save(tmp_path / "window.npz", reductions.mean(), state.window)
    loaded = state._replace(window=statefile.load(tmp_path / "window.npz", reductions.mean(), params))
    for other in (restored, loaded):
        assert contents(tx.update(grads, other, params)) == contents(tx.update(grads, state, params))


@pytest.mark.parametrize(
    "name", [*(pytest.param(x, marks=pytest.mark.full) if x in ("row mean", "moments") else x for x in REDUCTIONS)]
)
def test_tensorflow(tmp_path: Path, name: str) -> None:
    """A variable for each array of the state."""

    def variables(state: Any) -> tf.train.Checkpoint:
        leaves = (x for x in tree.flatten("test", state)[0] if x is not None)
        return tf.train.Checkpoint(leaves=[tf.Variable(np.asarray(x), trainable=False) for x in leaves])

    state = window(name, 3)
    saved, restored = variables(state), variables(window(name, 0))
    restored.read(saved.write(str(tmp_path / "state"))).assert_consumed()
    values, structure = iter(restored.leaves), tree.flatten("test", state)[1]
    back = [None if x is None else next(values).numpy() for x in tree.flatten("test", state)[0]]
    assert contents(tree.unflatten(structure, back)) == contents(state)
