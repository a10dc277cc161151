"""Strategies to run a window of microbatches: their names, their costs, and their order in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradcombine import wires
from gradcombine.audit import Audit, Target
from gradcombine.audit.subject import size_text
from gradcombine.audit.target import Bound
from gradcombine.errors import invalid, shown

CALLS = ("window", "every", "flush", "accumulate")
PLACES = ("replicated", "zero1", "zero2", "fsdp")
NUMBERS = ("bfloat16", "8bits", "compensated", "exact", "tree")
"""Words in the names of strategies, as in the table of docs/plan.md."""


class Strategy(NamedTuple):
    """A strategy to run a window.

    Attributes:
      calls: what a call of the step processes, from `CALLS`.
      place: what is sharded over the replicas, from `PLACES`.
      numbers: precision, wire and order of sums, from `NUMBERS`; at most one precision and one wire.
    """

    calls: str
    place: str
    numbers: tuple[str, ...] = ()

    @property
    def mean(self) -> dict[str, Any]:
        """Keyword arguments of `gradcombine.reductions.mean`."""
        settings: dict[str, tuple[str, Any]] = {name: ("precision", name) for name in ("compensated", "exact")}
        settings |= {"bfloat16": ("wire", wires.cast("bfloat16")), "8bits": ("wire", wires.blocks(8))}
        return dict(settings[name] for name in self.numbers if name in settings)

    @property
    def name(self) -> str:
        return "+".join((self.calls, *[self.place] * (self.place != "replicated"), *self.numbers))


DEFAULT = (
    *(f"{calls}+{place}" for calls in ("window", "every", "flush") for place in PLACES),
    "accumulate",
    *(f"window+{name}" for name in NUMBERS),
)


def way_of(name: str) -> Strategy:
    """Parses a strategy's name: words of `CALLS`, `PLACES`, `NUMBERS` joined by +, as in ``"every+zero1+bfloat16"``.

    The defaults are "window", "replicated", and plain sums in the accumulators' dtype.

    Raises:
      GradCombineError: for an unknown word, and two words that exclude each other.

    >>> way_of("zero1"), way_of("every+replicated").name
    (Strategy(calls='window', place='zero1', numbers=()), 'every')
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid("the name of a strategy", shown(name))
    words = [word.strip() for word in name.split("+")]
    known = [*CALLS, *PLACES, *NUMBERS]
    if unknown := [word for word in words if word not in known]:
        raise invalid(f"a strategy of the words {', '.join(known)}, joined by +", ", ".join(unknown))
    calls, places, numbers = ([word for word in group if word in words] for group in (CALLS, PLACES, NUMBERS))
    exclusive = ("compensated", "exact"), ("bfloat16", "8bits")
    choices = [calls, places, *([word for word in numbers if word in group] for group in exclusive)]
    if len(words) > len(set(words)) or any(len(choice) > 1 for choice in choices):
        raise invalid("a strategy with at most one word for the calls, the sharding, the precision and the wire", name)
    return Strategy("".join(calls) or "window", "".join(places) or "replicated", tuple(numbers))


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


def ranked(rows: list[Row]) -> list[Row]:
    """Sorts rows as in a `Plan`, and explains the place of each."""
    rows = sorted(rows, key=_rank)
    return [row._replace(why=_why(row, rows[i + 1 : i + 2])) for i, row in enumerate(rows)]


def _rank(row: Row) -> tuple[float, ...]:
    if row.fits and row.compiled is not None:
        # Bounds that agree to three digits are ties, decided by the sum without overlap, then by memory.
        seconds = (row.compiled.moved + row.compiled.sent) if row.seconds is None else row.seconds
        return 0, _rounded(seconds), _rounded(row.in_turn), row.compiled.memory
    return (1, row.lacking) if row.lacking else (2,)


def _rounded(x: float) -> float:
    return float(f"{x:.3g}")


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
