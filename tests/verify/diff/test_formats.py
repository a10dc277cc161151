"""Dumps of every format: what is written by its own framework is read to the bit, and damage is noticed."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from gradcombine import GradCombineError
from gradcombine.formats import entry
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
    monkeypatch.setattr(entry, "PIECE", 7)
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
    "shape", ["-" * 3000 + "1", "-" * 9000 + "1", "(" * 4000 + ")" * 4000, "(1.5,)", "'", "*2", "{}}", "(1,), 'x': 1"]
)
def test_an_npy_header_that_is_none_is_refused_in_our_words(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("w.npy", b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header)
    with pytest.raises(GradCombineError, match=r"leaf w: expected an \.npy header: a dict .*received another text"):
        open_dump(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("[" * 100_000, "expected JSON in a.safetensors"),
        ('{"a":' * 100_000, "expected JSON in a.safetensors"),
        ("[1]", "expected an object of JSON in a.safetensors"),
        ('{"w": 1}', "leaf w: expected a dtype, a shape and two data_offsets"),
        ('{"w": {"dtype": "F32", "shape": [1]}}', "leaf w: expected a dtype, a shape and two data_offsets"),
        ('{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "leaf w: expected a dtype, a shape"),
    ],
)
def test_a_header_of_safetensors_that_is_none_is_refused_in_our_words(
    tmp_path: Path, header: str, expected: str
) -> None:
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(GradCombineError, match=expected):
        open_dump(tmp_path / "a.safetensors")


@pytest.mark.parametrize("write", [npz, safetensors], ids=["npz", "safetensors"])
def test_a_damaged_file_never_shows_wrong_numbers_silently(write: Writer, tmp_path: Path) -> None:
    """Cut short anywhere, a file is refused; no other class of exception comes out."""
    whole = write(tmp_path, parameters())
    content, (good,) = whole.read_bytes(), [open_dump(whole)]
    rng = np.random.default_rng(0)
    (tmp_path / "bad").mkdir()
    bad = tmp_path / "bad" / whole.name
    for length in rng.integers(0, len(content), 150):
        bad.write_bytes(content[:length])
        with pytest.raises(GradCombineError, match="diff: "):
            diff(good, open_dump(bad))


def test_a_flipped_bit_shows(tmp_path: Path) -> None:
    """Anywhere in an .npz, whose arrays carry checksums, a flipped bit is an error or a difference."""
    whole = npz(tmp_path, parameters())
    content, good = whole.read_bytes(), open_dump(whole)
    rng = np.random.default_rng(1)
    (tmp_path / "bad").mkdir()
    bad = tmp_path / "bad" / "dump.npz"
    outcomes = {"refused": 0, "same": 0}
    for bit in rng.integers(0, 8 * len(content), 250):
        corrupted = bytearray(content)
        corrupted[bit // 8] ^= 1 << (bit % 8)
        bad.write_bytes(corrupted)
        try:
            report = diff(good, open_dump(bad))
        except GradCombineError:
            outcomes["refused"] += 1
            continue
        # What is not refused is a date or a permission in the archive, and not a number.
        outcomes["same"] += 1
        assert report.passes or report.only_a or report.left_out
    assert outcomes["refused"] > 100


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
