"""Searches with Hypothesis for the smallest contributions for which a reduction breaks a law."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cache, partial
from numbers import Number
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import dtype_of, is_absent, placeholder
from gradcombine.errors import (
    invalid,
    operation,
    require_flag,
    require_installed,
    require_integer,
    require_items,
    require_number,
    shown,
)
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.guarded import GuardedState
from gradcombine.settings import check
from gradcombine.types import State, Tree
from gradcombine.verify.check.laws import DETERMINISTIC, LAWS, Contribution, Law, Sides, Trial, mapped
from gradcombine.verify.check.leaves import as_numpy
from gradcombine.verify.compare.ulp import rounding_unit

ELEMENTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 4.0, -4.0)
WEIGHTS = (1, 2, 3, 0.5, 0)
ODD = 683
"""Factor of large weights, whose 10 bits fit in float16, unlike the 12 bits of three times as much."""


class Stretch(NamedTuple):
    """Scales a case by powers of two, so that sums do not round.

    Attributes:
      element, weight: factors of all elements and of all weights.
      doublings: k, if a state contains each contribution 2**k - 1 times, which a small integer counter cannot hold.
    """

    element: float = 1
    weight: int = 1
    doublings: int = 1


class Case(NamedTuple):
    stretch: Stretch
    terms: Sequence[Contribution]


class BrokenLaw(AssertionError):  # noqa: N818 (a finding, as AssertionError's others)
    """Raised if a reduction breaks a law.

    Attributes:
      law: the law that does not hold.
      contributions: the smallest counterexample that was found: pairs of value and weight.
      left, right: the two sides that differ; or None and the exception that was raised.
    """

    def __init__(self, name: str, law: Law, case: Case, sides: Sides) -> None:
        contributions, times = list(case.terms), 2**case.stretch.doublings - 1
        self.law, self.contributions = law.statement, contributions
        self.left, self.right, captions = sides
        lines = [f"{name} breaks the law: {law.statement}"]
        if contributions:
            repeats = f", each {times} times in a state" if times > 1 else ""
            lines += [
                f"for the contributions{repeats}:",
                *(f"  {value!r}, weight {weight!r}" for value, weight in contributions),
            ]
        if isinstance(self.right, Exception):
            lines.append(f"raised: {type(self.right).__name__}: {self.right}")
        else:
            width = max(map(len, captions)) + 1
            # A state as the functions of the reduction see it.
            both = [side.value if isinstance(side, GuardedState) else side for side in (self.left, self.right)]
            lines += [f"{f'{caption}:':{width}} {side!r}" for caption, side in zip(captions, both, strict=True)]
        if law.waiver:
            lines.append(f"If it need not hold, use check_reduction(..., {law.waiver}).")
        super().__init__("\n".join(lines))


@operation("check_reduction")
def check_reduction(
    reduction: Reduction,
    like: Tree = np.zeros(2, np.float32),  # noqa: B008 (never changed)
    *,
    commutative: bool = True,
    weighted: bool = True,
    ulps: int = 0,
    elements: Sequence[float] = ELEMENTS,
    weights: Sequence[float] = WEIGHTS,
    asarray: Callable[[np.ndarray], Any] = np.asarray,
    examples: int = 50,
) -> None:
    """Searches for contributions for which a reduction breaks a law; raises with the law and the smallest ones.

    Laws, in order of the tests: an empty state has a value without NaN; the functions run and preserve structure,
    shapes and dtypes; they do not change their arguments, and are deterministic; the empty state is the identity of
    ``merge``; ``update(s, v, w) == merge(s, update(init, v, w))``; a contribution of weight 0 changes nothing, even if
    it is NaN; ``clear`` returns the empty state; ``merge`` is associative and commutative; twice the weight counts as
    two contributions, and three times as three; a list, time, replicas and mixtures of them give the same value in both
    orders.

    Hypothesis generates and shrinks the contributions, deterministically. Some are scaled by 2**20 or 2**-20, have
    weights times 683, or are 255 or 2,047 times in a state, to find sums and counters that saturate. Also tests
    scalars, empty leaves, leaves of one element, of two axes, in float64, float16 and int32, and a tree without its
    first leaf, if the functions accept them. Nothing is compiled, so effects of compilers are not found.

    Args:
      reduction: any reduction, for example a user-defined one.
      like: a tree with the shapes and dtypes of contributions, and None for no gradient.
      commutative: whether ``merge`` has to be commutative; that of `gradcombine.reductions.last` is not.
      weighted: whether twice the weight has to count as two contributions; `gradcombine.reductions.product` only uses
        whether a weight is 0.
      ulps: allowed distance of the two sides' values, in units in the last place of the largest number among them and
        the contributions. 0: bitwise equal except for NaN payloads. With the default elements and weights, sums and
        products do not round, so sums obey the laws bitwise. The laws of weight 0, ``clear``, determinism and unchanged
        arguments compare full states, always bitwise.
      elements: values of the leaves; integer leaves use only the integers among them, unsigned ones no negative ones.
      weights: weights of the contributions; only the integers among them are used if a leaf has an integer dtype.
      asarray: converts NumPy arrays to another framework, like jax.numpy.asarray and tf.constant.
      examples: number of cases per law; a fifth of it for the last law, and a tenth for other leaves.

    Raises:
      BrokenLaw: an AssertionError, for the first law that does not hold.
      GradCombineError: for invalid arguments, and if hypothesis is not installed.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.verify import check_reduction
    >>> check_reduction(gc.reductions.max(), examples=10)
    >>> check_reduction(gc.reductions.last(), examples=10)
    Traceback (most recent call last):
        ...
    gradcombine.verify.check.law_search.BrokenLaw: last breaks the law: merge is commutative: merge(a, b) == merge(b, a)
    for the contributions:
      array([0., 0.], dtype=float32), weight 1
      array([0., 1.], dtype=float32), weight 1
    merge(a, b): array([0., 1.], dtype=float32)
    merge(b, a): array([0., 0.], dtype=float32)
    If it need not hold, use check_reduction(..., commutative=False).
    """
    check(reduction=reduction)
    ulps = require_integer("ulps from 0 to 2**20", ulps, 0, 2**20)
    examples = require_integer("1 example or more", examples)
    require_installed("check_reduction", "hypothesis")
    if not callable(asarray):
        raise invalid("a function as asarray", shown(asarray))
    leaf_dtypes = [dtype_of(x) for x in tree.flatten(like)[0] if not is_absent(x)]
    has_integers = any(dtypes.kind(dtype) == "integer" for dtype in leaf_dtypes)
    stretches = _stretches(leaf_dtypes, has_integers, elements, weights)
    elements, weights = (_numbers(name, x) for name, x in (("elements", elements), ("weights", weights)))
    for weight in weights:
        require_number("weights that are finite and not negative", weight, 0)
    require_flag("commutative", commutative)
    require_flag("weighted", weighted)
    integers = [weight for weight in weights if dtypes.holds(np.dtype(np.int64), weight)]
    usable = integers if has_integers else weights
    if not usable:
        raise invalid("a weight, an integer one if leaves are integers", shown(weights))
    waived = {"commutative=False": not commutative, "weighted=False": not weighted}
    laws = [law for law in LAWS if not waived.get(law.waiver, False)]
    cases = cache(partial(_cases, like, elements, usable, asarray, stretches))
    for law in laws:
        if law is LAWS[-1]:  # runs every place in both orders
            costly = _cases(like, elements, usable, asarray, stretches[:1], law.terms)
            _try(reduction, like, law, ulps, costly, -(-examples // 5))
        else:
            _try(reduction, like, law, ulps, cases(law.terms), examples)
    for other in _others(reduction, like, asarray):
        cases = cache(partial(_cases, other, _fitting(other, elements), integers or [1], asarray, [Stretch()]))
        for law in laws[:-1]:
            _try(reduction, other, law, ulps, cases(law.terms), -(-examples // 10))


def _numbers(name: str, values: Any) -> list[Any]:
    numbers = require_items(f"numbers as {name}", values)
    if not all(isinstance(x, Number) and dtypes.holds(np.dtype(np.complex128), x) for x in numbers):
        raise invalid(f"numbers that a float holds as {name}", shown(numbers))
    return numbers


def _try(reduction: Reduction, like: Tree, law: Law, ulps: int, strategy: Any, examples: int) -> None:
    import hypothesis
    from hypothesis.errors import Flaky

    broken: list[tuple[Case, Sides]] = []
    settings = hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=[*hypothesis.HealthCheck],  # pyright: ignore[reportArgumentType] (its metaclass is untyped)
    )

    def tried(case: Case) -> None:
        sides = _broken(reduction, like, law, ulps, case)
        if sides is not None:
            broken.append((case, sides))
            raise BrokenLaw(reduction.name, law, case, sides)

    # Hypothesis parses the source of a test at each call, to seed the search unless there is a seed, and as a key.
    @hypothesis.seed(0)
    @settings
    @hypothesis.given(strategy)
    def holds(case: Case) -> None:
        tried(case)

    try:
        holds()
    except BrokenLaw:
        # The last failure has the smallest contributions. A new error drops the notes of hypothesis.
        raise BrokenLaw(reduction.name, law, *broken[-1]) from None
    except Flaky:
        if not broken:
            raise invalid("deterministic functions", reduction.name) from None
        # The same contributions broke a law in one of two runs.
        raise BrokenLaw(reduction.name, DETERMINISTIC, *broken[-1]) from None


def _broken(reduction: Reduction, like: Tree, law: Law, ulps: int, case: Case) -> Sides | None:
    """Returns the first two sides that differ, or None if the law holds."""
    # Copied, because the error shows the contributions, and a function may write to its arguments.
    copied = [Contribution(mapped(copy, value), weight) for value, weight in case.terms]
    leaves = [x for value, _ in case.terms for x in tree.flatten(value)[0] if not is_absent(x)]
    largest = max((float(np.abs(as_numpy(x).astype(np.float64)).max(initial=0)) for x in leaves), default=0.0)

    def made(term: Contribution) -> State:
        state = one = reduction.update(reduction.init(term.value), *term)
        for _ in range(case.stretch.doublings - 1):
            state = reduction.merge(reduction.merge(state, state), one)
        return state

    allowed = 0 if law.exact else ulps
    try:
        for sides in law.sides(Trial(reduction, like, copied, made)):
            (lefts, one), (rights, other) = (tree.flatten(side) for side in sides[:2])
            if one != other or not all(_near(x, y, allowed, largest) for x, y in zip(lefts, rights, strict=True)):
                return sides
    except Exception as error:
        return Sides(None, error, ("", ""))
    return None


def _others(reduction: Reduction, like: Tree, asarray: Callable[[np.ndarray], Any]) -> Iterator[Tree]:
    """Yields the tree with other shapes and dtypes, and without its first leaf, if the functions accept it."""
    leaves, structure = tree.flatten(like)
    specs = [None if is_absent(x) else placeholder(x) for x in leaves]

    def changed(shape: tuple[int, ...] | None, dtype: Any) -> Tree:
        new: list[Any] = [
            None if x is None else np.zeros(x.shape if shape is None else shape, dtype or x.dtype) for x in specs
        ]
        return tree.unflatten(structure, [x if y is None else asarray(y) for x, y in zip(leaves, new, strict=True)])

    others = [changed(shape, None) for shape in ((), (0,), (1,), (2, 3))]
    others += [changed(None, dtype) for dtype in (np.float64, np.float16, np.int32)]
    if sum(x is not None for x in specs) > 1:
        first = next(i for i, x in enumerate(specs) if x is not None)
        others.append(tree.unflatten(structure, [None if i == first else x for i, x in enumerate(leaves)]))
    for other in others:
        try:
            empty = reduction.init(other)
            reduction.finalize(reduction.merge(empty, reduction.update(empty, other, 1)))
        except Exception:
            continue  # a reduction need not accept every tree
        yield other


def _fitting(like: Tree, elements: Sequence[float]) -> list[float]:
    """Returns the elements that every leaf can represent, or 0 and 1 if there are none."""
    leaf_dtypes = [placeholder(x).dtype for x in tree.flatten(like)[0] if not is_absent(x)]
    return [x for x in elements if all(dtypes.holds(dtype, x) for dtype in leaf_dtypes)] or [0, 1]


def _cases(
    like: Tree,
    elements: Sequence[float],
    weights: Sequence[float],
    asarray: Callable[[np.ndarray], Any],
    stretches: Sequence[Stretch],
    count: int,
) -> Any:
    """Returns a strategy for cases of ``count`` contributions, which hypothesis validates at its first use."""
    from hypothesis import strategies

    leaves, structure = tree.flatten(like)

    def leaf(x: Any, stretch: Stretch) -> Any:
        if is_absent(x):
            return strategies.just(x)
        spec = placeholder(x)
        drawn = [y * stretch.element for y in elements if dtypes.holds(spec.dtype, y * stretch.element)]
        if not drawn:
            raise invalid(f"elements that are {spec.dtype}", shown(elements))
        rows = strategies.lists(strategies.sampled_from(drawn), min_size=spec.size, max_size=spec.size)
        return rows.map(lambda row: asarray(np.array(row, spec.dtype).reshape(spec.shape)))

    def of(stretch: Stretch) -> Any:
        drawn = (leaf(x, stretch) for x in leaves)
        value = strategies.tuples(*drawn).map(lambda drawn: tree.unflatten(structure, drawn))
        weight = strategies.sampled_from([weight * stretch.weight for weight in weights])
        terms = strategies.lists(strategies.builds(Contribution, value, weight), min_size=count, max_size=count)
        return strategies.builds(Case, strategies.just(stretch), terms)

    return strategies.one_of(*map(of, stretches))


def _stretches(leaf_dtypes: Sequence[np.dtype], has_integers: bool, elements: Any, weights: Any) -> list[Stretch]:
    """Returns stretches for which sums in the narrowest dtype do not round; only the default values are stretched."""
    stretches, itemsize = [Stretch()], min((dtypes.part(dtype).itemsize for dtype in leaf_dtypes), default=0)
    if elements is ELEMENTS:
        factors = (2.0**20, 2.0**-20) if itemsize >= 4 else (32.0,) if itemsize == 2 else ()
        stretches += [Stretch(element=x) for x in factors[: 1 if has_integers else 2]]
    if itemsize >= 4:
        stretches += [Stretch(weight=ODD)] if weights is WEIGHTS else []
        stretches += [Stretch(doublings=8), Stretch(doublings=11)]  # an exact sum of float32 holds 4,096
    return stretches


def _near(left: Any, right: Any, ulps: int, largest: float) -> bool:
    if is_absent(left) or is_absent(right):
        return is_absent(left) and is_absent(right)
    x: Any = as_numpy(left)
    y: Any = as_numpy(right)
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    if dtypes.kind(x.dtype) not in ("float", "complex"):
        return bool(np.all(x == y))
    both_nan = (x != x) & (y != y)
    if not ulps:
        return bool(np.all(both_nan | ((x == y) & (np.signbit(x.real) == np.signbit(y.real)))))
    with np.errstate(invalid="ignore"):
        wide = x + np.float64(0), y + np.float64(0)
        scale = max(largest, *(float(np.max(abs(z), where=np.isfinite(z), initial=0)) for z in wide))
        is_close = abs(wide[0] - wide[1]) <= 2 * ulps * rounding_unit(dtypes.part(x.dtype)) * scale
    return bool(np.all(both_nan | (x == y) | is_close))
