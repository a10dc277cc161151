"""Digests of leaves equal those computed with Python integers, for every dtype, mode and split."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import GradCombineError, sparse
from tests.spec.modes import Env, Mode
from tests.spec.selection import unrolled

DTYPES = {
    np.dtype(name): np.dtype(f"<u{size}")
    for size, names in {
        1: ("bool", "int8", "uint8", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
        2: ("int16", "uint16", "float16", ml_dtypes.bfloat16),
        4: ("int32", "uint32", "float32", "float64", "int64", "uint64", "complex64", "complex128"),
    }.items()
    for name in names
}
"""Word dtype by dtype."""

MODULUS = 1 << 32


def expected(array: np.ndarray) -> list[int]:
    """The definition of a digest, in Python integers."""
    total = squares = 0
    for word in np.ascontiguousarray(array).reshape(-1).view(DTYPES[array.dtype]).tolist():
        product = 0x9E3779B1 * (word ^ (word >> 16)) % MODULUS
        mixed = product ^ (product >> 15)
        total, squares = total + mixed, squares + mixed**2
    return [total % MODULUS, squares % MODULUS]


def bits(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bit patterns, including NaN payloads, subnormal numbers and both zeros."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()


def leaves_for(framework: str, seed: int) -> dict[str, np.ndarray]:
    """One leaf for each dtype of the framework, and one that is large enough to be compiled."""
    leaves = {str(dtype): bits(dtype, (8, 5), seed) for dtype in DTYPES if has(framework, dtype)}
    return leaves | {
        "scalar": bits(np.dtype(np.float32), (), seed),
        "large": bits(np.dtype(np.int16), (300, 101), seed),
    }


def has(framework: str, dtype: np.dtype) -> bool:
    if framework == "jax":
        return dtype.itemsize < 8 or dtype == np.complex64
    return framework == "numpy" or "float8" not in dtype.name


def of_replica(env: Env, data: Any) -> Any:
    """The digests of all leaves, and the sums of their halves' digests."""
    del env
    whole, first, second = data
    return gc.digest(whole), gc.digest(first) + gc.digest(second)


def with_halves(leaves: dict[str, np.ndarray]) -> list[Any]:
    """The leaves and their halves, split outside of XLA, which changes the bits of a float8_e5m2 NaN."""
    arrays = [leaves[name] for name in sorted(leaves) if leaves[name].shape]
    return [leaves, [array[:4] for array in arrays], [array[4:] for array in arrays]]


@unrolled
def test_digests_are_those_of_the_definition_and_parts_add_up(mode: Mode) -> None:
    """Holds on every replica for different data; a digest is the sum of its halves' digests."""
    replicas = [leaves_for(mode.framework, seed) for seed in range(2 if 2 in mode.replicas else 1)]
    answers = mode.run(of_replica, [with_halves(leaves) for leaves in replicas])
    for data, (whole, parts) in zip(replicas, answers, strict=True):
        assert whole.dtype == np.uint32
        assert whole.tolist() == [expected(data[name]) for name in sorted(data)]
        np.testing.assert_array_equal(parts, np.delete(whole, sorted(data).index("scalar"), axis=0))


@pytest.mark.cpus
@pytest.mark.needs("jax")
def test_split_and_replicated_leaves_in_one_jax_program() -> None:
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    data = {"split": bits(np.dtype(ml_dtypes.bfloat16), (8, 12)), "same": bits(np.dtype(np.float32), (5,))}
    specs = {"split": P("data", "model"), "same": P()}
    placed = {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in data.items()}
    answer = [expected(data[name]) for name in sorted(data)]

    automatic = jax.jit(gc.digest)(placed)
    assert [np.asarray(shard.data).tolist() for shard in automatic.addressable_shards] == [answer] * 8

    def manual(same: Any, split: Any) -> Any:
        return jax.numpy.concatenate([gc.digest(same), jax.lax.psum(gc.digest(split), ("data", "model"))])

    summed = jax.jit(jax.shard_map(manual, mesh=mesh, in_specs=(P(), specs["split"]), out_specs=P()))
    assert np.asarray(summed(placed["same"], placed["split"])).tolist() == answer


@pytest.mark.cpus
@pytest.mark.needs("jax")
@pytest.mark.parametrize(("shape", "rows"), [((512, 256), 512), ((2**15,), 64), ((512, 8), 0), ((2**15 + 1,), 0)])
def test_rows_are_summed_apart_on_a_cpu(shape: tuple[int, ...], rows: int) -> None:
    """XLA distributes the rows of a result over cores, but not a scalar; the sums are equal."""
    import jax

    array = bits(np.dtype(np.float32), shape)
    compiled = jax.jit(gc.digest).lower(array).compile()
    assert (f"(u32[{rows}]{{0}}, u32[{rows}]{{0}}) fusion(" in compiled.as_text()) == bool(rows)
    assert np.asarray(compiled(array)).tolist() == [expected(array)]


@pytest.mark.needs("jax")
def test_64_bits_in_jax() -> None:
    import jax

    with jax.enable_x64(True):
        for dtype in DTYPES:
            if dtype.itemsize >= 8:
                array = jax.numpy.asarray(bits(dtype, (7, 5)))
                assert (array.dtype, jax.jit(gc.digest)(array).tolist()) == (dtype, [expected(bits(dtype, (7, 5)))])


@pytest.mark.needs("jax")
def test_each_code_of_narrow_floats() -> None:
    """NaN payloads count: digests convert no code to another float type, eager or compiled."""
    import jax

    kinds = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
    codes = {f"float8_{kind}": np.arange(256, dtype=np.uint8) for kind in kinds}
    codes["float4_e2m1fn"] = np.arange(16, dtype=np.uint8)
    floats = {name: code.view(name) for name, code in codes.items()}
    answer = [expected(codes[name]) for name in sorted(codes)]
    for received in (gc.digest(floats), gc.digest(jax.device_put(floats)), jax.jit(gc.digest)(floats)):
        assert received.tolist() == answer


def test_narrow_integers_are_those_of_8_bits() -> None:
    for narrow, wide in ((ml_dtypes.int4, np.int8), (ml_dtypes.uint4, np.uint8)):
        values = np.arange(-8, 8) if wide == np.int8 else np.arange(16)
        np.testing.assert_array_equal(gc.digest(values.astype(narrow)), gc.digest(values.astype(wide)))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype: np.dtype) -> None:
    array = bits(dtype, (16,))
    before = gc.digest(array)[0]
    for bit in range(16 if dtype == np.bool_ else 8 * array.nbytes):
        flipped = array.copy()
        if dtype == np.bool_:
            flipped[bit] ^= True
        else:
            flipped.view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
        # The first sum suffices, as proved.
        assert gc.digest(flipped)[0][0] != before[0]


def test_changes_that_cancel_in_a_sum_of_bits_do_not_here() -> None:
    """Flips one bit of two elements in opposite directions, which a plain sum of bit patterns would miss."""
    words = np.random.default_rng(0).integers(0, MODULUS, (64, 2), np.uint32)
    for bit in range(32):
        up = np.uint32(1 << bit)
        changed = (words & ~up) ^ np.array([up, 0], np.uint32)
        before = (words & ~up) ^ np.array([0, up], np.uint32)
        for x, y in zip(before, changed, strict=True):
            assert x.sum(dtype=np.uint32) == y.sum(dtype=np.uint32)
            assert not np.array_equal(gc.digest(x), gc.digest(y))


def test_sparse_leaves_have_two_digests_and_absent_ones_none() -> None:
    rows = sparse.row_sparse(np.int32([2, 0]), np.float32([[1], [5]]), rows=3)
    received = gc.digest({"table": rows, "frozen": None, "w": np.float32([3])})
    assert received.tolist() == [expected(x) for x in (rows.indices, rows.values, np.float32([3]))]
    assert gc.digest({"frozen": None}).shape == (0, 2)


@pytest.mark.needs("jax", "tensorflow")
def test_what_has_no_digest_is_refused() -> None:
    import jax
    import tensorflow as tf

    for value, words in (
        ({"rng": jax.random.key(0)}, "jax.random.key_data"),
        (
            {"w": tf.cast(tf.ones(2), tf.dtypes.experimental.float8_e5m2)},
            r"leaf \['w'\]: expected a dtype that TensorFlow computes with",
        ),
        ({"w": "text"}, "an array, a number"),
        ([tf.ones(2), jax.numpy.ones(2)], "arrays of one framework"),
        ({"w": jax.ShapeDtypeStruct((2,), np.float32)}, "expected an array"),
    ):
        with pytest.raises(GradCombineError, match=words):
            gc.digest(value)
    with pytest.raises(GradCombineError, match="a dtype of 4 bits or of bytes, received float6_e2m3fn"):
        jax.make_jaxpr(gc.digest)(jax.ShapeDtypeStruct((4,), ml_dtypes.float6_e2m3fn))


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_long_doubles_have_padding_and_no_digest(dtype: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"digest: leaf \['w'\]: expected numbers of at most 64 bits"):
        gc.digest({"w": np.zeros(2, dtype)})
