"""The container of a state file: a text and named arrays in an .npz or .safetensors file.

Arrays of dtypes that both formats support are stored directly, others as bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from gradcombine import errors
from gradcombine.errors import GradCombineError, invalid, require_given
from gradcombine.formats import Entry, npz, safetensors

_SUFFIXES = (".npz", ".safetensors")
_TEXT = "header"
_KEY = "gradcombine"
"""Name of the text in an .npz and in a .safetensors file, respectively."""

_NATIVE = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""The dtypes that both .npz and .safetensors support."""


def stored_as(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape in the file. An unsupported dtype is stored as uint8, with a last axis over the bytes."""
    if dtype.name in _NATIVE:
        return dtype.newbyteorder("<"), shape
    return np.dtype(np.uint8), (*shape, dtype.itemsize)


def to_stored(array: np.ndarray) -> np.ndarray:
    """Converts an array to its form in the file, in C order."""
    dtype, shape = stored_as(array.dtype, array.shape)
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name in _NATIVE:
        return contiguous.astype(dtype, copy=False)
    return contiguous.reshape(-1).view(np.uint8).reshape(shape)


def from_stored(stored: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_stored`."""
    if dtype.name in _NATIVE:
        return stored.astype(dtype, copy=False)
    return stored.reshape(-1).view(dtype).reshape(shape)


def digest(stored: np.ndarray) -> str:
    """The SHA-256 of an array's bytes in the file."""
    return hashlib.sha256(stored.reshape(-1).view(np.uint8).data).hexdigest()


class Contents(NamedTuple):
    """Contents of a state file: the header's text, and arrays by name, read on access."""

    text: str
    arrays: dict[str, Entry]


def require_path(path: str | os.PathLike[str]) -> Path:
    """Converts a path; raises for an unknown suffix, and if it exists but is not a regular file.

    Opening a FIFO would block forever, and a device or directory must not be replaced.
    """
    expected = f"a path that ends in {' or '.join(_SUFFIXES)}"
    file = errors.require_path(expected, path)
    if file.suffix not in _SUFFIXES:
        raise invalid(expected, repr(str(path)))
    if os.path.exists(file) and not os.path.isfile(file):
        raise invalid("a regular file", repr(str(path)))
    return file


def write(path: Path, text: str, arrays: Mapping[str, np.ndarray], exclusive: bool = False) -> None:
    """Writes a file atomically. Equal contents give equal bytes. Raises FileExistsError as `replacing` does."""
    with replacing(path, exclusive) as file:
        if path.suffix == ".npz":
            npz.write(file, {_TEXT: np.frombuffer(text.encode(), np.uint8), **arrays})
        else:
            safetensors.write(file, arrays, {_KEY: text})


def read(path: Path) -> Contents:
    """Reads a file's header. Damaged contents may raise any exception, which `decoding` translates."""
    if path.suffix == ".npz":
        arrays = npz.read(path, compressed=False)
        header = arrays.pop(_TEXT, None)
        is_text = header is not None and header.dtype == np.uint8 and len(header.shape) == 1
        text = header.whole().tobytes().decode() if header is not None and is_text else None
    else:
        contents = safetensors.read(path)
        text, arrays = contents.texts.get(_KEY), contents.entries
    text = require_given("a gradcombine state file", text, f"a {path.suffix} file without a header")
    return Contents(text, arrays)


@contextmanager
def decoding(path: Path) -> Generator[None, None, None]:
    """Translates the exceptions of a decoder to GradCombineError; an OSError of opening the file is kept."""
    try:
        yield
    except (GradCombineError, MemoryError):
        raise
    except Exception as error:
        # An OSError without a filename comes from reading past the end of damaged contents.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        # Archive decoders raise a dozen classes, depending on where the damage is.
        raise invalid("an undamaged state file", f"{path.name}: {type(error).__name__}: {error}") from error


def array_name(rank: int, leaf: int) -> str:
    """Name of an array in the file, from its replica and its index among the header's leaves."""
    return f"{rank}.{leaf}"


POSIX = os.name == "posix"


@contextmanager
def replacing(path: Path, exclusive: bool = False) -> Generator[IO[bytes], None, None]:
    """Opens a temporary file that replaces ``path`` atomically after the block, and is removed after an error.

    The contents are synced to disk before the rename, so that a crash leaves either the old or the new file. If the
    path is a symbolic link, its target is replaced. Mode and owner of the old file are kept. Temporary files that
    killed writers of the same path have left behind are removed first.

    Raises:
      FileExistsError: with ``exclusive``, if the path exists after the block, on file systems with hard links.
    """
    target = Path(os.path.realpath(path))
    try:
        old = os.stat(path)
    except FileNotFoundError:
        os.stat(target.parent)  # an error names the missing directory, not the temporary file
        old = None
    _remove_abandoned(target)
    # Not readable by others before it has the mode of the old file.
    draft, descriptor = _locked_draft(target, 0o666 if old is None else 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if old is not None and POSIX:
                _take_over(descriptor, old)
            os.fsync(descriptor)
            if POSIX:  # rename while the lock is held; other systems cannot rename an open file
                _publish(draft, target, exclusive)
        if not POSIX:
            _publish(draft, target, exclusive)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if POSIX:
        # Sync the rename, which changes the directory.
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _publish(draft: Path, target: Path, exclusive: bool) -> None:
    """Renames a temporary file to its target; with ``exclusive``, raises if that exists."""
    if exclusive:
        try:
            os.link(draft, target)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            os.replace(draft, target)
        else:
            draft.unlink()
    else:
        os.replace(draft, target)


def _locked_draft(target: Path, mode: int) -> tuple[Path, int]:
    """Creates a temporary file, with a lock that lasts until its writer closes it or dies."""
    while True:
        draft = target.with_name(f"{_prefix(target)}{uuid.uuid4().hex}.tmp")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
        if _lock(descriptor, wait=True) and os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)  # another writer removed it as abandoned before it was locked
            continue
        return draft, descriptor


def _remove_abandoned(target: Path) -> None:
    """Removes the temporary files of ``target`` that no writer has locked.

    Those of other targets stay: on a file system whose locks are local, their writers may run on other machines.
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
    """Locks a file; returns whether that succeeded. Always false on systems and file systems without locks."""
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
    """Copies mode and, as far as permitted, owner of the old file."""
    mode = stat.S_IMODE(old.st_mode) & 0o777
    try:
        os.fchown(descriptor, old.st_uid, old.st_gid)
    except OSError:
        try:
            os.fchown(descriptor, -1, old.st_gid)
        except OSError:
            mode &= ~0o070  # the permissions of the old group must not pass to another group
    os.fchmod(descriptor, mode)


def _prefix(target: Path) -> str:
    """Prefix of the temporary files of a target: a hash, as the name itself may have the maximum length."""
    return f".gradcombine-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"
