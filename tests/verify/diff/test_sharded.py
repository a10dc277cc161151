"""Tensors in several files with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gradcombine import GradCombineError
from gradcombine.verify.diff.by_step import is_steps
from gradcombine.verify.diff.comparing import diff
from gradcombine.verify.diff.dumps import open_dump

SHARDS = {
    "model-00001-of-00002.safetensors": {"a": np.arange(3.0), "b": np.ones((2, 3), np.float32)},
    "model-00002-of-00002.safetensors": {"c": np.zeros(2, np.int32)},
}
MAP = {name: shard for shard, tensors in SHARDS.items() for name in tensors}


def written(folder: Path, index: Any = None, **more: dict[str, np.ndarray]) -> Path:
    for shard, tensors in SHARDS.items():
        save_file(tensors | more.get(shard[6:11], {}), folder / shard)
    text = (
        index if isinstance(index, str) else json.dumps({"metadata": {}, "weight_map": MAP} if index is None else index)
    )
    (folder / "model.safetensors.index.json").write_text(text)
    return folder / "model.safetensors.index.json"


def moved(names: str, folder: Path, to: str) -> None:
    """Moves the files and leaves symbolic links in their place."""
    (folder / to).mkdir(exist_ok=True)
    for path in list(folder.glob(names)):
        path.symlink_to(path.rename(folder / to / f"blob of {path.name}"))


@pytest.mark.parametrize(("names", "to"), [("model*", "../blobs"), ("model-*", "files")])
def test_links_lead_to_where_the_index_is(tmp_path: Path, names: str, to: str) -> None:
    """The cache of the Hugging Face Hub is a folder of links into a folder of files."""
    whole = {name: x.whole().tolist() for name, x in open_dump(written(tmp_path)).items()}
    moved(names, tmp_path, to)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert {name: x.whole().tolist() for name, x in open_dump(path).items()} == whole


def test_the_index_and_its_folder_are_the_whole_model(tmp_path: Path) -> None:
    index = written(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    np.savez(tmp_path / "whole.npz", **{name: x for tensors in SHARDS.values() for name, x in tensors.items()})
    for path in (index, tmp_path):
        report = diff(open_dump(path), open_dump(tmp_path / "whole.npz"))
        assert report.passes and len(report.rows) == 3
    assert not is_steps(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            "the shard model-00002-.*received none",
        ),
        (lambda folder: written(folder, **{"00002": {"a": np.ones(3)}}), "leaf a: expected a tensor in one shard"),
        (
            lambda folder: written(folder, **{"00002": {"d": np.ones(3)}}),
            "leaf d: expected a tensor of model.*in model",
        ),
        (lambda folder: written(folder, {"weight_map": MAP | {"d": MAP["c"]}}), "leaf d: .*none in any shard"),
        (lambda folder: written(folder, {"weight_map": MAP | {"b": MAP["c"]}}), "leaf b: .*received it in model-00001"),
        (lambda folder: written(folder, {"weight_map": {"a": "../x.safetensors"}}), "the shard ../x.safetensors"),
        (lambda folder: written(folder, {"weight_map": {"a": "config.json"}}), "the shard config.json"),
        (lambda folder: written(folder, {"weight_map": {"a": 3}}), "a weight_map of"),
        (lambda folder: written(folder, []), "a JSON object in model"),
        (lambda folder: written(folder, '{"weight_map": {"a": "x", "a": "y"}}'), "leaf a: expected unique keys"),
        (lambda folder: written(folder, "{"), "expected JSON in model.safetensors.index.json"),
        (lambda folder: written(folder, "[" * 100_000), "expected JSON in model.safetensors.index.json"),
        (lambda folder: moved("*.safetensors", folder, "../elsewhere"), "the shard model-00001-.*received a link to"),
        (lambda folder: (folder / "other.safetensors.index.json").write_text("{}"), "expected one index, received mod"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Any, message: str) -> None:
    written(tmp_path)
    change(tmp_path)
    with pytest.raises(GradCombineError, match=message):
        open_dump(tmp_path)
