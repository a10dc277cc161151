# pyright: standard
"""A drop-in for optax.MultiSteps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.registry import load, require_scalar
from gradcombine.errors import invalid, operation, require_type, shown, translate_errors
from gradcombine.integrations.jax.arrays import (
    KEPT,
    as_arrays,
    keep_dtypes,
    place_beside,
    require_transformation,
)
from gradcombine.integrations.optax.skip import Skip, decide, first_detail
from gradcombine.integrations.optax.updates import cast_as, gradients_like, init_for
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.dtypes import Settings
from gradcombine.settings import check, valid
from gradcombine.types import AccumulateState, Array, DType, Leaf, Scalar, State, Tree

_MATCHING = "gradients that match the state"


class MultiSteps:
    """Accumulates gradients over windows of k microbatches, with the interface and the states of optax.MultiSteps.

    The last microbatch of a window gives the window's mean (or sum) to ``opt``; all others, and those that are left
    out, return zeros. Where it differs from optax.MultiSteps:

    - ``opt`` runs at the boundary alone, not on every microbatch with its result masked.
    - A NaN or an infinity stays in its window. There, all later windows are NaN.
    - Complex gradients keep their imaginary part.
    - `has_updated` is false after a microbatch that was left out. There, it stays true after an update.
    - k may be a NumPy or JAX integer. There, a TypeError.
    - k = 0 is an error. There, no update ever happens, and nothing says so.
    - `gradient_transformation` takes extra arguments.
    - Gradients may be None where they have none this once.

    Args:
      opt: the transformation to run.
      every_k_schedule: k, an integer of 1 or more, or a function of ``gradient_step`` (int32 scalar) that returns one.
      use_grad_mean: whether ``opt`` gets the mean, else the sum. Both in the dtypes of the gradients.
      should_skip_update_fn: ``(updates, gradient_step, params) -> (boolean scalar, skip_state)``. A microbatch for
        which it is true leaves everything but ``skip_state`` unchanged: a window always has k others.
      accumulator_dtype: of ``acc_grads``; of complex leaves, that of their parts. None: the parameters' own.
      compat: the arithmetic of optax.MultiSteps, bit by bit, see below.

    The state is an ``optax.MultiStepsState``, and ``acc_grads`` has the structure and the dtypes of optax's (a complex
    leaf's is complex). It holds the sum of the window so far, and after an update still that of the window which
    ended, until the next microbatch. With ``compat`` it holds the running mean, or the sum, and zeros after an update,
    as in optax. So a state that optax made between two windows can be taken over as it is; one from the middle of a
    window as it is with ``compat``, else by `adopt`.

    ``skip_state`` is what the skip function returned. Where that is () or a dict without ``should_skip``, ``compat``
    leaves it as it is, and `has_updated` cannot tell; otherwise the decision is kept in a dict, as ``should_skip``.

    Raises:
      GradCombineError: for a k that is not an integer of 1 or more, and for a transformation or a function that is not
        one. In ``update``: for a skip function that returns anything else; without ``compat``, for gradients that do
        not match the state, and for a mean of integers.

    Bits: without ``compat`` those of `gradcombine.combine` with `gradcombine.reductions.mean` or ``sum``. With
    ``compat`` those of optax.MultiSteps, updates and states at every step, eagerly and under jit, given the gradients
    as arguments. The zeros that it returns between updates may be negative ones there. In a scan without a skip
    function XLA rounds optax's own update of a leaf of one element otherwise than under jit, by a last digit with Adam;
    this class keeps to the bits that both have under jit.

    References: `optax.MultiSteps
    <https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html#optax.MultiSteps>`_.

    >>> import jax.numpy as jnp, optax
    >>> from gradcombine.integrations.optax import MultiSteps
    >>> tx = MultiSteps(optax.sgd(1.0), every_k_schedule=2)
    >>> state = tx.init({"w": jnp.zeros(2)})
    >>> updates, state = tx.update({"w": jnp.float32([1, 2])}, state)
    >>> updates["w"].tolist(), bool(tx.has_updated(state))
    ([0.0, 0.0], False)
    >>> updates, state = tx.update({"w": jnp.float32([3, 4])}, state)
    >>> updates["w"].tolist(), bool(tx.has_updated(state))
    ([-2.0, -3.0], True)
    """

    @operation("MultiSteps")
    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[Array], Scalar],
        use_grad_mean: bool = True,
        should_skip_update_fn: Skip | None = None,
        accumulator_dtype: DType = jnp.float32,
        *,
        compat: bool = False,
    ) -> None:
        check(should_skip_update_fn=should_skip_update_fn)
        require_transformation(opt)
        self._ready = gc.accumulate(gc.reductions.sum(), valid("every", every_k_schedule)).ready
        self._opt = optax.with_extra_args_support(opt)
        self._skip = should_skip_update_fn
        self._compat = compat = valid("compat", compat)
        self._use_grad_mean = use_grad_mean = valid("use_grad_mean", use_grad_mean)
        asked = dtypes.parse(accumulator_dtype)
        dtype = None if asked is None else jax.dtypes.canonicalize_dtype(asked)
        self._rule = (OptaxOrder if compat else Sums)(use_grad_mean, dtype)

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The transformation that runs at the boundary."""
        return self._opt

    @operation("MultiSteps")
    def init(self, params: optax.Params) -> optax.MultiStepsState:
        """The state before the first microbatch."""
        params = as_arrays(params)
        like = gradients_like(params)
        detail: Tree = ()
        if self._skip is not None:
            detail = self._kept(jnp.asarray(False), first_detail(self._skip, like))
        inner, window = self._opt.init(params), self._rule.init(like)
        return place_beside(like, optax.MultiStepsState(jnp.int32(0), jnp.int32(0), inner, window, detail))

    @operation("MultiSteps")
    def update(
        self,
        updates: optax.Updates,
        state: Tree,
        params: optax.Params | None = None,
        **extra_args: Tree,
    ) -> tuple[optax.Updates, optax.MultiStepsState]:
        """One microbatch: zeros and the next state, or at the boundary what the transformation returns.

        Args:
          updates: gradients.
          state: from `init`, from the last call, or one of optax.MultiSteps.
          params: the parameters, where the transformation asks for them.
          **extra_args: for the transformation, which gets those of the window's last microbatch. Not ``weight``,
            ``flush`` and ``number``, which mean something to `accumulate`: optax.MultiSteps would drop them.
        """
        _require_state(state)
        if others := sorted(_OF_ACCUMULATE & extra_args.keys()):
            expected = f"no {others[0]}, which optax.MultiSteps does not know (integrations.optax.accumulate does)"
            raise invalid(expected, shown(extra_args[others[0]]))
        updates, state = as_arrays(updates), as_arrays(state)
        mini_step, gradient_step = state.mini_step, state.gradient_step
        emit = jnp.asarray(self._ready(AccumulateState(((),), mini_step + 1, gradient_step)))
        skip, detail = None, ()
        if self._skip is not None:
            skip, returned = decide(self._skip, updates, gradient_step, params)
            detail = self._kept(skip, returned)
            emit = emit & ~skip
        window, kept = self._rule.add(updates, state.acc_grads, mini_step, emit)

        # The window is only read in the conditional: a buffer that passes through one is copied.
        def apply() -> tuple[optax.Updates, Tree]:
            def transform(gradients: Tree) -> tuple[Tree, Tree]:
                return self._opt.update(gradients, state.inner_opt_state, params=params, **extra_args)

            return self._rule.boundary(window, updates, state.inner_opt_state, emit, transform)

        def wait() -> tuple[optax.Updates, Tree]:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(apply)[0]), state.inner_opt_state

        result, inner = jax.lax.cond(emit, apply, wait)
        counted = jnp.where(emit, 0, mini_step + 1)
        if skip is not None:
            kept = jax.tree.map(lambda old, new: jnp.where(skip, old, new), state.acc_grads, kept)
            counted = jnp.where(skip, mini_step, counted)
        window = jnp.where(emit, gradient_step + 1, gradient_step)
        return result, optax.MultiStepsState(counted, window, inner, kept, detail)

    @operation("MultiSteps")
    def has_updated(self, state: optax.MultiStepsState) -> Array:
        """Whether the last microbatch ended a window, a boolean scalar."""
        _require_state(state)
        updated = jnp.logical_and(jnp.equal(state.mini_step, 0), jnp.greater(state.gradient_step, 0))
        skipped = _skip_flag(state.skip_state)
        if skipped is None or np.shape(skipped) != np.shape(updated):
            return updated
        return jnp.logical_and(updated, ~skipped)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """The pair of functions, for `optax.chain` and its like."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    @operation("MultiSteps")
    def adopt(self, state: optax.MultiStepsState) -> optax.MultiStepsState:
        """Takes over a state of optax.MultiSteps with the same arguments, also from the middle of a window.

        Args:
          state: one that optax.MultiSteps made, or this class with ``compat``.

        Returns:
          The state for this object: zeros where no window has begun, whatever an earlier one has left there, and else,
          unless ``compat``, each running mean times the number of its gradients.
        """
        _require_state(state)
        state = as_arrays(state)
        n, scaled = jnp.asarray(state.mini_step), self._use_grad_mean and not self._compat

        def adopted(acc: Array) -> Array:
            return jnp.where(n == 0, jnp.zeros_like(acc), acc * n.astype(acc.dtype) if scaled else acc)

        with translate_errors("accumulators of numbers"):
            return state._replace(acc_grads=jax.tree.map(adopted, state.acc_grads))

    def _kept(self, skip: Array, detail: Tree) -> Tree:
        """The skip function's state, with the decision in it where it is `has_updated` that needs it."""
        if self._compat or _skip_flag(detail) is not None or not (isinstance(detail, Mapping) or detail == ()):
            return detail
        return {**(detail or {}), "should_skip": skip}


_OF_ACCUMULATE = {"weight", "flush", "number"}


def _require_state(state: Tree) -> None:
    """Refuses what is no state of optax.MultiSteps."""
    require_type("an optax.MultiStepsState", state, optax.MultiStepsState)
    for name in ("mini_step", "gradient_step"):
        require_scalar("an integer scalar", getattr(state, name), "iu", f".{name}")


def _skip_flag(skip_state: Tree) -> Array | None:
    """The decision that a skip state holds as ``should_skip``; None where it holds none."""
    is_mapping = isinstance(skip_state, Mapping)
    flag = skip_state.get("should_skip") if is_mapping else getattr(skip_state, "should_skip", None)
    return flag if getattr(flag, "dtype", None) == np.bool_ else None


Transform: TypeAlias = Callable[[Tree], tuple[Tree, Tree]]
"""Combined gradients to the inner transformation's updates and next state."""


class Sums:
    """Running sums by a reduction of the library, divided once; ``acc_grads`` is the accumulators of its state."""

    def __init__(self, mean: bool, dtype: DType) -> None:
        self._reduction: Reduction = gc.reductions.mean(dtype=dtype) if mean else gc.reductions.sum(dtype=dtype)

    def init(self, params: Tree) -> Tree:
        """The accumulators of no gradients: zeros."""
        return jax.tree.map(jnp.zeros_like, init_for(self._reduction.init, params).value)

    def add(self, grads: Tree, accumulators: Tree, mini_step: Array, emit: Array) -> tuple[Tree, Tree]:
        """The gradients number ``mini_step``, from 0; ``emit`` says that they are the window's last.

        Returns:
          The argument ``window`` of `boundary`, and the accumulators that the state holds afterwards.
        """
        del emit
        window = self._open(grads, accumulators, mini_step)
        # The full window is left where it is; the next one begins with an empty one in its place.
        window = tree.select(load("jax"), mini_step == 0, self._reduction.clear(window), window)
        window = self._reduction.update(window, grads)
        return window, window.value

    def boundary(self, window: Any, grads: Tree, inner: Tree, emit: Array, transform: Transform) -> tuple[Tree, Tree]:
        """Runs the transformation on the combined gradients, in the dtypes of ``grads``; in the conditional's branch.

        Returns:
          Its updates and its next state, in the dtypes of ``inner``, the last one.
        """
        del emit
        updates, state = transform(cast_as(self._reduction.finalize(window), grads))
        return updates, keep_dtypes(state, inner)

    def _open(self, grads: Tree, accumulators: Tree, mini_step: Array) -> State:
        def present(g: Leaf, acc: Leaf) -> Tree:
            # A gradient that is missing for once does not make its accumulator one of no gradient.
            return acc if g is None and not tree.is_static(acc) else g

        with translate_errors(_MATCHING):
            like = jax.tree.map(present, grads, accumulators, is_leaf=lambda g: g is None)
        spec = jax.eval_shape(self._reduction.init, like)
        return spec._replace(value=accumulators, weight=mini_step.astype(spec.weight.dtype), count=mini_step)


class OptaxOrder:
    """`Sums` in the arithmetic of optax.MultiSteps, as XLA is given it: ``acc + (g - acc) / (n + 1)``, or ``g + acc``.

    `gradcombine.foreign_orders.welford` has the bits of that mean from operations that every backend rounds alike. But
    which products of the inner transformation XLA fuses into additions depends on all that it compiles with them. So
    the whole expression goes to the compiler as optax gives it, the mean and the masks around the transformation
    included.
    """

    def __init__(self, mean: bool, dtype: DType) -> None:
        self._mean, self._dtype = mean, dtype

    def init(self, params: Tree) -> Tree:
        def zeros(x: Array) -> Array:
            if self._dtype is None or not jnp.iscomplexobj(x):
                return jnp.zeros_like(x, dtype=self._dtype)
            return jnp.zeros_like(x, dtype=Settings(self._dtype).running(x.dtype))

        return jax.tree.map(zeros, params)

    def add(self, grads: Tree, accumulators: Tree, mini_step: Array, emit: Array) -> tuple[Tree, Tree]:
        with translate_errors(_MATCHING):
            return (accumulators, mini_step), _kept(grads, accumulators, mini_step, emit, mean=self._mean)

    def boundary(self, window: Any, grads: Tree, inner: Tree, emit: Array, transform: Transform) -> tuple[Tree, Tree]:
        combined = _combined(grads, *window, mean=self._mean)
        updates, state = transform(optax.tree.cast_like(combined, grads))
        # True in this branch, but the compiler does not know, and fuses as it does in optax.
        with translate_errors(KEPT):
            state = jax.tree.map(lambda old, new: jnp.where(emit, new, old).astype(old.dtype), inner, state)
        return jax.tree.map(lambda x: emit.astype(x.dtype) * x, updates), state


def _combined(grads: Tree, accumulators: Tree, n: Array, *, mean: bool) -> Tree:
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda g, acc: acc + (g - acc) / (n + 1) if mean else g + acc, grads, accumulators)


# Compiled by itself outside of jit too, as optax's conditional is: the product with 1 / (n + 1) is fused into the sum.
@partial(jax.jit, static_argnames="mean")
def _kept(grads: Tree, accumulators: Tree, n: Array, emit: Array, *, mean: bool) -> Tree:
    combined = _combined(grads, accumulators, n, mean=mean)
    return jax.tree.map(lambda x, acc: jnp.where(emit, _zero(x), x).astype(acc.dtype), combined, accumulators)


def _zero(x: Array) -> Array:
    """The zero of each element's sign, which optax's multiplication by 0 leaves; of infinities and NaN too."""
    zero = jnp.zeros_like(x)
    return jnp.copysign(zero, x) if jnp.issubdtype(x.dtype, jnp.floating) else zero
