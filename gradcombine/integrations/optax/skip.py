# pyright: standard
"""Skip functions that leave out microbatches whose gradients are not finite or too large."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from gradcombine import tree
from gradcombine.backends.jax_backend import BACKEND
from gradcombine.backends.registry import require_scalar
from gradcombine.errors import invalid, operation, require_tuple, shown, translate_errors, within
from gradcombine.reductions import dtypes
from gradcombine.types import Array, Scalar, Tree

Skip: TypeAlias = Callable[[Tree, Array, Tree], tuple[Array, Tree]]
"""``skip(updates, gradient_step, params) -> (left_out, detail)``, as in optax.MultiSteps: ``left_out`` is a boolean
scalar, ``detail`` a tree of arrays, of the same structure and dtypes in every call. ``gradient_step`` is the number of
the window, an int32 scalar; ``params`` may be None."""


class SkipState(NamedTuple):
    """State of the skip function of `accumulate`.

    Attributes:
      skipped: int32 scalar, the number of microbatches left out since the state was created.
      in_a_row: int32 scalar, the number of consecutive microbatches left out up to the last one.
      detail: the second result of the last call of the skip function. It differs between replicas, unlike the others.
      all_of_window: boolean scalar, whether all microbatches of the window so far were left out.
    """

    skipped: Array
    in_a_row: Array
    detail: Tree
    all_of_window: Array


_NOT_GIVEN = object()


@operation("skip_not_finite")
def skip_not_finite(updates: Tree = _NOT_GIVEN, gradient_step: Scalar = None, params: Tree = None) -> Tree:
    """Leaves out a microbatch that holds an infinity or a NaN.

    Like ``optax.skip_not_finite``, this is the skip function itself. Called without arguments, it returns itself, for
    symmetry with `skip_large`.

    Args:
      updates: gradients of any float, complex or integer dtype; without it, the function returns itself.
      gradient_step, params: ignored.

    Returns:
      A boolean scalar, and a dict of ``should_skip``, the same scalar, and ``num_not_finite``, an int32 scalar, the
      number of infinities and NaNs.

    References: `optax.skip_not_finite
    <https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html#optax.skip_not_finite>`_.

    >>> import jax.numpy as jnp
    >>> from gradcombine.integrations.optax import skip_not_finite
    >>> left_out, detail = skip_not_finite()({"w": jnp.float32([1, jnp.nan, jnp.inf])}, 0, None)
    >>> bool(left_out), int(detail["num_not_finite"])
    (True, 2)
    """
    if updates is _NOT_GIVEN:
        return skip_not_finite
    returned: Tree = optax.skip_not_finite(_gradients(updates), gradient_step, params)
    left_out, detail = returned
    return left_out, {**detail, "num_not_finite": detail["num_not_finite"].astype(jnp.int32)}


@operation("skip_large")
def skip_large(max_norm: Scalar) -> Skip:
    """Leaves out a microbatch if the Euclidean norm of its gradients, over all leaves, is above a bound or NaN.

    Can replace ``optax.skip_large_updates``, whose bound is that of the squared norm. The squares of narrow floats do
    not overflow.

    Args:
      max_norm: a number above 0, or a function of the window's number (an int32 scalar) that returns one.

    Returns:
      The skip function. Its detail is a dict of ``should_skip`` and ``norm``, a float32 scalar, computed in float32
      (float64 if any leaf is float64).

    Raises:
      GradCombineError: for a ``max_norm`` that is neither a function nor a number above 0.

    >>> import jax.numpy as jnp
    >>> from gradcombine.integrations.optax import skip_large
    >>> left_out, detail = skip_large(4.5)({"w": jnp.float32([3, 4])}, 0, None)
    >>> bool(left_out), float(detail["norm"])
    (True, 5.0)
    """
    expected = "a norm above 0, or a function of the window's number"
    if not callable(max_norm):
        require_scalar(expected, max_norm, "iuf")
        if not max_norm > 0:
            raise invalid(expected, shown(max_norm))

    @operation("skip_large")
    def skip(updates: Tree, gradient_step: Scalar, params: Tree = None) -> tuple[Array, Tree]:
        del params
        bound, norm = max_norm(gradient_step) if callable(max_norm) else max_norm, jnp.sqrt(_norm_squared(updates))
        with translate_errors("a norm that is a number", received=lambda: shown(bound)):
            left_out = ~(norm <= jnp.asarray(bound, norm.dtype).reshape(()))
        return left_out, {"should_skip": left_out, "norm": norm}

    return skip


def decide(skip: Skip, updates: Tree, gradient_step: Array, params: Tree) -> tuple[Array, Tree]:
    """Calls a skip function; raises unless it returns a boolean scalar and a detail.

    Returns:
      The decision, a boolean scalar array, and the detail.
    """
    expected = "a skip function that returns (boolean scalar, state)"
    decision, detail = require_tuple(expected, skip(updates, gradient_step, params), 2)
    require_scalar("a skip function that returns a boolean scalar first", decision, "b")
    return jnp.asarray(decision), jax.tree.map(jnp.asarray, detail)


def first_detail(skip: Skip, params: Tree) -> Tree:
    """Detail of a skip function before the first microbatch: that of zero gradients."""
    arguments = jax.tree.map(jnp.zeros_like, params), jnp.int32(0), params
    with translate_errors("a skip function of (updates, gradient_step, params)", received=shown(skip)):
        inspect.signature(skip).bind(*arguments)
    return decide(skip, *arguments)[1]


def _gradients(updates: Tree) -> list[Array]:
    """The present leaves as arrays; raises for dtypes that are not numeric."""
    gradients = list[Array]()
    for path, leaf in tree.present(updates):
        with within(path):
            gradients.append(BACKEND.asarray(leaf))
            dtype = BACKEND.dtype(leaf)
            if dtypes.kind(dtype) not in dtypes.NUMERIC:
                raise invalid("gradients of numbers", dtype)
    return gradients


def _norm_squared(updates: Tree) -> Array:
    """The squared norm in float32, in float64 if any leaf is."""
    squares = [jnp.sum(_square(leaf)) for leaf in _gradients(updates)]
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in squares) else jnp.float32
    return jnp.sum(jnp.stack([x.astype(dtype) for x in squares])) if squares else jnp.zeros((), dtype)


def _square(leaf: Array) -> Array:
    if jnp.iscomplexobj(leaf):
        return jnp.square(leaf.real) + jnp.square(leaf.imag)
    wide = leaf if leaf.dtype in (jnp.float32, jnp.float64) else leaf.astype(jnp.float32)
    return jnp.square(wide)
