"""The ways to run a window of microbatches side by side, compiled for the machine that it will run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gradcombine.audit import Target, find_target
from gradcombine.audit.auditing import made_by
from gradcombine.errors import operation, require_list
from gradcombine.types import Tree
from gradcombine.verify.foreign_calls import arguments
from gradcombine.verify.plan.ranking import Figures, Plan, Row, explained, rank

if TYPE_CHECKING:
    import optax

    from gradcombine.integrations.jax import Loss

__all__ = ["Figures", "Plan", "Row", "plan", "plan_named"]


@operation("plan")
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
    """Compiles a window of microbatches in several ways, and tells what each takes; nothing runs.

    Args:
      loss, optimizer, weight: as for `gradcombine.integrations.jax.train_step`.
      params: a tree of arrays or ``jax.ShapeDtypeStruct``. Shardings that they have over other axes than the replicas'
        are kept.
      batch: the arguments of the loss behind the parameters, as a tuple, or the only one: arrays or specs of the
        examples of a whole window of all replicas.
      microbatches: of a window, k.
      target: as for `gradcombine.audit.audit`.
      mesh: a mapping of axes to sizes, in the order of the devices, or a mesh of as many devices. None: that of the
        parameters' and the batch's shardings; without any, all devices along ``axis``.
      axis: along which the replicas are.
      names: of the ways, see `gradcombine.verify.plan.ways.way_of`; None: its `DEFAULT`.

    Returns:
      A row for each way. A way that does not fit, and one that the library or the compiler refuses, has one too, with
      the reason.

    Raises:
      GradCombineError: for a name that no way or target has, an axis that the mesh lacks, a batch that the replicas and
        microbatches cannot share, and a loss or optimizer that none of the ways can be made of.

    >>> import jax, jax.numpy as jnp, optax
    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> w, x = jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> found = plan(loss, w, x, optax.sgd(0.1), microbatches=4, mesh={"data": 1}, names=["window"])
    >>> found.best.name, found.best.compiled.sent
    ('window', 0.0)
    """
    found = find_target(target)
    asked: dict[str, Any] = {"microbatches": microbatches, "mesh": mesh, "axis": axis, "weight": weight}
    return _planned(found, names, loss=loss, params=params, batch=batch, optimizer=optimizer, **asked)


def _planned(
    target: Target,
    names: Sequence[str] | None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    **asked: Any,
) -> Plan:
    from gradcombine.verify.plan import costs, problem, ways  # which import JAX

    expected = f"names of ways, for instance {ways.DEFAULT[0]}"
    wanted = map(ways.way_of, ways.DEFAULT if names is None else require_list(expected, names))
    chosen = list(dict.fromkeys(wanted))
    made = problem.problem_of(target=target, **asked)
    progress("one microbatch", 0, len(chosen))
    one, rows = costs.microbatch_of(made, target), list[Row]()
    for i, way in enumerate(chosen):
        progress(way.name, i + 1, len(chosen))
        rows.append(costs.row_of(made, way, target, one))
    axes = {str(name): int(size) for name, size in made.mesh.shape.items()}
    return Plan(target, axes, made.axis, made.microbatches, explained(sorted(rows, key=rank)))


@operation("plan")
def plan_named(
    what: str,
    target: str | None = None,
    names: Sequence[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Plan:
    """Plans what a command line names.

    Args:
      what: "module:callable". The callable returns a dict of arguments of `plan`: loss, params, batch, optimizer and
        microbatches, and any other but target and names. If it has a parameter, it is called with the
        target's devices.
      target, names: as for `plan`.
      progress: called with the name of each way before it is compiled, its number and how many there are.

    Raises:
      GradCombineError: as `plan`; a module that does not import, a callable that returns something else.
    """
    progress(f"importing and calling {what}", 0, 0)
    made, found = made_by("plan", what, target)
    needed = ("loss", "params", "batch", "optimizer", "microbatches")
    optional = ("mesh", "axis", "weight")
    return _planned(found, names, progress, **arguments(f"{what} to return", made, needed, optional))
