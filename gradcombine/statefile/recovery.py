"""The windows of a run in one folder: each process saves its own, and any number of processes goes on with them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.errors import GradCombineError, invalid, operation
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.plain import last
from gradcombine.resilience import ledger
from gradcombine.settings import check, valid
from gradcombine.statefile.files import inspect, load, require_composition, save
from gradcombine.statefile.header import on_host
from gradcombine.types import State, Tree

_KEPT = last()
_BEGUN, _PART = "begun", re.compile(r"window-(\d{8,})\.(begun|\d+)\.npz")
_WINDOWS = 2
"""How many windows' files stay: if the newest beginning is damaged, the one before it has all of its parts."""


class Recovered(NamedTuple):
    """State to continue a run with.

    Attributes:
      window: its index, from 0.
      begun: the tree that the window began with: parameters, the optimizer's state.
      parts: by holder, states of this window, no two of which hold the same microbatch.
      left_out: by file, why it was not used: damaged, or its microbatches are in another part.
    """

    window: int
    begun: Tree
    parts: dict[int, State]
    left_out: dict[str, str]


@operation("statefile.begin_window")
def begin_window(folder: str | os.PathLike[str], index: int, begun: Tree) -> None:
    """Saves what a window begins with: the end of the window before it, which counts from then on.

    Every process calls this when it has applied a window, with the same tree; one file is written, and not again. Files
    of windows before the last one are removed.

    Args:
      folder: of this run alone; shared by all processes. Made where it is missing.
      index: of the window that begins, from 0.
      begun: parameters, the optimizer's state, whatever an update changes: a tree of arrays.

    Raises:
      GradCombineError: for an index below 0, values that cannot be saved, and where the file of another process is
        there and holds other bits: then the processes have parted, and one of them computes wrongly.
      OSError: where the file cannot be written. The window has not begun then: call this again before `save_part`.

    >>> import numpy as np, tempfile
    >>> from gradcombine import reductions, statefile
    >>> mean = reductions.numbered(reductions.mean("exact"), 2)
    >>> params = {"w": np.zeros(2, np.float32)}
    >>> part = mean.update(mean.init(params), reductions.Numbered({"w": np.float32([1, 2])}, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     statefile.begin_window(folder, 0, params)
    ...     statefile.save_part(folder, 0, 3, mean, part)
    ...     run = statefile.recover(folder, mean, like=params, start=params)
    >>> run.window, run.begun, sorted(run.parts)
    (0, {'w': array([0., 0.], dtype=float32)}, [3])
    """
    index = valid("index", index)
    path = _path(folder, index, _BEGUN)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not _is_there(path, begun):
        save(path, _KEPT, _KEPT.update(_KEPT.init(begun), begun))
    for file, window, _ in _files(path.parent):
        if window <= index - _WINDOWS:
            file.unlink(missing_ok=True)


@operation("statefile.save_part")
def save_part(folder: str | os.PathLike[str], index: int, holder: int, reduction: Reduction, state: State) -> None:
    """Saves what one holder has of a window; after each microbatch, so that a failure costs one microbatch at most.

    Args:
      folder: of the run.
      index: of the window, which `begin_window` has begun: a part of a window whose beginning nobody knows could not
        be used, and the parts of the window before it still can.
      holder: which part it is, from 0: the rank of a process, or the number of a logical replica. Its last part is
        replaced.
      reduction: a `gradcombine.reductions.numbered` one, so that what is there twice is seen.
      state: of the reduction, or of `gradcombine.accumulate`.

    Raises:
      GradCombineError: for a window that has not begun, a state without a ledger, and as `save`.
      OSError: where the file cannot be written. The last part is whole then, so that training may go on without it.
    """
    path = _path(folder, index, str(valid("holder", holder)))
    if not _path(folder, index, _BEGUN).is_file():
        raise invalid("a window that begin_window has begun", index)
    ledger.read(state)
    save(path, reduction, state)


@operation("statefile.recover")
def recover(folder: str | os.PathLike[str], reduction: Reduction, like: Tree, start: Tree) -> Recovered:
    """Reads the newest window of a run that has begun, and parts of it that hold each microbatch at most once.

    A file is used for what it holds, whoever wrote it and however many processes there were. One that is cut off or
    damaged is left out, and so is a part of whose microbatches another part holds one: its work is done again. Parts of
    other windows are stale: they have been applied, or belong to parameters that are lost.

    All processes have to read before any of them writes, or they may see different parts: put a barrier after this.
    Then call `begin_window` with the index and the tree, which begins a new run, and mends a file that was damaged.

    Args:
      folder: of the run. It need not be there.
      reduction: as for `save_part`.
      like: the tree of the gradients, as for `load`.
      start: what the first window begins with, the same in every start of the run; other beginnings are read like it.

    Returns:
      ``window``, its index, from 0; ``begun``, the tree that it began with; ``parts``, by holder, states of this
      window, no two of which hold the same microbatch; ``left_out``, by file, why it was not used.

    Raises:
      GradCombineError: where windows after the first have begun, and the beginnings of all of them are damaged; for a
        part of another reduction, or of the same one with other settings.
      OSError: where a file cannot be read.

    Bits: what is merged of the parts, and of the microbatches that `gradcombine.resilience.ledger.read` calls missing,
    has the bits of the unbroken run in precision ``"exact"``, and in order ``"tree"`` if the holders are logical
    replicas.
    """
    check(reduction=reduction)
    files, left_out = _files(valid("folder", folder)), dict[str, str]()
    window, begun = 0, start
    beginnings = sorted(((index, file) for file, index, holder in files if holder == _BEGUN), reverse=True)
    for index, file in beginnings:
        try:
            window, begun = index, _KEPT.finalize(load(file, _KEPT, start))
            break
        except GradCombineError as error:
            left_out[file.name] = str(error)
    else:
        if any(index > 0 for index, _ in beginnings):
            received = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise invalid("an undamaged beginning", received)
    parts = dict[int, State]()
    for file, index, holder in files:
        if index == window and holder != _BEGUN:
            try:
                header = inspect(file)
            except GradCombineError as error:
                left_out[file.name] = str(error)
                continue
            require_composition(file, header, reduction)
            try:
                parts[int(holder)] = load(file, reduction, like)
            except GradCombineError as error:
                left_out[file.name] = str(error)
    apart = _apart(parts)
    for holder in parts.keys() - apart.keys():
        left_out[_name(window, str(holder))] = "it has no microbatch, or one that another part has"
    return Recovered(window, begun, apart, left_out)


def _apart(parts: dict[int, State]) -> dict[int, State]:
    """Parts that hold each microbatch at most once, those that hold most first."""
    held = {holder: set(ledger.read(part).held) for holder, part in parts.items()}
    taken, found = set[int](), dict[int, State]()
    for holder in sorted(parts, key=lambda holder: (-len(held[holder]), holder)):
        if held[holder] and not held[holder] & taken and not ledger.read(parts[holder]).doubled:
            taken |= held[holder]
            found[holder] = parts[holder]
    return dict(sorted(found.items()))


def _is_there(path: Path, begun: Tree) -> bool:
    """Whether a file holds this tree. One that is damaged does not; one that holds another is refused."""
    try:
        stored = _KEPT.finalize(load(path, _KEPT, begun))
    except (GradCombineError, OSError):
        return False
    (ours, structure), theirs = (tree.flatten(on_host(x)) for x in (begun, stored))
    for where, x, y in zip(structure.paths(), ours, theirs[0], strict=True):
        if x is not None and np.asarray(x).tobytes() != np.asarray(y).tobytes():
            raise invalid(f"the bits with which another process has begun this window, in {path.name}", "others", where)
    return True


def _path(folder: str | os.PathLike[str], index: int, holder: str) -> Path:
    number = valid("index", index)
    return valid("folder", folder) / _name(number, holder)


def _name(index: int, holder: str) -> str:
    return f"window-{index:08d}.{holder}.npz"


def _files(folder: Path) -> list[tuple[Path, int, str]]:
    """Each file of a window, the window's index, and whose part it is."""
    named = [(file, _PART.fullmatch(file.name)) for file in sorted(folder.glob("window-*.npz"))]
    return [(file, int(found[1]), found[2]) for file, found in named if found]
