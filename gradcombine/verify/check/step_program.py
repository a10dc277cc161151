"""Reads a step's program: the precision of its products, random numbers, epsilons, and the source line of a defect.

A mean of means is a division by the number of microbatches, or of parts on all devices, which changes with this number;
or an update of `optax.MultiSteps`, which divides by its counter. The divisor of a term of the loss is found by
multiplying each divisor in turn by a factor and observing the term. A narrow accumulator is an addition in a narrow
dtype after the last product. A line is named only if exactly one can be meant.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradcombine.audit.subject import LIBRARIES
from gradcombine.errors import GradCombineError
from gradcombine.types import Tree
from gradcombine.verify.check.leaves import as_floats, flat, is_float_dtype, over, perturbation, rms
from gradcombine.verify.check.retyping import DRAWS, inner, operations, scanned
from gradcombine.verify.check.running import ONE_BATCH, NotFiniteError, NotWide, Result, Split, Subject
from gradcombine.verify.check.step_report import Cause
from gradcombine.verify.compare.ulp import rounding_unit

UNIT64 = rounding_unit(np.dtype(np.float64))


def equations(subject: Subject, split: Split) -> list[Any]:
    """Returns the equations of a division's JAX program, including inner ones; empty if it is unknown."""
    traced = subject.program(subject.step(split), subject.batch)
    return [] if traced is None else list(operations(traced.jaxpr.jaxpr))


def may_be_narrow(subject: Subject, split: Split) -> bool:
    """Whether a division's JAX program has a dtype narrower than float32; True if the program is unknown."""
    found = equations(subject, split)
    return not found or any(_is_narrow(getattr(variable.aval, "dtype", None)) for x in found for variable in x.outvars)


# --- precision and random numbers ---


class Facts(NamedTuple):
    """Facts read from a program.

    Attributes:
      unit: unit roundoff of the matrix products; None if there are none, or if the step cannot be traced.
      differs: whether it draws random numbers that differ in float64.
      draws: whether it may draw random numbers, also outside of JAX, as constants; True if unknown.
    """

    unit: float | None = None
    differs: bool = False
    draws: bool = True


def read(subject: Subject) -> Facts:
    """Reads the program of a step on one batch, in the framework of its arrays."""
    step, params, batch = subject.step(ONE_BATCH), subject.params, subject.batch
    if subject.framework == "torch":
        with suppress(Exception):  # the step does not run under a dispatch mode
            return _in_torch(step, params, batch)
    traced = subject.program(step, batch)
    if traced is not None:
        program = equations(subject, ONE_BATCH)
        products = [x for x in program if x.primitive.name in ("dot_general", "conv_general_dilated")]
        draws = any(x.primitive.name.startswith(DRAWS) for x in program)
        unit = _unit(variable.aval.dtype for x in products for variable in x.invars)
        constants = any(np.size(x) > 1 for x in traced.jaxpr.consts)
        return Facts(unit, draws and bool(traced.problem), draws or constants)
    if "tensorflow" in sys.modules and subject.framework in ("tensorflow", "numpy"):
        with suppress(Exception):  # the step belongs to another framework, or cannot run eagerly
            programs = import_module("gradcombine.verify.check.tensorflow_programs")
            found, is_graph = programs.operations(subject)
            draws = any("Random" in name for name, _ in found)
            unit = _unit(x for name, x in found if x is not None and _PRODUCTS.match(name))
            return Facts(unit, draws, draws or not is_graph)
    return Facts()


def _in_torch(step: Any, params: Tree, batch: Tree) -> Facts:
    finfo, observed = sys.modules["torch"].finfo, step.observe(params, batch)
    unit = max((finfo(x).eps / 2 for x in observed.products), default=None)
    return Facts(unit, any(finfo(x).bits < 32 for x in observed.drawn), bool(observed.drawn))


_PRODUCTS = re.compile(r"MatMul|BatchMatMul|Einsum|Conv")


def _unit(dtypes: Any) -> float | None:
    floats = [np.dtype(x) for x in dtypes]
    return max((rounding_unit(x) for x in floats if x.kind in "fcV"), default=None)


# --- additions in a narrow dtype ---

SUMS = "add", "add_any", "sub", "psum", "psum_invariant", "reduce_scatter"
MOVES = "copy", "reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "pvary", "optimization_barrier"
UPDATES = "integer_pow", "square", "sqrt", "rsqrt", "pow", "sign", "abs", "max", "min", "clamp"
ELEMENTWISE = *SUMS, *MOVES, *UPDATES, "neg", "mul", "div", "select_n", "convert_element_type"
"""Operations between the last products of a step and its result, such as an optimizer's update."""


SCALES, JUMPS = (2.0**-44, 2.0**-24, 2.0**-6), (2.0**-10, 2.0**-10, 0.5)
"""Relative sizes of perturbations, and least relative changes of elements that depend on a sign or on rounding."""


def run_unread(subject: Subject, split: Split, batch: Tree) -> Result:
    """Runs a division in float64, in a framework whose programs cannot be read.

    Raises:
      NotWide: if it does not run in float64, or rounds to a narrower dtype internally: tiny changes of the parameters
        then change its result by too much or not at all.
    """
    scales = [*SCALES]
    zero = 0.0 if any(np.any(x) for _, x in subject.param_leaves) else 2.0**-6
    try:
        wide = subject.run(split, batch, wide=True)
        largest = max(rms(x) for x in wide.floats)
        rounding = 2**6 * UNIT64 * largest
        if subject.returns_params:  # a change is the difference of parameters, which are rounded
            size = max((rms(as_floats(x)) for _, x in subject.param_leaves), default=0)
            rounding += 4 * UNIT64 * size
            scales[0] *= min(max(over(size, largest), 1), 2.0**14)
        perturbed = [subject.run(split, batch, True, noise=perturbation(0, scale, zero)) for scale in scales]
    except NotFiniteError as error:
        raise NotWide(f"{error.path} is not finite in float64, or at slightly different parameters") from None
    columns = zip(wide.floats, *(x.floats for x in perturbed), strict=True)
    for name, (base, *others) in zip(subject.names, columns, strict=True):
        # An update whose gradient is only rounding, such as Adam's of a key bias of attention, jumps in any precision.
        jumps = np.any([np.abs(x - base) > y * np.abs(base) for x, y in zip(others, JUMPS, strict=True)], axis=0)
        distances = [rms((x - base) * ~jumps) for x in others]
        for j in range(len(scales) - 1):
            expected = distances[j + 1] * scales[j] / scales[j + 1]
            if distances[j] > 2**10 * expected + rounding or (distances[j] == 0 and expected > rounding):
                raise NotWide(f"the step rounds to a dtype narrower than float64 internally (leaf {name})")
    return wide


def narrow_sums(subject: Subject, split: Split) -> tuple[list[Any], list[Any]]:
    """Returns the additions in dtypes narrower than float32 that only elementwise operations follow, and their terms.

    The terms are the other operations with narrow results at the end of a step, such as products and casts.
    """
    traced, found = subject.program(subject.step(split), subject.batch), list[Any]()
    if traced is not None:
        jaxpr = traced.jaxpr.jaxpr
        _follow(jaxpr, range(len(jaxpr.outvars)), found)
    narrow = [x for x in found if all(_is_narrow(variable.aval.dtype) for variable in x.outvars)]
    return [x for x in narrow if x.primitive.name in SUMS], [x for x in narrow if x.primitive.name not in SUMS]


def rounded_sums(subject: Subject, split: Split) -> tuple[str, list[Result]]:
    """Returns the dtype of narrow additions, and the results in float64 with their terms and with both rounded to it.

    The dtype is empty if there are none, and the list if the step does not run in float64.
    """
    if subject.framework == "torch":
        return import_module("gradcombine.verify.check.torch_observer").rounded_sums(subject, split)
    sums, terms = narrow_sums(subject, split)
    if not sums:
        return "", []
    results = list[Result]()
    with suppress(NotWide, NotFiniteError):
        results = subject.evaluated(
            split, lambda program, leaves: [program.rounded(leaves, x) for x in (terms, [*terms, *sums])]
        )
    return str(sums[0].outvars[0].aval.dtype), results


def _follow(jaxpr: Any, outputs: Iterable[int], found: list[Any]) -> set[int]:
    """Adds the operations that end in some outputs to ``found``, back to the last ones that are not elementwise.

    Returns:
      The indices of the inputs that it reaches.
    """
    reached = {id(jaxpr.outvars[i]) for i in outputs}
    for x in reversed(jaxpr.eqns):
        results = [i for i, variable in enumerate(x.outvars) if id(variable) in reached]
        if not results:
            continue
        inputs, inner_programs = set[int](), [*inner(x)]
        if not inner_programs:
            found.append(x)
        if x.primitive.name in ELEMENTWISE:
            sizes = {y.aval.size for y in x.outvars}
            inputs = {i for i, y in enumerate(x.invars) if y.aval.size in sizes}
        elif x.primitive.name in ("scan", "while", "cond"):
            for body, first, carried in _bodies(x):
                inside = _follow(body, [i for i in results if i < carried], found)
                inputs |= {first + i for i in inside if first + i < len(x.invars)}
        else:
            for body in inner_programs:
                if (len(body.invars), len(body.outvars)) == (len(x.invars), len(x.outvars)):
                    inputs |= _follow(body, results, found)
        reached |= {id(x.invars[i]) for i in inputs}
    return {i for i, variable in enumerate(jaxpr.invars) if id(variable) in reached}


def _bodies(x: Any) -> Iterator[tuple[Any, int, int]]:
    """Yields a control flow operation's bodies, the index of their first argument, and how many results they carry."""
    params = x.params
    if x.primitive.name == "scan":
        yield params["jaxpr"].jaxpr, 0, scanned(params)[1]
    elif x.primitive.name == "while":
        yield params["body_jaxpr"].jaxpr, params["cond_nconsts"], len(x.outvars)
    else:
        for branch in params["branches"]:
            yield branch.jaxpr, 1, len(x.outvars)


# --- epsilons ---

SMALL = 1e-2
"""Upper bound of epsilons: smaller constants that are added, or are an operand of a maximum."""


def other_constants(subject: Subject, split: Split) -> str:
    """Describes epsilons that differ between one batch and a division; empty if none do or a program is unknown."""
    one, divided = (_epsilons(subject, x) for x in (ONE_BATCH, split))
    only_one, only_divided = sorted(one - divided), sorted(divided - one)
    # An epsilon that only one of the programs has may be a guard.
    if not only_one or not only_divided:
        return ""
    first, second = (", ".join(f"{x:g}" for x in values) for values in (only_one, only_divided))
    return f"constants: {first} in one batch but {second} in {split}, a difference that rounding may hide"


def _epsilons(subject: Subject, split: Split) -> set[float]:
    constants = [
        float(x.val)
        for operation in equations(subject, split)
        if operation.primitive.name in ("add", "max")
        for x in operation.invars
        if hasattr(x, "val") and getattr(x.val, "ndim", 0) == 0 and "float" in x.aval.dtype.name
    ]
    return {float(f"{x:.6g}") for x in constants if 0 < x < SMALL}


# --- source lines ---

BY_NUMBER = "divided by the number of"
"""Marks a detail that blames a division by the number of microbatches or devices."""

Line: TypeAlias = tuple[str, int]

NOT_OF_USERS = (*LIBRARIES, "/gradcombine/verify/", "/lib/python3")


def line_of(cause: Cause, detail: str, subject: Subject, split: Split) -> str:
    """Returns the file and line of a cause, as "step.py:12"; empty if there is no line, or several."""
    shapes = {x.shape for _, x in subject.param_leaves}
    lines = set[Line]()
    if cause is Cause.MEAN_OF_MEANS or (cause is Cause.SCALED and BY_NUMBER in detail):
        lines = _divided(subject, split, shapes) or _divided(subject, split, {()}) or _averaged(subject, split)
    elif cause is Cause.PRECISION:
        written = [x for x in narrow_sums(subject, split)[0] if x.primitive.name == "add"]  # add_any is of derivatives
        lines = {line for x in written for line in _users_line(x)}
    return format_line(*lines.pop()) if len(lines) == 1 else ""


def dividing(subject: Subject, split: Split, terms: Sequence[Sequence[np.ndarray]]) -> str:
    """Returns the lines that divide these terms of a division's result; empty unless there is one line per term.

    Lines that divide by a computed number are preferred to those that divide by a constant.
    """
    divisions = [x for x in equations(subject, split) if x.primitive.name == "div"]
    computed = {line for x in divisions if not hasattr(x.invars[1], "val") for line in _users_line(x)}
    lines = [*dict.fromkeys(line for x in divisions for line in _users_line(x))]
    indices = {line: i for i, line in enumerate(lines)}

    def of_line(operation: Any) -> int | None:
        return indices.get(next(_users_line(operation), ("", 0)))

    factors = np.ones((1 + len(lines), len(lines))) + STEP * np.eye(1 + len(lines), len(lines), -1)
    try:
        results = subject.evaluated(split, lambda program, leaves: program.scaled(leaves, of_line, factors.tolist()))
    except (NotWide, NotFiniteError):
        return ""
    base, *scaled = [flat(x.floats) for x in results]
    parts = [flat(x) for x in terms]
    matrix = np.stack([*parts, base - np.sum(parts, axis=0)], axis=1)
    lines_of: list[list[Line]] = [[] for _ in parts]
    for line, result in zip(lines, scaled, strict=True):
        change = (base - result) / STEP  # the sum of the terms that this line divides
        coefficients, *_ = np.linalg.lstsq(matrix, change)
        if np.linalg.norm(matrix @ coefficients - change) <= 1e-3 * np.linalg.norm(change):
            for of_term, a in zip(lines_of, coefficients, strict=False):
                if a > 0.5:
                    of_term.append(line)
    chosen = [[x for x in of_term if x in computed] or of_term for of_term in lines_of]
    return " and ".join(dict.fromkeys(format_line(*x[0]) for x in chosen)) if {*map(len, chosen)} == {1} else ""


STEP = 2.0**-20
"""Relative change of a divisor."""


def format_line(file: str, line: int) -> str:
    """Formats a line as "file:line", relative to the working directory if possible."""
    path = Path(file).resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def _divided(subject: Subject, split: Split, shapes: set[tuple[int, ...]]) -> set[Line]:
    """Returns lines that divide by the number of parts, in this division and in another one if possible."""
    lines = set(_divisions(equations(subject, split), split, shapes))
    others = (Split(k, split.devices) for k in (2, 4, 3, 5) if k != split.microbatches)
    other = next((x for x in others if subject.examples % (x.microbatches * x.devices) == 0), None)
    if other is not None:
        with suppress(GradCombineError):  # make_step may not accept this number
            lines &= set(_divisions(equations(subject, other), other, shapes))
    return lines


def _averaged(subject: Subject, split: Split) -> set[Line]:
    """Returns lines that update `optax.MultiSteps` more often than in one batch, or in a loop of several iterations."""
    one, program = (equations(subject, x) for x in (ONE_BATCH, split))
    loops = [x for x in program if x.primitive.name == "scan" and x.params["length"] > 1]
    looped = [x for loop in loops for x in operations(loop.params["jaxpr"].jaxpr)]
    in_one, in_division = (Counter(_multi_steps(x)) for x in (one, program))
    return set(_multi_steps(looped)) | {line for line, count in in_division.items() if count > in_one[line]}


def _multi_steps(program: Sequence[Any]) -> Iterator[Line]:
    for x in program:  # optax traces its branches separately: the user's frame is that of the conditional
        within = operations(SimpleNamespace(eqns=[x]))
        if _is_of_multi_steps(x) and any(y.primitive.name == "div" and _is_of_multi_steps(y) for y in within):
            yield from _users_line(x)


def _is_of_multi_steps(equation: Any) -> bool:
    """Whether an operation is written in `optax.MultiSteps`, not in an optimizer that it calls."""
    file = next((frame.file_name for frame in _frames(equation) if "/jax/_src/" not in frame.file_name), "")
    return MULTI_STEPS.search(file) is not None


MULTI_STEPS = re.compile(r"/optax/(transforms|_src)/_?(accumulation|accumulating|wrappers)\.py$")
"""Files of `optax.MultiSteps`, which contain no other division."""


def _divisions(program: Sequence[Any], split: Split, shapes: set[tuple[int, ...]]) -> Iterator[Line]:
    numbers = {split.microbatches, split.devices, split.microbatches * split.devices} - {1}
    for x in program:
        if x.primitive.name not in ("div", "mul") or x.outvars[0].aval.shape not in shapes:
            continue
        for operand in x.invars[1:] if x.primitive.name == "div" else x.invars:
            value = getattr(operand, "val", None)
            if value is None or np.shape(value) != () or np.iscomplexobj(value):
                continue
            if not np.isfinite(number := float(value)) or number == 0:
                continue
            if any(np.isclose(number if x.primitive.name == "div" else 1 / number, n, rtol=1e-2) for n in numbers):
                yield from _users_line(x)


def _is_narrow(dtype: Any) -> bool:
    is_float = issubclass(type(dtype), np.dtype) and is_float_dtype(dtype)  # not that of a random key
    return is_float and rounding_unit(np.dtype(dtype)) > rounding_unit(np.dtype(np.float32))


AT = "at "


def scope_of(equation: Any) -> str:
    """Returns the name of a scope that preserves the user's line when an operation is bound again."""
    return next((f"{AT}{file}:{line}" for file, line in _users_line(equation)), "bound")


def _users_line(equation: Any) -> Iterator[Line]:
    for scope in equation.source_info.name_stack.stack:
        if (name := getattr(scope, "name", "")).startswith(AT):
            file, _, line = name.removeprefix(AT).rpartition(":")
            yield file, int(line)
            return
    for frame in _frames(equation):
        if not any(part in frame.file_name for part in NOT_OF_USERS):
            yield frame.file_name, frame.line_num
            return


def _frames(equation: Any) -> Sequence[Any]:
    traceback = equation.source_info.traceback
    return [] if traceback is None else traceback.frames
