"""The end of the data in fit."""

from __future__ import annotations

from typing import Any

import keras

from gradcombine.integrations.keras.accumulate import accumulating
from gradcombine.integrations.keras.checks import error


class FlushAtEpochEnd(keras.callbacks.Callback):
    """Applies the partial window that an epoch ends with, divided by its true weight, so that none reaches the next.

    The window is applied before the epoch's validation, which then sees what the whole epoch has trained, and before
    ``on_epoch_end`` of the callbacks after this one: put it first, in front of a ModelCheckpoint for instance.

    Raises:
      GradCombineError: for a model whose optimizer is no `Accumulate`.

    >>> import keras, numpy as np
    >>> from gradcombine.integrations.keras import Accumulate
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    >>> model.compile(Accumulate(keras.optimizers.SGD(1.0), every=2), "mse")
    >>> data = np.ones((3, 1), np.float32), np.ones((3, 1), np.float32)
    >>> _ = model.fit(*data, batch_size=1, verbose=0, callbacks=[FlushAtEpochEnd()])
    >>> int(model.optimizer.iterations)
    2
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = False
        model: Any = self.model
        found = accumulating(model.optimizer)
        if found is None:
            raise error("a model compiled with Accumulate", type(model.optimizer).__name__)
        self._optimizer = found

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # The model's own evaluate, outside of fit, trains nothing.
        if getattr(self, "_in_epoch", False):
            self._optimizer.flush()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = False
        self._optimizer.flush()
