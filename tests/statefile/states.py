"""States of every reduction, and their contents for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import gradcombine as gc
from gradcombine import reductions, sparse, statefile, tree

SUFFIXES = (".npz", ".safetensors")


class Layer(NamedTuple):
    """A user-defined container."""

    kernel: Any
    bias: Any


FLOATS = {
    "layers": [Layer(np.zeros((2, 3), np.float32), None), (np.zeros((), ml_dtypes.bfloat16),)],
    7: np.zeros(4, np.float16),
    "name/with \\ 'every' \N{GREEK SMALL LETTER ALPHA}\n": np.zeros((1, 2), np.float32),
}
WIDE = {"complex": np.zeros(3, np.complex64), "double": np.zeros(2, np.float64), "z": np.zeros((), np.complex128)}
INTEGERS = {"int8": np.zeros(3, np.int8), "uint32": np.zeros((2, 1), np.uint32), "float": np.zeros(2, np.float32)}
EVERYTHING = {**INTEGERS, "bool": np.zeros((2,), np.bool_), "complex": np.zeros(2, np.complex64), "none": None}


class Case(NamedTuple):
    reduction: gc.Reduction
    like: Any


CASES = {
    "sum": Case(reductions.sum(), {**FLOATS, **INTEGERS}),
    "sum of wide": Case(reductions.sum(), WIDE),
    "sum into other dtypes": Case(reductions.sum(dtype="bfloat16", output_dtype="float64"), FLOATS),
    "compensated sum": Case(reductions.sum("compensated"), FLOATS),
    "exact sum": Case(reductions.sum("exact"), FLOATS),
    "mean": Case(reductions.mean(), FLOATS),
    "mean of wide": Case(reductions.mean(), WIDE),
    "compensated mean": Case(reductions.mean("compensated"), {**FLOATS, **WIDE}),
    "exact mean": Case(reductions.mean("exact"), FLOATS),
    "product": Case(reductions.product(), FLOATS),
    "min": Case(reductions.min(), INTEGERS),
    "max": Case(reductions.max(), INTEGERS),
    "first": Case(reductions.first(), EVERYTHING),
    "last": Case(reductions.last(), EVERYTHING),
    "moments": Case(reductions.moments(), FLOATS),
    "row mean": Case(
        reductions.row_mean(capacity=30),
        {"embedding": sparse.row_sparse(np.zeros(3, np.int32), np.zeros((3, 2), np.float16), rows=100), "none": None},
    ),
    "checked": Case(reductions.checked(reductions.mean()), FLOATS),
    "per_leaf": Case(
        reductions.per_leaf(
            {"exact": reductions.mean("exact"), "moments": reductions.moments(), "tokens": reductions.sum()}
        ),
        {"exact": FLOATS, "moments": np.zeros(2, np.float32), "tokens": np.int32(0)},
    ),
    "no gradient at all": Case(reductions.mean(), {"a": None, "b": [None]}),
}


def contribution(like: Any, seed: int) -> Any:
    """A random tree with the structure of ``like``: sums round, and some elements are NaN, infinite or -0."""
    rng = np.random.default_rng(seed)
    leaves, structure = tree.flatten(like)

    def fill(leaf: Any) -> Any:
        if leaf is None:
            return None
        dtype = np.asarray(leaf).dtype
        if dtype.kind in "iub":
            return rng.integers(0, 2 if dtype.kind == "b" else 100, np.shape(leaf)).astype(dtype)
        values = rng.normal(size=np.shape(leaf))
        special = rng.choice([np.nan, np.inf, -0.0], np.shape(leaf))
        return np.where(rng.random(np.shape(leaf)) < 0.05, special, values).astype(dtype)

    return tree.unflatten(structure, map(fill, leaves))


def accumulated(case: Case, order: Any, contributions: range, every: int = 8, state: Any = None) -> Any:
    """A window of these contributions with weights 1, 2, 3, 1, 2, 3, ..."""
    acc = gc.accumulate(case.reduction, every, order=order)
    state = acc.init(case.like) if state is None else state
    for seed in contributions:
        state = acc.update(contribution(case.like, seed), state, weight=1 + seed % 3)
    return state


def saved_and_loaded(path: Path, case: Case, state: Any) -> Any:
    """The state from a file, which equals the saved one bit for bit."""
    statefile.save(path, case.reduction, state)
    loaded = statefile.load(path, case.reduction, case.like)
    assert contents(loaded) == contents(state)
    return loaded


def contents(state: Any) -> dict[str, Any]:
    """Dtype, shape and bytes of every leaf, by path."""
    leaves, structure = tree.flatten(state)
    arrays = (None if leaf is None else np.asarray(leaf) for leaf in leaves)
    described = (None if x is None else (x.dtype, x.shape, x.tobytes()) for x in arrays)
    return {**dict(zip(structure.paths(), described, strict=True)), "containers": str(structure)}
