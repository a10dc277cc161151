"""Two runs against each other: directories that hold one dump a step."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gradcombine.errors import GradCombineError
from gradcombine.verify.diff.measure import EQUAL_BITS, Allowed, DiffReport, diff
from gradcombine.verify.dumps import open_dump
from gradcombine.verify.dumps.open import detect
from gradcombine.verify.mapping import Rules
from gradcombine.verify.mapping.rules import NO_RULES

_NUMBER = re.compile(r"\d+")


class StepReport(NamedTuple):
    """What was found about two runs.

    Attributes:
      steps: the report of each step that both have, by its number.
      only_a, only_b: steps that only one run has.
    """

    steps: dict[int, DiffReport]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]

    @property
    def passes(self) -> bool:
        return not self.only_a and not self.only_b and all(report.passes for report in self.steps.values())

    @property
    def first(self) -> int | None:
        """The first step that does not pass."""
        return next((step for step, report in self.steps.items() if not report.passes), None)


def is_steps(path: str | Path) -> bool:
    """Whether a path is a directory of dumps, and not a dump itself."""
    path = Path(path)
    return path.is_dir() and detect(path) is None and bool(dumps_by_step(path))


def diff_steps(
    a: str | Path,
    b: str | Path,
    *,
    allowed: Allowed = EQUAL_BITS,
    rules: Rules = NO_RULES,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> StepReport:
    """Compares two directories of dumps, step by step, by the last number in the dumps' names.

    Args:
      a, b: directories of files such as ``step_00003.npz``.
      allowed, rules: as for `diff`.
      progress: called before each step, and after the last.

    Raises:
      GradCombineError: as `diff`; and for two dumps of one step in a directory.
    """
    left, right = dumps_by_step(Path(a)), dumps_by_step(Path(b))
    both = [step for step in left if step in right]
    reports = {}
    for i, step in enumerate(both):
        progress(f"step {step}", i, len(both))
        reports[step] = diff(open_dump(left[step]), open_dump(right[step]), allowed=allowed, rules=rules)
    progress("", len(both), len(both))
    only = (tuple(step for step in x if step not in y) for x, y in ((left, right), (right, left)))
    return StepReport(reports, *only)


def dumps_by_step(directory: Path) -> dict[int, Path]:
    """The dumps of a directory, by the last number in their names.

    Raises:
      GradCombineError: for two dumps of one step, and for what is no directory.
    """
    if not directory.is_dir():
        raise GradCombineError("diff", "a directory of dumps", str(directory))
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        numbers = _NUMBER.findall(path.name.partition(".")[0])
        if not numbers or detect(path) is None or path.name.endswith(".index"):
            continue
        step = int(numbers[-1])
        if step in found:
            raise GradCombineError(
                "diff", f"one dump of step {step} in {directory}", f"{found[step].name}, {path.name}"
            )
        found[step] = path
    return dict(sorted(found.items()))
