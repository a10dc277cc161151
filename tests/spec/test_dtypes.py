"""Accumulator and output dtypes, in every mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import tree
from gradcombine.sparse import row_sparse
from tests.spec import exact, modes
from tests.spec.programs import rows
from tests.spec.selection import communicating, unrolled

DTYPES = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "int8", "int32")


class Total:
    """Sum and, for floats, mean over time and replicas."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings

    def __call__(self, env: modes.Env, data: Any) -> Any:
        values, weights = rows(data["values"]), rows(data["weights"])
        return {
            name: self.one(env, getattr(gc.reductions, name)(**self.settings), values, weights) for name in self.names
        }

    def one(self, env: modes.Env, reduction: Any, values: Any, weights: Any) -> Any:
        state = reduction.init(values[0])
        for value, weight in zip(values, weights, strict=True):
            state = reduction.update(state, value, weight)
        return reduction.finalize(gc.merge_replicas(reduction, state, env.collective))


FLOATING, INTEGRAL = Total("sum", "mean"), Total("sum")
INTO_FLOAT32 = Total("sum", output_dtype="float32")
NARROW_ACCUMULATOR = Total("sum", "product", dtype="bfloat16")


def runs(mode: modes.Mode, dtype: str) -> bool:
    return (mode.framework, dtype) not in modes.CANNOT and (mode.name, dtype) not in modes.CANNOT


@unrolled
@pytest.mark.parametrize("dtype", DTYPES)
@communicating
def test_each_dtype(mode: modes.Mode, dtype: str) -> None:
    """Checks value and dtype of the result for small integers, whose sums are exact."""
    if not runs(mode, dtype):
        assert mode.framework == "jax"
        with pytest.raises(gc.GradCombineError, match="jax_enable_x64"):
            gc.reductions.sum().init(_spec(dtype))
        return
    kind = np.dtype(dtype)
    base = np.array([[1, -2], [3, 4], [0, 5]])
    values = (base * (1 + 2j) if kind.kind == "c" else base).astype(kind)
    integral = kind.kind == "i"
    weights = np.array([1, 3, 2], np.int32 if integral else np.float32)
    (result,) = mode.run(INTEGRAL if integral else FLOATING, [{"values": values, "weights": weights}])
    total = (values.astype(np.complex128 if kind.kind == "c" else np.float64) * weights[:, None]).sum(0)
    assert result["sum"].dtype == (np.int32 if integral else kind)
    np.testing.assert_array_equal(result["sum"].astype(total.dtype), total)
    if not integral:
        assert result["mean"].dtype == kind
        for received, part in zip(_parts(result["mean"]), _parts(total), strict=True):
            assert Fraction(float(received)) == exact.round_to(Fraction(float(part)) / 6, _real(dtype))


def _spec(dtype: str) -> Any:
    import jax

    return jax.ShapeDtypeStruct((2,), np.dtype(dtype))


def _parts(array: np.ndarray) -> list[Any]:
    return [*array.real.ravel(), *array.imag.ravel()] if array.dtype.kind == "c" else list(array.ravel())


def _real(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


@unrolled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@communicating
def test_narrow_floats_accumulate_in_float32(mode: modes.Mode, dtype: str) -> None:
    """The sum of a large value and three ones is rounded once; a narrow accumulator would lose each one."""
    large = 2.0 ** exact.PRECISION[dtype]
    values = np.array([[large], [1], [1], [1]]).astype(dtype)
    (result,) = mode.run(FLOATING, [{"values": values, "weights": np.ones(4, np.float32)}])
    total = Fraction(large) + 3
    assert Fraction(float(result["sum"][0])) == exact.round_to(total, dtype) > large
    assert Fraction(float(result["mean"][0])) == exact.round_to(total / 4, dtype)


def test_300_ones_in_bfloat16() -> None:
    """A bfloat16 accumulator stops at 256; Keras' running mean ends at 0.85."""
    ones = [np.ones(1, ml_dtypes.bfloat16)] * 300
    assert float(gc.add_n(ones)[0]) == 300
    assert float(gc.mean(ones)[0]) == 1


@unrolled
@communicating
def test_output_dtype(mode: modes.Mode) -> None:
    values = np.array([[256], [1], [1], [1]]).astype("bfloat16")
    (result,) = mode.run(INTO_FLOAT32, [{"values": values, "weights": np.ones(4, np.float32)}])
    assert result["sum"].dtype == np.float32
    assert result["sum"][0] == 259


@unrolled
@communicating
def test_accumulator_dtype(mode: modes.Mode) -> None:
    """A narrow accumulator, if requested, rounds at each step: 256 + 1 + 1 stays 256, 256 + 2 + 2 is 260."""
    values = np.float32([[256, 256, 129 / 128], [1, 2, 129 / 128], [1, 2, 129 / 128]])
    (result,) = mode.run(NARROW_ACCUMULATOR, [{"values": values, "weights": np.ones(3, np.float32)}])
    assert result["sum"].dtype == np.float32
    np.testing.assert_array_equal(result["sum"], np.float32([256, 260, 3 + 1 / 32]))
    np.testing.assert_array_equal(result["product"], np.float32([256, 1024, 1 + 3 / 128]))


@pytest.mark.parametrize("make", [gc.reductions.moments, gc.reductions.product, partial(gc.reductions.row_sum, 2)])
def test_accumulators_of_a_wider_dtype(make: Callable[..., gc.Reduction]) -> None:
    dense = np.float32([[1], [2]])
    leaf = row_sparse(np.int32([0]), dense[:1], 2) if isinstance(make, partial) else dense
    reduction = make(dtype="float64")
    state = reduction.update(reduction.init(leaf), leaf)
    arrays = [x for _, x in tree.present(state.value) if x.dtype.kind == "f"]
    assert arrays and all(x.dtype == np.float64 for x in arrays if x.ndim)
    results = [x for _, x in tree.present(reduction.finalize(state)) if x.dtype.kind == "f"]
    assert results and all(x.dtype == np.float32 for x in results)


@pytest.mark.parametrize("settings", [{}, {"precision": "compensated"}, {"dtype": "float64"}])
def test_weights_are_added_in_the_widest_dtype_of_the_contributions(settings: Any) -> None:
    """Rounded at each addition, whatever the precision and dtype of the values; exact sums add them exactly."""
    weights = [0.1] * 4000
    for dtype in (np.float32, np.float64):
        reduction = gc.reductions.mean(**settings)
        state = reduction.init(dtype([1]))
        for weight in weights:
            state = reduction.update(state, dtype([1]), weight)
        assert state.weight.dtype == dtype and state.weight == sum(map(dtype, weights), dtype(0))
    exact_mean = gc.combine(gc.reductions.mean("exact"), [np.float32([1])] * 4000, weights=weights)
    assert exact_mean.tolist() == [1]


@pytest.mark.parametrize("values", [np.int32([1, 2]), np.array([True, False]), np.int8([1])])
def test_a_mean_of_integers_is_an_error(values: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"mean: leaf \['n'\]: expected a dtype that is float or complex"):
        gc.mean([{"n": values}])


def test_python_numbers_are_32_bits_wide() -> None:
    assert gc.add_n([1.5, 2.5]).dtype == np.float32
    assert gc.add_n([1, 2]).dtype == np.int32


OTHERS = [
    np.dtype(x)
    for x in (
        *("f2", "g", "G", ">f4", ">i8", "?", "u2", "M8[s]", "O"),
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3b11fnuz),
        *(ml_dtypes.float6_e2m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.int2, ml_dtypes.uint4, ml_dtypes.int4),
    )
]
REDUCTIONS: dict[Callable[..., Any], float] = {
    gc.reductions.sum: 2.0,
    gc.reductions.mean: 1.0,
    gc.reductions.max: 1.0,
    gc.reductions.min: 1.0,
}
"""Reductions with their values for two ones."""


@pytest.mark.parametrize("framework", ["numpy", "tensorflow", pytest.param("jax", marks=pytest.mark.full)])
def test_what_a_framework_has_no_kernels_for_is_refused(framework: str) -> None:
    """Every dtype of a leaf or result gives the right value or a GradCombineError, never a framework's error."""
    asarray = modes.converter(framework)
    counts: Counter[bool] = Counter()
    for leaf, output in [(dtype, None) for dtype in OTHERS] + [(np.dtype(np.float32), dtype) for dtype in OTHERS]:
        try:
            ones = asarray(np.ones(2).astype(leaf))
        except (TypeError, ValueError, RuntimeError):  # the framework has no array of this dtype
            continue
        for make, expected in REDUCTIONS.items():
            try:
                result = gc.combine(make(**({"output_dtype": output} if output else {})), [ones, ones])
            except gc.GradCombineError:
                counts[False] += 1
            else:
                np.testing.assert_array_equal(np.asarray(result).astype(np.complex128), [expected] * 2)
                counts[True] += 1
    assert min(counts[True], counts[False]) > 10


@pytest.mark.needs("jax")
@pytest.mark.skipif(not hasattr(ml_dtypes, "uint1"), reason="not every version of ml_dtypes has integers of one bit")
def test_integers_of_one_bit_are_refused_in_jax() -> None:
    """JAX has them, but XLA cannot lower most operations on them."""
    import jax.numpy as jnp

    wide = jnp.ones(2, jnp.int8)
    for call in (
        lambda: gc.add_n([np.ones(2, ml_dtypes.uint1), wide]),
        lambda: gc.combine(gc.reductions.sum(output_dtype="uint1"), [wide]),
    ):
        with pytest.raises(gc.GradCombineError, match="expected a dtype that JAX has, received uint1"):
            call()


def test_what_is_under_a_mask_does_not_count() -> None:
    masked = np.ma.masked_array(np.float32([1, 1e30]), [False, True])
    for call in (
        gc.add_n,
        gc.digest,
        lambda x: gc.mean([1.0], weights=x),
        lambda x: gc.combine(gc.reductions.max(), x),
    ):
        with pytest.raises(gc.GradCombineError, match="expected an array without a mask, received MaskedArray"):
            call([masked])


def test_narrow_dtypes_that_no_cast_joins_pass_through_float32() -> None:
    """No cast exists from float8_e8m0fnu to float6_e2m3fn or between integers of 2 and 4 bits."""
    for dtype, table in ((ml_dtypes.float8_e8m0fnu, ml_dtypes.float6_e2m3fn), (ml_dtypes.uint2, ml_dtypes.uint4)):
        rows = gc.sparse.row_sparse(np.int32([1]), np.ones(1, dtype), rows=2)
        assert gc.sparse.add_rows(np.ones(2, table), rows).astype(np.float32).tolist() == [1, 2]
