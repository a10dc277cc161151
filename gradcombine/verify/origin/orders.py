"""The orders of addition that a result may have been made in. Each adds a list of trees in their own dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from gradcombine.foreign_orders import addn_blocks, hierarchical_copy, left_chain, ring
from gradcombine.pairwise import fold_pairwise
from gradcombine.types import Tree

Order: TypeAlias = Callable[[Sequence[Tree]], Tree]
Split: TypeAlias = Callable[[Sequence[Tree], int], list[Sequence[Tree]]]


def orders(count: int, ranks: Sequence[int]) -> Iterator[tuple[str, Order]]:
    """Every order for this many contributions, with its name; those that are the same for so few are named once.

    Args:
      count: of contributions.
      ranks: numbers of replicas that may have shared them.
    """
    yield "one after another", left_chain
    if count < 3:
        return
    yield "one after another, from the last to the first", lambda trees: left_chain(trees[::-1])
    if count > 3:
        yield "canonical tree (order='tree')", canonical
    if count > 9:
        yield "AddN (tf.add_n on CPU)", addn_blocks
    if count > 10:
        names = [f"x_{i}" for i in range(count)]
        yield "AddN, terms sorted by name (tf.function)", partial(addn_blocks, names=names)
    for number in ranks:
        if number < 2 or count % number:
            continue
        whole = number == count
        for how, split in (("in blocks", blocks), ("in turn", turns)) if not whole else (("", blocks),):
            over = f"over {number} ranks" + (f", dealt {how}" if how else "")
            if not whole or number > 9:
                yield f"psum by rank {over}", partial(_twice, split, number, left_chain)
            if number > 3 and not whole:
                yield f"tree by rank {over}", partial(_twice, split, number, canonical)
            if number > 2:
                yield f"ring {over}", partial(_twice, split, number, ring)
                yield f"ring, a leaf at a time, {over}", partial(_twice, split, number, partial(ring, packed=False))
            if number > 3:
                yield f"HierarchicalCopyAllReduce {over}", partial(_twice, split, number, hierarchical_copy)


def blocks(trees: Sequence[Tree], ranks: int) -> list[Sequence[Tree]]:
    """The first rank has the first contributions, and so on."""
    each = len(trees) // ranks
    return [trees[i : i + each] for i in range(0, len(trees), each)]


def turns(trees: Sequence[Tree], ranks: int) -> list[Sequence[Tree]]:
    """Contribution i is on rank i modulo their number."""
    return [trees[rank::ranks] for rank in range(ranks)]


def canonical(trees: Sequence[Tree]) -> Tree:
    """The binary tree over the contributions' numbers."""
    return fold_pairwise(lambda a, b: left_chain([a, b]), trees)


def _twice(split: Split, ranks: int, over: Order, trees: Sequence[Tree]) -> Tree:
    """Each rank adds its own one after another; the ranks' sums are added by ``over``."""
    return over([left_chain(own) for own in split(trees, ranks)])
