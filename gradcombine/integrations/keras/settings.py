"""The reduction that an optimizer's config names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from gradcombine import reductions
from gradcombine.integrations.keras.checks import error
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.sums import Precision

Name = Literal["mean", "sum"]


def reduction_of(name: Name, precision: Precision, dtype: Any) -> Reduction:
    """The reduction of ordinary gradients."""
    if name not in get_args(Name):
        raise error(f"a reduction of {list(get_args(Name))}", repr(name))
    return (reductions.mean if name == "mean" else reductions.sum)(precision, dtype)


class Parts:
    """Gradients that are averaged, and values that take their variable's place, by the variables.

    Keras calls the latter ``overwrite_with_gradient``: the scales of float8 layers, of which a window has the maximum.

    Args:
      overwritten: for each variable, whether it is one of these.
      reduction: of all others.
    """

    def __init__(self, overwritten: Sequence[bool], reduction: Reduction) -> None:
        self._overwritten = list(overwritten)
        self.reduction = reduction
        if any(self._overwritten):
            self.reduction = reductions.per_leaf((reduction, reductions.max()))

    def split(self, values: Sequence[Any]) -> Any:
        """The tree that the reduction takes."""
        if not any(self._overwritten):
            return list(values)
        pairs = list(zip(values, self._overwritten, strict=True))
        return [x for x, chosen in pairs if not chosen], [x for x, chosen in pairs if chosen]

    def join(self, tree: Any) -> list[Any]:
        """The values again, one a variable."""
        if not any(self._overwritten):
            return list(tree)
        others, chosen = map(iter, tree)
        return [next(chosen) if overwritten else next(others) for overwritten in self._overwritten]

    def averaged(self, position: int) -> int:
        """The variable of a position among the others."""
        return [i for i, overwritten in enumerate(self._overwritten) if not overwritten][position]
