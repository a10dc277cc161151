"""Defects that the campaign has to find: in its training, and in the library."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gradcombine import ledger
from gradcombine.statefile import container, header, recovery

IN_TRAINING = ("saved-after-update", "saved-at-end", "dealt-twice", "skip-not-agreed")
"""`anew.train` has them itself."""
FAULTS = ("twice", "flip", "stray", "kill-in-save")
"""What strikes, in turn, the runs with a defect in the library: wrong bits on the disk, and what comes of them."""


def _doubles_hidden() -> None:
    """A ledger says of no microbatch that it was counted twice."""
    real = ledger.read
    ledger.read = lambda *states: real(*states)._replace(doubled=())


def _save_not_atomic() -> None:
    """A save writes into the file that it replaces."""

    @contextmanager
    def replacing(path: Path) -> Generator[IO[bytes], None, None]:
        with open(path, "wb") as file:
            yield file

    container.replacing = replacing


def _parts_overlap() -> None:
    """All parts of a window are used, those that share microbatches, too."""
    recovery._disjoint = lambda parts: dict(sorted(parts.items()))  # pyright: ignore[reportPrivateUsage]


class _Equal(str):
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def _checksums_not_compared() -> None:
    """Checksums are written, and are right whatever is read."""
    for module, name in ((container, "digest"), (header, "_digest")):
        real: Callable[..., str] = getattr(module, name)
        setattr(module, name, lambda contents, real=real: _Equal(real(contents)))


def _windows_mixed() -> None:
    """A part is used in whichever window it was saved."""
    real: Any = recovery._files  # pyright: ignore[reportPrivateUsage]

    def files(folder: Path) -> Any:
        found = real(folder)
        newest = max((index for _, index, holder in found if holder == "begun"), default=0)
        return [(file, index if holder == "begun" else newest, holder) for file, index, holder in found]

    recovery._files = files  # pyright: ignore[reportPrivateUsage]


IN_LIBRARY: dict[str, Callable[[], None]] = {
    "doubles-hidden": _doubles_hidden,
    "save-not-atomic": _save_not_atomic,
    "parts-overlap": _parts_overlap,
    "checksums-not-compared": _checksums_not_compared,
    "windows-mixed": _windows_mixed,
}
"""Each is planted in a process of the run, before it reads or saves anything."""
