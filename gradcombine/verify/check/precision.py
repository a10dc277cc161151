"""In which precision a step multiplies matrices, and whether it draws random numbers: read from its program."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from gradcombine.types import Tree
from gradcombine.verify.check.retyping import operations
from gradcombine.verify.check.running import WHOLE, Subject
from gradcombine.verify.compare.ulp import rounding_unit


class Program(NamedTuple):
    """Facts read from a program.

    Attributes:
      unit: the unit roundoff of its products of matrices; None where it has none, or cannot be traced.
      draws: whether it draws random numbers that are others in float64.
      random: whether it draws any; True where that is not known.
    """

    unit: float | None = None
    draws: bool = False
    random: bool = True


def read(subject: Subject) -> Program:
    """The program of a step on one batch, in the framework whose arrays it takes or returns."""
    step, params, batch = subject.step(WHOLE), subject.params, subject.batch
    if subject.framework == "torch":
        with suppress(Exception):  # of a step that cannot be looked into
            return _in_torch(step, params, batch)
    traced = subject.program(step, batch)
    if traced is not None:
        found = list(operations(traced.retyped.program.jaxpr))
        products = [x for x in found if x.primitive.name in ("dot_general", "conv_general_dilated")]
        draws = any(x.primitive.name.startswith(("random_bits", "threefry", "rng_")) for x in found)
        unit = _unit(variable.aval.dtype for x in products for variable in x.invars)
        return Program(unit, draws and bool(traced.retyped.problem), draws)
    if "tensorflow" in sys.modules and subject.framework in ("tensorflow", "numpy"):
        with suppress(Exception):  # a step of another framework, or one that cannot be traced
            return _in_tensorflow(step, params, batch)
    return Program()


def _in_torch(step: Any, params: Tree, batch: Tree) -> Program:
    finfo, seen = sys.modules["torch"].finfo, step.read(params, batch)
    unit = max((finfo(x).eps / 2 for x in seen.products), default=None)
    return Program(unit, any(finfo(x).bits < 32 for x in seen.drawn), bool(seen.drawn))


_PRODUCTS = re.compile(r"MatMul|BatchMatMul|Einsum|Conv")


def _in_tensorflow(step: Any, params: Tree, batch: Tree) -> Program:
    tf = sys.modules["tensorflow"]
    graph = tf.function(step).get_concrete_function(params, batch).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    types = [node.attr["T"].type for node in nodes if _PRODUCTS.match(node.op) and node.attr["T"].type]
    draws = any("Random" in node.op for node in nodes)
    return Program(_unit(tf.as_dtype(x).as_numpy_dtype for x in types), draws, draws)


def _unit(dtypes: Any) -> float | None:
    floats = [np.dtype(x) for x in dtypes]
    return max((rounding_unit(x) for x in floats if x.kind in "fcV"), default=None)
