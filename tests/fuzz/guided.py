"""``python -m tests.fuzz.guided``: coverage-guided fuzzing of the file readers that are written in Python.

Mutates valid files, guided by the library's coverage, with atheris (libFuzzer for Python), which must be installed as
well; ``nox -s guided`` does. Exit status: 0 if all files were accepted or rejected with the right error.
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
"""Readers of `tests.fuzz.files`; C or C++ libraries, invisible to coverage, parse the files of the others."""


class DefectError(Exception):
    """Describes the defect that a file triggered."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="readers in which this pattern is found")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        _guide(options.reader, options.seconds, options.seed)
    place: Any = import_module("tests.fuzz.campaign").place  # not before the library is instrumented
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
    """Fuzzes, then exits: with status 0, or with that of libFuzzer if a file triggers a defect."""
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
