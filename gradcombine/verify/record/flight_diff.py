"""Two logs of digests against each other: the first step, replica and leaf that part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gradcombine.errors import operation
from gradcombine.formats import unread
from gradcombine.reductions.numbered import ranges
from gradcombine.reporting.sections import Cells, Section
from gradcombine.reporting.words import listed
from gradcombine.verify.diff.dumps import Dump
from gradcombine.verify.diff.mapping import NO_RULES, Rules, match, require_rules
from gradcombine.verify.record.flight import EVERY, Leaf, Log

SHOWN = 8
"""How many names or numbers a sentence has."""


class Parting(NamedTuple):
    """Digests that differ.

    Attributes:
      step, replica, leaf: where; the replica is `EVERY` if both logs have one row for all.
      a, b: the two digests.
      twins: what the other replicas of that step say, in words; empty if nothing.
    """

    step: int
    replica: int
    leaf: str
    a: str
    b: str
    twins: str = ""

    def __str__(self) -> str:
        twins = f"; {self.twins}" if self.twins else ""
        return f"step {self.step}, {_replica(self.replica)}, leaf {self.leaf}: {self.a} against {self.b}{twins}"


class LogReport(NamedTuple):
    """How far two logs agree.

    Attributes:
      compared: how many digests were.
      first: the first ones that differ, by step, then replica, then leaf; None if none do.
      parted: for each step that differs, how many digests of it do.
      steps: how many steps both logs have.
      problems: what was not compared, or shows that a log disagrees with itself: a sentence each.
    """

    compared: int
    first: Parting | None
    parted: dict[int, int]
    steps: int
    problems: tuple[str, ...]

    @property
    def passes(self) -> bool:
        """Whether digests were compared, all of them are equal, and nothing was left out."""
        return self.compared > 0 and self.first is None and not self.problems


@operation("diff_logs")
def diff_logs(a: Log, b: Log, rules: Rules = NO_RULES) -> LogReport:
    """Compares two logs of digests, step by step; of a step that a log has twice, the later row.

    Leaves are the same by rule or by name (`gradcombine.verify.diff.mapping.match`); whether one is transposed makes no
    difference to a digest. A row for all replicas stands for each of them.

    Args:
      a, b: from `gradcombine.verify.record.flight.read_log`.
      rules: which leaf is which, if names cannot tell.
    """
    require_rules(rules)
    pairs, problems = _matched(a, b, rules)
    problems += [*_of_log("A", a), *_of_log("B", b)]
    rows = _rows(a), _rows(b)
    for side, mine, theirs in (("A", *rows), ("B", *reversed(rows))):
        if alone := sorted(mine.keys() - theirs.keys()):
            problems.append(f"only {side} has steps {ranges(alone)}")
    both = sorted(rows[0].keys() & rows[1].keys())
    lonely: Counter[tuple[str, int]] = Counter()
    parted: Counter[int] = Counter()
    first: Parting | None = None
    compared = 0
    for step in both:
        left, right = ({n: log.digests(at) for n, at in of[step].items()} for log, of in zip((a, b), rows, strict=True))
        found = {n: (_row(left, n), _row(right, n)) for n in sorted(left.keys() | right.keys())}
        lonely.update(("B" if x is None else "A", n) for n, (x, y) in found.items() if n != EVERY and None in (x, y))
        common = [(n, x, y) for n, (x, y) in found.items() if x is not None and y is not None]
        for replica, x, y in [each for each in common if each[0] != EVERY] or common:
            compared += len(pairs)
            apart = [(i, j) for i, j in pairs if x[i] != y[j]]
            if apart:
                parted[step] += len(apart)
            if apart and first is None:
                i, j = apart[0]
                name, other = a.leaves[i].name, b.leaves[j].name
                leaf = name if name == other else f"{name} = {other}"
                first = Parting(step, replica, leaf, x[i], y[j], _twins(replica, i, j, left, right))
    problems += [f"only {side} has replica {replica}, in {n} steps" for (side, replica), n in sorted(lonely.items())]
    return LogReport(compared, first, dict(parted), len(both), tuple(problems))


def verdict(report: LogReport) -> str:
    """The answer in a sentence."""
    if report.first is not None:
        count = report.parted[report.first.step]
        return f"The logs part at {report.first}. In that step {count} of its digests differ."
    if report.passes:
        return f"All {report.compared:,} digests of {report.steps:,} steps are equal."
    if not report.compared:
        return "No digest was compared."
    return (
        f"All {report.compared:,} digests that were compared are equal; not all were, or a log disagrees with itself."
    )


def sections(report: LogReport) -> list[Section]:
    """Sections of a report: problems first, then the steps that differ."""
    problems = [Cells((problem,), False) for problem in report.problems]
    steps = [Cells((str(step), str(count)), False) for step, count in report.parted.items()]
    parts = [
        Section("Not compared, or at odds", columns=("",), rows=problems),
        Section("Steps that differ", columns=("step", "digests that differ"), rows=steps),
    ]
    return [part for part in parts if part.rows]


def as_json(report: LogReport) -> dict[str, object]:
    """The report as what json can write."""
    first = None if report.first is None else report.first._asdict()
    return {"passes": report.passes, **report._asdict(), "first": first, "problems": list(report.problems)}


def _matched(a: Log, b: Log, rules: Rules) -> tuple[list[tuple[int, int]], list[str]]:
    """The numbers of the leaves that both logs have, of one dtype and of lengths that may be the same; and problems."""
    matching = match(_as_dump(a), _as_dump(b), rules)
    problems: list[str] = []
    for side, names in (("A", matching.only_a), ("B", matching.only_b)):
        problems += [f"only {side} has the leaves {listed(names, SHOWN)}"] if names else []
    places = [{leaf.name: i for i, leaf in enumerate(log.leaves)} for log in (a, b)]
    pairs: list[tuple[int, int]] = []
    for pair in matching.pairs:
        i, j = places[0][pair.a], places[1][pair.b]
        left, right = a.leaves[i], b.leaves[j]
        if _unlike(left, right):
            problems.append(f"{pair.a} is {left.dtype} {left.shape} in A, {right.dtype} {right.shape} in B")
        else:
            pairs.append((i, j))
    return sorted(pairs), problems


def _of_log(side: str, log: Log) -> Iterator[str]:
    """Problems within one log."""
    if log.damaged:
        numbers = ", ".join(map(str, log.damaged[:SHOWN]))
        last = f" after step {max(step for step, _ in log.rows)}" if log.rows else ""
        yield f"{side} is cut off or damaged in line {numbers}; the complete lines end{last or ' there'}"
    for (step, replica), offsets in sorted(log.rows.items()):
        rows = [log.digests(offset) for offset in offsets] if len(offsets) > 1 else []
        at = next((i for earlier in rows for i, x in enumerate(earlier) if x != rows[-1][i]), None)
        if at is not None:
            where = f"step {step} of {_replica(replica)}"
            yield f"{side} has {where} {len(rows)} times, and not with the same digests: of {log.leaves[at].name} first"
    yield from _odd(side, log)


def _odd(side: str, log: Log) -> Iterator[str]:
    """The first replica whose copy of what is the same on all replicas is not."""
    if not any(log.twins):
        return
    for step, offsets in _rows(log).items():
        rows = {replica: log.digests(offset) for replica, offset in offsets.items()}
        for i, twin in enumerate(log.twins):
            counts = Counter(row[i] for row in rows.values())
            if twin and len(counts) > 1:
                most, times = counts.most_common(1)[0]
                odd = [replica for replica, row in rows.items() if row[i] != most]
                apart = f"replica {', '.join(map(str, odd))} differs from its twins"
                if 2 * times <= len(rows):  # which of them is odd?
                    apart = "the replicas differ from one another"
                yield f"in step {step} of {side}, {apart} in {log.leaves[i].name}"
                return


def _twins(replica: int, i: int, j: int, left: dict[int, list[str]], right: dict[int, list[str]]) -> str:
    """The side on which a replica's digest differs from all others, where those agree with the other side."""
    x, y = (_row(rows, replica) or [] for rows in (left, right))
    for side, other, rows, k, digest in (("A", "B", left, i, y[j]), ("B", "A", right, j, x[i])):
        rest = {row[k] for number, row in rows.items() if number not in (replica, EVERY)}
        if rest == {digest}:
            return f"the other replicas of {side} agree with {other}, replica {replica} of {side} does not"
    return ""


def _row(rows: dict[int, list[str]], replica: int) -> list[str] | None:
    """A replica's digests; a row for all stands for any."""
    return rows.get(replica, rows.get(EVERY))


def _rows(log: Log) -> dict[int, dict[int, int]]:
    """Where the last row of each step and replica is, in order."""
    found: dict[int, dict[int, int]] = {}
    for (step, replica), offsets in sorted(log.rows.items()):
        found.setdefault(step, {})[replica] = offsets[-1]
    return found


def _as_dump(log: Log) -> Dump:
    """The leaves as what cannot be read: they are matched by rule and by name only."""
    shapes = {leaf.name: tuple(n for n in leaf.shape if n is not None) for leaf in log.leaves}
    return {name: unread(name, "a digest", shape) for name, shape in shapes.items()}


def _unlike(a: Leaf, b: Leaf) -> bool:
    """Whether two leaves cannot hold the same words: of other dtypes, or lengths. Axes may be in another order."""
    if None in a.shape or None in b.shape:
        return a.dtype != b.dtype or len(a.shape) != len(b.shape)
    sizes = (int(np.prod([n or 0 for n in leaf.shape], dtype=np.int64)) for leaf in (a, b))
    return a.dtype != b.dtype or len(set(sizes)) > 1


def _replica(number: int) -> str:
    return "all replicas" if number == EVERY else f"replica {number}"
