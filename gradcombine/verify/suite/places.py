# pyright: standard
"""The places where gradients are combined, the same for all frameworks; what a row runs; and the devices it runs on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.types import AccumulateState, Order, Tree

MEAN = gc.reductions.mean()

ORDERS: tuple[Order, ...] = ("sequential", "tree")

LIST, TIME, REPLICAS, TIME_AND_REPLICAS = "list", "time", "replicas", "time x replicas"


class Contributions(NamedTuple):
    """Numbered gradients, the same for every row.

    Attributes:
      values: flat dicts of float32 arrays.
      weights: the number of examples behind each.
    """

    values: Sequence[Tree]
    weights: Sequence[int]

    def first(self, count: int) -> Contributions:
        return Contributions(self.values[:count], self.weights[:count])

    def stacked(self, *shape: int) -> tuple[Tree, np.ndarray]:
        """Values and weights (float32) with these leading axes in place of the list."""
        names = self.values[0]
        values = {name: np.stack([value[name] for value in self.values]) for name in names}
        dealt = {name: value.reshape(*shape, *value.shape[1:]) for name, value in values.items()}
        return dealt, np.array(self.weights, np.float32).reshape(shape)


class Case(NamedTuple):
    """A row: what combines, where and in which order.

    Attributes:
      place: over replicas alone each replica has one contribution, so there are as many as replicas. In the other
        places there are all; over time and replicas, replica r has the r-th block of them.
      run: from those `contributions` to the result of every replica, as NumPy trees.
    """

    framework: str
    mode: str
    place: str
    replicas: int
    order: Order
    run: Callable[[Contributions], list[Tree]]

    def contributions(self, contributions: Contributions) -> Contributions:
        return contributions.first(self.replicas) if self.place == REPLICAS else contributions


def over_list(values: Sequence[Tree], weights: Sequence[Any], order: Order) -> Tree:
    return gc.combine(MEAN, values, weights, order=order)


def over_time(
    values: Sequence[Tree], weights: Sequence[Any], order: Order, compiled: Callable[..., Any] | None = None
) -> tuple[gc.Accumulator, AccumulateState]:
    """A full window and the accumulator it belongs to; ``compiled`` is applied to the update of one contribution."""
    accumulator = gc.accumulate(MEAN, every=len(values), order=order)
    update = accumulator.update if compiled is None else compiled(accumulator.update)
    state = accumulator.init(values[0])
    for value, weight in zip(values, weights, strict=True):
        state = update(value, state, weight)
    return accumulator, state


def over_replicas(value: Tree, weight: Any, over: Collective, order: Order) -> Tree:
    return gc.all_reduce(MEAN, value, over=over, weight=weight, order=order)


def merged(window: tuple[gc.Accumulator, AccumulateState], over: Collective, order: Order) -> Tree:
    """The value of a window that was merged over the replicas."""
    accumulator, state = window
    return accumulator.value(gc.merge_replicas(MEAN, state, over=over, order=order))


def numpy_cases() -> Iterator[Case]:
    """NumPy: the reference, which has one replica."""
    for order in ORDERS:
        for place, run in _PLACES.items():
            yield Case("numpy", "eager", place, 1, order, partial(_alone, run, order))


def _alone(run: Callable[[Contributions, Order], Tree], order: Order, contributions: Contributions) -> list[Tree]:
    return [run(contributions, order)]


def _over_list(contributions: Contributions, order: Order) -> Tree:
    return over_list(contributions.values, contributions.weights, order)


def _over_time(contributions: Contributions, order: Order) -> Tree:
    accumulator, state = over_time(contributions.values, contributions.weights, order)
    return accumulator.value(state)


def _over_replicas(contributions: Contributions, order: Order) -> Tree:
    return over_replicas(contributions.values[0], contributions.weights[0], gc.LOCAL, order)


def _over_time_and_replicas(contributions: Contributions, order: Order) -> Tree:
    return merged(over_time(contributions.values, contributions.weights, order), gc.LOCAL, order)


_PLACES = {
    LIST: _over_list,
    TIME: _over_time,
    REPLICAS: _over_replicas,
    TIME_AND_REPLICAS: _over_time_and_replicas,
}


DEVICES = 8


def prepare_devices() -> None:
    """Sets what JAX and TensorFlow read as they are imported, then makes TensorFlow's devices.

    Raises:
      RuntimeError: where TensorFlow has run already in this process.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _silent():
        import tensorflow as tf  # after the settings above

    # The bits are compared on CPU, whatever else the machine has.
    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps off the screen what TensorFlow's C++ code writes to stderr before it reads its log level."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
