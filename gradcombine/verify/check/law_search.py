"""Does a reduction obey the laws? Cases that Hypothesis draws, and the smallest one that breaks a law."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    shown,
)
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check
from gradcombine.types import State, Tree
from gradcombine.verify.check.laws import (
    DETERMINISTIC,
    LAWS,
    Contribution,
    Law,
    Sides,
    Terms,
    copy_of,
    mapped,
    own_state,
)
from gradcombine.verify.compare.ulp import rounding_unit

ELEMENTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 4.0, -4.0)
WEIGHTS = (1, 2, 3, 0.5, 0)


class Stretch(NamedTuple):
    """How one case is made larger: by powers of two, of which no sum rounds.

    Attributes:
      element, weight: what all elements, and all weights, are multiplied by.
      doublings: k, where a state has each contribution 2**k - 1 times, as one that counts modulo 2**k would not see.
    """

    element: float = 1
    weight: int = 1
    doublings: int = 1


class Case(NamedTuple):
    """The inputs that a law is tried on."""

    stretch: Stretch
    terms: Terms


class BrokenLaw(AssertionError):  # noqa: N818 (a finding, as AssertionError's others)
    """A law that a reduction breaks.

    Attributes:
      law: what should hold.
      contributions: the smallest that were found for which it does not: pairs of value and weight.
      left, right: the two sides that differ; or None and the exception that was raised.
    """

    def __init__(self, name: str, law: Law, case: Case, sides: Sides) -> None:
        contributions, times = list(case.terms), 2**case.stretch.doublings - 1
        self.law, self.contributions = law.statement, contributions
        self.left, self.right, captions = sides
        lines = [f"{name} breaks the law: {law.statement}"]
        if contributions:
            often = f", where a state has each {times} times" if times > 1 else ""
            lines += [
                f"for the contributions{often}:",
                *(f"  {value!r}, weight {weight!r}" for value, weight in contributions),
            ]
        if isinstance(self.right, Exception):
            lines.append(f"raised: {type(self.right).__name__}: {self.right}")
        else:
            width = max(map(len, captions)) + 1
            both = zip(captions, (self.left, self.right), strict=True)
            lines += [f"{f'{caption}:':{width}} {own_state(side)!r}" for caption, side in both]
        if law.waiver:
            lines.append(f"If it need not hold: check_reduction(..., {law.waiver}).")
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
    """Looks for contributions for which a reduction breaks a law, and names the law and the smallest of them.

    The laws, in this order: an empty state has a value, without NaN; the functions run, and keep the structure, shapes
    and dtypes of states; they are deterministic, and leave their arguments as they are; the empty state is the identity
    of ``merge``; ``update(s, v, w) == merge(s, update(init, v, w))``; a contribution of weight 0 changes nothing, even
    if it is NaN; twice the weight counts as two contributions; ``clear`` gives the empty state; ``merge`` is
    associative and commutative; a list, time, two replicas and mixtures of them give the same value in both orders.
    Each is tried on contributions that hypothesis generates and shrinks, the same ones in every run: some of them 2**20
    times as large or as small, with weights 1,024 times as large, or 255 and 2,047 times in a state, where sums and
    counts would saturate. Leaves of no axis, no element, one element, two axes, float64, float16 and int32, and a tree
    without its first leaf, are tried as well, where the functions run for them. Nothing is compiled, so what compilers
    make of the functions is not tried.

    Args:
      reduction: a user's own, or any other.
      like: a tree of the shapes and dtypes of contributions, with None where there is no gradient.
      commutative: whether ``merge`` has to be commutative; that of `gradcombine.reductions.last` is not.
      weighted: whether twice the weight has to count as two contributions; `gradcombine.reductions.product` only asks
        whether a weight is 0.
      ulps: how far apart the values of two sides may be, in units in the last place of the largest number among them
        and the contributions. 0: equal bits, except for the payload of NaN. By default sums and products of
        contributions do not round, so the laws of sums hold to the bit. The laws of weight 0, ``clear``, determinism
        and unchanged arguments hold for whole states, always to the bit.
      elements: what the leaves hold; only whole ones are used for integers, and no negative ones if unsigned.
      weights: of the contributions; only whole ones if a leaf is of integers.
      asarray: converts NumPy's arrays to another framework's, as jax.numpy.asarray and tf.constant do.
      examples: how many cases are tried for each law; a fifth of it for the last one, and a tenth for other leaves.

    Raises:
      BrokenLaw: an AssertionError, for the first law that does not hold.
      GradCombineError: for settings that mean nothing, and if hypothesis is not installed.

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
    If it need not hold: check_reduction(..., commutative=False).
    """
    check(reduction=reduction)
    ulps = require_integer("ulps from 0 to 2**20", ulps, 0, 2**20)
    examples = require_integer("1 example or more", examples)
    require_installed("check_reduction", "hypothesis")
    if not callable(asarray):
        raise invalid("a function as asarray", shown(asarray))
    kinds = [dtype_of(x) for x in tree.flatten(like)[0] if not is_absent(x)]
    whole = any(dtypes.kind(dtype) == "integer" for dtype in kinds)
    stretches = _stretches(kinds, elements, weights)
    elements, weights = (_numbers(name, x) for name, x in (("elements", elements), ("weights", weights)))
    require_flag("commutative", commutative)
    require_flag("weighted", weighted)
    usable = [weight for weight in weights if not whole or dtypes.holds(np.dtype(np.int64), weight)]
    if not usable:
        raise invalid("a weight, a whole one if leaves are integers", shown(weights))
    waived = {"commutative=False": not commutative, "weighted=False": not weighted}
    held = [law for law in LAWS if not waived.get(law.waiver, False)]
    for law in held:
        costly = law is LAWS[-1]
        cases = _cases(like, law.terms, elements, usable, asarray, stretches[:1] if costly else stretches)
        # It runs each place of both orders, where the other laws run a few functions.
        _try(reduction, like, law, ulps, cases, -(-examples // 5) if costly else examples)
    whole_weights = [weight for weight in usable if dtypes.holds(np.dtype(np.int64), weight)] or [1]
    for other in _others(reduction, like, asarray):
        for law in held[:-1]:
            cases = _cases(other, law.terms, _fitting(other, elements), whole_weights, asarray, [Stretch()])
            _try(reduction, other, law, ulps, cases, -(-examples // 10))


def _numbers(name: str, values: Any) -> list[Any]:
    numbers = require_items(f"numbers as {name}", values)
    if not all(isinstance(x, Number) and dtypes.holds(np.dtype(np.complex128), x) for x in numbers):
        raise invalid(f"numbers that a float holds as {name}", shown(numbers))
    return numbers


def _try(reduction: Reduction, like: Tree, law: Law, ulps: int, strategy: Any, examples: int) -> None:
    import hypothesis
    from hypothesis.errors import Flaky

    broken: list[tuple[Case, Sides]] = []

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=[*hypothesis.HealthCheck],  # pyright: ignore[reportArgumentType] (its metaclass is untyped)
    )
    @hypothesis.given(strategy)
    def holds(case: Case) -> None:
        sides = _broken(reduction, like, law, ulps, case)
        if sides is not None:
            broken.append((case, sides))
            raise BrokenLaw(reduction.name, law, case, sides)

    try:
        holds()
    except BrokenLaw:
        # As it was raised last, for the smallest contributions, without what hypothesis adds about itself.
        raise BrokenLaw(reduction.name, law, *broken[-1]) from None
    except Flaky:
        if not broken:
            expected = "functions that return the same for the same arguments"
            raise invalid(expected, reduction.name) from None
        # The same contributions have broken a law, and have not.
        raise BrokenLaw(reduction.name, DETERMINISTIC, *broken[-1]) from None


def _broken(reduction: Reduction, like: Tree, law: Law, ulps: int, case: Case) -> Sides | None:
    """The first sides that differ, None if the law holds."""
    # What is shown has to stay as it is, even if a function writes to its arguments.
    copied = [Contribution(mapped(copy_of, value), weight) for value, weight in case.terms]
    leaves = [x for value, _ in case.terms for x in tree.flatten(value)[0] if not is_absent(x)]
    largest = max((float(np.abs(np.asarray(x, np.float64)).max(initial=0)) for x in leaves), default=0.0)

    def made(term: Contribution) -> State:
        state = one = reduction.update(reduction.init(term.value), *term)
        for _ in range(case.stretch.doublings - 1):
            state = reduction.merge(reduction.merge(state, state), one)
        return state

    allowed = 0 if law.exact else ulps
    try:
        for sides in law.sides(reduction, like, copied, made):
            (lefts, one), (rights, other) = (tree.flatten(side) for side in sides[:2])
            if one != other or not all(_near(x, y, allowed, largest) for x, y in zip(lefts, rights, strict=True)):
                return sides
    except Exception as error:
        return Sides(None, error, ("", ""))
    return None


def _others(reduction: Reduction, like: Tree, asarray: Callable[[np.ndarray], Any]) -> Iterator[Tree]:
    """The tree with leaves of other shapes and dtypes, or without its first: what the functions run for."""
    leaves, structure = tree.flatten(like)
    specs = [None if is_absent(x) else placeholder(x) for x in leaves]

    def changed(shape: tuple[int, ...] | None, dtype: Any) -> Tree:
        new: list[Any] = [
            None if x is None else np.zeros(x.shape if shape is None else shape, dtype or x.dtype) for x in specs
        ]
        return tree.unflatten(structure, [x if y is None else asarray(y) for x, y in zip(leaves, new, strict=True)])

    found = [changed(shape, None) for shape in ((), (0,), (1,), (2, 3))]
    found += [changed(None, dtype) for dtype in (np.float64, np.float16, np.int32)]
    if sum(x is not None for x in specs) > 1:
        first = next(i for i, x in enumerate(specs) if x is not None)
        found.append(tree.unflatten(structure, [None if i == first else x for i, x in enumerate(leaves)]))
    for other in found:
        try:
            empty = reduction.init(other)
            reduction.finalize(reduction.merge(empty, reduction.update(empty, other, 1)))
        except Exception:
            continue  # it need not take any tree
        yield other


def _fitting(like: Tree, elements: Sequence[float]) -> list[float]:
    """The elements that each leaf can hold; 0 and 1 if there are none."""
    held = [placeholder(x).dtype for x in tree.flatten(like)[0] if not is_absent(x)]
    return [x for x in elements if all(dtypes.holds(dtype, x) for dtype in held)] or [0, 1]


def _cases(
    like: Tree,
    count: int,
    elements: Sequence[float],
    weights: Sequence[float],
    asarray: Callable[[np.ndarray], Any],
    stretches: Sequence[Stretch],
) -> Any:
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


def _stretches(kinds: Sequence[np.dtype], elements: Any, weights: Any) -> list[Stretch]:
    """Stretches of the elements within which sums in the narrowest dtype do not round; none for given elements."""
    found, least = [Stretch()], min((dtypes.part(dtype).itemsize for dtype in kinds), default=0)
    is_whole = any(dtypes.kind(dtype) == "integer" for dtype in kinds)
    if elements is ELEMENTS:
        found += [Stretch(element=x) for x in ((2.0**20, 2.0**-20) if least >= 4 else (32.0,) if least == 2 else ())]
        found = found[:2] if is_whole else found
    if least >= 4:
        found += [Stretch(weight=2**10)] if weights is WEIGHTS else []
        found += [Stretch(doublings=8), Stretch(doublings=11)]  # an exact sum of float32 holds 4,096
    return found


def _near(left: Any, right: Any, ulps: int, largest: float) -> bool:
    if is_absent(left) or is_absent(right):
        return is_absent(left) and is_absent(right)
    x: Any = np.asarray(left)
    y: Any = np.asarray(right)
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    inexact = dtypes.kind(x.dtype) in ("float", "complex")
    alike = x == y
    if inexact and not ulps:
        alike &= np.signbit(x.real) == np.signbit(y.real)
    if inexact:
        alike |= (x != x) & (y != y)
    if inexact and ulps:
        step = 2 * rounding_unit(dtypes.part(x.dtype))
        with np.errstate(invalid="ignore"):
            wide = x + np.float64(0), y + np.float64(0)
            scale = max(largest, *(float(np.max(abs(z), where=np.isfinite(z), initial=0)) for z in wide))
            alike |= abs(wide[0] - wide[1]) <= ulps * step * scale
    return bool(np.all(alike))
