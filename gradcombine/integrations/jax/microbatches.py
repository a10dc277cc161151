"""Division of a batch into microbatches along its first axis."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.types import Tree


class Microbatches(NamedTuple):
    """A batch, divided.

    Attributes:
      stacked: the microbatches of full size, along a new first axis.
      rest: the last, smaller one; None where there is none.
      full: how many are stacked.
    """

    stacked: Tree
    rest: Tree | None
    full: int

    @property
    def total(self) -> int:
        return self.full + (self.rest is not None)


def divide(operation: str, batch: Tree, microbatches: int, interleaved: bool = False) -> Microbatches:
    """Divides n examples into microbatches of ceil(n / microbatches), and a smaller one of what is left.

    Args:
      operation: what error messages call the caller.
      batch: a tree of arrays with one first axis.
      microbatches: how many, at most.
      interleaved: whether microbatch i gets the examples i, i + count, ... in place of a block of neighbours.
    """
    n = examples(operation, batch)
    if n == 0:
        raise GradCombineError(operation, "a batch of one example or more", "an empty one")
    size = -(-n // microbatches)
    count, rest_size = divmod(n, size)

    def stack(x: Any) -> Any:
        full = x[: count * size]
        if interleaved:
            return full.reshape((size, count, *x.shape[1:])).swapaxes(0, 1)
        return full.reshape((count, size, *x.shape[1:]))

    stacked = jax.tree.map(stack, batch)
    rest = jax.tree.map(lambda x: x[count * size :], batch) if rest_size else None
    return Microbatches(stacked, rest, count)


def examples(operation: str, batch: Tree) -> int:
    """The length of the first axis, which all arrays of a batch share."""
    found: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = jax.tree_util.keystr(path)
        shape = np.shape(leaf)
        if not shape:
            raise GradCombineError(operation, "a batch argument with a first axis of examples", "a scalar", name)
        if found and shape[0] not in found:
            (other, where), *_ = found.items()
            raise GradCombineError(operation, f"{other} examples, as in {where}", shape[0], name)
        found[shape[0]] = name
    if not found:
        raise GradCombineError(operation, "a batch argument with an array", "none")
    return next(iter(found))


def require_count(operation: str, microbatches: Any) -> int:
    """Refuses a number of microbatches that is not an integer of 1 or more."""
    expected = "a number of microbatches that is an integer of 1 or more"
    try:
        if isinstance(microbatches, (bool, np.bool_)):
            raise TypeError
        count = operator.index(microbatches)
    except TypeError:
        raise GradCombineError(operation, expected, repr(microbatches)) from None
    if count < 1:
        raise GradCombineError(operation, expected, count)
    return count
