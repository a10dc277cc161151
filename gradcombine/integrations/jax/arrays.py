# pyright: standard
"""The arrays of a step: made of numbers, placed beside each other, donated, and lost with a process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gradcombine import tree
from gradcombine.backends.jax_backend import has_dtype
from gradcombine.backends.numpy_backend import NARROW
from gradcombine.backends.registry import in_words, is_absent, shape_of
from gradcombine.errors import (
    GradCombineError,
    invalid,
    require_equal,
    require_given,
    require_type,
    shown,
    translate_errors,
    within,
)
from gradcombine.reductions import dtypes
from gradcombine.types import Leaf, Tree

_LOST = ("gloo", "connection", "deadline", "unavailable", "heartbeat", "nccl", "peer")


def require_tree(*values: Tree) -> None:
    """Refuses what JAX cannot flatten, and what `require_levels` does."""
    _flattened(values)


def _flattened(values: Tree) -> tuple[list[Tree], Any]:
    require_levels(values)
    with translate_errors("trees that JAX can flatten"):
        return jax.tree.flatten(values)


def require_levels(*values: Tree) -> None:
    """Refuses containers of Python without an end, or with keys in no order, and arrays that XLA has no dtype for.

    After containers of both kinds JAX leaves the calls that follow less depth of recursion; of such arrays XLA ends the
    process.
    """

    def is_leaf(x: Leaf) -> bool:
        if type(x) in (dict, defaultdict):
            with translate_errors(
                "dicts whose keys have an order, as JAX does", received=lambda: f"the keys {', '.join(map(shown, x))}"
            ):
                sorted(x)
        return not isinstance(x, (dict, list, tuple))

    leaves, structure = tree.flatten(values, is_leaf)
    for i, x in enumerate(leaves):
        if isinstance(x, (np.ndarray, np.generic)) and x.dtype in NARROW and not has_dtype(x.dtype):
            raise invalid("a dtype that JAX has", x.dtype, structure.path(i))


def as_arrays(values: Tree) -> Tree:
    """A tree whose Python numbers and NumPy arrays are JAX's, in the dtypes that jit gives them."""
    leaves, structure = _flattened(values)
    arrays = list(map(_as_array, leaves))
    for i, array in enumerate(arrays):
        if array is None:
            path = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(values)[i][0])
            raise invalid("a tree of arrays, numbers and None", in_words(leaves[i]), path)
    return structure.unflatten(arrays)


def _as_array(x: Leaf) -> Leaf:
    """The array; None for what is none."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or is_absent(x):
        return x
    if _is_number(x):
        with suppress(TypeError, ValueError, OverflowError):
            return jnp.asarray(x, jnp.result_type(x))
    return None


KEPT = "a state of the optimizer that it keeps"


def keep_dtypes(new: Tree, old: Tree) -> Tree:
    """A state in the dtypes that it had: some transformations promote theirs, which no conditional or scan allows."""

    def keep(x: Leaf, like: Leaf) -> Leaf:
        expected, received = getattr(like, "dtype", None), getattr(x, "dtype", None)
        return x if expected is None or received is None or expected == received else x.astype(expected)

    with translate_errors(KEPT):
        return jax.tree.map(keep, new, old)


def require_transformation(optimizer: object) -> None:
    """Refuses what is not an optax.GradientTransformation, of two functions."""
    import optax  # which gradients alone do not need

    require_type("an optax.GradientTransformation", optimizer, optax.GradientTransformation)


def place_beside(params: Tree, state: Tree) -> Tree:
    """The state, what of it has no place yet on the devices of its parameters: the same on all of them.

    A compiled step puts all that it returns there. Counts that began elsewhere would let the second call compile the
    step once more.
    """
    shardings = {_whole(x.sharding) for x in jax.tree.leaves(params) if _is_known(x) and x.committed}
    (sharding,) = shardings if len(shardings) == 1 else (None,)
    if sharding is None:
        return state
    return jax.tree.map(lambda x: jax.device_put(x, sharding) if _is_known(x) and not x.committed else x, state)


@contextmanager
def usable(*values: Tree) -> Iterator[None]:
    """Says what is wrong with arguments that a compiled step has refused.

    No arrays, buffers taken over before, other devices. Nothing is looked at where it was not refused.
    """
    try:
        yield
    except GradCombineError:
        raise
    except Exception as error:  # a foreign object may raise any
        require_tree(values)
        as_arrays(values)
        for path, x in jax.tree_util.tree_leaves_with_path(values):
            if isinstance(x, np.generic) and np.dtype(x.dtype.name).type is not type(x):
                expected = "arrays and numbers that jax.jit takes"
                raise invalid(expected, type(x).__name__, _named(path)) from error
        leaves = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(values) if _is_known(x)]
        for path, x in leaves:
            if x.is_deleted():
                expected = "what the last call returned: it has taken over the parameters and the state that it got"
                raise invalid(expected, "a donated buffer", _named(path)) from error
        committed = [(path, x.devices()) for path, x in leaves if x.committed]
        for path, devices in committed:
            if devices != (first := committed[0][1]):
                expected = f"arguments on the same devices, {_ids(first)} as in {_named(committed[0][0])}"
                raise invalid(expected, _ids(devices), _named(path)) from error
        raise


@contextmanager
def detect_lost_peers(operation: str) -> Iterator[None]:
    """Turns the error of a collective that has lost a process into one that says so.

    The body has to wait for its results (`jax.block_until_ready`): JAX computes behind the caller's back, and an error
    shows where a result is waited for. A peer that died is noticed at once, as its connections close. One that hangs
    is noticed by the coordinator after ``heartbeat_timeout_seconds`` of ``jax.distributed.initialize`` (100 seconds
    unless given), and then JAX ends this process itself; nothing can be caught. Both ways lead to a restart of all
    processes, from a state that was saved before, partial windows included (`gradcombine.statefile`).

    Args:
      operation: what was being done, for the message.

    Raises:
      GradCombineError: for an error of JAX's runtime that tells of a lost connection; any other passes unchanged.

    References: `Multi-controller JAX <https://docs.jax.dev/en/latest/multi_process.html>`_.

    >>> import jax, jax.numpy as jnp
    >>> from gradcombine.integrations.jax import detect_lost_peers
    >>> with detect_lost_peers("merge_replicas"):
    ...     total = jax.block_until_ready(jnp.ones(3).sum())
    >>> with detect_lost_peers("merge_replicas"):
    ...     raise ValueError("Gloo all-reduce failed: connection closed by peer")
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: merge_replicas: expected an answer of all 1 processes, received Gloo ...
    """
    try:
        yield
    except GradCombineError:
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not any(word in str(error).lower() for word in _LOST):
            raise
        expected = f"an answer of all {jax.process_count()} processes"
        raise GradCombineError(operation, expected, str(error)) from error


def examples(batch: Tree) -> int:
    """The length of the first axis, which all arrays of a batch share."""
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
    if isinstance(x, (np.ndarray, np.generic)):  # a float0, JAX's "no gradient", is no number
        number = x.dtype == np.bool_ or dtypes.kind(x.dtype) in ("float", "complex", "integer")
        return number and not isinstance(x, np.ma.MaskedArray)
    return isinstance(x, (bool, int, float, complex))


def _named(path: Any) -> str:
    return jax.tree_util.keystr(path[1:])


def _ids(devices: Iterable[Any]) -> str:
    return f"devices {sorted(device.id for device in devices)}"


def _is_known(x: Leaf) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _whole(sharding: Sharding) -> Sharding | None:
    """Whole arrays on the same devices."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return SingleDeviceSharding(*sharding.device_set) if isinstance(sharding, SingleDeviceSharding) else None
