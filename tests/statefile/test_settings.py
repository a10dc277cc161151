"""A state is accepted only under the reductions, wrappers and settings with which it was created."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions, statefile, wires
from gradcombine.reductions import Numbered
from tests.statefile.states import Case, saved_and_loaded
from tests.statefile.test_damage import rewritten

LIKE = {"w": np.zeros(2, np.float32)}
GRAD = {"w": np.float32([3, 4])}
AMAX: dict[str, Any] = {
    "empty": 0,
    "update": lambda xp, a, x, w: xp.maximum(a, abs(x)),
    "merge": lambda xp, a, b: xp.maximum(a, b),
}
COMPOSITIONS: dict[str, gc.Reduction] = {
    "mean": reductions.mean(),
    "mean, stored in float64": reductions.mean(dtype="float64"),
    "mean, returned as float16": reductions.mean(output_dtype="float16"),
    "mean, sent as bfloat16": reductions.mean(wire=wires.cast("bfloat16")),
    "mean, sent in 8 bits": reductions.mean(wire=wires.blocks(8)),
    "compensated": reductions.mean("compensated"),
    "exact": reductions.mean("exact"),
    "exact, of more terms": reductions.mean("exact", max_terms=5000),
    "clipped at 1": reductions.clipped(reductions.mean(), 1),
    "clipped at 100": reductions.clipped(reductions.mean(), 100),
    "zeroed": reductions.zeroed(reductions.mean()),
    "checked": reductions.checked(reductions.mean()),
    "zeroed, clipped": reductions.zeroed(reductions.clipped(reductions.mean(), 1)),
    "clipped, zeroed": reductions.clipped(reductions.zeroed(reductions.mean()), 1),
    "measured": reductions.measured(reductions.mean()),
    "measured, clipped": reductions.measured(reductions.clipped(reductions.mean(), 1)),
    "one a leaf": reductions.per_leaf({"w": reductions.mean()}),
    "another one a leaf": reductions.per_leaf({"w": reductions.clipped(reductions.mean(), 2)}),
    "own": reductions.elementwise("amax", **AMAX),
    "own, returned as float16": reductions.elementwise("amax", output_dtype="float16", **AMAX),
}
LEDGERS: dict[str, gc.Reduction] = {
    "numbered": reductions.numbered(reductions.mean(), 4),
    "of clipped": reductions.numbered(reductions.clipped(reductions.mean(), 1), 4),
    "clipped": reductions.clipped(reductions.numbered(reductions.mean(), 4), 1),
    "of 8": reductions.numbered(reductions.mean(), 8),
}


def window(reduction: gc.Reduction, value: Any = GRAD) -> Any:
    acc = gc.accumulate(reduction, every=4)
    return acc.update(value, acc.init(LIKE))


def test_descriptions_differ_where_compositions_do() -> None:
    described = [reduction.description for reduction in (COMPOSITIONS | LEDGERS).values()]
    assert len(set(described)) == len(described)
    assert (
        reductions.clipped(reductions.mean(), 1).description == reductions.clipped(reductions.mean(), 1.0).description
    )
    assert reductions.mean(dtype=np.float32).description == reductions.mean(dtype="float32").description


@pytest.mark.parametrize("begun", COMPOSITIONS)
def test_another_composition_is_refused(begun: str, tmp_path: Path) -> None:
    path = tmp_path / "window.npz"
    statefile.save(path, COMPOSITIONS[begun], window(COMPOSITIONS[begun]))
    for resumed, load in itertools.product(COMPOSITIONS.keys() - {begun}, (statefile.load, statefile.load_replicas)):
        with pytest.raises(gc.GradCombineError, match=r"expected states of .*, received states of "):
            load(path, COMPOSITIONS[resumed], LIKE)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_its_own_composition_goes_on(name: str, tmp_path: Path) -> None:
    path, reduction = tmp_path / "window.safetensors", COMPOSITIONS[name]
    loaded = saved_and_loaded(path, Case(reduction, LIKE), window(reduction))
    gc.check_state(reduction, loaded)
    assert statefile.inspect(path).settings == reduction.description


@pytest.mark.parametrize(("begun", "resumed"), list(itertools.permutations(LEDGERS, 2)))
def test_a_part_of_another_composition_is_refused(begun: str, resumed: str, tmp_path: Path) -> None:
    statefile.begin_window(tmp_path, 0, LIKE)
    statefile.save_part(tmp_path, 0, 0, LEDGERS[begun], window(LEDGERS[begun], Numbered(GRAD, 1)))
    with pytest.raises(gc.GradCombineError, match=r"expected states of .*, received states of "):
        statefile.recover(tmp_path, LEDGERS[resumed], LIKE, LIKE)
    assert sorted(statefile.recover(tmp_path, LEDGERS[begun], LIKE, LIKE).parts) == [0]


def test_a_file_of_the_version_before_loads_and_says_what_it_does_not_tell(tmp_path: Path) -> None:
    path, clipped = tmp_path / "window.npz", COMPOSITIONS["clipped at 1"]
    state = window(clipped)
    statefile.save(path, clipped, state)
    rewritten(path, lambda entries, fields: (fields.update(version=2), fields.pop("settings")))
    assert statefile.inspect(path).settings is None
    with pytest.warns(UserWarning, match=r"lacks the settings of its reduction: clipped\(mean\(\), max_norm=1"):
        loaded = statefile.load(path, clipped, LIKE)
    assert json.dumps(loaded.levels[0].value["w"].tolist()) == json.dumps(state.levels[0].value["w"].tolist())
    with pytest.raises(gc.GradCombineError, match="expected states of 'sum'"):
        statefile.load(path, reductions.sum(), LIKE)
