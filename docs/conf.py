"""Sphinx configuration: `sphinx-build -W -b html docs site` builds the site offline and fails on any warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sphinx.util import logging

import gradcombine

project = "gradcombine"
author = "The gradcombine authors"
copyright = author
release = version = gradcombine.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath", "colon_fence"]
suppress_warnings = ["myst.header"]  # an included page starts with its title

html_theme = "furo"
html_title = "gradcombine"
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_prompt_text = ">>> "

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {name: name for name in ("Array", "DType", "Leaf", "Scalar", "State", "Tree")}
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_use_rtype = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Returns", "prose")]  # not "type: description"
default_role = "py:obj"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

PUBLIC = (
    "gradcombine",
    "gradcombine.losses",
    "gradcombine.noise",
    "gradcombine.reductions",
    "gradcombine.replicated",
    "gradcombine.resilience.faults",
    "gradcombine.resilience.ledger",
    "gradcombine.statefile",
    "gradcombine.verify",
    "gradcombine.wires",
    "gradcombine.audit",
    *(f"gradcombine.integrations.{name}" for name in ("horovod", "jax", "jax.zero", "keras", "optax", "tensorflow")),
)
"""Modules whose ``__all__`` is public API."""


def require_all_names(app: Any, env: Any) -> None:
    """Warns about public names missing from the reference."""
    documented = env.domains["py"].objects
    for module in PUBLIC:
        contents = vars(import_module(module))
        defined = [name for name, x in contents.items() if getattr(x, "__module__", None) == module and name[0] != "_"]
        for name in contents.get("__all__", defined):
            if f"{module}.{name}" not in documented:
                logging.getLogger(__name__).warning("the reference lacks %s.%s", module, name)


def require_descriptions(app: Any, doctree: Any, name: str) -> None:
    """Warns about named tuple fields without a description."""
    if "Alias for field number" in doctree.astext():
        logging.getLogger(__name__).warning("%s: a field without a description", name)


def require_live_links(app: Any, exception: Exception | None) -> None:
    """Warns about dead links between pages, including the links that Sphinx generates."""
    if exception is not None or app.builder.format != "html":
        return
    root = Path(app.outdir)
    texts = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.html")}
    anchors = {path: set(re.findall(r'\b(?:id|name)="([^"]*)"', text)) for path, text in texts.items()}
    for path, text in texts.items():
        for link in set(re.findall(r'\b(?:href|src)="(?![a-z]+:|//)([^"]*)"', text)):
            name, _, anchor = unquote(unescape(link)).partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                logging.getLogger(__name__).warning("%s: a dead link to %s", path.relative_to(root), link)


STEPS = """

def make_audited():
    return make_step(4), make_case()[1:]
"""
DUMPS = """
import numpy as np
kernel = np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30)
np.savez("old.npz", **{"dense/kernel": kernel, "dense/bias": kernel[0]})
np.savez("new.npz", **{"dense/kernel": np.nextafter(kernel, np.float32(2)), "dense/bias": kernel[0]})
"""
COMMAND = [sys.executable, "-c", "from gradcombine.verify.main import main; main()"]
REPORTS = {"check": ["steps:make_case"], "audit": ["steps:make_audited"], "diff": ["old.npz", "new.npz"]}


def write_reports(app: Any, exception: Exception | None) -> None:
    """Writes the reports that the gallery links to: of the step in check.md, and of two dumps that differ."""
    if exception is not None or app.builder.format != "html":
        return
    reports = Path(app.outdir) / "reports"
    reports.mkdir(exist_ok=True)
    step = re.findall(
        r"^```python\n(.*?)^```", (Path(app.srcdir) / "check.md").read_text(encoding="utf-8"), re.S | re.M
    )[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "steps.py").write_text(step + STEPS, encoding="utf-8")
        paths = [folder, str(Path(gradcombine.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        run = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "check": False}
        subprocess.run([sys.executable, "-c", DUMPS], **run)
        for verb, arguments in REPORTS.items():
            page = reports / f"{verb}.html"
            done = subprocess.run([*COMMAND, verb, *arguments, "--html", str(page)], **run)
            if done.returncode not in (0, 1) or not page.exists():
                logging.getLogger(__name__).warning("no report of %s: %s", verb, done.stderr)


def skip_fields(app: Any, what: str, name: str, x: Any, skip: bool, options: Any) -> bool | None:
    """Skips named tuple fields with Python's default docstring; the class docstring describes them."""
    return True if (getattr(x, "__doc__", None) or "").startswith("Alias for field number") else None


def name_aliases(app: Any, what: str, name: str, x: Any, options: Any, signature: str, returns: str) -> Any:
    """Replaces the objects that autodoc prints for type aliases in a union by the aliases' names."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, returns))


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", name_aliases)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("env-check-consistency", require_all_names)
    app.connect("doctree-resolved", require_descriptions)
    app.connect("build-finished", write_reports)
    app.connect("build-finished", require_live_links)
