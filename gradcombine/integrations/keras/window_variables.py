# pyright: standard
"""A window stored in Keras variables, and its form in ``.keras`` files."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import in_words
from gradcombine.errors import GradCombineError, invalid, require_equal, shown, translate_errors
from gradcombine.integrations.keras.settings import Parts
from gradcombine.places import binary_counter
from gradcombine.places.time import cleared, depth_of, replace_window, whole_window
from gradcombine.places.window import Window
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.statefile import resize
from gradcombine.types import AccumulateState, Array, BinaryCounter, DType, Leaf, Scalar, State

_ACCUMULATOR = re.compile(r"\.levels(\[0\]|\.stacked)(?:\.parts\[0\])?\.value\[(\d+)\]")
DESCRIPTION_KEY = "window"
"""Entry of a file that holds the window's description."""


class KerasWindow(ABC):
    """An `AccumulateState` in Keras variables, and the optimizer that is run on full windows.

    Subclasses implement reads, writes and conditionals of a backend.

    Whether a window was applied is stored, not inferred from its number of microbatches: a checkpoint may hold a window
    of another length, which must not be lost or applied twice.

    Attributes:
      replicas: number of replicas, each with its own window.
      leaves: variables of the state's leaves.
      structure: tree structure of the state.
      rules: pure functions of the window.
      parts: splits gradients into the tree that is reduced.
      touched: int32 variable: per trainable variable, 1 + the index of the last window with a gradient for it; as last
        element, 1 + the index of the last window that was applied.

    Args:
      rules: pure functions of the window.
      parts: splits gradients into the tree that is reduced.
      optimizer: the inner optimizer, built.
      variables: its trainable variables.
    """

    replicas = 1

    def __init__(self, rules: Window, parts: Parts, optimizer: Any, variables: Sequence[Any]) -> None:
        like = [np.broadcast_to(np.zeros((), dtypes.parse(_dtype(v))), tuple(v.shape)) for v in variables]
        initial, self.structure = tree.flatten(rules.init(parts.split(like)))
        self.rules, self.parts = rules, parts
        self._optimizer, self._targets = optimizer, list(variables)
        self._seen: set[int] = set()
        self.touched = make_variable(np.zeros(len(variables) + 1, np.int32), "touched")
        names = [_name_and_layout(path, parts, variables) for path in self.structure.paths()]
        self.leaves = [make_variable(x, *name) for x, name in zip(initial, names, strict=True)]

    @abstractmethod
    def contribute(self, gradients: list[Leaf], weight: Scalar) -> None:
        """Adds one microbatch of this replica; the last one of a window runs the optimizer."""

    @abstractmethod
    def flush(self) -> Array:
        """Applies and ends a partial window; returns whether there was one."""

    @abstractmethod
    def record_size(self, size: Scalar, is_first: bool) -> Iterable[int]:
        """Records the number of examples of an unweighted microbatch.

        Args:
          size: number of examples.
          is_first: whether no step of this ``fit`` has ended.

        Returns:
          The sizes in this ``fit``, as far as they are known.
        """

    @abstractmethod
    def take_sizes(self) -> Iterable[int]:
        """Returns the recorded sizes, or their minimum and maximum, and resets the record."""

    @abstractmethod
    def load(self, states: list[AccumulateState], touched: Array) -> None:
        """Replaces the state of each replica."""

    @abstractmethod
    def values(self, variable: Any) -> list[Array]:
        """Value of a variable of the window on each replica."""

    def checkpointed(self, description: str) -> Any:
        """Trackable object that tf.train.Checkpoint compares on restore, or None."""
        return None

    def have_values(self, variables: Sequence[Any]) -> bool:
        """Whether the variables have values."""
        return True

    def unshare(self, variables: Sequence[Any]) -> None:
        """Copies the buffers of variables that may share them."""
        return

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables of the window."""
        return [*self.leaves, self.touched]

    def read(self, value: Callable[[keras.Variable], Any]) -> AccumulateState:
        """Returns the state with ``value(variable)`` as leaves."""
        return tree.unflatten(self.structure, map(value, self.leaves))

    @property
    def depth(self) -> int:
        """Number of levels of the state."""
        return self.leaves[0].shape[0] if self._is_counter else 1

    @property
    def _is_counter(self) -> bool:
        return self.structure.children[0].kind is BinaryCounter

    def levels(self, arrays: Sequence[np.ndarray]) -> tuple[State] | BinaryCounter:
        """Builds levels from the arrays of a saved window, which may have another number of levels.

        Raises:
          GradCombineError: for another number of arrays, other shapes, and dtypes that a cast would round.
        """
        leaves = self.leaves[: -3 if self._is_counter else -2]
        is_counter = len(arrays) == len(leaves) + 1
        require_equal("{} arrays, or a counter of them", len(leaves) + is_counter, len(arrays))
        skipped = 1 if self._is_counter else 0
        values = [_cast(x, array, int(is_counter), skipped) for x, array in zip(leaves, arrays, strict=False)]
        part = tree.unflatten(self.structure.children[0].children[0], values)
        return BinaryCounter(part, np.asarray(arrays[-1], np.int32)) if is_counter else (part,)

    def arrays(self, state: AccumulateState) -> list[Array]:
        """Leaves of a state, one per variable in ``leaves``."""
        return tree.flatten_as(self.structure, state)

    def ended(self, state: AccumulateState) -> AccumulateState:
        """Ends the window if it was applied."""
        return self.rules.end(state, self.touched.value[-1] == state.index + 1)

    def resumed(self, state: AccumulateState) -> AccumulateState:
        """Returns the state to continue with.

        If a checkpoint holds a full window that was not applied, that many additional microbatches are added to it.
        """
        step = keras.ops.where(self.rules.is_full(state), np.int32(0), state.step)
        return self.ended(state._replace(step=step))

    def marked(self, present: Sequence[bool], applied: Scalar, index: Scalar) -> Array:
        """Returns `touched` after a microbatch with gradients for the ``present`` variables, or after a flush."""
        changed = keras.ops.append(np.array(present, np.bool_), applied)
        return keras.ops.where(changed, index + 1, keras.ops.convert_to_tensor(self.touched.value))

    def write(self, state: AccumulateState) -> None:
        """Assigns a state to the variables."""
        for x, array in zip(self.leaves, self.arrays(state), strict=True):
            x.assign(array)


def save(store: Any, others: Sequence[Any], window: KerasWindow, description: str) -> None:
    """Saves variables under their numbers, those of the window stacked over the replicas."""
    for i, variable in enumerate(others):
        store[str(i)] = variable.numpy()
    for i, variable in enumerate(window.variables, len(others)):
        store[str(i)] = np.stack(window.values(variable))
    store[DESCRIPTION_KEY] = np.frombuffer(description.encode(), np.uint8)


def load(store: Any, others: Sequence[Any], window: KerasWindow, description: str) -> None:
    """Loads the result of `save`, for any number of replicas; see `replace`."""
    # A store may be of any class, and its contents damaged.
    with translate_errors("a window, as it was saved", Exception):
        received = np.asarray(store[DESCRIPTION_KEY]).tobytes().decode()
        arrays = [as_array(store[str(i)]) for i in range(len(names_in(store)) - 1)]
    values = values_of(others, arrays[: len(others)])
    saved = arrays[len(others) :]
    require_window(saved)
    replace(saved, window, received, description)
    for variable, value in zip(others, values, strict=True):
        variable.assign(value)


def names_in(store: Any) -> list[str]:
    """Names of the arrays in a store, which need not be a dict."""
    with translate_errors("a store of arrays by name", AttributeError, TypeError, received=lambda: shown(store)):
        return list(store.keys())


def as_array(value: Leaf) -> np.ndarray:
    """Converts a variable's new value to a NumPy array."""
    # Keras' backends raise errors of different classes.
    with translate_errors("arrays of numbers", Exception, received=lambda: in_words(value)):
        array = np.asarray(keras.ops.convert_to_numpy(value))
    if array.dtype.kind in "OSUMm":
        raise invalid("arrays of numbers", in_words(value))
    return array


def values_of(variables: Sequence[Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Casts arrays to the variables' dtypes; raises if one does not fit, before any is assigned."""
    require_equal("{} arrays", len(variables), len(arrays))
    return [_cast(x, array, casting="same_kind") for x, array in zip(variables, arrays, strict=True)]


def require_window(arrays: Sequence[np.ndarray]) -> None:
    """Raises unless these are the arrays of a saved window, stacked over the replicas."""
    axes = [x.ndim for x in arrays[-3:] if x.dtype.kind in "iu"]
    wrong = axes != [1, 1, 2] or len({x.shape[:1] for x in arrays}) > 1 or not arrays[-1].size
    expected = "arrays with a leading axis of replicas, of which the last three are the integers step, index, touched"
    if wrong:
        raise invalid(expected, ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays))


def is_pending(arrays: Sequence[np.ndarray]) -> bool:
    """Whether a saved window holds microbatches that have not been applied."""
    *_, step, index, touched = arrays
    return bool(step[0] > 0 and touched[0, -1] != index[0] + 1)


def replace(arrays: Sequence[np.ndarray], window: KerasWindow, received: str, description: str) -> None:
    """Replaces the state of all replicas by a saved window.

    A saved window without pending microbatches that does not fit is replaced by an empty one.

    Args:
      arrays: variables of the saved window, stacked over the replicas.
      window: the window whose state is replaced.
      received: description of the saved window.
      description: description of ``window``.

    Raises:
      GradCombineError: for a partial window that cannot be continued. Nothing is changed then.
    """
    *_, step, index, touched = arrays
    marks = np.zeros(window.touched.shape, np.int32)
    try:
        states = _states(arrays, window, received, description)
        marks = touched.max(0)
    except GradCombineError:
        if is_pending(arrays):
            raise
        states = [_empty(window, int(index[0]) + int(step[0] > 0))] * window.replicas
    window.load(states, marks)


def _states(arrays: Sequence[np.ndarray], window: KerasWindow, received: str, expected: str) -> list[AccumulateState]:
    *leaves, step, index, touched = arrays
    require_equal("a window of {}", expected, received)
    require_equal("a window of {} variables", window.touched.shape[0] - 1, touched.shape[1] - 1)
    states = [_state(window, [x[rank] for x in (*leaves, step, index)]) for rank in range(len(step))]
    full = is_pending(arrays) and window.rules.is_full(states[0])
    if full:
        raise invalid("a window of fewer microbatches than every", f"{int(step[0])} that have not been applied")
    return _redistributed(window.rules.reduction, states, window.replicas)


def _state(window: KerasWindow, arrays: Sequence[np.ndarray]) -> AccumulateState:
    """Builds one replica's state with the window's depth from arrays that may have another depth."""
    *leaves, step, index = arrays
    saved = AccumulateState(window.levels(leaves), step, index)
    if (depth := depth_of(saved)) == window.depth:
        return saved
    if isinstance(saved.levels, BinaryCounter) and depth < window.depth and saved.levels.filled < 2**depth:
        return saved._replace(levels=binary_counter.deeper(window.rules.reduction, saved.levels, window.depth))
    empty = _empty(window, 0)._replace(step=step, index=index)
    return replace_window(window.rules.reduction, empty, whole_window(window.rules.reduction, saved))


def _empty(window: KerasWindow, index: int) -> AccumulateState:
    state = window.read(lambda variable: variable.numpy())
    return AccumulateState(cleared(window.rules.reduction, state.levels), np.int32(0), np.int32(index))


def _redistributed(reduction: Reduction, states: Sequence[AccumulateState], replicas: int) -> list[AccumulateState]:
    """Redistributes the replicas' states over another number of replicas.

    Additional replicas get empty windows. With fewer replicas, windows are merged, which changes the order of
    additions.
    """
    if replicas >= len(states):
        empty = states[0]._replace(levels=cleared(reduction, states[0].levels))
        return [*states, *[empty] * (replicas - len(states))]
    merged = resize(reduction, [whole_window(reduction, state) for state in states], replicas)
    return [replace_window(reduction, states[0], window) for window in merged]


def _cast(variable: Any, array: np.ndarray, levels: int = 0, skipped: int = 0, casting: Any = "safe") -> np.ndarray:
    """Casts to the variable's dtype; the array's first ``levels`` axes and the variable's ``skipped`` may differ."""
    dtype, shape = np.dtype(dtypes.parse(_dtype(variable))), tuple(variable.shape)[skipped:]
    received = array.shape[levels:]
    if array.ndim < levels or received != shape or not np.can_cast(array.dtype, dtype, casting):
        raise invalid(f"{dtype} of shape {shape}", f"{array.dtype} of shape {received}", variable.path)
    return array.astype(dtype)


def _dtype(variable: Any) -> str:
    # Unaffected by an autocast scope, unlike `dtype`.
    return keras.backend.standardize_dtype(getattr(variable, "_dtype", variable.dtype))


def _name_and_layout(path: str, parts: Parts, variables: Sequence[Any]) -> tuple[str, Any]:
    """Name and layout of the variable for a leaf of the state; an accumulator has its trainable variable's layout."""
    match = _ACCUMULATOR.match(path)
    if match is None:
        return re.sub(r"\W+", "_", path).strip("_"), None
    trained = variables[parts.ordinary_index(int(match[2]))]
    name = re.sub(r"\W+", "_", f"{getattr(trained, 'path', trained.name)}_window_{match[1]}{path[match.end() :]}")
    # Stacked levels have an additional axis.
    return name, None if match[1] == ".stacked" else getattr(trained, "_layout", None)


def make_variable(initial: Leaf, name: str, layout: Any = None) -> keras.Variable:
    """Creates a variable with a separate value on each replica."""
    dtype = str(initial.dtype)
    with translate_errors("a dtype of Keras variables", received=dtype):
        keras.backend.standardize_dtype(dtype)

    def initializer(shape: Any, dtype: DType) -> Array:
        return keras.ops.convert_to_tensor(initial, dtype=dtype)

    variable = keras.Variable(
        initializer,
        shape=initial.shape,
        dtype=dtype,
        trainable=False,
        autocast=False,
        # A value per replica of a strategy; in cross-replica context, reads return the first replica's.
        aggregation="only_first_replica",
        synchronization="on_read",
        name=name,
        layout=layout,
    )
    actual = keras.backend.standardize_dtype(variable.value.dtype)
    require_equal("accumulators of {}, for which JAX needs jax_enable_x64", dtype, actual, variable.path)
    return variable
