"""The weighted mean of a window's gradients, and how near a result comes to it, by a rounding bound.

The exact mean is ``sum(c_i g_i)``, computed in float64. A float32 accumulator of unit roundoff u = 2**-24, in whatever
order and form (sums divided at the end, terms scaled first, Welford's running mean), is within
``gamma(2 n + 5) * max|g_i|`` of it, elementwise, with ``gamma(m) = m u / (1 - m u)``:

- a sum takes n - 1 additions and a product a term, n - 1 additions of weights, and a division: 2 n roundings;
- Welford's step ``m + (g - m) / i`` adds at most ``(4 / i + 1) u max|g|``, of which later steps leave the part i / n:
  all of them ``((n + 1) / 2 + 4) u max|g|``.

One rounding to the gradients' dtype is added if that is narrower, and 2 n + 1 times the smallest normal number for
results that are flushed to zero.

References: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 2002, sections 3.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcombine.verify.check.case import Case, combined
from gradcombine.verify.check.running import Result, Split
from gradcombine.verify.check.standard import Floats, Standard, gamma, rms
from gradcombine.verify.check.windows.subject import Leaves
from gradcombine.verify.compare.ulp import finfo, rounding_unit

FLOAT32 = np.dtype(np.float32)


class Window(Standard):
    """A window's gradients, and what came of them.

    Args:
      weights: of the microbatches.
      gradients: of each; a leaf that is None in some counts as zero there, one that is None in all is left out.
      made: what came of them.
      bound: of all elements; None: that of the module's docstring.
    """

    what, wide, overdetermined = "microbatch", None, 1.2

    def __init__(
        self, weights: Sequence[float], gradients: Sequence[Leaves], made: Leaves, bound: float | None = None
    ) -> None:
        rows: list[list[np.ndarray]] = [[] for _ in gradients]
        results: list[np.ndarray] = []
        dtypes: list[np.dtype] = []
        for column, result in zip(zip(*gradients, strict=True), made, strict=True):
            present: list[np.ndarray] = [x for x in column if x is not None]
            if not present or result is None:
                continue
            for row, x in zip(rows, column, strict=True):
                row.append(np.zeros(present[0].shape) if x is None else x.astype(np.float64))
            results.append(result.astype(np.float64))
            dtypes.append(present[0].dtype)
        self.sizes = np.array(weights, np.float64)
        self.mean = self.given = self.sizes / self.sizes.sum()
        self.examples, self.names = len(rows), [str(i) for i in range(len(results))]
        self._terms = [Result(tuple(row), (), tuple(dtypes)) for row in rows]
        self.own, self.made = self._mean(range(len(rows))), Result(tuple(results), (), tuple(dtypes))
        self._bounds = (
            [np.full(x.shape, bound) for x in results] if bound else list(map(self._bound, range(len(dtypes))))
        )

    @property
    def case(self) -> Case:
        return Case(Split(self.examples), self.made, self.made, wide=False)

    @property
    def share(self) -> float:
        """The largest distance of what was made from the mean, over its bound; infinite if it is not finite."""
        return float(self.shares(self.made.floats, self.own.floats, wide=False, sides=1).max(initial=0))

    def allowed(self, wide: bool) -> np.ndarray:
        del wide
        return np.array([rms(x) for x in self._bounds])

    def shares(self, a: Floats, b: Floats, wide: bool, sides: float = 2) -> np.ndarray:
        """Elementwise, in place of the root of the mean square."""
        del wide
        with np.errstate(all="ignore"):
            far = [np.abs(x - y) for x, y in zip(a, b, strict=True)]
            shares = [
                np.where(x == 0, 0, x / (sides * y)).max(initial=0) for x, y in zip(far, self._bounds, strict=True)
            ]
        return np.array([x if np.isfinite(x) else np.inf for x in shares])

    def resolution(self, floats: Floats) -> list[np.ndarray]:
        return [2.0**-22 * np.abs(x) for x in floats]

    def one(self, rows: Sequence[int]) -> Result:
        return self._terms[rows[0]] if len(rows) == 1 else self._mean(rows)

    def combined(self, coefficients: np.ndarray) -> list[np.ndarray]:
        return combined(coefficients, [x.floats for x in self._terms])

    def _mean(self, rows: Sequence[int]) -> Result:
        weights = np.zeros(self.examples)
        weights[list(rows)] = self.sizes[list(rows)]
        return self._terms[0]._replace(floats=tuple(self.combined(weights / weights.sum())))

    def _bound(self, leaf: int) -> np.ndarray:
        output = self._terms[0].dtypes[leaf]
        # A gradient that is wider than float32 has an accumulator of its own dtype.
        used = output if rounding_unit(output) < rounding_unit(FLOAT32) else FLOAT32
        roundings = 2 * self.examples + 5
        bound = gamma(roundings, rounding_unit(used)) * np.max([np.abs(x.floats[leaf]) for x in self._terms], axis=0)
        if rounding_unit(output) > rounding_unit(used):
            bound = bound * (1 + rounding_unit(output)) + rounding_unit(output) * np.abs(self.own.floats[leaf])
        return bound + roundings * max(float(finfo(x).smallest_normal) for x in (output, used))
