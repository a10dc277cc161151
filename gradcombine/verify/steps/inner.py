"""The gradient within a program of JAX: what reaches an optimizer whose update is no mean of examples.

Of what one batch computes in the shapes of the parameters some is a mean of what its examples give, as the gradient and
Adam's first moment are. Put in place of these, other combinations of the examples give what a defect would give behind
the optimizer: the rest of the program runs as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from importlib import import_module
from typing import Any, TypeAlias, cast

import numpy as np

from gradcombine.types import Tree
from gradcombine.verify.steps.case import combined
from gradcombine.verify.steps.measure import UNIT64, StepStandard
from gradcombine.verify.steps.running import WHOLE, NotFiniteError, NotWide, Result
from gradcombine.verify.steps.standard import Floats, Standard, rms

ROUNDINGS = 2**10
"""How many a mean may have more than one of its terms, each of the size of the largest term."""


class InnerStandard(Standard):
    """What one batch computes in the shapes of the parameters, the latest first; a `Standard` of its examples.

    Raises:
      NotWide: for a step whose program cannot be traced, or does not run in float64.
    """

    def __init__(self, standard: StepStandard, wide: bool) -> None:
        self._outer, self._in_float64, self.examples = standard, wide, standard.examples
        if "jax" not in sys.modules or standard.subject.framework not in ("jax", "numpy"):
            raise NotWide("no program of JAX")
        self._record, self._rest = _programs(standard)
        self._made: dict[tuple[int, ...], Result | None] = {}
        whole = self.one(range(self.examples))
        if whole is None or not whole.floats:
            raise NotWide("nothing in the shapes of the parameters is finite")
        self.own, self.wide = whole, whole if wide else None
        self.names = [str(i) for i in range(len(whole.floats))]

    def allowed(self, wide: bool) -> np.ndarray:
        return self._sizes * ROUNDINGS * (UNIT64 if wide else self._outer.unit)

    @cached_property
    def _sizes(self) -> np.ndarray:
        results = [self.own, *(x for x in self.columns() if x is not None)]
        return np.array([[rms(y) for y in x.floats] for x in results]).max(axis=0)

    def one(self, rows: Sequence[int]) -> Result | None:
        key, subject = tuple(rows), self._outer.subject
        if key not in self._made:
            try:
                floats = subject.of(self._record, subject.rows(rows), self._in_float64)
            except Exception as error:  # whatever a foreign step raises
                raise NotWide(str(error)) from None
            finite = all(np.isfinite(x).all() for x in floats)
            dtypes = tuple(np.dtype(np.float64) for _ in floats)
            self._made[key] = Result(tuple(floats), (), dtypes) if finite else None
        return self._made[key]

    def repeated(self, rows: Sequence[int]) -> Result | None:
        return self.one(self._outer.copies(rows))

    def counts(self) -> Any:
        return self._outer.counts()

    def after(self, weights: np.ndarray) -> Floats | None:
        """What the step returns where its examples weigh so; None where that is not finite."""
        used = [(a, x.floats) for a, x in zip(weights, self.columns(), strict=True) if x is not None]
        values = combined(np.array([a for a, _ in used]), [x for _, x in used])
        columns = [x.floats for x in self.columns() if x is not None]
        # What no example moves, as decay, is no mean of them.
        moving = [any(not np.array_equal(x[i], y) for x in columns) for i, y in enumerate(self.own.floats)]
        chosen = np.array([i in self.combination[1] and moves for i, moves in enumerate(moving)])
        subject = self._outer.subject
        try:
            run = subject.wide if self._in_float64 else subject.run
            return run(WHOLE, (subject.batch, values, chosen), step=self._rest).floats
        except (NotWide, NotFiniteError):
            return None


def _programs(standard: StepStandard) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """What records all that has a parameter's shape, the latest first, and what runs with others in their place."""
    jax = import_module("jax")
    step = standard.subject.step(WHOLE)
    shapes = {x.shape for _, x in standard.subject.param_leaves}

    def run(params: Tree, batch: Tree, visit: Visit) -> Tree:
        program, shape = jax.make_jaxpr(step, return_shape=True)(params, batch)
        entered = [(x, False) for x in jax.tree.leaves((params, batch))]
        seen = _evaluated(program.jaxpr, program.consts, entered, visit)
        return jax.tree.unflatten(jax.tree.structure(shape), [x for x, _ in seen])

    def is_one(x: Any) -> bool:
        return x.shape in shapes and jax.numpy.issubdtype(x.dtype, jax.numpy.floating)

    @jax.jit
    def record(params: Tree, batch: Tree) -> list[Any]:
        found: list[Any] = []

        def visit(x: Any, put: Any) -> Pair:
            if is_one(x):
                found.append(x)
            return x, put

        run(params, batch, visit)
        return found[::-1]

    @jax.jit
    def rest(params: Tree, given: tuple[Tree, Sequence[Any], Any]) -> Tree:
        batch, values, chosen = given
        others = [*zip(values, chosen, strict=True)]

        def visit(x: Any, put: Any) -> Pair:
            if not is_one(x):
                return x, put
            value, mean = others.pop()
            # What is computed from another one in place is right as it is, with what is added to it.
            return jax.numpy.where(mean & ~jax.numpy.asarray(put), value.astype(x.dtype), x), mean | put

        return run(params, batch, visit)

    return record, rest


Pair: TypeAlias = tuple[Any, Any]
"""A value, and whether it is computed from one that was put in another's place."""

Visit: TypeAlias = Callable[[Any, Any], Pair]


def _evaluated(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Pair], visit: Visit) -> list[Pair]:
    """The results of a program, with all that it computes as a visitor gives it back; compiled functions inlined."""
    entered = [*((x, False) for x in consts), *arguments]
    values: dict[Any, Pair] = dict(zip([*jaxpr.constvars, *jaxpr.invars], entered, strict=True))

    def of(variable: Any) -> Pair:
        return (variable.val, False) if hasattr(variable, "val") else values[variable]

    for x in jaxpr.eqns:
        pairs = [of(v) for v in x.invars]
        if x.primitive.name in ("jit", "pjit"):
            inner = x.params["jaxpr"]
            made = _evaluated(inner.jaxpr, inner.consts, pairs, visit)
        else:
            functions, others = _bound(x)
            found = x.primitive.bind(*functions, *(value for value, _ in pairs), **others)
            put = reduce(lambda a, b: a | b, (flag for _, flag in pairs), False)
            made = [visit(y, put) for y in (found if x.primitive.multiple_results else [found])]
        values.update(zip(x.outvars, made, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _bound(equation: Any) -> tuple[Any, Any]:
    """The functions and the parameters to bind an equation's primitive with; older versions of JAX give the pair."""
    bound = equation.primitive.get_bind_params(equation.params)
    return cast("tuple[Any, Any]", bound if isinstance(bound, tuple) else ((), bound))
