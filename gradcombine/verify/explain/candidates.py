"""The known ways in which frameworks combine contributions: summation orders, precisions and scalings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.foreign_orders import addn_blocks, hierarchical_copy, left_chain, mean_of_means, ring, welford
from gradcombine.fused import multiply_add
from gradcombine.pairwise import fold_pairwise
from gradcombine.types import Array, Tree

Order: TypeAlias = Callable[[Sequence[Tree]], Tree]
Split: TypeAlias = Callable[[Sequence[Tree], int], list[Sequence[Tree]]]


def splits(count: int, ranks: Sequence[int]) -> Iterator[tuple[int, str, Split]]:
    """The ways to distribute contributions over ranks: the number of ranks, a description, and the function."""
    for number in ranks:
        if number == count > 1:
            yield number, "", blocks
        elif number > 1 and count % number == 0:
            yield number, ", split into blocks", blocks
            yield number, ", dealt round-robin", round_robin


def blocks(trees: Sequence[Tree], ranks: int) -> list[Sequence[Tree]]:
    """Gives each rank a block of consecutive contributions."""
    size = len(trees) // ranks
    return [trees[i : i + size] for i in range(0, len(trees), size)]


def round_robin(trees: Sequence[Tree], ranks: int) -> list[Sequence[Tree]]:
    """Gives contribution i to rank ``i % ranks``."""
    return [trees[rank::ranks] for rank in range(ranks)]


def from_the_last(trees: Sequence[Tree]) -> Tree:
    """Adds one after another, from the last to the first."""
    return left_chain(trees[::-1])


def canonical(trees: Sequence[Tree]) -> Tree:
    """Adds in the canonical binary tree over the contributions' numbers."""
    return fold_pairwise(lambda a, b: left_chain([a, b]), trees)


def by_rank(split: Split, ranks: int, over: Order, trees: Sequence[Tree], factor: np.generic | None = None) -> Tree:
    """Adds each rank's contributions one after another; adds the sums, times ``factor``, in the order ``over``."""
    sums = [left_chain(part) for part in split(trees, ranks)]
    return over(sums if factor is None else [mapped(partial(np.multiply, factor), x) for x in sums])


EXCHANGES: tuple[tuple[int, float, str, Order], ...] = (
    (2, 10, "by psum", left_chain),
    (4, math.inf, "in a tree", canonical),
    (3, 3, "in a ring", ring),
    (3, 3, "in a ring, leaf by leaf,", partial(ring, packed=False)),
    (4, 4, "by HierarchicalCopyAllReduce", hierarchical_copy),
)
"""Orders over ranks: the number of ranks from which an order differs from those above it, that number if each rank has
one contribution, its name, and the function."""


def orders(count: int, ranks: Sequence[int]) -> Iterator[tuple[str, Order]]:
    """All known orders for ``count`` contributions over any of the numbers of replicas in ``ranks``, with their names.

    Orders that coincide for few contributions are listed once.
    """
    names = [f"x_{i}" for i in range(count)]
    for least, name, order in (
        (1, "one after another", left_chain),
        (3, "one after another, from the last to the first", from_the_last),
        (4, "in the canonical tree (order='tree')", canonical),
        (10, "by AddN (tf.add_n on CPU)", addn_blocks),
        (11, "by AddN, terms sorted by name (tf.function)", partial(addn_blocks, names=names)),
    ):
        if count >= least:
            yield name, order
    for number, how, split in splits(count, ranks):
        for least, least_of_one_each, name, order in EXCHANGES:
            if number >= (least_of_one_each if number == count else least):
                yield f"{name} over {number} ranks{how}", partial(by_rank, split, number, order)


ACCUMULATORS: tuple[type, ...] = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)


class Candidate(NamedTuple):
    """One way to combine the contributions.

    Attributes:
      order: the order of the additions.
      accumulator: the dtype that sums are rounded to.
      scaling: how weights and the number of contributions are applied.
      run: computes the result, in the accumulator's or the contributions' dtype.
      others: alternatives to ``run``, if each chunk of the actual result may come from a different one, and the
        boundaries of the chunks are unknown.
    """

    order: str
    accumulator: str
    scaling: str
    run: Callable[[], Tree]
    others: tuple[Callable[[], Tree], ...] = ()

    def __str__(self) -> str:
        return f"{self.scaling}, added {self.order}, in {self.accumulator}"


def candidates(trees: Sequence[Tree], weights: Sequence[float] | None, ranks: Sequence[int]) -> Iterator[Candidate]:
    """All candidates for float contributions, the likely ones first.

    Args:
      trees: the contributions in order, as NumPy trees of one structure.
      weights: one per tree, or None.
      ranks: the numbers of replicas that may have held them.
    """
    dtypes = dtypes_of(trees)
    known = dict(orders(len(trees), ranks))
    common = [np.dtype(x) for x in ACCUMULATORS]
    for dtype in [*common, *sorted(dtypes - set(common), key=str)]:
        cast = [as_dtype(x, dtype) for x in trees]
        for name, order in known.items():
            if dtype not in common and name.startswith("in a ring"):
                continue  # TensorFlow's ring does not support such dtypes
            for scaling, run in scaled(order, cast, weights, dtype):
                yield Candidate(name, str(dtype), scaling, run)
    wide = np.dtype(np.float64) in dtypes
    if not dtypes <= set(common):
        # Narrower dtypes are exactly representable in float32.
        trees = [as_dtype(x, np.dtype(np.float64 if wide else np.float32)) for x in trees]
    yield from _precise(trees, weights)
    yield from _means(trees, weights, ranks, wide)


def dtypes_of(trees: Sequence[Tree]) -> set[np.dtype]:
    """The dtypes of all leaves."""
    return {x.dtype for value in trees for x in tree.flatten(value)[0] if x is not None}


def as_dtype(value: Tree, dtype: np.dtype) -> Tree:
    """Casts all leaves."""
    return mapped(partial(np.asarray, dtype=dtype), value)


def mapped(function: Callable[..., Array], *trees: Tree) -> Tree:
    """Maps a function over the leaves of the trees; None stays None."""
    leaves, structure = tree.flatten(trees[0])
    others = [tree.flatten_as(structure, other) for other in trees[1:]]
    rows = zip(leaves, *others, strict=True)
    return tree.unflatten(structure, [None if row[0] is None else np.asarray(function(*row)) for row in rows])


def scaled(
    order: Order, trees: Sequence[Tree], weights: Sequence[float] | None, dtype: np.dtype
) -> Iterator[tuple[str, Callable[[], Tree]]]:
    """Sums and means in an order, with every known scaling by the number of contributions or by weights."""
    count, one = dtype.type(len(trees)), dtype.type(1)

    def times(value: Tree, factor: np.generic) -> Tree:
        return mapped(partial(np.multiply, factor), value)

    def over(value: Tree, divisor: np.generic) -> Tree:
        def quotient(x: np.ndarray) -> np.ndarray:
            return np.true_divide(x, divisor)

        return mapped(quotient, value)

    total = cache(lambda: order(trees))
    yield "sum", total
    yield "sum / n", lambda: over(total(), count)
    yield "sum * (1 / n)", lambda: times(total(), one / count)
    yield "sum of each / n", lambda: order([over(x, count) for x in trees])
    yield "sum of each * (1 / n)", lambda: order([times(x, one / count) for x in trees])
    if weights is None:
        return
    rounded, units = [dtype.type(float(w)) for w in weights], dtype.type(float(sum(weights)))  # also beyond int64
    weighted = cache(lambda: order(list(map(times, trees, rounded))))
    yield "weighted sum", weighted
    yield "weighted sum / total weight", lambda: over(weighted(), units)
    yield "weighted sum * (1 / total weight)", lambda: times(weighted(), one / units)
    yield (
        "sum of each * (weight / total weight)",
        lambda: order([times(x, w / units) for x, w in zip(trees, rounded, strict=True)]),
    )
    yield "weighted sum / n", lambda: over(weighted(), count)
    if dtype == np.float32 and order is left_chain:
        yield "weighted sum, fused multiply-adds", lambda: _fused(trees, rounded)
        yield "weighted sum, fused multiply-adds, / total weight", lambda: over(_fused(trees, rounded), units)


def _precise(trees: Sequence[Tree], weights: Sequence[float] | None) -> Iterator[Candidate]:
    """gradcombine's compensated and exact precisions."""
    sums, means = gc.reductions.sum, gc.reductions.mean
    for precision, order, total, mean in (
        ("compensated", "one after another", sums("compensated"), means("compensated")),
        ("exact", "in any order", sums("exact"), means("exact")),
    ):
        yield Candidate(order, precision, "sum", partial(gc.combine, total, trees))
        yield Candidate(order, precision, "sum / n", partial(gc.combine, mean, trees))
        if weights is not None:
            yield Candidate(order, precision, "weighted sum", partial(gc.combine, total, trees, weights))
            yield Candidate(order, precision, "weighted sum / total weight", partial(gc.combine, mean, trees, weights))


def _means(
    trees: Sequence[Tree], weights: Sequence[float] | None, ranks: Sequence[int], wide: bool
) -> Iterator[Candidate]:
    """Means that are not scaled sums: Welford's, and means of means."""
    chain = "one after another"
    if not wide:
        for dtype in map(np.dtype, ACCUMULATORS[:3]):
            run = partial(welford, trees, accumulator=dtype)
            yield Candidate(chain, str(dtype), "Welford's mean (optax.MultiSteps)", run)
        run = partial(welford, trees, fused=False)
        yield Candidate(chain, "float32", "Welford's mean, no fused multiply-adds", run)
        run = partial(welford, trees, divided=True)
        yield Candidate(chain, "float32", "Welford's mean, divided (optax.MultiSteps on JAX 0.9)", run)
    accumulator = "float64" if wide else "float32"
    for number, how, split in splits(len(trees), ranks):
        if number == len(trees):
            continue
        sorted_by_rank = [x for part in split(trees, number) for x in part]
        name = f"by rank over {number} ranks{how}"
        yield Candidate(name, accumulator, "mean of means", partial(mean_of_means, sorted_by_rank, number))
        if weights is not None:
            scales = [w for part in split(weights, number) for w in part]
            run = partial(mean_of_means, sorted_by_rank, number, scales)
            yield Candidate(name, accumulator, "mean of weighted means", run)


def _fused(trees: Sequence[Tree], weights: Sequence[np.float32]) -> Tree:
    """Accumulates ``acc = w * x + acc`` with one rounding, as contracted by XLA."""
    total = mapped(np.zeros_like, trees[0])
    for x, weight in zip(trees, weights, strict=True):
        total = mapped(partial(_multiply_add, weight), x, total)
    return total


def _multiply_add(weight: np.float32, x: np.ndarray, total: np.ndarray) -> Array:
    return multiply_add(NUMPY, x, weight, total)
