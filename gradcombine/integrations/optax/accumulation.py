# pyright: standard
"""Accumulation over microbatches and replicas as a wrapper of an optax transformation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import dtype_of
from gradcombine.denominators import Terms
from gradcombine.errors import (
    GradCombineError,
    invalid,
    operation,
    require_given,
    require_type,
    translate_errors,
    within,
)
from gradcombine.integrations.jax.arrays import (
    apply_updates,
    as_arrays,
    cast_as,
    optimized,
    place_beside,
    require_transformation,
)
from gradcombine.integrations.jax.jax_window import ReplicatedWindow, conditional, run_if
from gradcombine.integrations.jax.on_replicas import mark_varying
from gradcombine.integrations.optax.parameters import gradients_like, init_for
from gradcombine.integrations.optax.skip import Skip, SkipState, decide, first_detail
from gradcombine.places.time import require_counters, require_state
from gradcombine.places.window import Window, require_condition, widened
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.ratios import Ratio, ratios_of
from gradcombine.settings import check
from gradcombine.types import AccumulateState, Array, BinaryCounter, Order, Scalar, Tree


class AccumulateUpdatesState(NamedTuple):
    """State of `accumulate` and `accumulate_and_apply`.

    Attributes:
      window: the accumulated microbatches. ``window.levels`` differs between replicas; everything else is the same on
        all replicas. After a window has been applied, its arrays are unspecified, as the all-reduce may have reused
        them; it only counts as full.
      inner: the state of the inner transformation.
      applied: boolean scalar, whether the inner transformation ran in the last update.
      skip: with a skip function: ``skipped``, int32, the number of microbatches left out since the state was created;
        ``in_a_row``, the number of consecutive ones among the last; ``detail``, the second result of the last call of
        the function, different on each replica; ``all_of_window``, whether the open window has no other microbatches.
        Without one: ().
    """

    window: AccumulateState
    inner: Tree
    applied: Array
    skip: Any = ()


@operation("accumulate")
def accumulate(
    inner: optax.GradientTransformation,
    every: int | Callable[[Array], Scalar],
    *,
    reduction: Reduction | None = None,
    over: Collective | None = None,
    skip: Skip | None = None,
    order: Order = "sequential",
    max_every: int | None = None,
    denominators: Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation once per window, on the gradients combined over its microbatches and over the replicas.

    The last microbatch of a window merges the replicas' windows, divides once, and runs ``inner``; all others return
    zeros and leave its state unchanged. So clipping, weight decay and schedules inside ``inner`` happen once per
    window, and replicas all-reduce gradients once per window.

    Args:
      inner: the transformation to run, for instance an optimizer.
      every, order, max_every: as for `gradcombine.accumulate`. `gradcombine.UNTIL_FLUSH`: only ``flush`` ends windows.
        If ``flush`` is a Python bool (a static argument under jit), there are two programs, and neither has a branch.
      reduction: combines the gradients, from `gradcombine.reductions`; None: their mean.
      over: the replicas that share the parameters: `gradcombine.jax_axis`, or `gradcombine.LOCAL`; None: the latter.
      skip: decides which microbatches to leave out: `skip_not_finite()`, `skip_large(max_norm)` or any function
        ``(updates, gradient_step, params) -> (boolean scalar, detail)``. It gets this replica's gradients as passed to
        ``update``. If it returns true on any replica, the microbatch is left out on all of them, which takes a small
        all-reduce per update. It then has weight 0, but still counts as a step of its window: windows end with the same
        microbatches as without ``skip``, schedules stay in step with the data, and the mean is over the other
        microbatches. If all microbatches of a window are left out, ``inner`` does not run, so that neither momentum nor
        weight decay acts without a gradient; one of weight 0 is not left out, also if it ends the window. (`MultiSteps`
        waits for ``every`` good microbatches instead.)
      denominators: for a loss of several terms whose totals are not known before the gradients: the names of their
        denominators. ``updates`` is then a dict of gradients by denominator, of undivided sums, as computed by
        `gradcombine.integrations.jax.grads_by_denominator`; ``weight`` is a dict of the numbers that are added to the
        denominators; ``reduction`` is a mean. ``inner`` gets the gradient of ``sum_j (sum_i L_ij) / (sum_i W_ij)``. (If
        the totals W_j are known, accumulate the gradients of ``sum_j L_ij / W_j`` with ``reductions.sum()``.)

    Returns:
      A transformation. Its ``init(params)`` returns an `AccumulateUpdatesState`; a parameter that never has a gradient
      is None in ``params``, and then in all updates. Its ``update`` takes ``(updates, state, params=None, *,
      weight=1.0, flush=False, **extra_args)``:

      - ``updates``: gradients with the parameters' shapes, in their dtypes or in narrower ones, which are widened
        without loss. A leaf that is None in one call adds nothing. ``inner`` gets the dtypes that the reduction returns
        for such updates: the same dtypes, unless the reduction has another ``output_dtype``.
      - ``weight``: weight of this microbatch on this replica, for instance its number of tokens.
      - ``flush``: a boolean scalar. True ends the window with this microbatch, as at the end of the data, and divides
        by the weight so far. If it is traced, all replicas flush if any does, which takes another small all-reduce per
        update. If no data is left, flush with any updates and weight 0, but not if the last update ended its window
        (``state.applied``): ``inner`` would run on zeros.
      - ``number``: number of this microbatch, for a `gradcombine.reductions.numbered` reduction; by default its
        position in the window. A repeated number raises or, if it is traced, counts twice (`ledger.require_once`).
      - ``extra_args``: for ``inner``, which gets those of the window's last microbatch, and no ``weight``: combine the
        replicas by ``over``, as an `all_reduce` or `accumulate` in ``inner`` gives all windows the same weight.

    Raises:
      GradCombineError: as `gradcombine.accumulate`; in ``update`` also for a ``flush`` that is not a boolean scalar,
        for an unbound axis, and for updates that are already combined according to shard_map's types (check_vma).

    In shard_map, create the state inside and scan over the microbatches there; then only ``inner`` has to be returned,
    with specs ``P()``. A window that outlives the call differs between replicas: give ``window.levels`` a leading axis
    of replicas (``x[None]`` on return, ``x[0]`` on entry) with specs ``P(axis)``, and everything else specs ``P()``.
    With check_vma, differentiate with respect to ``jax.lax.pcast(params, axis, to="varying")``, so that JAX does not
    sum the gradients over replicas.

    Bits: ``inner`` gets the bits of `gradcombine.combine` over the microbatches; over replicas, the bits of
    `gradcombine.merge_replicas`.

    References: `optax.MultiSteps <https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html>`_.

    >>> import jax.numpy as jnp, optax
    >>> from gradcombine.integrations.optax import accumulate
    >>> tx = accumulate(optax.sgd(1.0), every=2)
    >>> params = {"w": jnp.zeros(2)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"w": jnp.float32([1, 2])}, state, params, weight=1)
    >>> updates["w"].tolist(), bool(state.applied)
    ([0.0, 0.0], False)
    >>> updates, state = tx.update({"w": jnp.float32([3, 4])}, state, params, weight=3)
    >>> updates["w"].tolist(), bool(state.applied)
    ([-2.5, -3.5], True)
    >>> tx = accumulate(optax.sgd(1.0), every=1, denominators=["tokens", "sequences"])
    >>> grads = {"tokens": {"w": jnp.float32([8, 4])}, "sequences": {"w": jnp.float32([2, 2])}}
    >>> updates, state = tx.update(grads, tx.init(params), params, weight={"tokens": 4, "sequences": 2})
    >>> updates["w"].tolist()
    [-3.0, -2.0]
    """
    accumulation = Accumulation(inner, every, reduction, over, skip, order, max_every, denominators)
    named = operation("accumulate")
    return optax.GradientTransformationExtraArgs(named(accumulation.init), named(accumulation.update))


class ApplyingTransformation(NamedTuple):
    """A transformation that also applies its updates to the parameters; see `accumulate_and_apply`, which makes it."""

    init: Callable[[Tree], AccumulateUpdatesState]
    apply: Callable[..., tuple[Tree, AccumulateUpdatesState]]


@operation("accumulate_and_apply")
def accumulate_and_apply(
    inner: optax.GradientTransformation,
    every: int | Callable[[Array], Scalar],
    *,
    reduction: Reduction | None = None,
    over: Collective | None = None,
    skip: Skip | None = None,
    order: Order = "sequential",
    max_every: int | None = None,
    denominators: Sequence[str] | None = None,
) -> ApplyingTransformation:
    """Combines `accumulate` and ``optax.apply_updates`` in one function that returns new parameters.

    An optax transformation has to return updates on every call: before the end of a window, a full tree of zeros to be
    added. This function leaves the parameters in their buffers, if the caller donates them with the state: a microbatch
    costs one in-place addition of its gradients, and the optimizer runs once per window.

    Args:
      inner, every, reduction, over, skip, order, max_every, denominators: as for `accumulate`.

    Returns:
      ``init(params)``, and ``apply(updates, state, params, *, weight=1.0, flush=False, number=None, **extra_args)``,
      which returns parameters and state. At the end of a window the parameters are ``optax.apply_updates(params,
      updates)`` with the updates of ``inner``, otherwise unchanged. The state is that of `accumulate`, and is
      interchangeable with it.

    Raises:
      GradCombineError: as `accumulate`.

    Bits: ``inner`` gets the same gradients as in `accumulate`. The parameters have the bits of `accumulate` and
    ``optax.apply_updates`` if the compiler fuses the inner transformation in the same way.

    >>> import jax, jax.numpy as jnp, optax
    >>> from gradcombine.integrations.optax import accumulate_and_apply
    >>> tx = accumulate_and_apply(optax.sgd(1.0), every=2)
    >>> step = jax.jit(tx.apply, donate_argnums=(1, 2))
    >>> params = {"w": jnp.zeros(2)}
    >>> state = tx.init(params)
    >>> params, state = step({"w": jnp.float32([1, 2])}, state, params)
    >>> params, state = step({"w": jnp.float32([3, 4])}, state, params)
    >>> params["w"].tolist(), bool(state.applied)
    ([-2.0, -3.0], True)
    """
    accumulation = Accumulation(inner, every, reduction, over, skip, order, max_every, denominators, applies=True)
    named = operation("accumulate_and_apply")
    return ApplyingTransformation(named(accumulation.init), named(accumulation.update))


class Accumulation:
    """Implements `accumulate`, and with ``applies`` `accumulate_and_apply`: `update` then returns new parameters."""

    def __init__(
        self,
        inner: optax.GradientTransformation,
        every: int | Callable[[Array], Scalar],
        reduction: Reduction | None,
        over: Collective | None,
        skip: Skip | None,
        order: Order,
        max_every: int | None,
        denominators: Sequence[str] | None,
        applies: bool = False,
    ) -> None:
        self._terms = None
        if denominators is not None:
            reduction = ratios_of(denominators, reduction)  # raises for invalid names
            self._terms = Terms({name: name for name in denominators})
        reduction = gc.reductions.mean() if reduction is None else reduction
        self.window = ReplicatedWindow(reduction, every, gc.LOCAL if over is None else over, order, max_every)
        check(skip=skip)
        self._inner, self._skip, self._applies = require_transformation(inner), skip, applies

    def init(self, params: optax.Params) -> AccumulateUpdatesState:
        params = as_arrays(params)
        like, terms = gradients_like(params), self._terms
        window = init_for(lambda like: self.window.init(like if terms is None else terms.like(like)), like)
        window = jax.tree.map(jnp.asarray, window)
        skipped: Tree = ()
        if self._skip is not None:
            updates = like if terms is None else dict.fromkeys(terms.denominators, like)
            skipped = SkipState(jnp.int32(0), jnp.int32(0), first_detail(self._skip, updates), jnp.asarray(False))
        # Where an axis is not bound, outside the mapped function or in one over other axes, there is nothing to mark.
        with contextlib.suppress(GradCombineError):
            window, skipped = self.window.mark_varying(window), self._varying(skipped)
        state = AccumulateUpdatesState(window, self._inner.init(params), jnp.asarray(False), skipped)
        return place_beside(like, state)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        weight: Scalar = 1.0,
        flush: Scalar = False,
        number: Scalar = None,
        **extra_args: Tree,
    ) -> tuple[Tree, AccumulateUpdatesState]:
        """Adds a microbatch, and runs the inner transformation if it ends the window."""
        if self._applies:
            params = as_arrays(require_given("the parameters to update", params))
        new_state, dtypes = self._contribute(updates, state, params, weight, flush, number)

        def transform(kept: tuple[Tree, Tree], gradients: Tree) -> tuple[tuple[Tree, Tree], Tree]:
            inner_state, inner_params = kept[0], cast(Any, kept[1] if self._applies else params)
            result, new = optimized(self._inner, cast_as(gradients, dtypes), inner_state, inner_params, **extra_args)
            return ((new, apply_updates(inner_params, result)), ()) if self._applies else ((new, ()), result)

        # On one replica, the branches that return updates are elementwise: on GPUs, XLA fuses a conditional with the
        # operations that read the updates, while a loop would have to write the updates to memory.
        branch = run_if if self._applies or self.window.over is not gc.LOCAL else conditional
        kept = new_state.inner, params if self._applies else ()
        window, kept, result = self.window.apply_if(new_state.applied, new_state.window, transform, kept, branch)
        new_state = new_state._replace(window=window, inner=kept[0], applied=jnp.asarray(new_state.applied))
        return (kept[1] if self._applies else result), new_state

    def _contribute(
        self,
        updates: optax.Updates,
        state: Tree,
        params: optax.Params | None,
        weight: Scalar,
        flush: Scalar,
        number: Scalar,
    ) -> tuple[AccumulateUpdatesState, Tree]:
        """Adds a microbatch to the window.

        Returns:
          The new state, with ``inner`` unchanged, whose ``applied`` says whether it has to run; and specs for `cast_as`
          with the dtypes of the gradients for it.
        """
        state, updates = as_arrays(self._require_state(state)), as_arrays(updates)
        contribution = updates
        if self._terms is not None:
            weights = self._terms.weights(weight)
            gradients = self._terms.named("gradients of each denominator", updates)
            contribution, weight = self._terms.contribution(gradients, weights), 1
        contribution, dtypes = in_dtypes_of_window(self.window, contribution, state.window)
        left_out: Scalar = False
        detail: Tree = ()
        if self._skip is not None:
            left_out, detail = decide(self._skip, updates, self.window.next(state.window)[0], params)
        flush, left_out = self.window.agreed([require_condition("flush", flush), left_out])
        window = self.window.contribute(state.window, contribution, weight, skipped=left_out, number=number)
        skipped: Tree = ()
        all_skipped = None
        if self._skip is not None:
            # Not determined from counts: a window that is resumed under another length has another position.
            all_skipped = left_out & (state.skip.all_of_window | ~self.window.is_partial(state.window))
            in_a_row = jnp.where(left_out, state.skip.in_a_row + 1, 0)
            count = jnp.where(left_out, state.skip.skipped + 1, state.skip.skipped)
            skipped = self._varying(SkipState(count, in_a_row, detail, jnp.asarray(all_skipped)))
        window, due = self.window.due(window, flush=flush, all_skipped=all_skipped)
        return AccumulateUpdatesState(window, state.inner, due, skipped), dtypes

    def _varying(self, skipped: Tree) -> Tree:
        return skipped and skipped._replace(detail=mark_varying(self.window.over, skipped.detail))

    def _require_state(self, state: object) -> AccumulateUpdatesState:
        """Returns the state; raises if another transformation made it."""
        state = require_type("an AccumulateUpdatesState", state, AccumulateUpdatesState)
        with_or_without = "without" if self._skip is None else "with"
        if isinstance(state.skip, SkipState) != (self._skip is not None):
            raise invalid(f"a state made {with_or_without} a skip function", type(state.skip).__name__)
        with within(".window"):
            require_state(state.window)
        require_counters(state.window, ".window")
        return state


def _eval_shape(function: Callable[[Tree], Tree], value: Tree) -> Tree:
    """Abstractly evaluates ``function``; raises for PRNG keys and unregistered leaf types."""
    with translate_errors("a tree of arrays of numbers"):
        return jax.eval_shape(function, value)


def in_dtypes_of_window(window: Window, updates: Tree, state: AccumulateState) -> tuple[Tree, Tree]:
    """Casts updates to the dtypes of the window; also returns specs of the reduction's results for the original dtypes.

    The specs are None if the window was made for updates of these dtypes, and nothing has to be cast.

    Raises:
      GradCombineError: for updates of another structure, and for updates that are already combined over the replicas.
    """
    window.over.require_unreduced(tree.present(_numerators(updates)))
    held = state.levels.stacked if isinstance(state.levels, BinaryCounter) else state.levels[0]
    for_updates = _eval_shape(window.reduction.init, updates)
    if jax.tree.structure(for_updates) == jax.tree.structure(held) and _dtypes(for_updates) == _dtypes(held):
        return updates, None
    window_results, structure = tree.flatten(_eval_shape(window.accumulator.value, state))
    results = jax.eval_shape(window.reduction.finalize, for_updates)
    outputs = tree.flatten_as(structure, results)
    # The window accepts an update unchanged if its result has the dtype of the window's result.
    targets = [
        spec if spec is not None and output is not None and output.dtype != spec.dtype else None
        for spec, output in zip(window_results, outputs, strict=True)
    ]

    def widen(gradients: Tree) -> Tree:
        leaves = tree.flatten_as(structure, gradients)
        return tree.unflatten(structure, map(widened, leaves, targets))

    if not isinstance(updates, dict) or not any(isinstance(x, Ratio) for x in updates.values()):
        return widen(updates), results
    return {name: x._replace(numerator=widen(x.numerator)) for name, x in updates.items()}, results


def _numerators(updates: Tree) -> Tree:
    """Replaces `Ratio`s by their numerators, the gradients."""

    def is_ratio(node: Tree) -> bool:
        return isinstance(node, Ratio)

    return jax.tree.map(lambda x: x.numerator if is_ratio(x) else x, updates, is_leaf=is_ratio)


def _dtypes(state: Tree) -> list[np.dtype]:
    return [dtype_of(leaf) for leaf in jax.tree.leaves(state)]
