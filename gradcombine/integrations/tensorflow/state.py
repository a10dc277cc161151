# pyright: standard
"""Per-replica windows in variables, the record of variables with gradients, and the order of reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import tensorflow as tf

from gradcombine import tree
from gradcombine.backends.tensorflow_backend import in_plain_graph, unguarded
from gradcombine.errors import invalid, operation
from gradcombine.places.time import whole_window
from gradcombine.places.window import Window
from gradcombine.reductions.algebra import Wrapper
from gradcombine.types import AccumulateState, Array, BinaryCounter, Leaf, Scalar, State, Tree


class Pending(NamedTuple):
    """A state that has not been written yet.

    Attributes:
      after: the new state; with ``terms``, without accumulators.
      terms: per accumulator, a tensor of its dtype to add in place, or None. None: ``after`` is written as it is.
      replaces: with ``terms``, boolean scalar: whether they replace the accumulators' values instead.
    """

    after: AccumulateState
    terms: list[Any] | None = None
    replaces: Array | None = None


class ReplicaState:
    """The `AccumulateState` of each replica, in variables; call the methods in replica context.

    In a graph that XLA does not compile, a sum with one accumulator per leaf is updated in place: assigned at the start
    of a window, added to afterwards. Under XLA, which copies a buffer that a conditional writes, and in eager mode, all
    variables are assigned. The bits are the same.

    Attributes:
      position: variables of ``step`` and ``index``.

    Args:
      structure: tree structure of the state's levels.
      leaves: variables of the levels' leaves, each a variable or a list of one per replica.
      resumed: function that is applied to a state after it is read.
    """

    def __init__(
        self,
        window: Window,
        structure: tree.Structure,
        leaves: Sequence[Leaf],
        position: dict[str, Tree],
        resumed: Callable[[AccumulateState], AccumulateState] = lambda state: state,
    ) -> None:
        self.window, self.position = window, position
        self._structure, self._variables = structure, list(leaves)
        self._resumed = resumed
        levels = tree.unflatten(structure, self._variables)
        adds = window.reduction.adds and not isinstance(levels, BinaryCounter)
        self._added = len(levels[0].value) if adds else 0
        self._merging = replace(window, reduction=_MergedStates(window.reduction))

    @property
    def windows(self) -> list[list[Leaf]]:
        """Variables of each replica, for a checkpoint."""
        local = tf.distribute.get_strategy().experimental_local_results
        return [x if isinstance(x, list) else list(local(x)) for x in self._variables]

    def read(self) -> AccumulateState:
        """This replica's state."""
        return self._state([tf.convert_to_tensor(x) for x in self._leaves()])

    def unread(self) -> AccumulateState:
        """This replica's state with variables as leaves; only the position is read."""
        return self._state(self._leaves())

    def contributed(self, gradients: Tree, weight: Scalar, number: Scalar = None) -> tuple[Pending, tf.Tensor]:
        """Computes the state after a contribution, without writing it.

        Returns:
          The state, for `write`; and whether the window is full.
        """
        if not self._in_place() or number is not None:
            after = self.window.contribute(self.read(), gradients, weight, number=number)
            return Pending(after), self.window.is_full(after)
        leaves = self._leaves()
        totals = map(tf.convert_to_tensor, leaves[self._added :])
        before = self._state([*leaves[: self._added], *totals])
        level: Any = before.levels[0]
        with unguarded():  # the product is computed here, and added inside a conditional
            part = self.window.reduction.contribution(level, gradients, weight)
        after = self._merging.contribute(before._replace(levels=(_without_leaves(level),)), _without_leaves(part))
        terms = [None if tree.is_static(x) else x for x in part.value]
        return Pending(after, terms, self.window.is_over(before)), self.window.is_full(after)

    def write(self, pending: Pending) -> list[tf.Operation]:
        """Replaces this replica's state.

        Returns:
          The assignments, in a graph without automatic control dependencies; otherwise an empty list.
        """
        leaves, after = self._leaves(), pending.after
        if pending.terms is None:
            arrays = tree.flatten_as(self._structure, after.levels)
        else:
            self._add(leaves[: self._added], pending.terms, pending.replaces)
            leaves = leaves[self._added :]
            arrays = tree.flatten(after.levels)[0]
        leaves = [*leaves, *(_of_this_replica(x) for x in self.position.values())]
        written = [x.assign(array) for x, array in zip(leaves, [*arrays, after.step, after.index], strict=True)]
        return [] if tf.executing_eagerly() or tf.inside_function() else [x.op for x in written]

    def write_step(self, step: tf.Tensor) -> None:
        """Replaces the number of contributions in the window."""
        _of_this_replica(self.position["step"]).assign(step)

    def value(self) -> Array:
        """Combined gradients of the window."""
        # The sum of weights is read from a variable: no compiler can fold it.
        with unguarded() if self._in_place() else nullcontext():
            return self.window.value(self.read())

    def flat(self) -> list[Leaf]:
        """This replica's state as a list of tensors, which strategy.run can return."""
        state = self.read()
        return [*tree.flatten(state.levels)[0], state.step, state.index]

    def unflat(self, arrays: Sequence[Leaf]) -> AccumulateState:
        """Inverse of `flat`."""
        *leaves, step, index = arrays
        return AccumulateState(tree.unflatten(self._structure, leaves), step, index)

    def layout(self) -> Layout:
        """Layout that a checkpoint must have to be restored into this state."""
        leaves = [next(iter(x)) if isinstance(x, list) else x for x in self._variables]
        return Layout([self.window.reduction.name, *(f"{x.dtype.name}{x.shape}" for x in leaves)])

    def _in_place(self) -> bool:
        return self._added > 0 and in_plain_graph()

    def _add(self, accumulators: Sequence[Leaf], terms: Sequence[Tree], replaces: Array) -> None:
        pairs = list(zip(accumulators, terms, strict=True))

        def replaced() -> None:
            empty = self._empty() if any(x is None for x in terms) else terms
            for (x, term), neutral in zip(pairs, empty, strict=True):
                x.assign(neutral if term is None else term, read_value=False)

        def added() -> None:
            for x, term in pairs:
                if term is not None:
                    x.assign_add(term, read_value=False)

        tf.cond(replaces, replaced, added)

    def _empty(self) -> list[Leaf]:
        """Accumulator values of an empty window."""
        (level,) = tree.unflatten(self._structure, self._leaves())
        return self.window.reduction.clear(level).value

    def _leaves(self) -> list[Leaf]:
        return [_of_this_replica(x) for x in self._variables]

    def _state(self, leaves: Sequence[Leaf]) -> AccumulateState:
        position = {name: tf.convert_to_tensor(_of_this_replica(x)) for name, x in self.position.items()}
        return self._resumed(AccumulateState(levels=tree.unflatten(self._structure, list(leaves)), **position))


class Layout(tf.train.experimental.PythonState):
    """Layout of a window, in lines that are equal for compatible windows.

    Compared on restore, as tf.train.Checkpoint matches variables of a list by position only.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self._text = "\n".join(lines).encode()

    def serialize(self) -> bytes:
        """Returns the layout for the checkpoint."""
        return self._text

    @operation("tf.train.Checkpoint.restore")
    def deserialize(self, string_value: bytes) -> None:
        """Raises for a checkpoint of an incompatible window, before its variables are read."""
        if string_value != self._text:
            pair = zip_longest(self._text.decode().split("\n"), string_value.decode().split("\n"))
            raise invalid(*next((f"a window with {a}", b) for a, b in pair if a != b))


def in_local_variables(window: Window, specs: Tree) -> ReplicaState:
    """Creates the variables of a window's state, for gradients with these specs, in the scope of the strategy.

    ON_READ variables are written in replica context, with a separate value on each replica. tf.distribute would save
    one combined value for all replicas, so checkpoints track the components instead of the distributed variables.
    A CentralStorageStrategy creates one variable for all replicas, so here it gets a list of one per replica. In a
    tf.Graph of TensorFlow 1 they are local variables, initialized by `tf.compat.v1.local_variables_initializer`.
    """
    initial = window.init(specs)
    leaves, structure = tree.flatten(initial.levels)
    position = {"step": local_variable(initial.step), "index": local_variable(initial.index)}
    return ReplicaState(window, structure, [local_variable(x) for x in leaves], position)


def _of_this_replica(leaf: Leaf) -> Array:
    """Selects this replica's variable from a list; returns anything else unchanged."""
    if not isinstance(leaf, list):
        return leaf
    rank = tf.distribute.get_replica_context().replica_id_in_sync_group
    return leaf[int(tf.get_static_value(rank))]


def local_variable(initial: tf.Tensor) -> Any:
    strategy = tf.distribute.get_strategy()
    options: dict[str, Tree] = {}
    if tf.distribute.has_strategy():
        options["synchronization"] = tf.VariableSynchronization.ON_READ
        # A checkpoint of the position holds one value for all replicas.
        options["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA

    def make() -> Any:
        return tf.compat.v1.Variable(
            initial,
            trainable=False,
            use_resource=True,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            **options,
        )

    variable = make()
    # Unwrapped: an assignment to the wrapper would be aggregated over all replicas.
    unwrap = getattr(variable, "get", None)
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy) and unwrap is not None:
        return [unwrap(), *(make().get() for _ in range(strategy.num_replicas_in_sync - 1))]
    return variable


class _MergedStates(Wrapper):
    """A reduction that merges states of another one."""

    def update(self, state: State, value: State, weight: Scalar = 1) -> State:
        return self.of.merge(state, value)


def _without_leaves(state: State) -> State:
    """Removes the leaves of a state, but not its total weight and count."""
    return state._replace(value=[], dtypes=[])


def branch(condition: tf.Tensor, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Tree:
    """tf.cond; a Python conditional in eager mode, so that a branch may contain a collective."""
    if tf.executing_eagerly():
        return if_true() if condition else if_false()
    return tf.cond(condition, if_true, if_false)


def run_after(first: Sequence[Any]) -> AbstractContextManager[Any]:
    """Context in which operations run after the tensors or operations ``first``."""
    return nullcontext() if tf.executing_eagerly() else tf.control_dependencies(_operations(first))


def completed(tensors: Sequence[Leaf], operations: Sequence[Any]) -> list[Leaf]:
    """Returns the tensors, available only after the operations have run."""
    if tf.executing_eagerly() or not operations:
        return list(tensors)
    with tf.control_dependencies(_operations(operations)):
        return [tf.identity(x) for x in tensors]


def graph_size() -> int:
    """Number of operations in the graph that is being traced; 0 in eager mode."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


def effects_since(size: int) -> list[tf.Operation]:
    """Operations with side effects, such as assertions, that were added since `graph_size` returned ``size``."""
    if tf.executing_eagerly():
        return []
    added = tf.compat.v1.get_default_graph().get_operations()[size:]
    return [op for op in added if op.op_def.is_stateful and op.type != "ReadVariableOp"]


def converted(function: Callable[..., Tree], status: Any = None) -> Callable[..., Tree]:
    """Converts a caller's function by AutoGraph if the surrounding tf.function, or ``status``, enables AutoGraph."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, status or autograph.control_status_ctx(), convert_by_default=False)


def _operations(values: Sequence[Any]) -> list[tf.Operation]:
    # Other values, such as Keras variables, occur only in a tf.function, which has automatic control dependencies.
    operations = [x if isinstance(x, tf.Operation) else getattr(x, "op", None) for x in values]
    return [x for x in operations if isinstance(x, tf.Operation)]


_NAME = "seen"


def neutral(window: Window, specs: Tree) -> Array:
    """Combined gradients of an empty window, for gradients with these specs."""
    return window.reduction.finalize(whole_window(window.reduction, window.init(specs)))


def differs(combined: Array, empty: Array) -> tf.Tensor:
    """Whether a variable's combined gradient differs from that of an empty window."""
    pairs = zip(tf.nest.flatten(combined), tf.nest.flatten(empty), strict=True)
    return tf.reduce_any([tf.reduce_any(tf.not_equal(x, y)) for x, y in pairs])


class WithSeen(tf.Module):
    """A module that records which variables have had a gradient, in this process or before a restart.

    Checkpoints hold the record as a tensor of the module itself, not as a variable below it: thus a checkpoint without
    it restores, and ``assert_consumed()`` passes. Checkpoints that have it as a variable restore, too.

    Attributes:
      seen: boolean vector variable: whether each variable has had a gradient; None before `make_seen`.
    """

    seen: Any = None
    _restored: Any = None

    def make_seen(self, count: int, each_replica: bool = False) -> None:
        """Creates `seen`, for ``count`` variables; ``each_replica``: with a separate value on each replica."""
        initial = tf.zeros([count], tf.bool)
        if each_replica:
            self.seen = local_variable(initial)
        else:
            collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            self.seen = tf.compat.v1.Variable(initial, trainable=False, use_resource=True, collections=collections)
        if self._restored is not None:
            self._restore_from_tensors({_NAME: self._restored})
            self._restored = None

    def see(self, present: Iterable[int]) -> Array:
        """Marks variables as seen; returns the assignment."""
        indices = set(present)
        mask = tf.constant([i in indices for i in range(self.seen.shape[0])], tf.bool)
        return self.seen.assign(tf.convert_to_tensor(self.seen) | mask)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Tree) -> Any:
        base: Tree = super()
        children = base._trackable_children(save_type, **kwargs)
        return {name: x for name, x in children.items() if save_type != "checkpoint" or name != _NAME}

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        base: Tree = super()
        return base._lookup_dependency(name, None if name == _NAME else cached_dependencies)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if self.seen is None:
            return {_NAME: tf.zeros([0], tf.bool)}
        return {_NAME: tf.convert_to_tensor(self.seen)}

    def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, options: Any, **_: Any) -> list[Any]:
        object_map[self] = tf.Module()  # a SavedModel has the variable below the module, and no tensor
        return []

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        restored = restored_tensors[_NAME]
        if self.seen is None:  # created in the first call
            self._restored = restored if tf.executing_eagerly() else None
            return tf.no_op()
        # Empty if the module was saved before its first call.
        missing = self.seen.shape[0] - tf.size(restored)
        return self.seen.assign(tf.ensure_shape(tf.pad(restored, [[0, missing]]), self.seen.shape))
