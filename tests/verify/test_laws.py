"""`check_reduction` passes the library's reductions and names each deliberately broken law."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions
from gradcombine.reductions.algebra import Wrapper
from gradcombine.verify import BrokenLaw, check_reduction

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.full
def test_the_page_of_reductions_runs_and_prints_what_it_shows() -> None:
    page = (DOCS / "reductions.md").read_text()
    shown = "".join(re.findall(r"```text\n(.*?)```", page, re.S))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.S)), {})
    assert printed.getvalue() == shown


MEAN = reductions.mean()
ROUNDED = {"ulps": 64}
UNWEIGHTED = {"weighted": False}
AMAX = reductions.elementwise(
    "amax", empty=0, update=lambda xp, a, x, w: xp.maximum(a, abs(x)), merge=lambda xp, a, b: xp.maximum(a, b)
)
PAIR = {"numerator": np.zeros(2, np.float32), "denominator": np.float32(0)}


def _of_ratios(reduction: gc.Reduction, made: Callable[[Any], Any]) -> gc.Reduction:
    """Makes ratios from arbitrary arrays, with squares as denominators."""

    def opened(x: Any) -> Any:
        return made(reductions.Ratio(x["numerator"], np.square(np.nan_to_num(x["denominator"]))))

    class Opened(Wrapper):
        def init(self, like: Any) -> Any:
            return self.of.init(opened(like))

        def update(self, state: Any, value: Any, weight: Any = 1) -> Any:
            return self.of.update(state, opened(value), weight)

    return Opened(reduction)


class _Placeholders(Wrapper):
    """Contributions numbered -1, which a ledger ignores: it counts a number only once, but the laws repeat them."""

    def update(self, state: Any, value: Any, weight: Any = 1) -> Any:
        return self.of.update(state, reductions.Numbered(value, -1), weight)


NUMBERED = _Placeholders(reductions.numbered(reductions.sum(), 4))
OBEYED: dict[str, list[tuple[gc.Reduction, dict[str, Any]]]] = {
    "checked": [(reductions.checked(MEAN), ROUNDED)],
    "clipped": [(reductions.clipped(reductions.sum(), 100), ROUNDED)],
    "differentiable": [(reductions.differentiable(reductions.mean("exact")), {})],
    "elementwise": [(AMAX, {})],
    "first": [(reductions.first(), {"commutative": False})],
    "last": [(reductions.last(), {"commutative": False})],
    "max": [(reductions.max(), {})],
    "mean": [
        (reductions.mean("exact"), {}),
        (reductions.mean("compensated"), {}),
        (MEAN, {"like": np.float16([0]), "elements": [0.1, -0.3, 7], "ulps": 4}),
    ],
    "measured": [(reductions.measured(reductions.zeroed(reductions.max())), ROUNDED | UNWEIGHTED)],
    "min": [(reductions.min(), {})],
    "moments": [(reductions.moments(), ROUNDED)],
    "numbered": [(NUMBERED, {})],
    "per_leaf": [
        (
            reductions.per_leaf([reductions.sum("exact"), reductions.max()]),
            {"like": [np.float32([0])] * 2, "weighted": False},
        )
    ],
    "product": [(reductions.product(), UNWEIGHTED)],
    "ratio": [(_of_ratios(reductions.ratio(), lambda ratio: ratio), {"like": PAIR} | UNWEIGHTED)],
    "ratios": [(_of_ratios(reductions.ratios(["a"]), lambda ratio: {"a": ratio}), {"like": PAIR} | UNWEIGHTED)],
    "sparse_as_dense": [(reductions.sparse_as_dense(reductions.sum("compensated")), {})],
    "sum": [
        (reductions.sum(), {"like": {"w": np.float32([[0, 0]]), "none": None, "n": np.int8(0)}}),
        (reductions.sum("exact"), {}),
    ],
    "zeroed": [(reductions.zeroed(reductions.sum()), {})],
}


@pytest.mark.sampled
@pytest.mark.parametrize("examples", [5, 50])
@pytest.mark.parametrize("name", OBEYED)
def test_the_library_obeys_its_laws(name: str, examples: int) -> None:
    for reduction, settings in OBEYED[name]:
        check_reduction(reduction, **settings, examples=examples)


@pytest.mark.full
def test_an_adaptive_sum_depends_on_the_grouping() -> None:
    with pytest.raises(BrokenLaw, match="merge is associative"):
        check_reduction(reductions.adasum(), ulps=64)


def test_all_public_reductions_are_among_them() -> None:
    """Except row reductions, whose contributions are not arrays, and fed_back, whose windows start with a residual."""
    assert {*OBEYED, "adasum", "row_sum", "row_mean", "fed_back"} == {x for x in reductions.__all__ if x.islower()}


def _summed(**changed: Any) -> gc.Reduction:
    functions: dict[str, Any] = {
        "init": np.zeros_like,
        "update": lambda s, x, w: s + w * x,
        "merge": lambda a, b: a + b,
        "finalize": lambda s: s,
    }
    return gc.Reduction(**{**functions, **changed})


def _in_place(s: Any, x: Any, w: Any) -> Any:
    s += w * x
    return s


def _first(a: Any, b: Any) -> Any:
    return np.where((a == 0) | (b == 0), a + b, a)


TICKS = itertools.cycle(np.float32([0, 0, 1]))
"""State outside the function, which a pure function would not read."""


def _shortcut(**changed: Any) -> gc.Reduction:
    """A sum whose shortcuts are wrong."""
    methods = {name: staticmethod(method) for name, method in changed.items()}
    return type("Wrong", (Wrapper,), methods)(_summed())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("broken", "law", "smallest"),
    [
        (_summed(finalize=lambda s: s * np.float32(np.nan)), "an empty state has a value", []),
        (_summed(finalize=lambda s: [][0]), "an empty state has a value", []),
        (_summed(finalize=lambda s: None), "an empty state has a value", []),
        (_summed(update=lambda s, x, w: s + np.float64(w) * x), "dtypes of states", [([0, 0], 1)]),
        (_summed(merge=lambda a, b: (a + b)[:1]), "shapes", [([0, 0], 1)]),
        (_summed(finalize=lambda s: s * np.float64(2) if s.any() else s), "dtypes of states and values", [([0, 1], 1)]),
        (_summed(update=_in_place), "leave their arguments as they are", [([0, 1], 1), ([0, 0], 1)]),
        (_summed(finalize=lambda s: np.multiply(s, 2, out=s)), "leave their arguments", [([0, 1], 1), ([0, 0], 1)]),
        (_summed(update=lambda s, x, w: np.multiply(x, w, out=x) + s), "leave their arguments", None),
        (_summed(update=lambda s, x, w: s + w * x + next(TICKS)), "deterministic", None),
        (_summed(merge=lambda a, b: a + b + next(TICKS)), "deterministic", None),
        (_summed(merge=lambda a, b: np.maximum(a, b)), "identity of merge", [([0, -1], 1)]),
        (_summed(update=lambda s, x, w: s * 2 + w * x), "update", [([0, 1], 1), ([0, 0], 1)]),
        (
            _summed(merge=lambda a, b: np.where(a == 0, b, np.where(b == 0, a, a + b + 1))),
            "update(s, v, w) == merge(s, update(init, v, w))",
            [([0, 1], 1), ([0, 1], 1)],
        ),
        (
            _summed(merge=_first, update=lambda s, x, w: _first(s, w * x)),
            "merge is commutative",
            [([0, 1], 1), ([0, 1], 2)],
        ),
        (_summed(update=lambda s, x, w: s + x), "twice the weight", [([0, 0], 1), ([0, 1], 1)]),
        (_summed(update=lambda s, x, w: s + w * w * x), "twice the weight", [([0, 0], 1), ([0, 1], 1)]),
        (_shortcut(clear=lambda s: s), "clear gives the empty state", [([0, 0], 1)]),
        (
            _shortcut(combine=lambda values, weights, order: values[0] * np.float32(weights[0])),
            "a list, time, replicas",
            None,
        ),
    ],
)
def test_the_law_that_breaks_is_named_with_the_smallest_contributions(broken: Any, law: str, smallest: Any) -> None:
    with pytest.raises(BrokenLaw, match=re.escape(law)) as raised:
        check_reduction(broken, examples=30)
    found = [(np.sort(np.asarray(value)).tolist(), weight) for value, weight in raised.value.contributions]
    if smallest is not None:
        assert sorted(map(repr, found)) == sorted(map(repr, [(sorted(map(float, v)), w) for v, w in smallest]))


def _counted(**changed: Any) -> gc.Reduction:
    """A sum that also counts its contributions."""
    functions: dict[str, Any] = {
        "init": lambda like: {"value": np.zeros_like(like), "count": np.int32(0)},
        "update": lambda s, x, w: {"value": s["value"] + w * x, "count": np.int32(s["count"] + 1)},
        "merge": lambda a, b: {"value": a["value"] + b["value"], "count": np.int32(a["count"] + b["count"])},
        "finalize": lambda s: s["value"],
    }
    return gc.Reduction(**functions | {name: partial(new, functions[name]) for name, new in changed.items()})


def _held(x: Any, most: float) -> Any:
    return np.clip(x, np.float32(-most), np.float32(most))


@pytest.mark.full
@pytest.mark.parametrize(
    "broken",
    [
        _summed(update=lambda s, x, w: _held(s + w * x, 100), merge=lambda a, b: _held(a + b, 100)),
        _summed(update=lambda s, x, w: np.minimum(s + w * x, 100), merge=lambda a, b: np.minimum(a + b, 100)),
        _summed(update=lambda s, x, w: np.where(abs(s) >= 100, s, s + w * x)),
        _summed(update=lambda s, x, w: _held(s + w * x, 1e6), merge=lambda a, b: _held(a + b, 1e6)),
        _summed(merge=lambda a, b: np.where(abs(a) > 1000, 2 * a, a) + b),
        _summed(merge=lambda a, b: np.where(abs(a) < 1e-3, 0 * a, a) + b),
        _summed(update=lambda s, x, w: s + np.minimum(w, np.float32(1)) * x),
        _summed(update=lambda s, x, w: s + np.minimum(w, np.float32(100)) * x),
        _summed(update=lambda s, x, w: s + np.float32(np.float16(w)) * x),
        _summed(update=lambda s, x, w: s + np.float32(np.asarray(w, jnp.bfloat16)) * x),
        _summed(merge=lambda a, b: np.where((a == 0).all() & (b == 0).all(), a + 1, a + b)),
        _summed(merge=lambda a, b: a + b if a.ndim else a),
        _summed(merge=lambda a, b: a + b if a.shape != (1,) else a),
        _summed(merge=lambda a, b: a + b if a.ndim < 2 else a + b[::-1]),
        _summed(merge=lambda a, b: a + b if a.dtype != np.float64 else a + 2 * b),
        _counted(update=lambda own, s, x, w: own(s, x, w) if s["count"] < 100 else s),
        _counted(update=lambda own, s, x, w: own(s, x, w) if s["count"] < 1000 else s),
        _counted(update=lambda own, s, x, w: own(s, x, w) if s["count"] % 64 < 63 else own(s, 0 * x, w)),
        _counted(update=lambda own, s, x, w: own(s, x * (1 + s["count"] % 2), w)),
        _counted(merge=lambda own, a, b: own(a, b) if a["count"] + b["count"] < 1000 else a),
    ],
)
def test_a_defect_that_one_small_contribution_does_not_show_is_found(broken: Any) -> None:
    with pytest.raises(BrokenLaw):
        check_reduction(broken)


@pytest.mark.parametrize("kept", [np.asarray, jnp.asarray, tf.constant])
def test_values_may_be_boolean(kept: Any) -> None:
    """Whether any contribution has an element that is not 0."""
    any_nonzero = gc.Reduction(
        init=lambda like: kept(np.zeros(like.shape, np.bool_)),
        update=lambda s, x, w: s | (x != 0),
        merge=lambda a, b: a | b,
        finalize=lambda s: s,
    )
    check_reduction(any_nonzero, kept(np.zeros(2, np.float32)), asarray=kept, examples=5)


def test_values_may_be_bfloat16_scalars_of_tensorflow() -> None:
    """NumPy cannot convert them."""
    total = gc.Reduction(
        init=lambda like: tf.zeros(like.shape, tf.bfloat16),
        update=lambda s, x, w: s + tf.cast(w, tf.bfloat16) * x,
        merge=lambda a, b: a + b,
        finalize=lambda s: s,
    )
    check_reduction(total, tf.zeros(2, tf.bfloat16), asarray=tf.constant, examples=5)


@pytest.mark.parametrize("weight", [-1, np.nan, np.inf])
def test_weights_that_no_contribution_may_have_are_not_a_broken_law(weight: float) -> None:
    with pytest.raises(gc.GradCombineError, match="check_reduction: expected weights that are finite and not negative"):
        check_reduction(MEAN, weights=[1, weight])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(gc.GradCombineError, match=r"'gradcombine\[verify\]' installs, .* no module hypothesis"):
        check_reduction(reductions.sum())
