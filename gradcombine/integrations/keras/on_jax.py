# pyright: standard
"""Windows on Keras' JAX backend: pure functions between reading and assigning variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from gradcombine.integrations.jax.run_if import run_if
from gradcombine.integrations.keras.settings import Parts
from gradcombine.integrations.keras.window_variables import KerasWindow
from gradcombine.integrations.keras_optimizers import without_update
from gradcombine.places.window import Window
from gradcombine.types import AccumulateState, Array, Leaf, Scalar, Tree


class JaxWindow(KerasWindow):
    """A window, and the optimizer that is run at its end.

    Works on whatever values the variables have: those of a keras.StatelessScope, traced or not, or their own. There are
    no replicas: jax.Array spans the devices. tf.train.Checkpoint does not save variables of this backend.
    """

    def __init__(self, rules: Window, parts: Parts, optimizer: Any, variables: Sequence[Any]) -> None:
        super().__init__(rules, parts, optimizer, variables)
        self._sizes: set[int] = set()
        self._sizes_before: set[int] = set()

    def contribute(self, gradients: list[Leaf], weight: Scalar) -> None:
        before = self.resumed(self._read())
        after = self.rules.contribute(before, self.parts.split(gradients), weight)
        full = self.rules.is_full(after)
        self.write(after)
        present = [gradient is not None for gradient in gradients]
        self.touched.assign(self.marked(present, full, after.index))
        self._seen |= {i for i, chosen in enumerate(present) if chosen}
        self._apply_if(full, after)

    def flush(self) -> Array:
        state = self._read()
        partial = self.rules.is_partial(self.ended(state))
        self._apply_if(partial, state)
        nothing = [False] * len(self._targets)
        self.touched.assign(self.marked(nothing, partial, state.index))
        return partial

    def see(self, size: Scalar, is_first: bool) -> Iterable[int]:
        """As `KerasWindow.see`: shapes are static, and each new one is traced.

        One that is new in the middle of ``fit`` follows steps of another size, which may have been traced before it.
        """
        before = self._sizes | self._sizes_before
        self._sizes.add(size)
        return self._sizes if is_first or size in before else {size, *before}

    def seen(self) -> Iterable[int]:
        found, self._sizes = self._sizes, set()
        self._sizes_before |= found
        return found

    def load(self, states: list[AccumulateState], touched: Array) -> None:
        self.write(states[0])
        self.touched.assign(touched)

    def values(self, variable: Any) -> list[Leaf]:
        return [variable.numpy()]

    def holds(self, variables: Sequence[Any]) -> bool:
        """Whether variables have values: while ``fit`` runs, and where it has failed, they have none."""
        return all(variable._value is not None for variable in variables)

    def unshare(self, variables: Sequence[Any]) -> None:
        """Gives variables buffers of their own: Keras' averages share theirs with the variables that they overwrite.

        ``fit`` donates all buffers, and one that is donated twice is an error.
        """
        for variable in variables:
            variable.assign(jnp.copy(variable.value))

    def _read(self) -> AccumulateState:
        return self.read(lambda variable: variable.value)

    def _apply_if(self, condition: Scalar, window: AccumulateState) -> None:
        variables = [*self._targets, *self._optimizer.variables]
        trained, places = len(self._targets), {id(x): i for i, x in enumerate(variables)}
        unseen = sorted(set(range(trained)) - self._seen)
        # In another process or trace; the last mark is of the window.
        touched = self.touched.value[:-1] > 0
        held = touched[np.array(unseen, np.int32)].any()

        def apply(kept: Tree, combined: Tree) -> tuple[Tree, tuple[()]]:
            gradients = self.parts.join(combined)

            def run(gradients: list[Leaf], kept: list[Array]) -> tuple[list[Array], tuple[()]]:
                after, state = self._optimizer.stateless_apply(kept[trained:], gradients, kept[:trained])
                return [*after, *state], ()

            if not unseen:
                return run(gradients, kept)

            def run_mixed(kept: list[Array]) -> tuple[list[Array], tuple[()]]:
                """Applies all gradients, and takes back what that has done to variables without one, and to slots."""
                given = [jnp.where(touched[i], x, 0) if i in unseen else x for i, x in enumerate(gradients)]
                after, _ = run(given, kept)
                for i in unseen:
                    for x, value in without_update(self._optimizer, self._targets[i], lambda x: kept[places[id(x)]]):
                        after[places[id(x)]] = jnp.where(touched[i], after[places[id(x)]], value)
                return after, ()

            kept, _ = run_if(held, run_mixed, kept)
            without = [None if i in unseen else x for i, x in enumerate(gradients)]
            return run_if(~held, partial(run, without), kept) if self._seen else (kept, ())

        _, after, _ = self.rules.apply_if(condition, window, apply, [x.value for x in variables], run_if)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)
