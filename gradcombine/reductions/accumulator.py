"""What states are made of, array by array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import described, dtype_of, require_scalar
from gradcombine.errors import GradCombineError, renamed, shown
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import Cell, parts
from gradcombine.types import Array, State, Tree


@dataclass(frozen=True)
class Opened:
    """A state, flattened.

    Attributes:
      structure: of its tree.
      values: the accumulators; None where there is no gradient.
      made_for: constants, in the same order.
    """

    structure: tree.Structure
    values: list[Any]
    made_for: list[Any]

    def present(self) -> list[Any]:
        return [a for a in self.values if a is not None]

    def arrays(self) -> list[Array]:
        return [array for a in self.values if a is not None for array in parts(a)]

    def closed(self, state: State, values: Sequence[Any], weight: Any, count: Array) -> State:
        """The state with other accumulators."""
        return type(state)(self.value(values), weight, count, state.dtypes)

    def value(self, values: Sequence[Any]) -> Tree:
        """The tree of these accumulators."""
        pairs = zip(self.made_for, values, strict=True)
        return tree.unflatten(self.structure, [kind if value is None else value for kind, value in pairs])


def unless(backend: Backend, zero: Array | bool, x: Array) -> Array:
    return x if isinstance(zero, bool) else backend.where(zero, backend.full((), 0, backend.dtype(x)), x)


def plus(backend: Backend, count: Array, more: int) -> Array:
    """The sum, still known where the count was."""
    known = backend.concrete(count)
    return count + more if known is None else backend.full((), int(known) + more, dtypes.INT32, [count])


def on_wire(backend: Backend, arrays: Sequence[Array], wire: np.dtype | None) -> list[Array]:
    """The arrays as replicas exchange them."""
    if wire is None:
        return list(arrays)
    return [backend.cast(x, wire) if dtypes.kind(dtype_of(x)) == dtypes.kind(wire) else x for x in arrays]


def summary(a: Any) -> str:
    if a is None:
        return "no gradient"
    kept = parts(a)[0]
    held = f"shape {described(kept).shape(kept)} and dtype {dtype_of(kept)}"
    return f"{held} in {getattr(a, 'in_words', type(a).__name__)}" if isinstance(a, tuple) else held


def require_totals(operation: str, weight: Any, count: Any) -> None:
    """Refuses a state whose sum of weights or number of contributions is damaged."""
    for part in parts(weight):
        require_scalar(operation, "a real scalar", part, "fiu", ".weight")
    require_scalar(operation, "an integer scalar", count, "iu", ".count")


def require_running(cell: Cell, structure: tree.Structure, values: Sequence[Any], made_for: Sequence[Any]) -> None:
    """Refuses accumulators of other dtypes, in any byte order, than contributions of these have."""
    for i, (a, kind) in enumerate(zip(values, made_for, strict=True)):
        if a is not None and kind.dtype is None:
            raise GradCombineError(
                cell.name, "no accumulator, where there is no gradient", summary(a), structure.path(i)
            )
        if a is not None and dtype_of(parts(a)[0]).name != (running := cell.running(kind.dtype)).name:
            expected = f"an accumulator of {running}, for contributions of {kind.dtype}"
            raise GradCombineError(cell.name, expected, dtype_of(parts(a)[0]), structure.path(i))


def shape_of(operation: str, leaf: Any, path: str) -> tuple[int, ...]:
    """The shape of an array or spec of any framework.

    Raises:
      GradCombineError: for one of which a dimension is not known while tracing.
    """
    with renamed(operation, path):
        return described(leaf).shape(leaf)


def opened(cell: Cell, kind: type, state: State) -> Opened:
    """A state that must be of this class, and whole.

    Raises:
      GradCombineError: for another state, and for a damaged one.
    """
    if type(state) is not kind:
        raise GradCombineError(cell.name, f"a {kind.__name__}", type(state).__name__)
    require_totals(cell.name, state.weight, state.count)
    made_for, structure = tree.flatten(cell.name, state.dtypes, tree.is_static)
    if not all(map(tree.is_static, made_for)):
        raise GradCombineError(cell.name, "a state whose dtypes are constants", shown(state.dtypes))
    split = tree.split_as(cell.name, structure, state.value)
    values = [None if tree.is_static(a) else a for a in split]
    require_running(cell, structure, values, made_for)
    return Opened(structure, values, made_for)


def absent(backend: Backend, kind: Any) -> Any:
    """The result where there is no gradient."""
    return None if kind.shape is None else backend.make_absent(kind.shape)
