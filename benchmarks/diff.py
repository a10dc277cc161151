"""Cost of `gradcombine diff` for large dumps: its time relative to reading both files, and its peak memory.

    python benchmarks/diff.py [--gigabytes 4] [--directory DIR] [--json FILE]
    python benchmarks/diff.py --growth

Writes two dumps of a model with leaves of 256 MB, of which one leaf differs. Each command runs in a new process;
reading is the time to read both files in chunks of the same size, right afterwards, from the same cache. ``--growth``
shows instead how the CPU time of a diff grows with the number of small leaves: if it is linear, ten times the leaves
take at most ten times as long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

LEAF = 1 << 26
"""Elements per leaf: 256 MB of float32."""

DIFF = "import sys; from gradcombine.verify.main import main; sys.argv = ['gradcombine', 'diff', *sys.argv[1:]]; main()"
READ = """
import sys
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(1 << 24)
        while file.readinto(buffer):
            pass
"""


def write(path: Path, leaves: int, changed: bool, kind: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"layer_{i}": rng.standard_normal(LEAF, np.float32) for i in range(leaves)}
    if changed:
        arrays["layer_0"] *= np.float32(1 + 1e-6)
    if kind == "npz":
        np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    else:
        save_file(arrays, path)


def run(code: str, paths: list[Path]) -> tuple[float, float]:
    """Seconds and peak memory in MB of a process."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, paths)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1)
    return time.perf_counter() - begun, usage.ru_maxrss / 1024


def measure(directory: Path, kind: str, leaves: int) -> dict[str, Any]:
    paths = [directory / f"{side}.{kind}" for side in "ab"]
    # A process starts with its parent's peak memory, so this one stays small.
    with ProcessPoolExecutor(1, get_context("spawn")) as writer:
        for path in paths:
            writer.submit(write, path, leaves, path.name.startswith("b"), kind).result()
    found = [(run(DIFF, paths), run(READ, paths)) for _ in range(2)]
    (seconds, peak), (reading, _) = min(found)
    size = sum(path.stat().st_size for path in paths)
    for path in paths:
        path.unlink()
    return {
        "format": kind,
        "GB of both": size / 1e9,
        "GB/s": size / 1e9 / seconds,
        "time over reading": seconds / reading,
        "peak, MB": peak,
    }


def processor_time(directory: Path, leaves: int, renamed: bool) -> float:
    """CPU seconds of a diff of equally shaped vectors, of which one differs, or all are renamed."""
    paths = [directory / "a.npz", directory / "b.npz"]
    values = np.random.default_rng(0).standard_normal((leaves, 8)).astype(np.float32)
    np.savez(paths[0], **{f"a{i}": x for i, x in enumerate(values)})  # pyright: ignore[reportArgumentType]
    values[0] *= 2
    name = "b" if renamed else "a"
    np.savez(paths[1], **{f"{name}{i}": x for i, x in enumerate(values)})  # pyright: ignore[reportArgumentType]
    process = subprocess.Popen([sys.executable, "-c", DIFF, *map(str, paths)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1)
    return usage.ru_utime + usage.ru_stime


def show_growth(directory: Path) -> None:
    table = Table("leaves", "over a tenth of them", "over one leaf")
    for renamed, counts in ((False, (1_000, 10_000)), (True, (12, 120))):
        one, few, many = (processor_time(directory, leaves, renamed) for leaves in (1, *counts))
        label = f"{counts[1]}, renamed" if renamed else str(counts[1])
        table.add_row(label, f"{many / few:.1f}", f"{many / one:.1f}")
    Console().print(table)


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of each dump.")] = 4,
    directory: Annotated[Path | None, typer.Option(help="Directory for the dumps.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    growth: Annotated[bool, typer.Option("--growth", help="Compare many small leaves instead.")] = False,
) -> None:
    """Prints the cost of comparing two dumps."""
    if growth:
        with tempfile.TemporaryDirectory(dir=directory) as place:
            show_growth(Path(place))
        return
    leaves = max(1, round(gigabytes * 1e9 / (4 * LEAF)))
    with tempfile.TemporaryDirectory(dir=directory) as place:
        rows = [measure(Path(place), kind, leaves) for kind in ("npz", "safetensors")]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(x if isinstance(x, str) else f"{x:.2f}" for x in row.values()))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
