# pyright: standard
"""Finds the backend of a leaf, and loads a backend only where its framework is loaded already."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from gradcombine.backends.protocol import Backend, Collective
from gradcombine.errors import importing, invalid, shown, translate_errors
from gradcombine.types import Array, Leaf

FRAMEWORKS = ("jax", "tensorflow")
NUMPY_TYPES = (np.ndarray, np.generic, bool, int, float, complex)
"""Of leaves that go along with the arrays of any framework."""
_PLAIN = np.dtype(np.bool_)
_INT32 = np.dtype(np.int32)


@cache
def load(name: str) -> Backend:
    """The backend called ``"numpy"``, ``"jax"`` or ``"tensorflow"``; imports its framework."""
    with importing(name):
        return importlib.import_module(f"gradcombine.backends.{name}_backend").BACKEND


def load_collective(name: str) -> Callable[..., Collective]:
    """The factory of collectives of ``"jax"``, from axis names, or of ``"tensorflow"``; imports the framework."""
    with importing(f"the replicas of {name}"):
        return importlib.import_module(f"gradcombine.backends.{name}_collective").COLLECTIVE


_LOADED: dict[str, Backend] = {}


def loaded() -> list[Backend]:
    """The backends of the frameworks that the program has imported."""
    for name in FRAMEWORKS:
        if name not in _LOADED and _imported(name):
            _LOADED[name] = load(name)
    return list(_LOADED.values())


def _imported(name: str) -> bool:
    # A framework in the middle of its own import is in sys.modules too, but owns no arrays yet.
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


LEAF_TYPES: dict[type, Backend | None] = dict.fromkeys(
    {np.ndarray, bool, int, float, complex, *np.sctypeDict.values()} - {np.void}
)
"""Types whose every instance is a leaf: None for those of NumPy and Python; a framework's, as they are met."""


def owner(leaf: Leaf) -> Backend | None:
    """The backend of one leaf; None for what belongs to no framework."""
    if (known := LEAF_TYPES.get(type(leaf))) is not None:
        return known
    # JAX's float0, which stands for "no gradient", is a structured dtype of NumPy's own arrays.
    if isinstance(leaf, NUMPY_TYPES) and not getattr(leaf, "dtype", _PLAIN).names:
        return load("numpy")
    for backend in loaded():
        if backend.owns(leaf):
            if not isinstance(leaf, NUMPY_TYPES):
                LEAF_TYPES[type(leaf)] = backend
            return backend
    numpy = load("numpy")
    return numpy if numpy.owns(leaf) else None


def is_absent(leaf: Leaf) -> bool:
    """Whether a leaf stands for "no gradient": None, or what its framework has for it."""
    backend = None if leaf is None else owner(leaf)
    return leaf is None or (backend is not None and backend.absent(leaf))


def resolve(leaves: Iterable[Leaf]) -> Backend:
    """The one backend of all leaves; NumPy arrays and Python numbers go along with either framework.

    Raises:
      GradCombineError: for arrays of two frameworks.
    """
    found = load("numpy")
    for leaf in leaves:
        backend = LEAF_TYPES.get(type(leaf))
        if backend is None:
            # As in `owner`, which would be half of the calls of a small update.
            if leaf is None or (isinstance(leaf, NUMPY_TYPES) and not getattr(leaf, "dtype", _PLAIN).names):
                continue
            backend = owner(leaf)
        if backend is None or backend is found or backend.name == "numpy":
            continue
        if found.name != "numpy":
            raise invalid("arrays of one framework", f"arrays of {found.name} and of {backend.name}")
        found = backend
    return found


def described(leaf: Leaf) -> Backend:
    """The backend of an array or spec that `gradcombine.tree.flatten` has let through."""
    backend = owner(leaf)
    if backend is None:
        raise invalid("an array or a number", shown(leaf))
    return backend


def dtype_of(array: Array) -> np.dtype:
    """The NumPy dtype of an array of any framework."""
    return described(array).dtype(array)


def shape_of(array: Array) -> tuple[int, ...]:
    """The shape of an array of any framework."""
    return described(array).shape(array)


def placeholder(leaf: Leaf) -> Leaf:
    """A leaf as `init` may be given it: of zeros that take no memory, in the leaf's shape and dtype."""
    if is_absent(leaf):
        return leaf
    backend = described(leaf)
    with translate_errors("a shape that an array can have", received=lambda: backend.shape(leaf)):
        return np.broadcast_to(np.zeros((), backend.dtype(leaf)), backend.shape(leaf))


def holds_values(leaf: Leaf) -> bool:
    """Whether a leaf has values of its dtype: a spec has none, and a Python integer may be too wide for its own."""
    if isinstance(leaf, int):
        return leaf.bit_length() < 32
    return hasattr(leaf, "__add__")  # a framework's array, or a number


def is_array_of(leaf: Leaf, dtype: np.dtype, shape: tuple[int, ...] | None = None) -> bool:
    """Whether a leaf holds values of a dtype, in any byte order, in a shape if one is given."""
    backend = owner(leaf)
    if backend is None or not holds_values(leaf):
        return False
    own = backend.dtype(leaf)
    # Names take NumPy microseconds, and each call of a reduction asks for each leaf.
    return (own == dtype or own.name == dtype.name) and (shape is None or backend.shape(leaf) == shape)


def in_words(leaf: Leaf) -> str:
    """A leaf as messages name it: an array by its shape and dtype."""
    backend = owner(leaf)
    if backend is None or not holds_values(leaf):
        return shown(leaf)
    return f"{backend.dtype(leaf)} of shape {backend.shape(leaf)}"


def require_count(leaf: Leaf, path: str) -> None:
    """Refuses what is not an int32 scalar, as states count in."""
    if not is_array_of(leaf, _INT32, ()):
        raise invalid("int32 of shape ()", in_words(leaf), path)


def require_scalar(expected: str, leaf: Leaf, kinds: str, path: str = "") -> None:
    """Refuses what is not a scalar array or number of one of these NumPy kinds of dtype."""
    backend = owner(leaf)
    whole = backend is not None and holds_values(leaf) and backend.shape(leaf) == ()
    if backend is None or not whole or np.dtype(backend.dtype(leaf)).kind not in kinds:
        raise invalid(expected, in_words(leaf), path)
