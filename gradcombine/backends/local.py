"""The collective of a program that has one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradcombine.backends.protocol import Collective
from gradcombine.types import Array


class Local:
    """One replica: every exchange returns what it was given."""

    def __repr__(self) -> str:
        return "LOCAL"

    def size(self) -> int:
        return 1

    def rank(self) -> Array:
        return np.int32(0)

    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        return list(arrays)

    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        return list(arrays)

    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        return [array[None] for array in arrays]

    def reduce_scatter_map(
        self,
        function: Callable[[Sequence[Array], Sequence[Array]], list[Array]],
        summed: Sequence[Array],
        common: Sequence[Array],
    ) -> list[Array]:
        return function(summed, common)

    def mark_varying(self, arrays: Sequence[Array]) -> list[Array]:
        return list(arrays)

    def require_unreduced(self, operation: str, paths: Sequence[str], leaves: Sequence[Array]) -> None:
        return None


LOCAL: Collective = Local()
