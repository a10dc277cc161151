"""Observes optax accumulations with a probe around the inner transformation."""

# pyright: standard

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcombine import tree
from gradcombine.errors import invalid
from gradcombine.verify.check.windows import Leaves, Outcome, Run, leaves

Wrap = Callable[[Any, int], Any]


class ProbeState(NamedTuple):
    """State of a probe.

    Attributes:
      calls: number of updates, an int32 scalar.
      gradient, updates: input and result of the last update, at least float32.
      inner: state of the inner transformation.
    """

    calls: jax.Array
    gradient: Any
    updates: Any
    inner: Any


def probe(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation like ``inner`` that records its last input and result in its state.

    Updates that an accumulation computes but masks out do not change the state, so they are not counted.
    """
    wrapped = optax.with_extra_args_support(inner)

    def init(params: Any) -> ProbeState:
        empty = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
        return ProbeState(jnp.int32(0), empty, empty, wrapped.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, ProbeState]:
        # Recorded and returned values must be the same; XLA might compute one of them again in a different way.
        gradient = jax.lax.optimization_barrier(updates)
        result, inner_state = wrapped.update(gradient, state.inner, params, **extra_args)
        result = jax.lax.optimization_barrier(result)
        new, old = (gradient, result), (state.gradient, state.updates)
        last_gradient, last_updates = jax.tree.map(lambda x, like: x.astype(like.dtype), new, old)
        return result, ProbeState(state.calls + 1, last_gradient, last_updates, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class OptaxTraining:
    """A JAX loss, an optax transformation, and the accumulation around it."""

    def __init__(self, loss: Any, inner: optax.GradientTransformation, wrap: Wrap) -> None:
        self._inner, self._wrap = inner, wrap
        self.gradient = _gradient(loss)
        self._compiled: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def start(self, microbatches: int, params: Any, alone: bool) -> Run:
        if (microbatches, alone) not in self._compiled:
            accumulating = self._wrap(probe(optax.identity() if alone else self._inner), microbatches)
            self._compiled[microbatches, alone] = accumulating.init, jax.jit(accumulating.update)
        init, compiled = self._compiled[microbatches, alone]
        params = jax.tree.map(jnp.asarray, params)
        structure, state = tree.flatten(params)[1], init(params)

        def step(gradient: Leaves, extra: Mapping[str, Any]) -> Outcome:
            nonlocal state
            gradients = tree.unflatten(structure, [None if x is None else jnp.asarray(x) for x in gradient])
            before = int(_probe_state(state).calls)
            updates, state = compiled(gradients, state, params, **extra)
            probed, applied = _probe_state(state), leaves(updates)
            calls = int(probed.calls) - before
            moved = any(np.any(x != 0) for x in applied if x is not None)
            changed = calls > 0 and any(
                not np.array_equal(x.astype(np.float64), y.astype(np.float64), equal_nan=True)
                for x, y in zip(applied, leaves(probed.updates), strict=True)
                if x is not None and y is not None
            )
            return Outcome(moved, calls, leaves(probed.gradient) if calls else None, changed)

        return step


@lru_cache(maxsize=8)
def _gradient(loss: Any) -> Any:
    """Returns the compiled gradient of a loss, cached over checks."""
    return jax.jit(jax.grad(loss))


def _probe_state(state: Any) -> ProbeState:
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ProbeState))
    probes = [x for x in nodes if isinstance(x, ProbeState)]
    if len(probes) != 1:
        raise invalid("accumulating to use the inner transformation once", f"{len(probes)} times")
    return probes[0]
