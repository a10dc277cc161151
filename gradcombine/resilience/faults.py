# pyright: standard
"""Detection of faults of a replica, equal on all replicas, and their handling.

Replicas that do not agree wait for one another for ever. So each says in a few integers how it is, all get what all
said, and whatever is decided is decided from that.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

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
from gradcombine.places.time import cleared, require_state
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.resilience.ledger import ledgers_in
from gradcombine.settings import check
from gradcombine.types import AccumulateState, Array, BinaryCounter, Leaf, State, Tree

__all__ = ["drop", "find", "require_none"]

KINDS = ("structure", "nan", "infinity", "stale", "doubled", "differs")
"""The columns of a table of faults."""

_TOLD = {
    "structure": "a tree of another structure, shapes or dtypes",
    "nan": "NaN",
    "infinity": "an infinity",
    "stale": "a window that is behind the others'",
    "doubled": "a microbatch that another replica, or itself, has counted already",
    "differs": "a copy unlike that of most replicas",
}


class Faults(NamedTuple):
    """Faults that were detected; equal on all replicas but for ``own``.

    Attributes:
      table: int32 of shape (replicas, 6), by rank and `KINDS`: 0 where there is no such fault; else 1, and of NaN and
        infinities 1 + the number of the first leaf that holds one.
      found: whether there is any; a boolean scalar.
      own: whether this replica has one; a boolean scalar.
      index, step: int32 scalars, the position of the window that is furthest; 0 without one.
    """

    table: Array
    found: Array
    own: Array
    index: Array
    step: Array


@operation("faults.find")
def find(over: Collective, values: Tree = None, *, window: AccumulateState | None = None, twins: Tree = None) -> Faults:
    """Looks for faults on all replicas, in two exchanges of a few integers.

    Args:
      over: the collective, always explicit: `LOCAL`, `jax_axis` or `tf_replicas`.
      values: this replica's own arrays that have to be finite, for instance its gradients, or the value of its window.
        Integers are.
      window: this replica's state of `gradcombine.accumulate`, which has to be as far as those of the others; with a
        `gradcombine.reductions.numbered` reduction no microbatch in it may be in another's. That takes one exchange
        more, of the ledger.
      twins: arrays that have to be the same on all replicas, to the bit, for instance parameters: a copy that differs
        from those of more than half of the replicas has silently become another.

    Returns:
      The same on all replicas but for ``own``: ``table``, int32 of shape (replicas, 6), by rank and fault (another
      structure than more than half of the replicas, NaN, an infinity, a window that is behind, a microbatch that was
      counted already, a copy unlike that of most replicas): 0 where there is no such fault, else 1, and of NaN and
      infinities 1 + the number of the first leaf that holds one; ``found`` and ``own``, boolean scalars, whether any
      replica or this one has a fault; ``index`` and ``step``, int32, the position of the window that is furthest, 0
      without one. Arrays are not exchanged, so nothing waits for ever.

    Raises:
      GradCombineError: for an axis that is not bound, a ``window`` that is none, and leaves that are no arrays.

    Of two replicas whose copies or structures differ nobody can say which is right: both have the fault. Copies are
    compared by their `gradcombine.digest`: an element that has changed is always seen, elements that have changed
    places are not.

    >>> import numpy as np, gradcombine as gc
    >>> found = gc.faults.find(gc.LOCAL, {"w": np.float32([1, np.nan])})
    >>> bool(found.found), found.table.tolist()
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
    structure = scalar(_structure(parts))
    position = [backend.cast(x, dtypes.INT32) for x in (index, step)]
    said = backend.stack([structure, *position, *copies])
    (heard,) = over.all_gather([said])

    def equal(columns: Sequence[int]) -> Array:
        return reduce(lambda a, b: a & b, (heard[:, i] == said[i] for i in columns))

    def alone(columns: Sequence[int]) -> Array:
        return (_count(backend, equal(columns)) * 2 <= size) & (_count(backend, equal(columns)) < size)

    ahead = (heard[:, 1] > said[1]) | ((heard[:, 1] == said[1]) & (heard[:, 2] > said[2]))
    stale = _count(backend, ahead) > 0
    verdicts = [alone([0]), nan, infinity, stale, _doubled(backend, over, window), alone([3, 4])]
    own = backend.stack([backend.cast(backend.asarray(x), dtypes.INT32) for x in verdicts])
    (table,) = over.all_gather([own])
    latest = _largest(backend, heard[:, 1])
    furthest = backend.where(heard[:, 1] == latest, heard[:, 2], heard[:, 2] * 0 - 1)
    return Faults(table, backend.total(table) > 0, backend.total(own) > 0, latest, _largest(backend, furthest))


@operation("faults")
def require_none(faults: Faults, values: Tree = None) -> None:
    """The policy "raise": refuses faults, outside of compiled code; all replicas that ask raise the same.

    Args:
      faults: from `find`.
      values: as there, to name leaves.

    Raises:
      GradCombineError: names each replica that has a fault, and all its faults; and for what `find` has not made, or
        made of traced values.

    >>> import numpy as np, gradcombine as gc
    >>> grads = {"w": np.float32([1, np.inf])}
    >>> gc.faults.require_none(gc.faults.find(gc.LOCAL, grads), grads)
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: faults: expected none, received replica 0: an infinity in ['w']
    """
    backend = _require_faults(faults)
    table = backend.concrete(backend.asarray(faults.table))
    table = require_given("a table whose values are known", table, "a traced one")
    paths = list(tree.flatten(values)[1].paths()) if values is not None else []

    def told(kind: str, code: int) -> str:
        named = kind in ("nan", "infinity") and 0 < code <= len(paths)
        return _TOLD[kind] + (f" in {paths[code - 1] or 'the array'}" if named else "")

    lines = [
        f"replica {rank}: " + ", ".join(told(kind, code) for kind, code in zip(KINDS, row, strict=True) if code)
        for rank, row in enumerate(table.tolist())
        if any(row)
    ]
    if lines:
        raise invalid("none", "; ".join(lines))


@operation("faults.drop")
def drop(reduction: Reduction, state: State, faults: Faults) -> State:
    """The policy "drop the replica": what a replica with a fault holds counts nothing, that of the others as ever.

    The other one, "skip everywhere", is ``left_out=faults.found`` of a `gradcombine.places.window.Window`, or a weight
    of 0.

    Args:
      reduction: the one that made the state.
      state: of this replica: a window of `gradcombine.accumulate`, or a state of the reduction; before it is merged.
      faults: from `find`.

    Returns:
      The state, empty where this replica has a fault; the position of a window is then that of the furthest one. Where
      all have faults, all are empty: then there is nothing to apply.

    Raises:
      GradCombineError: for what is no such state, and for what `find` has not made.

    Bits: of a replica without faults those of its state.

    >>> import numpy as np, gradcombine as gc
    >>> total = gc.reductions.sum()
    >>> state = total.update(total.init(np.float32(0)), np.float32(np.nan))
    >>> faults = gc.faults.find(gc.LOCAL, total.finalize(state))
    >>> float(total.finalize(gc.faults.drop(total, state, faults)))
    0.0
    """
    check(reduction=reduction)
    _require_faults(faults)
    if isinstance(state, AccumulateState):
        require_state(state)
        empty = AccumulateState(cleared(reduction, state.levels), faults.step, faults.index)
    else:
        empty = reduction.clear(state)
    backend = resolve([*tree.flatten(state)[0], faults.own])
    return tree.select(backend, faults.own, empty, state)


def _require_faults(faults: Faults) -> Backend:
    """Refuses what `find` has not made; of what it has, the backend."""
    require_type("Faults, as find returns them", faults, Faults)
    if not is_array_of(faults.table, dtypes.INT32) or shape_of(faults.table)[1:] != (len(KINDS),):
        raise invalid(f"int32 of shape (replicas, {len(KINDS)})", in_words(faults.table), ".table")
    for name in ("found", "own"):
        require_scalar("a boolean scalar", getattr(faults, name), "b", f".{name}")
    for name in ("index", "step"):
        require_count(getattr(faults, name), f".{name}")
    return resolve(list(faults))


def _not_finite(backend: Backend, leaves: Sequence[Leaf]) -> tuple[Array, Array]:
    """1 + the number of the first leaf with a NaN, and that of the first with an infinity; 0 for none."""
    numbers, nans, infinities = list[int](), list[Array](), list[Array]()
    for i, leaf in enumerate(leaves):
        if is_absent(leaf) or dtypes.kind(dtype_of(leaf)) not in ("float", "complex"):
            continue
        array = backend.asarray(leaf)
        x = backend.cast(array, dtypes.working(backend.dtype(array)))
        # x - x is 0 for every finite x, and NaN for NaN and the infinities.
        rest = backend.add(x, -x)
        numbers.append(i + 1)
        nans.append(_count(backend, x != x))
        infinities.append(_count(backend, (rest != rest) & (x == x)))
    zero = backend.full((), 0, dtypes.INT32)
    if not numbers:
        return zero, zero

    def first(counts: Sequence[Array]) -> Array:
        # Before the first leaf that has one, the running total is 0.
        flags = backend.cast(backend.stack(counts) > 0, dtypes.INT32)
        before = backend.total(backend.cast(backend.cumsum(flags) == 0, dtypes.INT32))
        places = backend.asarray(np.asarray([*numbers, 0], np.int32))
        return backend.slice_at(places, before)

    return first(nans), first(infinities)


def _count(backend: Backend, flags: Array) -> Array:
    """How many are true, at least as far as being any: in float32, which does not overflow."""
    return backend.total(backend.cast(flags, dtypes.FLOAT32))


def _largest(backend: Backend, vector: Array) -> Array:
    order = backend.argsort(vector)
    return backend.slice_at(vector, order[-1])


def _structure(parts: Sequence[tuple[str, Sequence[Leaf], tree.Structure]]) -> int:
    """A checksum of containers, paths, shapes and dtypes, of 31 bits."""
    lines = [
        f"{name}{path} {'none' if is_absent(leaf) else f'{dtype_of(leaf)}{shape_of(leaf)}'}"
        for name, leaves, structure in parts
        for path, leaf in zip(structure.paths(), leaves, strict=True)
    ]
    lines += [line for name, _, structure in parts for line in _containers(structure, name)]
    return zlib.crc32("\n".join(lines).encode()) & 0x7FFFFFFF


def _containers(structure: tree.Structure, path: str) -> Iterator[str]:
    if structure.kind is not None:
        yield f"{path} {structure.kind.__name__}"
    for key, child in zip(structure.keys, structure.children, strict=True):
        yield from _containers(child, path + key)


def _combined(backend: Backend, digests: Array) -> list[Array]:
    """One digest of those of all leaves: a change of one leaf's always changes it, as its factor is odd."""
    words = backend.bitcast(backend.asarray(digests), dtypes.INT32)
    factors = backend.asarray(np.arange(1, 2 * words.shape[0], 2, dtype=np.int32))
    return [backend.total(backend.product(words[:, i], factors)) for i in range(2)]


def _doubled(backend: Backend, over: Collective, window: AccumulateState | None) -> Array:
    """Whether this replica has counted a microbatch that has been counted before, by itself or by another."""
    twice = backend.full((), 0, dtypes.INT32)
    for node, filled in [] if window is None else ledgers_in(window.levels):
        counter = None if filled is None else BinaryCounter(node.counts, filled)
        own = backend.asarray(node.counts if counter is None else binary_counter.total(_COUNTS, counter))
        (everywhere,) = over.all_sum([own])
        twice = twice + backend.cast(_count(backend, (own > 0) & (everywhere > 1)) > 0, dtypes.INT32)
    return twice > 0


_COUNTS: Any = SimpleNamespace(name="faults.find", merge=lambda a, b: a + b, clear=lambda a: a * 0)
"""Stands for the reduction of a counter of ledgers alone."""
