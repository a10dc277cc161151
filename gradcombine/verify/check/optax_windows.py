"""optax: a probe inside of the accumulation sees what reaches the inner transformation."""

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
from gradcombine.verify.check.windows import Leaves, Outcome, leaves

Wrap = Callable[[Any, int], Any]


class ProbeState(NamedTuple):
    """Observations of a probe in the steps whose state was kept.

    Attributes:
      calls: int32 scalar, how many.
      gradient, updates: of the last one, at least float32.
      inner: the state of the transformation behind the probe.
    """

    calls: jax.Array
    gradient: Any
    updates: Any
    inner: Any


def probe(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A transformation that does what ``inner`` does, and keeps in its state what it received and returned.

    What an accumulation computes and masks out does not stay in the state, so it is not counted.
    """
    wrapped = optax.with_extra_args_support(inner)

    def init(params: Any) -> ProbeState:
        empty = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
        return ProbeState(jnp.int32(0), empty, empty, wrapped.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, ProbeState]:
        # What is kept and what is passed on are the same values: XLA must not compute one of them again, otherwise.
        gradient = jax.lax.optimization_barrier(updates)
        result, behind = wrapped.update(gradient, state.inner, params, **extra_args)
        result = jax.lax.optimization_barrier(result)
        seen, made = jax.tree.map(_as, gradient, state.gradient), jax.tree.map(_as, result, state.updates)
        return result, ProbeState(state.calls + 1, seen, made, behind)

    return optax.GradientTransformationExtraArgs(init, update)


def _as(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.astype(like.dtype)


class OptaxTraining:
    """A loss in JAX, an optax transformation, and the accumulation around it."""

    def __init__(self, loss: Any, inner: optax.GradientTransformation, wrap: Wrap) -> None:
        self._inner, self._wrap = inner, wrap
        self.gradient = _differentiated(loss)
        self._made: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def start(self, microbatches: int, params: Any, alone: bool) -> OptaxRun:
        # Compiled once, for all runs.
        if (microbatches, alone) not in self._made:
            made = self._wrap(probe(optax.identity() if alone else self._inner), microbatches)
            self._made[microbatches, alone] = made.init, jax.jit(made.update)
        return OptaxRun(*self._made[microbatches, alone], params)


class OptaxRun:
    """One training."""

    def __init__(self, init: Any, update: Any, params: Any) -> None:
        self._params, self._update = jax.tree.map(jnp.asarray, params), update
        self._structure = tree.flatten(self._params)[1]
        self._state = init(self._params)
        self._calls = int(_seen(self._state).calls)

    def step(self, gradient: Leaves, extra: Mapping[str, Any]) -> Outcome:
        gradients = tree.unflatten(self._structure, [None if x is None else jnp.asarray(x) for x in gradient])
        updates, self._state = self._update(gradients, self._state, self._params, **extra)
        seen, made = _seen(self._state), leaves(updates)
        calls, self._calls = int(seen.calls) - self._calls, int(seen.calls)
        moved = any(np.any(x != 0) for x in made if x is not None)
        changed = calls > 0 and any(
            not np.array_equal(x.astype(np.float64), y.astype(np.float64), equal_nan=True)
            for x, y in zip(made, leaves(seen.updates), strict=True)
            if x is not None and y is not None
        )
        return Outcome(moved, calls, leaves(seen.gradient) if calls else None, changed)


@lru_cache(maxsize=8)
def _differentiated(loss: Any) -> Any:
    """Compiled once for all checks of a loss."""
    return jax.jit(jax.grad(loss))


def _seen(state: Any) -> ProbeState:
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ProbeState))
    probes = [x for x in nodes if isinstance(x, ProbeState)]
    if len(probes) != 1:
        raise invalid("accumulating to use the inner transformation once", f"{len(probes)} times")
    return probes[0]
