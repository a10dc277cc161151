"""Words of sentences that reports share."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names with commas between, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
