"""Sums: left chains, what TensorFlow makes of them in its AddN kernel, and the ring of its collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import is_absent, shape_of
from gradcombine.errors import GradCombineError, require_integer, shown
from gradcombine.foreign_orders.leaves import by_leaf, require_dtypes, trees_of
from gradcombine.reductions import dtypes
from gradcombine.types import Array, Tree, no_autograph

_BLOCK = 8


@no_autograph
def left_chain(values: Sequence[Tree], dtype: Any = None) -> Tree:
    """The sum from left to right: ``((v_1 + v_2) + v_3) + ...``.

    Args:
      values: a list of one tree or more, of one structure, with leaves of equal shapes and dtypes. A leaf that is None
        in all of them is None in the result.
      dtype: of the running sum. None: the contributions' own.

    Returns:
      The sum, of the contributions' dtype.

    Raises:
      GradCombineError: for an empty list, trees that do not match, a leaf that is None in some of them only.

    Bits: those of plain additions in eager Python; of `tf.add_n` under jit_compile; of
    ``AggregationMethod.EXPERIMENTAL_TREE`` and ``EXPERIMENTAL_ACCUMULATE_N`` where Grappler is off (see `addn_blocks`);
    and of `jax.lax.psum` over pmap and shard_map, by rank: there bfloat16 is added in float32 and rounded once
    (``dtype="float32"``), float16 at each addition.

    References: math_ops.accumulate_n and gradients_util._AggregatedGrads in TensorFlow; for psum and XLA, observation
    alone.

    >>> import numpy as np
    >>> left_chain([np.float32([1e8]), np.float32([1]), np.float32([-1e8])])
    array([0.], dtype=float32)
    """
    running = dtypes.parse(dtype, "left_chain")

    def summed(backend: Backend, terms: list[Array]) -> Array:
        result = backend.dtype(terms[0])
        cast = terms if running is None else [backend.cast(term, running) for term in terms]
        return backend.cast(chain(backend, cast), result)

    return by_leaf("left_chain", values, summed)


@no_autograph
def addn_blocks(values: Sequence[Tree], names: Sequence[str] | None = None, reused: int = 0) -> Tree:
    """The sum as TensorFlow's AddN kernel forms it: ``(block_1 + block_2) + ...``, each block a left chain.

    The first block has n % 8 terms (8 for a remainder of 0, 9 for 1), each later one 8. Up to nine terms are a left
    chain.

    Args:
      values: as for `left_chain`.
      names: in a tf.function, of the graph nodes whose outputs are added, one a tree. Grappler sorts the inputs of an
        AddN by them, as strings (``"a_10"`` before ``"a_2"``, ``"replica_1/x"`` before rank 0's ``"x"``), and makes
        one AddN of any chain or tree of additions. None: the terms are added in the order given, as in eager mode.
      reused: the number (after sorting) of the term that changes places with the first. In a graph the kernel writes
        into the buffer of the first term that nothing else uses, and begins with it: 0 where that is the first term,
        or where there is none (arguments, variables and constants are in use).

    Returns:
      The sum, of the contributions' dtype.

    Raises:
      GradCombineError: as `left_chain`; for a wrong number of names, or a term that is not there.

    Bits: those of `tf.add_n` on CPU, eager and in a tf.function; of ``tf.gradients`` with any AggregationMethod in a
    tf.function; of MirroredStrategy with ReductionToOneDevice, by rank; and of ``strategy.reduce`` onto a CPU, whatever
    the strategy's cross-device operations are.

    References: kernels/aggregate_ops.cc, grappler's arithmetic optimizer, cross_device_ops.ReductionToOneDevice and
    MirroredStrategy's _reduce_to in TensorFlow.

    >>> import numpy as np
    >>> terms = [np.float32([x]) for x in (1, 1, 1, 1e8, 1, 1, 1, 1, 1, 1, -1e8)]
    >>> addn_blocks(terms), left_chain(terms)
    (array([3.], dtype=float32), array([0.], dtype=float32))
    """
    trees = trees_of("addn_blocks", values)
    if names is not None:
        named = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        if not named or len(names) != len(trees):
            raise GradCombineError("addn_blocks", f"{len(trees)} names", len(names) if named else shown(names))
        trees = [trees[i] for i in sorted(range(len(trees)), key=names.__getitem__)]
    last = len(trees) - 1
    reused = require_integer("addn_blocks", f"a reused term from 0 to {last}", reused, 0, last)
    trees[0], trees[reused] = trees[reused], trees[0]
    return by_leaf("addn_blocks", trees, blocks)


@no_autograph
def hierarchical_copy(values: Sequence[Tree]) -> Tree:
    """The sum of two halves, each by `addn_blocks`: ``addn(v_1 ... v_h) + addn(v_{h+1} ... v_2h)``, h = n // 2.

    Args:
      values: as for `left_chain`, by rank. The last of an odd number is left out, as TensorFlow leaves it out.

    Returns:
      The sum, of the contributions' dtype; one tree passes through unchanged.

    Raises:
      GradCombineError: as `left_chain`.

    Bits: those of an all-reduce in MirroredStrategy's replica context with HierarchicalCopyAllReduce, eager. In a
    tf.function Grappler makes one AddN of the three: `addn_blocks` over the same 2h ranks.

    References: cross_device_utils.aggregate_gradients_using_hierarchical_copy in TensorFlow.

    >>> import numpy as np
    >>> hierarchical_copy([np.float32([x]) for x in (1e8, -1e8, 1, 1)])
    array([2.], dtype=float32)
    """
    trees = trees_of("hierarchical_copy", values)
    half = len(trees) // 2

    def halves(backend: Backend, terms: list[Array]) -> Array:
        if not half:
            return terms[0]
        return backend.add(blocks(backend, terms[:half]), blocks(backend, terms[half : 2 * half]))

    return by_leaf("hierarchical_copy", trees, halves)


def chain(backend: Backend, terms: Sequence[Array]) -> Array:
    """One leaf's `left_chain`."""
    return reduce(backend.add, terms)


def blocks(backend: Backend, terms: Sequence[Array]) -> Array:
    """One leaf's `addn_blocks`."""
    # The kernel has functors for 2 to 9 terms, which begin a sum, and one that adds 8 terms to it.
    first = (len(terms) - 2) % _BLOCK + 2
    later = range(first, len(terms), _BLOCK)
    return chain(backend, [chain(backend, terms[i : i + n]) for i, n in [(0, first), *((i, _BLOCK) for i in later)]])


_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
_ALIGNED_BYTES = 64


@no_autograph
def ring(values: Sequence[Tree], packed: bool = True) -> Tree:
    """The sum as TensorFlow's ring all-reduce forms it: chunk k is ``((v_k + v_{k+1}) + ...) + v_{k-1}``, ranks from 0.

    A chunk has ``ceil(size / n)`` elements, rounded up to a multiple of 64 bytes (and to the next one, where it is a
    multiple already): so the last chunks may be short or empty, and up to 16 elements of float32 are a left chain.
    Large chunks are not subdivided, though ring_alg.cc knows how to.

    Args:
      values: as for `left_chain`, one tree a rank, of one dtype: float16, bfloat16, float32, float64, int32 or int64.
      packed: whether the leaves, flattened, last leaf first, go round as one array, as in a tf.function. False: each
        leaf by itself, as in eager mode.

    Returns:
      The sum, of the contributions' dtype.

    Raises:
      GradCombineError: as `left_chain`, and for a dtype that the ring does not know, or several in one pack.

    Bits: those of an all-reduce of the whole tree in the replica context of a MirroredStrategy over CPUs of one process
    with its default operations, on every rank. A mean is that sum, divided. ``strategy.reduce`` adds otherwise: see
    `addn_blocks`.

    References: common_runtime/ring_alg.cc, ring_reducer.cc and base_collective_executor.cc,
    CollectiveAllReduce._all_reduce and CollectiveReplicaLauncher.batch_all_reduce in TensorFlow.

    >>> import numpy as np
    >>> ranks = [np.full(33, x, np.float32) for x in (1e8, 1, -1e8)]
    >>> ring(ranks)[[0, 16, 32]]
    array([0., 0., 1.], dtype=float32)
    """
    trees = trees_of("ring", values)
    found = require_dtypes("ring", trees[0], _DTYPES)
    if packed and len(set(found)) > 1:
        raise GradCombineError("ring", "leaves of one dtype in a pack", ", ".join(sorted({x.name for x in found})))
    leaves, structure = tree.flatten("ring", trees[0])
    pairs = zip(leaves, structure.paths(), strict=True)
    shapes = [shape_of("ring", leaf, path) for leaf, path in pairs if not is_absent(leaf)]
    packs = [shapes] if packed else [[shape] for shape in shapes]
    numbers = [_chunks(pack, dtype, len(trees)) for pack, dtype in zip(packs, found, strict=False)]
    chunks = iter([leaf for pack in numbers for leaf in pack])

    def around(backend: Backend, terms: list[Array]) -> Array:
        chunk = next(chunks)
        total = terms[0]
        for k in np.unique(chunk):
            total = backend.where(chunk == k, chain(backend, terms[k:] + terms[:k]), total)
        return total

    return by_leaf("ring", trees, around)


def _chunks(shapes: Sequence[tuple[int, ...]], dtype: np.dtype, ranks: int) -> list[np.ndarray]:
    """For each leaf of a pack, the chunk of each of its elements. The last leaf comes first in the pack."""
    sizes = [math.prod(shape) for shape in shapes]
    length = -(-sum(sizes) // ranks)
    length += _ALIGNED_BYTES // dtype.itemsize - length % (_ALIGNED_BYTES // dtype.itemsize)
    starts = [sum(sizes[i + 1 :]) for i in range(len(sizes))]
    return [
        np.arange(start, start + size).reshape(shape) // length
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]
