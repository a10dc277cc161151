"""A wrapper that makes the states of exact reductions differentiable."""

from __future__ import annotations

from typing import NamedTuple

from gradcombine.errors import operation
from gradcombine.reductions.algebra import Beside, Reduction, derived
from gradcombine.settings import check
from gradcombine.types import Scalar, State, Tree


class DifferentiableState(NamedTuple):
    """The state of a reduction, and the state of the reduction for its derivative."""

    value: State
    derivative: State


@operation("differentiable")
def differentiable(reduction: Reduction) -> Reduction:
    """Makes a reduction differentiable over time, too.

    In a list and over replicas, precision ``"exact"`` has the derivatives of the sum and the mean. But its states are
    integers: differentiating through `accumulate`, `update` or `merge` raises. The states of this wrapper also have a
    running value of precision ``"fast"``, which is differentiated instead.

    Args:
      reduction: any reduction. Returned unchanged if its states are differentiable.

    Returns:
      A reduction with the same bits. Its states take 4 more bytes per float32 element.

    >>> import jax, jax.numpy as jnp, gradcombine as gc
    >>> acc = gc.accumulate(gc.reductions.differentiable(gc.reductions.mean("exact")), every=2)
    >>> def loss(x):
    ...     state = acc.update(x * x, acc.init(x))
    ...     return acc.value(acc.update(x, state)).sum()
    >>> jax.grad(loss)(jnp.float32([1, 2]))
    Array([1.5, 2.5], dtype=float32)
    """
    check(reduction=reduction)
    return reduction if reduction.derivative is None else Differentiable(reduction)


class Differentiable(Beside):
    """See `differentiable`."""

    state = DifferentiableState

    def __init__(self, of: Reduction) -> None:
        assert of.derivative is not None
        super().__init__(of, of.derivative)

    @property
    def derivative(self) -> Reduction | None:
        return self.of.derivative

    def init(self, like: Tree) -> DifferentiableState:
        return DifferentiableState(self.of.init(like), self.other.init(like))

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> DifferentiableState:
        a, b = self.require(state)
        return DifferentiableState(self.of.update(a, value, weight), self.other.update(b, value, weight))

    def finalize(self, state: State) -> Tree:
        def run(reduction: Reduction, state: DifferentiableState) -> Tree:
            return reduction.finalize(state.value if reduction is self.of else state.derivative)

        return derived(self.of, run, self.require(state))
