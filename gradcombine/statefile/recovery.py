"""Checkpoints of a run's windows in one folder, which any number of processes can write and resume from."""

from __future__ import annotations

import os
import re
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from gradcombine import tree
from gradcombine.backends.registry import dtype_of, in_words, require_numbers
from gradcombine.errors import GradCombineError, invalid, operation
from gradcombine.formats import holds_numbers
from gradcombine.reductions.algebra import Reduction, Wrapper
from gradcombine.reductions.plain import last
from gradcombine.resilience import ledger
from gradcombine.settings import check, valid
from gradcombine.statefile.files import encoded, inspect, load, require_form, save, write
from gradcombine.types import State, Tree


class Beginning(Wrapper):
    """The tree itself as the state, so that its file keeps every bit; `last` would widen narrow leaves."""

    def init(self, like: Tree) -> State:
        return like

    def clear(self, state: State) -> State:
        return state


_OLDER = last()
"""The reduction of the beginnings that earlier versions saved."""
_BEGINNING = Beginning(_OLDER)
_BEGUN, _PART = "begun", re.compile(r"window-(\d{8,})\.(begun|0|[1-9]\d*)\.npz")
_WINDOWS = 2
"""Number of windows whose files are kept: if the newest beginning is damaged, the previous window is complete."""


class Recovered(NamedTuple):
    """The state to resume a run from.

    Attributes:
      window: index of the window, from 0.
      begun: the tree at the beginning of the window: parameters and the optimizer's state.
      parts: states of the window, by holder. No two of them hold the same microbatch.
      left_out: by file, why it was not used: it is damaged, or another part holds its microbatches.
    """

    window: int
    begun: Tree
    parts: dict[int, State]
    left_out: dict[str, str]


@operation("statefile.begin_window")
def begin_window(folder: str | os.PathLike[str], index: int, begun: Tree) -> None:
    """Saves the tree that a window begins with, which commits the previous window.

    Every process calls this with the same tree after applying a window; the file is written once. Only the files of
    this window and the previous one are kept.

    Args:
      folder: shared by all processes, and used by this run only. Created if it is missing.
      index: of the window that begins, from 0.
      begun: tree of arrays with everything that an update changes: parameters and the optimizer's state.

    Raises:
      GradCombineError: for a negative index, values that cannot be saved, and if another process has saved a tree with
        other bits: the processes have diverged.
      OSError: if the file cannot be written. The window has not begun then: call this again before `save_part`.

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
    leaves, structure = tree.flatten(begun)
    for leaf, leaf_path in zip(leaves, structure.paths(), strict=True):
        require_numbers(leaf, leaf_path)
        if leaf is not None and not holds_numbers(dtype_of(leaf)):
            raise invalid("an array of numbers", in_words(leaf), leaf_path)
    is_new = not path.exists()
    if not _is_saved(path, begun):
        try:
            # Of processes that arrive at once, one writes. A damaged file is replaced.
            write(path, _BEGINNING, [begun], exclusive=is_new)
        except FileExistsError:
            _is_saved(path, begun)
    for file, window, _ in _files(path.parent):
        if window <= index - _WINDOWS and not file.is_dir():
            file.unlink(missing_ok=True)


@operation("statefile.save_part")
def save_part(folder: str | os.PathLike[str], index: int, holder: int, reduction: Reduction, state: State) -> None:
    """Saves one holder's part of a window. Called after each microbatch, so that a failure loses at most one.

    Args:
      folder: of the run.
      index: of a window that `begin_window` has begun: without its beginning, the part would be useless.
      holder: rank of the process, or index of the logical replica, from 0. Replaces the part that it saved before.
      reduction: a `gradcombine.reductions.numbered` reduction, so that duplicate microbatches are detected.
      state: of the reduction or of `gradcombine.accumulate`.

    Raises:
      GradCombineError: for a window that has not begun, a state without a ledger, and as for `save`.
      OSError: if the file cannot be written. The holder's previous part is intact then, so training may continue.
    """
    path = _path(folder, index, str(valid("holder", holder)))
    if not _path(folder, index, _BEGUN).is_file():
        raise invalid("a window that begin_window has begun", index)
    ledger.read(state)
    save(path, reduction, state)


@operation("statefile.recover")
def recover(folder: str | os.PathLike[str], reduction: Reduction, like: Tree, start: Tree) -> Recovered:
    """Reads the newest window that has begun, and parts of it that hold each microbatch at most once.

    Parts are used regardless of which process wrote them, and of the number of processes. Truncated and damaged files
    are left out, and so are parts that share a microbatch with another part: their other microbatches are computed
    again. Parts of other windows are stale: already applied, or for parameters that are lost.

    All processes have to read before any of them writes, or they may see different parts: put a barrier after this
    call. Then call `begin_window` with the index and the tree, which starts a new run and rewrites a damaged file.

    Args:
      folder: of the run. It need not exist.
      reduction: as for `save_part`.
      like: the tree of the gradients, as for `load`.
      start: the tree that the first window begins with, the same in every start of the run. The trees of later windows
        are loaded like it.

    Returns:
      ``window``, the index, from 0; ``begun``, the tree that it began with; ``parts``, states of the window by holder,
      no two of which hold the same microbatch; ``left_out``, by file, why it was not used.

    Raises:
      GradCombineError: if a window after the first has begun, but all beginnings are damaged; for a part of another
        reduction, or of the same one with other settings, shapes or dtypes.
      OSError: if a file cannot be read.

    Bits: merging the parts and the microbatches that `gradcombine.resilience.ledger.read` lists as missing gives the
    bits of an uninterrupted run in precision ``"exact"``, and in order ``"tree"`` if the holders are logical replicas.
    """
    check(reduction=reduction)
    files, left_out = _files(valid("folder", folder)), dict[str, str]()
    window, begun = 0, start
    beginnings = sorted(((index, file) for file, index, holder in files if holder == _BEGUN), reverse=True)
    for index, file in beginnings:
        try:
            window, begun = index, _loaded(file, start)
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
            require_form(file, header, reduction, like)
            try:
                parts[int(holder)] = load(file, reduction, like)
            except GradCombineError as error:
                left_out[file.name] = str(error)
    disjoint = _disjoint(parts)
    for holder in parts.keys() - disjoint.keys():
        left_out[_name(window, str(holder))] = "it has no microbatch, or one that another part has"
    return Recovered(window, begun, disjoint, left_out)


def _disjoint(parts: dict[int, State]) -> dict[int, State]:
    """Parts that hold each microbatch at most once, chosen greedily by the number of microbatches."""
    held = {holder: set(ledger.read(part).held) for holder, part in parts.items()}
    taken, chosen = set[int](), dict[int, State]()
    for holder in sorted(parts, key=lambda holder: (-len(held[holder]), holder)):
        if held[holder] and not held[holder] & taken and not ledger.read(parts[holder]).doubled:
            taken |= held[holder]
            chosen[holder] = parts[holder]
    return dict(sorted(chosen.items()))


def _is_saved(path: Path, begun: Tree) -> bool:
    """Whether a file holds this tree: false if it is missing or damaged; raises if it holds another one."""
    try:
        header = inspect(path)
    except (FileNotFoundError, GradCombineError):
        return False
    if header.settings != _BEGINNING.description:
        return False
    for ours, saved in zip_longest(encoded(_BEGINNING, [begun])[0].leaves, header.leaves):
        if ours != saved:
            raise invalid(f"the bits that another process saved in {path.name}", "other bits", (ours or saved).path)
    try:
        load(path, _BEGINNING, begun)
    except GradCombineError:
        return False
    return True


def _loaded(path: Path, start: Tree) -> Tree:
    """The tree of a beginning."""
    if inspect(path).settings == _OLDER.description:
        return _OLDER.finalize(load(path, _OLDER, start))
    return load(path, _BEGINNING, start)


def _path(folder: str | os.PathLike[str], index: int, holder: str) -> Path:
    number = valid("index", index)
    return valid("folder", folder) / _name(number, holder)


def _name(index: int, holder: str) -> str:
    return f"window-{index:08d}.{holder}.npz"


def _files(folder: Path) -> list[tuple[Path, int, str]]:
    """The files in a folder, each with the index of its window and its holder, or ``"begun"``."""
    try:
        names = sorted(os.listdir(folder))  # raises where Path.glob would ignore an unreadable folder
    except FileNotFoundError:
        return []
    matches = [(folder / name, _PART.fullmatch(name)) for name in names]
    return [(file, int(match[1]), match[2]) for file, match in matches if match]
