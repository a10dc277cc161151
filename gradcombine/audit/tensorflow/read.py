# pyright: standard
"""Reads the graph of a tf.function, ConcreteFunction or SavedModel, or its HLO if XLA compiles it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gradcombine.audit.program import Lines
from gradcombine.audit.subject import LIBRARIES, Frame
from gradcombine.audit.tensorflow.graph import Graph
from gradcombine.errors import attribute, invalid
from gradcombine.types import Tree

HIDDEN = (*LIBRARIES, "__autograph_generated_file", "threading.py")
"""Parts of the paths of files that reports do not show."""


def is_function(step: object) -> bool:
    """Whether a step is a tf.function or a ConcreteFunction."""
    return attribute(step, "get_concrete_function") is not None or is_traced(step)


def is_traced(step: object) -> bool:
    return all(attribute(step, name) is not None for name in ("structured_input_signature", "captured_inputs"))


class Compiled(NamedTuple):
    """A function as an HLO proto, optimized or not, with the source lines of its operations."""

    name: str
    hlo: bytes
    lines: Lines


def read_function(step: Any, args: Sequence[Tree], *, optimized: bool) -> Graph | Compiled:
    """Traces a tf.function for its arguments, without running it.

    Args:
      step: a function of ``tf.function``, or a ``ConcreteFunction``.
      args: arguments of the function, or ``tf.TensorSpec``; empty for a ``ConcreteFunction``.
      optimized: whether to compile HLO for this machine, or to return it unoptimized.

    Returns:
      The graph; of a function with ``jit_compile=True``, the HLO.
    """
    if is_traced(step):
        if args:
            raise invalid("a ConcreteFunction without arguments", f"{len(args)}")
        return of_concrete(step)
    concrete = step.get_concrete_function(*args)
    if "_XlaMustCompile" in (attributes := concrete.function_def.attr) and attributes["_XlaMustCompile"].b:
        stage = "optimized_hlo_serialized" if optimized else "hlo_serialized"
        given = args or step.input_signature or ()
        bound = _with_values(inspect.signature(step.python_function).bind(*given))
        hlo = step.experimental_get_compiler_ir(*bound.args, **bound.kwargs)(stage=stage)
        return Compiled(_short(_name(concrete)), hlo, _lines(concrete))
    return of_concrete(concrete)


def _with_values(bound: inspect.BoundArguments) -> inspect.BoundArguments:
    """Arguments as ``experimental_get_compiler_ir`` takes them: with defaults, and either specs or values.

    Specs inside of structures are not accepted, either: all are replaced by zeros unless each argument is a spec.
    """
    from tensorflow import TensorSpec, nest, zeros

    bound.apply_defaults()
    if not all(isinstance(x, TensorSpec) for x in (*bound.args, *bound.kwargs.values())):
        for name, x in bound.arguments.items():
            bound.arguments[name] = nest.map_structure(
                lambda x: zeros(x.shape, x.dtype) if isinstance(x, TensorSpec) else x, x
            )
    return bound


def of_concrete(concrete: Any) -> Graph:
    name, results = _name(concrete), [x.name for x in concrete.outputs]
    captured = {inner.op.name: getattr(outer, "device", "") for outer, inner in concrete.graph.captures}
    return Graph(_short(name), concrete.graph.as_graph_def(add_shapes=True), results, _frames(name), captured)


def _name(concrete: Any) -> str:
    return concrete.name.decode() if isinstance(concrete.name, bytes) else str(concrete.name)


def _short(name: str) -> str:
    """The name of a ConcreteFunction without the suffix that is unique to each trace."""
    match = re.fullmatch(r"__inference_(.+)_\d+", name)
    return match[1] if match else name


def read_saved(path: Path) -> Iterator[Graph]:
    """The graphs of a SavedModel: that of its signatures, and other functions with variable writes or collectives.

    Raises:
      GradCombineError: for a file that is not a SavedModel.
    """
    from google.protobuf.message import DecodeError
    from tensorflow import compat
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel()
    try:
        saved.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise invalid("an undamaged SavedModel", f"{path}: {error}") from None
    if not saved.meta_graphs:
        raise invalid("a SavedModel with a graph", f"{path}, which holds none")
    for meta in saved.meta_graphs:
        main = Graph(path.parent.name or "saved_model", meta.graph_def)
        yield main
        for name in main.roots():
            proto = compat.v1.GraphDef(library=meta.graph_def.library)
            node = proto.node.add(name="call", op=name)
            for argument in next(x for x in proto.library.function if x.signature.name == name).signature.input_arg:
                placeholder = proto.node.add(name=f"argument_{argument.name}", op="Placeholder")
                placeholder.attr["dtype"].type = argument.type
                node.input.append(placeholder.name)
            yield Graph(name, proto)


def _lines(concrete: Any) -> Lines:
    """Source lines by XLA's names of operations, which are prefixed with those of enclosing calls and loops."""
    proto, frames = concrete.graph.as_graph_def(), _frames(_name(concrete))
    library = {x.signature.name: x for x in proto.library.function}
    operations = dict[str, tuple[str, str]]()

    def enter(nodes: Any, prefix: str, function: str) -> None:
        for node in nodes:
            operations[prefix + node.name] = function, node.name
            for value in node.attr.values():
                for called in (value.func, *value.list.func):
                    if called.name in library:
                        enter(library[called.name].node_def, f"{prefix}{node.name}/", called.name)

    enter(proto.node, "", "")
    return lambda name: frames(*operations[name]) if name in operations else ()


def _frames(top: str) -> Callable[[str, str], Sequence[Frame]]:
    """Looks up the stack frames that TensorFlow recorded for operations while tracing."""

    @cache
    def debug_info(function: str) -> Any:
        from tensorflow.python.eager import context  # pyright: ignore[reportMissingImports]

        eager: Any = context.context()
        try:
            return eager.get_graph_debug_info(function or top)
        except Exception:  # the function was not traced in this process
            return None

    def frames(function: str, operation: str) -> list[Frame]:
        info = debug_info(function)
        if info is None or operation not in info.name_to_trace_id:
            return []
        trace = info.traces_by_id[info.name_to_trace_id[operation]]
        recorded = [info.frames_by_id[i] for i in reversed(trace.frame_id)]
        lines = [Frame(info.files[x.file_index], x.line, x.func) for x in recorded]
        return [x for x in lines if not any(part in x.file for part in HIDDEN)]

    return frames
