# pyright: standard
"""Compiles a step for a machine, and takes in what other tools have compiled, without running either."""

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
from gradcombine.errors import GradCombineError, attribute, invalid, require_file, require_installed, shown
from gradcombine.types import Tree

T = TypeVar("T")

KNOWN = "HLO in a form that is known"
A_STEP = (
    "a function of jax.jit or tf.function for its arguments (of any other: jax.jit(step) or tf.function(step); of a "
    "Keras model: tf.function(model.train_step) for a batch)"
)


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


class Built(NamedTuple):
    """A program, compiled.

    Attributes:
      program: its HLO.
      memory: None where nothing tells.
      donated: the numbers of the parameters that the caller donates, beside those that the program names.
    """

    program: Program
    memory: Memory | None = None
    donated: Sequence[int] = ()


def compile_step(step: Any, args: Sequence[Tree], target: Target) -> Built:
    """A jitted function for its arguments, what ``lower`` gave of it, or what ``compile`` gave of that."""
    if attribute(step, "lower") is not None:
        from gradcombine.integrations.jax.arrays import require_levels  # only such a step needs JAX

        require_levels(*args)
        step = _plain(_guarded(target, lambda: _lowered(step, args, target)))
    elif args:
        raise invalid(A_STEP, shown(step))
    if attribute(step, "compile") is not None:
        step = _tried(target, step.compile)
    step = _plain(step)
    if attribute(step, "as_text") is None or attribute(step, "memory_analysis") is None:
        raise invalid("a jitted function, or one lowered or compiled", shown(step))
    if not target.here and (others := _kinds(step) - {device.device_kind for device in target.devices}):
        expected = f"a step on devices of {target.name}: one that holds a mesh is built with a mesh of these"
        raise invalid(expected, f"one on {', '.join(sorted(others))}")
    program = read_program(step.as_text(), "a compiled function", shardings=shardings(step))
    return Built(program, _memory(step.memory_analysis(), target), _donated(step, len(program.parameters)))


def compile_hlo(hlo: bytes, name: str, target: Target, lines: Lines = no_lines) -> Built:
    """HLO as a framework has written it, before any pass, for one device of a target."""

    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # no public module compiles StableHLO

    def module() -> Any:
        from jax.extend.mlir import ir
        from jax.interpreters import mlir

        # A copy is its operand; the dialect that all compilers read has none.
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
    made = _tried(target, compiled)
    text, sizes = foreign(KNOWN, name, lambda: (made.hlo_modules()[0].to_string(), made.get_compiled_memory_stats()))
    return Built(read_program(text, name, lines), _memory(sizes, target))


def _tried(target: Target, compiled: Callable[..., T]) -> T:
    """Compiles; tries other kernels where XLA's own choice fails."""
    try:
        return _guarded(target, compiled)
    except OutOfMemoryError:
        raise
    except GradCombineError:
        if not any(device.platform in ("cuda", "gpu") for device in target.devices):
            raise
    # Nothing tries kernels where no device is, and of some products XLA's first guess has no code.
    return _guarded(target, lambda: compiled(compiler_options={"xla_gpu_enable_triton_gemm": False}))


def _memory(sizes: Any, target: Target) -> Memory | None:
    """XLA's memory statistics; raises OutOfMemoryError where they exceed the target's memory."""
    if sizes is None:
        return None
    memory = Memory(*(int(getattr(sizes, f"{x}_size_in_bytes")) for x in ("argument", "output", "alias", "temp")))
    if target.figures is not None and memory.peak > target.figures.memory:
        lacking = memory.peak - target.figures.memory
        expected = f"at most {target.figures.memory:,} bytes on a device of {target.name}"
        raise OutOfMemoryError("audit", expected, f"{memory.peak:,}, {lacking:,} too many")
    return memory


def _plain(stage: Any) -> Any:
    """JAX's own stage, where flax.nnx.jit or equinox.filter_jit has wrapped it."""
    wrapped = [attribute(stage, name) for name in ("lowered", "compiled")]
    return next((x for x in wrapped if x is not None), stage)


def _lowered(step: Any, args: Sequence[Tree], target: Target) -> Any:
    """The step for these arguments on the target's devices: on those of its meshes, or on the first one."""
    import jax

    with _all_frames():
        if target.figures is None or not target.devices:
            return step.lower(*args)
        with jax.default_device(target.devices[0]):
            return step.lower(*jax.tree.map(lambda x: _placed(x, target), tuple(args)))


@contextmanager
def _all_frames() -> Iterator[None]:
    """All lines of source around an operation: by default JAX keeps ten, which may all be an optimizer's."""
    import jax

    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, -1)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _placed(x: Any, target: Target) -> Any:
    """An array as a spec on the target's devices; anything else is left as it is, for it may be static."""
    import jax
    from jax.sharding import Mesh, NamedSharding

    if not hasattr(x, "shape") or not hasattr(x, "dtype") or not getattr(x, "committed", True):
        return x  # an array that is nowhere goes where the step is
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        if not isinstance(mesh, Mesh) or not set(mesh.devices.flat) <= set(target.devices):
            if mesh.size != len(target.devices):
                raise invalid(f"a mesh of the {len(target.devices)} devices of {target.name}", f"one of {mesh.size}")
            devices = np.array(target.devices).reshape(mesh.axis_sizes)
            mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        # What the memory of other devices is called is not known on these.
        host = "pinned_host" if sharding.memory_kind == "pinned_host" else None
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=host)
    elif sharding is not None and len(sharding.device_set) > 1:
        raise invalid("arguments that are split over devices by a NamedSharding", shown(sharding))
    else:
        sharding = None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))


def _kinds(compiled: Any) -> set[str]:
    """Of the devices that arguments and results lie on, as far as it tells."""
    import jax

    places = [attribute(compiled, name) for name in ("input_shardings", "output_shardings")]
    return {device.device_kind for x in jax.tree.leaves(places) for device in attribute(x, "device_set") or ()}


def shardings(compiled: Any) -> list[str]:
    """Of the program's parameters, as HLO writes them: XLA of JAX 0.12 leaves them out of the text."""
    executable: Any = getattr(compiled, "runtime_executable", lambda: None)()
    made = getattr(executable, "get_parameter_shardings", lambda: None)()
    return [str(hlo_parser().HloSharding.from_proto(x)) for x in made or ()]


def _donated(compiled: Any, parameters: int) -> list[int]:
    """The numbers of the program's parameters that were donated: arguments that nothing uses are none of them."""
    import jax

    information = jax.tree.leaves(attribute(compiled, "args_info"), is_leaf=lambda x: hasattr(x, "donated"))
    kept = attribute(attribute(compiled, "_executable"), "_kept_var_idx")
    numbers = sorted(range(len(information)) if kept is None else kept)
    # Constants that a function closes over come first.
    first = parameters - len(numbers)
    if first < 0 or not information:
        return []
    return [first + i for i, n in enumerate(numbers) if n < len(information) and information[n].donated]


def _guarded(target: Target, make: Callable[[], T]) -> T:
    """Calls ``make``; turns whatever a compiler raises into GradCombineError."""
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
            expected = f"a step that fits a device of {target.name}"
            raise OutOfMemoryError("audit", expected, reason[at : at + 250]) from None
        raise invalid(f"a step that compiles for {target.name}", reason) from error


def foreign(expected: str, what: object, call: Callable[[], T]) -> T:
    """Calls a function of the user's; turns whatever it raises, an exit too, into GradCombineError."""
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
    """The texts of files of HLO, text or proto, as XLA's own parser has understood them.

    That parser, which jaxlib ships, decides whether a file is whole and of a known version. It runs in a process of its
    own, as some damaged files end the one that reads them.

    Raises:
      GradCombineError: a file is damaged, cut off, or of a version that this jaxlib does not know.
    """
    files = [require_file("a file of HLO", path) for path in paths]
    contents = (foreign("a file that can be read", str(file), file.read_bytes) for file in files)
    texts = parse_apart(contents)
    for file in files:
        yield parsed(lambda: next(texts), str(file))


def read_program(text: str, where: str, lines: Lines = no_lines, shardings: Sequence[str] = ()) -> Program:
    return foreign(KNOWN, where, lambda: Program(text, lines, shardings))


def parsed(read: Callable[[], str], where: str) -> str:
    """The text of HLO, from a parser of its text or proto."""
    require_installed("audit", "jax")
    return foreign("HLO that the installed jaxlib reads, text or proto", where, read)
