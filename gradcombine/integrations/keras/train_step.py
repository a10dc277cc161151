"""Microbatches that count by their size in fit."""

from __future__ import annotations

from typing import Any

import keras

from gradcombine.integrations.keras.accumulate import accumulating


class WeightedTrainStep:
    """Mixin for a keras.Model whose ``fit`` tells `Accumulate` the weight of each microbatch.

    Without it every microbatch of ``fit`` weighs 1, which is right where all of them have the same size: the last one
    of an epoch, and the replicas' shares of it, often have not.

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

    def microbatch_weight(self, x: Any, y: Any, sample_weight: Any) -> Any:
        """The weight of one microbatch on one replica: by default the number of its examples.

        That is what belongs to Keras' default loss reduction, ``"sum_over_batch_size"``, which divides by the number of
        examples even where there are sample weights. For ``"mean_with_sample_weight"``, return the sum of the
        sample weights (of the tokens that count); for ``"sum"``, compile ``Accumulate(..., reduction="sum")``.

        Args:
          x, y, sample_weight: a batch, as ``fit`` hands it to ``train_step``.

        Returns:
          A scalar, finite and not negative; a microbatch of weight 0 changes nothing.
        """
        shape: Any = keras.ops.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))
        return shape[0]

    def train_step(self, *args: Any) -> Any:
        """Keras' own, with the weight of the batch, which is the last argument on every backend."""
        step: Any = super().train_step  # pyright: ignore[reportAttributeAccessIssue]
        optimizer = accumulating(getattr(self, "optimizer", None))
        if optimizer is None:
            return step(*args)
        with optimizer.weighted(self.microbatch_weight(*keras.utils.unpack_x_y_sample_weight(args[-1]))):
            return step(*args)
