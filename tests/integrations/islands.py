"""NumPy reference for local SGD with an outer optimizer, shared by the tests of all frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np

EVERY, STEPS = 4, 8
SHAPES = {"a": (6, 5), "b": (4,), "c": (3, 3)}
FRAGMENTS = {1: [["a", "b", "c"]], 2: [["a"], ["b", "c"]]}
"""Leaves of each fragment; leaves are assigned by decreasing size to the smallest fragment so far."""


def start() -> Any:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def moves(n: int) -> Any:
    """Updates of each island's inner optimizer in each step, of shape (islands, steps, ...)."""
    rng = np.random.default_rng(n)
    return {name: rng.normal(size=(n, STEPS, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def ruled(added: Any, weights: np.ndarray, fragments: list[list[str]]) -> Any:
    """Parameters after each step, with outer SGD (learning rate 1, Nesterov momentum 1/2) computed in float32."""
    n, f32 = len(weights), np.float32
    outer_params, momentum = start(), {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    params, seen = [start() for _ in range(n)], []
    weight = np.zeros((len(fragments), n), np.float32)
    for i in range(STEPS):
        for island in range(n):
            params[island] = {name: x + added[name][island, i] for name, x in params[island].items()}
        weight += weights[:, i]
        for f, names in enumerate(fragments):
            if (i + 1 + f * EVERY // len(fragments)) % EVERY:
                continue
            for name in names:
                terms = [weight[f, k] * (outer_params[name] - params[k][name]) for k in range(n)]
                while len(terms) > 1:
                    terms = [x + y for x, y in zip(terms[::2], terms[1::2], strict=True)]
                gradient = terms[0] / weight[f].sum(dtype=np.float32)
                momentum[name] = gradient + f32(0.5) * momentum[name]
                outer_params[name] = outer_params[name] - (gradient + f32(0.5) * momentum[name])
                for island in range(n):
                    params[island][name] = outer_params[name]
            weight[f] = 0
        seen.append({"params": [dict(x) for x in params], "outer": dict(outer_params)})
    return seen


def seen_by(n: int) -> np.ndarray:
    """Input of each island in each step, of shape (islands, steps)."""
    return np.float32(np.arange(1, n * STEPS + 1).reshape(n, STEPS) % 5 + 1)
