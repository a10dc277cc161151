"""The ``gradcombine`` command, as far as it runs without the packages of an extra."""

from __future__ import annotations

import sys

from gradcombine.errors import GradCombineError, require_installed

NEEDED = ("typer", "rich")


def main() -> None:
    """Runs the command line, or says in one line what it lacks."""
    try:
        require_installed("gradcombine", *NEEDED)
    except GradCombineError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    from gradcombine.verify.command import app  # names typer and rich, which are known to be there by now

    app()
