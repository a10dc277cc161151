"""The time limit for calls of foreign code."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

import gradcombine as gc
from gradcombine.audit.compiling import foreign
from gradcombine.verify.foreign_calls import within_seconds


@pytest.mark.full
@pytest.mark.parametrize("swallowed", [0, 1])
def test_a_call_ends_even_if_the_first_alarm_is_swallowed(swallowed: int) -> None:
    """As Python does with an exception in a finalizer or in a callback of C."""
    late = gc.GradCombineError("check", "a result in time", "none")

    def call() -> None:
        for _ in range(swallowed):
            with suppress(BaseException):
                time.sleep(20)
        time.sleep(20)

    begun = time.monotonic()
    with pytest.raises(gc.GradCombineError, match="a result in time"), within_seconds(0.1, late):
        call()
    assert time.monotonic() - begun < 15
    time.sleep(1.2)  # no alarm comes after the body


def test_the_time_limit_is_said_if_it_ends_code_whose_errors_are_translated() -> None:
    late = gc.GradCombineError("check", "a result in time", "none")
    with pytest.raises(gc.GradCombineError, match="a result in time"), within_seconds(0.1, late):
        foreign("a callable that returns", "sleep", lambda: time.sleep(20))
