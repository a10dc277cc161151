"""The ``gradcombine`` command, as far as it runs without the packages of the verify extra."""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("rich", "typer", "sklearn", "jax", "tensorflow")


def main() -> None:
    """Runs the command line, or says in one line what it lacks."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = "install gradcombine[verify], for instance: pip install 'gradcombine[verify]'"
        sys.exit(f"gradcombine: {', '.join(missing)} not found; {hint}")
    from gradcombine.verify.command import app  # names typer and rich, which are known to be there by now

    app()
