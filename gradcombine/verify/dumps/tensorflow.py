"""TensorFlow checkpoints, as tf.train.Checkpoint writes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import tensorflow as tf

from gradcombine.verify.dumps.entry import Dump, from_array

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def read(path: Path) -> Dump:
    """The numeric variables of a checkpoint, by the paths of the objects that held them.

    Args:
      path: the checkpoint's prefix; its .index file; or a directory, whose latest checkpoint is read.
    """
    prefix = tf.train.latest_checkpoint(path) if path.is_dir() else str(path).removesuffix(".index")
    reader = tf.train.load_checkpoint(prefix)
    dtypes = reader.get_variable_to_dtype_map()
    found = {}
    for key, shape in sorted(reader.get_variable_to_shape_map().items()):
        dtype = dtypes[key]
        if dtype in (tf.string, tf.variant, tf.resource):
            continue
        name = key.removesuffix(_SUFFIX)
        load = partial(_load, reader, key)
        found[name] = from_array(name, load, tuple(shape), np.dtype(dtype.as_numpy_dtype))
    return found


def _load(reader: tf.train.CheckpointReader, key: str) -> np.ndarray:
    return np.asarray(reader.get_tensor(key))
