"""Files that are there in full, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

POSIX = os.name == "posix"


@contextmanager
def replacing(path: Path) -> Generator[IO[bytes], None, None]:
    """A draft to write to. After the block it takes the place of ``path`` in one step; after an error it is removed.

    The contents are on the disk before the name is, so that a crash leaves the old file or the new one. What a symbolic
    link points to is replaced, not the link. Mode and owner are the old file's. The drafts that killed writers of the
    same file have left behind are removed first.
    """
    target = Path(os.path.realpath(path))
    try:
        old = os.stat(path)
    except FileNotFoundError:
        old = None
    _remove_abandoned(target)
    # Nobody else may read it before it has the old file's mode.
    draft, descriptor = _locked_draft(target, 0o666 if old is None else 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if old is not None and POSIX:
                _take_over(descriptor, old)
            os.fsync(descriptor)
            if POSIX:  # Its lock is held until it has its name; other systems cannot rename an open file.
                os.replace(draft, target)
        if not POSIX:
            os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if POSIX:
        # The new name is an entry of the folder, which has to be on the disk as well.
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _locked_draft(target: Path, mode: int) -> tuple[Path, int]:
    """A new file, whose lock lasts as long as its writer does."""
    while True:
        draft = target.with_name(f"{_prefix(target)}{uuid.uuid4().hex}.tmp")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
        if _lock(descriptor, wait=True) and os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)  # Another writer took it for abandoned before it was locked.
            continue
        return draft, descriptor


def _remove_abandoned(target: Path) -> None:
    """Removes the drafts of one file that no writer holds a lock on.

    Those of other files stay: where locks do not reach other machines, the writers there may be alive.
    """
    for draft in target.parent.glob(f"{_prefix(target)}*.tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(draft, os.O_WRONLY)
            try:
                if _lock(descriptor, wait=False):
                    draft.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool:
    """Whether the file is locked now; never on a file system, or a system, without locks."""
    try:
        import fcntl
    except ModuleNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _take_over(descriptor: int, old: os.stat_result) -> None:
    """Gives a file the owner, as far as that is allowed, and the mode of another one."""
    mode = stat.S_IMODE(old.st_mode) & 0o777
    try:
        os.fchown(descriptor, old.st_uid, old.st_gid)
    except OSError:
        try:
            os.fchown(descriptor, -1, old.st_gid)
        except OSError:
            mode &= ~0o070  # what the old group was allowed is not for another group
    os.fchmod(descriptor, mode)


def _prefix(target: Path) -> str:
    """Names the target without its name, which may be as long as a name can be."""
    return f".gradcombine-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"
