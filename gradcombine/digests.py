"""A 64-bit digest of every leaf: integer sums of its mixed bits, the same for any order, sharding and framework."""

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
"""Odd, so that a product by it has an inverse modulo 2**32; the prime next to 2**32 over the golden ratio."""


@operation("digest")
def digest(value: Tree) -> Array:
    """A digest of the bits of every leaf, which does not depend on the order of the elements.

    Each element is read as words of 32 bits: a narrower one is one word, filled with zeros; one of 64 bits, and a
    complex one, are several. With ``y = m ^ (m >> 15)`` of ``m = 0x9E3779B1 * (x ^ (x >> 16))``, modulo 2**32, which
    is another one for each word x, the digest is ``(sum y, sum y**2)``, modulo 2**32.

    - One word that changes, by one bit or by several, always changes the digest. Two that change leave it as it is if
      they change places, else only where ``2 d e`` is 0 modulo 2**32, for the change d of one y and its new distance e
      from the old other one.
    - The digests of parts add up, modulo 2**32, to that of the whole: of a leaf that is split over an axis of a mesh,
      ``lax.psum(digest(shard), axis)``. Under jax.jit with automatic axes it is that of the whole by itself.
    - Elements in another order, as a transposed kernel, have the same digest; so have leaves of other dtypes or shapes
      whose words are the same but for zeros, which add nothing. The sign of a zero, and the payload of a NaN, are bits.

    Args:
      value: a tree of numbers. A leaf that is None has no digest. Of row-sparse leaves the indices and the values each
        have one: their order, and which row is whose, is not seen.

    Returns:
      uint32 of shape (leaves, 2), in the order of `digested`: an array of the leaves' framework, also while tracing.

    Raises:
      GradCombineError: for a leaf that is no array of numbers or of NumPy's long doubles, and for arrays of two
        frameworks.

    Bits: the same from every framework and in every mode, for any sharding. They are those that a leaf has: of a
    float8 leaf with infinities (e5m2, e4m3, e3m4), operations of compiled JAX that only move elements, such as a slice
    or a stack, may give each NaN another payload before this function sees it, as XLA passes them through wider floats.

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
    """An array that has a digest: the number of its leaf, what to add to the leaf's name, and itself."""

    leaf: int
    suffix: str
    array: Array


def digested(value: Tree) -> tuple[list[Part], Structure]:
    """The arrays of a tree that have digests: of leaves that are not None, both parts of row-sparse ones.

    Raises:
      GradCombineError: for a leaf without numbers, such as a random key.
    """
    leaves, structure = tree.flatten(value, sparse.is_row_sparse)
    parts: list[Part] = []
    for i, leaf in enumerate(leaves):
        if str(getattr(leaf, "dtype", None)).startswith("key<"):
            expected = "numbers (of a random key, its jax.random.key_data)"
            raise invalid(expected, leaf.dtype, structure.path(i))
        if is_absent(leaf):
            continue
        slices = sparse.row_slices(leaf)
        arrays = {"": leaf} if slices is None else {".indices": slices.indices, ".values": slices.values}
        for suffix, array in arrays.items():
            dtype = dtype_of(array)
            if dtypes.kind(dtype) not in (*dtypes.NUMERIC, "bool"):
                raise invalid("numbers", dtype, structure.path(i) + suffix)
            if dtypes.part(dtype).itemsize > 8:  # padded in memory, by a platform's own rule
                raise invalid("numbers of at most 64 bits", dtype, structure.path(i) + suffix)
            parts.append(Part(i, suffix, array))
    return parts, structure


def _mixed(backend: Backend, array: Array) -> tuple[Array, Array]:
    words = _words(backend, array)
    product = backend.product(words ^ backend.shift_right(words, 16), MULTIPLIER)
    mixed = product ^ backend.shift_right(product, 15)
    return mixed, backend.product(mixed, mixed)


def _words(backend: Backend, array: Array) -> Array:
    """The bits of all elements as uint32."""
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
