"""Loss curves on a terminal, where there is no page: one line of blocks a curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"


def blocks(values: Sequence[float], low: float, high: float) -> str:
    """One block a value, the lowest for ``low`` and below, the highest for ``high``; ``!`` for what is not finite.

    >>> blocks([0.0, 0.5, 1.0, float("nan")], 0.0, 1.0)
    '▁▅█!'
    """
    return "".join(_block(value, low, high) for value in values)


def plot(curves: Mapping[str, Sequence[float]]) -> Table:
    """All curves on one scale, with where each begins and ends."""
    finite = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, curve in curves.items():
        table.add_row(Text(name), Text(blocks(curve, low, high), "cyan"), f"{curve[0]:.4f} to {curve[-1]:.4f}")
    return table


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    part = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[min(len(_BLOCKS) - 1, max(0, int(part * len(_BLOCKS))))]
