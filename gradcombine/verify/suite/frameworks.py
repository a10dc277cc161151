"""Rows of the combine and training steps, independent of the framework.

The programs are in `with_jax` and `with_tensorflow`, which run in separate processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.types import AccumulateState, Array, Order, Tree
from gradcombine.verify.suite.classifier import SIZES, Batch, cut, initial_parameters
from gradcombine.verify.suite.outcomes import LIST, REPLICAS, TIME, TIME_AND_REPLICAS
from gradcombine.verify.suite.places import (
    MEAN,
    ORDERS,
    Case,
    Contributions,
    merged,
    over_list,
    over_replicas,
    over_time,
)

WINDOWS, EVERY, LEARNING_RATE = 16, 4, 1.0
"""Training: number of windows, microbatches per window, learning rate."""

Window = tuple[gc.Accumulator, AccumulateState]
Compiled = Callable[[Callable[..., Tree]], Callable[..., Tree]]
Spread = Callable[[Callable[..., Tree], int, tuple[Tree, np.ndarray]], list[Tree]]
"""Runs a function on replicas, each with its block of stacked values and weights; returns each replica's result."""

Measure = Callable[[dict[str, Array], Batch], dict[str, Array]]
"""Computes the mean loss of a batch and its gradient, as one flat dict of the framework's arrays."""

Gradients = dict[str, np.ndarray]
"""A gradient and its loss."""


class Framework(NamedTuple):
    """Programs of a framework.

    Attributes:
      name: name of the framework.
      array: converts a NumPy array.
      compiled: by mode, compiles a function for one replica.
      spread: by mode, runs a function on replicas.
      over: the replicas, inside such a function.
      window: accumulates a full window from stacked values and weights, inside such a function.
      more: additional rows of one replica, by mode and place.
      on_demand: modes of ``spread`` that are run with ``--full`` only.
    """

    name: str
    array: Callable[[Array], Array]
    compiled: Mapping[str, Compiled]
    spread: Mapping[str, Spread]
    over: Collective
    window: Callable[[Tree, Array, Order], Window]
    more: Mapping[tuple[str, str], Callable[[Order, Contributions], list[Tree]]]
    on_demand: frozenset[str] = frozenset()

    def cases(self, counts: Sequence[int], full: bool) -> Iterator[Case]:
        """Rows of the combine, including the modes ``on_demand`` if ``full``."""
        one_replica = {
            (mode, place): partial(run, self, compiled)
            for (mode, compiled), (place, run) in product(self.compiled.items(), _ON_ONE_REPLICA.items())
        }
        for order, ((mode, place), run) in product(ORDERS, (one_replica | dict(self.more)).items()):
            yield Case(self.name, mode, place, 1, order, partial(run, order))
        modes = [(mode, spread) for mode, spread in self.spread.items() if full or mode not in self.on_demand]
        for (mode, spread), order, (place, run), count in product(modes, ORDERS, _ON_REPLICAS.items(), counts):
            yield Case(self.name, mode, place, count, order, partial(run, self, spread, count, order))


def exported(tree: Tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in tree.items()}


def measured(measure: Measure, parameters: Gradients, batches: Sequence[Batch]) -> list[Gradients]:
    return [exported(measure(parameters, batch)) for batch in batches]


def _arrays(framework: Framework, inputs: Contributions) -> tuple[list[Tree], list[Array]]:
    values = [{name: framework.array(leaf) for name, leaf in value.items()} for value in inputs.values]
    return values, [framework.array(np.float32(weight)) for weight in inputs.weights]


_LISTS = {order: partial(over_list, order=order) for order in ORDERS}


def _in_list(framework: Framework, compiled: Compiled, order: Order, inputs: Contributions) -> list[Tree]:
    return [exported(compiled(_LISTS[order])(*_arrays(framework, inputs)))]


def _in_time(framework: Framework, compiled: Compiled, order: Order, inputs: Contributions) -> list[Tree]:
    accumulator, state = over_time(*_arrays(framework, inputs), order, compiled)
    return [exported(accumulator.value(state))]


def _on_replicas(framework: Framework, spread: Spread, count: int, order: Order, inputs: Contributions) -> list[Tree]:
    return spread(partial(over_replicas, over=framework.over, order=order), count, inputs.stacked(count))


def _in_windows(framework: Framework, spread: Spread, count: int, order: Order, inputs: Contributions) -> list[Tree]:
    def run(values: Tree, weights: Array) -> Tree:
        return merged(framework.window(values, weights, order), framework.over, order)

    return spread(run, count, inputs.stacked(count, len(inputs.weights) // count))


def eager(function: Callable[..., Tree]) -> Callable[..., Tree]:
    return function


def unrolled(compiled: Compiled, values: Tree, weights: Array, order: Order) -> Window:
    steps = range(weights.shape[0])
    return over_time(
        [{name: x[i] for name, x in values.items()} for i in steps], [weights[i] for i in steps], order, compiled
    )


def _loop(function: Callable[..., Tree], count: int, stacked: tuple[Tree, np.ndarray]) -> list[Tree]:
    return [function({name: x[rank] for name, x in stacked[0].items()}, stacked[1][rank]) for rank in range(count)]


_ON_ONE_REPLICA = {LIST: _in_list, TIME: _in_time}
_ON_REPLICAS = {REPLICAS: _on_replicas, TIME_AND_REPLICAS: _in_windows}

_NUMPY = Framework("numpy", np.asarray, {"eager": eager}, {}, gc.LOCAL, partial(unrolled, eager), {})
NUMPY = _NUMPY._replace(more={("eager", place): partial(run, _NUMPY, _loop, 1) for place, run in _ON_REPLICAS.items()})
"""The reference, with a single replica."""


def windows(examples: Batch) -> list[list[Batch]]:
    """Microbatches of all windows, which have the same sizes and cover consecutive examples."""
    sizes = SIZES[:EVERY]
    return [list(cut(examples, sizes, window * sum(sizes))) for window in range(WINDOWS)]


def steps(
    framework: Framework, measure: Measure, windows: list[list[Batch]], weighted: bool = True
) -> Iterator[tuple[Gradients, Gradients]]:
    """Runs gradient descent with one step per window; the loss is averaged in the same tree as the gradients.

    Args:
      framework: the framework.
      measure: computes the gradient of a microbatch and its loss.
      windows: the microbatches of each window.
      weighted: whether to weight microbatches by their number of examples; otherwise a mean of means is computed.

    Yields:
      The parameters before a step, and the window's mean loss and gradient.
    """
    array = framework.array
    parameters = {name: array(leaf) for name, leaf in initial_parameters().items()}
    accumulator = gc.accumulate(MEAN, every=EVERY)
    state = accumulator.init(parameters | {"loss": array(np.float32(0))})
    for window in windows:
        for batch in window:
            weight = array(np.float32(len(batch.labels) if weighted else 1))
            state = accumulator.update(measure(parameters, batch), state, weight)
        mean = accumulator.value(state)
        yield exported(parameters), exported(mean)
        parameters = {name: leaf - LEARNING_RATE * mean[name] for name, leaf in parameters.items()}


STEPS_EVERY, ROWS, RATE = 4, 8, 0.1
"""Audited steps: microbatches per window, examples per microbatch, learning rate."""


def in_tensorflow(name: str = "", *arguments: object) -> Any:
    """Calls a function of `with_tensorflow`, which imports TensorFlow; without a name, only imports it."""
    module = import_module("gradcombine.verify.suite.with_tensorflow")
    return getattr(module, name)(*arguments) if name else None
