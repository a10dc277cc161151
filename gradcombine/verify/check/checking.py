"""Checks that a step's result does not depend on how its batch is divided."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from gradcombine.errors import (
    invalid,
    operation,
    require_integer,
    require_list,
    require_number,
    require_one_of,
    translate_errors,
)
from gradcombine.types import Tree
from gradcombine.verify.check import step_program
from gradcombine.verify.check.divided_terms import require_right
from gradcombine.verify.check.elsewhere import faults_elsewhere
from gradcombine.verify.check.hypotheses import explain
from gradcombine.verify.check.hypotheses import hidden as hidden_cause
from gradcombine.verify.check.leaves import REPEATED, as_floats, perturbation, rms
from gradcombine.verify.check.measure import FLOAT32_UNIT, UNIT64
from gradcombine.verify.check.running import (
    ONE_BATCH,
    NotFiniteError,
    Result,
    Split,
    Step,
    Subject,
)
from gradcombine.verify.check.standard import Standard
from gradcombine.verify.check.step_report import BY_DESIGN, Cause, Fault, StepReport, StepRun
from gradcombine.verify.check.terms import ByName, Terms
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
    terms: ByName | None = None,
    reference: Tree | Step | None = None,
    unit: float | None = None,
) -> StepReport:
    """Checks that a step returns the same result for one batch and for the batch divided, and names the cause if not.

    Measures two distances of each division's result, each with its own bound. *Invariance*: the distance from the
    result of one batch. *Accuracy*: the distance from one batch of the same step in float64, also as a multiple of the
    step's measured rounding noise; it tells which of two different results is wrong.

    Names a cause if it explains the full difference: the result that the defect would produce is predicted from one
    batch's results for subsets of the examples, and compared with the division's result, in float64 if the step runs in
    float64. Otherwise the cause is `Cause.UNEXPLAINED`.

    Args:
      make_step: ``make_step(microbatches) -> step``, called once for each division, with 1 for one batch, and with a
        keyword argument ``devices`` if there are several. ``step(params, batch)`` is the full step, including
        accumulation, all-reduce and compilation, in JAX, TensorFlow, PyTorch or NumPy. It may donate its arguments and
        change modules in place. In PyTorch, and with variables in TensorFlow, it is called again for float64, where
        variables and Keras layers made elsewhere are widened while a step runs.
      params: a tree of arrays, and PyTorch modules, optimizers, learning rate schedules and gradient scalers, of which
        each run gets copies; hooks of an optimizer's steps must use the optimizer that they receive. Floats may have
        any dtype; other leaves (counters, random keys, texts) are passed unchanged.
      batch: a tree of arrays whose first axis has n examples; scalars apply to all examples. 8 to 64 examples work
        best: each one is then also run alone, as a batch of n copies.
      microbatches, devices: numbers to divide by; all pairs are run.
      returns: ``"gradients"``: the step returns a tree of means over the examples, which may include a loss and
        metrics. It is also compared at perturbed parameters, since gradients may be 0 at the given ones.
        ``"params"``: it returns a tree like ``params``, alone or in a tuple before metrics; the change of the
        parameters is compared. If its size does not depend on that of the gradients, as in Adam's first step or after
        clipping, the verdict is `Verdict.CANNOT_TELL`, unless the gradients are found and compared: in the step's JAX
        program, or at a Keras optimizer on TensorFlow outside of strategies. A second step is compared, too, from its
        parameters and from perturbed ones: it shows how often moments that start at 0 decay, and terms of the loss
        whose gradient is 0 at first. In PyTorch, one at perturbed parameters takes its place, and another from the same
        parameters shows whether gradients of the first one remain (zero_grad is missing).
      pad: ``(batch, n) -> batch`` that appends n padding rows, which must not count. None: padding is not checked.
      terms: for a loss of several terms with a denominator each, ``(params, examples) -> {name: (gradient, weight)}``:
        the gradient of the term's sum over the examples, and the weight that divides this sum. If the step returns new
        parameters, these are compared with the gradient that reaches the optimizer. None: a wrong denominator remains
        unexplained.
      reference: the right result of one batch, for example computed in float64: a tree, or ``(params, batch) -> tree``.
        None: the step itself is run on one batch in float64.
      unit: unit roundoff of the step, 2**-24 for float32. None: that of the narrowest operand of its matrix products if
        its program can be read, else that of its result. A step that rounds to 8 bits but multiplies in float32 (fake
        quantization) needs the unit of the 8-bit dtype, such as 2**-4 for float8_e4m3fn.

    Returns:
      A `StepReport`, which prints as text: ``assert report.passes, report``.

    Raises:
      GradCombineError: for a batch without a common first axis, or with fewer examples than parts; for a step that
        raises on the batch, divided or not (with its message); if the result of one batch is not finite; for a
        result that has no floats, or another structure, shape or kind of numbers than for one batch or than ``params``.

    A result may differ by 16 times the measured noise plus the rounding bound of a sum over the examples, and two
    results by twice that. For steps with a dtype narrower than float32, and for changes of parameters within the
    rounding of the stored parameters, this bound hides much, so their divisions are also compared in float64, within
    the bound for float32, if they run in float64. Comparisons that were impossible are listed in the report, whose
    `verdict` is then `Verdict.CANNOT_TELL`, which does not pass.

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
    settings = {"microbatches": microbatches, "devices": devices, "returns": returns, "pad": pad, "terms": terms}
    return checked(make_step, params, batch, settings | {"reference": reference, "unit": unit})


DEFAULTS: dict[str, Any] = {"microbatches": (2, 4), "devices": (1,), "returns": "gradients"}


def checked(
    make_step: Callable[..., Step],
    params: Tree,
    batch: Tree,
    settings: Mapping[str, Any],
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> StepReport:
    """Runs `check_step` with settings by name.

    Args:
      progress: called before each part with its name, the number of finished parts, and the number of all parts.
    """
    settings = DEFAULTS | dict(settings)
    microbatches, devices, returns = settings["microbatches"], settings["devices"], settings["returns"]
    require_one_of("returns to be 'gradients' or 'params'", returns, ("gradients", "params"))
    if "torch" in sys.modules:
        from gradcombine.verify.check.torch_steps import as_arrays  # imports torch

        make_step, params, batch, settings = as_arrays(make_step, params, batch, settings)
    subject = Subject(make_step, params, batch, returns == "params", settings.get("reverse", True))
    if "tensorflow" in sys.modules and subject.framework in ("tensorflow", "numpy"):
        from gradcombine.verify.check.tensorflow_programs import in_each_precision

        subject.make_step = in_each_precision(make_step, params, batch)
    pad, terms, reference, unit = (settings.get(name) for name in ("pad", "terms", "reference", "unit"))
    expected = "a unit roundoff from 2**-53 to below 1, such as 2**-24"
    if unit is not None and (unit := require_number(expected, unit, UNIT64)) >= 1:
        raise invalid(expected, unit)
    n = subject.examples
    splits = splits_of(microbatches, devices, n)
    parts = ["one batch and its rounding noise", *map(str, splits), "one batch again"]
    progress(parts[0], 0, len(parts))
    first = subject.run(ONE_BATCH, batch)
    # Tracing leaks tracers into the state of a step that is not pure, which then raises or changes its result.
    subject.program(subject.step(ONE_BATCH), batch)
    second = subject.tried(ONE_BATCH, batch)
    if second is None or _differs(first, second):
        return _not_repeatable(str(ONE_BATCH))
    standard = Standard(subject, unit, None if terms is None else Terms(terms))
    if terms is not None:
        require_right(standard)
    reference_floats, source = _reference(standard, reference)
    faults: dict[Cause, Fault] = {}
    runs, results = list[StepRun](), dict[Split, Result]()

    def add(run: str, cause: Cause, detail: str = "", line: str = "") -> None:
        faults.setdefault(cause, Fault(cause, run, detail, line))

    def run(name: str, split: Split, batch: Tree) -> Result | None:
        """Runs a division; records the fault if its result is not finite, or has a narrower dtype."""
        try:
            result = subject.run(split, batch)
        except NotFiniteError as error:
            return add(name, Cause.NOT_FINITE, f"in leaf {error.path}")
        result.require_form_of(first)
        for leaf, dtype, expected in zip(subject.names, result.dtypes, first.dtypes, strict=True):
            if rounding_unit(dtype) > max(rounding_unit(expected), FLOAT32_UNIT):
                return add(name, Cause.PRECISION, f"leaf {leaf} is {dtype} instead of {expected}")
        return result

    def measure(name: str, result: Result, reverse: bool = False) -> StepRun:
        """Records a run's distances from one batch and, unless the order of the examples matters, the reference."""
        one, accuracy, noises = standard.one_reversed if reverse else standard.native, None, None
        shares = standard.shares(result.floats, one.floats, wide=False)
        if reference_floats is not None and not (reverse and standard.depends_on_order):
            accuracy, noises = standard.accuracy(result, reference_floats)
        worst, by_leaf = subject.names[int(shares.argmax())], dict(zip(subject.names, map(float, shares), strict=True))
        runs.append(StepRun(name, float(shares.max()), accuracy, noises, worst, by_leaf))
        return runs[-1]

    def distance(name: str, split: Split, batch: Tree, result: Result, reverse: bool = False) -> float:
        """Records a run; returns its distance from one batch over the bound."""
        measure(name, result, reverse)
        return standard.distance(split, batch, result, reverse)

    one_run = measure(str(ONE_BATCH), standard.native)
    for i, split in enumerate([ONE_BATCH, *splits]):
        progress(parts[i], i, len(parts))
        result, repeated = run(str(split), split, batch), run(str(split), split, batch)
        if result is None or repeated is None:
            continue
        results[split] = result
        if _differs(result, repeated):
            add(str(split), Cause.STATE)
            continue
        if split != ONE_BATCH and distance(str(split), split, batch, result) > 1:
            add(str(split), *explain(standard, split, result))
            continue
        if split != ONE_BATCH and (dtype := standard.narrow_sums(split)):
            text = f"gradients are added in {dtype}, which rounds them by more than float32 does"
            add(str(split), Cause.PRECISION, text, step_program.line_of(Cause.PRECISION, "", subject, split))
            continue
        if result.unequal:
            add(str(split), Cause.NOT_EXCHANGED, f"leaf {result.unequal[0]} differs between devices")
            continue
        if pad is not None:
            rows = -n % (split.microbatches * split.devices) or split.microbatches * split.devices
            name = f"{split} with {rows} rows of padding"
            with translate_errors("pad(batch, rows) -> batch", Exception):
                padded = pad(batch, rows)
            result = run(name, split, padded)
            if result is not None and (share := distance(name, split, padded, result)) > 1:
                add(name, Cause.PLACEHOLDERS, f"{share:.3g} times the rounding bound")
    unclear, examined = "", True
    for split in splits if subject.returns_params else ():
        if faults:
            break
        if (answer := hidden_cause(standard, split)) is not None:
            if answer[0] is Cause.UNEXPLAINED:
                unclear = f"{answer[1]}: {split}"
            else:
                add(str(split), *answer)
        examined = examined and standard.gradient_examined
        standard.gradient_examined = examined  # in all divisions so far
    constants_may_differ = reference is None and not standard.is_retyped(ONE_BATCH, batch)
    if one_run.accuracy is not None and 1 < one_run.accuracy <= MAX_FROM_CONSTANTS and constants_may_differ:
        unclear = f"accuracy: {one_run.noises:.3g} times the noise from a float64 run whose constants may differ"
    elif one_run.accuracy is not None and one_run.accuracy > 1:
        inaccurate = Fault(Cause.INACCURATE, one_run.name, f"{one_run.noises:.3g} times its noise")
        any_accurate = any(run.accuracy is not None and run.accuracy <= 1 for run in runs)
        of_one = {Cause.INACCURATE: inaccurate}
        faults = of_one | faults if any_accurate else faults | of_one
    progress(parts[-1], len(parts) - 1, len(parts))
    if not faults and subject.reverse:
        split, in_reverse = splits[-1], standard.reversed_batch
        name = f"{split} in reverse order"
        result = run(name, split, in_reverse)
        if result is not None and distance(name, split, in_reverse, result, reverse=True) > 1:
            cause, detail, _ = explain(standard.at(subject.on(in_reverse)), split, result)
            add(name, cause, detail)
    not_asked = () if pad is not None else ("padding, which needs the argument pad",)
    if not faults:
        faults, missing = faults_elsewhere(standard, splits)
        not_asked += missing
    by_design = faults.keys() <= {*BY_DESIGN.values()}
    if by_design and subject.framework == "torch" and (split := _leaves_gradients(subject, results)):
        if cast("Any", make_step).takes_optimizer:
            add(str(split), Cause.STATE, "a second step adds its gradients to those of the first; call zero_grad")
        else:
            not_asked += ("a second step, whose gradients add to those of the first unless zero_grad is called",)
    if not faults and subject.framework == "torch" and standard.draws:
        not_asked += (
            "random numbers on other devices, where microbatches may not draw those of one batch as they do here",
        )
    if _differs(first, subject.run(ONE_BATCH, batch)):
        return _not_repeatable(f"{ONE_BATCH}, after other batches")  # state of other runs is in all results
    of_result = standard.hidden_fraction([standard.native.floats[i] for i in standard.gradients])
    not_checked: list[str] = []
    # Some steps are also compared in float64, and new parameters up to the gradients.
    compared = standard.in_both or standard.gradient_examined or bool(standard.observed)
    coarse = COARSE < of_result < np.inf and not compared
    if standard.is_coarse or coarse:
        of_params = standard.hidden_fraction([as_floats(x) for _, x in subject.param_leaves])
        sizes = f"smaller than {of_result:.2g} of the result, or {of_params:.2g} of the parameters"
        not_checked.append(f"differences {sizes}, which rounding hides")
    not_checked += filter(None, (unclear, standard.not_compared))
    if hides := standard.uninformative(bool(faults)):
        not_checked.append(hides)
    if not faults and (difference := step_program.other_constants(subject, splits[-1])):
        not_checked.append(difference)
    if reference_floats is None:
        not_checked.append(f"accuracy, since {standard.not_wide} (pass a reference)")
    return StepReport(tuple(faults.values()), tuple(runs), source, tuple(not_checked), not_asked)


MAX_FROM_CONSTANTS = 2.0**12
"""Largest distance, over the bound, that different constants may explain in a step that cannot be retyped: Adam's 0.999
is rounded differently in float32 and float64, and 1 - 0.999 has a thousand times the relative difference."""

COARSE = 0.1
"""Fraction of the result above which hidden differences are reported: if a step has jumps, its noise does not measure
its rounding."""


def _leaves_gradients(subject: Subject, results: Mapping[Split, Result]) -> Split | None:
    """Returns the first division of a PyTorch step whose result changes if it starts with gradients that it left."""
    for split, result in results.items() if subject.returns_params else ():
        step: Any = subject.step(split)
        # At other parameters, because clipping hides that a parallel gradient is added.
        subject.tried(split, subject.batch, noise=perturbation(0, 0.5, 0.5))
        if _differs(result, subject.run(split, subject.batch, step=step.again)):
            return split
    return None


def _differs(a: Result, b: Result) -> bool:
    """Whether two results of the same call differ by more than the order of additions explains."""
    far = any(
        rms(x - y) > REPEATED * rounding_unit(dtype) * rms(x)
        for x, y, dtype in zip(a.floats, b.floats, a.dtypes, strict=True)
    )
    return far or a.differs_in_integers(b)


def _not_repeatable(run: str) -> StepReport:
    return StepReport((Fault(Cause.STATE, run),), (), "", ("all divisions",))


def splits_of(microbatches: Sequence[int], devices: Sequence[int], examples: int) -> list[Split]:
    """Returns all pairs of microbatches and devices except one batch."""
    numbers: list[list[int]] = []
    for name, values in (("microbatches", microbatches), ("devices", devices)):
        items = require_list(f"numbers of {name}", values)
        numbers.append(list(dict.fromkeys(require_integer(f"a number of {name}", x) for x in items)))
    splits = [split for d in numbers[1] for k in numbers[0] if (split := Split(k, d)) != ONE_BATCH]
    if not splits:
        raise invalid("a division of the batch to compare with one batch", f"{ONE_BATCH} alone")
    for split in splits:
        if split.microbatches * split.devices > examples:
            raise invalid(f"at least as many examples as parts: {split}", examples)
    return splits


def _reference(standard: Standard, reference: Any) -> tuple[list[np.ndarray] | None, str]:
    if reference is None:
        if standard.wide is None:
            return None, ""
        return list(standard.wide.floats), "the same step in float64"
    with translate_errors("reference(params, batch) -> tree", Exception):
        value = reference(standard.subject.params, standard.subject.batch) if callable(reference) else reference
    try:
        result = standard.subject.read(value)
    except NotFiniteError as error:
        raise invalid("a finite reference", error.received, error.path) from None
    result.require_form_of(standard.native)
    return list(result.floats), "the reference argument"
