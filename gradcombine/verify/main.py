"""Entry point of the ``gradcombine`` command, which also runs if the extra's packages are missing."""

from __future__ import annotations

import sys

from gradcombine.errors import GradCombineError, require_installed

NEEDED = ("typer", "rich")


def main() -> None:
    """Runs the command line, or prints which package is missing and exits with status 2."""
    try:
        require_installed("gradcombine", *NEEDED)
    except GradCombineError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    from gradcombine.verify.command import app  # imports typer and rich

    app()
