"""Modes by name, for tests that compile much: a few of them in the quick suite, all in the slow one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.spec import modes


def among(quick: Iterable[str], names: Iterable[str] | None = None) -> list[Any]:
    """Parameters of a test: all modes, or these; those that are not quick are marked as slow.

    Args:
      quick: names of modes.
      names: None for all modes.
    """
    quick = set(quick)
    frameworks = {name: framework for framework, group in modes.NAMES.items() for name in group}
    return [_parameter(name, frameworks[name], name in quick) for name in (frameworks if names is None else names)]


def _parameter(name: str, framework: str, quick: bool) -> Any:
    marks = [] if framework == "numpy" else [pytest.mark.needs(framework)]
    return pytest.param(name, id=name, marks=marks if quick else [*marks, pytest.mark.slow])
