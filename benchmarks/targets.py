"""XLA's output for full windows on GPUs and TPUs that are not attached: the table of docs/performance.md.

    python benchmarks/targets.py [MACHINE]

MACHINE is a part of a machine's name, to print only its rows. Needs the extra `targets`. Nothing is executed or timed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from tests.targets.programs import MACHINES, MESH_WIDTH, WIDTH, Placed, Row, by_hand, on_mesh, ours, row_of, scan

COLUMNS = (
    "machine",
    "program",
    "exchanges in a microbatch",
    "once a window",
    "rows",
    "MiB in a microbatch",
    "MiB beside",
    "MiB temporary",
)
PLACES = {
    "over the data axis": Placed(),
    "the same, explicit axes": Placed(AxisType.Explicit),
    "the same, parameters split over data": Placed(params=P("data")),
    "without over": Placed(over=gc.LOCAL),
    "without over, explicit axes": Placed(AxisType.Explicit, over=gc.LOCAL),
}


def rows(chosen: str) -> Iterator[tuple[str, str, Row]]:
    """Machine, program and its compiled costs, for machines whose names contain ``chosen``."""
    scans = product((jnp.float32, jnp.bfloat16), (False, True), {"by hand": by_hand, "value_and_grad": ours}.items())
    for dtype, weighted, (name, of) in scans if chosen in (alone := "1 H100") else ():
        title = f"{name}, {jnp.dtype(dtype).name}{', weighted' if weighted else ''}"
        yield alone, title, row_of(scan(of(weighted), dtype, weighted), WIDTH)
    for machine, made in MACHINES.items():
        for title, placed in PLACES.items() if chosen in machine else ():
            yield machine, f"train_step, {title}", row_of(on_mesh(made, placed), MESH_WIDTH)


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def main(chosen: str) -> None:
    """Prints each row of the table as soon as it is compiled."""
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for machine, title, row in rows(chosen):
        cells = machine, title, listed(row.inside), listed(row.outside), row.rows, row.turn, row.rest, row.temporary
        print(f"| {' | '.join('' if cell is None else str(cell) for cell in cells)} |", flush=True)


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("standard"):
        main(sys.argv[1] if len(sys.argv) > 1 else "")
