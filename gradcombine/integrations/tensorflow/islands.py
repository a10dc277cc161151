# pyright: standard
"""Local steps with an outer optimizer (DiLoCo): replicas train independently and exchange parameter differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from gradcombine import reductions
from gradcombine.backends.tensorflow_backend import BACKEND
from gradcombine.errors import invalid, operation, require_given, require_integer, require_items, shown
from gradcombine.integrations.keras_optimizers import require_built_with, require_each_once, require_unscaled
from gradcombine.integrations.tensorflow.boundary import Update
from gradcombine.integrations.tensorflow.inputs import (
    keras_optimizer,
    require_context,
    require_created_in_scope,
    require_same_length,
    require_synchronous,
)
from gradcombine.integrations.tensorflow.state import local_variable
from gradcombine.places.fragments import divided, due
from gradcombine.places.replicas import all_reduce, tf_replicas
from gradcombine.places.window import require_condition
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.weights import parse
from gradcombine.settings import check
from gradcombine.types import Order, Scalar


class Fragment(NamedTuple):
    """Outer parameters that are exchanged together, each island's copies and weight, and the outer update."""

    targets: list[Any]
    params: list[Any]
    weight: Scalar
    update: Update

    def reset(self, condition: Scalar) -> None:
        """Resets this island to the outer parameters if the condition holds; in replica context."""
        condition = require_condition("begins", condition)
        for param, target in zip(self.params, self.targets, strict=True):
            param.assign(tf.where(condition, tf.convert_to_tensor(target), tf.convert_to_tensor(param)))
        self.weight.assign(tf.where(condition, 0.0, tf.convert_to_tensor(self.weight)))


class Outer(tf.Module):
    """Local steps with an outer optimizer (DiLoCo): H steps on each replica, then an exchange of the differences.

    Each replica of the strategy is an island with its own parameters, which move from the variables x to x_i in
    ``every`` steps. The outer optimizer applies the weighted mean of ``x - x_i`` over the islands as the gradient of x,
    and all islands continue from the new x.

    Call the methods in cross-replica context, eagerly or in a tf.function. The boundary is a tf.cond outside of the
    replicas, which exchange nothing between boundaries.

    Args:
      variables: the outer parameters: floating tf.Variables or Keras variables, each once, created under the strategy
        in scope.
      optimizer: a Keras optimizer, built here if necessary. With a list of F optimizers the variables are divided into
        F fragments of entire variables and roughly equal size in bytes, one for each optimizer. One fragment is
        exchanged every H / F steps, in turn, so that an exchange sends 1 / F of the bytes. Not with a loss scale.
      every: H, the number of steps between two exchanges of a fragment; F or more.
      reduction: reduction of the differences. None: `gradcombine.reductions.mean`. A ``wire`` sends them in fewer bits.
      order: order of the sum over the islands, as for `gradcombine.all_reduce`.

    Attributes:
      params: list of each island's parameters, in variables that are read and assigned in replica context. Their
        initial values are those of ``variables``.
      step: int32 scalar variable, the number of steps so far, which determines the schedule.

    Raises:
      GradCombineError: for invalid settings; for variables or an optimizer of another strategy, an optimizer that was
        built with other variables, or one with a loss scale; for a strategy without per-replica variables
        (CentralStorageStrategy) or an asynchronous one; in the methods, for a call inside ``strategy.run``.

    Bits: those of `gradcombine.all_reduce` of the differences in float32: with order ``"tree"`` the same under a
    strategy and in a simulation of the islands on one device by `gradcombine.combine`.

    A tf.train.Checkpoint holds each island's parameters and weight, the step, and the optimizers.

    References: Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
    <https://arxiv.org/abs/2311.08105>`_, 2023, and `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025.

    >>> import keras, tensorflow as tf
    >>> x = tf.Variable(8.0)
    >>> islands = Outer([x], keras.optimizers.SGD(0.5), every=2)
    >>> for _ in range(2):
    ...     _ = islands.params[0].assign_sub(2.0), islands.update(weight=16)
    >>> float(x), float(islands.params[0])  # 8 - 0.5 * (8 - 4)
    (6.0, 6.0)
    """

    @operation("Outer")
    def __init__(
        self,
        variables: Sequence[Any],
        optimizer: Any,
        every: int,
        *,
        reduction: Reduction | None = None,
        order: Order = "sequential",
    ) -> None:
        super().__init__()
        self._strategy = tf.distribute.get_strategy()
        self._order: Order = order
        self._reduction = reductions.mean() if reduction is None else reduction
        check(reduction=self._reduction, order=order)
        require_context(self._strategy)
        require_synchronous(self._strategy)
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        expected = "a Keras optimizer, or a list of one for each fragment"
        self.optimizers = [require_given(expected, keras_optimizer(x)) for x in optimizers]
        for one in self.optimizers:
            require_unscaled(one)
        count = len(self.optimizers)
        self._every = require_integer(f"{max(count, 1)} steps or more, one for each fragment", every, max(count, 1))
        require_same_length(self._strategy, self._every)
        targets = require_items("a list of variables", variables)
        require_each_once(targets)
        for i, target in enumerate(targets):
            require_created_in_scope(self._strategy, target, f"[{i}]")
            dtype = tf.as_dtype(target.dtype)
            if not dtype.is_floating:
                raise invalid("floating variables", dtype.name, f"[{i}]")
        if not count or len(set(map(id, self.optimizers))) < count:
            raise invalid(expected, shown(optimizer))
        params = [local_variable(tf.convert_to_tensor(target)) for target in targets]
        if any(isinstance(x, list) for x in params):
            raise invalid("a strategy with per-replica variables", type(self._strategy).__name__)
        parts = divided([math.prod(x.shape) * x.dtype.size for x in params], count)
        weights = [local_variable(tf.zeros(())) for _ in parts]
        fragments = list[Fragment]()
        for part, weight, one in zip(parts, weights, self.optimizers, strict=True):
            chosen = [targets[i] for i in part]
            require_created_in_scope(self._strategy, one.iterations, ".iterations")
            if not one.built:
                one.build(chosen)
            require_built_with(one, chosen)
            update = Update(self._strategy, None, one, chosen)
            fragments.append(Fragment(chosen, [params[i] for i in part], weight, update))
        self.step = tf.Variable(tf.constant(0), trainable=False)
        # In closures: a checkpoint would save one combined value for all replicas, and cannot save Keras variables.
        self._params, self._fragments = lambda: params, lambda: fragments
        self.of_islands = [list(self._strategy.experimental_local_results(x)) for x in [*params, *weights]]

    @property
    def params(self) -> list[tf.Variable]:
        return self._params()

    @operation("Outer")
    @tf.autograph.experimental.do_not_convert
    def update(self, weight: Scalar = 1.0) -> tf.Tensor:
        """Counts one step of each island, and exchanges the fragments that are due.

        Args:
          weight: weight of the island's step, for instance its number of tokens: a scalar, per replica under a
            strategy. An island of weight 0 since the last exchange, for instance a lost one, adds nothing, even if its
            parameters are NaN.

        Returns:
          Boolean vector: which fragments were exchanged.
        """
        require_context(self._strategy)
        self._strategy.run(self._add_weight, args=(weight,))
        self.step.assign_add(1)
        ends = due(tf.convert_to_tensor(self.step), self._every, len(self.optimizers))
        for end, fragment in zip(tf.unstack(ends), self._fragments(), strict=True):
            tf.cond(end, partial(self._exchange, fragment), lambda: None)
        return ends

    @operation("Outer")
    @tf.autograph.experimental.do_not_convert
    def join(self, begins: Scalar) -> None:
        """Resets islands that join, or return, to the outer parameters.

        Args:
          begins: boolean scalar, per replica under a strategy: whether to reset the island.
        """
        require_context(self._strategy)
        for fragment in self._fragments():
            self._strategy.run(fragment.reset, args=(begins,))

    def _add_weight(self, weight: Scalar) -> None:
        weight = parse(BACKEND, weight).cast(BACKEND, dtypes.FLOAT32)
        for fragment in self._fragments():
            fragment.weight.assign_add(weight)

    def _exchange(self, fragment: Fragment) -> None:
        def gradient() -> list[tf.Tensor]:
            pairs = zip(fragment.targets, fragment.params, strict=True)
            differences = [difference(x, x_i) for x, x_i in pairs]
            weight = tf.convert_to_tensor(fragment.weight)
            mean = all_reduce(self._reduction, differences, tf_replicas(), weight, self._order)
            return [tf.cast(g, x.dtype) for g, x in zip(mean, fragment.targets, strict=True)]

        if fragment.targets:
            fragment.update.run(self._strategy.run(gradient), range(len(fragment.targets)))
        self._strategy.run(fragment.reset, args=(True,))


def difference(a: Any, b: Any) -> tf.Tensor:
    """``a - b`` in float32, subtracted in at least float32."""
    wide = tf.float64 if tf.as_dtype(a.dtype) == tf.float64 else tf.float32
    return tf.cast(tf.cast(a, wide) - tf.cast(b, wide), tf.float32)
