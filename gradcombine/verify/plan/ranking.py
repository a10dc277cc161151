"""A plan: the ways as rows, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradcombine.audit import Audit, Target
from gradcombine.audit.subject import size_text
from gradcombine.audit.target import Bound


class Figures(NamedTuple):
    """Cost of a window on each device, in bytes.

    Attributes:
      moved: in main memory.
      sent: to other devices.
      memory: at the peak.
    """

    moved: float
    sent: float
    memory: float


class Row(NamedTuple):
    """One way.

    Attributes:
      name: of the way.
      code: what makes it.
      calls: the audit of each of its programs, and how often a window calls it; empty where one was refused.
      compiled: what was compiled; None where it was refused.
      predicted: by the formulas of ``docs/plan.md``; None where not even a microbatch compiles for a device.
      bounds: of compute, memory and exchange of a window; none where nothing was compiled.
      lacking: bytes by which it exceeds a device's memory; 0 where it fits, None where that is not known.
      refused: why there is no program, or none that fits; empty otherwise.
      why: what its bound is made of, and what sets it apart from the next row.
    """

    name: str
    code: str
    calls: list[tuple[Audit, int]]
    compiled: Figures | None
    predicted: Figures | None
    bounds: dict[str, Bound]
    lacking: int | None
    refused: str
    why: str = ""

    @property
    def fits(self) -> bool:
        return self.compiled is not None and self.lacking == 0

    @property
    def findings(self) -> list[str]:
        """The names of those of its audits, but for the exchange in each microbatch that ZeRO-2 is."""
        names = {finding.name for one, _ in self.calls for finding in one.findings}
        return sorted(names - ({"reduced-in-loop"} if "zero2" in self.name.split("+") else set[str]()))

    @property
    def by(self) -> str:
        """The bound that limits the window; empty where nothing is published."""
        known = {name: bound.seconds for name, bound in self.bounds.items() if bound.seconds is not None}
        return max(known, key=lambda name: known[name]) if known else ""

    @property
    def seconds(self) -> float | None:
        """The bound of a window: no execution is shorter, however well all overlaps."""
        return self.bounds[self.by].seconds if self.by else None

    @property
    def in_turn(self) -> float:
        """The sum of what is known of the bounds: a window in which nothing overlaps."""
        return sum(bound.seconds or 0.0 for bound in self.bounds.values())


class Plan(NamedTuple):
    """The ways to run a window, the best first.

    Attributes:
      target: what they were compiled for.
      axes: of the mesh, with their sizes.
      axis: that of the replicas.
      microbatches: of a window.
      rows: those that fit, by their bound; then those that do not; then those that were refused.
    """

    target: Target
    axes: dict[str, int]
    axis: str
    microbatches: int
    rows: list[Row]

    @property
    def best(self) -> Row | None:
        """None where no way fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None


def rank(row: Row) -> tuple[float, ...]:
    if row.fits and row.compiled is not None:
        # Bounds that differ in the fourth digit do not: then the shorter sum, and then the smaller memory, is better.
        seconds = (row.compiled.moved + row.compiled.sent) if row.seconds is None else row.seconds
        return 0, _rounded(seconds), _rounded(row.in_turn), row.compiled.memory
    return (1, row.lacking) if row.lacking else (2,)


def _rounded(x: float) -> float:
    return float(f"{x:.3g}")


def explained(rows: list[Row]) -> list[Row]:
    return [row._replace(why=_why(row, rows[i + 1 : i + 2])) for i, row in enumerate(rows)]


def _why(row: Row, following: Sequence[Row]) -> str:
    if row.compiled is None:
        return ""
    made = f"bound by {row.by}: {row.bounds[row.by].arithmetic}" if row.by else row.bounds["memory"].arithmetic
    if not row.fits:
        return f"{made}; {size_text(row.lacking or 0)} more than a device has"
    other = following[0] if following and following[0].compiled is not None and following[0].fits else None
    if other is None or other.compiled is None:
        return made
    words = list[str]()
    for verb, own, others in zip(("moves", "sends", "holds"), row.compiled, other.compiled, strict=True):
        if _rounded(own) != _rounded(others):
            words.append(f"{verb} {size_text(abs(own - others))} {'less' if own < others else 'more'}")
    differences = ", ".join(words) or "takes the same"
    return f"{made}. Beside {other.name}: {differences}"
