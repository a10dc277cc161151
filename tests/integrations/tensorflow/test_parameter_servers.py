"""Updates that a parameter-server worker made before it was killed count twice; its return values count once.

As a program: runs a parameter server, a worker that is killed within a function, and its successor; prints one line of
JSON. The function adds its gradient to a variable, and returns it with its microbatch number for a ledger.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradcombine import GradCombineError, reductions
from gradcombine.reductions import Numbered
from gradcombine.resilience import ledger
from tests.multi_process.processes import free_addresses

pytestmark = [pytest.mark.needs("tensorflow"), pytest.mark.full]

COUNT = 4
GRADIENTS = 4.0 ** np.arange(COUNT, dtype=np.float32)
"""Gradients by microbatch number: their sum shows how often each was added."""


def serve(cluster: Any, job: str, begin: Any) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the process ends with its parent
    begin.wait()
    tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=0).join()


def main() -> None:
    # Forked after TensorFlow is imported but before it starts threads.
    context: Any = multiprocessing.get_context("fork")
    server, worker = free_addresses(2)
    cluster = {"ps": [server], "worker": [worker]}
    begins = [context.Event() for _ in range(3)]
    jobs = zip(("ps", "worker", "worker"), begins, strict=True)
    processes = [context.Process(target=serve, args=(cluster, job, begin), daemon=True) for job, begin in jobs]
    for process in processes:
        process.start()
    for begin in begins[:2]:
        begin.set()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        added, may_end = tf.Variable(0.0), tf.Variable(False)

    @tf.function
    def run(number: Any) -> Any:
        gradient = tf.gather(GRADIENTS, number)
        added.assign_add(gradient)
        tf.while_loop(lambda _: tf.logical_not(may_end), lambda turn: turn + 1, [0])
        return gradient, number

    scheduled = [coordinator.schedule(run, args=(tf.constant(number),)) for number in range(COUNT)]
    while added.numpy() == 0:
        time.sleep(0.02)
    processes[1].kill()
    processes[1].join()
    begins[2].set()
    may_end.assign(True)
    coordinator.join()

    total, refused = reductions.numbered(reductions.sum(), COUNT), ""
    state = total.init(np.float32(0))
    for result in scheduled:
        state = total.update(state, Numbered(*(np.asarray(x) for x in result.fetch())))
    ledger.require_once(state)
    try:
        total.update(state, Numbered(*(np.asarray(x) for x in scheduled[0].fetch())))
    except GradCombineError as error:
        refused = str(error)
    merged = float(total.finalize(state))
    print(json.dumps({"added": float(added.numpy()), "merged": merged, "refused": refused}), flush=True)
    for process in processes:
        process.kill()
    os._exit(0)  # a regular exit would wait for the cluster


def test_what_is_returned_with_its_number_counts_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.tensorflow.test_parameter_servers"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["merged"] == 1 + 4 + 16 + 64
    # One of the four was interrupted when its worker was killed, and ran again.
    assert found["added"] - found["merged"] in (1, 4, 16, 64)
    assert "expected each microbatch once, received twice: 0" in found["refused"]


if __name__ == "__main__":
    main()
