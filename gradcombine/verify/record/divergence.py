"""The first difference between two traces: its step, stage and leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradcombine.errors import invalid, operation, require_path, shown
from gradcombine.reporting import listed
from gradcombine.verify.diff.by_step import dumps_by_step
from gradcombine.verify.diff.comparing import EQUAL_BITS, Allowed, LeftOut, Row, diff, require_allowed, require_rules
from gradcombine.verify.diff.dumps import Dump, open_dump
from gradcombine.verify.diff.rules import NO_RULES, Rules
from gradcombine.verify.record.trace import STAGES

CAUSES = {
    "inputs": "the inputs: the data, its order, or the parameters before the step",
    "gradients": "the gradients: the model, its parameters, its loss, or its kernels",
    "combined": "the combine: weights, order or precision",
    "updates": "the optimizer: its settings, its state or its schedule",
    "params": "the application of the updates",
}
"""Causes of a divergence, by the first stage that differs."""

GIVEN = {"inputs": "inputs", "gradients": "gradients", "combined": "combined gradient", "updates": "updates"}
"""Names of the stages from which the next one is computed."""

UNKNOWN = "something unknown: only one of the runs has recorded it"
"""Cause for a stage or a step that could not be compared."""


class Divergence(NamedTuple):
    """The point at which two runs diverge.

    Attributes:
      step: the first step that differs.
      stage: its first stage that differs; None if one run lacks the entire step.
      row: its worst leaf; None if all leaves that both runs have pass.
      introduced_by: the parts of the step between this stage and the last one that passes.
      unrecorded: stages before this one that a run did not record, and which may therefore be the cause.
      unmatched: leaves of this stage that only one run has.
      left_out: leaves of this stage that could not be compared, and why.
      mixed_up: leaves of this stage that match a leaf of another name in the other run.
    """

    step: int
    stage: str | None
    row: Row | None
    introduced_by: str
    unrecorded: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    mixed_up: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        text = f"step {self.step}: introduced by {self.introduced_by}"
        if self.row is not None:
            leaf = self.row.difference
            text += f"; worst leaf {leaf.name}, {leaf.distance}, {leaf.relative:.1e} relative"
            if not leaf.same_dtype:
                text += f", {leaf.dtypes[0]} against {leaf.dtypes[1]}"
            if self.row.transposed:
                order = self.row.pair.axes or tuple(range(len(leaf.shape)))
                text += f", compared with its axes in the order {order}, for which there is no rule"
        if self.mixed_up:
            text += f"; names mixed up: {', '.join(f'{x} matches {y}' for x, y in self.mixed_up[:4])}"
        if self.left_out:
            text += f"; not compared: {', '.join(map(' '.join, self.left_out[:3]))}"
        if self.unmatched:
            text += f"; in one run only: {listed(self.unmatched, 3)}"
        if self.unrecorded:
            text += f"; not recorded before it: {', '.join(self.unrecorded)}"
        return text


@operation("first_divergence", renames=True)
def first_divergence(
    a: str | Path,
    b: str | Path,
    *,
    allowed: Allowed | Mapping[str, Allowed] = EQUAL_BITS,
    rules: Rules = NO_RULES,
) -> Divergence | None:
    """Finds the first step and stage in which two traces differ by more than is allowed.

    Args:
      a, b: directories written by `record`, by the same framework or by two; leaves are matched as in
        `gradcombine diff`.
      allowed: the tolerance, or a dict of tolerances by stage; stages that it does not contain have to be equal. As
        kernels of two frameworks round differently, allow a relative difference in ``gradients`` and later stages.
      rules: mapping of leaves, whose names begin with their stage.

    Returns:
      None if both runs have the same steps and stages and all of them pass; otherwise a `Divergence`, which prints as a
      sentence. Also a divergence: a step or stage that only one run has, a leaf that could not be compared, and a leaf
      that matches only with its axes permuted, if the shapes agree and no rule specifies the permutation.

    Raises:
      GradCombineError: for a directory without a trace, leaves outside of the stages of `record`, traces without a
        common step, and as `diff`.

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
    require_rules(rules)
    limits: dict[str, Any] = dict(allowed) if isinstance(allowed, Mapping) else dict.fromkeys(STAGES, allowed)
    if unknown := limits.keys() - set(STAGES):
        raise invalid(f"stages of {', '.join(STAGES)}", shown(unknown))
    for limit in limits.values():
        require_allowed(limit)
    left, right = (dumps_by_step(require_path("a directory", path)) for path in (a, b))
    common = [step for step in left if step in right]
    if not common:
        raise invalid("two traces with a common step", f"{len(left)} and {len(right)} steps")
    one_sided: list[Divergence] = []
    for step in common:
        dumps = open_dump(left[step]), open_dump(right[step])
        for directory, dump in zip((a, b), dumps, strict=True):
            _require_stages(directory, dump)
        for divergence in _in_step(step, *dumps, limits, rules):
            if divergence.introduced_by != UNKNOWN:
                return divergence
            one_sided.append(divergence)
    one_sided += [Divergence(step, None, None, UNKNOWN) for step in left.keys() ^ right.keys()]
    return min(one_sided, key=lambda divergence: divergence.step, default=None)


def _in_step(step: int, a: Dump, b: Dump, allowed: Mapping[str, Allowed], rules: Rules) -> Iterator[Divergence]:
    """Yields the stages that only one run has, up to and including the first one that differs."""
    unrecorded: list[str] = []
    for stage in STAGES:
        # Rules may exempt a leaf from having a counterpart.
        left = _stage(a, stage, lambda name: (rules.find(name) or (None, name))[1] is not None)
        right = _stage(b, stage, lambda name: not rules.ignores(name))
        if not left or not right:
            if left or right:
                yield Divergence(step, stage, None, UNKNOWN, tuple(unrecorded), (*left, *right))
            unrecorded.append(stage)
            continue
        report = diff(left, right, allowed=allowed.get(stage, EQUAL_BITS), rules=rules)
        failed = [row for row in report.rows if not row.passes] or [row for row in report.rows if row.transposed]
        if failed or not report.passes:
            unmatched = (*report.only_a, *report.only_b)
            missing = tuple(unrecorded), unmatched, report.left_out, report.mixed_up
            yield Divergence(step, stage, next(iter(failed), None), _causes(stage, unrecorded), *missing)
            return
        unrecorded = []


def _causes(stage: str, unrecorded: Sequence[str]) -> str:
    """The causes of a divergence in a stage, or in those before it that were not recorded."""
    first = STAGES.index(stage) - len(unrecorded)
    given = f", from the same {GIVEN[STAGES[first - 1]]}" if first else ""
    return ", or by ".join(CAUSES[x] for x in (*unrecorded, stage)) + given


def _require_stages(directory: str | Path, dump: Dump) -> None:
    """Raises for leaves outside of stages, which would not be compared, and for a dump without leaves."""
    other = next((name for name in dump if name.partition("/")[0] not in STAGES), None if dump else "no leaves")
    if other is not None:
        raise invalid(f"a trace: leaves whose names begin with {', '.join(STAGES)}", f"{other} in {directory}")


def _stage(dump: Dump, stage: str, is_required: Callable[[str], bool]) -> Dump:
    return {name: leaf for name, leaf in dump.items() if name.partition("/")[0] == stage and is_required(name)}
