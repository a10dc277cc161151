"""Reports of audits: as sections, as JSON, and compared with a baseline."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradcombine.audit.auditing import Audit
from gradcombine.audit.rules import RULES, Finding
from gradcombine.audit.subject import short, size_text
from gradcombine.audit.timeline import timeline
from gradcombine.errors import invalid, operation
from gradcombine.reporting.earlier import read_earlier
from gradcombine.reporting.sections import Cells, Section

VERSION = 1
"""Version of the JSON format."""

STATUS = {True: 0, False: 1, None: 2}
"""Exit status by whether the audit passes; None: undecided. 2 also means unreadable input, 3 out of memory."""

COMPARED = ("moved", "sent", "flops", "temporary")
"""Totals that must not exceed those of the baseline."""

NO_COST = (0.0,) * 5
"""Costs for a defect without findings."""


def sections(report: Audit) -> list[Section]:
    """The sections of a terminal report; the findings come last, next to the prompt."""
    return _sections(report, _totals, _bound, _collectives, _branches, _unread, _findings)


def _sections(report: Audit, *parts: Callable[[Audit], Section | None]) -> list[Section]:
    return [section for part in parts if (section := part(report)) is not None]


def page_sections(
    reports: Sequence[Audit], fail_on: frozenset[str], worse: Sequence[str] | None = None
) -> list[Section]:
    """The sections of a page: the result of `worse`, a table of all programs, and details of those with findings."""
    parts, shown = list[Section](), [one for one in reports if one.findings or len(reports) == 1]
    if worse:
        parts.append(Section("Worse than before", columns=("what",), rows=[Cells((x,), False) for x in worse]))
    if len(reports) > 1:
        answers = [(one, verdict(one, fail_on).removeprefix(f"{one.name}: ")) for one in reports]
        rows = [Cells((one.name, answer), passes(one, fail_on) is not False) for one, answer in answers]
        parts.append(Section("Programs", columns=("program", ""), rows=rows))
    for one in shown:
        parts += _sections(one, _bound, _timeline, _findings, _collectives, _branches, _totals, _unread)
    names = {x.name for one in shown for x in one.findings}
    return parts + [Section(name, anchor=name, text=text) for name, text in explanations().items() if name in names]


def explanations() -> dict[str, str]:
    """Explanations of the findings in Markdown, by name."""
    _, *parts = (Path(__file__).parent / "findings.md").read_text(encoding="utf-8").split("\n## ")
    return {name: text.strip() for name, _, text in (part.partition("\n") for part in parts)}


def _timeline(report: Audit) -> Section:
    title, drawing = f"One call of {report.name}", timeline(report)
    if drawing is not None:
        return Section(title, charts=[drawing])
    of_graph = "times cannot be read from a graph"
    return Section(title, of_graph if report.flops is None else "nothing is computed, moved or exchanged")


def _collectives(report: Audit) -> Section:
    rows = [
        Cells(
            (
                f"{i}. {x.kind}",
                size_text(x.size) if x.exact else "unknown",
                f"{len(x.groups)} of {x.members}" if x.groups else "unknown",
                " x ".join("?" if loop.trips is None else f"{loop.trips:,}" for loop in x.loops),
                f"{x.times:,}",
                short(report.program.source(x.x)),
            )
        )
        for i, x in sorted(enumerate(report.exchanges, 1), key=lambda at: -at[1].times * at[1].sent())
    ]
    columns = ("collective", "size", "groups", "in loops of", "times", "source")
    return Section("Collectives", "" if rows else "none", columns=columns if rows else (), rows=rows)


def _unread(report: Audit) -> Section | None:
    return Section("Not read", "; ".join(report.unread)) if report.unread else None


def _findings(report: Audit) -> Section | None:
    rows = [_finding(report, *pair) for pair in _merged(report.findings)]
    columns = "finding", "times", "cost", "at the bound"
    return Section("Findings", columns=columns, rows=rows, whole=True) if rows else None


def passes(report: Audit, fail_on: frozenset[str]) -> bool | None:
    """Whether a program has none of the defects to fail on; None if they may be in parts that could not be read."""
    if any(x.name in fail_on for x in report.findings):
        return False
    return None if fail_on.intersection(report.undecided) else True


def passes_of_all(reports: Iterable[Audit], fail_on: frozenset[str]) -> bool | None:
    """The worst answer of `passes`."""
    answers = {passes(one, fail_on) for one in reports}
    return False if False in answers else None if None in answers else True


def verdict(report: Audit, fail_on: frozenset[str]) -> str:
    """A one-line summary of an audit."""
    undecided = [name for name in report.undecided if name in fail_on]
    unknown = f"; cannot tell of {', '.join(undecided)}" if undecided else ""
    total, judged = len(report.findings), len(report.judged)
    if not total:
        of_all = "" if judged == len(RULES) else f" of {len(RULES)}"
        answer = "nothing found" if undecided else "clean"
        return f"{report.name}: {answer}; {judged}{of_all} defects looked for{unknown}"
    counts, failing = Counter(x.name for x in report.findings), sum(x.name in fail_on for x in report.findings)
    listed = ", ".join(f"{n} {name}" if n > 1 else name for name, n in counts.items())
    return f"{report.name}: {total} finding{'s' * (total > 1)}, {failing} to fail on: {listed}{unknown}"


def verdict_of_all(reports: Sequence[Audit], fail_on: frozenset[str]) -> str:
    """A one-line summary of several audits."""
    if len(reports) == 1:
        return verdict(reports[0], fail_on)
    answers = Counter(passes(one, fail_on) for one in reports)
    unknown = f", {answers[None]} that cannot be decided" if answers[None] else ""
    return f"{len(reports)} programs, {answers[False]} with findings to fail on{unknown}"


@operation("audit")
def names(text: str | None) -> frozenset[str]:
    """Parses the comma-separated names of ``--fail-on``; None means all of them.

    Raises:
      GradCombineError: for an unknown name.
    """
    chosen = frozenset(RULES) if text is None else frozenset(x.strip() for x in text.split(",") if x.strip())
    if unknown := sorted(chosen - set(RULES)):
        raise invalid(f"names of findings: {', '.join(RULES)}", ", ".join(unknown))
    return chosen


def as_json(reports: Sequence[Audit]) -> dict[str, Any]:
    """The full reports as JSON, with sizes in bytes and times in seconds."""
    return {"version": VERSION, "programs": list(map(program_as_json, reports))}


class Measured(NamedTuple):
    """Figures of a program that are compared with a baseline.

    Attributes:
      totals: by the names in `COMPARED`; None if unknown.
      costs: sums over the findings of each name: their number, times, bytes moved, bytes sent and flops.
      undecided: names of the defects that may be in parts that were not read.
    """

    totals: dict[str, float | None]
    costs: dict[str, tuple[float, ...]]
    undecided: frozenset[str]


Baseline = dict[tuple[str, str, int], Measured]
"""Figures by a program's name, its target, and its index among the programs with both."""


@operation("audit")
def read_baseline(path: Path) -> Baseline:
    """Reads an earlier report that ``--json`` wrote.

    Raises:
      GradCombineError: for a file that cannot be read, or is of another form or version.
    """
    return read_earlier(path, VERSION, lambda content: _measured(content["programs"]))


@operation("audit")
def worse(reports: Sequence[Audit], baseline: Baseline, fail_on: frozenset[str]) -> list[str]:
    """Lists regressions since an earlier report of the same programs, one per line.

    Args:
      reports: the current reports.
      baseline: the result of `read_baseline`.
      fail_on: names of findings that count.

    Raises:
      GradCombineError: for a program that the baseline lacks.
    """
    lines = list[str]()
    for (name, target, index), now in _measured(map(program_as_json, reports)).items():
        before = baseline.get((name, target, index))
        if before is None:
            known = ", ".join(dict.fromkeys(f"{name} on {target}" for name, target, _ in baseline)) or "no program"
            raise invalid(f"a baseline of {name} on {target}", known)
        lines += [f"{name}: {line}" for line in _regressions(now, before, fail_on)]
    return lines


def program_as_json(report: Audit) -> dict[str, Any]:
    """The report of one program as JSON."""
    memory = report.memory
    return {
        "name": report.name,
        "target": report.target.name,
        "devices": report.program.devices,
        "moved": None if report.turns is None or report.beside is None else report.turns + report.beside,
        "moved_in_loops": report.turns,
        "sent": report.sent,
        "flops": None if report.flops is None else sum(report.flops.values()),
        "temporary": None if memory is None else memory.temporary,
        "memory": None if memory is None else memory._asdict() | {"peak": memory.peak},
        "bounds": {name: bound._asdict() for name, bound in report.bounds.items()},
        "collectives": [
            {
                "kind": x.kind,
                "operand": x.operand,
                "result": x.result,
                "members": x.members,
                "exact": x.exact,
                "groups": len(x.groups),
                "trips": [loop.trips for loop in x.loops],
                "times": x.times,
                "sent": x.times * x.sent(),
                "operation": x.x.op_name,
                "source": report.program.source(x.x),
            }
            for x in report.exchanges
        ],
        "looked_for": report.judged,
        "undecided": report.undecided,
        "unread": report.unread,
        "findings": [x._asdict() | {"seconds": report.seconds(x)} for x in report.findings],
    }


def _measured(programs: Iterable[Mapping[str, Any]]) -> Baseline:
    measured, seen = Baseline(), Counter[tuple[str, str]]()
    for program in programs:
        costs = dict[str, tuple[float, ...]]()
        for x in program["findings"]:
            cost = 1.0, *(_finite(x[name]) for name in ("times", "moved", "sent", "flops"))
            costs[x["name"]] = tuple(map(sum, zip(costs.get(x["name"], NO_COST), cost, strict=True)))
        totals = {name: None if program[name] is None else _finite(program[name]) for name in COMPARED}
        key = program["name"], program["target"]
        measured[*key, seen[key]] = Measured(totals, costs, frozenset(map(str, program.get("undecided", ()))))
        seen[key] += 1
    return measured


def _finite(number: float) -> float:
    # With NaN or infinity in the baseline, no cost would count as worse.
    if not math.isfinite(cost := float(number)):
        raise ValueError(f"{number!r} is no cost")
    return cost


def _regressions(now: Measured, before: Measured, fail_on: frozenset[str]) -> Iterator[str]:
    for name, total in now.totals.items():
        earlier = before.totals[name]
        if total is not None and earlier is not None and total > earlier:
            yield f"{name} {earlier:,.0f} -> {total:,.0f}"
    for name, cost in sorted(now.costs.items()):
        earlier = before.costs.get(name, NO_COST)
        if name in fail_on and any(b > a for a, b in zip(earlier, cost, strict=True)):
            yield f"{name}, {_words(earlier)} -> {_words(cost)}"
    if lost := sorted(fail_on & now.undecided - before.undecided):
        yield f"no longer decided: {', '.join(lost)}"


def _words(costs: tuple[float, ...]) -> str:
    findings, times, moved, sent, flops = costs
    return f"{findings:.0f} findings, {times:,.0f} times, {size_text(moved + sent)}, {flops:.3g} flops"


def _totals(report: Audit) -> Section:
    devices = report.program.devices
    title = f"{report.name} on {report.target.name}, {devices} device{'s' * (devices > 1)}"
    sent = [sum(x.times * x.sent() for x in report.exchanges if bool(x.loops) is looped) for looped in (True, False)]
    rows = [Cells(("bytes sent", *map(size_text, sent)))]
    if report.turns is not None and report.beside is not None:
        rows.insert(0, Cells(("bytes moved", size_text(report.turns), size_text(report.beside))))
    if (memory := report.memory) is not None:
        sizes = memory._asdict() | {"peak": memory.peak}
        rows += [Cells((name, "", size_text(size))) for name, size in sizes.items()]
    return Section(title, columns=("", "in loops", "outside"), rows=rows)


def _bound(report: Audit) -> Section:
    title = "Lower bound of a call"
    known = {name: bound.seconds for name, bound in report.bounds.items() if bound.seconds is not None}
    if not known:
        return Section(title, f"none: no rates are published for {report.target.name}")
    name = max(known, key=lambda x: known[x])
    omitted = "" if len(known) == len(report.bounds) else "; unpublished rates are left out"
    note = f"{known[name]:.3g} s, by {name}, if all overlap; {sum(known.values()):.3g} s without overlap{omitted}"
    rows = [
        Cells((name, "" if bound.seconds is None else f"{bound.seconds:.3g}", bound.arithmetic))
        for name, bound in report.bounds.items()
    ]
    return Section(title, note, columns=("", "seconds", "arithmetic"), rows=rows)


def _branches(report: Audit) -> Section | None:
    rows = [Cells((what, count, short(source))) for what, count, source in report.program.controls()]
    return Section("Loops and branches", columns=("what", "how often", "source"), rows=rows) if rows else None


def _merged(findings: Sequence[Finding]) -> Iterator[tuple[Finding, int]]:
    """Merges findings with equal name, text and source; yields each with the sum of their costs and their number."""
    groups = defaultdict[tuple[str, str, str], list[Finding]](list)
    for x in findings:
        groups[x.name, x.what, x.source].append(x)
    for key, group in groups.items():
        costs = zip(*(x[len(key) :] for x in group), strict=True)
        yield Finding(*key, *map(sum, costs)), len(group)


def _finding(report: Audit, x: Finding, count: int) -> Cells:
    seconds = report.seconds(x)
    parts = [size_text(x.moved + x.sent)] * bool(x.moved or x.sent) + [f"{x.flops:.2g} flops"] * bool(x.flops)
    what = f"{x.name}: " + f"{count} x " * (count > 1) + x.what + f" ({short(x.source)})" * bool(x.source)
    return Cells((what, f"{x.times:,}", " ".join(parts), "" if seconds is None else f"{seconds:.2g} s"), False, x.name)
