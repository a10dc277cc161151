"""An optimizer around another one whose window is saved, loaded and replaced."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from gradcombine.integrations.keras import saving
from gradcombine.integrations.keras.backend import BackendWindow
from gradcombine.integrations.keras.checks import error
from gradcombine.integrations.keras.wrapper import Wrapper


class Saved(Wrapper):
    """A `Wrapper` whose variables are some of its own, a window's, and the inner optimizer's.

    Attributes:
      _window: None until it is built.
      _kind: what the window is of.
    """

    _window: BackendWindow | None = None
    _kind: str

    @property
    def variables(self) -> list[Any]:
        """The windows, and the inner optimizer's variables."""
        return [*self._variables, *self.inner_optimizer.variables]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Replaces the values of ``variables`` by those of an optimizer of the same reduction and precision.

        Raises:
          GradCombineError: for other shapes; for a window that has been begun and cannot be gone on with, or of which
            there are several: files alone hold those of all replicas. Nothing is changed then.
        """
        window, (own, inner) = self._built_window(), (self._others(), self.inner_optimizer.variables)
        arrays: list[Any] = [keras.ops.convert_to_numpy(x) for x in weights]
        received, expected = [x.shape for x in arrays], [tuple(x.shape) for x in self.variables]
        if received != expected:
            raise error(f"weights of shapes {expected}", received)
        inside = slice(len(own), len(self._variables))
        held = [x[np.newaxis] for x in arrays[inside]]
        if window.replicas > 1 and saving.begun(held):
            raise error("a window of all replicas, as files have it", "the first one's")
        saving.replace(held, window, self._kind, self._kind)
        for variable, array in zip([*own, *inner], [*arrays[: inside.start], *arrays[inside.stop :]], strict=True):
            variable.assign(array)

    def save_own_variables(self, store: Any) -> None:
        """Every replica's window, if there is one yet; Keras saves the inner optimizer by itself."""
        if self._window is not None:
            saving.save(store, self._others(), self._window, self._kind)

    def load_own_variables(self, store: Any) -> None:
        """What `save_own_variables` has saved, on either backend and under any number of replicas.

        Raises:
          GradCombineError: for a window that has been begun and cannot be gone on with. Nothing of this optimizer is
            changed then; Keras loads the rest all the same, and says at the end what could not be loaded.
        """
        found = saving.KIND in list(store.keys())  # a store need not be a dict
        if self._window is not None and found:
            saving.load(store, self._others(), self._window, self._kind)
        elif self._window is not None:
            self._skip("there is none in the file")
        elif found:
            self._skip("it is not built; call build(model.trainable_variables) before loading")

    def _skip(self, reason: str) -> None:
        warnings.warn(f"Skipping the window of optimizer {self.name!r}: {reason}.", stacklevel=3)

    def _built_window(self) -> BackendWindow:
        if self._window is None:
            raise error("an optimizer that is built, or trainable_variables", "neither")
        return self._window

    def _others(self) -> list[Any]:
        """The variables of its own that are not a window's."""
        return self._variables[: len(self._variables) - len(self._built_window().state.variables)]
