"""A damaged file raises unless the damage does not affect the loaded state."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions, statefile
from tests.formats.test_damage import damaged
from tests.statefile.states import SUFFIXES, accumulated, contents
from tests.statefile.states import Case as States

CASE = States(reductions.mean(), {"w": np.zeros((2, 3), np.float32), "half": np.zeros(2, np.float16), "none": None})
STATES = [accumulated(CASE, "tree", range(rank, rank + 3), every=4) for rank in range(2)]
CASES_A_FORMAT = 1000


@pytest.fixture
def whole(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / f"whole{request.param}"
    statefile.save_replicas(path, CASE.reduction, STATES)
    return path


def outcome(path: Path, header: statefile.Header | None = None) -> str:
    """``"refused"`` or ``"loaded"``: an other errors, other data or another header fail the test."""
    try:
        assert header is None or statefile.inspect(path) == header
        loaded = statefile.load_replicas(path, CASE.reduction, CASE.like)
    except gc.GradCombineError:
        return "refused"
    assert [contents(state) for state in loaded] == [contents(state) for state in STATES]
    return "loaded"


@pytest.mark.full
@pytest.mark.parametrize("whole", SUFFIXES, indirect=True)
def test_bits_that_flip_and_files_that_are_cut_off(whole: Path) -> None:
    data, rng, seen = whole.read_bytes(), np.random.default_rng(0), []
    header = statefile.inspect(whole)
    for i in range(CASES_A_FORMAT):
        whole.write_bytes(damaged(data, rng, i))
        seen.append(outcome(whole, header))
        if i % 4 == 0:
            assert seen[-1] == "refused"
    # Dates and padding of a container may change without effect, but most of a file may not.
    assert seen.count("refused") > 0.8 * CASES_A_FORMAT


@pytest.mark.full
@pytest.mark.parametrize("whole", SUFFIXES, indirect=True)
def test_every_bit_of_an_array_counts(whole: Path) -> None:
    data = whole.read_bytes()
    numbers = np.asarray(STATES[1].levels[0].value["w"]).tobytes()
    assert data.count(numbers) == 1
    for i in range(8 * len(numbers)):
        flipped = bytearray(data)
        flipped[data.index(numbers) + i // 8] ^= 1 << i % 8
        whole.write_bytes(flipped)
        assert outcome(whole) == "refused"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("data", [b"", b"PK", b"\0" * 100, b"x" * 5000, pickle.dumps([1, 2])])
def test_a_foreign_file(tmp_path: Path, suffix: str, data: bytes) -> None:
    (tmp_path / f"a{suffix}").write_bytes(data)
    assert outcome(tmp_path / f"a{suffix}") == "refused"


def test_foreign_files_of_the_right_format(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    np.savez(tmp_path / "a.npz", w=np.zeros(3))
    save_file({"w": np.zeros(3)}, tmp_path / "a.safetensors")
    for suffix in SUFFIXES:
        with pytest.raises(gc.GradCombineError, match="expected a gradcombine state file, received"):
            statefile.load(tmp_path / f"a{suffix}", CASE.reduction, CASE.like)


class Trap:
    """Records its own unpickling."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


def rewritten(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    """Rewrites an .npz file with ``change(entries)`` and a matching checksum in its header."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    text = np.load(io.BytesIO(entries["header.npy"])).tobytes().decode().partition("\n")[2]
    fields = json.loads(text)
    change(entries, fields)
    body = json.dumps(fields, separators=(",", ":"))
    header = io.BytesIO()
    np.save(header, np.frombuffer(f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}".encode(), np.uint8))
    entries["header.npy"] = header.getvalue()
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def leaf(fields: Any, path: str) -> Any:
    return next(entry for entry in fields["leaves"] if entry["path"] == path)


W = ".levels.stacked.value['w']"
CRAFTED = {
    "nothing": lambda entries, fields: None,
    "an object array": lambda entries, fields: entries.update({"0.0.npy": npy(np.array([Trap()]))}),
    "an array too many": lambda entries, fields: entries.update({"0.99.npy": npy(np.zeros(2))}),
    "an array too few": lambda entries, fields: entries.pop("1.0.npy"),
    "another dtype of one size": lambda entries, fields: entries.update(
        {"0.1.npy": npy(np.zeros((3, 2, 3), np.int32))}
    ),
    "Fortran order": lambda entries, fields: entries.update({"0.1.npy": npy(np.zeros((3, 2, 3), "f4", order="F"))}),
    "a huge shape in the header": lambda entries, fields: leaf(fields, W).update(shape=[10**15]),
    "a huge shape in an array": lambda entries, fields: entries.update(
        {"0.1.npy": entries["0.1.npy"].replace(b"(3, 2, 3), }".ljust(23), b"(99999999999, 2, 3), }".ljust(23))}
    ),
    "many replicas": lambda entries, fields: fields.update(replicas=10**9),
    "no replicas": lambda entries, fields: fields.update(replicas=0),
    "many levels": lambda entries, fields: fields.update(levels=10**9),
    "levels that are no number": lambda entries, fields: fields.update(levels="3"),
    "a leaf twice": lambda entries, fields: fields["leaves"].append(fields["leaves"][0]),
    "no leaves": lambda entries, fields: fields.pop("leaves"),
    "another format": lambda entries, fields: fields.update(format="another"),
}


@pytest.mark.parametrize("name", CRAFTED)
@pytest.mark.parametrize("whole", [".npz"], indirect=True)
def test_crafted_contents_with_a_fitting_checksum(whole: Path, name: str) -> None:
    rewritten(whole, CRAFTED[name])
    tracemalloc.start()
    assert outcome(whole) == ("loaded" if name == "nothing" else "refused")
    assert tracemalloc.get_traced_memory()[1] < 2e6  # independent of the claimed size
    tracemalloc.stop()


@pytest.mark.full
@pytest.mark.parametrize("whole", [".npz"], indirect=True)
def test_compressed_entries_are_refused_before_they_are_unpacked(whole: Path) -> None:
    bomb = {"0.0.npy": npy(np.zeros(10**8, np.uint8))}
    rewritten(whole, lambda entries, fields: entries.update(bomb), zipfile.ZIP_DEFLATED)
    assert whole.stat().st_size < 10**6
    with pytest.raises(gc.GradCombineError, match="entries that are not compressed"):
        statefile.load_replicas(whole, CASE.reduction, CASE.like)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "another"}, "expected the format 'gradcombine state', received another format"),
        (
            {"version": 4, "gradcombine": "9.0", "leaves": "something new"},
            "expected version 3 of the format, received version 4, written by gradcombine '9.0'",
        ),
    ],
)
@pytest.mark.parametrize("whole", [".npz"], indirect=True)
def test_another_format_or_version_says_so(whole: Path, changed: dict[str, Any], message: str) -> None:
    rewritten(whole, lambda entries, fields: fields.update(changed))
    with pytest.raises(gc.GradCombineError, match=re.escape(message)):
        statefile.inspect(whole)
