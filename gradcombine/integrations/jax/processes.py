"""Several processes: a peer that is lost, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from gradcombine.errors import GradCombineError

_LOST = ("gloo", "connection", "deadline", "unavailable", "heartbeat", "nccl", "peer")


@contextmanager
def detect_lost_peers(operation: str) -> Iterator[None]:
    """Turns the error of a collective that has lost a process into one that says so.

    The body has to wait for its results (`jax.block_until_ready`): JAX computes behind the caller's back, and an error
    shows where a result is waited for. A peer that died is noticed at once, as its connections close. One that hangs
    is noticed by the coordinator after ``heartbeat_timeout_seconds`` of ``jax.distributed.initialize`` (100 seconds
    unless given), and then JAX ends this process itself; nothing can be caught. Both ways lead to a restart of all
    processes, from a state that was saved before, partial windows included (`gradcombine.statefile`).

    Args:
      operation: what was being done, for the message.

    Raises:
      GradCombineError: for an error of JAX's runtime that tells of a lost connection; any other passes unchanged.

    References: `Multi-controller JAX <https://docs.jax.dev/en/latest/multi_process.html>`_.

    >>> import jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax.processes import detect_lost_peers
    >>> with detect_lost_peers("merge_replicas"):
    ...     total = jax.block_until_ready(jnp.ones(3).sum())
    >>> with detect_lost_peers("merge_replicas"):
    ...     raise ValueError("Gloo all-reduce failed: connection closed by peer")
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: merge_replicas: expected an answer of all 1 processes, received Gloo ...
    """
    try:
        yield
    except GradCombineError:
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not any(word in str(error).lower() for word in _LOST):
            raise
        expected = f"an answer of all {jax.process_count()} processes"
        raise GradCombineError(operation, expected, str(error)) from error
