"""A window in Keras variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from gradcombine import tree
from gradcombine.integrations.keras.checks import error
from gradcombine.integrations.keras.settings import Parts
from gradcombine.reductions import dtypes
from gradcombine.types import AccumulateState, BinaryCounter, State
from gradcombine.window import UNTIL_FLUSH, Window

_OPERATION = "Accumulate"
FULL = np.int32(UNTIL_FLUSH)
"""A step that fills a window of any length."""
_ACCUMULATOR = re.compile(r"\.levels(\[0\]|\.stacked)(?:\.parts\[0\])?\.value\[(\d+)\]")


class WindowVariables:
    """The variables of an `AccumulateState`, what in it never changes, and what became of its windows.

    Whether a window was applied is written down, and not told by the number of its microbatches: a checkpoint may hold
    one of another length, of which nothing may be lost, and nothing applied twice.

    Attributes:
      leaves: variables.
      structure: of the state.
      rules: of the window.
      touched: for each trainable variable, 1 + the number of the last window that has a gradient for it; at the end,
        1 + the number of the last window that was full, and applied.

    Args:
      rules: of the window.
      parts: the gradients' tree.
      variables: the trainable variables.
    """

    def __init__(self, rules: Window, parts: Parts, variables: Sequence[Any]) -> None:
        like = [np.broadcast_to(np.zeros((), dtypes.parse(_dtype(v))), tuple(v.shape)) for v in variables]
        empty, self.structure = tree.flatten(_OPERATION, rules.init(parts.split(like)))
        self.rules = rules
        paths = self.structure.paths()
        self.touched = _variable(np.zeros(len(variables) + 1, np.int32), "touched")
        self.leaves = [_variable(x, *_place(path, parts, variables)) for x, path in zip(empty, paths, strict=True)]

    @property
    def held(self) -> list[keras.Variable]:
        """The variables of the state."""
        return self.leaves

    @property
    def variables(self) -> list[keras.Variable]:
        """All of them."""
        return [*self.held, self.touched]

    def read(self, value: Callable[[keras.Variable], Any]) -> AccumulateState:
        """The state, with ``value(variable)`` for each variable."""
        return tree.unflatten(self.structure, map(value, self.leaves))

    @property
    def depth(self) -> int:
        """How many levels the state has."""
        return self.leaves[0].shape[0] if self._is_counter else 1

    @property
    def _is_counter(self) -> bool:
        return self.structure.children[0].kind is BinaryCounter

    def levels(self, arrays: Sequence[np.ndarray]) -> tuple[State] | BinaryCounter:
        """Levels like those of the state, of which there may be more or fewer, with these arrays.

        Raises:
          GradCombineError: for arrays of other shapes or another number, and of dtypes that a cast loses digits of.
        """
        leaves = self.leaves[: -3 if self._is_counter else -2]
        counted = len(arrays) == len(leaves) + 1
        if not counted and len(arrays) != len(leaves):
            raise error(f"{len(leaves)} arrays, or a counter of them", len(arrays))
        skipped = 1 if self._is_counter else 0
        given = [
            _cast(x, tuple(x.shape)[skipped:], array, levels=int(counted))
            for x, array in zip(leaves, arrays, strict=False)
        ]
        part = tree.unflatten(self.structure.children[0].children[0], given)
        return BinaryCounter(part, np.asarray(arrays[-1], np.int32)) if counted else (part,)

    def arrays(self, state: AccumulateState) -> list[Any]:
        """What a state has for each of the variables of its leaves."""
        return tree.flatten_as(_OPERATION, self.structure, state)

    def applied(self, state: AccumulateState) -> Any:
        """Whether the window was full, and applied."""
        return self.touched.value[-1] == state.index + 1

    def is_partial(self, state: AccumulateState) -> Any:
        """Whether there are contributions that have not been applied."""
        return (state.step > 0) & ~self.applied(state)

    def resumed(self, state: AccumulateState) -> AccumulateState:
        """The state to go on with.

        A window of a checkpoint that is full, and has not been applied, gets as many contributions more.
        """
        going_on = keras.ops.where(self.rules.is_full(state), np.int32(0), state.step)
        return state._replace(step=keras.ops.where(self.applied(state), FULL, going_on))

    def marked(self, present: Sequence[bool], full: Any, index: Any) -> Any:
        """`touched` after gradients for these variables, which may have made a window full that is applied then."""
        chosen = keras.ops.append(np.array(present, np.bool_), full)
        return keras.ops.where(chosen, index + 1, keras.ops.convert_to_tensor(self.touched.value))

    def write(self, state: AccumulateState) -> None:
        """Assigns a state to the variables."""
        for x, array in zip(self.held, self.arrays(state), strict=True):
            x.assign(array)


def _cast(variable: keras.Variable, shape: tuple[int, ...], array: np.ndarray, levels: int) -> np.ndarray:
    dtype = np.dtype(dtypes.parse(variable.dtype))
    expected, received = (dtype, shape), (array.dtype, array.shape[levels:])
    if array.ndim < levels or received[1] != expected[1] or not np.can_cast(array.dtype, dtype):
        names = ["{} of shape {}".format(*x) for x in (expected, received)]
        raise error(*names, path=variable.path)
    return array.astype(dtype)


def _dtype(variable: Any) -> str:
    # A Keras variable's own dtype, whatever an autocast scope says.
    return keras.backend.standardize_dtype(getattr(variable, "_dtype", variable.dtype))


def _place(path: str, parts: Parts, variables: Sequence[Any]) -> tuple[str, Any]:
    """The name of a variable of the state, and the layout, which an accumulator has from its trainable variable."""
    found = _ACCUMULATOR.match(path)
    if found is None:
        return re.sub(r"\W+", "_", path).strip("_"), None
    of = variables[parts.averaged(int(found[2]))]
    name = re.sub(r"\W+", "_", f"{getattr(of, 'path', of.name)}_window_{found[1]}{path[found.end() :]}")
    # Levels have an axis more than their variable.
    return name, None if found[1] == ".stacked" else getattr(of, "_layout", None)


def _variable(first: Any, name: str, layout: Any = None) -> keras.Variable:
    dtype = str(first.dtype)

    def initializer(shape: Any, dtype: Any) -> Any:
        return keras.ops.convert_to_tensor(first, dtype=dtype)

    made = keras.Variable(
        initializer,
        shape=first.shape,
        dtype=dtype,
        trainable=False,
        autocast=False,
        # Under a strategy each replica has a window of its own. Read from outside it is the first one's.
        aggregation="only_first_replica",
        synchronization="on_read",
        name=name,
        layout=layout,
    )
    held = keras.backend.standardize_dtype(made.value.dtype)
    if held != dtype:
        raise error(f"accumulators of {dtype}, which JAX has with jax_enable_x64", held, path=made.path)
    return made
