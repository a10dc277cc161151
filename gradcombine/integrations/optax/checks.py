"""What the transformations ask of their arguments."""

from __future__ import annotations

from typing import Any

from gradcombine.errors import GradCombineError


def require_collective(operation: str, over: Any) -> None:
    """Refuses what is not a collective."""
    if not hasattr(over, "all_gather"):
        raise GradCombineError(operation, "a collective: LOCAL or jax_axis(name)", repr(over))
