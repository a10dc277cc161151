"""A reduction that keeps a ledger: how often each numbered microbatch of a window has been counted."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import in_words, is_absent, is_array_of, require_scalar, resolve
from gradcombine.errors import invalid, operation
from gradcombine.reductions.algebra import Reduction, Wrapper, described
from gradcombine.reductions.dtypes import INT32
from gradcombine.settings import check, valid
from gradcombine.types import Array, Order, Scalar, State, Tree

PLACEHOLDER = -1
"""The number of a contribution that stands in no ledger: one of weight 0 that fills a place."""


class Numbered(NamedTuple):
    """One contribution to a `numbered` reduction.

    Attributes:
      value: the contribution.
      number: of the microbatch in its window, from 0: an integer scalar, known or traced. -1: a placeholder, which no
        ledger names.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.reductions import Numbered
    >>> total = gc.reductions.numbered(gc.reductions.sum(), 2)
    >>> float(gc.combine(total, [Numbered(np.float32(3), 0), Numbered(np.float32(4), 1)]))
    7.0
    """

    value: Tree
    number: Array


class NumberedState(NamedTuple):
    """A partial result, and how often it holds each microbatch.

    Attributes:
      value: the state of the reduction.
      counts: int32 of shape (microbatches,).
    """

    value: State
    counts: Array


@operation("numbered")
def numbered(reduction: Reduction, microbatches: int) -> Reduction:
    """Keeps a ledger in the states of a reduction, which tells the microbatches that they hold.

    The microbatches of a window are numbered from 0, over time and replicas, whichever replica computes them: where
    nothing happens, replica r has ``every`` of them from ``r * every`` on. The ledger is a sum like any other, of
    vectors that hold a single 1. So it is merged, saved, loaded, resized and sent with the state that it belongs to,
    and a state with a ledger of another length is refused. `gradcombine.resilience.ledger` reads it, and deals what is
    missing.

    Args:
      reduction: any reduction.
      microbatches: of a whole window, over all replicas; from 1 to 2**24, whose ledger takes 64 MiB.

    Returns:
      A reduction of the same values. Contributions are ``Numbered(value, number)``. One of weight 0 is in the ledger
      as well, as it need not come again. In a `gradcombine.places.window.Window`, as the integrations have them, a
      contribution without a number has that of its place.

    Raises:
      GradCombineError: for a contribution without a number, or with one that is not below ``microbatches``; in
        ``merge``, where both states hold a microbatch, which is named; these where values are known. In compiled code
        such a number is in no ledger, and so found missing, and a doubled one is counted twice:
        `gradcombine.resilience.ledger.require_once` names both afterwards.

    Bits: those of the reduction. A state is 4 bytes a microbatch larger, and so is what replicas exchange.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.reductions import Numbered
    >>> mean = gc.reductions.numbered(gc.reductions.mean(), 4)
    >>> acc = gc.accumulate(mean, every=4)
    >>> state = acc.init(np.zeros(2, np.float32))
    >>> for number in 0, 1, 3:
    ...     state = acc.update(Numbered(np.float32([number, 1]), number), state)
    >>> print(gc.ledger.read(state))
    holds 0-1, 3; misses 2
    >>> gc.merge_replicas(mean, state, over=gc.LOCAL).levels[0].counts
    array([1, 1, 0, 1], dtype=int32)
    """
    check(reduction=reduction)
    if reduction.microbatches is not None:
        raise invalid("a reduction without a ledger", repr(reduction))
    return NumberedReduction(reduction, valid("microbatches", microbatches))


class NumberedReduction(Wrapper):
    """A reduction whose contributions are `Numbered`. See `numbered`."""

    def __init__(self, of: Reduction, microbatches: int) -> None:
        super().__init__(of)
        self.name, self._count = f"numbered({of.name})", microbatches

    def around(self, of: Reduction) -> Reduction:
        return NumberedReduction(of, self._count)

    @property
    def description(self) -> str:
        return described("numbered", self.of.description, microbatches=self._count)

    @property
    def microbatches(self) -> int | None:
        return self._count

    @operation()
    def init(self, like: Tree) -> NumberedState:
        value = like.value if isinstance(like, Numbered) else like
        leaves = [leaf for leaf in tree.flatten(value)[0] if not is_absent(leaf)]
        counts = resolve(leaves).full((self._count,), 0, INT32, leaves)
        return NumberedState(self.of.init(value), counts)

    @operation()
    def update(self, state: State, value: Tree, weight: Scalar = 1) -> NumberedState:
        name, held = self.of.name, self._open(state)
        if not isinstance(value, Numbered):
            raise invalid("Numbered(value, number)", type(value).__name__)
        backend = resolve([held.counts, value.number])
        one = one_at(backend, value.number, self._count)
        _require_apart(name, held.counts, one)
        return NumberedState(self.of.update(held.value, value.value, weight), backend.asarray(held.counts) + one)

    @operation()
    def merge(self, a: State, b: State) -> NumberedState:
        a, b = self._open(a), self._open(b)
        _require_apart(self.of.name, a.counts, b.counts)
        return NumberedState(self.of.merge(a.value, b.value), a.counts + b.counts)

    @operation()
    def finalize(self, state: State) -> Tree:
        return self.of.finalize(self._open(state).value)

    @operation()
    def clear(self, state: State) -> NumberedState:
        state = self._open(state)
        return NumberedState(self.of.clear(state.value), state.counts * 0)

    @operation()
    def all_merge(self, state: State, collective: Collective, order: Order) -> NumberedState:
        state = self._open(state)
        (counts,) = collective.all_sum([state.counts])
        return NumberedState(self.of.all_merge(state.value, collective, order), counts)

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        if not isinstance(value, Numbered):
            raise invalid("Numbered(value, number)", type(value).__name__)
        gradients, inner = self.of.gradients(value.value)
        return gradients, lambda changed: Numbered(inner(changed), value.number)

    def _open(self, state: State) -> NumberedState:
        if not isinstance(state, NumberedState):
            raise invalid("a NumberedState", type(state).__name__)
        if not is_array_of(state.counts, INT32, (self._count,)):
            expected = f"a ledger of {self._count} microbatches"
            raise invalid(expected, in_words(state.counts), ".counts")
        return state


def without_numbers(reduction: Reduction) -> Reduction:
    """The reduction of the same wrappers without a ledger, of contributions without numbers."""
    if reduction.microbatches is None or not isinstance(reduction, Wrapper):
        return reduction
    if isinstance(reduction, NumberedReduction):
        return reduction.of
    return reduction.around(without_numbers(reduction.of))


def one_at(backend: Backend, number: Scalar, count: int) -> Array:
    """int32 zeros with a 1 at the number of a microbatch; without it for a placeholder, or a traced number beyond.

    Compared in the number's own dtype: a cast to fewer bits would wrap a number around.
    """
    if not isinstance(number, int) or isinstance(number, bool):
        require_scalar("the number of a microbatch, an integer scalar", number, "iu", ".number")
        number = backend.asarray(number)
    known = number if isinstance(number, int) else backend.concrete(number)
    if known is not None and not PLACEHOLDER <= int(known) < count:
        raise invalid(f"the number of a microbatch, from 0 to {count - 1}, or -1", int(known), ".number")
    number = backend.asarray(number)
    dtype = backend.dtype(number)
    most = np.iinfo(dtype).max
    places = np.arange(builtins.min(count, most + 1)).astype(dtype)
    one = backend.cast(backend.asarray(places) == number, INT32)
    return one if len(places) == count else backend.concat([one, backend.full((count - len(places),), 0, INT32)])


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as text, for instance ``"0-5, 8"``; ``"none"`` where there are none."""
    runs = groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in runs)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends) or "none"


def _require_apart(name: str, a: Array, b: Array) -> None:
    """Refuses a microbatch that both of these counts have, where they are known."""
    backend = resolve([a, b])
    known: Sequence[Any] = [backend.concrete(backend.asarray(counts)) for counts in (a, b)]
    if any(counts is None for counts in known):
        return
    twice = np.flatnonzero(np.minimum(*known) > 0)
    if twice.size:
        raise invalid("each microbatch once", f"twice: {ranges(twice.tolist())}")
