# pyright: standard
"""Sharded accumulation (ZeRO stage 2): microbatches are reduce-scattered into accumulators of 1/N of the size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcombine import tree
from gradcombine.backends.jax_backend import BACKEND
from gradcombine.backends.jax_collective import JaxAxis
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import dtype_of, is_absent, owner, shape_of
from gradcombine.errors import invalid, operation, require_equal, require_type, translate_errors, within
from gradcombine.places.replicas import LOCAL
from gradcombine.reductions.algebra import Reduction, Wrapper
from gradcombine.reductions.sums import MeanState, SumState
from gradcombine.settings import check, valid
from gradcombine.types import Array, Leaf, Order, Scalar, State, Tree
from gradcombine.wires import exchange
from gradcombine.wires.wire import Wire, require_wire

__all__ = ["exchange_costs", "gather", "scattered", "shard"]


@operation("scattered")
def scattered(reduction: Reduction, over: Collective) -> Reduction:
    """Shards the accumulators of a reduction over the replicas: each holds 1/N.

    Each ``update`` sums the replicas' contributions by one reduce-scatter, and adds this replica's shard. With
    ``gradcombine.accumulate(scattered(reduction, over), every=k)`` the accumulators need 1/N of the memory, and a
    window moves k/2 times the bytes of one all-reduce at its end (see `exchange_costs`). With
    ``value_and_grad(loss, microbatches=k, reduction=scattered(reduction, over), over=over)`` in shard_map, and with
    `gradcombine.integrations.optax.accumulate` around an elementwise optimizer, the gradients are shards as well. A
    `train_step` in shard_map supports it with an optimizer that gathers its updates; `gradcombine plan` prints one.

    Args:
      reduction: ``reductions.sum`` or ``reductions.mean`` in precision ``"fast"``. A mean sums numerators and weights
        over replicas and microbatches, and divides once. With a ``wire``, each reduce-scatter becomes an all-to-all of
        encoded values, which are rounded once and added in float32.
      over: `gradcombine.jax_axis`. All replicas have to call ``update``, those without data with weight 0.

    Returns:
      A reduction for use inside pmap, vmap or shard_map. ``finalize`` returns a tree of shards: for a leaf of n
      elements, an array of shape (ceil(n / N),), with this replica's elements in row-major order, padded with zeros.
      An elementwise optimizer can run on shards of the parameters (`shard`), and `gather` restores full leaves.

    Raises:
      GradCombineError: for another reduction, a collective that is not ``jax_axis``, and in ``all_merge`` over only
        some of the axes that ``update`` sums over (over all of them, ``all_merge`` changes nothing).

    Bits: each microbatch is summed over replicas in the order of XLA's reduce-scatter, then added to the window. This
    order differs from that of one all-reduce at the end; if all sums are exact, the bits are the same.

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
    """See `scattered`; ``over`` is the replica axis over which accumulators are sharded."""

    call = "scattered"

    def __init__(self, of: Reduction, over: JaxAxis) -> None:
        super().__init__(of, over=over)
        self.axis = self.summed_over = over

    def init(self, like: Tree) -> State:
        leaves, structure = tree.flatten(like)
        shards = list[Leaf]()
        with within(lambda: structure.path(len(shards))):
            for leaf in leaves:
                shards.append(leaf if is_absent(leaf) else _empty_shard(self.axis, leaf))
        return self.of.init(tree.unflatten(structure, shards))

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        present = tree.present(value)
        self.axis.require_unreduced(present)
        local = self.of.update(self.of.init(value), value, weight)
        arrays, inner = tree.flatten(local.value)
        shards = self._sum_scatter([path for path, _ in present], arrays)
        total, count = self.axis.mark_varying(self.axis.all_sum([local.weight, local.count]))
        summed = local._replace(value=tree.unflatten(inner, shards), weight=total, count=count)
        return self.of.merge(state, summed)

    def _sum_scatter(self, paths: Sequence[str], arrays: Sequence[Array]) -> list[Array]:
        """Reduce-scatters arrays over the axis, in the format of the wire if that sends fewer bytes."""
        rows, wire = [self.axis.rows(array) for array in arrays], self.wire
        encoded = [
            wire is not None
            and "parts" in self.axis.narrow_ways()
            and not wire.keeps(path, array.shape)
            and wire.nbytes(x.shape[1]) * len(x) < x.nbytes
            for path, array, x in zip(paths, arrays, rows, strict=True)
        ]
        plain_sums = iter(self.axis.sum_scatter([x for x, encodes in zip(rows, encoded, strict=True) if not encodes]))
        if wire is None or not any(encoded):
            return list(plain_sums)
        sent = [x.astype(jnp.float32) for x, encodes in zip(rows, encoded, strict=True) if encodes]
        wire_sums = iter(exchange.sum_parts(BACKEND, self.axis, wire, sent))
        return [
            next(wire_sums)[0].astype(x.dtype) if encodes else next(plain_sums)
            for x, encodes in zip(rows, encoded, strict=True)
        ]

    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        names = self.axis.names
        others = set(getattr(collective, "names", names))
        if others == set(names) and collective is not LOCAL:
            return state  # updates have summed over them already
        if collective is not LOCAL and set(names) & others:
            expected = f"all axes of {self.axis!r}, which updates sum over, or none of them"
            raise invalid(expected, repr(collective))
        return self.of.all_merge(state, collective, order)


@operation("shard")
def shard(values: Tree, over: Collective) -> Tree:
    """Returns this replica's shard of each leaf, as in `scattered`.

    Args:
      values: a tree that is the same on all replicas, for instance the parameters.
      over: `gradcombine.jax_axis`.

    Returns:
      A tree of arrays: for a leaf of n elements, one of shape (ceil(n / N),), padded with zeros.

    >>> import gradcombine as gc, jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax import zero
    >>> part = lambda rank: zero.shard(jnp.float32([[1, 2, 3]]), gc.jax_axis("data"))
    >>> jax.vmap(part, axis_name="data")(jnp.arange(2)).tolist()
    [[1.0, 2.0], [3.0, 0.0]]
    """
    axis = _axis(over)

    def part(leaf: Leaf) -> Leaf:
        return leaf if is_absent(leaf) else axis.mark_varying([axis.rows(BACKEND.asarray(leaf))])[0][axis.rank()]

    return tree.map(part, values)


@operation("gather")
def gather(shards: Tree, like: Tree, over: Collective, wire: Wire | None = None) -> Tree:
    """Gathers full leaves from the shards of all replicas, by one all-gather.

    Args:
      shards: results of `shard` or of the ``finalize`` of `scattered`, or updates of the same shapes.
      like: arrays or specs with the shapes of the full leaves, for instance the parameters.
      over: `gradcombine.jax_axis`.
      wire: format in which float shards are sent, each rounded once; None: as they are.

    Returns:
      A tree with the shapes of ``like`` and the dtypes of the shards, on all replicas; in shard_map, its type does not
      vary over the axis.

    Raises:
      GradCombineError: for trees that do not match.

    >>> import gradcombine as gc, jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax import zero
    >>> full = lambda part: zero.gather(part, jnp.zeros((1, 3)), gc.jax_axis("data"))
    >>> jax.vmap(full, axis_name="data")(jnp.float32([[1, 2], [3, 0]]))[0].tolist()
    [[1.0, 2.0, 3.0]]
    """
    axis = _axis(over)
    specs, structure = tree.flatten(like)
    leaves = tree.flatten_as(structure, shards)
    for i, (path, spec, leaf) in enumerate(zip(structure.paths(), specs, leaves, strict=True)):
        expected = None if is_absent(spec) else (_length(axis.size(), spec),)
        received = None if is_absent(leaf) else shape_of(leaf)
        require_equal("a shard of shape {}", expected, received, path)
        with within(path):
            leaves[i] = leaf if received is None else BACKEND.asarray(leaf)
    present = [i for i, leaf in enumerate(leaves) if not is_absent(leaf)]
    encoded = dict.fromkeys(present, False)
    if wire is not None and require_wire(wire) and axis.size() > 1:
        paths = list(structure.paths())
        encoded = {i: not wire.keeps(paths[i], shape_of(specs[i])) for i in present}
        for i in present:
            if encoded[i] and not jnp.issubdtype(leaves[i].dtype, jnp.floating):
                expected = f"a float shard for {wire!r}, or one that its wide= keeps uncompressed"
                raise invalid(expected, leaves[i].dtype, paths[i])
    plain = iter(axis.all_gather([leaves[i] for i in present if not encoded[i]]))
    sent = [leaves[i].astype(jnp.float32)[None] for i in present if encoded[i]]
    decoded = iter(exchange.gather_rows(BACKEND, axis, wire, sent) if wire is not None and sent else [])
    gathered = (next(decoded if encoded[i] else plain).astype(leaves[i].dtype) for i in present)

    def full(spec: Leaf, leaf: Leaf) -> Leaf:
        if is_absent(leaf):
            return leaf
        shape = shape_of(spec)
        return next(gathered).reshape(-1)[: math.prod(shape)].reshape(shape)

    return tree.unflatten(structure, map(full, specs, leaves))


class ExchangeCost(NamedTuple):
    """Bytes per device and window.

    Attributes:
      sent: bytes sent by ring collectives during the window; as many are received.
      accumulators: bytes of the window's state, without its scalars.
    """

    sent: int
    accumulators: int


@operation("exchange_costs")
def exchange_costs(reduction: Reduction, like: Tree, every: int, replicas: int) -> dict[str, ExchangeCost]:
    """Compares the costs of two strategies to combine a window over replicas.

    Args:
      reduction: combines the gradients.
      like: arrays or specs of the gradients.
      every: the number of microbatches in a window.
      replicas: N, the number of replicas.

    Returns:
      An `ExchangeCost` per strategy. ``"all_reduce"``: full accumulators, and one all-reduce at the end of the window,
      which sends 2 (N - 1) / N of their bytes. ``"reduce_scatter"``: `scattered`, which sends (N - 1) / N of the bytes
      in each microbatch, and once more to `gather` the updated parameters, assumed to be in the gradients' dtypes.

    >>> import gradcombine as gc, jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax import zero
    >>> spec = jax.ShapeDtypeStruct((1000,), jnp.float32)
    >>> zero.exchange_costs(gc.reductions.mean(), spec, every=4, replicas=8)["reduce_scatter"]
    ExchangeCost(sent=17500, accumulators=500)
    """
    check(reduction=reduction)
    every, replicas = valid("microbatches", every), valid("replicas", replicas)
    full = shards = gathered = all_reduced = scattered = 0
    for path, leaf in tree.present(like):
        with translate_errors("arrays or specs of JAX", TypeError):  # raised for dtypes that JAX lacks
            state = jax.eval_shape(lambda leaf=leaf: reduction.init(leaf)).value
        if owner(state) is None:
            raise invalid("a reduction whose state is one array per leaf", type(state).__name__)
        size, length, width = math.prod(shape_of(leaf)), _length(replicas, leaf), BACKEND.dtype(state).itemsize
        sent = length * width
        full, shards, gathered = full + size * width, shards + sent, gathered + length * dtype_of(leaf).itemsize
        if (wire := reduction.wire) is not None:
            costs, keeps = exchange.bytes_sent(wire, size, replicas, width), wire.keeps(path, shape_of(leaf))
            all_reduced += costs["wide"] if keeps else min(costs.values())
            sent = sent if keeps else min(sent, wire.nbytes(length))
        scattered += sent
    if reduction.wire is None:
        all_reduced = 2 * (replicas - 1) * full // replicas
    return {
        "all_reduce": ExchangeCost(all_reduced, full),
        "reduce_scatter": ExchangeCost((replicas - 1) * (every * scattered + gathered), shards),
    }


def _axis(over: object) -> JaxAxis:
    return require_type("a collective of gradcombine.jax_axis", over, JaxAxis)


def _length(replicas: int, leaf: Leaf) -> int:
    return -(-math.prod(shape_of(leaf)) // replicas)


def _empty_shard(axis: JaxAxis, leaf: Leaf) -> Array:
    zeros = BACKEND.full((_length(axis.size(), leaf),), 0, dtype_of(leaf), [leaf])
    return axis.mark_varying([zeros])[0]
