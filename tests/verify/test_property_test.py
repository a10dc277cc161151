"""`check_reduction`: the library's own reductions pass; a law that is broken on purpose is named."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.verify import BrokenLaw, check_reduction

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_reductions_runs_and_prints_what_it_shows() -> None:
    page = (DOCS / "reductions.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.S)), {})
    assert printed.getvalue() == shown


@pytest.mark.parametrize(
    ("reduction", "settings"),
    [
        (reductions.sum(), {"like": {"w": np.float32([[0, 0]]), "none": None, "n": np.int8(0)}}),
        (reductions.mean("exact"), {}),
        (reductions.mean(), {"like": np.float16([0]), "elements": [0.1, -0.3, 7], "ulps": 4}),
        (reductions.moments(), {"ulps": 64}),
        (reductions.last(), {"commutative": False}),
        (reductions.measured(reductions.zeroed(reductions.max())), {"ulps": 64}),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_library_obeys_its_laws(reduction: Any, settings: Any) -> None:
    check_reduction(reduction, **settings, examples=10)


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


def _shortcut(**changed: Any) -> gc.Reduction:
    """A sum whose shortcuts are wrong."""
    own = _summed()
    assert own.shortcuts is not None
    return replace(own, shortcuts=own.shortcuts._replace(stand_for=own.functions, **changed))


@pytest.mark.parametrize(
    ("broken", "law", "smallest"),
    [
        (_summed(finalize=lambda s: s * np.float32(np.nan)), "an empty state finalizes", None),
        (_summed(finalize=lambda s: [][0]), "an empty state finalizes", None),
        (_summed(update=_in_place), "pure", None),
        (_summed(merge=lambda a, b: np.maximum(a, b)), "identity of merge", [([0, -1], 1)]),
        (_summed(update=lambda s, x, w: s * 2 + w * x), "update", [([0, 1], 1), ([0, 0], 1)]),
        (
            _summed(merge=lambda a, b: np.where(a == 0, b, np.where(b == 0, a, a + b + 1))),
            "update(s, v, w) == merge(s, update(init, v, w))",
            [([1, 0], 1), ([1, 0], 1)],
        ),
        (_shortcut(clear=lambda s: s), "clear gives the empty state", [([0, 0], 1)]),
        (
            _shortcut(
                update_many=lambda s, values, weights, order: (
                    _summed().init(values[0])._replace(value=values[0] * np.float32(weights[0]))
                )
            ),
            "a list, time, replicas",
            None,
        ),
    ],
)
def test_the_law_that_breaks_is_named_with_the_smallest_contributions(broken: Any, law: str, smallest: Any) -> None:
    with pytest.raises(BrokenLaw, match=re.escape(law)) as raised:
        check_reduction(broken)
    found = [(np.asarray(value).tolist(), weight) for value, weight in raised.value.contributions]
    if smallest is not None:
        assert sorted(map(repr, found)) == sorted(map(repr, [([float(x) for x in v], w) for v, w in smallest]))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradcombine.verify.property_test.missing", lambda names: list(names))
    with pytest.raises(gc.GradCombineError, match=r"hypothesis not found; install gradcombine\[verify\]"):
        check_reduction(reductions.sum())
