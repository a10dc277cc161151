"""In which precision a step multiplies matrices, and whether it draws random numbers: read from its program."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from gradcombine.types import Tree
from gradcombine.verify.steps.running import WHOLE, Step, Subject
from gradcombine.verify.ulp import rounding_unit


class Program(NamedTuple):
    """What a program says of itself.

    Attributes:
      unit: the unit roundoff of its products of matrices; None where it has none, or cannot be traced.
      draws: whether it draws random numbers.
    """

    unit: float | None = None
    draws: bool = False


def read(subject: Subject) -> Program:
    """The program of a step on one batch, in the framework whose arrays it takes or returns."""
    step, params, batch = subject.step(WHOLE), subject.params, subject.batch
    for framework, program in (("jax", _in_jax), ("tensorflow", _in_tensorflow)):
        if framework in sys.modules and subject.framework in (framework, "numpy"):
            try:
                return program(step, params, batch)
            except Exception:  # a step of another framework, or one that cannot be traced
                continue
    return Program()


def with_constants(subject: Subject, dtype: np.dtype) -> Step | None:
    """The step on one batch in float64, its constants rounded to what they are in its own precision.

    ``1 - 0.999`` is another number in float32, by the rounding of 0.999. None where JAX is not there to trace it.
    """
    jax, step = sys.modules.get("jax"), subject.step(WHOLE)
    if jax is None or subject.framework not in ("jax", "numpy"):
        return None
    core = import_module("jax.extend.core")

    def rounded(value: Any) -> Any:
        wide = getattr(value, "dtype", None) == np.float64 or isinstance(value, float)
        return np.asarray(value).astype(dtype).astype(np.float64) if wide else value

    def of(node: Any) -> Any:
        if type(node) in (tuple, list):
            return type(node)(map(of, node))
        if isinstance(node, core.Literal):
            return core.Literal(rounded(node.val), node.aval)
        if isinstance(node, core.ClosedJaxpr):
            return node.replace(jaxpr=of(node.jaxpr), consts=[rounded(x) for x in node.consts])
        if not hasattr(node, "eqns"):
            return node
        inner = [x.replace(invars=of(x.invars), params={k: of(v) for k, v in x.params.items()}) for x in node.eqns]
        return node.replace(eqns=inner)

    def made(params: Tree, batch: Tree) -> Tree:
        program, shapes = jax.make_jaxpr(step, return_shape=True)(params, batch)
        results = jax.jit(core.jaxpr_as_fun(of(program)))(*jax.tree.leaves((params, batch)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return made


def _in_jax(step: Any, params: Tree, batch: Tree) -> Program:
    jax = sys.modules["jax"]
    operations = list(_operations(jax.make_jaxpr(step)(params, batch).jaxpr))
    products = [x for x in operations if x.primitive.name in ("dot_general", "conv_general_dilated")]
    draws = any(x.primitive.name.startswith(("random_bits", "threefry", "rng_")) for x in operations)
    return Program(_unit(variable.aval.dtype for x in products for variable in x.invars), draws)


def _operations(jaxpr: Any) -> Iterator[Any]:
    for operation in jaxpr.eqns:
        yield operation
        for value in operation.params.values():
            values: list[Any] = [*value] if issubclass(type(value), (tuple, list)) else [value]
            for inner in values:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _operations(inner)


_PRODUCTS = re.compile(r"MatMul|BatchMatMul|Einsum|Conv")


def _in_tensorflow(step: Any, params: Tree, batch: Tree) -> Program:
    tf = sys.modules["tensorflow"]
    graph = tf.function(step).get_concrete_function(params, batch).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    types = [node.attr["T"].type for node in nodes if _PRODUCTS.match(node.op) and node.attr["T"].type]
    return Program(_unit(tf.as_dtype(x).as_numpy_dtype for x in types), any("Random" in node.op for node in nodes))


def _unit(dtypes: Any) -> float | None:
    floats = [np.dtype(x) for x in dtypes]
    return max((rounding_unit(x) for x in floats if x.kind in "fcV"), default=None)
