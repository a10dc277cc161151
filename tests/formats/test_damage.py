"""Readers of damaged or malicious files raise one class of error or return the same numbers, with little memory."""

from __future__ import annotations

import gc
import io
import json
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from gradcombine import GradCombineError
from gradcombine.formats.npz import read
from gradcombine.verify.diff.dumps import open_dump

ARRAYS = {
    "kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "turned": np.asarray(np.arange(6.0).reshape(2, 3), order="F"),
    "half": np.array([1, 2.5], ml_dtypes.bfloat16),
    "scalar": np.int64(7),
    "empty": np.zeros((0, 3)),
}
CASES = 400


def stored(path: Path) -> Path:
    np.savez(path / "a.npz", **ARRAYS)
    return path / "a.npz"


def compressed(path: Path) -> Path:
    np.savez_compressed(path / "b.npz", **ARRAYS)
    return path / "b.npz"


def safetensors(path: Path) -> Path:
    save_file({name: np.array(x, order="C") for name, x in ARRAYS.items()}, path / "c.safetensors")
    return path / "c.safetensors"


WRITERS = [stored, compressed, safetensors]


def damaged(data: bytes, rng: np.random.Generator, case: int) -> bytes:
    """The file with flipped bits, an overwritten piece, or a cut-off end."""
    out = bytearray(data)
    if case % 4 == 0:
        del out[rng.integers(len(data)) :]
    elif case % 4 == 1:
        start = rng.integers(len(data))
        out[start : start + rng.integers(1, 64)] = rng.bytes(rng.integers(1, 64))
    else:
        for _ in range(case % 4 - 1):
            out[rng.integers(len(data))] ^= 1 << rng.integers(8)
    return bytes(out)


@pytest.mark.full
@pytest.mark.parametrize("write", WRITERS)
def test_damage_is_one_class_of_error_and_little_memory(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path, rng = write(tmp_path), np.random.default_rng(0)
    data, refused = path.read_bytes(), 0
    open_dump(path)
    tracemalloc.start()
    for case in range(CASES):
        path.write_bytes(damaged(data, rng, case))
        try:
            found = {name: entry.whole() for name, entry in open_dump(path).items() if not entry.unread}
        except GradCombineError:
            refused += 1
            continue
        assert case % 4 or found.keys() < ARRAYS.keys()  # truncated files are never accepted
        if path.suffix == ".npz":  # whose arrays carry checksums
            for name in found.keys() & ARRAYS.keys():
                same = np.asarray(ARRAYS[name])
                assert found[name].shape != same.shape or found[name].dtype != same.dtype or (found[name] == same).all()
    assert refused > CASES / 4
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()


def test_a_file_that_is_cut_off_may_have_any_name(tmp_path: Path) -> None:
    path = safetensors(tmp_path).rename(tmp_path / "{0} {x}.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GradCombineError, match=r"bytes in \{0\} \{x\}\.safetensors"):
        open_dump(path)


def header(text: str, data: bytes = b"\0" * 12) -> bytes:
    """An .npy file with this header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


def shaped(shape: str) -> bytes:
    return header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n")


MEMBERS = {
    "more than is there": shaped("(4,)"),
    "less than is there": shaped("(2,)"),
    "huge": shaped("(10**15,)".replace("10**15", str(10**15))),
    "beyond 64 bits": shaped(f"({2**62}, 4)"),
    "negative": shaped("(-1, -3)"),
    "no number": shaped("(3.0,)"),
    "a header that is cut off": header("{'descr': '<f4', ")[:24],
    "a header that is deep": header("(" * 5000),
    "nothing": b"",
}
NO_SHAPES = ("-" * 3000 + "1", "-" * 9000 + "1", "(" * 4000 + ")" * 4000, "(1.5,)", "'", "*2", "{}}", "(1,), 'x': 1")


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_headers_that_do_not_fit_are_refused(member: bytes, method: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(GradCombineError):
        open_dump(tmp_path / "a.npz")


@pytest.mark.parametrize("shape", NO_SHAPES)
def test_a_header_that_is_none_is_refused_in_our_words(shape: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", shaped(shape))
    with pytest.raises(GradCombineError, match=r"leaf x: expected an \.npy header: .*received malformed or deeply"):
        open_dump(tmp_path / "a.npz")


def test_an_array_that_fits_its_header_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", shaped("(3,)"))
    assert open_dump(tmp_path / "a.npz")["x"].whole().tolist() == [0, 0, 0]


def two_of_a_name(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x", "x.npy"):
            archive.writestr(name, shaped("(3,)"))


def a_bomb(path: Path) -> None:
    """Directory and header both declare a few bytes to be a gigabyte."""
    file, member = io.BytesIO(), shaped("(250000000,)")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", member)
    claimed = len(member) - 12 + 10**9
    path.write_bytes(file.getvalue().replace(len(member).to_bytes(4, "little"), claimed.to_bytes(4, "little")))


@pytest.mark.parametrize("make", [two_of_a_name, a_bomb])
def test_archives_that_mislead_are_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "a.npz")
    with pytest.raises(GradCombineError):
        open_dump(tmp_path / "a.npz")


def tensor(**fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} | fields


FIELDS, JSON = "leaf x: expected a dtype, a shape and two data_offsets", "expected JSON in a.safetensors"
HEADERS: dict[str, tuple[Any, str]] = {
    "too short a shape": ({"x": tensor(shape=[2])}, "leaf x: expected the bytes of float32"),
    "a huge shape": ({"x": tensor(shape=[10**15])}, "leaf x: expected the bytes of float32"),
    "a negative shape": ({"x": tensor(shape=[-1, -3])}, FIELDS),
    "a shape of a truth value": ({"x": tensor(shape=[True, 3])}, FIELDS),
    "offsets beyond the end": ({"x": tensor(shape=[4], data_offsets=[0, 16])}, "a file of 86 bytes"),
    "offsets backwards": ({"x": tensor(shape=[0], data_offsets=[12, 0])}, "leaf x: expected bytes that begin at 0"),
    "an overlap": ({"x": tensor(), "y": tensor()}, "leaf y: expected bytes that begin at 12"),
    "a hole": (
        {"x": tensor(shape=[1], data_offsets=[0, 4]), "y": tensor(shape=[1], data_offsets=[8, 12])},
        "leaf y: expected bytes that begin at 4",
    ),
    "a rest": ({"x": tensor(shape=[2], data_offsets=[0, 8])}, "a file of 77 bytes"),
    "no offsets": ({"x": {"dtype": "F32", "shape": [3]}}, FIELDS),
    "a number": ({"x": 1}, FIELDS),
    "a list": ([1, 2], "expected a JSON object in a.safetensors"),
    "a name twice": (
        f'{{"x": {json.dumps(tensor())}, "x": {json.dumps(tensor())}}}',
        "leaf x: expected unique keys in a JSON object",
    ),
    "no JSON": ("{", JSON),
    "deep lists": ("[" * 100_000, JSON),
    "deep objects": ('{"a":' * 100_000, JSON),
}


@pytest.mark.parametrize(("content", "message"), HEADERS.values(), ids=HEADERS)
def test_headers_of_safetensors_that_do_not_fit_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    text = (content if isinstance(content, str) else json.dumps(content)).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 12)
    with pytest.raises(GradCombineError, match=message):
        open_dump(tmp_path / "a.safetensors")


@pytest.mark.parametrize("length", [0, 2**40, 2**64 - 1])
def test_lengths_of_headers_that_do_not_fit_are_refused(length: int, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(GradCombineError, match="a header of up to 2 bytes"):
        open_dump(tmp_path / "a.safetensors")


def test_a_file_that_ends_in_a_cycle_is_closed(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            entries = read(stored(tmp_path))
            pieces = entries["kernel"].pieces()
            cycle: list[Any] = [next(pieces), pieces, entries]
            cycle.append(cycle)
            del entries, pieces, cycle
        gc.collect()
    assert not [x for x in caught if x.category is ResourceWarning]
