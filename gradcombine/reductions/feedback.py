"""Error feedback: what a wire rounds off is kept, and added to the next window."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import dtype_of, is_absent, resolve
from gradcombine.errors import invalid, operation
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, Wrapper, described
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.settings import check
from gradcombine.types import Array, Order, Scalar, State, Tree


class FedBackState(NamedTuple):
    """A state of the other reduction, and what its last exchange rounded off.

    Attributes:
      state: of the other reduction; its accumulators begin with the residual of the window before.
      residual: float32 arrays of the leaves that are sent through the wire, None for others; each replica's own.
    """

    state: TreewiseState
    residual: Tree


@operation("fed_back")
def fed_back(reduction: Reduction) -> Reduction:
    """Adds what the wire rounded off to the next window of the same replica, leaf by leaf.

    A window begins with the residual r of the last one in place of 0. At its end the accumulators are
    ``v = r + w_1 g_1 + ...``, the wire sends a rounding q(v), and the new residual is ``v - q(v)``. What is rounded off
    the sum of a part is kept by the replica that made the sum.

    Args:
      reduction: `sum` or `mean` in precision ``"fast"``, with a ``wire`` that rounds to nearest.

    Returns:
      A reduction for windows in order ``"sequential"``: `gradcombine.accumulate` with `gradcombine.merge_replicas`, and
      `optax.accumulate` and `train_step` of the integrations with ``every``. It costs 4 bytes an element more.
      Residuals are saved with the window; `gradcombine.statefile.resize` adds up those of replicas that become one, and
      a new replica begins with 0, so that none is lost.

    Raises:
      GradCombineError: for another reduction; in `gradcombine.all_reduce`, in whole windows of one call, and in hosts
        whose windows are read only, all of which would lose the residual; and in order ``"tree"``.

    Bits: ``q(v) + residual`` is v, without rounding, of float32 accumulators. Where a part's sum is rounded too, its
    owner adds that error in one float32 addition. What is not finite is sent as it is, and leaves a residual of 0. A
    window whose weights are all 0 loses what it sent of the residual.

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

    @property
    def description(self) -> str:
        return described("fed_back", self.of.description)

    @operation()
    def init(self, like: Tree) -> State:
        state = self.of.init(like)
        return FedBackState(state, self._zeros(state))

    def _zeros(self, state: TreewiseState) -> Tree:
        structure = tree.flatten(state.dtypes, tree.is_static)[1]
        accumulators = tree.split_as(structure, state.value)

        def zeros(path: str, a: Any) -> Any:
            if isinstance(a, tree.Static) or self._wire.keeps(path, tuple(a.shape)):
                return None
            backend = resolve([a])
            return backend.full(backend.shape(a), -0.0, dtypes.FLOAT32, [a])

        return tree.unflatten(structure, map(zeros, structure.paths(), accumulators))

    @property
    def _wire(self) -> Any:
        return self.of.wire

    @operation()
    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        return state._replace(state=self.of.update(state.state, value, weight))

    @operation()
    def merge(self, a: State, b: State) -> State:
        leaves, structure = tree.flatten(a.residual)
        others = tree.flatten_as(structure, b.residual)
        backend = resolve([*leaves, *others])
        for path, x, y in zip(structure.paths(), leaves, others, strict=True):
            if (x is None) != (y is None):
                raise invalid("residuals of one wire", "one that keeps the leaf wide, and one that does not", path)
        added = [x if is_absent(x) else backend.add(x, y) for x, y in zip(leaves, others, strict=True)]
        return FedBackState(self.of.merge(a.state, b.state), tree.unflatten(structure, added))

    @operation()
    def finalize(self, state: State) -> Tree:
        return self.of.finalize(state.state)

    @operation()
    def clear(self, state: State) -> State:
        """An empty window, which begins with the residual."""
        empty = self.of.clear(state.state)
        residuals, structure = tree.flatten(state.residual)
        accumulators = tree.split_as(structure, empty.value)
        begun = [
            a if x is None else resolve([x, a]).cast(x, dtype_of(a))
            for a, x in zip(accumulators, residuals, strict=True)
        ]
        return FedBackState(empty._replace(value=tree.unflatten(structure, begun)), self._zeros(empty))

    @operation()
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        if order != "sequential":
            raise invalid("order 'sequential' for residuals", order)
        left: list[Array] = []
        merged = self.of.all_merge(state.state, collective, order, left)
        leaves, structure = tree.flatten(state.residual)
        if not left:  # one replica, which sends nothing
            return state._replace(state=merged)
        back = iter(left)
        return FedBackState(merged, tree.unflatten(structure, [None if x is None else next(back) for x in leaves]))

    @operation()
    def all_finalize(self, state: State, collective: Collective, order: Order, weight: Scalar) -> Tree:
        raise invalid("a window, whose state keeps the residual", "all_reduce")


def residuals(state: State) -> list[int]:
    """The numbers of the residuals' leaves among all leaves of a state."""
    numbers, count = list[int](), 0
    for part in tree.flatten(state, lambda x: isinstance(x, FedBackState))[0]:
        is_one = isinstance(part, FedBackState)
        size = len(tree.flatten(part)[0]) if is_one else 1
        kept = len(tree.flatten(part.residual)[0]) if is_one else 0
        numbers += range(count + size - kept, count + size)
        count += size
    return numbers


def require_none(state: State) -> None:
    """Raises for a state with residuals, which would be lost."""
    if residuals(state):
        raise invalid("a reduction without error feedback, whose residual would be lost here", "fed_back")
