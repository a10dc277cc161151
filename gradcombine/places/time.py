"""Time: accumulates contributions one after another, in windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import owner, require_count, require_scalar, resolve, shape_of
from gradcombine.errors import (
    MOST,
    invalid,
    operation,
    require_given,
    require_type,
    shown,
    translate_errors,
    type_name,
    within,
)
from gradcombine.places import binary_counter
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.dtypes import INT32
from gradcombine.settings import EXPECTED_LENGTH, LENGTH, check, valid
from gradcombine.types import AccumulateState, Array, BinaryCounter, Order, Scalar, State, Tree


class Accumulator(NamedTuple):
    """Pure functions on an `AccumulateState`; made by `accumulate`.

    Attributes:
      init: ``init(like) -> state``: an empty window. ``like``: arrays or shape/dtype specs, None for "no gradient".
      update: ``update(grads, state, weight=1.0) -> state``: adds a contribution; to a new window if this one is full.
      ready: ``ready(state)``: whether the window is full, a boolean scalar (traced if the state is).
      value: ``value(state)``: the result of the window, partial or full, divided by the weights it has.
      restart: ``restart(state) -> state``: drops a window whose value was taken before it was full.
    """

    init: Callable[[Tree], AccumulateState]
    update: Callable[..., AccumulateState]
    ready: Callable[[AccumulateState], Array]
    value: Callable[[AccumulateState], Tree]
    restart: Callable[[AccumulateState], AccumulateState]


@operation("accumulate")
def accumulate(
    reduction: Reduction,
    every: int | Callable[[Array], Scalar],
    *,
    order: Order = "sequential",
    max_every: int | None = None,
) -> Accumulator:
    """Combines contributions over windows of ``every`` updates.

    All functions are pure, take NumPy, JAX or TensorFlow trees, and can be called inside jit, scan and tf.function. A
    full window can be read until the next update, which replaces it with an empty one: nothing of a window, not even a
    NaN, reaches the next one.

    Args:
      reduction: from `gradcombine.reductions`.
      every: the length of a window in updates, including those of weight 0: an integer of 1 or more, or a function from
        the index of the window (int32 scalar, traced under jit) to one. Traced lengths below 1 count as 1.
      order: ``"sequential"``: one running value. ``"tree"``: the canonical order of `combine`, in a binary counter of
        floor(log2(every)) + 1 partial states.
      max_every: the longest window, which sizes the binary counter; required for order ``"tree"`` if ``every`` is a
        function. Updates beyond it are combined, but not in the canonical order.

    Returns:
      An `Accumulator`.

    Raises:
      GradCombineError: for an ``every`` or ``max_every`` that is 0, negative or not an integer; in ``update`` as
        `combine`, and for a window that already has more than ``every`` updates (unless traced), for instance from a
        checkpoint with another ``every``. The state remains valid.

    Bits: those of `combine` in the same order.

    >>> import numpy as np, gradcombine as gc
    >>> acc = gc.accumulate(gc.reductions.mean(), every=2)
    >>> state = acc.init({"w": np.zeros(2, np.float32)})
    >>> state = acc.update({"w": np.float32([1, 2])}, state, weight=1)
    >>> bool(acc.ready(state))
    False
    >>> state = acc.update({"w": np.float32([3, 4])}, state, weight=3)
    >>> bool(acc.ready(state)), acc.value(state)
    (True, {'w': array([2.5, 3.5], dtype=float32)})
    """
    check(reduction=reduction, order=order)
    length, longest = valid("every", every), valid("max_every", max_every)
    depth = 1
    if order == "tree":
        longest = longest if callable(length) else length
        depth = require_given("max_every, for a function with order 'tree'", longest).bit_length()

    def init(like: Tree) -> AccumulateState:
        part = reduction.init(like)
        backend = resolve([*tree.flatten(like)[0], *tree.flatten(part)[0]])
        levels = (part,) if depth == 1 else binary_counter.empty(part, depth)
        return AccumulateState(levels, *(backend.full((), 0, INT32) for _ in range(2)))

    def require_depth(state: AccumulateState) -> None:
        require_state(state)
        if (received := depth_of(state)) != depth:
            levels = "1 level" if depth == 1 else f"{depth} levels"
            raise invalid(f"a state of {levels}", received)

    def is_full(state: AccumulateState) -> Array:
        require_depth(state)
        return state.step >= (length_at(length, state.index) if callable(length) else length)

    def update(grads: Tree, state: AccumulateState, weight: Scalar = 1.0) -> AccumulateState:
        full = is_full(state)
        backend = resolve([state.step, state.index])
        known = backend.concrete(full)
        step, index = state.step, state.index
        if known is None or known:
            if known is not None:
                _require_same_every(backend, state, length)
            step, index = tree.select(backend, full, (backend.full((), 0, INT32), index + 1), (step, index))
        if isinstance(state.levels, BinaryCounter):
            carry = reduction.update(binary_counter.cleared(reduction, state.levels), grads, weight)
            filled = backend.where(full, backend.full((), 0, INT32), state.levels.filled)
            counter = state.levels._replace(filled=filled)
            levels = binary_counter.count(reduction, counter, carry)
        else:
            (level,) = state.levels
            if known is None or known:
                level = tree.select(backend, full, reduction.clear(level), level)
            levels = (reduction.update(level, grads, weight),)
        return AccumulateState(levels, position(backend, step) + 1, index)

    def value(state: AccumulateState) -> Tree:
        return reduction.finalize(whole_window(reduction, state))

    def restart(state: AccumulateState) -> AccumulateState:
        require_depth(state)
        backend = resolve([state.step, state.index])
        index = backend.where(is_begun(state), state.index + 1, state.index)
        return AccumulateState(cleared(reduction, state.levels), backend.full((), 0, INT32), index)

    named = operation("accumulate")
    return Accumulator(named(init), named(update), named(is_full), named(value), named(restart))


def position(backend: Backend, step: Array) -> Array:
    """The number of contributions as a position in the window: 0 for -1, see `AccumulateState.step`."""
    return backend.where(step < 0, step * 0, step)


def is_begun(state: AccumulateState) -> Array:
    """Whether a window has contributions, also if `statefile.resize` rounded its position down to 0."""
    return (state.step > 0) | (state.step < 0)  # not !=, which TensorFlow 1 graph tensors do not overload


def whole_window(reduction: Reduction, state: AccumulateState) -> State:
    """The window as one partial state of the reduction."""
    require_state(state)
    if isinstance(state.levels, BinaryCounter):
        return binary_counter.total(reduction, state.levels)
    return state.levels[0]


def replace_window(reduction: Reduction, state: AccumulateState, merged: State) -> AccumulateState:
    """Replaces the window by one partial state of the reduction; keeps step and index."""
    require_state(state)
    if isinstance(state.levels, BinaryCounter):
        return state._replace(levels=binary_counter.holding(reduction, merged, depth_of(state)))
    return state._replace(levels=(merged,))


def cleared(reduction: Reduction, levels: tuple[State, ...] | BinaryCounter) -> tuple[State, ...] | BinaryCounter:
    """The levels of an empty window of the same shapes."""
    if isinstance(levels, BinaryCounter):
        binary_counter.cleared(reduction, levels)  # raises for a state of another reduction
        return levels._replace(filled=levels.filled * 0)
    return (reduction.clear(levels[0]),)


def depth_of(state: AccumulateState) -> int:
    """The number of levels: 1 in order ``"sequential"``."""
    return binary_counter.depth_of(state.levels) if isinstance(state.levels, BinaryCounter) else len(state.levels)


def require_state(state: State) -> None:
    require_type("an AccumulateState", state, AccumulateState)


def require_counters(state: AccumulateState, path: str = "") -> None:
    """Raises unless step and index of the window at this path are int32 scalars."""
    for name in ("step", "index"):
        require_count(getattr(state, name), f"{path}.{name}")


@operation("check_state")
def check_state(reduction: Reduction, state: State) -> None:
    """Checks a state that was not made by the functions of the reduction, for instance a checkpoint.

    The functions of a reduction and of `accumulate` only check the type of a state. `gradcombine.statefile` checks the
    states that it loads.

    Args:
      reduction: the reduction that will use the state.
      state: a state of the reduction or of `accumulate`; its arrays may be traced.

    Raises:
      GradCombineError: for a state of another reduction, precision or `per_leaf` member, and for arrays of shapes or
        dtypes that this reduction does not make; names the leaf.

    >>> import numpy as np, gradcombine as gc
    >>> mean = gc.reductions.mean()
    >>> gc.check_state(mean, mean.init(np.float32(0))._replace(count=None))
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: check_state: leaf .count: expected int32 of shape (), received None
    """
    require_state_of(reduction, state)


def require_state_of(reduction: Reduction, state: State) -> None:
    """`check_state` for public functions, which add their own names to errors."""
    check(reduction=reduction)
    part, path = state, ""
    if isinstance(state, AccumulateState):
        # A list or TensorFlow's wrapper of a tuple, in a restored checkpoint.
        is_sequence = isinstance(state.levels, (tuple, list))  # pyright: ignore[reportUnnecessaryIsInstance]
        if not isinstance(state.levels, BinaryCounter) and (not is_sequence or len(state.levels) != 1):
            raise invalid("1 level, or a BinaryCounter", type_name(state.levels), ".levels")
        require_counters(state)
        if isinstance(state.levels, BinaryCounter):
            require_count(state.levels.filled, ".levels.filled")
        part, path = _first_level(state)
    with within(path):
        tree.flatten(part)  # raises for leaves that are not arrays, and for a tree that contains itself
        # `clear` trusts its argument, and may fail in any way for the state of another reduction.
        with translate_errors(f"a state of {reduction!r}", AttributeError, LookupError, TypeError, ValueError):
            expected = reduction.clear(part)
        tree.require_alike(expected, part)


def _first_level(state: AccumulateState) -> tuple[State, str]:
    """The first partial state of a window, and its path."""
    if not isinstance(state.levels, BinaryCounter):
        return state.levels[0], ".levels[0]"
    leaves, _ = tree.flatten(state.levels.stacked)
    levels = {None if leaf is None else shape_of(leaf)[:1] for leaf in leaves}
    if len(levels) != 1 or levels & {None, (), (0,)}:
        received = shown(state.levels.stacked)
        raise invalid("arrays with a first axis of levels", received, ".levels.stacked")
    return binary_counter.level(state.levels, 0), ".levels.stacked"


def _require_same_every(backend: Backend, state: AccumulateState, length: int | Callable[[Array], Scalar]) -> None:
    """Raises if a full window has more than ``every`` microbatches: it was started with another ``every``."""
    step = backend.concrete(backend.asarray(state.step))
    most = backend.concrete(backend.asarray(length_at(length, state.index)))
    if step is not None and most is not None and most < step < MOST:
        expected = f"a window of {int(most)} microbatches or fewer (was it started with another every?)"
        raise invalid(expected, int(step), ".step")


def length_at(length: int | Callable[[Array], Scalar], index: Array) -> Array:
    """The length of the window of this index; raises for an invalid result of the user's function."""
    if not callable(length):
        return length
    every = length(index)
    backend = owner(every)
    if backend is None:
        return LENGTH(every)
    value = backend.concrete(backend.asarray(every))
    if value is not None:
        return LENGTH(value)
    require_scalar(EXPECTED_LENGTH, every, "iu")
    return backend.maximum(every, backend.full((), 1, backend.dtype(every)))
