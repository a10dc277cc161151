"""``python -m tests.fuzz.guided``: bytes that reach new lines of the readers of files that are parsed here, in Python.

Files grow from a whole one, guided by what of the library they reach (atheris, a libFuzzer for Python, which is to be
installed beside the project: ``nox -s guided`` does). Exit status: 0 if each was read, or refused as it has to be.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

READERS = (
    *("dump .npz", "dump .npz, compressed", "dump .safetensors", "dump .index.json"),
    *("state .npz", "state .safetensors", "trace", "flight log", "rules", "baseline", "target"),
)
"""Of `tests.fuzz.files`; of the others' bytes libraries of C or C++ make arrays, of which coverage sees nothing."""


class DefectError(Exception):
    """Says what a file did."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="readers in which this pattern is found")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        _guide(options.reader, options.seconds, options.seed)
    place: Any = import_module("tests.fuzz.campaign").place  # not where the library is still to be instrumented
    failed = False
    for name in (name for name in READERS if re.search(options.only, name)):
        command = [sys.executable, "-m", "tests.fuzz.guided", "--reader", name]
        command += ["--seconds", str(options.seconds), "--seed", str(options.seed)]
        with place() as where:
            run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, **where)
        done = re.search(r"Done (\d+) runs", run.stderr)
        reached = re.findall(r"cov: (\d+)", run.stderr)
        if run.returncode or done is None:
            failed = True
            print(f"{name:24}status {run.returncode}\n{run.stderr[-3000:]}", flush=True)
        else:
            print(
                f"{name:24}{int(done[1]):,} files, {reached[0]} places reached at first, {reached[-1]} at last",
                flush=True,
            )
    return int(failed)


def _guide(name: str, seconds: int, seed: int) -> None:
    """Ends this process: with status 0, or with that of libFuzzer for a file that did what it must not do."""
    atheris: Any = import_module("atheris")
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with atheris.instrument_imports(include=["gradcombine"]):
        files: Any = import_module("tests.fuzz.files")
    guard: Any = import_module("tests.fuzz.guard")
    reader = files.readers()[name]
    content, sealed = reader.inner or (reader.content, bytes)
    path = files.FOLDER / reader.name

    def run(data: bytes) -> None:
        path.write_bytes(sealed(data))
        kind, what = guard.happened(lambda: reader.read(path), reader.allowed)
        if kind == "defect":
            raise DefectError(what)

    corpus = Path(tempfile.mkdtemp())
    (corpus / "whole").write_bytes(content)
    with guard.bounded(guard.COMPILING):
        limits = f"-max_total_time={seconds}", f"-seed={seed}", f"-artifact_prefix={corpus}/"
        atheris.Setup([sys.argv[0], *limits, str(corpus)], run)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
