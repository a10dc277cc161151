"""The fixed grids of binary positions on which exact sums keep their digits: one of float32, one of float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.types import Array


@dataclass(frozen=True)
class Grid:
    """A float format, and the words that hold digits of it.

    Position 0 is the smallest subnormal number. A value with the exponent field E has the exponent
    ``p = max(E, 1) - 1``, and is ``significand * 2**p`` of it.

    Attributes:
      value: the float dtype.
      word: the signed integer dtype of its width.
      precision: the bits of a significand, the hidden one among them.
      width: the positions of a bin: half of those of a word.
      tag_bits: the bits of a word that tell its bin.
      special: the tag of slot 0 that only infinities and NaN have.
    """

    value: np.dtype
    word: np.dtype
    precision: int
    width: int
    tag_bits: int
    special: int

    @property
    def bits(self) -> int:
        return 8 * self.word.itemsize

    @property
    def capacity(self) -> int:
        """The digits that a word can sum up, below the sign and above the tag."""
        return 1 << (self.bits - 1 - self.tag_bits - self.width)

    @property
    def tag(self) -> int:
        """The mask of the tag."""
        return (1 << self.tag_bits) - 1

    @property
    def digit(self) -> int:
        """The mask of a digit."""
        return (1 << self.width) - 1

    @property
    def negative(self) -> int:
        """Where slot 0 counts -inf, above the count of +inf; a NaN counts as one of each."""
        return 1 << ((self.bits - self.tag_bits) // 2)

    @property
    def most(self) -> int:
        """The bits of a float without its sign."""
        return (1 << (self.bits - 1)) - 1

    @property
    def hidden(self) -> int:
        """The hidden bit of a significand: the lowest one of the exponent field."""
        return 1 << (self.precision - 1)

    @property
    def half(self) -> int:
        """The bits of the lower half of a significand: products of halves, and sums of a few, fit a word."""
        return (self.precision + 1) // 2

    @property
    def lower(self) -> int:
        """The mask of the lower bits of a product of significands, below the precision's."""
        return (1 << 2 * self.half) - 1

    @property
    def unit(self) -> int:
        """``2**-unit`` is the smallest subnormal number."""
        return self.top // 2 + self.precision - 2

    @property
    def infinity(self) -> int:
        """The bits of +inf."""
        return self.most & -self.hidden

    @property
    def top(self) -> int:
        """The exponent p of infinities and NaN; that of finite values is less."""
        return (self.infinity >> (self.precision - 1)) - 1

    @property
    def _shift(self) -> int:
        """``(p + _shift) // width`` is the bin of the leading bit: so much that infinities begin the bin of a tag."""
        return self.special * 3 * self.width - self.top

    def lowest(self, s: int) -> int:
        """The lowest position of slot s at tag 0."""
        return self.width * s - (self._shift - self.precision + 1)

    def tag_of(self, backend: Backend, exponent: Array, s: int) -> Array:
        """``(exponent + shift - width * s) // (3 * width)`` without a division, which is exact for every exponent."""
        factor = -(-(1 << 20) // (3 * self.width))
        return backend.shift_right(exponent * factor + (self._shift - self.width * s) * factor, 20)


FLOAT32 = Grid(np.dtype(np.float32), np.dtype(np.int32), precision=24, width=16, tag_bits=3, special=6)
FLOAT64 = Grid(np.dtype(np.float64), np.dtype(np.int64), precision=53, width=32, tag_bits=5, special=22)


def of(dtype: np.dtype) -> Grid:
    """The grid for contributions, or of words, of this dtype: that of float64 for 64 bits, else that of float32."""
    return FLOAT64 if dtype.itemsize == 8 else FLOAT32
