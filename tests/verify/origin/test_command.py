"""The command `gradcombine explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import gradcombine as gc
from gradcombine.verify.command import app


def run(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


@pytest.fixture
def dumps(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(2)
    trees = [{"w": rng.normal(size=300).astype(np.float32)} for _ in range(5)]
    for i, tree in enumerate(trees):
        np.savez(tmp_path / f"g{i}.npz", **tree)
    np.savez(tmp_path / "mean.npz", **gc.mean(trees, weights=[1, 2, 3, 4, 5]))
    np.savez(tmp_path / "other.npz", w=np.ones(300, np.float32))
    return [tmp_path / f"g{i}.npz" for i in range(5)]


def test_an_order_is_found(dumps: list[Path]) -> None:
    code, output = run(*dumps, "--result", dumps[0].with_name("mean.npz"), "--weights", "1,2,3,4,5", "--ranks", "5")
    assert code == 0
    assert "the result is, to the bit: weighted sum / total weight, added one after another, in float32" in output


def test_no_order_is_another_status(dumps: list[Path]) -> None:
    code, output = run(*dumps, "--result", dumps[0].with_name("other.npz"), "--ranks", "5")
    assert code == 1
    assert output.count("no known order gives this result") == 2
    assert "Nearest" in output and "0.00%" in output


@pytest.mark.parametrize(
    ("option", "value"),
    [("weights", "1,2"), ("weights", "a,b,c,d,e"), ("weights", "1,2,nan,4,5"), ("ranks", "nan"), ("ranks", "2.5")],
)
def test_wrong_numbers_are_named(dumps: list[Path], option: str, value: str) -> None:
    code, output = run(*dumps, "--result", dumps[0].with_name("mean.npz"), f"--{option}", value)
    assert code == 2
    assert "explain: expected" in output


def test_a_missing_leaf_is_named(dumps: list[Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", w=np.ones(300), v=np.ones(3))
    code, output = run(*dumps, "--result", tmp_path / "two.npz")
    assert code == 2
    assert "the result's leaf v in g0.npz" in output


def test_a_missing_file_is_named(dumps: list[Path]) -> None:
    code, output = run(*dumps, "--result", dumps[0].with_name("nothing.npz"))
    assert code == 2
    assert output.startswith("explain: expected") and "nothing.npz, which does not exist" in output


def test_what_explains_nothing_does_not_pass(tmp_path: Path) -> None:
    np.savez(tmp_path / "zeros.npz", w=np.zeros(5, np.float32))
    np.savez(tmp_path / "empty.npz")
    zeros, empty = tmp_path / "zeros.npz", tmp_path / "empty.npz"
    code, output = run(zeros, zeros, zeros, "--result", zeros)
    assert code == 1 and "it does not show which one was used" in output
    code, output = run(zeros, zeros, "--result", empty)
    assert code == 2 and "one element or more in the result" in output
