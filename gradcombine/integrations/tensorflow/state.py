# pyright: standard
"""Each replica's own window in variables, the variables that have had a gradient, and the order of reads and writes."""

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
      after: the state; without accumulators where there are terms.
      terms: what is added to each accumulator where it lies, in its dtype, None for nothing. None: nothing is added,
        the state is written as it is.
      replaces: with terms, whether they take the place of what the accumulators hold; a boolean scalar.
    """

    after: AccumulateState
    terms: list[Any] | None = None
    replaces: Array | None = None


class ReplicaState:
    """The `AccumulateState` of each replica, in variables; the methods are called in replica context.

    A sum of one accumulator a leaf is written in place in a graph that XLA does not compile: assigned at the start of a
    window, added to after it. Under XLA, which copies a buffer that a conditional writes, and eagerly, all variables
    are assigned. Either way gives the same bits.

    Attributes:
      position: the variables of ``step`` and ``index``.

    Args:
      window: whose state it is.
      structure: of the state's levels.
      leaves: their variables; in place of one a list, of which each replica has one.
      position: see above.
      resumed: applied to a state before it is used; None: nothing is.
    """

    def __init__(
        self,
        window: Window,
        structure: tree.Structure,
        leaves: Sequence[Leaf],
        position: dict[str, Tree],
        resumed: Callable[[AccumulateState], AccumulateState] | None = None,
    ) -> None:
        self.window, self.position = window, position
        self._structure, self._variables = structure, list(leaves)
        self._resumed = (lambda state: state) if resumed is None else resumed
        levels = tree.unflatten(structure, self._variables)
        adds = window.reduction.adds and not isinstance(levels, BinaryCounter)
        self._added = len(levels[0].value) if adds else 0

    @property
    def windows(self) -> list[list[Leaf]]:
        """The variables of each replica, for a checkpoint."""
        local = tf.distribute.get_strategy().experimental_local_results
        return [x if isinstance(x, list) else list(local(x)) for x in self._variables]

    def read(self) -> AccumulateState:
        """This replica's state."""
        return self._resumed(self._state([tf.convert_to_tensor(x) for x in self._leaves()]))

    def unread(self) -> AccumulateState:
        """This replica's state as it is in the variables, of which the position alone is read."""
        return self._state(self._leaves())

    def contributed(self, gradients: Tree, weight: Scalar, number: Scalar = None) -> tuple[Pending, tf.Tensor]:
        """One more contribution to this replica's window, for `write`, and whether it is full then.

        Nothing is written yet.
        """
        if not self._in_place() or number is not None:
            after = self.window.contribute(self.read(), gradients, weight, number=number)
            return Pending(after), self.window.is_full(after)
        leaves = self._leaves()
        totals = map(tf.convert_to_tensor, leaves[self._added :])
        before = self._resumed(self._state([*leaves[: self._added], *totals]))
        level: Any = before.levels[0]
        with unguarded():  # a product is made here, and added in a conditional
            part = self.window.reduction.contribution(level, gradients, weight)
        merging = replace(self.window, reduction=_OfStates(self.window.reduction))
        after = merging.contribute(before._replace(levels=(_without_leaves(level),)), _without_leaves(part))
        terms = [None if tree.is_static(x) else x for x in part.value]
        return Pending(after, terms, self.window.is_over(before)), self.window.is_full(after)

    def write(self, pending: Pending) -> list[tf.Operation]:
        """Replaces this replica's state.

        Returns:
          The operations that do, in a graph whose operations are not ordered by themselves.
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
        """The combined gradients of the window."""
        # No compiler knows a sum of weights that lies in a variable.
        with unguarded() if self._in_place() else nullcontext():
            return self.window.value(self.read())

    def flat(self) -> list[Leaf]:
        """This replica's arrays, and its position, in a form that strategy.run can return."""
        state = self.read()
        return [*tree.flatten(state.levels)[0], state.step, state.index]

    def unflat(self, arrays: Sequence[Leaf]) -> AccumulateState:
        """The state of what `flat` gave."""
        *leaves, step, index = arrays
        return AccumulateState(tree.unflatten(self._structure, leaves), step, index)

    def layout(self) -> Layout:
        """The layout that a checkpoint must have to be restored into this state."""
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
        """The accumulators' values in an empty window."""
        (level,) = tree.unflatten(self._structure, self._leaves())
        return self.window.reduction.clear(level).value

    def _leaves(self) -> list[Leaf]:
        return [_of_this_replica(x) for x in self._variables]

    def _state(self, leaves: Sequence[Leaf]) -> AccumulateState:
        position = {name: tf.convert_to_tensor(_of_this_replica(x)) for name, x in self.position.items()}
        return AccumulateState(levels=tree.unflatten(self._structure, list(leaves)), **position)


class Layout(tf.train.experimental.PythonState):
    """Layout of a window: tf.train.Checkpoint would restore another one's variables by their numbers alone.

    Args:
      lines: the same for windows that can be restored from each other.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self._text = "\n".join(lines).encode()

    def serialize(self) -> bytes:
        """For the checkpoint."""
        return self._text

    @operation("tf.train.Checkpoint.restore")
    def deserialize(self, string_value: bytes) -> None:
        """Refuses a checkpoint of another window, before its variables are read."""
        if string_value != self._text:
            pair = zip_longest(self._text.decode().split("\n"), string_value.decode().split("\n"))
            raise invalid(*next((f"a window with {a}", b) for a, b in pair if a != b))


def in_local_variables(window: Window, specs: Tree) -> ReplicaState:
    """A state in variables of its own, in the scope of its strategy.

    ON_READ variables are written in replica context and stay each replica's own. Their containers are kept out of
    checkpoints, where tf.distribute would save one combined value for all replicas; the components are tracked instead.
    A CentralStorageStrategy makes one variable for all replicas, so there each replica gets one by number. In a
    tf.Graph of TensorFlow 1 they are local variables, which `tf.compat.v1.local_variables_initializer` starts.

    Args:
      window: whose state it is.
      specs: the shapes and dtypes of the gradients, a list or another tree.
    """
    empty = window.init(specs)
    leaves, structure = tree.flatten(empty.levels)
    position = {"step": local_variable(empty.step), "index": local_variable(empty.index)}
    return ReplicaState(window, structure, [local_variable(x) for x in leaves], position)


def _of_this_replica(leaf: Leaf) -> Array:
    """This replica's variable, where there is a list of them."""
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
    # Without the wrapper, which would send what one replica writes through an aggregation over all of them.
    unwrap = getattr(variable, "get", None)
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy) and unwrap is not None:
        return [unwrap(), *(make().get() for _ in range(strategy.num_replicas_in_sync - 1))]
    return variable


class _OfStates(Wrapper):
    """A reduction whose contributions are states of another one."""

    def update(self, state: State, value: State, weight: Scalar = 1) -> State:
        return self.of.merge(state, value)


def _without_leaves(state: State) -> State:
    """The state of no leaves, of the same sum of weights and count."""
    return state._replace(value=[], dtypes=[])


def branch(condition: tf.Tensor, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Tree:
    """One of the two results: eagerly by plain Python, so that a branch may hold a collective; else by tf.cond."""
    if tf.executing_eagerly():
        return if_true() if condition else if_false()
    return tf.cond(condition, if_true, if_false)


def run_after(first: Sequence[Any]) -> AbstractContextManager[Any]:
    """A context whose operations run after ``first``, tensors or operations."""
    return nullcontext() if tf.executing_eagerly() else tf.control_dependencies(_operations(first))


def completed(tensors: Sequence[Leaf], operations: Sequence[Any]) -> list[Leaf]:
    """The tensors, available only after the operations have run."""
    if tf.executing_eagerly() or not operations:
        return list(tensors)
    with tf.control_dependencies(_operations(operations)):
        return [tf.identity(x) for x in tensors]


def graph_size() -> int:
    """How many operations the graph that is being traced has; 0 where none is."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


def effects_since(begun: int) -> list[tf.Operation]:
    """The operations with an effect, assertions for instance, made since `graph_size` was ``begun``."""
    if tf.executing_eagerly():
        return []
    since = tf.compat.v1.get_default_graph().get_operations()[begun:]
    return [op for op in since if op.op_def.is_stateful and op.type != "ReadVariableOp"]


def converted(function: Callable[..., Tree], status: Any = None) -> Callable[..., Tree]:
    """A caller's function, converted by AutoGraph if the tf.function around it uses that, or did at ``status``."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, status or autograph.control_status_ctx(), convert_by_default=False)


def _operations(things: Sequence[Any]) -> list[tf.Operation]:
    # Other things, such as Keras variables, are ordered by the tf.function itself.
    operations = [x if isinstance(x, tf.Operation) else getattr(x, "op", None) for x in things]
    return [x for x in operations if isinstance(x, tf.Operation)]


_NAME = "seen"


def neutral(window: Window, specs: Tree) -> Array:
    """The combined gradients of a window without any, of these shapes and dtypes."""
    return window.reduction.finalize(whole_window(window.reduction, window.init(specs)))


def differs(combined: Array, empty: Array) -> tf.Tensor:
    """Whether the combined gradients of a variable are others than those of an empty window."""
    pairs = zip(tf.nest.flatten(combined), tf.nest.flatten(empty), strict=True)
    return tf.reduce_any([tf.reduce_any(tf.not_equal(x, y)) for x, y in pairs])


class WithSeen(tf.Module):
    """A module whose state says which of some variables have had a gradient, in this process or an earlier one.

    A checkpoint holds it as a tensor of the module itself, not as a variable below it: so one that was saved without it
    restores, and ``assert_consumed()`` finds nothing missing. One that has it as a variable restores as well.

    Attributes:
      seen: for each variable whether it has had a gradient, a boolean vector; None before it is made.
    """

    seen: Any = None
    _restored: Any = None

    def make_seen(self, count: int, each_replica: bool = False) -> None:
        """Makes `seen`, for so many variables; ``each_replica``: written in replica context, and each one's own."""
        empty = tf.zeros([count], tf.bool)
        if each_replica:
            self.seen = local_variable(empty)
        else:
            collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            self.seen = tf.compat.v1.Variable(empty, trainable=False, use_resource=True, collections=collections)
        if self._restored is not None:
            self._restore_from_tensors({_NAME: self._restored})
            self._restored = None

    def see(self, present: Iterable[int]) -> Array:
        """Notes a gradient for these variables; returns the assignment."""
        chosen = set(present)
        mask = tf.constant([i in chosen for i in range(self.seen.shape[0])], tf.bool)
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
        object_map[self] = tf.Module()  # has the variable below it, and no tensor
        return []

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        given = restored_tensors[_NAME]
        if self.seen is None:  # the first call makes it
            self._restored = given if tf.executing_eagerly() else None
            return tf.no_op()
        # A module that had not been called yet has saved none.
        missing = self.seen.shape[0] - tf.size(given)
        return self.seen.assign(tf.ensure_shape(tf.pad(given, [[0, missing]]), self.seen.shape))
