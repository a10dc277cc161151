"""Files that are there in full, or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to. After the block it takes the place of ``path`` in one step; after an error it is removed.

    The contents are on the disk before the name is, so that a crash leaves the old file or the new one.
    """
    written = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield written
        _flush(written, os.O_RDWR)
        os.replace(written, path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        # The new name is an entry of the folder, which has to be on the disk as well.
        _flush(path.parent, os.O_RDONLY)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
