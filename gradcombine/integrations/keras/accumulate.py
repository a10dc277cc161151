"""Accumulation around any Keras optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from gradcombine.accumulate import accumulate
from gradcombine.autograph import ordinary
from gradcombine.integrations.keras import checks, saving
from gradcombine.integrations.keras.backend import BackendWindow
from gradcombine.integrations.keras.checks import error
from gradcombine.integrations.keras.settings import Name, Parts, reduction_of
from gradcombine.integrations.keras.weights import Weights
from gradcombine.reductions.sum import Precision
from gradcombine.types import Order


@keras.saving.register_keras_serializable("gradcombine")
class Accumulate(keras.optimizers.Optimizer):
    """Runs a Keras optimizer once a window, on the gradients combined over its microbatches and over the replicas.

    An optimizer as any other for ``compile``, ``fit`` and custom loops. All but the last microbatch of a window only
    add to the window; the last one runs ``inner_optimizer``. So clipping, weight decay, moving averages, constraints,
    learning-rate schedules and ``iterations`` count windows. Accumulators are float32 for narrower gradients.

    ``fit`` gives every microbatch weight 1; `WeightedTrainStep` makes it the number of examples, and ``apply`` takes it
    in a custom loop. `FlushAtEpochEnd` applies what an epoch leaves over.

    A gradient that is None adds nothing. A variable that has had no gradient yet is left to the inner optimizer as one
    without, and Keras warns of it. Sparse gradients (tf.IndexedSlices) become dense.

    Replicas of a tf.distribute strategy exchange gradients at the boundary alone. As every Keras optimizer, this one
    takes gradients that are to be summed over replicas: Keras divides its losses by their number. The mean is over
    all their microbatches, by weight.

    A dynamic loss scale goes inside: ``Accumulate(LossScaleOptimizer(inner), ...)``, and ``compile`` with
    ``auto_scale_loss=False``. It then decides at the boundary, by the combined gradients, which are the same on all
    replicas; a window with an infinity is skipped whole. Around this optimizer it leaves out single microbatches, and
    is refused where there are several replicas, of which it would ask the first one only.

    Args:
      inner_optimizer: a Keras optimizer, its name or its config.
      every: the microbatches of a window: an integer of 1 or more, or a function of the window's index (int32 scalar),
        registered by keras.saving.register_keras_serializable if the model is to be saved.
      reduction: ``"mean"`` or ``"sum"``.
      precision: ``"fast"``, ``"compensated"`` or ``"exact"``, as for `gradcombine.reductions.sum`.
      dtype: of the accumulators, as there.
      order, max_every: as for `gradcombine.accumulate`.
      name: of the optimizer.

    Raises:
      GradCombineError: for an inner optimizer that accumulates itself; for gradients of which none is there, or that do
        not match the variables; as `gradcombine.accumulate`. The window is whole then.

    Bits: the inner optimizer gets those of `gradcombine.combine` over the microbatches (over replicas, as
    `gradcombine.merge_replicas`), on both backends.

    A ``.keras`` file resumes in the middle of a window, to the bit, under as many replicas or more, and on the other
    backend; under fewer, their windows are merged. A tf.train.Checkpoint does on one replica; of several it holds the
    first one's window alone, so flush before.

    References: `Keras optimizers <https://keras.io/api/optimizers/>`_, argument ``gradient_accumulation_steps``.

    >>> import keras
    >>> w = keras.Variable([0.0, 0.0])
    >>> optimizer = Accumulate(keras.optimizers.SGD(1.0), every=2)
    >>> optimizer.apply([keras.ops.convert_to_tensor([1.0, 2.0])], [w], weight=1)
    >>> optimizer.apply([keras.ops.convert_to_tensor([3.0, 4.0])], [w], weight=3)
    >>> w.numpy().tolist(), int(optimizer.iterations)
    ([-2.5, -3.5], 1)
    """

    def __init__(
        self,
        inner_optimizer: Any,
        every: int | Callable[[Any], Any],
        *,
        reduction: Name = "mean",
        precision: Precision = "fast",
        dtype: str | None = None,
        order: Order = "sequential",
        max_every: int | None = None,
        name: str | None = None,
    ) -> None:
        inner = checks.inner_optimizer(inner_optimizer)
        combined = reduction_of(reduction, precision, dtype)
        accumulate(combined, every, order=order, max_every=max_every)
        super().__init__(learning_rate=0.0, name=name)
        self.every, self.reduction, self.precision, self.dtype = every, reduction, precision, dtype
        self.order: Order = order
        self.max_every = max_every
        self._combined, self._weights = combined, Weights()
        self._window: BackendWindow | None = None
        self._scaled_outside = False
        self.inner_optimizer = inner

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and "inner_optimizer" in self.__dict__:
            # So a LossScaleOptimizer around this one says that the gradients are unscaled already.
            if checks.scales_loss(self.inner_optimizer):
                raise checks.one_loss_scale()
            self._scaled_outside = True
            self.inner_optimizer.loss_scale_factor = value
        super().__setattr__(name, value)

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the windows and builds the inner optimizer; ``fit`` calls it. Under a strategy, call it in its scope.

        Args:
          variables: what is trained.
        """
        variables = list(variables)
        parts = Parts([self._overwrite_variable_with_gradient(x) for x in variables], self._combined)
        accumulator = accumulate(parts.reduction, self.every, order=self.order, max_every=self.max_every)
        inner = self.inner_optimizer
        if not inner.built:
            inner.build(variables)
        with keras.name_scope(self.name):
            window = BackendWindow(accumulator, parts, self.order, inner, variables)
        if self._scaled_outside:
            checks.require_agreed_scale(window.replicas)
        for variable in window.state.variables:
            self._track_variable(variable)
        self._window = window
        super().build(variables)

    @ordinary
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None, weight: Any = None) -> None:
        """One microbatch; the last one of a window runs the inner optimizer.

        Args:
          grads: one gradient a variable, of its shape and dtype, or None.
          trainable_variables: those that the optimizer was built with, or some of them; None: all. Builds it, if it is
            not yet.
          weight: of the microbatch on this replica, for instance its number of tokens: a scalar, finite and not
            negative. One of weight 0 changes nothing, but is a step of its window. None: what `weighted` says, else 1.
        """
        gradients = list(grads)
        if not gradients:
            return
        if trainable_variables is not None and not self.built:
            self.build(list(trainable_variables))
        window = self._built_window()
        gradients = self._aligned(gradients, trainable_variables)
        if all(gradient is None for gradient in gradients):
            raise error("a gradient for one variable or more", "none")
        window.contribute(gradients, self._weights.current() if weight is None else weight)
        self._iterations.assign_add(1)

    @ordinary
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], weight: Any = None) -> Any:
        """`apply` for pairs; returns the number of microbatches so far."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables, weight)
        return self._iterations

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
        weight: Any = None,
    ) -> tuple[list[Any], list[Any]]:
        """`apply` as a pure function of the variables' values, on the JAX backend; see Keras.

        Returns:
          The values of the trainable variables and of ``variables``. To have them updated in place, take them in this
          order where they are donated to jax.jit: it pairs donated arguments with results by order.
        """
        with self._weights.given(self._weights.current() if weight is None else weight):
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)

    @ordinary
    def flush(self) -> Any:
        """Applies a partial window, divided by its true weight, and starts the next one: at the end of the data.

        Under a strategy, call it outside of strategy.run, or in replica context on all replicas.

        Returns:
          Whether there was one, a boolean scalar. A window that is empty or has been applied changes nothing.
        """
        return False if self._window is None else self._window.flush()

    def stateless_flush(
        self, optimizer_variables: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`flush` as a pure function, on the JAX backend: arguments and result as of `stateless_apply`."""
        window = self._built_window()
        trained = self._trainable_variables
        mapping = [
            *zip(trained, trainable_variables, strict=True),
            *zip(self.variables, optimizer_variables, strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            window.flush()
        return [scope.get_current_value(x) for x in trained], [scope.get_current_value(x) for x in self.variables]

    def weighted(self, weight: Any) -> AbstractContextManager[None]:
        """Gives the microbatches that this thread applies inside of a with statement a weight.

        For a ``train_step`` of your own, where Keras calls ``apply`` without one.
        """
        return self._weights.given(weight)

    @property
    def variables(self) -> list[Any]:
        """The windows, and the inner optimizer's variables."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def iterations(self) -> Any:
        """How often the inner optimizer has run."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    def scale_loss(self, loss: Any) -> Any:
        """As the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)
        if self._window is not None:
            self._window.unshare(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Every replica's window; Keras saves the inner optimizer by itself."""
        if self._window is None:
            super().save_own_variables(store)
            return
        saving.save(store, self._others(), self._window)

    def load_own_variables(self, store: Any) -> None:
        """What `save_own_variables` has saved, on either backend and under any number of replicas."""
        if self._window is None or len(store.keys()) != len(self._variables):
            warnings.warn(f"Skipping the window of optimizer '{self.name}': it was built otherwise.", stacklevel=2)
            return
        saving.load(store, self._others(), self._window)

    def get_config(self) -> dict[str, Any]:
        """The arguments, with the inner optimizer's config."""
        serialize = keras.saving.serialize_keras_object
        return {
            "inner_optimizer": serialize(self.inner_optimizer),
            "every": serialize(self.every) if callable(self.every) else self.every,
            "reduction": self.reduction,
            "precision": self.precision,
            "dtype": self.dtype,
            "order": self.order,
            "max_every": self.max_every,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Accumulate:
        """The optimizer of a config."""
        made = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("inner_optimizer", "every")
        }
        return cls(**{**config, **made})

    def _built_window(self) -> BackendWindow:
        if self._window is None:
            raise error("an optimizer that is built, or trainable_variables", "neither")
        return self._window

    def _others(self) -> list[Any]:
        """The variables of its own that are not a window's."""
        return self._variables[: len(self._variables) - len(self._built_window().state.variables)]

    def _aligned(self, gradients: list[Any], variables: Sequence[Any] | None) -> list[Any]:
        """One gradient for each variable that the optimizer was built with."""
        targets = list(self._trainable_variables if variables is None else variables)
        if len(gradients) != len(targets):
            raise error(f"{len(targets)} gradients, one a variable", len(gradients))
        if variables is None:
            return gradients
        self._check_variables_are_known(targets)
        found = {self._get_variable_index(x): gradient for x, gradient in zip(targets, gradients, strict=True)}
        return [found.get(i) for i in range(len(self._trainable_variables))]


def accumulating(optimizer: Any) -> Accumulate | None:
    """The accumulating optimizer of a model: its own, or the one in a LossScaleOptimizer."""
    return next((found for found in checks.chain(optimizer) if isinstance(found, Accumulate)), None)
