"""A 64-bit digest of each leaf: integer sums of hashed words, equal for any element order, sharding and framework."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from gradcombine import sparse, tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import dtype_of, is_absent, resolve
from gradcombine.errors import invalid, operation, within
from gradcombine.reductions import dtypes
from gradcombine.tree import Structure
from gradcombine.types import Array, Tree

WORD = np.dtype(np.uint32)

_UINT4 = np.dtype(ml_dtypes.uint4)

MULTIPLIER = np.uint32(0x9E3779B1)
"""The prime closest to 2**32 / golden ratio. Odd, so that the multiplication is invertible modulo 2**32."""


@operation("digest")
def digest(value: Tree) -> Array:
    """Computes a digest of the bits of each leaf that does not depend on the order of the elements.

    Reads each element as 32-bit words: narrower elements are zero-extended; 64-bit and complex ones are several words.
    Hashes each word x to ``y = m ^ (m >> 15)`` with ``m = 0x9E3779B1 * (x ^ (x >> 16))`` modulo 2**32, which is a
    bijection. The digest is ``(sum y, sum y**2)`` modulo 2**32.

    - A change of one word, in any number of bits, always changes the digest. If two words change, the digest stays the
      same if they swap places, else only if ``2 d e`` is 0 modulo 2**32, where d is the change of one y and e the
      difference of its new value from the old value of the other one.
    - The digests of shards add up, modulo 2**32, to the digest of the array: ``lax.psum(digest(shard), axis)`` in
      shard_map. Under jax.jit with automatic axes the result already is the digest of the global array.
    - The digest does not see the order of the elements (a transposed kernel has the same one), the dtype, the shape,
      or words that are 0. It sees the sign of a zero and the payload of a NaN.

    Args:
      value: a tree of numbers. None leaves have no digest. Row-sparse leaves have one for the indices and one for the
        values, which do not see their order, nor which row belongs to which index.

    Returns:
      uint32 array of shape (leaves, 2), of the leaves' framework, in the order of `digested`. Works while tracing.

    Raises:
      GradCombineError: for a leaf that is not an array of numbers, for NumPy's long doubles, and for arrays of two
        frameworks.

    Bits: the same in every framework, mode and sharding. XLA moves float8 dtypes with infinities (e5m2, e4m3, e3m4)
    through wider floats, so in compiled JAX a slice or a stack can change the payload of a NaN before this function
    reads it.

    >>> import numpy as np, gradcombine as gc
    >>> gc.digest({"w": np.float32([1, 2]), "b": None}) == gc.digest([np.float32([2, 1])])
    array([[ True,  True]])
    >>> gc.digest([np.float32([0.0])]) == gc.digest([np.float32([-0.0])])
    array([[False, False]])
    """
    parts, structure = digested(value)
    backend = resolve([part.array for part in parts])
    paths, rows = list(structure.paths()), list[Array]()
    for part in parts:
        with within(paths[part.leaf] + part.suffix):
            rows.append(backend.stack(backend.fused_totals(_mixed, (), [backend.asarray(part.array)])))
    return backend.stack(rows) if rows else np.zeros((0, 2), WORD)


class Part(NamedTuple):
    """An array that has a digest: the index of its leaf, the suffix to the leaf's path, and the array."""

    leaf: int
    suffix: str
    array: Array


def digested(value: Tree) -> tuple[list[Part], Structure]:
    """Returns the arrays of a tree that have digests: all leaves but None; indices and values of row-sparse ones.

    Raises:
      GradCombineError: for a leaf that is not an array of numbers, such as a PRNG key.
    """
    leaves, structure = tree.flatten(value, sparse.is_row_sparse)
    parts: list[Part] = []
    for i, leaf in enumerate(leaves):
        if str(getattr(leaf, "dtype", None)).startswith("key<"):
            expected = "numbers (of a PRNG key, its jax.random.key_data)"
            raise invalid(expected, leaf.dtype, structure.path(i))
        if is_absent(leaf):
            continue
        slices = sparse.row_slices(leaf)
        arrays = {"": leaf} if slices is None else {".indices": slices.indices, ".values": slices.values}
        for suffix, array in arrays.items():
            dtype = dtype_of(array)
            if dtypes.kind(dtype) not in (*dtypes.NUMERIC, "bool"):
                raise invalid("numbers", dtype, structure.path(i) + suffix)
            if dtypes.part(dtype).itemsize > 8:  # long doubles, whose padding in memory depends on the platform
                raise invalid("numbers of at most 64 bits", dtype, structure.path(i) + suffix)
            parts.append(Part(i, suffix, array))
    return parts, structure


def _mixed(backend: Backend, array: Array) -> tuple[Array, Array]:
    """y and y**2 of `digest` for all words of an array."""
    words = _words(backend, array)
    product = backend.product(words ^ backend.shift_right(words, 16), MULTIPLIER)
    mixed = product ^ backend.shift_right(product, 15)
    return mixed, backend.product(mixed, mixed)


def _words(backend: Backend, array: Array) -> Array:
    """Reinterprets the elements as uint32 words; zero-extends narrower ones."""
    dtype = backend.dtype(array)
    if dtype.name == "float4_e2m1fn":
        array, dtype = backend.bitcast(array, _UINT4), _UINT4
    if dtype.name in ("bool", "uint4", "uint2"):
        return backend.cast(array, WORD)
    if dtype.name in ("int4", "int2"):
        array, dtype = backend.cast(array, np.dtype(np.int8)), np.dtype(np.int8)
    if dtype.itemsize >= WORD.itemsize:
        return array if dtype == WORD else backend.bitcast(array, WORD)
    narrow = np.dtype(f"u{dtype.itemsize}")
    return backend.cast(array if dtype == narrow else backend.bitcast(array, narrow), WORD)
