"""Decisions that all replicas take together: were they to differ, some would wait in a collective for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gradcombine.backends.protocol import Collective
from gradcombine.errors import GradCombineError


def any_replica(flags: Sequence[Any], over: Collective) -> list[Any]:
    """Each flag, true where it is true on any replica; those that are not known while tracing, by one exchange.

    Args:
      flags: boolean scalars. Known ones are taken to be the same on all replicas.
      over: the replicas.

    Returns:
      A Python bool for each known flag, a traced boolean scalar for each of the others.
    """
    known = [None if isinstance(flag, Tracer) else bool(flag) for flag in flags]
    traced = [flag.astype(jnp.int32) for flag in flags if isinstance(flag, Tracer)]
    if not traced:
        return known
    (counts,) = over.all_sum([jnp.stack(traced)])
    agreed = iter(counts > 0)
    return [next(agreed) if flag is None else flag for flag in known]


def require_flag(operation: str, name: str, flag: Any) -> Any:
    """Refuses what is not a boolean scalar."""
    if isinstance(flag, (bool, np.bool_)):
        return flag
    if not isinstance(flag, (np.ndarray, jax.Array)) or flag.dtype != np.bool_ or flag.shape != ():
        raise GradCombineError(operation, f"{name} as a boolean scalar", repr(flag))
    return flag
