# pyright: standard
"""JAX: the digits classifier, and the combine: eager, jit and scan; pmap and shard_map over virtual CPU devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import gradcombine as gc
from gradcombine.types import AccumulateState, Order, Tree
from gradcombine.verify.suite import places
from gradcombine.verify.suite.digits import Batch
from gradcombine.verify.suite.places import Case, Contributions

_AXIS = "data"
_Mapped = Callable[[Callable[..., Any], int], Callable[..., Any]]


def cases(counts: Sequence[int]) -> Iterator[Case]:
    for order in places.ORDERS:
        for mode, compiled in (("eager", _eager), ("jit", jax.jit)):
            yield Case("jax", mode, places.LIST, 1, order, partial(_over_list, compiled, order))
            yield Case("jax", mode, places.TIME, 1, order, partial(_over_time, compiled, order))
        yield Case("jax", "scan", places.TIME, 1, order, partial(_over_scan, order))
    for mode, mapped in _MAPPED.items():
        for order in places.ORDERS:
            for count in counts:
                yield Case("jax", mode, places.REPLICAS, count, order, partial(_over_replicas, mapped, count, order))
            for count in counts:
                run = partial(_over_time_and_replicas, mapped, count, order)
                yield Case("jax", mode, places.TIME_AND_REPLICAS, count, order, run)


def _over_list(compiled: Callable[..., Any], order: Order, contributions: Contributions) -> list[Tree]:
    function = compiled(partial(places.over_list, order=order))
    return [_numpy(function(*_arrays(contributions)))]


def _over_time(compiled: Callable[..., Any], order: Order, contributions: Contributions) -> list[Tree]:
    accumulator, state = places.over_time(*_arrays(contributions), order, compiled)
    return [_numpy(accumulator.value(state))]


def _over_scan(order: Order, contributions: Contributions) -> list[Tree]:
    @jax.jit
    def run(values: Tree, weights: jax.Array) -> Tree:
        accumulator, state = _scan(values, weights, order)
        return accumulator.value(state)

    return [_numpy(run(*contributions.stacked(len(contributions.weights))))]


def _over_replicas(mapped: _Mapped, count: int, order: Order, contributions: Contributions) -> list[Tree]:
    run = partial(places.over_replicas, over=gc.jax_axis(_AXIS), order=order)
    return _every_replica(mapped(run, count), count, contributions.stacked(count))


def _over_time_and_replicas(mapped: _Mapped, count: int, order: Order, contributions: Contributions) -> list[Tree]:
    def run(values: Tree, weights: jax.Array) -> Tree:
        return places.merged(_scan(values, weights, order), gc.jax_axis(_AXIS), order)

    return _every_replica(mapped(run, count), count, contributions.stacked(count, len(contributions.weights) // count))


def _every_replica(run: Callable[..., Any], count: int, dealt: Any) -> list[Tree]:
    results = _numpy(run(*dealt))
    return [{name: result[rank] for name, result in results.items()} for rank in range(count)]


def _scan(values: Tree, weights: jax.Array, order: Order) -> tuple[gc.Accumulator, AccumulateState]:
    accumulator = gc.accumulate(places.MEAN, every=len(weights), order=order)
    empty = accumulator.init(jax.tree.map(lambda value: value[0], values))

    def step(state: AccumulateState, contributions: Any) -> tuple[AccumulateState, None]:
        value, weight = contributions
        return accumulator.update(value, state, weight), None

    state, _ = lax.scan(step, empty, (values, weights))
    return accumulator, state


def _pmap(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    return jax.pmap(function, _AXIS, devices=jax.devices()[:count])


def _shard_map(check_vma: bool, function: Callable[..., Any], count: int) -> Callable[..., Any]:
    def local(*blocks: Any) -> Any:
        own = jax.tree.map(lambda block: block[0], blocks)
        return jax.tree.map(lambda result: result[None], function(*own))

    mesh = Mesh(np.array(jax.devices()[:count]), (_AXIS,))
    # Results are stacked by replica, so that each replica's is checked.
    spec = PartitionSpec(_AXIS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))


_MAPPED: dict[str, _Mapped] = {
    "pmap": _pmap,
    "shard_map": partial(_shard_map, True),
    "shard_map, no vma": partial(_shard_map, False),
}


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _arrays(contributions: Contributions) -> tuple[list[Tree], list[jax.Array]]:
    return jax.tree.map(jnp.asarray, list(contributions.values)), [
        jnp.float32(weight) for weight in contributions.weights
    ]


def _numpy(result: Tree) -> Tree:
    return jax.tree.map(np.asarray, result)


def loss(parameters: dict[str, Any], images: jax.Array, labels: jax.Array) -> jax.Array:
    hidden = jnp.tanh(images @ parameters["w1"] + parameters["b1"])
    logits = hidden @ parameters["w2"] + parameters["b2"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


@jax.jit
def measure(parameters: dict[str, Any], batch: Batch) -> dict[str, jax.Array]:
    """The mean loss over a batch and its gradient, as one flat tree."""
    value, gradients = jax.value_and_grad(loss)(parameters, *batch)
    return gradients | {"loss": value}


def exported(tree: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in tree.items()}
