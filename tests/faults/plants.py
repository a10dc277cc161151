"""Planted defects, in the training and in the library, that the campaign must find."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gradcombine import ledger
from gradcombine.statefile import container, header, recovery

IN_TRAINING = ("saved-after-update", "saved-at-end", "dealt-twice", "skip-not-agreed")
"""Defects that `anew.train` implements."""
FAULTS = ("twice", "flip", "stray", "kill-in-save")
"""Faults, in rotation, of the runs with a defect in the library."""


def _doubles_hidden() -> None:
    """Ledgers report no microbatch as counted twice."""
    real = ledger.read
    ledger.read = lambda *states: real(*states)._replace(doubled=())


def _save_not_atomic() -> None:
    """A save overwrites the existing file in place."""

    @contextmanager
    def replacing(path: Path, exclusive: bool = False) -> Generator[IO[bytes], None, None]:
        with open(path, "xb" if exclusive else "wb") as file:
            yield file

    container.replacing = replacing


def _parts_overlap() -> None:
    """Uses all parts of a window, including ones that share microbatches."""
    recovery._disjoint = lambda parts: dict(sorted(parts.items()))  # pyright: ignore[reportPrivateUsage]


class _Equal(str):
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def _checksums_not_compared() -> None:
    """Writes checksums but accepts any data."""
    for module, name in ((container, "digest"), (header, "_digest")):
        real: Callable[..., str] = getattr(module, name)
        setattr(module, name, lambda contents, real=real: _Equal(real(contents)))


def _windows_mixed() -> None:
    """Uses parts of other windows."""
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
"""Functions that plant a defect in a process of the run, before it reads or saves anything."""
