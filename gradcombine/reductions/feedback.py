"""Error feedback: adds the rounding errors of a wire to the next window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import dtype_of, is_absent, resolve
from gradcombine.errors import invalid, operation
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, Wrapper
from gradcombine.reductions.cell import parts
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.settings import check
from gradcombine.types import Array, Order, Scalar, State, Tree


class FedBackState(NamedTuple):
    """The state of the wrapped reduction, and the rounding errors of the last exchange.

    Attributes:
      state: the state of the wrapped reduction, without the residual.
      residual: float32 arrays for the leaves that the wire compresses, None for others; they differ by replica. For a
        mean they are divided by the total weight of the window that they come from.
    """

    state: TreewiseState
    residual: Tree


@operation("fed_back")
def fed_back(reduction: Reduction) -> Reduction:
    """Adds the rounding errors of the wire to the next window of the same replica, for each leaf.

    At the end of a window, the residual r of the previous one is added to the accumulators: the wire sends the rounded
    q(v) of ``v = w_1 g_1 + ... + r``, and the new residual is ``v - q(v)``. If the wire also rounds the sum of a part,
    the replica that computes the sum keeps its rounding error. A mean keeps r as a part of the mean, and adds ``W r``
    in a window of total weight W: the sum of the means over the windows is right whatever they weigh. This takes one
    more all-reduce, of a scalar. A window that is not exchanged, or of weight 0, leaves r as it is.

    Args:
      reduction: `sum` or `mean` in precision ``"fast"``, with a ``wire`` that rounds to nearest.

    Returns:
      A reduction for windows in order ``"sequential"``: `gradcombine.accumulate` with `gradcombine.merge_replicas`, and
      `optax.accumulate` and `train_step` of the integrations with ``every``. It takes 4 more bytes per element.
      Residuals are saved with the window. `gradcombine.statefile.resize` adds up the residuals of merged replicas, and
      new replicas start from 0, so that none is lost.

    Raises:
      GradCombineError: for another reduction; in `gradcombine.all_reduce`, in a step that takes an entire window, and
        in integrations that read windows without updating them, as these would lose the residual; and in order
        ``"tree"``.

    Bits: ``q(v) + residual`` is exactly v for float32 accumulators, and up to the roundings of ``residual / W`` for a
    mean. If the sum of a part is rounded as well, its error is added in one float32 addition. Values that are not
    finite are sent unchanged, with a residual of 0.

    References: Seide et al., `1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs <https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html>`_, 2014; Tang et
    al., `DoubleSqueeze <https://arxiv.org/abs/1905.05957>`_, 2019.

    >>> import gradcombine as gc
    >>> gc.reductions.fed_back(gc.reductions.mean(wire=gc.wires.blocks(8)))
    fed_back(mean(wire=wires.blocks(8, size=128)))
    """
    check(reduction=reduction)
    if not isinstance(reduction, Treewise) or reduction.wire is None or not reduction.cell.additive:
        raise invalid("sum or mean in precision 'fast', with a wire", repr(reduction))
    if reduction.wire.rounding != "nearest":
        raise invalid("a wire that rounds to nearest", repr(reduction.wire))
    return FedBack(reduction)


class FedBack(Wrapper):
    """See `fed_back`."""

    of: Treewise
    call, state = "fed_back", FedBackState

    def init(self, like: Tree) -> State:
        state = self.of.init(like)
        return FedBackState(state, self._residuals(state, lambda a: _no_residual(resolve([a]), a)))

    def _residuals(self, state: TreewiseState, make: Callable[[Array], Array]) -> Tree:
        """``make(accumulator)`` for each leaf that the wire compresses, None for others."""
        structure, wire = tree.flatten(state.dtypes, tree.is_static)[1], self.of.wire
        assert wire is not None
        accumulators = tree.split_as(structure, state.value)

        def residual(path: str, a: Any) -> Any:
            return None if isinstance(a, tree.Static) or wire.keeps(path, tuple(a.shape)) else make(a)

        return tree.unflatten(structure, map(residual, structure.paths(), accumulators))

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        state = self.require(state)
        return state._replace(state=self.of.update(state.state, value, weight))

    def merge(self, a: State, b: State) -> State:
        leaves, structure = tree.flatten(self.require(a).residual)
        others = tree.flatten_as(structure, self.require(b).residual)
        backend = resolve([*leaves, *others])
        for path, x, y in zip(structure.paths(), leaves, others, strict=True):
            if (x is None) != (y is None):
                raise invalid("states of the same wire", "a residual of this leaf in one of them only", path)
        added = [x if is_absent(x) else backend.add(x, y) for x, y in zip(leaves, others, strict=True)]
        return FedBackState(self.of.merge(a.state, b.state), tree.unflatten(structure, added))

    def finalize(self, state: State) -> Tree:
        return self.of.finalize(self.require(state).state)

    def clear(self, state: State) -> State:
        """An empty window, which keeps the residual."""
        empty = self.of.clear(self.require(state).state)
        # Forms without elements: a check at the end of each window must not copy a tree of gradients.
        forms = self._residuals(empty, lambda a: np.broadcast_to(np.float32(0), tuple(a.shape)))
        tree.require_alike(forms, state.residual)
        return FedBackState(empty, state.residual)

    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        if order != "sequential":
            raise invalid("order 'sequential' for residuals", order)
        leaves, structure = tree.flatten(self.require(state).residual)
        backend = resolve([*tree.flatten(state)[0], collective.rank()])
        zero, one, infinity = (backend.full((), x, dtypes.FLOAT32) for x in (0, 1, np.inf))

        def counted(weights: Sequence[Array]) -> tuple[Array, Array]:
            total = backend.cast(reduce(backend.add, weights), dtypes.FLOAT32)
            return total, (total > zero) & (total < infinity)

        divisor, is_weight, errors = one, None, list[Array]()
        if self.of.divides:
            total, is_weight = counted(collective.all_sum([backend.asarray(x) for x in parts(state.state.weight)]))
            divisor = backend.where(is_weight, total, one)

        def added(a: Any, x: Any) -> Any:
            if x is None:
                return a
            return backend.add(a, backend.cast(backend.scale(x, divisor) if self.of.divides else x, dtype_of(a)))

        accumulators = map(added, tree.split_as(structure, state.state.value), leaves)
        of_window = state.state._replace(value=tree.unflatten(structure, accumulators))
        merged = self.of.all_merge(of_window, collective, "sequential", errors)
        if is_weight is None:
            _, is_weight = counted([backend.asarray(x) for x in parts(merged.weight)])
        remaining = iter(errors)

        def left(x: Array) -> Array:
            error = next(remaining) if errors else _no_residual(backend, x)  # a single replica sends nothing
            return backend.where(is_weight, backend.divide(error, divisor) if self.of.divides else error, x)

        return FedBackState(merged, tree.unflatten(structure, [None if x is None else left(x) for x in leaves]))

    def all_finalize(self, state: State, collective: Collective, order: Order, weight: Scalar) -> Tree:
        raise invalid("a window, whose state keeps the residual", "all_reduce")


def _no_residual(backend: Backend, like: Array) -> Array:
    return backend.full(backend.shape(like), -0.0, dtypes.FLOAT32, [like])


def emptied(reduction: Reduction, state: State) -> State:
    """An empty state for another replica: without the residuals, which ``clear`` keeps."""
    leaves, structure = tree.flatten(reduction.clear(state))
    held = [i for i in residuals(state) if leaves[i] is not None]
    for i in held:
        leaves[i] = _no_residual(resolve([leaves[i]]), leaves[i])
    return tree.unflatten(structure, leaves)


def residuals(state: State) -> list[int]:
    """The indices of the leaves of residuals among all leaves of a state."""
    indices, count = list[int](), 0
    for part in tree.flatten(state, lambda x: isinstance(x, FedBackState))[0]:
        is_fed_back = isinstance(part, FedBackState)
        size = len(tree.flatten(part)[0]) if is_fed_back else 1
        residual_size = len(tree.flatten(part.residual)[0]) if is_fed_back else 0
        indices += range(count + size - residual_size, count + size)
        count += size
    return indices


def require_none(state: State) -> None:
    """Raises for a state with residuals, for callers that would lose them."""
    if residuals(state):
        raise invalid("a reduction without error feedback, whose residual would be lost here", "fed_back")
