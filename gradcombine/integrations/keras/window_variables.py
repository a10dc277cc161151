# pyright: standard
"""A window in Keras variables, and in ``.keras`` files."""

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

_OPERATION = "Accumulate"
_ACCUMULATOR = re.compile(r"\.levels(\[0\]|\.stacked)(?:\.parts\[0\])?\.value\[(\d+)\]")
KIND = "window"
"""The entry that says what the window is of."""


class KerasWindow(ABC):
    """The variables of an `AccumulateState`, what became of its windows, and the optimizer that they are for.

    Subclasses know how their backend reads, writes and branches.

    Whether a window was applied is stored, not inferred from the number of its microbatches: a checkpoint may hold a
    window of another length, none of which may be lost or applied twice.

    Attributes:
      replicas: how many windows there are.
      leaves: variables.
      structure: of the state.
      rules: of the window.
      parts: the gradients' tree.
      touched: for each trainable variable, 1 + the number of the last window that has a gradient for it; at the end,
        1 + the number of the last window that was full, and applied.

    Args:
      rules: of the window.
      parts: the gradients' tree.
      optimizer: run at the boundary; built.
      variables: what it trains.
    """

    replicas = 1

    def __init__(self, rules: Window, parts: Parts, optimizer: Any, variables: Sequence[Any]) -> None:
        like = [np.broadcast_to(np.zeros((), dtypes.parse(_dtype(v))), tuple(v.shape)) for v in variables]
        empty, self.structure = tree.flatten(rules.init(parts.split(like)))
        self.rules, self.parts = rules, parts
        self._optimizer, self._targets = optimizer, list(variables)
        self._seen: set[int] = set()
        paths = self.structure.paths()
        self.touched = make_variable(np.zeros(len(variables) + 1, np.int32), "touched")
        self.leaves = [make_variable(x, *_place(path, parts, variables)) for x, path in zip(empty, paths, strict=True)]

    @abstractmethod
    def contribute(self, gradients: list[Leaf], weight: Scalar) -> None:
        """One more microbatch of this replica; where it fills the window, the optimizer runs."""

    @abstractmethod
    def flush(self) -> Array:
        """Runs the optimizer on a partial window, and ends it; returns whether there was one."""

    @abstractmethod
    def see(self, size: Scalar, is_first: bool) -> Iterable[int]:
        """Takes note of the size of a microbatch without a weight; returns those of this ``fit``, if known already.

        Args:
          size: the number of its examples.
          is_first: whether no step of this ``fit`` has ended.
        """

    @abstractmethod
    def seen(self) -> Iterable[int]:
        """The least and the greatest size that `see` has taken note of; it begins anew."""

    @abstractmethod
    def load(self, states: list[AccumulateState], touched: Array) -> None:
        """Replaces the state of each replica."""

    @abstractmethod
    def values(self, variable: Any) -> list[Array]:
        """The value of a variable of the window on each replica."""

    def checkpointed(self, kind: str) -> Any:
        """An object that tf.train.Checkpoint saves beside the variables of a window of this kind; None: nothing."""
        return None

    def holds(self, variables: Sequence[Any]) -> bool:
        """Whether variables have values."""
        return True

    def unshare(self, variables: Sequence[Any]) -> None:
        """Gives variables buffers of their own, where they may share them."""
        return

    @property
    def variables(self) -> list[keras.Variable]:
        """All of them."""
        return [*self.leaves, self.touched]

    def read(self, value: Callable[[keras.Variable], Any]) -> AccumulateState:
        """The state, with ``value(variable)`` for each variable."""
        return tree.unflatten(self.structure, map(value, self.leaves))

    @property
    def depth(self) -> int:
        """How many levels the state has."""
        return self.leaves[0].shape[0] if self._is_counter else 1

    @property
    def _is_counter(self) -> bool:
        return self.structure.children[0].kind is BinaryCounter

    def levels(self, arrays: Sequence[np.ndarray]) -> tuple[State] | BinaryCounter:
        """Levels like those of the state, of which there may be more or fewer, with these arrays.

        Raises:
          GradCombineError: for arrays of other shapes or another number, and of dtypes that a cast loses digits of.
        """
        leaves = self.leaves[: -3 if self._is_counter else -2]
        counted = len(arrays) == len(leaves) + 1
        require_equal("{} arrays, or a counter of them", len(leaves) + counted, len(arrays))
        skipped = 1 if self._is_counter else 0
        filling = [_cast(x, array, int(counted), skipped) for x, array in zip(leaves, arrays, strict=False)]
        part = tree.unflatten(self.structure.children[0].children[0], filling)
        return BinaryCounter(part, np.asarray(arrays[-1], np.int32)) if counted else (part,)

    def arrays(self, state: AccumulateState) -> list[Array]:
        """The arrays of a state, one for each variable of its leaves."""
        return tree.flatten_as(self.structure, state)

    def ended(self, state: AccumulateState) -> AccumulateState:
        """The state, its window over where it was applied."""
        return self.rules.end(state, self.touched.value[-1] == state.index + 1)

    def resumed(self, state: AccumulateState) -> AccumulateState:
        """The state to continue with.

        A window of a checkpoint that is full, and has not been applied, gets as many contributions more.
        """
        step = keras.ops.where(self.rules.is_full(state), np.int32(0), state.step)
        return self.ended(state._replace(step=step))

    def marked(self, present: Sequence[bool], full: Scalar, index: Scalar) -> Array:
        """`touched` after gradients for these variables, which may have made a window full that is applied then."""
        chosen = keras.ops.append(np.array(present, np.bool_), full)
        return keras.ops.where(chosen, index + 1, keras.ops.convert_to_tensor(self.touched.value))

    def write(self, state: AccumulateState) -> None:
        """Assigns a state to the variables."""
        for x, array in zip(self.leaves, self.arrays(state), strict=True):
            x.assign(array)


def save(store: Any, others: Sequence[Any], window: KerasWindow, kind: str) -> None:
    """Writes variables by their numbers: of the window along a first axis of replicas."""
    for i, variable in enumerate(others):
        store[str(i)] = variable.numpy()
    for i, variable in enumerate(window.variables, len(others)):
        store[str(i)] = np.stack(window.values(variable))
    store[KIND] = np.frombuffer(kind.encode(), np.uint8)


def load(store: Any, others: Sequence[Any], window: KerasWindow, kind: str) -> None:
    """Reads what `save` has written, under any number of replicas, as `replace` does."""
    with translate_errors(
        "a window, as it was saved", Exception
    ):  # a store may be of any class, and what it holds damaged
        received = np.asarray(store[KIND]).tobytes().decode()
        arrays = [as_array(store[str(i)]) for i in range(len(names_in(store)) - 1)]
    mine, held = arrays[: len(others)], arrays[len(others) :]
    values = values_of(others, mine)
    require_window(held)
    replace(held, window, received, kind)
    for variable, value in zip(others, values, strict=True):
        variable.assign(value)


def names_in(store: Any) -> list[str]:
    """The names of the arrays in a store, which need not be a dict."""
    with translate_errors("a store of arrays by name", AttributeError, TypeError, received=lambda: shown(store)):
        return list(store.keys())


def as_array(value: Leaf) -> np.ndarray:
    """Converts a value for a variable to a NumPy array."""
    with translate_errors(
        "arrays of numbers", Exception, received=lambda: in_words(value)
    ):  # the backends have several classes
        array = np.asarray(keras.ops.convert_to_numpy(value))
    if array.dtype.kind in "OSUMm":
        raise invalid("arrays of numbers", in_words(value))
    return array


def values_of(variables: Sequence[Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays in the variables' dtypes; refuses what is no value of one, so that all are assigned or none."""
    require_equal("{} arrays", len(variables), len(arrays))
    return [_cast(x, array, casting="same_kind") for x, array in zip(variables, arrays, strict=True)]


def require_window(arrays: Sequence[np.ndarray]) -> None:
    """Refuses what is not the arrays of a saved window: the replicas along a first axis, its position at the end."""
    axes = [x.ndim for x in arrays[-3:] if x.dtype.kind in "iu"]
    other = axes != [1, 1, 2] or len({x.shape[:1] for x in arrays}) > 1 or not arrays[-1].size
    expected = "arrays that begin with an axis of replicas, the last three its integers step, index and touched"
    if other:
        raise invalid(expected, ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays))


def begun(arrays: Sequence[np.ndarray]) -> bool:
    """Whether a saved window holds microbatches that have not been applied."""
    *_, step, index, touched = arrays
    return bool(step[0] > 0 and touched[0, -1] != index[0] + 1)


def replace(arrays: Sequence[np.ndarray], window: KerasWindow, received: str, kind: str) -> None:
    """Replaces the windows by saved ones; where those have not been begun, by empty ones if they do not fit.

    Args:
      arrays: the variables of a window, the replicas along a first axis.
      window: to be replaced.
      received: what the arrays are of.
      kind: what the window is of.

    Raises:
      GradCombineError: for a window that has been begun and cannot be continued. Nothing is changed then.
    """
    *_, step, index, touched = arrays
    marks = np.zeros(window.touched.shape, np.int32)
    try:
        states = _states(arrays, window, received, kind)
        marks = touched.max(0)
    except GradCombineError:
        if begun(arrays):
            raise
        states = [_empty(window, int(index[0]) + int(step[0] > 0))] * window.replicas
    window.load(states, marks)


def _states(arrays: Sequence[np.ndarray], window: KerasWindow, received: str, kind: str) -> list[AccumulateState]:
    *held, step, index, touched = arrays
    require_equal("a window of {}", kind, received)
    require_equal("a window of {} variables", window.touched.shape[0] - 1, touched.shape[1] - 1)
    states = [_state(window, [x[rank] for x in (*held, step, index)]) for rank in range(len(step))]
    full = begun(arrays) and window.rules.is_full(states[0])
    pending = f"{int(step[0])} that have not been applied"
    if full:
        raise invalid("a window of fewer microbatches, as every says", pending)
    return _divided(window.rules.reduction, states, window.replicas)


def _state(window: KerasWindow, arrays: Sequence[np.ndarray]) -> AccumulateState:
    """A state of the depth of a window, of arrays that may be of another depth."""
    *held, step, index = arrays
    saved = AccumulateState(window.levels(held), step, index)
    if (depth := depth_of(saved)) == window.depth:
        return saved
    if isinstance(saved.levels, BinaryCounter) and depth < window.depth and saved.levels.filled < 2**depth:
        return saved._replace(levels=binary_counter.deeper(window.rules.reduction, saved.levels, window.depth))
    empty = _empty(window, 0)._replace(step=step, index=index)
    return replace_window(window.rules.reduction, empty, whole_window(window.rules.reduction, saved))


def _empty(window: KerasWindow, index: int) -> AccumulateState:
    state = window.read(lambda variable: variable.numpy())
    return AccumulateState(cleared(window.rules.reduction, state.levels), np.int32(0), np.int32(index))


def _divided(reduction: Reduction, states: Sequence[AccumulateState], replicas: int) -> list[AccumulateState]:
    """The states that a number of replicas continue with.

    Where there are more than before, the others' windows are empty. Where there are fewer, windows are merged: the sum
    is the same then, but not the order of its additions.
    """
    if replicas >= len(states):
        empty = states[0]._replace(levels=cleared(reduction, states[0].levels))
        return [*states, *[empty] * (replicas - len(states))]
    merged = resize(reduction, [whole_window(reduction, state) for state in states], replicas)
    return [replace_window(reduction, states[0], window) for window in merged]


def _cast(variable: Any, array: np.ndarray, levels: int = 0, skipped: int = 0, casting: Any = "safe") -> np.ndarray:
    """The array in the variable's dtype; its first ``levels`` axes, and ``skipped`` of the variable's, are any."""
    dtype, shape = np.dtype(dtypes.parse(_dtype(variable))), tuple(variable.shape)[skipped:]
    received = array.shape[levels:]
    if array.ndim < levels or received != shape or not np.can_cast(array.dtype, dtype, casting):
        raise invalid(f"{dtype} of shape {shape}", f"{array.dtype} of shape {received}", variable.path)
    return array.astype(dtype)


def _dtype(variable: Any) -> str:
    # A Keras variable's own dtype, whatever an autocast scope says.
    return keras.backend.standardize_dtype(getattr(variable, "_dtype", variable.dtype))


def _place(path: str, parts: Parts, variables: Sequence[Any]) -> tuple[str, Any]:
    """The name of a variable of the state, and the layout, which an accumulator has from its trainable variable."""
    match = _ACCUMULATOR.match(path)
    if match is None:
        return re.sub(r"\W+", "_", path).strip("_"), None
    of = variables[parts.averaged(int(match[2]))]
    name = re.sub(r"\W+", "_", f"{getattr(of, 'path', of.name)}_window_{match[1]}{path[match.end() :]}")
    # Levels have an axis more than their variable.
    return name, None if match[1] == ".stacked" else getattr(of, "_layout", None)


def make_variable(first: Leaf, name: str, layout: Any = None) -> keras.Variable:
    """Makes a variable that each replica has a value of its own of."""
    dtype = str(first.dtype)
    with translate_errors("a dtype that Keras has variables of", received=dtype):
        keras.backend.standardize_dtype(dtype)

    def initializer(shape: Any, dtype: DType) -> Array:
        return keras.ops.convert_to_tensor(first, dtype=dtype)

    made = keras.Variable(
        initializer,
        shape=first.shape,
        dtype=dtype,
        trainable=False,
        autocast=False,
        # Under a strategy each replica has its own window; read from outside, the variable has the first one's value.
        aggregation="only_first_replica",
        synchronization="on_read",
        name=name,
        layout=layout,
    )
    held = keras.backend.standardize_dtype(made.value.dtype)
    require_equal("accumulators of {}, which JAX has with jax_enable_x64", dtype, held, made.path)
    return made
