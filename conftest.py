"""Configures JAX, TensorFlow and Hypothesis for all tests and doctests, before a framework is imported."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import ctypes
import gc
import importlib.util
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import gradcombine.verify  # noqa: F401  # binds its functions before pytest imports the packages of the same names

REQUIRED = frozenset(filter(None, os.environ.get("GRADCOMBINE_REQUIRE", "").split(",")))
"""Frameworks whose tests must run: if one is missing, they fail instead of being skipped."""

ON_CPU = os.environ["JAX_PLATFORMS"] == "cpu"
"""Whether JAX runs on CPUs; on other platforms, the options and the eight devices of the tests do not exist."""

FRAMEWORKS = ("jax", "tensorflow", "optax", "keras", "flax", "equinox", "orbax", "safetensors", "sklearn", "torch")
INSTALLED = frozenset(name for name in FRAMEWORKS if importlib.util.find_spec(name))

NEEDED_AT_IMPORT = {
    "gradcombine/backends/jax_backend.py": {"jax"},
    "gradcombine/backends/tensorflow_backend.py": {"tensorflow"},
    "gradcombine/integrations/horovod": {"tensorflow"},
    "gradcombine/integrations/jax": {"jax", "optax"},
    "gradcombine/integrations/keras": {"tensorflow", "keras", "jax"},
    "gradcombine/integrations/optax": {"jax", "optax"},
    "gradcombine/integrations/tensorflow": {"tensorflow"},
    "gradcombine/verify/check/torch_": {"torch"},
    "gradcombine/verify": {"jax", "optax", "tensorflow", "keras"},
    "tests/backends/test_jax_": {"jax"},
    "tests/backends/test_quotient": {"jax", "tensorflow"},
    "tests/backends/test_tensorflow_": {"tensorflow"},
    "tests/foreign_orders/test_blocks": {"jax", "tensorflow"},
    "tests/formats": {"safetensors"},
    "tests/contract": {"jax", "optax", "tensorflow", "keras"},
    "tests/fuzz": {"jax", "optax", "tensorflow", "keras"},
    "tests/integrations/horovod": {"jax", "tensorflow", "keras"},
    "tests/integrations/jax": {"jax", "optax", "flax", "equinox"},
    "tests/integrations/keras": {"tensorflow", "keras", "jax"},
    "tests/integrations/optax": {"jax", "optax"},
    "tests/integrations/tensorflow": {"tensorflow", "keras"},
    "tests/multi_process": {"jax", "tensorflow"},
    "tests/replicated/test_jax": {"jax"},
    "tests/replicated/test_live": {"tensorflow"},
    "tests/replicated/test_tensorflow": {"tensorflow"},
    "tests/spec/test_derivatives": {"jax", "tensorflow"},
    "tests/statefile": {"jax", "tensorflow", "optax", "orbax", "safetensors"},
    "tests/targets": {"jax", "optax"},
    "tests/verify/check/test_forms.py": {"flax", "equinox"},
    "tests/verify/pytorch": {"torch"},
    "tests/verify": {"jax", "optax", "tensorflow", "keras", "orbax", "safetensors"},
    "examples/port_torch_to_flax.py": {"torch"},
    "examples": {"jax", "tensorflow", "optax", "keras", "flax", "sklearn"},
}
"""Path prefixes of the files that import frameworks when they are collected."""

pytest_plugins = ["tests.spec.closing"]

AS_USERS_DO = (
    "tests/backends",
    "tests/foreign_orders",
    "tests/integrations/optax/test_multi_steps_bits.py",
    "tests/multi_process",
    "tests/spec",
    "tests/verify/origin",
    "tests/verify/steps/test_right.py",
)
"""Path prefixes of the files that the full tier compiles with XLA's defaults: tests of bits and of correct steps."""

FLOAT32_AS_USERS_DO = ("tests/verify/steps/test_right.py",)
"""Files among these whose float64 programs, which no user sees, compile cheaply: they have bounds of their own."""

WITHOUT_BITS = ("tests/spec/test_derivatives.py",)
"""Files below these paths that assert no bits."""


def _version(package: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version(package))[:3]))


# A process whose XLA does not know an option of XLA_FLAGS ends: jaxlib's from 0.11.1 on, TensorFlow's before 2.21.
_has_emitters = "jax" in INSTALLED and _version("jaxlib") < (0, 11, 1)
_both_do = _has_emitters and ("tensorflow" not in INSTALLED or _version("tensorflow") >= (2, 21))
_EMITTERS, _ONE_MODULE = {"xla_cpu_use_fusion_emitters": False}, {"xla_cpu_parallel_codegen_split_count": 1}
"""XLA options that halve the time to compile: no fusion emitters, and one LLVM module for each program, not many."""

CHEAP = {
    **(_EMITTERS if _has_emitters else {}),
    **_ONE_MODULE,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""XLA options for the JAX programs of all other files, in both tiers."""

_QUICK = {**(_EMITTERS if _both_do else {}), **_ONE_MODULE, "xla_backend_optimization_level": 1}
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _QUICK.items())
"""XLA options for the quick tier: compile in half the time and keep the bits that the tests assert."""

MOST_MEMORY = 2 * 2**30
"""Growth of a test process, in bytes, after which it clears JAX's caches."""

_kept = 2**30
_cheap = _cheap_float64 = False

settings.register_profile("default", deadline=None, derandomize=True, max_examples=20, print_blob=True)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Configures the frameworks, except in the controller of pytest-xdist, which runs no tests."""
    distributes = config.getoption("tx", None) and config.getoption("dist") != "no"
    if distributes and not hasattr(config, "workerinput"):
        return
    gc.disable()  # until collection ends: imported modules and tests are no garbage
    if "not full" in config.option.markexpr and ON_CPU:
        os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} {os.environ['XLA_FLAGS']}"
    if "jax" in INSTALLED:
        import jax

        _offer_cheap_programs()
        jax.config.update("jax_numpy_rank_promotion", "raise")
        jax.config.update("jax_numpy_dtype_promotion", "strict")
    if "tensorflow" in INSTALLED:
        import tensorflow as tf

        (one,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(one, [tf.config.LogicalDeviceConfiguration()] * 8)


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from traversing the frameworks and the tests in each collection."""
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores files that import a missing framework, unless GRADCOMBINE_REQUIRE names it."""
    path = collection_path.relative_to(config.rootpath).as_posix() if collection_path.is_file() else ""
    needed = (names for start, names in NEEDED_AT_IMPORT.items() if path.startswith(start))
    return True if any(names - INSTALLED - REQUIRED for names in needed) else None


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """Clears JAX's caches whenever the process has grown by gigabytes, as several workers share a machine.

    Objects that survive, such as TensorFlow's graphs, are frozen: a full collection takes ten seconds.
    """
    yield
    global _kept
    if "jax" in INSTALLED and _resident_bytes() > _kept + MOST_MEMORY:
        import jax

        jax.clear_caches()
        gc.collect()
        gc.freeze()
        with suppress(AttributeError, OSError, TypeError):  # glibc only: its arenas keep memory that compilers freed
            ctypes.CDLL(None).malloc_trim(0)
        _kept = _resident_bytes()


@pytest.fixture(scope="module", autouse=True)
def _cheaply(request: pytest.FixtureRequest) -> None:
    """Selects the XLA options of a file; clears the caches when they change, so that no compiled program is reused."""
    global _cheap, _cheap_float64
    path = request.path.relative_to(request.config.rootpath).as_posix()
    cheap = path in WITHOUT_BITS or not path.startswith(AS_USERS_DO)
    options = cheap, cheap or path in FLOAT32_AS_USERS_DO
    if "jax" in INSTALLED and options != (_cheap, _cheap_float64):
        import jax

        jax.clear_caches()
        _cheap, _cheap_float64 = options


def _offer_cheap_programs() -> None:
    import jax
    from jax._src import compiler  # private: jit takes compiler options, but the steps under test do not forward them

    original = compiler.get_compile_options

    def options(*args: Any, **kwargs: Any) -> Any:
        compile_options = original(*args, **kwargs)
        if (_cheap_float64 if jax.config.jax_enable_x64 else _cheap) and ON_CPU:
            compile_options.env_option_overrides = [*compile_options.env_option_overrides, *CHEAP.items()]
        return compile_options

    compiler.get_compile_options = options


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Allows implicit dtype promotion: optax's arithmetic mixes integers and floats."""
    import jax

    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def as_users_do() -> Iterator[None]:
    """Allows implicit rank and dtype promotion, as JAX does by default."""
    import jax

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _resident_bytes() -> int:
    statistics = Path("/proc/self/statm")
    return int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statistics.exists() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves cases of ``sampled`` tests to the full tier; skips tests that cannot run here."""
    begun: set[str] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in begun and item.get_closest_marker("sampled"):
            item.add_marker(pytest.mark.full)
        elif not item.get_closest_marker("full"):
            begun.add(test)
        if not ON_CPU and (item.get_closest_marker("cpus") or "shard_map" in item.nodeid):
            item.add_marker(pytest.mark.skip(reason="needs JAX on eight CPU devices"))
        missing = {name for needed in item.iter_markers("needs") for name in needed.args} - INSTALLED - REQUIRED
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(sorted(missing))}"))
