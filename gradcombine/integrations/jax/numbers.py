"""Numbers that are not JAX's yet."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import jax.tree_util
import numpy as np

from gradcombine.reductions import dtypes
from gradcombine.types import Tree


def as_arrays(values: Tree) -> Tree:
    """A tree whose Python numbers and NumPy arrays are JAX's, in the dtypes that jit gives them."""
    return jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.result_type(x)) if _is_number(x) else x, values)


def _is_number(x: Any) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):  # a float0, JAX's "no gradient", is no number
        return x.dtype == np.bool_ or dtypes.kind(x.dtype) in ("float", "complex", "integer")
    return isinstance(x, (bool, int, float, complex))
