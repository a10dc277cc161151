"""Storage of a variable's components: one per replica of the program, or all stacked along a leading axis."""

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
    """One component on each replica that runs the program. `Stacked` overrides the methods.

    Every method is collective: all replicas have to call it.
    """

    over: Collective
    order: Order

    def size(self) -> int:
        """The number of replicas."""
        return self.over.size()

    def rank(self, backend: Backend, like: Array) -> Array:
        """The int32 rank of the replica that holds each component, broadcastable to ``like``."""
        return self.over.rank()

    def shape(self, backend: Backend, component: Array, path: str) -> tuple[int, ...]:
        """The shape of a single component."""
        return backend.shape(component)

    def broadcast(self, backend: Backend, value: Array) -> Array:
        """Makes a value the component of every replica."""
        return value

    def one(self, component: Array) -> Array:
        """The common value of components that are all equal."""
        return component

    def mark_varying(self, components: Sequence[Leaf]) -> list[Leaf]:
        """Marks the components as varying over the replicas, if the framework tracks this; None stays None."""
        try:
            marked = iter(self.over.mark_varying([x for x in components if not is_absent(x)]))
        except GradCombineError:  # a state may also be created outside of the axis, where nothing is tracked
            return list(components)
        return [x if is_absent(x) else next(marked) for x in components]

    def reduce(self, reduction: Reduction, components: Tree) -> Tree:
        """Combines the components into one value."""
        return self.all_reduce(reduction, components)

    def all_reduce(self, reduction: Reduction, values: Tree) -> Tree:
        """Combines the replicas' values; the result is a component on every replica."""
        return all_reduce(reduction, values, over=self.over, order=self.order)


@dataclass(frozen=True)
class Stacked(Layout):
    """The components of all replicas in one program, stacked along a new first axis."""

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
        def component(rank: int) -> Tree:
            return tree.map(lambda x: x if is_absent(x) else x[rank], components)

        return combine(reduction, [component(rank) for rank in range(self.replicas)], order=self.order)

    def all_reduce(self, reduction: Reduction, values: Tree) -> Tree:
        combined = self.reduce(reduction, values)
        backend = resolve(tree.flatten(combined)[0])
        return tree.map(lambda x: x if is_absent(x) else self.broadcast(backend, x), combined)


@operation("replicated.stacked")
def stacked(replicas: int) -> Stacked:
    """Keeps the components of all replicas in one program, along a new first axis; used in place of a collective.

    For NumPy, which has no replicas; for access to all components, as in TensorFlow's cross-replica context; and for
    arrays whose first axis is sharded over devices.

    Args:
      replicas: number of replicas, 1 or more.

    >>> from gradcombine import replicated
    >>> replicated.stacked(4)
    stacked(4)
    """
    return Stacked(LOCAL, "sequential", valid("replicas", replicas))


def layout(over: Collective | Stacked, order: Order) -> Layout:
    """The layout for the ``over`` argument of `replicated.variable`."""
    if isinstance(over, Stacked):
        return replace(over, order=order)
    expected = "a collective, LOCAL, jax_axis(name) or tf_replicas(), or replicated.stacked(n)"
    return Layout(collective(expected)(over), order)
