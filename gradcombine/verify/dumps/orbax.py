"""Orbax checkpoints, the usual ones of JAX programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gradcombine.verify.dumps.entry import Dump, from_array


def read(path: Path) -> Dump:
    """The arrays and numbers of a checkpoint directory, by their paths in the saved tree."""
    directory = item(path)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata: Any = checkpointer.metadata(directory)
    tree = metadata.item_metadata.tree
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "dtype"))
    found = {}
    for keys, leaf in leaves:
        if getattr(leaf, "dtype", None) is None:
            continue
        path_keys = tuple(_key(key) for key in keys)
        name = "/".join(map(str, path_keys))
        shape = tuple(getattr(leaf, "shape", None) or ())
        found[name] = from_array(name, partial(_load, directory, tree, keys), shape, np.dtype(leaf.dtype))
    return found


def item(path: Path) -> Path:
    """The directory that holds the tree: the given one, or the only item of a checkpoint with named items."""
    path = path.resolve()
    if (path / "_METADATA").exists():
        return path
    inside = [child for child in sorted(path.iterdir()) if (child / "_METADATA").exists()]
    return inside[0] if len(inside) == 1 else path


def _load(directory: Path, tree: Any, wanted: Any) -> np.ndarray:
    """One leaf; the others stay on the disk."""

    def ask(keys: Any, leaf: Any) -> Any:
        del leaf
        return ocp.RestoreArgs(restore_type=np.ndarray) if keys == wanted else ocp.PLACEHOLDER

    arguments = jax.tree_util.tree_map_with_path(ask, tree, is_leaf=lambda node: hasattr(node, "dtype"))
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        restored = checkpointer.restore(
            directory,
            args=ocp.args.PyTreeRestore(
                item=jax.tree.map(lambda x: x if x is ocp.PLACEHOLDER else 0, arguments), restore_args=arguments
            ),
        )
    for key in wanted:
        restored = restored[_key(key)]
    return np.asarray(restored)


def _key(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
