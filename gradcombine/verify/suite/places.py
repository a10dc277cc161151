# pyright: standard
"""The places where gradients are combined, the promise of a row of each, a judge of it, and the devices it runs on.

The combine promises bits or a rounding bound: `promised`. A fault that breaks the promise: `flip_lowest_bit`.
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
    """Numbered gradients, the same for every row.

    Attributes:
      values: flat dicts of float32 arrays.
      weights: the number of examples behind each.
    """

    values: Sequence[Tree]
    weights: Sequence[int]

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
        count = self.replicas if self.place == REPLICAS else None
        return Contributions(contributions.values[:count], contributions.weights[:count])


def over_list(values: Sequence[Tree], weights: Sequence[Scalar], order: Order) -> Tree:
    return gc.combine(MEAN, values, weights, order=order)


def over_time(
    values: Sequence[Tree], weights: Sequence[Scalar], order: Order, compiled: Callable[..., Any]
) -> tuple[gc.Accumulator, AccumulateState]:
    """A full window and the accumulator it belongs to; ``compiled`` is applied to the update of one contribution."""
    accumulator = gc.accumulate(MEAN, every=len(values), order=order)
    update, state = compiled(accumulator.update), accumulator.init(values[0])
    for value, weight in zip(values, weights, strict=True):
        state = update(value, state, weight)
    return accumulator, state


def over_replicas(value: Tree, weight: Scalar, over: Collective, order: Order) -> Tree:
    return gc.all_reduce(MEAN, value, over=over, weight=weight, order=order)


def merged(window: tuple[gc.Accumulator, AccumulateState], over: Collective, order: Order) -> Tree:
    """The value of a window that was merged over the replicas."""
    accumulator, state = window
    return accumulator.value(gc.merge_replicas(MEAN, state, over=over, order=order))


def promised(case: Case) -> str:
    """`BITS` or `BOUND`.

    The canonical tree gives the same bits in every mode, in every place and for every number of replicas; so does the
    sequential order where nothing is exchanged. The sequential order over replicas is the order of the framework's own
    all-reduce, which promises none. The list in NumPy is the reference itself, held against the exact value alone.
    """
    if case.framework == "numpy":
        return BOUND if case.place == LIST else BITS
    return BOUND if case.order == "sequential" and case.place in (REPLICAS, TIME_AND_REPLICAS) else BITS


class Expected(NamedTuple):
    """Expected results of some contributions in some order, leaf by leaf.

    Attributes:
      reference: NumPy's list.
      exact: the exact weighted mean, and how far rounding may lead from it, as object arrays of Fractions.
      shares: how much of its bound each result took up that was measured already, by its bytes.
    """

    reference: Tree
    exact: dict[str, tuple[np.ndarray, np.ndarray]]
    shares: dict[bytes, float]

    def share(self, result: Tree) -> float:
        key = b"".join(result[name].tobytes() for name in self.exact)
        if key not in self.shares:
            self.shares[key] = max(
                problem.share(_off(result[name], x), bound) for name, (x, bound) in self.exact.items()
            )
        return self.shares[key]


class Judge:
    """Measures rows against NumPy's list of the same contributions in the same order, and against the exact mean.

    Args:
      contributions: all of them, uncorrupted.
    """

    def __init__(self, contributions: Contributions) -> None:
        self._contributions = contributions
        self._kept: dict[tuple[int, str], Expected] = {}

    def finding(self, case: Case, results: list[Tree]) -> Finding:
        """Judges the results of a row over all of its replicas: the worst counts."""
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
        if (count, case.order) not in self._kept:
            additions = count - 1 if case.order == "sequential" else (count - 1).bit_length()
            columns = {name: [value[name] for value in values] for name in values[0]}
            exact = {
                name: (problem.weighted_mean(x, weights), problem.rounding_bound(x, weights, additions))
                for name, x in columns.items()
            }
            self._kept[count, case.order] = Expected(over_list(values, weights, case.order), exact, {})
        return self._kept[count, case.order]


def combine(
    cases: Sequence[Case],
    contributions: Contributions,
    started: Callable[[str], None] = lambda name: None,
    corrupted: Case | None = None,
) -> list[Finding]:
    """The findings of some rows; ``corrupted`` gets its contributions with one bit flipped."""
    judge = Judge(contributions)
    findings: list[Finding] = []
    for case in cases:
        started(f"{case.framework}, {case.mode}, {case.place}")
        inputs = case.contributions(contributions)
        if case is corrupted:
            inputs = flip_lowest_bit(case, inputs)
        findings.append(judge.finding(case, case.run(inputs)))
    return findings


def _off(result: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """The distance from the exact mean, as Fractions; infinite where the result is not finite."""
    if not np.isfinite(result).all():
        return np.full(np.shape(mean), np.inf)
    return np.abs(problem.fractions(result) - mean)


def distances(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[int, float]:
    """The largest distance of any leaf from its reference: in ulp, and relative to the leaf's largest magnitude."""
    with np.errstate(all="ignore"):
        relative = [float(np.abs(np.float64(a) - b).max() / (np.abs(b).max() or 1)) for a, b in pairs]
    return max(int(ulp_distance(a, b).max()) for a, b in pairs), max(relative)


def flip_lowest_bit(case: Case, contributions: Contributions) -> Contributions:
    """The contributions of a case with the lowest mantissa bit of one element of the first one flipped.

    The combine rounds, and may round the flipped bit away: the element is one where it does not.
    """
    (first, *others), weights = contributions
    flipped = {name: (leaf.view(np.uint32) ^ np.uint32(1)).view(np.float32) for name, leaf in first.items()}
    before = over_list(*contributions, case.order)
    after = over_list([flipped, *others], weights, case.order)
    name, seen = next(
        (name, np.argwhere(before[name] != after[name])) for name in first if (before[name] != after[name]).any()
    )
    corrupted = first[name].copy()
    corrupted[tuple(seen[0])] = flipped[name][tuple(seen[0])]
    return Contributions([first | {name: corrupted}, *others], weights)


DEVICES = 8


def prepare_devices() -> None:
    """Sets the variables that JAX and TensorFlow read as they are imported."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def prepare_tensorflow() -> None:
    """`prepare_devices`, then makes TensorFlow's.

    Raises:
      RuntimeError: where TensorFlow has run already in this process.
    """
    prepare_devices()
    # TensorFlow would import it, for its converter to TensorFlow Lite.
    sys.modules.setdefault("jax", None)  # pyright: ignore[reportArgumentType]
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
