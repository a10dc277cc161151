"""Does a user's reduction obey the laws by which it is run?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from gradcombine import tree
from gradcombine.accumulation import accumulate
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent
from gradcombine.errors import GradCombineError, require_integer, shown
from gradcombine.lists import combine
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, require_reduction
from gradcombine.replicas import all_reduce, merge_replicas
from gradcombine.types import State, Tree
from gradcombine.verify.in_process import run_replicas
from gradcombine.verify.laws import COMMUTATIVE, LAWS, Contribution, Law
from gradcombine.verify.main import hint, missing

_ELEMENTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 4.0, -4.0)
_WEIGHTS = (1, 2, 3, 0.5, 0)
_FINALIZES = "an empty state finalizes, to no NaN"
_PURE = "the functions are pure: what they are given stays as it is"
_PLACES = "a list, time, replicas and mixtures of them give the same"


class BrokenLaw(AssertionError):  # noqa: N818 (a finding, as AssertionError's others)
    """A law that a reduction breaks.

    Attributes:
      law: what should hold.
      contributions: the smallest that were found for which it does not: pairs of value and weight.
      left: one side of the law.
      right: the other one, or the exception that was raised.
    """

    def __init__(self, name: str, law: str, contributions: Sequence[Contribution], left: Any, right: Any) -> None:
        self.law, self.contributions, self.left, self.right = law, list(contributions), left, right
        listed = "".join(f"\n  {value!r}, weight {weight!r}" for value, weight in contributions)
        super().__init__(
            f"{name} breaks the law: {law}\nfor the contributions:{listed}\none side:   {left!r}\nthe other:  {right!r}"
        )


def check_reduction(
    reduction: Reduction,
    like: Tree = np.zeros(2, np.float32),  # noqa: B008 (never changed)
    *,
    commutative: bool = True,
    ulps: int = 0,
    elements: Sequence[float] = _ELEMENTS,
    weights: Sequence[float] = _WEIGHTS,
    asarray: Callable[[np.ndarray], Any] = np.asarray,
    examples: int = 50,
) -> None:
    """Looks for contributions for which a reduction breaks a law, and names the law and the smallest of them.

    The laws: an empty state finalizes, to no NaN; the functions are pure; the empty state is the identity of ``merge``;
    ``update(s, v, w) == merge(s, update(init, v, w))``; a contribution of weight 0 changes nothing, NaN neither;
    ``clear`` gives the empty state; ``merge`` is associative and commutative; a list, time, two replicas and mixtures
    of them give the same in both orders. Each is tried on contributions that hypothesis generates and shrinks, the same
    ones in every run. What compilers make of the functions is not tried: nothing is compiled.

    Args:
      reduction: a user's own, or any other.
      like: a tree of the shapes and dtypes of contributions, with None where there is no gradient.
      commutative: whether ``merge`` has to be; `gradcombine.reductions.last` for one is not.
      ulps: how far apart the values of two sides may be, in units in the last place of the largest number among them
        and the contributions. 0: equal bits, except for the payload of NaN. By default sums and products of
        contributions do not round, so the laws of sums hold to the bit. The laws of weight 0, ``clear`` and purity hold
        for whole states, to the bit always.
      elements: what the leaves hold; whole ones alone are used for integers, and not the negative ones if unsigned.
      weights: of the contributions; whole ones alone where a leaf is of integers.
      asarray: makes arrays of another framework of NumPy's, as jax.numpy.asarray and tf.constant do.
      examples: so many cases are tried for each law.

    Raises:
      BrokenLaw: an AssertionError, for the first law that does not hold.
      GradCombineError: for settings that mean nothing, and where hypothesis is not installed.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.verify import check_reduction
    >>> check_reduction(gc.reductions.max())
    >>> check_reduction(gc.reductions.last())
    Traceback (most recent call last):
        ...
    gradcombine.verify.property_test.BrokenLaw: last breaks the law: merge is commutative: merge(a, b) == merge(b, a)
    for the contributions:
      array([0., 0.], dtype=float32), weight 1
      array([0., 1.], dtype=float32), weight 1
    one side:   array([0., 1.], dtype=float32)
    the other:  array([0., 0.], dtype=float32)
    """
    require_reduction("check_reduction", reduction)
    require_integer("check_reduction", "ulps from 0 to 2**20", ulps, 0, 2**20)
    require_integer("check_reduction", "1 example or more", examples)
    if lacking := missing(["hypothesis"]):
        raise GradCombineError("check_reduction", "the packages that it needs", hint(lacking))
    kinds = [dtypes.kind(np.asarray(x).dtype) for x in tree.flatten("check_reduction", like)[0] if not is_absent(x)]
    whole = "integer" in kinds
    usable = [weight for weight in weights if not whole or float(weight).is_integer()]
    if not usable:
        raise GradCombineError("check_reduction", "a weight, a whole one if leaves are integers", shown(weights))

    def pairs(law: Law, terms: Sequence[Contribution]) -> Iterator[tuple[Any, Any, int]]:
        for pair in law.pairs(reduction, terms):
            yield (*pair, 0) if law.of_states else (*map(reduction.finalize, pair), ulps)

    def places(terms: Sequence[Contribution]) -> Iterator[tuple[Any, Any, int]]:
        values = _places(reduction, terms)
        first = next(values)  # one at a time: what differs early ends the search for it early
        return ((first, other, ulps) for other in values)

    tried: list[tuple[str, int, Callable[[Sequence[Contribution]], Iterator[tuple[Any, Any, int]]]]] = [
        (_FINALIZES, 1, lambda terms: _empty(reduction, terms)),
        (_PURE, 2, lambda terms: _unchanged(reduction, terms)),
        *(
            (law.statement, law.terms, lambda terms, law=law: pairs(law, terms))
            for law in LAWS
            if commutative or law is not COMMUTATIVE
        ),
        (_PLACES, 4, places),
    ]
    for statement, count, sides in tried:
        _try(reduction.name, statement, sides, _contributions(like, count, elements, usable, asarray), examples)


def _try(name: str, statement: str, sides: Any, strategy: Any, examples: int) -> None:
    import hypothesis

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[*hypothesis.HealthCheck],  # pyright: ignore[reportArgumentType] (its metaclass is untyped)
    )
    @hypothesis.given(strategy)
    def holds(terms: list[Contribution]) -> None:
        largest = max((_largest(value) for value, _ in terms), default=0.0)
        pair: tuple[Any, Any] = (None, None)
        try:
            for left, right, ulps in sides(terms):
                pair = left, right
                if not _equal(left, right, ulps, largest):
                    break
            else:
                return
        except Exception as error:
            pair = ("no value", error)
        raise BrokenLaw(name, statement, terms, *pair)

    try:
        holds()
    except BrokenLaw as broken:
        # As it was raised for the smallest example, without what hypothesis adds about itself.
        raise BrokenLaw(name, broken.law, broken.contributions, broken.left, broken.right) from None


def _contributions(
    like: Tree, count: int, elements: Sequence[float], weights: Sequence[float], asarray: Callable[[np.ndarray], Any]
) -> Any:
    from hypothesis import strategies

    leaves, structure = tree.flatten("check_reduction", like)

    def leaf(x: Any) -> Any:
        if is_absent(x):
            return strategies.just(x)
        spec = np.asarray(x)
        drawn = [y for y in elements if dtypes.kind(spec.dtype) != "integer" or float(y).is_integer()]
        drawn = [y for y in drawn if spec.dtype.kind not in "ub" or y >= 0]
        if not drawn:
            raise GradCombineError("check_reduction", f"elements that are {spec.dtype}", shown(elements))
        rows = strategies.lists(strategies.sampled_from(drawn), min_size=spec.size, max_size=spec.size)
        return rows.map(lambda row: asarray(np.array(row, spec.dtype).reshape(spec.shape)))

    value = strategies.tuples(*map(leaf, leaves)).map(lambda drawn: tree.unflatten(structure, drawn))
    one = strategies.builds(Contribution, value, strategies.sampled_from(list(weights)))
    return strategies.lists(one, min_size=count, max_size=count)


def _empty(reduction: Reduction, terms: Sequence[Contribution]) -> Iterator[tuple[Any, Any, int]]:
    value = reduction.finalize(reduction.init(terms[0].value))
    leaves, structure = tree.flatten(reduction.name, value)
    numbers = [x if is_absent(x) else np.where(np.asarray(x) != np.asarray(x), 0, np.asarray(x)) for x in leaves]
    yield value, tree.unflatten(structure, numbers), 0


def _unchanged(reduction: Reduction, terms: Sequence[Contribution]) -> Iterator[tuple[Any, Any, int]]:
    (value, weight), (other, other_weight) = terms
    empty = reduction.init(value)
    kept = [(x, _copied(x)) for x in (empty, value, other)]
    a = reduction.update(empty, value, weight)
    kept.append((a, _copied(a)))
    b = reduction.update(empty, other, other_weight)
    kept.append((b, _copied(b)))
    for run in (reduction.finalize, reduction.clear, lambda a: reduction.merge(a, b)):
        run(a)
        yield from ((after, before, 0) for after, before in kept)


def _places(reduction: Reduction, terms: Sequence[Contribution]) -> Iterator[Any]:
    """The value of the same contributions in every place."""
    values, weights = zip(*terms, strict=True)
    orders: tuple[Any, ...] = ("sequential", "tree")
    for order in orders:
        yield combine(reduction, values, weights, order)
        yield accumulate(reduction, every=len(terms), order=order).value(_window(reduction, terms, order))

        def replica(rank: int, over: Collective, order: Any = order) -> tuple[Any, Any]:
            half = len(terms) // 2
            state = _window(reduction, terms[rank * half : (rank + 1) * half], order)
            merged = merge_replicas(reduction, state, over, order)
            return accumulate(reduction, every=half, order=order).value(merged)

        yield from run_replicas(2, replica)

        def alone(rank: int, over: Collective, order: Any = order) -> Any:
            return all_reduce(reduction, values[rank], over, weights[rank], order)

        yield from run_replicas(len(terms), alone)


def _window(reduction: Reduction, terms: Sequence[Contribution], order: Any) -> State:
    acc = accumulate(reduction, every=len(terms), order=order)
    state = acc.init(terms[0].value)
    for value, weight in terms:
        state = acc.update(value, state, weight)
    return state


def _copied(node: Tree) -> Tree:
    leaves, structure = tree.flatten("check_reduction", node)
    return tree.unflatten(structure, [x if is_absent(x) else np.array(x) for x in leaves])


def _largest(value: Tree) -> float:
    arrays = [np.abs(np.asarray(x, np.float64)) for x in tree.flatten("check_reduction", value)[0] if not is_absent(x)]
    return max((float(x.max()) for x in arrays if x.size), default=0.0)


def _equal(left: Tree, right: Tree, ulps: int, largest: float) -> bool:
    (lefts, one), (rights, other) = (tree.flatten("check_reduction", side) for side in (left, right))
    return one == other and all(_near(x, y, ulps, largest) for x, y in zip(lefts, rights, strict=True))


def _near(left: Any, right: Any, ulps: int, largest: float) -> bool:
    if is_absent(left) or is_absent(right):
        return is_absent(left) and is_absent(right)
    x: Any = np.asarray(left)
    y: Any = np.asarray(right)
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    inexact = dtypes.kind(x.dtype) in ("float", "complex")
    alike = (x == y) & (~inexact | (np.signbit(x.real) == np.signbit(y.real))) if not ulps else x == y
    if inexact:
        alike |= (x != x) & (y != y)
    if inexact and ulps:
        step = float(ml_dtypes.finfo(dtypes.part(x.dtype)).eps)
        with np.errstate(invalid="ignore"):
            wide = x + np.float64(0), y + np.float64(0)
            scale = np.maximum(np.maximum(abs(wide[0]), abs(wide[1])), largest)
            alike |= abs(wide[0] - wide[1]) <= ulps * step * scale
    return bool(np.all(alike))
