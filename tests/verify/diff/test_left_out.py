"""Leaves that cannot be compared never pass: they are named, and the others are still compared."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import h5py
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorflow as tf

from gradcombine import GradCombineError
from gradcombine.verify.diff.by_step import diff_steps
from gradcombine.verify.diff.comparing import diff
from gradcombine.verify.diff.dumps import open_dump
from gradcombine.verify.diff.rules import read_rules
from tests.verify.diff.test_command import run, saved

ONES = np.ones(3, np.float32)


def npz(path: Path) -> Path:
    arrays = {
        "objects": np.array([{}], dtype=object),
        "text": np.array(["a"]),
        "float8": np.ones(2, ml_dtypes.float8_e5m2),
        "record": np.zeros(2, [("x", "f4")]),
        "day": np.zeros(2, "M8[D]"),
    }
    np.savez(path / "a.npz", w=ONES, **arrays)
    with zipfile.ZipFile(path / "a.npz", "a") as archive:
        archive.writestr("settings.json", "{}")
    return path / "a.npz"


def outside(path: Path) -> Path:
    with h5py.File(path.parent / f"{path.name}.h5", "w") as file:
        file["w"] = ONES
    return path.parent / f"{path.name}.h5"


def hdf5(path: Path) -> Path:
    with h5py.File(path / "a.h5", "w") as file:
        file["w"] = ONES
        file["text"] = "a"
        file["empty"] = h5py.Empty("f4")
        file["record"] = np.zeros(2, [("x", "f4")])
        file["opaque"] = np.zeros(2, "V2")
        file["type"] = np.dtype("f4")
        file["lost"] = h5py.SoftLink("/nowhere")
        file["elsewhere"] = h5py.ExternalLink("nowhere.h5", "/w")
        file["group/circle"] = h5py.SoftLink("/group")
        file["itself"] = h5py.SoftLink("/itself")
        file["round"] = h5py.ExternalLink("a.h5", "/round")
        file["stranger's"] = h5py.ExternalLink(str(outside(path)), "/w")
        file["outside"] = h5py.ExternalLink(str(outside(path)), "/")
        file["through"] = h5py.SoftLink("/outside/w")
        file.create_group("/g" * 3_000)
        file.create_dataset("unwritten", (10**12,), "f4", chunks=(10**6,))
    return path / "a.h5"


def safetensors(path: Path) -> Path:
    fields = {
        "w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "float4": {"dtype": "F4", "shape": [2], "data_offsets": [12, 13]},
    }
    text = json.dumps(fields).encode()
    (path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + ONES.tobytes() + b"\0")
    return path / "a.safetensors"


def tensorflow(path: Path) -> Path:
    return Path(tf.train.Checkpoint(w=tf.Variable(ONES), text=tf.Variable("a")).write(str(path / "a")))


def orbax(path: Path) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path / "a", {"w": jnp.asarray(ONES), "text": "a", "x": {"y": np.ones(2)}, "x.y": np.zeros(2)})
    return path / "a"


LEFT_OUT = {
    npz: {"objects", "text", "float8", "record", "day", "settings.json"},
    hdf5: {"text", "empty", "record", "opaque", "type", "lost", "elsewhere", "group/circle", "unwritten"}
    | {"itself", "round", "stranger's", "outside", "through", "/".join("g" * 101)},
    safetensors: {"float4"},
    tensorflow: {"text"},
    orbax: {"text", "x/y", "x.y"},
}


@pytest.mark.full
@pytest.mark.timeout(60)
def test_no_chain_of_links_opens_a_file_elsewhere(tmp_path: Path) -> None:
    """Opening the FIFO would never return."""
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with h5py.File(tmp_path / "in" / "b.h5", "w") as file:
        file["w"] = ONES
        file["far"] = h5py.ExternalLink("../fifo", "/w")
        file["near"] = h5py.SoftLink("/w")
    with h5py.File(tmp_path / "in" / "a.h5", "w") as file:
        file["group/w"] = ONES
        file["beside"] = h5py.ExternalLink("b.h5", "/near")
        file["relative"] = h5py.SoftLink("group/w")
        file["elsewhere"] = h5py.ExternalLink("../fifo", "/")
        file["through"] = h5py.SoftLink("/elsewhere/w")
        file["by another file"] = h5py.ExternalLink("b.h5", "/far")
        for i in range(2_000):
            file[f"chain/{i}"] = h5py.SoftLink(f"/chain/{i + 1}")
        file["chain/2000"] = h5py.SoftLink("/elsewhere/w")
    dump = open_dump(tmp_path / "in" / "a.h5")
    assert {name for name, entry in dump.items() if not entry.unread} == {"group/w", "beside", "relative"}
    assert len(dump) == 2_007


@pytest.mark.parametrize("write", LEFT_OUT)
def test_what_cannot_be_read_is_named_and_fails(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    report = diff(open_dump(path), open_dump(path))
    assert {each.name for each in report.left_out} == LEFT_OUT[write]
    assert [row.difference.name for row in report.rows] == ["w"] and report.rows[0].passes
    assert not report.passes
    with pytest.raises(GradCombineError, match="an array of numbers"):
        open_dump(path)[report.left_out[0].name].whole()


def test_the_screen_says_it_and_a_rule_may_leave_it_out(tmp_path: Path) -> None:
    path = npz(tmp_path)
    code, output = run(path, path, "--json", tmp_path / "out.json")
    assert code == 1
    assert "Leaves that were not compared" in output and "A: a file that is not an .npy array" in output
    assert "1 leaves were compared; 6 could not be compared." in output
    assert len(json.loads((tmp_path / "out.json").read_text())["left_out"]) == 6
    (tmp_path / "rules.toml").write_text("ignore_a = ['[^w].*']\nignore_b = ['[^w].*']")
    assert run(path, path, "--rules", tmp_path / "rules.toml")[0] == 0


def test_nothing_compared_is_nothing_passed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=ONES)
    np.savez(tmp_path / "none.npz")
    (tmp_path / "rules.toml").write_text("ignore_a = ['w']\nignore_b = ['w']")
    assert not diff({}, {}).passes
    rules = read_rules(tmp_path / "rules.toml")
    assert not diff(open_dump(tmp_path / "a.npz"), open_dump(tmp_path / "a.npz"), rules=rules).passes
    code, output = run(tmp_path / "none.npz", tmp_path / "none.npz")
    assert code == 1 and "No leaf was compared." in output


def test_an_unlike_leaf_leaves_the_others_to_be_compared(tmp_path: Path) -> None:
    same = {"w": ONES, "long": np.longdouble([1])}
    report = diff(*map(open_dump, saved(tmp_path, same | {"step": np.int32(3)}, same | {"step": np.float32(3)})))
    assert {each.name: each.reason for each in report.left_out} == {
        "step": "int32 against float32: no common measure",
        "long": f"{np.dtype(np.longdouble)} against {np.dtype(np.longdouble)}: no common measure",
    }
    assert [row.difference.name for row in report.rows] == ["w"] and not report.passes


@pytest.mark.parametrize("off", [0, 1])
def test_bfloat16_in_hdf5_and_linked_datasets_are_compared(off: float, tmp_path: Path) -> None:
    """Keras writes bfloat16 as opaque words with an attribute."""
    for name, value in (("a", 0.0), ("b", off)):
        with h5py.File(tmp_path / f"{name}_linked.h5", "w") as file:
            file["w"] = ONES + value
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["half"] = (ONES + value).astype(ml_dtypes.bfloat16).view("V2")
            file["half"].attrs["dtype"] = "bfloat16"
            file["far"] = h5py.ExternalLink(f"{name}_linked.h5", "/w")
            file["near"] = h5py.SoftLink("/hard")
            file["hard"] = ONES + value
            file["hard twice"] = file["hard"]
    report = diff(open_dump(tmp_path / "a.h5"), open_dump(tmp_path / "b.h5"))
    assert {row.difference.name for row in report.rows} == {"half", "far", "near", "hard", "hard twice"}
    assert [row.passes for row in report.rows] == [not off] * 5 and report.passes == (not off)
    assert {row.difference.name: row.difference.dtypes[0] for row in report.rows}["half"] == "bfloat16"


def test_a_big_endian_leaf_is_measured_by_its_values(tmp_path: Path) -> None:
    little = np.array([1.0, np.nextafter(np.float32(256), np.float32(300))], "<f4")
    a, b = map(open_dump, saved(tmp_path, {"w": np.array([1.0, 256.0], ">f4")}, {"w": little}))
    assert next(a["w"].pieces()).dtype.isnative
    (row,) = diff(a, b).rows
    assert (row.difference.max_ulp, row.difference.dtypes) == (1, ("float32", "float32"))


def test_names_that_collide_stay_apart(tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", {"a": {"b": np.zeros(2)}, "a/b": np.ones(2)})
    found = {name: entry.whole().tolist() for name, entry in open_dump(tmp_path / "a").items()}
    assert found == {"['a']['b']": [0, 0], "['a/b']": [1, 1]}


@pytest.mark.parametrize("names", [("final", "final"), ("step_1", "step_-1")])
def test_dumps_of_a_run_that_are_no_common_step_are_named(names: tuple[str, str], tmp_path: Path) -> None:
    for side, name in zip("ab", names, strict=True):
        (tmp_path / side).mkdir()
        for each in ("step_0", name):
            np.savez(tmp_path / side / f"{each}.npz", w=ONES)
    report = diff_steps(tmp_path / "a", tmp_path / "b")
    assert not report.passes
    left_out: Any = [Path(each).name for each in report.left_out] or (report.only_a, report.only_b)
    assert left_out == (["final.npz"] * 2 if names[0] == "final" else ((1,), (-1,)))


def test_files_of_unknown_formats_that_are_named_like_dumps_do_not_pass(tmp_path: Path) -> None:
    for side in "ab":
        (tmp_path / side).mkdir()
        np.savez(tmp_path / side / "step_0.npz", w=ONES)
        for name in ("step_0.json", "log.txt", "events.17"):
            (tmp_path / side / name).touch()
    assert diff_steps(tmp_path / "a", tmp_path / "b").passes
    (tmp_path / "b" / "step_1.msgpack").touch()
    report = diff_steps(tmp_path / "a", tmp_path / "b")
    assert not report.passes
    assert report.left_out == (str(tmp_path / "b" / "step_1.msgpack"),)


def test_files_of_a_run_are_not_compared_with_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for side in "ab":
        (tmp_path / side).mkdir()
        for step in range(60):
            (tmp_path / side / f"step_{step}.json").touch()
        np.savez(tmp_path / side / "step_0.npz", w=ONES)
    comparisons: list[object] = []
    equals = PurePath.__eq__
    monkeypatch.setattr(PurePath, "__eq__", lambda one, other: comparisons.append(one) or equals(one, other))
    diff_steps(tmp_path / "a", tmp_path / "b")
    assert not comparisons


def test_data_of_hdf5_that_was_never_written_is_not_zero(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("never", (3,), "f4")
        file.create_dataset("partly", (6,), "f4", chunks=(3,))[:3] = 0
        file["zeros"] = np.zeros(3, np.float32)
        file.create_dataset("chunks", (6,), "f4", chunks=(3,))[:] = 0
        file["none"] = np.zeros((0, 3), np.float32)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        for name, size in (("never", 3), ("partly", 6), ("zeros", 3), ("chunks", 6)):
            file[name] = np.zeros(size, np.float32)
        file["none"] = np.zeros((0, 3), np.float32)
    report = diff(open_dump(tmp_path / "a.h5"), open_dump(tmp_path / "b.h5"))
    assert not report.passes
    assert {x.name for x in report.left_out} == {"never", "partly"}
    assert {row.difference.name for row in report.rows if row.passes} == {"zeros", "chunks", "none"}


@pytest.mark.parametrize("names", [("q_proj_weight", "in_proj_weight"), ("in_proj_weight", "q_proj_weight")])
def test_packed_weights_are_not_split_over_a_leaf_of_that_name(names: tuple[str, str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"q_proj_weight": (4, 4), "in_proj_weight": (12, 4)}
    ours = {f"attn.{name}": rng.normal(size=shapes[name]).astype(np.float32) for name in names}
    theirs = dict(zip((f"attn.{x}_proj_weight" for x in "qkv"), np.split(ours["attn.in_proj_weight"], 3), strict=True))
    report = diff(*map(open_dump, saved(tmp_path, ours, theirs)))
    assert not report.passes
    assert report.only_a == ("attn.in_proj_weight",)


def test_permuted_axes_fail_beside_a_kernel_that_follows_its_name(tmp_path: Path) -> None:
    kernel, stack = np.arange(20, dtype=np.float32).reshape(4, 5), np.random.default_rng(0).normal(size=(2, 3, 2))
    sides = saved(tmp_path, {"kernel": kernel, "stack": stack}, {"kernel": kernel, "stack": stack.transpose(2, 1, 0)})
    assert not diff(*map(open_dump, sides)).passes


@pytest.mark.parametrize(
    ("a", "b", "options"),
    [
        (np.float32([1000, 1]), np.array([np.nan, 1], np.float16), ("--max-ulp", "0")),
        (np.float32([np.inf]), np.float16([np.nan]), ("--max-ulp", "1")),
        (np.float32([1e30]), np.float16([65504]), ("--max-ulp", "1")),
        (np.float32([1e30]), np.float16([np.inf]), ("--max-ulp", "1")),
        (np.complex128([1e39]), np.complex64([np.inf]), ("--max-ulp", "1")),
        (np.complex128([1e308 + 1.5e308j]), np.complex128([1.5e308 + 1.5e308j]), ("--rtol", "1e-9")),
    ],
)
def test_what_the_narrower_dtype_cannot_hold_does_not_pass(
    a: np.ndarray, b: np.ndarray, options: tuple[str, str], tmp_path: Path
) -> None:
    left, right = saved(tmp_path, {"w": a}, {"w": b})
    assert run(left, right, *options)[0] == run(right, left, *options)[0] == 1
    assert run(left, left, *options)[0] == 0
