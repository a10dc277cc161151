# pyright: standard
"""An accumulating wrapper for any Keras optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    shown,
    translate_errors,
    within,
)
from gradcombine.integrations.keras import settings
from gradcombine.integrations.keras.losses import UnweightedSizes
from gradcombine.integrations.keras.settings import Parts, ReductionName, Weights, reduction_of
from gradcombine.integrations.keras.wrapper import Wrapper
from gradcombine.integrations.keras_optimizers import require_built_with
from gradcombine.places.window import Window
from gradcombine.reductions import dtypes
from gradcombine.types import Array, DType, Leaf, Order, Precision, Scalar
from gradcombine.wires import Wire
from gradcombine.wires.wire import named

# Keras fixes its backend at import; the other framework need not be installed.
if keras.backend.backend() == "tensorflow":
    from gradcombine.integrations.keras.on_tensorflow import TensorflowWindow as BackendWindow
elif keras.backend.backend() == "jax":
    from gradcombine.integrations.keras.on_jax import JaxWindow as BackendWindow
else:
    raise GradCombineError("keras", "Keras' backend 'tensorflow' or 'jax'", repr(keras.backend.backend()))


_OF_REDUCTION = "reduction", "precision", "dtype", "wire"
_OF_WINDOW = *_OF_REDUCTION, "every", "order", "max_every"
"""Settings that the window has once the optimizer is built; those of the reduction, from the beginning."""


@keras.saving.register_keras_serializable("gradcombine")
@operation("Accumulate")
class Accumulate(Wrapper):
    """Runs a Keras optimizer once per window, on gradients combined over the window's microbatches and the replicas.

    Use it like any other optimizer, in ``compile``, ``fit`` and custom training loops. A call adds one microbatch to
    the accumulators; the last one of a window runs ``inner_optimizer``. Clipping, weight decay, moving averages,
    constraints, learning-rate schedules and ``iterations`` therefore count windows. Gradients narrower than float32 are
    accumulated in float32.

    In ``fit`` every microbatch has weight 1. The callback `FlushAtEpochEnd` weights it by its number of examples, and
    applies the partial window at the end of an epoch; `WeightedTrainStep` is for other weights. In a custom loop, pass
    them to ``apply``. If Keras' ``train_step`` gets batches of different sizes and no weights, a warning is issued,
    once per optimizer, at the end of ``fit`` at the latest.

    A gradient of None adds nothing. For a variable that has never had a gradient the inner optimizer gets None, and
    Keras warns about it. Sparse gradients (tf.IndexedSlices) become dense: rows of a repeated id are added before the
    optimizer squares them, unlike in Keras' Adam, Adagrad and RMSprop, also with ``every=1``.

    Replicas of a tf.distribute strategy exchange gradients only at the boundary of a window. Like every Keras
    optimizer, this one expects gradients that are to be summed over replicas, as Keras divides its losses by the number
    of replicas. The result is the weighted mean over the microbatches of all replicas.

    Put dynamic loss scaling inside: ``Accumulate(LossScaleOptimizer(inner), ...)``. It then checks the combined
    gradients, which are identical on all replicas, and skips the entire window if one is infinite. A LossScaleOptimizer
    around this optimizer (``compile`` adds one under the policy mixed_float16 if there is none inside) skips single
    microbatches. With several replicas it is an error, as it would check the gradients of the first replica only.

    Args:
      inner_optimizer: a Keras optimizer, its name or its config.
      every: number of microbatches per window: an integer of 1 or more, or a function of the window's index (int32
        scalar), registered with keras.saving.register_keras_serializable if the model is to be saved.
      reduction: ``"mean"``; or ``"sum"``, for losses that are sums over the examples.
      precision: ``"fast"``, ``"compensated"`` or ``"exact"``, as for `gradcombine.reductions.sum`.
      dtype: accumulator dtype, as for `gradcombine.reductions.sum`.
      wire: encoding of the windows that replicas exchange: `gradcombine.wires.cast` or `gradcombine.wires.blocks`. Leaf
        paths are positions in the list of gradients. A wire whose ``wide`` is a function cannot be restored from a
        config.
      order, max_every: as for `gradcombine.accumulate`.
      name: name of the optimizer.

    Raises:
      GradCombineError: for an inner optimizer that itself accumulates; for gradients that are all None or do not match
        the variables; as `gradcombine.accumulate`. The window is unchanged then.

    Bits: the inner optimizer gets the bits of `gradcombine.combine` over the microbatches (over replicas, of
    `gradcombine.merge_replicas`), on both backends.

    Training resumes bit for bit from a ``.keras`` file saved in the middle of a window, on either backend, with the
    same number of replicas or more; with fewer, windows are merged. (With another number, weight the microbatches, as
    `FlushAtEpochEnd` does: without weights, a microbatch counts 1 on each replica.) A partial window can also continue
    with a different ``every`` or ``order``, or with a wider ``dtype``. Loading raises, and leaves the window as it is
    (Keras loads the model and the inner optimizer), if the saved window already has ``every`` microbatches or more, or
    if the reduction, precision or wire differs or the dtype is narrower. A tf.train.Checkpoint resumes with the same
    settings (with a shorter ``every``, the next microbatch completes the window) on one replica; with several, of which
    it would hold the first one's window only, saving an open window raises: flush before.
    A pickled or deep-copied optimizer has its values again once it is built; built with variables of other shapes, it
    warns and begins anew.

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
        every: int | Callable[[Array], Scalar],
        *,
        reduction: ReductionName = "mean",
        precision: Precision = "fast",
        dtype: DType = None,
        wire: Wire | None = None,
        order: Order = "sequential",
        max_every: int | None = None,
        name: str | None = None,
    ) -> None:
        inner = settings.inner_optimizer(inner_optimizer)
        combined = reduction_of(reduction, precision, dtype, wire)
        every = Window(combined, every, order=order, max_every=max_every).every
        super().__init__(name)
        self.every, self.reduction, self.precision = every, reduction, precision
        self.dtype = None if dtype is None else str(dtypes.parse(dtype))  # for `get_config`
        self.order: Order = order
        self.wire: Wire | None = wire
        self.max_every = max_every
        self._combined, self._unweighted = combined, UnweightedSizes(self)
        self._weights = Weights(BackendWindow.is_tracing)
        self.inner_optimizer = inner
        if type(self) is Accumulate and settings.scales_loss(inner):
            object.__setattr__(self, "__class__", ScaledAccumulate)

    @operation("Accumulate")
    def __setattr__(self, name: str, value: object) -> None:
        if "inner_optimizer" in vars(self) and name in (_OF_REDUCTION if not self.built else _OF_WINDOW):
            raise invalid(f"{name} as an argument of Accumulate, not assigned later", shown(value))
        super().__setattr__(name, value)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the accumulators and builds the inner optimizer, as ``fit`` does; call it in the strategy's scope.

        Args:
          variables: the trainable variables.
        """
        if self.built:
            return
        variables = settings.require_variables(variables)
        parts = Parts([self._overwrite_variable_with_gradient(x) for x in variables], self._combined)
        rules = Window(parts.reduction, self.every, order=self.order, max_every=self.max_every)
        inner = self.inner_optimizer
        if not inner.built:
            inner.build(variables)
        if list(map(id, inner._trainable_variables)) != list(map(id, variables)):
            expected = "an inner optimizer that is not built, or built with the same variables"
            raise invalid(expected, "one built with others")
        require_built_with(inner, variables)
        if inner is not self._settings and self.use_ema:  # keras.callbacks.SwapEMAWeights looks only one level deep
            vars(inner)["_model_variables_moving_average"] = self._model_variables_moving_average
        description = f"{self.reduction}, precision {self.precision!r}" + (f", {self.wire!r}" if self.wire else "")
        with keras.name_scope(self.name):
            window = BackendWindow(rules, parts, inner, variables, description)
        if self._scaled_outside and window.replicas > 1:
            expected = "Accumulate(LossScaleOptimizer(...)), which checks the gradients of all replicas"
            received = "LossScaleOptimizer(Accumulate(...)), which checks those of the first replica only"
            raise invalid(expected, f"{received} (compile adds one under the policy mixed_float16)")
        self._checkpointed = window.layout()  # first, as a deferred restore compares it
        for variable in window.variables:
            self._track_variable(variable)
        self._window = window
        # Bypasses Keras' attribute tracking: the trained variables are not variables of the optimizer.
        self.__dict__["_trainable_variables"] = variables
        self._trainable_variables_indices = {self._var_key(x): i for i, x in enumerate(variables)}
        self.built = True
        self._load_unpickled()

    def apply(
        self, grads: Sequence[Leaf], trainable_variables: Sequence[Any] | None = None, weight: Scalar = None
    ) -> None:
        """Adds one microbatch; the last one of a window runs the inner optimizer.

        Args:
          grads: one gradient per variable, of its shape and dtype, or None, which adds nothing. As in Keras, a variable
            without any gradient in a window is not updated.
          trainable_variables: variables that the optimizer was built with, all or some; None: all. Builds the optimizer
            if necessary.
          weight: weight of the microbatch on this replica, for instance its number of tokens: a finite, nonnegative
            scalar. Weight 0 adds nothing, but the microbatch counts toward its window. None: the weight set by
            `weighted`, or 1.
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
        weight = self._weights.take(weight)
        with window.after(gradients):
            if weight is None:
                self._unweighted.add(window)
            window.contribute(gradients, 1 if weight is None else weight)
            self._iterations.assign_add(1)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], weight: Scalar = None) -> Array:
        """Calls `apply` on pairs of gradient and variable; returns the number of microbatches so far."""
        expected = "pairs of a gradient and its variable"
        pairs = require_items(expected, grads_and_vars)
        for i, pair in enumerate(pairs):
            with within(f"[{i}]"):
                require_tuple(expected, pair, 2, kinds=(tuple, list))
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs], weight)
        return self._iterations

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Leaf],
        trainable_variables: Sequence[Any],
        weight: Scalar = None,
    ) -> tuple[list[Array], list[Array]]:
        """Pure version of `apply` on the variables' values, on the JAX backend; see Keras.

        Returns:
          The new values of the trainable variables and of ``variables``. A jitted step that donates both should take
          them in this order: jax.jit pairs donated arguments with results by position.
        """
        settings.require_jax("stateless_apply")
        self._built_window()
        with nullcontext() if weight is None else self._weights.set_to(weight):
            # Not super(), which in `ScaledAccumulate` is LossScaleOptimizer.
            return keras.optimizers.Optimizer.stateless_apply(self, optimizer_variables, grads, trainable_variables)

    def flush(self) -> Array:
        """Applies a partial window, divided by its actual weight, and starts a new one, e.g. at the end of the data.

        Under a strategy, call it outside of strategy.run, or in replica context on all replicas.

        Returns:
          Boolean scalar: whether there was a partial window. Otherwise nothing changes.
        """
        return False if self._window is None else self._window.flush()

    def stateless_flush(
        self, optimizer_variables: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Array], list[Array]]:
        """Pure version of `flush`, on the JAX backend; arguments and results as for `stateless_apply`."""
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
        """Sets the weight of the microbatches that this thread applies inside a with statement.

        For a custom ``train_step`` in which Keras calls ``apply``, without a weight.

        Raises:
          GradCombineError: for a with statement around a compiled function, such as ``train_on_batch``, which would
            keep the first weight; and around ``strategy.run``, whose replicas are other threads.
        """
        return self._weights.set_to(weight)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Finalizes the variables as the inner optimizer does; called at the end of ``fit``."""
        if self._window is not None:
            self._unweighted.end(self._window)
            self._window.finalize(var_list)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, with the inner optimizer's config."""
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
        """Creates an optimizer from the result of `get_config`."""
        # Deserialization raises errors of many classes.
        with translate_errors("a config, as get_config returns it", Exception):
            arguments = copy.deepcopy(config)  # deserialization removes keys
            for name in ("inner_optimizer", "every"):
                arguments[name] = keras.saving.deserialize_keras_object(arguments[name], custom_objects=custom_objects)
            if arguments.get("wire") is not None:
                arguments["wire"] = named(arguments["wire"])
            return cls(**arguments)

    def _aligned(self, gradients: list[Leaf], variables: Sequence[Any] | None) -> list[Leaf]:
        """Returns one gradient or None per variable that the optimizer was built with."""
        targets = list[Any](self._trainable_variables if variables is None else variables)
        require_equal("{} gradients, one per variable", len(targets), len(gradients))
        if variables is None:
            return gradients
        require_built_with(self, targets)
        by_index = {self._get_variable_index(x): gradient for x, gradient in zip(targets, gradients, strict=True)}
        return [by_index.get(i) for i in range(len(self._trainable_variables))]


def accumulating(optimizer: Any) -> Accumulate | None:
    """Returns a model's optimizer if it accumulates, or the accumulating one inside a LossScaleOptimizer, or None."""
    return next((x for x in settings.chain(optimizer) if isinstance(x, Accumulate)), None)


@keras.saving.register_keras_serializable("gradcombine")
class ScaledAccumulate(Accumulate, keras.optimizers.LossScaleOptimizer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """An `Accumulate` around a LossScaleOptimizer, which is also an instance of LossScaleOptimizer.

    Otherwise ``compile`` would wrap it in a second one, also for a model loaded from a file, which does not record that
    the model was compiled with ``auto_scale_loss=False``.
    """
