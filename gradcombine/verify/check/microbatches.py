"""Checks that an optimizer that accumulates k microbatches makes the update of one batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import resolve
from gradcombine.errors import GradCombineError, invalid, operation
from gradcombine.types import Tree
from gradcombine.verify.check.checking import checked, splits_of
from gradcombine.verify.check.leaves import examples, flattened, shape_of
from gradcombine.verify.check.running import Split, Step, line
from gradcombine.verify.check.step_report import Cause, Fault, StepReport, StepRun
from gradcombine.verify.check.windows import FLOAT32, Leaves, Training, Windows, leaves
from gradcombine.verify.compare.ulp import rounding_unit


@operation("check_microbatches", renames=True)
def check_microbatches(
    loss: Callable[[Any, Any], Any],
    params: Tree,
    batch: Tree,
    inner: Any,
    accumulating: Callable[[Any, int], Any],
    *,
    microbatches: Sequence[int] = (2, 4),
    arguments: Callable[[Any, bool], Mapping[str, Any]] = lambda microbatch, last: {},
    partial: bool = False,
) -> StepReport:
    """Checks that an optimizer that accumulates makes the update of one batch per window, and names the cause if not.

    Measures the optimizer's response to the gradient of each microbatch: when the inner optimizer runs and what it
    counts, whether the parameters change within a window, the coefficients and rounding of the accumulation, changes of
    the updates, and whether a window affects the next one (for example by a NaN). The accumulation with the measured
    coefficients is then checked as a step by `check_step`.

    Args:
      loss: ``(params, microbatch) -> scalar``, the mean loss over a microbatch, in JAX or, for Keras, in TensorFlow.
      params: a tree of float arrays of any float dtype.
      batch: a tree of arrays whose first axis has the examples, as for `check_step`. It is split like
        `numpy.array_split`, ideally into microbatches of different weights.
      inner: the optimizer for training with one batch per update: an optax transformation, including clipping, decay
        and schedule; or a Keras optimizer.
      accumulating: function of ``inner`` and the number of microbatches that returns the optimizer under test, for
        example ``optax.MultiSteps``; for Keras, ``lambda inner, k: type(inner).from_config(inner.get_config() |
        {"gradient_accumulation_steps": k})``. It is also called with probes instead of ``inner``.
      microbatches: numbers to divide by.
      arguments: ``(microbatch, last) -> dict``, keyword arguments of each update of an optax transformation; ``last``
        is true for the last microbatch of a window: ``lambda microbatch, last: {"weight": microbatch["mask"].sum(),
        "flush": last}`` for `gradcombine.integrations.optax.accumulate`. Default: no arguments.
      partial: whether to also check windows that end one microbatch early.

    Returns:
      A `StepReport`, which prints as text: ``assert report.passes, report``. Windows are numbered from 0: two full
      ones, and with ``partial`` a partial and another full one.

    Raises:
      GradCombineError: as `check_step`; if ``accumulating`` does not use its argument; for an optimizer that is neither
        an optax transformation nor a Keras optimizer; if one of the functions raises (with its message).

    >>> import jax.numpy as jnp, numpy as np, optax
    >>> from gradcombine.integrations.optax import accumulate
    >>> from gradcombine.verify import check_microbatches
    >>> def loss(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> rng = np.random.default_rng(0)
    >>> batch = {"x": rng.normal(size=(7, 5)).astype(np.float32), "y": rng.normal(size=7).astype(np.float32)}
    >>> params = {"w": np.zeros(5, np.float32)}
    >>> report = check_microbatches(loss, params, batch, optax.sgd(0.1), accumulate, microbatches=[2])
    >>> print(report.faults[0].cause)
    mean of means: the microbatches' weights are ignored
    """
    splits = splits_of(microbatches, (1,), examples(batch))
    try:
        return _checked(_training(loss, inner, accumulating), params, batch, splits, arguments, partial)
    except GradCombineError:
        raise
    except Exception as error:  # users' functions may raise anything
        expected = "a loss and optimizers that take these parameters and microbatches"
        raise invalid(expected, f"{type(error).__name__}: {line(error)}") from error


def _checked(
    training: Training,
    params: Tree,
    batch: Tree,
    splits: Sequence[Split],
    arguments: Callable[[Any, bool], Mapping[str, Any]],
    partial: bool,
) -> StepReport:
    within, across, runs, coefficients = list[Fault](), list[Fault](), list[StepRun](), dict[int, list[Leaves]]()
    for split in splits:
        parts = _parts(batch, split.microbatches)
        gradients = [leaves(training.gradient(params, part)) for part in parts]
        if not all(np.isfinite(x).all() for row in gradients for x in row if x is not None):
            raise invalid("finite gradients", "NaN or infinity")
        windows = Windows(training, params, gradients, lambda i, last, parts=parts: arguments(parts[i], last), partial)
        faults = [Fault(cause, f"{split}, window {w}", detail) for cause, w, detail in windows.within_windows()]
        within += faults
        runs.append(StepRun(f"the accumulator with {split}", windows.share, None, None, ""))
        is_linear = all(fault.cause in (Cause.MOVED, Cause.COUNTED) for fault in faults)
        if is_linear and (not faults or windows.ends_at_last()):
            coefficients[split.microbatches] = windows.coefficients
            across += [Fault(cause, f"{split}, window {w}", detail) for cause, w, detail in windows.across_windows()]
    report = StepReport((), (), "")
    if coefficients:
        ones = [[None if x is None else np.ones((), np.float32) for x in leaves(training.gradient(params, batch))]]
        make_step = _step_of(training, {1: ones} | coefficients)
        report = checked(make_step, params, batch, {"microbatches": [*coefficients], "reverse": False})
    by_cause = dict[Cause, Fault]()
    for fault in (*within, *report.faults, *across):
        by_cause.setdefault(fault.cause, fault._replace(line=""))  # lines are those of _step_of
    not_asked = () if partial else ("partial windows",)
    return report._replace(faults=tuple(by_cause.values()), runs=(*report.runs, *runs), not_asked=not_asked)


def _step_of(training: Training, coefficients: Mapping[int, Sequence[Leaves]]) -> Callable[[int], Step]:
    """Returns a make_step for steps that add up the gradients of the microbatches with the measured coefficients."""

    def make_step(microbatches: int) -> Step:
        factors = coefficients[microbatches]

        def step(params: Tree, batch: Tree) -> Tree:
            parts = [tree.flatten(training.gradient(params, part))[0] for part in _parts(batch, microbatches)]
            rows = [[_times(x, c) for x, c in zip(*row, strict=True)] for row in zip(parts, factors, strict=True)]
            sums = [None if column[0] is None else sum(column) for column in zip(*rows, strict=True)]
            return tree.unflatten(tree.flatten(params)[1], sums)

        return step

    return make_step


def _times(x: Any, factors: np.ndarray | None) -> Any:
    """Multiplies an array by factors, in float32 or wider; None if there are no factors."""
    if factors is None:
        return None
    backend = resolve([x])
    wide = min(FLOAT32, backend.dtype(x), key=rounding_unit)
    return backend.product(backend.cast(x, wide), factors.astype(wide))


def _parts(batch: Tree, microbatches: int) -> list[Tree]:
    """Splits a batch into contiguous microbatches whose sizes differ by at most one."""
    arrays, structure = flattened(batch)
    n = next(shape_of(x)[0] for x in arrays if shape_of(x))
    pieces = [slice(x[0], x[-1] + 1) for x in np.array_split(range(n), microbatches)]
    return [tree.unflatten(structure, [x[piece] if shape_of(x) else x for x in arrays]) for piece in pieces]


def _training(loss: Any, inner: Any, accumulating: Any) -> Training:
    keras, optax = sys.modules.get("keras"), sys.modules.get("optax")
    if keras is not None and isinstance(inner, keras.optimizers.Optimizer):
        from gradcombine.verify.check.keras_windows import KerasTraining  # imports TensorFlow

        return KerasTraining(loss, inner, accumulating)
    if optax is not None and isinstance(inner, optax.GradientTransformation):
        from gradcombine.verify.check.optax_windows import OptaxTraining  # imports JAX

        return OptaxTraining(loss, inner, accumulating)
    raise invalid("an optax transformation or a Keras optimizer", type(inner).__name__)
