"""The orders in which PyTorch's processes add gradients, as far as their sources say so: DDP, and NCCL's all-reduces.

- **Accumulation.** ``.grad`` is a left chain over the backward passes, in the parameter's dtype (autograd's
  AccumulateGrad).
- **DDP** divides before it adds: each rank's ``.grad`` is multiplied by ``1 / ranks``, rounded to the gradients' dtype,
  as it is copied into its bucket (Reducer::mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp);
  divided by ``ranks``, if it is a view of the bucket already. FSDP leaves that to ``ncclAvg``, which multiplies each
  rank's part by ``1 / ranks``, too (FuncPreMulSum in NCCL's src/device/reduce_kernel.h).
- **Buckets** do not change which orders there are, only which elements take which.
- **Ring.** Each chunk goes once round, and begins at another rank: `ring_chunk`. Every addition is rounded to
  the gradients' dtype. Where a chunk begins depends on the size, the protocol and the number of channels, and these on
  the machine.
- **Tree.** A chain within each machine, and over machines one of two binary trees a chunk: `tree_chunk`.
- **NVLS**, the sum inside of an NVLink switch: of float32 the correctly rounded exact sum, which has no order; that was
  measured, and is not promised. Of bfloat16 it truncates: `nvls`.

References: DistributedDataParallel and reducer.cpp in PyTorch; src/device/all_reduce.h (runRing, runTreeSplit),
src/graph/trees.cc and connect.cc in NCCL; its maintainers in NVIDIA/nccl#545, #671 and #672 (chains within a machine),
#1026 (what is rounded), #1055 (channels take other orders) and #2360 (float32 sums of NVLS without an order, bfloat16
ones that depend on it); NVIDIA/Megatron-LM#6806 (16.7 million float32 sums of NVLS that were correctly rounded;
bfloat16 truncates).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from gradcombine.foreign_orders import left_chain
from gradcombine.types import Tree
from gradcombine.verify.explain.candidates import (
    Candidate,
    Order,
    Split,
    as_dtype,
    dealt,
    mapped,
    present,
    scaled,
    twice,
)

SHORTEST = 32
"""A chunk has this many elements or more, but for those that a leaf begins and ends with: NCCL's have hundreds."""

TELLING = 4
"""At this many elements another order has to fail for a chunk to be one: fewer may be errors, which some order fits."""


def ring_chunk(trees: Sequence[Tree], start: int) -> Tree:
    """A chunk's sum on a ring: ``((v_start + v_start+1) + ...) + v_start-1``, ranks from 0."""
    return left_chain([*trees[start:], *trees[:start]])


def tree_chunk(trees: Sequence[Tree], machines: int, second: bool = False) -> Tree:
    """A chunk's sum in NCCL's tree: in each machine a chain from its last rank to its first, then a binary tree.

    A machine adds what it receives to its chain's sum, the children in their order. In the first tree, machine m's
    parent is m with its lowest bit cleared and the next one set, or only cleared if that is none of them; 0 is the
    root. The second is the first one of the machines counted backwards, if their number is even; shifted by one, if it
    is odd.

    Args:
      trees: one a rank, in the order of the ranks: those of machine 0 first.
      machines: how many; each has as many ranks.
      second: which of the two trees.
    """
    each = len(trees) // machines
    chains = [left_chain(trees[i : i + each][::-1]) for i in range(0, len(trees), each)]
    if second:
        chains = chains[::-1] if machines % 2 == 0 else [*chains[1:], chains[0]]
    children: list[list[int]] = [[] for _ in chains]
    for machine in range(1, machines):
        low = machine & -machine
        parent = (machine ^ low) | (low << 1)
        children[parent if parent < machines else machine ^ low].append(machine)

    def total(machine: int) -> Tree:
        return left_chain([chains[machine], *map(total, children[machine])])

    return total(0)


def nvls(trees: Sequence[Tree]) -> Tree:
    """The sum in an NVLink switch, of float32 correctly rounded, of bfloat16 truncated towards zero: a model.

    The sources say of bfloat16 that it truncates, and that the result may depend on an order; they do not say how. The
    sum before it is rounded is exact to 2**-100 of its largest term.
    """
    return mapped(_nvls, *trees)


def _nvls(*terms: np.ndarray) -> np.ndarray:
    total, error = np.zeros(terms[0].shape), np.zeros(terms[0].shape)
    with np.errstate(all="ignore"):
        for term in terms:
            x, before = term.astype(np.float64), total
            total = before + x
            added = total - before
            error += (before - (total - added)) + (x - added)
        rounded = np.where(np.isfinite(total), total + error, total)
        if terms[0].dtype == np.float32:
            return rounded.astype(np.float32)
        lost = np.where(np.isfinite(total), (total - rounded) + error, 0)
        # bfloat16 has 8 of float64's 53 digits; a sum that was rounded up to 8 digits belongs to the number below.
        upper = rounded.view(np.uint64) >> np.uint64(45) << np.uint64(45)
        up = (upper.view(np.float64) == rounded) & (lost != 0) & (np.signbit(lost) != np.signbit(rounded))
        return (upper - np.where(up, np.uint64(1 << 45), np.uint64(0))).view(np.float64).astype(terms[0].dtype)


def chunked(leaves: Sequence[npt.NDArray[np.bool_]]) -> list[npt.NDArray[np.intp]]:
    """The order of each element of each leaf, if those of a chunk have one.

    One order is that of all elements, unless it fails at `TELLING` of them or more. ``leaves``: of each, [orders,
    elements], whether an order gives an element to the bit.
    """
    totals = np.sum([same.sum(axis=1) for same in leaves], axis=0)
    if len(totals) == 1 or sum(same.shape[1] for same in leaves) - totals.max(initial=0) < TELLING:
        return [np.full(same.shape[1], totals.argmax()) for same in leaves]
    return [pieces(same) for same in leaves]


def pieces(same: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """The order of each element of a leaf, if those of a chunk have one.

    From the first element on, the order that gives the most of the next ones takes them. Where these are fewer than
    `SHORTEST` within the leaf, or the order before fails at fewer than `TELLING` of them, there is no chunk, and the
    rest is left to the order before.

    Args:
      same: [orders, elements], whether an order gives an element to the bit.
    """
    size = same.shape[1]
    places = np.where(same, size, np.arange(size, dtype=np.int64))
    ends = np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1]
    chosen, starts, at = np.zeros(size, np.intp), list[int](), 0
    while at < size:
        best = int(ends[:, at].argmax())
        end = int(ends[best, at])
        if at > 0 and (end < min(at + SHORTEST, size) or same[chosen[at], at:end].sum() > end - at - TELLING):
            break
        chosen[at:] = best
        starts.append(at)
        at = max(end, at + 1)
    if len(starts) > 1 and same[chosen[starts[1]], : starts[1]].sum() > starts[1] - TELLING:
        chosen[: starts[1]] = chosen[starts[1]]
    return chosen


def nccl_candidates(
    trees: Sequence[Tree], weights: Sequence[float] | None, ranks: Sequence[int]
) -> Iterator[Candidate]:
    """Candidates for what PyTorch's processes make of float contributions over 2 ranks or more; as `candidates`."""
    own = present(trees)
    # Additions are rounded to the dtype that goes round: the gradients' own, or float32 of narrower ones.
    sent = own | {np.dtype(np.float32)} if np.dtype(np.float64) not in own else own
    for number, how, split in dealt(len(trees), ranks):
        over = f"over {number} ranks{how}"
        for dtype in sorted(sent, key=str):
            cast = [as_dtype(x, dtype) for x in trees]
            averaged = partial(_averaged, split, number, dtype)
            for name, chunks in _all_reduces(number, dtype, whole=number == len(trees)):
                chunk_orders = [partial(twice, split, number, chunk) for chunk in chunks]
                for same in zip(*(scaled(order, cast, weights, dtype) for order in chunk_orders), strict=True):
                    yield _candidate(f"{name} {over}", str(dtype), same[0][0], [run for _, run in same])
                if number < len(trees):
                    runs = [partial(averaged, chunk, cast) for chunk in chunks]
                    yield _candidate(f"{name} {over}", str(dtype), _DDP, runs)
            if number < len(trees):
                yield _candidate(f"psum by rank {over}", str(dtype), _DDP, [partial(averaged, left_chain, cast)])


_DDP = "mean over ranks, each scaled by 1 / ranks first (DDP)"


def _averaged(split: Split, ranks: int, dtype: np.dtype, over: Order, trees: Sequence[Tree]) -> Tree:
    factor = dtype.type(1) / dtype.type(ranks)
    return over([mapped(partial(np.multiply, factor), left_chain(part)) for part in split(trees, ranks)])


def _all_reduces(ranks: int, dtype: np.dtype, whole: bool) -> Iterator[tuple[str, list[Order]]]:
    """NCCL's all-reduces over so many ranks by name, each with the orders that its chunks have."""
    if dtype.name in ("float32", "bfloat16"):
        yield "in any order, by NVLS", [nvls]
    if ranks > 2:
        forward = [partial(ring_chunk, start=start) for start in range(ranks)]
        yield "NCCL's or gloo's ring", forward
        yield "NCCL's or gloo's ring, backwards,", [lambda trees, order=order: order(trees[::-1]) for order in forward]
    for machines in range(1, ranks + 1):
        # A chain of all contributions is a candidate by itself.
        if ranks > 2 and ranks % machines == 0 and (machines > 1 or not whole):
            each = [partial(tree_chunk, machines=machines, second=second) for second in (False, True)]
            name = (
                "NCCL's tree, which is a chain in one machine,"
                if machines == 1
                else f"NCCL's tree, {machines} machines,"
            )
            yield name, each[: 1 if machines < 3 else 2]


def _candidate(order: str, accumulator: str, scaling: str, runs: Sequence[Callable[[], Tree]]) -> Candidate:
    return Candidate(order, accumulator, scaling, runs[0], tuple(runs[1:]))
