"""Modes as a parameter, and a closing list of what ran in which mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.spec import modes

_passed: Counter[str] = Counter()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``mode``: all of them. ``replicated``: those with several replicas, times the numbers of replicas."""
    if "mode" in metafunc.fixturenames:
        names = [name for group in modes.NAMES.values() for name in group]
        metafunc.parametrize("mode", [_parameter(name) for name in names], indirect=True, scope="session")
    if "replicated" in metafunc.fixturenames:
        metafunc.parametrize(
            "replicated", [_parameter(name) for name in modes.REPLICATED], indirect=True, scope="session"
        )


def _parameter(name: str) -> Any:
    framework = next(group for group, names in modes.NAMES.items() if name in names)
    marks = [] if framework == "numpy" else [pytest.mark.needs(framework)]
    return pytest.param(name, id=name, marks=marks)


@pytest.fixture(scope="session")
def mode(request: pytest.FixtureRequest) -> modes.Mode:
    return modes.get(request.param)


@pytest.fixture(scope="session")
def replicated(request: pytest.FixtureRequest) -> modes.Mode:
    return modes.get(request.param)


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs() -> Iterator[None]:
    """What one file has compiled is not kept for the next."""
    yield
    modes.forget()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        for names in modes.NAMES.values():
            for name in names:
                if f"[{name}-" in report.nodeid or f"[{name}]" in report.nodeid or f"-{name}]" in report.nodeid:
                    _passed[name] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("spec suite: cases passed by mode")
    for names in modes.NAMES.values():
        for name in names:
            terminalreporter.line(f"{name:26} {_passed[name]}")
