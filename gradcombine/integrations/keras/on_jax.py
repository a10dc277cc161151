# pyright: standard
"""Windows on Keras' JAX backend: read variables, apply pure functions, assign the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from gradcombine import tree
from gradcombine.backends.jax_versions import is_transformed
from gradcombine.integrations.jax.jax_window import run_if
from gradcombine.integrations.keras.window_variables import KerasWindow
from gradcombine.integrations.keras_optimizers import has_several, without_update
from gradcombine.types import AccumulateState, Array, Leaf, Scalar, Tree


class JaxWindow(KerasWindow):
    """A window on the JAX backend; see `KerasWindow`.

    Works on the variables' current values, concrete or traced, also inside keras.StatelessScope. There is a single
    window, also on several devices, as a jax.Array spans them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sizes: set[int] = set()
        self._sizes_before: set[int] = set()

    def contribute(self, gradients: list[Leaf], weight: Scalar) -> None:
        after = self.rules.contribute(self._read(), self.parts.split(gradients), weight)
        full = self.rules.is_full(after)
        present = {i for i, gradient in enumerate(gradients) if gradient is not None}
        self.load([after], self.marked(present, full, after.index))
        self._apply_if(full, after, present)

    def flush(self) -> Array:
        state = self._read()
        partial = self.rules.is_partial(state)
        self._apply_if(partial, state, set())
        self.touched.assign(self.marked((), partial, state.index))
        return partial

    @staticmethod
    def is_tracing() -> bool:
        return is_transformed()

    def record_size(self, size: Scalar, is_first: bool) -> Iterable[int]:
        """Records a static batch size while tracing; see `KerasWindow.record_size`.

        A size first traced in the middle of ``fit`` follows steps of another size, which an earlier ``fit`` may have
        traced.
        """
        before = self._sizes | self._sizes_before
        self._sizes.add(size)
        return self._sizes if is_first or size in before else {size, *before}

    def take_sizes(self) -> Iterable[int]:
        sizes, self._sizes = self._sizes, set()
        self._sizes_before |= sizes
        return sizes

    def components(self, variable: Any) -> list[Any]:
        return [variable]

    def finalize(self, variables: Sequence[Any]) -> None:
        """Finalizes the variables, and copies their buffers, which they share with Keras' moving averages.

        ``fit`` donates all buffers, and donating one twice is an error. Does nothing while the variables have no
        values: while ``fit`` runs, and after it has failed.
        """
        if all(variable._value is not None for variable in variables):
            super().finalize(variables)
            for variable in variables:
                variable.assign(jnp.copy(variable.value))

    def _read(self) -> AccumulateState:
        state = tree.unflatten(self.structure, [x.value for x in self.leaves])
        return self.resumed(state, self.touched.value)

    def _apply_if(self, condition: Scalar, window: AccumulateState, present: set[int]) -> None:
        """Ends the window if the condition holds; ``present`` are the variables known to have a gradient in it."""
        variables = [*self._targets, *self._optimizer.variables]
        count, positions = len(self._targets), {id(x): i for i, x in enumerate(variables)}
        unseen = sorted(set(range(count)) - present)
        touched = self.touched_in(window.index)  # in other traces
        any_touched = touched[np.array(unseen, np.int32)].any()

        def apply(values: Tree, combined: Tree) -> tuple[Tree, tuple[()]]:
            gradients = self.parts.join(combined)

            def run(gradients: list[Leaf], values: list[Array]) -> tuple[list[Array], tuple[()]]:
                after, state = self._optimizer.stateless_apply(values[count:], gradients, values[:count])
                return [*after, *state], ()

            if not unseen:
                return run(gradients, values)

            def run_masked(values: list[Array]) -> tuple[list[Array], tuple[()]]:
                """Applies all gradients, then reverts the update, if not skipped, of untouched variables and slots."""
                masked = [jnp.where(touched[i], x, 0) if i in unseen else x for i, x in enumerate(gradients)]
                after, _ = run(masked, values)
                iterations = positions[id(self._optimizer.iterations)]
                kept = touched | (after[iterations] == values[iterations])
                for i in unseen:
                    for x, old in without_update(self._optimizer, self._targets[i], lambda x: values[positions[id(x)]]):
                        position = positions[id(x)]
                        after[position] = jnp.where(kept[i], after[position], old)
                return after, ()

            if present and has_several(self._optimizer):  # Keras raises if an inner optimizer has no gradients
                return run_masked(values)
            values, _ = run_if(any_touched, run_masked, values)
            without = [None if i in unseen else x for i, x in enumerate(gradients)]
            return run_if(~any_touched, partial(run, without), values) if present else (values, ())

        _, after, _ = self.rules.apply_if(condition, window, apply, [x.value for x in variables], run_if)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)
