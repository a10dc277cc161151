"""A pytest plugin: ends a run with a table of the cases that passed, failed, or were not selected, by mode."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tests.spec import modes

_ENDS = ("passed", "failed", "skipped", "not selected")
_counts: Counter[tuple[str, str]] = Counter()
"""Number of cases, by mode and outcome."""


def _modes_of(nodeid: str) -> Iterable[str]:
    identifiers = set(re.split(r"[\[\]-]", nodeid))
    return (name for names in modes.NAMES.values() for name in names if name in identifiers)


def _count(nodeid: str, end: str) -> None:
    _counts.update((name, end) for name in _modes_of(nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or (report.when == "setup" and not report.passed):
        _count(report.nodeid, report.outcome)


def pytest_deselected(items: Iterable[pytest.Item]) -> None:
    for item in items:
        _count(item.nodeid, "not selected")


@pytest.hookimpl
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Reports a pytest-xdist worker's deselected cases to the controller, which collects nothing itself."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["not selected"] = {mode: n for (mode, end), n in _counts.items() if end == "not selected"}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for mode, n in getattr(node, "workeroutput", {}).get("not selected", {}).items():
        _counts[mode, "not selected"] = n


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _counts:
        terminalreporter.section("cases by mode; `-m full` selects the rest")
        terminalreporter.line(" ".join([" " * 24, *(f"{end:>12}" for end in _ENDS)]))
        for names in modes.NAMES.values():
            for name in names:
                terminalreporter.line(" ".join([f"{name:24}", *(f"{_counts[name, end]:12}" for end in _ENDS)]))
