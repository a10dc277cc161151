"""Row-sparse contributions and their expected combinations, from exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gradcombine.sparse import RowSparse
from gradcombine.tree import static_rows
from tests.spec import exact
from tests.spec.data import WEIGHTS

ROWS, WIDTH, PLACES = 6, 2, 5
"""Rows of the dense array, elements per row, and rows per contribution, of which some occur twice."""


@st.composite
def contributions(draw: Any, n: int, elements: Any, weights: Any = WEIGHTS) -> dict[str, Any]:
    """``n`` stacked contributions with weights. Padding and contributions of weight 0 hold NaN."""
    scales = np.float32(draw(st.lists(weights, min_size=n, max_size=n)))
    indices = np.int32(draw(st.lists(st.integers(0, ROWS), min_size=n * PLACES, max_size=n * PLACES)))
    size = n * PLACES * WIDTH
    values = np.float32(draw(st.lists(elements, min_size=size, max_size=size))).reshape((n, PLACES, WIDTH))
    indices = indices.reshape((n, PLACES))
    values[indices == ROWS] = np.nan
    values[scales == 0] = np.nan
    return {"values": RowSparse(indices, values, static_rows(ROWS)), "weights": scales}


def deal(data: Any, replicas: int) -> list[Any]:
    """Splits the contributions into one contiguous block per replica."""
    indices, values, extent = data["values"]
    parts = [np.split(x, replicas) for x in (indices, values, data["weights"])]
    return [{"values": RowSparse(i, v, extent), "weights": w} for i, v, w in zip(*parts, strict=True)]


def dense_terms(data: Any, row: int, element: int) -> list[Fraction]:
    """One element of each densified contribution: repeated rows are added in the canonical tree, in float32."""
    elements = []
    for indices, values in zip(data["values"].indices, data["values"].values, strict=True):
        occurring = [Fraction(float(v)) if v == v else Fraction(0) for v in values[indices == row, element]]
        terms = [(value, Fraction(1), False) for value in occurring] or [(Fraction(0), Fraction(1), False)]
        elements.append(Fraction(exact.combine("sum", terms, "tree")))
    return elements


def expected(name: str, data: Any, order: str, blocks: int = 1) -> np.ndarray:
    """The dense combination: in ``order`` within a block, in the canonical tree over blocks."""
    result = np.zeros((ROWS, WIDTH), np.float32)
    for row in range(ROWS):
        for element in range(WIDTH):
            values = dense_terms(data, row, element)
            terms = [exact.term(name, float(v), w) for v, w in zip(values, data["weights"], strict=True)]
            result[row, element] = exact.combine(name, terms, order, blocks)
    return result


def occurring(data: Any) -> list[int]:
    """Rows that occur in contributions of nonzero weight, in ascending order."""
    return sorted(set(data["values"].indices[data["weights"] != 0].ravel().tolist()) - {ROWS})


def check(result: RowSparse, wanted: np.ndarray, rows: list[int]) -> None:
    """Asserts that the result holds these rows in order, then padding, and the bits of the dense array's rows."""
    assert result.shape == wanted.shape
    np.testing.assert_array_equal(result.indices, [*rows, *[len(wanted)] * (len(result.indices) - len(rows))])
    np.testing.assert_array_equal(exact.bits(result.values[: len(rows)]), exact.bits(wanted[rows]))
    np.testing.assert_array_equal(exact.bits(result.values[len(rows) :]), 0)
    assert not wanted[[row for row in range(len(wanted)) if row not in rows]].any()
