# pyright: standard
"""A window of training: microbatches over time and replicas, and the boundary at which they are combined.

Holds the logic of windows that optimizer wrappers and training steps of all frameworks share. The integrations store
the state, and pass in the one thing that differs between frameworks: a conditional that runs once per window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import owner, resolve
from gradcombine.errors import MOST, invalid, require_given, shown
from gradcombine.places.replicas import LOCAL
from gradcombine.places.time import Accumulator, accumulate, is_begun, length_at, position, whole_window
from gradcombine.reductions import dtypes, weights
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.feedback import require_none, residuals
from gradcombine.reductions.numbered import PLACEHOLDER, Numbered, one_at
from gradcombine.settings import UNTIL_FLUSH, Settings
from gradcombine.types import AccumulateState, Array, BinaryCounter, Leaf, Order, Scalar, State, Tree, no_autograph

OVER = np.int32(MOST)
"""The step of a window that is over, for any length: its contributions were applied, or all were skipped."""


RunIf: TypeAlias = Callable[[Array, Callable[[Tree], tuple[Tree, Tree]], Tree], tuple[Tree, Tree]]
"""A framework's conditional: ``run_if(condition, run, carry)`` returns ``run(carry)``, or ``carry`` and zeros."""


@no_autograph
@dataclass(frozen=True)
class Window(Settings):
    """Pure functions on an `AccumulateState` for windows over time and replicas.

    A window is full after ``every`` microbatches, including skipped ones and those of weight 0, or when it is flushed.
    The next contribution starts a new window. A full window can be read until then, unless `apply_if` let the
    all-reduce overwrite its arrays (`may_overwrite`).

    The state records that a window is over by the step `OVER`. So a window that is restored under another ``every``
    loses no contributions: if it already has ``every`` microbatches or more, the next one completes it.

    Attributes:
      reduction: from `gradcombine.reductions`.
      every, order, max_every: as for `gradcombine.accumulate`. With `gradcombine.UNTIL_FLUSH` only a flush ends
        windows; order ``"tree"`` then requires ``max_every``.
      over: the replicas. Their states differ in the levels only.
    """

    reduction: Reduction
    every: int | Callable[[Array], Scalar]
    over: Collective = LOCAL
    order: Order = "sequential"
    max_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.accumulator  # raises for invalid settings

    @cached_property
    def accumulator(self) -> Accumulator:
        """The `accumulate` functions of one replica."""
        if self.ends_by_flush and self.order == "tree":
            expected = "max_every, the longest window, for windows that only a flush ends in order 'tree'"
            require_given(expected, self.max_every)
            # As a function: a constant length would size the binary counter in place of max_every.
            return accumulate(self.reduction, lambda index: UNTIL_FLUSH, order=self.order, max_every=self.max_every)
        return accumulate(self.reduction, self.every, order=self.order, max_every=self.max_every)

    @property
    def ends_by_flush(self) -> bool:
        """Whether only a flush ends windows."""
        return not callable(self.every) and self.every == UNTIL_FLUSH

    def init(self, like: Tree) -> AccumulateState:
        """An empty window for gradients of these shapes and dtypes."""
        return self.accumulator.init(like)

    def is_full(self, state: AccumulateState) -> Array:
        """Whether the window has all its contributions and can be applied; a boolean scalar."""
        return self.accumulator.ready(state)

    def is_over(self, state: AccumulateState) -> Array:
        """Whether the next contribution starts a new window; a boolean scalar."""
        return state.step >= OVER  # not ==, which TensorFlow 1 graph tensors do not overload

    def is_partial(self, state: AccumulateState) -> Array:
        """Whether there are contributions that a flush has to apply; a boolean scalar."""
        return is_begun(state) & ~self.is_over(state)

    def next(self, state: AccumulateState) -> tuple[Array, Array]:
        """The index of the window of the next contribution, and its index in that window; both from 0."""
        backend, over = resolve([state.step, state.index]), self.is_over(state)
        step = position(backend, self._with_room(state).step)
        return backend.where(over, state.index + 1, state.index), backend.where(over, step * 0, step)

    def number(self, state: AccumulateState) -> Array:
        """The index of the next contribution among those of its window on all replicas, from 0.

        Replica r has the indices from ``r * every``; if only a flush ends windows, the replicas' indices alternate.
        """
        index, position = self.next(state)
        if self.ends_by_flush:
            return position * self.over.size() + self.over.rank()
        return self.over.rank() * self._length(index) + position

    def contribute(
        self,
        state: AccumulateState,
        gradients: Tree,
        weight: Scalar = 1.0,
        *,
        skipped: Array | bool = False,
        number: Array | None = None,
    ) -> AccumulateState:
        """Adds a microbatch of this replica.

        Args:
          state: the window so far.
          gradients: the gradients of this replica, as for `gradcombine.accumulate`.
          weight: the weight of the microbatch, as for `gradcombine.accumulate`.
          skipped: whether to give it weight 0. It still advances the window, so that the boundaries of windows do not
            depend on what is skipped. The same on all replicas, see `agreed`.
          number: the index of the microbatch, for a `gradcombine.reductions.numbered` reduction; None: `number`.
        """
        if self.reduction.microbatches is not None and not isinstance(gradients, Numbered):
            gradients = Numbered(gradients, self.number(state) if number is None else number)
        elif number is not None:
            raise invalid("no number, or a reduction that is numbered", shown(number))
        if skipped is not False:
            weight = self._weight_unless(skipped, gradients, weight)
        return self.accumulator.update(gradients, self.mark_varying(self._with_room(state)), weight)

    def once(self, state: AccumulateState, weight: Scalar, number: Array) -> tuple[Scalar, Array]:
        """Makes `contribute` ignore a microbatch that the window already has.

        Args:
          state: the window so far, of a `gradcombine.reductions.numbered` reduction.
          weight, number: the arguments of `contribute`.

        Returns:
          ``weight`` and ``number``; 0 and a placeholder for a duplicate.
        """
        counts, microbatches = whole_window(self.reduction, state).counts, self.reduction.microbatches
        backend = resolve([counts, number])
        one = one_at(backend, number, 0 if microbatches is None else microbatches)
        is_duplicate = (backend.total(backend.product(backend.asarray(counts), one)) > 0) & ~self.is_over(state)
        number = backend.asarray(number)
        placeholder = backend.full((), PLACEHOLDER, backend.dtype(number))
        return (
            weights.where(backend, ~is_duplicate, weight, wide=True),
            backend.where(is_duplicate, placeholder, number),
        )

    def end(self, state: AccumulateState, condition: Array | bool = True) -> AccumulateState:
        """Marks the window as over if the condition holds, so that the next contribution starts a new one."""
        if condition is False:
            return state
        backend = resolve([state.step])
        over = backend.full((), int(OVER), dtypes.INT32, [state.step])
        return state._replace(step=over if condition is True else backend.where(condition, over, state.step))

    def due(
        self, state: AccumulateState, *, flush: Array | bool = False, all_skipped: Array | None = None
    ) -> tuple[AccumulateState, Array]:
        """Ends the window if it is full or flushed; returns whether to apply it.

        A window of which all microbatches were skipped is not applied: momentum and weight decay must not act on a
        missing gradient.

        Args:
          state: the state after a contribution.
          flush: whether to end the window after this contribution. The same on all replicas, see `agreed`.
          all_skipped: whether all contributions of this window were skipped; None: not all.

        Returns:
          The state, and a boolean scalar; a Python bool if ``flush`` is one and decides alone.
        """
        # If it is static, the caller's program needs no conditional.
        is_static = isinstance(flush, bool) and (flush or self.ends_by_flush)
        full = flush if is_static else self.is_full(state) | flush
        ended = self.end(state, full)
        if full is False or all_skipped is None:
            return ended, full
        return ended, full & ~all_skipped

    def value(self, state: AccumulateState) -> Tree:
        """The result of the window, combined over its microbatches and the replicas."""
        require_none(state.levels)
        return self.exchanged(state)[0]

    def merged(self, state: AccumulateState, taken: Sequence[int] = ()) -> tuple[State, list[Array]]:
        """All-reduces the window.

        Args:
          state: the window of this replica.
          taken: indices of leaves of ``state.levels``.

        Returns:
          The merged partial state, and its arrays that correspond to ``taken``, typed as varying over the replicas.
        """
        merged = self.reduction.all_merge(whole_window(self.reduction, state), self.over, self.order)
        if not taken:
            return merged, []
        arrays = tree.flatten_as(tree.flatten(state.levels)[1], (merged,))
        return merged, self.over.mark_varying([arrays[i] for i in taken])

    def exchanged(self, state: AccumulateState, taken: Sequence[int] = ()) -> tuple[Tree, list[Array]]:
        """`value`, and the merged arrays that correspond to ``taken``, as in `merged`."""
        merged, arrays = self.merged(state, taken)
        return self.reduction.finalize(merged), arrays

    def may_overwrite(self, array: Array) -> bool:
        """Whether the all-reduce may overwrite this array of a window instead of copying it. For subclasses."""
        return False

    def apply_if(
        self,
        condition: Array,
        state: AccumulateState,
        apply: Callable[[Tree, Tree], tuple[Tree, Tree]],
        carry: Tree,
        run_if: RunIf,
    ) -> tuple[AccumulateState, Tree, Tree]:
        """Runs all-reduce, division and ``apply(carry, value)`` inside of a conditional.

        The conditional only reads the window, so that no framework copies it, except for the arrays that the all-reduce
        may overwrite (`may_overwrite`), which are its operands and results and hold the merged window afterwards.
        Nothing reads those again, as the next contribution starts with an empty window.

        TensorFlow's integrations, whose windows and parameters are variables, call `value` in a conditional outside of
        the replica context instead.

        Args:
          condition: the result of `due`, or `is_partial` for a flush; the same on all replicas.
          state: the state with the window to apply.
          apply: for instance an optimizer: ``(carry, combined gradients) -> (carry, metrics)``.
          carry: the tree that ``apply`` updates, for instance parameters and optimizer state.
          run_if: the conditional of the framework.

        Returns:
          The state, the updated ``carry``, and the metrics.
        """
        arrays, structure = tree.flatten(state.levels)
        # The stacked levels of a counter do not correspond to the arrays of a merged state.
        single = [] if isinstance(state.levels, BinaryCounter) else enumerate(arrays)
        changing = residuals(state.levels)  # the all-reduce returns new ones
        taken = [i for i, x in single if x is not None and (i in changing or self.may_overwrite(x))]

        def with_taken(changed: Sequence[Array]) -> AccumulateState:
            replaced = dict(zip(taken, changed, strict=True))
            levels = tree.unflatten(structure, (replaced.get(i, x) for i, x in enumerate(arrays)))
            return state._replace(levels=levels)

        def run(both: tuple[list[Array], Tree]) -> tuple[tuple[list[Array], Tree], Tree]:
            value, changed = self.exchanged(with_taken(both[0]), taken)
            updated, metrics = apply(both[1], value)
            return (changed, updated), metrics

        (changed, updated), metrics = run_if(condition, run, ([arrays[i] for i in taken], carry))
        return with_taken(changed), updated, metrics

    def mark_varying(self, state: AccumulateState) -> AccumulateState:
        """Marks the levels as varying over the replicas, as the carry of a loop in shard_map must be."""
        arrays, structure = tree.flatten(state.levels)
        return state._replace(levels=tree.unflatten(structure, self.over.mark_varying(arrays)))

    def agreed(self, flags: Sequence[Array | bool]) -> list[Array | bool]:
        """Ors each flag over the replicas: replicas that branch differently around a collective would deadlock.

        Args:
          flags: boolean scalars. Concrete ones must be the same on all replicas; traced ones take one all-reduce.

        Returns:
          A bool for each concrete flag, a boolean scalar array for each traced one.
        """
        values = [_concrete(flag) for flag in flags]
        traced = [flag for flag, value in zip(flags, values, strict=True) if value is None]
        if not traced:
            return [bool(value) for value in values]
        backend = resolve(traced)
        (counts,) = self.over.all_sum([backend.stack([backend.cast(flag, dtypes.INT32) for flag in traced])])
        agreed = iter([counts[i] > 0 for i in range(len(traced))])
        return [next(agreed) if value is None else value for value in values]

    def _with_room(self, state: AccumulateState) -> AccumulateState:
        """Lowers the step of a full window that is not over, restored under another ``every``, to ``every - 1``."""
        if self.ends_by_flush:
            return state
        length = self._length(state.index)
        full = (state.step >= length) & ~self.is_over(state)
        return state._replace(step=resolve([state.step]).where(full, length - 1, state.step))

    def _length(self, index: Array) -> Array:
        """The length of the window of this index, an int32 scalar."""
        if not callable(self.every):
            return np.int32(self.every)
        length = length_at(self.every, index)
        backend = resolve([index, length])
        return backend.cast(backend.asarray(length), dtypes.INT32)

    def _weight_unless(self, skipped: Array | bool, gradients: Tree, weight: Scalar) -> Scalar:
        if skipped is True:
            return 0
        backend, leaves = resolve([skipped]), tree.flatten(gradients)[0]
        wide = any(leaf is not None and dtypes.is_wide(backend.dtype(leaf)) for leaf in leaves)
        return weights.where(backend, ~skipped, weight, wide)


def widened(gradient: Leaf, like: Leaf) -> Leaf:
    """Casts a narrower gradient exactly to the dtype that a window was made for.

    Args:
      gradient: an array or None. Wider dtypes and other types are returned unchanged; the window raises for them.
      like: an array or spec; None leaves the gradient unchanged.
    """
    if gradient is None or like is None:
        return gradient
    backend = resolve([gradient])
    dtype, wanted = backend.dtype(gradient), backend.dtype(like)
    is_narrower = dtype != wanted and dtypes.kind(dtype) == dtypes.kind(wanted) and np.can_cast(dtype, wanted)
    return backend.cast(gradient, wanted) if is_narrower else gradient


def require_condition(name: str, flag: Scalar) -> Array | bool:
    """Returns a boolean scalar, a Python bool if it is one or NumPy's; raises for other values."""
    if isinstance(flag, (bool, np.bool_)):
        return bool(flag)
    backend = owner(flag)
    if backend is None or backend.dtype(flag) != np.bool_ or backend.shape(flag) != ():
        raise invalid(f"{name} as a boolean scalar", shown(flag))
    return flag


def _concrete(flag: Array | bool) -> bool | None:
    if isinstance(flag, bool):
        return flag
    value = resolve([flag]).concrete(flag)
    return None if value is None else bool(value)
