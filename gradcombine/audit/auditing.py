"""Compiles a step and reports what it does."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
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
from gradcombine.audit.subject import Exchange
from gradcombine.audit.target import Bound, Target, bounds, find_target
from gradcombine.audit.tensorflow.graph import Graph
from gradcombine.audit.tensorflow.read import is_function, read_function, read_saved
from gradcombine.errors import attribute, invalid, operation, require_path, shown
from gradcombine.types import Tree


class Audit(NamedTuple):
    """The work of one call of a compiled program on each device.

    Attributes:
      name: of the program.
      target: what it was compiled for.
      program: its HLO; the graph of a tf.function that XLA does not compile.
      memory: None where only HLO was read.
      findings: the defects.
      turns: bytes moved in loops that turn more than once, in a call; None where a graph does not tell.
      beside: bytes moved beside them.
      flops: of matrix products and convolutions, by the bits of their types.
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
    def judged(self) -> tuple[str, ...]:
        """The names of the defects that were looked for."""
        return judged(self.program)

    @property
    def unread(self) -> list[str]:
        """The parts of the program that could not be read."""
        found = list[str]()
        if self.memory is None:
            found.append("memory, and whether what is donated is reused")
        if isinstance(self.program, Graph):
            names = ", ".join(name for name in RULES if name not in self.judged)
            found += ["what is moved in memory, and products", names, *self.program.unread()]
        elif self.program.is_unsplit:
            found.append("how arguments are split, and so what devices repeat")
        return found

    @property
    def undecided(self) -> list[str]:
        """The names of the defects that may be in what could not be read."""
        found = set(RULES).difference(self.judged)
        if isinstance(self.program, Graph):
            found |= set(RULES) if self.program.notes else set()
            unknown = [x for x in self.exchanges if not (x.exact and x.groups)]
            found |= {"many-small-collectives", "repeated-collective"} if unknown else set()
        else:
            found |= {"donation-lost"} if self.memory is None else set()
            found |= {"batch-gathered", "repeated-work", "repeated-collective"} if self.program.is_unsplit else set()
        return [name for name in RULES if name in found]

    @property
    def exchanges(self) -> Sequence[Exchange[Any]]:
        return self.program.exchanges

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a call."""
        return sum(x.times * x.sent() for x in self.exchanges)

    @property
    def bounds(self) -> dict[str, Bound]:
        """Of compute, memory and exchange: the longest is the bound of the call, where they overlap perfectly."""
        if self.turns is None or self.beside is None or self.flops is None:
            nothing = Bound(None, "not known from a graph")
            return bounds(self.target, {}, 0, self.exchanges) | {"compute": nothing, "memory": nothing}
        return bounds(self.target, self.flops, self.turns + self.beside, self.exchanges)

    def seconds(self, finding: Finding) -> float | None:
        """The cost of a finding at the bound, in seconds; None where nothing is published, or it costs no bytes."""
        figures = self.target.figures
        if figures is None or not (finding.moved or finding.sent or finding.flops):
            return None
        total = finding.moved / figures.bandwidth
        if finding.sent:
            if figures.link is None:
                return None
            total += finding.sent / figures.link
        if finding.flops:
            if not figures.flops:
                return None
            total += finding.flops / max(figures.flops.values())
        return total


@operation("audit")
def audit(step: Any, *args: Any, target: str | Target | None = None) -> Audit:
    """Reports what a compiled step moves, copies, exchanges and repeats.

    Nothing runs: a jitted function is lowered and compiled for its arguments, a tf.function is traced.

    Args:
      step: a function of ``jax.jit`` or ``jax.pmap``, what its ``lower`` gives, or what ``compile`` gives of that; a
        function of ``tf.function``, or a ``ConcreteFunction``. With ``jit_compile=True`` its HLO is read, as compiled
        for this machine or for one device of the target, otherwise its graph.
      *args: of a jitted function: arrays or ``jax.ShapeDtypeStruct``, with the shardings that they will have; of a
        tf.function: what it is called with, or ``tf.TensorSpec``.
      target: hardware to compile for, which need not be attached: the result of `find_target`, or, for functions, its
        name. Arguments on a mesh of other devices are moved to a mesh of the same shape of the target's devices; a step
        that holds a mesh has to be built with the target's devices.

    Returns:
      The report: ``findings`` is empty for a step without a known defect; ``undecided`` names the defects that may be
      in a part that could not be read.

    Raises:
      GradCombineError: what cannot be compiled or read.
      OutOfMemoryError: a step that needs more memory than the target has.

    >>> import jax, jax.numpy as jnp
    >>> step = jax.jit(lambda window, grads: window + grads, donate_argnums=0)
    >>> report = audit(step, jnp.zeros(1024), jnp.ones(1024))
    >>> report.findings, report.memory.aliased
    ([], 4096)
    """
    if is_function(step):
        return _of_tensorflow(step, args, target)
    found = find_target(target)
    if isinstance(target, str) and attribute(step, "lower") is None:
        raise invalid(A_STEP, shown(step))
    return _audited(compile_step(step, args, found), found)


@operation("audit")
def audit_file(path: str | Path, target: str | Target | None = None) -> list[Audit]:
    """Reports what a program does that another tool has compiled.

    Args:
      path: a file of optimized HLO, text or proto, a folder that XLA dumped to (``--xla_dump_to``), or a SavedModel.
      target: whose published figures bound the time; nothing is compiled.

    Returns:
      One report for each program.

    Raises:
      GradCombineError: what cannot be read, or is not optimized; a folder without a program.
    """
    found = find_target(target, compiles=False)
    folder = require_path("a file of HLO, or a folder", path)
    if (saved := folder / "saved_model.pb" if folder.is_dir() else folder).name == "saved_model.pb" and saved.is_file():
        expected = "a SavedModel that can be read"
        return foreign(expected, str(path), lambda: [_of_graph(x, found) for x in read_saved(saved)])
    files = [folder]
    if folder.is_dir():
        texts = sorted(folder.glob("*after_optimizations.txt"))
        files = texts or sorted((*folder.glob("*after_optimizations*.pb"), *folder.glob("*.hlo.pb")))
        if not files:
            raise invalid("a folder with files *after_optimizations.txt or .pb", str(path))
    return [_audited(Built(_optimized(*pair)), found) for pair in zip(files, read(files), strict=True)]


def _optimized(path: Path, text: str) -> Program:
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise invalid("optimized HLO, as XLA has it after all passes", f"{path}, not scheduled")
    return read_program(text, str(path))


@operation("audit")
def audit_named(
    what: str, target: str | None = None, progress: Callable[[str], None] = lambda name: None
) -> list[Audit]:
    """Audits what a command line names.

    Args:
      what: a file or a folder as of `audit_file`, or "module:callable". The callable returns a function of
        ``jax.jit`` or ``tf.function`` and a tuple of its arguments, or one that is lowered, compiled or traced already.
        If it has a parameter named devices, or one without a default, it is called with the target's devices, of which
        it makes its mesh.
      target: see `find_target`.
      progress: called with the name of each step before it.

    Returns:
      One report for each program.

    Raises:
      GradCombineError: nothing of this name, a module that does not import, a callable that returns something else.
      OutOfMemoryError: a step that needs more memory than the target has.
    """
    if require_path(_NAMED, what).exists():
        progress(f"reading {what}")
        return audit_file(what, target)
    progress(f"importing and calling {what}")
    made, found = made_by("audit", what, target)
    progress(f"compiling for {found.name}")
    return [_audit_made(what, made, found)]


_NAMED = "module:callable, or a file or a folder that exists"


def _audit_made(what: str, made: Any, target: Target) -> Audit:
    if isinstance(made, tuple):
        pair = cast("tuple[Any, ...]", made)
        if len(pair) == 2 and isinstance(pair[1], tuple | list):
            return audit(pair[0], *cast("Sequence[Any]", pair[1]), target=target)
        received = f"({', '.join(type(x).__name__ for x in pair)})"
    elif hasattr(made, "compile") or hasattr(made, "memory_analysis") or is_function(made):
        return audit(made, target=target)
    else:
        received = shown(made)
    expected = f"{what} to return a jitted function and a tuple of arguments, or one that is lowered or traced"
    raise invalid(expected, received)


def made_by(verb: str, what: str, target: str | None) -> tuple[Any, Target]:
    """The result of the callable ``what``, "module:callable", and the target that it was made for.

    If it has a parameter named devices, or one without a default, it is called with the target's devices.

    Raises:
      GradCombineError: a module that does not import, no callable of this name, or one that raises.
    """
    if target is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a compiler of GPUs is no reason to look for one
    make = callable_named(verb, what)
    found = find_target(target)
    wanted = "a callable of no argument, or of the target's devices"
    arguments = foreign(wanted, what, lambda: _devices(make, found))
    return foreign("a callable that returns", what, lambda: make(*arguments)), found


def callable_named(verb: str, what: str) -> Callable[..., Any]:
    """Imports the callable "module:callable".

    Raises:
      GradCombineError: a module that does not import, or without a callable of this name.
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


def _devices(make: Callable[..., Any], target: Target) -> tuple[Any, ...]:
    """The arguments to call ``make`` with."""
    signature = inspect.signature(make)
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = next((x for x in signature.parameters.values() if x.kind in kinds), None)
    wants = first is not None and (first.name == "devices" or first.default is inspect.Parameter.empty)
    arguments = (target.devices,) if wants else ()
    signature.bind(*arguments)  # a TypeError names the parameter that is left
    return arguments


def _of_tensorflow(step: Any, args: Sequence[Tree], target: str | Target | None) -> Audit:
    """A graph, which needs no compiler, or what XLA makes of it: TensorFlow's own here, the target's there."""
    machine = find_target(target, compiles=target is None)
    expected = "a tf.function that is traced, and compiled where it asks for that, for its arguments"
    function = foreign(expected, step, lambda: read_function(step, args, optimized=machine.here))
    if isinstance(function, Graph):
        return _of_graph(function, machine)
    if machine.here:
        built = Built(read_program(parsed(lambda: parse(function.hlo), function.name), function.name, function.lines))
    else:
        machine = machine if machine.devices else find_target(machine.name)
        built = compile_hlo(function.hlo, function.name, machine, function.lines)
    return _audited(built, machine)._replace(name=function.name)


def _of_graph(graph: Graph, target: Target) -> Audit:
    return Audit(graph.name, target, graph, None, find(graph), None, None, None)


def _audited(built: Built, target: Target) -> Audit:
    """Audits a program; raises GradCombineError for HLO of an unknown form."""
    program = built.program

    def counted() -> Audit:
        flops, moved = dict[int, float](), [0, 0]
        for _, loops, size, products in program.work():
            moved[not loops] += size
            for width, count in products.items():
                flops[width] = flops.get(width, 0.0) + count
        findings = find(program, built.donated)
        return Audit(program.name, target, program, built.memory, findings, moved[0], moved[1], flops)

    return foreign(KNOWN, program.name, counted)
