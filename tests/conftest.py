"""Settings that must be made before a framework starts: made here, once, for all tests."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import importlib.util

import pytest
from hypothesis import settings

REQUIRED = frozenset(filter(None, os.environ.get("GRADCOMBINE_REQUIRE", "").split(",")))
INSTALLED = frozenset(name for name in ("jax", "tensorflow") if importlib.util.find_spec(name))

settings.register_profile("default", deadline=None, derandomize=True, max_examples=20, print_blob=True)
settings.load_profile("default")

if "jax" in INSTALLED:
    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")

if "tensorflow" in INSTALLED:
    import tensorflow as tf

    one = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(one, [tf.config.LogicalDeviceConfiguration()] * 8)


NEEDED_BY = {
    "gradcombine/backends/jax_backend.py": "jax",
    "gradcombine/backends/tensorflow_backend.py": "tensorflow",
    "gradcombine/integrations/optax.py": "jax",
    "gradcombine/integrations/tensorflow.py": "tensorflow",
    "tests/integrations/test_optax": "jax",
    "tests/integrations/test_tensorflow": "tensorflow",
    "tests/integrations/strategies.py": "tensorflow",
    "tests/verify/": "tensorflow",
    "gradcombine/verify/": "tensorflow",
    "examples/optax_chain.py": "jax",
    "examples/tf_function_step.py": "tensorflow",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A framework that is not installed leaves out the tests that need it, unless GRADCOMBINE_REQUIRE names it."""
    for item in items:
        for needed in item.iter_markers("needs"):
            for name in set(needed.args) - INSTALLED - REQUIRED:
                item.add_marker(pytest.mark.skip(reason=f"{name} is not installed"))
