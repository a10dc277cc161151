"""A wrapper that keeps a ledger of the numbered microbatches in a state."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import in_words, is_absent, is_array_of, require_scalar, resolve
from gradcombine.errors import invalid, operation, require_type
from gradcombine.reductions.algebra import Reduction, Wrapper
from gradcombine.reductions.dtypes import INT32
from gradcombine.settings import check, valid
from gradcombine.types import Array, Order, Scalar, State, Tree

PLACEHOLDER = -1
"""The number of a contribution that is not recorded in the ledger, such as a padding microbatch of weight 0."""


class Numbered(NamedTuple):
    """One contribution to a `numbered` reduction.

    Attributes:
      value: the contribution.
      number: the index of the microbatch in its window, from 0; an integer scalar, traced or not. -1: not recorded.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.reductions import Numbered
    >>> total = gc.reductions.numbered(gc.reductions.sum(), 2)
    >>> float(gc.combine(total, [Numbered(np.float32(3), 0), Numbered(np.float32(4), 1)]))
    7.0
    """

    value: Tree
    number: Array


class NumberedState(NamedTuple):
    """A partial result and its ledger.

    Attributes:
      value: the state of the wrapped reduction.
      counts: int32 of shape (microbatches,), how many times each microbatch was added.
    """

    value: State
    counts: Array


@operation("numbered")
def numbered(reduction: Reduction, microbatches: int) -> Reduction:
    """Adds a ledger to the states of a reduction, which records the microbatches that they contain.

    The microbatches of a window are numbered from 0, over time and replicas, whichever replica computes them. By
    default replica r has the ``every`` numbers from ``r * every``. The ledger is a sum of one-hot vectors, and is
    merged, saved, loaded, resized and exchanged together with its state. States with ledgers of other lengths raise.
    `gradcombine.resilience.ledger` reads the ledger, and reassigns missing microbatches.

    Args:
      reduction: any reduction.
      microbatches: the number of microbatches of a window, over all replicas; from 1 to 2**24, which takes 64 MiB.

    Returns:
      A reduction of the same values, whose contributions are ``Numbered(value, number)``. The ledger records
      contributions of weight 0, too, as they need not be computed again. A `gradcombine.places.window.Window`, as in
      the integrations, numbers contributions that have no number.

    Raises:
      GradCombineError: for a contribution without a number; for a number that is not below ``microbatches``; and for a
        microbatch that is added twice, by ``update`` or ``merge``. If the latter two are traced, the number is not
        recorded, or is counted twice: `gradcombine.resilience.ledger.require_once` reports both afterwards.

    Bits: those of the reduction. The ledger takes 4 bytes per microbatch in states and in exchanges.

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

    microbatches: int
    call, state = "numbered", NumberedState

    def __init__(self, of: Reduction, microbatches: int) -> None:
        super().__init__(of, microbatches=microbatches)
        self.name, self.microbatches = f"numbered({of.name})", microbatches

    def init(self, like: Tree) -> NumberedState:
        value = like.value if isinstance(like, Numbered) else like
        leaves = [leaf for leaf in tree.flatten(value)[0] if not is_absent(leaf)]
        counts = resolve(leaves).full((self.microbatches,), 0, INT32, leaves)
        return NumberedState(self.of.init(value), counts)

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> NumberedState:
        state = self.require(state)
        require_type("Numbered(value, number)", value, Numbered)
        backend = resolve([state.counts, value.number])
        one = one_at(backend, value.number, self.microbatches)
        _require_disjoint(state.counts, one)
        return NumberedState(self.of.update(state.value, value.value, weight), backend.asarray(state.counts) + one)

    def merge(self, a: State, b: State) -> NumberedState:
        a, b = self.require(a), self.require(b)
        _require_disjoint(a.counts, b.counts)
        return NumberedState(self.of.merge(a.value, b.value), a.counts + b.counts)

    def finalize(self, state: State) -> Tree:
        return self.of.finalize(self.require(state).value)

    def clear(self, state: State) -> NumberedState:
        state = self.require(state)
        return NumberedState(self.of.clear(state.value), state.counts * 0)

    def all_merge(self, state: State, collective: Collective, order: Order) -> NumberedState:
        state = self.require(state)
        (counts,) = collective.all_sum([state.counts])
        return NumberedState(self.of.all_merge(state.value, collective, order), counts)

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        require_type("Numbered(value, number)", value, Numbered)
        gradients, inner = self.of.gradients(value.value)
        return gradients, lambda changed: Numbered(inner(changed), value.number)

    def require(self, state: State) -> NumberedState:
        super().require(state)
        if not is_array_of(state.counts, INT32, (self.microbatches,)):
            expected = f"a ledger of {self.microbatches} microbatches"
            raise invalid(expected, in_words(state.counts), ".counts")
        return state


def without_numbers(reduction: Reduction) -> Reduction:
    """Removes `numbered` from a reduction, also inside of other wrappers."""
    if reduction.microbatches is None or not isinstance(reduction, Wrapper):
        return reduction
    if isinstance(reduction, NumberedReduction):
        return reduction.of
    return reduction.around(without_numbers(reduction.of))


def one_at(backend: Backend, number: Scalar, count: int) -> Array:
    """The int32 one-hot vector of a microbatch; zeros for a placeholder, and for a traced number out of range.

    Compares in the dtype of the number, as a cast to a narrower one would wrap around.
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
    indices = np.arange(builtins.min(count, most + 1)).astype(dtype)
    one = backend.cast(backend.asarray(indices) == number, INT32)
    return one if len(indices) == count else backend.concat([one, backend.full((count - len(indices),), 0, INT32)])


def ranges(numbers: Iterable[int]) -> str:
    """Formats numbers, for instance ``"0-5, 8"``, or ``"none"``."""
    runs = groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in runs)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends) or "none"


def _require_disjoint(a: Array, b: Array) -> None:
    """Raises for a microbatch in both ledgers, unless they are traced."""
    backend = resolve([a, b])
    values: Sequence[Any] = [backend.concrete(backend.asarray(counts)) for counts in (a, b)]
    if any(counts is None for counts in values):
        return
    twice = np.flatnonzero(np.minimum(*values) > 0)
    if twice.size:
        raise invalid("each microbatch once", f"twice: {ranges(twice.tolist())}")
