"""The gradient that reaches an optimizer within a program of JAX, in one batch and in a division of it.

Both programs end with the same optimizer: the same operations in the shapes of the parameters. Some of what these begin
with is the gradient: with the division's values in its place, one batch's program gives what the division gives. A step
that ends there is explained as one that returns gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import takewhile
from typing import Any, TypeAlias, cast

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.types import Tree
from gradcombine.verify.check.case import Case, accounts_for
from gradcombine.verify.check.leaves import perturbation
from gradcombine.verify.check.lines import place_of
from gradcombine.verify.check.measure import FLOAT32_UNIT, SAMPLES, TIMES, UNIT64, StepStandard
from gradcombine.verify.check.running import WHOLE, NotFiniteError, NotWide, Split, Subject

CUTS = 2
"""At how many places a step is cut off, where several lead to the result."""


def before_update(standard: StepStandard, case: Case) -> Iterator[StepStandard]:
    """Steps up to the gradients that reach the optimizer, for the earliest places that lead to the result."""
    subject, found = standard.subject, 0
    if subject.framework == "torch":
        yield from import_module("gradcombine.verify.check.torch_steps").before_update(standard, case)
        return
    try:
        whole, divided = (Recorded(subject, split) for split in (WHOLE, case.split))
        one, made = (subject.of(x.values(), subject.batch, case.wide) for x in (whole, divided))
    except Exception:  # of a step that cannot be traced, or not run so
        return
    for length in _lengths(whole, divided, [x.shape for _, x in subject.param_leaves]):
        others = dict(zip(whole.entering(length), divided.entering(length), strict=True))
        if all(np.array_equal(one[i], made[j]) for i, j in others.items()):
            continue
        values = [made[others[i]] if i in others else x for i, x in enumerate(one)]
        chosen = np.array([i in others for i in range(len(one))])
        try:
            run = subject.wide if case.wide else subject.run
            predicted = run(WHOLE, (subject.batch, values, chosen), step=whole.rest).floats
            if accounts_for(standard, case, predicted, 1, range(len(subject.param_leaves))):
                yield StepStandard(_up_to(subject, length), standard.unit)
                found += 1
        except (NotWide, NotFiniteError, ValueError):
            continue
        if found == CUTS:
            return


HIDDEN = 1e-3
"""How far apart, of their size, gradients have to be for a step that hides it, as Adam's first one does, to be looked
at; where they are not in float64, 16 units of rounding, if that is more."""


def hidden_by_update(standard: StepStandard, split: Split) -> Iterator[StepStandard]:
    """Steps up to gradients that reach the optimizer and differ by more than `HIDDEN`, at the earliest places."""
    subject = standard.subject
    wide = standard.wide is not None and standard.unit > FLOAT32_UNIT  # whose rounding would look like a difference
    try:
        whole, divided = (Recorded(subject, x) for x in (WHOLE, split))
        lengths = _lengths(whole, divided, [x.shape for _, x in subject.param_leaves])[:CUTS]
        looked_at = [x.entering(*lengths) for x in (whole, divided)]
        values = [x.values(*lengths) for x in (whole, divided)]
        one, made = (subject.of(x, subject.batch, wide) for x in values)
        unit = 2 * (UNIT64 if wide else standard.unit)
        moved = [subject.of(values[0], subject.batch, wide, perturbation(seed, unit)) for seed in range(SAMPLES)]
    except Exception:  # of a step that cannot be traced, or not run so
        return
    noise = [TIMES * max(float(np.linalg.norm(x - y)) for x in column) for *column, y in zip(*moved, one, strict=True)]
    for length in lengths:
        at = [looked_at[0].index(i) for i in whole.entering(length)]
        first, second = [one[i] for i in at], [made[looked_at[1].index(i)] for i in divided.entering(length)]
        if not _far(first, second, [noise[i] for i in at], HIDDEN if wide else max(HIDDEN, 16 * standard.unit)):
            return
        try:
            found = StepStandard(_up_to(subject, length), standard.unit)
        except GradCombineError:  # gradients that are not finite, moved by rounding or not
            return
        yield found


def _far(one: Sequence[np.ndarray], made: Sequence[np.ndarray], noise: Sequence[float], most: float) -> bool:
    """Whether a leaf differs by more than this part and its noise; one that is zero but for rounding says nothing."""
    sizes = [np.linalg.norm(x) for x in one]
    rows = zip(one, made, sizes, noise, strict=True)
    return any(size > most * max(sizes) and np.linalg.norm(x - y) > most * size + off for x, y, size, off in rows)


def _lengths(whole: Recorded, divided: Recorded, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """How many operations at the end may be the optimizer: first those that begin with what has the parameters' shapes.

    Of these, and of the others, the most go first.
    """
    pairs = zip(whole.kinds[::-1], divided.kinds[::-1], strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    found: dict[tuple[int, ...], int] = {}
    for length in range(same, 0, -1):
        at = whole.entering(length)
        if at and whole.shapes(at) == divided.shapes(divided.entering(length)):
            found.setdefault(at, length)
    return sorted(found.values(), key=lambda length: whole.shapes(whole.entering(length)) != shapes)


def _up_to(subject: Subject, length: int) -> Subject:
    """The step that returns what so many operations at its end begin with."""

    def make_step(microbatches: int, devices: int = 1) -> Callable[[Tree, Tree], Tree]:
        return Recorded(subject, Split(microbatches, devices)).values(length)

    return Subject(make_step, subject.params, subject.batch, returns_params=False)


class Recorded:
    """Values in the shapes of the parameters that a step computes from its examples.

    Attributes:
      rest: a function of parameters and (batch, values, chosen) that runs the step with the chosen values in place.
      kinds: the operation and the shape of each.
      after: the numbers of those that each is computed from, but for what these are computed from.

    Raises:
      NotWide: for a step that is no program of JAX.
    """

    def __init__(self, subject: Subject, split: Split) -> None:
        if "jax" not in sys.modules or subject.framework not in ("jax", "numpy"):
            raise NotWide("no program of JAX")
        jax = import_module("jax")
        self._step, self._shapes = subject.step(split), {x.shape for _, x in subject.param_leaves}
        self.kinds: list[tuple[str, tuple[int, ...]]] = []
        self.after: list[After] = []

        def rest(params: Tree, given: tuple[Tree, Sequence[Any], Any]) -> Tree:
            batch, others, chosen = given
            pairs = iter([*zip(others, chosen, strict=True)])

            def put(x: Any) -> Any:
                other, yes = next(pairs)
                return jax.numpy.where(yes, other.astype(x.dtype), x)

            return self._run(params, batch, put)

        self.rest = jax.jit(rest)
        jax.eval_shape(self.values(), subject.params, subject.batch)

    def values(self, *lengths: int) -> Callable[[Tree, Tree], list[Any]]:
        """A function of parameters and batch that returns what `entering` counts; without lengths, all values."""

        def step(params: Tree, batch: Tree) -> list[Any]:
            found: list[Any] = []

            def keep(x: Any) -> Any:
                found.append(x)
                return x

            self._run(params, batch, keep)
            # Counted for this batch: in one of another size other values may have the parameters' shapes.
            return [found[i] for i in self.entering(*lengths)] if lengths else found

        return import_module("jax").jit(step)

    def entering(self, *lengths: int) -> tuple[int, ...]:
        """The numbers of the inputs of the last ``length`` operations, in the order of their use, for each length."""
        starts = [len(self.kinds) - length for length in lengths]
        used = (i for start in starts for after in self.after[start:] for i in after or () if i < start)
        return tuple(dict.fromkeys(used))

    def shapes(self, at: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.kinds[i][1] for i in at]

    def _run(self, params: Tree, batch: Tree, visit: Callable[[Any], Any]) -> Tree:
        jax = import_module("jax")
        program, shape = jax.make_jaxpr(self._step, return_shape=True)(params, batch)
        self.kinds, self.after = [], []
        entered = [*((x, None) for x in jax.tree.leaves(params)), *((x, ()) for x in jax.tree.leaves(batch))]

        def computed(operation: str, x: Any, after: After) -> Numbered:
            if after is None or x.shape not in self._shapes or not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
                return x, after
            self.kinds.append((operation, x.shape))
            self.after.append(after)
            return visit(x), (len(self.kinds) - 1,)

        made = _evaluated(program.jaxpr, program.consts, entered, computed)
        return jax.tree.unflatten(jax.tree.structure(shape), [x for x, _ in made])


After: TypeAlias = tuple[int, ...] | None
"""The numbers of the values that something is computed from; None where no example enters it."""

Numbered: TypeAlias = tuple[Any, After]


def _evaluated(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Numbered], computed: Callable[[str, Any, After], Numbered]
) -> list[Numbered]:
    """The results of a program, of each of whose operations a function is told; compiled functions are inlined."""
    entered = [*((x, None) for x in consts), *arguments]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], entered, strict=True))

    def of(variable: Any) -> Numbered:
        return (variable.val, None) if hasattr(variable, "val") else known[variable]

    for x in jaxpr.eqns:
        pairs = [of(v) for v in x.invars]
        if x.primitive.name in ("jit", "pjit"):
            inner = x.params["jaxpr"]
            made = _evaluated(inner.jaxpr, inner.consts, pairs, computed)
        else:
            functions, others = _bound(x)
            with import_module("jax").named_scope(place_of(x)):
                found = x.primitive.bind(*functions, *(value for value, _ in pairs), **others)
            entering = [after for _, after in pairs if after is not None]
            after = tuple(dict.fromkeys(i for some in entering for i in some)) if entering else None
            made = [computed(x.primitive.name, y, after) for y in (found if x.primitive.multiple_results else [found])]
        known.update(zip(x.outvars, made, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _bound(equation: Any) -> tuple[Any, Any]:
    """The functions and the parameters to bind an equation's primitive with; older versions of JAX give the pair."""
    bound = equation.primitive.get_bind_params(equation.params)
    return cast("tuple[Any, Any]", bound if isinstance(bound, tuple) else ((), bound))
