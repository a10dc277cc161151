"""A reduction that keeps a ledger: how often each numbered microbatch of a window has been counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import in_words, is_absent, is_array_of, require_scalar, resolve
from gradcombine.errors import GradCombineError, require_integer
from gradcombine.reductions.algebra import Reduction, Shortcuts, require_reduction
from gradcombine.reductions.dtypes import INT32
from gradcombine.types import Array, Order, State, Tree, no_autograph

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


@dataclass(frozen=True)
class NumberedReduction(Reduction):
    """A reduction whose contributions are `Numbered`.

    Attributes:
      microbatches: how many logical ones a window has.
      of: the reduction of their values.
    """

    microbatches: int = field(kw_only=True)
    of: Reduction = field(kw_only=True)


@no_autograph
def numbered(reduction: Reduction, microbatches: int) -> NumberedReduction:
    """The same reduction, whose states tell which microbatches they hold.

    The microbatches of a window are numbered from 0, over time and replicas, whichever replica computes them: where
    nothing happens, replica r has ``every`` of them from ``r * every`` on. The ledger is a sum like any other, of
    vectors that hold a single 1. So it is merged, saved, loaded, resized and sent with the state that it belongs to,
    and a state with a ledger of another length is refused. `gradcombine.ledger` reads it, and deals what is missing.

    Args:
      reduction: any reduction.
      microbatches: of a whole window, over all replicas; from 1 to 2**24, whose ledger takes 64 MiB.

    Returns:
      A reduction of the same values. Contributions are ``Numbered(value, number)``. One of weight 0 is in the ledger
      as well, as it need not come again. In a `gradcombine.window.Window`, as the integrations have them, a
      contribution without a number has that of its place.

    Raises:
      GradCombineError: for a contribution without a number, or with one that is not below ``microbatches``; in
        ``merge``, where both states hold a microbatch, which is named; these where values are known. In compiled code
        such a number is in no ledger, and so found missing, and a doubled one is counted twice:
        `gradcombine.ledger.require_once` names both afterwards.

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
    require_reduction("numbered", reduction)
    count = require_integer("numbered", "from 1 to 2**24 microbatches", microbatches, highest=1 << 24)
    name = reduction.name

    def opened(state: State) -> NumberedState:
        if not isinstance(state, NumberedState):
            raise GradCombineError(name, "a NumberedState", type(state).__name__)
        if not is_array_of(state.counts, INT32, (count,)):
            raise GradCombineError(name, f"a ledger of {count} microbatches", in_words(state.counts), ".counts")
        return state

    @no_autograph
    def init(like: Tree) -> NumberedState:
        value = like.value if isinstance(like, Numbered) else like
        leaves = [leaf for leaf in tree.flatten(name, value)[0] if not is_absent(leaf)]
        return NumberedState(reduction.init(value), resolve(name, leaves).full((count,), 0, INT32, leaves))

    @no_autograph
    def update(state: State, value: Tree, weight: Any = 1) -> NumberedState:
        held = opened(state)
        if not isinstance(value, Numbered):
            raise GradCombineError(name, "Numbered(value, number)", type(value).__name__)
        require_scalar(name, "the number of a microbatch, an integer scalar", value.number, "iu", ".number")
        backend = resolve(name, [held.counts, value.number])
        number = backend.asarray(value.number)
        known = backend.concrete(number)
        if known is not None and not PLACEHOLDER <= int(known) < count:
            expected = f"the number of a microbatch, from 0 to {count - 1}, or -1"
            raise GradCombineError(name, expected, int(known), ".number")
        one = backend.cast(backend.asarray(np.arange(count, dtype=INT32)) == backend.cast(number, INT32), INT32)
        _require_apart(name, held.counts, one)
        return NumberedState(reduction.update(held.value, value.value, weight), backend.asarray(held.counts) + one)

    @no_autograph
    def merge(a: State, b: State) -> NumberedState:
        a, b = opened(a), opened(b)
        _require_apart(name, a.counts, b.counts)
        return NumberedState(reduction.merge(a.value, b.value), a.counts + b.counts)

    @no_autograph
    def finalize(state: State) -> Tree:
        return reduction.finalize(opened(state).value)

    @no_autograph
    def clear(state: State) -> NumberedState:
        state = opened(state)
        return NumberedState(reduction.clear(state.value), state.counts * 0)

    @no_autograph
    def all_merge(state: State, collective: Collective, order: Order) -> NumberedState:
        state = opened(state)
        (counts,) = collective.all_sum([state.counts])
        return NumberedState(reduction.all_merge(state.value, collective, order), counts)

    functions = init, update, merge, finalize
    derivative = None if reduction.derivative is None else numbered(reduction.derivative, count)
    shortcuts = Shortcuts(functions, clear, all_merge, derivative=derivative)
    scales = reduction.scales_by_weight
    return NumberedReduction(*functions, f"numbered({name})", scales, shortcuts, microbatches=count, of=reduction)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as text, for instance ``"0-5, 8"``; ``"none"`` where there are none."""
    runs = groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in runs)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends) or "none"


def _require_apart(name: str, a: Array, b: Array) -> None:
    """Refuses a microbatch that both of these counts have, where they are known."""
    backend = resolve(name, [a, b])
    known: Sequence[Any] = [backend.concrete(backend.asarray(counts)) for counts in (a, b)]
    if any(counts is None for counts in known):
        return
    twice = np.flatnonzero(np.minimum(*known) > 0)
    if twice.size:
        raise GradCombineError(name, "each microbatch once", f"twice: {ranges(twice.tolist())}")
