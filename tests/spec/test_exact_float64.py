"""Exact sums of float64, which use 64-bit words, in the frameworks that have them."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.reductions.cell import parts
from tests.spec import exact, modes
from tests.spec.programs import rows
from tests.spec.selection import among

SUM, MEAN = reductions.sum("exact"), reductions.mean("exact")
MODES = ("numpy", "tf_eager", "tf_function", "tf_xla", "tf_mirrored")
"""Modes with float64. JAX needs jax_enable_x64, which holds for a process, and has a separate test."""


def patterns(n: int, size: int) -> dict[str, np.ndarray]:
    return exact.patterns(n, size, np.float64)


def folded(x: np.ndarray) -> Any:
    return exact.at_once(SUM, SUM.init(x[0]), list(x), [1] * len(x))


@pytest.mark.parametrize("kind", patterns(2, 2))
@pytest.mark.parametrize("n", [1, 2, 3, 16, 512])
def test_order_grouping_and_error_bound(n: int, kind: str) -> None:
    """The words depend on the multiset of terms only."""
    x = patterns(n, 8)[kind]
    exact.check_grouping(SUM, folded, x, seeds=[n])


def program(env: modes.Env, data: Any) -> Any:
    state = SUM.init(data["x"][0])
    for row in rows(data["x"]):
        state = SUM.update(state, row)
    known = gc.combine(MEAN, rows(data["x"]), [3, 2**30 + 7, 0])
    traced = gc.combine(MEAN, rows(data["x"]), rows(data["weights"]))
    return parts(state.value), SUM.finalize(state), known, traced


def run(name: str, kind: str) -> None:
    x = patterns(len(WEIGHTS), 32)[kind]
    ((words, total, known, traced),) = modes.get(name).run(program, [{"x": x, "weights": WEIGHTS}])
    for word, expected in zip(words, parts(folded(x).value), strict=True):
        np.testing.assert_array_equal(word, expected)
    np.testing.assert_array_equal(total, SUM.finalize(folded(x)))
    np.testing.assert_array_equal(known, traced)
    if kind in ("normal", "cancelling"):
        weights = [int(w) for w in WEIGHTS]
        for column, received in zip(x.T, known, strict=True):
            products = sum((Fraction(v) * w for v, w in zip(column, weights, strict=True)), Fraction(0))
            assert float(received) == float(exact.round_to(products / sum(weights), "float64"))


WEIGHTS = np.int32([3, 2**30 + 7, 0])


@pytest.mark.full
@pytest.mark.parametrize("kind", patterns(2, 2))
@pytest.mark.parametrize("name", among(("numpy", "tf_function"), MODES))
def test_modes(name: str, kind: str) -> None:
    run(name, kind)


@pytest.mark.needs("jax")
@pytest.mark.full
def test_jax_with_x64() -> None:
    """Runs in a separate process, eager and compiled."""
    call = "run('jax_eager', 'every exponent'); run('jax_jit', 'normal')"
    code = f"from tests.spec.test_exact_float64 import run; {call}; print('done')"
    env = {**os.environ, "JAX_ENABLE_X64": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr


def test_specials() -> None:
    values, expected = exact.specials(np.float64)
    np.testing.assert_array_equal(exact.bits(gc.combine(SUM, list(values))), exact.bits(expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrower_outputs_are_rounded_once(dtype: str) -> None:
    """The sum lies above a tie of the output format by less than float64 resolves."""
    values = [1.0, 2.0 ** -exact.PRECISION[dtype], 2.0**-30, 2.0**-60, -(2.0**-30)]
    total = gc.combine(reductions.sum("exact", output_dtype=dtype), [np.float64([v, -v]) for v in values])
    expected = float(exact.round_to(sum(map(Fraction, values), Fraction(0)), dtype))
    assert total.dtype == dtype
    np.testing.assert_array_equal(total.astype(np.float64), [expected, -expected])


def test_leaves_of_both_widths_share_their_weights() -> None:
    trees = [{"wide": np.float64([0.1 * i]), "narrow": np.float32([0.1 * i])} for i in range(1, 4)]
    mean = gc.combine(MEAN, trees, [0.1, 0.2, 0.3])
    for leaf, dtype in (("wide", "float64"), ("narrow", "float32")):
        assert mean[leaf].dtype == dtype
        kind = mean[leaf].dtype.type
        products = sum(Fraction(float(kind(w) * t[leaf][0])) for w, t in zip((0.1, 0.2, 0.3), trees, strict=True))
        weight = exact.round_to(sum(map(Fraction, (0.1, 0.2, 0.3))), dtype)
        assert float(mean[leaf][0]) == float(exact.round_to(products / weight, dtype))


NARROWER = ("float32", "bfloat16", "float16")


def narrowed(env: modes.Env, x: Any) -> Any:
    return [gc.combine(reductions.sum("exact", output_dtype=dtype), rows(x)) for dtype in NARROWER]


@pytest.mark.parametrize("name", among(("numpy", "tf_eager"), ("numpy", "tf_eager", "tf_function", "tf_xla")))
def test_subnormal_results_of_narrower_outputs(name: str) -> None:
    """Covers ties, and sums that differ from a tie by less than float32 resolves."""
    parts = [[n + 0.5, beside, -0.25, 0.25] for n in (0, 1, 2, 5) for beside in (0, 2.0**-40, -(2.0**-40))]
    for i, dtype in enumerate(NARROWER):
        unit = exact.SUBNORMAL[dtype]
        x = np.float64(parts).T * unit
        (results,) = modes.get(name).run(narrowed, [x])
        expected = [
            float(exact.round_gradually(sum(map(Fraction, column)) * Fraction(unit), dtype)) for column in parts
        ]
        assert results[i].dtype == dtype
        np.testing.assert_array_equal(results[i].astype(np.float64), expected)


def widened(env: modes.Env, x: Any) -> Any:
    return gc.combine(reductions.sum("exact", output_dtype="float64"), rows(x))


@pytest.mark.parametrize("name", among(("tf_eager",), ("numpy", "tf_eager", "tf_function", "tf_xla")))
def test_subnormal_results_of_a_wider_output(name: str) -> None:
    x = np.float32([[3, -1, 2**23, 0], [-1, -1, 1, 0]]) * np.float32(2.0**-149)
    (result,) = modes.get(name).run(widened, [x])
    np.testing.assert_array_equal(result, np.float64([2, -2, 2**23 + 1, 0]) * 2.0**-149)
