# pyright: standard
"""Weights of the microbatches of ``fit``, and a flush at the end of each epoch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import keras

from gradcombine.errors import operation, require_type
from gradcombine.integrations.keras.accumulate import Accumulate, accumulating
from gradcombine.integrations.keras.losses import no_masks, require_weighable, weight_of
from gradcombine.types import Array, Tree


class WeightedTrainStep:
    """Mixin for a keras.Model whose ``fit`` passes the weight of each microbatch to `Accumulate`.

    Use it for weights other than the numbers of examples, which `FlushAtEpochEnd` sets. With neither, every microbatch
    of ``fit`` has weight 1, which is correct if all have the same size. The last batch of an epoch is often smaller,
    and may be divided unevenly among replicas.

    List it before keras.Model: ``class Model(WeightedTrainStep, keras.Model)``, for functional and subclassed models
    alike. It has no effect with other optimizers. A custom ``train_step`` calls ``super().train_step``, or, without the
    mixin, applies the gradients inside ``with optimizer.weighted(weight)``.

    >>> import keras, numpy as np
    >>> class Model(WeightedTrainStep, keras.Model):
    ...     pass
    >>> x = keras.Input((2,))
    >>> Model(x, keras.layers.Dense(1)(x)).microbatch_weight(np.zeros((3, 2)), None, None)
    3
    """

    @operation("Accumulate")
    def microbatch_weight(self, x: Tree, y: Tree, sample_weight: Tree) -> Array:
        """Computes the weight of one microbatch on one replica, by default from the reduction of the losses.

        For Keras' default ``"sum_over_batch_size"`` it is the number of examples (of the first label), even if there
        are sample weights, as for Keras; for ``"mean_with_sample_weight"`` the sum of the sample weights; for
        ``"sum"``, with ``Accumulate(..., reduction="sum")``, 1. If layers mask tokens, override it to return the number
        of unmasked tokens; if the length of sequences differs between batches, the number of tokens.

        Args:
          x, y, sample_weight: a batch, as passed by ``fit`` to ``train_step``.

        Returns:
          A finite, nonnegative scalar; a microbatch of weight 0 adds nothing.

        Raises:
          GradCombineError: for losses that are sums over the examples if the window is a mean, for a mixture of sums
            and means or regularizers, and for losses with ``ignore_class`` or masked outputs, which are means over the
            other labels; for labels (or inputs without labels) of different lengths.
        """
        optimizer = accumulating(getattr(self, "optimizer", None))
        return weight_of(self, "mean" if optimizer is None else optimizer.reduction, x, y, sample_weight)

    def train_step(self, *args: Any) -> Any:
        """Runs Keras' train step with the weight of the batch, which is the last argument on every backend."""
        step: Any = super().train_step  # pyright: ignore[reportAttributeAccessIssue]
        optimizer = accumulating(getattr(self, "optimizer", None))
        if optimizer is None:
            return step(*args)
        is_own = type(self).microbatch_weight is not WeightedTrainStep.microbatch_weight
        weight = self.microbatch_weight(*keras.utils.unpack_x_y_sample_weight(args[-1]))
        with nullcontext() if is_own else no_masks(self), optimizer.weighted(weight):
            return step(*args)


class _WeightedStep:
    """A model's train step with the microbatch weight that its losses imply.

    Attributes:
      step: the model's train step.
      is_assigned: whether it was assigned to this model, rather than a method of its class.
    """

    def __init__(self, step: Any, is_assigned: bool, model: Any, optimizer: Any) -> None:
        self.step, self.is_assigned, self.model, self.optimizer = step, is_assigned, model, optimizer

    def __call__(self, *args: Any) -> Any:
        if accumulating(self.model.optimizer) is not self.optimizer:  # compiled anew after a fit that failed
            return self.step(*args)
        batch = keras.utils.unpack_x_y_sample_weight(args[-1])
        weight = weight_of(self.model, self.optimizer.reduction, *batch)
        with no_masks(self.model), self.optimizer.weighted(weight):
            return self.step(*args)


class FlushAtEpochEnd(keras.callbacks.Callback):
    """Weights the microbatches of ``fit``, and applies the partial window at the end of an epoch.

    The weight of a microbatch is its number of examples on the replica, so that the smaller last batch of an epoch
    counts for less (sequences must have one length). For losses with ``reduction="mean_with_sample_weight"`` it is the
    sum of the sample weights. A model with `WeightedTrainStep` keeps its weights, and ``Accumulate(reduction="sum")``,
    for losses with ``reduction="sum"``, adds unweighted gradients. The partial window is divided by its actual weight,
    and the next epoch begins a new one.

    The partial window is applied before the epoch's validation, and before ``on_epoch_end`` of the callbacks that
    follow this one in the list. List it first: a ModelCheckpoint before it saves the weights without this update, and
    after a SwapEMAWeights the update is applied to the averaged weights, which makes both sets of weights wrong.

    Raises:
      GradCombineError: for a model whose optimizer is not an `Accumulate`; for models without `WeightedTrainStep`, as
        its `microbatch_weight`.

    >>> import keras, numpy as np
    >>> from gradcombine.integrations.keras import Accumulate
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    >>> model.compile(Accumulate(keras.optimizers.SGD(1.0), every=2), "mse")
    >>> data = np.ones((3, 1), np.float32), np.ones((3, 1), np.float32)
    >>> _ = model.fit(*data, batch_size=1, verbose=0, callbacks=[FlushAtEpochEnd()])
    >>> int(model.optimizer.iterations)
    2
    """

    @operation("Accumulate")
    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = False
        model: Any = self.model
        optimizer = accumulating(model.optimizer) or model.optimizer
        self._optimizer = require_type("a model compiled with Accumulate", optimizer, Accumulate)
        if isinstance(model, WeightedTrainStep):
            return
        require_weighable(model, optimizer.reduction)
        if optimizer.reduction == "mean":
            step, is_assigned = model.train_step, "train_step" in vars(model)
            if isinstance(step, _WeightedStep):  # of a fit that failed
                step, is_assigned = step.step, step.is_assigned
            model.train_step = _WeightedStep(step, is_assigned, model, optimizer)
            model.make_train_function(force=True)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        model: Any = self.model
        if isinstance(wrapper := vars(model).get("train_step"), _WeightedStep):
            if wrapper.is_assigned:
                model.train_step = wrapper.step
            else:
                del model.train_step
            model.train_function = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # No flush in an evaluate outside of fit.
        if getattr(self, "_in_epoch", False):
            self._optimizer.flush()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = False
        self._optimizer.flush()
