"""Do k accumulated microbatches give the update of one batch?"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import shape_of
from gradcombine.errors import GradCombineError, require_list, require_number, shown
from gradcombine.verify.check.hypotheses import linear
from gradcombine.verify.check.running import WHOLE, line
from gradcombine.verify.check.step_report import Cause, Fault
from gradcombine.verify.check.windows import causes
from gradcombine.verify.check.windows.causes import MicrobatchReport
from gradcombine.verify.check.windows.subject import OPERATION, NotWide, Subject, Trace, observe, replay
from gradcombine.verify.check.windows.window_standard import FLOAT32, Window
from gradcombine.verify.compare.ulp import rounding_unit

_ADAPTERS = "gradcombine.verify.check.windows"


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

    The gradient has to be within the rounding bound of `gradcombine.verify.check.windows.window_standard`: with n
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
    _require_windows(windows)
    for given in (params, *(microbatch for window in windows for microbatch in window)):
        tree.flatten(OPERATION, given)  # JAX's own, of a tree that contains itself, leaves no depth for other calls
    subject = _subject(loss, inner, accumulating, arguments)
    try:
        return _checked(subject, params, windows, weights or _examples, join or _concatenated)
    except GradCombineError:
        raise
    except Exception as error:  # whatever foreign functions raise
        expected = "a loss and optimizers that take these parameters and microbatches"
        raise GradCombineError(OPERATION, expected, f"{type(error).__name__}: {line(error)}") from error


def _checked(
    subject: Subject,
    params: Any,
    windows: Sequence[Sequence[Any]],
    weigh: Callable[[Any], float],
    joined: Callable[[Sequence[Any]], Any],
) -> MicrobatchReport:
    scales = [[_weight(weigh(microbatch)) for microbatch in window] for window in windows]
    whole = _full_batch(subject, params, windows, scales, joined)
    every = max(map(len, windows))
    # What a partial window leaves behind shows in the one after it.
    again = [0] if len(windows[-1]) < every else []
    order = [*range(len(windows)), *again]
    trace = observe(subject, params, [windows[w] for w in order], [scales[w] for w in order])
    _require_finite(trace)
    faults: list[Fault] = [] if whole.fault is None else [whole.fault]
    for fault in causes.faults(trace, lambda change: replay(subject, params, trace, change)):
        if fault.cause not in [other.cause for other in faults]:
            faults.append(fault)
    return MicrobatchReport(tuple(faults), causes.results(trace), whole.share, whole.not_checked)


def _subject(loss: Any, inner: Any, accumulating: Any, arguments: Any) -> Subject:
    """The adapter of the optimizer's framework, which is imported already."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(inner, keras.optimizers.Optimizer):
        return importlib.import_module(f"{_ADAPTERS}.keras_subject").KerasSubject(loss, inner, accumulating)
    optax = sys.modules.get("optax")
    if optax is not None and isinstance(inner, optax.GradientTransformation):
        adapter = importlib.import_module(f"{_ADAPTERS}.optax_subject")
        return adapter.OptaxSubject(loss, inner, accumulating, arguments)
    raise GradCombineError(OPERATION, "an optax transformation or a Keras optimizer", type(inner).__name__)


def _examples(microbatch: Any) -> float:
    first = next((shape_of(x) for x in tree.flatten(OPERATION, microbatch)[0] if x is not None), ())
    if not first:
        raise GradCombineError(OPERATION, "microbatches of arrays with an axis of examples", shown(microbatch))
    return float(first[0])


def _concatenated(microbatches: Sequence[Any]) -> Any:
    columns = [tree.flatten(OPERATION, microbatch) for microbatch in microbatches]
    leaves = zip(*(arrays for arrays, _ in columns), strict=True)
    return tree.unflatten(columns[0][1], [np.concatenate([np.asarray(x) for x in column]) for column in leaves])


def _weight(value: Any) -> float:
    weight = require_number(OPERATION, "positive weights", value, 0)
    if not weight:
        raise GradCombineError(OPERATION, "positive weights", weight)
    return weight


def _require_windows(windows: Sequence[Sequence[Any]]) -> None:
    expected = "at least one window, and at least one microbatch in each"
    for window in require_list(OPERATION, expected, windows):
        require_list(OPERATION, expected, window)


def _require_finite(trace: Trace) -> None:
    for w, steps in enumerate(trace):
        if not all(np.isfinite(x).all() for step in steps for x in step.gradient if x is not None):
            raise GradCombineError(OPERATION, "finite gradients", f"NaN or infinity in window {w}")


class FullBatch(NamedTuple):
    """The law of the loss: a batch's gradient is the weighted mean of its microbatches' gradients.

    Attributes:
      share: the largest distance over what is allowed; None if it was not checked.
      not_checked: why not.
      fault: if the law does not hold.
    """

    share: float | None
    not_checked: str
    fault: Fault | None


def _full_batch(
    subject: Subject,
    params: Any,
    windows: Sequence[Sequence[Any]],
    weights: Sequence[Sequence[float]],
    join: Callable[[Sequence[Any]], Any],
) -> FullBatch:
    """Checks the first window of each length, at the parameters that the training starts from."""
    worst = 0.0
    for w in {len(microbatches): w for w, microbatches in reversed(list(enumerate(windows)))}.values():
        try:
            parts = [subject.wide_gradient(params, microbatch) for microbatch in windows[w]]
            whole = subject.wide_gradient(params, join(windows[w]))
        except NotWide as reason:
            return FullBatch(None, str(reason), None)
        largest = max((float(np.abs(x).max(initial=0)) for part in parts for x in part if x is not None), default=0)
        window = Window(weights[w], parts, whole, bound=rounding_unit(FLOAT32) * largest)
        if window.share > 1:
            return FullBatch(window.share, "", causes.fault(Cause.LOSS, w, _likely(window)))
        worst = max(worst, window.share)
    return FullBatch(worst, "", None)


def _likely(window: Window) -> str:
    cause, detail = next(linear(window, window.case), (None, ""))
    free = window.fitted(window.made, WHOLE, wide=False)
    if cause is Cause.COEFFICIENTS and free is not None:
        return "their coefficients in it are {}".format(", ".join(f"{x:.4g}" for x in free))
    if cause is not None:
        return f"{cause}: {detail}"
    return "it is no known combination of its microbatches' gradients, as with batch normalization over the batch"
