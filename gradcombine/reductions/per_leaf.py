"""Several reductions in one tree and one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import resolve
from gradcombine.errors import GradCombineError, renamed, shown
from gradcombine.reductions.algebra import Reduction, Shortcuts, require_reduction
from gradcombine.reductions.weights import presence
from gradcombine.types import Order, State, Tree, no_autograph


class PerLeafState(NamedTuple):
    """One partial state for each reduction, in the order of the prefix tree's leaves."""

    parts: tuple[State, ...]


@no_autograph
def per_leaf(reductions: Tree) -> Reduction:
    """Combines each part of a tree by a reduction of its own.

    Args:
      reductions: a tree of reductions, a prefix of the trees to combine: each reduction stands for the subtree in its
        place.

    Returns:
      A reduction of trees that begin as ``reductions`` does. The weight of a contribution weighs the parts that are
      averages (`mean`); the other parts learn from it only whether the contribution is present. So token counts are
      summed, and not multiplied by themselves, when they are the weight as well.

    Bits: those of each part's reduction.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import reductions
    >>> step = reductions.per_leaf({"grads": reductions.mean(), "tokens": reductions.sum(), "amax": reductions.max()})
    >>> a = {"grads": {"w": np.float32([1])}, "tokens": np.int32(3), "amax": np.float32(7)}
    >>> b = {"grads": {"w": np.float32([5])}, "tokens": np.int32(1), "amax": np.float32(2)}
    >>> out = gc.combine(step, [a, b], weights=[3, 1])
    >>> out["grads"]["w"].item(), int(out["tokens"]), float(out["amax"])
    (2.0, 4, 7.0)
    """
    members, prefix = tree.flatten("per_leaf", reductions, is_leaf=lambda node: isinstance(node, Reduction))
    paths = list(prefix.paths())
    for path, member in zip(paths, members, strict=True):
        require_reduction("per_leaf", member, path)

    def each(function: Callable[[Reduction, Any], Any], column: Iterable[Any]) -> Iterator[Any]:
        for path, member, part in zip(paths, members, column, strict=True):
            with renamed(path=path):
                yield function(member, part)

    def parts(state: PerLeafState) -> tuple[State, ...]:
        return _parts(state, len(members))

    @no_autograph
    def init(like: Tree) -> PerLeafState:
        likes = tree.split_as("per_leaf", prefix, like)
        return PerLeafState(tuple(each(lambda member, part: member.init(part), likes)))

    @no_autograph
    def update(state: PerLeafState, value: Tree, weight: Any = 1) -> PerLeafState:
        values = tree.split_as("per_leaf", prefix, value)
        leaves, _ = tree.flatten("per_leaf", value)
        present = presence("per_leaf", resolve("per_leaf", [*leaves, weight]), weight)

        def updated(member: Reduction, pair: tuple[State, Tree]) -> State:
            return member.update(*pair, weight if member.scales_by_weight else present)

        return PerLeafState(tuple(each(updated, zip(parts(state), values, strict=True))))

    @no_autograph
    def finalize(state: PerLeafState) -> Tree:
        return tree.unflatten(prefix, each(lambda member, part: member.finalize(part), parts(state)))

    @no_autograph
    def all_merge(state: PerLeafState, collective: Collective, order: Order) -> PerLeafState:
        merged = each(lambda member, part: member.all_merge(part, collective, order), parts(state))
        return PerLeafState(tuple(merged))

    @no_autograph
    def merge(a: PerLeafState, b: PerLeafState) -> PerLeafState:
        pairs = zip(parts(a), parts(b), strict=True)
        return PerLeafState(tuple(each(lambda member, pair: member.merge(*pair), pairs)))

    @no_autograph
    def clear(state: PerLeafState) -> PerLeafState:
        return PerLeafState(tuple(each(lambda member, part: member.clear(part), parts(state))))

    derivative = None
    if any(member.derivative is not None for member in members):
        derivative = per_leaf(tree.unflatten(prefix, [member.derivative or member for member in members]))
    functions = init, update, merge, finalize
    shortcuts = Shortcuts(functions, clear, all_merge, derivative=derivative)
    return Reduction(*functions, name="per_leaf", scales_by_weight=True, shortcuts=shortcuts)


def _parts(state: Any, expected: int) -> tuple[State, ...]:
    if not isinstance(state, PerLeafState):
        raise GradCombineError("per_leaf", "a PerLeafState", type(state).__name__)
    held: Any = state.parts  # whatever a caller made of it; TensorFlow's wrappers of tuples are tuples alone
    if not isinstance(held, (tuple, list)) or len(state.parts) != expected:
        raise GradCombineError("per_leaf", f"a state of {expected} parts", shown(held))
    return state.parts
