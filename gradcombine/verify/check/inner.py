"""Finds the gradient that reaches an optimizer inside the JAX program of a step that returns new parameters.

The programs of one batch and of a division end with the same optimizer, i.e. with the same operations on values in the
shapes of the parameters, with the same constant operands, so a division by the number of microbatches comes before it.
The inputs of these last operations include the gradient: if the division's values replace them, one batch's program
returns the division's result. A step that is cut off there returns gradients, and is explained as such.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from itertools import takewhile
from math import gcd
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.types import Tree
from gradcombine.verify.check.case import Case, accounts_for
from gradcombine.verify.check.leaves import array_of, change, changed, perturbation
from gradcombine.verify.check.measure import FLOAT32_UNIT, SAMPLES, TIMES, UNIT64
from gradcombine.verify.check.running import ONE_BATCH, NotFiniteError, NotWide, Split, Subject
from gradcombine.verify.check.standard import Standard
from gradcombine.verify.check.step_program import scope_of

CUTS = 2
"""Number of points at which a step is cut off; the earliest ones."""


def before_update(standard: Standard, case: Case) -> Iterator[tuple[Standard, list[int]]]:
    """Yields the step up to the gradients that reach the optimizer, for all cuts that predict the result.

    Each comes with the leaves of the state that differ, but do not depend on these gradients, such as running
    statistics. Cuts without such leaves come first.
    """
    subject = standard.subject
    if subject.framework == "torch":
        inner = import_module("gradcombine.verify.check.torch_steps").before_update(standard, case)
        yield from ((x, []) for x in inner)
        return
    try:
        one, divided = (_recorded(standard, split) for split in (ONE_BATCH, case.split))
        values, divided_values = (subject.floats_of(x.values(), subject.batch, case.wide) for x in (one, divided))
    except Exception:  # the step cannot be traced, or not run like this
        return
    count, partial_cuts = len(subject.param_leaves), list[tuple[int, list[int]]]()
    for length in _lengths(one, divided, [x.shape for _, x in subject.param_leaves]):
        counterparts = dict(zip(one.inputs(length), divided.inputs(length), strict=True))
        if all(np.array_equal(values[i], divided_values[j]) for i, j in counterparts.items()):
            continue
        replaced = [divided_values[counterparts[i]] if i in counterparts else x for i, x in enumerate(values)]
        chosen = np.array([i in counterparts for i in range(len(values))])
        try:
            predicted = subject.run(ONE_BATCH, (subject.batch, replaced, chosen), case.wide, one.rest).floats
            moved = np.flatnonzero(standard.shares(predicted, standard.best.floats, case.wide)[:count] > 1).tolist()
            if accounts_for(standard, case, predicted, 1, range(count)):
                yield Standard(_up_to(subject, length), standard.unit), []
            elif accounts_for(standard, case, predicted, 1, moved):
                partial_cuts.append((length, [i for i in range(count) if i not in moved]))
        except (NotWide, NotFiniteError, ValueError):
            continue
    for length, others in sorted(partial_cuts, key=lambda x: len(x[1])):
        with suppress(NotFiniteError, ValueError):
            yield Standard(_up_to(subject, length), standard.unit), others


def updated_in_sequence(
    standard: Standard, case: Case, batches: Sequence[Sequence[int]], weights: Sequence[float]
) -> Iterator[list[np.ndarray]]:
    """Yields the change of the parameters by one update per microbatch, for the earliest cuts of one batch's program.

    Each update uses the gradient of its microbatch, at the parameters after the last update, times its weight.

    Raises:
      Exception: of any type, if the step cannot be traced by JAX, or not run like this.
    """
    subject, one = standard.subject, _recorded(standard, ONE_BATCH)
    start = subject.start
    for length in _gradients(one, [x.shape for x in start]):
        indices, state, counts = one.inputs(length), start, None
        for rows, weight in zip(batches, weights, strict=True):
            batch = subject.rows(rows)
            values = [array_of(x) for x in subject.call(one.values(), batch, case.wide, start=state, counts=counts)[0]]
            chosen = np.array([i in indices for i in range(len(values))])
            replaced = [np.asarray(x * weight if y else x) for x, y in zip(values, chosen, strict=True)]
            arguments = (batch, replaced, chosen), case.wide, one.rest
            result = subject.run(ONE_BATCH, *arguments, start=state, counts=counts)
            state = [changed(x, y) for x, y in zip(state, result.floats, strict=False)]
            counts = result.integers
        yield [change(x, y) for x, y in zip(state, start, strict=True)]


def _gradients(one: Recorded, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns numbers of last operations whose inputs have the shapes of the parameters, without their moments.

    Moments have the same shapes, so a state has a multiple of them. Numbers in a state, such as a rate, are ignored if
    there is no such length with them.
    """
    by_inputs: dict[tuple[int, ...], int] = {}
    for least in (0, 1):
        counts = Counter(shape for shape in shapes if len(shape) >= least)
        common = gcd(*counts.values())
        wanted = [Counter({x: n // d for x, n in counts.items()}) for d in range(1, common + 1) if common % d == 0]
        for length in range(len(one.operations), 0, -1) if not by_inputs else ():
            inputs = one.inputs(length)
            if Counter(shape for shape in one.shapes(inputs) if len(shape) >= least) in wanted:
                by_inputs.setdefault(inputs, length)
    return list(by_inputs.values())[:CUTS]


HIDDEN = 16
"""Least difference of gradients, in units of rounding, at which a step that hides it (Adam's first one) is examined."""


def hidden_by_update(standard: Standard, split: Split) -> Iterator[tuple[Standard, bool]]:
    """Yields the step up to gradients at the optimizer that differ beyond rounding, for the earliest cuts.

    Each comes with whether the optimizer may begin with a division of the gradients by a computed number.
    """
    subject = standard.subject
    if subject.framework == "torch":
        yield from import_module("gradcombine.verify.check.torch_steps").hidden_by_update(standard, split)
        return
    # In a narrow dtype, rounding would look like a difference.
    wide = standard.wide is not None and standard.unit > FLOAT32_UNIT
    try:
        one, divided = (_recorded(standard, x) for x in (ONE_BATCH, split))
        lengths = _lengths(one, divided, [x.shape for _, x in subject.param_leaves])[:CUTS]
        indices, divided_indices = (x.inputs(*lengths) for x in (one, divided))
        functions = [x.values(*lengths) for x in (one, divided)]
        values, divided_values = (subject.floats_of(x, subject.batch, wide) for x in functions)
        noise_of = [perturbation(seed, 2 * (UNIT64 if wide else standard.unit)) for seed in range(SAMPLES)]
        perturbed = [subject.floats_of(functions[0], subject.batch, wide, x) for x in noise_of]
    except Exception:  # the step cannot be traced, or not run like this
        return
    standard.gradient_examined = bool(lengths)
    columns = zip(*perturbed, values, strict=True)
    noise = [TIMES * max(float(np.linalg.norm(x - y)) for x in column) for *column, y in columns]
    for length in lengths:
        at = [indices.index(i) for i in one.inputs(length)]
        first = [values[i] for i in at]
        second = [divided_values[divided_indices.index(i)] for i in divided.inputs(length)]
        if not are_far(first, second, [noise[i] for i in at], HIDDEN * min(standard.unit, FLOAT32_UNIT)):
            continue
        try:
            inner = Standard(_up_to(subject, length), standard.unit)
        except GradCombineError:  # gradients that are not finite, with or without perturbation
            standard.gradient_examined = False
            return
        if not are_different(inner, split):
            continue
        yield inner, any(divided.may_rescale(i, length) for i in divided.inputs(length))


def are_different(inner: Standard, split: Split) -> bool:
    """Whether the gradients of a division differ from those of one batch by more than their rounding bound."""
    batch = inner.subject.batch
    return inner.distance(split, batch, inner.subject.run(split, batch)) > 1


def are_far(a: Sequence[np.ndarray], b: Sequence[np.ndarray], noise: Sequence[float], threshold: float) -> bool:
    """Whether a leaf differs by more than a relative threshold plus noise; ignores leaves that are 0 up to rounding."""
    sizes = [np.linalg.norm(x) for x in a]
    rows = zip(a, b, sizes, noise, strict=True)
    return any(z > threshold * max(sizes) and np.linalg.norm(x - y) > threshold * z + e for x, y, z, e in rows)


def _lengths(one: Recorded, divided: Recorded, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns candidate numbers of last operations that form the optimizer.

    Candidates whose inputs have the shapes of the parameters come first, and larger numbers before smaller ones.
    """
    pairs = zip(one.operations[::-1], divided.operations[::-1], strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    by_inputs: dict[tuple[int, ...], int] = {}
    for length in range(common, 0, -1):
        inputs = one.inputs(length)
        if inputs and one.shapes(inputs) == divided.shapes(divided.inputs(length)):
            by_inputs.setdefault(inputs, length)
    # Optimizers of groups of parameters use them in another order.
    return sorted(by_inputs.values(), key=lambda length: sorted(one.shapes(one.inputs(length))) != sorted(shapes))


def _up_to(subject: Subject, length: int) -> Subject:
    """Returns the step that ends before its last operations and returns their inputs."""

    def make_step(microbatches: int, devices: int = 1) -> Callable[[Tree, Tree], Tree]:
        return Recorded(subject, Split(microbatches, devices)).values(length)

    return Subject(make_step, subject.params, subject.batch, returns_params=False)


def _recorded(standard: Standard, split: Split) -> Recorded:
    """Returns the recorded step; that of one batch is compared with several divisions."""
    if split not in standard.recorded:
        standard.recorded[split] = Recorded(standard.subject, split)
    return standard.recorded[split]


class Recorded:
    """Records the values in the shapes of the parameters that a step computes from its examples.

    Attributes:
      values: a function of lengths that returns a function of parameters and batch, which returns `inputs`, or all
        values if there are no lengths.
      rest: a function of parameters and (batch, values, chosen) that runs the step with the chosen values replaced.
      operations: the operation, the shape and the constant operands of each value.
      dependencies: the indices of the values that each is computed from, directly.

    Raises:
      NotWide: if the step is not a JAX program.
    """

    def __init__(self, subject: Subject, split: Split) -> None:
        if "jax" not in sys.modules or subject.framework not in ("jax", "numpy"):
            raise NotWide("it is not a JAX program")
        jax = import_module("jax")
        self._step, self._shapes = subject.step(split), {x.shape for _, x in subject.param_leaves}
        self.operations: list[tuple[str, tuple[int, ...], Constants]] = []
        self.dependencies: list[Dependencies] = []

        def rest(params: Tree, replacement: tuple[Tree, Sequence[Any], Any]) -> Tree:
            batch, values, chosen = replacement
            pairs = iter([*zip(values, chosen, strict=True)])

            def replace(x: Any) -> Any:
                value, replaces = next(pairs)
                return jax.numpy.where(replaces, value.astype(x.dtype), x)

            return self._run(params, batch, replace)

        self.rest = jax.jit(rest)
        self.values = lru_cache(maxsize=2)(self._values)
        jax.eval_shape(self.values(), subject.params, subject.batch)

    def _values(self, *lengths: int) -> Callable[[Tree, Tree], list[Any]]:
        def step(params: Tree, batch: Tree) -> list[Any]:
            recorded: list[Any] = []

            def record(x: Any) -> Any:
                recorded.append(x)
                return x

            self._run(params, batch, record)
            # Indices depend on the batch: for one of another size, other values may have the parameters' shapes.
            return [recorded[i] for i in self.inputs(*lengths)] if lengths else recorded

        return import_module("jax").jit(step)

    def inputs(self, *lengths: int) -> tuple[int, ...]:
        """Returns the indices of the inputs of the last ``length`` operations, in order of use, for each length."""
        starts = [len(self.operations) - length for length in lengths]
        used = (i for start in starts for indices in self.dependencies[start:] for i in indices or () if i < start)
        return tuple(dict.fromkeys(used))

    def may_rescale(self, index: int, length: int) -> bool:
        """Whether the last operations may use a value only divided, or multiplied, by a number that is no constant."""
        while True:
            users = [j for j, x in enumerate(self.dependencies) if index in (x or ())]
            users = [j for j in users if j >= len(self.operations) - length]
            if len(users) != 1:
                return False
            name, _, constants = self.operations[index := users[0]]
            if name not in UNSCALED:
                return name in ("scan", "while", "cond", "shard_map") or (name in ("div", "mul") and not constants)

    def shapes(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.operations[i][1] for i in indices]

    def _run(self, params: Tree, batch: Tree, visit: Callable[[Any], Any]) -> Tree:
        jax = import_module("jax")
        program, shape = jax.make_jaxpr(self._step, return_shape=True)(params, batch)
        self.operations, self.dependencies = [], []
        arguments = [Tracked(x) for x in jax.tree.leaves(params)]
        arguments += [Tracked(x, ()) for x in jax.tree.leaves(batch)]
        results = self._evaluate(program, arguments, visit)
        return jax.tree.unflatten(jax.tree.structure(shape), [x.value for x in results])

    def _evaluate(self, program: Any, arguments: Sequence[Tracked], visit: Callable[[Any], Any]) -> list[Tracked]:
        """Evaluates a program with results of ``visit`` in place of the recorded values; inlines jitted functions."""
        inputs = [*(Tracked(x, constant=_hashed(x)) for x in program.consts), *arguments]
        values = dict(zip([*program.jaxpr.constvars, *program.jaxpr.invars], inputs, strict=True))

        def read(variable: Any) -> Tracked:
            if hasattr(variable, "val"):
                return Tracked(variable.val, constant=_hashed(variable.val))
            return values[variable]

        for x in program.jaxpr.eqns:
            operands = [read(v) for v in x.invars]
            if x.primitive.name in ("jit", "pjit"):
                results = self._evaluate(x.params["jaxpr"], operands, visit)
            else:
                functions, params = _bind_params(x)
                with import_module("jax").named_scope(scope_of(x)):
                    outputs = x.primitive.bind(*functions, *(y.value for y in operands), **params)
                outputs = outputs if x.primitive.multiple_results else [outputs]
                results = [self._recorded(x.primitive.name, y, operands, visit) for y in outputs]
            values.update(zip(x.outvars, results, strict=True))
        return [read(v) for v in program.jaxpr.outvars]

    def _recorded(self, name: str, x: Any, operands: Sequence[Tracked], visit: Callable[[Any], Any]) -> Tracked:
        constants = tuple(y.constant for y in operands if y.constant is not None)
        sources = [y.dependencies for y in operands if y.dependencies is not None]
        if not sources:
            return Tracked(x, constant=hash((name, x.shape, constants)) if len(constants) == len(operands) else None)
        indices = tuple(dict.fromkeys(i for some in sources for i in some))
        if x.shape not in self._shapes or not import_module("jax").numpy.issubdtype(x.dtype, np.floating):
            return Tracked(x, indices)
        self.operations.append((name, x.shape, constants))
        self.dependencies.append(indices)
        return Tracked(visit(x), (len(self.operations) - 1,))


UNSCALED = "convert_element_type", "copy", "reshape", "select_n", "transpose"

Dependencies: TypeAlias = tuple[int, ...] | None
"""Indices of the recorded values that a value is computed from; None if it does not depend on examples."""

Constants: TypeAlias = tuple[int, ...]
"""Hashes of constants, or of the operations that compute them."""


class Tracked(NamedTuple):
    """A value in a program.

    Attributes:
      value: an array.
      dependencies: the recorded values that it is computed from.
      constant: hash of its value, or of the operations that compute it from constants; None if it is not constant.
    """

    value: Any
    dependencies: Dependencies = None
    constant: int | None = None


def _hashed(x: Any) -> int | None:
    return None if isinstance(x, import_module("jax").core.Tracer) else hash(array_of(x).tobytes())


def _bind_params(equation: Any) -> tuple[Any, Any]:
    """Returns the functions and parameters to bind a primitive with; newer versions of JAX return no functions."""
    bound = equation.primitive.get_bind_params(equation.params)
    return cast("tuple[Any, Any]", bound if isinstance(bound, tuple) else ((), bound))
