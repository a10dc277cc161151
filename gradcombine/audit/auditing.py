"""Compiles a step, and reports its costs and defects."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from gradcombine.audit.compiling import (
    A_STEP,
    KNOWN,
    Built,
    Memory,
    compile_hlo,
    compile_step,
    foreign,
    parsed,
    read,
    read_program,
)
from gradcombine.audit.parsing import parse
from gradcombine.audit.program import Program
from gradcombine.audit.rules import RULES, Finding, find, judged
from gradcombine.audit.subject import Exchange, Facts
from gradcombine.audit.target import Bound, Target, bounds, find_target
from gradcombine.audit.tensorflow.graph import Graph
from gradcombine.audit.tensorflow.read import is_function, read_function, read_saved
from gradcombine.errors import attribute, invalid, operation, require_path, shown
from gradcombine.types import Tree


class Audit(NamedTuple):
    """The report of a program: its work per call on each device, and its defects.

    Attributes:
      name: of the program.
      target: hardware that it was compiled for.
      program: its HLO, or the graph of a tf.function that XLA does not compile.
      memory: None if only HLO was read.
      findings: defects.
      turns: bytes moved per call inside loops of more than one iteration; None for a graph.
      beside: bytes moved per call outside such loops; None for a graph.
      flops: of matrix products and convolutions, by the bit width of their type; None for a graph.
    """

    name: str
    target: Target
    program: Program | Graph
    memory: Memory | None
    findings: list[Finding]
    turns: int | None
    beside: int | None
    flops: dict[int, float] | None

    @property
    def _unknown(self) -> Facts:
        """Facts that could not be determined from the program."""
        if self.memory is not None:
            return self.program.unknown
        return {"donation": ["memory, and whether donated buffers are reused"], **self.program.unknown}

    @property
    def judged(self) -> tuple[str, ...]:
        """Names of the defects that were checked for."""
        return judged(self._unknown)

    @property
    def unread(self) -> list[str]:
        """Descriptions of what could not be determined from the program."""
        parts = list[str]()
        for fact, texts in self._unknown.items():
            names = [", ".join(name for name in RULES if name not in self.judged)] if fact == "compiled" else []
            parts += texts + names
        return parts

    @property
    def undecided(self) -> list[str]:
        """Names of the defects that may be present in parts that could not be read."""
        unknown = self._unknown.keys()
        return [name for name, rule in RULES.items() if "code" in unknown or rule.needs & unknown]

    @property
    def exchanges(self) -> Sequence[Exchange[Any]]:
        return self.program.exchanges

    @property
    def sent(self) -> float:
        """Bytes that each device sends per call."""
        return sum(x.times * x.sent() for x in self.exchanges)

    @property
    def bounds(self) -> dict[str, Bound]:
        """Lower bounds of compute, memory and exchange; the largest bounds the call if all three overlap perfectly."""
        if self.turns is None or self.beside is None or self.flops is None:
            nothing = Bound(None, "not known from a graph")
            return bounds(self.target, {}, 0, self.exchanges) | {"compute": nothing, "memory": nothing}
        return bounds(self.target, self.flops, self.turns + self.beside, self.exchanges)

    def seconds(self, finding: Finding) -> float | None:
        """Lower bound of the time that a finding costs, in seconds; None if its cost or the rates are unknown."""
        figures = self.target.figures
        if figures is None:
            return None
        rates = figures.bandwidth, figures.link, max(figures.flops.values(), default=None)
        costs = zip((finding.moved, finding.sent, finding.flops), rates, strict=True)
        seconds = [None if rate is None else cost / rate for cost, rate in costs if cost]
        known = [x for x in seconds if x is not None]
        return sum(known) if 0 < len(known) == len(seconds) else None


@operation("audit")
def audit(step: Any, *args: Any, target: str | Target | None = None) -> Audit:
    """Reports what a compiled step moves, copies, exchanges and repeats, without running it.

    Args:
      step: a function of ``jax.jit`` or ``jax.pmap``, or its lowered or compiled stage; a function of ``tf.function``,
        or a ``ConcreteFunction``. Of a function with ``jit_compile=True`` the HLO is read, compiled for this machine or
        for one device of the target; otherwise, and of every ``ConcreteFunction``, the graph.
      *args: for a jitted function: arrays or ``jax.ShapeDtypeStruct`` with their shardings; for a tf.function: its
        arguments, or ``tf.TensorSpec``.
      target: hardware to compile for, which need not be attached: the result of `find_target`, or, for functions, its
        name. Arguments on a mesh of other devices are moved to a mesh of the same shape with the target's devices; a
        step that closes over a mesh has to be built with the target's devices.

    Returns:
      The report: ``findings`` is empty for a step without a known defect; ``undecided`` names the defects that may be
      present in parts that could not be read.

    Raises:
      GradCombineError: for a step that cannot be compiled or read.
      OutOfMemoryError: for a step that needs more memory than the target has.

    >>> import jax, jax.numpy as jnp
    >>> step = jax.jit(lambda window, grads: window + grads, donate_argnums=0)
    >>> report = audit(step, jnp.zeros(1024), jnp.ones(1024))
    >>> report.findings, report.memory.aliased
    ([], 4096)
    """
    if is_function(step):
        return _of_tensorflow(step, args, target)
    machine = find_target(target)
    if isinstance(target, str) and attribute(step, "lower") is None:
        raise invalid(A_STEP, shown(step))
    return _audited(compile_step(step, args, machine), machine)


@operation("audit")
def audit_file(path: str | Path, target: str | Target | None = None) -> list[Audit]:
    """Audits programs that were compiled elsewhere.

    Args:
      path: a file of optimized HLO (text or proto), a folder that XLA dumped to (``--xla_dump_to``), or a SavedModel.
      target: hardware whose published figures bound the time. Nothing is compiled.

    Returns:
      One report for each program.

    Raises:
      GradCombineError: for a file that cannot be read or is not optimized, and a folder without a program.
    """
    machine = find_target(target, compiles=False)
    folder = require_path("a file of HLO, or a folder", path)
    if (saved := folder / "saved_model.pb" if folder.is_dir() else folder).name == "saved_model.pb" and saved.is_file():
        expected = "a SavedModel that can be read"
        return foreign(expected, str(path), lambda: [_audited(Built(x), machine) for x in read_saved(saved)])
    files = [folder]
    if folder.is_dir():
        texts = sorted(folder.glob("*after_optimizations.txt"))
        files = texts or sorted(folder.glob("*after_optimizations.hlo.pb"))
        if not files:
            raise invalid("a folder with files *after_optimizations.txt or .hlo.pb", str(path))
    return [_audited(Built(_optimized(*pair)), machine) for pair in zip(files, read(files), strict=True)]


def _optimized(path: Path, text: str) -> Program:
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise invalid("optimized HLO, printed after all passes of XLA", f"{path}, which is not scheduled")
    return read_program(text, str(path))


@operation("audit")
def audit_named(
    what: str, target: str | None = None, progress: Callable[[str], None] = lambda name: None
) -> list[Audit]:
    """Audits the programs named by an argument of the command line.

    Args:
      what: a file or folder as for `audit_file`, or "module:callable". The callable returns a function of ``jax.jit``
        or ``tf.function`` and a tuple of its arguments, or a lowered, compiled or traced function. If it has a
        parameter named devices, or one without a default, it is called with the target's devices, for its mesh.
      target: see `find_target`.
      progress: called with a description of each stage before it starts.

    Returns:
      One report for each program.

    Raises:
      GradCombineError: if there is no such file or callable, the module fails to import, or the callable returns
        something else.
      OutOfMemoryError: for a step that needs more memory than the target has.
    """
    if require_path(_NAMED, what).exists():
        progress(f"reading {what}")
        return audit_file(what, target)
    progress(f"importing and calling {what}")
    made, machine = made_by("audit", what, target)
    progress(f"compiling for {machine.name}")
    return [_audit_made(what, made, machine)]


_NAMED = "module:callable, or a file or a folder that exists"


def _audit_made(what: str, made: Any, target: Target) -> Audit:
    if isinstance(made, tuple):
        pair = cast("tuple[Any, ...]", made)
        if len(pair) == 2 and isinstance(pair[1], tuple | list):
            return audit(pair[0], *cast("Sequence[Any]", pair[1]), target=target)
        received = f"({', '.join(type(x).__name__ for x in pair)})"
    elif any(hasattr(made, x) for x in ("compile", "memory_analysis", "jaxpr")) or is_function(made):
        return audit(made, target=target)
    else:
        received = shown(made)
    expected = f"{what} to return a jitted function and a tuple of arguments, or one that is lowered or traced"
    raise invalid(expected, received)


def made_by(verb: str, what: str, target: str | None) -> tuple[Any, Target]:
    """Calls "module:callable"; returns its result, and the target.

    If the callable has a parameter named devices, or one without a default, it is passed the target's devices.

    Raises:
      GradCombineError: if the module fails to import, has no such callable, or the callable raises.
    """
    if target is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # cross-compiling for a GPU needs none
    make = callable_named(verb, what)
    machine = find_target(target)
    expected = "a callable of no argument, or of the target's devices"
    arguments = foreign(expected, what, lambda: _devices(make, machine))
    return foreign("a callable that returns", what, lambda: make(*arguments)), machine


def callable_named(verb: str, what: str) -> Callable[..., Any]:
    """Imports the callable "module:callable".

    Raises:
      GradCombineError: if the module fails to import, or has no such callable.
    """
    module, _, name = what.partition(":") if isinstance(what, str) else ("", "", "")  # pyright: ignore[reportUnnecessaryIsInstance]
    if not module or not name.isidentifier():
        raise invalid(_NAMED if verb == "audit" else "module:callable", shown(what))
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    imported = foreign("a module that imports", module, lambda: import_module(module))
    expected = f"a callable {name} in {module} that returns what to {verb}"
    make: Any = foreign(expected, what, lambda: getattr(imported, name, None))
    if not callable(make) or hasattr(make, "lower") or is_function(make):
        raise invalid(expected, "none" if make is None else shown(make))
    return make


def require_arguments(what: str, returned: Any, needed: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    """The arguments in a dict that a user's callable returned; raises for missing or unknown names and other types."""
    received: Mapping[str, Any] = cast("Mapping[str, Any]", returned) if isinstance(returned, Mapping) else {}
    wrong = [x for x in needed if x not in received] or [x for x in received if x not in (*needed, *optional)]
    if wrong:
        expected = f"{what} a dict of {', '.join(needed)}, optionally with {', '.join(optional)}"
        names = f"{'none of' if wrong[0] in needed else 'also'} {', '.join(map(str, wrong))}"
        raise invalid(expected, names if isinstance(returned, Mapping) else shown(returned))
    return dict(received)


def _devices(make: Callable[..., Any], target: Target) -> tuple[Any, ...]:
    """Arguments for ``make``: the target's devices if it takes them, or none."""
    signature = inspect.signature(make)
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = next((x for x in signature.parameters.values() if x.kind in positional), None)
    takes_devices = first is not None and (first.name == "devices" or first.default is inspect.Parameter.empty)
    arguments = (target.devices,) if takes_devices else ()
    signature.bind(*arguments)  # raises a TypeError that names a missing argument
    return arguments


def _of_tensorflow(step: Any, args: Sequence[Tree], target: str | Target | None) -> Audit:
    """Audits a tf.function: its graph, or with jit_compile the HLO, compiled by TensorFlow or for the target."""
    machine = find_target(target, compiles=target is None)
    expected = "a tf.function that can be traced (with jit_compile: compiled) for its arguments"
    name = getattr(step, "__name__", step)
    function = foreign(expected, name, lambda: read_function(step, args, optimized=machine.here))
    if isinstance(function, Graph):
        return _audited(Built(function), machine)
    if machine.here:
        built = Built(read_program(parsed(lambda: parse(function.hlo), function.name), function.name, function.lines))
    else:
        machine = machine if machine.devices else find_target(machine.name)
        built = compile_hlo(function.hlo, function.name, machine, function.lines)
    return _audited(built, machine)._replace(name=function.name)


def _audited(built: Built, target: Target) -> Audit:
    """Audits a program; raises GradCombineError for HLO of an unknown form."""
    program, target = built.program, target._replace(order=built.order)
    if isinstance(program, Graph):
        return Audit(program.name, target, program, None, find(program), None, None, None)

    def report() -> Audit:
        flops, in_loops, outside = dict[int, float](), 0, 0
        for _, loops, size, products in program.work():
            in_loops, outside = (in_loops + size, outside) if loops else (in_loops, outside + size)
            for width, count in products.items():
                flops[width] = flops.get(width, 0.0) + count
        findings = find(program, built.donated)
        return Audit(program.name, target, program, built.memory, findings, in_loops, outside, flops)

    return foreign(KNOWN, program.name, report)
