"""What a verification finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

BITS, BOUND, OUTSIDE = "bits", "bound", "outside the bound"
"""What a row may promise: the reference's bits; a distance within the rounding bound; one beyond it, as a contrast."""


@dataclass(frozen=True)
class Finding:
    """One row: what was compared, what it promised, and what was found.

    Attributes:
      section: the part of the report that it belongs to.
      labels: what tells the row from the others of its section.
      promise: in a word.
      holds: whether the promise was kept.
      ulps: the largest distance from the reference, in units in the last place; None where there is no reference.
      relative: the largest distance from the reference, relative to the largest magnitude of the same leaf.
      share: what was found over what is allowed.
      equal: whether all bits are those of the reference.
    """

    section: str
    labels: dict[str, Any]
    promise: str
    holds: bool
    ulps: int | None = None
    relative: float | None = None
    share: float | None = None
    equal: bool = False

    @property
    def name(self) -> str:
        return f"{self.section}: {' / '.join(str(label) for label in self.labels.values())}"


class Report(NamedTuple):
    """Everything that was found.

    Attributes:
      findings: the rows of all sections.
      curves: the losses of the trainings, by name.
      settings: what was run, and with which versions.
      seconds: how long it took.
    """

    findings: list[Finding]
    curves: dict[str, list[float]]
    settings: dict[str, Any]
    seconds: float

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.holds]
