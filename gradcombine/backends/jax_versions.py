"""What has another name in JAX 0.9: that is released, so that what is private in it stays as it is."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from gradcombine.types import Array

if jax.__version_info__ >= (0, 10):
    from jax.extend.core import get_opaque_trace_state
else:
    from jax.core import get_opaque_trace_state

__all__ = ["all_gather", "get_opaque_trace_state", "varying"]


def varying(leaf: Any) -> frozenset[str]:
    """The manual mesh axes over which shard_map's type system says that a value, or one of a spec, may differ."""
    kind = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    if jax.__version_info__ < (0, 10):
        return getattr(kind, "vma", None) or frozenset()
    axes = getattr(kind, "manual_axis_type", None)
    return frozenset() if axes is None else axes.varying


def all_gather(array: Array, names: tuple[str, ...], to: str) -> Array:
    """The first axes of all replicas' arrays, one after another; typed as ``"varying"``, or as ``"invarying"``."""
    if to == "invarying" and jax.__version_info__ < (0, 10):
        from jax._src.lax.parallel import all_gather_invariant

        return all_gather_invariant(array, names, tiled=True)
    return lax.all_gather(array, names, tiled=True, to=to)
