"""The tests of this folder run on the backend that Keras is imported with; `test_jax_backend` runs them on JAX."""

import keras
import pytest

JAX_ONLY = ("test_distribution.py", "test_stateless.py")
TENSORFLOW_ONLY = ("test_jax_backend.py", "test_resume_on_jax.py", "test_replicas.py", "test_replicas_saved.py")

if keras.backend.backend() == "jax":
    import jax

    collect_ignore = list(TENSORFLOW_ONLY)
    # Keras itself promotes.
    jax.config.update("jax_numpy_rank_promotion", "allow")
    jax.config.update("jax_numpy_dtype_promotion", "standard")
else:
    collect_ignore = list(JAX_ONLY)


@pytest.fixture(params=["eager", "compiled"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param
