"""Which part of the product of modes and tests is quick; the rest carries the mark ``full``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.spec import modes

FULL = pytest.mark.full

LOCAL = ("numpy", "jax_jit", "tf_function")
"""Quick modes of a test in which replicas do not communicate."""

COLLECTIVE = ("jax_shard_map", "tf_mirrored")
"""Quick modes of a test in which they do."""

REPLICAS = (pytest.param(1, marks=FULL), 2, pytest.param(4, marks=FULL), 8)
"""Numbers of replicas, for a test that takes one besides `replicated`."""


def among(quick: Iterable[str], names: Iterable[str] | None = None) -> list[Any]:
    """Parameters of a test: all modes, or these; those that are not quick are left to the full suite.

    Args:
      quick: names of modes.
      names: None for all modes.
    """
    quick = set(quick)
    frameworks = {name: framework for framework, group in modes.NAMES.items() for name in group}
    return [_parameter(name, frameworks[name], name in quick) for name in (frameworks if names is None else names)]


def _parameter(name: str, framework: str, quick: bool) -> Any:
    marks = [] if framework == "numpy" else [pytest.mark.needs(framework)]
    return pytest.param(name, id=name, marks=marks if quick else [*marks, FULL])


def takes_many_threads(parameters: dict[str, Any]) -> bool:
    """Whether a test traces on eight replica threads, which hold one lock in turn."""
    return parameters.get("replicated") == "tf_mirrored" and parameters.get("replicas", 0) > 4
