"""Leaves of a step's arguments and results: which of them are arrays, conversions of dtype and framework, rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import dtype_of, is_absent, loaded, owner
from gradcombine.errors import invalid
from gradcombine.types import Tree
from gradcombine.verify.compare.ulp import kind_of, rounding_unit

NUMBERS = bool, int, float, complex
"""Python numbers, which are passed to steps unchanged."""

ZERO = 2.0**-40
"""Size of a leaf, relative to the largest one, that is 0 up to rounding."""

CONSTANT = 2.0**-20
"""Difference of the changes by different examples, relative to the largest change, of a parameter without gradients."""


def flattened(value: Tree) -> tuple[list[Any], tree.Structure]:
    """Flattens a tree; IndexedSlices, PyTorch objects and static nodes (names, functions) are leaves."""
    return tree.flatten(value, is_leaf=lambda node: _is_sparse(node) or _is_static(node) or is_torch(node))


def examples(batch: Tree) -> int:
    """Returns the length of the first axis, which all leaves except scalars share."""
    leaves, structure = flattened(batch)
    first: tuple[str, int] | None = None
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        shape = shape_of(leaf) if is_present(leaf) else ()
        if not shape:
            continue
        if first and shape[0] != first[1]:
            expected = f"{first[1]} examples along the first axis, as in {first[0] or 'the first leaf'}"
            raise invalid(expected, shape[0], path)
        first = first or (path, shape[0])
    if first is None or first[1] < 2:
        raise invalid("a batch of two examples or more", "none" if first is None else first[1])
    return first[1]


def as_framework_of(array: np.ndarray, like: Any) -> Any:
    """Converts a NumPy array to the framework of ``like``, with its sharding if that spans several devices."""
    backend = owner(like)
    if backend is not None and backend.name == "jax":
        converted = sys.modules["jax"].numpy.array(array)
        sharding = getattr(like, "sharding", None)
        sharded = sharding is not None and len(sharding.device_set) > 1 and like.shape == array.shape
        return sys.modules["jax"].device_put(converted, sharding) if sharded else converted
    if backend is not None and backend.name == "tensorflow":
        return sys.modules["tensorflow"].constant(array)
    return np.asarray(array)  # arithmetic on arrays of shape () makes np.float64, a Python number


Noise: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""Function that perturbs an array."""


def perturbation(seed: int, unit: float, zero: float = 0.0) -> Noise:
    """Returns a function that perturbs each element by a random relative error of up to ``unit``.

    Zeros become positive numbers of up to ``zero * unit``. No sign changes, because optimizer states hold squares whose
    root is taken. Infinite and the largest finite numbers, as in the mask of attention, do not change.
    """
    rng = np.random.default_rng(seed)

    def perturb(x: np.ndarray) -> np.ndarray:
        wide = widened(x)
        errors = unit * rng.uniform(-1, 1, x.shape)
        with np.errstate(all="ignore"):
            perturbed = np.where(wide == 0, zero * np.abs(errors), wide + errors * wide).astype(x.dtype)
        return np.where(np.isfinite(perturbed), perturbed, x)

    return perturb


def change(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns the change of each element; the new value where the old one is infinite, as that of a best loss may be.

    An infinite element that stays, as in the mask of attention, has a change of 0.
    """
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(old), np.where(new == old, 0, new), new - old)


def constant(changes: Sequence[np.ndarray], others: Sequence[Sequence[np.ndarray]], of: Sequence[int]) -> list[Any]:
    """Returns whether each element changes as in the others, relative to the largest change in the leaves ``of``.

    No element does if there are no others.
    """
    allowed = CONSTANT * max(np.abs(changes[i]).max(initial=0) for i in of)
    found = [np.full(x.shape, bool(others)) for x in changes]
    for other in others:
        found = [same & (np.abs(x - y) <= allowed) for same, x, y in zip(found, changes, other, strict=True)]
    return found


def changed(old: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Returns the new value of each element, from its `change`."""
    return np.where(np.isinf(old) & (by != 0), by, old + by)


def finite(x: np.ndarray) -> np.ndarray:
    """Returns the array with 0 in place of infinities."""
    return np.where(np.isinf(x), np.zeros_like(x), x)


def copied(x: Any, wide: bool, noise: Noise | None) -> Any:
    """Returns a copy that a step may donate, optionally in float64 and perturbed by ``noise``."""
    if _is_key(x):
        random = sys.modules["jax"].random
        return random.wrap_key_data(array_of(x).copy(), impl=random.key_impl(x))
    if not is_present(x) or not _is_array(x):
        return x
    array = array_of(x)
    if not is_float_dtype(array.dtype):
        return as_framework_of(array.copy(), x)
    array = widened(array) if wide else array.copy()
    return as_framework_of(array if noise is None else noise(array), x)


def _is_array(x: Any) -> bool:
    """Whether a leaf converts to NumPy without loss, unlike a typed JAX random key."""
    return not isinstance(x, NUMBERS) and not _is_key(x)


def _is_key(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def but_exact(noise: Noise, like: Any) -> Noise:
    """Returns ``noise`` that leaves elements without a rounding error unchanged.

    These are all elements of a mask or of counts, and numbers like 3.5 and -1, with at most half the digits of the
    dtype.
    """
    if not is_float(like) or np.iscomplexobj(array := widened(array_of(like))):
        return noise
    digits = np.frexp(array)[0] * 2.0 ** round(-math.log2(rounding_unit(dtype_of(like))) / 2)
    exact = bool(np.all(array == np.round(array))) or digits == np.round(digits)
    return lambda x: np.where(exact, x, noise(x)).astype(x.dtype)


def is_float(x: Any) -> bool:
    return is_present(x) and _is_array(x) and is_float_dtype(dtype_of(x))


def is_integers(x: Any) -> bool:
    return is_present(x) and _is_array(x) and not is_float_dtype(dtype_of(x))


def is_quantized(x: np.ndarray) -> bool:
    """Whether an array of integers may hold quantized numbers, as the state of an 8-bit optimizer."""
    return x.dtype.kind in "iu" and x.itemsize == 1 and x.size > 1


def is_float_dtype(dtype: np.dtype) -> bool:
    return dtype.kind not in "OSU" and kind_of(dtype) != "integer"  # texts are passed unchanged


def widened(x: np.ndarray) -> np.ndarray:
    """Returns the array in float64 or complex128."""
    return x.astype(np.complex128 if kind_of(x.dtype) == "complex" else np.float64)


def as_floats(x: np.ndarray) -> np.ndarray:
    """Returns the array in float64, with complex numbers as pairs along a last axis."""
    wide = widened(x)
    return wide if wide.dtype == np.float64 else wide[..., None].view(np.float64)


def floats_in(value: Tree) -> list[np.ndarray]:
    """Returns the float leaves of a tree, in float64, with 0 in place of infinities."""
    arrays = [array_of(x) for x in flattened(value)[0] if is_present(x)]
    return [finite(as_floats(x)) for x in arrays if is_float_dtype(x.dtype)]


def from_floats(floats: np.ndarray, like: Any, wide: bool) -> np.ndarray:
    """Inverts `as_floats`; the result has the dtype of ``like``, or is of its kind in 64 or 128 bits."""
    dtype = dtype_of(like)
    array = np.ascontiguousarray(floats).view(np.complex128)[..., 0] if kind_of(dtype) == "complex" else floats
    return array if wide else array.astype(dtype)


def flat(arrays: Iterable[np.ndarray | None]) -> np.ndarray:
    """Returns the elements of all arrays as one float64 vector."""
    return np.concatenate([np.zeros(0), *(x.ravel().astype(np.float64) for x in arrays if x is not None)])


def rms(x: np.ndarray) -> float:
    """Returns the root mean square of float64 numbers of any size."""
    largest = float(np.abs(x).max(initial=0))
    return float(largest * np.sqrt(np.mean(np.square(x / largest)))) if largest else 0.0


def _is_sparse(x: Any) -> bool:
    """Whether a node is a tf.IndexedSlices gradient, which is treated as a dense array."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(x, tf.IndexedSlices)


def is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    objects = torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler
    return isinstance(x, (torch.Tensor, *objects))


def _is_static(x: Any) -> bool:
    """Whether a node is passed to steps unchanged because it holds no arrays: a name, a type or a function."""
    if isinstance(x, (str, bytes, type, Enum)):
        return True
    return callable(x) and owner(x) is None and all(backend.split(x) is None for backend in loaded())


def is_present(x: Any) -> bool:
    """Whether a leaf is an array, also of typed random keys, or a number."""
    return _is_key(x) or not (_is_static(x) or is_absent(x))


def array_of(x: Any) -> np.ndarray:
    if _is_sparse(x):
        x = sys.modules["tensorflow"].convert_to_tensor(x)
    if _is_key(x):
        x = sys.modules["jax"].random.key_data(x)
    return as_numpy(x)


def as_numpy(leaf: Any) -> np.ndarray:
    """A leaf as a NumPy array, which NumPy itself cannot make of TensorFlow's bfloat16 scalars."""
    backend = owner(leaf)
    value = None if backend is None else backend.concrete(leaf)
    return np.asarray(leaf if value is None else value)


REPEATED = 64
"""Units of rounding by which a repeated result, or one on another device, may differ: parallel additions have no fixed
order."""


def differs_on_devices(x: Any) -> bool:
    """Whether the copies of a replicated JAX array differ between the devices of this process."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(x, jax.Array) or _is_key(x) or not x.is_fully_replicated:
        return False
    base, *copies = (as_floats(np.asarray(shard.data)) for shard in x.addressable_shards)
    allowed = REPEATED * rounding_unit(dtype_of(x)) * rms(finite(base))
    far = (rms(finite(y) - finite(base)) if np.array_equal(np.isinf(y), np.isinf(base)) else np.inf for y in copies)
    return not all(y <= allowed for y in far)  # also for NaN


def shape_of(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def taken(x: Any, rows: np.ndarray) -> Any:
    if not is_present(x) or not shape_of(x):
        return x
    return x[rows] if _is_key(x) else as_framework_of(array_of(x)[rows], x)


def over(distance: float, allowed: float) -> float:
    if distance == 0:
        return 0.0
    return distance / allowed if allowed else float("inf")
