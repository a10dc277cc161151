"""The leaves of a step: what of its arguments and results is an array, in which precision, and which rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import dtype_of, is_absent, loaded, owner
from gradcombine.errors import invalid
from gradcombine.types import Tree
from gradcombine.verify.compare.ulp import kind_of

NUMBERS = bool, int, float, complex
"""Of Python: they enter steps as they are."""


def flattened(value: Tree) -> tuple[list[Any], tree.Structure]:
    """The leaves of a tree, rows of TensorFlow and what is no array (names, functions) among them; its structure."""
    return tree.flatten(value, is_leaf=lambda node: _is_sparse(node) or _is_static(node) or is_torch(node))


def examples(batch: Tree) -> int:
    """How many examples a batch has: the length of the first axis, which all leaves but scalars share."""
    leaves, structure = flattened(batch)
    found: tuple[str, int] | None = None
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        shape = shape_of(leaf) if is_there(leaf) else ()
        if not shape:
            continue
        if found and shape[0] != found[1]:
            expected = f"{found[1]} examples along the first axis, as in {found[0] or 'the first leaf'}"
            raise invalid(expected, shape[0], path)
        found = found or (path, shape[0])
    if found is None or found[1] < 2:
        raise invalid("a batch of two examples or more", "none" if found is None else found[1])
    return found[1]


def as_kind(array: np.ndarray, like: Any) -> Any:
    """A NumPy array as an array of the framework of another one, uncommitted to any device."""
    backend = owner(like)
    if backend is not None and backend.name == "jax":
        made = sys.modules["jax"].numpy.array(array)
        sharding = getattr(like, "sharding", None)
        split = sharding is not None and len(sharding.device_set) > 1 and like.shape == array.shape
        return sys.modules["jax"].device_put(made, sharding) if split else made
    if backend is not None and backend.name == "tensorflow":
        return sys.modules["tensorflow"].constant(array)
    return array


def perturbation(seed: int, unit: float, zero: float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that changes each element at random by up to ``unit`` of itself; zeros by ``zero`` times it.

    No sign changes: states hold squares, and roots are taken of them.
    """
    rng = np.random.default_rng(seed)

    def changed(x: np.ndarray) -> np.ndarray:
        wide = widened(x)
        moves = unit * rng.uniform(-1, 1, x.shape)
        return np.where(wide == 0, zero * np.abs(moves), wide + moves * wide).astype(x.dtype)

    return changed


def copied(x: Any, wide: bool, noise: Callable[[np.ndarray], np.ndarray] | None) -> Any:
    """An array that a step may donate, wide or changed where asked."""
    if _is_key(x):
        random = sys.modules["jax"].random
        return random.wrap_key_data(array_of(x).copy(), impl=random.key_impl(x))
    if not is_there(x) or not _is_array(x):
        return x
    array = array_of(x)
    if not is_float_dtype(array.dtype):
        return as_kind(array.copy(), x)
    array = widened(array) if wide else array.copy()
    return as_kind(array if noise is None else noise(array), x)


def _is_array(x: Any) -> bool:
    """Whether NumPy can hold a leaf; a typed random key of JAX it can not."""
    return not isinstance(x, NUMBERS) and not _is_key(x)


def _is_key(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def are_counts(x: Any) -> bool:
    """Whether an array holds whole numbers alone, as a mask or numbers of tokens: no rounding has made them."""
    array = array_of(x) if is_float(x) else np.zeros(0)
    return bool(np.all(widened(array) == np.round(widened(array))))


def is_float(x: Any) -> bool:
    return is_there(x) and _is_array(x) and is_float_dtype(dtype_of(x))


def is_float_dtype(dtype: np.dtype) -> bool:
    return kind_of(dtype) != "integer"


def widened(x: np.ndarray) -> np.ndarray:
    """In float64, or complex128."""
    return x.astype(np.complex128 if kind_of(x.dtype) == "complex" else np.float64)


def as_floats(x: np.ndarray) -> np.ndarray:
    """In float64, complex numbers as pairs."""
    wide = widened(x)
    return wide if wide.dtype == np.float64 else wide[..., None].view(np.float64)


def _is_sparse(x: Any) -> bool:
    """Whether a node is TensorFlow's gradient of some rows, which counts as a dense one."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(x, tf.IndexedSlices)


def is_torch(x: Any) -> bool:
    """Whether a node is PyTorch's: a tensor, a module or an optimizer."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer))


def _is_static(x: Any) -> bool:
    """Whether a node is no array and holds none: a name, a type or a function, which enters steps as it is."""
    if isinstance(x, (str, bytes, type, Enum)):
        return True
    return callable(x) and owner(x) is None and all(backend.split(x) is None for backend in loaded())


def is_there(x: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return not _is_static(x) and not is_absent(x)


def array_of(x: Any) -> np.ndarray:
    if _is_sparse(x):
        x = sys.modules["tensorflow"].convert_to_tensor(x)
    if _is_key(x):
        x = sys.modules["jax"].random.key_data(x)
    return np.asarray(x)


def shape_of(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def taken(x: Any, rows: np.ndarray) -> Any:
    if not is_there(x) or not shape_of(x):
        return x
    return x[rows] if _is_key(x) else as_kind(array_of(x)[rows], x)
