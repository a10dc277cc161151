"""Losses of a model over the examples of a batch: means or sums, and the weight that belongs to them."""

from __future__ import annotations

from typing import Any

import keras

from gradcombine.integrations.keras.settings import error

_BY_SAMPLE_WEIGHT = "mean_with_sample_weight"
_MEANS = ("sum_over_batch_size", "mean", _BY_SAMPLE_WEIGHT)
"""The other reductions, ``"sum"`` and none, have gradients that are sums over the examples."""


def examples(x: Any) -> Any:
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
    if summed != reductions:
        expected = "losses that are all means over the examples or all sums, or a microbatch_weight of your own"
        raise error(expected, received, "loss")
    if reduction == "mean":
        expected = "Accumulate(..., reduction='sum') for losses that are sums over the examples"
        raise error(expected, f"reduction='mean' and {received}", "loss")


def weight_of(model: Any, reduction: str, x: Any, sample_weight: Any) -> Any:
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
    if len(reductions) > 1 or len(leaves) > 1:
        expected = f"one sample weight and one reduction for all losses with reduction {_BY_SAMPLE_WEIGHT!r}"
        raise error(expected, f"{len(leaves)}, and {sorted(map(repr, reductions))}", "loss")
    return keras.ops.sum(keras.ops.cast(leaves[0], "float32"))


def _reductions(model: Any) -> set[Any]:
    """The reductions of the losses of compile; those given by name and as functions have Keras' default."""
    losses = [x for x in keras.tree.flatten(getattr(model, "loss", None)) if x is not None]
    return {getattr(x, "reduction", _MEANS[0]) if isinstance(x, keras.losses.Loss) else _MEANS[0] for x in losses}
