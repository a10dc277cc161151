"""The ways in which frameworks combine contributions: every order of additions, precision and scaling that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.registry import load
from gradcombine.foreign_orders import (
    addn_blocks,
    hierarchical_copy,
    left_chain,
    mean_of_means,
    ring,
    welford,
)
from gradcombine.fused import multiply_add
from gradcombine.pairwise import fold_pairwise
from gradcombine.types import Array, Tree

Order: TypeAlias = Callable[[Sequence[Tree]], Tree]
Split: TypeAlias = Callable[[Sequence[Tree], int], list[Sequence[Tree]]]


def orders(count: int, ranks: Sequence[int]) -> Iterator[tuple[str, Order]]:
    """Every order for so many contributions on any of these numbers of replicas, with its name.

    Orders that are the same for so few are given once.
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
    for number, how, split in dealt(count, ranks):
        whole, over = number == count, f"over {number} ranks{how}"
        if not whole or number > 9:
            yield f"psum by rank {over}", partial(twice, split, number, left_chain)
        if number > 3 and not whole:
            yield f"tree by rank {over}", partial(twice, split, number, canonical)
        if number > 2:
            yield f"ring {over}", partial(twice, split, number, ring)
            yield f"ring, a leaf at a time, {over}", partial(twice, split, number, partial(ring, packed=False))
        if number > 3:
            yield f"HierarchicalCopyAllReduce {over}", partial(twice, split, number, hierarchical_copy)


def dealt(count: int, ranks: Sequence[int]) -> Iterator[tuple[int, str, Split]]:
    """The ways in which contributions may lie on so many ranks: the number, how it is said, and which has which."""
    for number in ranks:
        if number == count > 1:
            yield number, "", blocks
        elif number > 1 and count % number == 0:
            yield number, ", dealt in blocks", blocks
            yield number, ", dealt in turn", turns


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


def twice(split: Split, ranks: int, over: Order, trees: Sequence[Tree]) -> Tree:
    """Each rank adds its contributions one after another; the ranks' sums are added by ``over``."""
    return over([left_chain(part) for part in split(trees, ranks)])


ACCUMULATORS: tuple[type, ...] = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)


class Candidate(NamedTuple):
    """One way to combine the contributions.

    Attributes:
      order: of the additions.
      accumulator: the dtype that they are rounded to.
      scaling: how weights and the number of contributions enter.
      run: the result, in the accumulator's dtype or in the contributions' own.
      others: further results, if each chunk of the real one is that of one of them, and where the chunks begin depends
        on more than is known here.
    """

    order: str
    accumulator: str
    scaling: str
    run: Callable[[], Tree]
    others: tuple[Callable[[], Tree], ...] = ()

    def __str__(self) -> str:
        return f"{self.scaling}, added {self.order}, in {self.accumulator}"


def candidates(trees: Sequence[Tree], weights: Sequence[float] | None, ranks: Sequence[int]) -> Iterator[Candidate]:
    """All candidates for float contributions, NumPy trees of one structure in their order; the likely ones first.

    ``weights``: one for each tree, if there were any; ``ranks``: numbers of replicas that may have held them.
    """
    own = present(trees)
    known = dict(orders(len(trees), ranks))
    common = [np.dtype(x) for x in ACCUMULATORS]
    for dtype in [*common, *sorted(own - set(common), key=str)]:
        cast = [as_dtype(x, dtype) for x in trees]
        for name, order in known.items():
            if dtype not in common and name.startswith("ring"):
                continue  # TensorFlow's ring does not take such a dtype
            for scaling, run in scaled(order, cast, weights, dtype):
                yield Candidate(name, str(dtype), scaling, run)
    wide = np.dtype(np.float64) in own
    if not own <= set(common):
        # Narrower dtypes are exact in float32.
        trees = [as_dtype(x, np.dtype(np.float64 if wide else np.float32)) for x in trees]
    yield from _precise(trees, weights)
    yield from _means(trees, weights, ranks, wide)


def present(trees: Sequence[Tree]) -> set[np.dtype]:
    """The dtypes of all leaves."""
    return {x.dtype for value in trees for x in tree.flatten(value)[0] if x is not None}


def as_dtype(value: Tree, dtype: np.dtype) -> Tree:
    """The tree in another dtype."""

    def cast(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return x.astype(dtype)

    return mapped(cast, value)


def mapped(function: Callable[..., Array], *trees: Tree) -> Tree:
    """The function of every leaf; None stays."""
    leaves, structure = tree.flatten(trees[0])
    others = [tree.flatten_as(structure, other) for other in trees[1:]]
    rows = zip(leaves, *others, strict=True)
    return tree.unflatten(structure, [None if row[0] is None else np.asarray(function(*row)) for row in rows])


def scaled(
    order: Order, trees: Sequence[Tree], weights: Sequence[float] | None, dtype: np.dtype
) -> Iterator[tuple[str, Callable[[], Tree]]]:
    count, one = dtype.type(len(trees)), dtype.type(1)

    def times(factors: Sequence[np.generic]) -> list[Tree]:
        return [mapped(partial(np.multiply, factor), x) for factor, x in zip(factors, trees, strict=True)]

    total = cache(lambda: order(trees))
    yield "sum", total
    yield "sum / n", lambda: _quiet(np.true_divide, total(), count)
    yield "sum * (1 / n)", lambda: _quiet(np.multiply, total(), one / count)
    yield "sum of each / n", lambda: order([_quiet(np.true_divide, x, count) for x in trees])
    yield "sum of each * (1 / n)", lambda: order(times([one / count] * len(trees)))
    if weights is None:
        return
    rounded = [dtype.type(w) for w in weights]
    units = dtype.type(sum(weights))
    weighted = cache(lambda: order(times(rounded)))
    yield "weighted sum", weighted
    yield "weighted sum / total weight", lambda: _quiet(np.true_divide, weighted(), units)
    yield "weighted sum * (1 / total weight)", lambda: _quiet(np.multiply, weighted(), one / units)
    yield "sum of each * (weight / total weight)", lambda: order(times([w / units for w in rounded]))
    yield "weighted sum / n", lambda: _quiet(np.true_divide, weighted(), count)
    if dtype == np.float32 and order is left_chain:
        yield "weighted sum, fused multiply-adds", lambda: _fused(trees, rounded)
        fused = "weighted sum, fused multiply-adds, / total weight"
        yield fused, lambda: _quiet(np.true_divide, _fused(trees, rounded), units)


def _precise(trees: Sequence[Tree], weights: Sequence[float] | None) -> Iterator[Candidate]:
    """The compensated and the exact precision of gradcombine."""
    for precision in ("compensated", "exact"):
        for scaling, reduction, used in (
            ("sum", gc.reductions.sum(precision), None),
            ("sum / n", gc.reductions.mean(precision), None),
            ("weighted sum", gc.reductions.sum(precision), weights),
            ("weighted sum / total weight", gc.reductions.mean(precision), weights),
        ):
            if used is not None or not scaling.startswith("weighted"):
                run = partial(gc.combine, reduction, list(trees), used)
                yield Candidate(
                    "in any order" if precision == "exact" else "one after another", precision, scaling, run
                )


def _means(
    trees: Sequence[Tree], weights: Sequence[float] | None, ranks: Sequence[int], wide: bool
) -> Iterator[Candidate]:
    """Means that are not scaled sums."""
    fused, plain = "Welford's mean (optax.MultiSteps)", "Welford's mean, no fused multiply-adds"
    divided = "Welford's mean, divided (optax.MultiSteps on JAX 0.9)"
    if not wide:
        for dtype in (np.dtype(x) for x in ACCUMULATORS[:3]):
            run = partial(welford, list(trees), accumulator=dtype)
            yield Candidate("one after another", str(dtype), fused, run)
        yield Candidate("one after another", "float32", plain, partial(welford, list(trees), fused=False))
        yield Candidate("one after another", "float32", divided, partial(welford, list(trees), divided=True))
    accumulator = "float64" if wide else "float32"
    for number, how, split in dealt(len(trees), ranks):
        if number == len(trees):
            continue
        by_rank = [x for part in split(trees, number) for x in part]
        name = f"by rank over {number} ranks{how}"
        yield Candidate(name, accumulator, "mean of means", partial(mean_of_means, by_rank, number))
        if weights is not None:
            scales = [w for part in split(list(weights), number) for w in part]
            run = partial(mean_of_means, by_rank, number, scales)
            yield Candidate(name, accumulator, "mean of weighted means", run)


def _quiet(operation: Any, value: Tree, scalar: Any) -> Tree:
    def apply(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return operation(x, scalar)

    return mapped(apply, value)


def _fused(trees: Sequence[Tree], weights: Sequence[np.float32]) -> Tree:
    """``acc = w * x + acc`` with one rounding, as XLA contracts it."""
    backend = load("numpy")
    total = mapped(np.zeros_like, trees[0])
    for x, weight in zip(trees, weights, strict=True):

        def add(a: np.ndarray, b: np.ndarray, w: np.float32 = weight) -> Array:
            return multiply_add(backend, a, w, b)

        total = mapped(add, x, total)
    return total
