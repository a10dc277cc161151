# pyright: standard
"""Rows of the combine: what they compute, the expected outcome (`promised`), and how they are checked (`Judge`).

`flip_lowest_bit` injects a fault that must be detected. `prepare_devices` and `prepare_tensorflow` set up the devices.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.types import AccumulateState, Order, Scalar, Tree
from gradcombine.verify.compare.ulp import equal_bits, ulp_distance
from gradcombine.verify.suite import classifier as problem
from gradcombine.verify.suite.outcomes import BITS, BOUND, LIST, REPLICAS, TIME_AND_REPLICAS, Finding

MEAN = gc.reductions.mean()

ORDERS: tuple[Order, ...] = ("sequential", "tree")


class Contributions(NamedTuple):
    """Gradients of microbatches, the input of every row.

    Attributes:
      values: flat dicts of float32 arrays.
      weights: number of examples of each microbatch.
    """

    values: Sequence[Tree]
    weights: Sequence[int]

    def stacked(self, *shape: int) -> tuple[Tree, np.ndarray]:
        """Stacks the values and the weights (float32) along leading axes of this shape."""
        stacked = {name: np.stack([value[name] for value in self.values]) for name in self.values[0]}
        reshaped = {name: value.reshape(*shape, *value.shape[1:]) for name, value in stacked.items()}
        return reshaped, np.array(self.weights, np.float32).reshape(shape)


class Case(NamedTuple):
    """A row of the combine.

    Attributes:
      framework, mode: how the program is run.
      place: what is combined: over replicas, each replica has one contribution, so there are as many as replicas; in
        all other places, all contributions; over time and replicas, replica r has the r-th block of them.
      replicas: number of replicas.
      order: order of addition.
      run: computes the result of every replica, as NumPy trees, from `contributions`.
    """

    framework: str
    mode: str
    place: str
    replicas: int
    order: Order
    run: Callable[[Contributions], list[Tree]]

    def contributions(self, contributions: Contributions) -> Contributions:
        count = self.replicas if self.place == REPLICAS else None
        return Contributions(contributions.values[:count], contributions.weights[:count])


def over_list(values: Sequence[Tree], weights: Sequence[Scalar], order: Order) -> Tree:
    return gc.combine(MEAN, values, weights, order=order)


def over_time(
    values: Sequence[Tree], weights: Sequence[Scalar], order: Order, compiled: Callable[..., Any]
) -> tuple[gc.Accumulator, AccumulateState]:
    """Accumulates a full window, with the update compiled by ``compiled``; returns the accumulator and its state."""
    accumulator = gc.accumulate(MEAN, every=len(values), order=order)
    update, state = compiled(accumulator.update), accumulator.init(values[0])
    for value, weight in zip(values, weights, strict=True):
        state = update(value, state, weight)
    return accumulator, state


def over_replicas(value: Tree, weight: Scalar, over: Collective, order: Order) -> Tree:
    return gc.all_reduce(MEAN, value, over=over, weight=weight, order=order)


def merged(window: tuple[gc.Accumulator, AccumulateState], over: Collective, order: Order) -> Tree:
    """Merges a window over the replicas, and returns its value."""
    accumulator, state = window
    return accumulator.value(gc.merge_replicas(MEAN, state, over=over, order=order))


def promised(case: Case) -> str:
    """Promise of a row: `BITS` or `BOUND`.

    The canonical tree gives the same bits in every mode and place, for every number of replicas; so does the sequential
    order without replicas. Over replicas, the sequential order is that of the framework's all-reduce, which does not
    promise bits. The list in NumPy is the reference, and is compared with the exact value only.
    """
    if case.framework == "numpy":
        return BOUND if case.place == LIST else BITS
    return BOUND if case.order == "sequential" and case.place in (REPLICAS, TIME_AND_REPLICAS) else BITS


class Expected(NamedTuple):
    """Expected result for a number of contributions and an order.

    Attributes:
      reference: result of NumPy's list.
      exact: per leaf, the exact weighted mean and the rounding bound, as object arrays of Fractions.
      shares: cache of `share`, by the bytes of a result.
    """

    reference: Tree
    exact: dict[str, tuple[np.ndarray, np.ndarray]]
    shares: dict[bytes, float]

    def share(self, result: Tree) -> float:
        """Largest distance from the exact mean, divided by its bound."""
        key = b"".join(result[name].tobytes() for name in self.exact)
        if key not in self.shares:
            self.shares[key] = max(
                problem.share(_distance(result[name], x), bound) for name, (x, bound) in self.exact.items()
            )
        return self.shares[key]


class Judge:
    """Compares rows with NumPy's list of the same contributions in the same order, and with the exact mean.

    Args:
      contributions: all contributions, uncorrupted.
    """

    def __init__(self, contributions: Contributions) -> None:
        self._contributions = contributions
        self._cache: dict[tuple[int, str], Expected] = {}

    def finding(self, case: Case, results: list[Tree]) -> Finding:
        """Judges a row by the worst of its replicas' results."""
        expected = self._expected(case)
        pairs = [(result[name], leaf) for result in results for name, leaf in expected.reference.items()]
        equal = all(equal_bits(a, b) for a, b in pairs)
        share, promise = max(map(expected.share, results)), promised(case)
        labels = {label: value for label, value in case._asdict().items() if label != "run"}
        holds = share <= 1 and (equal or promise == BOUND)
        return Finding("combine", labels, promise, holds, *distances(pairs), share, equal)

    def _expected(self, case: Case) -> Expected:
        values, weights = case.contributions(self._contributions)
        count = len(weights)
        if (count, case.order) not in self._cache:
            additions = count - 1 if case.order == "sequential" else (count - 1).bit_length()
            columns = {name: [value[name] for value in values] for name in values[0]}
            exact = {
                name: (problem.weighted_mean(x, weights), problem.rounding_bound(x, weights, additions))
                for name, x in columns.items()
            }
            self._cache[count, case.order] = Expected(over_list(values, weights, case.order), exact, {})
        return self._cache[count, case.order]


def combine(
    cases: Sequence[Case],
    contributions: Contributions,
    progress: Callable[[str], None] = lambda name: None,
    corrupted: Case | None = None,
) -> list[Finding]:
    """Runs and judges rows; the row ``corrupted`` gets contributions with one flipped bit."""
    judge = Judge(contributions)
    findings: list[Finding] = []
    for case in cases:
        progress(f"{case.framework}, {case.mode}, {case.place}")
        inputs = case.contributions(contributions)
        if case is corrupted:
            inputs = flip_lowest_bit(case, inputs)
        findings.append(judge.finding(case, case.run(inputs)))
    return findings


def _distance(result: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Distance from the exact mean, as Fractions; infinite if the result is not finite."""
    if not np.isfinite(result).all():
        return np.full(np.shape(mean), np.inf)
    return np.abs(problem.fractions(result) - mean)


def distances(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[int, float]:
    """Largest distance of leaves from their references, in ulp and relative to the leaf's largest magnitude."""
    with np.errstate(all="ignore"):
        relative = [float(np.abs(np.float64(a) - b).max() / (np.abs(b).max() or 1)) for a, b in pairs]
    return max(int(ulp_distance(a, b).max()) for a, b in pairs), max(relative)


def flip_lowest_bit(case: Case, contributions: Contributions) -> Contributions:
    """Flips the lowest mantissa bit of one element of the first contribution.

    The element is one for which the flipped bit changes the result, and is not lost by rounding.
    """
    (first, *others), weights = contributions
    flipped = {name: (leaf.view(np.uint32) ^ np.uint32(1)).view(np.float32) for name, leaf in first.items()}
    before = over_list(*contributions, case.order)
    after = over_list([flipped, *others], weights, case.order)
    name, indices = next(
        (name, np.argwhere(before[name] != after[name])) for name in first if (before[name] != after[name]).any()
    )
    corrupted = first[name].copy()
    corrupted[tuple(indices[0])] = flipped[name][tuple(indices[0])]
    return Contributions([first | {name: corrupted}, *others], weights)


DEVICES = 8


def prepare_devices() -> None:
    """Sets environment variables that JAX and TensorFlow read on import."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def prepare_tensorflow() -> None:
    """Calls `prepare_devices`, imports TensorFlow and configures its logical CPUs.

    Raises:
      RuntimeError: if TensorFlow is already initialized in this process.
    """
    prepare_devices()
    # TensorFlow would import JAX, for its converter to TensorFlow Lite.
    sys.modules.setdefault("jax", None)  # pyright: ignore[reportArgumentType]
    with _silent():
        import tensorflow as tf  # after the settings above

    # Bits are compared on the CPU only.
    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


@contextmanager
def _silent() -> Iterator[None]:
    """Discards the messages that TensorFlow's C++ code writes to stderr before it reads its log level."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
