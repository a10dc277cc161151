"""The ways to run a window side by side, each compiled, the best first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from gradcombine.audit import Audit, Target, find_target
from gradcombine.audit.auditing import made_by
from gradcombine.audit.subject import size_text
from gradcombine.audit.target import Bound
from gradcombine.errors import GradCombineError, require_items, shown

if TYPE_CHECKING:
    import optax

    from gradcombine.integrations.jax import Loss


class Figures(NamedTuple):
    """Cost of a window on each device, in bytes.

    Attributes:
      moved: in main memory.
      sent: to other devices.
      memory: at the peak.
    """

    moved: float
    sent: float
    memory: float


class Row(NamedTuple):
    """One way.

    Attributes:
      name: of the way.
      code: what makes it.
      calls: the audit of each of its programs, and how often a window calls it; empty where one was refused.
      compiled: what was compiled; None where it was refused.
      predicted: by the formulas of ``docs/plan.md``; None where not even a microbatch compiles for a device.
      bounds: of compute, memory and exchange of a window; none where nothing was compiled.
      lacking: bytes by which it exceeds a device's memory; 0 where it fits, None where that is not known.
      refused: why there is no program, or none that fits; empty otherwise.
      why: what its bound is made of, and what sets it apart from the next row.
    """

    name: str
    code: str
    calls: list[tuple[Audit, int]]
    compiled: Figures | None
    predicted: Figures | None
    bounds: dict[str, Bound]
    lacking: int | None
    refused: str
    why: str = ""

    @property
    def fits(self) -> bool:
        return self.compiled is not None and self.lacking == 0

    @property
    def findings(self) -> list[str]:
        """The names of those of its audits, but for the exchange in each microbatch that ZeRO-2 is."""
        names = {finding.name for one, _ in self.calls for finding in one.findings}
        return sorted(names - ({"reduced-in-loop"} if "zero2" in self.name.split("+") else set[str]()))

    @property
    def by(self) -> str:
        """The bound that limits the window; empty where nothing is published."""
        known = {name: bound.seconds for name, bound in self.bounds.items() if bound.seconds is not None}
        return max(known, key=lambda name: known[name]) if known else ""

    @property
    def seconds(self) -> float | None:
        """The bound of a window: no execution is shorter, however well all overlaps."""
        return self.bounds[self.by].seconds if self.by else None

    @property
    def in_turn(self) -> float:
        """The sum of what is known of the bounds: a window in which nothing overlaps."""
        return sum(bound.seconds or 0.0 for bound in self.bounds.values())


class Plan(NamedTuple):
    """The ways to run a window, the best first.

    Attributes:
      target: what they were compiled for.
      axes: of the mesh, with their sizes.
      axis: that of the replicas.
      microbatches: of a window.
      rows: those that fit, by their bound; then those that do not; then those that were refused.
    """

    target: Target
    axes: dict[str, int]
    axis: str
    microbatches: int
    rows: list[Row]

    @property
    def best(self) -> Row | None:
        """None where no way fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None


def plan(
    loss: Callable[..., Any] | Loss,
    params: Any,
    batch: Any,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int,
    target: str | Target | None = None,
    mesh: Any = None,
    axis: str = "data",
    names: Sequence[str] | None = None,
    weight: Callable[..., Any] | None = None,
) -> Plan:
    """Compiles a window of microbatches in several ways, and tells what each takes; nothing runs.

    Args:
      loss, optimizer, weight: as for `gradcombine.integrations.jax.train_step`.
      params: a tree of arrays or ``jax.ShapeDtypeStruct``. Shardings that they have over other axes than the replicas'
        are kept.
      batch: the arguments of the loss behind the parameters, as a tuple, or the only one: arrays or specs of the
        examples of a whole window of all replicas.
      microbatches: of a window, k.
      target: as for `gradcombine.verify.audit`.
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
    found = target if isinstance(target, Target) else find_target(target)
    asked = {"microbatches": microbatches, "mesh": mesh, "axis": axis, "weight": weight}
    return _planned((loss, params, batch, optimizer), asked, found, names)


def _planned(
    parts: tuple[Any, ...],
    asked: dict[str, Any],
    target: Target,
    names: Sequence[str] | None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Plan:
    """The plan for a loss, parameters, a batch and an optimizer."""
    from gradcombine.verify.plan import compiled, problem, ways  # which import JAX

    expected = f"names of ways, for instance {ways.DEFAULT[0]}"
    wanted = [ways.way_of(name) for name in (ways.DEFAULT if names is None else require_items("plan", expected, names))]
    if not wanted:
        raise GradCombineError("plan", expected, "none")
    made = problem.problem_of(*parts, target=target, **asked)
    chosen = list(dict.fromkeys(wanted))
    progress("one microbatch", 0, len(chosen))
    one, rows = compiled.microbatch_of(made, target), list[Row]()
    for i, way in enumerate(chosen):
        progress(way.name, i + 1, len(chosen))
        rows.append(compiled.row_of(made, way, target, one))
    axes = {str(name): int(size) for name, size in made.mesh.shape.items()}
    return Plan(target, axes, made.axis, made.microbatches, _explained(sorted(rows, key=_rank)))


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
    made, found = made_by("plan", what, target)
    needed = ("loss", "params", "batch", "optimizer", "microbatches")
    optional = ("mesh", "axis", "weight")
    if not isinstance(made, Mapping):
        raise GradCombineError("plan", f"{what} to return a dict of {', '.join(needed)}", shown(made))
    given = cast("Mapping[str, Any]", made)
    if wrong := [name for name in needed if name not in given] or [x for x in given if x not in needed + optional]:
        expected = f"{what} to return a dict of {', '.join(needed)}, and of {', '.join(optional)} what it needs"
        raise GradCombineError("plan", expected, f"{'none of' if wrong[0] in needed else 'also'} {', '.join(wrong)}")
    parts = tuple(given[name] for name in needed[:4])
    return _planned(parts, {name: x for name, x in given.items() if name not in needed[:4]}, found, names, progress)


def _rank(row: Row) -> tuple[float, ...]:
    if row.fits and row.compiled is not None:
        # Bounds that differ in the fourth digit do not: then the shorter sum, and then the smaller memory, is better.
        seconds = (row.compiled.moved + row.compiled.sent) if row.seconds is None else row.seconds
        return 0, _rounded(seconds), _rounded(row.in_turn), row.compiled.memory
    return (1, row.lacking) if row.lacking else (2,)


def _rounded(x: float) -> float:
    return float(f"{x:.3g}")


def _explained(rows: list[Row]) -> list[Row]:
    return [row._replace(why=_why(row, rows[i + 1 : i + 2])) for i, row in enumerate(rows)]


def _why(row: Row, following: Sequence[Row]) -> str:
    if row.compiled is None:
        return ""
    made = f"bound by {row.by}: {row.bounds[row.by].arithmetic}" if row.by else row.bounds["memory"].arithmetic
    if not row.fits:
        return f"{made}; {size_text(row.lacking or 0)} more than a device has"
    other = following[0] if following and following[0].compiled is not None and following[0].fits else None
    if other is None or other.compiled is None:
        return made
    words = list[str]()
    for verb, own, others in zip(("moves", "sends", "holds"), row.compiled, other.compiled, strict=True):
        if _rounded(own) != _rounded(others):
            words.append(f"{verb} {size_text(abs(own - others))} {'less' if own < others else 'more'}")
    differences = ", ".join(words) or "takes the same"
    return f"{made}. Beside {other.name}: {differences}"
