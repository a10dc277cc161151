"""The canonical order: a fixed binary tree over the indices of the contributions.

Node ``j`` of level ``i`` covers the indices ``[j * 2**i, (j + 1) * 2**i)``; indices past the last contribution are
skipped, so 7 contributions combine as ``((0 1)(2 3))((4 5)6)``. A block whose length is a power of two, and whose start
is a multiple of its length, is one node of the tree: so replicas or windows that hold such blocks combine to the same
bits as a list of all contributions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TypeVar

from gradcombine.backends.protocol import Backend, Collective
from gradcombine.types import Array

T = TypeVar("T")


def fold_pairwise(merge: Callable[[T, T], T], items: Iterable[T]) -> T:
    """Merges the items in the canonical order; holds at most ceil(log2 n) + 1 intermediate results at a time.

    >>> fold_pairwise(lambda a, b: f"({a} {b})", "0123456")
    '(((0 1) (2 3)) ((4 5) 6))'
    """
    counter: list[T | None] = []
    for item in items:
        carry, level = item, 0
        while level < len(counter) and (earlier := counter[level]) is not None:
            carry, counter[level] = merge(earlier, carry), None
            level += 1
        if level == len(counter):
            counter.append(None)
        counter[level] = carry
    return fold_levels(merge, [node for node in counter if node is not None])


def fold_levels(merge: Callable[[T, T], T], levels: Iterable[T]) -> T:
    """Merges the levels of a binary counter, lowest (latest items) first, into one."""
    return reduce(lambda later, earlier: merge(earlier, later), levels)


def fold_ranks(
    backend: Backend,
    collective: Collective,
    merge: Callable[[T, T], T],
    arrays_of: Callable[[T], list[Array]],
    rebuild: Callable[[Sequence[Array]], T],
    ranks: Iterable[list[Array]],
) -> T:
    """Merges the states of all replicas in the canonical order.

    Args:
      backend: the backend of the arrays. In a graph, more than two ranks share one trace of the merge.
      collective: the collective of the replicas.
      merge: the merge of two states.
      arrays_of: the arrays of a state.
      rebuild: the state with these arrays.
      ranks: the arrays of each replica's state.
    """

    def merged(*arrays: Array) -> list[Array]:
        half = len(arrays) // 2
        return arrays_of(merge(rebuild(arrays[:half]), rebuild(arrays[half:])))

    pair = backend.traced(merged) if collective.size() > 2 else merged
    return rebuild(fold_pairwise(lambda a, b: pair(*a, *b), ranks))


def sum_rows(backend: Backend, rows: Array) -> Array:
    """Adds the rows of an array in the canonical order, all nodes of a level at once; the result has one row."""
    while (n := backend.shape(rows)[0]) > 1:
        pairs = backend.add(rows[0 : n - n % 2 : 2], rows[1::2])
        rows = backend.concat([pairs, rows[n - 1 :]]) if n % 2 else pairs
    return rows
