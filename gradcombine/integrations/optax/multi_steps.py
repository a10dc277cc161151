# pyright: standard
"""A drop-in replacement for optax.MultiSteps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.jax_backend import BACKEND
from gradcombine.backends.registry import require_scalar
from gradcombine.errors import invalid, operation, require_equal, require_type, shown, translate_errors
from gradcombine.integrations.jax.arrays import (
    STABLE_STATE,
    as_arrays,
    cast_as,
    explain_state,
    keep_dtypes,
    place_beside,
    require_transformation,
)
from gradcombine.integrations.optax.parameters import gradients_like, init_for
from gradcombine.integrations.optax.skip import Skip, decide, first_detail
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.dtypes import Settings
from gradcombine.settings import check, valid
from gradcombine.types import AccumulateState, Array, DType, Leaf, Scalar, State, Tree

_MATCHING = "gradients that match the state"


@operation("MultiSteps")
class MultiSteps:
    """Accumulates gradients over windows of k microbatches, with the interface and the states of optax.MultiSteps.

    The last microbatch of a window passes the window's mean (or sum) to ``opt``; all others, and those that are left
    out, return zeros. Differences from optax.MultiSteps:

    - ``opt`` only runs at the end of a window. In optax, it runs on every microbatch, and its result is masked.
    - A NaN or an infinity stays in its window. In optax, all later windows become NaN.
    - Complex gradients keep their imaginary part.
    - `has_updated` is false after a microbatch that was left out. In optax, it stays true after an update.
    - k may be a NumPy or JAX integer. In optax, this is a TypeError.
    - k = 0 is an error. In optax, no update ever happens.
    - `gradient_transformation` takes extra arguments.
    - Without ``compat``, gradients may be None on some microbatches.
    - Gradients of another shape than the parameters are an error. In optax, those of fewer elements are broadcast.

    Args:
      opt: the transformation to run.
      every_k_schedule: k, an integer of 1 or more, or a function of ``gradient_step`` (int32 scalar) that returns one.
      use_grad_mean: whether ``opt`` gets the mean instead of the sum. Both have the dtypes of the gradients.
      should_skip_update_fn: ``(updates, gradient_step, params) -> (boolean scalar, skip_state)``. If it returns true,
        the microbatch is left out and changes only ``skip_state``: a window always has k other microbatches.
      accumulator_dtype: dtype of ``acc_grads``; for complex leaves, of their real and imaginary parts. None: that of
        the parameters.
      compat: whether to use the arithmetic of optax.MultiSteps, bit by bit, see below.

    The state is an ``optax.MultiStepsState``, whose ``acc_grads`` has the structure and the dtypes of optax's (except
    that complex leaves stay complex). It holds the sum of the window so far; after an update, the sum of the window
    that ended, until the next microbatch. With ``compat`` it holds the running mean or the sum, and zeros after an
    update, as in optax. So a state that optax made between two windows can be used directly; one from the middle of a
    window directly with ``compat``, else through `adopt`.

    ``skip_state`` is what the skip function returned. If that is () or a dict without ``should_skip``, the decision is
    added to it as ``should_skip``; ``compat`` does not add it, and `has_updated` then ignores microbatches left out.

    Raises:
      GradCombineError: for a k that is not an integer of 1 or more, and for an invalid transformation or function. In
        ``update``: for a skip function with another result, and for gradients that do not match the state; without
        ``compat``, for a mean of integers.

    Bits: without ``compat`` those of `gradcombine.combine` with `gradcombine.reductions.mean` or ``sum``. With
    ``compat`` those of optax.MultiSteps, for updates and states at every step, eagerly and under jit, if the gradients
    are arguments; the zeros between updates are positive, while optax's may be negative. In a scan without a skip
    function, XLA rounds optax's own update of a leaf of one element differently from jit, in the last bit with Adam;
    this class then has the bits of jit.

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
        self._opt = require_transformation(opt)
        self._ready = gc.accumulate(gc.reductions.sum(), valid("every", every_k_schedule)).ready
        self._skip = should_skip_update_fn
        self._compat = compat = valid("compat", compat)
        self._use_grad_mean = use_grad_mean = valid("use_grad_mean", use_grad_mean)
        dtype = dtypes.parse(accumulator_dtype)
        dtype = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
        self._rule = (OptaxOrder if compat else Sums)(use_grad_mean, dtype)

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The transformation that runs at the end of a window."""
        return self._opt

    def init(self, params: optax.Params) -> optax.MultiStepsState:
        """Returns the state before the first microbatch."""
        params = as_arrays(params)
        like = gradients_like(params)
        detail: Tree = ()
        if self._skip is not None:
            detail = self._skip_state(jnp.asarray(False), first_detail(self._skip, like))
        inner, window = self._opt.init(params), self._rule.init(like)
        return place_beside(like, optax.MultiStepsState(jnp.int32(0), jnp.int32(0), inner, window, detail))

    def update(
        self,
        updates: optax.Updates,
        state: Tree,
        params: optax.Params | None = None,
        **extra_args: Tree,
    ) -> tuple[optax.Updates, optax.MultiStepsState]:
        """Adds a microbatch; returns zeros, or at the end of a window the transformation's updates, and the next state.

        Args:
          updates: gradients.
          state: from `init`, from the last call, or from optax.MultiSteps.
          params: the parameters, if the transformation needs them.
          **extra_args: for the transformation, which gets those of the window's last microbatch. ``weight``, ``flush``
            and ``number`` raise an error: `accumulate` takes them, but optax.MultiSteps would ignore them.
        """
        _require_state(state)
        if unsupported := sorted(_ARGS_OF_ACCUMULATE & extra_args.keys()):
            expected = f"no {unsupported[0]}, which optax.MultiSteps does not know (integrations.optax.accumulate does)"
            raise invalid(expected, shown(extra_args[unsupported[0]]))
        updates, state = as_arrays(updates), as_arrays(state)
        mini_step, gradient_step = state.mini_step, state.gradient_step
        emit = jnp.asarray(self._ready(AccumulateState(((),), mini_step + 1, gradient_step)))
        skip, detail = None, ()
        if self._skip is not None:
            skip, returned = decide(self._skip, updates, gradient_step, params)
            detail = self._skip_state(skip, returned)
            emit = emit & ~skip
        window, acc_grads = self._rule.add(updates, state.acc_grads, mini_step, emit)

        old = state.inner_opt_state

        # The conditional only reads the window: a buffer that passes through a conditional is copied.
        def apply() -> tuple[optax.Updates, Tree]:
            gradients = self._rule.combined(window, updates)
            with explain_state(self._opt, old, gradients if params is None else params):
                result, new = self._opt.update(gradients, old, params=params, **extra_args)
            return self._rule.applied(result, new, old, emit)

        def wait() -> tuple[optax.Updates, Tree]:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(apply)[0]), old

        result, inner = jax.lax.cond(emit, apply, wait)
        next_mini_step = jnp.where(emit, 0, mini_step + 1)
        if skip is not None:
            acc_grads = jax.tree.map(lambda old, new: jnp.where(skip, old, new), state.acc_grads, acc_grads)
            next_mini_step = jnp.where(skip, mini_step, next_mini_step)
        next_gradient_step = jnp.where(emit, gradient_step + 1, gradient_step)
        return result, optax.MultiStepsState(next_mini_step, next_gradient_step, inner, acc_grads, detail)

    def has_updated(self, state: optax.MultiStepsState) -> Array:
        """Whether the last microbatch ended a window; a boolean scalar."""
        _require_state(state)
        updated = jnp.logical_and(jnp.equal(state.mini_step, 0), jnp.greater(state.gradient_step, 0))
        skipped = _skip_flag(state.skip_state)
        if skipped is None or np.shape(skipped) != np.shape(updated):
            return updated
        return jnp.logical_and(updated, ~skipped)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Converts this object to an optax transformation, for instance for `optax.chain`."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def adopt(self, state: optax.MultiStepsState) -> optax.MultiStepsState:
        """Converts a state of optax.MultiSteps with the same arguments, even from the middle of a window.

        Args:
          state: made by optax.MultiSteps, or by this class with ``compat``.

        Returns:
          The state for this object. ``acc_grads`` becomes zeros if no window has begun; else, without ``compat``, each
          running mean is multiplied by the number of its gradients.
        """
        _require_state(state)
        state = as_arrays(state)
        n, scales = jnp.asarray(state.mini_step), self._use_grad_mean and not self._compat

        def convert(acc: Array) -> Array:
            return jnp.where(n == 0, jnp.zeros_like(acc), acc * n.astype(acc.dtype) if scales else acc)

        detail = state.skip_state if self._skip is None else self._skip_state(jnp.asarray(False), state.skip_state)
        with translate_errors("accumulators of numbers"):
            return state._replace(acc_grads=jax.tree.map(convert, state.acc_grads), skip_state=detail)

    def _skip_state(self, skip: Array, detail: Tree) -> Tree:
        """The detail of the skip function, with the decision added to it if `has_updated` needs that."""
        # Not detail == (), which raises for a JAX array.
        extended = {} if isinstance(detail, tuple) and not detail else detail
        if self._compat or _skip_flag(detail) is not None or not isinstance(extended, Mapping):
            return detail
        return {**extended, "should_skip": skip}


_ARGS_OF_ACCUMULATE = {"weight", "flush", "number"}


def _require_state(state: Tree) -> None:
    """Raises unless the argument is a state of optax.MultiSteps."""
    require_type("an optax.MultiStepsState", state, optax.MultiStepsState)
    for name in ("mini_step", "gradient_step"):
        require_scalar("an integer scalar", getattr(state, name), "iu", f".{name}")


def _skip_flag(skip_state: Tree) -> Array | None:
    """The decision ``should_skip`` in a skip state; None without one."""
    is_mapping = isinstance(skip_state, Mapping)
    flag = skip_state.get("should_skip") if is_mapping else getattr(skip_state, "should_skip", None)
    return flag if getattr(flag, "dtype", None) == np.bool_ else None


class Sums:
    """Running sums, divided once: a reduction of this library, with its accumulators as ``acc_grads``."""

    def __init__(self, mean: bool, dtype: DType) -> None:
        self._reduction: Reduction = gc.reductions.mean(dtype=dtype) if mean else gc.reductions.sum(dtype=dtype)

    def init(self, params: Tree) -> Tree:
        """Returns accumulators of zeros."""
        return jax.tree.map(jnp.zeros_like, init_for(self._reduction.init, params).value)

    def add(self, grads: Tree, accumulators: Tree, mini_step: Array, emit: Array) -> tuple[Tree, Tree]:
        """Adds the gradients of microbatch ``mini_step``, from 0; ``emit``: whether it is the last of its window.

        Returns:
          The argument ``window`` of `combined`, and the new ``acc_grads``.
        """
        del emit
        window = self._restored(grads, accumulators, mini_step)
        # A full window is not cleared; the next microbatch starts from an empty one instead.
        window = tree.select(BACKEND, mini_step == 0, self._reduction.clear(window), window)
        window = self._reduction.update(window, grads)
        return window, window.value

    def combined(self, window: Any, grads: Tree) -> Tree:
        """The combined gradients in the dtypes of ``grads``, the last ones of the window."""
        return cast_as(self._reduction.finalize(window), grads)

    def applied(self, updates: Tree, new: Tree, old: Tree, emit: Array) -> tuple[Tree, Tree]:
        """The updates of the transformation, and its new state in the dtypes of the old one; ``emit`` is true."""
        del emit
        return updates, keep_dtypes(new, old)

    def _restored(self, grads: Tree, accumulators: Tree, mini_step: Array) -> State:
        def present(g: Leaf, acc: Leaf) -> Tree:
            # A gradient that is only missing on this microbatch still has an accumulator.
            return acc if g is None and not tree.is_static(acc) else g

        with translate_errors(_MATCHING):
            like = jax.tree.map(present, grads, accumulators, is_leaf=lambda g: g is None)
        spec = jax.eval_shape(self._reduction.init, like)
        return spec._replace(value=accumulators, weight=mini_step.astype(spec.weight.dtype), count=mini_step)


class OptaxOrder:
    """`Sums` in the arithmetic of optax.MultiSteps: ``acc + (g - acc) / (n + 1)``, or ``g + acc``.

    `gradcombine.foreign_orders.welford` computes the bits of this mean by operations that all backends round alike. But
    whether XLA fuses products of the inner transformation into additions depends on the surrounding program. So the
    compiler gets the same expressions as from optax, including the mean and the masks around the transformation.
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
        def require_shape(path: tuple[object, ...], g: Array, acc: Array) -> None:
            require_equal("shape {}", np.shape(acc), np.shape(g), jax.tree_util.keystr(path))

        with translate_errors(_MATCHING):
            jax.tree_util.tree_map_with_path(require_shape, grads, accumulators)
            return (accumulators, mini_step), _kept(grads, accumulators, mini_step, emit, mean=self._mean)

    def combined(self, window: Any, grads: Tree) -> Tree:
        return optax.tree.cast_like(_combined(grads, *window, mean=self._mean), grads)

    def applied(self, updates: Tree, new: Tree, old: Tree, emit: Array) -> tuple[Tree, Tree]:
        # ``emit`` is true in this branch, but the compiler does not know, and fuses as in optax.
        with translate_errors(STABLE_STATE):
            state = jax.tree.map(lambda old, new: jnp.where(emit, new, old).astype(old.dtype), old, new)
        return jax.tree.map(lambda x: emit.astype(x.dtype) * x, updates), state


def _combined(grads: Tree, accumulators: Tree, n: Array, *, mean: bool) -> Tree:
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda g, acc: acc + (g - acc) / (n + 1) if mean else g + acc, grads, accumulators)


# Compiled even in eager mode, like optax's conditional: this fuses the product with 1 / (n + 1) into the sum.
@partial(jax.jit, static_argnames="mean")
def _kept(grads: Tree, accumulators: Tree, n: Array, emit: Array, *, mean: bool) -> Tree:
    combined = _combined(grads, accumulators, n, mean=mean)
    return jax.tree.map(lambda x, acc: jnp.where(emit, _zero(x), x).astype(acc.dtype), combined, accumulators)


def _zero(x: Array) -> Array:
    """Zeros with the signs of the elements, as from optax's multiplication by 0, but even for infinities and NaN."""
    zero = jnp.zeros_like(x)
    return jnp.copysign(zero, x) if jnp.issubdtype(x.dtype, jnp.floating) else zero
