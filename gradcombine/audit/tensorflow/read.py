# pyright: standard
"""Takes a graph from a tf.function, a ConcreteFunction or a SavedModel; the compiled program where XLA compiles it."""

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

NOBODYS = (*LIBRARIES, "__autograph_generated_file", "threading.py")
"""Parts of the paths of files that no reader of a report knows."""


def is_function(step: object) -> bool:
    """Whether this is a tf.function, or one that is traced."""
    return attribute(step, "get_concrete_function") is not None or is_traced(step)


def is_traced(step: object) -> bool:
    return all(attribute(step, name) is not None for name in ("structured_input_signature", "captured_inputs"))


class Compiled(NamedTuple):
    """A function for XLA, or what XLA has made of it, as a proto, and the lines of its operations' source."""

    name: str
    hlo: bytes
    lines: Lines


def read_function(step: Any, args: Sequence[Tree], *, optimized: bool) -> Graph | Compiled:
    """Traces a tf.function for its arguments, without running it.

    Args:
      step: a function of ``tf.function``, or a ``ConcreteFunction``, which takes no arguments here.
      args: tensors, ``tf.TensorSpec``, or whatever the function is called with.
      optimized: whether HLO is compiled for this machine, or left as TensorFlow has written it.

    Returns:
      Its graph; with ``jit_compile=True``, its HLO.
    """
    if is_traced(step):
        if args:
            raise invalid("a ConcreteFunction without arguments", f"{len(args)}")
        return of_concrete(step)
    concrete = step.get_concrete_function(*args)
    if "_XlaMustCompile" in (told := concrete.function_def.attr) and told["_XlaMustCompile"].b:
        stage = "optimized_hlo_serialized" if optimized else "hlo_serialized"
        given = _with_defaults(inspect.signature(step.python_function).bind(*args))
        hlo = step.experimental_get_compiler_ir(*given.args, **given.kwargs)(stage=stage)
        return Compiled(_short(_name(concrete)), hlo, _lines(concrete))
    return of_concrete(concrete)


def _with_defaults(given: inspect.BoundArguments) -> inspect.BoundArguments:
    """Tracing takes defaults by itself, and compiling does not; nor does it take specifications beside values."""
    from tensorflow import TensorSpec, nest, zeros

    named = len(given.arguments)
    given.apply_defaults()
    if len(given.arguments) > named:
        for name, x in given.arguments.items():
            given.arguments[name] = nest.map_structure(
                lambda x: zeros(x.shape, x.dtype) if isinstance(x, TensorSpec) else x, x
            )
    return given


def of_concrete(concrete: Any) -> Graph:
    name, results = _name(concrete), [x.name for x in concrete.outputs]
    captured = {inner.op.name: getattr(outer, "device", "") for outer, inner in concrete.graph.captures}
    return Graph(_short(name), concrete.graph.as_graph_def(add_shapes=True), results, _frames(name), captured)


def _name(concrete: Any) -> str:
    return concrete.name.decode() if isinstance(concrete.name, bytes) else str(concrete.name)


def _short(name: str) -> str:
    """Without the number that each trace has of its own."""
    found = re.fullmatch(r"__inference_(.+)_\d+", name)
    return found[1] if found else name


def read_saved(path: Path) -> Iterator[Graph]:
    """The graphs of a SavedModel: that of its signatures, and the functions beside them that write or exchange.

    Raises:
      GradCombineError: a file that is none.
    """
    from google.protobuf.message import DecodeError
    from tensorflow import compat
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel()
    try:
        saved.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise invalid("a SavedModel that is whole", f"{path}: {error}") from None
    if not saved.meta_graphs:
        raise invalid("a SavedModel with a graph", f"{path}, which holds none")
    for meta in saved.meta_graphs:
        whole = Graph(path.parent.name or "saved_model", meta.graph_def)
        yield whole
        for name in whole.roots():
            proto = compat.v1.GraphDef(library=meta.graph_def.library)
            node = proto.node.add(name="call", op=name)
            for argument in next(x for x in proto.library.function if x.signature.name == name).signature.input_arg:
                given = proto.node.add(name=f"argument_{argument.name}", op="Placeholder")
                given.attr["dtype"].type = argument.type
                node.input.append(given.name)
            yield Graph(name, proto)


def _lines(concrete: Any) -> Lines:
    """By the names that XLA gives to operations: those of the calls and loops around them come first."""
    proto, frames = concrete.graph.as_graph_def(), _frames(_name(concrete))
    library = {x.signature.name: x for x in proto.library.function}
    places = dict[str, tuple[str, str]]()

    def enter(nodes: Any, around: str, function: str) -> None:
        for node in nodes:
            places[around + node.name] = function, node.name
            for value in node.attr.values():
                for called in (value.func, *value.list.func):
                    if called.name in library:
                        enter(library[called.name].node_def, f"{around}{node.name}/", called.name)

    enter(proto.node, "", "")
    return lambda name: frames(*places[name]) if name in places else ()


def _frames(top: str) -> Callable[[str, str], Sequence[Frame]]:
    """The lines of source of operations, as TensorFlow kept them while tracing."""

    @cache
    def traces(function: str) -> Any:
        from tensorflow.python.eager import context  # pyright: ignore[reportMissingImports]

        tracing: Any = context.context()
        try:
            return tracing.get_graph_debug_info(function or top)
        except Exception:  # of functions that this process has not traced, nothing is kept
            return None

    def frames(function: str, operation: str) -> list[Frame]:
        kept = traces(function)
        if kept is None or operation not in kept.name_to_trace_id:
            return []
        trace = kept.traces_by_id[kept.name_to_trace_id[operation]]
        found = [kept.frames_by_id[i] for i in reversed(trace.frame_id)]
        lines = [Frame(kept.files[x.file_index], x.line, x.func) for x in found]
        return [x for x in lines if not any(part in x.file for part in NOBODYS)]

    return frames
