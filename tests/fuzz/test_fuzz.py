"""A small part of the fuzzing campaign, and regressions that it found."""

from __future__ import annotations

import faulthandler
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine.audit import audit_report as report
from gradcombine.audit import target
from gradcombine.verify.diff.rules import read_rules
from gradcombine.verify.record.flight import read_log
from tests.fuzz import campaign, files, guard


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.full
def test_a_few_files_of_each_reader() -> None:
    slow, defects = ("HLO", "command", "Orbax"), dict[str, Any]()
    jobs = list(campaign.jobs(24))  # starts frameworks, which need more memory than a file may take
    with guard.bounded():
        for job in jobs:
            if not any(word in job.name for word in slow):
                outcomes = (job.run(Random(f"0:{job.name}:{i}")) for i in range(job.inputs))
                if found := Counter(what for kind, what in outcomes if kind == "defect"):
                    defects[job.name] = found
    assert defects == {}


def test_a_defect_is_found() -> None:
    """Detects each type of defect: a wrong error, an endless loop, too much memory."""

    def wrong() -> None:
        raise KeyError

    def endless() -> None:
        while True:
            pass

    with guard.bounded():
        assert guard.happened(wrong)[0] == "defect"
        assert guard.happened(endless, factor=0.02)[0] == "defect"
        assert guard.happened(lambda: np.zeros(1 << 31, np.uint8).sum(), (OSError,))[0] == "defect"
        assert guard.happened(lambda: None) == ("accepted", "")
        assert guard.happened(lambda: gc.add_n(3)) == ("refused", "")


def test_a_process_that_is_full_asks_for_another_one_and_loses_no_defect(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = list[str]()
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: timers.append("begun"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: timers.append("ended"))
    job, full = campaign.Job("x", 100, lambda r: ("defect", "bad")), iter([False, True])
    with pytest.raises(SystemExit, match=str(campaign.AGAIN)):
        campaign._work(job, 0, 0, 60, lambda: next(full))
    *printed, _ = json.loads(capfd.readouterr().out.splitlines()[-1].removeprefix(":: "))
    assert printed == ["at", "x", 64, {"defect": 64}, {"bad": [64, [0, 1, 2]]}]
    assert timers == ["begun", "ended"]  # or it would end the process that runs other tests


NO_REGULAR_FILES = {
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "none": lambda _: None,
}


@pytest.mark.parametrize("make", NO_REGULAR_FILES.values(), ids=NO_REGULAR_FILES)
@pytest.mark.parametrize("read", [read_log, read_rules, report.read_baseline])
def test_only_regular_files_are_read(read: Any, make: Any, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(gc.GradCombineError, match=r"which (is not a regular file|does not exist)"):
        read(tmp_path / "x")


TEXTS = {
    "a deep baseline": (report.read_baseline, "[" * 100_000),
    "a baseline of NaN": (report.read_baseline, files.BASELINE.decode().replace("2.5", "NaN")),
    "a baseline of infinity": (report.read_baseline, files.BASELINE.decode().replace("1000", "1e999")),
    "names twice": (report.read_baseline, files.BASELINE.decode().replace('"name"', '"target"', 1)),
    "deep rules": (read_rules, "ignore_a = " + "[" * 100_000),
    "axes of lists": (read_rules, "[[rule]]\na = 'x'\nb = 'y'\ntranspose = [[0]]"),
    "axes of bools": (read_rules, "[[rule]]\na = 'x'\nb = 'y'\ntranspose = [true, 0]"),
    "rules of 5000 digits": (read_rules, "ignore_a = " + "9" * 5000),
    "memory without an end": (
        lambda path: target.find_target(f"{path}:8", compiles=False),
        target.H100.read_text().replace("84942979072", "9" * 400),
    ),
}
ROWS = {"no number": b"x 0 ", "5000 digits": b"9" * 5000 + b" 0 ", "two parts": b"0 ", "a negative step": b"-1 0 "}
HEADERS = {
    "leaves of numbers": b'{"gradcombine": "digests", "version": 1, "leaves": 3, "twins": []}',
    "leaves without a shape": b'{"gradcombine": "digests", "version": 1, "leaves": [["w", "float32"]], "twins": []}',
    "no leaves": b'{"gradcombine": "digests", "version": 1}',
    "a deep one": b'{"gradcombine": "digests", "version": ' + b"[" * 100_000,
}


@pytest.mark.parametrize(("read", "text"), TEXTS.values(), ids=TEXTS)
def test_texts_that_are_refused(read: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(gc.GradCombineError):
        read(tmp_path / "x")


@pytest.mark.parametrize("line", [*ROWS.values(), *HEADERS.values()], ids=[*ROWS, *HEADERS])
def test_lines_of_a_log_that_their_checksums_vouch_for(line: bytes, tmp_path: Path) -> None:
    header = files._unchecked(files._log()).split(b"\n")[0]
    lines = [line] if line in HEADERS.values() else [header, line + b"0" * 64]
    (tmp_path / "x").write_bytes(files._checked(b"\n".join(lines)))
    with pytest.raises(gc.GradCombineError):
        read_log(tmp_path / "x")
