"""Programs for the modes: combine contributions in each place (list, time, replicas, mixtures), for all reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradcombine as gc
from gradcombine import tree
from tests.spec.modes import Env

REDUCTIONS = {
    "sum": gc.reductions.sum(),
    "mean": gc.reductions.mean(),
    "product": gc.reductions.product(),
    "min": gc.reductions.min(),
    "max": gc.reductions.max(),
    "first": gc.reductions.first(),
    "last": gc.reductions.last(),
}

LOCAL_PLACES = ("list", "time", "merged halves")
"""Places that combine the contributions of one replica."""


def rows(xs: Any) -> list[Any]:
    """Splits a stacked tree into the list of its rows."""
    leaves, structure = tree.flatten(xs)
    count = next(leaf.shape[0] for leaf in leaves if leaf is not None)
    return [tree.unflatten(structure, [None if x is None else x[i] for x in leaves]) for i in range(count)]


@dataclass(frozen=True)
class Combine:
    """Combines ``{"values": stacked tree, "weights": stacked scalars}`` of one replica to one tree per reduction."""

    place: str
    order: str
    names: tuple[str, ...] = tuple(REDUCTIONS)
    precision: str = "fast"

    def __call__(self, env: Env, data: Any) -> Any:
        return {name: self.one(env, self.reduction(name), data["values"], data["weights"]) for name in self.names}

    def reduction(self, name: str) -> gc.Reduction:
        return REDUCTIONS[name] if self.precision == "fast" else getattr(gc.reductions, name)(self.precision)

    def one(self, env: Env, reduction: gc.Reduction, values: Any, weights: Any) -> Any:
        order: Any = self.order
        trees, scales = rows(values), rows(weights)
        if self.place == "list":
            return gc.combine(reduction, trees, scales, order)
        if self.place == "merged halves":
            return _merged_halves(reduction, trees, scales)
        if self.place == "replicas":
            return gc.all_reduce(reduction, trees[0], env.collective, scales[0], order)
        if self.place == "list x replicas":
            state = reduction.init(trees[0])
            for value, weight in zip(trees, scales, strict=True):
                state = reduction.update(state, value, weight)
            return reduction.finalize(gc.merge_replicas(reduction, state, env.collective, order))
        accumulator = gc.accumulate(reduction, every=len(trees), order=order)

        def step(state: Any, x: Any) -> Any:
            return accumulator.update(x["values"], state, x["weights"])

        state = env.loop(step, accumulator.init(trees[0]), {"values": values, "weights": weights})
        if self.place == "time x replicas":
            state = gc.merge_replicas(reduction, state, env.collective, order)
        return accumulator.value(state)


@dataclass(frozen=True)
class Single:
    """Like `Combine`, for one reduction."""

    reduction: gc.Reduction
    place: str
    order: str

    def __call__(self, env: Env, data: Any) -> Any:
        return Combine(self.place, self.order).one(env, self.reduction, data["values"], data["weights"])


def _merged_halves(reduction: gc.Reduction, trees: list[Any], scales: list[Any]) -> Any:
    half = len(trees) // 2
    states = []
    for part in (slice(None, half), slice(half, None)):
        state = reduction.init(trees[0])
        for value, weight in zip(trees[part], scales[part], strict=True):
            state = reduction.update(state, value, weight)
        states.append(state)
    return reduction.finalize(reduction.merge(*states))
