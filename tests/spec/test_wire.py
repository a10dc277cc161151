"""Exact states over replicas: an all-reduce of integers (max, then sum) gives the words of successive merges."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions.cell import parts
from gradcombine.tree import is_static
from gradcombine.types import no_autograph
from tests.spec import exact, modes
from tests.spec.selection import FULL, traced_quickly, unrolled

FEW = reductions.mean("exact")
MANY = reductions.mean("exact", max_terms=2**26)
REPLICAS = 4
SIZE = 100


def contributions() -> dict[str, np.ndarray]:
    """Two contributions per replica, of shape (replicas, 2, patterns, SIZE), and their weights."""
    rng = np.random.default_rng(0)
    shape = (REPLICAS, 2, SIZE)
    normal = rng.normal(size=shape).astype(np.float32)
    cancelling = normal.copy()
    cancelling[1] = -cancelling[0]
    kinds = {
        "random bits": rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32),
        "normal": normal,
        "another magnitude on each replica": normal * np.float32(10) ** np.float32([9, -30, 0, -9])[:, None, None],
        "another magnitude everywhere": (normal * 10.0 ** rng.integers(-45, 39, shape)).astype(np.float32),
        "cancelling": cancelling,
        "subnormal": (rng.integers(-(2**24), 2**24, shape) * 2.0**-149).astype(np.float32),
        "specials": rng.choice(np.float32([np.inf, -np.inf, np.nan, 0, -0.0, 1, -(2.0**127)]), shape),
        "zeros": np.zeros(shape, np.float32),
    }
    weights = np.int32([[1, 3], [0, 0], [2**20 + 1, 0], [5000, 1]])
    x = np.stack(list(kinds.values()), axis=2)
    x[0, :, :, -1] = 0
    x[weights == 0] = np.nan
    return {"x": x, "weights": weights}


DATA = contributions()


def start(reduction: gc.Reduction, rank: int) -> Any:
    """The state of one replica; one leaf has no gradient, another is a scalar."""
    trees = [{"w": x, "none": None, "scalar": x[1, 0]} for x in DATA["x"][rank]]
    state = reduction.init(trees[0])
    for value, weight in zip(trees, DATA["weights"][rank], strict=True):
        state = reduction.update(state, value, weight)
    return state


FEW_STATES, MANY_STATES = ([start(reduction, rank) for rank in range(REPLICAS)] for reduction in (FEW, MANY))


@no_autograph
def merged(env: modes.Env, states: Any) -> Any:
    few, many = (gc.merge_replicas(r, s, env.collective) for r, s in zip((FEW, MANY), states, strict=True))
    return few, many, FEW.finalize(few)


COUNTS = [2, 4, pytest.param(8, marks=FULL)]


@pytest.mark.full
@unrolled
@pytest.mark.parametrize("replicas", COUNTS)
def test_the_words_are_those_of_merging_one_after_another(replicated: modes.Mode, replicas: int) -> None:
    states = [(FEW_STATES[rank % REPLICAS], MANY_STATES[rank % REPLICAS]) for rank in range(replicas)]
    expected = [fold_pairwise(r.merge, own) for r, own in zip((FEW, MANY), zip(*states, strict=True), strict=True)]
    mean = FEW.finalize(expected[0])
    for *received, finished in replicated.run(merged, states):
        for state, other in zip(received, expected, strict=True):
            assert is_static(state.value["none"])
            for word, expected_word in zip(arrays(state), arrays(other), strict=True):
                np.testing.assert_array_equal(word, expected_word)
        for leaf in ("w", "scalar"):
            np.testing.assert_array_equal(exact.bits(finished[leaf]), exact.bits(mean[leaf]))


def arrays(state: Any) -> list[Any]:
    return list(parts((state.value["w"], state.value["scalar"], state.weight, state.count)))


@no_autograph
def reduced(env: modes.Env, data: Any) -> Any:
    return gc.all_reduce(FEW, {"w": data["x"], "none": None}, env.collective, data["weight"])


@pytest.mark.sampled
@unrolled
@traced_quickly(("jax_shard_map", "4"), ("tf_mirrored",))
@pytest.mark.parametrize("replicas", COUNTS)
def test_all_reduce_gives_the_mean_of_the_list(replicated: modes.Mode, replicas: int) -> None:
    data = [{"x": DATA["x"][i % REPLICAS, 0], "weight": WEIGHTS[i % REPLICAS]} for i in range(replicas)]
    expected = gc.combine(FEW, [{"w": own["x"], "none": None} for own in data], [own["weight"] for own in data])
    for result in replicated.run(reduced, data):
        assert result["none"] is None
        np.testing.assert_array_equal(exact.bits(result["w"]), exact.bits(expected["w"]))


WEIGHTS = np.float32([0.3, 0, 1, 1e7])


LARGEST = np.float32(2**16 - 2**-8)
"""A number whose top digit is the largest possible: its leading bit is the highest of a bin."""


LONG = 3 * (2**24 + 1)
"""A constant weight of two 24-bit parts, with which a contribution makes two deposits."""


@no_autograph
def long_weights(env: modes.Env, x: Any) -> Any:
    return tuple(gc.all_reduce(r, x, env.collective, LONG) for r in (FEW, reductions.sum("exact")))


@pytest.mark.full
@pytest.mark.needs("jax")
@pytest.mark.parametrize("replicas", [128, 256])
def test_two_words_hold_the_digits_of_128_replicas(replicas: int) -> None:
    """Each makes two deposits. With 256 replicas, two words are too small, and three are exchanged."""
    third = LARGEST / np.float32(3)
    columns = [third, -third, LARGEST * np.float32(2**-16), -np.float32(2**-149), np.inf, -np.inf, np.nan, 0]
    x = np.tile(np.float32(columns), (replicas, 1))
    x[1:, -1] = np.float32([LARGEST, -LARGEST])[np.arange(replicas - 1) % 2]
    expected = [gc.combine(r, list(x), [LONG] * replicas) for r in (FEW, reductions.sum("exact"))]
    for result in modes.get("jax_vmap").run(long_weights, list(x))[:: replicas - 1]:
        for received, other in zip(result, expected, strict=True):
            np.testing.assert_array_equal(exact.bits(received), exact.bits(other))


@no_autograph
def settled(env: modes.Env, x: Any) -> Any:
    state = gc.merge_replicas(MANY, MANY.update(MANY.init(x), x), env.collective)
    return parts(state.value), parts(state.weight), state.count


@pytest.mark.full
@pytest.mark.needs("jax")
def test_settled_words_of_4096_replicas() -> None:
    """The most replicas that one exchange supports: the largest digits and counts of infinities do not overflow."""
    x = np.float32([LARGEST, -LARGEST, -np.float32(2**-149), np.inf, -np.inf, np.nan])
    state = MANY.update(MANY.init(x), x, np.float32(1))
    for _ in range(12):
        state = MANY.merge(state, state)
    expected = parts(state.value), parts(state.weight), state.count
    for result in modes.get("jax_vmap").run(settled, [x] * 4096)[::4095]:
        for received, other in zip(result, expected, strict=True):
            np.testing.assert_array_equal(received, other)


@pytest.mark.full
@pytest.mark.needs("jax")
def test_deposits_of_all_replicas_are_counted() -> None:
    """Replicas within their capacity that exceed it together give NaN; a count near its limit does not wrap around."""

    def program(env: modes.Env, state: Any) -> Any:
        merged = gc.merge_replicas(MANY, state, env.collective)
        return MANY.finalize(merged), merged.weight.deposits

    state = MANY.update(MANY.init(np.float32([1])), np.float32([1]))
    for deposits, fits in ((2**19, True), (2**19 + 1, False), (2**26 + 1, False)):
        full = state._replace(weight=state.weight._replace(deposits=np.int32(deposits)))
        result, count = modes.get("jax_vmap").run(program, [full] * 128)[0]
        assert (result == 1) if fits else np.isnan(result)
        assert count == min(deposits * 128, 2**26 + 1)


BYTES = {
    "psum": (lambda x, axis: axis.all_sum([x])[0], 1),
    "all_reduce": (lambda x, axis: gc.all_reduce(FEW, x, axis), 1.75),
    "all_reduce, many": (lambda x, axis: gc.all_reduce(MANY, x, axis), 1.75),
    "merge_replicas": (lambda x, axis: gc.merge_replicas(FEW, FEW.update(FEW.init(x), x), axis), 3.25),
    "merge_replicas, many": (lambda x, axis: gc.merge_replicas(MANY, MANY.update(MANY.init(x), x), axis), 6.25),
}
"""Bytes that one replica receives in ring exchanges, relative to an all-reduce of floats."""


@pytest.mark.cpus
@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in ("psum", "all_reduce") else FULL) for x in BYTES])
def test_bytes_on_the_wire(name: str) -> None:
    """Counts bytes in the compiled XLA program."""
    import jax
    from jax.sharding import PartitionSpec

    from tests.integrations.jax.replicas import mesh

    program, factor = BYTES[name]
    size, replicas = 40_000, 4
    spec = PartitionSpec("data")
    settings: dict[str, Any] = {"mesh": mesh(replicas, "data"), "in_specs": spec, "out_specs": PartitionSpec()}
    function = jax.shard_map(lambda x: program(x, gc.jax_axis("data")), **settings)
    compiled = jax.jit(function).lower(jax.ShapeDtypeStruct((replicas * size,), np.float32)).compile().as_text()
    received = 0.0
    for shapes, kind in re.findall(r" = (.*?) (all-reduce|all-gather|reduce-scatter)\(", compiled):
        for width, dimensions in re.findall(r"[sfu](8|32)\[([0-9,]+)\]", shapes):
            result = int(width) // 8 * math.prod(map(int, dimensions.split(",")))
            ring = {"all-reduce": 2 * (replicas - 1) / replicas, "all-gather": (replicas - 1) / replicas}
            received += result * ring.get(kind, replicas - 1)
    plain = 4 * size * 2 * (replicas - 1) / replicas
    assert factor * plain <= received <= factor * plain + 100
    assert not re.search(r"all-to-all|collective-permute", compiled)
