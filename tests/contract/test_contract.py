"""The contract of public functions: a mistake in any argument raises one short GradCombineError with its operation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import foreign_orders, reductions, statefile
from gradcombine.verify import explain
from tests.contract.calls import CALLS, named, required
from tests.contract.kinds import MEAN, ONE, SUM, unrefused


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolates the calls in a temporary directory, as mistaken paths may be written to."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
def test_valid_arguments_are_accepted(name: str) -> None:
    call = CALLS[name]
    assert set(required(call.function)) <= set(call.kinds), "a parameter of no kind"
    call.function(**call.arguments())


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_mistakes_are_refused(name: str) -> None:
    call = CALLS[name]
    happened = {
        parameter: unrefused(
            lambda value: call.function(**call.arguments() | {parameter: value}),  # noqa: B023
            {name: x for name, x in call.kinds[parameter].mistakes.items() if x is not p.default},
        )
        for parameter, p in named(call.function).items()
        if parameter in call.kinds
    }
    assert not any(happened.values()), happened


TOGETHER: dict[str, Callable[[], Any]] = {
    "exact sums of different max_terms": lambda: reductions.sum("exact").merge(
        reductions.sum("exact").init(ONE), reductions.sum("exact", max_terms=10**6).init(ONE)
    ),
    "adasum of longdouble": lambda: gc.combine(reductions.adasum(), [np.ones(2, np.longdouble)]),
    "a state made for another dtype": lambda: gc.check_state(SUM, reductions.sum(dtype="float64").init(ONE)),
    "dict and OrderedDict": lambda: gc.add_n([{"a": ONE}, OrderedDict(a=ONE)]),
    "list and tuple": lambda: gc.add_n([[ONE], (ONE,)]),
    "names of other types": lambda: foreign_orders.addn_blocks([ONE, ONE], names=[1, "a"]),
    "infinite weights": lambda: explain([ONE, ONE], ONE, [1.0, float("inf")]),
    "a number of 64 bits": lambda: gc.combine(
        reductions.numbered(SUM, 4), [reductions.Numbered(ONE, np.int64(2**32 + 1))]
    ),
    "a state of another reduction among others": lambda: statefile.resize(SUM, [SUM.init(ONE), MEAN.init(ONE)], 2),
    "an empty that does not fit": lambda: gc.combine(
        reductions.elementwise("own", empty=10**400, update=max, merge=max), [ONE]
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_arguments_that_do_not_fit_together_are_refused(name: str) -> None:
    with pytest.raises(gc.GradCombineError):
        TOGETHER[name]()
