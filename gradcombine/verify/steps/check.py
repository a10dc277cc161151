"""Does a step give the same, however its batch is divided?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.errors import GradCombineError, require_integer, require_one_of, shown
from gradcombine.types import Tree
from gradcombine.verify.microbatches.causes import Cause
from gradcombine.verify.steps.hypotheses import Case, explain
from gradcombine.verify.steps.measure import Standard, best
from gradcombine.verify.steps.report import StepFault, StepReport, StepRun
from gradcombine.verify.steps.running import OPERATION, WHOLE, Result, Split, Step, Subject


def check_step(
    make_step: Callable[..., Step],
    params: Tree,
    batch: Tree,
    *,
    microbatches: Sequence[int] = (2, 4),
    devices: Sequence[int] = (1,),
    returns: Literal["gradients", "params"] = "gradients",
    pad: Callable[[Any, int], Any] | None = None,
    reference: Tree | Step | None = None,
    unit: float | None = None,
) -> StepReport:
    """..."""
    splits = _splits(microbatches, devices)
    require_one_of(OPERATION, "returns to be 'gradients' or 'params'", returns, ("gradients", "params"))
    if not callable(make_step):
        raise GradCombineError(OPERATION, "make_step(microbatches) that returns a step", shown(make_step))
    subject = Subject(make_step, params, batch, returns == "params")
    n = subject.examples
    for split in splits:
        if split.microbatches * split.devices > n:
            raise GradCombineError(OPERATION, f"at least as many examples as parts: {split}", n)
    standard = Standard(subject, unit)
    exact, source = _reference(standard, reference)
    faults: list[StepFault] = []
    runs: list[StepRun] = []

    def add(cause: Cause, run: str, detail: str = "") -> None:
        if cause not in [fault.cause for fault in faults]:
            faults.append(StepFault(cause, run, detail))

    def note(name: str, result: Result) -> StepRun:
        shares = standard.shares(result.floats, standard.own.floats, wide=False)
        accuracy, noises = (None, None) if exact is None else standard.accuracy(result, exact)
        run = StepRun(
            name,
            float(shares.max()),
            None if accuracy is None else float(accuracy.max()),
            None if noises is None else float(noises.max()),
            subject.names[int(shares.argmax())],
        )
        runs.append(run)
        return run

    first = note(str(WHOLE), standard.own)
    if first.accuracy is not None and first.accuracy > 1:
        add(Cause.INACCURATE, first.name, f"{first.noises:.3g} times its noise")
    for split in [WHOLE, *splits]:
        own = subject.divided(split, batch)
        again = subject.divided(split, batch)
        if standard.shares(own.floats, again.floats, wide=False).max() > 1 or _differ(own, again):
            add(Cause.STATE, str(split))
            continue
        if split != WHOLE:
            found = note(str(split), own)
            if found.invariance > 1 or _differ(own, standard.own):
                result, wide = best(standard, split, batch, own)
                add(*_said(explain(standard, Case(split, result, own, wide)), str(split)))
                continue
        if pad is not None:
            more = -n % (split.microbatches * split.devices) or split.microbatches * split.devices
            name = f"{split} with {more} rows of padding"
            padded = note(name, subject.divided(split, pad(batch, more)))
            if padded.invariance > 1:
                add(Cause.PLACEHOLDERS, name, f"{padded.invariance:.3g} times what rounding allows")
    if not standard.depends_on_places and not faults:
        turned = note(f"{splits[-1]} in reverse order", subject.divided(splits[-1], subject.rows(range(n - 1, -1, -1))))
        if turned.invariance > 1:
            add(Cause.UNEXPLAINED, turned.name, f"{turned.invariance:.3g} times what rounding allows")
    not_checked = []
    if exact is None:
        not_checked.append(f"accuracy, since {standard.not_wide}")
    if standard.depends_on_places:
        not_checked.append("other orders of the examples: one batch itself depends on their places")
    if pad is None:
        not_checked.append("padding: no pad was given")
    return StepReport(tuple(faults), tuple(runs), source, tuple(not_checked))


def _said(answer: tuple[Cause, str], run: str) -> tuple[Cause, str, str]:
    return answer[0], run, answer[1]


def _differ(a: Result, b: Result) -> bool:
    """Whether integers differ."""
    return any(x.shape != y.shape or np.any(x != y) for x, y in zip(a.integers, b.integers, strict=True))


def _splits(microbatches: Sequence[int], devices: Sequence[int]) -> list[Split]:
    for name, values in (("microbatches", microbatches), ("devices", devices)):
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or not len(values):
            raise GradCombineError(OPERATION, f"numbers of {name}", shown(values))
    counts, on = ([require_integer(OPERATION, f"a number of {name}", x) for x in values]
                  for name, values in (("microbatches", microbatches), ("devices", devices)))
    return [split for d in on for k in counts if (split := Split(k, d)) != WHOLE]


def _reference(standard: Standard, reference: Any) -> tuple[list[np.ndarray] | None, str]:
    if reference is None:
        if standard.wide is None:
            return None, ""
        return list(standard.wide.floats), "the same step in float64"
    made = reference(standard.subject.params, standard.subject.batch) if callable(reference) else reference
    result = standard.subject.read(made)
    return list(result.floats), "the given reference"
