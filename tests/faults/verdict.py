"""Checks a run by the logs of its processes: every microbatch counted once, the right bits, no wasted work."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcombine.resilience.faults import KINDS as COLUMNS
from tests.faults.bad_replicas import KINDS
from tests.faults.training import MICROBATCHES, WINDOWS, Unbroken

Entries = list[dict[str, Any]]


@dataclass
class Outcome:
    """Findings on one run.

    Attributes:
      again: number of recomputed microbatches; ``wasted`` describes the ones without a fault as their cause.
      bad: fault and policy of each replica that computed wrong values.
    """

    seconds: float = 0.0
    starts: int = 0
    again: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    lost: list[str] = field(default_factory=list[str])
    doubled: list[str] = field(default_factory=list[str])
    wasted: list[str] = field(default_factory=list[str])
    differs: list[str] = field(default_factory=list[str])
    late: list[str] = field(default_factory=list[str])

    @property
    def said(self) -> list[str]:
        return [*self.lost, *self.doubled, *self.differs, *self.wasted, *self.late]

    @property
    def is_good(self) -> bool:
        return not self.said


def examine(
    folder: Path, unbroken: Callable[[frozenset[int]], Unbroken], outcome: Outcome, policy: str, goes_on: bool
) -> None:
    """Compares the logs of the processes with the expected microbatches and bits.

    Args:
      folder: directory of the run.
      unbroken: returns the run without faults in which the policy skips these windows.
      outcome: receives the findings.
      policy: policy for bad replicas.
      goes_on: whether processes continue without lost ones.
    """
    logs = {
        file.stem.removeprefix("log-"): [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("log-*"))
    }
    entries = [entry for log in logs.values() for entry in log]
    outcome.bad += [(entry["kind"], policy) for entry in entries if "struck" in entry]
    skipped = frozenset(entry["skipped"] for entry in entries if "skipped" in entry)
    expected = unbroken(skipped)
    computed = Counter(tuple(entry["computed"]) for entry in entries if "computed" in entry)
    applied = [entry for entry in entries if "applied" in entry]
    find = _refused(logs) if policy == "ledger" else _bad_replicas(logs, policy, skipped)
    differs = [*find, *_recovered(entries, expected), *_updates(logs, expected)]
    for entry in applied:
        window = entry["applied"]
        outcome.lost += [f"{window}.{number}: not in the window" for number in entry["missing"]]
        outcome.doubled += [f"{window}.{number}: twice in the window" for number in entry["doubled"]]
    for window in range(WINDOWS):
        found = {entry["bits"] for entry in applied if entry["applied"] == window}
        if found - {expected.digest(window)}:
            differs.append(f"window {window}: other gradients than those of the unbroken run")
        for number in range(MICROBATCHES):
            if found and not computed[window, number]:
                outcome.lost.append(f"{window}.{number}: never computed, so another window's was counted")
    outcome.differs += sorted(differs, key=lambda text: text[: len("window 0")])  # causes before consequences
    outcome.again = sum(computed.values()) - len(computed)
    ended = {name: not (folder / f"result-{name}").exists() for name in logs}
    allowed = Counter(x for name, log in logs.items() for x in _cost(log, ended[name], goes_on))
    for file in folder.glob("cut-*"):
        allowed.update(tuple(x) for x in json.loads(file.read_text()))
    for (window, number), times in sorted(computed.items()):
        if (excess := times - 1 - allowed[window, number]) > 0:
            outcome.wasted.append(f"{window}.{number}: computed again {excess} times more than a fault accounts for")
    for file in sorted(folder.glob("refused-*")):
        outcome.differs.append(f"{file.name}: {file.read_text()}")
    results = {file.name: file.read_text() for file in sorted(folder.glob("result-*"))}
    outcome.differs += [f"{name}: other parameters" for name, bits in results.items() if bits != expected.parameters]
    if not results and outcome.is_good:
        outcome.late.append("no process has ended well")
    if not outcome.is_good and (keep := os.environ.get("FAULTS_KEEP")):
        shutil.copytree(folder, Path(keep) / folder.name)


def _cost(log: Entries, was_ended: bool, goes_on: bool) -> list[tuple[int, int]]:
    """The microbatches that may be recomputed because of the events of this process.

    =====================  =============================================================================
    event                  microbatches that may be recomputed
    =====================  =============================================================================
    a process is ended     the one in progress, of each process that a restart ends
    the disk was full      those computed since, up to a save that holds them
    others go on           those in its window: the others do not read its file
    a replica is dropped   those in its window
    a window is refused    those in its window: two parts share a microbatch, and one part is skipped
    a file is damaged      those in the part; for a beginning, those in the parts that need it (`damage`)
    =====================  =============================================================================
    """
    unsaved, held, is_full = list[tuple[int, int]](), set[tuple[int, int]](), False
    lost = [(name, entry) for entry in log for name in ("dropped", "refused") if name in entry]
    dropped = [(entry[name], number) for name, entry in lost for number in entry["numbers"]]
    for entry in log if was_ended else ():
        if "computed" in entry:
            window, number = entry["computed"]
            unsaved.append((window, number))
            held = {x for x in held if x[0] == window} | {(window, number)}
        elif "recovered" in entry:
            held |= {(entry["recovered"], number) for number in entry["numbers"]}
        elif "saved" in entry:
            unsaved = [(w, n) for w, n in unsaved if w != entry["saved"] or n not in entry["numbers"]]
            is_full = is_full and bool(unsaved)
        elif "unsaved" in entry:
            is_full = True
    if goes_on:
        return dropped + sorted({*held, *unsaved})
    return dropped + (unsaved if is_full else unsaved[-1:])


def _recovered(entries: Entries, expected: Unbroken) -> Iterable[str]:
    """Reports parts on the disk whose gradients are not those of their window."""
    seen, saving = set[str](), {entry["state"] for entry in entries if "saving" in entry}
    for entry in entries:
        if "recovered" not in entry or not entry["numbers"]:
            continue
        window, numbers, found = entry["recovered"], entry["numbers"], entry["bits"]
        if found == expected.digest(window, numbers):
            if saving and entry["state"] not in saving:
                seen.add(f"window {window}: the part of {entry['holder']} on the disk is none that a process has saved")
            continue
        of = [w for w in range(WINDOWS) if found == expected.digest(w, numbers)]
        why = f"those of window {of[0]}, saved after its update" if of else "others"
        seen.add(
            f"window {window}: expected its gradients in the part of {entry['holder']} on the disk, received {why}"
        )
    return sorted(seen)


def _updates(logs: dict[str, Entries], expected: Unbroken) -> Iterable[str]:
    """Reports windows that only some of the processes skipped."""
    for window, update in enumerate(expected.updates):
        decided = {"applied": window, "bits": expected.digest(window), "update": not update}
        wrong = [name for name, log in logs.items() if any(decided.items() <= entry.items() for entry in log)]
        if wrong:
            verb, instead = ("applied", "left out") if update else ("left out", "applied")
            processes = ", ".join(wrong)
            yield f"window {window}: {verb} in the unbroken run, {instead} by {processes}: the skip was not agreed on"


def _refused(logs: dict[str, Entries]) -> Iterable[str]:
    """Reports microbatches that two replicas counted and the merged ledger did not name."""
    for generation in sorted({name.split("-")[0] for name in logs}):
        heard = {name: log for name, log in logs.items() if name.split("-")[0] == generation}
        struck = [(entry["struck"], entry["number"]) for log in heard.values() for entry in log if "struck" in entry]
        told = [f"each of {MICROBATCHES} microbatches once, received several of {number}" for _, number in struck]
        for name, log in heard.items():
            refused = [
                (entry["refused"], entry["told"].partition("expected ")[2]) for entry in log if "refused" in entry
            ]
            if refused != [(window, words) for (window, _), words in zip(struck, told, strict=True)]:
                yield f"start {generation}: {struck or 'none'} counted twice, and {name} refused {refused or 'none'}"


def _bad_replicas(logs: dict[str, Entries], policy: str, skipped: Collection[int]) -> Iterable[str]:
    """Reports bad replicas that were missed, good ones that were accused, and findings that differ by replica."""
    struck = [
        (name, entry["struck"], entry["kind"]) for name, log in logs.items() for entry in log if "struck" in entry
    ]
    found = {name: [entry for entry in log if "found" in entry] for name, log in logs.items()}
    for generation in sorted({name.split("-")[0] for name in logs}):
        heard = [found[name] for name in logs if name.split("-")[0] == generation]
        if any(one != heard[0] for one in heard):
            yield f"start {generation}: replicas have found other faults than others, or told others of them"
        bad = [one for one in struck if one[0].split("-")[0] == generation]
        if len(heard[0]) != len(bad):
            yield f"start {generation}: {len(bad)} bad replicas, {len(heard[0])} times found"
            continue
        for (name, window, kind), entry in zip(bad, heard[0], strict=True):
            rank, column, table = int(name.split("-")[2]), COLUMNS.index(KINDS[kind]), entry["table"]
            rows = {i for i, row in enumerate(table) if row[column]}
            others = {i for i, row in enumerate(table) if any(row) and i not in rows}
            # Of two that differ, neither is known to be right; a doubled microbatch involves two, and a stale one may.
            count = 2 if kind == "doubled" or (kind in ("shape", "flipped") and len(table) == 2) else 1
            told = f"replica {rank}: " in entry["told"] and entry["policy"] == policy
            if not told or rank not in rows or len(rows) != count or (others and kind != "stale"):
                yield f"window {window}: replica {rank} was {kind}, and this was found: {entry}"
    if (expected := {window for _, window, _ in struck} if policy == "skip" else set[int]()) != set(skipped):
        yield f"windows {sorted(skipped)}: left out by the policy, instead of {sorted(expected)}"
