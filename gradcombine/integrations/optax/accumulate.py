"""Accumulation over microbatches and replicas, around an optax transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.integrations.jax.numbers import as_arrays
from gradcombine.integrations.jax.run_if import conditional, run_if
from gradcombine.integrations.optax.accumulation import AccumulateUpdatesState, Accumulation
from gradcombine.integrations.optax.contribution import cast_as, keep_dtypes
from gradcombine.integrations.optax.skip import Skip
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import Array, Order, Tree

__all__ = ["AccumulateUpdatesState", "ApplyingTransformation", "accumulate", "accumulate_and_apply"]


def accumulate(
    inner: optax.GradientTransformation,
    every: int | Callable[[Array], Any],
    *,
    reduction: Reduction | None = None,
    over: Collective | None = None,
    skip: Skip | None = None,
    order: Order = "sequential",
    max_every: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation once a window, on the gradients combined over its microbatches and over the replicas.

    The last microbatch of a window merges the replicas' windows, divides once, and runs ``inner``; all others return
    zeros and leave its state alone. So clipping, weight decay and schedules inside ``inner`` happen once a window, and
    replicas exchange gradients once a window.

    Args:
      inner: the transformation to run, an optimizer for instance.
      every, order, max_every: as for `gradcombine.accumulate`. `UNTIL_FLUSH`: windows end by ``flush`` alone. Given as
        a Python bool (a static argument under jit) it makes two programs, of which neither has a branch.
      reduction: from `gradcombine.reductions`; None: their mean.
      over: the replicas that share the parameters: `gradcombine.jax_axis`, or `gradcombine.LOCAL`; None: the latter.
      skip: which microbatches to leave out: `skip_not_finite()`, `skip_large(max_norm)` or any function
        ``(updates, gradient_step, params) -> (boolean scalar, detail)``. It sees this replica's gradients as they
        arrive. Where it says so on any replica, the microbatch is left out on all of them, agreed by one small exchange
        an update. One that is left out has weight 0 and still is a step of its window: so windows end with the same
        microbatches as without it, at a batch's, an epoch's or a checkpoint's end, and schedules stay in step with the
        data, while the mean is over what was kept. A window of which nothing was kept does not run ``inner``: neither
        momentum nor decay acts on a gradient that was not there. (`MultiSteps` waits for ``every`` good ones instead.)

    Returns:
      A transformation. Its ``init(params)`` makes an `AccumulateUpdatesState`; a parameter that never has a gradient is
      None in ``params``, and then in all updates. Its ``update`` takes ``(updates, state, params=None, *, weight=1.0,
      flush=False, **extra_args)``:

      - ``updates``: gradients of the parameters' shapes, in their dtypes or in narrower ones, which are widened without
        loss. A leaf that is None for once adds nothing there. What ``inner`` gets has the dtypes that the reduction
        gives to such updates: their own, unless it was made with another ``output_dtype``.
      - ``weight``: of this microbatch on this replica, for instance its number of tokens.
      - ``flush``: a boolean scalar. True ends the window with this microbatch, as at the end of the data, and divides
        by what it holds. A traced one is agreed over the replicas, where any of them flushes all do, by one more small
        exchange an update. Where no data is left, flush with any updates and weight 0.
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
    """
    microbatches = Accumulation("accumulate", inner, every, reduction, over, skip, order, max_every)
    # On one replica the branches are elementwise, and GPUs fuse them with what reads the updates: a loop would have to
    # write these.
    branch = conditional if microbatches.window.over is gc.LOCAL else run_if

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        weight: Any = 1.0,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AccumulateUpdatesState]:
        added, dtypes = microbatches.contribute(updates, state, params, weight, flush)

        def transform(inner_state: Any, gradients: Tree) -> tuple[Any, optax.Updates]:
            result, new = microbatches.inner.update(cast_as(gradients, dtypes), inner_state, params, **extra_args)
            return keep_dtypes(new, inner_state), result

        window, inner_state, result = microbatches.window.apply_if(
            added.applied, added.window, transform, added.inner, branch
        )
        return result, added._replace(window=window, inner=inner_state, applied=jnp.asarray(added.applied))

    return optax.GradientTransformationExtraArgs(microbatches.init, update)


class ApplyingTransformation(NamedTuple):
    """A transformation that updates the parameters itself; made by `accumulate_and_apply`.

    Attributes:
      init: ``init(params) -> state``, an `AccumulateUpdatesState`.
      apply: ``apply(updates, state, params, *, weight=1.0, flush=False, **extra_args) -> params, state``.
    """

    init: Callable[[Tree], AccumulateUpdatesState]
    apply: Callable[..., tuple[Tree, AccumulateUpdatesState]]


def accumulate_and_apply(
    inner: optax.GradientTransformation,
    every: int | Callable[[Array], Any],
    *,
    reduction: Reduction | None = None,
    over: Collective | None = None,
    skip: Skip | None = None,
    order: Order = "sequential",
    max_every: int | None = None,
) -> ApplyingTransformation:
    """`accumulate` and ``optax.apply_updates`` in one: parameters in, parameters out.

    A transformation has to return updates on every call, and a whole tree of zeros between the boundaries, which have
    to be added. Here the parameters pass untouched, in the buffers where they are, if the caller donates them with the
    state: a microbatch costs the addition of its gradients in place, and the optimizer's cost arises once a window.

    Args:
      inner, every, reduction, over, skip, order, max_every: as for `accumulate`.

    Returns:
      An `ApplyingTransformation`. Where a window ends, its ``apply`` returns ``optax.apply_updates(params, updates)``,
      with the updates of ``inner``; else the parameters as they are. Its state is that of `accumulate`: either takes
      the other one's.

    Raises:
      GradCombineError: as `accumulate`.

    Bits: the parameters have those of `accumulate` and ``optax.apply_updates``, as far as the compiler fuses the inner
    transformation alike; what ``inner`` is given has them always.

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
    microbatches = Accumulation("accumulate_and_apply", inner, every, reduction, over, skip, order, max_every)

    def apply(
        updates: optax.Updates,
        state: AccumulateUpdatesState,
        params: optax.Params,
        *,
        weight: Any = 1.0,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[Tree, AccumulateUpdatesState]:
        params = as_arrays(params)
        added, dtypes = microbatches.contribute(updates, state, params, weight, flush)

        def transform(kept: Tree, gradients: Tree) -> tuple[Tree, Tree]:
            params, inner_state = kept
            result, new = microbatches.inner.update(cast_as(gradients, dtypes), inner_state, params, **extra_args)
            return (optax.apply_updates(params, result), keep_dtypes(new, inner_state)), ()

        kept = (params, added.inner)
        window, (params, inner_state), _ = microbatches.window.apply_if(
            added.applied, added.window, transform, kept, run_if
        )
        return params, added._replace(window=window, inner=inner_state, applied=jnp.asarray(added.applied))

    return ApplyingTransformation(microbatches.init, apply)
