"""The ``gradcombine`` command, as far as it runs without the packages of the verify extra."""

from __future__ import annotations

import sys

from gradcombine.verify.packages import hint, missing

NEEDED = ("rich", "typer")


def main() -> None:
    """Runs the command line, or says in one line what it lacks."""
    lacking = missing(NEEDED)
    if lacking:
        sys.exit(f"gradcombine: {hint(lacking)}")
    from gradcombine.verify.command import app  # names typer and rich, which are known to be there by now

    app()
