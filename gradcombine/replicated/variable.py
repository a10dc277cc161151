"""Variables with a component on every replica, as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import described, is_absent, require_numbers, resolve
from gradcombine.errors import GradCombineError, invalid, operation, require_type, shown, translate_errors, within
from gradcombine.reductions import dtypes
from gradcombine.replicated.layouts import Layout, Stacked, layout
from gradcombine.replicated.policy import Aggregation, Policy, Synchronization, decide
from gradcombine.settings import check
from gradcombine.types import Array, Leaf, Order, Tree


class CrossReplica(NamedTuple):
    """The functions of cross-replica context; see `variable`, which makes them."""

    assign: Callable[[ReplicatedState, Tree], ReplicatedState]
    assign_add: Callable[[ReplicatedState, Tree], ReplicatedState]
    assign_sub: Callable[[ReplicatedState, Tree], ReplicatedState]
    read: Callable[[ReplicatedState], Tree]


class ReplicatedVariable(NamedTuple):
    """A variable under tf.distribute, as pure functions of a `ReplicatedState`; made and described by `variable`."""

    aggregation: Aggregation
    synchronization: Synchronization
    init: Callable[[Tree], ReplicatedState]
    assign: Callable[[ReplicatedState, Tree], ReplicatedState]
    assign_add: Callable[[ReplicatedState, Tree], ReplicatedState]
    assign_sub: Callable[[ReplicatedState, Tree], ReplicatedState]
    read: Callable[[ReplicatedState], Tree]
    cross: CrossReplica


@operation("replicated.variable")
def variable(
    aggregation: object = Aggregation.NONE,
    synchronization: object = Synchronization.AUTO,
    *,
    over: Collective | Stacked,
    order: Order = "sequential",
) -> ReplicatedVariable:
    """Creates a variable, or a tree of variables, with a component on every replica.

    Args:
      aggregation: how the replicas' values are combined: ``"none"``, ``"sum"``, ``"mean"``, ``"only_first_replica"``,
        or a tf.VariableAggregation.
      synchronization: when they are combined: ``"auto"``, ``"none"``, ``"on_write"``, ``"on_read"``, or a
        tf.VariableSynchronization. AUTO is ON_WRITE. NONE is for a single copy, over `LOCAL`.
      over: the replicas. A collective: the functions run on each replica, on its component. `stacked`: one program
        holds all components, along a first axis.
      order: of the aggregation, as for `gradcombine.all_reduce`.

    Returns:
      Pure functions of a `ReplicatedState`, and ``aggregation`` and ``synchronization`` as resolved. ``init(value)``
      makes a state of a value that is the same on every replica. In replica context, where each replica passes its
      value (over `stacked` along the first axis): ``read(state)``, this replica's component; ``assign(state, value)``,
      which with ON_WRITE aggregates the values and writes the result to every component, and with ON_READ writes this
      replica's value to its component; ``assign_add`` and ``assign_sub``, which add to or subtract from the component.
      In cross-replica context, on all components at once, with one value for all replicas: ``cross.assign``, after
      which ``cross.read`` returns the value; ``cross.assign_add`` and ``cross.assign_sub``, which change every
      component; and ``cross.read``, the components combined. Values have the structure, shapes and dtypes of the
      variables; only Python numbers, the same on every replica, are cast or broadcast. None writes nothing.

    Raises:
      GradCombineError: for unknown names and for NONE with several copies. The functions raise it for a value of
        another structure, shape or dtype, and for calls that are not defined: a write in replica context with ON_WRITE
        and aggregation NONE; a Python number with ON_WRITE and SUM; a cross-replica read or write with ON_READ and
        NONE; a cross-replica assign_add or assign_sub with ON_READ and SUM; MEAN of integers.

    Bits: as `gradcombine.all_reduce` and `gradcombine.combine` guarantee for the order. With ON_READ and SUM,
    ``cross.assign`` splits the value over the replicas: integers so that their sum is exactly the value; floats by
    dividing by the number of replicas, as TensorFlow does, so that the sum is exact only for a power of two.

    References: `tf.VariableAggregation <https://www.tensorflow.org/api_docs/python/tf/VariableAggregation>`_,
    `tf.VariableSynchronization <https://www.tensorflow.org/api_docs/python/tf/VariableSynchronization>`_.

    >>> import numpy as np
    >>> from gradcombine import replicated
    >>> counter = replicated.variable("sum", "on_read", over=replicated.stacked(2))
    >>> state = counter.assign_add(counter.init({"tokens": np.int32(0)}), {"tokens": np.int32([3, 7])})
    >>> state.value
    {'tokens': array([3, 7], dtype=int32)}
    >>> counter.cross.read(state)
    {'tokens': array(10, dtype=int32)}

    In replica context, here under jax.vmap:

    >>> import jax, gradcombine as gc
    >>> mean = replicated.variable("mean", "on_write", over=gc.jax_axis("data"))
    >>> def step(x):
    ...     return mean.read(mean.assign_add(mean.init(np.float32(10)), x))
    >>> [float(y) for y in jax.vmap(step, axis_name="data")(np.float32([1, 4]))]
    [12.5, 12.5]
    """
    check(order=order)
    policy = decide(aggregation, synchronization, over)
    contexts = _Contexts(policy, layout(over, order))
    return ReplicatedVariable(
        policy.aggregation,
        policy.synchronization,
        contexts.init,
        operation("replicated.assign")(contexts.write(replace)),
        operation("replicated.assign_add")(contexts.write(add)),
        operation("replicated.assign_sub")(contexts.write(subtract)),
        contexts.read,
        CrossReplica(
            operation("replicated.cross.assign")(contexts.cross_write(replace)),
            operation("replicated.cross.assign_add")(contexts.cross_write(add)),
            operation("replicated.cross.assign_sub")(contexts.cross_write(subtract)),
            contexts.cross_read,
        ),
    )


@dataclass(frozen=True)
class _Contexts:
    """The functions of replica context and cross-replica context, for one policy and layout."""

    policy: Policy
    layout: Layout

    @operation("replicated.init")
    def init(self, value: Tree) -> ReplicatedState:
        leaves, structure = tree.flatten(value)
        for x, path in zip(leaves, structure.paths(), strict=True):
            require_numbers(x, path)
        backend = resolve(leaves)
        arrays = [x if is_absent(x) else backend.asarray(x) for x in leaves]
        if self.policy.reduction is not None:
            # Raises for dtypes that the aggregation does not support, for instance MEAN of integers.
            scalars = [None if is_absent(x) else np.empty((), backend.dtype(x)) for x in arrays]
            try:
                self.policy.reduction.init(tree.unflatten(structure, scalars))
            except GradCombineError as error:
                expected = f"{error.expected}, for {self.policy}"
                raise invalid(expected, error.received, error.path) from None
        components = [x if is_absent(x) else self.layout.broadcast(backend, x) for x in arrays]
        if self.policy.on_read:
            components = self.layout.mark_varying(components)
        return ReplicatedState(tree.unflatten(structure, components))

    @operation("replicated.read")
    def read(self, state: ReplicatedState) -> Tree:
        into = opened(state)
        return into.rebuild(into.leaves)

    @operation("replicated.cross.read")
    def cross_read(self, state: ReplicatedState) -> Tree:
        into = opened(state)
        for leaf, path in zip(into.leaves, into.paths(), strict=True):
            if not is_absent(leaf):
                self.layout.shape(into.backend, leaf, path)
        if not self.policy.on_read:
            return into.rebuild([x if is_absent(x) else self.layout.one(x) for x in into.leaves])
        reduction = self.policy.require_one_value()
        components = into.rebuild(self.layout.mark_varying(into.leaves))
        values = tree.flatten_as(into.structure, self.layout.reduce(reduction, components))
        backend, pairs = resolve(values), zip(values, into.leaves, strict=True)
        return into.rebuild([x if is_absent(x) else backend.cast(x, into.backend.dtype(c)) for x, c in pairs])

    def write(self, write: Write) -> Callable[[ReplicatedState, Tree], ReplicatedState]:
        """A write in replica context, where each replica passes its value."""

        def assign(state: ReplicatedState, value: Tree) -> ReplicatedState:
            into = opened(state, value)
            self.policy.require_aggregation(self.layout.size)
            items = self._written(into, value, one_for_all=False)
            values = [self.layout.broadcast(into.backend, x.array) if x.number else x.array for x in items]
            if not self.policy.on_read:
                values = self._combined(into, items, values)
            return self._applied(write, into, values)

        return assign

    def cross_write(self, write: Write) -> Callable[[ReplicatedState, Tree], ReplicatedState]:
        """A write in cross-replica context, with one value for all replicas."""

        def assign(state: ReplicatedState, value: Tree) -> ReplicatedState:
            if write is not replace:
                self.policy.require_equal_addends()
            into = opened(state, value)
            if self.policy.on_read:
                self.policy.require_one_value()
            items = self._written(into, value, one_for_all=True)
            values = [None if x.array is None else self._component(into.backend, x.array) for x in items]
            return self._applied(write, into, values)

        return assign

    def _written(self, into: Opened, value: Tree, one_for_all: bool) -> list[Written]:
        """Converts ``value`` for a write to each variable: this replica's own, or ``one_for_all``.

        Raises:
          GradCombineError: unless the structure, shapes and dtypes are those of the variables.
        """
        backend = into.backend

        def leaf(component: Leaf, x: Leaf, path: str) -> Written:
            if x is None:
                return Written(None)
            require_numbers(x, path)
            if is_absent(component):
                raise invalid("None, as in the value passed to init", "an array", path)
            dtype, shape = backend.dtype(component), self.layout.shape(backend, component, path)
            with within(path):
                if type(x) in _KINDS:
                    if shape:
                        raise invalid(f"shape {shape}", f"the number {shown(x)}")
                    return Written(_number(backend, x, dtype), number=True)
                received = described(x).shape(x), described(x).dtype(x)
            expected = shape if one_for_all else backend.shape(component), dtype
            if expected != received:
                wanted, got = (f"shape {pair[0]} and dtype {pair[1]}" for pair in (expected, received))
                raise invalid(wanted, got, path)
            return Written(backend.asarray(x))

        values = tree.flatten_as(into.structure, value)
        return [leaf(*row) for row in zip(into.leaves, values, into.paths(), strict=True)]

    def _combined(self, into: Opened, items: list[Written], values: list[Array | None]) -> list[Array | None]:
        """Aggregates the replicas' values. A Python number is the same on all replicas, and stays as it is."""
        for item, path in zip(items, into.paths(), strict=True):
            if item.number:
                self.policy.require_contribution(self.layout.size, path)
        arrays = [None if item.number else item.array for item in items]
        if self.policy.reduction is None or all(map(is_absent, arrays)):
            return values
        combined, _ = tree.flatten(self.layout.all_reduce(self.policy.reduction, into.rebuild(arrays)))
        return [x if is_absent(y) else y for x, y in zip(values, combined, strict=True)]

    def _component(self, backend: Backend, value: Array) -> Array:
        """The component to write for a cross-replica value: the value, or a share of it if components are summed."""
        value = self.layout.broadcast(backend, value)
        if not self.policy.shares:
            return value
        dtype, size = backend.dtype(value), self.layout.size()
        if dtypes.kind(dtype) != "integer":
            working = dtypes.working(dtype)
            return backend.divide(backend.cast(value, working), backend.full((), size, dtypes.part(working)))
        wide = backend.cast(value, dtypes.Settings().running(dtype))
        share, rest = wide // size, backend.cast(wide % size, dtypes.INT32)
        return backend.where(self.layout.rank(backend, value) < rest, share + 1, share)

    def _applied(self, write: Write, into: Opened, values: Sequence[Array | None]) -> ReplicatedState:
        """Writes a value to every component; None leaves the component unchanged."""
        backend = resolve([*into.leaves, *values])

        def leaf(component: Leaf, value: Array | None, path: str) -> Leaf:
            if is_absent(value):
                return component
            dtype = backend.dtype(component)
            if write is not replace and dtypes.kind(dtype) not in dtypes.NUMERIC:
                raise invalid("a numeric variable", dtype, path)
            return write(backend, backend.asarray(component), backend.cast(backend.asarray(value), dtype))

        new = [leaf(*row) for row in zip(into.leaves, values, into.paths(), strict=True)]
        return ReplicatedState(into.rebuild(self.layout.mark_varying(new) if self.policy.on_read else new))


# The kinds of variables that a Python number may be written to.
_KINDS = {bool: ("bool",), int: ("integer", "float", "complex"), float: ("float", "complex"), complex: ("complex",)}

Write: TypeAlias = Callable[[Backend, Array, Array], Array]
"""``write(backend, component, value)`` returns the new component."""


class ReplicatedState(NamedTuple):
    """The components of a variable, or of a tree of variables.

    Attributes:
      value: tree of components: this replica's, or over `stacked` those of all replicas along a first axis.
    """

    value: Tree


class Opened(NamedTuple):
    """A flattened state."""

    backend: Backend
    structure: tree.Structure
    leaves: list[Leaf]

    def paths(self) -> list[str]:
        return list(self.structure.paths())

    def rebuild(self, leaves: list[Leaf]) -> Tree:
        return tree.unflatten(self.structure, leaves)


class Written(NamedTuple):
    """A value to write to one variable of the tree.

    Attributes:
      array: of the variable's dtype, or None to write nothing.
      number: whether the user passed a Python number, which is the same on every replica.
    """

    array: Array | None
    number: bool = False


def opened(state: ReplicatedState, value: Tree = None) -> Opened:
    """Flattens a state, with components as arrays of the common framework of the state and ``value``."""
    leaves, structure = tree.flatten(require_type("a ReplicatedState", state, ReplicatedState).value)
    backend = resolve([*leaves, *tree.flatten(value)[0]])
    return Opened(backend, structure, [x if is_absent(x) else backend.asarray(x) for x in leaves])


def _number(backend: Backend, x: complex, dtype: np.dtype) -> Array:
    expected = f"a number that a variable of {dtype} can hold"
    if dtypes.kind(dtype) not in _KINDS[type(x)]:
        raise invalid(expected, shown(x))
    with translate_errors(expected, OverflowError, received=lambda: shown(x)), np.errstate(all="ignore"):
        return backend.asarray(np.asarray(x, dtype))


def replace(backend: Backend, component: Array, value: Array) -> Array:
    return value


def add(backend: Backend, component: Array, value: Array) -> Array:
    return backend.add(component, value)


def subtract(backend: Backend, component: Array, value: Array) -> Array:
    with np.errstate(all="ignore"):  # as in `Backend.add`
        return component - value
