"""Summation orders of PyTorch's gradients over processes, according to the sources of DDP and NCCL.

- **Accumulation.** ``.grad`` is a left chain over the backward passes, in the parameter's dtype (autograd's
  AccumulateGrad).
- **DDP** divides before it adds: each rank's ``.grad`` is multiplied by ``1 / ranks``, rounded to the gradients' dtype,
  when it is copied into its bucket (Reducer::mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp), or
  divided by ``ranks`` if it already is a view of the bucket. FSDP leaves that to ``ncclAvg``, which also multiplies
  each rank's part by ``1 / ranks`` (FuncPreMulSum in NCCL's src/device/reduce_kernel.h).
- **Buckets** do not add orders; they only determine which elements use which order.
- **Ring.** Each chunk makes one round and starts at a different rank: `ring_chunk`. Every addition is rounded to the
  gradients' dtype. The boundaries of the chunks depend on the size, the protocol and the number of channels, and these
  on the machine.
- **Tree.** A chain within each machine, and one of two binary trees over the machines for each chunk: `tree_chunk`.
- **NVLS**, the sum in an NVLink switch: for float32 the correctly rounded exact sum, which has no order (measured, not
  guaranteed); bfloat16 is truncated: `nvls`.

References: DistributedDataParallel and reducer.cpp in PyTorch; src/device/all_reduce.h (runRing, runTreeSplit),
src/graph/trees.cc and connect.cc in NCCL; its maintainers in NVIDIA/nccl#545, #671 and #672 (chains within a machine),
#1026 (what is rounded), #1055 (channels use different orders) and #2360 (float32 sums of NVLS do not depend on an
order, bfloat16 sums do); NVIDIA/Megatron-LM#6806 (16.7 million float32 sums of NVLS, all correctly rounded; bfloat16
truncates).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from gradcombine.foreign_orders import left_chain
from gradcombine.types import Tree
from gradcombine.verify.explain.candidates import (
    Candidate,
    Order,
    as_dtype,
    by_rank,
    dtypes_of,
    mapped,
    scaled,
    splits,
)

SHORTEST = 32
"""Minimum length of a chunk, except the first and the last one of a leaf. NCCL's chunks have hundreds of elements."""

TELLING = 4
"""Minimum number of elements at which the previous order must fail for a new chunk to start. Fewer may be errors, which
some other order reproduces by chance."""


def ring_chunk(trees: Sequence[Tree], start: int) -> Tree:
    """A chunk's sum on a ring: ``((v_start + v_start+1) + ...) + v_start-1``, ranks from 0."""
    return left_chain([*trees[start:], *trees[:start]])


def tree_chunk(trees: Sequence[Tree], machines: int, second: bool = False) -> Tree:
    """A chunk's sum in NCCL's tree: in each machine a chain from its last rank to its first, then a binary tree.

    A machine adds the sums of its children, in order, to the sum of its chain. In the first tree, the parent of machine
    m is m with its lowest set bit cleared and the next bit set, or only cleared if there is no such machine; 0 is the
    root. The second tree is the first one with the machines in reverse order if their number is even, or shifted by one
    if it is odd.

    Args:
      trees: one per rank, in the order of the ranks, starting with machine 0.
      machines: the number of machines; all have the same number of ranks.
      second: whether to use the second tree.
    """
    size = len(trees) // machines
    chains = [left_chain(trees[i : i + size][::-1]) for i in range(0, len(trees), size)]
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
    """A model of the sum in an NVLink switch: correctly rounded for float32, truncated toward zero for bfloat16.

    According to the sources, bfloat16 is truncated, and the result may depend on an order, which they do not specify.
    The sum before rounding is exact to 2**-100 of its largest term.
    """
    with np.errstate(invalid="ignore"):  # infinities
        return mapped(_nvls, *trees)


def _nvls(*terms: np.ndarray) -> np.ndarray:
    total, error = np.zeros(terms[0].shape), np.zeros(terms[0].shape)
    for term in terms:
        x, before = term.astype(np.float64), total
        total = before + x
        added = total - before
        error += (before - (total - added)) + (x - added)
    rounded = np.where(np.isfinite(total), total + error, total)
    if terms[0].dtype == np.float32:
        return rounded.astype(np.float32)
    lost = np.where(np.isfinite(total), (total - rounded) + error, 0)
    # bfloat16 keeps 8 of 53 bits. A sum that float64 rounded up to such a number truncates to the one below it.
    upper = rounded.view(np.uint64) >> np.uint64(45) << np.uint64(45)
    up = (upper.view(np.float64) == rounded) & (lost != 0) & (np.signbit(lost) != np.signbit(rounded))
    return (upper - np.where(up, np.uint64(1 << 45), np.uint64(0))).view(np.float64).astype(terms[0].dtype)


def chunked(leaves: Sequence[npt.NDArray[np.bool_]]) -> list[npt.NDArray[np.intp]]:
    """Index of the order of each element of each leaf, assuming one order per chunk.

    One order is assumed for all elements unless it fails for `TELLING` elements or more.

    Args:
      leaves: for each leaf, whether an order reproduces an element, of shape [orders, elements].
    """
    totals = np.sum([same.sum(axis=1) for same in leaves], axis=0)
    if len(totals) == 1 or sum(same.shape[1] for same in leaves) - totals.max(initial=0) < TELLING:
        return [np.full(same.shape[1], totals.argmax()) for same in leaves]
    return [pieces(same) for same in leaves]


def pieces(same: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Index of the order of each element of a leaf, assuming one order per chunk.

    Greedy: starting from the first element, a chunk gets the order that reproduces the most of the next elements. If
    they are fewer than `SHORTEST` within the leaf, or the previous order fails for fewer than `TELLING` of them, no
    chunk starts there, and the rest keeps the previous order.

    Args:
      same: whether an order reproduces an element, of shape [orders, elements].
    """
    size = same.shape[1]
    failures = np.where(same, size, np.arange(size, dtype=np.int64))
    ends = np.minimum.accumulate(failures[:, ::-1], axis=1)[:, ::-1]
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
    """Candidates for sums over PyTorch processes. The arguments are those of `candidates`, with 2 ranks or more."""
    dtypes = dtypes_of(trees)
    # Additions are rounded to the dtype that is sent: the gradients' dtype, or float32 for narrower ones.
    sent = dtypes | {np.dtype(np.float32)} if np.dtype(np.float64) not in dtypes else dtypes
    for (number, how, split), dtype in product(splits(len(trees), ranks), sorted(sent, key=str)):
        over, one_each = f"over {number} ranks{how}", number == len(trees)
        cast = [as_dtype(x, dtype) for x in trees]
        factor = dtype.type(1) / dtype.type(number)
        for name, chunks in _all_reduces(number, dtype, one_each):
            chunk_orders = [partial(by_rank, split, number, chunk) for chunk in chunks]
            forms = [
                (same[0][0], [run for _, run in same])
                for same in zip(*(scaled(order, cast, weights, dtype) for order in chunk_orders), strict=True)
            ]
            if not one_each:
                forms.append((_DDP, [partial(order, cast, factor) for order in chunk_orders]))
            for scaling, (run, *others) in forms:
                yield Candidate(f"{name} {over}", str(dtype), scaling, run, tuple(others))
        if not one_each:
            run = partial(by_rank, split, number, left_chain, cast, factor)
            yield Candidate(f"by psum {over}", str(dtype), _DDP, run)


_DDP = "mean over ranks, each scaled by 1 / ranks first (DDP)"


def _all_reduces(ranks: int, dtype: np.dtype, one_each: bool) -> Iterator[tuple[str, list[Order]]]:
    """The names of NCCL's all-reduces over ``ranks`` ranks, each with the possible orders of its chunks."""
    if dtype.name in ("float32", "bfloat16"):
        yield "in any order, by NVLS", [nvls]
    if ranks > 2:
        ring: list[Order] = [partial(ring_chunk, start=start) for start in range(ranks)]
        yield "in NCCL's or gloo's ring", ring
        yield "in NCCL's or gloo's ring, backwards,", [lambda trees, order=order: order(trees[::-1]) for order in ring]
    for machines in range(1, ranks + 1):
        # A chain of all contributions is a candidate already.
        if ranks > 2 and ranks % machines == 0 and (machines > 1 or not one_each):
            trees = [partial(tree_chunk, machines=machines, second=second) for second in (False, True)]
            where = "a chain in one machine" if machines == 1 else f"{machines} machines"
            yield f"in NCCL's tree, {where},", trees[: 1 if machines < 3 else 2]
