# pyright: standard
"""A compiled training step: gradients, accumulation, exchange and optimizer in one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import jax
from jax.core import eval_context

import gradcombine as gc
from gradcombine.backends.jax_versions import get_opaque_trace_state
from gradcombine.backends.protocol import Collective
from gradcombine.errors import importing, invalid, operation, require_one
from gradcombine.integrations.jax.arrays import require_transformation, usable
from gradcombine.integrations.jax.loss import Loss, require_first
from gradcombine.integrations.jax.modules import closed_if_open, of_modules, open_module
from gradcombine.integrations.jax.objective_of_terms import objective_of
from gradcombine.integrations.jax.step_functions import (
    StepFunctions,
    StepMetrics,
    TrainState,
    over_calls,
    whole_windows,
)
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check, valid
from gradcombine.types import Array, Order, Scalar, Tree

if TYPE_CHECKING:
    import optax


_SCHEDULE = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""On CPU, XLA's default schedule divides all leaves first, and keeps a whole tree of means until the optimizer ends."""


@dataclass(frozen=True)
class TrainStep:
    """A training step; made by `train_step`.

    ``step(params, state, *args, **kwargs)`` is compiled, and takes the buffers of ``params`` and ``state`` over: use
    what it returns in their place, and the old ones never again. Inside of another transformation (jit, scan, grad,
    vmap, shard_map) it is ``function``, and takes nothing over: what is donated is then the caller's to say.

    Attributes:
      init: ``init(params, *example, carry=None) -> state``. The example is what a call gets after ``state``, arrays or
        shape/dtype specs: needed where the loss returns aux and a window extends over several calls.
      function: ``function(params, state, *args, **kwargs) -> params, state, metrics``, not compiled: for the body of a
        shard_map, a pmap or a scan.
      flush_function: ``flush`` in the same way.
    """

    init: Callable[..., TrainState]
    function: Callable[..., tuple[Tree, TrainState, StepMetrics]]
    flush_function: Callable[[Tree, TrainState], tuple[Tree, TrainState, StepMetrics]]

    @operation("train_step")
    def __call__(self, params: Tree, state: TrainState, *args: Tree, **kwargs: Tree) -> Tree:
        """One call; returns ``params, state, metrics``."""
        if _is_transformed():
            return self.function(params, state, *args, **kwargs)
        params = params if (module := open_module(params)) is None else module
        with usable(params, state, args, kwargs):
            params, state, metrics = self.compiled(params, state, *args, **kwargs)
        return closed_if_open(params), state, metrics

    @operation("train_step")
    def flush(self, params: Tree, state: TrainState) -> tuple[Tree, TrainState, StepMetrics]:
        """Applies a partial window, divided by its true weight, and ends it: at the end of the data.

        A window that is empty or has been applied changes nothing. Compiled and donated as a call is.
        """
        if _is_transformed():
            return self.flush_function(params, state)
        params = params if (module := open_module(params)) is None else module
        with usable(params, state):
            params, state, metrics = self.compiled_flush(params, state)
        return closed_if_open(params), state, metrics

    @cached_property
    def compiled(self) -> jax.stages.Wrapped:
        """``function`` under jax.jit, for instance for ``step.compiled.lower(...)``."""
        return compile_step(self.function)

    @cached_property
    def compiled_flush(self) -> jax.stages.Wrapped:
        """``flush_function`` under jax.jit."""
        return compile_step(self.flush_function)


def compile_step(function: Callable[..., Tree], donated: tuple[int, ...] = (0, 1)) -> jax.stages.Wrapped:
    """The function under jax.jit, these arguments donated."""
    options = _SCHEDULE if jax.default_backend() == "cpu" else None
    return jax.jit(function, donate_argnums=donated, compiler_options=options)


with eval_context():
    _OUTERMOST = get_opaque_trace_state(convention="gradcombine")


def _is_transformed() -> bool:
    """Whether the call is made inside of a transformation, also one of whose values it gets none."""
    return get_opaque_trace_state(convention="gradcombine") != _OUTERMOST


@operation("train_step")
def train_step(
    loss: Callable[..., Tree] | Loss,
    optimizer: optax.GradientTransformation,
    *,
    every: int | Callable[[Array], Scalar] | None = None,
    microbatches: int | None = None,
    weight: Callable[..., Scalar] | None = None,
    reduction: Reduction | None = None,
    over: Collective = gc.LOCAL,
    order: Order = "sequential",
    max_every: int | None = None,
    interleaved: bool = False,
) -> TrainStep:
    """A training step that runs the optimizer once a window of microbatches, and keeps everything else in place.

    Either a call brings one microbatch, and every ``every``-th call ends a window, or a call brings the batch of a
    whole window, which is divided into ``microbatches``. The optimizer runs on the weighted mean of the window's
    gradients over its microbatches and over the replicas, which exchange once a window. The loss is differentiated by
    its first argument, the parameters: a tree of arrays, or a module of flax.nnx or equinox, as for `value_and_grad`.
    The step returns the updated module, whose state has changed where a window has ended.

    Args:
      loss, weight, reduction, over, order: as for `gradcombine.integrations.jax.value_and_grad`. The weight's default
        is the number of examples in a call; calls that bring different numbers are compiled separately. Of a `Loss`,
        random keys have the window's index folded in first, so that the same key may be passed on every call; the carry
        is kept in the state, and the step is called without it; terms are reported in the metrics by name. With
        ``every``, terms need the example in ``init``; their totals may be given but not counted, the same in all calls
        of a window, and a flush divides by these.
      optimizer: an optax transformation. It runs outside of the replicas where ``over`` is an axis of a mesh: its state
        may be split over it as the parameters may. It is given the combined loss as ``value=``, for those that ask for
        it.
      every: the calls of a window: an integer of 1 or more, or a function of the window's index, as for
        `gradcombine.accumulate`. None: 1. `gradcombine.UNTIL_FLUSH`: windows end by ``flush`` alone. Where a loop knows
        when that is, the two compiled programs have no branch, which a GPU has the host decide on every call.
      microbatches: as for `value_and_grad`, with ``interleaved``. None: a call is one microbatch.
      max_every: as for `gradcombine.accumulate`.

    Returns:
      A `TrainStep`: ``state = step.init(params)``, then ``params, state, metrics = step(params, state, *batch)``;
      at the end of the data ``step.flush(params, state)``. The state is a `TrainState`; the metrics, of the window that
      the call has applied, are `StepMetrics`.

    Raises:
      GradCombineError: as `value_and_grad` and `gradcombine.accumulate`; for both ``every`` and ``microbatches``; for
        an optimizer that is none; while tracing, and then nothing is donated and the state is whole. For buffers that a
        call before has taken over, and arguments on different devices.

    Donation: parameters, optimizer state and window are updated in place. In memory the window costs one accumulator a
    parameter (with precisions other than "fast" and order "tree", more), the gradients of one microbatch, and nothing
    else of the parameters' size. A step that is compiled by the caller has, at the end of a window, the mean as well
    where the compiler does not fuse it into the optimizer. Between the ends of windows a call costs one addition in
    place.

    On a mesh, ``over`` names an axis of it, params and batch are put there, and ``step.init(params)`` and the step are
    called as everywhere: ``state.window.levels`` and ``state.carry`` are each replica's own, along a first axis that is
    split over the mesh; all else is as the parameters lie. With ``every``, a call exchanges nothing but at the end of a
    window. Parameters that are split over the axis are gathered for the loss, once a call, and of the sums each device
    gets what its part of the optimizer reads: a reduce-scatter on GPUs. (With ``every``, leaves of 30 MiB and more are
    all-reduced in place, unless explicit axes say that the parameters are split.)

    In shard_map, ``step.function`` is the body, and ``step.init`` is called inside as well. With ``every``, a window
    outlives the call: ``state.window.levels`` and ``state.carry`` get a leading axis of replicas (``x[None]`` as they
    leave, ``x[0]`` as they enter) under specs ``P(axis)``; all else has specs ``P()``.

    Bits: the optimizer gets those of `gradcombine.combine` over the microbatches' gradients with their weights; over
    replicas, those of `gradcombine.merge_replicas`.

    References: `optax.MultiSteps <https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html>`_; `Buffer
    donation <https://docs.jax.dev/en/latest/buffer_donation.html>`_.

    >>> import jax.numpy as jnp, optax
    >>> from gradcombine.integrations.jax import train_step
    >>> def loss(w, x):
    ...     return jnp.mean(w * x)
    >>> step = train_step(loss, optax.sgd(1.0), every=2)
    >>> w = jnp.float32(0)
    >>> state = step.init(w)
    >>> w, state, metrics = step(w, state, jnp.float32([4]))
    >>> float(w), bool(metrics.applied)
    (0.0, False)
    >>> w, state, metrics = step(w, state, jnp.float32([1, 2, 5]))
    >>> float(w), bool(metrics.applied)
    (-3.0, True)
    """
    objective = objective_of(loss, weight, reduction, over, order)
    require_first(objective.loss)
    with importing("train_step"):
        import optax  # which gradients alone do not need

    check(interleaved=interleaved)
    require_transformation(optimizer)
    wrapped = optax.with_extra_args_support(optimizer)
    require_one("every or microbatches", every, microbatches)

    def functions(loss: Loss) -> StepFunctions:
        objective = objective_of(loss, weight, reduction, over, order)
        if microbatches is not None:
            return whole_windows(objective, wrapped, valid("microbatches", microbatches), interleaved)
        if objective.counts:
            raise invalid("microbatches, for totals that are counted before a window", "every")
        return over_calls(objective, wrapped, 1 if every is None else every, max_every)

    named = operation("train_step")
    init, function, flush = of_modules(Loss.of(loss), functions, objective.average_of_aux)
    return TrainStep(named(init), named(function), named(flush))
