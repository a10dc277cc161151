"""Matching of leaves by rule, name, shape and values."""

from __future__ import annotations

import signal
import zipfile
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradcombine import GradCombineError
from gradcombine.formats import from_array
from gradcombine.verify.diff import rules
from gradcombine.verify.diff.comparing import diff
from gradcombine.verify.diff.dumps import Dump, open_dump
from gradcombine.verify.diff.mapping import match
from gradcombine.verify.diff.rules import Rules, read_rules
from tests.verify.diff.test_command import run, saved

RNG = np.random.default_rng(5)
KERNELS = [RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(3)]


def dump(arrays: dict[str, Any]) -> Dump:
    return {name: from_array(name, x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()}


def pairs(a: dict[str, Any], b: dict[str, Any], rules: Rules | None = None) -> list[tuple[Any, ...]]:
    return [tuple(pair)[:4] for pair in match(dump(a), dump(b), rules or Rules()).pairs]


CONVOLUTION = RNG.normal(size=(3, 3, 2, 5)).astype(np.float32)
MATCHED: dict[str, tuple[dict[str, Any], dict[str, Any], Any, Any]] = {
    "equal names, first": ({"x": KERNELS[0], "y": KERNELS[1]}, {"x": KERNELS[1], "y": KERNELS[0]}, None, "name"),
    "names of flax and PyTorch": (
        {"params/Dense_0/kernel": KERNELS[0], "params/Dense_1/kernel": KERNELS[1]},
        {"model.dense.0.weight": KERNELS[2], "model.dense.1.weight": KERNELS[2]},
        (1, 0),  # as these names imply, since no order is similar
        "similar name",
    ),
    "a word that one dump lacks": (  # like the model name that Keras adds in each window of a trace
        {f"gradients/{i}/['sequential/{name}/bias']": KERNELS[i] for i in range(3) for name in "ab"},
        {f"gradients/{i}/{name}/bias": KERNELS[2 - i] for i in range(3) for name in "ab"},
        None,
        "similar name",
    ),
    "transposed": (
        {"w": KERNELS[0], "v": KERNELS[1][:, :3]},
        {"w": KERNELS[0].T, "v": KERNELS[1][:, :3].T},
        (1, 0),
        "name",
    ),
    "a convolution": ({"conv": CONVOLUTION}, {"conv": CONVOLUTION.transpose(3, 2, 0, 1)}, (2, 3, 1, 0), "name"),
    "unique shapes": (
        {"in": np.ones((3, 2)), "out": np.ones(2)},
        {"q": np.zeros((3, 2)), "p": np.zeros(2)},
        None,
        "shape",
    ),
    "values": (  # renamed, transposed and slightly different
        {f"a{i}": kernel for i, kernel in enumerate(KERNELS)},
        {f"layer_{'xyz'[i]}": (KERNELS[i] * np.float32(1.001)).T for i in range(3)},
        (1, 0),
        "values",
    ),
    "zeros, in order": (
        {f"left{i}": np.zeros(3) for i in range(3)},
        {f"right{i}": np.zeros(3) for i in range(3)},
        None,
        "values",
    ),
    "many axes": ({"x": np.arange(64.0).reshape((2,) * 6)},) * 2 + (None, "name"),
    # Even if the transposed kernel is slightly less different.
    "unlike": ({"w": KERNELS[0]}, {"w": KERNELS[1]}, None, "name"),
    "unlike, transposed": ({"w": KERNELS[0]}, {"w": KERNELS[1].T}, None, "name"),
}
"""Two dumps whose leaves correspond in order, the axes, and the reason."""


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", MATCHED)
def test_leaves_that_correspond(name: str, shuffled: bool) -> None:
    a, b, axes, reason = MATCHED[name]
    expected = [(x, y, axes, reason) for x, y in zip(a, b, strict=True)]
    b = dict(reversed(b.items())) if shuffled and not name.startswith("zeros") else b
    assert pairs(a, b) == expected


def test_what_is_unlike_stays_alone() -> None:
    found = match(dump({"a": KERNELS[0], "b": KERNELS[1]}), dump({"c": KERNELS[2], "d": -KERNELS[0]}))
    assert (found.pairs, found.only_a, found.only_b) == ((), ("a", "b"), ("c", "d"))


def test_a_square_kernel_that_is_turned_is_said(tmp_path: Path) -> None:
    a = {"w": KERNELS[0], "v": KERNELS[1][:, :3]}
    paths = saved(tmp_path, a, {name: x.T for name, x in a.items()})
    code, output = run(*paths)
    assert code == 0
    assert "agree only with their axes in another order" in output and "w          1, 0" in output
    (tmp_path / "rules.toml").write_text("[[rule]]\na = 'w'\nb = 'w'\ntranspose = [1, 0]")
    assert "another order" not in run(*paths, "--rules", tmp_path / "rules.toml")[1]


@pytest.mark.parametrize("factor", [1, 1.001])
def test_renamed_leaves_are_read_a_few_times_each(factor: float) -> None:
    """Regardless of how many have the same shape; some are equal, some transposed."""
    reads, kernels = [], [np.random.default_rng(i % 50).normal(size=(20, 20)) for i in range(60)]

    def counted(arrays: dict[str, np.ndarray]) -> Dump:
        def load(name: str, x: np.ndarray) -> np.ndarray:
            reads.append(name)
            return x

        return {n: from_array(n, x.shape, x.dtype, partial(load, n, x)) for n, x in arrays.items()}

    b = {f"{'xyz'[i % 3]}q{i * 7 % 60}z": (k.T if i % 4 == 0 else k) * factor for i, k in enumerate(kernels)}
    found = match(counted({f"a{i}": k for i, k in enumerate(kernels)}), counted(b))
    assert len(found.pairs) == 60
    for pair in found.pairs:
        other = b[pair.b] if pair.axes is None else b[pair.b].transpose(pair.axes)
        np.testing.assert_array_equal(kernels[int(pair.a[1:])] * factor, other)
    assert max(Counter(reads).values()) <= 6


def test_an_archive_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = [], zipfile.ZipFile
    np.savez(tmp_path / "a.npz", **{f"x{i}": np.ones((2, 2)) for i in range(20)})

    def counted(path: Any) -> Any:
        opened.append(path)
        return real(path)

    monkeypatch.setattr("gradcombine.formats.npz.zipfile.ZipFile", counted)
    assert diff(open_dump(tmp_path / "a.npz"), open_dump(tmp_path / "a.npz")).passes
    assert len(opened) == 2


RULES = r"""
ignore_a = ["opt.*"]
ignore_b = ["step"]

[[rule]]
a = 'layers/(\d)/w'
b = 'h_\1'
transpose = [1, 0]
"""


def test_rules_go_before_all(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    a = {"layers/0/w": KERNELS[0], "layers/1/w": KERNELS[1], "opt/m": KERNELS[2]}
    b = {"h_0": KERNELS[1], "h_1": KERNELS[0].T, "step": KERNELS[2]}
    found = match(dump(a), dump(b), read_rules(tmp_path / "rules.toml"))
    assert [tuple(pair)[:4] for pair in found.pairs] == [
        ("layers/0/w", "h_0", (1, 0), "rule"),
        ("layers/1/w", "h_1", (1, 0), "rule"),
    ]
    assert not found.only_a and not found.only_b


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "rules as ignore_a, ignore_b and"),
        ("[[rule]]\na = 'x'", "rule 1 with a, a name as b"),
        ("[[rule]]\na = '('\nb = 'x'", "a regular expression"),
        ("[[rule]]\na = 'x'\nb = 'y'\ntranspose = [0, 2]", "an order of axes"),
        ("[[rule]", "a TOML file"),
        ("ignore_a = 3", "a list of regular expressions"),
        ("rule = 3", "rules as"),
        ("[[rule]]\na = 'x'\nb = 3", "a name as b"),
        ("[[rule]]\na = 'x'\nb = 'y'\ntranspose = ['a']", "an order of axes"),
    ],
)
def test_bad_rules_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(GradCombineError, match=message):
        read_rules(tmp_path / "rules.toml")


@pytest.mark.parametrize(("name", "message"), [("no", "a leaf no in the second dump"), ("v", "that fits v of shape")])
def test_rules_that_do_not_fit_are_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "rules.toml").write_text(f"[[rule]]\na = 'w'\nb = '{name}'")
    with pytest.raises(GradCombineError, match=message):
        match(dump({"w": KERNELS[0]}), dump({"v": np.ones(3)}), read_rules(tmp_path / "rules.toml"))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows bounds no time")
@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*)*b", ".*.*.*.*.*.*.*b"])
@pytest.mark.parametrize("side", ["ignore_a", "ignore_b"])
def test_a_pattern_that_would_match_without_an_end_is_refused(
    side: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.toml").write_text(f"{side} = ['{pattern}']")
    leaves, read = dump({"a" * 150: KERNELS[0]}), read_rules(tmp_path / "rules.toml")
    monkeypatch.setattr(rules, "SECONDS", 0.02)
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[1]
    with pytest.raises(GradCombineError, match="expected a regular expression that takes less than") as caught:
        match(leaves, leaves, read)
    assert caught.value.path == "a" * 150
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[1]) == before


def _random(names: Iterable[str], seed: int, size: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=size).astype(np.float32) for name in names}


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "encoder/backbone/"), ("module.", "student.net."), ("params/", ""), ("ema/params/", "target/network/")],
)
def test_what_stands_before_all_names_is_found(before: str, after: str) -> None:
    """Even if the values differ, as between two training steps; a leaf on one side only stays unmatched."""
    names = [f"block_{i}/{kind}" for i in range(40) for kind in ("query/kernel", "key/kernel", "bias")]
    a = _random((before + name for name in names), 0)
    b = _random((after + name for name in reversed(names)), 1) | _random(["head/kernel"], 2)
    found = match(dump(a), dump(b))
    assert {(pair.a, pair.b) for pair in found.pairs} == {(before + name, after + name) for name in names}
    assert (found.only_a, found.only_b) == ((), ("head/kernel",))


@pytest.mark.parametrize("size", [6, 7], ids=["another shape", "the same shape"])
def test_leaves_without_a_counterpart_are_read_a_few_times(size: int) -> None:
    """Regardless of their number."""
    reads = Counter[str]()

    def counted(side: str, arrays: dict[str, np.ndarray]) -> Any:
        def load(name: str) -> np.ndarray:
            reads[side + name] += 1
            return arrays[name]

        entries = {name: (x, partial(load, name)) for name, x in arrays.items()}
        return {name: from_array(name, x.shape, x.dtype, load) for name, (x, load) in entries.items()}

    count = 400
    a = counted("a", _random((f"alpha{i}" for i in range(count)), 0, 7))
    b = counted("b", _random((f"beta_{i * 7}x" for i in range(count)), 1, size))
    report = diff(a, b)
    assert len(report.only_a) + len(report.rows) == count
    assert sum(reads.values()) <= 40 * count


NUMBERED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "activations are numbered in nn.Sequential": (("0", "2", "4"), ("Dense_0", "Dense_1", "Dense_2")),
    "from 1 and from 0": (("fc1", "fc2", "fc3"), ("Dense_0", "Dense_1", "Dense_2")),
    "the first without a number": (("fc1", "fc2", "fc3"), ("dense", "dense_1", "dense_2")),
    "layers of one word": (("layers.1", "layers.2", "layers.3"), ("layers/0", "layers/1", "layers/2")),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_layers_that_are_numbered_otherwise_are_matched_by_values(name: str) -> None:
    left, right = NUMBERED[name]
    a = {f"{x}.weight": kernel for x, kernel in zip(left, KERNELS, strict=True)}
    b = {f"{x}/kernel": kernel.T * np.float32(1.0001) for x, kernel in zip(right, KERNELS, strict=True)}
    assert [pair[:3] for pair in pairs(a, b)] == [(x, y, (1, 0)) for x, y in zip(a, b, strict=True)]


def test_layers_of_the_same_numbers_are_matched_by_them() -> None:
    """So that swapped layers are found."""
    a = {f"fc{i}.weight": kernel for i, kernel in enumerate(KERNELS)}
    b = {f"Dense_{i}/kernel": KERNELS[j].T for i, j in enumerate((1, 0, 2))}
    assert [pair[:2] for pair in pairs(a, b)] == [*zip(a, b, strict=True)]


def test_unlike_layers_that_are_numbered_otherwise_are_matched_by_their_numbers() -> None:
    a, b = ({f"{word}{i + first}/kernel": KERNELS[i] for i in range(2)} for word, first in (("fc", 1), ("dense", 0)))
    assert pairs(a, {name: -x for name, x in b.items()}) == [("fc1/kernel", "dense1/kernel", None, "similar name")]
