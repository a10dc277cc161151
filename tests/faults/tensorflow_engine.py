"""Processes of a TensorFlow MultiWorkerMirroredStrategy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import gradcombine as gc
from gradcombine import faults, ledger, tree
from tests.faults.training import Scheme, on_host


class TensorFlowEngine:
    """One of several workers, which all restart when one is lost."""

    def __init__(self) -> None:
        self.strategy = tf.distribute.get_strategy()

        @tf.function(reduce_retracing=True)
        def gradient(params: Any, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(params)
                off = tf.linalg.matvec(x, params["w"]) + params["b"] - y
                loss = tf.reduce_mean(off * off)
            return tape.gradient(loss, params)

        @tf.function
        def descend(params: Any, grads: Any) -> Any:
            return {name: params[name] - 0.125 * grads[name] for name in params}

        self._gradient, self._descend = gradient, descend

    def join(self, addresses: Sequence[str], rank: int) -> None:
        task = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(task)
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def wait_for_all(self) -> None:
        self._on_replicas(lambda x: gc.tf_replicas().all_sum([x]), tf.ones(()))

    def gradient(self, params: Any, x: Any, y: Any) -> Any:
        return self._gradient(*map(_tensors, (params, x, y)))

    def descend(self, params: Any, gradients: Any) -> Any:
        return self._descend(_tensors(params), _tensors(gradients))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: function(*map(_tensors, args))  # tracing would cost more than these few eager calls

    def merge(self, scheme: Scheme, held: Sequence[Any], assignment: ledger.Assignment) -> Any:
        def merge(held: Any) -> Any:
            return ledger.merge_held(scheme.reduction, held, assignment, gc.tf_replicas(), scheme.order)

        return on_host(self._on_replicas(merge, [_tensors(state) for state in held]))

    def find(self, values: Any, window: Any, twins: Any) -> faults.Faults:
        def find(given: Any) -> Any:
            return faults.find(gc.tf_replicas(), given[0], window=given[1], twins=given[2])

        return on_host(self._on_replicas(find, _tensors((values, window, twins))))

    def ledger_of(self, window: Any) -> ledger.Ledger:
        """The ledger of all workers' windows."""
        (counts,) = self._on_replicas(lambda x: gc.tf_replicas().all_sum([x]), window.levels[0].counts)
        return ledger.read(window.levels[0]._replace(counts=counts))

    def _on_replicas(self, function: Callable[..., Any], value: Any) -> Any:
        local = self.strategy.experimental_local_results
        leaves, structure = tree.flatten(value)
        kept: list[Any] = []

        def run(leaves: Any) -> Any:
            found, after = tree.flatten(function(tree.unflatten(structure, leaves)))
            kept[:] = [after]
            return found

        results = self.strategy.run(run, args=(leaves,))
        return tree.unflatten(kept[0], [local(x)[0] for x in results])


def _tensors(values: Any) -> Any:
    leaves, structure = tree.flatten(values)
    return tree.unflatten(structure, [x if x is None else tf.convert_to_tensor(x) for x in leaves])
