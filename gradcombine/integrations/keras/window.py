"""A window in Keras variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from gradcombine import tree
from gradcombine.accumulate import Accumulator
from gradcombine.integrations.keras.settings import Parts
from gradcombine.reductions import dtypes
from gradcombine.types import AccumulateState

_OPERATION = "Accumulate"
_ACCUMULATOR = re.compile(r"\.levels\[(\d+)\](?:\.parts\[0\])?\.value\[(\d+)\]")


class Window:
    """The variables of an `AccumulateState`, what in it never changes, and which variables have had a gradient.

    Attributes:
      leaves: variables; None and empty arrays, which carry a dtype, as they are.
      structure: of the state.
      reduction: that the state is of.
      touched: for each trainable variable, 1 + the number of the last window that has a gradient for it.

    Args:
      accumulator: from `gradcombine.accumulate`.
      parts: the gradients' tree.
      variables: the trainable variables.
    """

    def __init__(self, accumulator: Accumulator, parts: Parts, variables: Sequence[Any]) -> None:
        like = [np.broadcast_to(np.zeros((), dtypes.parse(_dtype(v))), tuple(v.shape)) for v in variables]
        empty, self.structure = tree.flatten(_OPERATION, accumulator.init(parts.split(like)))
        self.reduction = parts.reduction
        paths = self.structure.paths()
        self.touched = _variable(np.zeros(len(variables), np.int32), "touched")
        self.leaves = [
            x if x is None or 0 in x.shape else _variable(x, *_place(path, parts, variables))
            for x, path in zip(empty, paths, strict=True)
        ]

    @property
    def held(self) -> list[keras.Variable]:
        """Those of the leaves that are variables."""
        return [x for x in self.leaves if isinstance(x, keras.Variable)]

    @property
    def variables(self) -> list[keras.Variable]:
        """All of them."""
        return [*self.held, self.touched]

    def read(self, value: Callable[[keras.Variable], Any]) -> AccumulateState:
        """The state, with ``value(variable)`` for each variable."""
        return tree.unflatten(self.structure, [value(x) if isinstance(x, keras.Variable) else x for x in self.leaves])

    def arrays(self, state: AccumulateState) -> list[Any]:
        """What a state has for each of the variables of its leaves."""
        pairs = zip(self.leaves, tree.flatten_as(_OPERATION, self.structure, state), strict=True)
        return [array for x, array in pairs if isinstance(x, keras.Variable)]

    def write(self, state: AccumulateState) -> None:
        """Assigns a state to the variables."""
        for x, array in zip(self.held, self.arrays(state), strict=True):
            x.assign(array)


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
    return name, getattr(of, "_layout", None)


def _variable(first: Any, name: str, layout: Any = None) -> keras.Variable:
    dtype = str(first.dtype)

    def initializer(shape: Any, dtype: Any) -> Any:
        return keras.ops.convert_to_tensor(first, dtype=dtype)

    return keras.Variable(
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
