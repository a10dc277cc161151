# pyright: standard
"""Accumulation around any Keras optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from gradcombine.errors import (
    GradCombineError,
    invalid,
    operation,
    require_equal,
    require_given,
    require_items,
    require_tuple,
    translate_errors,
    within,
)
from gradcombine.integrations.keras import settings
from gradcombine.integrations.keras.losses import Unweighed
from gradcombine.integrations.keras.settings import Name, Parts, Weights, reduction_of
from gradcombine.integrations.keras.wrapper import WindowWrapper
from gradcombine.places.window import Window
from gradcombine.types import Array, Leaf, Order, Precision, Scalar
from gradcombine.wires import Wire
from gradcombine.wires.wire import named

# As in Keras itself, the backend is chosen at import, and the other framework need not be installed.
if keras.backend.backend() == "tensorflow":
    from gradcombine.integrations.keras.on_tensorflow import TensorflowWindow as BackendWindow
elif keras.backend.backend() == "jax":
    from gradcombine.integrations.keras.on_jax import JaxWindow as BackendWindow
else:
    raise GradCombineError("keras", "Keras' backend 'tensorflow' or 'jax'", repr(keras.backend.backend()))

_OPERATION = "Accumulate"


@keras.saving.register_keras_serializable("gradcombine")
class Accumulate(WindowWrapper):
    """Runs a Keras optimizer once a window, on the gradients combined over its microbatches and over the replicas.

    It is used like any other optimizer, in ``compile``, ``fit`` and custom loops. Microbatches are only added to their
    window, until the last one runs ``inner_optimizer``. So clipping, weight decay, moving averages, constraints,
    learning-rate schedules and ``iterations`` count windows. Accumulators are float32 for narrower gradients.

    ``fit`` gives every microbatch weight 1; the callback `FlushAtEpochEnd` makes it the number of examples, and applies
    what an epoch leaves over. `WeightedTrainStep` has weights of your own, and ``apply`` takes them in a custom loop.
    Where Keras' own ``train_step`` hands over batches of different sizes without either, a warning says so, once for
    each optimizer: at the latest at the end of ``fit``.

    A gradient that is None adds nothing. For a variable that has had no gradient yet, the inner optimizer gets None,
    and Keras warns about it. Sparse gradients (tf.IndexedSlices) become dense.

    Replicas of a tf.distribute strategy exchange gradients only at the boundary. Like every Keras optimizer, this one
    takes gradients that are to be summed over replicas: Keras divides its losses by their number. The mean is over
    all their microbatches, by weight.

    A dynamic loss scale goes inside: ``Accumulate(LossScaleOptimizer(inner), ...)``. It then decides at the boundary,
    by the combined gradients, which are the same on all replicas; a window with an infinity is skipped as a whole. A
    LossScaleOptimizer around this optimizer, as ``compile`` adds it under the policy mixed_float16 if there is none
    inside, skips single microbatches. It is refused on several replicas, as it would look at the first one only.

    Args:
      inner_optimizer: a Keras optimizer, its name or its config.
      every: the microbatches of a window: an integer of 1 or more, or a function of the window's index (int32 scalar),
        registered by keras.saving.register_keras_serializable if the model is to be saved.
      reduction: ``"mean"``; or ``"sum"``, for losses that are sums over the examples.
      precision: ``"fast"``, ``"compensated"`` or ``"exact"``, as for `gradcombine.reductions.sum`.
      dtype: of the accumulators, as there.
      wire: how replicas of a strategy send their windows: `gradcombine.wires.cast` or `gradcombine.wires.blocks`. Paths
        of leaves are positions. One with a function as ``wide`` is not made again from a config.
      order, max_every: as for `gradcombine.accumulate`.
      name: of the optimizer.

    Raises:
      GradCombineError: for an inner optimizer that accumulates itself; for gradients that are all None or do not match
        the variables; as `gradcombine.accumulate`. The window is unchanged then.

    Bits: the inner optimizer gets those of `gradcombine.combine` over the microbatches (over replicas, as
    `gradcombine.merge_replicas`), on both backends.

    Training resumes from a ``.keras`` file in the middle of a window, to the bit, with as many replicas or more, and on
    the other backend; with fewer, their windows are merged. A window that has been begun also continues with another
    ``every`` or ``order``, or with a wider ``dtype``. It is refused, and nothing is changed, if it already has as many
    microbatches as ``every``, and for another reduction, precision or wire or a narrower dtype. A tf.train.Checkpoint
    resumes with the same settings (with a shorter ``every``, the window gets that many microbatches more) on one
    replica; of several it holds only the first one's window, so flush before saving.

    References: `Keras optimizers <https://keras.io/api/optimizers/>`_, argument ``gradient_accumulation_steps``.

    >>> import keras
    >>> w = keras.Variable([0.0, 0.0])
    >>> optimizer = Accumulate(keras.optimizers.SGD(1.0), every=2)
    >>> optimizer.apply([keras.ops.convert_to_tensor([1.0, 2.0])], [w], weight=1)
    >>> optimizer.apply([keras.ops.convert_to_tensor([3.0, 4.0])], [w], weight=3)
    >>> w.numpy().tolist(), int(optimizer.iterations)
    ([-2.5, -3.5], 1)
    """

    @operation("Accumulate")
    def __init__(
        self,
        inner_optimizer: Any,
        every: int | Callable[[Array], Scalar],
        *,
        reduction: Name = "mean",
        precision: Precision = "fast",
        dtype: str | None = None,
        wire: Wire | None = None,
        order: Order = "sequential",
        max_every: int | None = None,
        name: str | None = None,
    ) -> None:
        inner = settings.inner_optimizer(inner_optimizer)
        combined = reduction_of(reduction, precision, dtype, wire)
        every = Window(combined, every, order=order, max_every=max_every).every
        super().__init__(name)
        self.every, self.reduction, self.precision, self.dtype = every, reduction, precision, dtype
        self.order: Order = order
        self.wire: Wire | None = wire
        self.max_every = max_every
        self._kind = f"{reduction}, precision {precision!r}" + (f", {wire!r}" if wire else "")
        self._combined, self._weights, self._unweighed = combined, Weights(), Unweighed(self)
        self._scaled_outside = False
        self.inner_optimizer = inner
        if type(self) is Accumulate and settings.scales_loss(inner):
            object.__setattr__(self, "__class__", ScaledAccumulate)

    @operation("Accumulate")
    def __setattr__(self, name: str, value: object) -> None:
        if name == "loss_scale_factor" and "inner_optimizer" in vars(self):
            both = settings.scales_loss(self.inner_optimizer)
            if both:
                raise invalid(settings.ONE_LOSS_SCALE, "both")
            # So a LossScaleOptimizer around this one says that the gradients are unscaled already.
            self._scaled_outside = value is None
        super().__setattr__(name, value)

    @operation("Accumulate")
    def build(self, variables: Sequence[Any]) -> None:
        """Makes the windows and builds the inner optimizer; ``fit`` calls it. Under a strategy, call it in its scope.

        Args:
          variables: what is trained.
        """
        if self.built:
            return
        variables = settings.require_variables(variables)
        parts = Parts([self._overwrite_variable_with_gradient(x) for x in variables], self._combined)
        rules = Window(parts.reduction, self.every, order=self.order, max_every=self.max_every)
        inner = self.inner_optimizer
        if not inner.built:
            inner.build(variables)
        settings.require_built_alike(inner, variables)
        with keras.name_scope(self.name):
            window = BackendWindow(rules, parts, inner, variables)
        if self._scaled_outside:
            settings.require_agreed_scale(window.replicas)
        for variable in window.variables:
            self._track_variable(variable)
        self._window = window
        self._checkpointed = window.checkpointed(self._kind)
        # Bypasses Keras' tracking of attributes: trained variables are not among the optimizer's.
        self.__dict__["_trainable_variables"] = variables
        self._trainable_variables_indices = {self._var_key(x): i for i, x in enumerate(variables)}
        self.built = True

    @operation("Accumulate")
    def apply(
        self, grads: Sequence[Leaf], trainable_variables: Sequence[Any] | None = None, weight: Scalar = None
    ) -> None:
        """One microbatch; the last one of a window runs the inner optimizer.

        Args:
          grads: one gradient a variable, of its shape and dtype, or None.
          trainable_variables: those that the optimizer was built with, or some of them; None: all. Builds it, if it is
            not yet.
          weight: of the microbatch on this replica, for instance its number of tokens: a scalar, finite and not
            negative. One of weight 0 changes nothing, but is a step of its window. None: what `weighted` says, else 1.
        """
        gradients = require_items("a list of gradients", grads)
        if not gradients:
            return
        if trainable_variables is not None:
            trainable_variables = settings.require_variables(trainable_variables)
            self.build(trainable_variables)
        window = self._built_window()
        gradients = self._aligned(gradients, trainable_variables)
        require_given("a gradient for one variable or more", next((x for x in gradients if x is not None), None))
        weight = self._weights.current() if weight is None else weight
        if weight is None:
            self._unweighed.add(window)
        window.contribute(gradients, 1 if weight is None else weight)
        self._iterations.assign_add(1)

    @operation("Accumulate")
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], weight: Scalar = None) -> Array:
        """`apply` for pairs; returns the number of microbatches so far."""
        expected = "pairs of a gradient and its variable"
        pairs = require_items(expected, grads_and_vars)
        for i, pair in enumerate(pairs):
            with within(f"[{i}]"):
                require_tuple(expected, pair, 2, kinds=(tuple, list))
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs], weight)
        return self._iterations

    @operation("Accumulate")
    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Leaf],
        trainable_variables: Sequence[Any],
        weight: Scalar = None,
    ) -> tuple[list[Array], list[Array]]:
        """`apply` as a pure function of the variables' values, on the JAX backend; see Keras.

        Returns:
          The values of the trainable variables and of ``variables``. To have them updated in place, take them in this
          order where they are donated to jax.jit: it pairs donated arguments with results by order.
        """
        settings.require_jax("stateless_apply")
        with self._weights.set_to(self._weights.current() if weight is None else weight):
            # Not super(), which in a `ScaledAccumulate` is a LossScaleOptimizer's.
            return keras.optimizers.Optimizer.stateless_apply(self, optimizer_variables, grads, trainable_variables)

    @operation("Accumulate")
    def flush(self) -> Array:
        """Applies a partial window, divided by its true weight, and starts the next one: at the end of the data.

        Under a strategy, call it outside of strategy.run, or in replica context on all replicas.

        Returns:
          Whether there was one, a boolean scalar. A window that is empty or has been applied changes nothing.
        """
        return False if self._window is None else self._window.flush()

    @operation("Accumulate")
    def stateless_flush(
        self, optimizer_variables: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Array], list[Array]]:
        """`flush` as a pure function, on the JAX backend: arguments and result as of `stateless_apply`."""
        settings.require_jax("stateless_flush")
        window = self._built_window()
        trained = self._trainable_variables
        mapping = [
            *zip(trained, trainable_variables, strict=True),
            *zip(self.variables, optimizer_variables, strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            window.flush()
        return [scope.get_current_value(x) for x in trained], [scope.get_current_value(x) for x in self.variables]

    def weighted(self, weight: Scalar) -> AbstractContextManager[None]:
        """Gives the microbatches that this thread applies inside of a with statement a weight.

        For a ``train_step`` of your own, where Keras calls ``apply`` without one.
        """
        return self._weights.set_to(weight)

    @operation("Accumulate")
    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As the inner optimizer does; ``fit`` calls it at its end."""
        if self._window is None:
            return
        self._unweighed.end(self._window)
        if not self._window.holds(var_list):
            return
        super().finalize_variable_values(var_list)
        self._window.unshare(var_list)

    def get_config(self) -> dict[str, Any]:
        """The arguments, with the inner optimizer's config."""
        serialize = keras.saving.serialize_keras_object
        return {
            "inner_optimizer": serialize(self.inner_optimizer),
            "every": serialize(self.every) if callable(self.every) else self.every,
            "reduction": self.reduction,
            "precision": self.precision,
            "dtype": self.dtype,
            "wire": self.wire and self.wire.name,
            "order": self.order,
            "max_every": self.max_every,
            "name": self.name,
        }

    @classmethod
    @operation("Accumulate")
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Accumulate:
        """The optimizer of a config."""
        with translate_errors(
            "a config, as get_config returns it", Exception
        ):  # Keras has a class of error for each part
            copied = copy.deepcopy(config)  # Keras takes names out of what it reads
            made = {
                name: keras.saving.deserialize_keras_object(copied[name], custom_objects=custom_objects)
                for name in ("inner_optimizer", "every")
            }
            made["wire"] = named(copied["wire"]) if copied.get("wire") is not None else None
            return cls(**{**copied, **made})

    def _aligned(self, gradients: list[Leaf], variables: Sequence[Any] | None) -> list[Leaf]:
        """One gradient for each variable that the optimizer was built with."""
        targets = list[Any](self._trainable_variables if variables is None else variables)
        require_equal("{} gradients, one per variable", len(targets), len(gradients))
        if variables is None:
            return gradients
        self._check_variables_are_known(targets)
        by_index = {self._get_variable_index(x): gradient for x, gradient in zip(targets, gradients, strict=True)}
        return [by_index.get(i) for i in range(len(self._trainable_variables))]


def accumulating(optimizer: Any) -> Accumulate | None:
    """The accumulating optimizer of a model: its own, or the one in a LossScaleOptimizer."""
    return next((x for x in settings.chain(optimizer) if isinstance(x, Accumulate)), None)


@keras.saving.register_keras_serializable("gradcombine")
class ScaledAccumulate(Accumulate, keras.optimizers.LossScaleOptimizer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """An `Accumulate` around a LossScaleOptimizer, which is a LossScaleOptimizer to Keras.

    So ``compile`` puts no second one around it, also where it compiles what a file holds: that does not say that it was
    compiled with ``auto_scale_loss=False``.
    """
