# pyright: standard
"""Weights of microbatches in fit, and the end of the data."""

from __future__ import annotations

from typing import Any

import keras

from gradcombine.errors import operation, require_type
from gradcombine.integrations.keras.accumulate import Accumulate, accumulating
from gradcombine.integrations.keras.losses import require_weighable, weight_of
from gradcombine.types import Array, Tree


class WeightedTrainStep:
    """Mixin for a keras.Model whose ``fit`` tells `Accumulate` the weight of each microbatch.

    For weights of your own in place of the numbers of examples, which `FlushAtEpochEnd` takes. Without either every
    microbatch of ``fit`` has weight 1, which is right if all have the same size. The last one of an epoch often has
    not, nor have the replicas' shares of it.

    Put it before keras.Model: ``class Model(WeightedTrainStep, keras.Model)``. The functional API and subclassing work
    alike. Compiled with another optimizer, nothing changes. A ``train_step`` of your own calls ``super().train_step``,
    or, in place of the mixin, opens ``optimizer.weighted(weight)`` around what applies the gradients.

    >>> import keras, numpy as np
    >>> class Model(WeightedTrainStep, keras.Model):
    ...     pass
    >>> x = keras.Input((2,))
    >>> Model(x, keras.layers.Dense(1)(x)).microbatch_weight(np.zeros((3, 2)), None, None)
    3
    """

    @operation("Accumulate")
    def microbatch_weight(self, x: Tree, y: Tree, sample_weight: Tree) -> Array:
        """The weight of one microbatch on one replica: by default the one that belongs to the reduction of the losses.

        For Keras' default, ``"sum_over_batch_size"``, that is the number of examples, by which it divides even where
        there are sample weights. For ``"mean_with_sample_weight"`` it is the sum of the sample weights, and for
        ``"sum"``, with ``Accumulate(..., reduction="sum")``, 1. Where layers mask tokens, return the number of those
        that count.

        Args:
          x, y, sample_weight: a batch, as ``fit`` hands it to ``train_step``.

        Returns:
          A scalar, finite and not negative; a microbatch of weight 0 changes nothing.

        Raises:
          GradCombineError: for losses that are sums over the examples in a window that is a mean; for both kinds.
        """
        optimizer = accumulating(getattr(self, "optimizer", None))
        return weight_of(self, "mean" if optimizer is None else optimizer.reduction, x, sample_weight)

    def train_step(self, *args: Any) -> Any:
        """Keras' own, with the weight of the batch, which is the last argument on every backend."""
        step: Any = super().train_step  # pyright: ignore[reportAttributeAccessIssue]
        optimizer = accumulating(getattr(self, "optimizer", None))
        if optimizer is None:
            return step(*args)
        with optimizer.weighted(self.microbatch_weight(*keras.utils.unpack_x_y_sample_weight(args[-1]))):
            return step(*args)


class _Weighed:
    """A model's train step, whose microbatches have the weight that belongs to its losses."""

    def __init__(self, step: Any, model: Any, optimizer: Any) -> None:
        self.step, self.model, self.optimizer = step, model, optimizer

    def __call__(self, *args: Any) -> Any:
        x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(args[-1])
        with self.optimizer.weighted(weight_of(self.model, self.optimizer.reduction, x, sample_weight)):
            return self.step(*args)


class FlushAtEpochEnd(keras.callbacks.Callback):
    """Weighs the microbatches of ``fit``, and applies the partial window that an epoch ends with.

    Each microbatch has its number of examples for a weight (the share of each replica has its own), so that the smaller
    last batch of an epoch counts as what it is. For losses with ``reduction="mean_with_sample_weight"`` the weight is
    the sum of the sample weights. A model with `WeightedTrainStep` keeps the weights of its own, and
    ``Accumulate(reduction="sum")``, which belongs to losses with ``reduction="sum"``, adds gradients as they are. The
    partial window is divided by its true weight, and the next epoch begins a new one.

    The window is applied before the epoch's validation, which then sees what the whole epoch has trained, and before
    ``on_epoch_end`` of the callbacks after this one: put it first, in front of a ModelCheckpoint for instance.

    Raises:
      GradCombineError: for a model whose optimizer is not an `Accumulate`; for a window that is a mean of losses that
        are sums over the examples, or of both kinds.

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
        found = accumulating(model.optimizer) or model.optimizer
        self._optimizer = optimizer = require_type("a model compiled with Accumulate", found, Accumulate)
        if optimizer.reduction == "mean" and not isinstance(model, WeightedTrainStep):
            require_weighable(model, optimizer.reduction)
            self._weigh(model, optimizer)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        model: Any = self.model
        if isinstance(vars(model).get("train_step"), _Weighed):
            del model.train_step
            model.train_function = None

    def _weigh(self, model: Any, optimizer: Any) -> None:
        """Puts weights around the model's own step, for this ``fit``."""
        own = vars(model).get("train_step", model.train_step)
        model.train_step = _Weighed(own.step if isinstance(own, _Weighed) else own, model, optimizer)
        model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # The model's own evaluate, outside of fit, trains nothing.
        if getattr(self, "_in_epoch", False):
            self._optimizer.flush()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = False
        self._optimizer.flush()
