"""Measures time, memory and order of summing a gradient's terms with each tf.AggregationMethod and with gradcombine.

According to tf.AggregationMethod, its experimental methods may save memory. Here, 32 terms are computed and added in
one graph; the peak is the largest total size of live tensors in TensorFlow's trace, in units of one gradient.
TensorFlow starts computing terms as early as possible, so nearly all of them may exist before the first two are added,
with any method. To save memory, keep one term at a time, as `gradcombine.accumulate` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import gradcombine as gc
from gradcombine import foreign_orders

TERMS, SIZE, ROUNDS = 32, 1 << 17, 9
METHODS = ("ADD_N", "EXPERIMENTAL_TREE", "EXPERIMENTAL_ACCUMULATE_N")


class Case:
    """A graph that adds the terms with one method, and its measurements."""

    def __init__(self, add: Callable[[list[Any], Any], Any]) -> None:
        config = tf.compat.v1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True  # measure the graph as written
        with tf.Graph().as_default() as graph:
            self.x = tf.compat.v1.placeholder(tf.float32, SIZE)
            uses = [tf.sin(self.x * float(i + 1), name=f"use_{i:02}") for i in range(TERMS)]
            self.terms = [tf.gradients(use, self.x)[0] for use in uses]
            self.total = add(uses, self.x)
        self.session = tf.compat.v1.Session(graph=graph, config=config)
        self.seconds: list[float] = []
        self.peaks: list[float] = []

    def run(self, x: np.ndarray) -> np.ndarray:
        return self.session.run(self.total, {self.x: x})

    def measure(self, x: np.ndarray) -> None:
        """Records the time of one run, and the peak memory of another, traced run."""
        start = time.perf_counter()
        self.session.run(self.total.op, {self.x: x})
        self.seconds.append(time.perf_counter() - start)
        metadata = tf.compat.v1.RunMetadata()
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        self.session.run(self.total.op, {self.x: x}, options, metadata)
        self.peaks.append(peak_bytes(metadata) / x.nbytes)


def peak_bytes(metadata: tf.compat.v1.RunMetadata) -> int:
    """The largest number of bytes allocated at any time, from the trace of allocations."""
    nodes = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
    records = [r for node in nodes for memory in node.memory for r in memory.allocation_records]
    live = np.cumsum([r.alloc_bytes for r in sorted(records, key=lambda r: r.alloc_micros)])
    return int(live.max())


def by_method(method: str) -> Callable[[list[Any], Any], Any]:
    """Adds the terms in tf.gradients."""
    value = getattr(tf.AggregationMethod, method)
    return lambda uses, x: tf.gradients(uses, x, aggregation_method=value)[0]


def by_gradcombine(method: str) -> Callable[[list[Any], Any], Any]:
    """Adds the gradients of the terms with gradcombine."""
    return lambda uses, x: gc.add_n([tf.gradients(use, x)[0] for use in uses], method=method)


def order_of(received: np.ndarray, terms: list[np.ndarray]) -> str:
    """The order of additions that reproduces the bits."""
    orders = {
        "left chain": foreign_orders.left_chain(terms),
        "canonical tree": gc.tree_sum(terms),
        "blocks of eight": foreign_orders.addn_blocks(terms),
    }
    return next((name for name, total in orders.items() if (total == received).all()), "unknown")


def main() -> None:
    cases = {f"tf.gradients, {method}": Case(by_method(method)) for method in METHODS}
    cases |= {f"gradcombine.add_n, {method}": Case(by_gradcombine(method)) for method in ("add_n", "tree")}
    x = np.linspace(-1, 1, SIZE, dtype=np.float32)
    first = next(iter(cases.values()))
    terms = first.session.run(first.terms, {first.x: x})
    orders = {name: order_of(case.run(x), terms) for name, case in cases.items()}
    for _ in range(ROUNDS):  # alternating, so that load on the machine affects all cases
        for case in cases.values():
            case.measure(x)

    table = Table(title=f"{TERMS} terms of {SIZE} float32 elements")
    for name in ("method", "order, by its bits"):
        table.add_column(name)
    for name in ("ms", "peak, in gradients"):
        table.add_column(name, justify="right")
    for name, case in cases.items():
        table.add_row(name, orders[name], f"{1000 * median(case.seconds):.1f}", f"{median(case.peaks):.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
