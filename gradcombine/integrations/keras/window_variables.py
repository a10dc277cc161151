# pyright: standard
"""A window stored in Keras variables, and its form in ``.keras`` files."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from gradcombine.statefile import resize
from gradcombine.types import AccumulateState, Array, BinaryCounter, DType, Leaf, Scalar

_ACCUMULATOR = re.compile(r"\.levels(\[0\]|\.stacked)(?:\.parts\[0\])?\.value\[(\d+)\]")
DESCRIPTION_KEY = "window"
"""Entry of a file that holds the window's description."""


class KerasWindow(ABC):
    """An `AccumulateState` in Keras variables, and the optimizer that is run on full windows.

    Subclasses implement reads, writes and conditionals of a backend.

    Attributes:
      replicas: number of replicas, each with its own window.
      leaves: variables of the state's leaves.
      structure: tree structure of the state.
      touched: int32 variable: per trainable variable, 1 + the index of the last window with a gradient for it; as last
        element, 1 + the index of the last window that was applied.

    Args:
      optimizer, variables: the inner optimizer, built, and its trainable variables.
      description: reduction, precision and wire, which a saved window has to match.
    """

    replicas = 1

    def __init__(self, rules: Window, parts: Parts, optimizer: Any, variables: Sequence[Any], description: str) -> None:
        self.rules, self.parts, self.description = rules, parts, description
        self._optimizer, self._targets = optimizer, list(variables)
        initial, self.structure = tree.flatten(self.empty())
        self.touched = make_variable(np.zeros(len(variables) + 1, np.int32), "touched")
        names = [_name_and_layout(path, parts, variables) for path in self.structure.paths()]
        self.leaves = [make_variable(x, *name) for x, name in zip(initial, names, strict=True)]

    @abstractmethod
    def contribute(self, gradients: list[Leaf], weight: Scalar) -> None:
        """Adds one microbatch of this replica; the last one of a window runs the optimizer."""

    @abstractmethod
    def flush(self) -> Array:
        """Applies and ends a partial window; returns whether there was one."""

    @staticmethod
    @abstractmethod
    def is_tracing() -> bool:
        """Whether a compiled function is being traced."""

    @abstractmethod
    def record_size(self, size: Scalar, is_first: bool) -> Iterable[int]:
        """Records the number of examples of an unweighted microbatch; returns those of this ``fit``, as far as known.

        ``is_first``: whether no step of this ``fit`` has ended.
        """

    @abstractmethod
    def take_sizes(self) -> Iterable[int]:
        """Returns the recorded sizes, or their minimum and maximum, and resets the record."""

    @abstractmethod
    def components(self, variable: Any) -> list[Any]:
        """Variable of each replica."""

    def after(self, gradients: Sequence[Leaf]) -> AbstractContextManager[Any]:
        """Context whose operations wait for the gradients, so that a step that fails before changes no state."""
        return nullcontext()

    def untraced(self) -> AbstractContextManager[None]:
        """Context whose assignments are made once, also if a step is being traced that has built the optimizer."""
        return nullcontext()

    def layout(self) -> Any:
        """Trackable object that tf.train.Checkpoint compares on restore, or None."""
        return None

    def finalize(self, variables: Sequence[Any]) -> None:
        """Finalizes the variables as the inner optimizer does, at the end of ``fit``."""
        self._optimizer.finalize_variable_values(variables)

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables of the window."""
        return [*self.leaves, self.touched]

    def empty(self) -> AccumulateState:
        """An empty window of NumPy arrays."""
        like = [np.broadcast_to(np.zeros((), dtypes.parse(_dtype(v))), tuple(v.shape)) for v in self._targets]
        return self.rules.init(self.parts.split(like))

    def values(self, variable: Any) -> list[np.ndarray]:
        """Value of a variable of the window on each replica."""
        return [component.numpy() for component in self.components(variable)]

    def load(self, states: Sequence[AccumulateState], touched: Array) -> None:
        """Replaces the state of each replica."""
        rows = [[*tree.flatten_as(self.structure, state), touched] for state in states]
        for variable, *values in zip(self.variables, *rows, strict=True):
            for component, value in zip(self.components(variable), values, strict=True):
                component.assign(value)

    def resumed(self, state: AccumulateState, touched: Array) -> AccumulateState:
        """Marks a stored window as over if it was applied.

        This is recorded in `touched`, as ``step`` of an applied window is its number of microbatches in files.
        """
        return self.rules.end(state, touched[-1] == state.index + 1)

    def touched_in(self, index: Array) -> Array:
        """Boolean vector: the variables that have had a gradient in the window of this index, in any trace."""
        touched: Any = self.touched.value
        return touched[:-1] == index + 1

    def marked(self, present: Collection[int], applied: Scalar, index: Scalar) -> Array:
        """Returns `touched` after a microbatch with gradients for the ``present`` variables, or after a flush."""
        changed = keras.ops.append(np.array([i in present for i in range(len(self._targets))]), applied)
        return keras.ops.where(changed, index + 1, keras.ops.convert_to_tensor(self.touched.value))


def save(store: Any, others: Sequence[Any], window: KerasWindow) -> None:
    """Saves variables under their numbers, those of the window stacked over the replicas."""
    for i, variable in enumerate(others):
        store[str(i)] = variable.numpy()
    for i, variable in enumerate(window.variables, len(others)):
        store[str(i)] = np.stack(window.values(variable))
    store[DESCRIPTION_KEY] = np.frombuffer(window.description.encode(), np.uint8)


def load(store: Any, others: Sequence[Any], window: KerasWindow) -> None:
    """Loads the result of `save`, for any number of replicas; see `replace`."""
    # A store may be of any class, and its contents damaged.
    with translate_errors("a window, as it was saved", Exception):
        description = np.asarray(store[DESCRIPTION_KEY]).tobytes().decode()
        arrays = [as_array(store[str(i)]) for i in range(len(names_in(store)) - 1)]
    replace(window, arrays[len(others) :], description, others, arrays[: len(others)])


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


def replace(
    window: KerasWindow,
    saved: Sequence[np.ndarray],
    description: str,
    others: Sequence[Any],
    values: Sequence[np.ndarray],
) -> None:
    """Replaces the windows of all replicas by a saved one, and assigns ``values`` to other variables.

    A saved window without pending microbatches that does not fit is replaced by an empty one.

    Args:
      saved, description: variables of the saved window, stacked over the replicas, and its description.
      others: variables outside of the window.
      values: their new values.

    Raises:
      GradCombineError: for a partial window that cannot be continued. Nothing is changed then.
    """
    require_equal("{} arrays", len(others), len(values))
    values = [_cast(x, array, casting="same_kind") for x, array in zip(others, values, strict=True)]
    _require_stacked(saved)
    *_, step, index, touched = saved
    try:
        states, marks = _states(window, saved, description), touched.max(0)
    except GradCombineError:
        if is_pending(window, saved):
            raise
        empty = window.empty()._replace(index=np.int32(index[0] + (step[0] > 0)))
        states, marks = [empty] * window.replicas, np.zeros(window.touched.shape, np.int32)
    window.load(states, marks)
    for variable, value in zip(others, values, strict=True):
        variable.assign(value)


def is_pending(window: KerasWindow, saved: Sequence[np.ndarray]) -> bool:
    """Whether a saved window holds microbatches that have not been applied."""
    *_, step, index, touched = saved
    return bool(window.rules.is_partial(window.resumed(AccumulateState((), step[0], index[0]), touched[0])))


def _require_stacked(arrays: Sequence[np.ndarray]) -> None:
    axes = [x.ndim for x in arrays[-3:] if x.dtype.kind in "iu"]
    if axes != [1, 1, 2] or len({x.shape[:1] for x in arrays}) > 1 or not arrays[-1].size:
        expected = "arrays with a leading axis of replicas, of which the last three are the integers"
        received = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        raise invalid(f"{expected} step, index, touched", received)
    if lowest := min(0, *(int(x.min(initial=0)) for x in arrays[-3:])):
        raise invalid("step, index and touched that are not negative", lowest)


def _states(window: KerasWindow, saved: Sequence[np.ndarray], description: str) -> list[AccumulateState]:
    """Redistributes the saved windows over the replicas.

    Additional replicas get empty windows. With fewer replicas, windows are merged, which changes the order of
    additions.
    """
    require_equal("a window of {}", window.description, description)
    require_equal("a window of {} variables", window.touched.shape[0] - 1, saved[-1].shape[1] - 1)
    states = [_state(window, arrays) for arrays in zip(*saved[:-1], strict=True)]
    first, reduction = states[0], window.rules.reduction
    if is_pending(window, saved) and window.rules.is_full(first):
        raise invalid("a window of fewer microbatches than every", f"{int(first.step)} that have not been applied")
    if window.replicas < len(states):
        merged = resize(reduction, [whole_window(reduction, state) for state in states], window.replicas)
        return [replace_window(reduction, first, part) for part in merged]
    empty = first._replace(levels=cleared(reduction, first.levels))
    return [*states, *[empty] * (window.replicas - len(states))]


def _state(window: KerasWindow, arrays: Sequence[np.ndarray]) -> AccumulateState:
    """Builds one replica's state from saved arrays, whose number of levels may differ.

    Raises:
      GradCombineError: for another number of arrays, other shapes, and dtypes that a cast would round.
    """
    *leaves, step, index = arrays
    part = window.structure.children[0].children[0]
    variables = window.leaves[: len([*part.paths()])]
    is_counter = len(leaves) == len(variables) + 1
    require_equal("{} arrays, or a counter of them", len(variables) + is_counter, len(leaves))
    skipped = int(window.structure.children[0].kind is BinaryCounter)
    level = tree.unflatten(
        part, [_cast(x, array, int(is_counter), skipped) for x, array in zip(variables, leaves, strict=False)]
    )
    saved = AccumulateState(BinaryCounter(level, np.int32(leaves[-1])) if is_counter else (level,), step, index)
    empty, reduction = window.empty()._replace(step=step, index=index), window.rules.reduction
    depth, wanted = depth_of(saved), depth_of(empty)
    if depth == wanted:
        return saved
    if isinstance(saved.levels, BinaryCounter) and depth < wanted and saved.levels.filled < 2**depth:
        return saved._replace(levels=binary_counter.deeper(reduction, saved.levels, wanted))
    return replace_window(reduction, empty, whole_window(reduction, saved))


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
