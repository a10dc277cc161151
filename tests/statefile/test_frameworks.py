"""States saved by one framework and loaded by another, eager and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions, statefile, tree
from gradcombine.places.time import whole_window
from tests.spec.modes import as_arrays, converter
from tests.spec.selection import cases
from tests.statefile.states import Layer, contents

F32 = np.float32
LIKE = {
    "layer": Layer(np.zeros((2, 3), F32), None),
    "half": np.zeros(2, np.float16),
    "brain": np.zeros(3, jnp.bfloat16),
    "complex": np.zeros(2, np.complex64),
}
REDUCTIONS = {
    "mean": reductions.mean(),
    "exact": reductions.per_leaf(
        {"layer": reductions.mean("exact"), "half": reductions.sum("exact"), "brain": reductions.sum("exact")}
        | {"complex": reductions.sum("compensated")}
    ),
    "several": reductions.per_leaf(
        {"layer": reductions.moments(), "half": reductions.max(), "brain": reductions.last()}
        | {"complex": reductions.first()}
    ),
}
EVERY = 4


def contribution(k: int) -> Any:
    rng = np.random.default_rng(k)
    leaves, structure = tree.flatten(LIKE)
    return tree.unflatten(structure, [None if x is None else rng.normal(size=x.shape).astype(x.dtype) for x in leaves])


def run(framework: str, name: str, steps: range, state: Any, step: Any = None) -> Any:
    step = gc.accumulate(REDUCTIONS[name], EVERY, order="tree").update if step is None else step
    for k in steps:
        state = step(as_arrays(framework, contribution(k)), state, np.float32(1 + k % 2))
    return state


def empty(framework: str, name: str) -> Any:
    return gc.accumulate(REDUCTIONS[name], EVERY, order="tree").init(as_arrays(framework, LIKE))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("framework", "name"),
    cases([("numpy", "mean"), ("jax", "mean"), ("tensorflow", "several")], ("numpy", "jax", "tensorflow"), REDUCTIONS),
)
def test_what_leaves_one_framework_enters_every_other(tmp_path: Path, framework: str, name: str) -> None:
    state = run(framework, name, range(3), empty(framework, name))
    expected = contents(run("numpy", name, range(3, 6), run("numpy", name, range(3), empty("numpy", name))))
    statefile.save(tmp_path / "a.npz", REDUCTIONS[name], state)
    for other, kind in (("numpy", np.ndarray), ("jax", jax.Array), ("tensorflow", tf.Tensor)):
        loaded = statefile.load(tmp_path / "a.npz", REDUCTIONS[name], as_arrays(other, LIKE))
        assert contents(loaded) == contents(state)
        assert all(leaf is None or isinstance(leaf, kind) for leaf in tree.flatten(loaded)[0])
        assert contents(run(other, name, range(3, 6), loaded)) == expected


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_numpy_states_enter_compiled_code(tmp_path: Path, framework: str) -> None:
    reduction, like = reductions.mean(), {"w": np.zeros((2, 3), F32), "b": np.zeros(3, np.float16), "none": None}
    acc = gc.accumulate(reduction, 3, order="tree")
    rows = [{"w": np.full((2, 3), 0.1 * k, F32), "b": np.full(3, k, np.float16), "none": None} for k in range(5)]
    state = acc.init(like)
    for row in rows[:2]:
        state = acc.update(row, state)
    statefile.save(tmp_path / "a.npz", reduction, state)
    loaded = statefile.load(tmp_path / "a.npz", reduction, like)
    if framework == "jax":
        step = jax.jit(acc.update)
        rest = jax.tree.map(lambda *xs: np.stack(xs), *rows[2:])
        final = jax.jit(lambda s, xs: jax.lax.scan(lambda c, x: (acc.update(x, c), None), s, xs)[0])(loaded, rest)
    else:
        step = final = tf.function(acc.update)
        final = loaded
        for row in rows[2:]:
            final = step(row, final)
    for row in rows[2:]:
        state, loaded = acc.update(row, state), step(row, loaded)
    assert contents(loaded) == contents(state) == contents(final)


def test_specs_say_of_which_framework(tmp_path: Path) -> None:
    total = reductions.sum()
    statefile.save(tmp_path / "a.npz", total, total.init({"w": np.zeros(2, F32)}))
    specs = ((jax.ShapeDtypeStruct((2,), F32), jax.Array), (tf.TensorSpec((2,), tf.float32), tf.Tensor))
    for spec, kind in specs:
        assert isinstance(statefile.load(tmp_path / "a.npz", total, {"w": spec}).value["w"], kind)


def test_float0_and_none_are_the_same_absence(tmp_path: Path) -> None:
    """The gradient of an integer parameter is float0 in JAX and None in other frameworks."""
    mean, absent = reductions.mean(), np.zeros((2, 2), jax.dtypes.float0)
    likes = {"jax": {"w": jnp.zeros(2), "ids": absent}, "numpy": {"w": np.zeros(2, F32), "ids": None}}
    for writer, reader in (("jax", "numpy"), ("numpy", "jax"), ("jax", "jax")):
        state = mean.update(mean.init(likes[writer]), likes[writer] | {"w": converter(writer)(F32([1, 2]))})
        statefile.save(tmp_path / "a.npz", mean, state)
        value = mean.finalize(statefile.load(tmp_path / "a.npz", mean, likes[reader]))
        np.testing.assert_array_equal(value["w"], F32([1, 2]))
        if reader == "jax":
            assert value["ids"].dtype == jax.dtypes.float0 and value["ids"].shape == (2, 2)
        else:
            assert value["ids"] is None


def test_64_bits_need_a_jax_that_has_them(tmp_path: Path) -> None:
    total = reductions.sum()
    statefile.save(tmp_path / "a.npz", total, total.init(np.zeros(2)))
    with pytest.raises(gc.GradCombineError, match="float64"):
        statefile.load(tmp_path / "a.npz", total, {"w": jnp.zeros(2)}["w"])


def test_values_that_are_traced_are_refused(tmp_path: Path) -> None:
    mean, path = reductions.mean(), tmp_path / "a.npz"
    message = "expected an array whose value is available in this process, received a traced one"
    with pytest.raises(gc.GradCombineError, match=message):
        jax.jit(lambda x: statefile.save(path, mean, mean.init(x)._replace(weight=x[0])))(jnp.zeros(2))
    with pytest.raises(gc.GradCombineError, match=message):
        tf.function(lambda x: statefile.save(path, mean, mean.init(x)))(tf.zeros(2))
    assert not path.exists()


@pytest.mark.full
def test_windows_are_merged_inside_of_compiled_code() -> None:
    """Traces `resize` of held states, whose position is an array there."""
    mean = reductions.mean()
    acc = gc.accumulate(mean, 2, order="tree")
    states = [acc.update(F32([k, 1]), acc.init(np.zeros(2, F32)), weight=1 + k) for k in range(4)]
    (expected,) = statefile.resize(mean, states, 1)
    for compiled in (jax.jit, tf.function):
        (merged,) = compiled(lambda *parts: statefile.resize(mean, parts, 1))(*states)
        assert contents(merged) == contents(expected)
        assert contents(mean.finalize(whole_window(mean, merged))) == contents(
            mean.finalize(whole_window(mean, expected))
        )
