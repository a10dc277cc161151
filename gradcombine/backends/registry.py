# pyright: standard
"""Finds the backend of a leaf. A backend is loaded only if its framework has already been imported."""

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
"""Leaf types that may be mixed with the arrays of any framework."""
_PLAIN = np.dtype(np.bool_)
_INT32 = np.dtype(np.int32)


@cache
def load(name: str) -> Backend:
    """Loads the backend ``"numpy"``, ``"jax"`` or ``"tensorflow"``; imports its framework."""
    with importing(name):
        return importlib.import_module(f"gradcombine.backends.{name}_backend").BACKEND


def load_collective(name: str) -> Callable[..., Collective]:
    """Loads the class of collectives of ``"jax"`` (takes axis names) or ``"tensorflow"``; imports the framework."""
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
    # A framework whose import is still running is in sys.modules too, but no array of it exists yet.
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


LEAF_TYPES: dict[type, Backend | None] = dict.fromkeys(
    {np.ndarray, bool, int, float, complex, *np.sctypeDict.values()} - {np.void}
)
"""Types whose instances are always leaves.

NumPy and Python types map to None, the array types of a framework to its backend: `owner` adds them on first use.
"""


def owner(leaf: Leaf) -> Backend | None:
    """The backend of a leaf, or None if no framework knows its type."""
    if (known := LEAF_TYPES.get(type(leaf))) is not None:
        return known
    # JAX's float0 ("no gradient") is a structured dtype in a NumPy array.
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
    """Whether a leaf is None or its framework's marker of "no gradient"."""
    backend = None if leaf is None else owner(leaf)
    return leaf is None or (backend is not None and backend.absent(leaf))


def require_numbers(leaf: Leaf, path: str) -> None:
    """Raises for an array without numbers: a JAX PRNG key, or float0. None passes."""
    if leaf is not None and is_absent(leaf):
        expected = "an array of numbers, or None (of a PRNG key: jax.random.key_data)"
        raise invalid(expected, f"an array of {leaf.dtype}", path)


def resolve(leaves: Iterable[Leaf]) -> Backend:
    """The common backend of all leaves; NumPy arrays and Python numbers mix with either framework.

    Raises:
      GradCombineError: for arrays of two frameworks.
    """
    common = load("numpy")
    for leaf in leaves:
        backend = LEAF_TYPES.get(type(leaf))
        if backend is None:
            # Repeats a check of `owner`: calling it would be half of all calls in a small update.
            if leaf is None or (isinstance(leaf, NUMPY_TYPES) and not getattr(leaf, "dtype", _PLAIN).names):
                continue
            backend = owner(leaf)
        if backend is None or backend is common or backend.name == "numpy":
            continue
        if common.name != "numpy":
            raise invalid("arrays of one framework", f"arrays of {common.name} and of {backend.name}")
        common = backend
    return common


def described(leaf: Leaf) -> Backend:
    """The backend of an array or spec; raises if it has none."""
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
    """Zeros of a leaf's shape and dtype that occupy no memory, as an argument of ``init``."""
    if is_absent(leaf):
        return leaf
    backend = described(leaf)
    with translate_errors("a shape that an array can have", received=lambda: backend.shape(leaf)):
        return np.broadcast_to(np.zeros((), backend.dtype(leaf)), backend.shape(leaf))


def holds_values(leaf: Leaf) -> bool:
    """Whether a leaf holds values of its dtype: false for specs and for Python integers that do not fit int32."""
    if isinstance(leaf, int):
        return leaf.bit_length() < 32
    return hasattr(leaf, "__add__")  # a framework's array, or a number


def is_array_of(leaf: Leaf, dtype: np.dtype, shape: tuple[int, ...] | None = None) -> bool:
    """Whether a leaf holds values of this dtype, in any byte order, and (unless None) has this shape."""
    backend = owner(leaf)
    if backend is None or not holds_values(leaf):
        return False
    actual = backend.dtype(leaf)
    # NumPy takes microseconds to make a dtype's name, and every call of a reduction checks every leaf.
    return (actual == dtype or actual.name == dtype.name) and (shape is None or backend.shape(leaf) == shape)


def in_words(leaf: Leaf) -> str:
    """Describes a leaf in a message: an array by its dtype and shape."""
    backend = owner(leaf)
    if backend is None or not holds_values(leaf):
        return shown(leaf)
    return f"{backend.dtype(leaf)} of shape {backend.shape(leaf)}"


def require_count(leaf: Leaf, path: str) -> None:
    """Raises unless a leaf is an int32 scalar, the type of the counters in states."""
    if not is_array_of(leaf, _INT32, ()):
        raise invalid("int32 of shape ()", in_words(leaf), path)


def require_scalar(expected: str, leaf: Leaf, kinds: str, path: str = "") -> None:
    """Raises unless a leaf is a number or scalar array whose ``dtype.kind`` is in ``kinds``."""
    backend = owner(leaf)
    is_scalar = backend is not None and holds_values(leaf) and backend.shape(leaf) == ()
    if backend is None or not is_scalar or np.dtype(backend.dtype(leaf)).kind not in kinds:
        raise invalid(expected, in_words(leaf), path)
