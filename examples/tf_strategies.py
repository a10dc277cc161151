"""Trains the same classifier of handwritten digits under one tf.distribute strategy, or under each of them.

    python examples/tf_strategies.py [none | one_device | mirrored_2 | mirrored_4 | mirrored_8 | central_2 |
                                      multi_worker_2 | parameter_server | dtensor]

A window always has the same 256 images, for any number of replicas, so all strategies end with the same loss.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.experimental import dtensor

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.tensorflow import AccumulatedStep

STRATEGIES = (
    *("none", "one_device", "mirrored_2", "mirrored_4", "mirrored_8"),
    *("central_2", "multi_worker_2", "parameter_server", "dtensor"),
)
WINDOW, MICROBATCH, EPOCHS, RATE = 256, 32, 3, 0.5


def images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    size = len(digits.target) // WINDOW * WINDOW
    return np.float32(digits.data[:size]) / 16, np.int32(digits.target[:size])


def initial() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((64, 32), (32,), (32, 10), (10,))
    return [np.float32(rng.normal(0, 0.2, shape) if len(shape) == 2 else np.zeros(shape)) for shape in shapes]


def logits(weights: list[Any], images: Any) -> Any:
    w1, b1, w2, b2 = weights
    return tf.nn.relu(images @ w1 + b1) @ w2 + b2


def mean_loss(weights: list[Any], images: Any, labels: Any) -> Any:
    one_hot = tf.one_hot(labels, 10)
    return -tf.reduce_mean(tf.reduce_sum(one_hot * tf.nn.log_softmax(logits(weights, images)), axis=1))


def gradients(weights: list[Any], images: Any, labels: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = mean_loss(weights, images, labels)
    return tape.gradient(loss, weights)


def descend(grads: list[Any], weights: list[Any]) -> None:
    for gradient, weight in zip(grads, weights, strict=True):
        weight.assign_sub(RATE * gradient)


def make_strategy(name: str) -> tf.distribute.Strategy:
    """The strategy with this name, on virtual devices of one CPU. Use GPUs instead if there are any."""
    prefix, _, size = name.rpartition("_")
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    if prefix == "multi_worker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    devices = [f"CPU:{i}" for i in range(int(size))] if prefix else []
    if prefix == "mirrored":
        return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    if prefix == "central":
        return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    return tf.distribute.get_strategy()


def replicated(strategy: tf.distribute.Strategy) -> tuple[float, float]:
    """Loss and accuracy after training under a strategy with synchronous replicas."""
    images, labels = images_and_labels()
    n = strategy.num_replicas_in_sync

    # 1. replicate the model: create variables under the strategy.
    with strategy.scope():
        weights = [tf.Variable(x) for x in initial()]
        # 4. and 5. synchronize once per window, and apply the mean over all its images.
        step = AccumulatedStep(
            lambda x, y: (gradients(weights, x, y), tf.size(y)), weights, descend, every=WINDOW // MICROBATCH // n
        )

    # 2. distribute the data: every replica gets a different microbatch.
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(MICROBATCH * n, drop_remainder=True)
    batches = strategy.experimental_distribute_dataset(data)

    # 3. train.
    train = tf.function(step)
    for _ in range(EPOCHS):
        for batch in batches:
            train(*batch)

    # 6. evaluate: each metric has a reduction over replicas.
    metrics = reductions.per_leaf({"loss": reductions.mean(), "correct": reductions.sum()})

    def evaluate(x: Any, y: Any) -> Any:
        correct = tf.argmax(logits(weights, x), axis=1, output_type=tf.int32) == y
        values = {"loss": mean_loss(weights, x, y), "correct": tf.reduce_sum(tf.cast(correct, tf.int32))}
        return gc.all_reduce(metrics, values, over=gc.tf_replicas(), weight=tf.size(y))

    one_batch = tf.data.Dataset.from_tensor_slices((images, labels)).batch(len(labels))
    (batch,) = strategy.experimental_distribute_dataset(one_batch)
    results = tf.function(lambda *x: strategy.run(evaluate, args=x))(*batch)
    loss, correct = (strategy.experimental_local_results(results[key])[0] for key in ("loss", "correct"))
    return float(loss), int(correct) / len(labels)


def parameter_server() -> tuple[float, float]:
    """Trains with asynchronous workers: a coordinator fetches their gradients and combines them."""
    addresses = free_addresses(3)
    cluster = tf.train.ClusterSpec({"worker": addresses[:2], "ps": addresses[2:]})
    # With fewer threads, servers in one process deadlock on a machine with two cores.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
    servers = [
        tf.distribute.Server(cluster, job_name=job, task_index=i, protocol="grpc", config=config)
        for job, i in (("worker", 0), ("worker", 1), ("ps", 0))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = [tf.Variable(x) for x in initial()]
    compute = tf.function(lambda x, y: gradients(weights, x, y))
    images, labels = images_and_labels()
    for window in [*range(0, len(labels), WINDOW)] * EPOCHS:
        scheduled = [
            coordinator.schedule(compute, (tf.constant(images[at : at + MICROBATCH]), labels[at : at + MICROBATCH]))
            for at in range(window, window + WINDOW, MICROBATCH)
        ]
        # Combined in the order of scheduling, regardless of which worker finishes first.
        descend([tf.constant(x) for x in gc.mean([each.fetch() for each in scheduled])], weights)
    assert len(servers) == 3
    return measured([w.numpy() for w in weights])


def model_parallel() -> tuple[float, float]:
    """Trains with DTensor: images are sharded over 'data', the hidden layer over 'model', as are accumulators."""
    dtensor.initialize_accelerator_system("CPU")
    mesh = dtensor.create_mesh([("data", 2), ("model", 2)], devices=[f"CPU:{i}" for i in range(4)])
    layouts = [
        dtensor.Layout(specs, mesh)
        for specs in ((dtensor.UNSHARDED, "model"), ("model",), ("model", dtensor.UNSHARDED), (dtensor.UNSHARDED,))
    ]

    def placed(x: np.ndarray, layout: dtensor.Layout) -> Any:
        return dtensor.relayout(dtensor.copy_to_mesh(tf.constant(x), dtensor.Layout.replicated(mesh, x.ndim)), layout)

    weights = [dtensor.DVariable(placed(x, layout)) for x, layout in zip(initial(), layouts, strict=True)]
    compute, apply = (
        tf.function(lambda x, y: gradients(weights, x, y)),
        tf.function(lambda grads: descend(grads, weights)),
    )
    images, labels = images_and_labels()
    sharded = [dtensor.Layout(["data", *[dtensor.UNSHARDED] * rest], mesh) for rest in (1, 0)]
    size = 2 * MICROBATCH
    window = gc.accumulate(reductions.mean(), every=WINDOW // size)
    with dtensor.default_mesh(mesh):
        state = window.init([tf.TensorSpec(w.shape, w.dtype) for w in weights])
        for at in [*range(0, len(labels), size)] * EPOCHS:
            # The gradients of a global batch: DTensor sums over 'data', and only over that axis.
            batch = [placed(x[at : at + size], layout) for x, layout in zip((images, labels), sharded, strict=True)]
            state = window.update(compute(*batch), state, size)
            if window.ready(state):
                grads = window.value(state)
                assert [dtensor.fetch_layout(x) for x in grads] == layouts
                apply(grads)
        replicated = [dtensor.relayout(w, dtensor.Layout.replicated(mesh, len(w.shape))).numpy() for w in weights]
    return measured(replicated)


def measured(weights: list[Any]) -> tuple[float, float]:
    """The loss and accuracy of these weights."""
    images, labels = images_and_labels()
    correct = tf.argmax(logits(weights, images), axis=1, output_type=tf.int32) == labels
    return float(mean_loss(weights, images, labels)), float(np.mean(correct.numpy()))


def free_addresses(size: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def several_processes(name: str) -> str:
    """Runs this script once for every worker; returns the output of worker 0."""
    addresses = free_addresses(int(name[-1]))
    workers = []
    for i in range(len(addresses)):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
        command = [sys.executable, __file__, name]
        environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        first, *_ = [worker.communicate(timeout=240)[0] for worker in workers]
        return first
    finally:
        for worker in workers:
            worker.kill()


def main(name: str) -> None:
    if name.startswith("multi_worker") and "TF_CONFIG" not in os.environ:
        print(several_processes(name), end="")
        return
    if not name.startswith(("multi_worker", "parameter_server")):
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    others = {"parameter_server": parameter_server, "dtensor": model_parallel}
    loss, accuracy = others[name]() if name in others else replicated(make_strategy(name))
    print(f"{name:18} loss {loss:.4f}   accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        rows = [
            subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True).stdout
            for name in STRATEGIES
        ]
        print("".join(rows), end="")
