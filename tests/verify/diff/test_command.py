"""The command `gradcombine diff`."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gradcombine.verify import terminal
from gradcombine.verify.command import app


def run(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["diff", *map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def saved(folder: Path, *sides: dict[str, Any]) -> list[Path]:
    """Saves the arrays of the sides as a.npz, b.npz and so on."""
    paths = [folder / f"{'abc'[i]}.npz" for i in range(len(sides))]
    for path, arrays in zip(paths, sides, strict=True):
        np.savez(path, **arrays)
    return paths


@pytest.fixture
def dumps(tmp_path: Path) -> tuple[Path, Path]:
    kernel, bias = np.arange(1, 7, dtype=np.float32).reshape(2, 3), np.float32([1, 2])
    off = kernel.copy()
    off[1, 2] = np.nextafter(off[1, 2], np.float32(9), dtype=np.float32)
    a, b = saved(tmp_path, {"kernel": kernel, "bias": bias}, {"kernel": off, "bias": bias})
    return a, b


def test_equal_dumps_pass(dumps: tuple[Path, Path]) -> None:
    code, output = run(dumps[0], dumps[0])
    assert code == 0
    assert "All 2 leaves (8 elements) pass." in output


def test_a_difference_fails_and_is_shown(dumps: tuple[Path, Path]) -> None:
    code, output = run(*dumps)
    assert code == 1
    for text in (
        "kernel",
        "1 ulp",
        "[1, 2] 6.0 | 6.00",
        "Leaves with equal bits (1)",
        "2 leaves were compared; 1 do not pass.",
    ):
        assert text in output


@pytest.mark.parametrize(("option", "value"), [("--max-ulp", 1), ("--rtol", 1e-6), ("--atol", 1e-6)])
def test_an_allowance_passes(dumps: tuple[Path, Path], option: str, value: float) -> None:
    assert run(*dumps, option, value)[0] == 0
    assert run(*dumps, option, 0)[0] == 1


def test_numbers_have_the_digits_of_their_dtype(tmp_path: Path) -> None:
    sides = ({"half": np.float16([x]), "complex": np.complex64([1 + x * 1j])} for x in (0.1, 0.2))
    code, output = run(*saved(tmp_path, *sides))
    assert code == 1 and "[0] 0.1 | 0.2" in output and "[0] (1+0.1j) | (1+0.2j)" in output


def test_nan_is_no_small_relative_difference(tmp_path: Path) -> None:
    paths = saved(tmp_path, {"x": np.float32([1, np.nan])}, {"x": np.float32([1, 2])})
    assert run(*paths, "--rtol", 1)[0] == 1


def test_gradients_that_are_zero_in_exact_arithmetic_pass_within_atol(tmp_path: Path) -> None:
    """As of a bias before a normalization, where each side has its own rounding errors."""
    kernel, step = np.linspace(-1, 1, 8, dtype=np.float32), np.int64(10**9)
    biases = np.float32([[3e-8, -1e-8], [-2e-8, 4e-8]])
    paths = saved(tmp_path, *({"kernel": kernel, "bias": bias, "step": step} for bias in biases))
    code, output = run(*paths, "--rtol", 1e-4)
    assert code == 1 and "as small as the rounding error of the largest leaf" in output
    assert run(*paths, "--rtol", 1e-4, "--atol", 1e-7)[0] == 0
    assert run(*paths, "--rtol", 1e-4, "--atol", 1e-8)[0] == 1


def test_a_leaf_is_small_beside_the_largest_of_its_stage(tmp_path: Path) -> None:
    """Gradients are compared with gradients, not with larger parameters."""
    others = {"gradients/w": np.float32([1e-3]), "params/w": np.float32([1])}
    paths = saved(tmp_path, *(others | {"gradients/b": np.float32([bias])} for bias in (1e-7, 2e-7)))
    code, output = run(*paths, "--rtol", 1e-4)
    assert code == 1 and "rounding error of the largest" not in output


def test_one_step_passes_in_the_singular(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    np.savez(tmp_path / "run/step_0.npz", w=np.ones(2))
    assert "The only step passes." in run(tmp_path / "run", tmp_path / "run")[1]


def test_a_gradient_above_rounding_is_not_called_small(tmp_path: Path) -> None:
    others = {"kernel": np.ones(8, np.float32), "step": np.int64(10**9)}
    paths = saved(tmp_path, *(others | {"bias": np.float32([bias])} for bias in (1e-5, 2e-5)))
    code, output = run(*paths, "--rtol", 1e-4)
    assert code == 1 and "rounding error of the largest" not in output


def test_json_holds_every_leaf(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    run(*dumps, "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["passes"], found["elements"]) == (False, 8)
    assert [leaf["a"] for leaf in found["leaves"]] == ["kernel", "bias"]
    assert found["leaves"][0]["worst"] == {"at": 5, "a": 6.0, "b": float(np.nextafter(np.float32(6), np.float32(9)))}


def test_a_page_stands_alone(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", **{"<script>": np.ones(2)}, kernel=np.ones((2, 3)))
    run(dumps[0], tmp_path / "c.npz", "--html", tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    assert "&lt;script&gt;" in text and "<script" not in text
    assert text.count("data:image/svg+xml;base64,") == 2
    assert "[1, 2] 6.0 | 1.0" in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_files_are_written_before_a_closed_pipe_ends_the_report(
    dumps: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*arguments: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(terminal, "show", closed)
    run(*dumps, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert json.loads((tmp_path / "out.json").read_text()) and (tmp_path / "out.html").exists()


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of four steps; one leaf differs from the third step on."""
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for step in range(4):
            w = np.float32([1, 2]) + np.float32(1e-6 * (side == "b" and step >= 2) * step)
            np.savez(tmp_path / side / f"step_{step:05}.npz", w=w, v=np.ones(3))
    return tmp_path / "a", tmp_path / "b"


def test_runs_are_compared_step_by_step(runs: tuple[Path, Path], tmp_path: Path) -> None:
    code, output = run(*runs, "--html", tmp_path / "out.html", "--json", tmp_path / "out.json")
    assert code == 1
    assert "The first step that differs is 2" in output
    assert "Heat map" in (tmp_path / "out.html").read_text()
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert [steps[str(step)]["passes"] for step in range(4)] == [True, True, False, False]
    assert run(runs[0], runs[0])[0] == 0


def test_a_missing_step_does_not_pass(runs: tuple[Path, Path]) -> None:
    (runs[1] / "step_00003.npz").unlink()
    code, output = run(*runs, "--max-ulp", 100)
    assert code == 1
    assert "step 3  only in A" in output


def test_what_cannot_be_read_is_another_status(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    code, output = run(dumps[0], tmp_path / "none.npz")
    assert code == 2
    assert "which does not exist" in output


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_report_that_cannot_be_written_is_another_status(
    dumps: tuple[Path, Path], tmp_path: Path, option: str
) -> None:
    code, output = run(*dumps, option, tmp_path / "nowhere" / "out")
    assert code == 2
    assert f"expected a path in an existing folder for {option}" in output
    (tmp_path / "folder").mkdir()
    assert run(*dumps, option, tmp_path / "folder")[0] == 2


def test_a_truncated_member_is_no_difference(tmp_path: Path) -> None:
    """Neither as stored nor transposed: missing data is an error, not uninitialized memory."""
    file = io.BytesIO()
    np.save(file, np.ones((4, 3), np.float32))
    np.savez(tmp_path / "a.npz", w=np.ones((3, 4), np.float32))
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("w.npy", file.getvalue()[:-8])
    code, output = run(tmp_path / "a.npz", tmp_path / "b.npz")
    assert code == 2 and output.count("\n") == 1
    assert "expected an array of float32(4, 3), 48 bytes" in output


def test_leaves_of_six_axes_may_be_transposed(tmp_path: Path) -> None:
    x = np.arange(720, dtype=np.float32).reshape(1, 2, 3, 4, 5, 6)
    a, b, c = saved(tmp_path, *({"w": array} for array in (x, x.T, x.transpose(2, 0, 1, 5, 4, 3))))
    assert run(a, b)[0] == run(a, c)[0] == 0


@pytest.mark.parametrize("shape", [[1] * 100, [0, 10**30], [10**30, 0]], ids=["axes", "length", "zero"])
def test_shapes_that_numpy_lacks_are_another_status(tmp_path: Path, shape: list[int]) -> None:
    data = bytes(4 * math.prod(shape))
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    for name, last in (("a", data), ("b", data[:-1] + b"\1"[: len(data)])):
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + last)
    status, output = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert status == 2
    assert "a shape that NumPy can represent" in output


def test_the_last_number_of_a_name_is_its_step(tmp_path: Path) -> None:
    for run_name, step in (("a", 5), ("b", 6)):
        (tmp_path / run_name).mkdir()
        np.savez(tmp_path / run_name / f"epoch1.step{step}.npz", w=np.ones(3))
    status, output = run(tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "step 5 only in A" in " ".join(output.split())
