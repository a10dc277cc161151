# pyright: standard
"""Array arguments of a step: conversion, checks, placement on devices, and errors of donation and lost processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gradcombine import tree
from gradcombine.backends.jax_backend import canonical
from gradcombine.backends.numpy_backend import NARROW
from gradcombine.backends.registry import in_words, is_absent, shape_of
from gradcombine.errors import (
    GradCombineError,
    importing,
    invalid,
    require_equal,
    require_given,
    require_tuple,
    require_type,
    shown,
    translate_errors,
    within,
)
from gradcombine.reductions import dtypes
from gradcombine.types import Leaf, Tree

if TYPE_CHECKING:
    import optax

_LOST_PEER_WORDS = ("gloo", "connection", "deadline", "unavailable", "heartbeat", "nccl", "peer")


def require_tree(*values: Tree) -> None:
    """Raises for trees that JAX cannot flatten or that `require_levels` rejects."""
    _flattened(values)


def _flattened(values: Tree) -> tuple[list[Tree], Any]:
    require_levels(values)
    with translate_errors("trees that JAX can flatten"):
        return jax.tree.flatten(values)


def require_levels(*values: Tree) -> None:
    """Raises for cyclic containers, dicts with unsortable keys, and arrays of dtypes that XLA lacks.

    JAX must not see them: after the former, it leaves less recursion depth to later calls; for such arrays, XLA aborts
    the process.
    """

    def is_leaf(x: Leaf) -> bool:
        if type(x) in (dict, defaultdict):
            expected = "dicts with keys that JAX can sort"
            with translate_errors(expected, received=lambda: f"the keys {', '.join(map(shown, x))}"):
                sorted(x)
        return not isinstance(x, (dict, list, tuple))

    leaves, structure = tree.flatten(values, is_leaf)
    for i, x in enumerate(leaves):
        if isinstance(x, (np.ndarray, np.generic)) and x.dtype in NARROW:
            with within(lambda i=i: structure.path(i)):
                canonical(x.dtype)


def as_arrays(values: Tree) -> Tree:
    """Converts Python numbers and NumPy arrays to JAX arrays, in jit's dtypes; raises for leaves of other types."""
    leaves, structure = _flattened(values)
    arrays = list(map(_as_array, leaves))
    for i, array in enumerate(arrays):
        if array is None:
            path = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(values)[i][0])
            raise invalid("a tree of arrays, numbers and None", in_words(leaves[i]), path)
    return structure.unflatten(arrays)


def _as_array(x: Leaf) -> Leaf:
    """``x`` as a JAX array, spec or absent leaf; None if it is not array-like."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or is_absent(x):
        return x
    if _is_number(x):
        with suppress(TypeError, ValueError, OverflowError):
            return jnp.asarray(x, jnp.result_type(x))
    return None


def with_jax_arrays(values: Tree) -> Tree:
    """Converts NumPy arrays to JAX arrays, which a loss can index by a traced batch; keeps all other leaves."""
    if not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(values)):
        return values  # the module itself, not a copy of it
    return jax.tree.map(lambda x: _as_array(x) if isinstance(x, np.ndarray) and _is_number(x) else x, values)


STABLE_STATE = "an optimizer state whose structure and shapes do not change"


def keep_dtypes(new: Tree, old: Tree) -> Tree:
    """Casts a state back to its old dtypes: some transformations promote, which conditionals and scans do not allow."""

    def keep(path: Any, x: Leaf, like: Leaf) -> Leaf:
        if np.shape(x) != np.shape(like):
            raise invalid(STABLE_STATE, f"shape {np.shape(x)} after {np.shape(like)}", jax.tree_util.keystr(path))
        old_dtype, new_dtype = getattr(like, "dtype", None), getattr(x, "dtype", None)
        return x if old_dtype is None or new_dtype is None or old_dtype == new_dtype else x.astype(old_dtype)

    with translate_errors(STABLE_STATE):
        return jax.tree_util.tree_map_with_path(keep, new, old)


def cast_as(values: Tree, specs: Tree) -> Tree:
    """Casts values to the dtypes of a tree of arrays or specs; None, for a leaf or for the tree, keeps the dtype."""
    if specs is None:
        return values
    return tree.map(lambda x, spec: x if x is None or spec is None else x.astype(spec.dtype), values, specs)


def require_carry(new: Tree, old: Tree) -> None:
    """Raises unless the loss returned a carry like the one that it received."""
    expected = "a carry whose structure, shapes and dtypes do not change"

    def compare(path: Any, x: Leaf, before: Leaf) -> None:
        arrays = (leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in (x, before))
        after, first = (f"{array.dtype} of shape {array.shape}" for array in arrays)
        if after != first:
            raise invalid(expected, f"{after} after {first}", f".carry{jax.tree_util.keystr(path)}")

    with translate_errors(expected):
        jax.tree_util.tree_map_with_path(compare, new, old)


def optimized(
    optimizer: optax.GradientTransformationExtraArgs, gradients: Tree, state: Tree, params: Tree, **extra_args: Tree
) -> tuple[Tree, Tree]:
    """The updates of an optimizer, and its new state in the dtypes of the old one."""
    is_like_params = params is None or jax.tree.structure(gradients) == jax.tree.structure(params)
    expected = "an optimizer for the results of the reduction, whose structure is not that of the parameters"
    translation = nullcontext() if is_like_params else translate_errors(expected)
    with explain_state(optimizer, state, gradients if params is None else params), translation:
        result = optimizer.update(gradients, state, params, **extra_args)
    updates, new = require_tuple("an optimizer that returns a tuple of updates and state", result, 2)
    return updates, keep_dtypes(new, state)


@contextmanager
def explain_state(optimizer: optax.GradientTransformation, state: Tree, params: Tree) -> Iterator[None]:
    """Explains an error of the optimizer in the body if it did not make the state, which it then may fail to read."""
    try:
        yield
    except Exception as error:
        difference = None
        with suppress(Exception):  # its init may raise, too
            made, held = (tree.flatten(x)[1] for x in (jax.eval_shape(optimizer.init, params), state))
            difference = None if made == held else tree.difference(made, held)
        if difference is None:
            raise
        expected = f"a state of this optimizer: {difference.expected}"
        raise invalid(expected, difference.received, difference.path) from error


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``optax.apply_updates`` for updates of the parameters' structure and shapes; raises for others."""
    import optax

    leaves, structure = tree.flatten(params)
    for path, x, update in zip(structure.paths(), leaves, tree.flatten_as(structure, updates), strict=True):
        if x is not None and update is not None:
            require_equal("updates of the parameters' shape {}", np.shape(x), np.shape(update), path)
    return optax.apply_updates(params, updates)


def require_transformation(optimizer: object) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that takes extra arguments; raises unless ``optimizer`` is one of optax."""
    with importing(""):
        import optax  # optional: gradients alone do not need it

    optimizer = require_type("an optax.GradientTransformation", optimizer, optax.GradientTransformation)
    return optax.with_extra_args_support(optimizer)


def place_beside(params: Tree, state: Tree) -> Tree:
    """Replicates the uncommitted leaves of ``state`` over the parameters' devices.

    A compiled step returns all its results there. Leaves that start out elsewhere would make the second call compile
    again.
    """
    shardings = {_replicated(x.sharding) for x in jax.tree.leaves(params) if _is_concrete(x) and x.committed}
    (sharding,) = shardings if len(shardings) == 1 else (None,)
    if sharding is None:
        return state
    return jax.tree.map(lambda x: jax.device_put(x, sharding) if _is_concrete(x) and not x.committed else x, state)


@contextmanager
def explain_rejection(*values: Tree) -> Iterator[None]:
    """Explains why a compiled step rejected its arguments: invalid leaves, donated buffers or different devices.

    The arguments are only inspected after an error.
    """
    try:
        yield
    except GradCombineError:
        raise
    except Exception as error:  # user-defined leaves may raise anything
        require_tree(values)
        as_arrays(values)
        for path, expected, received in _rejections(values, error):
            raise invalid(expected, received, path) from error
        raise


def _rejections(values: Tree, error: Exception) -> Iterator[tuple[str, str, str]]:
    """Path, expectation and description of the leaves for which a compiled step may have raised this error."""
    leaves = [(jax.tree_util.keystr(path[1:]), x) for path, x in jax.tree_util.tree_leaves_with_path(values)]
    for path, x in leaves:
        if isinstance(x, np.generic) and np.dtype(x.dtype.name).type is not type(x):
            yield path, "arrays and numbers that jax.jit accepts", type(x).__name__
    arrays = [(path, x) for path, x in leaves if _is_concrete(x)]
    for path, x in arrays:
        if x.is_deleted():
            expected = "the parameters and the state that the last call returned, as it donated its arguments"
            yield path, expected, "a donated buffer"
    if "donate the same buffer twice" in str(error):
        paths: dict[int, str] = {}
        for path, x in arrays:
            if (first := paths.setdefault(id(x), path)) != path:
                yield path, f"another array than in {first}, as the step donates both (copy one)", "the same"
    committed = [(path, x.devices()) for path, x in arrays if x.committed]
    for path, devices in committed:
        if devices != (first := committed[0][1]):
            expected = f"arguments on the same devices, {_ids(first)} as in {committed[0][0]}"
            yield path, expected, _ids(devices)


@contextmanager
def detect_lost_peers(operation: str) -> Iterator[None]:
    """Raises a GradCombineError if a collective in the body fails because a process was lost.

    The body has to wait for its results (`jax.block_until_ready`): JAX dispatches asynchronously, and errors surface
    when a result is waited for. If a peer dies, this is detected at once, as its connections close. If a peer hangs,
    the coordinator detects it after ``heartbeat_timeout_seconds`` of ``jax.distributed.initialize`` (by default 100
    seconds), and JAX then ends this process; there is no error to catch. In both cases restart all processes from a
    saved state, which may include partial windows (`gradcombine.statefile`).

    Args:
      operation: the operation named in the message.

    Raises:
      GradCombineError: for a JAX runtime error that reports a lost connection; other errors pass unchanged.

    References: `Multi-controller JAX <https://docs.jax.dev/en/latest/multi_process.html>`_.

    >>> import jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax import detect_lost_peers
    >>> with detect_lost_peers("merge_replicas"):
    ...     total = jax.block_until_ready(jnp.ones(3).sum())
    >>> with detect_lost_peers("merge_replicas"):
    ...     raise ValueError("Gloo all-reduce failed: connection closed by peer")
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: merge_replicas: expected an answer from all 1 processes, received Gloo ...
    """
    try:
        yield
    except GradCombineError:
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not any(word in str(error).lower() for word in _LOST_PEER_WORDS):
            raise
        expected = f"an answer from all {jax.process_count()} processes"
        raise GradCombineError(operation, expected, str(error)) from error


def examples(batch: Tree) -> int:
    """Number of examples: the length of the first axis, which all arrays of a batch share."""
    first: tuple[int, str] | None = None
    leaves, structure = tree.flatten(batch)
    for leaf, name in zip(leaves, structure.paths(), strict=True):
        if leaf is None:
            continue
        with within(name):
            shape = shape_of(leaf)
            if getattr(leaf, "dtype", None) == jax.dtypes.float0:
                raise invalid("a batch of numbers", "an array of float0")
            if not shape:
                raise invalid("a batch argument with a first axis of examples", "a scalar")
        first = (shape[0], name) if first is None else first
        require_equal(f"{{}} examples, as in {first[1]}", first[0], shape[0], name)
    return require_given("a batch argument with an array", first)[0]


def _is_number(x: Leaf) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):  # float0, JAX's "no gradient", is not a number
        number = x.dtype == np.bool_ or dtypes.kind(x.dtype) in ("float", "complex", "integer")
        return number and not isinstance(x, np.ma.MaskedArray)
    return isinstance(x, (bool, int, float, complex))


def _ids(devices: Iterable[Any]) -> str:
    return f"devices {sorted(device.id for device in devices)}"


def _is_concrete(x: Leaf) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _replicated(sharding: Sharding) -> Sharding | None:
    """Sharding of a replicated array on the same devices; None if unknown."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return SingleDeviceSharding(*sharding.device_set) if isinstance(sharding, SingleDeviceSharding) else None
