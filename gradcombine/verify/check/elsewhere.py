"""Compares the divisions of a step in its second step and at perturbed parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.verify.check.hypotheses import explain
from gradcombine.verify.check.leaves import perturbation
from gradcombine.verify.check.running import ONE_BATCH, NotFiniteError, Result, Split, Subject
from gradcombine.verify.check.standard import Standard
from gradcombine.verify.check.step_report import Cause, Fault

SECOND_STEP = "in the second step"
PERTURBED = "at perturbed parameters"


def faults_elsewhere(standard: Standard, splits: Sequence[Split]) -> tuple[dict[Cause, Fault], tuple[str, ...]]:
    """Returns the first fault at other parameters, by its cause, and what could not be compared.

    The first step hides how often a moment that starts at 0 decays, or the moving average of parameters that starts
    equal to them. A gradient, or that of a term of the loss, may be 0 for all examples at the given parameters, as of
    LoRA's first factor if the second one is 0, and nearly 0 in the second step. The second step of a PyTorch step is
    not compared: its optimizer has a state that is not among the parameters.
    """
    subject, missing = standard.subject, tuple[str, ...]()
    second = subject.returns_params and subject.framework != "torch"
    later = subject.after_one_batch() if second else subject
    places = {SECOND_STEP: later} if second else {}
    # Accumulators are 0 at the start of a window, parameters that are 0 change in the first step, and numbers in a
    # state may be hyperparameters that have to be less than 1.
    perturb = perturbation(0, 0.5, 0.0 if second else 0.5)
    places[PERTURBED] = later.perturbed(lambda x: x if second and not x.ndim else perturb(x))
    for where, other in places.items():
        one: Result | None = None
        try:
            one = other.run(ONE_BATCH, other.batch)
            fault = _fault(standard, other, one, where, splits)
        except GradCombineError:  # the step does not accept them, or a division overflows at perturbed parameters
            if one is not None and where == SECOND_STEP:
                raise
            missing += (f"divisions {where}, where the step raises, is not finite or skips an update",)
        else:
            if fault is not None:
                return {fault.cause: fault}, missing
    return {}, missing


def _fault(standard: Standard, later: Subject, one: Result, where: str, splits: Sequence[Split]) -> Fault | None:
    batch, second = later.batch, None
    for split in splits:
        name = f"{split} {where}"
        try:
            result = later.run(split, batch)
        except NotFiniteError as error:
            if where == PERTURBED:
                raise
            return Fault(Cause.NOT_FINITE, name, f"in leaf {error.path}")
        if where == PERTURBED and later.returns_params and _updates(one) != _updates(result):
            raise NotFiniteError(PERTURBED)  # a loss scale may skip an update that overflows
        near = standard.shares(result.floats, one.floats, wide=False).max() <= 1
        if near and not result.differs_in_integers(one) and _are_near_in_float64(standard, later, split):
            continue
        second = second or standard.at(later)
        far = second.distance(split, batch, result)
        standard.is_coarse |= second.is_coarse
        if far > 1:
            cause, detail, line = explain(second, split, result)
            standard.not_compared = second.not_compared
            return Fault(cause, name, detail, line)
    return None


def _updates(result: Result) -> bool:
    """Whether a step changes more than numbers, such as a loss scale."""
    return any(x.ndim and np.any(x) for x in result.floats)


def _are_near_in_float64(standard: Standard, later: Subject, split: Split) -> bool:
    """Whether a division at other parameters is near one batch in float64, too; narrow steps are examined further."""
    if standard.is_narrow or not standard.in_both:
        return not standard.is_narrow
    one, divided = (later.tried(x, later.batch, wide=True) for x in (ONE_BATCH, split))
    if one is None or divided is None:
        return False
    return float(standard.float32_shares(divided.floats, one.floats).max()) <= 1
