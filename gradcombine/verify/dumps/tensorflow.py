"""TensorFlow checkpoints, as tf.train.Checkpoint writes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import tensorflow as tf

from gradcombine.formats import Entry, entry, from_array, unread

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""How objects hang together: the file's own bookkeeping, which is no leaf."""


def read(path: Path) -> dict[str, Entry]:
    """The variables of a checkpoint, by the paths of the objects that held them.

    Args:
      path: the checkpoint's prefix; its .index file; or a directory, whose latest checkpoint is read.
    """
    prefix = tf.train.latest_checkpoint(path) if path.is_dir() else str(path).removesuffix(".index")
    reader = tf.train.load_checkpoint(prefix)
    dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
    found = {}
    for key in sorted(shapes):
        if key == _GRAPH:
            continue
        short = key.removesuffix(_SUFFIX)
        name = key if short != key and short in shapes else short
        shape, dtype = tuple(shapes[key]), np.dtype(dtypes[key].as_numpy_dtype)
        if entry.holds_numbers(dtype):
            found[name] = from_array("diff", name, shape, dtype, partial(_load, reader, key))
        else:
            found[name] = unread("diff", name, f"elements of dtype {dtypes[key].name}", shape)
    return found


def _load(reader: tf.train.CheckpointReader, key: str) -> np.ndarray:
    return np.asarray(reader.get_tensor(key))
