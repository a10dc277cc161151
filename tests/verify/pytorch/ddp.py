"""A step of DistributedDataParallel over gloo; `test_ddp` runs this program once per rank."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

SIZES = {"first": (300, 40), "second": (7, 300), "bias": (41,)}
MICROBATCHES = 2


def parts(rank: int) -> list[dict[str, np.ndarray]]:
    """Gradients of a rank's microbatches."""
    rng = np.random.default_rng(rank)
    return [{k: rng.normal(size=shape).astype(np.float32) for k, shape in SIZES.items()} for _ in range(MICROBATCHES)]


class Linear(torch.nn.Module):
    """The gradient of ``sum(w * part)`` is exactly `part`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict({k: torch.zeros(shape) for k, shape in SIZES.items()})

    def forward(self, part: dict[str, Any]) -> torch.Tensor:
        return sum((self.weights[k] * x).sum() for k, x in part.items())


def main(rank: int, ranks: int, store: str, result: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = torch.nn.parallel.DistributedDataParallel(Linear())
    *before, last = [{k: torch.from_numpy(x) for k, x in part.items()} for part in parts(rank)]
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        model.zero_grad()
        with model.no_sync():
            for part in before:
                model(part).backward()
        model(last).backward()
    if rank == 0:
        torch.save({k: p.grad for k, p in model.module.weights.items()}, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
