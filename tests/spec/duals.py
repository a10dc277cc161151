"""Exact first and second derivatives by forward-mode differentiation of fractions, with nested dual numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Dual:
    """``value + slope * e`` with ``e * e = 0``."""

    value: Any
    slope: Any

    def __add__(self, other: Any) -> Dual:
        other = lifted(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other: Any) -> Dual:
        other = lifted(other)
        return Dual(self.value * other.value, self.value * other.slope + self.slope * other.value)

    def __sub__(self, other: Any) -> Dual:
        return self + lifted(other) * -1

    def __truediv__(self, other: Any) -> Dual:
        other = lifted(other)
        return Dual(
            self.value / other.value,
            (self.slope * other.value - self.value * other.slope) / (other.value * other.value),
        )

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: Any) -> bool:
        return self.value < lifted(other).value


def lifted(x: Any) -> Dual:
    return x if isinstance(x, Dual) else Dual(x, Fraction(0))


def derivatives(function: Any, at: Sequence[float], along: Sequence[float]) -> tuple[float, float]:
    """First and second directional derivatives of a function of a list of numbers."""
    moving = [
        Dual(Dual(Fraction(x), Fraction(u)), Dual(Fraction(u), Fraction(0))) for x, u in zip(at, along, strict=True)
    ]
    result = function(moving)
    return float(result.slope.value), float(result.slope.slope)
