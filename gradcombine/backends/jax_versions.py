# pyright: standard
"""Compatibility shims for JAX 0.9, whose private names no longer change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import eval_context
from jax.interpreters import ad

from gradcombine.types import Array

if jax.__version_info__ >= (0, 10):
    from jax.extend.core import get_opaque_trace_state
else:
    from jax.core import get_opaque_trace_state

with eval_context():
    _OUTERMOST = get_opaque_trace_state(convention="gradcombine")


def is_transformed() -> bool:
    """Whether a JAX transformation is active, even if no argument is a tracer."""
    return get_opaque_trace_state(convention="gradcombine") != _OUTERMOST


def vjp_by_name(function: Callable[..., Any], *primals: Any) -> tuple[Callable[[str], Any], Any]:
    """Differentiates named scalars separately.

    Args:
      function: returns a dict of scalars and an auxiliary value.
      primals: arguments of ``function``.

    Returns:
      A function that maps a name to the gradients of that scalar, and the auxiliary value. Computations that only other
      scalars depend on are not differentiated, so that a NaN there cannot leak into a gradient.
    """
    values, pull_back, aux = jax.vjp(function, *primals, has_aux=True)

    def gradient(name: str) -> Any:
        one = lax.full_like(values[name], 1)
        if jax.__version_info__ < (0, 10):  # a vjp function does not accept symbolic zeros
            return jax.vjp(lambda *inner: function(*inner)[0][name], *primals)[1](one)
        avals: dict[str, Any] = {other: jax.typeof(x) for other, x in values.items()}
        return pull_back({other: ad.Zero(aval.to_ct_aval()) for other, aval in avals.items()} | {name: one})

    return gradient, aux


def all_gather(array: Array, names: tuple[str, ...], to: str) -> Array:
    """Concatenates the replicas' arrays along the first axis; the result is typed ``"varying"`` or ``"invarying"``."""
    if to == "invarying" and jax.__version_info__ < (0, 10):
        from jax._src.lax.parallel import all_gather_invariant

        return all_gather_invariant(array, names, tiled=True)
    return lax.all_gather(array, names, tiled=True, to=to)
