"""Intact files that do not match the request, and states that cannot be saved, raise."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions, statefile
from tests.statefile.states import Layer, contents

F32 = np.zeros(2, np.float32)
LIKE = {"a": F32, "b": [F32, None]}
SAVED = gc.accumulate(reductions.mean(), every=4, order="tree").init(LIKE)

OTHERS = {
    "reduction": (reductions.sum(), LIKE, "expected states of 'sum', received states of 'mean'"),
    "precision": (reductions.mean("exact"), LIKE, "states of mean(precision=exact), received states of mean()"),
    "accumulator": (reductions.mean(dtype="float64"), LIKE, "states of mean(dtype=float64), received states of mean()"),
    "shape": (
        reductions.mean(),
        {**LIKE, "a": np.zeros((2, 1), np.float32)},
        "leaf .levels.stacked.value['a']: expected float32 of shape (3, 2, 1), received float32 of shape (3, 2)",
    ),
    "dtype": (
        reductions.mean(),
        {**LIKE, "a": np.zeros(2, ml_dtypes.bfloat16)},
        "leaf .levels.stacked.dtypes['a']: expected bfloat16, received float32",
    ),
    "a leaf more": (
        reductions.mean(),
        {**LIKE, "c": F32},
        "leaf .levels.stacked.dtypes['c']: expected float32, received an array or an unnamed container",
    ),
    "a leaf less": (
        reductions.mean(),
        {"a": F32, "b": [F32]},
        "leaf .levels.stacked.value['b'][1]: expected an array or an unnamed container, received no gradient",
    ),
    "a gradient": (
        reductions.mean(),
        {"a": F32, "b": [F32, F32]},
        "leaf .levels.stacked.dtypes['b'][1]: expected float32, received no gradient",
    ),
    "no gradient": (
        reductions.mean(),
        {"a": None, "b": [F32, None]},
        "leaf .levels.stacked.value['a']: expected no gradient, received an array or an unnamed container",
    ),
    "a named tuple": (
        reductions.mean(),
        {"a": F32, "b": Layer(F32, None)},
        "expected Layer, received an array or an unnamed container",
    ),
}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_kind(tmp_path: Path, name: str, suffix: str) -> None:
    statefile.save(tmp_path / f"a{suffix}", reductions.mean(), SAVED)
    reduction, like, message = OTHERS[name]
    with pytest.raises(gc.GradCombineError) as caught:
        statefile.load(tmp_path / f"a{suffix}", reduction, like)
    assert message in str(caught.value)


def test_containers_with_the_same_paths_are_the_same(tmp_path: Path) -> None:
    """A tuple matches a list, and an OrderedDict another order, as frameworks have different containers."""
    statefile.save(tmp_path / "a.npz", reductions.mean(), SAVED)
    like = OrderedDict(b=(F32, None), a=F32)
    loaded = statefile.load(tmp_path / "a.npz", reductions.mean(), like)
    assert contents(loaded) == contents(gc.accumulate(reductions.mean(), every=4, order="tree").init(like))


def test_booleans_are_not_taken_for_absent(tmp_path: Path) -> None:
    first, boolean = reductions.first(), np.zeros(3, np.bool_)
    for saved, wanted in ((boolean, None), (None, boolean)):
        statefile.save(tmp_path / "a.npz", first, first.init({"a": saved}))
        with pytest.raises(gc.GradCombineError, match="no gradient"):
            statefile.load(tmp_path / "a.npz", first, {"a": wanted})


def test_members_of_per_leaf_are_compared(tmp_path: Path) -> None:
    like = {"a": F32, "b": F32}
    saved = reductions.per_leaf({"a": reductions.min(), "b": reductions.max()})
    other = reductions.per_leaf({"a": reductions.max(), "b": reductions.min()})
    statefile.save(tmp_path / "a.npz", saved, saved.init(like))
    with pytest.raises(gc.GradCombineError, match=r"max\(\), .*min\(\)\), received states of .*min\(\), .*max\(\)"):
        statefile.load(tmp_path / "a.npz", other, like)


def test_a_file_of_several_replicas_is_not_one_state(tmp_path: Path) -> None:
    statefile.save_replicas(tmp_path / "a.npz", reductions.mean(), [SAVED, SAVED])
    with pytest.raises(gc.GradCombineError, match=r"expected 1 replica \(load_replicas takes several\), received 2"):
        statefile.load(tmp_path / "a.npz", reductions.mean(), LIKE)


STACKED = reductions.mean().init(LIKE)._replace(weight=np.zeros(3, np.float32), count=np.zeros(3, np.int32))
NOT_SAVED: dict[str, tuple[Any, str]] = {
    "of another reduction": (reductions.sum().init(LIKE), "expected a MeanState, received SumState"),
    "a tree": (LIKE, "expected a MeanState, received dict"),
    "a stacked position": (SAVED._replace(step=np.zeros(3, np.int32)), "leaf .step: expected int32 of shape ()"),
    "a wide position": (SAVED._replace(index=np.int64(0)), "received int64 of shape ()"),
    "stacked parts": (STACKED, "leaf .weight: expected float32 of shape (), received float32 of shape (3,)"),
    "a level of another kind": (SAVED._replace(levels=(1,)), "expected a MeanState, received ndarray"),
    "an object": (SAVED._replace(step=object()), "received object"),
}


@pytest.mark.parametrize("name", NOT_SAVED)
def test_what_cannot_be_saved_leaves_the_old_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.npz"
    statefile.save(path, reductions.mean(), SAVED)
    before = path.read_bytes()
    state, message = NOT_SAVED[name]
    with pytest.raises(gc.GradCombineError) as caught:
        statefile.save(path, reductions.mean(), state)
    assert message in str(caught.value)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("states", [[], SAVED, "states", None])
def test_replicas_are_a_list(tmp_path: Path, states: Any) -> None:
    with pytest.raises(gc.GradCombineError, match="expected a list of states, one per replica"):
        statefile.save_replicas(tmp_path / "a.npz", reductions.mean(), states)


def test_replicas_are_alike(tmp_path: Path) -> None:
    other = gc.accumulate(reductions.mean(), every=4, order="tree").init({**LIKE, "a": np.zeros(3, np.float32)})
    with pytest.raises(gc.GradCombineError, match=r"expected states of one structure, .* received another at rank 1"):
        statefile.save_replicas(tmp_path / "a.npz", reductions.mean(), [SAVED, other])


def test_paths(tmp_path: Path) -> None:
    for name in ("a", "a.pkl", "a.npz.gz"):
        with pytest.raises(gc.GradCombineError, match=r"expected a path that ends in \.npz or \.safetensors"):
            statefile.save(tmp_path / name, reductions.mean(), SAVED)
    with pytest.raises(FileNotFoundError) as missing:
        statefile.save(tmp_path / "no" / "a.npz", reductions.mean(), SAVED)
    assert Path(missing.value.filename).resolve() == (tmp_path / "no").resolve()
    for suffix in (".npz", ".safetensors"):
        with pytest.raises(FileNotFoundError):
            statefile.load(tmp_path / f"no{suffix}", reductions.mean(), LIKE)


def test_a_reduction_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(gc.GradCombineError, match="mean, not called"):
        statefile.save(tmp_path / "a.npz", reductions.mean, SAVED)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("terms", [(4096, 2**20), (2**20, 4096)])
def test_what_the_same_reduction_would_not_load_is_not_saved(tmp_path: Path, terms: tuple[int, int]) -> None:
    own, other = (reductions.mean("exact", max_terms=n) for n in terms)
    with pytest.raises(gc.GradCombineError, match=r"leaf \.value\['a'\]\.spills\[0\]: expected the structure to have"):
        statefile.save(tmp_path / "a.npz", own, other.init(LIKE))
    assert not list(tmp_path.iterdir())
