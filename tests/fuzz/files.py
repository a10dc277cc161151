"""The readers of files, each with valid files to damage at random: their bytes, or contents within valid checksums."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from typer.main import get_command

import gradcombine as gc
from gradcombine import GradCombineError, reductions, statefile
from gradcombine.audit import audit_file, target
from gradcombine.audit import audit_report as report
from gradcombine.audit.parsing import hlo_parser
from gradcombine.formats import npz, safetensors
from gradcombine.verify import FlightRecorder, first_divergence
from gradcombine.verify.command import app
from gradcombine.verify.diff.comparing import diff
from gradcombine.verify.diff.dumps import open_dump
from gradcombine.verify.diff.rules import read_rules
from gradcombine.verify.record.flight import read_log
from gradcombine.verify.record.flight_diff import as_json, diff_logs, sections, verdict
from tests.fuzz.guard import COMPILING

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz"))
"""Directory of the files."""
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

ARRAYS: dict[str, np.ndarray] = {
    "layer/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layer/turned": np.asarray(np.arange(6.0).reshape(2, 3), order="F"),
    "scalar": np.array(7),
    "empty": np.zeros((0, 3)),
}
LIKE = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(2)}
MEAN = reductions.mean("exact")
ACC = gc.accumulate(MEAN, every=4, order="tree")


class Reader(NamedTuple):
    """A reader and a valid file for it.

    Attributes:
      name: name of the file.
      content: content of a valid file.
      read: reads everything in a file.
      inner: a part to damage separately, and a function from the part to a file with valid checksums.
      allowed: documented errors other than `GradCombineError`.
      factor: multiple of the memory and time bounds; above 1 for readers with threads.
    """

    name: str
    content: bytes
    read: Callable[[Path], Any]
    inner: tuple[bytes, Callable[[bytes], bytes]] | None = None
    allowed: tuple[type[BaseException], ...] = ()
    factor: int = 1


def _bytes_of(write: Callable[[Any], Any]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def _read_dump(path: Path) -> Any:
    dump = open_dump(path)
    whole = {name: entry.whole() for name, entry in dump.items() if not entry.unread}
    str(diff(dump, dump))
    return whole


def _zipped(member: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with this entry."""

    def write(buffer: Any) -> None:
        with zipfile.ZipFile(buffer, "w", method) as archive:
            archive.writestr("x.npy", member)
            archive.writestr("y.npy", _bytes_of(lambda file: np.save(file, ARRAYS["scalar"])))

    return _bytes_of(write)


def _safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + b"\0" * 120


def _tensors() -> bytes:
    arrays = {name: np.ascontiguousarray(x) for name, x in ARRAYS.items()}
    return _bytes_of(lambda file: safetensors.write(file, arrays, {"note": "text"}))


def _state(suffix: str) -> bytes:
    path = FOLDER / f"whole{suffix}"
    state = ACC.init(LIKE)
    for weight in (1, 2.5):
        state = ACC.update({"w": np.float32([[1, 2, 3], [4, 5, 6]]), "b": np.float64([1, 2])}, state, weight)
    statefile.save_replicas(path, MEAN, [state, state])
    return path.read_bytes()


def _header(content: bytes) -> bytes:
    """The header of an .npz state file, without its checksum."""
    with np.load(io.BytesIO(content)) as arrays:
        return arrays["header"].tobytes().partition(b"\n")[2]


def _with_header(content: bytes) -> Callable[[bytes], bytes]:
    with np.load(io.BytesIO(content)) as arrays:
        others = {name: arrays[name] for name in arrays.files if name != "header"}

    def sealed(body: bytes) -> bytes:
        text = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        return _bytes_of(lambda file: npz.write(file, {"header": np.frombuffer(text, np.uint8), **others}))

    return sealed


def _read_state(path: Path) -> Any:
    statefile.inspect(path)
    states = statefile.load_replicas(path, MEAN, LIKE)
    return [ACC.value(state) for state in statefile.resize(MEAN, states, 1)]


def _log() -> bytes:
    path = FOLDER / "whole.log"
    with FlightRecorder(path, LIKE, twins=["b"]) as recorder:
        for step in range(4):
            recorder(step, {replica: gc.digest(LIKE) for replica in range(2)})
    return path.read_bytes()


def _checked(lines: bytes) -> bytes:
    return b"".join(b"%s %08x\n" % (line, zlib.crc32(line)) for line in lines.split(b"\n"))


def _unchecked(log: bytes) -> bytes:
    return b"\n".join(line.rpartition(b" ")[0] for line in log.splitlines())


def _read_log(path: Path) -> Any:
    log, whole = read_log(path), read_log(FOLDER / "whole.log")
    for pair in ((log, whole), (whole, log), (log, log)):
        found = diff_logs(*pair)
        json.dumps([verdict(found), as_json(found)]), sections(found)
    with FlightRecorder(path, LIKE) as recorder:
        recorder(9, gc.digest(LIKE))


def _read_traces(path: Path) -> Any:
    """Compares a run whose second step is the file with an intact run."""
    return str(first_divergence(path.parent, FOLDER / "trace"))


def _hdf5() -> bytes:
    def write(buffer: Any) -> None:
        with h5py.File(buffer, "w") as file:
            for name, x in ARRAYS.items():
                file.create_dataset(name, data=x, compression="gzip" if x.size > 6 else None)
            file["layer/again"] = h5py.SoftLink("/layer/kernel")
            file.create_dataset("text", data="words")

    return _bytes_of(write)


def _checkpoint() -> bytes:
    """The index of a TensorFlow checkpoint; its data file stays next to the damaged ones."""
    import tensorflow as tf

    checkpoint = tf.train.Checkpoint(w=tf.Variable([1.0, 2.0]), text=tf.Variable("words"))
    return Path(f"{checkpoint.write(str(FOLDER / 'x'))}.index").read_bytes()


def _torch() -> dict[str, Reader]:
    """Readers of a PyTorch archive and of the pickle in it, if PyTorch is installed."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    content = _bytes_of(lambda file: torch.save({"model": {"w": torch.ones(2, 3)}, "step": 3}, file))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in members if name.endswith("data.pkl"))

    def sealed(inner: bytes) -> bytes:
        def write(buffer: Any) -> None:
            with zipfile.ZipFile(buffer, "w") as archive:
                for name, member in (members | {pickled: inner}).items():
                    archive.writestr(name, member)

        return _bytes_of(write)

    return {"dump .pt": Reader("x.pt", content, _read_dump, (members[pickled], sealed), factor=COMPILING)}


def _orbax() -> bytes:
    """The metadata of an Orbax checkpoint; its arrays stay next to the damaged ones."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(FOLDER / "orbax", {"w": np.ones(2, np.float32), "n": 3}, force=True)
    return (FOLDER / "orbax" / "_METADATA").read_bytes()


def _command(*arguments: str) -> Callable[[Path], None]:
    """Runs the command with a file; its exit status must be documented, and 2 comes with one line or no decision."""

    def run(path: Path) -> None:
        printed, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(printed), redirect_stderr(errors), pytest.raises(SystemExit) as end:
            COMMAND.main([*arguments, str(path)], "gradcombine")
        lines, status = len(errors.getvalue().splitlines()), end.value.code
        is_refused = status == 2 and "cannot tell" not in " ".join(printed.getvalue().split())
        if status not in (0, 1, 2) or (is_refused and lines != 1):
            raise AssertionError(f"status {status}, {lines} lines")
        if is_refused:
            raise GradCombineError(arguments[0], "a file that is whole", errors.getvalue())

    return run


COMMAND = get_command(app)


RULES = b"""ignore_a = ["optimizer/.*"]
ignore_b = ["step"]

[[rule]]
a = 'layer/(\\w+)'
b = 'layer/\\1'
transpose = [1, 0]
"""
BASELINE = json.dumps(
    {
        "version": report.VERSION,
        "programs": [
            {
                "name": "step",
                "target": "h100:8",
                **dict.fromkeys(report.COMPARED, 1000),
                "findings": [{"name": "copy", "times": 1, "moved": 2.5, "sent": None or 0, "flops": 0}],
            }
        ],
    }
).encode()
HLO = b"""HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0}, f32[4]{0})->f32[4]{0}}

ENTRY %main.4 (p0: f32[4], p1: f32[4]) -> f32[4] {
  %p0 = f32[4]{0} parameter(0)
  %p1 = f32[4]{0} parameter(1)
  ROOT %add.1 = f32[4]{0} add(%p0, %p1), metadata={op_name="jit(step)/add" source_file="a.py" source_line=3}
}
"""


def readers() -> dict[str, Reader]:
    """All readers, by name."""
    (FOLDER / "trace").mkdir(exist_ok=True)
    (FOLDER / "damaged").mkdir(exist_ok=True)
    whole = _bytes_of(lambda file: np.savez(file, **{f"params/{name}": x for name, x in ARRAYS.items()}))
    for folder in ("trace", "damaged"):
        for step in (1, 2):
            (FOLDER / folder / f"step_{step:08}.npz").write_bytes(whole)
    (FOLDER / "a.safetensors").write_bytes(_tensors())
    index = {"metadata": {"total_size": 10}, "weight_map": dict.fromkeys(ARRAYS, "a.safetensors")}
    tensors, state, log = _tensors(), _state(".npz"), _log()
    header = tensors[8 : 8 + int.from_bytes(tensors[:8], "little")]
    member = _bytes_of(lambda file: np.save(file, ARRAYS["layer/kernel"]))
    os_errors: tuple[type[BaseException], ...] = (OSError,)
    whole_file, vector = str(FOLDER / "a.safetensors"), _bytes_of(lambda file: np.savez(file, w=np.float32([1, 2])))
    (FOLDER / "v.npz").write_bytes(vector)
    (FOLDER / "whole.txt").write_bytes(HLO)
    _command("audit", str(FOLDER / "whole.txt"), "--json")(earlier := FOLDER / "earlier.json")
    arrays = _bytes_of(lambda file: np.savez(file, **ARRAYS))
    proto = hlo_parser().hlo_module_from_text(HLO.decode()).as_serialized_hlo_module_proto()
    return {
        "dump .npz": Reader("x.npz", arrays, _read_dump, (member, _zipped)),
        "dump .npz, compressed": Reader(
            "x.npz",
            _bytes_of(lambda file: np.savez_compressed(file, **ARRAYS)),
            _read_dump,
            (member, lambda inner: _zipped(inner, zipfile.ZIP_DEFLATED)),
        ),
        "dump .safetensors": Reader("x.safetensors", tensors, _read_dump, (header, _safetensors)),
        "dump .index.json": Reader("x.index.json", json.dumps(index).encode(), _read_dump),
        "state .npz": Reader("x.npz", state, _read_state, (_header(state), _with_header(state)), allowed=os_errors),
        "state .safetensors": Reader("x.safetensors", _state(".safetensors"), _read_state, None, allowed=os_errors),
        "trace": Reader("damaged/step_00000002.npz", whole, _read_traces, (member, _zipped)),
        "flight log": Reader("x.log", log, _read_log, (_unchecked(log), _checked)),
        "rules": Reader("x.toml", RULES, read_rules),
        "baseline": Reader("x.json", BASELINE, report.read_baseline),
        "target": Reader(
            "x.pbtxt", target.H100.read_bytes(), lambda path: target.find_target(f"{path}:8", compiles=False)
        ),
        "dump .h5": Reader("x.h5", _hdf5(), _read_dump),
        "tf.train checkpoint": Reader("x.index", _checkpoint(), _read_dump),
        "Orbax checkpoint": Reader("orbax/_METADATA", _orbax(), lambda path: _read_dump(path.parent), factor=COMPILING),
        "command diff": Reader("x.npz", arrays, _command("diff", whole_file)),
        "command diff --rules": Reader("x.toml", RULES, _command("diff", whole_file, whole_file, "--rules")),
        "command explain": Reader("x.npz", vector, _command("explain", *[str(FOLDER / "v.npz")] * 2, "--result")),
        "command audit": Reader("x.txt", HLO, _command("audit")),
        "command audit --baseline": Reader(
            "x.json", earlier.read_bytes(), _command("audit", str(FOLDER / "whole.txt"), "--baseline")
        ),
        "HLO text": Reader("x.txt", HLO, audit_file),
        "HLO proto": Reader("x.pb", proto, audit_file),
    } | _torch()


TOKENS = [
    *(b"0", b"-1", b"1e999", b"NaN", b"Infinity", b"null", b"true", b"1.5", b"9" * 5000, b"18446744073709551616"),
    *(b"[" * 5000, b'{"a":' * 3000, b"(" * 5000, b'""', b'"\\ud800"', b"\xff\xfe", b"\0", b"[]", b"{}", b"[[]]"),
    *(b"4294967295", b"2147483648", b"9223372036854775807", b"*", b"\\", b"'", b"(a+)+$", b"\n", b" "),
]


def damaged(r: Random, content: bytes) -> bytes:
    """Damages the content at random."""
    out = bytearray(content)
    for _ in range(r.choice([1, 1, 1, 2, 4])):
        n, action = len(out), r.randrange(10)
        at, length = r.randrange(n + 1), r.choice([1, 2, 4, 8, 16, 64])
        if action == 0:
            del out[at:]
        elif action == 1 and n:
            out[r.randrange(n)] ^= 1 << r.randrange(8)
        elif action == 2:
            out[at : at + length] = r.randbytes(length)
        elif action == 3:
            out[at : at + length] = r.choice([b"\xff", b"\0", b"\x7f"]) * length
        elif action == 4:
            del out[at : at + length]
        elif action == 5:
            out[at:at] = out[(start := r.randrange(n + 1)) : start + length]
        elif action == 6 and n:
            other = r.randrange(n)
            out[at : at + length], out[other : other + length] = out[other : other + length], out[at : at + length]
        elif action == 7:
            out[at:at] = r.choice(TOKENS)
        else:
            found = list(re.finditer(rb"-?\d+(?:\.\d+)?|\"[^\"]*\"|true|null|\w+", out))
            if found:
                token = r.choice(found)
                out[token.start() : token.end()] = r.choice(TOKENS)
    return bytes(out)


def place(r: Random, reader: Reader) -> Path:
    """Creates a damaged file, or something that is no file, at a path for the reader."""
    path = FOLDER / reader.name
    if path.is_symlink() or path.exists():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    special = r.random()
    if special < 0.001:
        path.symlink_to(path)
    elif special < 0.002:
        os.mkfifo(path)
    elif special < 0.003:
        path.mkdir()
    elif special < 0.004:
        path.symlink_to("/dev/zero")
    elif special < 0.006:
        path.write_bytes(b"")
    elif special < 0.02:
        path.write_bytes(reader.content)
    elif reader.inner is not None and r.random() < 0.5:
        inner, sealed = reader.inner
        path.write_bytes(sealed(damaged(r, inner)))
    else:
        path.write_bytes(damaged(r, reader.content))
    return path
