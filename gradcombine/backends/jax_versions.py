# pyright: standard
"""Compatibility shims for JAX 0.9, whose private names no longer change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad

from gradcombine.types import Array, Leaf

if jax.__version_info__ >= (0, 10):
    from jax.extend.core import get_opaque_trace_state
else:
    from jax.core import get_opaque_trace_state

__all__ = ["all_gather", "get_opaque_trace_state", "varying", "vjp_by_name"]


def varying(leaf: Leaf) -> frozenset[str]:
    """The manual mesh axes over which shard_map's type system says that a value, or one of a spec, may differ."""
    kind = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    if jax.__version_info__ < (0, 10):
        return getattr(kind, "vma", None) or frozenset()
    axes = getattr(kind, "manual_axis_type", None)
    return frozenset() if axes is None else axes.varying


def vjp_by_name(function: Callable[..., Any], *primals: Any) -> tuple[dict[str, Array], Callable[[str], Any], Any]:
    """The scalars that a function returns by name, the gradient of each alone, and what it returns beside them.

    What belongs to other scalars alone is not run through, so that no NaN there comes here.
    """
    values, pull_back, beside = jax.vjp(function, *primals, has_aux=True)

    def gradient(name: str) -> Any:
        one = lax.full_like(values[name], 1)
        if jax.__version_info__ < (0, 10):  # which takes no symbolic zeros
            return jax.vjp(lambda *inner: function(*inner)[0][name], *primals)[1](one)
        kinds: dict[str, Any] = {other: jax.typeof(x) for other, x in values.items()}
        return pull_back({other: ad.Zero(kind.to_ct_aval()) for other, kind in kinds.items()} | {name: one})

    return values, gradient, beside


def all_gather(array: Array, names: tuple[str, ...], to: str) -> Array:
    """The first axes of all replicas' arrays, one after another; typed as ``"varying"``, or as ``"invarying"``."""
    if to == "invarying" and jax.__version_info__ < (0, 10):
        from jax._src.lax.parallel import all_gather_invariant

        return all_gather_invariant(array, names, tiled=True)
    return lax.all_gather(array, names, tiled=True, to=to)
