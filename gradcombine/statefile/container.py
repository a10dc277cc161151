"""A state file: one text, and arrays by name, in an .npz or a .safetensors file.

An array lies there as it is, where both formats know its dtype, else as its bytes.
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
"""Names of the text in an .npz file, and in a .safetensors file."""

_NATIVE = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""The dtypes that .npz and .safetensors both have."""


def stored_as(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape in the file. Another dtype becomes uint8, with one more axis: the bytes of each element."""
    if dtype.name in _NATIVE:
        return dtype.newbyteorder("<"), shape
    return np.dtype(np.uint8), (*shape, dtype.itemsize)


def to_stored(array: np.ndarray) -> np.ndarray:
    """The array as it lies in the file, in C order."""
    dtype, shape = stored_as(array.dtype, array.shape)
    whole = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name in _NATIVE:
        return whole.astype(dtype, copy=False)
    return whole.reshape(-1).view(np.uint8).reshape(shape)


def from_stored(stored: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_stored`."""
    if dtype.name in _NATIVE:
        return stored.astype(dtype, copy=False)
    return stored.reshape(-1).view(dtype).reshape(shape)


def digest(stored: np.ndarray) -> str:
    """The SHA-256 of the bytes in the file."""
    return hashlib.sha256(stored.reshape(-1).view(np.uint8).data).hexdigest()


class Contents(NamedTuple):
    """Contents of a state file: the header's text, and the arrays by name, read on access."""

    text: str
    arrays: dict[str, Entry]


def require_path(path: str | os.PathLike[str]) -> Path:
    """Refuses a path that names no format, and where anything else than a file has it.

    A FIFO would wait for ever, and nobody means to replace a device or a folder.
    """
    expected = f"a path that ends in {' or '.join(_SUFFIXES)}"
    found = errors.require_path(expected, path)
    if found.suffix not in _SUFFIXES:
        raise invalid(expected, repr(str(path)))
    if os.path.exists(found) and not os.path.isfile(found):
        raise invalid("a regular file", repr(str(path)))
    return found


def write(path: Path, text: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file as a whole. The same contents give the same bytes."""
    with replacing(path) as file:
        if path.suffix == ".npz":
            npz.write(file, {_TEXT: np.frombuffer(text.encode(), np.uint8), **arrays})
        else:
            safetensors.write(file, arrays, {_KEY: text})


def read(path: Path) -> Contents:
    """Reads a file's header. It may raise anything for damaged contents: `decoding` gives that one name."""
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
    """Names whatever a decoder raises on damaged contents; a file that cannot be opened keeps its OSError."""
    try:
        yield
    except (GradCombineError, MemoryError):
        raise
    except Exception as error:
        # An error about a path says so; one without a name is about a place in the file that is not there.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        # Decoders of archives raise a dozen classes, depending on where the damage is.
        raise invalid("a whole state file", f"{path.name}: {type(error).__name__}: {error}") from error


def array_name(rank: int, leaf: int) -> str:
    """The name of an array in the file: its replica, and its number among the header's leaves."""
    return f"{rank}.{leaf}"


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
