"""Windows in ``.keras`` files, one a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcombine import binary_counter
from gradcombine.accumulation import cleared, depth_of, replace_window, whole_window
from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras.backend import BackendWindow
from gradcombine.integrations.keras.checks import error
from gradcombine.integrations.keras.window import WindowVariables
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import AccumulateState, BinaryCounter

KIND = "window"
"""The entry that says what the window is of."""


def save(store: Any, others: Sequence[Any], window: BackendWindow, kind: str) -> None:
    """Writes variables by their numbers: of the window along a first axis of replicas."""
    for i, variable in enumerate(others):
        store[str(i)] = variable.numpy()
    for i, variable in enumerate(window.state.variables, len(others)):
        store[str(i)] = np.stack(window.values(variable))
    store[KIND] = np.frombuffer(kind.encode(), np.uint8)


def load(store: Any, others: Sequence[Any], window: BackendWindow, kind: str) -> None:
    """Reads what `save` has written, under any number of replicas, as `replace` does."""
    received = np.asarray(store[KIND]).tobytes().decode()
    arrays = [np.asarray(store[str(i)]) for i in range(len(store.keys()) - 1)]
    replace(arrays[len(others) :], window, received, kind)
    for variable, array in zip(others, arrays, strict=False):
        variable.assign(array)


def begun(arrays: Sequence[np.ndarray]) -> bool:
    """Whether a saved window holds microbatches that have not been applied."""
    *_, step, index, touched = arrays
    return bool(step[0] > 0 and touched[0, -1] != index[0] + 1)


def replace(arrays: Sequence[np.ndarray], window: BackendWindow, received: str, kind: str) -> None:
    """Replaces the windows by saved ones; where those have not been begun, by empty ones if they do not fit.

    Args:
      arrays: the variables of a window, the replicas along a first axis.
      window: to be replaced.
      received: what the arrays are of.
      kind: what the window is of.

    Raises:
      GradCombineError: where a window that has been begun cannot be gone on with. Nothing is changed then.
    """
    *_, step, index, touched = arrays
    marks = np.zeros(window.state.touched.shape, np.int32)
    try:
        states = _states(arrays, window, received, kind)
        marks = touched[0]
    except GradCombineError:
        if begun(arrays):
            raise
        states = [_empty(window.state, int(index[0]) + int(step[0] > 0))] * window.replicas
    window.load(states, marks)


def _states(arrays: Sequence[np.ndarray], window: BackendWindow, received: str, kind: str) -> list[AccumulateState]:
    *held, step, index, touched = arrays
    if received != kind:
        raise error(f"a window of {kind}", received)
    if touched.shape[1:] != tuple(window.state.touched.shape):
        raise error(f"a window of {window.state.touched.shape[0] - 1} variables", touched.shape[1] - 1)
    states = [_state(window.state, [x[rank] for x in (*held, step, index)]) for rank in range(len(step))]
    if begun(arrays) and window.state.rules.is_full(states[0]):
        raise error("a window of fewer microbatches, as every says", f"{int(step[0])} that have not been applied")
    return _divided(window.state.rules.reduction, states, window.replicas)


def _state(window: WindowVariables, arrays: Sequence[np.ndarray]) -> AccumulateState:
    """A state of the depth of a window, of arrays that may be of another depth."""
    *held, step, index = arrays
    saved = AccumulateState(window.levels(held), step, index)
    if (depth := depth_of(saved)) == window.depth:
        return saved
    if isinstance(saved.levels, BinaryCounter) and depth < window.depth and saved.levels.filled < 2**depth:
        return saved._replace(levels=binary_counter.deeper(window.rules.reduction, saved.levels, window.depth))
    empty = _empty(window, 0)._replace(step=step, index=index)
    return replace_window(window.rules.reduction, empty, whole_window(window.rules.reduction, saved))


def _empty(window: WindowVariables, index: int) -> AccumulateState:
    state = window.read(lambda variable: variable.numpy())
    return AccumulateState(cleared(window.rules.reduction, state.levels), np.int32(0), np.int32(index))


def _divided(reduction: Reduction, states: Sequence[AccumulateState], replicas: int) -> list[AccumulateState]:
    """The states that a number of replicas go on with.

    Where there are more than before, the others' windows are empty. Where there are fewer, windows are merged: the sum
    is the same then, but not the order of its additions.
    """
    empty = states[0]._replace(levels=cleared(reduction, states[0].levels))
    kept = list(states[:replicas]) + [empty] * (replicas - len(states))
    for rank, state in enumerate(states[replicas:]):
        into = rank % replicas
        merged = reduction.merge(whole_window(reduction, kept[into]), whole_window(reduction, state))
        kept[into] = replace_window(reduction, kept[into], merged)
    return kept
