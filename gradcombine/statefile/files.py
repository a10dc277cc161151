"""Saving and loading states."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gradcombine.errors import GradCombineError
from gradcombine.reductions.algebra import Reduction
from gradcombine.statefile.header import Header
from gradcombine.statefile.states import read, read_header, write
from gradcombine.types import State, Tree, no_autograph


@no_autograph
def save(path: str | os.PathLike[str], reduction: Reduction, state: State) -> None:
    """Saves one state; `load` gives it back, in any framework.

    Args:
      path: of a file that ends in ``.npz`` or ``.safetensors``. An existing one is replaced in one step: after a crash
        there is the old file or the new one, and nothing between. Its mode and owner are kept; where the path is a
        symbolic link, what it points to is replaced.
      reduction: the one that made the state.
      state: a state of the reduction, or of `gradcombine.accumulate`: partial, full or empty. Of NumPy, JAX or
        TensorFlow, outside of compiled code, and of one replica.

    Raises:
      GradCombineError: for another suffix, a path of what is no regular file, a state of another reduction, states that
        are stacked in one, and values that are traced or partly in other processes.
      OSError: where the file cannot be written. The old one is whole then.

    Bits: every array is saved as it is, the payloads of NaN included. The same state gives the same file.

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
    write("statefile.save", path, reduction, [state])


@no_autograph
def load(path: str | os.PathLike[str], reduction: Reduction, like: Tree) -> State:
    """Loads the one state that `save` wrote.

    Args:
      path: of the file.
      reduction: made as the one that made the state.
      like: the tree that ``init`` would get: its containers are those of the state, and its arrays (or specs) say of
        which framework. NumPy arrays may enter any framework's compiled code.

    Returns:
      A state of the kind that was saved. ``None`` and JAX's ``float0`` both stand for "no gradient": the leaf is what
      ``like`` has there.

    Raises:
      GradCombineError: for a path of what is no regular file; for a file that is damaged, cut off, of another format or
        a newer version; for one that another reduction, or the same one with other settings, has written; where the
        leaves' paths, shapes or dtypes differ from those of ``like``; and for several replicas, which `load_replicas`
        takes.
      OSError: where the file cannot be read.

    Bits: those that were saved; checksums cover every byte of every array, and of what the file says about them.

    >>> import numpy as np, gradcombine as gc, tempfile
    >>> from gradcombine import reductions, statefile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     statefile.save(f"{folder}/sum.npz", reductions.sum(), reductions.sum().init(np.float32(0)))
    ...     statefile.load(f"{folder}/sum.npz", reductions.mean(), like=np.float32(0))
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: statefile.load: expected states of 'mean', received states of 'sum'
    """
    states = read("statefile.load", path, reduction, like, replicas=1)
    return states[0]


@no_autograph
def save_replicas(path: str | os.PathLike[str], reduction: Reduction, states: Sequence[State]) -> None:
    """Saves one state a replica in one file; `load_replicas` gives them back, and `resize` makes them more or fewer.

    Args:
      path, reduction: as for `save`.
      states: one a replica, by rank, of one structure. A tree that holds them stacked along a first axis, as jax.vmap
        and jax.shard_map return it, is taken apart by ``jax.tree.map(lambda x: x[rank], stacked)``.

    Raises:
      GradCombineError: as `save`, and for no states, or states that differ in structure, shapes or dtypes.
      OSError: as `save`.

    Bits: as `save`.

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
    if not isinstance(states, (list, tuple)) or hasattr(states, "_fields") or not states:
        raise GradCombineError("statefile.save_replicas", "a list of states, one a replica", type(states).__name__)
    write("statefile.save_replicas", path, reduction, states)


@no_autograph
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
    return read("statefile.load_replicas", path, reduction, like, replicas=None)


@no_autograph
def inspect(path: str | os.PathLike[str]) -> Header:
    """What a state file says about itself. Reads no array, and needs no ``like``.

    Args:
      path: of the file.

    Raises:
      GradCombineError: for a file that is damaged there, of another format or a newer version.
      OSError: where the file cannot be read.

    >>> import numpy as np, gradcombine as gc, tempfile
    >>> from gradcombine import reductions, statefile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     statefile.save(f"{folder}/sum.npz", reductions.sum(), reductions.sum().init({"w": np.float32([0, 0])}))
    ...     header = statefile.inspect(f"{folder}/sum.npz")
    >>> header.reduction, header.replicas, header.kinds, header.leaves[0][:3]
    ('sum', 1, {'': 'SumState', ".dtypes['w']": 'float32'}, (".value['w']", 'float32', (2,)))
    """
    return read_header("statefile.inspect", path)
