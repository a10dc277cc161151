# pyright: standard
"""Accumulation over microbatches and replicas, around an optax transformation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import require_count
from gradcombine.denominators import Terms
from gradcombine.errors import GradCombineError, invalid, operation, require_given, require_type, within
from gradcombine.integrations.jax.arrays import as_arrays, keep_dtypes, place_beside, require_transformation
from gradcombine.integrations.jax.on_replicas import ReplicatedWindow, mark_own
from gradcombine.integrations.jax.run_if import conditional, run_if
from gradcombine.integrations.optax.skip import Skip, SkipState, decide, first_detail
from gradcombine.integrations.optax.updates import cast_as, gradients_like, in_dtypes_of_window, init_for
from gradcombine.places.time import require_state
from gradcombine.places.window import require_flag
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.ratios import ratios_of
from gradcombine.settings import check
from gradcombine.types import AccumulateState, Array, Order, Scalar, Tree


class AccumulateUpdatesState(NamedTuple):
    """The state of `accumulate` and `accumulate_and_apply`.

    Attributes:
      window: the microbatches so far. ``window.levels`` is each replica's own, all else is the same on all replicas.
        Of a window that was applied nothing is promised but that it is full: over replicas, the exchange may have taken
        its arrays over.
      inner: the state of the inner transformation.
      applied: boolean scalar, whether the inner transformation ran in the last update.
      skip: with a skip function ``skipped``, int32, the microbatches left out since the state was made; ``in_a_row``,
        how many of these were the last ones without a good one in between; ``detail``, what the function returned last
        beside its decision, each replica's own. Else ().
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
    """Runs a transformation once a window, on the gradients combined over its microbatches and over the replicas.

    The last microbatch of a window merges the replicas' windows, divides once, and runs ``inner``; all others return
    zeros and leave its state alone. So clipping, weight decay and schedules inside ``inner`` happen once a window, and
    replicas exchange gradients once a window.

    Args:
      inner: the transformation to run, an optimizer for instance.
      every, order, max_every: as for `gradcombine.accumulate`. `gradcombine.UNTIL_FLUSH`: only ``flush`` ends windows.
        If that is a Python bool (a static argument under jit), there are two programs, and neither has a branch.
      reduction: from `gradcombine.reductions`; None: their mean.
      over: the replicas that share the parameters: `gradcombine.jax_axis`, or `gradcombine.LOCAL`; None: the latter.
      skip: which microbatches to leave out: `skip_not_finite()`, `skip_large(max_norm)` or any function
        ``(updates, gradient_step, params) -> (boolean scalar, detail)``. It sees this replica's gradients as they
        arrive. If it returns true on any replica, the microbatch is left out on all of them, which takes one small
        exchange an update. It then has weight 0, but still counts as a step of its window: windows end with the same
        microbatches as without ``skip``, and schedules stay in step with the data, while the mean is over what was
        kept. If nothing of a window was kept, ``inner`` does not run: neither momentum nor decay acts on a gradient
        that was not there. (`MultiSteps` waits for ``every`` good ones instead.)
      denominators: for a loss of several terms whose denominators' totals are not known before, their names.
        ``updates`` is then a dict of gradients by denominator, of sums that are not divided, as
        `gradcombine.integrations.jax.grads_by_denominator` computes them, and ``weight`` a dict of what each is over;
        ``reduction`` is a mean. ``inner`` gets the gradient of ``sum_j (sum_i L_ij) / (sum_i W_ij)``. (Where the totals
        are known, accumulate the gradients of ``sum_j L_ij / W_j`` by ``reductions.sum()``.)

    Returns:
      A transformation. Its ``init(params)`` makes an `AccumulateUpdatesState`; a parameter that never has a gradient is
      None in ``params``, and then in all updates. Its ``update`` takes ``(updates, state, params=None, *, weight=1.0,
      flush=False, **extra_args)``:

      - ``updates``: gradients of the parameters' shapes, in their dtypes or in narrower ones, which are widened without
        loss. A leaf that is None in one call adds nothing there. What ``inner`` gets has the dtypes that the reduction
        returns for such updates: theirs, unless it was made with another ``output_dtype``.
      - ``weight``: of this microbatch on this replica, for instance its number of tokens.
      - ``flush``: a boolean scalar. True ends the window with this microbatch, as at the end of the data, and divides
        by what it holds. With a traced one, all replicas flush if any does, which takes one more small exchange an
        update. Where no data is left, flush with any updates and weight 0.
      - ``number``: of this microbatch, with a reduction that is `gradcombine.reductions.numbered`; by default that of
        its place.
      - ``extra_args``: for ``inner``, which gets those of the window's last microbatch.

    Raises:
      GradCombineError: as `gradcombine.accumulate`, and in ``update`` also for a ``flush`` that is not a boolean
        scalar, for an axis that is not bound, and for updates that shard_map (check_vma) knows to be combined already.

    In shard_map, make the state inside and scan over the microbatches there; then only ``inner`` has to leave, under
    specs ``P()``. A window that outlives the call has one part a replica: ``window.levels`` gets a leading axis of
    replicas (``x[None]`` as it leaves, ``x[0]`` as it enters) and specs ``P(axis)``, all else ``P()``. With check_vma,
    differentiate by ``jax.lax.pcast(params, axis, to="varying")``: the gradients have to be the replica's own.

    Bits: ``inner`` gets those of `gradcombine.combine` over the microbatches; over replicas, those of
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
    """A transformation that updates the parameters itself; made by `accumulate_and_apply`.

    Attributes:
      init: ``init(params) -> state``, an `AccumulateUpdatesState`.
      apply: ``apply(updates, state, params, *, weight=1.0, flush=False, number=None, **extra_args) -> params, state``.
    """

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
    """`accumulate` and ``optax.apply_updates`` in one: parameters in, parameters out.

    A transformation has to return updates on every call: between the boundaries a whole tree of zeros, which is then
    added. Here the parameters stay untouched in their buffers, if the caller donates them with the state: a microbatch
    costs the addition of its gradients in place, and the optimizer's cost arises once a window.

    Args:
      inner, every, reduction, over, skip, order, max_every, denominators: as for `accumulate`.

    Returns:
      ``init(params)``, and ``apply(updates, state, params, *, weight=1.0, flush=False, number=None, **extra_args)``,
      which returns parameters and state: where a window ends, ``optax.apply_updates(params, updates)``, with the
      updates of ``inner``; else the parameters as they are. The state is that of `accumulate`: either can continue with
      the other's.

    Raises:
      GradCombineError: as `accumulate`.

    Bits: the parameters have those of `accumulate` and ``optax.apply_updates``, as far as the compiler fuses the inner
    transformation alike; the gradients that ``inner`` gets always have them.

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
    """The window, the inner transformation and the skip function; the arguments are those of `accumulate`.

    Args:
      applies: whether `update` returns updated parameters in place of updates.
    """

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
            reduction = ratios_of(denominators, reduction)  # raises for names that are none
            self._terms = Terms({name: name for name in denominators})
        reduction = gc.reductions.mean() if reduction is None else reduction
        self.window = ReplicatedWindow(reduction, every, gc.LOCAL if over is None else over, order, max_every)
        check(skip=skip)
        require_transformation(inner)
        self.inner = optax.with_extra_args_support(inner)
        self._skip, self._applies = skip, applies

    def init(self, params: optax.Params) -> AccumulateUpdatesState:
        """No window begun."""
        params = as_arrays(params)
        like, terms = gradients_like(params), self._terms
        window = jax.tree.map(
            jnp.asarray, init_for(lambda like: self.window.init(like if terms is None else terms.like(like)), like)
        )
        skipped: Tree = ()
        if self._skip is not None:
            updates = like if terms is None else dict.fromkeys(terms.denominators, like)
            skipped = SkipState(jnp.int32(0), jnp.int32(0), first_detail(self._skip, updates))
        # Outside of the mapped function the axis is not bound, and there is nothing to mark.
        with contextlib.suppress(GradCombineError):
            window, skipped = self.window.mark_varying(window), self._varying(skipped)
        state = AccumulateUpdatesState(window, self.inner.init(params), jnp.asarray(False), skipped)
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
        """One more microbatch, and the inner transformation where it ends the window."""
        if self._applies:
            params = as_arrays(require_given("the parameters to update", params))
        added, dtypes = self._contribute(updates, state, params, weight, flush, number)

        def transform(kept: tuple[Tree, Tree], gradients: Tree) -> tuple[tuple[Tree, Tree], Tree]:
            inner_state, its = kept[0], cast(Any, kept[1] if self._applies else params)
            result, new = self.inner.update(cast_as(gradients, dtypes), inner_state, its, **extra_args)
            new = keep_dtypes(new, inner_state)
            return ((new, optax.apply_updates(its, result)), ()) if self._applies else ((new, ()), result)

        # On one replica the branches that return updates are elementwise, and GPUs fuse them with what reads the
        # updates: a loop would have to write these.
        branch = run_if if self._applies or self.window.over is not gc.LOCAL else conditional
        kept = added.inner, params if self._applies else ()
        window, kept, result = self.window.apply_if(added.applied, added.window, transform, kept, branch)
        state = added._replace(window=window, inner=kept[0], applied=jnp.asarray(added.applied))
        return (kept[1] if self._applies else result), state

    def _contribute(
        self,
        updates: optax.Updates,
        state: Tree,
        params: optax.Params | None,
        weight: Scalar,
        flush: Scalar,
        number: Scalar,
    ) -> tuple[AccumulateUpdatesState, Tree]:
        """One more microbatch.

        Returns:
          The state after it, whose ``inner`` has yet to run where ``applied`` holds; and specs of the dtypes that the
          combined gradients are to have for it, see `cast_as`.
        """
        state, updates = as_arrays(self._require_state(state)), as_arrays(updates)
        entering = updates
        if self._terms is not None:
            weights = self._terms.weights(weight)
            gradients = self._terms.named("gradients of each denominator", updates)
            entering, weight = self._terms.contribution(gradients, weights), 1
        contribution, dtypes = in_dtypes_of_window(self.window, entering, state.window)
        left_out: Scalar = False
        detail: Tree = ()
        if self._skip is not None:
            index, _ = self.window.next(state.window)
            left_out, detail = decide(self._skip, updates, index, params)
        flush, left_out = self.window.agreed([require_flag("flush", flush), left_out])
        window = self.window.contribute(state.window, contribution, weight, skipped=left_out, number=number)
        skipped = self._varying(_counted(state.skip, left_out, detail)) if self._skip is not None else ()
        in_a_row = skipped.in_a_row if isinstance(skipped, SkipState) else None
        window, due = self.window.due(window, flush=flush, skipped_in_a_row=in_a_row)
        return AccumulateUpdatesState(window, state.inner, due, skipped), dtypes

    def _varying(self, skipped: Tree) -> Tree:
        return skipped._replace(detail=mark_own(self.window.over, skipped.detail)) if self._skip is not None else ()

    def _require_state(self, state: object) -> AccumulateUpdatesState:
        """The state; raises for another transformation's."""
        state = require_type("an AccumulateUpdatesState", state, AccumulateUpdatesState)
        with_or_without = "without" if self._skip is None else "with"
        if isinstance(state.skip, SkipState) != (self._skip is not None):
            raise invalid(f"a state made {with_or_without} a skip function", type(state.skip).__name__)
        with within(".window"):
            require_state(state.window)
        for name in ("step", "index"):
            require_count(getattr(state.window, name), f".window.{name}")
        tree.flatten(state)  # refuses what is no array
        return state


def _counted(state: SkipState, left_out: Scalar, detail: Tree) -> SkipState:
    skipped = jnp.where(left_out, state.skipped + 1, state.skipped)
    return SkipState(skipped, jnp.where(left_out, state.in_a_row + 1, 0), detail)
