"""Calls the host from inside of a compiled program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from gradcombine.autograph import no_autograph
from gradcombine.backends.registry import resolve


@no_autograph
def call(arrays: Sequence[Any], step: Any, write: Callable[[Any, Any], None]) -> None:
    """``write(step, arrays)``, with NumPy arrays: now where the values are known, else as the program runs."""
    backend = resolve("record", [*arrays, step])
    if all(backend.concrete(backend.asarray(x)) is not None for x in (*arrays, step)):
        write(step, arrays)
    elif backend.name == "jax":
        from jax.experimental import io_callback

        io_callback(write, None, step, list(arrays))
    else:
        import tensorflow as tf

        def run(number: Any, *values: Any) -> None:
            write(number, values)

        tf.numpy_function(run, [step, *arrays], [])


def wait() -> None:
    """Returns when the callbacks of all programs that were started have returned."""
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.effects_barrier()
