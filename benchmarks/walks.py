"""Counts the files of gradcombine that five typical calls visit: python benchmarks/walks.py [--files]

A file counts if one of its functions is called, in any thread; class bodies and imports do not count. Functions that a
framework compiles are traced in the counted call.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorflow as tf
from typer.testing import CliRunner

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.optax import accumulate
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.verify.command import app

PACKAGE = Path(gc.__file__).parent


def files_of(run: Callable[[], Any]) -> list[str]:
    """The files of the package whose functions are called by ``run``."""
    entered: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(f"{PACKAGE}/"):
            entered.add(code.co_filename)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return sorted(str(Path(name).relative_to(PACKAGE)) for name in entered)


def mean_of_a_list(size: int) -> Callable[[], Any]:
    values = [{"w": jnp.full(size, i, jnp.float32)} for i in range(3)]
    return lambda: gc.mean(values, weights=[1, 2, 3])


def exact_sum(size: int) -> Callable[[], Any]:
    total, x = reductions.sum("exact"), np.full(size, 0.1, np.float32)
    return lambda: total.finalize(total.update(total.init(x), x))


def optax_boundary(size: int) -> Callable[[], Any]:
    params = {"w": jnp.zeros(size)}
    tx = accumulate(optax.sgd(0.1), every=2)
    state = tx.init(params)
    return lambda: jax.jit(tx.update)(params, state, params)


def mirrored_step(size: int) -> Callable[[], Any]:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        variable = tf.Variable(tf.zeros(size))

        def gradients(x: tf.Tensor) -> Any:
            return [x * tf.ones(size)], tf.constant(1)

        import keras

        step = AccumulatedStep(gradients, [variable], keras.optimizers.SGD(0.1), every=2)
    return lambda: tf.function(step)(tf.constant(1.0))


def diff_of_dumps(size: int) -> Callable[[], Any]:
    folder = tempfile.mkdtemp()
    for name in ("a", "b"):
        np.savez(f"{folder}/{name}.npz", w=np.ones(size, np.float32))
    return lambda: CliRunner().invoke(app, ["diff", f"{folder}/a.npz", f"{folder}/b.npz"], catch_exceptions=False)


WALKS = {
    "a mean of three JAX arrays": (mean_of_a_list, 8),
    "an exact sum of one leaf: init, update, finalize": (exact_sum, 9),
    "a boundary of optax.accumulate, traced": (optax_boundary, 11),
    "AccumulatedStep under MirroredStrategy, traced": (mirrored_step, 11),
    "a diff of two dumps, with its command": (diff_of_dumps, 9),
}
"""The calls, and the aims for their numbers of files."""


def files_entered() -> dict[str, list[str]]:
    """The files of each call."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    files: dict[str, list[str]] = {}
    for name, (walk, _) in WALKS.items():
        walk(3)()  # one-time work
        files[name] = files_of(walk(4))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files")
    named = parser.parse_args().files
    for name, files in files_entered().items():
        print(f"{len(files):3} {name} (aim {WALKS[name][1]})")
        if named:
            print(*(f"      {file}" for file in files), sep="\n")


if __name__ == "__main__":
    main()
