# pyright: standard
"""Wires: received values equal the roundings in exact arithmetic, in every mode and on all replicas."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import sparse, wires
from gradcombine.backends.registry import load
from gradcombine.wires.coding import decode, encode
from tests.spec import exact, modes
from tests.spec.selection import unrolled

NUMPY = load("numpy")
WIRES = {
    "bfloat16": wires.cast("bfloat16"),
    "float16": wires.cast("float16"),
    "float8_e4m3": wires.cast("float8_e4m3"),
    "float8_e5m2": wires.cast("float8_e5m2"),
    "8 bits": wires.blocks(8, 32),
    "4 bits": wires.blocks(4, 32),
}
SHAPES = {"w": (40, 50), "norm": (8, 300), "b": (300,), "scalar": (), "empty": (0, 3)}


def rounded(wire: wires.Wire, x: np.ndarray) -> np.ndarray:
    """Rounds to nearest even in blocks of rows, through ml_dtypes or float64, which holds each product exactly."""
    if not wire.size:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    rows, columns = x.shape
    blocks = np.pad(x, ((0, 0), (0, -columns % wire.size))).reshape(rows, -1, wire.size).astype(np.float64)
    top = np.abs(blocks).max(-1, keepdims=True)
    top[top == 0] = 1
    if wire.exponent:
        name = next(name for name, one in WIRES.items() if one.name == wire.name)
        power = 2.0 ** (np.floor(np.log2(top)) - (2 ** (wire.exponent - 1) - 2))
        result = (blocks / power).astype(name).astype(np.float64) * power
    else:
        power = 2.0 ** np.ceil(np.log2(top / (2**wire.significand - 1)))
        result = np.rint(blocks / power) * power
    return result.astype(np.float32).reshape(rows, -1)[:, :columns]


def summed(wire: wires.Wire, xs: list[np.ndarray], to: str) -> np.ndarray:
    """The sum over replicas through one type of exchange, in the canonical tree."""
    n, size, shape = len(xs), xs[0].size, xs[0].shape
    rows = n if to == "parts" else 1
    flat = [np.pad(x.reshape(-1), (0, -size % rows)).reshape(rows, -1) for x in xs]
    total = exact.fold(add, [rounded(wire, x) for x in flat], "tree")
    if to == "parts":
        total = rounded(wire, total)
    return total.reshape(-1)[:size].reshape(shape)


def way_of(wire: wires.Wire, framework: str, name: str, n: int) -> str:
    """The type of exchange of a leaf, by the rule of docs/wires.md."""
    if wire.bits <= 8 and (len(SHAPES[name]) < 2 or "norm" in name):
        return "wide"
    size, ring = math.prod(SHAPES[name]), 2 * (n - 1) / n

    def coded(elements: int) -> float:
        blocks = math.ceil(elements / wire.block)
        return blocks * (wire.block * wire.bits / 8 + (wire.size > 0))

    costs = {"wide": ring * 4 * size, "gathered": (n - 1) * coded(size), "parts": ring * n * coded(math.ceil(size / n))}
    if framework == "tensorflow":
        del costs["parts"]
    return min(costs, key=lambda to: costs[to])


def data_of(n: int, seed: int = 0) -> list[Any]:
    """One tree per replica, with elements of various magnitudes whose sums round."""
    rng = np.random.default_rng(seed)

    def leaf(shape: tuple[int, ...]) -> np.ndarray:
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 3, shape)).astype(np.float32)

    return [{name: leaf(shape) for name, shape in SHAPES.items()} for _ in range(n)]


@dataclass(frozen=True)
class Reduce:
    """Sums one tree per replica through each of the wires."""

    names: tuple[str, ...] = tuple(WIRES)
    order: Any = "sequential"

    def __call__(self, env: modes.Env, data: Any) -> Any:
        reductions = {name: gc.reductions.sum(wire=WIRES[name]) for name in self.names}
        return {name: gc.all_reduce(one, data, env.collective, order=self.order) for name, one in reductions.items()}


ALL, FEW, IN_TREE = Reduce(), Reduce(("bfloat16", "8 bits")), Reduce(("bfloat16", "8 bits"), "tree")


def check(mode: modes.Mode, program: Reduce, n: int) -> None:
    data = data_of(n)
    first, *others = mode.run(program, data)
    for name, leaf in itertools.product(program.names, SHAPES):
        wire, received, xs = WIRES[name], first[name][leaf], [one[leaf] for one in data]
        for other in others:
            np.testing.assert_array_equal(other[name][leaf].view(np.int32), received.view(np.int32))
        to = way_of(wire, mode.framework, leaf, n)
        if program.order == "tree":
            kept = wire.bits <= 8 and (len(SHAPES[leaf]) < 2 or leaf == "norm")
            to = "wide" if kept else "gathered"
        if to == "wide":
            total = np.sum([x.astype(np.float64) for x in xs], axis=0)
            bound = n * 2.0**-24 * np.sum([np.abs(x).astype(np.float64) for x in xs], axis=0)
            assert (np.abs(received - total) <= bound).all()
        else:
            np.testing.assert_array_equal(received, summed(wire, xs, to), err_msg=f"{name}, {leaf}, {to}")


@pytest.mark.full
@unrolled
@pytest.mark.parametrize("n", [2, 4, 8])
def test_sums_over_replicas(replicated: modes.Mode, n: int) -> None:
    """Rounds twice in parts, once for gathered leaves, never for wide leaves; all replicas have the same bits."""
    check(replicated, FEW if n == 8 else ALL, n)


@unrolled
@pytest.mark.full
def test_sums_in_the_canonical_tree(replicated: modes.Mode) -> None:
    """States are gathered as codes and merged as without a wire."""
    check(replicated, IN_TREE, 4)


def test_ways() -> None:
    """The leaves above cover all types of exchange."""
    taken = {way_of(wire, "jax", leaf, n) for wire in WIRES.values() for leaf in SHAPES for n in (2, 4)}
    assert taken == {"wide", "gathered", "parts"}


def special(n: int) -> list[Any]:
    """Data in which each replica has one value that is not finite."""
    leaf = np.ones((n, 64, 64), np.float32)
    for rank, value in zip(range(n), [np.nan, np.inf, -np.inf, np.inf], strict=True):
        leaf[rank, rank, 1] = value
    leaf[0, 5, 5], leaf[1, 5, 5] = np.inf, -np.inf
    leaf[:, 6, 6] = -0.0
    leaf[:, 7, 7] = 1e-40
    return [dict.fromkeys(SHAPES, x) for x in leaf]


@pytest.mark.full
@unrolled
@pytest.mark.parametrize("n", [2, 4])
def test_what_is_not_finite_arrives(replicated: modes.Mode, n: int) -> None:
    """Holds on all replicas; with integer codes, finite elements of the same block arrive as 0."""
    data = [{"w": one["w"]} for one in special(4)[:n]]
    for result in replicated.run(FEW, data):
        for name in FEW.names:
            received = result[name]["w"]
            assert np.isnan(received[0, 1]) and np.isnan(received[5, 5])
            assert received[1, 1] == np.inf and (n == 2 or (received[2, 1] == -np.inf and received[3, 1] == np.inf))
            assert np.signbit(received[6, 6]) and received[6, 6] == 0
            assert received[7, 7] == 0
            np.testing.assert_array_equal(received[20:], np.full((44, 64), float(n), np.float32))


@pytest.mark.parametrize("name", WIRES)
def test_codes(name: str) -> None:
    """Codes round to nearest even over the normal range of float32 and have the documented number of bytes."""
    rng, wire = np.random.default_rng(1), WIRES[name]
    x = rng.integers(0, 2**32, (64, 128), np.uint32).view(np.float32)
    x = np.where(np.isfinite(x) & (np.abs(x) > 2.0**-100) & (np.abs(x) < 2.0**126), x, np.float32(0))
    x[32:] = rng.standard_normal((32, 128)).astype(np.float32)
    x[40:, ::2] = (rng.integers(-255, 255, (24, 64)) / 2).astype(np.float32)  # ties
    codes = encode(NUMPY, wire, x)
    assert sum(one.nbytes for one in codes) == wire.nbytes(x.size)
    tiny = 2.0**-126
    expected = rounded(wire, x)
    decoded = decode(NUMPY, wire, *codes)
    np.testing.assert_array_equal(decoded[32:], expected[32:])
    # Next to much larger numbers, the smallest step is at least 2**-126.
    np.testing.assert_allclose(decoded[:32], expected[:32], rtol=0, atol=tiny)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3", "8 bits", "4 bits"])
def test_stochastic_rounding(name: str) -> None:
    """Rounds to one of both neighbors, with the upper one's frequency within five standard deviations."""
    made = {"8 bits": partial(wires.blocks, 8, 32), "4 bits": partial(wires.blocks, 4, 32)}
    wire = made.get(name, partial(wires.cast, name))(rounding="stochastic", seed=3)  # pyright: ignore[reportArgumentType]
    x = np.random.default_rng(2).uniform(0.5, 1, (256, 256)).astype(np.float32)
    x[:, ::32] = 1.0
    step = {"bfloat16": 2.0**-8, "float8_e4m3": 2.0**-4, "8 bits": 2.0**-6, "4 bits": 2.0**-2}[name]
    decoded = decode(NUMPY, wire, *encode(NUMPY, wire, x)).astype(np.float64)
    lower = np.floor(x.astype(np.float64) / step) * step
    fraction = (x - lower) / step
    up = decoded > lower
    np.testing.assert_array_equal(decoded, np.where(up, lower + step, lower))
    assert not up[fraction == 0].any()
    assert abs((up - fraction).sum()) <= 5 * np.sqrt((fraction * (1 - fraction)).sum())
    again, other = (decode(NUMPY, wire, *encode(NUMPY, wire, x, np.int32(salt))) for salt in (0, 1))
    np.testing.assert_array_equal(again, decoded)
    assert (other != decoded).any()


STOCHASTIC = gc.reductions.sum(wire=wires.cast("bfloat16", "stochastic"))


@pytest.mark.full
@unrolled
def test_stochastic_rounding_over_replicas(replicated: modes.Mode) -> None:
    """The codes of each rank are a function of its data; computed in NumPy for two replicas."""
    data = [{"w": one["w"]} for one in data_of(2)]
    sent = [encode(NUMPY, STOCHASTIC.wire, x["w"].reshape(1, -1), np.int32(2 * r + 1)) for r, x in enumerate(data)]  # pyright: ignore[reportArgumentType]
    first, second = (decode(NUMPY, STOCHASTIC.wire, *codes) for codes in sent)  # pyright: ignore[reportArgumentType]
    for result in replicated.run(reduce_stochastically, data):
        np.testing.assert_array_equal(result["w"].reshape(-1), (first + second)[0])


def reduce_stochastically(env: modes.Env, data: Any) -> Any:
    return gc.all_reduce(STOCHASTIC, data, env.collective)


@dataclass(frozen=True)
class Others:
    """Reductions that gather their states, windows and a mean."""

    def __call__(self, env: modes.Env, data: Any) -> Any:
        wire, x = WIRES["bfloat16"], data["w"]
        leaf = sparse.row_sparse(data["rows"], x[:2], rows=100)
        window = gc.accumulate(gc.reductions.mean(wire=wire), every=2)
        state = window.init(x)
        for weight in (1.0, 3.0):
            state = window.update(x, state, weight)
        return {
            "product": gc.all_reduce(gc.reductions.product(wire=wire), x, env.collective),
            "compensated": gc.all_reduce(gc.reductions.sum("compensated", wire=wire), x, env.collective),
            "rows": gc.all_reduce(gc.reductions.row_sum(4, wire=wire), leaf, env.collective).values,
            "window": window.value(gc.merge_replicas(gc.reductions.mean(wire=wire), state, env.collective)),
        }


OTHERS = Others()


@pytest.mark.full
@unrolled
def test_other_reductions_and_windows(replicated: modes.Mode) -> None:
    """257 needs nine bits, and bfloat16 has eight; a window sends 4 * 257 and divides by 8 at the end."""
    data = [{"w": np.full((40, 50), v, np.float32), "rows": np.int32([v % 7, 9])} for v in (257, 1)]
    for result in replicated.run(OTHERS, data):
        assert {name: np.unique(x).tolist() for name, x in result.items()} == {
            "product": [256.0],
            "compensated": [257.0],
            "rows": [0.0, 1.0, 256.0, 257.0],
            "window": [(1024 + 4) / 8],
        }


BAD = {
    "an integer leaf": lambda: SUM.init({"w": np.zeros((4, 4), np.int32)}),
    "a complex leaf": lambda: SUM.init({"w": np.zeros((4, 4), np.complex64)}),
    "an integer among parameters of a mean": lambda: gc.combine(
        gc.reductions.mean(wire=WIRES["8 bits"]), [{"w": np.int32([1])}]
    ),
    "a name": lambda: gc.reductions.sum(wire="bfloat16"),  # pyright: ignore[reportArgumentType]
    "exact": lambda: gc.reductions.sum("exact", wire=WIRES["bfloat16"]),
    "another wire's state": lambda: SUM.merge(SUM.init(np.float32(1)), gc.reductions.mean().init(np.float32(1))),
}
SUM = gc.reductions.sum(wire=WIRES["bfloat16"])


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    with pytest.raises(gc.GradCombineError):
        BAD[name]()


def test_leaves_that_stay_wide_may_be_of_any_kind() -> None:
    def wide(path: str, shape: tuple[int, ...]) -> bool:
        return "steps" in path

    reduction = gc.reductions.sum(wire=wires.cast("bfloat16", wide=wide))
    total = gc.all_reduce(reduction, {"steps": np.int32(3), "w": np.float32([257])}, gc.LOCAL)
    assert (total["steps"], total["w"].tolist()) == (3, [257])  # one replica sends nothing
    with pytest.raises(gc.GradCombineError, match=r"sum: leaf \['n'\]: expected a float leaf for wires.cast"):
        reduction.init({"n": np.int32(3)})


@pytest.mark.needs("jax")
def test_leaves_that_int32_cannot_index_stay_wide() -> None:
    import jax

    assert wires.bytes_sent(wires.cast("bfloat16"), 2**32, 2)["parts"] == 2**33
    mean = gc.reductions.mean(wire=wires.blocks(8))
    call = jax.vmap(lambda g: gc.all_reduce(mean, g, gc.jax_axis("d")), axis_name="d", axis_size=8, in_axes=None)
    programs = [str(jax.make_jaxpr(call)(jax.ShapeDtypeStruct((2, n), np.float32))) for n in (2**14, 2**31)]
    assert ["int8" in program for program in programs] == [True, False]


@pytest.mark.full
def test_derivatives_pass_through() -> None:
    """Derivatives ignore the rounding of the wire: each gradient is ones."""
    import jax
    import jax.numpy as jnp

    def loss(x: Any) -> Any:
        reduced = jax.vmap(lambda one: gc.all_reduce(SUM, one, gc.jax_axis("data")), axis_name="data")(x)
        return jnp.sum(reduced[0])

    x = jnp.full((2, 4, 4), 1.001)
    np.testing.assert_array_equal(jax.grad(loss)(x), np.ones((2, 4, 4), np.float32))


@pytest.mark.full
def test_sharded_sums_and_gathered_shards() -> None:
    """`zero` sends each part once and gathers only what it is asked to."""
    import jax
    import jax.numpy as jnp

    from gradcombine.integrations.jax import zero

    over, wire, n = gc.jax_axis("data"), WIRES["8 bits"], 4
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((n, 40, 50)).astype(np.float32)
    accumulator = gc.accumulate(zero.scattered(gc.reductions.sum(wire=wire), over), every=1)

    def replica(x: Any) -> Any:
        shard = accumulator.value(accumulator.update({"w": x}, accumulator.init({"w": x})))
        return shard["w"], zero.gather(shard, {"w": x}, over, wire)["w"]

    shards, whole = jax.vmap(replica, axis_name="data")(jnp.asarray(xs))
    rows = exact.fold(add, [rounded(wire, x.reshape(n, -1)) for x in xs], "tree")
    np.testing.assert_array_equal(shards, rows)
    for received in whole:
        np.testing.assert_array_equal(received, rounded(wire, rows).reshape(40, 50))
    costs = zero.exchange_costs(gc.reductions.sum(wire=wire), {"w": jnp.asarray(xs[0])}, every=1, replicas=n)
    assert costs["reduce_scatter"].sent == (n - 1) * (wire.nbytes(500) + 4 * 500)
    assert costs["all_reduce"].sent == 2 * (n - 1) * wire.nbytes(500)
