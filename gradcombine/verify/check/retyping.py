"""Runs a JAX program in float64, regardless of its casts, by binding its operations again with other dtypes.

A program is traced in its native precision and evaluated operation by operation in float64. Casts between floats,
accumulation dtypes of products and carries of loops become float64; integers, booleans and keys are unchanged.
Constants and random numbers keep the values that they have in the native precision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.types import Tree
from gradcombine.verify.check.leaves import NUMBERS, flattened, is_present
from gradcombine.verify.compare.ulp import kind_of

Arrays = Sequence[Any]

DIVISORS = ContextVar[Callable[[Any], Any]]("divisors", default=lambda operation: 1)
"""Function of an equation that returns a factor for the divisor of a division."""

ROUNDED = ContextVar[Collection[int]]("rounded", default=())
"""Identities of the equations whose results are rounded to their own dtype."""


class NotWide(Exception):  # noqa: N818 (an answer, not an error)
    """Raised with the reason why something cannot be computed in float64."""


class Traced:
    """JAX program of a function of leaves that returns a tree.

    Args:
      function: from a list of leaves to a tree; leaves may be other objects than arrays.
      leaves: example arguments for tracing.

    Attributes:
      jaxpr: the traced ClosedJaxpr, from arrays to arrays.
    """

    _structure: tree.Structure

    def __init__(self, function: Callable[[list[Any]], Tree], leaves: Sequence[Any]) -> None:
        self._inputs, self._outputs, self._results = inputs_among(leaves), list[int](), list[Any]()

        def run(arrays: Arrays) -> list[Any]:
            results, self._structure = flattened(function(with_inputs(leaves, arrays)))
            self._outputs = [i for i, x in enumerate(results) if is_present(x)]
            self._results = [None if i in self._outputs else x for i, x in enumerate(results)]
            return [results[i] for i in self._outputs]

        self.jaxpr = sys.modules["jax"].make_jaxpr(run)(self.arrays(leaves))

    def arrays(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the arrays among the arguments of the function."""
        return [leaves[i] for i in self._inputs]

    def tree(self, arrays: Arrays) -> Tree:
        """Builds the result of the function from the arrays that the program returned."""
        leaves = list(self._results)
        for i, x in zip(self._outputs, arrays, strict=True):
            leaves[i] = x
        return tree.unflatten(self._structure, leaves)


def inputs_among(leaves: Sequence[Any]) -> list[int]:
    """Returns the indices of the arrays; numbers, functions and names are constants of a program."""
    return [i for i, x in enumerate(leaves) if is_present(x) and not isinstance(x, NUMBERS)]


def with_inputs(leaves: Sequence[Any], arrays: Arrays) -> list[Any]:
    """Returns the leaves with other arrays."""
    replaced = list(leaves)
    for i, x in zip(inputs_among(leaves), arrays, strict=True):
        replaced[i] = x
    return replaced


class Program(Traced):
    """`Traced` program that runs in float64.

    Attributes:
      problem: the reason why it does not run in float64; empty if it does.
    """

    def __init__(self, function: Callable[[list[Any]], Tree], leaves: Sequence[Any]) -> None:
        super().__init__(function, leaves)
        jax = sys.modules["jax"]
        self._run = jax.jit(self._evaluate)
        self.problem = ""
        try:
            with wide():  # with the dtypes of the float64 run, which is then not traced again
                like = [
                    jax.ShapeDtypeStruct(x.shape, _wide(x.dtype), sharding=getattr(x, "sharding", None))
                    for x in self.arrays(leaves)
                ]
                jax.eval_shape(self._run, self.jaxpr.consts, like)
        except Exception as error:  # operations without float64 support, and foreign ones, may raise anything
            self.problem = str(error).strip().partition("\n")[0] or type(error).__name__

    def __call__(self, leaves: Sequence[Any]) -> Tree:
        """Runs the program in float64 on leaves of the traced shapes; to be called within `wide`."""
        return self.tree(self._run(self.jaxpr.consts, self.arrays(leaves)))

    def scaled(
        self, leaves: Sequence[Any], index: Callable[[Any], int | None], factors: Sequence[Sequence[float]]
    ) -> list[Tree]:
        """Runs the program once per vector of factors, multiplying the divisor of each division by one of them.

        Args:
          index: from a division to the index of its factor, or None for no factor.
        """

        def run(consts: Arrays, arrays: Arrays, vector: Any) -> list[Any]:
            def factor(operation: Any) -> Any:
                return 1 if (i := index(operation)) is None else vector[i]

            with _set(DIVISORS, factor):
                return self._evaluate(consts, arrays)

        compiled, arrays = sys.modules["jax"].jit(run), self.arrays(leaves)
        return [self.tree(compiled(self.jaxpr.consts, arrays, np.array(vector))) for vector in factors]

    def rounded(self, leaves: Sequence[Any], equations: Sequence[Any]) -> Tree:
        """Runs the program in float64, but rounds the results of these equations to their own dtype."""

        def run(consts: Arrays, arrays: Arrays) -> list[Any]:
            with _set(ROUNDED, set(map(id, equations))):
                return self._evaluate(consts, arrays)

        return self.tree(sys.modules["jax"].jit(run)(self.jaxpr.consts, self.arrays(leaves)))

    def _evaluate(self, consts: Arrays, arrays: Arrays) -> list[Any]:
        jaxpr, jnp = self.jaxpr.jaxpr, sys.modules["jax"].numpy
        pairs = zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True)
        inputs = [jnp.asarray(x).astype(_wide(variable.aval.dtype)) for variable, x in pairs]
        return _evaluate(jaxpr, inputs[: len(consts)], inputs[len(consts) :])[0]


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Generator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def wide(enabled: bool = True) -> Generator[None]:
    """Enables 64-bit types and standard dtype promotion in JAX, if it is imported."""
    jax = sys.modules.get("jax")
    if jax is None or not enabled:
        yield
        return
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def mapped(params: Any, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
    """Maps a function like the shard_map with these parameters, but for its results."""
    axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    shared = {name: params[name] for name in ("mesh", "in_specs", "check_vma")}
    return sys.modules["jax"].shard_map(function, out_specs=out_specs, axis_names=axes, **shared)


def operations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a program, each followed by those of its inner programs."""
    for operation in jaxpr.eqns:
        yield operation
        for program in inner(operation):
            yield from operations(program)


def inner(operation: Any) -> Iterator[Any]:
    """Yields the inner programs of an equation."""
    for value in operation.params.values():
        for program in [*value] if issubclass(type(value), (tuple, list)) else [value]:
            program = getattr(program, "jaxpr", program)
            if hasattr(program, "eqns"):
                yield program


class Origin(IntEnum):
    """Origin of a value: constants, random bits, or arguments."""

    CONSTANT = 0
    DRAWN = 1
    """Computed from random bits and constants, in native precision."""
    COMPUTED = 2


def _evaluate(
    jaxpr: Any, consts: Arrays, arguments: Arrays, origins: Sequence[Origin] = ()
) -> tuple[list[Any], list[Origin]]:
    """Evaluates a program on float64 arguments; returns its results and their origins.

    Args:
      origins: of the arguments; empty: all are computed.
    """
    entering = [*(Origin.COMPUTED for _ in consts), *(origins or (Origin.COMPUTED for _ in arguments))]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], zip([*consts, *arguments], entering, strict=True), strict=True))

    def read(x: Any) -> tuple[Any, Origin]:
        return (_widened(np.asarray(x.val, x.aval.dtype)), Origin.CONSTANT) if hasattr(x, "val") else known[x]

    for operation in jaxpr.eqns:
        name, pairs = operation.primitive.name, [read(x) for x in operation.invars]
        operands, operand_origins = [x for x, _ in pairs], [x for _, x in pairs]
        if name == "div" and _kind(operands[1].dtype) == "float":
            operands[1] = operands[1] * DIVISORS.get()(operation)
        rule = _RULES.get(name, _bind)
        with operation.ctx.manager:
            if name in CALLS:
                program = operation.params.get("call_jaxpr") or operation.params["jaxpr"]
                results, result_origins = _evaluate_inner(program, operands, operand_origins)
            else:
                origin = Origin.DRAWN if name.startswith(DRAWS) else max(operand_origins, default=Origin.CONSTANT)
                if origin is Origin.DRAWN and name in SUMS:
                    origin = Origin.COMPUTED
                drawn = rule is _bind and origin is Origin.DRAWN and bool(operation.outvars)
                results = (_bind_native if drawn else rule)(operation, operands)
                result_origins = [origin if rule in _OF_VALUES else Origin.COMPUTED] * len(results)
        if id(operation) in ROUNDED.get():
            results = [_rounded(x, v.aval.dtype) for v, x in zip(operation.outvars, results, strict=True)]
        known.update(zip(operation.outvars, zip(results, result_origins, strict=True), strict=True))
    outputs = [read(x) for x in jaxpr.outvars]
    return [x for x, _ in outputs], [x for _, x in outputs]


DRAWS = "random_bits", "threefry", "rng_", "random_gamma"
"""Prefixes of primitives that draw random numbers."""

SUMS = "reduce_sum", "cumsum", "dot_general"
"""Primitives whose sums of random numbers, such as drawn weights of examples, may differ between divisions."""


CUSTOM_CALLS = "custom_jvp_call", "custom_vjp_call"
CALLS = "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "composite", *CUSTOM_CALLS
"""Primitives that call an inner program."""


def _evaluate_inner(program: Any, arguments: Arrays, origins: Sequence[Origin] = ()) -> tuple[list[Any], list[Origin]]:
    consts = [_widened(x) for x in getattr(program, "consts", ())]
    return _evaluate(getattr(program, "jaxpr", program), consts, arguments, origins)


def _closed(program: Any) -> Callable[..., list[Any]]:
    """Returns an inner program as a function of float64 arrays."""
    return lambda *arguments: _evaluate_inner(program, arguments)[0]


def _bind(operation: Any, arguments: Arrays) -> Arrays:
    primitive = operation.primitive
    if not operation.outvars:  # a print, or a callback without results
        return []
    results = primitive.bind(*arguments, **{k: _param(k, v) for k, v in operation.params.items()})
    results = results if primitive.multiple_results else [results]
    for x in results:
        if _is_narrow(x.dtype):
            raise NotWide(f"{primitive.name} computes in {x.dtype} for float64 inputs")
    return results


def _param(name: str, value: Any) -> Any:
    """Widens a parameter of an operation, if it is a dtype or the scalar program of a scatter or reduction."""
    if name == "precision":
        return None  # product algorithms exist for one dtype each
    if isinstance(value, np.dtype):
        return _wide(value)
    program = getattr(value, "jaxpr", value)
    if hasattr(program, "eqns"):
        jax = sys.modules["jax"]
        like = [jax.ShapeDtypeStruct(x.aval.shape, _wide(x.aval.dtype)) for x in program.invars]
        widened = jax.make_jaxpr(_closed(value))(*like)
        return widened.jaxpr if program is value else widened
    return value


def _bind_native(operation: Any, arguments: Arrays) -> Arrays:
    """Runs an operation that reads or draws bits, or rounds to integers, in its native dtype."""
    pairs = zip(operation.invars, arguments, strict=True)
    narrow = [x.astype(v.aval.dtype) if _is_narrow(v.aval.dtype) else x for v, x in pairs]
    results = operation.primitive.bind(*narrow, **operation.params)
    return [_widened(x) for x in (results if operation.primitive.multiple_results else [results])]


def _cast(operation: Any, arguments: Arrays) -> Arrays:
    """Drops casts between floats; casts to integers round as in native precision."""
    to_float = _kind(operation.params["new_dtype"]) != "integer"
    return (_bind if to_float else _bind_native)(operation, arguments)


def scanned(params: Any) -> tuple[int, int]:
    """Returns the numbers of constants and of carried arrays of a scan."""
    if "num_carry" in params:  # before JAX 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts.vals), len(carry.vals)


def _scan(operation: Any, arguments: Arrays) -> Arrays:
    params = operation.params
    consts, carries = scanned(params)
    body = _closed(params["jaxpr"])

    def iteration(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*arguments[:consts], *carry, *xs)
        return results[:carries], results[carries:]

    init, xs = list(arguments[consts : consts + carries]), list(arguments[consts + carries :])
    carry, ys = sys.modules["jax"].lax.scan(
        iteration, init, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys]


def _while(operation: Any, arguments: Arrays) -> Arrays:
    params = operation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    condition, body = _closed(params["cond_jaxpr"]), _closed(params["body_jaxpr"])

    def holds(carry: list[Any]) -> Any:
        return condition(*arguments[:first], *carry)[0]

    def iteration(carry: list[Any]) -> list[Any]:
        return body(*arguments[first:second], *carry)

    return sys.modules["jax"].lax.while_loop(holds, iteration, list(arguments[second:]))


def _cond(operation: Any, arguments: Arrays) -> Arrays:
    index, *operands = arguments
    return sys.modules["jax"].lax.switch(index, [_closed(x) for x in operation.params["branches"]], *operands)


def _shard_map(operation: Any, arguments: Arrays) -> Arrays:
    params = operation.params
    body = _closed(params["jaxpr"])

    def on_device(*x: Any) -> tuple[Any, ...]:
        return tuple(body(*x))

    return mapped(params, on_device, params["out_specs"])(*arguments)


def _linear_solve(operation: Any, arguments: Arrays) -> Arrays:
    """Solves as the program does; its rules for derivatives, which JAX has applied already, are for other dtypes."""
    lengths, solve = operation.params["const_lengths"], operation.params["jaxprs"].solve
    first = lengths.matvec + lengths.vecmat
    return _closed(solve)(*arguments[first : first + lengths.solve], *arguments[sum(lengths) :])


_RULES: dict[str, Callable[[Any, Arrays], Arrays]] = {
    "convert_element_type": _cast,
    "reduce_precision": lambda operation, arguments: arguments,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_linear_solve": _linear_solve,
    **dict.fromkeys(("bitcast_convert_type", "random_gamma", "rng_uniform"), _bind_native),
}

_OF_VALUES = _bind, _cast, _bind_native
"""Rules whose results depend on the operands only."""


def _kind(dtype: Any) -> str:
    jax = sys.modules["jax"]
    return "integer" if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else kind_of(np.dtype(dtype))


def _wide(dtype: Any) -> Any:
    return {"integer": dtype, "complex": np.dtype(np.complex128)}.get(_kind(dtype), np.dtype(np.float64))


def _is_narrow(dtype: Any) -> bool:
    return _wide(dtype) != dtype


def _rounded(x: Any, dtype: Any) -> Any:
    """Rounds to a narrower dtype; XLA removes pairs of casts, and compiles lax.reduce_precision slowly."""
    return sys.modules["jax"].lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


def _widened(x: Any) -> Any:
    return x.astype(_wide(x.dtype)) if _is_narrow(x.dtype) else x
