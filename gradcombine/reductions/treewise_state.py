"""States of treewise reductions, as trees and flattened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradcombine import tree
from gradcombine.backends.registry import dtype_of, shape_of
from gradcombine.errors import invalid
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import Accumulator, parts
from gradcombine.types import Array, Leaf, Scalar, State, Tree
from gradcombine.wires.wire import Wire


class TreewiseState(NamedTuple):
    """A partial result. Each reduction has a subclass of its own, which tells its states from those of others.

    Attributes:
      value: the tree of accumulators; a constant in the structure where the parameter has no gradient.
      weight: the sum of weights, a real scalar (of an exact reduction, a NamedTuple of scalars).
      count: int32 scalar, the number of contributions whose weight is not 0.
      dtypes: constants in the structure: for each leaf the dtype of the contributions, or that there is no gradient.
    """

    value: Tree
    weight: Scalar
    count: Array
    dtypes: Tree


@dataclass(eq=False, slots=True)
class Opened:
    """A state, flattened.

    Attributes:
      structure: of its tree.
      values: the accumulators; None where there is no gradient.
      made_for: constants, in the same order.
    """

    structure: tree.Structure
    values: list[Accumulator | None]
    made_for: list[Any]

    def present(self) -> list[Accumulator]:
        return [a for a in self.values if a is not None]

    def arrays(self) -> list[Array]:
        arrays: list[Array] = []
        for a in self.values:
            if isinstance(a, tuple):
                arrays.extend(parts(a))
            elif a is not None:
                arrays.append(a)
        return arrays

    def closed(self, state: State, values: Sequence[Accumulator | None], weight: Scalar, count: Array) -> State:
        """The state with other accumulators."""
        return type(state)(self.value(values), weight, count, state.dtypes)

    def value(self, values: Sequence[Accumulator | None]) -> Tree:
        """The tree of these accumulators."""
        held = list(values)
        for i, kind in enumerate(self.made_for):
            if held[i] is None:
                held[i] = kind
        return tree.unflatten(self.structure, held)


def summary(a: Accumulator | None) -> str:
    """An accumulator in words, as messages name it."""
    if a is None:
        return "no gradient"
    kept = parts(a)[0]
    held = f"shape {shape_of(kept)} and dtype {dtype_of(kept)}"
    return f"{held} in {getattr(a, 'in_words', type(a).__name__)}" if kept is not a else held


def require_sendable(
    wire: Wire, opened: Opened, shape: Callable[[Leaf], tuple[int, ...]], leaves: Sequence[Leaf]
) -> None:
    """Raises for a leaf that is no float, unless the wire leaves it as it is."""
    for path, leaf, kind in zip(opened.structure.paths(), leaves, opened.made_for, strict=True):
        is_float = kind.dtype is None or dtypes.kind(kind.dtype) == "float"
        if not is_float and not wire.keeps(path, shape(leaf)):
            raise invalid(f"a float leaf for {wire!r}, or one that its wide= leaves as it is", kind.dtype, path)
