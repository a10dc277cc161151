"""Shared by the tests of the optax transformations."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """optax's own arithmetic mixes integers and floats; all else here runs under strict promotion."""
    # A conftest is imported where JAX is not installed too.
    import jax

    with jax.numpy_dtype_promotion("standard"):
        yield
