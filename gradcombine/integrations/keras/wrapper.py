"""An optimizer around another one, which all that it does not do itself is left to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import keras

from gradcombine.integrations.keras import checks
from gradcombine.integrations.keras.checks import error

_Optimizer = keras.optimizers.Optimizer


def _delegated(name: str) -> Callable[..., Any]:
    """The inner optimizer's method in place of the one that is inherited, which would change this optimizer alone."""

    @wraps(getattr(_Optimizer, name))
    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._configured(name), name)(*args, **kwargs)

    return method


class Wrapper(_Optimizer):
    """Leaves methods, properties and settings to its ``inner_optimizer``, which subclasses assign last.

    Settings (``weight_decay``, ``clipnorm``, ...) and methods that change them reach the optimizer in a
    LossScaleOptimizer, which has no use for any.

    Args:
      name: of the optimizer.
    """

    def __init__(self, name: str | None) -> None:
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

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Refused: it would pass the window by."""
        raise error("a call of apply, which counts microbatches", "one of update_step")

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

    @property
    def _model_variables_moving_average(self) -> Any:
        # Of keras.callbacks.SwapEMAWeights, which looks for it in what a LossScaleOptimizer wraps.
        return self._settings._model_variables_moving_average

    def scale_loss(self, loss: Any) -> Any:
        """As the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def __getattr__(self, name: str) -> Any:
        # Called for what this optimizer has not.
        if name.startswith("_") or "inner_optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._holder(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if own or "inner_optimizer" not in vars(self) or not hasattr(self, name):
            super().__setattr__(name, value)
        elif name == "gradient_accumulation_steps" and value:
            raise error("no gradient_accumulation_steps: the window has every microbatches", value)
        else:
            setattr(self._holder(name), name, value)

    @property
    def _settings(self) -> Any:
        """The optimizer that settings are of."""
        return checks.unscaled(self.inner_optimizer)

    def _holder(self, name: str) -> Any:
        return self._settings if hasattr(self._settings, name) else self.inner_optimizer

    def _configured(self, name: str) -> Any:
        if hasattr(self._settings, "optimizers"):
            raise error(f"a call of {name} on one of MultiOptimizer.optimizers", "one on all of them")
        return self._settings
