"""Mean losses over tokens, sequences and groups, as a numerator and a denominator that add up over microbatches.

Each function takes values per token and returns a `gradcombine.reductions.Ratio`: the numerator, in the dtype of the
values but at least float32, and the denominator, an int32 count. Numerators and denominators are added over
microbatches and replicas, and divided once at the end. Filtering out a sequence only changes the mask, so the count
need not be known before all microbatches have run.

Common arguments are arrays of NumPy, JAX or TensorFlow, eager or traced:

- ``values``: one per token, of shape (..., T), a real float dtype.
- ``mask``: of the same shape: bools, floats of 0 or 1, or integers from 0; 0 masks a token out. None: no token is
  masked. Values of masked tokens, even NaN, have no effect and a gradient of 0, which a function whose derivative is
  NaN there, such as exp(NaN), turns into NaN: mask its argument, too. Multiply ``values`` by weights of tokens:
  a mask of other numbers, for instance one that is added to logits, raises, or makes a traced numerator NaN.
- ``segments``: for packed rows, integers of the same shape, from 0 to T: the index of the sequence within its row, from
  1; 0 for padding. None: each row is one sequence.

Sequences and groups of which all tokens are masked are not counted. If there are no others, numerator and denominator
are 0, whose quotient is 0 in `gradcombine.reductions.ratio`. Numerators are differentiable in the values; denominators
are constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import owner, resolve
from gradcombine.errors import (
    invalid,
    operation,
    require_equal,
    require_integer,
    require_items,
    require_list,
    require_number,
    require_one_of,
    shown,
    within,
)
from gradcombine.places.fragments import divided
from gradcombine.reductions import dtypes
from gradcombine.reductions.ratios import Ratio
from gradcombine.reductions.weights import parse
from gradcombine.types import Array, no_autograph

_MOST = np.iinfo(np.int32).max


@operation("token_mean")
def token_mean(values: Array, mask: Array | None = None) -> Ratio:
    """The mean over all tokens that are not masked.

    >>> import numpy as np
    >>> from gradcombine.losses import token_mean
    >>> token_mean(np.float32([[1, 2, 3], [5, 0, 0]]), np.array([[1, 1, 1], [1, 0, 0]]))
    Ratio(numerator=np.float32(11.0), denominator=np.int32(4))
    """
    tokens = _Tokens(values, mask, None)
    return tokens.ratio(tokens.values, tokens.present)


@operation("token_sum")
def token_sum(values: Array, mask: Array | None = None, *, count: Array | int) -> Ratio:
    """The sum over all tokens that are not masked, divided by a count that the caller defines.

    Args:
      values, mask: see `gradcombine.losses`.
      count: the denominator of this microbatch, a scalar of 0 or more: for instance the number of its rows or prompts,
        including those of which all tokens are masked.

    >>> import numpy as np
    >>> from gradcombine.losses import token_sum
    >>> token_sum(np.float32([[1, 2, 3], [5, 0, 0]]), np.array([[1, 1, 1], [0, 0, 0]]), count=2)
    Ratio(numerator=np.float32(6.0), denominator=2)
    """
    tokens = _Tokens(values, mask, None)
    with within(".count"):
        parse(resolve([] if owner(count) is None else [count]), count)
    return Ratio(tokens.backend.total(tokens.values), count)


@operation("sequence_mean_of_token_mean")
def sequence_mean_of_token_mean(values: Array, mask: Array | None = None, segments: Array | None = None) -> Ratio:
    """The mean over sequences of the mean over a sequence's tokens.

    >>> import numpy as np
    >>> from gradcombine.losses import sequence_mean_of_token_mean
    >>> sequence_mean_of_token_mean(np.float32([[1, 3, 5, 7]]), segments=np.array([[1, 1, 2, 0]]))
    Ratio(numerator=np.float32(7.0), denominator=np.int32(2))
    """
    tokens = _Tokens(values, mask, segments)
    sizes, first = tokens.sequences()
    return tokens.ratio(tokens.over(tokens.values, sizes), first)


@operation("sequence_mean_of_token_sum")
def sequence_mean_of_token_sum(
    values: Array, mask: Array | None = None, segments: Array | None = None, normalizer: float = 1.0
) -> Ratio:
    """The mean over sequences of the sum over a sequence's tokens, divided by a constant.

    Args:
      values, mask, segments: see `gradcombine.losses`.
      normalizer: the constant, for instance the maximal length of a response: positive, and a normal number of the
        numerator's dtype.

    >>> import numpy as np
    >>> from gradcombine.losses import sequence_mean_of_token_sum
    >>> sequence_mean_of_token_sum(np.float32([[1, 2, 3], [5, 0, 0]]), np.array([[1, 1, 1], [1, 0, 0]]), normalizer=2)
    Ratio(numerator=np.float32(5.5), denominator=np.int32(2))
    """
    tokens = _Tokens(values, mask, segments)
    backend, dtype, limits = tokens.backend, tokens.dtype, np.finfo(tokens.dtype)
    expected = f"a positive normalizer in the range of {dtype}"
    divisor = require_number(expected, normalizer, float(limits.tiny))
    if divisor > float(limits.max):
        raise invalid(expected, shown(normalizer))
    scaled = backend.divide(tokens.values, backend.full((), divisor, dtype, [tokens.values]))
    return tokens.ratio(scaled, tokens.sequences()[1])


@operation("group_mean")
def group_mean(
    values: Array, groups: Array, mask: Array | None = None, segments: Array | None = None, *, of: str = "sequences"
) -> Ratio:
    """The mean over groups (for instance, of the samples for one prompt) of the mean of a group.

    All sequences of a group must be in one microbatch: `deal` assigns them so, and `require_whole` checks it.

    Args:
      values, mask, segments: see `gradcombine.losses`.
      groups: the group ids, integers from 0: one per row, or one per token for packed rows.
      of: the mean of a group. "sequences": the mean over its sequences of their means; "tokens": over its tokens.

    >>> import numpy as np
    >>> from gradcombine.losses import group_mean
    >>> group_mean(np.float32([[1, 3], [4, 4], [7, 7]]), np.array([5, 5, 9]))
    Ratio(numerator=np.float32(10.0), denominator=np.int32(2))
    """
    require_one_of("of 'sequences' or 'tokens'", of, ("sequences", "tokens"))
    tokens = _Tokens(values, mask, segments, groups)
    ids = tokens.of_groups(groups)
    if of == "tokens":
        sizes, first = _sizes(tokens.backend, ids, tokens.present)
        return tokens.ratio(tokens.over(tokens.values, sizes), first)
    lengths, is_first = tokens.sequences()
    counts, first = _sizes(tokens.backend, ids, is_first)
    return tokens.ratio(tokens.over(tokens.over(tokens.values, lengths), counts), first)


class _Tokens:
    """The tokens of a microbatch, flattened.

    Attributes:
      dtype: the dtype of the numerator.
      values: in this dtype; 0 for masked tokens. All are NaN if traced masks, segments or groups are out of range.
      present: whether a token is not masked.
    """

    @no_autograph
    def __init__(self, values: Array, mask: Array, segments: Array, groups: Array = None) -> None:
        arrays = [values, *(x for x in (mask, segments, groups) if x is not None)]
        for x in arrays:
            if owner(x) is None:
                raise invalid("arrays of NumPy, JAX or TensorFlow", shown(x))
        self.backend = backend = resolve(arrays)
        values = backend.asarray(values)
        dtype, self._shape = backend.dtype(values), _dimensions(values)
        if dtypes.kind(dtype) != "float" or not self._shape:
            raise invalid("values of a real float dtype, of shape (..., T)", f"{dtype} of shape {self._shape}")
        self.dtype = dtypes.working(dtype)
        flat = backend.flat(backend.cast(values, self.dtype))
        self._rows = backend.row_numbers(values)
        present = self._rows == self._rows
        marks = None if mask is None else self._flat(mask, "mask", ("bool", "float", "integer"))
        if marks is not None:
            present = present & (marks if backend.dtype(marks) == np.bool_ else marks != 0)
        self._segments = ids = None
        if segments is not None:
            ids = self._flat(segments, "segments", ("integer",))
            self._segments = self._as_ids(ids)
            present = present & (self._segments > 0)
        self.present = present
        self.values = backend.where(present, flat, backend.full((), 0, self.dtype, [flat]))
        if marks is not None:
            self._require_mask(marks)
        if self._segments is not None:
            length = self._length()
            outside = (self._segments < 0) | (self._segments > length)
            self._require_in_range(ids, outside, f"segments from 0 to {length}")

    def sequences(self) -> tuple[Array, Array]:
        """For each token, the number of tokens in its sequence, and whether it is the first of them."""
        ids = self._rows if self._segments is None else self._rows * (self._length() + 1) + self._segments
        return _sizes(self.backend, ids, self.present)

    def of_groups(self, groups: Array) -> Array:
        """The group id of each token."""
        backend, array = self.backend, self._asarray(groups)
        of_rows = backend.dtype(array).kind in "iu" and _compatible(array, self._shape[:-1])
        flat = backend.flat(array) if of_rows else self._flat(groups, "groups", ("integer",))
        ids = self._as_ids(flat)
        self._require_in_range(flat, (ids < 0) | (ids == _MOST), f"groups from 0 to {_MOST - 1}")
        return backend.take(ids, self._rows) if of_rows else ids

    def over(self, values: Array, counts: Array) -> Array:
        """Divides the values of tokens that are not masked by ``counts``."""
        one = self.backend.full((), 1, dtypes.INT32, [counts])
        divisor = self.backend.cast(self.backend.where(self.present, counts, one), self.dtype)
        return self.backend.divide(values, self.backend.maximum(divisor, self.backend.cast(one, self.dtype)))

    def ratio(self, terms: Array, counted: Array) -> Ratio:
        backend = self.backend
        return Ratio(backend.total(terms), backend.total(backend.cast(counted, dtypes.INT32)))

    def _asarray(self, x: Array) -> Array:
        # JAX has no 64-bit integers by default. Python numbers have no dtype.
        is_wide = owner(x) is not self.backend and str(getattr(x, "dtype", "")) in ("int64", "uint64")
        fits = is_wide and bool(np.all((x >= -_MOST) & (x <= _MOST)))
        return self.backend.asarray(np.int32(x) if fits else x)

    def _as_ids(self, x: Array) -> Array:
        """Casts integers to int32; those out of its range become -1."""
        backend = self.backend
        ids = backend.cast(x, dtypes.INT32)
        return backend.where(backend.cast(ids, backend.dtype(x)) == x, ids, backend.full((), -1, dtypes.INT32, [ids]))

    def _flat(self, x: Array, name: str, kinds: tuple[str, ...]) -> Array:
        array = self._asarray(x)
        if dtypes.kind(self.backend.dtype(array)) not in kinds or not _compatible(array, self._shape):
            expected = f"{name} of {'integers' if len(kinds) == 1 else 'numbers or bools'} of shape {self._shape}"
            raise invalid(expected, f"{self.backend.dtype(array)} of shape {_dimensions(array)}")
        return self.backend.flat(array)

    def _length(self) -> int:
        length, rows = self._shape[-1], math.prod(1 if n is None else n for n in self._shape[:-1])
        if length is None or (rows + 1) * (length + 1) > _MOST:
            raise invalid("a known length of the rows, and fewer than 2**31 tokens", f"shape {self._shape}")
        return length

    def _require_mask(self, marks: Array) -> None:
        """Raises for weights, and for masks that are added to logits: their 0 keeps a token."""
        kind = dtypes.kind(self.backend.dtype(marks))
        if kind != "bool":
            valid = (marks == 0) | (marks == 1 if kind == "float" else marks > 0)
            self._require_in_range(marks, ~valid, "a mask of bools, floats of 0 or 1, or integers from 0")

    def _require_in_range(self, array: Array, outside: Array, expected: str) -> None:
        """Raises for elements out of range; if they are traced, sets all values to NaN instead."""
        mask = self.backend.concrete(outside)
        if mask is None:
            any_outside = self.backend.total(self.backend.cast(outside, dtypes.INT32)) > 0
            nan = self.backend.full((), np.nan, self.dtype, [self.values])
            self.values = self.backend.where(any_outside, nan, self.values)
        elif mask.any():
            raise invalid(expected, np.asarray(self.backend.concrete(array))[mask][0].item())


def _sizes(backend: Backend, ids: Array, present: Array) -> tuple[Array, Array]:
    """For each element, the number of present elements with its id, and whether it is the first of them."""
    keys = backend.where(present, ids, backend.full((), _MOST, dtypes.INT32, [ids]))
    order = backend.argsort(keys)
    ordered = backend.take(keys, order)
    sizes = backend.search_sorted(ordered, ids + 1) - backend.search_sorted(ordered, ids)
    positions = backend.cumsum(ids * 0 + 1) - 1
    is_first = backend.search_sorted(ordered, ordered) == positions
    return sizes, backend.take(is_first, backend.argsort(order)) & present


def _dimensions(array: Array) -> tuple[int | None, ...]:
    """The shape, with None for dimensions that TensorFlow does not know."""
    try:
        return tuple(array.shape)
    except ValueError:
        raise invalid("an array of a known number of dimensions", shown(array)) from None


def _compatible(array: Array, shape: tuple[int | None, ...]) -> bool:
    actual = _dimensions(array)
    return len(actual) == len(shape) and all(
        a is None or b is None or a == b for a, b in zip(actual, shape, strict=True)
    )


@operation("deal")
def deal(tokens: Iterable[int], groups: Iterable[int], parts: int) -> list[list[int]]:
    """Assigns sequences to microbatches, without splitting groups and with about as many tokens in each.

    Greedy: assigns the groups from the largest to the smallest, ties in the order of their first sequence, each to the
    part with the fewest tokens so far. With k microbatches on each of r replicas use ``k * r`` parts: the assignment
    depends on the arguments only, so it is the same for any number of replicas with the same product.

    Args:
      tokens: the number of tokens of each sequence.
      groups: the group id of each sequence, any integers.
      parts: the number of microbatches.

    Returns:
      The ascending indices of the sequences of each part. Parts are empty if there are fewer groups than parts.

    >>> from gradcombine.losses import deal
    >>> deal(tokens=[9, 1, 4, 4, 2, 2], groups=[7, 7, 3, 3, 5, 5], parts=2)
    [[0, 1], [2, 3, 4, 5]]
    """
    expected = "the tokens of each sequence, integers from 0"
    sizes = [require_integer(expected, n, lowest=0) for n in require_items(expected, tokens)]
    expected = "the group of each sequence, integers"
    ids = [require_integer(expected, n, -math.inf, math.inf) for n in require_items(expected, groups)]
    require_equal("{} groups, one for each sequence", len(sizes), len(ids))
    count = require_integer("1 part or more", parts)
    members: dict[int, list[int]] = {}
    for i, group in enumerate(ids):
        members.setdefault(group, []).append(i)
    whole = list(members.values())
    assigned = divided([sum(sizes[i] for i in sequences) for sequences in whole], count)
    return [sorted(i for group in part for i in whole[group]) for part in assigned]


@operation("pack")
def pack(tokens: Iterable[int], length: int) -> list[list[int]]:
    """Packs sequences into rows of at most ``length`` tokens: first fit, from the longest sequence to the shortest.

    Returns:
      The indices of the sequences of each row. Sequence j of a row has the segment ``j + 1``.

    Raises:
      GradCombineError: for a sequence that is longer than ``length``.

    >>> from gradcombine.losses import pack
    >>> pack([3, 6, 2, 5], length=8)
    [[1, 2], [3, 0]]
    """
    most = require_integer("a length of 1 or more", length)
    expected = f"sequences of 0 to {most} tokens"
    sizes = [require_integer(expected, n, lowest=0, highest=most) for n in require_items(expected, tokens)]
    rows: list[list[int]] = [[] for _ in sizes]
    # A binary tree over the rows: node i has the most room of a row below it, and the children 2 i and 2 i + 1.
    leaves = 1 << len(sizes).bit_length()
    room = [most] * (2 * leaves)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        node = 1
        while node < leaves:  # to the first row with enough room
            node = 2 * node + (room[2 * node] < sizes[i])
        rows[node - leaves].append(i)
        room[node] -= sizes[i]
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [row for row in rows if row]


@operation("require_whole")
def require_whole(microbatches: Sequence[Iterable[int]]) -> None:
    """Raises if a group is split, that is, if a group id occurs in more than one microbatch.

    Args:
      microbatches: for each microbatch of all replicas, the group id of each of its sequences, without padding.

    >>> from gradcombine.losses import require_whole
    >>> require_whole([[7, 7, 3], [5, 5]])
    """
    expected = "microbatches, each with the groups of its sequences"
    microbatch_of: dict[int, int] = {}
    for i, ids in enumerate(require_list(expected, microbatches)):
        for group in {require_integer(expected, n, -math.inf, math.inf) for n in require_items(expected, ids)}:
            if microbatch_of.setdefault(group, i) != i:
                raise invalid("whole groups", f"group {group} in microbatches {microbatch_of[group]} and {i}")
