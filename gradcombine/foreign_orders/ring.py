"""The ring of TensorFlow's collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gradcombine import tree
from gradcombine.autograph import no_autograph
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import is_absent
from gradcombine.errors import GradCombineError
from gradcombine.foreign_orders.blocks import chain
from gradcombine.foreign_orders.leaves import by_leaf, require_dtypes, trees_of
from gradcombine.reductions.accumulator import shape_of
from gradcombine.types import Array, Tree

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
