"""Losses of tokens, sequences and groups as a sum and what it is a sum over, so that microbatches add up.

Every function takes values per token and returns a `gradcombine.reductions.Ratio`: the numerator, in the dtype of the
values and float32 at least, and the denominator, an int32 count. Over microbatches and replicas numerators and
denominators are added, and divided once at the end; a filter that leaves sequences out only changes the mask, whose
count is known when every microbatch has run.

Common arguments, arrays of NumPy, JAX or TensorFlow, eager or traced:

- ``values``: per token, of shape (..., T), a real float dtype.
- ``mask``: of their shape: bool, or a number that is 0 where a token does not count. None: all count. What stands at a
  token that does not count, NaN too, has no effect and no gradient.
- ``segments``: of packed rows, of their shape: the integers from 0 to T, each the number of a sequence in its row, 0
  for padding. None: a row is one sequence.

A sequence, or a group, without a token that counts is none. Where there is none at all, numerator and denominator are
0, whose quotient is 0 in `gradcombine.reductions.ratio`. Numerators are differentiable in the values; denominators are
constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

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
from gradcombine.reductions import dtypes
from gradcombine.reductions.ratios import Ratio
from gradcombine.reductions.weights import parse
from gradcombine.types import Array, Scalar, no_autograph

_MOST = np.iinfo(np.int32).max


@operation("token_mean")
def token_mean(values: Array, mask: Array | None = None) -> Ratio:
    """The mean over all tokens that count.

    >>> import numpy as np
    >>> from gradcombine.losses import token_mean
    >>> token_mean(np.float32([[1, 2, 3], [5, 0, 0]]), np.array([[1, 1, 1], [1, 0, 0]]))
    Ratio(numerator=np.float32(11.0), denominator=np.int32(4))
    """
    tokens = _Tokens(values, mask, None)
    return tokens.ratio(tokens.values, tokens.present)


@operation("token_sum")
def token_sum(values: Array, mask: Array | None = None, *, count: Array | int) -> Ratio:
    """The sum over all tokens that count, divided by a count of the caller's.

    Args:
      values, mask: see `gradcombine.losses`.
      count: what this microbatch adds to the denominator, a scalar from 0: its rows, its prompts, also those of which
        no token counts.

    >>> import numpy as np
    >>> from gradcombine.losses import token_sum
    >>> token_sum(np.float32([[1, 2, 3], [5, 0, 0]]), np.array([[1, 1, 1], [0, 0, 0]]), count=2)
    Ratio(numerator=np.float32(6.0), denominator=2)
    """
    return Ratio(token_mean(values, mask).numerator, _count(count))


@operation("sequence_mean_of_token_mean")
def sequence_mean_of_token_mean(values: Array, mask: Array | None = None, segments: Array | None = None) -> Ratio:
    """The mean over sequences of the mean over the tokens of each.

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
    """The mean over sequences of the sum over the tokens of each, divided by a constant.

    Args:
      values, mask, segments: see `gradcombine.losses`.
      normalizer: the constant: the longest response that is sampled, say.

    >>> import numpy as np
    >>> from gradcombine.losses import sequence_mean_of_token_sum
    >>> sequence_mean_of_token_sum(np.float32([[1, 2, 3], [5, 0, 0]]), np.array([[1, 1, 1], [1, 0, 0]]), normalizer=2)
    Ratio(numerator=np.float32(5.5), denominator=np.int32(2))
    """
    divisor = require_number("a positive normalizer", normalizer, np.nextafter(0, 1))
    tokens = _Tokens(values, mask, segments)
    backend, dtype = tokens.backend, tokens.dtype
    scaled = backend.divide(tokens.values, backend.full((), divisor, dtype, [tokens.values]))
    return tokens.ratio(scaled, tokens.sequences()[1])


@operation("group_mean")
def group_mean(
    values: Array, groups: Array, mask: Array | None = None, segments: Array | None = None, *, of: str = "sequences"
) -> Ratio:
    """The mean over groups (of the samples of one prompt, say) of the mean of each.

    A group has to be whole in its microbatch: `deal` hands out whole groups, and `require_whole` refuses others.

    Args:
      values, mask, segments: see `gradcombine.losses`.
      groups: integers from 0, equal within a group: one for each row, or of packed rows one for each token.
      of: "sequences": the mean of a group is over its sequences of the mean over tokens; "tokens": over its tokens.

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
    lengths, begins = tokens.sequences()
    counts, first = _sizes(tokens.backend, ids, begins)
    return tokens.ratio(tokens.over(tokens.over(tokens.values, lengths), counts), first)


class _Tokens:
    """The tokens of a microbatch along one axis.

    Attributes:
      backend: of the arrays.
      dtype: of the numerator.
      values: in this dtype, 0 where a token does not count; NaN, all of them, for ids out of range.
      present: whether a token counts.
    """

    @no_autograph
    def __init__(self, values: Array, mask: Array, segments: Array, groups: Array = None) -> None:
        given = [values, *(x for x in (mask, segments, groups) if x is not None)]
        for x in given:
            if owner(x) is None:
                raise invalid("arrays of NumPy, JAX or TensorFlow", shown(x))
        self.backend = backend = resolve(given)
        values = backend.asarray(values)
        dtype, self._shape = backend.dtype(values), _dimensions(values)
        if dtypes.kind(dtype) != "float" or not self._shape:
            raise invalid("values of a real float dtype, of shape (..., T)", f"{dtype} of shape {self._shape}")
        self.dtype = dtypes.working(dtype)
        flat = backend.flat(backend.cast(values, self.dtype))
        self._rows = backend.row_numbers(values)
        present = self._rows == self._rows
        if mask is not None:
            present = present & self._flat(mask, "mask", "biuf", partial(_counted, backend))
        self._segments = None
        if segments is not None:
            self._segments = self._flat(segments, "segments", "iu", self._as_ids)
            present = present & (self._segments > 0)
        self.present = present
        self.values = backend.where(present, flat, backend.full((), 0, self.dtype, [flat]))
        if self._segments is not None:
            length = self._length()
            self._refuse(
                self._segments, (self._segments < 0) | (self._segments > length), f"segments from 0 to {length}"
            )

    def sequences(self) -> tuple[Array, Array]:
        """For each token how many tokens its sequence has, and whether it is the first of them."""
        ids = self._rows if self._segments is None else self._rows * (self._length() + 1) + self._segments
        return _sizes(self.backend, ids, self.present)

    def of_groups(self, groups: Array) -> Array:
        """For each token the number of its group."""
        backend = self.backend
        if backend.dtype(backend.asarray(groups)).kind in "iu" and _compatible(groups, self._shape[:-1]):
            ids = backend.take(backend.flat(backend.cast(backend.asarray(groups), dtypes.INT32)), self._rows)
        else:
            ids = self._flat(groups, "groups", "iu", self._as_ids)
        self._refuse(ids, ids < 0, "groups from 0")
        return ids

    def over(self, values: Array, counts: Array) -> Array:
        """The values divided by counts, where they count."""
        one = self.backend.full((), 1, dtypes.INT32, [counts])
        divisor = self.backend.cast(self.backend.where(self.present, counts, one), self.dtype)
        return self.backend.divide(values, self.backend.maximum(divisor, self.backend.cast(one, self.dtype)))

    def ratio(self, terms: Array, counted: Array) -> Ratio:
        backend = self.backend
        return Ratio(backend.total(terms), backend.total(backend.cast(counted, dtypes.INT32)))

    def _as_ids(self, x: Array) -> Array:
        return self.backend.cast(x, dtypes.INT32)

    def _flat(self, x: Array, name: str, kinds: str, convert: Callable[[Array], Array]) -> Array:
        array = self.backend.asarray(x)
        if self.backend.dtype(array).kind not in kinds or not _compatible(array, self._shape):
            expected = f"{name} of {'integers' if kinds == 'iu' else 'numbers or bools'} of shape {self._shape}"
            raise invalid(expected, f"{self.backend.dtype(array)} of shape {_dimensions(array)}")
        return convert(self.backend.flat(array))

    def _length(self) -> int:
        length, rows = self._shape[-1], math.prod(1 if n is None else n for n in self._shape[:-1])
        if length is None or (rows + 1) * (length + 1) > _MOST:
            raise invalid("a known length of the rows, and fewer than 2**31 tokens", f"shape {self._shape}")
        return length

    def _refuse(self, ids: Array, wrong: Array, expected: str) -> None:
        """Raises for ids that are out of range; where they are traced, the values become NaN."""
        known = self.backend.concrete(wrong)
        if known is None:
            found = self.backend.total(self.backend.cast(wrong, dtypes.INT32)) > 0
            nan = self.backend.full((), np.nan, self.dtype, [self.values])
            self.values = self.backend.where(found, nan, self.values)
        elif known.any():
            raise invalid(expected, int(np.asarray(self.backend.concrete(ids))[known][0]))


def _sizes(backend: Backend, ids: Array, present: Array) -> tuple[Array, Array]:
    """For each element how many present ones have its id, and whether it is itself the first of those."""
    keys = backend.where(present, ids, backend.full((), _MOST, dtypes.INT32, [ids]))
    order = backend.argsort(keys)
    ordered = backend.take(keys, order)
    sizes = backend.search_sorted(ordered, ids + 1) - backend.search_sorted(ordered, ids)
    places = backend.cumsum(ids * 0 + 1) - 1
    is_first = backend.search_sorted(ordered, ordered) == places
    return sizes, backend.take(is_first, backend.argsort(order)) & present


def _counted(backend: Backend, mask: Array) -> Array:
    return mask if backend.dtype(mask) == np.bool_ else mask != 0


def _count(count: Scalar) -> Scalar:
    """The count, a weight; known ones are from 0, traced ones become NaN where they are negative."""
    backend = resolve([] if owner(count) is None else [count])
    with within(".count"):
        parse(backend, count)
    return count


def _dimensions(array: Array) -> tuple[int | None, ...]:
    """The shape, None for what TensorFlow does not know of it."""
    try:
        return tuple(array.shape)
    except ValueError:
        raise invalid("an array of a known number of dimensions", shown(array)) from None


def _compatible(array: Array, shape: tuple[int | None, ...]) -> bool:
    own = _dimensions(array)
    return len(own) == len(shape) and all(a is None or b is None or a == b for a, b in zip(own, shape, strict=True))


@operation("deal")
def deal(tokens: Iterable[int], groups: Iterable[int], parts: int) -> list[list[int]]:
    """Deals sequences to microbatches: whole groups, and about as many tokens to each.

    The largest group goes to the part with the fewest tokens so far, then the next one; equal ones in the order of
    their first sequence. It depends on nothing but the arguments: with k microbatches on each of r replicas deal
    ``k * r`` parts, and the batch is the same divided over any number of replicas.

    Args:
      tokens: of each sequence.
      groups: the group of each sequence, any integers.
      parts: how many.

    Returns:
      The numbers of the sequences of each part, rising; empty parts where there are fewer groups.

    >>> from gradcombine.losses import deal
    >>> deal(tokens=[9, 1, 4, 4, 2, 2], groups=[7, 7, 3, 3, 5, 5], parts=2)
    [[0, 1], [2, 3, 4, 5]]
    """
    expected = "tokens and a group of each sequence, integers from 0"
    sizes = [require_integer(expected, n, lowest=0) for n in require_items(expected, tokens)]
    ids = [require_integer(expected, n, lowest=-_MOST) for n in require_items(expected, groups)]
    require_equal("{} groups, one for each sequence", len(sizes), len(ids))
    count = require_integer("1 part or more", parts)
    members: dict[int, list[int]] = {}
    for i, group in enumerate(ids):
        members.setdefault(group, []).append(i)
    dealt: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for chosen in sorted(members.values(), key=lambda of: (-sum(sizes[i] for i in of), of[0])):
        part = held.index(min(held))
        dealt[part] += chosen
        held[part] += sum(sizes[i] for i in chosen)
    return [sorted(part) for part in dealt]


@operation("pack")
def pack(tokens: Iterable[int], length: int) -> list[list[int]]:
    """Packs sequences into rows of at most this many tokens: the longest first, each into the first row that fits it.

    Returns:
      The numbers of the sequences of each row. Sequence j of a row has the segment ``j + 1``.

    Raises:
      GradCombineError: for a sequence that is longer.

    >>> from gradcombine.losses import pack
    >>> pack([3, 6, 2, 5], length=8)
    [[1, 2], [3, 0]]
    """
    most = require_integer("a length of 1 or more", length)
    expected = f"sequences of 0 to {most} tokens"
    sizes = [require_integer(expected, n, lowest=0, highest=most) for n in require_items(expected, tokens)]
    rows: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        row = next((row for row, left in enumerate(free) if left >= sizes[i]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(most)
        rows[row].append(i)
        free[row] -= sizes[i]
    return rows


@operation("require_whole")
def require_whole(microbatches: Sequence[Iterable[int]]) -> None:
    """Raises if a group is cut apart: if an id stands in more than one microbatch.

    Args:
      microbatches: of each, on all replicas, the ids of its groups, as for `group_mean`.

    >>> from gradcombine.losses import require_whole
    >>> require_whole([[7, 7, 3], [5, 5]])
    """
    expected = "microbatches, each with the groups of its sequences"
    where: dict[int, int] = {}
    for i, ids in enumerate(require_list(expected, microbatches)):
        for group in {require_integer(expected, n, lowest=-_MOST) for n in require_items(expected, ids)}:
            if where.setdefault(group, i) != i:
                raise invalid("whole groups", f"group {group} in microbatches {where[group]} and {i}")
