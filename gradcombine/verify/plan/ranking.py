"""A plan: strategies as rows, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradcombine.audit import Audit, Target
from gradcombine.audit.subject import size_text
from gradcombine.audit.target import Bound


class Figures(NamedTuple):
    """Cost of a window on each device, in bytes.

    Attributes:
      moved: bytes read and written in device memory.
      sent: bytes sent to other devices.
      memory: peak memory.
    """

    moved: float
    sent: float
    memory: float


class Row(NamedTuple):
    """A strategy and its cost.

    Attributes:
      name: name of the strategy.
      code: source code of the strategy.
      calls: the audit of each program, and its number of calls per window; empty if one was rejected.
      compiled: cost of the compiled programs; None if one was rejected.
      predicted: cost by the formulas of ``docs/plan.md``; None if not even one microbatch fits a device.
      bounds: lower bounds of a window's compute, memory traffic and exchange; empty if nothing was compiled.
      lacking: bytes by which a device's memory is exceeded; 0 if the strategy fits, None if unknown.
      refused: reason for the rejection; empty if the programs were compiled.
      why: derivation of the bound, and differences from the next row.
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
        """Names of the audits' findings, except for ZeRO-2's inherent exchange in each microbatch."""
        names = {finding.name for one, _ in self.calls for finding in one.findings}
        return sorted(names - ({"reduced-in-loop"} if "zero2" in self.name.split("+") else set[str]()))

    @property
    def by(self) -> str:
        """Name of the largest bound; empty if no rates are published for the target."""
        known = {name: bound.seconds for name, bound in self.bounds.items() if bound.seconds is not None}
        return max(known, key=lambda name: known[name]) if known else ""

    @property
    def seconds(self) -> float | None:
        """Lower bound of the duration of a window, which assumes perfect overlap."""
        return self.bounds[self.by].seconds if self.by else None

    @property
    def in_turn(self) -> float:
        """Sum of the known bounds: the duration of a window without overlap."""
        return sum(bound.seconds or 0.0 for bound in self.bounds.values())


class Plan(NamedTuple):
    """Strategies to run a window, the best first.

    Attributes:
      target: hardware that they were compiled for.
      axes: sizes of the mesh axes.
      axis: mesh axis of the replicas.
      microbatches: number of microbatches per window.
      rows: strategies that fit in memory, by their bound; then those that do not; then those that were rejected.
    """

    target: Target
    axes: dict[str, int]
    axis: str
    microbatches: int
    rows: list[Row]

    @property
    def best(self) -> Row | None:
        """The fastest strategy that fits in memory, or None."""
        return self.rows[0] if self.rows and self.rows[0].fits else None


def rank(row: Row) -> tuple[float, ...]:
    if row.fits and row.compiled is not None:
        # Bounds that agree to three digits are ties, decided by the sum without overlap, then by memory.
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
    bound = f"bound by {row.by}: {row.bounds[row.by].arithmetic}" if row.by else row.bounds["memory"].arithmetic
    if not row.fits:
        return f"{bound}; {size_text(row.lacking or 0)} more than a device has"
    other = following[0] if following and following[0].fits else None
    if other is None or other.compiled is None:
        return bound
    differences = list[str]()
    for verb, x, y in zip(("moves", "sends", "holds"), row.compiled, other.compiled, strict=True):
        if _rounded(x) != _rounded(y):
            differences.append(f"{verb} {size_text(abs(x - y))} {'less' if x < y else 'more'}")
    return f"{bound}. Compared to {other.name}: {', '.join(differences) or 'equal cost'}"
