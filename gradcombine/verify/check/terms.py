"""Terms of a loss as a function that returns arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from gradcombine.types import Tree

ByName: TypeAlias = Callable[[Any, Any], Mapping[str, tuple[Tree, Any]]]
"""Function of parameters and examples that returns each term's gradient, summed over the examples, and its weight."""


class Terms:
    """Function of parameters and examples that returns the gradients of all terms, and their weights.

    Both are arrays, so that JAX can trace the function, once for all calls.

    Attributes:
      names: names of the terms, as of the last call that ran in Python.
    """

    def __init__(self, terms: ByName) -> None:
        self._terms, self.names = terms, list[str]()

    def __call__(self, params: Any, batch: Any) -> tuple[list[Tree], list[Any]]:
        pairs = self._terms(params, batch)
        self.names = list(pairs)
        return [pair[0] for pair in pairs.values()], [pair[1] for pair in pairs.values()]
