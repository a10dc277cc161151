"""Saves and loads states."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import gradcombine
from gradcombine import tree
from gradcombine.backends.registry import resolve
from gradcombine.errors import invalid, operation, require_equal, require_list
from gradcombine.formats import Entry
from gradcombine.places.time import depth_of, require_state_of
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check
from gradcombine.statefile import container
from gradcombine.statefile import header as headers
from gradcombine.statefile.container import array_name, decoding, require_path
from gradcombine.statefile.header import Header, Layout, Leaf, layout, on_host, template
from gradcombine.types import AccumulateState, State, Tree


@operation("statefile.save")
def save(path: str | os.PathLike[str], reduction: Reduction, state: State) -> None:
    """Saves a state, which `load` can read in any framework.

    Args:
      path: of a file that ends in ``.npz`` or ``.safetensors``. An existing file is replaced atomically: a crash leaves
        either the old or the new file. Its mode and owner are kept; if the path is a symbolic link, its target is
        replaced.
      reduction: that created the state.
      state: of one replica: a state of the reduction, or of `gradcombine.accumulate` (partial, full or empty), in
        NumPy, JAX or TensorFlow arrays. Not in compiled code.

    Raises:
      GradCombineError: for another suffix, a path that is not a regular file, a state of another reduction, states
        stacked into one, and values that are traced or partly in other processes.
      OSError: if the file cannot be written. The old file is intact then.

    Bits: arrays are saved bit for bit, including NaN payloads. Equal states give equal files.

    >>> import numpy as np, gradcombine as gc, tempfile
    >>> from gradcombine import reductions, statefile
    >>> acc, params = gc.accumulate(reductions.mean(), every=2), {"w": np.zeros(2, np.float32)}
    >>> state = acc.update({"w": np.float32([1, 2])}, acc.init(params), weight=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     statefile.save(f"{folder}/window.npz", reductions.mean(), state)
    ...     state = statefile.load(f"{folder}/window.npz", reductions.mean(), like=params)
    >>> acc.value(acc.update({"w": np.float32([3, 4])}, state, weight=3))
    {'w': array([2.5, 3.5], dtype=float32)}
    """
    write(path, reduction, [state])


@operation("statefile.load")
def load(path: str | os.PathLike[str], reduction: Reduction, like: Tree) -> State:
    """Loads a state that `save` wrote.

    Args:
      path: of the file.
      reduction: with the same settings as the one that created the state.
      like: the tree that was passed to ``init``, of arrays or specs: sets the containers and the framework of the
        state. NumPy arrays may be passed to compiled code of any framework.

    Returns:
      A state of the type that was saved. For ``None`` and JAX's ``float0`` ("no gradient"), the leaf is that of
      ``like``.

    Raises:
      GradCombineError: for a path that is not a regular file; for a file that is damaged, truncated, of another format
        or a newer version; for a file of another reduction, or of the same one with other settings; if the leaves'
        paths, shapes or dtypes differ from those of ``like``; and for a file with several replicas, which needs
        `load_replicas`.
      OSError: if the file cannot be read.

    Bits: those that were saved; checksums cover every byte of every array and of the header.

    >>> import numpy as np, gradcombine as gc, tempfile
    >>> from gradcombine import reductions, statefile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     statefile.save(f"{folder}/sum.npz", reductions.sum(), reductions.sum().init(np.float32(0)))
    ...     statefile.load(f"{folder}/sum.npz", reductions.mean(), like=np.float32(0))
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: statefile.load: expected states of 'mean', received states of 'sum'
    """
    (state,) = _states(path, reduction, like, replicas=1)
    return state


@operation("statefile.save_replicas")
def save_replicas(path: str | os.PathLike[str], reduction: Reduction, states: Sequence[State]) -> None:
    """Saves the states of all replicas in one file, for `load_replicas`; `resize` changes the number of replicas.

    Args:
      path, reduction: as for `save`.
      states: one per replica, by rank, of the same structure. Split states that are stacked along a first axis, as
        returned by jax.vmap and jax.shard_map, with ``jax.tree.map(lambda x: x[rank], stacked)``.

    Raises:
      GradCombineError: as for `save`; also for an empty list, and states that differ in structure, shapes or dtypes.
      OSError: as for `save`.

    Bits: as for `save`.

    >>> import numpy as np, gradcombine as gc, tempfile
    >>> from gradcombine import reductions, statefile
    >>> total = reductions.sum()
    >>> states = [total.update(total.init(np.float32(0)), np.float32(rank)) for rank in range(4)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     statefile.save_replicas(f"{folder}/sums.npz", total, states)
    ...     states = statefile.load_replicas(f"{folder}/sums.npz", total, like=np.float32(0))
    >>> [float(total.finalize(state)) for state in statefile.resize(total, states, 2)]
    [1.0, 5.0]
    """
    listed = require_list("a list of states, one per replica", states)
    write(path, reduction, listed)


@operation("statefile.load_replicas")
def load_replicas(path: str | os.PathLike[str], reduction: Reduction, like: Tree) -> list[State]:
    """Loads the states of all replicas, by rank.

    Args, errors and bits as for `load`; the file may hold any number of replicas.

    >>> import numpy as np, gradcombine as gc, tempfile
    >>> from gradcombine import reductions, statefile
    >>> total = reductions.sum()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     statefile.save(f"{folder}/sum.npz", total, total.init(np.float32(0)))
    ...     len(statefile.load_replicas(f"{folder}/sum.npz", total, like=np.float32(0)))
    1
    """
    return _states(path, reduction, like, replicas=None)


@operation("statefile.inspect")
def inspect(path: str | os.PathLike[str]) -> Header:
    """Reads the header of a state file, without reading its arrays.

    Args:
      path: of the file.

    Returns:
      The ``reduction``'s name and its ``settings``, the number of ``replicas``, the ``levels`` of windows, the
      ``kinds`` of containers by path, and for each of the ``leaves`` its ``path``, ``dtype``, ``shape`` (None for no
      gradient) and ``sha256``, one per replica.

    Raises:
      GradCombineError: for a file with a damaged header, of another format or a newer version.
      OSError: if the file cannot be read.

    >>> import numpy as np, gradcombine as gc, tempfile
    >>> from gradcombine import reductions, statefile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     statefile.save(f"{folder}/sum.npz", reductions.sum(), reductions.sum().init({"w": np.float32([0, 0])}))
    ...     header = statefile.inspect(f"{folder}/sum.npz")
    >>> header.reduction, header.replicas, header.kinds, header.leaves[0][:3]
    ('sum', 1, {'': 'SumState', ".dtypes['w']": 'float32'}, (".value['w']", 'float32', (2,)))
    """
    source = require_path(path)
    with decoding(source):
        return headers.decode(container.read(source).text)


def write(path: str | os.PathLike[str], reduction: Reduction, states: Sequence[State], exclusive: bool = False) -> None:
    """Saves the states of all replicas. With ``exclusive``, raises FileExistsError for a path that exists."""
    target = require_path(path)
    header, arrays = encoded(reduction, states)
    container.write(target, headers.encode(header), arrays, exclusive)


def encoded(reduction: Reduction, states: Sequence[State]) -> tuple[Header, dict[str, np.ndarray]]:
    """The header of a file of these states, and the arrays as they are stored."""
    check(reduction=reduction)
    parts = [on_host(state) for state in states]
    first = layout(parts[0])
    for rank, part in enumerate(parts):
        require_state_of(reduction, part)
        other = layout(part)
        if (other.leaves, other.kinds) != (first.leaves, first.kinds):
            raise invalid("states of one structure, shapes and dtypes", f"another at rank {rank}")
    columns = [tree.flatten(part)[0] for part in parts]
    arrays = {
        array_name(rank, i): container.to_stored(leaf)
        for rank, column in enumerate(columns)
        for i, leaf in enumerate(column)
        if leaf is not None
    }
    leaves: list[Leaf] = []
    for i, (leaf_path, described) in enumerate(first.leaves.items()):
        if described is None:
            leaves.append(Leaf(leaf_path, None, None, ()))
        else:
            digests = tuple(container.digest(arrays[array_name(rank, i)]) for rank in range(len(parts)))
            leaves.append(Leaf(leaf_path, described[0].name, described[1], digests))
    levels = depth_of(parts[0]) if isinstance(parts[0], AccumulateState) else None
    header = Header(
        gradcombine.__version__, reduction.name, reduction.description, len(parts), levels, first.kinds, tuple(leaves)
    )
    return header, arrays


def _states(path: str | os.PathLike[str], reduction: Reduction, like: Tree, replicas: int | None) -> list[State]:
    """Loads the states of all replicas; raises unless their number is ``replicas``, if not None."""
    check(reduction=reduction)
    source = require_path(path)
    with decoding(source):
        contents = container.read(source)
        header = headers.decode(contents.text)
    wanted = require_form(source, header, reduction, like)
    if replicas is not None:
        require_equal("{} replica (load_replicas takes several)", replicas, header.replicas)
    with decoding(source):
        columns = _arrays(contents.arrays, header, wanted)
    backend = resolve(tree.flatten(like)[0])
    numpy = backend.name == "numpy"

    def state(column: Sequence[np.ndarray | None]) -> State:
        # Only markers of "no gradient", which are part of the structure, come from ``like``.
        return tree.unflatten(wanted.structure, [x if x is None or numpy else backend.asarray(x) for x in column])

    return [state(column) for column in columns]


def require_form(source: Path, header: Header, reduction: Reduction, like: Tree) -> Layout:
    """The layout of the states; raises for a file of another one, or of another reduction or other settings.

    Warns if the file does not contain the settings.
    """
    require_equal("{}", f"states of {reduction.name!r}", f"states of {header.reduction!r}")
    if header.settings is None:
        text = f"statefile.load: {source} lacks the settings of its reduction: {reduction.description} is assumed"
        warnings.warn(text, stacklevel=4)
    else:
        require_equal("{}", f"states of {reduction.description}", f"states of {header.settings}")
    wanted = layout(template(reduction, like, header.levels))
    for path in [*wanted.kinds, *header.kinds]:
        expected, received = wanted.kinds.get(path), header.kinds.get(path)
        if not (_marks_absence(expected) and _marks_absence(received)):
            require_equal("{}", _named(expected), _named(received), path or "(root)")
    ours = {path: None if leaf is None else (leaf[0].name, leaf[1]) for path, leaf in wanted.leaves.items()}
    stored = {leaf.path: None if leaf.dtype is None else (leaf.dtype, leaf.shape) for leaf in header.leaves}
    for path in [*ours, *stored]:
        expected, received = (_described(leaves, path) for leaves in (ours, stored))
        require_equal("{}", expected, received, path or "(root)")
    return wanted


def _described(leaves: Mapping[str, tuple[str, tuple[int, ...] | None] | None], path: str) -> str:
    leaf = leaves.get(path, ("no leaf",))
    return "no gradient" if leaf is None else " of shape ".join(map(str, leaf))


def _marks_absence(kind: str | None) -> bool:
    """Whether a container is a marker of "no gradient": None or a JAX float0."""
    return kind is not None and kind.startswith("no_gradient")


def _named(kind: str | None) -> str:
    return "an array or an unnamed container" if kind is None else "no gradient" if _marks_absence(kind) else kind


def _arrays(arrays: dict[str, Entry], header: Header, wanted: Layout) -> list[list[np.ndarray | None]]:
    """Reads the leaves of every replica, in the order of the wanted layout; None for leaves without an array."""
    indices = {leaf.path: i for i, leaf in enumerate(header.leaves)}
    present = [i for i, leaf in enumerate(header.leaves) if leaf.dtype is not None]
    if set(arrays) != {array_name(rank, i) for rank in range(header.replicas) for i in present}:
        raise invalid("the arrays that the header names", "other arrays")

    def array(rank: int, path: str, described: tuple[np.dtype, tuple[int, ...]] | None) -> np.ndarray | None:
        index = indices[path]
        if described is None or header.leaves[index].dtype is None:
            return None
        dtype, shape = container.stored_as(*described)
        entry = arrays[array_name(rank, index)]
        # Compared with ``like`` before reading: a hostile file must not determine how much memory is allocated.
        require_equal("{} in the file", f"{dtype}{shape}", f"{entry.dtype}{entry.shape}", path)
        stored = entry.whole()
        if container.digest(stored) != header.leaves[index].sha256[rank]:
            raise invalid("bytes that match their checksum", "a mismatch: the file is damaged", path)
        return container.from_stored(stored, *described)

    return [[array(rank, *leaf) for leaf in wanted.leaves.items()] for rank in range(header.replicas)]
