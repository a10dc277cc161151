"""Names of strategies to run a window of microbatches."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradcombine import wires
from gradcombine.errors import invalid, shown

CALLS = ("window", "every", "flush", "accumulate")
PLACES = ("replicated", "zero1", "zero2", "fsdp")
NUMBERS = ("bfloat16", "8bits", "compensated", "exact", "tree")
"""Words in the names of strategies, as in the table of docs/plan.md."""


class Strategy(NamedTuple):
    """A strategy to run a window.

    Attributes:
      calls: what a call of the step processes, from `CALLS`.
      place: what is sharded over the replicas, from `PLACES`.
      numbers: precision, wire and order of sums, from `NUMBERS`; at most one precision and one wire.
    """

    calls: str
    place: str
    numbers: tuple[str, ...] = ()

    @property
    def mean(self) -> dict[str, Any]:
        """Keyword arguments of `gradcombine.reductions.mean`."""
        settings: dict[str, tuple[str, Any]] = {name: ("precision", name) for name in ("compensated", "exact")}
        settings |= {"bfloat16": ("wire", wires.cast("bfloat16")), "8bits": ("wire", wires.blocks(8))}
        return dict(settings[name] for name in self.numbers if name in settings)

    @property
    def name(self) -> str:
        return "+".join((self.calls, *[self.place] * (self.place != "replicated"), *self.numbers))


DEFAULT = (
    *(f"{calls}+{place}" for calls in ("window", "every", "flush") for place in PLACES),
    "accumulate",
    *(f"window+{name}" for name in NUMBERS),
)


def way_of(name: str) -> Strategy:
    """Parses a strategy's name: words of `CALLS`, `PLACES`, `NUMBERS` joined by +, as in ``"every+zero1+bfloat16"``.

    The defaults are "window", "replicated", and plain sums in the accumulators' dtype.

    Raises:
      GradCombineError: for an unknown word, and two words that exclude each other.

    >>> way_of("zero1"), way_of("every+replicated").name
    (Strategy(calls='window', place='zero1', numbers=()), 'every')
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid("the name of a strategy", shown(name))
    words = [word.strip() for word in name.split("+")]
    known = [*CALLS, *PLACES, *NUMBERS]
    if unknown := [word for word in words if word not in known]:
        raise invalid(f"a strategy of the words {', '.join(known)}, joined by +", ", ".join(unknown))
    calls, places, numbers = ([word for word in group if word in words] for group in (CALLS, PLACES, NUMBERS))
    exclusive = ("compensated", "exact"), ("bfloat16", "8bits")
    choices = [calls, places, *([word for word in numbers if word in group] for group in exclusive)]
    if len(words) > len(set(words)) or any(len(choice) > 1 for choice in choices):
        raise invalid("a strategy with at most one word for the calls, the sharding, the precision and the wire", name)
    return Strategy("".join(calls) or "window", "".join(places) or "replicated", tuple(numbers))
