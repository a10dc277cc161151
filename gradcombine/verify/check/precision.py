"""Reads from a step's program the precision of its matrix products, and whether it draws random numbers."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from gradcombine.types import Tree
from gradcombine.verify.check.retyping import operations
from gradcombine.verify.check.running import ONE_BATCH, Subject
from gradcombine.verify.compare.ulp import rounding_unit


class Program(NamedTuple):
    """Facts read from a program.

    Attributes:
      unit: unit roundoff of the matrix products; None if there are none, or if the step cannot be traced.
      draws: whether it draws random numbers that differ in float64.
      random: whether it draws any random numbers; True if unknown.
    """

    unit: float | None = None
    draws: bool = False
    random: bool = True


def read(subject: Subject) -> Program:
    """Reads the program of a step on one batch, in the framework of its arrays."""
    step, params, batch = subject.step(ONE_BATCH), subject.params, subject.batch
    if subject.framework == "torch":
        with suppress(Exception):  # the step does not run under a dispatch mode
            return _in_torch(step, params, batch)
    traced = subject.program(step, batch)
    if traced is not None:
        equations = list(operations(traced.retyped.program.jaxpr))
        products = [x for x in equations if x.primitive.name in ("dot_general", "conv_general_dilated")]
        draws = any(x.primitive.name.startswith(("random_bits", "threefry", "rng_")) for x in equations)
        unit = _unit(variable.aval.dtype for x in products for variable in x.invars)
        return Program(unit, draws and bool(traced.retyped.problem), draws)
    if "tensorflow" in sys.modules and subject.framework in ("tensorflow", "numpy"):
        with suppress(Exception):  # the step belongs to another framework, or cannot be traced
            return _in_tensorflow(step, params, batch)
    return Program()


def _in_torch(step: Any, params: Tree, batch: Tree) -> Program:
    finfo, observed = sys.modules["torch"].finfo, step.observe(params, batch)
    unit = max((finfo(x).eps / 2 for x in observed.products), default=None)
    return Program(unit, any(finfo(x).bits < 32 for x in observed.drawn), bool(observed.drawn))


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
