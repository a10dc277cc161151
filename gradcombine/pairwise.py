"""The canonical order: one fixed binary tree over the numbers of the contributions.

Node ``j`` of level ``i`` covers the numbers ``[j * 2**i, (j + 1) * 2**i)``. What is missing at the end is left out, so
7 contributions combine as ``((0 1)(2 3))((4 5)6)``. A block whose length is a power of two, and which begins at a
multiple of its length, is one node of the tree: so replicas or windows that hold such blocks combine to the same bits
as one list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def fold_pairwise(merge: Callable[[T, T], T], items: Iterable[T]) -> T:
    """The items merged in the canonical order, with at most ceil(log2 n) + 1 of them held at a time.

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
    """The levels of a binary counter, lowest (latest) first, merged into one."""
    nodes = iter(levels)
    total = next(nodes)
    for earlier in nodes:
        total = merge(earlier, total)
    return total
