"""Execution modes as fixtures, and the selection of quick cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spec import modes, selection


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes ``mode`` by all modes and ``replicated`` by the modes with several replicas.

    An `unrolled` test omits the modes that differ in their loop only; ``mode`` omits `modes.COMMUNICATING` unless the
    test is `communicating`.
    """
    unrolled, communicating = (getattr(metafunc.function, name, False) for name in ("unrolled", "communicating"))
    omitted = modes.LOOPING if unrolled else ()
    everywhere = [name for group in modes.NAMES.values() for name in group]
    for fixture, quick, names in (
        ("mode", selection.LOCAL, [name for name in everywhere if communicating or name not in modes.COMMUNICATING]),
        ("replicated", selection.COLLECTIVE, modes.REPLICATED),
    ):
        if fixture in metafunc.fixturenames:
            chosen = selection.among(quick, [name for name in names if name not in omitted])
            metafunc.parametrize(fixture, chosen, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items[:] = [
        item
        for item in items
        if item.path.parent != here or not selection.repeats(getattr(getattr(item, "callspec", None), "params", {}))
    ]
    for item in items:
        parametrized = getattr(item, "callspec", None)
        quick = getattr(getattr(item, "function", None), "traced_quickly", None)
        if parametrized is not None and selection.is_slow_to_trace(parametrized.params, quick):
            item.add_marker(selection.FULL)
    items[:] = [item for item in items if selection.is_of_pairs(item)]


@pytest.fixture(scope="session")
def mode(request: pytest.FixtureRequest) -> modes.Mode:
    return modes.get(request.param)


@pytest.fixture(scope="session")
def replicated(request: pytest.FixtureRequest) -> modes.Mode:
    return modes.get(request.param)


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs() -> Iterator[None]:
    """Drops the compiled programs after each file."""
    yield
    modes.forget()
