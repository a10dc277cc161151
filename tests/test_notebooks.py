"""The notebooks run in a new kernel without a failing assertion, and are stored with their outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.full
@pytest.mark.needs("jax", "tensorflow", "optax", "keras", "flax")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_is_stored_with_what_it_shows(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert os.path.getsize(path) < 100_000
