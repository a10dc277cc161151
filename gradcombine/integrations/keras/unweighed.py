"""The warning of microbatches of different sizes that ``fit`` hands to an optimizer with no weight.

An optimizer gets gradients, not batches. While Keras' own train step runs or is traced, its batch is on the stack. That
is looked up for this warning alone: no weight depends on who calls.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import keras

from gradcombine.integrations.keras import losses, settings
from gradcombine.integrations.keras.window_variables import KerasWindow

_BATCH_SIZE = 32
"""Of ``fit`` for arrays, where no argument gives it."""


@dataclass(frozen=True)
class FitStep:
    """A train step of Keras' own that is being run or traced.

    Attributes:
      size: the number of examples of its batch; on TensorFlow a tensor, where the shape is not static.
      announced: sizes that an epoch of this ``fit`` is known to have before it has seen them.
      is_first: whether no step of this ``fit`` is known to have ended; on JAX.
    """

    size: Any
    announced: tuple[int, ...]
    is_first: bool


class Unweighed:
    """Warns, once, where microbatches of different sizes have the same weight in windows that are means.

    Args:
      optimizer: that gets them.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._warned = False

    def add(self, window: KerasWindow) -> None:
        """Takes note of a microbatch that has come with no weight, if it is one of Keras' own train step."""
        optimizer = self._optimizer
        alone = window.replicas == 1 and isinstance(optimizer.every, int) and optimizer.every == 1
        if self._warned or alone or optimizer.reduction != "mean":
            return
        step = fit_step(optimizer)
        if step is not None:
            self._warn({*step.announced, *window.see(step.size, step.is_first)})

    def end(self, window: KerasWindow) -> None:
        """Looks at the sizes of a ``fit`` that has ended."""
        self._warn(window.seen())

    def _warn(self, found: Iterable[int]) -> None:
        sizes = sorted(set(found))
        if self._warned or len(sizes) < 2:
            return
        self._warned = True
        warnings.warn(
            f"Optimizer {self._optimizer.name!r} gives microbatches of {' and of '.join(map(str, sizes))} examples the "
            "same weight: a window that holds both is a mean of means, not the mean over its examples. Give fit "
            "callbacks=[gradcombine.integrations.keras.FlushAtEpochEnd()], which weighs each by its number of "
            "examples, or weigh them with WeightedTrainStep.",
            stacklevel=2,
        )


def fit_step(optimizer: Any) -> FitStep | None:
    """The innermost train step around this call, if it is Keras' own, of this optimizer, and of a mean over examples.

    A ``train_step`` of somebody's own, which does not call Keras', may weigh its losses by itself: None then.
    """
    frames = _callers()
    step = next(_running(frames, "train_step"), None)
    if step is None:
        return None
    names = step.f_code.co_varnames[: step.f_code.co_argcount]
    # Of TensorFlow's train_step(self, data) and JAX' train_step(self, state, data), which models override.
    model, batch = step.f_locals[names[0]], step.f_locals[names[-1]]
    if not any(x is optimizer for x in settings.chain(model.optimizer)) or not losses.are_means(model):
        return None
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        size = losses.examples(x)
    except (IndexError, ValueError):  # of no rank, or of one that is not known
        return None
    fit = next((x for x in _running(frames, "fit") if x.f_locals.get("self") is model), None)
    # The state that a step leaves for callbacks, until fit ends.
    is_first = getattr(model, "_jax_state", None) is None
    return FitStep(size, () if fit is None else _announced(fit.f_locals), is_first)


def _announced(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """The two sizes of an epoch's batches, by the arguments of ``fit``: of arrays that it takes in whole; else none."""
    first = next((x for x in keras.tree.flatten(arguments.get("x")) if x is not None), None)
    shape = tuple(getattr(first, "shape", None) or ())
    limits = arguments.get("steps_per_epoch"), getattr(keras.config, "max_steps_per_epoch", lambda: None)()
    size = arguments.get("batch_size") or _BATCH_SIZE
    if not shape or not isinstance(shape[0], int) or any(limits) or shape[0] < size:
        return ()
    return (size, shape[0] % size) if shape[0] % size else ()


def _running(frames: Iterator[FrameType], method: str) -> Iterator[FrameType]:
    """The frames that run this method of keras.Model, and not one that overrides it."""
    code: CodeType = inspect.unwrap(getattr(keras.Model, method)).__code__
    return (frame for frame in frames if frame.f_code is code)


def _callers() -> Iterator[FrameType]:
    """The stack, from the caller outwards."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
