"""The ``gradcombine`` command, as far as it runs without the packages of the verify extra."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

NEEDED = ("rich", "typer")


def main() -> None:
    """Runs the command line, or says in one line what it lacks."""
    lacking = missing(NEEDED)
    if lacking:
        sys.exit(f"gradcombine: {hint(lacking)}")
    from gradcombine.verify.command import app  # names typer and rich, which are known to be there by now

    app()


def missing(names: Sequence[str]) -> list[str]:
    """Those of the named packages that are not installed; none of them is imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def hint(names: Sequence[str]) -> str:
    """What to do about them, in one line."""
    return f"{', '.join(names)} not found; install gradcombine[verify], for instance: pip install 'gradcombine[verify]'"
