"""Comparison of two directories of dumps, step by step."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gradcombine.errors import invalid, operation, require_path
from gradcombine.verify.diff.comparing import EQUAL_BITS, Allowed, DiffReport, diff
from gradcombine.verify.diff.dumps import Dump, detect, open_dump
from gradcombine.verify.diff.rules import NO_RULES, Rules

_SUFFIX = re.compile(r"(\.weights)?\.[A-Za-z][A-Za-z0-9]*$|\.safetensors\.index\.json$")
"""The suffixes of dumps, which contain digits, as in ``.h5``."""

_NUMBER = re.compile(r"(?:(?<=_)-)?\d+")
"""A hyphen is a minus sign only after an underscore: step_-0000001 is step -1, ckpt-1 is step 1."""


class RunReport(NamedTuple):
    """The differences between two runs, step by step.

    Attributes:
      steps: the report of each common step, by its number.
      only_a, only_b: steps that only one run has.
      left_out: dumps whose names contain no step, and files of unknown formats that are named like the dumps.
    """

    steps: dict[int, DiffReport]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    left_out: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """Whether there are steps, both runs have the same steps and no other dumps, and all steps pass."""
        missing = self.only_a or self.only_b or self.left_out
        return bool(self.steps) and not missing and all(report.passes for report in self.steps.values())

    @property
    def first(self) -> int | None:
        """The first step that does not pass."""
        return next((step for step, report in self.steps.items() if not report.passes), None)


@operation("diff")
def is_steps(path: str | Path) -> bool:
    """Whether a path is a directory of dumps rather than a dump."""
    path = require_path("a path", path)
    return path.is_dir() and detect(path) is None and bool(dumps_by_step(path))


@operation("diff")
def diff_steps(
    a: str | Path,
    b: str | Path,
    *,
    allowed: Allowed = EQUAL_BITS,
    rules: Rules = NO_RULES,
    reference: str | Path | None = None,
    roundings: float | None = None,
    gradients: bool | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> RunReport:
    """Compares two directories of dumps step by step. The last number in a dump's name is its step.

    Args:
      a, b: directories of files such as ``step_00003.npz``.
      allowed, rules, roundings, gradients: as for `diff`.
      reference: a directory of the same steps in float64.
      progress: called before each step and after the last.

    Raises:
      GradCombineError: as in `diff`, and for two dumps of one step in a directory.
    """
    left, right = dumps_by_step(Path(a)), dumps_by_step(Path(b))
    references = None if reference is None else dumps_by_step(Path(reference))
    common = [step for step in left if step in right]
    reports = {}
    for i, step in enumerate(common):
        progress(f"step {step}", i, len(common))
        # If the reference lacks the step, an empty one leaves all its leaves out.
        exact: Dump | None = None if references is None else {}
        if references is not None and step in references:
            exact = open_dump(references[step])
        dumps = open_dump(left[step]), open_dump(right[step])
        reports[step] = diff(
            *dumps, allowed=allowed, rules=rules, reference=exact, roundings=roundings, gradients=gradients
        )
    progress("", len(common), len(common))
    only_a, only_b = (tuple(step for step in x if step not in y) for x, y in ((left, right), (right, left)))
    left_out = [str(path) for side in (a, b) for path in _left_out(Path(side))]
    return RunReport(reports, only_a, only_b, tuple(left_out))


@operation("diff")
def dumps_by_step(directory: Path) -> dict[int, Path]:
    """The dumps of a directory by step, the last number in their names.

    Raises:
      GradCombineError: for two dumps of one step, and for a path that is not a directory.
    """
    if not directory.is_dir():
        raise invalid("a directory of dumps", str(directory))
    steps: dict[int, Path] = {}
    for path in _dumps(directory):
        step = _step(path)
        if step is None:
            continue
        if step in steps:
            raise invalid(f"one dump of step {step} in {directory}", f"{steps[step].name}, {path.name}")
        steps[step] = path
    return dict(sorted(steps.items()))


def _dumps(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.iterdir()) if detect(path) is not None]


def _left_out(directory: Path) -> list[Path]:
    """The dumps without a step, and files such as step_4.msgpack beside step_3.npz, but not step_3.json beside it."""
    dumps = _dumps(directory)
    stems = {path.name.split(".")[0] for path in dumps}
    forms = {_NUMBER.sub("#", stem) for stem in stems if _NUMBER.search(stem)}
    files = [(path, path.name.split(".")[0]) for path in sorted(directory.iterdir())]
    unknown = [path for path, stem in files if stem not in stems and _NUMBER.sub("#", stem) in forms]
    return [path for path in dumps if _step(path) is None] + unknown


def _step(path: Path) -> int | None:
    numbers = _NUMBER.findall(_SUFFIX.sub("", path.name))
    return int(numbers[-1]) if numbers else None
