"""The first place where two traces part: the step, then what introduced it, then the leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from gradcombine.errors import GradCombineError
from gradcombine.verify.comparison.trees import describe_ulp
from gradcombine.verify.diff import Allowed, Row, diff
from gradcombine.verify.diff.measure import EQUAL_BITS, LeftOut
from gradcombine.verify.diff.steps import dumps_by_step
from gradcombine.verify.dumps import Dump, open_dump
from gradcombine.verify.mapping import Rules
from gradcombine.verify.mapping.rules import NO_RULES
from gradcombine.verify.trace.record import STAGES

CAUSES = {
    "inputs": "the inputs: the data, its order, or the parameters before the step",
    "gradients": "the gradients: the model, its loss, or its kernels, from the same inputs",
    "combined": "the combine: weights, order or precision, from the same gradients",
    "updates": "the optimizer: its settings, its state or its schedule, from the same combined gradient",
    "params": "the application of the updates, from the same updates",
}
"""What a stage that parts first says."""

UNKNOWN = "something unknown: only one of the runs has recorded it"
"""What a stage or a step says that could not be compared."""


class Divergence(NamedTuple):
    """Where two runs part.

    Attributes:
      step: the first step that differs.
      stage: the first stage of it that differs; None where one run lacks the whole step.
      row: its worst leaf; None where all leaves that both runs have are alike.
      introduced_by: what stands between this stage and the last one that is equal.
      unrecorded: stages before this one that a run lacks, so that they may be the cause.
      unmatched: leaves of this stage that only one run has.
      left_out: leaves of this stage that could not be compared, and why.
    """

    step: int
    stage: str | None
    row: Row | None
    introduced_by: str
    unrecorded: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def __str__(self) -> str:
        text = f"step {self.step}: introduced by {self.introduced_by}"
        if self.row is not None:
            found = self.row.difference
            text += f"; worst leaf {found.name}, {describe_ulp(found)}, {found.relative:.1e} relative"
            if self.row.turned:
                text += f", once its axes are in the order {self.row.pair.axes}, of which no rule says that it is right"
        if self.left_out:
            text += f"; not compared: {', '.join(map(' '.join, self.left_out[:3]))}"
        if self.unmatched:
            more = f" and {len(self.unmatched) - 3} more" if len(self.unmatched) > 3 else ""
            text += f"; in one run alone: {', '.join(self.unmatched[:3])}{more}"
        if self.unrecorded:
            text += f"; not recorded before it: {', '.join(self.unrecorded)}"
        return text


def first_divergence(
    a: str | Path,
    b: str | Path,
    *,
    allowed: Allowed | Mapping[str, Allowed] = EQUAL_BITS,
    rules: Rules = NO_RULES,
) -> Divergence | None:
    """Finds the first step, and in it the first stage, in which two traces differ by more than is allowed.

    Args:
      a, b: directories that `record` has written, of one framework or two; leaves are matched as in `gradcombine diff`.
      allowed: what may differ; or for each stage by its name, and then nothing in stages that are not named. Two
        frameworks' kernels round differently: give ``gradients`` a relative allowance, and all that follows.
      rules: which leaf is which, for names that begin with their stage.

    Returns:
      None where both runs have the same steps, with the same stages, and all of them are alike; else a `Divergence`,
      which prints as a sentence. A step or stage that only one run has is one where nothing else differs; a leaf that
      could not be compared is one, and so is a leaf that is like the other's only in another order of axes, though the
      shapes agree and no rule gives that order.

    Raises:
      GradCombineError: for a directory without a trace, traces without a common step, and as `diff`.

    >>> import tempfile, numpy as np
    >>> from gradcombine.verify import first_divergence, record
    >>> with tempfile.TemporaryDirectory() as place:
    ...     for run, rate in (("a", 0.5), ("b", 0.5), ("c", 0.25)):
    ...         with record(f"{place}/{run}") as recorder:
    ...             for step in range(3):
    ...                 recorder(step, combined={"w": np.ones(2)}, updates={"w": -rate**step * np.ones(2)})
    ...     print(first_divergence(f"{place}/a", f"{place}/b"))
    ...     print(first_divergence(f"{place}/a", f"{place}/c").step)
    None
    1
    """
    left, right = (dumps_by_step(path) for path in (Path(a), Path(b)))
    both = [step for step in left if step in right]
    if not both:
        raise GradCombineError(
            "first_divergence", "two traces with a common step", f"{len(left)} and {len(right)} steps"
        )
    lacking: list[Divergence] = []
    for step in both:
        found = _in_step(step, open_dump(left[step]), open_dump(right[step]), allowed, rules, lacking)
        if found is not None:
            return found
    lacking += [Divergence(step, None, None, UNKNOWN) for step in left.keys() ^ right.keys()]
    return min(lacking, key=lambda found: found.step, default=None)


def _in_step(
    step: int,
    a: Dump,
    b: Dump,
    allowed: Allowed | Mapping[str, Allowed],
    rules: Rules,
    lacking: list[Divergence],
) -> Divergence | None:
    """The first stage that parts; stages that only one run has are added to ``lacking``."""
    unrecorded: list[str] = []
    for stage in STAGES:
        # A rule may say of a leaf that it needs no counterpart.
        left = _stage(a, stage, lambda name: (rules.find(name) or (None, name))[1] is not None)
        right = _stage(b, stage, lambda name: not rules.ignores(name))
        if not left or not right:
            if left or right:
                lacking.append(Divergence(step, stage, None, UNKNOWN, tuple(unrecorded), (*left, *right)))
            unrecorded.append(stage)
            continue
        limit = allowed if isinstance(allowed, Allowed) else allowed.get(stage, EQUAL_BITS)
        report = diff(left, right, allowed=limit, rules=rules)
        apart = [row for row in report.rows if not row.passes] or [row for row in report.rows if row.turned]
        if apart or not report.passes:
            unmatched = (*report.only_a, *report.only_b)
            row = apart[0] if apart else None
            return Divergence(step, stage, row, CAUSES[stage], tuple(unrecorded), unmatched, report.left_out)
        unrecorded = []
    return None


def _stage(dump: Dump, stage: str, counts: Callable[[str], bool]) -> Dump:
    return {
        name: entry for name, entry in dump.items() if (name.startswith(f"{stage}/") or name == stage) and counts(name)
    }
