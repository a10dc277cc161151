"""One process of a MultiWorkerMirroredStrategy, started by `processes`; prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import gradcombine as gc
from gradcombine.integrations.tensorflow import AccumulatedStep, Outer

EVERY, SIZE = 4, 64


def gradient_at(rank: int, k: int) -> np.ndarray:
    return np.random.default_rng([rank, k]).standard_normal(SIZE, np.float32)


def weight_at(rank: int, k: int) -> float:
    return 1.0 + (3 * rank + k) % 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--microbatches", type=int, default=2 * EVERY)
    parser.add_argument("--save-after", type=int, help="microbatches before a checkpoint")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die-after", type=int, help="microbatches before rank 1 is killed")
    parser.add_argument("--uneven", action="store_true", help="a window length of its own in every process")
    parser.add_argument("--keras", action="store_true", help="a Keras optimizer in place of a function")
    parser.add_argument("--apart", action="store_true", help="a second variable with a gradient on rank 1 alone")
    parser.add_argument("--outer", action="store_true", help="the gradients are local steps of an island")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id

    with strategy.scope():
        w = tf.Variable(tf.zeros(SIZE))
        others = [tf.Variable(0.0), tf.Variable(0.0)] if args.apart else []

        def gradients(g: tf.Tensor, weight: tf.Tensor) -> tuple[list[tf.Tensor | None], tf.Tensor]:
            return [g, *([tf.ones(()) if rank == 1 else None, None] if args.apart else [])], weight

        def apply(found: list[tf.Tensor], variables: list[tf.Variable]) -> None:
            for one, variable in zip(found, variables, strict=True):
                variable.assign_sub(one)

        def local(g: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
            strategy.run(lambda: module.params[0].assign_sub(g))
            return module.update(weight)

        every = EVERY + args.uneven * rank
        try:
            applied_by = keras.optimizers.SGD(1.0) if args.keras else apply
            if args.outer:
                module = Outer([w], keras.optimizers.SGD(1.0), every, order="tree")
            else:
                module = AccumulatedStep(gradients, [w, *others], applied_by, every, order="tree")
        except gc.GradCombineError as error:
            print(json.dumps({"refused": str(error)}), flush=True)
            return
        step = tf.function(local if args.outer else module)
    # Windows differ by process, so each process keeps a separate checkpoint.
    folder, done = args.folder and str(args.folder / str(rank)), tf.Variable(0)
    checkpoint = tf.train.Checkpoint(step=module, w=w, done=done)
    if args.resume:
        checkpoint.restore(tf.train.latest_checkpoint(folder)).assert_consumed()
    applied = []
    for k in range(int(done), args.microbatches):
        if k == args.die_after and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        values = tf.constant(gradient_at(rank, k)), tf.constant(weight_at(rank, k))
        applied.append(bool(step(*values)[0]))
        if k + 1 == args.save_after:
            done.assign(k + 1)
            checkpoint.save(f"{folder}/window")
    traces = step.experimental_get_tracing_count()
    told = {"applied": applied, "traces": traces, "others": [float(x.numpy()) for x in others]}
    print(json.dumps({"w": w.numpy().tobytes().hex(), **told}), flush=True)


if __name__ == "__main__":
    main()
