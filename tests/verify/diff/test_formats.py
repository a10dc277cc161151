"""Dumps in all formats: files written by the frameworks are read exactly, and damage is detected."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from gradcombine import GradCombineError, formats
from gradcombine.verify.diff.comparing import diff
from gradcombine.verify.diff.dumps import open_dump
from tests.verify.diff.conftest import BFLOAT16, Arrays, flat, npz, orbax, parameters, safetensors, tensorflow

Writer = Callable[[Path, Arrays], Path]


def test_every_format_is_read_to_the_bit(write: Writer, tmp_path: Path) -> None:
    dump = open_dump(write(tmp_path, parameters()))
    found = {name.removeprefix("params/"): x.whole() for name, x in dump.items()}
    expected = flat(parameters())
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(found[name], array)


def test_every_format_meets_every_other(write: Writer, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    report = diff(open_dump(npz(tmp_path / "a", parameters())), open_dump(write(tmp_path, parameters())))
    assert report.passes
    assert report.elements == sum(x.size for x in flat(parameters()).values())


@pytest.mark.parametrize("write", [npz, safetensors, orbax, tensorflow])
def test_bfloat16_is_read(write: Writer, tmp_path: Path) -> None:
    (found,) = open_dump(write(tmp_path, {"x": np.float32([1, 2.5]).astype(BFLOAT16)})).values()
    assert found.dtype == BFLOAT16
    assert found.whole().astype(np.float32).tolist() == [1, 2.5]


def test_keras_weights_are_read(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.save_weights(tmp_path / "model.weights.h5")
    found = {name: x.whole() for name, x in open_dump(tmp_path / "model.weights.h5").items()}
    for weight, name in zip(model.weights, sorted(found), strict=True):
        np.testing.assert_array_equal(found[name], np.asarray(weight))


@pytest.mark.parametrize("order", ["C", "F"])
def test_large_arrays_come_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: Any) -> None:
    monkeypatch.setattr(formats, "PIECE", 7)
    array = np.asarray(np.arange(40, dtype=np.float32).reshape(8, 5), order=order)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = array
    np.savez(tmp_path / "x.npz", x=array)
    paths = [tmp_path / "x.npz", tmp_path / "x.h5", safetensors(tmp_path, {"x": np.ascontiguousarray(array)})]
    for path in paths:
        (found,) = open_dump(path).values()
        pieces = list(found.pieces())
        np.testing.assert_array_equal(np.concatenate(pieces), array.reshape(-1))
        assert order == "F" or (len(pieces) > 1 and max(piece.size for piece in pieces) <= 7)
    assert diff(open_dump(paths[0]), open_dump(paths[1])).passes
    assert diff(open_dump(paths[0]), open_dump(paths[2])).passes


def test_a_sequence_in_a_checkpoint_has_a_path(tmp_path: Path) -> None:
    dump = open_dump(orbax(tmp_path, {"layers": {"0": jnp.ones(2), "1": jnp.zeros(2)}}))
    assert list(dump) == ["params/layers/0", "params/layers/1"]


@pytest.mark.parametrize("name", ["nothing.npz", "nothing", "text.npz", "text.safetensors", "text.h5", "text.md"])
def test_what_is_no_dump_is_refused(tmp_path: Path, name: str) -> None:
    if name.startswith("text"):
        (tmp_path / name).write_text("This is not an array.")
    with pytest.raises(GradCombineError, match="diff: expected"):
        open_dump(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("w.pt", "torch", "'gradcombine[torch]'"),
        ("w.h5", "h5py", "'gradcombine[cli]'"),
        ("w.index", "tensorflow", "'gradcombine[tensorflow]'"),
        ("orbax/_METADATA", "orbax", "orbax-checkpoint"),
    ],
)
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    opened = path.parent if name == "orbax/_METADATA" else path
    with pytest.raises(GradCombineError) as raised:
        open_dump(opened)
    assert str(raised.value) == (
        f"to read {opened.name}: expected what pip install {package} installs, received no module {module}"
    )
