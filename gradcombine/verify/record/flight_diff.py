"""Two logs of digests against each other: the first step, replica and leaf that part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gradcombine.formats import unread
from gradcombine.reporting.sections import Cells, Section
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


def diff_logs(a: Log, b: Log, rules: Rules = NO_RULES) -> LogReport:
    """Compares two logs of digests, step by step; of a step that a log has twice, the later row.

    Leaves are the same by rule or by name (`gradcombine.verify.diff.mapping.match`); whether one is transposed makes no
    difference to a digest. A row for all replicas stands for each of them.

    Args:
      a, b: from `gradcombine.verify.record.flight.read_log`.
      rules: which leaf is which, if names cannot tell.
    """
    require_rules("diff_logs", rules)
    problems = [*_of_leaves(a, b, rules), *_of_log("A", a), *_of_log("B", b)]
    pairs = _pairs(a, b, rules)
    steps = [sorted({step for step, _ in log.rows}) for log in (a, b)]
    both = sorted(set(steps[0]) & set(steps[1]))
    for side, mine, theirs in (("A", *steps), ("B", *reversed(steps))):
        alone = [step for step in mine if step not in set(theirs)]
        if alone:
            problems.append(f"only {side} has steps {_ranges(alone)}")
    lonely: Counter[tuple[str, int]] = Counter()
    parted: dict[int, int] = {}
    first: Parting | None = None
    compared = 0
    rows_of = _replicas(a), _replicas(b)
    for step in both:
        left, right = (
            {replica: log.digests(log.rows[step, replica][-1]) for replica in of[step]}
            for log, of in zip((a, b), rows_of, strict=True)
        )
        common = _common(left, right)
        for side, mine, theirs in (("A", left, right), ("B", right, left)):
            lonely.update((side, n) for n in mine if n != EVERY and not {n, EVERY} & theirs.keys())
        for replica in common:
            x, y = (rows.get(replica, rows.get(EVERY, [])) for rows in (left, right))
            compared += len(pairs)
            apart = [(i, j) for i, j in pairs if x[i] != y[j]]
            if apart:
                parted[step] = parted.get(step, 0) + len(apart)
            if apart and first is None:
                i, j = apart[0]
                first = Parting(step, replica, _name(a, b, i, j), x[i], y[j], _twins(replica, i, j, left, right))
    problems += [f"only {side} has replica {replica}, in {n} steps" for (side, replica), n in sorted(lonely.items())]
    return LogReport(compared, first, parted, len(both), tuple(problems))


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
    parts = [
        Section(
            "Not compared, or at odds",
            columns=("",),
            rows=[Cells((problem,), False) for problem in report.problems],
        ),
        Section(
            "Steps that differ",
            columns=("step", "digests that differ"),
            rows=[Cells((str(step), str(count)), False) for step, count in report.parted.items()],
        ),
    ]
    return [part for part in parts if part.rows]


def as_json(report: LogReport) -> dict[str, Any]:
    """The report as what json can write."""
    first = None if report.first is None else report.first._asdict()
    return {"passes": report.passes, **report._asdict(), "first": first, "problems": list(report.problems)}


def _pairs(a: Log, b: Log, rules: Rules) -> list[tuple[int, int]]:
    """The numbers of the leaves that both logs have, of one dtype and of lengths that may be the same."""
    places = {leaf.name: i for i, leaf in enumerate(a.leaves)}, {leaf.name: i for i, leaf in enumerate(b.leaves)}
    matched = match(_as_dump(a), _as_dump(b), rules).pairs
    pairs = [(places[0][pair.a], places[1][pair.b]) for pair in matched]
    return sorted((i, j) for i, j in pairs if not _unlike(a.leaves[i], b.leaves[j]))


def _of_leaves(a: Log, b: Log, rules: Rules) -> Iterator[str]:
    leaves = {leaf.name: leaf for leaf in a.leaves}, {leaf.name: leaf for leaf in b.leaves}
    matching = match(_as_dump(a), _as_dump(b), rules)
    for side, names in (("A", matching.only_a), ("B", matching.only_b)):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield f"only {side} has the leaves {', '.join(names[:SHOWN])}{more}"
    for pair in matching.pairs:
        left, right = leaves[0][pair.a], leaves[1][pair.b]
        if _unlike(left, right):
            yield f"{pair.a} is {left.dtype} {left.shape} in A, {right.dtype} {right.shape} in B"


def _of_log(side: str, log: Log) -> Iterator[str]:
    """Problems within one log."""
    if log.damaged:
        numbers = ", ".join(map(str, log.damaged[:SHOWN]))
        last = f" after step {max(step for step, _ in log.rows)}" if log.rows else ""
        yield f"{side} is cut off or damaged in line {numbers}; what is whole was read, and ends{last or ' there'}"
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
    for step, replicas in sorted(_replicas(log).items()):
        rows = {replica: log.digests(log.rows[step, replica][-1]) for replica in replicas}
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
    x, y = (rows.get(replica, rows.get(EVERY, [])) for rows in (left, right))
    for side, rows, k, other in (("A", left, i, y[j]), ("B", right, j, x[i])):
        rest = [row[k] for number, row in rows.items() if number not in (replica, EVERY)]
        if rest and all(digest == other for digest in rest):
            against = "B" if side == "A" else "A"
            return f"the other replicas of {side} agree with {against}, replica {replica} of {side} does not"
    return ""


def _common(left: dict[int, Any], right: dict[int, Any]) -> list[int]:
    """The replicas whose digests both have, by number; a row for all stands for any."""
    numbers = {n for n in left if n in right or EVERY in right} | {n for n in right if n in left or EVERY in left}
    return sorted(numbers - {EVERY}) or sorted(numbers)


def _replicas(log: Log) -> dict[int, list[int]]:
    """The replicas of each step."""
    found: dict[int, list[int]] = {}
    for step, replica in sorted(log.rows):
        found.setdefault(step, []).append(replica)
    return found


def _as_dump(log: Log) -> Dump:
    """The leaves as what cannot be read: they are matched by rule and by name only."""
    shapes = {leaf.name: tuple(n for n in leaf.shape if n is not None) for leaf in log.leaves}
    return {name: unread("diff", name, "a digest", shape) for name, shape in shapes.items()}


def _unlike(a: Leaf, b: Leaf) -> bool:
    """Whether two leaves cannot hold the same words: of other dtypes, or lengths. Axes may be in another order."""
    if None in a.shape or None in b.shape:
        return a.dtype != b.dtype or len(a.shape) != len(b.shape)
    sizes = (int(np.prod([n or 0 for n in leaf.shape], dtype=np.int64)) for leaf in (a, b))
    return a.dtype != b.dtype or len(set(sizes)) > 1


def _name(a: Log, b: Log, i: int, j: int) -> str:
    left, right = a.leaves[i].name, b.leaves[j].name
    return left if left == right else f"{left} = {right}"


def _replica(number: int) -> str:
    return "all replicas" if number == EVERY else f"replica {number}"


def _ranges(steps: list[int]) -> str:
    """Numbers in order, runs of them as ``3-7``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:SHOWN]) + more
