"""Comparison of strategies to run a window of microbatches, compiled for the target machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gradcombine.audit import Target, find_target
from gradcombine.audit.auditing import made_by, require_arguments
from gradcombine.errors import operation, require_list
from gradcombine.types import Tree
from gradcombine.verify.plan.strategies import DEFAULT, Figures, Plan, Row, ranked, way_of

if TYPE_CHECKING:
    import optax

    from gradcombine.integrations.jax import Loss

__all__ = ["Figures", "Plan", "Row", "plan", "plan_named"]


@operation("plan", renames=True)
def plan(
    loss: Callable[..., Tree] | Loss,
    params: Tree,
    batch: Tree,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int,
    target: str | Target | None = None,
    mesh: Any = None,
    axis: str = "data",
    names: Sequence[str] | None = None,
    weight: Callable[..., Tree] | None = None,
) -> Plan:
    """Compiles a window of microbatches with several strategies, and compares their cost; nothing is executed.

    Args:
      loss, optimizer, weight: as for `gradcombine.integrations.jax.train_step`.
      params: a pytree of arrays or ``jax.ShapeDtypeStruct``. Their shardings over axes other than ``axis`` are kept.
      batch: the loss's arguments after the parameters, as a tuple, or a single argument: arrays or specs of the
        examples of one window of all replicas.
      microbatches: number of microbatches per window, k.
      target: as for `gradcombine.audit.audit`.
      mesh: a mapping of axes to sizes, in the order of the devices, or a mesh of as many devices. None: the mesh of the
        parameters' and the batch's shardings; without any, all devices along ``axis``.
      axis: mesh axis of the replicas.
      names: names of strategies, see `gradcombine.verify.plan.way_of`; None: `DEFAULT` there.

    Returns:
      A row for each strategy. A strategy that does not fit in memory, or that the library or the compiler rejects, also
      has a row, with the reason.

    Raises:
      GradCombineError: for an unknown strategy or target, an axis that the mesh does not have, a batch that cannot be
        divided into microbatches of the replicas, and a loss or an optimizer that no strategy can use.

    >>> import jax, jax.numpy as jnp, optax
    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> w, x = jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> result = plan(loss, w, x, optax.sgd(0.1), microbatches=4, mesh={"data": 1}, names=["window"])
    >>> result.best.name, result.best.compiled.sent
    ('window', 0.0)
    """
    rest: dict[str, Any] = {"microbatches": microbatches, "mesh": mesh, "axis": axis, "weight": weight}
    return _plan(find_target(target), names, loss=loss, params=params, batch=batch, optimizer=optimizer, **rest)


def _plan(
    target: Target,
    names: Sequence[str] | None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    **arguments: Any,
) -> Plan:
    from gradcombine.verify.plan import costs, problem  # they import JAX

    names = DEFAULT if names is None else require_list(f"names of strategies, for instance {DEFAULT[0]}", names)
    strategies = list(dict.fromkeys(map(way_of, names)))
    case = problem.problem_of(target=target, **arguments)
    progress("one microbatch", 0, len(strategies))
    microbatch, rows = costs.microbatch_of(case, target), list[Row]()
    for i, strategy in enumerate(strategies):
        progress(strategy.name, i + 1, len(strategies))
        rows.append(costs.row_of(case, strategy, target, microbatch))
    axes = {str(name): int(size) for name, size in case.mesh.shape.items()}
    return Plan(target, axes, case.axis, case.microbatches, ranked(rows))


@operation("plan", renames=True)
def plan_named(
    what: str,
    target: str | None = None,
    names: Sequence[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Plan:
    """Runs `plan` on the arguments that a callable returns.

    Args:
      what: "module:callable". The callable returns a dict of arguments of `plan`: loss, params, batch, optimizer and
        microbatches, and optionally others except target and names. If it has a parameter, it gets the target's
        devices.
      target, names: as for `plan`.
      progress: called with the name of each strategy before it is compiled, its number and the total number.

    Raises:
      GradCombineError: as `plan`; for a module that cannot be imported, a callable that returns something else.
    """
    progress(f"importing and calling {what}", 0, 0)
    result, resolved = made_by("plan", what, target)
    needed = ("loss", "params", "batch", "optimizer", "microbatches")
    optional = ("mesh", "axis", "weight")
    return _plan(resolved, names, progress, **require_arguments(f"{what} to return", result, needed, optional))
