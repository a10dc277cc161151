"""Gradients of DistributedDataParallel on three local processes are explained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gradcombine.verify import explain
from gradcombine.verify.diff.dumps import open_dump
from tests.verify.pytorch import ddp

ROOT = Path(__file__).parents[3]
RANKS = 3


def test_a_step_is_explained(tmp_path: Path) -> None:
    """Each rank sums its microbatches in order and scales by 1 / ranks; gloo reduces in a ring and picks the chunks."""
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.verify.pytorch.ddp",
                str(rank),
                str(RANKS),
                tmp_path / "s",
                tmp_path / "r.pt",
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    result = {name: entry.whole() for name, entry in open_dump(tmp_path / "r.pt").items()}
    found = explain([part for rank in range(RANKS) for part in ddp.parts(rank)], result, ranks=(RANKS,))
    expected = "mean over ranks, each scaled by 1 / ranks first (DDP), added in NCCL's or gloo's ring"
    assert str(found.matches[0].candidate).startswith(expected), found
