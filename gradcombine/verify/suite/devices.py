"""Eight CPU devices for each framework. Both fix their devices as they start, so this comes before they are used."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

COUNT = 8


def prepare() -> None:
    """Sets what JAX and TensorFlow read as they are imported, then makes TensorFlow's devices.

    Raises:
      RuntimeError: where TensorFlow has run already in this process.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={COUNT}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _silent():
        import tensorflow as tf  # after the settings above

    # The bits are compared on CPU, whatever else the machine has.
    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * COUNT)
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
