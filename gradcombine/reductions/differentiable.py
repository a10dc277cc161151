"""A wrapper that makes the states of exact reductions differentiable."""

from __future__ import annotations

from typing import NamedTuple

from gradcombine.backends.protocol import Collective
from gradcombine.errors import operation
from gradcombine.reductions.algebra import Reduction, Wrapper, derived
from gradcombine.settings import check
from gradcombine.types import Order, Scalar, State, Tree


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


class Differentiable(Wrapper):
    """See `differentiable`."""

    state = DifferentiableState

    @property
    def _other(self) -> Reduction:
        assert self.of.derivative is not None
        return self.of.derivative

    @property
    def derivative(self) -> Reduction | None:
        return self.of.derivative

    def init(self, like: Tree) -> DifferentiableState:
        return DifferentiableState(self.of.init(like), self._other.init(like))

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> DifferentiableState:
        a, b = self.require(state)
        return DifferentiableState(self.of.update(a, value, weight), self._other.update(b, value, weight))

    def merge(self, a: State, b: State) -> DifferentiableState:
        pairs = zip((self.of, self._other), self.require(a), self.require(b), strict=True)
        return DifferentiableState(*(reduction.merge(x, y) for reduction, x, y in pairs))

    def finalize(self, state: State) -> Tree:
        def run(reduction: Reduction, state: DifferentiableState) -> Tree:
            return reduction.finalize(state.value if reduction is self.of else state.derivative)

        return derived(self.of, run, self.require(state))

    def clear(self, state: State) -> DifferentiableState:
        a, b = self.require(state)
        return DifferentiableState(self.of.clear(a), self._other.clear(b))

    def all_merge(self, state: State, collective: Collective, order: Order) -> DifferentiableState:
        a, b = self.require(state)
        return DifferentiableState(self.of.all_merge(a, collective, order), self._other.all_merge(b, collective, order))
