"""Which of the packages that a command needs are not there."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


def missing(names: Sequence[str]) -> list[str]:
    """Those of the named packages that are not installed; none of them is imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def hint(names: Sequence[str]) -> str:
    """What to do about them, in one line."""
    return f"{', '.join(names)} not found; install gradcombine[verify], for instance: pip install 'gradcombine[verify]'"
