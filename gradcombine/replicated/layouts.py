"""Where the components of a variable are: one on each replica of a program, or all along a leading axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, invalid, operation
from gradcombine.places.lists import combine
from gradcombine.places.replicas import LOCAL, all_reduce
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.dtypes import INT32
from gradcombine.settings import collective, valid
from gradcombine.types import Array, Leaf, Order, Tree

BOOL = np.dtype(np.bool_)


@dataclass(frozen=True)
class Layout:
    """Where the components of a variable lie: one on each replica that runs the program.

    Every function is called on all replicas, in step. `Stacked` overrides them.
    """

    over: Collective
    order: Order

    def size(self) -> int:
        """The number of replicas."""
        return self.over.size()

    def rank(self, backend: Backend, like: Array) -> Array:
        """The number of the replica that holds a component, int32, of a shape that broadcasts against ``like``."""
        return self.over.rank()

    def shape(self, backend: Backend, component: Array, path: str) -> tuple[int, ...]:
        """The shape of one value, from what holds the components."""
        return backend.shape(component)

    def broadcast(self, backend: Backend, value: Array) -> Array:
        """One value as the component of every replica."""
        return value

    def one(self, component: Array) -> Array:
        """One value, from components that are all equal."""
        return component

    def mark_varying(self, components: Sequence[Leaf]) -> list[Leaf]:
        """The components, None among them, marked as each replica's own where the framework keeps account of that."""
        try:
            marked = iter(self.over.mark_varying([x for x in components if not is_absent(x)]))
        except GradCombineError:  # Outside of the axis, where a state may be made, there is nothing to keep account of.
            return list(components)
        return [x if is_absent(x) else next(marked) for x in components]

    def reduce(self, reduction: Reduction, components: Tree) -> Tree:
        """The components combined: one value."""
        return self.all_reduce(reduction, components)

    def all_reduce(self, reduction: Reduction, values: Tree) -> Tree:
        """The replicas' values combined: one component per replica."""
        return all_reduce(reduction, values, over=self.over, order=self.order)


@dataclass(frozen=True)
class Stacked(Layout):
    """All components of ``replicas`` replicas of one program, along a new first axis."""

    replicas: int

    def __repr__(self) -> str:
        return f"stacked({self.replicas})"

    def size(self) -> int:
        return self.replicas

    def rank(self, backend: Backend, like: Array) -> Array:
        ones = (1,) * (len(backend.shape(like)) - 1)
        return backend.asarray(np.arange(self.replicas, dtype=INT32).reshape(self.replicas, *ones))

    def shape(self, backend: Backend, component: Array, path: str) -> tuple[int, ...]:
        shape = backend.shape(component)
        if shape[:1] != (self.replicas,):
            raise invalid(f"{self.replicas} components along the first axis", f"shape {shape}", path)
        return shape[1:]

    def broadcast(self, backend: Backend, value: Array) -> Array:
        row = value[None]
        return backend.where(backend.full((self.replicas, *backend.shape(value)), True, BOOL), row, row)

    def one(self, component: Array) -> Array:
        return component[0]

    def reduce(self, reduction: Reduction, components: Tree) -> Tree:
        leaves, structure = tree.flatten(components)

        def of(rank: int) -> Tree:
            return tree.unflatten(structure, [leaf if is_absent(leaf) else leaf[rank] for leaf in leaves])

        return combine(reduction, [of(rank) for rank in range(self.replicas)], order=self.order)

    def all_reduce(self, reduction: Reduction, values: Tree) -> Tree:
        leaves, structure = tree.flatten(self.reduce(reduction, values))
        backend = resolve(leaves)
        return tree.unflatten(structure, [x if is_absent(x) else self.broadcast(backend, x) for x in leaves])


@operation("replicated.stacked")
def stacked(replicas: int) -> Stacked:
    """All replicas of a variable in one program: components along a new first axis, in place of a collective.

    For NumPy, which has no replicas of its own; for looking at the components from outside, as TensorFlow's
    cross-replica context does; and for arrays whose first axis is sharded over devices.

    Args:
      replicas: their number, 1 or more.

    >>> from gradcombine import replicated
    >>> replicated.stacked(4)
    stacked(4)
    """
    return Stacked(LOCAL, "sequential", valid("replicas", replicas))


def layout(over: Collective | Stacked, order: Order) -> Layout:
    """The layout that ``over`` names."""
    if isinstance(over, Stacked):
        return replace(over, order=order)
    expected = "a collective, LOCAL, jax_axis(name) or tf_replicas(), or replicated.stacked(n)"
    return Layout(collective(expected)(over), order)
