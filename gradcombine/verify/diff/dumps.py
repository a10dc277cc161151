# pyright: standard
"""Readers of files and checkpoints that contain arrays. A format's library is imported when such a file is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, cast

import ml_dtypes
import numpy as np

from gradcombine.errors import GradCombineError, first_line, importing, invalid, operation, require_path, shown
from gradcombine.formats import Entry, from_array, from_blocks, holds_numbers, npz, safetensors, unread
from gradcombine.verify.diff import pytorch

Dump: TypeAlias = Mapping[str, Entry]
"""The entries of a file by name."""


def require_dump(value: object) -> None:
    """Raises for anything but a `Dump`."""
    entries = cast("Mapping[str, object]", value).values() if isinstance(value, Mapping) else [value]
    if not all(isinstance(each, Entry) for each in entries):
        raise invalid("dumps, as open_dump returns them", shown(value))


EXPECTED = (
    "a .npz, .safetensors, .pt, .pth, .h5 or .weights.h5 file, shards with their index, a tf.train checkpoint or an "
    "Orbax checkpoint"
)


@operation("diff")
def open_dump(path: str | Path) -> Dump:
    """Opens a file or checkpoint; its arrays are read on demand.

    Args:
      path: an .npz, .safetensors, .h5 or .weights.h5 file; a .pt, .pth, .bin or .ckpt file of torch.save; the
        .index.json file of shards, or their directory; the prefix of a tf.train checkpoint, its .index file or its
        directory; or an Orbax checkpoint's directory.

    Raises:
      GradCombineError: for a missing path, an unknown format, a missing package, and a damaged file.
    """
    path = require_path(EXPECTED, path)
    file_format = detect(path)
    if file_format is None:
        received = str(path) if path.exists() else f"{path}, which does not exist"
        raise invalid(EXPECTED, received)
    try:
        with importing(f"to read {path.name}"):
            return _READERS[file_format](path)
    except (GradCombineError, MemoryError):
        raise
    except Exception as error:
        # Libraries raise different errors for a damaged file, from zlib.error to tf.errors.DataLossError.
        raise invalid(f"{path.name} to be a complete {file_format} file", first_line(error)) from error


_INDEX = ".index.json"
_SUFFIXES = {
    ".npz": "npz",
    ".safetensors": "safetensors",
    _INDEX: "sharded",
    ".pt": "torch",
    ".pth": "torch",
    ".h5": "h5",
    ".hdf5": "h5",
}
_TORCH_ARCHIVES = (".bin", ".ckpt")
"""Suffixes of torch.save files on the Hugging Face Hub and from Lightning. Other files have them, too."""


def detect(path: Path) -> str | None:
    """The format of a path by its name and neighboring files; None if unknown."""
    for suffix, file_format in _SUFFIXES.items():
        if path.name.endswith(suffix) and path.is_file():
            return file_format
    if path.name.endswith(_TORCH_ARCHIVES) and path.is_file() and pytorch.is_archive(path):
        return "torch"
    if path.is_dir():
        if _indices(path):
            return "sharded"
        if (path / "checkpoint").is_file():
            return "tensorflow"
        if any((child / "_METADATA").is_file() for child in (path, *filter(Path.is_dir, sorted(path.iterdir())))):
            return "orbax"
        return None
    index = path if path.name.endswith(".index") else path.with_name(f"{path.name}.index")
    return "tensorflow" if index.is_file() else None


# Shards with an index, as on the Hugging Face Hub.


def _indices(directory: Path) -> list[Path]:
    """The index files of a directory: those of .safetensors shards if there are any."""
    return sorted(directory.glob(f"*.safetensors{_INDEX}")) or sorted(directory.glob(f"*.bin{_INDEX}"))


def _is_beside(file: Path, other: Path) -> bool:
    """Whether two files are in one directory, or are links into one directory, as in the Hub's cache."""
    target = file.resolve()
    return target.is_relative_to(other.parent.resolve()) or target.parent == other.resolve().parent


def _read_sharded(path: Path) -> Dump:
    """The tensors of all shards, in the order of the index.

    Args:
      path: the index, which maps each tensor to a file in its directory; or the directory.
    """
    indices = _indices(path) if path.is_dir() else [path]
    if len(indices) > 1:
        raise invalid("one index", ", ".join(each.name for each in indices), path.name)
    weight_map: Any = safetensors.parsed(indices[0].name, indices[0].read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise invalid("a weight_map of tensors' names and their files' names", indices[0].name)
    shards: dict[str, Dump] = {}
    for shard in dict.fromkeys(weight_map.values()):
        # An untrusted index, or a link, must not lead out of the index's directory.
        file = indices[0].with_name(shard) if Path(shard).name == shard else None
        if file is None or detect(file) not in ("safetensors", "torch"):
            raise invalid(f"the shard {shard} beside {indices[0].name}", "none")
        if not _is_beside(file, indices[0]):
            raise invalid(f"the shard {shard} beside {indices[0].name}", "a link to elsewhere")
        shards[shard] = open_dump(file)
    for name in dict.fromkeys(chain(weight_map, *shards.values())):
        holders = [shard for shard, entries in shards.items() if name in entries]
        if holders != [weight_map.get(name)]:
            known = name in weight_map
            expected = f"a tensor in one shard, {weight_map[name]}" if known else f"a tensor of {indices[0].name}"
            raise invalid(expected, f"it in {', '.join(holders)}" if holders else "none in any shard", name)
    return {name: shards[shard][name] for name, shard in weight_map.items()}


# HDF5, the format of Keras' .weights.h5.

_MAX_COMPRESSION = 1 << 16
"""No writer reaches a higher ratio; a dataset that claims one would take forever to read."""

_MOST_LEVELS = 100
"""Limit of nested groups. Keras' files have a few levels."""

_MOST_LINKS = 16
"""HDF5's default limit of links in one path."""


def _read_hdf5(path: Path) -> Dump:
    """The datasets of an HDF5 file by path. The file stays open as long as one of its entries exists.

    Links are followed within this file, and to files in its directory.
    """
    import h5py

    return {each.name: each for each in _hdf5_entries(path, h5py.File(path), "", set())}


def _hdf5_entries(path: Path, group: Any, prefix: str, seen: set[Any]) -> Iterator[Entry]:
    import h5py

    seen.add(group.id)
    for key in group:
        name, link = prefix + key, group.get(key, getlink=True)
        if reason := _forbidden(path, group, key, set()):
            yield unread(name, reason)
            continue
        try:
            node = group[key]
        except (KeyError, RuntimeError, OSError):
            if isinstance(link, h5py.HardLink):
                raise
            yield unread(name, "a dangling link, or one that leads to itself")
            continue
        if isinstance(node, h5py.Dataset):
            yield _hdf5_entry(name, node)
        elif not isinstance(node, h5py.Group):
            yield unread(name, "a type without an array")
        elif node.id in seen:
            # Links may form cycles, or an exponential number of paths.
            yield unread(name, "a second link to a group")
        elif prefix.count("/") == _MOST_LEVELS:
            yield unread(name, f"a group nested in more than {_MOST_LEVELS} others")
        else:
            yield from _hdf5_entries(path, node, f"{name}/", seen)


def _forbidden(path: Path, group: Any, key: str, seen: set[Any]) -> str:
    """Why a link may not be followed, empty if it may: it leads to a file elsewhere, which must not even be opened.

    HDF5 resolves a chain of links in one call, and would wait forever for a FIFO among their files.
    """
    import h5py

    link, here = group.get(key, getlink=True), (group.file.filename, group.name, key)
    if not isinstance(link, (h5py.ExternalLink, h5py.SoftLink)) or here in seen:
        return ""
    seen.add(here)
    if len(seen) > _MOST_LINKS:
        return f"a chain of more than {_MOST_LINKS} links"
    node: Any = group
    try:
        if isinstance(link, h5py.ExternalLink):
            file = path.parent / link.filename
            if not file.is_file() or not _is_beside(file, path):
                reason = "is elsewhere" if file.is_file() else "does not exist"
                return f"a link to another file, {link.filename}, which {reason}"
            node = h5py.File(file)
        node = node["/"] if link.path.startswith("/") else node
        for part in filter(None, link.path.split("/")):
            if reason := _forbidden(path, node, part, seen):
                return reason
            node = node[part]
            if not isinstance(node, h5py.Group):
                return ""
    except (KeyError, RuntimeError, OSError):  # dangling, circular, or a file that is not HDF5: opening it will raise
        return ""
    return ""


def _hdf5_entry(name: str, node: Any) -> Entry:
    import h5py

    dtype = node.dtype
    if dtype == np.dtype("V2") and node.attrs.get("dtype") == "bfloat16":
        # Keras writes bfloat16 as opaque 2-byte words, marked by an attribute.
        dtype = np.dtype(ml_dtypes.bfloat16)
    if node.shape is None:
        return unread(name, "a dataset without a shape")
    if not holds_numbers(dtype):
        return unread(name, f"elements of dtype {dtype}", node.shape)
    if node.is_virtual or node.external:
        return unread(name, "a dataset whose contents are in other files", node.shape)
    if node.nbytes > _MAX_COMPRESSION * (node.id.get_storage_size() + 4096):
        return unread(name, f"{node.nbytes} bytes in {node.id.get_storage_size()} of the file", node.shape)
    if node.size and node.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
        return unread(name, "a dataset that was not written completely", node.shape)
    return from_blocks(name, node.shape, dtype, lambda index: np.asarray(node[index]).view(dtype))


# TensorFlow checkpoints, as written by tf.train.Checkpoint.

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Key of the serialized object graph, which is not a leaf."""


def _read_tensorflow(path: Path) -> Dump:
    """The variables of a checkpoint by object path.

    Args:
      path: the checkpoint's prefix, its .index file, or a directory, whose latest checkpoint is read.
    """
    import tensorflow as tf

    prefix = tf.train.latest_checkpoint(path) if path.is_dir() else str(path).removesuffix(".index")
    try:
        reader = tf.train.load_checkpoint(prefix)
    except MemoryError as error:  # TensorFlow allocates a damaged length before it verifies the checksum
        received = f"{path}, whose index asks for more memory than there is"
        raise invalid("a TensorFlow checkpoint", received) from error
    dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
    entries = {}
    for key in sorted(shapes):
        if key == _GRAPH:
            continue
        short = key.removesuffix(_SUFFIX)
        name = key if short != key and short in shapes else short
        shape, dtype = tuple(shapes[key]), np.dtype(dtypes[key].as_numpy_dtype)
        if holds_numbers(dtype):
            entries[name] = from_array(name, shape, dtype, lambda key=key: np.asarray(reader.get_tensor(key)))
        else:
            entries[name] = unread(name, f"elements of dtype {dtypes[key].name}", shape)
    return entries


# Orbax checkpoints, the usual format of JAX programs.

BATCH = 1 << 28
"""Approximate number of bytes to restore at a time; each restore traverses the entire tree."""


def _read_orbax(path: Path) -> Dump:
    """The arrays and numbers of a checkpoint directory by path in the saved tree."""
    path = path.resolve()
    if (path / "_METADATA").exists():
        return {leaf.name: leaf for leaf in _orbax_entries(path)}
    folders = [child for child in sorted(path.iterdir()) if child.is_dir()]
    trees = [child for child in folders if (child / "_METADATA").exists()]
    if len(trees) != 1:
        raise invalid("a checkpoint of one tree", f"{[child.name for child in trees]}", path.name)
    # With a single tree, its name is not part of the leaves' names.
    others = [child.name for child in folders if child != trees[0]]
    items = {f"{name} (item)": unread(name, "an item that is not a tree") for name in others}
    return {leaf.name: leaf for leaf in _orbax_entries(trees[0])} | items


def _orbax_entries(directory: Path) -> Iterator[Entry]:
    import jax
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata: Any = checkpointer.metadata(directory)
    tree = metadata.item_metadata.tree
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_orbax_leaf)[0]
    store = _OrbaxStore(directory, tree, leaves)
    names = ["/".join(str(_plain_key(key)) for key in keys) for keys, _ in leaves]
    with_name, with_file = Counter(names), Counter(leaf.name for _, leaf in leaves)
    for name, (keys, leaf) in zip(names, leaves, strict=True):
        name = name if with_name[name] == 1 else jax.tree_util.keystr(keys)
        dtype = getattr(leaf, "dtype", None)
        shape = tuple(getattr(leaf, "shape", None) or ())
        if with_file[leaf.name] > 1:
            # {"a": {"b": x}, "a.b": y} is one array on disk; Orbax has lost the other.
            yield unread(name, f"one array, {leaf.name}, for {with_file[leaf.name]} leaves", shape)
        elif dtype is None or not holds_numbers(np.dtype(dtype)):
            yield unread(name, f"a leaf of type {type(leaf).__name__.removesuffix('Metadata')}", shape)
        else:
            yield from_array(name, shape, np.dtype(dtype), partial(store.load, keys))


class _OrbaxStore:
    """Restores leaves in batches; the last batch is cached."""

    def __init__(self, directory: Path, tree: Any, leaves: list[tuple[Any, Any]]) -> None:
        self._directory, self._tree = directory, tree
        self._batches: dict[Any, int] = {}
        offset = 0
        for keys, leaf in leaves:
            self._batches[keys] = offset // BATCH
            shape, dtype = getattr(leaf, "shape", None) or (), getattr(leaf, "dtype", None) or np.float64
            offset += int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
        self._number, self._batch = -1, None

    def load(self, keys: Any) -> np.ndarray:
        if self._number != self._batches[keys]:
            self._number, self._batch = self._batches[keys], None
            self._batch = self._restored(self._number)
        node: Any = self._batch
        for key in keys:
            node = node[_plain_key(key)]
        return np.asarray(node)

    def _restored(self, number: int) -> Any:
        """The tree with the leaves of one batch restored, and placeholders for the others."""
        import jax
        import orbax.checkpoint as ocp

        def restore_args(keys: Any, leaf: Any) -> Any:
            in_batch = self._batches[keys] == number and hasattr(leaf, "dtype")
            return ocp.RestoreArgs(restore_type=np.ndarray) if in_batch else ocp.PLACEHOLDER

        arguments = jax.tree_util.tree_map_with_path(restore_args, self._tree, is_leaf=_is_orbax_leaf)
        item = jax.tree.map(lambda x: x if x is ocp.PLACEHOLDER else 0, arguments)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(self._directory, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments))


def _is_orbax_leaf(node: Any) -> bool:
    return hasattr(node, "name") and hasattr(node, "directory")


def _plain_key(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))


_READERS = {
    "npz": npz.read,
    "safetensors": lambda path: safetensors.read(path).entries,
    "sharded": _read_sharded,
    "torch": pytorch.read,
    "h5": _read_hdf5,
    "tensorflow": _read_tensorflow,
    "orbax": _read_orbax,
}
