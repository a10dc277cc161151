# pyright: standard
"""Microbatch weights that suit a model's losses, and a warning for unweighted microbatches of different sizes.

An optimizer gets gradients, not batches. For the warning, and only for it, the batch is looked up on the call stack, in
the frame of Keras' train step. No weight depends on the caller.
"""

from __future__ import annotations

import inspect
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import keras
import numpy as np
from keras.src.backend import get_keras_mask  # no public function returns the mask of a JAX array

from gradcombine.errors import invalid, operation, translate_errors
from gradcombine.integrations.keras import settings
from gradcombine.integrations.keras.window_variables import KerasWindow
from gradcombine.types import Array, Scalar, Tree

_BY_SAMPLE_WEIGHT = "mean_with_sample_weight"
_MEANS = ("sum_over_batch_size", "mean", _BY_SAMPLE_WEIGHT)
"""With the other reductions, ``"sum"`` and None, gradients are sums over the examples."""


_COUNTED = "an override of microbatch_weight that counts the labels (WeightedTrainStep), for means over labels"


def examples(x: Tree, y: Tree) -> Any:
    """Number of labels in a batch, or of inputs without labels; on TensorFlow a tensor if the shape is not static.

    Raises:
      GradCombineError: for arrays of different lengths, or of unknown rank; scalars have none.
    """
    labels, inputs = ([leaf for leaf in keras.tree.flatten(part) if leaf is not None] for part in (y, x))
    expected = "arrays with one number of examples, or an override of microbatch_weight (WeightedTrainStep)"
    with translate_errors(expected, ValueError, received="an array of unknown rank", path="batch"):
        arrays = [leaf for leaf in labels or inputs if len(leaf.shape)]
    lengths = {leaf.shape[0] for leaf in arrays}
    if len(lengths) != 1:
        raise invalid(expected, f"lengths {', '.join(sorted(map(str, lengths))) or 'of scalars'}", "batch")
    shape: Any = keras.ops.shape(arrays[0])
    return shape[0]


def are_means(model: Any) -> bool:
    """Whether all losses are known to be means over examples; False for a model that overrides compute_loss."""
    reductions = _reductions(model)
    overrides = type(model).compute_loss is not keras.Model.compute_loss
    return not overrides and bool(reductions) and reductions.issubset(_MEANS)


def require_weighable(model: Any, reduction: str) -> None:
    """Raises for losses of a compiled model that no microbatch weight is correct for; ``reduction``: of the window.

    Raises:
      GradCombineError: for a mixture of means and sums, also of sums and weight penalties; for sums if the window is a
        mean, which would multiply a sum by a number of examples; for means over the labels that are not ignored, or
        over the steps that are not masked; for losses that compare the examples of a batch.
    """
    losses, reductions = _losses(model), _reductions(model)
    if any(getattr(loss, "ignore_class", None) is not None and loss.reduction in _MEANS for loss in losses):
        raise invalid(_COUNTED, "a loss with ignore_class", "loss")
    if any(map(_compares_examples, losses)):
        raise invalid("means or sums over examples", "a loss that compares the examples of a batch", "loss")
    require_no_mask(model, getattr(model, "outputs", None) or [])
    summed = reductions.difference(_MEANS)
    if not summed:
        return
    received = f"losses with reduction {', '.join(sorted(map(repr, reductions)))}"
    if summed != reductions:
        expected = "losses that are all means over the examples or all sums, or an override of microbatch_weight"
        raise invalid(expected, received, "loss")
    if reduction == "mean":
        expected = "Accumulate(..., reduction='sum') for losses that are sums over the examples"
        raise invalid(expected, f"reduction='mean' and {received}", "loss")
    # Not model.losses: on JAX, a step has taken the variables' values.
    if _regularizes_activities(model) or any(getattr(x, "regularizer", None) for x in model.trainable_variables):
        expected = "no regularizers, which do not add up over microbatches, beside sums over the examples"
        raise invalid(expected, f"regularizers and {received}", "loss")


def _regularizes_activities(model: Any) -> bool:
    layers = model._flatten_layers(include_self=True, recursive=True)
    return any(getattr(x, "activity_regularizer", None) for x in layers)


def require_no_mask(model: Any, outputs: Tree) -> None:
    """Raises for masked outputs. A subclassed model has them only when it is called."""
    masked = any(get_keras_mask(x) is not None for x in keras.tree.flatten(outputs))
    if masked and _reductions(model).intersection(_MEANS):
        raise invalid(_COUNTED, "a model whose output has a mask", "loss")


class _CheckedLoss:
    """The compute_loss of a model, which raises for masked outputs in threads that run a weighted step."""

    def __init__(self, model: Any) -> None:
        self.model, self.compute_loss, self.steps = model, model.compute_loss, threading.local()

    @operation("Accumulate")
    def __call__(self, x: Tree = None, y: Tree = None, y_pred: Tree = None, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.steps, "are_weighted", False):
            require_no_mask(self.model, y_pred)
        return self.compute_loss(x, y, y_pred, *args, **kwargs)


@contextmanager
def no_masks(model: Any) -> Iterator[None]:
    """Makes this thread's computations of the loss raise for masked outputs.

    The replicas of a strategy run a step in a thread each, by turns, so the model keeps the function that checks.
    """
    loss = vars(model).get("compute_loss")
    if not isinstance(loss, _CheckedLoss):
        loss = model.compute_loss = _CheckedLoss(model)
    loss.steps.are_weighted = True
    try:
        yield
    finally:
        loss.steps.are_weighted = False


@operation("Accumulate")
def weight_of(model: Any, reduction: str, x: Tree, y: Tree, sample_weight: Tree) -> Array:
    """Computes the weight with which a window of microbatches equals one large batch, for a model's losses.

    Args:
      model: a model; if it is not compiled, Keras' default reduction is assumed.
      reduction: reduction of the window.
      x, y: the batch's inputs and labels; the labels count, if there are any, as Keras divides by their number.
      sample_weight: sample weights of the batch, or None.

    Raises:
      GradCombineError: as `require_weighable` and `examples`; for means by sample weight if outputs have different
        sample weights, losses have different reductions, or a layer has an activity regularizer, which Keras divides by
        the number of examples.
    """
    require_weighable(model, reduction)
    reductions = _reductions(model)
    if reductions.difference(_MEANS):
        return 1
    if sample_weight is None or _BY_SAMPLE_WEIGHT not in reductions:
        return examples(x, y)
    leaves = keras.tree.flatten(sample_weight)
    if len(reductions) > 1 or len(leaves) > 1:
        expected = f"one sample weight and one reduction for all losses with reduction {_BY_SAMPLE_WEIGHT!r}"
        weights = f"{len(leaves)} sample weights (Keras copies one for each output)"
        received = f"{weights} and reductions {sorted(map(repr, reductions))}"
        raise invalid(f"{expected}, or an override of microbatch_weight", received, "loss")
    if _regularizes_activities(model):
        expected = f"no activity_regularizer, a mean over examples, beside reduction {_BY_SAMPLE_WEIGHT!r}"
        raise invalid(expected, "one", "loss")
    is_wide = keras.backend.standardize_dtype(leaves[0].dtype) == "float64"
    return keras.ops.sum(keras.ops.cast(leaves[0], "float64" if is_wide else "float32"))


def _reductions(model: Any) -> set[Any]:
    """Reductions of the losses passed to ``compile``; names and functions have Keras' default."""
    return {
        getattr(x, "reduction", _MEANS[0]) if isinstance(x, keras.losses.Loss) else _MEANS[0] for x in _losses(model)
    }


def _compares_examples(loss: Any) -> bool:
    """Whether a loss is computed from all examples of a batch, so that it is no mean or sum over them."""
    made = keras.losses.get(loss)
    axes = getattr(made, "axis", None)
    is_one = getattr(made, "fn", made) in (keras.losses.circle, keras.losses.dice, keras.losses.tversky)
    return is_one and (axes is None or 0 in np.atleast_1d(axes))


def _losses(model: Any) -> list[Any]:
    return [x for x in keras.tree.flatten(getattr(model, "loss", None)) if x is not None]


_BATCH_SIZE = 32
"""Keras' default in ``fit`` on arrays."""


@dataclass(frozen=True)
class FitStep:
    """A call or trace of keras.Model.train_step.

    Attributes:
      size: number of examples in its batch; on TensorFlow a tensor if the shape is not static.
      announced: batch sizes known in advance from the arguments of ``fit``.
      is_first: whether no step of this ``fit`` is known to have ended (JAX backend).
    """

    size: Scalar
    announced: tuple[int, ...]
    is_first: bool


class UnweightedSizes:
    """Warns, once, if an `Accumulate` for means gives microbatches of different sizes the same weight."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._warned = False

    def add(self, window: KerasWindow) -> None:
        """Records the size of an unweighted microbatch, if it comes from Keras' train step."""
        optimizer = self._optimizer
        single = window.replicas == 1 and isinstance(optimizer.every, int) and optimizer.every == 1
        if self._warned or single or optimizer.reduction != "mean":
            return
        step = fit_step(optimizer)
        if step is not None:
            self._warn({*step.announced, *window.record_size(step.size, step.is_first)})

    def end(self, window: KerasWindow) -> None:
        """Checks the recorded sizes at the end of ``fit``."""
        self._warn(window.take_sizes())

    def _warn(self, sizes: Iterable[int]) -> None:
        sizes = sorted(set(sizes))
        if self._warned or len(sizes) < 2:
            return
        self._warned = True
        warnings.warn(
            f"Optimizer {self._optimizer.name!r} gives microbatches of {' and of '.join(map(str, sizes))} examples the "
            "same weight: a window that contains both is a mean of means, not the mean over its examples. Pass "
            "callbacks=[gradcombine.integrations.keras.FlushAtEpochEnd()] to fit, which weights each by its number of "
            "examples, or set the weights with WeightedTrainStep.",
            stacklevel=2,
        )


def fit_step(optimizer: Any) -> FitStep | None:
    """Finds the innermost call of keras.Model.train_step on the stack.

    Returns:
      The step, if its model has this optimizer and losses that are means over examples. None otherwise, also for a
      custom ``train_step`` that does not call Keras', as it may weight its losses.
    """
    frames = (frame for frame, _ in traceback.walk_stack(inspect.currentframe()))
    step = next(_running(frames, "train_step"), None)
    if step is None:
        return None
    names = step.f_code.co_varnames[: step.f_code.co_argcount]
    # TensorFlow: train_step(self, data); JAX: train_step(self, state, data).
    model, batch = step.f_locals[names[0]], step.f_locals[names[-1]]
    if not any(x is optimizer for x in settings.chain(model.optimizer)) or not are_means(model):
        return None
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        size = examples(x, y)
    except ValueError:  # scalars, several lengths or unknown rank
        return None
    fit = next((x for x in _running(frames, "fit") if x.f_locals.get("self") is model), None)
    # On JAX, a step leaves its state here for callbacks, until fit ends.
    is_first = getattr(model, "_jax_state", None) is None
    return FitStep(size, () if fit is None else _announced(fit.f_locals), is_first)


def _announced(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Both batch sizes of an epoch of ``fit`` on arrays; empty if they are unknown, or all batches have one size."""
    first = next((x for x in keras.tree.flatten(arguments.get("x")) if x is not None), None)
    shape = tuple(getattr(first, "shape", None) or ())
    limits = arguments.get("steps_per_epoch"), getattr(keras.config, "max_steps_per_epoch", lambda: None)()
    size = arguments.get("batch_size") or _BATCH_SIZE
    if not shape or not isinstance(shape[0], int) or any(limits) or shape[0] < size:
        return ()
    return (size, shape[0] % size) if shape[0] % size else ()


def _running(frames: Iterator[FrameType], method: str) -> Iterator[FrameType]:
    """Frames that run this method of keras.Model, not an override."""
    code: CodeType = inspect.unwrap(getattr(keras.Model, method)).__code__
    return (frame for frame in frames if frame.f_code is code)
