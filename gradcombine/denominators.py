"""A loss of several terms, each a sum over what it is counted in: its denominator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, cast

from gradcombine.backends.registry import in_words, owner, resolve
from gradcombine.errors import invalid, require_equal, require_one, require_type, shown, within
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.per_leaf import per_leaf
from gradcombine.reductions.ratios import Ratio, ratio, ratios_of
from gradcombine.reductions.sums import sum as sum_
from gradcombine.reductions.weights import parse, presence
from gradcombine.types import Array, Scalar, Tree, no_autograph


@dataclass(frozen=True)
class Terms:
    """The terms of a loss, and the denominator of each.

    Attributes:
      over: the name of each term's denominator.
      known: whether a window's totals of the denominators are known before its gradients.
    """

    over: Mapping[str, str]
    known: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.over, Mapping) or not self.over:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("terms as a dict from the name of each to that of its denominator", shown(self.over))
        for term, name in self.over.items():
            if not isinstance(term, str) or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise invalid("the name of a term's denominator", shown(name), f"[{term!r}]")

    @cached_property
    def denominators(self) -> list[str]:
        """Their names, each once, sorted."""
        return sorted(set(self.over.values()))

    @no_autograph
    def opened(self, received: Tree, weights: Tree) -> tuple[Tree, Tree]:
        """The terms and the weights of a loss that returns a `Ratio` of each; of another one, as they are.

        Raises:
          GradCombineError: for weights besides, and for terms of one denominator that bring different numbers.
        """
        terms = list(cast("Mapping[Any, Any]", received).values()) if isinstance(received, Mapping) else []
        if not any(isinstance(x, Ratio) for x in terms):
            return cast("Any", received), weights
        require_one("a Ratio of each term, or weights", terms, weights)
        ratios, found = _named("a Ratio of each term", self.over, received), dict[str, Any]()
        for term, value in ratios.items():
            value = require_type("a Ratio of each term", value, Ratio, f"[{term!r}]")
            name, denominator = self.over[term], value.denominator
            known = [_known(x) for x in (found.setdefault(name, denominator), denominator)]
            if None not in known:
                require_equal(
                    f"the denominator {{}}, as of other terms over {name!r}", known[0], known[1], f"[{term!r}]"
                )
        return {term: value.numerator for term, value in ratios.items()}, found

    @no_autograph
    def values(self, received: Tree) -> dict[str, Scalar]:
        """The terms of one microbatch: each a sum, a real floating scalar.

        Raises:
          GradCombineError: for others, which names the term.
        """
        values = _named("a value of each term", self.over, received)
        for term, value in values.items():
            backend = owner(value)
            if backend is None or backend.shape(value) != () or dtypes.kind(backend.dtype(value)) != "float":
                raise invalid("a real floating scalar", in_words(value), f"[{term!r}]")
        return values

    @no_autograph
    def widened(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """The values in one dtype, the widest of theirs and at least float32."""
        backend = resolve(values.values())
        widest = dtypes.of_weights(backend.dtype(x) for x in values.values())
        return {term: backend.cast(x, widest) for term, x in values.items()}

    @no_autograph
    def weights(self, received: Tree, what: str = "a weight of each denominator") -> dict[str, Scalar]:
        """The weights of one microbatch, or the totals of a window, by denominator.

        Raises:
          GradCombineError: for others, and for one that is no weight; names the denominator.
        """
        weights = self.named(what, received)
        for name, weight in weights.items():
            with within(f"[{name!r}]"):
                parse(resolve([] if owner(weight) is None else [weight]), weight)
        return weights

    @no_autograph
    def summed(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """By denominator, the sum of the terms that share it."""
        backend = resolve(values.values())
        return {
            name: reduce(backend.add, (x for term, x in values.items() if self.over[term] == name))
            for name in self.denominators
        }

    def reduction(self, given: Reduction | None) -> Reduction:
        """Combines the gradients: a mean for each denominator, or a sum where the totals are known.

        Raises:
          GradCombineError: for a reduction that does not fit.
        """
        if not self.known:
            return ratios_of(self.denominators, given)
        combined = sum_() if given is None else given
        if combined.scales_by_weight:
            raise invalid("a sum, for terms that are divided by known totals", combined.name)
        return combined

    def reduction_of_values(self) -> Reduction:
        """Combines the terms of a window, each with its denominator's total."""
        return sum_() if self.known else per_leaf({term: ratio() for term in self.over})

    def like(self, gradients: Tree) -> Tree:
        """Contributions of such gradients, for `reduction`."""
        return gradients if self.known else {name: Ratio(gradients, 1) for name in self.denominators}

    def contribution(self, gradients: Mapping[str, Tree], weights: Mapping[str, Scalar]) -> dict[str, Ratio]:
        """One microbatch for `reduction`, of its gradients by denominator."""
        return {name: Ratio(gradients[name], weights[name]) for name in self.denominators}

    @no_autograph
    def parts(
        self, values: Mapping[str, Scalar], weights: Mapping[str, Scalar], totals: Tree = None
    ) -> dict[str, Scalar]:
        """By term, one microbatch for `reduction_of_values`.

        Raises:
          GradCombineError: for totals that are none, where they are known.
        """
        if self.known:
            return self._shares(values, weights, self.weights(totals, "a total of each denominator"))
        return {term: Ratio(value, weights[self.over[term]]) for term, value in values.items()}

    def _shares(
        self, values: Mapping[str, Scalar], weights: Mapping[str, Scalar], totals: Mapping[str, Scalar]
    ) -> dict[str, Array]:
        """By term, what one microbatch adds to a window's ``sum / total``; in float32 at least.

        0 where the microbatch has weight 0 there, or the window the total 0, whatever the value.
        """
        backend = resolve([*values.values(), *weights.values(), *totals.values()])

        def share(term: str, value: Scalar) -> Array:
            name, dtype = self.over[term], dtypes.working(backend.dtype(value))
            whole = parse(backend, totals[name])
            absent = parse(backend, weights[name]).zero | whole.zero
            total = whole.cast(backend, dtype)
            zero, one = (backend.full((), x, dtype) for x in (0, 1))
            # Divided by no 0, of which the derivative would be NaN.
            divided = backend.divide(backend.cast(value, dtype), backend.where(absent, one, total))
            return backend.where(absent, zero, divided)

        return {term: share(term, value) for term, value in values.items()}

    @no_autograph
    def total(self, values: Mapping[str, Scalar]) -> Array:
        """The whole loss, of what its terms have become."""
        backend = resolve(values.values())
        return reduce(backend.add, (values[term] for term in self.over))

    @no_autograph
    def present(self, weights: Mapping[str, Scalar]) -> Scalar:
        """1 for a microbatch that has a weight other than 0, else 0; known where it can be."""
        backend = resolve(weights.values())
        found = [presence(backend, weight) for weight in weights.values()]
        if any(isinstance(x, int) and x for x in found):
            return 1
        return reduce(backend.maximum, [x for x in found if not isinstance(x, int)] or [0])

    def named(self, what: str, received: Tree) -> dict[str, Tree]:
        """Something that exists once for each denominator.

        Raises:
          GradCombineError: for a dict of other names, or none.
        """
        return _named(what, self.denominators, received)


def _known(number: Scalar) -> float | None:
    """The number, None where it is traced."""
    backend = owner(number)
    value = number if backend is None else backend.concrete(number)
    return None if value is None else float(value)


def _named(what: str, names: Iterable[str], received: Tree) -> dict[str, Tree]:
    expected = f"{what}, as a dict of {list(names)}"
    found = cast("Mapping[Any, Any]", require_type(expected, received, Mapping))
    if missing := [name for name in names if name not in found]:
        raise invalid(expected, "none", f"[{missing[0]!r}]")
    if others := [name for name in found if name not in names]:
        raise invalid(f"{expected} alone", "one more", f"[{others[0]!r}]")
    return {name: found[name] for name in names}
