"""The first and the last contribution."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcombine.autograph import no_autograph
from gradcombine.backends.protocol import Backend
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.cell import Plain
from gradcombine.reductions.treewise import TreewiseState, lift
from gradcombine.types import Array

_KINDS = ("float", "complex", "integer", "bool")


class FirstState(TreewiseState):
    """The first contribution so far."""


class LastState(TreewiseState):
    """The last contribution so far."""


@no_autograph
def first() -> Reduction:
    """The first contribution of nonzero weight; over replicas, the lowest rank's.

    ``merge`` is associative but, alone with `last`, not commutative: its first argument holds the earlier
    contributions. Over replicas this is what tf.VariableAggregation calls ONLY_FIRST_REPLICA.

    Returns:
      A reduction of any numeric or boolean leaves. No contribution, or one whose leaf is None: zeros.

    Bits: those of the contribution, in every mode.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.first(), [np.float32([1, 5]), np.float32([3, 4])], weights=[0, 1])
    array([3., 4.], dtype=float32)
    """
    return lift(Plain("first", _KINDS, _zero, _earlier), FirstState)


@no_autograph
def last() -> Reduction:
    """The last contribution of nonzero weight; over replicas, the highest rank's. In all else as `first`.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.last(), [np.float32([1, 5]), np.float32([3, 4])])
    array([3., 4.], dtype=float32)
    """
    return lift(Plain("last", _KINDS, _zero, _later), LastState)


def _zero(dtype: np.dtype) -> Any:
    return 0


def _earlier(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return backend.where(a_empty, b, a)


def _later(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return backend.where(b_empty, a, b)
