"""Shared by the tests of the optax transformations."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """optax's arithmetic mixes integers and floats; everything else here runs under strict promotion."""
    # Imported here because the conftest is loaded even if JAX is not installed.
    import jax

    with jax.numpy_dtype_promotion("standard"):
        yield
