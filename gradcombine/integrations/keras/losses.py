# pyright: standard
"""Losses over the examples of a batch: their weight, and a warning where ``fit`` gives different sizes none.

An optimizer gets gradients, not batches. While Keras' own train step runs or is traced, its batch is on the stack. That
is looked up for the warning alone: no weight depends on who calls.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import keras

from gradcombine.errors import invalid, within
from gradcombine.integrations.keras import settings
from gradcombine.integrations.keras.window_variables import KerasWindow
from gradcombine.types import Array, Scalar, Tree

_BY_SAMPLE_WEIGHT = "mean_with_sample_weight"
_MEANS = ("sum_over_batch_size", "mean", _BY_SAMPLE_WEIGHT)
"""The other reductions, ``"sum"`` and none, have gradients that are sums over the examples."""


def examples(x: Tree) -> Any:
    """The number of examples in a batch; on TensorFlow a tensor, where the shape is not static."""
    shape: Any = keras.ops.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))
    return shape[0]


def are_means(model: Any) -> bool:
    """Whether all losses are known to be means over examples: those of compile, in Keras' own compute_loss."""
    own = type(model).compute_loss is keras.Model.compute_loss
    reductions = _reductions(model)
    return own and bool(reductions) and reductions.issubset(_MEANS)


def require_weighable(model: Any, reduction: str) -> None:
    """Refuses losses that no weight of a batch is right for.

    Args:
      model: compiled.
      reduction: of the window.

    Raises:
      GradCombineError: for losses of which some are means and some are sums, as no weight is right for both; for sums
        in a window that is a mean: a sum times its number of examples is no part of any batch's gradient.
    """
    reductions = _reductions(model)
    summed = reductions.difference(_MEANS)
    if not summed:
        return
    received = f"losses with reduction {', '.join(sorted(map(repr, reductions)))}"
    of_one_kind = "losses that are all means over the examples or all sums, or a microbatch_weight of your own"
    of_sums = "Accumulate(..., reduction='sum') for losses that are sums over the examples"
    with within("loss"):
        if summed != reductions:
            raise invalid(of_one_kind, received)
        if reduction == "mean":
            raise invalid(of_sums, f"reduction='mean' and {received}")


def weight_of(model: Any, reduction: str, x: Tree, sample_weight: Tree) -> Array:
    """The weight that makes the batches of a window one batch, for the losses of a model.

    Args:
      model: compiled, or not yet: Keras' default losses then.
      reduction: of the window.
      x: the batch's inputs.
      sample_weight: of its examples, or None.

    Raises:
      GradCombineError: as `require_weighable`; for means by sample weights that differ between outputs.
    """
    require_weighable(model, reduction)
    reductions = _reductions(model)
    if reductions.difference(_MEANS):
        return 1
    if sample_weight is None or _BY_SAMPLE_WEIGHT not in reductions:
        return examples(x)
    leaves = keras.tree.flatten(sample_weight)
    several = len(reductions) > 1 or len(leaves) > 1
    expected = f"one sample weight and one reduction for all losses with reduction {_BY_SAMPLE_WEIGHT!r}"
    with within("loss"):
        if several:
            raise invalid(expected, f"{len(leaves)}, and {sorted(map(repr, reductions))}")
    return keras.ops.sum(keras.ops.cast(leaves[0], "float32"))


def _reductions(model: Any) -> set[Any]:
    """The reductions of the losses of compile; those given by name and as functions have Keras' default."""
    losses = [x for x in keras.tree.flatten(getattr(model, "loss", None)) if x is not None]
    return {getattr(x, "reduction", _MEANS[0]) if isinstance(x, keras.losses.Loss) else _MEANS[0] for x in losses}


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

    size: Scalar
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
    if not any(x is optimizer for x in settings.chain(model.optimizer)) or not are_means(model):
        return None
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        size = examples(x)
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
