"""What DistributedDataParallel makes of gradients, on three processes of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gradcombine.verify import explain
from gradcombine.verify.diff.dumps import open_dump
from gradcombine.verify.explain.nccl import FIRST_BUCKET, OTHER_BUCKETS, ddp_buckets
from tests.verify.pytorch import ddp

ROOT = Path(__file__).parents[3]
RANKS = 3


def test_a_step_is_explained(tmp_path: Path) -> None:
    """Each rank's chain of microbatches, times 1 / ranks, round a ring whose chunks gloo decides on."""
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
    expected = "mean over ranks, each scaled by 1 / ranks first (DDP), added NCCL's or gloo's ring"
    assert str(found.matches[0].candidate).startswith(expected), found


@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_those_of_the_reducer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = {str(i): int(rng.choice([10, 5000, 300_000, 4_000_000, 9_000_000])) for i in range(20)}
    dtypes = {name: ("float32", "bfloat16")[int(rng.integers(0, 4) == 0)] for name in sizes}
    ready = list(sizes)[::-1]
    tensors = [torch.empty(sizes[name], dtype=getattr(torch, dtypes[name]), device="cpu") for name in ready]
    limits = [FIRST_BUCKET, OTHER_BUCKETS]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * 20, list(range(20)))
    found = ddp_buckets({name: (sizes[name], np.dtype(dtypes[name])) for name in sizes})
    assert sorted(found) == sorted([ready[i] for i in bucket] for bucket in indices)


def test_the_limits_are_those_of_torch() -> None:
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET
    assert torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB << 20 == OTHER_BUCKETS
