"""A run interrupted anywhere resumes from its folder, on any number of processes, with the bits of an unbroken run."""

from __future__ import annotations

import os
import shutil
import threading
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import GradCombineError, ledger, reductions, statefile
from gradcombine.reductions import Numbered
from gradcombine.statefile import recovery

COUNT, WINDOWS = 4, 2
MEAN = reductions.numbered(reductions.mean("exact"), COUNT)
START = {"w": np.zeros(3, np.float32)}


def gradient(params: Any, window: int, number: int) -> Any:
    rng = np.random.default_rng([window, number])
    return {"w": (rng.normal(size=3) * 2.0 ** rng.integers(-20, 20)).astype(np.float32) + params["w"]}


class EndsHereError(Exception):
    """Simulates the end of all processes."""


def train(folder: Path, size: int, places: Any, backwards: bool = False) -> Any:
    """Runs all processes one after the other, in reverse if ``backwards``; `places` decides where the run ends."""
    found = statefile.recover(folder, MEAN, START, START)
    index, params, parts = found.window, found.begun, found.parts
    statefile.begin_window(folder, index, params)
    while index < WINDOWS:
        held = [[parts[holder] for holder in parts if holder % size == rank] for rank in range(size)]
        states = [statefile.resize(MEAN, group, 1)[0] if group else MEAN.init(START) for group in held]
        todo = ledger.deal(ledger.read(*states).missing, size, [ledger.read(state).held for state in states])
        for turn in range(COUNT):
            for rank, numbers in list(enumerate(todo))[:: -1 if backwards else 1]:
                if turn < len(numbers):
                    value = Numbered(gradient(params, index, numbers[turn]), numbers[turn])
                    states[rank] = MEAN.update(states[rank], value, 1 + numbers[turn])
                    places()
                    statefile.save_part(folder, index, rank, MEAN, states[rank])
        ledger.require_once(*states)
        (whole,) = statefile.resize(MEAN, states, 1)
        params = {"w": params["w"] - MEAN.finalize(whole)["w"]}
        index, parts = index + 1, {}
        places()
        statefile.begin_window(folder, index, params)
    return params


def unbroken() -> Any:
    params = START
    for window in range(WINDOWS):
        grads = [gradient(params, window, number) for number in range(COUNT)]
        combined = gc.combine(reductions.mean("exact"), grads, range(1, COUNT + 1))
        params = {"w": params["w"] - combined["w"]}
    return params["w"].tobytes()


def until(last: int) -> Any:
    passed = count()

    def place() -> None:
        if next(passed) == last:
            raise EndsHereError

    return place


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: durability is not tested here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def on_disk(folder: Path) -> set[tuple[int, int]]:
    found = statefile.recover(folder, MEAN, START, START)
    return {(found.window, number) for number in ledger.read(MEAN.init(START), *found.parts.values()).held}


@pytest.mark.parametrize(("holder", "size"), [(1, 2), (2, 3), (5, 2)])
def test_what_was_saved_stays_on_the_disk_whoever_goes_on_with_it(tmp_path: Path, holder: int, size: int) -> None:
    """Another process may replace the holder's file before the process that resumes it has saved."""
    for place in range(1, 4):
        folder = tmp_path / str(place)
        statefile.begin_window(folder, 0, START)
        saved = MEAN.update(MEAN.init(START), Numbered(gradient(START, 0, 3), 3), 4)
        statefile.save_part(folder, 0, holder, MEAN, saved)
        with pytest.raises(EndsHereError):
            train(folder, size, until(place), backwards=True)
        assert (0, 3) in on_disk(folder) or statefile.recover(folder, MEAN, START, START).window > 0
        assert train(folder, size, lambda: None)["w"].tobytes() == unbroken()


@pytest.mark.sampled
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (4, 1)])
def test_a_run_that_ends_at_any_place_goes_on_to_the_same_bits(tmp_path: Path, before: int, after: int) -> None:
    for place in range(WINDOWS * (COUNT + 1)):
        folder = tmp_path / str(place)
        with pytest.raises(EndsHereError):
            train(folder, before, until(place))
        if place % 3 == 0:  # and again on the same number: files of three starts coexist
            with pytest.raises(EndsHereError):
                train(folder, after, until(min(2, WINDOWS * (COUNT + 1) - place - 1)))
        assert train(folder, after, lambda: None)["w"].tobytes() == unbroken()


@pytest.mark.full
def test_a_file_that_is_cut_off_anywhere_costs_work_alone(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with pytest.raises(EndsHereError):
        train(whole, 2, until(COUNT + 3))
    names = [file.name for file in sorted(whole.iterdir())]
    assert names == [f"window-0000000{w}.{holder}.npz" for w in (0, 1) for holder in ("0", "1", "begun")]
    for number, name in enumerate(names * 3):
        folder = shutil.copytree(whole, tmp_path / str(number))
        os.truncate(folder / name, (folder / name).stat().st_size * number // (3 * len(names)))
        found = statefile.recover(folder, MEAN, START, START)
        assert found.window == (0 if name == "window-00000001.begun.npz" else 1)
        assert list(found.left_out) == ([] if "00000000" in name else [name])
        assert train(folder, 2, lambda: None)["w"].tobytes() == unbroken()


def part(*numbers: int) -> Any:
    state = MEAN.init(START)
    for number in numbers:
        state = MEAN.update(state, Numbered(START, number))
    return state


def test_no_microbatch_is_recovered_twice(tmp_path: Path) -> None:
    statefile.begin_window(tmp_path, 4, START)
    for holder, numbers in enumerate([(0,), (0, 1, 2), (2, 3), (3,), ()]):
        statefile.save_part(tmp_path, 4, holder, MEAN, part(*numbers))
    found = statefile.recover(tmp_path, MEAN, START, START)
    assert (found.window, list(found.parts)) == (4, [1, 3])
    assert sorted(found.left_out) == [f"window-00000004.{holder}.npz" for holder in (0, 2, 4)]


def test_parts_of_other_windows_are_stale(tmp_path: Path) -> None:
    for index in range(3):
        statefile.begin_window(tmp_path, index, START)
        statefile.save_part(tmp_path, index, 0, MEAN, part(index))
    assert len(list(tmp_path.iterdir())) == 4  # of two windows
    found = statefile.recover(tmp_path, MEAN, START, START)
    assert ledger.read(*found.parts.values()).held == (2,)


def test_what_is_refused(tmp_path: Path) -> None:
    assert statefile.recover(tmp_path / "nothing", MEAN, START, START) == (0, START, {}, {})
    with pytest.raises(GradCombineError, match=r"expected a window that begin_window has begun, received 0"):
        statefile.save_part(tmp_path, 0, 0, MEAN, part(0))
    statefile.begin_window(tmp_path, 0, START)
    with pytest.raises(GradCombineError, match=r"leaf \['w'\]: expected the bits that another process saved"):
        statefile.begin_window(tmp_path, 0, {"w": np.float32([0, 0, -0.0])})
    plain = reductions.mean()
    with pytest.raises(GradCombineError, match="ledger"):
        statefile.save_part(tmp_path, 0, 0, plain, plain.init(START))
    with pytest.raises(GradCombineError, match="index of a window, from 0"):
        statefile.begin_window(tmp_path, -1, START)
    statefile.save_part(tmp_path, 0, 0, MEAN, part(0))  # an intact file is not left out as damaged if ``like`` is wrong
    with pytest.raises(GradCombineError, match=r"recover: leaf .*\['w'\].*expected .*, received float32"):
        statefile.recover(tmp_path, MEAN, {"w": np.zeros(3)}, START)
    other = {"w": np.float32([1, 2, 3])}
    statefile.begin_window(tmp_path, 1, other)
    for index in range(2):
        os.truncate(tmp_path / f"window-0000000{index}.begun.npz", 10)
    with pytest.raises(GradCombineError, match=r"an undamaged beginning, received window-00000001\.begun\.npz: "):
        statefile.recover(tmp_path, MEAN, START, START)


def test_a_beginning_that_is_damaged_is_mended(tmp_path: Path) -> None:
    statefile.begin_window(tmp_path, 0, START)
    statefile.save_part(tmp_path, 0, 0, MEAN, part(3))
    os.truncate(tmp_path / "window-00000000.begun.npz", 10)
    for _ in range(2):
        found = statefile.recover(tmp_path, MEAN, START, START)
        assert (found.window, found.begun["w"].tolist()) == (0, [0, 0, 0])
        assert ledger.read(*found.parts.values()).held == (3,)
        statefile.begin_window(tmp_path, 0, found.begun)
    assert not found.left_out


def test_a_full_disk_leaves_the_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statefile.begin_window(tmp_path, 0, START)
    statefile.save_part(tmp_path, 0, 0, MEAN, part(0))

    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            statefile.save_part(tmp_path, 0, 0, MEAN, part(0, 1))
        with pytest.raises(OSError, match="no space left"):
            statefile.begin_window(tmp_path, 1, START)
    found = statefile.recover(tmp_path, MEAN, START, START)
    assert found.window == 0 and ledger.read(*found.parts.values()).held == (0,)


NARROW = [
    np.int8([1, -3, 7]),
    np.uint16([[1, 3]]),
    np.array([1, 2], ml_dtypes.int4),
    np.uint16([0x7F81, 0xFFC1, 1]).view(ml_dtypes.bfloat16),
    np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2),
    np.uint16([0x7C01]).view(np.float16),
    np.array([True, False]),
    np.zeros((0, 2), np.int8),
]


@pytest.mark.parametrize("leaf", NARROW, ids=lambda leaf: leaf.dtype.name)
def test_a_beginning_keeps_every_bit(tmp_path: Path, leaf: np.ndarray) -> None:
    """Narrow integers, for instance of an 8-bit optimizer, and NaN payloads."""
    tree = {**START, "leaf": leaf}
    for _ in range(2):  # a second process has the same tree
        statefile.begin_window(tmp_path, 0, tree)
    begun = statefile.recover(tmp_path, MEAN, START, tree).begun
    assert (begun["leaf"].dtype, begun["leaf"].shape) == (leaf.dtype, leaf.shape)
    assert (begun["leaf"].tobytes(), begun["w"].tobytes()) == (leaf.tobytes(), START["w"].tobytes())


@pytest.mark.needs("jax")
def test_a_random_key_is_no_beginning(tmp_path: Path) -> None:
    import jax

    with pytest.raises(GradCombineError, match=r"^statefile.begin_window: leaf \['key'\]: .* jax.random.key_data"):
        statefile.begin_window(tmp_path, 0, {"key": jax.random.key(0)})


OTHERS = [{"w": np.zeros(3)}, {"w": np.zeros(2, np.float32)}, {**START, "b": np.float32(0)}, {"w": START["w"] + 1}]


@pytest.mark.parametrize("other", OTHERS, ids=["dtype", "shape", "leaves", "bits"])
def test_another_beginning_is_never_overwritten(tmp_path: Path, other: Any) -> None:
    statefile.begin_window(tmp_path, 0, START)
    with pytest.raises(GradCombineError, match=r"another process saved in window-00000000\.begun\.npz, received other"):
        statefile.begin_window(tmp_path, 0, other)
    assert statefile.recover(tmp_path, MEAN, START, START).begun["w"].tobytes() == START["w"].tobytes()


def test_of_processes_that_begin_at_once_one_writes(tmp_path: Path) -> None:
    """Those with other bits raise, however they are interleaved."""
    for index in range(20):
        barrier, found = threading.Barrier(2), []

        def begin(value: float, index: int = index, barrier: Any = barrier, found: Any = found) -> None:
            barrier.wait()
            try:
                statefile.begin_window(tmp_path, index, {"w": np.full(100_000, value, np.float32)})
                found.append("begun")
            except GradCombineError:
                found.append("other bits")

        threads = [threading.Thread(target=begin, args=(value,)) for value in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == ["begun", "other bits"]


def test_a_beginning_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, is_saved = {"w": START["w"] + 1}, recovery._is_saved

    def overtaken(path: Path, begun: Any) -> bool:
        found = is_saved(path, begun)
        if not path.exists():
            recovery.write(path, recovery._BEGINNING, [other])
        return found

    monkeypatch.setattr(recovery, "_is_saved", overtaken)
    with pytest.raises(GradCombineError, match="received other bits"):
        statefile.begin_window(tmp_path, 0, START)
    assert statefile.recover(tmp_path, MEAN, START, START).begun["w"].tobytes() == other["w"].tobytes()


def test_beginnings_of_earlier_versions_are_read_and_replaced(tmp_path: Path) -> None:
    """They hold a state of `last`."""
    begun, last = {"w": START["w"] + 3}, reductions.last()
    statefile.save(tmp_path / "window-00000001.begun.npz", last, last.update(last.init(begun), begun))
    for _ in range(2):
        found = statefile.recover(tmp_path, MEAN, START, START)
        assert (found.window, found.begun["w"].tobytes()) == (1, begun["w"].tobytes())
        statefile.begin_window(tmp_path, 1, begun)


def test_a_folder_that_is_a_file_is_no_new_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(NotADirectoryError):
        statefile.recover(tmp_path / "run", MEAN, START, START)


def test_other_names_are_no_parts(tmp_path: Path) -> None:
    statefile.begin_window(tmp_path, 0, START)
    part = MEAN.update(MEAN.init(START), Numbered(START, 1))
    statefile.save_part(tmp_path, 0, 0, MEAN, part)
    (tmp_path / "window-00000000.00.npz").write_bytes(b"")
    (tmp_path / "window-00000000.9.npz").mkdir()
    assert sorted(statefile.recover(tmp_path, MEAN, START, START).parts) == [0]
    for index in range(1, 4):
        statefile.begin_window(tmp_path, index, START)
