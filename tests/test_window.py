"""The rules of an accumulation window, with a host and replicas in plain Python."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import GradCombineError
from gradcombine.backends.protocol import Collective
from gradcombine.places.window import Window, require_condition, widened
from gradcombine.settings import UNTIL_FLUSH


def numbers(*values: float) -> Any:
    return {"w": np.float32(values)}


def take(window: Window, state: Any) -> list[float]:
    return window.value(state)["w"].tolist()


@dataclass
class Host:
    """A host that branches with Python's ``if`` and records what it applied."""

    applied: list[list[float]] = field(default_factory=list)

    def run_if(self, condition: Any, run: Callable[[Any], Any], kept: Any) -> Any:
        return run(kept) if condition else (kept, None)

    def apply(self, kept: int, combined: Any) -> tuple[int, None]:
        self.applied.append(combined["w"].tolist())
        return kept + 1, None


class Two(Collective):
    """Two replicas that hold the same arrays, or of which the other one contributes ``others`` to each sum."""

    def __init__(self, others: Sequence[int] = ()) -> None:
        self.others, self.exchanges = np.int32(others), 0

    def size(self) -> int:
        return 2

    def all_sum(self, arrays: Sequence[Any]) -> list[Any]:
        self.exchanges += 1
        return [array + self.others if self.others.size else array * 2 for array in arrays]

    def all_gather(self, arrays: Sequence[Any]) -> list[Any]:
        return [np.stack([array, array]) for array in arrays]


class Unknown:
    """A NumPy flag whose value counts as unknown, like a tracer."""

    def __new__(cls, value: bool) -> Any:
        return np.array(value).view(_Traced)


class _Traced(np.ndarray):
    pass


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Any]:
    backend = type(gc.backends.registry.load("numpy"))
    concrete = backend.concrete
    monkeypatch.setattr(backend, "concrete", lambda self, x: None if isinstance(x, _Traced) else concrete(self, x))
    return Unknown


class Step(NamedTuple):
    value: float
    weight: float = 1
    skipped: bool = False
    flush: bool = False


def run(window: Window, steps: Sequence[Step]) -> tuple[Host, Any]:
    """The host with all it applied, and the last state."""
    host, state, all_skipped = Host(), window.init(numbers(0)), np.bool_(False)
    for value, weight, skipped, flush in steps:
        all_skipped = skipped & (all_skipped | ~window.is_partial(state))
        state = window.contribute(state, numbers(value), weight, skipped=skipped)
        state, due = window.due(state, flush=flush, all_skipped=all_skipped)
        window.apply_if(due, state, host.apply, 0, host.run_if)
    return host, state


MEAN_OF_2 = Window(gc.reductions.mean(), 2)


@pytest.mark.parametrize(
    ("steps", "applied"),
    [
        ([Step(1), Step(3)], [[2]]),
        ([Step(1), Step(3, weight=3), Step(5), Step(6)], [[2.5], [5.5]]),
        ([Step(1)], []),
        # A flush counts as full: the next contribution begins another window.
        ([Step(1, flush=True), Step(5), Step(6)], [[1], [5.5]]),
        ([Step(1), Step(3, flush=True), Step(5)], [[2]]),
        # A skipped microbatch has weight 0 and still advances the window: this one has one microbatch of two.
        ([Step(1, skipped=True), Step(3), Step(5), Step(6)], [[3], [5.5]]),
        ([Step(float("nan"), skipped=True), Step(3, weight=3)], [[3]]),
        # A window of skipped microbatches only is not applied, flushed or not.
        ([Step(1, skipped=True), Step(3, skipped=True), Step(5), Step(6)], [[5.5]]),
        ([Step(1, skipped=True, flush=True), Step(5), Step(6)], [[5.5]]),
        ([Step(1), Step(3), Step(5, skipped=True), Step(7, skipped=True)], [[2]]),
        ([Step(1, skipped=True), Step(3, skipped=True), Step(5, skipped=True), Step(6)], [[6]]),
    ],
)
def test_what_is_applied(steps: Any, applied: list[list[float]]) -> None:
    host, _ = run(MEAN_OF_2, steps)
    assert host.applied == applied


class TakenOver(Window):
    def may_overwrite(self, array: Any) -> bool:
        return array.ndim > 0


@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_what_the_exchange_takes_over_reaches_no_later_window(order: Any) -> None:
    """Both replicas hold the same arrays: the sum of a window is twice that of one replica."""
    window, host = TakenOver(gc.reductions.sum(), 2, Two(), order), Host()
    state = window.init(numbers(0))
    for value in (1, 3, float("inf"), 0, 5, 6):
        state, due = window.due(window.contribute(state, numbers(value)))
        before = window.accumulator.value(state)["w"].tolist()
        state, *_ = window.apply_if(due, state, host.apply, 0, host.run_if)
        held = window.accumulator.value(state)["w"].tolist()
        assert held == ([2 * x for x in before] if due and order == "sequential" else before)
    assert host.applied == [[8], [float("inf")], [22]]


@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_which_window_is_next(order: Any) -> None:
    window = Window(gc.reductions.sum(), lambda index: index + 1, order=order, max_every=4)
    state, places = window.init(numbers(0)), []
    for _ in range(6):
        places.append(tuple(map(int, window.next(state))))
        state, _ = window.due(window.contribute(state, numbers(1)))
    assert places == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


def test_a_flush_after_the_last_microbatch_ends_what_was_begun() -> None:
    state = MEAN_OF_2.init(numbers(0))
    seen = [bool(MEAN_OF_2.is_partial(state))]
    for value in (1.0, 3.0, 5.0):
        state, _ = MEAN_OF_2.due(MEAN_OF_2.contribute(state, numbers(value)))
        seen.append(bool(MEAN_OF_2.is_partial(state)))
    assert seen == [False, True, False, True]
    assert take(MEAN_OF_2, state) == [5]
    state = MEAN_OF_2.end(state, MEAN_OF_2.is_partial(state))
    assert not MEAN_OF_2.is_partial(state)
    assert tuple(map(int, MEAN_OF_2.next(state))) == (2, 0)


@pytest.mark.parametrize("order", ["sequential", "tree"])
@pytest.mark.parametrize(
    ("before", "begun", "after", "applied"),
    [
        # With at least as many microbatches as the new length, the window ends with the next one.
        (4, 3, 2, [[6], [9], [13]]),
        (4, 3, 3, [[6], [15]]),
        (4, 2, 1, [[3], [3], [4], [5], [6], [7]]),
        (4, 1, 2, [[1], [5], [9], [13]]),
        # With fewer, it continues to the new length.
        (2, 1, 4, [[6], [22]]),
        # A window that has been applied is over, whatever its length was.
        (2, 2, 4, [[14]]),
        (4, 4, 2, [[9], [13]]),
        (4, 4, 1, [[4], [5], [6], [7]]),
        (UNTIL_FLUSH, 2, 2, [[3], [7], [11]]),
    ],
)
def test_a_window_that_goes_on_with_another_length_loses_nothing(
    order: Any, before: int, begun: int, after: int, applied: Any
) -> None:
    depth = {"order": order, "max_every": 8} if order == "tree" else {}

    def of(every: int) -> Window:
        # A function of the index, so that the binary counter has the same levels for all lengths.
        length: Any = every if every == UNTIL_FLUSH or not depth else lambda index: every
        return Window(gc.reductions.sum(), length, **depth)

    state, host = of(before).init(numbers(0)), Host()
    for value in range(begun):
        state, _ = of(before).due(of(before).contribute(state, numbers(value)))
    for value in range(begun, 8):
        state, due = of(after).due(of(after).contribute(state, numbers(value)))
        of(after).apply_if(due, state, host.apply, 0, host.run_if)
    everything = [x for (x,) in host.applied] + ([take(of(after), state)[0]] if of(after).is_partial(state) else [])
    assert sum(everything) == sum(range(8)) - (sum(range(begun)) if begun >= before else 0)
    assert host.applied == applied


def test_a_window_that_a_flush_alone_ends_is_known_to_the_host() -> None:
    window, known = Window(gc.reductions.mean(), UNTIL_FLUSH), []
    state = window.init(numbers(0))
    for value, flush in ((1.0, False), (3.0, True), (5.0, False), (9.0, True)):
        state, due = window.due(window.contribute(state, numbers(value)), flush=flush)
        known.append((due, take(window, state)))
    assert known == [(False, [1]), (True, [2]), (False, [5]), (True, [7])]
    assert all(isinstance(due, bool) for due, _ in known)
    state = window.contribute(state, numbers(1))
    assert window.is_partial(state)
    state, due = window.due(state, flush=np.True_ & True)
    assert due
    assert not window.is_partial(state)


def test_replicas_are_merged_before_the_one_division() -> None:
    replicas = Two()
    window = Window(gc.reductions.mean(), 2, replicas)
    state = window.contribute(window.contribute(window.init(numbers(0)), numbers(1)), numbers(3), 2)
    assert replicas.exchanges == 0
    assert take(window, state) == [np.float32(14) / np.float32(6)]
    assert replicas.exchanges == 1


def test_the_exchange_is_inside_of_the_branch() -> None:
    replicas = Two()
    window = Window(gc.reductions.sum(), 2, replicas)
    run(window, [Step(1), Step(3), Step(5)])
    assert replicas.exchanges == 1


def test_known_flags_are_agreed_without_an_exchange() -> None:
    replicas = Two()
    window = Window(gc.reductions.sum(), 2, replicas)
    assert window.agreed([True, np.False_, np.array(True)]) == [True, False, True]
    assert replicas.exchanges == 0


def test_all_other_flags_are_agreed_by_one(traced: Callable[[bool], Any]) -> None:
    replicas = Two(others=[1, 0, 0])
    window = Window(gc.reductions.sum(), 2, replicas)
    flags = window.agreed([traced(False), True, traced(False), traced(True)])
    assert [bool(flag) for flag in flags] == [True, True, False, True]
    assert replicas.exchanges == 1


@pytest.mark.parametrize(
    ("dtype", "like", "expected"),
    [
        (ml_dtypes.bfloat16, np.float32, np.float32),
        (np.float16, np.float64, np.float64),
        (np.int8, np.int32, np.int32),
        (np.complex64, np.complex128, np.complex128),
        # Conversions that lose digits or change the type of number are left for the window to reject.
        (np.float64, np.float32, np.float64),
        (np.int32, np.float64, np.int32),
        (np.float32, np.complex64, np.float32),
        (np.int64, np.uint64, np.int64),
    ],
)
def test_narrow_gradients_are_widened(dtype: Any, like: Any, expected: Any) -> None:
    gradient = np.ones(2, dtype)
    assert widened(gradient, np.zeros(2, like)).dtype == expected
    assert widened(gradient, None).dtype == dtype
    assert widened(None, np.zeros(2, like)) is None


@pytest.mark.parametrize("flag", [1, None, "yes", np.int32(1), np.array([True])])
def test_a_flag_is_a_boolean_scalar(flag: Any) -> None:
    with pytest.raises(GradCombineError, match="expected flush as a boolean scalar"):
        require_condition("flush", flag)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "expected a window length"),
        ({"every": 2, "over": "data"}, "expected a collective"),
        ({"every": 2, "order": "random"}, "expected order"),
        ({"every": UNTIL_FLUSH, "order": "tree"}, "expected max_every"),
    ],
)
def test_bad_settings_are_refused_before_there_is_a_state(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        Window(gc.reductions.mean(), **options)
