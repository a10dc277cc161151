"""Do k accumulated microbatches give the update of one batch?"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import shape_of
from gradcombine.errors import GradCombineError, operation, require_list, require_number, shown
from gradcombine.verify.check.combinations import linear
from gradcombine.verify.check.retyping import NotWide
from gradcombine.verify.check.running import WHOLE, Subject, line
from gradcombine.verify.check.step_report import Cause, Fault, Verdict
from gradcombine.verify.check.windows import (
    FLOAT32,
    OPERATION,
    Change,
    Run,
    Trace,
    Window,
    arrived,
    fault,
    faults,
    leaves,
    trained,
)
from gradcombine.verify.compare.ulp import rounding_unit


class Training(Protocol):
    """A loss with an optimizer that accumulates."""

    def gradient(self, params: Any, microbatch: Any) -> Any:
        """A tree of arrays of the framework."""
        ...

    def narrow(self, params: Any, microbatch: Any) -> str:
        """Why the gradient, which is no program of JAX, cannot be computed in float64; empty if it can."""
        ...

    def start(self, params: Any, alone: bool) -> Run:
        """A new run; alone: of the accumulation without an optimizer, which leaves the parameters as they are."""
        ...


class WindowResult(NamedTuple):
    """How near a window's gradient came to the mean.

    Attributes:
      window: its number, counted from 0.
      weights: of its microbatches.
      share: the largest distance of the gradient that reached the inner optimizer from the exact weighted mean, over
        what rounding allows: at most 1. None where no gradient reached it at the window's end.
    """

    window: int
    weights: tuple[float, ...]
    share: float | None


class MicrobatchReport(NamedTuple):
    """The result of `check_microbatches`; prints as sentences.

    Attributes:
      faults: the first fault of every window that has one, each cause once, the first window first.
      windows: how near each came. After a partial last window the first one is run again, and is listed again.
      full_batch: the largest distance of a full batch's gradient from the microbatches' mean, both in float64, over
        what is allowed; None if it was not checked.
      not_checked: why not; empty if it was. Without it, the report does not pass.
    """

    faults: tuple[Fault, ...]
    windows: tuple[WindowResult, ...]
    full_batch: float | None = None
    not_checked: str = ""

    @property
    def verdict(self) -> Verdict:
        return Verdict.of(self.faults, self.not_checked)

    @property
    def passes(self) -> bool:
        """Whether everything was compared, and nothing found."""
        return self.verdict is Verdict.PASSES

    @property
    def cause(self) -> Cause | None:
        """The first one; None if there is none."""
        return self.faults[0].cause if self.faults else None

    def __str__(self) -> str:
        if self.faults:
            lines = ["microbatches do not equal one batch", *(f"  {fault}" for fault in self.faults)]
        else:
            shares = [window.share for window in self.windows if window.share is not None]
            worst = f"{max(shares):.2f} of the rounding bound at most" if shares else "no gradient"
            unsure = "cannot tell whether " if self.not_checked else ""
            lines = [f"{unsure}microbatches equal one batch: {len(self.windows)} windows, {worst}"]
        if self.full_batch is not None:
            lines.append(f"  full batch against microbatches in float64: {self.full_batch:.1e} of what is allowed")
        if self.not_checked:
            lines.append(f"  full batch against microbatches: not checked, since {self.not_checked}")
        return "\n".join(lines)


@operation("check_microbatches")
def check_microbatches(
    loss: Callable[[Any, Any], Any],
    params: Any,
    windows: Sequence[Sequence[Any]],
    inner: Any,
    accumulating: Callable[[Any], Any],
    *,
    weights: Callable[[Any], float] | None = None,
    arguments: Callable[[float, bool], Mapping[str, Any]] = lambda weight, last: {},
    join: Callable[[Sequence[Any]], Any] | None = None,
) -> MicrobatchReport:
    """Trains over some windows of microbatches, and names why they do not equal one batch each.

    It checks: the loss (is a batch's gradient the weighted mean of its microbatches', in float64?); when the inner
    optimizer runs and what it counts; whether the parameters stay within a window; the gradient that reaches the inner
    optimizer, against the exact weighted mean; what happens to its updates; what becomes of a partial window; and
    whether a NaN that the check itself puts into the first window is gone in the next.

    Args:
      loss: ``(params, microbatch) -> scalar``, the mean loss over a microbatch, in JAX or, for Keras, in TensorFlow.
      params: a tree of float arrays, with leaves of gradients in any float dtype.
      windows: each a sequence of microbatches, which are trees of arrays with a leading axis of examples. All have the
        accumulation's length, except partial ones, which are shorter. Two full windows at least show what one leaves
        behind for the next; three and a partial one take a second or two.
      inner: what would train on whole batches: an optax transformation, with its clipping, decay and schedule; or a
        Keras optimizer.
      accumulating: from ``inner`` to the optimizer under test, for instance ``lambda inner: optax.MultiSteps(inner,
        4)``; for Keras, ``lambda inner: type(inner).from_config(inner.get_config() | {"gradient_accumulation_steps":
        4})``. The check calls it with probes in place of ``inner``, too.
      weights: the weight of a microbatch, for instance its number of tokens; None: its number of examples.
      arguments: ``(weight, last) -> dict``, keyword arguments for each update of an optax transformation, where
        ``last`` says that the microbatch ends its window: ``lambda weight, last: {"weight": weight, "flush": last}``
        for `gradcombine.integrations.optax.accumulate`. By default none.
      join: several microbatches as one; None: leaves are concatenated along their first axis.

    Returns:
      A `MicrobatchReport`, which prints as sentences: ``assert report.passes, report``.

    Raises:
      GradCombineError: for no window or an empty one, weights that are not positive, gradients that are not finite, an
        ``accumulating`` that does not use its argument, an optimizer that is neither optax's nor Keras', and functions
        that do not take what they are given, with what they raised.

    The gradient has to be within the rounding bound of `gradcombine.verify.check.windows`: with n
    microbatches, ``gamma(2 n + 5) max|g|`` elementwise, in float32, and one rounding to the gradients' dtype.

    >>> import jax.numpy as jnp, numpy as np, optax
    >>> from gradcombine.integrations.optax import accumulate
    >>> from gradcombine.verify import check_microbatches
    >>> def loss(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> rng = np.random.default_rng(0)
    >>> def batch(n):
    ...     return {"x": rng.normal(size=(n, 5)).astype(np.float32), "y": rng.normal(size=n).astype(np.float32)}
    >>> params = {"w": np.zeros(5, np.float32)}
    >>> def unweighted(inner):
    ...     return accumulate(inner, every=2)
    >>> report = check_microbatches(loss, params, [[batch(3), batch(4)]] * 2, optax.sgd(0.1), unweighted)
    >>> print(report.faults[0])
    window 0: mean of means: the microbatches' weights are ignored (they weigh from 0.4286 to 0.5714 in one batch)
    """
    for name, function in (("loss", loss), ("accumulating", accumulating)):
        if not callable(function):
            raise GradCombineError(OPERATION, f"a function as {name}", shown(function))
    expected = "at least one window, and at least one microbatch in each"
    for window in require_list(expected, windows):
        require_list(expected, window)
    for given in (params, *(microbatch for window in windows for microbatch in window)):
        tree.flatten(given)  # JAX's own, of a tree that contains itself, leaves no depth for other calls
    training = _training(loss, inner, accumulating, arguments)
    try:
        return _checked(training, params, windows, weights or _examples, join or _concatenated)
    except GradCombineError:
        raise
    except Exception as error:  # whatever foreign functions raise
        expected = "a loss and optimizers that take these parameters and microbatches"
        raise GradCombineError(OPERATION, expected, f"{type(error).__name__}: {line(error)}") from error


def _checked(
    training: Training,
    params: Any,
    windows: Sequence[Sequence[Any]],
    weigh: Callable[[Any], float],
    joined: Callable[[Sequence[Any]], Any],
) -> MicrobatchReport:
    scales = [[_weight(weigh(microbatch)) for microbatch in window] for window in windows]
    share, not_checked, found = _full_batch(training, params, windows, scales, joined)
    # What a partial window leaves behind shows in the one after it.
    order = [*range(len(windows)), *([0] if len(windows[-1]) < max(map(len, windows)) else [])]
    weights, run = [scales[w] for w in order], training.start(params, alone=False)
    trace = trained(run, weights, lambda w, i: leaves(training.gradient(run.params, windows[order[w]][i])))
    for w, steps in enumerate(trace):
        if not all(np.isfinite(x).all() for step in steps for x in step.gradient if x is not None):
            raise GradCombineError(OPERATION, "finite gradients", f"NaN or infinity in window {w}")

    def replay(change: Change) -> Trace:
        """Accumulates the gradients again, changed, with nothing after the accumulation."""

        def changed(w: int, i: int) -> list[np.ndarray | None]:
            return [None if x is None else change(w, i, leaf, x) for leaf, x in enumerate(trace[w][i].gradient)]

        return trained(training.start(params, alone=True), weights, changed)

    for other in faults(trace, replay):
        if other.cause not in [fault.cause for fault in found]:
            found.append(other)
    reached = [arrived(trace, w) for w in range(len(trace))]
    results = [WindowResult(w, tuple(weights[w]), None if x is None else x.share) for w, x in enumerate(reached)]
    return MicrobatchReport(tuple(found), tuple(results), share, not_checked)


def _training(loss: Any, inner: Any, accumulating: Any, arguments: Any) -> Training:
    """The adapter of the optimizer's framework, which is imported already."""
    keras, optax = sys.modules.get("keras"), sys.modules.get("optax")
    if keras is not None and isinstance(inner, keras.optimizers.Optimizer):
        adapter = importlib.import_module("gradcombine.verify.check.keras_windows")
        return adapter.KerasTraining(loss, inner, accumulating)
    if optax is not None and isinstance(inner, optax.GradientTransformation):
        adapter = importlib.import_module("gradcombine.verify.check.optax_windows")
        return adapter.OptaxTraining(loss, inner, accumulating, arguments)
    raise GradCombineError(OPERATION, "an optax transformation or a Keras optimizer", type(inner).__name__)


def _examples(microbatch: Any) -> float:
    first = next((shape_of(x) for x in tree.flatten(microbatch)[0] if x is not None), ())
    if not first:
        raise GradCombineError(OPERATION, "microbatches of arrays with an axis of examples", shown(microbatch))
    return float(first[0])


def _concatenated(microbatches: Sequence[Any]) -> Any:
    columns = [tree.flatten(microbatch) for microbatch in microbatches]
    arrays = zip(*(arrays for arrays, _ in columns), strict=True)
    return tree.unflatten(columns[0][1], [np.concatenate([np.asarray(x) for x in column]) for column in arrays])


def _weight(value: Any) -> float:
    weight = require_number("positive weights", value, 0)
    if not weight:
        raise GradCombineError(OPERATION, "positive weights", weight)
    return weight


def _full_batch(
    training: Training,
    params: Any,
    windows: Sequence[Sequence[Any]],
    weights: Sequence[Sequence[float]],
    join: Callable[[Sequence[Any]], Any],
) -> tuple[float | None, str, list[Fault]]:
    """Whether a batch's gradient is the weighted mean of its microbatches' gradients, in float64.

    Checks the first window of each length, at the parameters that the training starts from.

    Returns:
      The largest distance over what is allowed, None if it was not checked; why not; and the fault, if there is one.
    """
    worst, gradient = 0.0, training.gradient

    def make_step(_: int) -> Callable[[Any, Any], Any]:
        return gradient

    subject = Subject(make_step, params, windows[0][0], returns_params=False)

    def wide(microbatch: Any) -> list[np.ndarray | None]:
        program = subject.program(gradient, microbatch)
        problem = training.narrow(params, microbatch) if program is None else program.retyped.problem
        if problem:
            raise NotWide(problem)
        return leaves(subject.called(gradient, microbatch, wide=True)[0])

    for w in {len(microbatches): w for w, microbatches in reversed(list(enumerate(windows)))}.values():
        try:
            parts, whole = [wide(microbatch) for microbatch in windows[w]], wide(join(windows[w]))
        except NotWide as reason:
            return None, str(reason), []
        largest = max((float(np.abs(x).max(initial=0)) for part in parts for x in part if x is not None), default=0)
        window = Window(weights[w], parts, whole, bound=rounding_unit(FLOAT32) * largest)
        if window.share > 1:
            return window.share, "", [fault(Cause.LOSS, w, _likely(window))]
        worst = max(worst, window.share)
    return worst, "", []


def _likely(window: Window) -> str:
    cause, detail = next(linear(window, window.case), (None, ""))
    free = window.fitted(window.made, WHOLE, wide=False)
    if cause is Cause.COEFFICIENTS and free is not None:
        return "their coefficients in it are {}".format(", ".join(f"{x:.4g}" for x in free))
    if cause is not None:
        return f"{cause}: {detail}"
    return "it is no known combination of its microbatches' gradients, as with batch normalization over the batch"
