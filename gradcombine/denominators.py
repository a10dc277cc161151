"""A loss of several terms, each a sum that is divided by its own denominator, such as a number of tokens."""

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


@no_autograph
@dataclass(frozen=True)
class Terms:
    """The names of the terms of a loss and of their denominators.

    Attributes:
      over: from the name of a term to the name of its denominator.
      known: whether the totals of the denominators over a window are known before its gradients are computed.
    """

    over: Mapping[str, str]
    known: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.over, Mapping) or not self.over:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("terms as a dict from the name of a term to the name of its denominator", shown(self.over))
        for term, name in self.over.items():
            if not isinstance(term, str) or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise invalid("the name of a term's denominator", shown(name), f"[{term!r}]")

    @cached_property
    def denominators(self) -> list[str]:
        """The sorted names of the denominators."""
        return sorted(set(self.over.values()))

    def opened(self, received: Tree, weights: Tree) -> tuple[Tree, Tree]:
        """Splits the `Ratio` of each term into terms and weights by denominator; returns other inputs unchanged.

        Raises:
          GradCombineError: for weights in addition to ratios, and for invalid or different values of one denominator.
        """
        terms = list(cast("Mapping[Any, Any]", received).values()) if isinstance(received, Mapping) else []
        if not any(isinstance(x, Ratio) for x in terms):
            return cast("Any", received), weights
        require_one("a Ratio of each term, or weights", terms, weights)
        ratios, denominators = _named("a Ratio of each term", self.over, received), dict[str, Any]()
        for term, value in ratios.items():
            value = require_type("a Ratio of each term", value, Ratio, f"[{term!r}]")
            name, denominator = self.over[term], value.denominator
            _check_weight(name, denominator)
            known = [_known(x) for x in (denominators.setdefault(name, denominator), denominator)]
            if None not in known:
                expected = f"the denominator {{}}, as in other terms over {name!r}"
                require_equal(expected, known[0], known[1], f"[{term!r}]")
        return {term: value.numerator for term, value in ratios.items()}, denominators

    def values(self, received: Tree) -> dict[str, Scalar]:
        """Returns the terms of one microbatch, each a real floating scalar; raises for other dicts and values."""
        values = _named("a value of each term", self.over, received)
        for term, value in values.items():
            backend = owner(value)
            if backend is None or backend.shape(value) != () or dtypes.kind(backend.dtype(value)) != "float":
                raise invalid("a real floating scalar", in_words(value), f"[{term!r}]")
        return values

    def widened(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Casts the values to their widest dtype, at least float32."""
        backend = resolve(values.values())
        widest = dtypes.of_weights(backend.dtype(x) for x in values.values())
        return {term: backend.cast(x, widest) for term, x in values.items()}

    def weights(self, received: Tree, what: str = "a weight of each denominator") -> dict[str, Scalar]:
        """Returns the weights of one microbatch, or the totals of a window, by denominator; raises for invalid ones."""
        weights = self.named(what, received)
        for name, weight in weights.items():
            _check_weight(name, weight)
        return weights

    def summed(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The sum of the terms of each denominator."""
        backend = resolve(values.values())
        return {
            name: reduce(backend.add, (x for term, x in values.items() if self.over[term] == name))
            for name in self.denominators
        }

    def reduction(self, base: Reduction | None) -> Reduction:
        """The reduction of the gradients: a sum if the totals are known, else a ratio per denominator.

        Args:
          base: the sum, or the mean of the ratios; None for the default one.

        Raises:
          GradCombineError: for a reduction of the other type.
        """
        if not self.known:
            return ratios_of(self.denominators, base)
        combined = sum_() if base is None else base
        if combined.scales_by_weight:
            raise invalid("a sum, for terms that are divided by known totals", combined.name)
        return combined

    def reduction_of_values(self) -> Reduction:
        """The reduction of the terms themselves over a window: sums if the totals are known, else ratios."""
        return sum_() if self.known else per_leaf({term: ratio() for term in self.over})

    def like(self, gradients: Tree) -> Tree:
        """The contribution to `reduction` whose structure, shapes and dtypes ``init`` needs."""
        return gradients if self.known else {name: Ratio(gradients, 1) for name in self.denominators}

    def contribution(self, gradients: Mapping[str, Tree], weights: Mapping[str, Scalar]) -> dict[str, Ratio]:
        """The contribution of one microbatch to `reduction`, from its gradients and weights by denominator."""
        return {name: Ratio(gradients[name], weights[name]) for name in self.denominators}

    def parts(
        self, values: Mapping[str, Scalar], weights: Mapping[str, Scalar], totals: Tree = None
    ) -> dict[str, Scalar]:
        """The contribution of one microbatch to `reduction_of_values`, by term.

        Raises:
          GradCombineError: for invalid totals.
        """
        if self.known:
            return self._shares(values, weights, self.weights(totals, "a total of each denominator"))
        return {term: Ratio(value, weights[self.over[term]]) for term, value in values.items()}

    def _shares(
        self, values: Mapping[str, Scalar], weights: Mapping[str, Scalar], totals: Mapping[str, Scalar]
    ) -> dict[str, Array]:
        """The share of one microbatch in the window's ``sum / total`` of each term, in at least float32.

        0, whatever the value, if the weight of the microbatch or the total of the window is 0.
        """
        backend = resolve([*values.values(), *weights.values(), *totals.values()])

        def share(term: str, value: Scalar) -> Array:
            name, dtype = self.over[term], dtypes.working(backend.dtype(value))
            total_weight = parse(backend, totals[name])
            absent = parse(backend, weights[name]).zero | total_weight.zero
            total = total_weight.cast(backend, dtype)
            zero, one = (backend.full((), x, dtype) for x in (0, 1))
            # Never divides by 0, as the derivative would be NaN.
            divided = backend.divide(backend.cast(value, dtype), backend.where(absent, one, total))
            return backend.where(absent, zero, divided)

        return {term: share(term, value) for term, value in values.items()}

    def total(self, values: Mapping[str, Scalar]) -> Array:
        """The loss: the sum of its terms."""
        backend = resolve(values.values())
        return reduce(backend.add, (values[term] for term in self.over))

    def present(self, weights: Mapping[str, Scalar]) -> Scalar:
        """1 if any weight of the microbatch is nonzero, else 0; a Python int if known, else a traced scalar."""
        backend = resolve(weights.values())
        flags = [presence(backend, weight) for weight in weights.values()]
        if any(isinstance(x, int) and x for x in flags):
            return 1
        return reduce(backend.maximum, [x for x in flags if not isinstance(x, int)] or [0])

    def named(self, what: str, received: Tree) -> dict[str, Tree]:
        """Returns a dict with one value per denominator; raises for other names and for other types."""
        return _named(what, self.denominators, received)


def _check_weight(name: str, weight: Scalar) -> None:
    """Raises for an invalid weight of the denominator with this name."""
    with within(f"[{name!r}]"):
        parse(resolve([] if owner(weight) is None else [weight]), weight)


def _known(number: Scalar) -> float | None:
    """The value of the number; None if it is traced."""
    backend = owner(number)
    value = number if backend is None else backend.concrete(number)
    return None if value is None else float(value)


def _named(what: str, names: Iterable[str], received: Tree) -> dict[str, Tree]:
    expected = f"{what}, as a dict of {list(names)}"
    values = cast("Mapping[Any, Any]", require_type(expected, received, Mapping))
    if missing := [name for name in names if name not in values]:
        raise invalid(expected, "none", f"[{missing[0]!r}]")
    if others := [name for name in values if name not in names]:
        raise invalid(f"{expected} only", "another name", f"[{others[0]!r}]")
    return {name: values[name] for name in names}
