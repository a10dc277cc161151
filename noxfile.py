"""Environments of their own, made by uv: the suites on other versions, each extra alone, and the distributions.

``nox -l`` lists the sessions; ``nox -s versions`` runs the quick suite on the lowest, the default and the newest
versions, ``nox -s distributions`` builds, checks and installs what is released. What follows ``--`` goes to pytest.
"""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["distributions"]

FRAMEWORKS = "jax,tensorflow,optax,keras,flax,equinox,orbax,safetensors,sklearn"

VERSIONS = {
    # The floors of pyproject.toml, with what the tests need beside them as new as it goes together with these.
    "lowest": ("3.11", ("jax==0.9.1", "optax==0.2.8", "tensorflow==2.19.0", "keras==3.12.0", "numpy==2.0.2")),
    "default": ("3.11", ()),
    "newest": ("3.13", ()),
}
"""By name: the Python, and what is pinned."""

IMPORTS = {
    "": ("gradcombine", "gradcombine.statefile", "gradcombine.verify"),
    "jax": ("gradcombine.integrations.jax",),
    "optax": ("gradcombine.integrations.jax", "gradcombine.integrations.optax"),
    "tensorflow": ("gradcombine.integrations.tensorflow", "gradcombine.integrations.horovod"),
    "keras,tensorflow": ("gradcombine.integrations.keras",),
    "cli": ("gradcombine.verify.command",),
}
"""What has to be importable with an extra alone."""

DOORS = tuple(f"gradcombine.integrations.{name}" for name in ("horovod", "jax", "keras", "optax", "tensorflow"))


@nox.session(python=False)
@nox.parametrize("name", list(VERSIONS))
def versions(session: nox.Session, name: str) -> None:
    """The quick suite, or what is named after ``--``, on these versions."""
    python, pins = VERSIONS[name]
    environment = Path(session.create_tmp()) / name
    interpreter = environment / "bin" / "python"
    session.run("uv", "venv", "-q", "--clear", "--python", python, str(environment), external=True)
    session.run("uv", "pip", "install", "-q", "--python", str(interpreter), "-e", ".[test]", *pins, external=True)
    command = [str(interpreter), "-m", "pytest", "-q", *session.posargs]
    session.run(*command, env={"GRADCOMBINE_REQUIRE": FRAMEWORKS}, external=True)


@nox.session
def distributions(session: nox.Session) -> None:
    """Builds wheel and sdist, checks them, and imports what each extra alone has to give from an empty environment."""
    folder = Path(session.create_tmp()) / "dist"
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", str(folder), ".")
    wheel, archive = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    session.run("twine", "check", "--strict", str(wheel), str(archive))
    for extra, modules in IMPORTS.items():
        environment = Path(session.create_tmp()) / (extra.replace(",", "-") or "none")
        interpreter = str(environment / "bin" / "python")
        package = f"{wheel}[{extra}]" if extra else str(archive)
        session.run("uv", "venv", "-q", "--clear", str(environment), external=True)
        session.run("uv", "pip", "install", "-q", "--python", interpreter, package, external=True)
        _imports(session, interpreter, modules)


def _imports(session: nox.Session, interpreter: str, modules: tuple[str, ...]) -> None:
    """Imports what has to be there; every other door names the command that installs what it lacks."""
    code = f"""if True:
    import importlib, os, sys
    os.chdir("/")
    for name in {modules!r}:
        importlib.import_module(name)
    for name in {DOORS!r}:
        try:
            importlib.import_module(name)
        except ImportError as error:
            assert name not in {modules!r} and "pip install 'gradcombine[" in str(error), (name, error)
    """
    session.run(interpreter, "-c", code, external=True)
