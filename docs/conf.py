"""The documentation site: `sphinx-build -W -b html docs site` builds it, offline, and any warning ends the build."""

from __future__ import annotations

import re
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
suppress_warnings = ["myst.header"]  # pages of findings begin at a title of their own

html_theme = "furo"
html_title = "gradcombine"
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_prompt_text = ">>> "

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"Tree": "Tree", "Array": "Array", "State": "State"}
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
    "gradcombine.noise",
    "gradcombine.reductions",
    "gradcombine.replicated",
    "gradcombine.statefile",
    "gradcombine.verify",
    "gradcombine.audit",
    *(f"gradcombine.integrations.{name}" for name in ("horovod", "jax", "jax.zero", "keras", "optax", "tensorflow")),
)
"""Every module whose ``__all__`` is promised to users."""


def require_all_names(app: Any, env: Any) -> None:
    """Warns, which ends the build, of each public name that the reference lacks."""
    known = env.domains["py"].objects
    for module in PUBLIC:
        found = import_module(module)
        own = [name for name, x in vars(found).items() if getattr(x, "__module__", None) == module and name[0] != "_"]
        for name in getattr(found, "__all__", own):
            # What the package above hands on is documented there, as the audit is by verify; a module by its own name.
            above = "gradcombine.verify" if module == "gradcombine.audit" else module.rpartition(".")[0]
            own_name = getattr(getattr(found, name), "__name__", name)
            if not {f"{module}.{name}", f"{above}.{name}", own_name} & known.keys():
                logging.getLogger(__name__).warning("the reference lacks %s.%s", module, name)


def require_descriptions(app: Any, doctree: Any, name: str) -> None:
    """Warns of a field of a named tuple that Python alone describes."""
    if "Alias for field number" in doctree.astext():
        logging.getLogger(__name__).warning("%s: a field without a description", name)


def require_live_links(app: Any, exception: Exception | None) -> None:
    """Warns of each link between pages that leads nowhere; those that Sphinx writes by itself are among them."""
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


def skip_fields(app: Any, what: str, name: str, x: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of named tuples, which their class describes, and Python only by their number."""
    return True if (getattr(x, "__doc__", None) or "").startswith("Alias for field number") else None


def setup(app: Any) -> None:
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("env-check-consistency", require_all_names)
    app.connect("doctree-resolved", require_descriptions)
    app.connect("build-finished", require_live_links)
