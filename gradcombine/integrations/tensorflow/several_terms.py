# pyright: standard
"""A loss of several terms over variables: what a microbatch contributes, and what is told of a window."""

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
    """Metrics of the window that a call of an `AccumulatedStep` with ``terms`` has applied; zeros where it has not.

    Attributes:
      value: by term, its sum over its denominator's total.
      weight: by denominator, the total of what the microbatches have brought.

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
      terms, totals: as for `AccumulatedStep`.
      reduction: as the caller has given it.

    Attributes:
      reduction: of the gradients.
    """

    def __init__(self, terms: Mapping[str, str], totals: Totals | None, reduction: Reduction | None) -> None:
        check(totals=totals)
        self._terms = Terms(terms, totals is not None)
        if totals == "counted":
            raise invalid("totals that are given, as a call brings one microbatch", "counted")
        self.reduction = self._terms.reduction(reduction)

    @property
    def is_given(self) -> bool:
        """Whether each call has to bring the totals."""
        return self._terms.known

    def like(self, specs: Sequence[Leaf]) -> Tree:
        """Specs of the contributions for gradients of these shapes and dtypes."""
        return self._terms.like(specs)

    def metrics(self, window: Window, specs: Sequence[Leaf]) -> ReplicaState:
        """A state for what is told of such windows."""
        self._dtype = dtypes.of_weights(BACKEND.dtype(spec) for spec in specs)
        parts = {"value": self._terms.reduction_of_values(), "weight": reductions.sum()}
        combined = reductions.per_leaf(parts)
        number = tf.TensorSpec((), self._dtype)
        values = {term: number if self._terms.known else Ratio(number, 1) for term in self._terms.over}
        weights = {name: tf.TensorSpec((), tf.float32) for name in self._terms.denominators}
        return in_local_variables(replace(window, reduction=combined), {"value": values, "weight": weights})

    def computed(
        self, loss: Callable[..., Tree], batch: Sequence[Tree], totals: Tree, targets: Sequence[Any]
    ) -> tuple[dict[str, list[Leaf]], dict[str, Tree], Any, dict[str, Tree], list[Leaf]]:
        """One microbatch.

        Returns:
          Its gradients by denominator, or the one of all under ""; the weights; whether it has any, 1 or 0; what is to
          be told of it; and the outputs of the loss, at most one.
        """
        terms = self._terms
        with tf.GradientTape(persistent=not terms.known and len(terms.denominators) > 1) as tape:
            result = loss(*batch)
            if isinstance(result, Mapping):
                result = (result, None)
            expected = "a Ratio of each term, (values, weights) or (values, weights, outputs), by name"
            result = require_tuple(expected, result, 2, 3)
            received, brought = terms.opened(*result[:2])
            values = {term: tf.convert_to_tensor(x) for term, x in terms.values(received).items()}
            values = terms.widened(values)
            weights = {
                name: tf.stop_gradient(x) if tf.is_tensor(x) else x for name, x in terms.weights(brought).items()
            }
            told = terms.parts(values, weights, totals)
            sums = {"": terms.total(told)} if terms.known else terms.summed(values)
        grads = {name: tape.gradient(x, targets) for name, x in sums.items()}
        return grads, weights, terms.present(weights), self._told(told, weights), list(result[2:])

    def contribution(self, gradients: Mapping[str, list[Leaf]], weights: Mapping[str, Tree]) -> Tree:
        """The contribution to the window, of dense gradients."""
        return gradients[""] if self._terms.known else self._terms.contribution(gradients, weights)

    def opened(self, values: Mapping[str, Tree]) -> WindowMetrics:
        """The metrics of a window, of its combined parts."""
        return WindowMetrics(values["value"], values["weight"])

    def nothing(self) -> WindowMetrics:
        """The metrics of a call that applied no window."""
        value = {term: tf.zeros((), self._dtype) for term in self._terms.over}
        return WindowMetrics(value, {name: tf.zeros(()) for name in self._terms.denominators})

    def _told(self, told: dict[str, Tree], weights: Mapping[str, Tree]) -> dict[str, Tree]:
        def number(x: Leaf) -> Array:
            return parse(BACKEND, x).cast(BACKEND, dtypes.FLOAT32)

        def value(x: Leaf) -> Array:
            return (
                x._replace(numerator=tf.cast(x.numerator, self._dtype))
                if isinstance(x, Ratio)
                else tf.cast(x, self._dtype)
            )

        return {
            "value": {term: value(x) for term, x in told.items()},
            "weight": {name: number(x) for name, x in weights.items()},
        }
