"""The gate on ratios of times, measured with a fake clock that the calls advance."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace

import pytest

from benchmarks import gate

ROW = gate.Row("a sum", "ours", "theirs")


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., gate.Call]:
    """Makes calls whose durations cycle through ``seconds``; reading the clock advances it too, so that waits end."""
    now = [0.0]

    def read() -> float:
        now[0] += 1e-4
        return now[0]

    def make(*seconds: float) -> gate.Call:
        durations = cycle(seconds)

        def call() -> None:
            now[0] += next(durations)

        return call

    monkeypatch.setattr(gate, "time", SimpleNamespace(process_time=read, perf_counter=read))
    return make


@pytest.mark.parametrize("peer", [0.25, 1e-3])
def test_a_ratio_is_of_one_call_however_often_a_turn_repeats_it(lasting: Callable[..., gate.Call], peer: float) -> None:
    measured = gate.measure({"ours": lasting(0.125), "theirs": lasting(peer)}, [ROW], 15)[ROW]
    assert measured == pytest.approx([0.125 / peer] * 4, rel=0.01)


@pytest.mark.parametrize(("plant", "worse"), [(1, False), (1.05, False), (1.5, True)])
def test_a_planted_slowdown_is_worse_and_what_lies_within_the_margin_is_not(
    lasting: Callable[..., gate.Call], plant: float, worse: bool
) -> None:
    calls = {"ours": lasting(0.2), "theirs": lasting(0.3)}
    before = gate.measure(calls, [ROW], 15)[ROW]
    assert gate.is_worse(gate.measure(calls, [ROW], 15, plant)[ROW], before) is worse


def test_noise_alone_is_not_worse(lasting: Callable[..., gate.Call]) -> None:
    """Every second call takes three times as long, so the median may lie anywhere between the two durations."""
    steady = gate.measure({"ours": lasting(0.06), "theirs": lasting(0.06)}, [ROW], 15)[ROW]
    noisy = gate.measure({"ours": lasting(0.06, 0.18), "theirs": lasting(0.06)}, [ROW], 15)[ROW]
    assert noisy.ratio >= 1 and not gate.is_worse(noisy, steady)


@pytest.mark.parametrize("count", [5, 6, 9, 15, 30])
def test_the_interval_of_a_median_has_95_percent(count: int) -> None:
    """Counts all ways in which the values can lie below or above the true median."""
    low, high = gate.interval(range(count))
    if count > 5:  # of five values or fewer, even the full range has less than 95 percent
        inside = [n for n in range(count + 1) if low < n <= high]  # n values lie below the true median
        assert sum(_ways(count, n) for n in inside) >= 0.95 * 2**count
        assert sum(_ways(count, n) for n in inside[1:-1]) < 0.95 * 2**count
    else:
        assert (low, high) == (0, count - 1)


def _ways(count: int, chosen: int) -> int:
    ways = 1
    for i in range(chosen):
        ways = ways * (count - i) // (i + 1)
    return ways
