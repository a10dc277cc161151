"""Loaded states equal the saved ones bit for bit, and accumulation continues as if uninterrupted."""

from __future__ import annotations

import subprocess
import sys
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions, statefile
from tests.spec.selection import cases
from tests.statefile.states import (
    CASES,
    FLOATS,
    SUFFIXES,
    Case,
    accumulated,
    contents,
    contribution,
    saved_and_loaded,
)

ORDERS = ("sequential", "tree")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


ONE_ORDER_EACH = list(zip(cycle(product(ORDERS, SUFFIXES)), CASES, strict=False))
QUICK = [(name, order, suffix) for (order, suffix), name in ONE_ORDER_EACH]


@pytest.mark.parametrize(("name", "order", "suffix"), cases(QUICK, CASES, ORDERS, SUFFIXES))
def test_a_partial_window_goes_on_from_a_file(tmp_path: Path, name: str, order: Any, suffix: str) -> None:
    case = CASES[name]
    state = accumulated(case, order, range(5))
    loaded = saved_and_loaded(tmp_path / f"window{suffix}", case, state)
    unbroken = accumulated(case, order, range(5, 11), state=state)
    assert contents(accumulated(case, order, range(5, 11), state=loaded)) == contents(unbroken)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("updates", [0, 1, 3])
def test_a_state_without_a_window(tmp_path: Path, name: str, updates: int, suffix: str) -> None:
    case = CASES[name]
    state = case.reduction.init(case.like)
    for seed in range(updates):
        state = case.reduction.update(state, contribution(case.like, seed), 2)
    saved_and_loaded(tmp_path / f"state{suffix}", case, state)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("updates", "position"), [(0, (0, 0)), (4, (4, 0)), (5, (1, 1))])
def test_empty_and_full_windows_and_their_number(
    tmp_path: Path, updates: int, position: tuple[int, int], suffix: str
) -> None:
    state = accumulated(CASES["mean"], "tree", range(updates), every=4)
    loaded = saved_and_loaded(tmp_path / f"window{suffix}", CASES["mean"], state)
    assert (int(loaded.step), int(loaded.index)) == position


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_bit_of_every_float_is_kept(tmp_path: Path, suffix: str) -> None:
    """Covers all 16-bit patterns: NaN payloads, signs of zeros, subnormal numbers."""
    patterns, total = np.arange(2**16, dtype=np.uint16), reductions.first()
    value = {"half": patterns.view(np.float16), "wide": (patterns.astype(np.uint32) << 16 | 0x1234).view(np.float32)}
    state = total.init(value)._replace(value=value)
    state = state._replace(value={**value, "half": value["half"].astype(np.float32)})
    saved_and_loaded(tmp_path / f"bits{suffix}", Case(total, value), state)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_states_of_several_replicas(tmp_path: Path, suffix: str) -> None:
    case, path = CASES["per_leaf"], tmp_path / f"windows{suffix}"
    states = [accumulated(case, "tree", range(rank, rank + 3)) for rank in range(4)]
    statefile.save_replicas(path, case.reduction, states)
    loaded = statefile.load_replicas(path, case.reduction, case.like)
    assert [contents(state) for state in loaded] == [contents(state) for state in states]
    assert len({str(contents(state)) for state in loaded}) == 4


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_state_gives_the_same_file(tmp_path: Path, suffix: str) -> None:
    case = CASES["exact mean"]
    for name in "ab":
        statefile.save(tmp_path / f"{name}{suffix}", case.reduction, accumulated(case, "tree", range(3)))
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_a_layout_in_memory_does_not_matter(tmp_path: Path) -> None:
    """Fortran order, strides and non-native byte order do not change the loaded values."""
    total, value = reductions.sum(), np.arange(12, dtype=np.float32).reshape(3, 4)
    state = total.update(total.init(value), value)
    for i, other in enumerate([np.asfortranarray(value), np.repeat(value, 2, 0)[::2], value.astype(">f4")]):
        statefile.save(tmp_path / f"{i}.npz", total, state._replace(value=other))
        assert contents(statefile.load(tmp_path / f"{i}.npz", total, value)) == contents(state)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_header_says_what_is_in_the_file(tmp_path: Path, suffix: str) -> None:
    case, path = CASES["exact mean"], tmp_path / f"window{suffix}"
    statefile.save(path, case.reduction, accumulated(case, "tree", range(3)))
    header = statefile.inspect(path)
    assert (header.reduction, header.replicas, header.levels) == ("mean", 1, 4)
    assert header.gradcombine == gc.__version__
    assert header.kinds[""] == "AccumulateState" and header.kinds[".levels.stacked"] == "ExactMeanState"
    leaves = {leaf.path: (leaf.dtype, leaf.shape) for leaf in header.leaves}
    assert leaves[".step"] == ("int32", ())
    assert leaves[".levels.stacked.value['layers'][0].kernel.slots[0]"] == ("int32", (4, 2, 3))
    assert header.kinds[".levels.stacked.value['layers'][0].bias"] == "no_gradient"
    assert header.kinds[".levels.stacked.dtypes['layers'][1][0]"] == "bfloat16"


def test_another_program_can_read_an_npz_file_as_documented(tmp_path: Path) -> None:
    total = reductions.sum(output_dtype="bfloat16", dtype="bfloat16")
    value = {"w": np.float32([1.5, -2])}
    statefile.save(tmp_path / "sum.npz", total, total.update(total.init(value), value))
    code = (
        "import sys, json, numpy as np, ml_dtypes\n"
        "with np.load(sys.argv[1]) as file:\n"
        "    _, text = file['header'].tobytes().decode().split('\\n')\n"
        "    for i, leaf in enumerate(json.loads(text)['leaves']):\n"
        "        if leaf['path'] == \".value['w']\":\n"
        "            print(leaf['dtype'], file[f'0.{i}'].view(leaf['dtype'])[..., 0].tolist())\n"
    )
    script = [sys.executable, "-c", code, str(tmp_path / "sum.npz")]
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "bfloat16 [1.5, -2.0]\n"


def test_saving_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    state = accumulated(CASES["mean"], "sequential", range(2))
    before = contents(state)
    statefile.save(tmp_path / "a.npz", CASES["mean"].reduction, state)
    assert contents(state) == before
    assert statefile.load(tmp_path / "a.npz", CASES["mean"].reduction, FLOATS).step.flags.writeable
