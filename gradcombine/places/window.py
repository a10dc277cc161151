# pyright: standard
"""A window of training: microbatches over time and replicas, up to the boundary where they are combined.

What an optimizer wrapper or a training step has to know about windows is here, for every framework alike. A host, as
the integrations are, keeps the state where its framework wants it, and lends the one thing that differs between
frameworks: a branch that is taken once per window and costs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import owner, resolve
from gradcombine.errors import MOST, invalid, require_given, shown
from gradcombine.places.replicas import LOCAL, merge_replicas
from gradcombine.places.time import Accumulator, accumulate, length_at, whole_window
from gradcombine.reductions import dtypes, weights
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.feedback import require_none, residuals
from gradcombine.reductions.numbered import PLACEHOLDER, Numbered, one_at
from gradcombine.settings import UNTIL_FLUSH, Settings
from gradcombine.types import AccumulateState, Array, BinaryCounter, Leaf, Order, Scalar, State, Tree, no_autograph

OVER = np.int32(MOST)
"""The step of a window that has ended, whatever its length: its contributions were applied, or all left out."""


class RunIf(Protocol):
    """The branch of a host: ``run(kept)`` where the boolean scalar holds, else ``kept`` as it is.

    Returns:
      What is kept, and the second result of ``run``; of that, zeros where it did not run.
    """

    def __call__(self, condition: Array, run: Callable[[Tree], tuple[Tree, Tree]], kept: Tree) -> tuple[Tree, Tree]: ...


@dataclass(frozen=True)
class Window(Settings):
    """Contributions of several replicas over time. Pure functions of an `AccumulateState`.

    A window is full after ``every`` microbatches, those of weight 0 and those left out counted, or when it is flushed.
    The contribution after that begins the next one. A full window stays readable until then, unless it was applied by a
    host whose exchange takes arrays over (`is_taken_over`): of such a one nothing is promised but that it is full.

    That a window is over is noted in its state, by `OVER` in the place of its step. So a saved window that goes on
    under another ``every`` loses nothing: where it has as many microbatches as that, or more, it ends with the next.

    Attributes:
      reduction: from `gradcombine.reductions`.
      every, order, max_every: as for `gradcombine.accumulate`. `gradcombine.UNTIL_FLUSH`: a flush alone ends windows;
        order ``"tree"`` then needs ``max_every``.
      over: the replicas. The state's levels are each replica's own, all else in it is the same on all.
    """

    reduction: Reduction
    every: int | Callable[[Array], Scalar]
    over: Collective = LOCAL
    order: Order = "sequential"
    max_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.accumulator  # a bad function is refused here, before there is a state

    @cached_property
    def accumulator(self) -> Accumulator:
        """The window of one replica."""
        # A counter has levels for the longest window: one without an end has to be told of another.
        every = self.every
        if self.ends_by_flush and self.order == "tree":
            expected = "max_every, the longest window, for windows that a flush alone ends in order 'tree'"
            require_given(expected, self.max_every)
            return accumulate(self.reduction, lambda index: UNTIL_FLUSH, order=self.order, max_every=self.max_every)
        return accumulate(self.reduction, every, order=self.order, max_every=self.max_every)

    @property
    def ends_by_flush(self) -> bool:
        """Whether nothing but a flush ends windows, which is the host's to know."""
        return not callable(self.every) and self.every == UNTIL_FLUSH

    @no_autograph
    def init(self, like: Tree) -> AccumulateState:
        """No window begun, for gradients of these shapes and dtypes."""
        return self.accumulator.init(like)

    @no_autograph
    def is_full(self, state: AccumulateState) -> Array:
        """Whether the window has ended, and its contributions may be taken; a boolean scalar."""
        return self.accumulator.ready(state)

    @no_autograph
    def is_over(self, state: AccumulateState) -> Array:
        """Whether the next contribution begins another window; a boolean scalar."""
        return state.step >= OVER  # which is the largest int32; tensors of TensorFlow 1's graphs know no ==

    @no_autograph
    def is_partial(self, state: AccumulateState) -> Array:
        """Whether there are contributions that a flush has to apply."""
        return (state.step > 0) & ~self.is_over(state)

    @no_autograph
    def next(self, state: AccumulateState) -> tuple[Array, Array]:
        """The number of the window that the next contribution belongs to, and its place there; both from 0."""
        backend, over = resolve([state.step, state.index]), self.is_over(state)
        step = self._going_on(state).step
        return backend.where(over, state.index + 1, state.index), backend.where(over, step * 0, step)

    @no_autograph
    def number(self, state: AccumulateState) -> Array:
        """The number of the next contribution among those of its window on all replicas, from 0.

        Each replica has a block, as long as the window; where only a flush ends that, replicas take turns.
        """
        index, place = self.next(state)
        if self.ends_by_flush:
            return place * self.over.size() + self.over.rank()
        return self.over.rank() * self._length(index) + place

    @no_autograph
    def contribute(
        self,
        state: AccumulateState,
        gradients: Tree,
        weight: Scalar = 1.0,
        *,
        left_out: Array | bool = False,
        number: Array | None = None,
    ) -> AccumulateState:
        """One more microbatch of this replica.

        Args:
          state: the window so far.
          gradients: of this replica, as for `gradcombine.accumulate`.
          weight: likewise.
          left_out: whether it counts nothing. It is a step of its window all the same, so that windows end with the
            same microbatches whatever is left out. The same on all replicas, see `agreed`.
          number: of the microbatch, for a reduction that is `gradcombine.reductions.numbered`; None: that of its place.
        """
        if self.reduction.microbatches is not None and not isinstance(gradients, Numbered):
            gradients = Numbered(gradients, self.number(state) if number is None else number)
        elif number is not None:
            raise invalid("no number, or a reduction that is numbered", shown(number))
        if left_out is not False:
            weight = self._weight_unless(left_out, gradients, weight)
        return self.accumulator.update(gradients, self.own(self._going_on(state)), weight)

    @no_autograph
    def once(self, state: AccumulateState, weight: Scalar, number: Array) -> tuple[Scalar, Array]:
        """The weight and the number of a contribution; 0 and a placeholder where the window holds the number already.

        Args:
          state: the window so far, of a reduction that is `gradcombine.reductions.numbered`.
          weight, number: as for `contribute`, which they are for.
        """
        counts, microbatches = whole_window(self.reduction, state).counts, self.reduction.microbatches
        backend = resolve([counts, number])
        one = one_at(backend, number, 0 if microbatches is None else microbatches)
        again = (backend.total(backend.product(backend.asarray(counts), one)) > 0) & ~self.is_over(state)
        number = backend.asarray(number)
        placeholder = backend.full((), PLACEHOLDER, backend.dtype(number))
        return weights.where(backend, ~again, weight, wide=True), backend.where(again, placeholder, number)

    @no_autograph
    def end(self, state: AccumulateState, condition: Array | bool = True) -> AccumulateState:
        """The state, its window over where the condition holds: the next contribution begins another."""
        if condition is False:
            return state
        backend = resolve([state.step])
        over = backend.full((), int(OVER), dtypes.INT32, [state.step])
        return state._replace(step=over if condition is True else backend.where(condition, over, state.step))

    @no_autograph
    def due(
        self, state: AccumulateState, *, flush: Array | bool = False, left_out_in_a_row: Array | None = None
    ) -> tuple[AccumulateState, Array]:
        """Ends the window where it is flushed, and says whether it is to be applied.

        That is where it is full, and not all of its microbatches were left out: neither momentum nor weight decay is to
        act on a gradient that was not there.

        Args:
          state: after a contribution.
          flush: whether that was the last one of its window. The same on all replicas, see `agreed`.
          left_out_in_a_row: how many of the last contributions were left out, of this window and before; None: none.

        Returns:
          The state, and a boolean scalar; a bool that is known while tracing, where a flush that is known ends windows
          alone.
        """
        # Known where the host knows it: its program then has no branch.
        known = isinstance(flush, bool) and (flush or self.ends_by_flush)
        full = flush if known else self.is_full(state) | flush
        ended = self.end(state, full)
        if full is False or left_out_in_a_row is None:
            return ended, full
        return ended, full & (left_out_in_a_row < state.step)

    @no_autograph
    def value(self, state: AccumulateState) -> Tree:
        """The window combined over its microbatches and over the replicas, and then divided, once."""
        require_none(state.levels)
        return self.exchanged(state)[0]

    @no_autograph
    def merged(self, state: AccumulateState, taken: Sequence[int] = ()) -> tuple[State, list[Array]]:
        """The window as one partial state, merged over the replicas; and the arrays of these numbers, in its levels."""
        whole = whole_window(self.reduction, state)
        merged = merge_replicas(self.reduction, whole, over=self.over, order=self.order)
        if not taken:
            return merged, []
        arrays = tree.flatten_as(tree.flatten(state.levels)[1], (merged,))
        return merged, self.over.mark_varying([arrays[i] for i in taken])

    def exchanged(self, state: AccumulateState, taken: Sequence[int] = ()) -> tuple[Tree, list[Array]]:
        """`value`, and the arrays of these numbers as the exchange leaves them: each replica's own, and merged."""
        merged, arrays = self.merged(state, taken)
        return self.reduction.finalize(merged), arrays

    def is_taken_over(self, array: Array) -> bool:
        """Whether this array of a window is what the exchange works in, in place of a copy: the host's to say."""
        return False

    @no_autograph
    def apply_if(
        self,
        condition: Array,
        state: AccumulateState,
        apply: Callable[[Tree, Tree], tuple[Tree, Tree]],
        kept: Tree,
        run_if: RunIf,
    ) -> tuple[AccumulateState, Tree, Tree]:
        """Runs what follows a window: exchange, division and ``apply(kept, value)`` are inside of the branch.

        The window is read there and not written, so that no host copies it, but for arrays that the exchange takes
        over: these hold the merged window afterwards. Nothing reads them again, as the window is full and the next one
        begins empty.

        A host whose windows and parameters are variables has nothing to hand on, and calls `value` in a branch of its
        own: TensorFlow's is taken outside of the replicas, which read their windows inside.

        Args:
          condition: `due`, or `is_partial` for a flush; the same on all replicas.
          state: whose window is applied.
          apply: for instance an optimizer: ``(kept, combined gradients) -> (kept, metrics)``.
          kept: what it changes, for instance parameters and the optimizer's state.
          run_if: the host's branch.

        Returns:
          The state, what is kept, and the metrics.
        """
        arrays, structure = tree.flatten(state.levels)
        # A counter's levels are no state of the reduction.
        single = [] if isinstance(state.levels, BinaryCounter) else enumerate(arrays)
        own = residuals(state.levels)
        taken = [i for i, x in single if x is not None and (i in own or self.is_taken_over(x))]

        def with_taken(changed: Sequence[Array]) -> AccumulateState:
            at = dict(zip(taken, changed, strict=True))
            levels = tree.unflatten(structure, (at.get(i, x) for i, x in enumerate(arrays)))
            return state._replace(levels=levels)

        def run(both: tuple[list[Array], Tree]) -> tuple[tuple[list[Array], Tree], Tree]:
            value, changed = self.exchanged(with_taken(both[0]), taken)
            kept, metrics = apply(both[1], value)
            return (changed, kept), metrics

        (changed, kept), metrics = run_if(condition, run, ([arrays[i] for i in taken], kept))
        return with_taken(changed), kept, metrics

    @no_autograph
    def own(self, state: AccumulateState) -> AccumulateState:
        """The state, its levels marked as this replica's own, so that a loop may carry it."""
        arrays, structure = tree.flatten(state.levels)
        return state._replace(levels=tree.unflatten(structure, self.over.mark_varying(arrays)))

    @no_autograph
    def agreed(self, flags: Sequence[Array | bool]) -> list[Array | bool]:
        """Each flag, true where it is true on any replica: were replicas to differ, some would wait for ever.

        Args:
          flags: boolean scalars. Known ones are taken to be the same on all replicas; all others take one exchange.

        Returns:
          A bool for each known flag, a boolean scalar array for each of the others.
        """
        known = [_known(flag) for flag in flags]
        unknown = [flag for flag, value in zip(flags, known, strict=True) if value is None]
        if not unknown:
            return [bool(value) for value in known]
        backend = resolve(unknown)
        (counts,) = self.over.all_sum([backend.stack([backend.cast(flag, dtypes.INT32) for flag in unknown])])
        agreed = iter([counts[i] > 0 for i in range(len(unknown))])
        return [next(agreed) if value is None else value for value in known]

    def _going_on(self, state: AccumulateState) -> AccumulateState:
        """The state, one microbatch from its end where it has more, or as many, and is not over."""
        if self.ends_by_flush:
            return state
        length = self._length(state.index)
        full = (state.step >= length) & ~self.is_over(state)
        return state._replace(step=resolve([state.step]).where(full, length - 1, state.step))

    def _length(self, index: Array) -> Array:
        """The length of window number ``index``, an int32 scalar."""
        if not callable(self.every):
            return np.int32(self.every)
        length = length_at(self.every, index)
        backend = resolve([index, length])
        return backend.cast(backend.asarray(length), dtypes.INT32)

    def _weight_unless(self, left_out: Array | bool, gradients: Tree, weight: Scalar) -> Scalar:
        if left_out is True:
            return 0
        backend, leaves = resolve([left_out]), tree.flatten(gradients)[0]
        wide = any(leaf is not None and dtypes.is_wide(backend.dtype(leaf)) for leaf in leaves)
        return weights.where(backend, ~left_out, weight, wide)


def widened(gradient: Leaf, like: Leaf) -> Leaf:
    """A gradient; a narrower one, without loss, in the dtype that a window was made for.

    Args:
      gradient: an array or None. The window refuses what is of another kind, or wider.
      like: an array or spec; None leaves the gradient as it is.
    """
    if gradient is None or like is None:
        return gradient
    backend = resolve([gradient])
    dtype, wanted = backend.dtype(gradient), backend.dtype(like)
    is_narrower = dtype != wanted and dtypes.kind(dtype) == dtypes.kind(wanted) and np.can_cast(dtype, wanted)
    return backend.cast(gradient, wanted) if is_narrower else gradient


def require_flag(name: str, flag: Scalar) -> Array | bool:
    """Refuses what is not a boolean scalar."""
    backend = None if isinstance(flag, (bool, np.bool_)) else owner(flag)
    if isinstance(flag, (bool, np.bool_)):
        return bool(flag)
    if backend is None or backend.dtype(flag) != np.bool_ or backend.shape(flag) != ():
        raise invalid(f"{name} as a boolean scalar", shown(flag))
    return flag


def _known(flag: Array | bool) -> bool | None:
    if isinstance(flag, bool):
        return flag
    backend = resolve([flag])
    value = backend.concrete(flag)
    return None if value is None else bool(value)
