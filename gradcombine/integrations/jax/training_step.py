# pyright: standard
"""A compiled training step: gradients, accumulation, all-reduce and optimizer in one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import jax

import gradcombine as gc
from gradcombine.backends.jax_versions import is_transformed
from gradcombine.backends.protocol import Collective
from gradcombine.errors import invalid, operation, require_one
from gradcombine.integrations.jax.arrays import explain_rejection, require_transformation
from gradcombine.integrations.jax.loss import Loss, require_first
from gradcombine.integrations.jax.modules import SplitModule, merge_module, module_step_functions, split_module
from gradcombine.integrations.jax.objective import Objective
from gradcombine.integrations.jax.step_functions import StepFunctions, StepMetrics, TrainState, step_functions
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check, valid
from gradcombine.types import Array, Order, Scalar, Tree

if TYPE_CHECKING:
    import optax


_SCHEDULE = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA's default CPU schedule divides all leaves first, which keeps a full tree of means alive during the optimizer."""


@dataclass(frozen=True)
class TrainStep:
    """A training step; made by `train_step`.

    ``step(params, state, *args, **kwargs)`` is compiled and donates ``params`` and ``state``: continue with the
    returned ones. Inside another transformation (jit, scan, grad, vmap, shard_map) it calls ``function`` and donates
    nothing; there the caller decides what to donate.

    Attributes:
      init: ``init(params, *example, carry=None) -> state``. The example is the arguments of a call after ``state``, as
        arrays or shape/dtype specs; required if the loss returns aux and a window spans several calls.
      function: ``function(params, state, *args, **kwargs) -> params, state, metrics``, not compiled: for the body of a
        shard_map, a pmap or a scan.
      flush_function: `flush`, not compiled.
    """

    init: Callable[..., TrainState]
    function: Callable[..., tuple[Tree, TrainState, StepMetrics]]
    flush_function: Callable[[Tree, TrainState], tuple[Tree, TrainState, StepMetrics]]

    @operation("train_step")
    def __call__(
        self, params: Tree, state: TrainState, *args: Tree, **kwargs: Tree
    ) -> tuple[Tree, TrainState, StepMetrics]:
        """Processes one microbatch or one full window; returns ``params, state, metrics``."""
        if is_transformed():
            return self.function(params, state, *args, **kwargs)
        return _run_compiled(self.compiled, params, state, *args, **kwargs)

    @operation("train_step")
    def flush(self, params: Tree, state: TrainState) -> tuple[Tree, TrainState, StepMetrics]:
        """Applies a partial window, divided by the weight that it holds, and ends it: for the end of the data.

        An empty window or one that has been applied changes nothing. Compiled and donated like a call.
        """
        if is_transformed():
            return self.flush_function(params, state)
        return _run_compiled(self.compiled_flush, params, state)

    @cached_property
    def compiled(self) -> jax.stages.Wrapped:
        """``function`` under jax.jit, for instance for ``step.compiled.lower(...)``."""
        return compile_step(self.function)

    @cached_property
    def compiled_flush(self) -> jax.stages.Wrapped:
        """``flush_function`` under jax.jit."""
        return compile_step(self.flush_function)


def _run_compiled(
    compiled: jax.stages.Wrapped, params: Tree, state: TrainState, /, *args: Tree, **kwargs: Tree
) -> tuple[Tree, TrainState, StepMetrics]:
    """Calls a compiled function, which takes and returns a module split into arrays."""
    params = params if (module := split_module(params)) is None else module
    with explain_rejection(params, state, args, kwargs):
        params, state, metrics = compiled(params, state, *args, **kwargs)
    return merge_module(params) if isinstance(params, SplitModule) else params, state, metrics


def compile_step(
    function: Callable[..., Tree], donated: tuple[int, ...] = (0, 1), keep_unused: bool = False
) -> jax.stages.Wrapped:
    """Compiles the function; donates the arguments at these positions."""
    options = _SCHEDULE if jax.default_backend() == "cpu" else None
    return jax.jit(function, donate_argnums=donated, keep_unused=keep_unused, compiler_options=options)


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
    """Builds a training step that runs the optimizer once per window of microbatches and updates all state in place.

    Either each call processes one microbatch and every ``every``-th call ends a window, or each call processes the
    batch of a full window, divided into ``microbatches``. The optimizer gets the weighted mean of the gradients over
    the microbatches of the window and over the replicas, which communicate once per window. The loss is differentiated
    with respect to its first argument, the parameters: a tree of arrays, or a module of flax.nnx or equinox, as for
    `value_and_grad`. For a module, the step returns the updated module; its state changes at the end of a window.

    Args:
      loss, weight, reduction, over, order: as for `gradcombine.integrations.jax.value_and_grad`. The default weight is
        the number of examples in the call; calls with different numbers of examples are compiled separately. For a
        `Loss`, the window's index is folded into random keys first, so that every call may pass the same key; the carry
        is kept in the state and is not an argument of the step; the metrics report terms by name. With ``every``, terms
        require the example in ``init``; their totals can be "given" but not "counted", have to be the same in all calls
        of a window, and also divide a flushed window.
      optimizer: an optax transformation. If ``over`` is a mesh axis, it runs outside the mapped function, and its
        state, like the parameters, may be sharded over that axis. It gets the combined loss as the extra argument
        ``value``.
      every: the number of calls per window: an integer of 1 or more, or a function of the window's index, as for
        `gradcombine.accumulate`. None: 1. `gradcombine.UNTIL_FLUSH`: only ``flush`` ends windows. If the training loop
        knows when windows end, this avoids a branch, which on GPUs the host decides in every call.
      microbatches: as for `value_and_grad`, with ``interleaved``. None: each call is one microbatch.
      max_every: as for `gradcombine.accumulate`.

    Returns:
      A `TrainStep`: ``state = step.init(params)``, then ``params, state, metrics = step(params, state, *batch)``;
      at the end of the data ``step.flush(params, state)``. The state is a `TrainState`; the metrics are `StepMetrics`
      of the window that the call applied.

    Raises:
      GradCombineError: as `value_and_grad` and `gradcombine.accumulate`; for both ``every`` and ``microbatches``, or an
        option or state of the other one; for an ``optimizer`` that is not an optax transformation; for donated buffers,
        and arguments on different devices. Errors are raised while tracing: nothing has been donated then, and the
        state is unchanged.

    Donation: parameters, optimizer state and window are updated in place. The window needs memory for one accumulator
    per parameter (more in precisions other than "fast" and in order "tree") and for the gradients of one microbatch,
    and nothing else of the size of the parameters. If the caller compiles the step, the end of a window also needs the
    mean, unless the compiler fuses it into the optimizer. All other calls only add to the accumulators in place.

    On a mesh, ``over`` names a mesh axis, and params and batch are placed on the mesh; ``step.init(params)`` and the
    step are called as usual (``init`` within jit only under ``jax.set_mesh``). ``state.window.levels`` and
    ``state.carry`` get a leading axis of replicas, sharded over the mesh; everything else is sharded like the
    parameters. With ``every``, calls communicate only at the end of a window. Parameters that are sharded over the axis
    are gathered for the loss once per call, and each device receives only the sums that its shard of the optimizer
    reads: a reduce-scatter on GPUs. (With ``every``, leaves of 30 MiB and more are all-reduced in place, unless
    explicit axes show that the parameters are sharded.)

    In shard_map, use ``step.function`` as the body, and call ``step.init`` inside as well. With ``every``, a window
    outlives the call: give ``state.window.levels`` and ``state.carry`` a leading axis of replicas (``x[None]`` on
    return, ``x[0]`` on entry) with specs ``P(axis)``, and everything else specs ``P()``.

    Bits: the optimizer gets the bits of `gradcombine.combine` over the microbatches' gradients with their weights; over
    replicas, the bits of `gradcombine.merge_replicas`. With ``microbatches``: those of `value_and_grad`.

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
    objective = Objective.of(loss, weight, reduction, over, order)
    require_first(objective.loss)
    transformation = require_transformation(optimizer)
    check(interleaved=interleaved)
    require_one("every or microbatches", every, microbatches)
    length = 1 if every is None else every
    scanned = None if microbatches is None else valid("microbatches", microbatches)
    if scanned is not None and max_every is not None:
        raise invalid("every, for max_every", "microbatches")
    if scanned is None and (interleaved or objective.loss.totals == "counted"):
        cause = "interleaved" if interleaved else "totals that are counted before a window"
        raise invalid(f"microbatches, for {cause}", "every")

    def functions(loss: Loss) -> StepFunctions:
        of_arrays = replace(objective, loss=loss)
        return step_functions(of_arrays, transformation, length, max_every, scanned, interleaved)

    named = operation("train_step")
    init, function, flush = module_step_functions(objective.loss, functions, objective.default_aux_reduction)
    return TrainStep(named(init), named(function), named(flush))
