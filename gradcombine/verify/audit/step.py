"""Compiles a step and tells what it does."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradcombine.errors import GradCombineError, importing, require_file, require_path, shown
from gradcombine.verify.audit.findings import RULES, Finding, find
from gradcombine.verify.audit.program import Exchange, Program, times
from gradcombine.verify.audit.target import Figures, Target, find_target
from gradcombine.verify.audit.tensorflow.findings import RULES as GRAPH_RULES
from gradcombine.verify.audit.tensorflow.findings import find as find_in_graph
from gradcombine.verify.audit.tensorflow.graph import Graph
from gradcombine.verify.audit.tensorflow.read import Compiled, is_function, read_function, read_saved

KNOWN = "HLO in a form that is known"


class OutOfMemoryError(GradCombineError):
    """A step needs more memory than a device of the target has."""


class Memory(NamedTuple):
    """Bytes on each device.

    Attributes:
      arguments: of all arguments.
      results: of all results.
      aliased: of the results that lie where arguments lay.
      temporary: of what is needed beside them.
    """

    arguments: int
    results: int
    aliased: int
    temporary: int

    @property
    def peak(self) -> int:
        return self.arguments + self.results - self.aliased + self.temporary


class Bound(NamedTuple):
    """A time that no execution is shorter than, and how it comes about.

    Attributes:
      seconds: the sum divided by the rate; None where no rate is published.
      arithmetic: the same in words.
    """

    seconds: float | None
    arithmetic: str


class Audit(NamedTuple):
    """What one call of a compiled program does on each device.

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
        return tuple(GRAPH_RULES if isinstance(self.program, Graph) else RULES)

    @property
    def unread(self) -> list[str]:
        """What the program does not tell."""
        found = list[str]()
        if self.memory is None:
            found.append("memory, and whether what is donated is reused")
        if isinstance(self.program, Graph):
            names = ", ".join(name for name in RULES if name not in self.judged)
            found += ["what is moved in memory, and products", names, *self.program.unread()]
        return found

    @property
    def exchanges(self) -> list[Exchange]:
        return self.program.exchanges

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a call."""
        return sum(x.times * x.sent() for x in self.exchanges)

    @property
    def bounds(self) -> dict[str, Bound]:
        """Of compute, memory and exchange: the longest is the bound of the call, where they overlap perfectly."""
        if self.turns is None or self.beside is None or self.flops is None:
            nothing = Bound(None, "a graph does not tell")
            return bounds(self.target, {}, 0, self.exchanges) | {"compute": nothing, "memory": nothing}
        return bounds(self.target, self.flops, self.turns + self.beside, self.exchanges)

    def seconds(self, finding: Finding) -> float | None:
        """What a finding costs at the bound; None where nothing is published, or it costs no bytes."""
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


def audit(step: Any, *args: Any, target: str | Target | None = None) -> Audit:
    """Tells what a compiled step does: what it moves, copies, exchanges and repeats.

    Nothing runs: a jitted function is lowered and compiled for its arguments, a tf.function is traced.

    Args:
      step: a function of ``jax.jit`` or ``jax.pmap``, what its ``lower`` gives, or what ``compile`` gives of that; a
        function of ``tf.function``, or a ``ConcreteFunction``. With ``jit_compile=True`` its HLO is read, as compiled
        for this machine, otherwise its graph.
      *args: of a jitted function: arrays or ``jax.ShapeDtypeStruct``, with the shardings that they will have; of a
        tf.function: what it is called with, or ``tf.TensorSpec``.
      target: a machine that need not be here: what `find_target` gives, or its name, which is for jitted functions
        alone. Their arguments on a mesh of other devices are moved to a mesh of the same shape on the target's; a step
        that holds a mesh by itself has to be built with the target's devices.

    Returns:
      What was found; ``findings`` is empty for a step without a known defect.

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
    found = target if isinstance(target, Target) else find_target(target)
    if hasattr(step, "lower"):
        step = _guarded(found, lambda: _lowered(step, args, found))
    elif args or isinstance(target, str):
        wanted = "a function of jax.jit for its arguments (of one that is not jitted: jax.jit(step))"
        raise GradCombineError("audit", wanted, shown(step))
    if hasattr(step, "compile"):
        step = _compiled(step, found)
    if not hasattr(step, "as_text") or not hasattr(step, "memory_analysis"):
        raise GradCombineError("audit", "a jitted function, or one lowered or compiled", shown(step))
    if target is not None and (others := _kinds(step) - {device.device_kind for device in found.devices}):
        expected = f"a step on devices of {found.name}: one that holds a mesh is built with a mesh of these"
        raise GradCombineError("audit", expected, f"one on {', '.join(sorted(others))}")
    program: Program = _foreign(
        "audit", "a compiled function whose HLO can be read", step, lambda: Program(step.as_text())
    )
    sizes = _foreign("audit", "a compiled function that tells its memory", step, lambda: step.memory_analysis())
    memory = None
    if sizes is not None:
        names = ("argument", "output", "alias", "temp")
        memory = Memory(*(int(getattr(sizes, f"{name}_size_in_bytes")) for name in names))
    if memory is not None and found.figures is not None and memory.peak > found.figures.memory:
        lacking = memory.peak - found.figures.memory
        expected = f"at most {found.figures.memory:,} bytes on a device of {found.name}"
        raise OutOfMemoryError("audit", expected, f"{memory.peak:,}, {lacking:,} too many")
    return _audited(program, found, memory, _donated(step, len(program.parameters)))


def audit_file(path: str | Path, target: str | Target | None = None) -> list[Audit]:
    """Tells what a program does that another tool has compiled.

    Args:
      path: a file of optimized HLO, text or proto, a folder that XLA dumped to (``--xla_dump_to``), or a SavedModel.
      target: whose published figures bound the time; nothing is compiled.

    Returns:
      One report for each program.

    Raises:
      GradCombineError: what cannot be read, or is not optimized; a folder without a program.
    """
    found = target if isinstance(target, Target) else find_target(target, compiles=False)
    folder = require_path("audit", "a file of HLO, or a folder", path)
    if (saved := folder / "saved_model.pb" if folder.is_dir() else folder).name == "saved_model.pb" and saved.is_file():
        expected = "a SavedModel that can be read"
        return _foreign("audit", expected, str(path), lambda: [_of_graph(x, found) for x in read_saved(saved)])
    files = [folder]
    if folder.is_dir():
        texts = sorted(folder.glob("*after_optimizations.txt"))
        files = texts or sorted((*folder.glob("*after_optimizations*.pb"), *folder.glob("*.hlo.pb")))
        if not files:
            raise GradCombineError("audit", "a folder with files *after_optimizations.txt or .pb", str(path))
    return [_audited(_optimized(file), found, None, ()) for file in files]


def _optimized(path: Path) -> Program:
    text = read(path)
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise GradCombineError("audit", "optimized HLO, as XLA has it after all passes", f"{path}, not scheduled")
    return _program(text, str(path))


def _program(text: str, where: str) -> Program:
    return _foreign("audit", KNOWN, where, lambda: Program(text))


def read(path: str | Path) -> str:
    """The text of a file of HLO, text or proto, as XLA's own parser has understood it.

    That parser, which jaxlib ships, decides whether a file is whole and of a known version.

    Raises:
      GradCombineError: the file is damaged, cut off, or of a version that this jaxlib does not know.
    """
    file = require_file("audit", "a file of HLO", path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise GradCombineError("audit", "a file that can be read", f"{path}: {error.strerror}") from None
    return parsed(content, str(path))


def parsed(content: bytes, where: str) -> str:
    """The text of HLO, from its text or proto."""
    with importing("audit"):
        from gradcombine.backends.jax_versions import hlo_parser  # only reading a file needs JAX
    hlo = hlo_parser()
    try:
        if content.lstrip().startswith(b"HloModule"):
            return hlo.hlo_module_from_text(content.decode()).to_string()
        first, *_ = _fields(content)
        try:
            return hlo.HloModule.from_serialized_hlo_module_proto(content).to_string()
        except Exception:  # an HloProto, which XLA dumps, holds the module as its first field
            return hlo.HloModule.from_serialized_hlo_module_proto(first).to_string()
    except Exception as error:  # XLA's own class, which is no public one
        reason = " ".join(str(error).split())[:160]
        expected = "HLO that the installed jaxlib reads, text or proto"
        raise GradCombineError("audit", expected, f"{where}: {reason}") from None


def _fields(content: bytes) -> Iterator[bytes]:
    """The fields of a proto; one that is cut off, which not every parser of XLA's minds, is an error."""
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        size, start = _varint(content, at) if tag & 7 in (0, 2) else ({1: 8, 5: 4}[tag & 7], at)
        at = start + (size if tag & 7 else 0)
        if at > len(content):
            raise ValueError("the file is cut off")
        yield content[start:at]


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while at < len(content):
        value |= (content[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if content[at - 1] < 128:
            return value, at
    raise ValueError("the file is cut off")


def audit_named(what: str, target: str | None = None) -> list[Audit]:
    """Audits what a command line names.

    Args:
      what: a file or a folder as of `audit_file`, or "module:callable". The callable returns a function of
        ``jax.jit`` or ``tf.function`` and a tuple of its arguments, or one that is lowered, compiled or traced already.
        If it has a parameter named devices, or one without a default, it is called with the target's devices, of which
        it makes its mesh.
      target: see `find_target`.

    Returns:
      One report for each program.

    Raises:
      GradCombineError: nothing of this name, a module that does not import, a callable that returns something else.
      OutOfMemoryError: a step that needs more memory than the target has.
    """
    if Path(what).exists():
        return [*audit_file(what, target)]
    made, found = made_by("audit", what, target)
    # Whatever else a foreign object does when it is asked for something.
    return _foreign("audit", "a step that can be audited", what, lambda: [_audit_made(what, made, found)])


def _audit_made(what: str, made: Any, target: Target) -> Audit:
    pair: Any = made if isinstance(made, tuple) else ()
    if len(pair) == 2 and isinstance(pair[1], tuple | list):
        return audit(pair[0], *pair[1], target=target)
    known = hasattr(made, "compile") or hasattr(made, "memory_analysis") or is_function(made)
    if not isinstance(made, tuple) and known:
        return audit(made, target=target)
    received = f"({', '.join(type(x).__name__ for x in pair)})" if isinstance(made, tuple) else shown(made)
    expected = f"{what} to return a jitted function and a tuple of arguments, or one that is lowered or traced"
    raise GradCombineError("audit", expected, received)


def made_by(operation: str, what: str, target: str | None) -> tuple[Any, Target]:
    """What a callable returns that a command line names, and the target that it was made for.

    Args:
      operation: what error messages call the caller.
      what: "module:callable". If the callable has a parameter named devices, or one without a default, it is called
        with the target's devices.
      target: see `find_target`.

    Raises:
      GradCombineError: a module that does not import, no callable of this name, or one that raises.
    """
    module, _, name = what.partition(":")
    if not module or not name.isidentifier():
        files = ", or a file or a folder that exists" if operation == "audit" else ""
        raise GradCombineError(operation, f"module:callable{files}", what)
    if target is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a compiler of GPUs is no reason to look for one
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    imported = _foreign(operation, "a module that imports", module, lambda: import_module(module))
    expected = f"a callable {name} in {module} that returns what to {operation}"
    make: Any = _foreign(operation, expected, what, lambda: getattr(imported, name, None))
    if not callable(make) or hasattr(make, "lower") or is_function(make):
        raise GradCombineError(operation, expected, "none" if make is None else shown(make))
    found = find_target(target)
    wanted = "a callable of no argument, or of the target's devices"
    arguments = _foreign(operation, wanted, what, lambda: _devices(make, found))
    return _foreign(operation, "a callable that returns", what, lambda: make(*arguments)), found


def _devices(make: Callable[..., Any], target: Target) -> tuple[Any, ...]:
    """What to call this with."""
    signature = inspect.signature(make)
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = next((x for x in signature.parameters.values() if x.kind in kinds), None)
    wants = first is not None and (first.name == "devices" or first.default is inspect.Parameter.empty)
    arguments = (target.devices,) if wants else ()
    signature.bind(*arguments)  # a TypeError names the parameter that is left
    return arguments


def _foreign(operation: str, expected: str, what: Any, call: Callable[[], Any]) -> Any:
    """What this returns; whatever it raises, an exit too, becomes the library's error."""
    try:
        return call()
    except (GradCombineError, KeyboardInterrupt):
        raise
    except BaseException as error:
        received = f"{what if isinstance(what, str) else shown(what)}: {_words(error)}"
        raise GradCombineError(operation, expected, received) from error


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _of_tensorflow(step: Any, args: Sequence[Any], target: str | Target | None) -> Audit:
    found = target if isinstance(target, Target) else find_target(target, compiles=target is None)
    expected = "a tf.function that is traced, and compiled where it asks for that, for its arguments"
    read = _foreign("audit", expected, step, lambda: read_function(step, args))
    if isinstance(read, Compiled):
        return _audited(_program(parsed(read.hlo, read.name), read.name), found, None, ())._replace(name=read.name)
    return _of_graph(read, found)


def _of_graph(graph: Graph, target: Target) -> Audit:
    return Audit(graph.name, target, graph, None, find_in_graph(graph), None, None, None)


def _audited(program: Program, target: Target, memory: Memory | None, donated: Sequence[int]) -> Audit:
    """What this program does; whatever form of HLO is not known becomes the library's error."""

    def counted() -> Audit:
        flops, moved = dict[int, float](), [0, 0]
        for name, x, loops in program.executed():
            moved[not loops] += times(loops) * program.traffic(name, x)
            for _, _, count, width in program.products(name, x):
                flops[width] = flops.get(width, 0.0) + times(loops) * count
        return Audit(program.name, target, program, memory, find(program, donated), moved[0], moved[1], flops)

    return _foreign("audit", KNOWN, program.name, counted)


def _guarded(target: Target, make: Callable[[], Any]) -> Any:
    """What this makes; whatever a compiler raises becomes the library's error."""
    try:
        with warnings.catch_warnings():
            # The audit says it itself, with what it costs.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return make()
    except (GradCombineError, KeyboardInterrupt):
        raise
    except BaseException as error:  # XLA's classes are no public ones, and a function that is traced may exit
        reason = _words(error)
        if "RESOURCE_EXHAUSTED" in reason or "Ran out of memory" in reason:
            at = max(reason.find("Ran out of memory"), 0)
            raise OutOfMemoryError(
                "audit", f"a step that fits a device of {target.name}", reason[at : at + 250]
            ) from None
        raise GradCombineError("audit", f"a step that compiles for {target.name}", reason) from error


def _compiled(step: Any, target: Target) -> Any:
    try:
        return _guarded(target, step.compile)
    except OutOfMemoryError:
        raise
    except GradCombineError:
        if not any(device.platform in ("cuda", "gpu") for device in target.devices):
            raise
    # Nothing tries kernels where no device is, and of some products XLA's first guess has no code.
    return _guarded(target, lambda: step.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}))


def _lowered(step: Any, args: Sequence[Any], target: Target) -> Any:
    """The step for these arguments on the target's devices: on those of its meshes, or on the first one."""
    if target.figures is None or not target.devices:
        return step.lower(*args)
    import jax

    with jax.default_device(target.devices[0]):
        return step.lower(*jax.tree.map(lambda x: _placed(x, target), tuple(args)))


def _placed(x: Any, target: Target) -> Any:
    """An array as a spec on the target's devices; anything else is left as it is, for it may be static."""
    import jax
    from jax.sharding import Mesh, NamedSharding

    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        if not isinstance(mesh, Mesh) or not set(mesh.devices.flat) <= set(target.devices):
            if mesh.size != len(target.devices):
                expected = f"a mesh of the {len(target.devices)} devices of {target.name}"
                raise GradCombineError("audit", expected, f"one of {mesh.size}")
            devices = np.array(target.devices).reshape(mesh.axis_sizes)
            mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        # What the memory of other devices is called is not known on these.
        host = "pinned_host" if sharding.memory_kind == "pinned_host" else None
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=host)
    elif sharding is not None and len(sharding.device_set) > 1:
        raise GradCombineError("audit", "arguments that are split over devices by a NamedSharding", shown(sharding))
    else:
        sharding = None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))


def _kinds(compiled: Any) -> set[str]:
    """Of the devices that arguments and results lie on, as far as it tells."""
    import jax

    places = (getattr(compiled, "input_shardings", ()), getattr(compiled, "output_shardings", ()))
    return {device.device_kind for x in jax.tree.leaves(places) for device in x.device_set}


def _donated(compiled: Any, parameters: int) -> list[int]:
    """The numbers of the program's parameters that were donated: arguments that nothing uses are none of them."""
    import jax

    information = jax.tree.leaves(getattr(compiled, "args_info", ()), is_leaf=lambda x: hasattr(x, "donated"))
    kept = getattr(getattr(compiled, "_executable", None), "_kept_var_idx", range(len(information)))
    numbers = sorted(kept)
    # Constants that a function closes over come first.
    first = parameters - len(numbers)
    if first < 0 or not information:
        return []
    return [first + i for i, n in enumerate(numbers) if n < len(information) and information[n].donated]


def bounds(target: Target, flops: dict[int, float], moved: float, exchanges: Sequence[Exchange]) -> dict[str, Bound]:
    """Of compute, memory and exchange.

    Args:
      target: whose published figures bound them.
      flops: of matrix products and convolutions, by the bits of their types.
      moved: bytes in main memory.
      exchanges: each as often as its loops turn.
    """
    figures = target.figures
    if figures is None:
        nothing = Bound(None, f"nothing is published of {target.name}")
        return dict.fromkeys(("compute", "memory", "exchange"), nothing)
    return {
        "compute": _compute(flops, figures),
        "memory": _memory(moved, figures),
        "exchange": _exchange(exchanges, target.per_host, figures),
    }


def _compute(flops: dict[int, float], figures: Figures) -> Bound:
    if not figures.flops:
        return Bound(None, "no rate of products is published")
    fastest = max(figures.flops.values())
    parts = [(count, width, figures.flops.get(width, fastest)) for width, count in sorted(flops.items())]
    words = " + ".join(f"{count:.3g} of {width} bits / {rate:.4g}/s" for count, width, rate in parts) or "no products"
    seconds = sum(count / rate for count, _, rate in parts)
    return Bound(seconds, f"{words} = {seconds:.3g} s")


def _memory(moved: float, figures: Figures) -> Bound:
    seconds = moved / figures.bandwidth
    return Bound(seconds, f"{moved:,.0f} B / {figures.bandwidth:.4g} B/s = {seconds:.3g} s")


def _exchange(exchanges: Sequence[Exchange], per_host: int, figures: Figures) -> Bound:
    within = across = 0.0
    for x in exchanges:
        hosts, away = x.leaves_host(per_host)
        across += x.times * away
        within += x.times * (x.sent() if hosts == 1 else max(0.0, x.sent() - away))
    words, seconds = list[str](), 0.0
    for sent, rate, where in ((within, figures.link, "to its host"), (across, figures.network, "to other hosts")):
        if sent and rate is None:
            return Bound(None, f"{sent:,.0f} B {where}, of which no rate is published")
        if sent and rate is not None:
            seconds = max(seconds, sent / rate)
            words.append(f"{sent:,.0f} B {where} / {rate:.4g} B/s")
    joined = f"max({', '.join(words)})" if len(words) > 1 else "".join(words)
    return Bound(seconds, f"{joined} = {seconds:.3g} s" if words else "nothing is exchanged")
