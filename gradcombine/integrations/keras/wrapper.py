# pyright: standard
"""An optimizer around another one: what it delegates to that one, and how its window is saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import keras
import numpy as np

from gradcombine.errors import invalid, operation, require_equal, require_given, require_items, shown
from gradcombine.integrations.keras import window_variables as windows
from gradcombine.integrations.keras.settings import unscaled
from gradcombine.integrations.keras.window_variables import KerasWindow
from gradcombine.types import Array, Leaf, Scalar

_Optimizer = keras.optimizers.Optimizer


def _delegated(name: str) -> Callable[..., Any]:
    """The inner optimizer's method in place of the one that is inherited, which would change this optimizer alone."""

    @wraps(getattr(_Optimizer, name))
    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._configured(name), name)(*args, **kwargs)

    return method


class Wrapper(_Optimizer):
    """Leaves methods, properties and settings to its ``inner_optimizer``, which subclasses assign last.

    Settings (``weight_decay``, ``clipnorm``, ...) and methods that change them are those of the optimizer inside a
    LossScaleOptimizer, which uses none of its own.

    Args:
      name: of the optimizer.
    """

    def __init__(self, name: str | None) -> None:
        if not (name is None or (isinstance(name, str) and name.isprintable() and "/" not in name)):
            raise invalid("a printable name without /, or None", shown(name))
        # Not super(): a subclass may be a LossScaleOptimizer as well, which starts otherwise.
        _Optimizer.__init__(self, learning_rate=0.0, name=name)
        for setting in [x for x in vars(self) if not x.startswith("_") and x not in ("name", "built")]:
            del self.__dict__[setting]  # `__getattr__` finds the inner optimizer's

    add_variable = _delegated("add_variable")
    add_variable_from_reference = _delegated("add_variable_from_reference")
    add_optimizer_variables = _delegated("add_optimizer_variables")
    assign = _delegated("assign")
    assign_add = _delegated("assign_add")
    assign_sub = _delegated("assign_sub")
    exclude_from_weight_decay = _delegated("exclude_from_weight_decay")

    @operation("Accumulate")
    def update_step(self, gradient: Leaf, variable: Any, learning_rate: Scalar) -> None:
        """Refused: it would bypass the window."""
        raise invalid("a call of apply, which counts microbatches", "one of update_step")

    @property
    def iterations(self) -> Array:
        """How often the inner optimizer has run."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Array:
        """The inner optimizer's."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Scalar) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def _model_variables_moving_average(self) -> Any:
        # Of keras.callbacks.SwapEMAWeights, which looks for it in what a LossScaleOptimizer wraps.
        return self._settings._model_variables_moving_average

    def scale_loss(self, loss: Any) -> Array:
        """As the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def __getattr__(self, name: str) -> Any:
        # Called for what this optimizer does not have.
        if name.startswith("_") or "inner_optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._holder(name), name)

    def __setattr__(self, name: str, value: object) -> None:
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if is_own or "inner_optimizer" not in vars(self) or not hasattr(self, name):
            super().__setattr__(name, value)
        else:
            if name == "gradient_accumulation_steps" and value:
                raise invalid("no gradient_accumulation_steps: the window has every microbatches", value)
            setattr(self._holder(name), name, value)

    @property
    def _settings(self) -> Any:
        """The optimizer that settings are of."""
        return unscaled(self.inner_optimizer)

    def _holder(self, name: str) -> Any:
        return self._settings if hasattr(self._settings, name) else self.inner_optimizer

    def _configured(self, name: str) -> Any:
        several = hasattr(self._settings, "optimizers")
        if several:
            raise invalid(f"a call of {name} on one of MultiOptimizer.optimizers", "one on all of them")
        return self._settings


class WindowWrapper(Wrapper):
    """A `Wrapper` that saves and loads a window with its own variables and the inner optimizer's.

    Attributes:
      _window: None until it is built.
      _kind: reduction and precision of the window, which a file has to match.
    """

    _window: KerasWindow | None = None
    _kind: str

    @property
    def variables(self) -> list[Any]:
        """The windows, and the inner optimizer's variables."""
        return [*self._variables, *self.inner_optimizer.variables]

    @operation("Accumulate")
    def set_weights(self, weights: Sequence[Leaf]) -> None:
        """Replaces the values of ``variables`` by those of an optimizer of the same reduction and precision.

        Raises:
          GradCombineError: for other shapes; for a window that has been begun and cannot be continued, or that has
            several replicas, whose windows only files hold. Nothing is changed then.
        """
        window, (others, inner) = self._built_window(), (self._others(), self.inner_optimizer.variables)
        arrays = list(map(windows.as_array, require_items("a list of weights", weights)))
        require_equal("weights of shapes {}", [tuple(x.shape) for x in self.variables], [x.shape for x in arrays])
        inside = slice(len(others), len(self._variables))
        rest = [*others, *inner]
        values = windows.values_of(rest, [*arrays[: inside.start], *arrays[inside.stop :]])
        held = [x[np.newaxis] for x in arrays[inside]]
        windows.require_window(held)
        if window.replicas > 1 and windows.begun(held):
            raise invalid("a window of all replicas, as files have it", "the first one's")
        windows.replace(held, window, self._kind, self._kind)
        for variable, value in zip(rest, values, strict=True):
            variable.assign(value)

    @operation("Accumulate")
    def save_own_variables(self, store: Any) -> None:
        """Every replica's window, if there is one yet; Keras saves the inner optimizer by itself."""
        if self._window is not None:
            windows.save(store, self._others(), self._window, self._kind)

    @operation("Accumulate")
    def load_own_variables(self, store: Any) -> None:
        """Loads the result of `save_own_variables`, on either backend and under any number of replicas.

        Raises:
          GradCombineError: for a window that has been begun and cannot be continued. Nothing of this optimizer is
            changed then; Keras still loads the rest, and reports at the end what could not be loaded.
        """
        in_file = windows.KIND in windows.names_in(store)
        if self._window is not None and in_file:
            windows.load(store, self._others(), self._window, self._kind)
        elif self._window is not None:
            self._skip("there is none in the file")
        elif in_file:
            self._skip("it is not built; call build(model.trainable_variables) before loading")

    def _skip(self, reason: str) -> None:
        warnings.warn(f"Skipping the window of optimizer {self.name!r}: {reason}.", stacklevel=3)

    def _built_window(self) -> KerasWindow:
        return require_given("an optimizer that is built, or trainable_variables", self._window)

    def _others(self) -> list[Any]:
        """Its own variables, without the window's."""
        return self._variables[: len(self._variables) - len(self._built_window().variables)]
