"""Comparison of two logs of digests: the first step, replica and leaf that differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from gradcombine.errors import operation
from gradcombine.formats import unread
from gradcombine.reductions.numbered import ranges
from gradcombine.reporting import listed
from gradcombine.reporting.sections import Cells, Section
from gradcombine.verify.diff.comparing import require_rules
from gradcombine.verify.diff.dumps import Dump
from gradcombine.verify.diff.mapping import match
from gradcombine.verify.diff.rules import NO_RULES, Rules
from gradcombine.verify.record.flight import EVERY, Leaf, Log
from gradcombine.verify.record.trace import STAGES

SHOWN = 8
"""Maximum number of names or numbers in a sentence."""


class Parting(NamedTuple):
    """A pair of digests that differ.

    Attributes:
      step: the step.
      replica: the replica; `EVERY` if both logs have one row for all replicas.
      leaf: name of the leaf.
      a, b: the two digests.
      twins: conclusion from the other replicas' digests of this leaf and step; may be empty.
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
    """Result of the comparison of two logs.

    Attributes:
      compared: number of digests compared.
      first: the first difference, by step, then replica, then stage, then leaf; None if there is none.
      parted: number of digests that differ, by step, for steps with a difference.
      steps: number of steps that both logs have.
      problems: sentences about parts that were not compared, and contradictions within a log.
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
    """Compares two logs of digests step by step; if a log has a step twice, the later row counts.

    Leaves are matched by rule or by name (`gradcombine.verify.diff.mapping.match`), regardless of transposition, which
    does not change a digest. A row for all replicas is compared with each of them.

    Args:
      a, b: logs, from `gradcombine.verify.record.flight.read_log`.
      rules: mapping of leaves whose names differ.
    """
    require_rules(rules)
    pairs, problems = _matched(a, b, rules)
    problems += [*_problems_of("A", a), *_problems_of("B", b)]
    for side, mine, theirs in (("A", a, b), ("B", b, a)):
        if missing := [step for step in mine.rows if step not in theirs.rows]:
            problems.append(f"only {side} has steps {ranges(missing)}")
    common = [step for step in a.rows if step in b.rows]
    one_sided: Counter[tuple[str, int]] = Counter()
    counts: Counter[int] = Counter()
    first: Parting | None = None
    compared = 0
    for step in common:
        left, right = a.at(step), b.at(step)
        for replica in sorted((left.keys() | right.keys()) - {EVERY}) or [EVERY]:
            x, y = (rows.get(replica, rows.get(EVERY)) for rows in (left, right))
            if x is None or y is None:
                one_sided["B" if x is None else "A", replica] += 1
                continue
            compared += len(pairs)
            different = [(i, j) for i, j in pairs if x[i] != y[j]]
            if different:
                counts[step] += len(different)
            if different and first is None:
                first = _parting(a, b, step, replica, *min(different, key=lambda pair: _stage(a.leaves[pair[0]].name)))
    problems += [f"only {side} has replica {replica}, in {n} steps" for (side, replica), n in sorted(one_sided.items())]
    return LogReport(compared, first, dict(counts), len(common), tuple(problems))


def _stage(leaf: str) -> int:
    """Position of a leaf's stage in a step, if its name begins with one."""
    stage = leaf.partition("/")[0]
    return STAGES.index(stage) if stage in STAGES else 0


def _parting(a: Log, b: Log, step: int, replica: int, i: int, j: int) -> Parting:
    """The difference of leaf i of A and leaf j of B, and what the digests of the other replicas say about it."""
    left, right = a.at(step), b.at(step)
    x, y = left.get(replica, left.get(EVERY, []))[i], right.get(replica, right.get(EVERY, []))[j]
    twins = ""
    for side, other, rows, k, digest in (("B", "A", right, j, x), ("A", "B", left, i, y)):
        if {row[k] for number, row in rows.items() if number not in (replica, EVERY)} == {digest}:
            twins = f"the other replicas of {side} agree with {other}, replica {replica} of {side} does not"
    name, counterpart = a.leaves[i].name, b.leaves[j].name
    return Parting(step, replica, name if name == counterpart else f"{name} = {counterpart}", x, y, twins)


def verdict(report: LogReport) -> str:
    """Summary in one sentence."""
    if report.first is not None:
        count = report.parted[report.first.step]
        return f"The logs first differ at {report.first}. In that step {count} digests differ."
    if report.passes:
        return f"All {report.compared:,} digests of {report.steps:,} steps are equal."
    if not report.compared:
        return "No digest was compared."
    return f"All {report.compared:,} digests compared are equal; some were not compared, or a log contradicts itself."


def sections(report: LogReport) -> list[Section]:
    """Sections of a report: problems first, then the steps that differ."""
    problems = [Cells((problem,), False) for problem in report.problems]
    steps = [Cells((str(step), str(count)), False) for step, count in report.parted.items()]
    parts = [
        Section("Not compared, or contradictory", columns=("",), rows=problems),
        Section("Steps that differ", columns=("step", "digests that differ"), rows=steps),
    ]
    return [part for part in parts if part.rows]


def as_json(report: LogReport) -> dict[str, object]:
    """The report as values that json can serialize."""
    first = None if report.first is None else report.first._asdict()
    return {"passes": report.passes, **report._asdict(), "first": first, "problems": list(report.problems)}


def _matched(a: Log, b: Log, rules: Rules) -> tuple[list[tuple[int, int]], list[str]]:
    """Matches leaves of equal dtype and size; returns pairs of their indices, and problems."""
    matching = match(_as_dump(a), _as_dump(b), rules)
    problems: list[str] = []
    for side, names in (("A", matching.only_a), ("B", matching.only_b)):
        problems += [f"only {side} has the leaves {listed(names, SHOWN)}"] if names else []
    indices = [{leaf.name: i for i, leaf in enumerate(log.leaves)} for log in (a, b)]
    pairs: list[tuple[int, int]] = []
    for pair in matching.pairs:
        i, j = indices[0][pair.a], indices[1][pair.b]
        left, right = a.leaves[i], b.leaves[j]
        if _are_incompatible(left, right):
            problems.append(f"{pair.a} is {left.dtype} {left.shape} in A, {right.dtype} {right.shape} in B")
        else:
            pairs.append((i, j))
    return sorted(pairs), problems


def _problems_of(side: str, log: Log) -> Iterator[str]:
    """Problems within one log."""
    if log.damaged:
        numbers = ", ".join(map(str, log.damaged[:SHOWN]))
        last = f"after step {max(log.rows)}" if log.rows else "there"
        yield f"{side} is cut off or damaged in line {numbers}; the complete lines end {last}"
    for step in log.rows:
        for replica, repeated in log.history(step).items():
            rows = [log.digests(offset) for offset in repeated] if len(repeated) > 1 else []
            at = next((i for earlier in rows for i, x in enumerate(earlier) if x != rows[-1][i]), None)
            if at is not None:
                where = f"step {step} of {_replica(replica)}"
                yield f"{side} has {where} {len(rows)} times, with different digests, of {log.leaves[at].name} first"
    yield from islice(_divergent_twins(side, log), 1)


def _divergent_twins(side: str, log: Log) -> Iterator[str]:
    """Describes differences between replicas in leaves that should be the same on all of them."""
    twins = [i for i, twin in enumerate(log.twins) if twin]
    for step in log.rows if twins else ():
        rows = log.at(step)
        if len(rows) > 1:
            rows.pop(EVERY, None)
        for i in twins:
            majority, count = Counter(row[i] for row in rows.values()).most_common(1)[0]
            others = [str(replica) for replica, row in rows.items() if row[i] != majority]
            if others:
                finding = f"replica {', '.join(others)} differs from the others"
                if 2 * count <= len(rows):  # no majority
                    finding = "the replicas differ from one another"
                yield f"in step {step} of {side}, {finding} in {log.leaves[i].name}"


def _as_dump(log: Log) -> Dump:
    """Leaves as unreadable entries of a dump, which are matched by rule and by name only."""
    shapes = {leaf.name: tuple(n for n in leaf.shape if n is not None) for leaf in log.leaves}
    return {name: unread(name, "a digest", shape) for name, shape in shapes.items()}


def _are_incompatible(a: Leaf, b: Leaf) -> bool:
    """Whether the leaves differ in dtype or in size, or, if a length is unknown, in rank; axes may be permuted."""
    if None in a.shape or None in b.shape:
        return a.dtype != b.dtype or len(a.shape) != len(b.shape)
    sizes = {math.prod(n or 0 for n in leaf.shape) for leaf in (a, b)}
    return a.dtype != b.dtype or len(sizes) > 1


def _replica(number: int) -> str:
    return "all replicas" if number == EVERY else f"replica {number}"
