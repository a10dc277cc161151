# pyright: standard
"""Sharded accumulation (ZeRO stage 2): every microbatch is reduce-scattered into accumulators of 1/N of the size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcombine import tree
from gradcombine.backends.jax_backend import BACKEND
from gradcombine.backends.jax_collective import JaxAxis
from gradcombine.backends.jax_versions import varying
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import dtype_of, is_absent, owner, shape_of
from gradcombine.errors import invalid, operation, require_equal, require_type, translate_errors
from gradcombine.places.replicas import LOCAL
from gradcombine.reductions.algebra import Reduction, Wrapper, described
from gradcombine.reductions.sums import MeanState, SumState
from gradcombine.settings import check, valid
from gradcombine.types import Array, Leaf, Order, Scalar, State, Tree
from gradcombine.wires import exchange
from gradcombine.wires.wire import Wire, require_wire

__all__ = ["exchange_costs", "gather", "scattered", "shard"]


@operation("scattered")
def scattered(reduction: Reduction, over: Collective) -> Reduction:
    """The reduction ``reduction`` with its accumulators split over the replicas: each holds 1/N.

    Each ``update`` sums the replicas' contributions by one reduce-scatter, and adds this replica's part. With
    ``gradcombine.accumulate(scattered(reduction, over), every=k)`` the accumulators need 1/N of the memory, and a
    window moves k/2 times the bytes of one all-reduce at its end (see `exchange_costs`). With
    ``value_and_grad(loss, microbatches=k, reduction=scattered(reduction, over), over=over)`` in shard_map, and with
    `gradcombine.integrations.optax.accumulate` around an elementwise optimizer, the gradients are shards as well. A
    `train_step` in shard_map takes it with an optimizer that gathers its updates; `gradcombine plan` prints one.

    Args:
      reduction: ``reductions.sum`` or ``reductions.mean`` in precision ``"fast"``. A mean sums numerators and weights
        over replicas and microbatches, and divides once. Its ``wire`` makes each reduce-scatter an all-to-all of codes,
        rounded once and added in float32.
      over: `gradcombine.jax_axis`. All replicas have to call ``update``, with a weight of 0 where they have no data.

    Returns:
      A reduction for use inside pmap, vmap or shard_map. ``finalize`` gives a tree of shards: from a leaf of n
      elements, an array of shape (ceil(n / N),), the elements of this replica's rank in row-major order; zeros beyond
      the end. An elementwise optimizer can run on shards of the parameters (`shard`), and `gather` makes whole leaves
      of them.

    Raises:
      GradCombineError: for another reduction, a collective that is not ``jax_axis``, and in ``all_merge`` over some of
        the axes that the parts are summed over already (over all of them there is nothing left to do).

    Bits: each microbatch is summed over replicas in the order that the framework's reduce-scatter chooses, and the sums
    are added over time in order. That is another order than that of one all-reduce at the end; where all sums are
    exact, the bits are the same.

    References: Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
    <https://arxiv.org/abs/1910.02054>`_, 2020.

    >>> import gradcombine as gc, jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax import zero
    >>> over = gc.jax_axis("data")
    >>> acc = gc.accumulate(zero.scattered(gc.reductions.mean(), over), every=2)
    >>> def window(grads, tokens):
    ...     state = acc.init(grads[0])
    ...     for i in range(2):
    ...         state = acc.update(grads[i], state, weight=tokens[i])
    ...     return acc.value(state)
    >>> grads = jnp.float32([[[1, 5, 3], [2, 2, 2]], [[4, 4, 4], [1, 1, 5]]])
    >>> jax.vmap(window, axis_name="data")(grads, jnp.float32([[1, 3], [2, 2]])).tolist()
    [[2.125, 2.625], [3.375, 0.0]]
    """
    check(reduction=reduction)
    axis = _axis(over)
    if not isinstance(reduction.init(jax.ShapeDtypeStruct((), jnp.float32)), (SumState, MeanState)):
        raise invalid("reductions.sum() or reductions.mean() in precision 'fast'", reduction.name)
    return _Scattered(reduction, axis)


class _Scattered(Wrapper):
    """See `scattered`.

    Attributes:
      axis: the replicas that share each accumulator.
    """

    def __init__(self, of: Reduction, axis: JaxAxis) -> None:
        super().__init__(of)
        self.axis = axis

    def around(self, of: Reduction) -> Reduction:
        return _Scattered(of, self.axis)

    @property
    def description(self) -> str:
        return described("scattered", self.of.description, over=self.axis)

    @operation()
    def init(self, like: Tree) -> State:
        leaves, structure = tree.flatten(like)
        empty = [leaf if is_absent(leaf) else _empty_shard(self.axis, leaf) for leaf in leaves]
        return self.of.init(tree.unflatten(structure, empty))

    @operation()
    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        leaves, structure = tree.flatten(value)
        present = [(path, leaf) for path, leaf in zip(structure.paths(), leaves, strict=True) if not is_absent(leaf)]
        self.axis.require_unreduced([path for path, _ in present], [leaf for _, leaf in present])
        own = self.of.update(self.of.init(value), value, weight)
        parts, inner = tree.flatten(own.value)
        shards = self._sums([path for path, _ in present], parts)
        total, count = self.axis.mark_varying(self.axis.all_sum([own.weight, own.count]))
        summed = own._replace(value=tree.unflatten(inner, shards), weight=total, count=count)
        return self.of.merge(state, summed)

    def _sums(self, paths: Sequence[str], parts: Sequence[Array]) -> list[Array]:
        """This replica's shards of the sums over replicas."""
        rows, wire = [self.axis.rows(part) for part in parts], self.wire
        narrow = [
            wire is not None
            and "parts" in self.axis.narrow_ways()
            and not wire.keeps(path, part.shape)
            and wire.nbytes(own.shape[1]) * len(own) < own.nbytes
            for path, part, own in zip(paths, parts, rows, strict=True)
        ]
        wide = iter(self.axis.sum_scatter([x for x, sends in zip(rows, narrow, strict=True) if not sends]))
        if wire is None or not any(narrow):
            return list(wide)
        sent = [x.astype(jnp.float32) for x, sends in zip(rows, narrow, strict=True) if sends]
        summed = iter(exchange.sum_parts(BACKEND, self.axis, wire, sent))
        return [next(summed)[0].astype(x.dtype) if sends else next(wide) for x, sends in zip(rows, narrow, strict=True)]

    @property
    def summed_over(self) -> Collective | None:
        return self.axis

    @operation()
    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        names = self.axis.names
        others = set(getattr(collective, "names", names))
        if others == set(names) and collective is not LOCAL:
            return state  # each update has summed over them
        if collective is not LOCAL and set(names) & others:
            expected = f"the axes of {self.axis!r}, summed already, or none of them"
            raise invalid(expected, repr(collective))
        return self.of.all_merge(state, collective, order)


@operation("shard")
def shard(values: Tree, over: Collective) -> Tree:
    """This replica's part of each leaf, as `scattered` divides them.

    Args:
      values: a tree that is the same on all replicas, parameters for instance.
      over: `gradcombine.jax_axis`.

    Returns:
      For a leaf of n elements an array of shape (ceil(n / N),), filled up with zeros.

    >>> import gradcombine as gc, jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax import zero
    >>> part = lambda rank: zero.shard(jnp.float32([[1, 2, 3]]), gc.jax_axis("data"))
    >>> jax.vmap(part, axis_name="data")(jnp.arange(2)).tolist()
    [[1.0, 2.0], [3.0, 0.0]]
    """
    axis = _axis(over)
    leaves, structure = tree.flatten(values)

    def part(leaf: Leaf) -> Leaf:
        return leaf if is_absent(leaf) else axis.mark_varying([axis.rows(BACKEND.asarray(leaf))])[0][axis.rank()]

    return tree.unflatten(structure, map(part, leaves))


@operation("gather")
def gather(shards: Tree, like: Tree, over: Collective, wire: Wire | None = None) -> Tree:
    """Whole leaves of the parts of all replicas; every replica gets them, by one all-gather.

    Args:
      shards: what `shard` or the ``finalize`` of `scattered` gave, or updates of the same shapes.
      like: arrays or specs of the whole leaves' shapes, for instance the parameters.
      over: `gradcombine.jax_axis`.
      wire: how they are sent, of float leaves, each rounded once; None: as they are.

    Returns:
      A tree of ``like``'s shapes and the shards' dtypes; in shard_map typed as the same on all replicas.

    Raises:
      GradCombineError: for trees that do not match.

    >>> import gradcombine as gc, jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax import zero
    >>> whole = lambda part: zero.gather(part, jnp.zeros((1, 3)), gc.jax_axis("data"))
    >>> jax.vmap(whole, axis_name="data")(jnp.float32([[1, 2], [3, 0]]))[0].tolist()
    [[1.0, 2.0, 3.0]]
    """
    axis = _axis(over)
    specs, structure = tree.flatten(like)
    parts = tree.flatten_as(structure, shards)
    for path, spec, part in zip(structure.paths(), specs, parts, strict=True):
        expected = None if is_absent(spec) else (_length(axis.size(), spec),)
        received = None if is_absent(part) else shape_of(part)
        require_equal("a shard of shape {}", expected, received, path)
    present = [i for i, part in enumerate(parts) if not is_absent(part)]
    narrow = dict.fromkeys(present, False)
    if wire is not None and require_wire(wire) and axis.size() > 1:
        paths = list(structure.paths())
        narrow = {i: not wire.keeps(paths[i], shape_of(specs[i])) for i in present}
        for i in present:
            if narrow[i] and not jnp.issubdtype(parts[i].dtype, jnp.floating):
                raise invalid(
                    f"a float shard for {wire!r}, or one that its wide= keeps uncompressed", parts[i].dtype, paths[i]
                )
    wide = axis.all_gather([parts[i] for i in present if not narrow[i]])
    sent = [parts[i].astype(jnp.float32)[None] for i in present if narrow[i]]
    arrived = exchange.gather_rows(BACKEND, axis, wire, sent) if wire is not None and sent else []
    of_each = {True: iter(arrived), False: iter(wide)}
    received = (next(of_each[narrow[i]]).astype(parts[i].dtype) for i in present)

    def whole(spec: Leaf, part: Leaf) -> Leaf:
        if is_absent(part):
            return part
        shape = shape_of(spec)
        return next(received).reshape(-1)[: math.prod(shape)].reshape(shape)

    return tree.unflatten(structure, map(whole, specs, parts))


class ExchangeCost(NamedTuple):
    """Bytes that a window costs each device.

    Attributes:
      sent: by a ring, over the window; what arrives is as much.
      accumulators: of the window's state, without its scalars.
    """

    sent: int
    accumulators: int


@operation("exchange_costs")
def exchange_costs(reduction: Reduction, like: Tree, every: int, replicas: int) -> dict[str, ExchangeCost]:
    """The two ways to combine a window over replicas, compared.

    Args:
      reduction: the one to accumulate by.
      like: arrays or specs of the gradients.
      every: microbatches in a window.
      replicas: their number N.

    Returns:
      For each way ``sent``, the bytes that a replica sends in a window, and ``accumulators``, the bytes that it holds.
      ``"all_reduce"``: whole accumulators, and one all-reduce at the end of the window, 2 (N - 1) / N of their bytes.
      ``"reduce_scatter"``: `scattered`; (N - 1) / N of the bytes in each microbatch, and once more for the `gather` of
      the updated parameters, counted in the gradients' dtypes.

    >>> import gradcombine as gc, jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax import zero
    >>> spec = jax.ShapeDtypeStruct((1000,), jnp.float32)
    >>> zero.exchange_costs(gc.reductions.mean(), spec, every=4, replicas=8)["reduce_scatter"]
    ExchangeCost(sent=17500, accumulators=500)
    """
    check(reduction=reduction)
    every, replicas = valid("microbatches", every), valid("replicas", replicas)
    leaves, _ = tree.flatten(like)
    present = [leaf for leaf in leaves if not is_absent(leaf)]
    with translate_errors("arrays or specs of JAX", TypeError):  # of what JAX has no dtype for
        states = [jax.eval_shape(lambda leaf=leaf: reduction.init(leaf)).value for leaf in present]
    for state in states:
        if owner(state) is None:
            raise invalid("a reduction of one array a leaf", type(state).__name__)
    widths = [BACKEND.dtype(state).itemsize for state in states]
    whole = sum(math.prod(shape_of(leaf)) * width for leaf, width in zip(present, widths, strict=True))
    parts = sum(_length(replicas, leaf) * width for leaf, width in zip(present, widths, strict=True))
    gathered = sum(_length(replicas, leaf) * dtype_of(leaf).itemsize for leaf in present)
    all_reduced, scattered = 2 * (replicas - 1) * whole // replicas, parts
    if (wire := reduction.wire) is not None:
        paths = tree.flatten(like)[1].paths()
        wide = [
            wire.keeps(path, shape_of(leaf)) for path, leaf in zip(paths, leaves, strict=True) if not is_absent(leaf)
        ]
        each = list(zip(present, widths, wide, strict=True))
        costs = [exchange.bytes_sent(wire, math.prod(shape_of(leaf)), replicas, width) for leaf, width, _ in each]
        all_reduced = sum(cost["wide"] if keep else min(cost.values()) for cost, keep in zip(costs, wide, strict=True))
        lengths = [(_length(replicas, leaf), width, keep) for leaf, width, keep in each]
        scattered = sum(n * width if keep else min(n * width, wire.nbytes(n)) for n, width, keep in lengths)
    return {
        "all_reduce": ExchangeCost(all_reduced, whole),
        "reduce_scatter": ExchangeCost((replicas - 1) * (every * scattered + gathered), parts),
    }


def _axis(over: object) -> JaxAxis:
    return require_type("a collective of gradcombine.jax_axis", over, JaxAxis)


def _length(replicas: int, leaf: Leaf) -> int:
    return -(-math.prod(shape_of(leaf)) // replicas)


def _empty_shard(axis: JaxAxis, leaf: Leaf) -> Array:
    made = jnp.zeros((_length(axis.size(), leaf),), leaf.dtype)
    missing = tuple(varying(leaf))
    return axis.mark_varying([jax.lax.pcast(made, missing, to="varying") if missing else made])[0]
