"""Modes as a parameter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spec import modes, selection


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``mode``: all of them. ``replicated``: those of several replicas. Of an `unrolled` test, those without a loop."""
    left_out = modes.LOOPING if getattr(metafunc.function, "unrolled", False) else ()
    for fixture, quick, names in (
        ("mode", selection.LOCAL, [name for group in modes.NAMES.values() for name in group]),
        ("replicated", selection.COLLECTIVE, modes.REPLICATED),
    ):
        if fixture in metafunc.fixturenames:
            chosen = selection.among(quick, [name for name in names if name not in left_out])
            metafunc.parametrize(fixture, chosen, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parametrized = getattr(item, "callspec", None)
        quick = getattr(getattr(item, "function", None), "traced_quickly", None)
        if parametrized is not None and selection.is_slow_to_trace(parametrized.params, quick):
            item.add_marker(selection.FULL)


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
