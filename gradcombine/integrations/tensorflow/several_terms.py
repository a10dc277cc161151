# pyright: standard
"""A loss of several terms over variables: contributions of a microbatch, and metrics of a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from gradcombine import reductions
from gradcombine.backends.tensorflow_backend import BACKEND
from gradcombine.denominators import Terms
from gradcombine.errors import invalid, require_tuple
from gradcombine.integrations.tensorflow.state import ReplicaState, in_local_variables
from gradcombine.places.window import Window
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.ratios import Ratio
from gradcombine.reductions.weights import parse
from gradcombine.settings import check
from gradcombine.types import Array, Leaf, Totals, Tree


class WindowMetrics(NamedTuple):
    """Metrics of the window applied by a call of an `AccumulatedStep` with ``terms``; zeros if none was applied.

    Attributes:
      value: by term, its sum divided by its denominator's total.
      weight: by denominator, its total over the microbatches.

    >>> import tensorflow as tf
    >>> from gradcombine.integrations.tensorflow import AccumulatedStep
    >>> w = tf.Variable(8.0)
    >>> def loss(x):
    ...     return {"fit": tf.reduce_sum(w * x), "decay": w * w}, {"tokens": tf.size(x), "microbatches": 1}
    >>> def apply(gradients, variables):
    ...     variables[0].assign_sub(gradients[0])
    >>> terms = {"fit": "tokens", "decay": "microbatches"}
    >>> step = AccumulatedStep(loss, [w], apply, every=2, terms=terms)
    >>> _ = step(tf.constant([1.0, 2.0, 3.0]))
    >>> applied, _, metrics = step(tf.constant([6.0]))
    >>> float(metrics.value["fit"]), float(metrics.weight["tokens"]), float(w)  # 8 - 12 / 4 - 16
    (24.0, 4.0, -11.0)
    """

    value: dict[str, tf.Tensor]
    weight: dict[str, tf.Tensor]


class LossOfTerms:
    """A loss of several terms.

    Args:
      terms, totals, reduction: as for `AccumulatedStep`.
      optimizer: the Keras optimizer, whose loss scale multiplies what is differentiated; None for a function.

    Attributes:
      reduction: reduction of the gradients.
      takes_totals: whether each call takes the totals.
    """

    def __init__(
        self, terms: Mapping[str, str], totals: Totals | None, reduction: Reduction | None, optimizer: Any
    ) -> None:
        check(totals=totals)
        self._terms = Terms(terms, totals is not None)
        if totals == "counted":
            raise invalid("totals 'given' or None, as a call gets a single microbatch", "counted")
        self._scaled = (lambda x: x) if optimizer is None else optimizer.scale_loss
        self.reduction, self.takes_totals = self._terms.reduction(reduction), self._terms.known

    def like(self, specs: Sequence[Leaf]) -> Tree:
        """Returns specs of the contributions for gradients with these specs."""
        return self._terms.like(specs)

    def metrics(self, window: Window, specs: Sequence[Leaf]) -> ReplicaState:
        """Creates the state that accumulates the metrics of a window."""
        self._dtype = dtypes.of_weights(BACKEND.dtype(spec) for spec in specs)
        reduction = reductions.per_leaf({"value": self._terms.reduction_of_values(), "weight": reductions.sum()})
        scalar = tf.TensorSpec((), self._dtype)
        values = {term: scalar if self._terms.known else Ratio(scalar, 1) for term in self._terms.over}
        weights = {name: tf.TensorSpec((), tf.float32) for name in self._terms.denominators}
        return in_local_variables(replace(window, reduction=reduction), {"value": values, "weight": weights})

    def computed(
        self, loss: Callable[..., Tree], batch: Sequence[Tree], totals: Tree, targets: Sequence[Any]
    ) -> tuple[dict[str, list[Leaf]], dict[str, Tree], Any, dict[str, Tree], list[Leaf]]:
        """Computes the loss of one microbatch and its gradients.

        Returns:
          The gradients by denominator, or, if totals are given, the total gradient under "", times the optimizer's
          loss scale; the weights; 1 if any weight is nonzero, else 0; the contribution to the metrics; and a list of
          the loss's outputs, at most one.
        """
        terms = self._terms
        with tf.GradientTape(persistent=not terms.known and len(terms.denominators) > 1) as tape:
            result = loss(*batch)
            if isinstance(result, Mapping):
                result = (result, None)
            expected = "a Ratio of each term, (values, weights) or (values, weights, outputs), by name"
            result = require_tuple(expected, result, 2, 3)
            raw_values, raw_weights = terms.opened(*result[:2])
            values = terms.widened({term: tf.convert_to_tensor(x) for term, x in terms.values(raw_values).items()})
            weights = {
                name: tf.stop_gradient(x) if tf.is_tensor(x) else x for name, x in terms.weights(raw_weights).items()
            }
            parts = terms.parts(values, weights, totals)
            sums = {"": terms.total(parts)} if terms.known else terms.summed(values)
            # A dynamic scale changes only in an update, so it is the one that the update at the boundary divides by.
            scaled = {name: self._scaled(x) for name, x in sums.items()}
        grads = {name: tape.gradient(x, targets) for name, x in scaled.items()}
        return grads, weights, terms.present(weights), self._metric_parts(parts, weights), list(result[2:])

    def contribution(self, gradients: Mapping[str, list[Leaf]], weights: Mapping[str, Tree]) -> Tree:
        """Returns the contribution of dense gradients to the window."""
        return gradients[""] if self._terms.known else self._terms.contribution(gradients, weights)

    def empty_metrics(self) -> WindowMetrics:
        """Returns the metrics of a call that applies no window."""
        value = {term: tf.zeros((), self._dtype) for term in self._terms.over}
        return WindowMetrics(value, {name: tf.zeros(()) for name in self._terms.denominators})

    def _metric_parts(self, parts: dict[str, Tree], weights: Mapping[str, Tree]) -> dict[str, Tree]:
        def value(x: Leaf) -> Array:
            if isinstance(x, Ratio):
                return x._replace(numerator=tf.cast(x.numerator, self._dtype))
            return tf.cast(x, self._dtype)

        return {
            "value": {term: value(x) for term, x in parts.items()},
            "weight": {name: parse(BACKEND, x).cast(BACKEND, dtypes.FLOAT32) for name, x in weights.items()},
        }
