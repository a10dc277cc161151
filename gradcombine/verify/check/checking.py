"""Does a step give the same, however its batch is divided?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from gradcombine.errors import GradCombineError, invalid, operation, require_integer, require_list, require_one_of
from gradcombine.types import Tree
from gradcombine.verify.check.divided_terms import Terms, require_right
from gradcombine.verify.check.epsilons import other_constants
from gradcombine.verify.check.hypotheses import case_of, explain
from gradcombine.verify.check.hypotheses import hidden as hidden_cause
from gradcombine.verify.check.leaves import as_floats
from gradcombine.verify.check.measure import FLOAT32_UNIT, StepStandard
from gradcombine.verify.check.running import WHOLE, NotFiniteError, NotWide, Result, Split, Step, Subject
from gradcombine.verify.check.standard import Floats
from gradcombine.verify.check.step_report import Cause, Fault, StepReport, StepRun
from gradcombine.verify.compare.ulp import rounding_unit


@operation("check_step")
def check_step(
    make_step: Callable[..., Step],
    params: Tree,
    batch: Tree,
    *,
    microbatches: Sequence[int] = (2, 4),
    devices: Sequence[int] = (1,),
    returns: Literal["gradients", "params"] = "gradients",
    pad: Callable[[Any, int], Any] | None = None,
    terms: Terms | None = None,
    reference: Tree | Step | None = None,
    unit: float | None = None,
) -> StepReport:
    """Runs a step on one batch and on the same batch divided, and names why they do not give the same.

    Two questions are kept apart, each with a bound of its own. *Invariance*: how far is a division's result from that
    of one batch? *Accuracy*: how far is each from the same step on one batch in float64? The answer to the second says
    which side is off: by how many times its own rounding noise, measured on the step itself, a result is away.

    A cause is named where it accounts for the whole difference: what the defect would give is computed from what one
    batch gives of the examples, and compared with what the division gives, in float64 where the step runs in it. Else
    the answer is `Cause.UNEXPLAINED`.

    Args:
      make_step: ``make_step(microbatches) -> step``, called once for each division, and with 1 for one batch; with a
        keyword ``devices`` where that is more than one. ``step(params, batch)`` is the whole step, with its
        accumulation, exchange and compilation: in JAX, TensorFlow, PyTorch or NumPy, jitted or not. It may donate what
        it gets, and change modules in place.
      params: a tree of arrays, and of PyTorch's modules and optimizers; floats of any dtype, other leaves as they are
        (counters, random keys).
      batch: a tree of arrays with a first axis of n examples, the same for all; scalars belong to all examples. Best
        are 8 to 64 examples: each of them is then run by itself too, in a batch of n copies.
      microbatches, devices: numbers to divide by; all pairs of them are run.
      returns: ``"gradients"``: whatever tree the step returns, a loss and metrics too, is a mean over the examples.
        ``"params"``: it returns a tree like ``params``, and its distance from them is compared; metrics may follow it
        in a tuple.
      pad: ``(batch, n) -> batch``, with n placeholder rows after the examples, which must not count. None: not checked.
      terms: for a loss of several terms with a denominator each, ``(params, examples) -> {name: (gradient, weight)}``:
        the gradient of the term's sum over these examples, and the weight that the sum is divided by. Of a step that
        returns new parameters, they are compared with the gradient that reaches the optimizer in its JAX program. None:
        a term that is divided by another's count stays unexplained.
      reference: what one batch gives, in float64 for instance: a tree, or ``(params, batch) -> tree``. None: the step
        itself runs in float64, on one batch.
      unit: the unit roundoff that the step computes in, 2**-24 for float32. None: that of the narrowest operands of its
        products of matrices, where its program can be read, or else of its result.

    Returns:
      A `StepReport`, which prints as sentences: ``assert report.passes, report``.

    Raises:
      GradCombineError: for a batch without a common first axis, or with fewer examples than parts; for a step that
        cannot take the batch, alone or divided, with what it raised; for one batch's result that is not finite;
        for a result that holds no floats, or has another structure than on one batch or than ``params``.

    A result may be 16 times the measured noise away, plus the bound of the sum over the examples; two results together
    twice that. Where a step computes in less than float32, that hides much: its divisions are compared in float64, too,
    to what float32 allows, if they run in it. What could not be compared is listed in the report, whose `verdict` is
    then `Verdict.CANNOT_TELL`: it does not pass.

    >>> import numpy as np
    >>> from gradcombine.verify import check_step
    >>> def gradient(w, x, y):
    ...     return x.T @ (x @ w - y) / len(y)  # a mean over the examples
    >>> def make_step(microbatches):
    ...     def step(w, batch):
    ...         size = -(-10 // microbatches)
    ...         parts = [(batch["x"][i : i + size], batch["y"][i : i + size]) for i in range(0, 10, size)]
    ...         return sum(gradient(w, x, y) for x, y in parts) / np.float32(len(parts))
    ...     return step
    >>> rng = np.random.default_rng(0)
    >>> batch = {"x": rng.normal(size=(10, 3)).astype(np.float32), "y": rng.normal(size=10).astype(np.float32)}
    >>> check_step(make_step, np.ones(3, np.float32), batch, microbatches=(2, 5)).passes
    True
    >>> report = check_step(make_step, np.ones(3, np.float32), batch, microbatches=(4,))
    >>> print(report.faults[0].cause, report.faults[0].detail, sep="; ")
    mean of means: the microbatches' weights are ignored; they weigh from 0.1 to 0.3 in one batch
    """
    case = {"microbatches": microbatches, "devices": devices, "returns": returns, "pad": pad, "terms": terms}
    return checked(make_step, params, batch, case | {"reference": reference, "unit": unit})


DEFAULTS: dict[str, Any] = {"microbatches": (2, 4), "devices": (1,), "returns": "gradients"}


def checked(
    make_step: Callable[..., Step],
    params: Tree,
    batch: Tree,
    settings: Mapping[str, Any],
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> StepReport:
    """`check_step` with its settings by name.

    Args:
      progress: called before each part with its name, how many are done, and how many there are.
    """
    given = DEFAULTS | dict(settings)
    microbatches, devices, returns = given["microbatches"], given["devices"], given["returns"]
    require_one_of("returns to be 'gradients' or 'params'", returns, ("gradients", "params"))
    if "torch" in sys.modules:
        from gradcombine.verify.check.torch_steps import as_arrays  # imports torch

        make_step, params, batch, given = as_arrays(make_step, params, batch, given)
    subject = Subject(make_step, params, batch, returns == "params", given.get("turns", True))
    pad, terms, reference, unit = (given.get(name) for name in ("pad", "terms", "reference", "unit"))
    n = subject.examples
    splits = splits_of(microbatches, devices, n)
    parts = ["one batch, and its rounding noise", *map(str, splits), "what one batch gives after the others"]
    progress(parts[0], 0, len(parts))
    first, second = subject.divided(WHOLE, batch), None
    subject.program(subject.step(WHOLE), batch)  # a step that keeps state keeps tracers of it, and fails after it
    with suppress(GradCombineError):
        second = subject.divided(WHOLE, batch)
    if second is None or _changes(first, second):
        return _not_repeatable(str(WHOLE))
    standard = StepStandard(subject, unit)
    if terms is not None:
        require_right(standard, terms)
    exact, source = _reference(standard, reference)
    faults: list[Fault] = []
    runs: list[StepRun] = []
    hidden: list[bool] = []

    def add(cause: Cause, run: str, detail: str = "", line: str = "") -> None:
        if cause not in [fault.cause for fault in faults]:
            faults.append(Fault(cause, run, detail, line=line))

    def note(name: str, result: Result, whole: Result, reference: Floats | None) -> StepRun:
        shares = standard.shares(result.floats, whole.floats, wide=False)
        accuracy, noises = (None, None) if reference is None else standard.accuracy(result, reference)
        run = StepRun(
            name,
            float(shares.max()),
            None if accuracy is None else float(accuracy.max()),
            None if noises is None else float(noises.max()),
            subject.names[int(shares.argmax())],
            dict(zip(subject.names, map(float, shares), strict=True)),
        )
        runs.append(run)
        return run

    def distance(name: str, split: Split, batch: Tree, own: Result, backwards: bool = False) -> float:
        """From one batch, over what is allowed: in its own precision, or in float64 where that one hides much."""
        moved = backwards and standard.depends_on_places
        run = note(name, own, standard.backwards if backwards else standard.own, None if moved else exact)
        if _differ(own, standard.own):
            return float("inf")
        if run.invariance > 1 or standard.unit <= FLOAT32_UNIT:
            return run.invariance
        try:
            best = standard.in_float64(WHOLE, batch) if moved else standard.wide
            made = None if best is None else standard.in_float64(split, batch)
        except NotWide:
            best = made = None
        hidden.append(made is None)
        return run.invariance if best is None or made is None else standard.shown(made.floats, best.floats)

    one = note(str(WHOLE), standard.own, standard.own, exact)
    for i, split in enumerate([WHOLE, *splits]):
        progress(parts[i], i, len(parts))
        try:
            own, again = subject.divided(split, batch), subject.divided(split, batch)
        except NotFiniteError as error:
            add(Cause.NOT_FINITE, str(split), f"in {error.path}")
            continue
        if _changes(own, again):
            add(Cause.STATE, str(split))
            continue
        if split != WHOLE and distance(str(split), split, batch, own) > 1:
            cause, detail, line = explain(standard, case_of(standard, split, own, terms))
            add(cause, str(split), detail, line)
            continue
        if pad is not None:
            more = -n % (split.microbatches * split.devices) or split.microbatches * split.devices
            name, filled = f"{split} with {more} rows of padding", pad(batch, more)
            padded = subject.divided(split, filled)._replace(integers=standard.own.integers)
            if (times := distance(name, split, filled, padded)) > 1:
                add(Cause.PLACEHOLDERS, name, f"{times:.3g} times what rounding allows")
    unclear = ""
    if not faults and subject.returns_params and (answer := hidden_cause(standard, splits[-1], terms)) is not None:
        if answer[0] is Cause.UNEXPLAINED:
            unclear = answer[1]
        else:
            add(answer[0], str(splits[-1]), *answer[1:])
    others = reference is None and not standard.is_retyped(WHOLE, batch)
    if one.accuracy is not None and 1 < one.accuracy <= CONSTANTS and others:
        unclear = f"accuracy: {one.noises:.3g} times its noise from a run in float64, which may have other constants"
    elif one.accuracy is not None and one.accuracy > 1:
        inaccurate = Fault(Cause.INACCURATE, one.name, f"{one.noises:.3g} times its noise")
        right = any(run.accuracy is not None and run.accuracy <= 1 for run in runs)
        faults = [inaccurate, *faults] if right else [*faults, inaccurate]
    progress(parts[-1], len(parts) - 1, len(parts))
    if not faults and subject.turns:
        backwards, split = subject.on(standard.turned), splits[-1]
        own, name = backwards.divided(split, backwards.batch), f"{split} in reverse order"
        if distance(name, split, backwards.batch, own, backwards=True) > 1:
            of_these = StepStandard(backwards, unit)
            cause, detail, _ = explain(of_these, case_of(of_these, split, own, terms))
            add(cause, name, detail)
    if _changes(first, subject.divided(WHOLE, batch)):
        return _not_repeatable(f"{WHOLE}, after other batches")  # which are in all results
    of_result = standard.hidden(standard.own.floats)
    not_checked: list[str] = []
    # Narrower steps are compared in float64, too; and rounding may decide of an element of Adam's first step.
    coarse = of_result > COARSE and standard.unit <= FLOAT32_UNIT and not subject.returns_params
    if any(hidden) or coarse:
        of_params = standard.hidden([as_floats(x) for _, x in subject.param_leaves])
        sizes = f"of less than {of_result:.2g} of the result, or {of_params:.2g} of the parameters"
        not_checked.append(f"differences {sizes}, which its own rounding hides")
    not_checked += [unclear] * bool(unclear)
    if not faults and (replaced := other_constants(subject, splits[-1])):
        not_checked.append(replaced)
    if exact is None:
        not_checked.append(f"accuracy, since {standard.not_wide}")
    not_asked = ("padding, for which no pad was given",) if pad is None else ()
    return StepReport(tuple(faults), tuple(runs), source, tuple(not_checked), not_asked)


CONSTANTS = 2.0**12
"""Up to how many times the bound a step that cannot be retyped may be off by its constants: in float64, Adam's 0.999 is
another number than in float32, and 1 - 0.999 has a thousand times the difference."""

COARSE = 0.1
"""Part of the result that rounding may hide: where a step jumps, its noise is no measure of its rounding."""

REPEATED = 64
"""By how many units of rounding a result may differ the second time: parallel additions have no fixed order."""


def _changes(a: Result, b: Result) -> bool:
    """Whether two results of the same call are different results."""
    far = any(
        np.sqrt(np.mean(np.square(x - y))) > REPEATED * rounding_unit(dtype) * np.sqrt(np.mean(np.square(x)))
        for x, y, dtype in zip(a.floats, b.floats, a.dtypes, strict=True)
        if x.size
    )
    return far or _differ(a, b)


def _not_repeatable(run: str) -> StepReport:
    return StepReport((Fault(Cause.STATE, run),), (), "", ("any division",))


def _differ(a: Result, b: Result) -> bool:
    """Whether integers differ."""
    return any(x.shape != y.shape or np.any(x != y) for x, y in zip(a.integers, b.integers, strict=True))


def splits_of(microbatches: Sequence[int], devices: Sequence[int], examples: int) -> list[Split]:
    """The divisions of so many examples, but for one batch."""
    numbers: list[list[int]] = []
    for name, values in (("microbatches", microbatches), ("devices", devices)):
        items = require_list(f"numbers of {name}", values)
        numbers.append([require_integer(f"a number of {name}", x) for x in items])
    splits = [split for d in numbers[1] for k in numbers[0] if (split := Split(k, d)) != WHOLE]
    if not splits:
        raise invalid("a division of the batch to compare with one batch", f"{WHOLE} alone")
    for split in splits:
        if split.microbatches * split.devices > examples:
            raise invalid(f"at least as many examples as parts: {split}", examples)
    return splits


def _reference(standard: StepStandard, reference: Any) -> tuple[list[np.ndarray] | None, str]:
    if reference is None:
        if standard.wide is None:
            return None, ""
        return list(standard.wide.floats), "the same step in float64"
    made = reference(standard.subject.params, standard.subject.batch) if callable(reference) else reference
    result = standard.subject.read(made)
    return list(result.floats), "the given reference"
