# pyright: standard
"""Compiles steps for a target, and reads HLO that was compiled elsewhere, without running either."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gradcombine.audit.parsing import hlo_parser, parse, parse_apart
from gradcombine.audit.program import Lines, Program, no_lines
from gradcombine.audit.target import Target
from gradcombine.audit.tensorflow.graph import Graph
from gradcombine.errors import GradCombineError, attribute, invalid, require_file, require_installed, shown
from gradcombine.types import Tree

T = TypeVar("T")

KNOWN = "HLO in a form that is known"
A_STEP = (
    "a function of jax.jit or tf.function for its arguments (wrap any other in jax.jit or tf.function; for a Keras "
    "model, pass tf.function(model.train_step) and a batch)"
)


class OutOfMemoryError(GradCombineError):
    """A step needs more memory than a device of the target has."""


class Memory(NamedTuple):
    """Bytes on each device.

    Attributes:
      arguments: of all arguments.
      results: of all results.
      aliased: of results that reuse the buffers of arguments.
      temporary: of temporary buffers.
    """

    arguments: int
    results: int
    aliased: int
    temporary: int

    @property
    def peak(self) -> int:
        return self.arguments + self.results - self.aliased + self.temporary


class Built(NamedTuple):
    """A program to audit.

    Attributes:
      program: its HLO, or a graph that is not compiled.
      memory: None if unknown.
      donated: indices of donated parameters, in addition to those that the HLO names.
      order: positions of its devices in the target's, see `Target`.
    """

    program: Program | Graph
    memory: Memory | None = None
    donated: Sequence[int] = ()
    order: tuple[int, ...] = ()


def compile_step(step: Any, args: Sequence[Tree], target: Target) -> Built:
    """Compiles a jitted function for its arguments, or its lowered stage; reads its compiled stage."""
    if attribute(step, "lower") is not None:
        from gradcombine.integrations.jax.arrays import require_levels  # only such a step needs JAX

        require_levels(*args)
        step = _unwrapped(_guarded(target, lambda: _lowered(step, args, target)))
    elif args:
        raise invalid(A_STEP, shown(step))
    if attribute(step, "compile") is not None:
        step = _compiled(target, step.compile)
    step = _unwrapped(step)
    if attribute(step, "as_text") is None or attribute(step, "memory_analysis") is None:
        raise invalid("a jitted function, or one lowered or compiled", shown(step))
    shardings = _shardings(step)
    kinds = {device.device_kind for x in shardings for device in attribute(x, "device_set") or ()}
    if not target.here and (others := kinds - {device.device_kind for device in target.devices}):
        expected = f"a step on devices of {target.name} (build a step that closes over a mesh with these devices)"
        raise invalid(expected, f"one on {', '.join(sorted(others))}")
    program = read_program(step.as_text(), "a compiled function", shardings=parameter_shardings(step))
    donated = _donated(step, len(program.parameters))
    return Built(program, _memory(step.memory_analysis(), target), donated, _order(shardings, target.devices))


def compile_hlo(hlo: bytes, name: str, target: Target, lines: Lines = no_lines) -> Built:
    """Compiles unoptimized HLO for one device of a target."""
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # no public module compiles StableHLO

    def module() -> Any:
        from jax.extend.mlir import ir
        from jax.interpreters import mlir

        # StableHLO, which all compilers read, has no copy: replace it by a reshape to the same shape.
        plain: Any = hlo_parser().hlo_module_from_text(
            re.sub(r" copy\(", " reshape(", parsed(lambda: parse(hlo), name))
        )
        with mlir.make_ir_context():
            return ir.Module.parse(_jax.mlir.hlo_to_stablehlo(plain.as_serialized_hlo_module_proto()))

    def compiled(compiler_options: Mapping[str, bool] = MappingProxyType({})) -> Any:
        options = _jax.CompileOptions()
        options.env_option_overrides = [*compiler_options.items()]
        return device.client.compile(stablehlo, _jax.DeviceList((device,)), options)

    device = target.devices[0]
    stablehlo = foreign(KNOWN, name, module)
    executable = _compiled(target, compiled)
    text = foreign(KNOWN, name, lambda: executable.hlo_modules()[0].to_string())
    sizes = foreign(KNOWN, name, executable.get_compiled_memory_stats)
    return Built(read_program(text, name, lines), _memory(sizes, target))


def _compiled(target: Target, compile_: Callable[..., T]) -> T:
    """Compiles; if that fails for a GPU, compiles again without Triton."""
    try:
        return _guarded(target, compile_)
    except OutOfMemoryError:
        raise
    except GradCombineError:
        if not any(device.platform in ("cuda", "gpu") for device in target.devices):
            raise
    # Without a device, XLA cannot autotune, and its default Triton kernel fails to compile for some products.
    return _guarded(target, lambda: compile_(compiler_options={"xla_gpu_enable_triton_gemm": False}))


def _memory(sizes: Any, target: Target) -> Memory | None:
    """XLA's memory statistics; raises OutOfMemoryError if they exceed the target's memory."""
    if sizes is None:
        return None
    memory = Memory(*(int(getattr(sizes, f"{x}_size_in_bytes")) for x in ("argument", "output", "alias", "temp")))
    if target.figures is not None and memory.peak > target.figures.memory:
        excess = memory.peak - target.figures.memory
        expected = f"at most {target.figures.memory:,} bytes on a device of {target.name}"
        raise OutOfMemoryError("audit", expected, f"{memory.peak:,}, {excess:,} too many")
    return memory


def _unwrapped(stage: Any) -> Any:
    """The lowered or compiled stage of JAX inside a stage of flax.nnx.jit or equinox.filter_jit."""
    wrapped = [attribute(stage, name) for name in ("lowered", "compiled")]
    return next((x for x in wrapped if x is not None), stage)


def _lowered(step: Any, args: Sequence[Tree], target: Target) -> Any:
    """Lowers the step for the target's devices: those of the arguments' meshes, or else the first one."""
    import jax

    with _all_frames():
        if target.figures is None or not target.devices:
            return step.lower(*args)
        with jax.default_device(target.devices[0]):
            return step.lower(*jax.tree.map(lambda x: _placed(x, target), tuple(args)))


@contextmanager
def _all_frames() -> Iterator[None]:
    """Makes JAX record the full traceback of each operation; its default of ten frames may end in an optimizer."""
    import jax

    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, -1)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _placed(x: Any, target: Target) -> Any:
    """Converts an array to a spec on the target's devices; other values, which may be static, stay as they are."""
    import jax
    from jax.sharding import Mesh, NamedSharding

    if not hasattr(x, "shape") or not hasattr(x, "dtype") or not getattr(x, "committed", True):
        return x  # uncommitted arrays follow the step
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        if not isinstance(mesh, Mesh) or not set(mesh.devices.flat) <= set(target.devices):
            if mesh.size != len(target.devices):
                raise invalid(f"a mesh of the {len(target.devices)} devices of {target.name}", f"one of {mesh.size}")
            devices = np.array(target.devices).reshape(mesh.axis_sizes)
            mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        # The target may not have the other memory kinds of the current devices.
        host = "pinned_host" if sharding.memory_kind == "pinned_host" else None
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=host)
    elif sharding is not None and len(sharding.device_set) > 1:
        raise invalid("arguments that are sharded by a NamedSharding", shown(sharding))
    else:
        sharding = None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))


def _shardings(compiled: Any) -> list[Any]:
    """Shardings of the arguments and results, as far as they are known."""
    import jax

    return jax.tree.leaves([attribute(compiled, name) for name in ("input_shardings", "output_shardings")])


def _order(shardings: Sequence[Any], devices: Sequence[Any]) -> tuple[int, ...]:
    """Positions in ``devices`` of the devices of a mesh, in whose order the program numbers them; empty if unknown."""
    from jax.sharding import Mesh

    position = {device: i for i, device in enumerate(devices)}
    for sharding in shardings:
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, Mesh) and position.keys() >= set(mesh.devices.flat):
            return tuple(position[device] for device in mesh.devices.flat)
    return ()


def parameter_shardings(compiled: Any) -> list[str]:
    """Shardings of the program's parameters in HLO's notation, which the HLO text of JAX 0.12 lacks."""
    executable: Any = getattr(compiled, "runtime_executable", lambda: None)()
    protos = getattr(executable, "get_parameter_shardings", lambda: None)()
    return [str(hlo_parser().HloSharding.from_proto(x)) for x in protos or ()]


def _donated(compiled: Any, parameters: int) -> list[int]:
    """Indices of the program's donated parameters, which do not include unused arguments."""
    import jax

    information = jax.tree.leaves(attribute(compiled, "args_info"), is_leaf=lambda x: hasattr(x, "donated"))
    kept = attribute(attribute(compiled, "_executable"), "_kept_var_idx")
    arguments = sorted(range(len(information)) if kept is None else kept)
    # Parameters for constants that the function closes over come first.
    first = parameters - len(arguments)
    if first < 0 or not information:
        return []
    return [first + i for i, n in enumerate(arguments) if n < len(information) and information[n].donated]


def _guarded(target: Target, compile_: Callable[[], T]) -> T:
    """Calls ``compile_``; translates every exception to GradCombineError."""
    try:
        with warnings.catch_warnings():
            # The finding donation-lost reports this.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return compile_()
    except (GradCombineError, KeyboardInterrupt):
        raise
    except BaseException as error:  # XLA's exceptions are private, and a traced function may call sys.exit
        reason = _words(error)
        if "RESOURCE_EXHAUSTED" in reason or "Ran out of memory" in reason:
            at = max(reason.find("Ran out of memory"), 0)
            expected = f"a step that fits a device of {target.name}"
            raise OutOfMemoryError("audit", expected, reason[at : at + 250]) from None
        raise invalid(f"a step that compiles for {target.name}", reason) from error


def foreign(expected: str, what: object, call: Callable[[], T]) -> T:
    """Calls a function; translates every exception, SystemExit included, to GradCombineError."""
    try:
        return call()
    except (GradCombineError, KeyboardInterrupt):
        raise
    except BaseException as error:
        received = f"{what if isinstance(what, str) else shown(what)}: {_words(error)}"
        raise invalid(expected, received) from error


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def read(paths: Iterable[Path]) -> Iterator[str]:
    """Reads HLO files, text or proto; yields their text.

    The parser of jaxlib decides whether a file is complete and of a known version. It runs in a separate process, as
    some damaged files crash it.

    Raises:
      GradCombineError: for a file that is damaged, truncated, or of a version that this jaxlib does not know.
    """
    files = [require_file("a file of HLO", path) for path in paths]
    contents = (foreign("a file that can be read", str(file), file.read_bytes) for file in files)
    texts = parse_apart(contents)
    for file in files:
        yield parsed(lambda: next(texts), str(file))


def read_program(text: str, where: str, lines: Lines = no_lines, shardings: Sequence[str] = ()) -> Program:
    return foreign(KNOWN, where, lambda: Program(text, lines, shardings))


def parsed(read: Callable[[], str], where: str) -> str:
    """Returns ``read()``, the text of parsed HLO; translates every exception to GradCombineError."""
    require_installed("audit", "jax")
    return foreign("HLO that the installed jaxlib reads, text or proto", where, read)
