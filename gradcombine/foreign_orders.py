"""Reproduces the order of additions of other systems, to explain differences from their results to the last bit.

The functions in `SUMS` and `MEANS` take a list of trees in the order of the other system's indices, such as ranks.
Verified on CPU (x86 with fused multiply-add) with TensorFlow 2.21, JAX 0.10.2 and optax 0.2.8; other versions may
differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import (
    invalid,
    operation,
    require_equal,
    require_flag,
    require_integer,
    require_items,
    require_list,
    shown,
    within,
)
from gradcombine.fused import multiply_add, subtract, times
from gradcombine.places.lists import mean
from gradcombine.reductions import dtypes
from gradcombine.reductions.dtypes import FLOAT32
from gradcombine.types import Array, DType, Leaf, Scalar, Tree

__all__ = ["MEANS", "SUMS", "addn_blocks", "hierarchical_copy", "left_chain", "mean_of_means", "ring", "welford"]

_BLOCK = 8


@operation("left_chain")
def left_chain(values: Sequence[Tree], dtype: DType = None) -> Tree:
    """The sum from left to right: ``((v_1 + v_2) + v_3) + ...``.

    Args:
      values: a list of one or more trees of the same structure, shapes and dtypes. A leaf that is None in all trees is
        None in the result.
      dtype: the dtype of the running sum. None: the dtype of the contributions.

    Returns:
      The sum, in the dtype of the contributions.

    Raises:
      GradCombineError: for an empty list, trees that do not match, and a leaf that is None in some trees only.

    Bits: those of additions in eager Python; of `tf.add_n` under jit_compile; of
    ``AggregationMethod.EXPERIMENTAL_TREE`` and ``EXPERIMENTAL_ACCUMULATE_N`` with Grappler off (see `addn_blocks`); and
    of `jax.lax.psum` in pmap and shard_map, by rank, which adds bfloat16 in float32 and rounds once
    (``dtype="float32"``), and rounds float16 at each addition.

    References: math_ops.accumulate_n and gradients_util._AggregatedGrads in TensorFlow; for psum and XLA, measurements.

    >>> import numpy as np
    >>> left_chain([np.float32([1e8]), np.float32([1]), np.float32([-1e8])])
    array([0.], dtype=float32)
    """
    running = dtypes.parse(dtype)

    def summed(backend: Backend, terms: list[Array]) -> Array:
        result = backend.dtype(terms[0])
        cast = terms if running is None else [backend.cast(term, running) for term in terms]
        return backend.cast(chain(backend, cast), result)

    return by_leaf(values, summed)


@operation("addn_blocks")
def addn_blocks(values: Sequence[Tree], names: Sequence[str] | None = None, reused: int = 0) -> Tree:
    """The sum of TensorFlow's AddN kernel: ``(block_1 + block_2) + ...``, each block a left chain.

    The first block has n % 8 terms (8 for a remainder of 0, 9 for 1), the other ones 8. Up to nine terms are a left
    chain.

    Args:
      values: as for `left_chain`.
      names: in a tf.function, the names of the graph nodes whose outputs are added, one per tree. Grappler merges any
        chain or tree of additions into one AddN and sorts its inputs by name, as strings (``"a_10"`` before ``"a_2"``,
        ``"replica_1/x"`` before rank 0's ``"x"``). None: adds in the order of ``values``, as in eager mode.
      reused: the index, after sorting, of the term that is swapped with the first one. In a graph the kernel writes
        into the buffer of the first term that has no other user, and starts with that term. 0 if that is the first
        term, or if all terms have other users, as arguments, variables and constants do.

    Returns:
      The sum, in the dtype of the contributions.

    Raises:
      GradCombineError: as `left_chain`; for a wrong number of names, and for ``reused`` out of range.

    Bits: those of `tf.add_n` on CPU, eager and in a tf.function; of ``tf.gradients`` with any AggregationMethod in a
    tf.function; of MirroredStrategy with ReductionToOneDevice, by rank; and of ``strategy.reduce`` to a CPU, with any
    cross-device operations.

    References: kernels/aggregate_ops.cc, grappler's arithmetic optimizer, cross_device_ops.ReductionToOneDevice and
    MirroredStrategy's _reduce_to in TensorFlow.

    >>> import numpy as np
    >>> terms = [np.float32([x]) for x in (1, 1, 1, 1e8, 1, 1, 1, 1, 1, 1, -1e8)]
    >>> addn_blocks(terms), left_chain(terms)
    (array([3.], dtype=float32), array([0.], dtype=float32))
    """
    trees = require_list("a list of trees", values)
    if names is not None:
        are_names = isinstance(names, (list, tuple)) and {type(name) for name in names} <= {str}
        if not are_names or len(names) != len(trees):
            raise invalid(f"{len(trees)} names", len(names) if are_names else shown(names))
        trees = [trees[i] for i in sorted(range(len(trees)), key=names.__getitem__)]
    last = len(trees) - 1
    reused = require_integer(f"a reused term from 0 to {last}", reused, 0, last)
    trees[0], trees[reused] = trees[reused], trees[0]
    return by_leaf(trees, blocks)


@operation("hierarchical_copy")
def hierarchical_copy(values: Sequence[Tree]) -> Tree:
    """The sum of two halves, each by `addn_blocks`: ``addn(v_1 ... v_h) + addn(v_{h+1} ... v_2h)``, h = n // 2.

    Args:
      values: as for `left_chain`, by rank. The last of an odd number of trees is omitted, as in TensorFlow.

    Returns:
      The sum, in the dtype of the contributions; a single tree is returned unchanged.

    Raises:
      GradCombineError: as `left_chain`.

    Bits: those of an eager all-reduce in MirroredStrategy's replica context with HierarchicalCopyAllReduce. In a
    tf.function Grappler merges the three sums into one AddN: `addn_blocks` over the same 2h ranks.

    References: cross_device_utils.aggregate_gradients_using_hierarchical_copy in TensorFlow.

    >>> import numpy as np
    >>> hierarchical_copy([np.float32([x]) for x in (1e8, -1e8, 1, 1)])
    array([2.], dtype=float32)
    """
    trees = require_list("a list of trees", values)
    half = len(trees) // 2

    def halves(backend: Backend, terms: list[Array]) -> Array:
        if not half:
            return terms[0]
        return backend.add(blocks(backend, terms[:half]), blocks(backend, terms[half : 2 * half]))

    return by_leaf(trees, halves)


def chain(backend: Backend, terms: Sequence[Array]) -> Array:
    """`left_chain` of one leaf."""
    return reduce(backend.add, terms)


def blocks(backend: Backend, terms: Sequence[Array]) -> Array:
    """`addn_blocks` of one leaf."""
    # The kernel has functors that start a sum with 2 to 9 terms, and one that adds 8 more.
    first = (len(terms) - 2) % _BLOCK + 2
    later = range(first, len(terms), _BLOCK)
    return chain(backend, [chain(backend, terms[i : i + n]) for i, n in [(0, first), *((i, _BLOCK) for i in later)]])


_RING_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
_ALIGNED_BYTES = 64


@operation("ring")
def ring(values: Sequence[Tree], packed: bool = True) -> Tree:
    """The sum of TensorFlow's ring all-reduce: chunk k is ``((v_k + v_{k+1}) + ...) + v_{k-1}``, ranks from 0.

    A chunk has ``ceil(size / n)`` elements, rounded up to a multiple of 64 bytes, or to the next one if it already is
    a multiple. So the last chunks may be short or empty, and up to 16 float32 elements are a left chain. Large chunks
    are not subdivided, although ring_alg.cc has code for it.

    Args:
      values: as for `left_chain`, one tree per rank, of one dtype: float16, bfloat16, float32, float64, int32 or int64.
      packed: whether the leaves are flattened and concatenated, last leaf first, as in a tf.function. False: a ring per
        leaf, as in eager mode.

    Returns:
      The sum, in the dtype of the contributions.

    Raises:
      GradCombineError: as `left_chain`, for an unsupported dtype, and for several dtypes in one pack.

    Bits: those of an all-reduce of the tree in the replica context of a MirroredStrategy over CPUs of one process with
    its default operations, on every rank. A mean is that sum, divided. For ``strategy.reduce`` see `addn_blocks`.

    References: common_runtime/ring_alg.cc, ring_reducer.cc and base_collective_executor.cc,
    CollectiveAllReduce._all_reduce and CollectiveReplicaLauncher.batch_all_reduce in TensorFlow.

    >>> import numpy as np
    >>> ranks = [np.full(33, x, np.float32) for x in (1e8, 1, -1e8)]
    >>> ring(ranks)[[0, 16, 32]]
    array([0., 0., 1.], dtype=float32)
    """
    trees = require_list("a list of trees", values)
    leaf_dtypes = require_dtypes(trees[0], _RING_DTYPES)
    if require_flag("packed", packed) and len(set(leaf_dtypes)) > 1:
        raise invalid("leaves of one dtype in a pack", ", ".join(sorted({x.name for x in leaf_dtypes})))
    shapes: list[tuple[int, ...]] = []
    for path, leaf in tree.present(trees[0]):
        with within(path):
            backend = resolve([leaf])
            shapes.append(backend.shape(backend.asarray(leaf)))
    packs = [shapes] if packed else [[shape] for shape in shapes]
    pack_chunks = [_chunks(pack, dtype, len(trees)) for pack, dtype in zip(packs, leaf_dtypes, strict=False)]
    chunks = iter([leaf for pack in pack_chunks for leaf in pack])

    def ring_sum(backend: Backend, terms: list[Array]) -> Array:
        chunk = next(chunks)
        total = terms[0]
        for k in np.unique(chunk):
            total = backend.where(chunk == k, chain(backend, terms[k:] + terms[:k]), total)
        return total

    return by_leaf(trees, ring_sum)


def _chunks(shapes: Sequence[tuple[int, ...]], dtype: np.dtype, ranks: int) -> list[np.ndarray]:
    """The chunk index of each element, for each leaf of a pack. The last leaf comes first in the pack."""
    sizes = [math.prod(shape) for shape in shapes]
    length = -(-sum(sizes) // ranks)
    length += _ALIGNED_BYTES // dtype.itemsize - length % (_ALIGNED_BYTES // dtype.itemsize)
    starts = [sum(sizes[i + 1 :]) for i in range(len(sizes))]
    return [
        np.arange(start, start + size).reshape(shape) // length
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]


_WELFORD_DTYPES = ("float16", "bfloat16", "float32")


@operation("welford")
def welford(values: Sequence[Tree], fused: bool = True, accumulator: DType = FLOAT32, divided: bool = False) -> Tree:
    """The mean of optax.MultiSteps: ``acc = acc + (g - acc) / (n + 1)`` from ``acc = 0``, for n = 0, 1, ....

    XLA replaces the division by a multiplication with the rounded ``1 / (n + 1)``, and contracts it with the addition
    to a fused multiply-add. For leaves of one element, and if all dtypes are bfloat16, it divides and does not fuse.
    XLA of JAX 0.9 always divides.

    Args:
      values: as for `left_chain`, of float32, bfloat16 or float16.
      fused: whether products are fused into additions, as in optax with and without jit. False: products are rounded,
        as under jax.disable_jit.
      accumulator: the dtype of the mean between two contributions, MultiSteps' ``accumulator_dtype``. The last step is
        not rounded to it. If the contributions have the same narrow dtype, each operation is rounded to it.
      divided: whether all leaves are divided, as in JAX 0.9; ``fused`` is ignored then.

    Returns:
      The mean, in the dtype of the contributions.

    Raises:
      GradCombineError: as `left_chain`, and for another dtype.

    Bits: those of MultiSteps with its default settings, for gradients that are arguments: if a gradient is computed in
    the same program, its last product may be fused, too. Exceptions: values above 2**115 or below 2**-100, as the fused
    multiply-add is emulated in float32; and float16 in a float16 accumulator on CPUs with AVX512-FP16.

    References: optax.MultiSteps, transforms/_accumulation.py; Welford, "Note on a method for calculating corrected sums
    of squares and products", 1962.

    >>> import numpy as np
    >>> welford([np.float32([1, 2]), np.float32([4, 5])])
    array([2.5, 3.5], dtype=float32)
    """
    trees = require_list("a list of trees", values)
    require_dtypes(trees[0], _WELFORD_DTYPES)
    require_flag("fused", fused)
    require_flag("divided", divided)
    accumulator_dtype = dtypes.parse(accumulator)
    if accumulator_dtype is None or accumulator_dtype.name not in _WELFORD_DTYPES:
        raise invalid(f"an accumulator of {', '.join(_WELFORD_DTYPES)}", accumulator)
    return by_leaf(trees, partial(_welford, fused=fused, accumulator=accumulator_dtype, divided=divided))


@operation("mean_of_means")
def mean_of_means(values: Sequence[Tree], ranks: int, weights: Sequence[Scalar] | None = None) -> Tree:
    """The unweighted mean over ranks of each rank's weighted mean: the result of a program that omits the rank weights.

    Args:
      values: as for `left_chain`: n / ranks trees of rank 0, then those of rank 1, and so on.
      ranks: the number of ranks, which divides the number of trees.
      weights: one scalar per tree; None: all 1.

    Returns:
      The mean of means, in the dtype of the contributions.

    Raises:
      GradCombineError: as `gradcombine.mean`, for trees that do not divide evenly, and for a wrong number of weights.

    Bits: those of `gradcombine.mean`, rounded once per rank and once more for the mean over ranks.

    >>> import numpy as np
    >>> mean_of_means([np.float32([x]) for x in (1, 2, 3, 4)], ranks=2, weights=[1, 1, 3, 1])
    array([2.375], dtype=float32)
    """
    trees = require_list("a list of trees", values)
    ranks = require_integer("1 rank or more", ranks)
    if len(trees) % ranks:
        raise invalid(f"a multiple of {ranks} trees", len(trees))
    scales = [1] * len(trees) if weights is None else require_items(f"{len(trees)} weights", weights)
    require_equal("{} weights", len(trees), len(scales))
    each = len(trees) // ranks
    return mean([mean(trees[i : i + each], scales[i : i + each]) for i in range(0, len(trees), each)])


def _welford(backend: Backend, terms: list[Array], fused: bool, accumulator: np.dtype, divided: bool) -> Array:
    shape, dtype = backend.shape(terms[0]), backend.dtype(terms[0])
    running = dtype if dtype == accumulator else FLOAT32
    average = backend.full(shape, 0, accumulator)
    for n, term in enumerate(terms, start=1):
        before = backend.cast(average, running)
        difference = subtract(backend, backend.cast(term, running), before)
        reciprocal = (1 / np.float32(n)).astype(running)
        if divided or math.prod(shape) == 1 or running.name == "bfloat16":
            after = backend.add(before, backend.divide(difference, backend.asarray(np.asarray(n).astype(running))))
        elif fused and running == FLOAT32:
            after = multiply_add(backend, difference, reciprocal, before)
        else:
            after = backend.add(before, times(backend, difference, reciprocal))
        average = after if n == len(terms) else backend.cast(after, accumulator)
    return backend.cast(average, dtype)


def by_leaf(values: Sequence[Tree], rule: Callable[[Backend, list[Array]], Array]) -> Tree:
    """The tree of ``rule(backend, terms)`` of each leaf, with one term per tree; calls the rule in `flatten` order.

    Raises:
      GradCombineError: for trees of different structures, shapes or dtypes, and for a leaf that is None in some trees
        only.
    """
    trees = require_list("a list of trees", values)
    _, structure = tree.flatten(trees[0])
    columns = list(zip(*(tree.flatten_as(structure, value) for value in trees), strict=True))
    backend = resolve([leaf for column in columns for leaf in column])
    combined: list[Leaf] = []
    for column, path in zip(columns, structure.paths(), strict=True):
        absent = [is_absent(leaf) for leaf in column]
        if any(absent) and not all(absent):
            raise invalid("a gradient in all trees or in none", f"{sum(absent)} without one", path)
        combined.append(column[0] if all(absent) else backend.asarray(rule(backend, _terms(column, path))))
    return tree.unflatten(structure, combined)


def _terms(column: Sequence[Leaf], path: str) -> list[Array]:
    backend = resolve(column)
    with within(path):
        terms = [backend.asarray(leaf) for leaf in column]
        expected, *others = ((backend.shape(term), backend.dtype(term)) for term in terms)
    if dtypes.kind(backend.dtype(terms[0])) not in dtypes.NUMERIC:
        raise invalid("a dtype of numbers", backend.dtype(terms[0]), path)
    for received in others:
        text = "shape {} and dtype {}".format
        require_equal("{}", text(*expected), text(*received), path)
    return terms


def require_dtypes(value: Tree, allowed: Sequence[str]) -> list[np.dtype]:
    """Returns the dtypes of the leaves except None, in the order of `flatten`; raises for one not in ``allowed``."""
    leaf_dtypes: list[np.dtype] = []
    for path, leaf in tree.present(value):
        dtype = resolve([leaf]).dtype(leaf)
        if dtype.name not in allowed:
            raise invalid(f"a dtype of {', '.join(allowed)}", dtype, path)
        leaf_dtypes.append(dtype)
    return leaf_dtypes


SUMS: Mapping[str, Callable[[Sequence[Tree]], Tree]] = {
    "left_chain": left_chain,
    "addn_blocks": addn_blocks,
    "hierarchical_copy": hierarchical_copy,
    "ring": ring,
}
"""Functions that sum in the order of another system, by name."""

MEANS: Mapping[str, Callable[[Sequence[Tree]], Tree]] = {
    "welford": welford,
    "welford_unfused": partial(welford, fused=False),
}
"""Functions that average in the order of another system, by name."""
