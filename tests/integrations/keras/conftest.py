"""These tests run on the backend that Keras is imported with; `test_jax_backend` runs them on JAX."""

import pytest

from tests.integrations.keras.cases import ON_JAX

JAX_ONLY = ("test_stateless.py",)
TENSORFLOW_ONLY = ("test_float64.py", "test_jax_backend.py", "test_replicas.py", "test_merged_gradients.py")

collect_ignore = list(TENSORFLOW_ONLY if ON_JAX else JAX_ONLY)


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Allows implicit promotion, which Keras relies on and the global test settings forbid."""
    if ON_JAX:
        import jax

        jax.config.update("jax_numpy_rank_promotion", "allow")
        jax.config.update("jax_numpy_dtype_promotion", "standard")


@pytest.fixture(params=["eager", "compiled"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param
