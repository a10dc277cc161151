# pyright: standard
"""An optimizer around another one: delegation to the inner optimizer, and saving of the window."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import keras
import numpy as np

from gradcombine.errors import invalid, operation, require_equal, require_given, require_items, shown
from gradcombine.integrations.keras import window_variables as windows
from gradcombine.integrations.keras.settings import chain, scales_loss
from gradcombine.integrations.keras.window_variables import KerasWindow
from gradcombine.types import Array, Leaf, Scalar

_Optimizer = keras.optimizers.Optimizer


def _delegated(name: str) -> Callable[..., Any]:
    """Returns a method that calls the inner optimizer's; the inherited one would change this optimizer only."""

    @wraps(getattr(_Optimizer, name))
    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self._settings, "optimizers"):
            raise invalid(f"a call of {name} on one of MultiOptimizer.optimizers", "one on all of them")
        return getattr(self._settings, name)(*args, **kwargs)

    return method


@operation("Accumulate")
class Wrapper(_Optimizer):
    """Delegates methods, properties and settings to ``inner_optimizer``, which subclasses assign last.

    Settings (``weight_decay``, ``clipnorm``, ...) and methods that change them are those of the optimizer inside a
    LossScaleOptimizer, which itself ignores them. The window is saved and loaded here, the inner optimizer by Keras.

    Attributes:
      _window: the window; None until the optimizer is built.
      _unpickled: values of the optimizer that this one is a copy of, until it is built: the result of
        `save_own_variables`, the inner optimizer's variables, and the shapes of all. None for other optimizers.
      _scaled_outside: whether there is a LossScaleOptimizer around this one.
    """

    _window: KerasWindow | None = None
    _unpickled: tuple[dict[str, Any], list[np.ndarray], list[tuple[int, ...]]] | None = None
    _scaled_outside = False

    def __init__(self, name: str | None) -> None:
        if not (name is None or (isinstance(name, str) and name.isprintable() and "/" not in name)):
            raise invalid("a printable name without /, or None", shown(name))
        # Not super(): a subclass may also be a LossScaleOptimizer, whose constructor differs.
        _Optimizer.__init__(self, learning_rate=0.0, name=name)
        for setting in [x for x in vars(self) if not x.startswith("_") and x not in ("name", "built")]:
            del self.__dict__[setting]  # so that `__getattr__` returns the inner optimizer's

    add_variable = _delegated("add_variable")
    add_variable_from_reference = _delegated("add_variable_from_reference")
    add_optimizer_variables = _delegated("add_optimizer_variables")
    assign = _delegated("assign")
    assign_add = _delegated("assign_add")
    assign_sub = _delegated("assign_sub")
    exclude_from_weight_decay = _delegated("exclude_from_weight_decay")

    def update_step(self, gradient: Leaf, variable: Any, learning_rate: Scalar) -> None:
        """Not supported, as it would bypass the window."""
        raise invalid("a call of apply, which counts microbatches", "one of update_step")

    @property
    def iterations(self) -> Array:
        """Number of updates by the inner optimizer."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Array:
        """Learning rate of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Scalar) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def _model_variables_moving_average(self) -> Any:
        # keras.callbacks.SwapEMAWeights reads it from the optimizer inside a LossScaleOptimizer.
        return self._settings._model_variables_moving_average

    def scale_loss(self, loss: Any) -> Array:
        """Scales the loss as the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that this optimizer does not have.
        if name.startswith("_") or "inner_optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._holder(name), name)

    @operation("Accumulate")
    def __setattr__(self, name: str, value: object) -> None:
        has_inner = "inner_optimizer" in vars(self)
        if name == "loss_scale_factor" and has_inner:
            if scales_loss(self.inner_optimizer):
                raise invalid("one LossScaleOptimizer, around this optimizer or inside", "both")
            # A LossScaleOptimizer around this one assigns None, as it unscales the gradients.
            self._scaled_outside = value is None
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if is_own or not has_inner or not hasattr(self, name):
            super().__setattr__(name, value)
        else:
            if name == "gradient_accumulation_steps" and value:
                raise invalid("no gradient_accumulation_steps: the window has every microbatches", value)
            setattr(self._holder(name), name, value)

    @property
    def _settings(self) -> Any:
        return next(x for x in chain(self.inner_optimizer) if not isinstance(x, keras.optimizers.LossScaleOptimizer))

    def _holder(self, name: str) -> Any:
        return self._settings if hasattr(self._settings, name) else self.inner_optimizer

    def __reduce__(self) -> Any:
        values = self._unpickled
        if self._window is not None:
            values = ({}, [x.numpy() for x in self.inner_optimizer.variables], self._shapes())
            self.save_own_variables(values[0])
        return _copied, (keras.optimizers.serialize(self), values)

    def _load_unpickled(self) -> None:
        """Assigns the values that the optimizer was unpickled with, once it is built."""
        if self._unpickled is None:
            return
        store, values, shapes = self.__dict__.pop("_unpickled")
        if shapes != self._shapes():
            self._warn_skipped("the optimizer was copied from one of other variables")
            return
        with self._built_window().untraced():
            self.load_own_variables(store)
            for variable, value in zip(self.inner_optimizer.variables, values, strict=True):
                variable.assign(value)

    @property
    def variables(self) -> list[Any]:
        """Variables of this optimizer, including its window's, and of the inner optimizer."""
        return [*self._variables, *self.inner_optimizer.variables]

    def set_weights(self, weights: Sequence[Leaf]) -> None:
        """Replaces the values of ``variables`` by those of an optimizer with the same reduction and precision.

        Raises:
          GradCombineError: for other shapes; for a partial window that cannot be continued, or if there are several
            replicas, as the weights contain the first one's window only. Nothing is changed then.
        """
        window, others = self._built_window(), self._others()
        arrays = list(map(windows.as_array, require_items("a list of weights", weights)))
        require_equal("weights of shapes {}", self._shapes(), [x.shape for x in arrays])
        start, stop = len(others), len(self._variables)
        saved = [x[np.newaxis] for x in arrays[start:stop]]
        if window.replicas > 1 and windows.is_pending(window, saved):
            raise invalid("a window of all replicas, as in a file", "one of the first replica only")
        rest = [*others, *self.inner_optimizer.variables]
        windows.replace(window, saved, window.description, rest, [*arrays[:start], *arrays[stop:]])

    def save_own_variables(self, store: Any) -> None:
        """Saves the windows of all replicas, if built; Keras saves the inner optimizer separately."""
        if self._window is not None:
            windows.save(store, self._others(), self._window)

    def load_own_variables(self, store: Any) -> None:
        """Loads the result of `save_own_variables`, from either backend and any number of replicas.

        Raises:
          GradCombineError: for a partial window that cannot be continued. This optimizer is unchanged then; Keras loads
            the rest, and reports at the end which objects it could not load.
        """
        in_file = windows.DESCRIPTION_KEY in windows.names_in(store)
        if self._window is not None and in_file:
            windows.load(store, self._others(), self._window)
        elif self._window is not None:
            self._warn_skipped("the file contains none")
        elif in_file:
            self._warn_skipped("the optimizer is not built; call build(model.trainable_variables) before loading")

    def _warn_skipped(self, reason: str) -> None:
        warnings.warn(f"Skipping the window of optimizer {self.name!r}: {reason}.", stacklevel=3)

    def _shapes(self) -> list[tuple[int, ...]]:
        return [tuple(x.shape) for x in self.variables]

    def _built_window(self) -> KerasWindow:
        return require_given("an optimizer that is built, or trainable_variables", self._window)

    def _others(self) -> list[Any]:
        """Variables of this optimizer except for the window's."""
        return self._variables[: len(self._variables) - len(self._built_window().variables)]


def _copied(config: dict[str, Any], values: Any) -> Any:
    # As Keras unpickles a model: a pickle can run any code, so a lambda in it is no additional risk.
    optimizer = keras.saving.deserialize_keras_object(config, safe_mode=False)
    vars(optimizer)["_unpickled"] = values  # not by setattr, which Keras tracks
    return optimizer
