"""From "it is 3 ulp off" to "it is the ring over 4 ranks": which order, precision and scaling made a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.registry import is_absent, load
from gradcombine.errors import GradCombineError
from gradcombine.foreign_orders import (
    addn_blocks,
    hierarchical_copy,
    left_chain,
    mean_of_means,
    multiply_add,
    ring,
    welford,
)
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.types import Tree
from gradcombine.verify.pytorch import converted
from gradcombine.verify.ulp import NAN_DISTANCE, ulp_distance

LISTED = 8
"""How many candidates are named if several give the result."""


class Verdict(NamedTuple):
    """How near one candidate comes to the result.

    Attributes:
      candidate: what was tried.
      equal: whether it gives the result to the bit.
      share: how many of the informative elements it gives to the bit, as a fraction.
      max_ulp: the largest distance, in units in the last place of the result.
    """

    candidate: Candidate
    equal: bool
    share: float
    max_ulp: int


class Explanation(NamedTuple):
    """How near each candidate comes to a result.

    Attributes:
      verdicts: every candidate, the nearest first; of equals, the simplest first.
      elements: how many are informative: those of the leaves that tell candidates apart.
      uninformative: the leaves that every candidate gives, such as zeros.
    """

    verdicts: tuple[Verdict, ...]
    elements: int
    uninformative: tuple[str, ...] = ()

    @property
    def matches(self) -> tuple[Verdict, ...]:
        """The candidates that give the result to the bit; none if all of them do, which says nothing."""
        return tuple(verdict for verdict in self.verdicts if verdict.equal and self.elements)

    def __str__(self) -> str:
        matches = self.matches
        if not self.elements:
            return f"all {len(self.verdicts)} known ways give this result: it does not tell which one made it"
        if matches:
            lines = [f"the result is, to the bit: {matches[0].candidate}"]
            lines += [f"  as well as: {verdict.candidate}" for verdict in matches[1:LISTED]]
            lines += [f"  and {len(matches) - LISTED} more"] if len(matches) > LISTED else []
        else:
            nearest = self.verdicts[0]
            lines = [
                f"no known order gives this result; the nearest is: {nearest.candidate} "
                f"({nearest.share:.1%} of the elements equal, the largest distance {nearest.max_ulp:,} ulp)"
            ]
        if self.uninformative:
            lines.append(f"  uninformative leaves, which all candidates give: {_listed(self.uninformative)}")
        return "\n".join(lines)


def explain(
    contributions: Sequence[Tree],
    result: Tree,
    weights: Sequence[float] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, str], None] = lambda tried, name: None,
) -> Explanation:
    """Finds the order of additions, the precision and the scaling that made a result of its contributions.

    It tries left chains, the canonical tree, TensorFlow's AddN, rings, psum and hierarchical copies over several
    numbers of ranks, Welford's mean (optax.MultiSteps) and means of means; with accumulators of float32, bfloat16,
    float16 and float64, compensated and exact; as a sum, or a mean that divides, multiplies by the reciprocal, or
    scales each contribution first; with the weights, and without them.

    Args:
      contributions: trees of float arrays (float8 and float64 too), of any framework, in the order of their numbers.
      result: the tree that was made of them, of the same structure. It may be narrower than the contributions.
      weights: one for each contribution, if there were any.
      ranks: the numbers of replicas that may have held the contributions; None: all that divide their number.
      progress: called before each candidate, with how many have been tried and its name.

    Returns:
      An `Explanation`, which prints as a sentence. Several candidates match if the contributions cannot tell them
      apart, as small integers cannot; a thousand elements of real gradients can. Leaves that all candidates give, such
      as zeros, are uninformative: they are named, and a result of nothing else matches none.

    Raises:
      GradCombineError: for an empty list, trees without an element, trees that do not match, leaves that are not
        floats, and a wrong number of weights.

    >>> import numpy as np
    >>> from gradcombine.verify import explain
    >>> rng = np.random.default_rng(0)
    >>> gradients = [{"w": rng.normal(size=400).astype(np.float32)} for _ in range(5)]
    >>> from_the_last = sum(g["w"] for g in reversed(gradients))
    >>> print(explain(gradients, {"w": from_the_last / np.float32(5)}))
    the result is, to the bit: sum / n, added one after another, from the last to the first, in float32
    """
    trees = [_numpy(value) for value in contributions]
    if not trees:
        raise GradCombineError("explain", "one contribution or more", "an empty list")
    if weights is not None and len(weights) != len(trees):
        raise GradCombineError("explain", f"{len(trees)} weights", len(weights))
    wanted, structure = tree.flatten("explain", _numpy(result))
    for value in trees:
        _require_alike(structure, wanted, value)
    sizes = [0 if x is None else x.size for x in wanted]
    if not sum(sizes):
        raise GradCombineError("explain", "one element or more in the result", "none")
    if ranks is None:
        ranks = [number for number in range(2, len(trees) + 1) if len(trees) % number == 0]
    measured: list[tuple[Candidate, list[_Leaf]]] = []
    for tried, candidate in enumerate(candidates(trees, weights, ranks)):
        progress(tried, str(candidate))
        measured.append((candidate, _measured(candidate, structure, wanted)))
    informative = [any(leaves[i].equal < size for _, leaves in measured) for i, size in enumerate(sizes)]
    elements = sum(compress(sizes, informative))
    verdicts = [_verdict(candidate, [*compress(leaves, informative)], elements) for candidate, leaves in measured]
    verdicts.sort(key=lambda verdict: (not verdict.equal, -verdict.share, verdict.max_ulp))
    rows = zip(structure.paths(), sizes, informative, strict=True)
    uninformative = tuple(path for path, size, tells in rows if size and not tells)
    return Explanation(tuple(verdicts), elements, uninformative)


def _numpy(value: Tree) -> Tree:
    leaves, structure = tree.flatten("explain", converted("explain", value))
    arrays = [None if is_absent(x) else np.asarray(x) for x in leaves]
    for array, path in zip(arrays, structure.paths(), strict=True):
        if array is not None and (dtypes.kind(array.dtype) != "float" or array.dtype.itemsize > 8):
            raise GradCombineError("explain", "a float array of 64 bits at most", array.dtype, path)
    return tree.unflatten(structure, arrays)


def _require_alike(structure: tree.Structure, wanted: Sequence[Any], value: Tree) -> None:
    for x, expected, path in zip(tree.flatten_as("explain", structure, value), wanted, structure.paths(), strict=True):
        shapes = [None if side is None else side.shape for side in (expected, x)]
        if shapes[0] != shapes[1]:
            raise GradCombineError("explain", f"the result's shape, {shapes[0]}", shapes[1], path)


class _Leaf(NamedTuple):
    """How many elements of a leaf have a candidate's bits, and how far away the worst is."""

    equal: int
    max_ulp: int


def _measured(candidate: Candidate, structure: tree.Structure, wanted: Sequence[Any]) -> list[_Leaf]:
    with np.errstate(all="ignore"):
        made = tree.flatten_as("explain", structure, candidate.run())
    measured: list[_Leaf] = []
    for x, expected in zip(made, wanted, strict=True):
        if expected is None:
            measured.append(_Leaf(0, 0))
            continue
        with np.errstate(all="ignore"):
            own = np.asarray(x).astype(expected.dtype)
        distances = ulp_distance(own, expected)
        # The sign of a zero is a bit, though not a distance; the payload of NaN does not count.
        same = (distances == 0) & ((np.signbit(own) == np.signbit(expected)) | np.isnan(expected))
        measured.append(_Leaf(int(np.count_nonzero(same)), int(distances.max(initial=0))))
    return measured


def _verdict(candidate: Candidate, leaves: Sequence[_Leaf], elements: int) -> Verdict:
    equal = sum(leaf.equal for leaf in leaves)
    worst = max((leaf.max_ulp for leaf in leaves), default=0)
    return Verdict(candidate, equal == elements, equal / max(elements, 1), min(worst, NAN_DISTANCE))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(name or "(root)" for name in names[:LISTED]) + more


Order: TypeAlias = Callable[[Sequence[Tree]], Tree]
Split: TypeAlias = Callable[[Sequence[Tree], int], list[Sequence[Tree]]]


def orders(count: int, ranks: Sequence[int]) -> Iterator[tuple[str, Order]]:
    """Every order for this many contributions, with its name; orders that are the same for so few are given once.

    Args:
      count: of contributions.
      ranks: numbers of replicas that may have held them.
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
    """Each rank adds its contributions one after another; the ranks' sums are added by ``over``."""
    return over([left_chain(part) for part in split(trees, ranks)])


ACCUMULATORS: tuple[Any, ...] = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)


class Candidate(NamedTuple):
    """One way to combine the contributions.

    Attributes:
      order: of the additions.
      accumulator: the dtype that they are rounded to.
      scaling: how weights and the number of contributions enter.
      run: the result, in the accumulator's dtype or in the contributions' own.
    """

    order: str
    accumulator: str
    scaling: str
    run: Callable[[], Tree]

    def __str__(self) -> str:
        return f"{self.scaling}, added {self.order}, in {self.accumulator}"


def candidates(trees: Sequence[Tree], weights: Sequence[float] | None, ranks: Sequence[int]) -> Iterator[Candidate]:
    """All candidates for float contributions; the likely ones first.

    Args:
      trees: NumPy trees of one structure, in their order.
      weights: one for each tree, if there were any.
      ranks: numbers of replicas that may have held them.
    """
    present = {x.dtype for value in trees for x in tree.flatten("explain", value)[0] if x is not None}
    known = dict(orders(len(trees), ranks))
    common = [np.dtype(x) for x in ACCUMULATORS]
    for dtype in [*common, *sorted(present - set(common), key=str)]:
        cast = [as_dtype(x, dtype) for x in trees]
        for name, order in known.items():
            if dtype not in common and name.startswith("ring"):
                continue  # TensorFlow's ring does not take such a dtype
            for scaling, run in _scaled(order, cast, weights, dtype):
                yield Candidate(name, str(dtype), scaling, run)
    wide = np.dtype(np.float64) in present
    if not present <= set(common):
        # Narrower dtypes are exact in float32.
        trees = [as_dtype(x, np.dtype(np.float64 if wide else np.float32)) for x in trees]
    yield from _precise(trees, weights)
    yield from _means(trees, weights, ranks, wide)


def as_dtype(value: Tree, dtype: np.dtype) -> Tree:
    """The tree in another dtype."""

    def cast(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return x.astype(dtype)

    return mapped(cast, value)


def mapped(function: Callable[..., Any], *trees: Tree) -> Tree:
    """The function of every leaf; None stays."""
    leaves, structure = tree.flatten("explain", trees[0])
    others = [tree.flatten_as("explain", structure, other) for other in trees[1:]]
    rows = zip(leaves, *others, strict=True)
    return tree.unflatten(structure, [None if row[0] is None else np.asarray(function(*row)) for row in rows])


def _scaled(
    order: Order, trees: Sequence[Tree], weights: Sequence[float] | None, dtype: np.dtype
) -> Iterator[tuple[str, Callable[[], Tree]]]:
    count, one = dtype.type(len(trees)), dtype.type(1)

    def scaled(factors: Sequence[Any]) -> list[Tree]:
        return [mapped(partial(np.multiply, factor), x) for factor, x in zip(factors, trees, strict=True)]

    total = cache(lambda: order(trees))
    yield "sum", total
    yield "sum / n", lambda: _quiet(np.true_divide, total(), count)
    yield "sum * (1 / n)", lambda: _quiet(np.multiply, total(), one / count)
    yield "sum of each / n", lambda: order([_quiet(np.true_divide, x, count) for x in trees])
    yield "sum of each * (1 / n)", lambda: order(scaled([one / count] * len(trees)))
    if weights is None:
        return
    rounded = [dtype.type(w) for w in weights]
    units = dtype.type(sum(weights))
    weighted = cache(lambda: order(scaled(rounded)))
    yield "weighted sum", weighted
    yield "weighted sum / total weight", lambda: _quiet(np.true_divide, weighted(), units)
    yield "weighted sum * (1 / total weight)", lambda: _quiet(np.multiply, weighted(), one / units)
    yield "sum of each * (weight / total weight)", lambda: order(scaled([w / units for w in rounded]))
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
    if not wide:
        for dtype in (np.dtype(x) for x in ACCUMULATORS[:3]):
            run = partial(welford, list(trees), accumulator=dtype)
            yield Candidate("one after another", str(dtype), fused, run)
        yield Candidate("one after another", "float32", plain, partial(welford, list(trees), fused=False))
    accumulator = "float64" if wide else "float32"
    for number in ranks:
        if number < 2 or len(trees) % number or number == len(trees):
            continue
        for how, split in (("in blocks", blocks), ("in turn", turns)):
            dealt = [x for part in split(trees, number) for x in part]
            name = f"by rank over {number} ranks, dealt {how}"
            yield Candidate(name, accumulator, "mean of means", partial(mean_of_means, dealt, number))
            if weights is not None:
                scales = [w for part in split(list(weights), number) for w in part]
                run = partial(mean_of_means, dealt, number, scales)
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

        def add(a: np.ndarray, b: np.ndarray, w: np.float32 = weight) -> Any:
            return multiply_add(backend, a, w, b)

        total = mapped(add, x, total)
    return total
