"""Division of a batch into microbatches along its first axis, without moving an example to another device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from gradcombine import tree
from gradcombine.backends.registry import shape_of
from gradcombine.errors import GradCombineError, renamed, require_integer
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

    A batch that is split over devices is taken as so many blocks. Each block is divided by itself, and a microbatch is
    made of the part that each block gives to it: so no example leaves its device.

    Args:
      operation: what error messages call the caller.
      batch: a tree of arrays with one first axis.
      microbatches: how many, at most.
      interleaved: whether microbatch i gets the examples i, i + count, ... of a block in place of neighbours.
    """
    n = examples(operation, batch)
    if n == 0:
        raise GradCombineError(operation, "a batch of one example or more", "an empty one")
    blocks = math.gcd(n, math.lcm(*(_most_blocks(x) for x in jax.tree.leaves(batch))))
    length = n // blocks
    size = -(-length // microbatches)
    count, rest_size = divmod(length, size)

    def stack(x: Any) -> Any:
        full = x.reshape((blocks, length, *x.shape[1:]))[:, : count * size]
        if interleaved:
            parts = full.reshape((blocks, size, count, *x.shape[1:])).swapaxes(1, 2)
        else:
            parts = full.reshape((blocks, count, size, *x.shape[1:]))
        return parts.swapaxes(0, 1).reshape((count, blocks * size, *x.shape[1:]))

    def remaining(x: Any) -> Any:
        left = x.reshape((blocks, length, *x.shape[1:]))[:, count * size :]
        return left.reshape((blocks * rest_size, *x.shape[1:]))

    rest = jax.tree.map(remaining, batch) if rest_size else None
    return Microbatches(jax.tree.map(stack, batch), rest, count)


def _most_blocks(x: Any) -> int:
    """Over how many devices the first axis of an array may be split.

    Which automatic axes of its mesh that are is not known while tracing: a block for each of their devices does for
    any of them.
    """
    if not isinstance(x, jax.Array):
        return 1
    kind = jax.typeof(x).sharding
    entry = kind.spec[0] if kind.spec else None
    explicit = entry if isinstance(entry, tuple) else (entry,)
    names = [*kind.mesh.auto_axes, *(name for name in explicit if name is not None)]
    return math.prod(kind.mesh.shape[name] for name in names)


def examples(operation: str, batch: Tree) -> int:
    """The length of the first axis, which all arrays of a batch share."""
    found: dict[int, str] = {}
    leaves, structure = tree.flatten(operation, batch)
    for leaf, name in zip(leaves, structure.paths(), strict=True):
        if leaf is None:
            continue
        with renamed(operation, name):
            shape = shape_of(leaf)
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # gradients of integers, which jit takes
            raise GradCombineError(operation, "a batch of numbers", "an array of float0", name)
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
    return require_integer(operation, expected, microbatches)
