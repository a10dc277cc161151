"""The package as a whole: what importing it loads, and that its public names are documented."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gradcombine as gc
from benchmarks.counts import PRONOUN, sources
from gradcombine.errors import EXTRAS


def test_importing_loads_no_framework() -> None:
    modules = ", ".join(f"gradcombine.{name}" for name in ("noise", "reductions", "replicated", "statefile"))
    code = f"import sys, gradcombine; {modules}; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    absent = {"jax", "jaxlib", "tensorflow", "optax", "keras", "rich", "safetensors", "typer", "sklearn"}
    assert not absent & set(loaded.split())


@pytest.mark.full
@pytest.mark.needs("jax")
def test_gradients_in_jax_need_no_optax() -> None:
    code = "import sys; sys.modules['optax'] = None; from gradcombine.integrations.jax import value_and_grad"
    used = "print(value_and_grad(lambda w, x: (w * x).mean(), 2)(2.0, __import__('jax').numpy.arange(4.0)))"
    command = [sys.executable, "-c", f"{code}; {used}"]
    assert "Array(1.5" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


EXTRA = {
    "gradcombine.integrations.jax": "jax",
    "gradcombine.integrations.optax": "optax",
    "gradcombine.integrations.tensorflow": "tensorflow",
    "gradcombine.integrations.keras": "keras",
    "gradcombine.integrations.horovod": "tensorflow",
}


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    """Every integration, `jax_axis`, `tf_replicas` and `audit` raise an error that is an ImportError as well."""
    code = """if True:
    import importlib, sys
    import gradcombine as gc
    from gradcombine.audit import audit, find_target
    sys.modules.update(dict.fromkeys(("jax", "optax", "tensorflow", "keras")))
    calls = {name: lambda name=name: importlib.import_module(name) for name in sys.argv[1:]}
    calls |= {"jax_axis": lambda: gc.jax_axis("data"), "tf_replicas": gc.tf_replicas}
    calls |= {"audit": lambda: audit(abs, 1), "target": lambda: find_target("h100:8")}
    for name, call in calls.items():
        try:
            call()
        except ImportError as error:
            assert isinstance(error, gc.GradCombineError)
            print(name, error, sep="|")
    """
    command = [sys.executable, "-c", code, *EXTRA]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    messages = dict(line.split("|") for line in done.stdout.splitlines())
    extras = EXTRA | {"jax_axis": "jax", "tf_replicas": "tensorflow", "audit": "jax", "target": "jax"}
    assert messages.keys() == extras.keys()
    for name, extra in extras.items():
        assert f"expected what pip install 'gradcombine[{extra}]' installs, received no module " in messages[name]


def test_each_module_is_of_the_extra_that_installs_it() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        assert any(re.match(rf"{module}\W", needed) for needed in extras[extra]), module


def test_what_the_readme_links_to_is_there_and_a_registrys_page_has_no_dead_link() -> None:
    """Applies the substitutions of the build; `nox -s distributions` checks the built page."""
    readme = Path("README.md").read_text()
    relative = re.compile(r"""(?:\]\(|src(?:set)?=")(?!https?:|#)([^)#"]+)""")
    paths = relative.findall(readme)
    assert len(paths) > 20 and [path for path in paths if not Path(path).exists()] == []
    page, code = readme, re.compile(r"^```.*?^```", re.S | re.M)
    hook = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for substitution in hook["substitutions"]:
        page = re.sub(substitution["pattern"], substitution["replacement"], page)
    assert relative.findall(page) == []
    assert code.findall(page) == code.findall(readme) and len(page) > 0.8 * len(readme)


PUBLIC = [getattr(gc, name) for name in gc.__all__ if inspect.isfunction(getattr(gc, name))]
PUBLIC += [getattr(gc.reductions, name) for name in gc.reductions.__all__]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_public_functions_have_a_docstring_with_an_example(function: object) -> None:
    assert ">>>" in (inspect.getdoc(function) or "")


def test_docstrings_name_their_objects() -> None:
    """No docstring begins with a pronoun, including the ones below constants and attributes."""
    found = [
        f"{path}: {node.value.value}"
        for path in sources("gradcombine")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and PRONOUN.match(str(node.value.value))
    ]
    assert not found
