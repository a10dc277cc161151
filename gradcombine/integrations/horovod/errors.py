"""Errors with the texts that programs written for Horovod look for."""

from __future__ import annotations

from typing import Any

from gradcombine.errors import GradCombineError


class HorovodError(GradCombineError):
    """A refusal whose whole text is Horovod's.

    Args:
      text: what ``str`` gives.
      operation, expected, received, path: as for `gradcombine.GradCombineError`.
    """

    def __init__(self, text: str, operation: str, expected: str, received: Any, path: str = "") -> None:
        super().__init__(operation, expected, received, path)
        self.text = text

    def __str__(self) -> str:
        return self.text


def sparse_over_several_passes(path: str) -> HorovodError:
    """For IndexedSlices that would have to be added up over several backward passes."""
    text = "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
    return HorovodError(text, "compute_gradients", "a dense gradient", "IndexedSlices", path)
