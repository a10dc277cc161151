"""Reductions of integers whose results have a derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError
from gradcombine.reductions.algebra import Reduction, Shortcuts
from gradcombine.types import Array, Order, State, Tree, no_autograph


class DifferentiableState(NamedTuple):
    """A partial result, and that of the reduction whose derivative it has."""

    value: State
    derivative: State


@no_autograph
def differentiable(reduction: Reduction) -> Reduction:
    """The same reduction, with a derivative over time as well.

    A list and an all-reduce of precision ``"exact"`` have the derivative of the sum and the mean. A state of integers
    has none: a derivative through `accumulate`, `update` or `merge` is refused. The states of this reduction hold
    beside the integers a running value of precision ``"fast"``, which the derivative flows through.

    Args:
      reduction: any reduction. One whose states have a derivative is returned as it is.

    Returns:
      A reduction of the same values, to the bit. Of float32 its states have 4 bytes an element more.

    >>> import jax, jax.numpy as jnp, gradcombine as gc
    >>> acc = gc.accumulate(gc.reductions.differentiable(gc.reductions.mean("exact")), every=2)
    >>> def loss(x):
    ...     state = acc.update(x * x, acc.init(x))
    ...     return acc.value(acc.update(x, state)).sum()
    >>> jax.grad(loss)(jnp.float32([1, 2]))
    Array([1.5, 2.5], dtype=float32)
    """
    derivative = reduction.derivative
    if derivative is None:
        return reduction

    def open_(state: State) -> DifferentiableState:
        if not isinstance(state, DifferentiableState):
            raise GradCombineError(reduction.name, "a DifferentiableState", type(state).__name__)
        return state

    @no_autograph
    def init(like: Tree) -> DifferentiableState:
        return DifferentiableState(reduction.init(like), derivative.init(like))

    @no_autograph
    def update(state: State, value: Tree, weight: Any = 1) -> DifferentiableState:
        a, b = open_(state)
        return DifferentiableState(reduction.update(a, value, weight), derivative.update(b, value, weight))

    @no_autograph
    def merge(a: State, b: State) -> DifferentiableState:
        pairs = zip((reduction, derivative), open_(a), open_(b), strict=True)
        return DifferentiableState(*(one.merge(x, y) for one, x, y in pairs))

    @no_autograph
    def finalize(state: State) -> Tree:
        def run(one: Reduction, state: DifferentiableState) -> Tree:
            return one.finalize(state.value if one is reduction else state.derivative)

        return derived(reduction, run, open_(state))

    @no_autograph
    def clear(state: State) -> DifferentiableState:
        a, b = open_(state)
        return DifferentiableState(reduction.clear(a), derivative.clear(b))

    @no_autograph
    def all_merge(state: State, collective: Collective, order: Order) -> DifferentiableState:
        a, b = open_(state)
        return DifferentiableState(
            reduction.all_merge(a, collective, order), derivative.all_merge(b, collective, order)
        )

    functions = init, update, merge, finalize
    shortcuts = Shortcuts(functions, clear, all_merge, derivative=derivative)
    return replace(reduction, init=init, update=update, merge=merge, finalize=finalize, shortcuts=shortcuts)


def derived(reduction: Reduction, run: Callable[..., Tree], *arguments: Tree) -> Tree:
    """``run(reduction, *arguments)``, with the derivative of ``run(reduction.derivative, *arguments)``.

    Args:
      reduction: any.
      run: what is done with a reduction; arrays that matter for the derivative are all in ``arguments``.
      arguments: trees of arrays and None.
    """
    derivative = reduction.derivative
    if derivative is None:
        return run(reduction, *arguments)
    try:
        leaves, structure = tree.flatten(reduction.name, arguments)
    except GradCombineError:
        return run(reduction, *arguments)  # which says better what is wrong
    backend = resolve(reduction.name, leaves)
    form: list[Any] = []

    def arrays_of(one: Reduction) -> Callable[..., Sequence[Array]]:
        def call(*leaves: Any) -> list[Array]:
            result, outer = tree.flatten(reduction.name, run(one, *tree.unflatten(structure, leaves)))
            missing = [(i, x) for i, x in enumerate(result) if is_absent(x)]
            form[:] = [outer, missing]
            return [x for x in result if not is_absent(x)]

        return call

    result = backend.custom_derivative(arrays_of(reduction), arrays_of(derivative), leaves)
    outer, missing = form
    for i, x in missing:
        result.insert(i, x)
    return tree.unflatten(outer, result)
