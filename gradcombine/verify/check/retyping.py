"""A JAX program run in float64, whatever it casts to: its operations are bound again, with other dtypes.

A program is traced in its own precision and evaluated operation by operation on float64. Casts between floats, the
accumulation dtypes of products, and the carries of loops become float64 with it; integers, booleans and keys stay as
they are. Constants keep the value that they have in the program's own precision, and random numbers the one that
they are drawn with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Any

import numpy as np

from gradcombine.verify.compare.ulp import kind_of

Arrays = Sequence[Any]

DIVISORS = ContextVar[Callable[[Any], Any]]("divisors", default=lambda operation: 1)
"""By what a division multiplies its divisor in addition."""


class NotWide(Exception):  # noqa: N818 (an answer, not an error)
    """Why something cannot be computed in float64."""


class Retyped:
    """The program of a function of arrays, to be run in float64 by JAX.

    Args:
      function: from a list of arrays to a list of arrays.
      arrays: what it is traced with.

    Attributes:
      program: a ClosedJaxpr, as it was traced.
      problem: why it does not run in float64; empty if it does.
    """

    def __init__(self, function: Callable[[list[Any]], list[Any]], arrays: Arrays) -> None:
        jax = sys.modules["jax"]
        self.program = jax.make_jaxpr(function)(list(arrays))
        self._run = jax.jit(self._evaluated)
        self.problem = ""
        try:
            with wide():
                jax.eval_shape(self._run, self.program.consts, list(arrays))
        except Exception as error:  # of operations that take no float64, and of foreign ones
            self.problem = str(error).strip().partition("\n")[0] or type(error).__name__

    def __call__(self, arrays: Arrays) -> list[Any]:
        """The results for other arrays of these shapes, all floats in float64; to be called within `wide`."""
        return self._run(self.program.consts, list(arrays))

    def scaled(self, arrays: Arrays, place: Callable[[Any], int | None], factors: Arrays) -> list[list[Any]]:
        """For each vector of factors the results where the divisors of these places are multiplied by them."""

        def run(consts: Arrays, arrays: Arrays, times: Any) -> list[Any]:
            token = DIVISORS.set(lambda operation: 1 if (i := place(operation)) is None else times[i])
            try:
                return self._evaluated(consts, arrays)
            finally:
                DIVISORS.reset(token)

        compiled = sys.modules["jax"].jit(run)
        return [compiled(self.program.consts, list(arrays), times) for times in factors]

    def _evaluated(self, consts: Arrays, arrays: Arrays) -> list[Any]:
        jaxpr, jnp = self.program.jaxpr, sys.modules["jax"].numpy
        pairs = zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True)
        entered = [jnp.asarray(x).astype(_wide(variable.aval.dtype)) for variable, x in pairs]
        return _evaluated(jaxpr, entered[: len(consts)], entered[len(consts) :])[0]


@contextmanager
def wide() -> Generator[None]:
    """JAX, if it is imported, with 64-bit types, whose mixing is no error."""
    jax = sys.modules.get("jax")
    with ExitStack() as stack:
        for context in () if jax is None else (jax.enable_x64(True), jax.numpy_dtype_promotion("standard")):
            stack.enter_context(context)
        yield


def operations(jaxpr: Any) -> Iterator[Any]:
    """The operations of a program, those of inner programs after the one that holds them."""
    for operation in jaxpr.eqns:
        yield operation
        for value in operation.params.values():
            values: list[Any] = [*value] if issubclass(type(value), (tuple, list)) else [value]
            for inner in values:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from operations(inner)


class Origin(IntEnum):
    """The origin of a value: constants, random bits, or the arguments."""

    CONSTANT = 0
    DRAWN = 1
    """Random bits and constants: it stays what the program's own precision makes of them."""
    COMPUTED = 2


def _evaluated(
    jaxpr: Any, consts: Arrays, arguments: Arrays, origins: Sequence[Origin] = ()
) -> tuple[list[Any], list[Origin]]:
    """The results of a program for float64 arguments, which are taken for computed ones, and their origins."""
    entering = [*(Origin.COMPUTED for _ in consts), *(origins or (Origin.COMPUTED for _ in arguments))]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], zip([*consts, *arguments], entering, strict=True), strict=True))

    def value(x: Any) -> tuple[Any, Origin]:
        return (_widened(np.asarray(x.val, x.aval.dtype)), Origin.CONSTANT) if hasattr(x, "val") else known[x]

    for operation in jaxpr.eqns:
        name, pairs = operation.primitive.name, [value(x) for x in operation.invars]
        given, of = [x for x, _ in pairs], [x for _, x in pairs]
        if name == "div" and _kind(given[1].dtype) == "float":
            given[1] = given[1] * DIVISORS.get()(operation)
        rule = _RULES.get(name, _bound)
        with operation.ctx.manager:
            if rule is _called:
                made, made_of = _inner(operation)(given, of)
            else:
                origin = Origin.DRAWN if name.startswith(DRAWS) else max(of, default=Origin.CONSTANT)
                drawn = rule is _bound and origin is Origin.DRAWN and bool(operation.outvars)
                made = (_in_its_own if drawn else rule)(operation, given)
                made_of = [origin if rule in _OF_VALUES else Origin.COMPUTED] * len(made)
        known.update(zip(operation.outvars, zip(made, made_of, strict=True), strict=True))
    results = [value(x) for x in jaxpr.outvars]
    return [x for x, _ in results], [x for _, x in results]


DRAWS = "random_bits", "threefry", "rng_", "random_gamma"
"""First letters of operations that draw random numbers."""


def _inner(operation: Any) -> Callable[[Arrays, Sequence[Origin]], tuple[list[Any], list[Origin]]]:
    """The program that an operation calls."""
    params = operation.params
    program = params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
    consts = [_widened(x) for x in getattr(program, "consts", ())]
    return lambda arguments, origins: _evaluated(getattr(program, "jaxpr", program), consts, arguments, origins)


def _closed(program: Any) -> Callable[..., list[Any]]:
    """An inner program as a function of float64 arrays."""
    consts = [_widened(x) for x in getattr(program, "consts", ())]
    jaxpr = getattr(program, "jaxpr", program)
    return lambda *arguments: _evaluated(jaxpr, consts, arguments)[0]


def _bound(operation: Any, arguments: Arrays) -> Arrays:
    primitive = operation.primitive
    if not operation.outvars:  # a print, or a callback that gives nothing back
        return []
    made = primitive.bind(*arguments, **{k: _param(k, v) for k, v in operation.params.items()})
    made = made if primitive.multiple_results else [made]
    for x in made:
        if _is_narrow(x.dtype):
            raise NotWide(f"{primitive.name} computes in {x.dtype} whatever its inputs")
    return made


def _param(name: str, value: Any) -> Any:
    """A parameter of an operation: dtypes and the scalar programs of scatters and reductions are widened."""
    if name == "precision":
        return None  # algorithms of products, which are for one dtype each
    if isinstance(value, np.dtype):
        return _wide(value)
    program = getattr(value, "jaxpr", value)
    if hasattr(program, "eqns"):
        jax = sys.modules["jax"]
        like = [jax.ShapeDtypeStruct(x.aval.shape, _wide(x.aval.dtype)) for x in program.invars]
        made = jax.make_jaxpr(_closed(value))(*like)
        return made.jaxpr if program is value else made
    return value


def _in_its_own(operation: Any, arguments: Arrays) -> Arrays:
    """Runs an operation that reads or draws bits, or rounds to integers, in the dtype that it was written for."""
    pairs = zip(operation.invars, arguments, strict=True)
    narrow = [x.astype(v.aval.dtype) if _is_narrow(v.aval.dtype) else x for v, x in pairs]
    made = operation.primitive.bind(*narrow, **operation.params)
    return [_widened(x) for x in (made if operation.primitive.multiple_results else [made])]


def _cast(operation: Any, arguments: Arrays) -> Arrays:
    """Between floats nothing is rounded; what becomes an integer is rounded as it was."""
    to_float = _kind(operation.params["new_dtype"]) != "integer"
    return (_bound if to_float else _in_its_own)(operation, arguments)


def _called(operation: Any, arguments: Arrays) -> Arrays:
    return _inner(operation)(arguments, ())[0]


def _scan(operation: Any, arguments: Arrays) -> Arrays:
    params = operation.params
    consts, carries = params["num_consts"], params["num_carry"]
    body = _closed(params["jaxpr"])

    def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        made = body(*arguments[:consts], *carry, *xs)
        return made[:carries], made[carries:]

    start, rows = list(arguments[consts : consts + carries]), list(arguments[consts + carries :])
    end, stacked = sys.modules["jax"].lax.scan(
        turn, start, rows, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*end, *stacked]


def _while(operation: Any, arguments: Arrays) -> Arrays:
    params = operation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    goes_on, body = _closed(params["cond_jaxpr"]), _closed(params["body_jaxpr"])

    def more(carry: list[Any]) -> Any:
        return goes_on(*arguments[:first], *carry)[0]

    def turn(carry: list[Any]) -> list[Any]:
        return body(*arguments[first:second], *carry)

    return sys.modules["jax"].lax.while_loop(more, turn, list(arguments[second:]))


def _cond(operation: Any, arguments: Arrays) -> Arrays:
    index, *operands = arguments
    return sys.modules["jax"].lax.switch(index, [_closed(x) for x in operation.params["branches"]], *operands)


def _shard_map(operation: Any, arguments: Arrays) -> Arrays:
    params = operation.params
    body = _closed(params["jaxpr"])

    def on_each(*x: Any) -> tuple[Any, ...]:
        return tuple(body(*x))

    axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    return sys.modules["jax"].shard_map(
        on_each,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        check_vma=params["check_vma"],
        axis_names=axes,
    )(*arguments)


_RULES: dict[str, Callable[[Any, Arrays], Arrays]] = {
    "convert_element_type": _cast,
    "reduce_precision": lambda operation, arguments: arguments,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    **dict.fromkeys(("bitcast_convert_type", "random_gamma", "rng_uniform"), _in_its_own),
    **dict.fromkeys(
        (
            "jit",
            "pjit",
            "closed_call",
            "core_call",
            "checkpoint",
            "remat2",
            "composite",
            "custom_jvp_call",
            "custom_vjp_call",
        ),
        _called,
    ),
}

_OF_VALUES = _bound, _cast, _in_its_own
"""The rules whose results are made of their arguments alone."""


def _kind(dtype: Any) -> str:
    jax = sys.modules["jax"]
    return "integer" if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else kind_of(np.dtype(dtype))


def _wide(dtype: Any) -> Any:
    return {"integer": dtype, "complex": np.dtype(np.complex128)}.get(_kind(dtype), np.dtype(np.float64))


def _is_narrow(dtype: Any) -> bool:
    return _wide(dtype) != dtype


def _widened(x: Any) -> Any:
    return x.astype(_wide(x.dtype)) if _is_narrow(x.dtype) else x
