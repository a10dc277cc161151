"""Cost of tracing a training step with many variables, and a sum of many tensors, in TensorFlow.

    python benchmarks/tensorflow_tracing.py [--variables 300]

Variables have six elements, so that only the number of operations matters. Steps are compared with Keras' accumulation,
sums with tf.add_n: Adam, a window of 8, one process. Tracing is CPU time of all threads, which other programs on the
machine hardly affect; the first call, which optimizes the graph, and one call of a step, the median over two windows,
are elapsed time. The table has ratios to the peer.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf
import typer
from rich.console import Console
from rich.table import Table

import gradcombine
from gradcombine.integrations.keras import Accumulate
from gradcombine.integrations.tensorflow import AccumulatedStep

EVERY = 8
SHAPE = (2, 3)
Function = Callable[[list[Any]], Any]


class Cost(NamedTuple):
    """The number of operations of a function, and seconds."""

    operations: float
    trace: float
    first: float
    call: float


def optimizer(make: Callable[[], Any]) -> Callable[[list[Any]], Function]:
    def build(variables: list[Any]) -> Function:
        built = make()
        built.build(variables)
        return lambda gradients: built.apply(gradients, variables)

    return build


def step(weight: Callable[[Any], Any]) -> Callable[[list[Any]], Function]:
    def build(variables: list[Any]) -> Function:
        return AccumulatedStep(lambda g: (g, weight(g[0])), variables, keras.optimizers.Adam(), every=EVERY)

    return build


STEPS: dict[str, Callable[[list[Any]], Function]] = {
    "Keras' own": optimizer(lambda: keras.optimizers.Adam(gradient_accumulation_steps=EVERY)),
    "AccumulatedStep": step(lambda _: 1),
    "AccumulatedStep, traced weights": step(lambda g: tf.cast(tf.shape(g)[0], tf.float32)),
    "Accumulate": optimizer(lambda: Accumulate(keras.optimizers.Adam(), every=EVERY)),
}
SUMS: dict[str, Callable[[list[Any]], Function]] = {
    "tf.add_n": lambda _: tf.add_n,
    "gradcombine.add_n": lambda _: gradcombine.add_n,
    "gradcombine.tree_sum": lambda _: gradcombine.tree_sum,
}


def cost(build: Callable[[list[Any]], Function], count: int) -> Cost:
    """Measures a function of this many tensors."""
    compiled = tf.function(build([keras.Variable(tf.zeros(SHAPE)) for _ in range(count)]), autograph=False)
    gc.collect()
    begun = time.process_time()
    graph = compiled.get_concrete_function([tf.TensorSpec(SHAPE)] * count).graph.as_graph_def()
    trace = time.process_time() - begun
    values, calls = [tf.ones(SHAPE)] * count, []
    for _ in range(2 * EVERY + 1):
        begun = time.perf_counter()
        compiled(values)
        calls.append(time.perf_counter() - begun)
    operations = len(graph.node) + sum(len(function.node_def) for function in graph.library.function)
    return Cost(operations, trace, calls[0], statistics.median(calls[1:]))


def main(variables: Annotated[int, typer.Option(min=1)] = 300) -> None:
    """Prints the cost of tracing, the first call and a call, relative to the peer."""
    table = Table("", *Cost._fields, title=f"Over the peer, {variables} variables or terms of {SHAPE}")
    for group in (STEPS, SUMS):
        for build in group.values():
            cost(build, 2)  # one-time work
        (_, peer), *others = [(name, cost(build, variables)) for name, build in group.items()]
        for name, own in others:
            table.add_row(name, *(f"{a / b:.2f}" for a, b in zip(own, peer, strict=True)))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
