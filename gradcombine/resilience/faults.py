"""Detects faulty replicas, with the same result on all replicas, and handles them.

Replicas that take different decisions deadlock in the next collective. So each replica reports its status in a few
integers, which all replicas gather, and decisions depend on the gathered reports only.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import (
    dtype_of,
    in_words,
    is_absent,
    is_array_of,
    require_count,
    require_scalar,
    resolve,
    shape_of,
)
from gradcombine.digests import digest
from gradcombine.errors import invalid, operation, require_given, require_type
from gradcombine.places import binary_counter
from gradcombine.places.time import cleared, require_state, require_state_of
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.resilience.ledger import ledgers_in
from gradcombine.settings import check
from gradcombine.types import AccumulateState, Array, Leaf, State, Tree

__all__ = ["drop", "find", "require_none"]

_DESCRIPTIONS = {
    "structure": "a tree of another structure, shapes or dtypes",
    "nan": "NaN",
    "infinity": "an infinity",
    "stale": "a window that is behind the others'",
    "doubled": "a microbatch that it or another replica has already counted",
    "differs": "a copy that differs from those of most replicas",
}
KINDS = tuple(_DESCRIPTIONS)
"""Columns of the table of faults."""


class Faults(NamedTuple):
    """Detected faults; made and described by `find`. The columns of ``table`` are `KINDS`."""

    table: Array
    found: Array
    own: Array
    index: Array
    step: Array


@operation("faults.find")
def find(over: Collective, values: Tree = None, *, window: AccumulateState | None = None, twins: Tree = None) -> Faults:
    """Detects faults on all replicas, in two exchanges of a few integers.

    Args:
      over: the collective, always explicit: `LOCAL`, `jax_axis` or `tf_replicas`.
      values: arrays of this replica that have to be finite, for instance its gradients or the value of its window.
      window: this replica's state of `gradcombine.accumulate`, whose position has to be that of the other replicas.
        With a `gradcombine.reductions.numbered` reduction, windows must not share a microbatch; this takes a further
        exchange, of the ledger.
      twins: arrays that have to be bitwise identical on all replicas, for instance parameters. Detects silent data
        corruption: a copy that differs from those of more than half of the replicas.

    Returns:
      The same on all replicas except for ``own``: ``table``, int32 of shape (replicas, 6), by rank and fault (another
      structure than more than half of the replicas, NaN, infinity, a window that is behind, a microbatch that was
      already counted, a copy that differs from those of most replicas): 0 for no fault, else 1, and for NaN and
      infinity 1 + the index of the first leaf that holds one; ``found`` and ``own``, boolean scalars, whether any
      replica or this one has a fault; ``index`` and ``step``, int32, the position of the most advanced window, or 0.
      Leaves are not exchanged, so trees of different structures cannot cause a deadlock.

    Raises:
      GradCombineError: for an unbound axis, a ``window`` that is not a state, and leaves that are not arrays.

    If exactly two replicas differ in a copy or structure, both have the fault, as there is no majority. Copies are
    compared by `gradcombine.digest`, which always detects a changed element, but not swapped elements.

    >>> import numpy as np, gradcombine as gc
    >>> faults = gc.faults.find(gc.LOCAL, {"w": np.float32([1, np.nan])})
    >>> bool(faults.found), faults.table.tolist()
    (True, [[0, 1, 0, 0, 0, 0]])
    """
    check(over=over)
    size, rank = over.size(), over.rank()
    parts = [(name, *tree.flatten(part)) for name, part in (("values", values), ("twins", twins))]
    if window is not None:
        require_state(window)
        parts.append(("window", *tree.flatten(window)))
    backend = resolve([*(leaf for _, leaves, _ in parts for leaf in leaves), rank])

    def scalar(value: int) -> Array:
        return backend.full((), value, dtypes.INT32)

    nan, infinity = _not_finite(backend, parts[0][1])
    index, step = (scalar(0), scalar(0)) if window is None else map(backend.asarray, (window.index, window.step))
    copies = _combined(backend, digest(twins)) if twins is not None else [scalar(0), scalar(0)]
    structure = scalar(_checksum(parts))
    position = [backend.cast(x, dtypes.INT32) for x in (index, step)]
    report = backend.stack([structure, *position, *copies])
    (reports,) = over.all_gather([report])

    def in_minority(columns: Sequence[int]) -> Array:
        equal = reduce(lambda a, b: a & b, (reports[:, i] == report[i] for i in columns))
        return _count(backend, equal) * 2 <= size

    ahead = (reports[:, 1] > report[1]) | ((reports[:, 1] == report[1]) & (reports[:, 2] > report[2]))
    stale = _count(backend, ahead) > 0
    verdicts = [in_minority([0]), nan, infinity, stale, _doubled(backend, over, window), in_minority([3, 4])]
    own = backend.stack([backend.cast(backend.asarray(x), dtypes.INT32) for x in verdicts])
    (table,) = over.all_gather([own])
    latest = _largest(backend, reports[:, 1])
    steps = backend.where(reports[:, 1] == latest, reports[:, 2], reports[:, 2] * 0 - 1)
    return Faults(table, backend.total(table) > 0, backend.total(own) > 0, latest, _largest(backend, steps))


@operation("faults")
def require_none(faults: Faults, values: Tree = None) -> None:
    """The policy "raise": raises the same error on all replicas if any of them has a fault. Not for compiled code.

    Args:
      faults: from `find`.
      values: as passed to `find`, to name leaves.

    Raises:
      GradCombineError: lists the faults of each faulty replica; also if ``faults`` is traced, or not from `find`.

    >>> import numpy as np, gradcombine as gc
    >>> grads = {"w": np.float32([1, np.inf])}
    >>> gc.faults.require_none(gc.faults.find(gc.LOCAL, grads), grads)
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: faults: expected none, received replica 0: an infinity in ['w']
    """
    backend = _require_faults(faults)
    table = backend.concrete(backend.asarray(faults.table))
    table = require_given("a table with concrete values", table, "a traced one")
    paths = list(tree.flatten(values)[1].paths()) if values is not None else []

    def description(kind: str, code: int) -> str:
        has_leaf = kind in ("nan", "infinity") and 0 < code <= len(paths)
        return _DESCRIPTIONS[kind] + (f" in {paths[code - 1] or 'the array'}" if has_leaf else "")

    lines = [
        f"replica {rank}: " + ", ".join(description(kind, code) for kind, code in zip(KINDS, row, strict=True) if code)
        for rank, row in enumerate(table.tolist())
        if any(row)
    ]
    if lines:
        raise invalid("none", "; ".join(lines))


@operation("faults.drop")
def drop(reduction: Reduction, state: State, faults: Faults) -> State:
    """The policy "drop the replica": discards the contributions of faulty replicas.

    For the policy "skip everywhere", pass ``skipped=faults.found`` to `gradcombine.places.window.Window`, or weight 0.

    Args:
      reduction: that created the state.
      state: of this replica, before merging: a window of `gradcombine.accumulate` or a state of the reduction.
      faults: from `find`.

    Returns:
      The state, emptied if this replica has a fault; an emptied window has the position of the most advanced one. If
      all replicas are faulty, all states are empty, and there is nothing to apply.

    Raises:
      GradCombineError: for a state of another reduction, and for ``faults`` that are not from `find`.

    Bits: the state of a replica without faults is unchanged.

    >>> import numpy as np, gradcombine as gc
    >>> total = gc.reductions.sum()
    >>> state = total.update(total.init(np.float32(0)), np.float32(np.nan))
    >>> faults = gc.faults.find(gc.LOCAL, total.finalize(state))
    >>> float(total.finalize(gc.faults.drop(total, state, faults)))
    0.0
    """
    require_state_of(reduction, state)
    _require_faults(faults)
    if isinstance(state, AccumulateState):
        empty = AccumulateState(cleared(reduction, state.levels), faults.step, faults.index)
    else:
        empty = reduction.clear(state)
    backend = resolve([*tree.flatten(state)[0], faults.own])
    return tree.select(backend, faults.own, empty, state)


def _require_faults(faults: Faults) -> Backend:
    """The backend of ``faults``; raises unless its fields are as `find` returns them."""
    require_type("Faults, as find returns them", faults, Faults)
    if not is_array_of(faults.table, dtypes.INT32) or shape_of(faults.table)[1:] != (len(KINDS),):
        raise invalid(f"int32 of shape (replicas, {len(KINDS)})", in_words(faults.table), ".table")
    for name in ("found", "own"):
        require_scalar("a boolean scalar", getattr(faults, name), "b", f".{name}")
    for name in ("index", "step"):
        require_count(getattr(faults, name), f".{name}")
    return resolve(list(faults))


def _not_finite(backend: Backend, leaves: Sequence[Leaf]) -> tuple[Array, Array]:
    """1 + the index of the first leaf with NaN, and 1 + that of the first leaf with infinity; 0 for none."""
    codes, nans, infinities = list[int](), list[Array](), list[Array]()
    for i, leaf in enumerate(leaves):
        if is_absent(leaf) or dtypes.kind(dtype_of(leaf)) not in ("float", "complex"):
            continue
        array = backend.asarray(leaf)
        x = backend.cast(array, dtypes.working(backend.dtype(array)))
        # x - x is 0 for finite x, and NaN for NaN and infinity.
        difference = backend.add(x, -x)
        codes.append(i + 1)
        nans.append(_count(backend, x != x))
        infinities.append(_count(backend, (difference != difference) & (x == x)))
    zero = backend.full((), 0, dtypes.INT32)
    if not codes:
        return zero, zero

    def first(counts: Sequence[Array]) -> Array:
        # The cumulative sum is 0 for the leaves before the first positive count.
        flags = backend.cast(backend.stack(counts) > 0, dtypes.INT32)
        position = backend.total(backend.cast(backend.cumsum(flags) == 0, dtypes.INT32))
        return backend.slice_at(backend.asarray(np.asarray([*codes, 0], np.int32)), position)

    return first(nans), first(infinities)


def _count(backend: Backend, flags: Array) -> Array:
    """Counts true elements in float32: may round, but never overflows to 0."""
    return backend.total(backend.cast(flags, dtypes.FLOAT32))


def _largest(backend: Backend, vector: Array) -> Array:
    order = backend.argsort(vector)
    return backend.slice_at(vector, order[-1])


def _checksum(parts: Sequence[tuple[str, Sequence[Leaf], tree.Structure]]) -> int:
    """A 31-bit checksum of containers, paths, shapes and dtypes."""
    lines = [
        f"{name}{path} {'none' if is_absent(leaf) else f'{dtype_of(leaf)}{shape_of(leaf)}'}"
        for name, leaves, structure in parts
        for path, leaf in zip(structure.paths(), leaves, strict=True)
    ]
    lines += [f"{path} {kind.__name__}" for name, _, structure in parts for path, kind in structure.containers(name)]
    return zlib.crc32("\n".join(lines).encode()) & 0x7FFFFFFF


def _combined(backend: Backend, digests: Array) -> list[Array]:
    """Combines the digests of all leaves; a change of a single digest changes the result, as factors are odd."""
    words = backend.bitcast(backend.asarray(digests), dtypes.INT32)
    factors = backend.asarray(np.arange(1, 2 * words.shape[0], 2, dtype=np.int32))
    return [backend.total(backend.product(words[:, i], factors)) for i in range(2)]


def _doubled(backend: Backend, over: Collective, window: AccumulateState | None) -> Array:
    """Whether this replica holds a microbatch that was counted more than once, by itself or another replica."""
    doubled = backend.full((), 0, dtypes.INT32)
    for node, filled in [] if window is None else ledgers_in(window.levels):
        counts = backend.asarray(node.counts)
        own = counts if filled is None else binary_counter.sum_of_levels(counts, backend.asarray(filled))
        (total,) = over.all_sum([own])
        doubled = doubled + backend.cast(_count(backend, (own > 0) & (total > 1)) > 0, dtypes.INT32)
    return doubled > 0
