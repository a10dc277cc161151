"""Windows in ``.keras`` files, one a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcombine.accumulate import replace_window
from gradcombine.accumulate import window as whole
from gradcombine.integrations.keras.backend import BackendWindow
from gradcombine.types import AccumulateState, Reduction


def save(store: Any, others: Sequence[Any], window: BackendWindow) -> None:
    """Writes variables by their numbers: of the window along a first axis of replicas, if there are several."""
    for i, variable in enumerate([*others, *window.state.variables]):
        values = window.values(variable) if i >= len(others) else [variable.numpy()]
        store[str(i)] = np.stack(values) if len(values) > 1 else values[0]


def load(store: Any, others: Sequence[Any], window: BackendWindow) -> None:
    """Reads what `save` has written, under any number of replicas."""
    for i, variable in enumerate(others):
        variable.assign(np.asarray(store[str(i)]))
    rows = []
    for i, variable in enumerate(window.state.variables, len(others)):
        array = np.asarray(store[str(i)])
        rows.append(list(array) if array.ndim > variable.ndim else [array])
    numbers = {id(variable): i for i, variable in enumerate(window.state.held)}
    states = [window.state.read(lambda x, rank=rank: rows[numbers[id(x)]][rank]) for rank in range(len(rows[0]))]
    window.load(_divided(window.state.reduction, states, window.replicas), rows[-1][0])


def _divided(reduction: Reduction, states: Sequence[AccumulateState], replicas: int) -> list[AccumulateState]:
    """The states that a number of replicas go on with.

    Where there are more than before, the others' windows are empty. Where there are fewer, windows are merged: the sum
    is the same then, but not the order of its additions.
    """
    empty = states[0]._replace(levels=tuple(map(reduction.clear, states[0].levels)))
    kept = list(states[:replicas]) + [empty] * (replicas - len(states))
    for rank, state in enumerate(states[replicas:]):
        into = rank % replicas
        merged = reduction.merge(whole(reduction, kept[into]), whole(reduction, state))
        kept[into] = replace_window(reduction, kept[into], merged)
    return kept
