"""Leaf names of a trace are unique, and names that a file would not return unchanged are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from gradcombine import GradCombineError
from gradcombine.verify import first_divergence, record
from gradcombine.verify.diff.dumps import open_dump
from gradcombine.verify.record.trace import LONGEST


class Fields(NamedTuple):
    """A container whose keys are fields."""

    a: Any
    b: Any


X, Y, Z = (np.full(2, i, np.float32) for i in range(3))
ALIKE: dict[str, tuple[Any, set[str]]] = {
    "a dot in a name": ({"a": {"b": X}, "a.b": Y}, {"a/b", "a.b"}),
    "a slash in a name": ({"a": {"b": X}, "a/b": Y}, {"a/b", "['a/b']"}),
    "brackets in a name": ({"a": [X], "a[0]": Y, "['a/b']": Z}, {"a/0", "a[0]", "[\"['a/b']\"]"}),
    "a name like a path": ({"['a": {"b']": X}, "a/b": Y}, {"[\"['a\"]/b']", "['a/b']"}),
    "an empty name": ({"": X, "a": {"": Y}}, {"['']", "a/['']"}),
    "a name of one dot": ({".": X, ".a": Y, "a": Z}, {"['.']", "['.a']", "a"}),
    "an integer and its text": ({1: X, "1": Y, "01": Z}, {"[1]", "['1']", "01"}),
    "numbers that print alike": ({1: X, 1.5: Y, "1.5": Z}, {"1", "[1.5]", "1.5"}),
    "a tuple and its text": ({("a",): X, "('a',)": Y}, {"[('a',)]", "('a',)"}),
    "a list beside a dict": ({"a": [X], "b": {0: Y}, "c": {"0": Z}}, {"a/0", "b/0", "c/0"}),
    "fields beside keys": ({"a": Fields(X, None), "b": {"a": Y}, "c": {".a": Z}}, {"a/a", "b/a", "c/['.a']"}),
    "upper and lower case": ({"w": X, "W": Y}, {"w", "W"}),
    "a NUL": ({"a": X, "a\0": Y, "a\0b": Z}, {"a", "['a\\x00']", "['a\\x00b']"}),
    "half of a surrogate pair": ({chr(0xD800): X, chr(0xD801): Y}, {"['\\ud800']", "['\\ud801']"}),
    "a quote": ({"it's": X, 'say "it\'s"': Y}, {"it's", 'say "it\'s"'}),
    "the suffix of a member": ({"w": X, "w.npy": Y}, {"w", "w.npy"}),
    "the longest name": ({"n" * (LONGEST - 10): X, "m": Y}, {"n" * (LONGEST - 10), "m"}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_no_two_leaves_share_a_name(name: str, tmp_path: Path) -> None:
    value, expected = ALIKE[name]
    for run in ("a", "b"):
        with record(tmp_path / run) as recorder:
            recorder(0, gradients=value, params=X)
    dump = open_dump(tmp_path / "a" / "step_00000000.npz")
    found = {name: entry.whole() for name, entry in dump.items()}
    assert set(found) == {"params", *(f"gradients/{name}" for name in expected)}
    written = sorted(float(x[0]) for name, x in found.items() if name != "params")
    assert written == [float(i) for i in range(len(expected))]
    assert first_divergence(tmp_path / "a", tmp_path / "b") is None


def test_each_of_two_leaves_with_like_names_is_compared(tmp_path: Path) -> None:
    for run, last in (("a", Y), ("b", Z)):
        with record(tmp_path / run) as recorder:
            recorder(0, combined={"a": {"b": X}, "a.b": last})
    found = first_divergence(tmp_path / "a", tmp_path / "b")
    assert found is not None and found.row is not None and found.row.difference.name == "combined/a.b"


class Nameless:
    """A key that prints like any other of its class."""

    def __repr__(self) -> str:
        return "it"

    def __lt__(self, other: Any) -> bool:
        return id(self) < id(other)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "keys that print alike": (0, {Nameless(): X, Nameless(): Y}, "leaves with different names"),
    "a name that is too long": (0, {"n" * (LONGEST - 9): X}, f"a name of at most {LONGEST} bytes"),
    "float8, which .npz forgets": (0, {"w": X.astype(ml_dtypes.float8_e4m3fn)}, r"leaf \['w'\]: expected bfloat16"),
    "float8 of another kind": (0, {"w": X.astype(ml_dtypes.float8_e5m2)}, "received float8_e5m2"),
    "int4": (0, {"w": X.astype(ml_dtypes.int4)}, "received int4"),
    "a random key": (
        0,
        {"rng": jax.random.key(0)},
        r"leaf \['rng'\]: expected numbers \(of a random key, its jax.random",
    ),
    "no step": (None, X, "record: expected an array or a number, received None"),
    "step -1": (-1, X, "expected a step of 0 or more, received -1"),
    "step 1.5": (1.5, X, "an integer scalar as the step, received float32"),
    "step True": (True, X, "an integer scalar as the step, received bool"),
    "two steps": (np.arange(2), X, r"an integer scalar as the step, received int64 of shape \(2,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_would_not_keep_is_refused(name: str, tmp_path: Path) -> None:
    step, value, message = REFUSED[name]
    with pytest.raises(GradCombineError, match=message), record(tmp_path) as recorder:
        recorder(step, gradients=value)
    assert not list(tmp_path.iterdir())
