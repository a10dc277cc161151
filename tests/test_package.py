"""The package as a whole: what importing it loads, and that its public names are documented."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import gradcombine as gc


def test_importing_loads_no_framework() -> None:
    modules = ", ".join(f"gradcombine.{name}" for name in ("noise", "reductions", "replicated", "statefile"))
    code = f"import sys, gradcombine; {modules}; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"jax", "jaxlib", "tensorflow", "optax", "keras", "rich", "typer", "sklearn"} & set(loaded.split())


@pytest.mark.needs("jax")
def test_gradients_in_jax_need_no_optax() -> None:
    code = "import sys; sys.modules['optax'] = None; from gradcombine.integrations.jax import value_and_grad"
    used = "print(value_and_grad(lambda w, x: (w * x).mean(), 2)(2.0, __import__('jax').numpy.arange(4.0)))"
    command = [sys.executable, "-c", f"{code}; {used}"]
    assert "Array(1.5" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


PUBLIC = [getattr(gc, name) for name in gc.__all__ if inspect.isfunction(getattr(gc, name))]
PUBLIC += [getattr(gc.reductions, name) for name in gc.reductions.__all__]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_public_functions_have_a_docstring_with_an_example(function: object) -> None:
    assert ">>>" in (inspect.getdoc(function) or "")
