"""The states of treewise reductions, as trees and flattened."""

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
    """A partial result. Each reduction has its own subclass, to detect states of other reductions.

    Attributes:
      value: the tree of accumulators; a constant in the structure for a leaf without gradient.
      weight: the sum of weights, a real scalar; for exact reductions, a NamedTuple of scalars.
      count: int32 scalar, the number of contributions of nonzero weight.
      dtypes: constants in the structure: for each leaf, the dtype of the contributions or "no gradient".
    """

    value: Tree
    weight: Scalar
    count: Array
    dtypes: Tree


@dataclass(eq=False, slots=True)
class FlatState:
    """A flattened state.

    Attributes:
      structure: the structure of ``dtypes``.
      values: the accumulators; None for a leaf without gradient.
      made_for: the constants of ``dtypes``, in the same order.
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

    def rebuild(self, state: State, values: Sequence[Accumulator | None], weight: Scalar, count: Array) -> State:
        """The state with these accumulators, weight and count."""
        return state.__class__(self.value(values), weight, count, state.dtypes)

    def value(self, values: Sequence[Accumulator | None]) -> Tree:
        """The tree of these accumulators, with a constant for each None."""
        leaves = list(values)
        for i, spec in enumerate(self.made_for):
            if leaves[i] is None:
                leaves[i] = spec
        return tree.unflatten(self.structure, leaves)


def summary(a: Accumulator | None) -> str:
    """Describes an accumulator for error messages."""
    if a is None:
        return "no gradient"
    first = parts(a)[0]
    text = f"shape {shape_of(first)} and dtype {dtype_of(first)}"
    return f"{text} in {getattr(a, 'in_words', type(a).__name__)}" if first is not a else text


def require_sendable(
    wire: Wire, flat: FlatState, shape: Callable[[Leaf], tuple[int, ...]], leaves: Sequence[Leaf]
) -> None:
    """Raises for leaves that are not floats and that the wire does not keep uncompressed."""
    for path, leaf, spec in zip(flat.structure.paths(), leaves, flat.made_for, strict=True):
        is_float = spec.dtype is None or dtypes.kind(spec.dtype) == "float"
        if not is_float and not wire.keeps(path, shape(leaf)):
            raise invalid(f"a float leaf for {wire!r}, or one that its wide= keeps uncompressed", spec.dtype, path)
