"""JAX: eager, under jit, and over the axes of pmap, vmap and shard_map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental import checkify

from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.protocol import Backend, Collective, Split
from gradcombine.errors import GradCombineError
from gradcombine.types import Array


class JaxBackend:
    name = "jax"

    def owns(self, leaf: Any) -> bool:
        return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or self.absent(leaf)

    def split(self, node: Any) -> Split | None:
        one_level = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        entries, definition = one_level
        if jax.tree_util.treedef_is_leaf(definition):
            return None
        keys = tuple(jax.tree_util.keystr(path) for path, _ in entries)
        return Split(keys, tuple(child for _, child in entries), definition.unflatten, definition)

    def asarray(self, leaf: Any) -> Array:
        if isinstance(leaf, jax.Array):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise GradCombineError("jax", "an array", f"the shape/dtype spec {leaf}")
        array = NUMPY.asarray(leaf)
        return _exactly(jnp.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype)), array.dtype)

    def dtype(self, leaf: Any) -> np.dtype:
        return np.dtype(leaf.dtype)

    def shape(self, leaf: Any) -> tuple[int, ...]:
        return tuple(leaf.shape)

    def concrete(self, array: Array) -> np.ndarray | None:
        return None if isinstance(array, Tracer) else np.asarray(array)

    def absent(self, leaf: Any) -> bool:
        return isinstance(leaf, np.ndarray) and leaf.dtype == jax.dtypes.float0

    def make_absent(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, jax.dtypes.float0)

    def full(self, shape: tuple[int, ...], fill: float, dtype: np.dtype, like: Sequence[Any] = ()) -> Array:
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        if len(like) == 1 and isinstance(like[0], jax.Array) and like[0].shape == shape:
            # full_like keeps the sharding of an array, and the axes it varies over.
            return _exactly(jnp.full_like(like[0], fill, narrow), dtype)
        axes = tuple(frozenset().union(*map(_varying, like)))
        made = _exactly(jnp.full(shape, fill, narrow), dtype)
        return lax.pcast(made, axes, to="varying") if axes else made

    def cast(self, array: Array, dtype: np.dtype) -> Array:
        return _exactly(jnp.asarray(array).astype(jax.dtypes.canonicalize_dtype(dtype)), dtype)

    def add(self, a: Array, b: Array) -> Array:
        return jnp.add(a, b)

    def total(self, array: Array) -> Array:
        return jnp.sum(array)

    def product(self, a: Array, b: Array) -> Array:
        return jnp.multiply(a, b)

    def scale(self, array: Array, weight: Array) -> Array:
        if jnp.iscomplexobj(array):
            return lax.complex(self.scale(array.real, weight), self.scale(array.imag, weight))
        product = jnp.multiply(array, weight)
        if not jnp.issubdtype(product.dtype, jnp.floating):
            return product
        # XLA contracts a product and the addition after it into one fused multiply-add, through optimization_barrier
        # and reduce_precision too. A select between them keeps the product's own rounding.
        return jnp.where(product != product, product + 1, product)

    def divide(self, array: Array, divisor: Array) -> Array:
        if jnp.iscomplexobj(array):
            return lax.complex(self.divide(array.real, divisor), self.divide(array.imag, divisor))
        # A scalar divisor becomes a multiplication by its reciprocal, which rounds twice; a select of full shape does
        # not.
        return jnp.divide(array, jnp.where(array != array, jnp.ones_like(divisor), divisor))

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        return jnp.where(condition, a, b)

    def bitcast(self, array: Array, dtype: np.dtype) -> Array:
        return lax.bitcast_convert_type(array, dtype)

    def shift_left(self, a: Array, amount: Array | int) -> Array:
        return jnp.left_shift(a, amount)

    def shift_right(self, a: Array, amount: Array | int) -> Array:
        return jnp.right_shift(a, amount)

    def maximum(self, a: Array, b: Array) -> Array:
        # XLA on CPU may drop a NaN in its own maximum, so the comparison is spelled out.
        return jnp.where(a != a, a, jnp.where(b != b, b, jnp.where(a > b, a, b)))

    def over(self, names: str | Sequence[str]) -> Collective:
        return JaxAxis(names)

    def check(self, condition: Array, operation: str, expected: str, received: str) -> None:
        message = str(GradCombineError(operation, expected, received))
        if isinstance(condition, Tracer):
            checkify.check(jnp.all(condition), message)
        elif not np.all(condition):
            raise GradCombineError(operation, expected, received)


def _exactly(array: Array, dtype: np.dtype) -> Array:
    if array.dtype != dtype:
        raise GradCombineError("jax", f"{dtype} (set jax_enable_x64 for 64-bit values)", array.dtype)
    return array


def _varying(leaf: Any) -> frozenset[str]:
    """The manual mesh axes over which shard_map's type system says that a value may differ."""
    return jax.typeof(leaf).manual_axis_type.varying if isinstance(leaf, jax.Array) else frozenset()


class JaxAxis:
    """The replicas along one or several named axes of pmap, vmap or shard_map."""

    def __init__(self, names: str | Sequence[str]) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)

    def __repr__(self) -> str:
        return f"jax_axis({', '.join(map(repr, self.names))})"

    def size(self) -> int:
        try:
            return lax.axis_size(self.names)
        except NameError as error:
            expected = "an axis that the surrounding pmap, vmap or shard_map binds"
            raise GradCombineError(repr(self), expected, str(error)) from None

    def rank(self) -> Array:
        return lax.axis_index(self.names)

    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        return list(lax.psum(tuple(self.vary(arrays)), self.names)) if arrays else []

    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        to = "invarying" if self._tracked() else "varying"
        return [self._gather(array, to) for array in self.vary(arrays)]

    def _gather(self, array: Array, to: str) -> Array:
        if len(self.names) == 1 or to == "invarying":
            return lax.all_gather(array, self.names, to=to)
        # Nested vmap axes have no joint all_gather: innermost first, then flattened to ranks in row-major order.
        gathered = array
        for name in reversed(self.names):
            gathered = lax.all_gather(gathered, name)
        return gathered.reshape((self.size(), *array.shape))

    def vary(self, arrays: Sequence[Array]) -> list[Array]:
        self.size()
        if not self._tracked():
            return list(arrays)
        return [self._vary(array) for array in arrays]

    def _vary(self, array: Array) -> Array:
        missing = tuple(name for name in self.names if name not in _varying(array))
        return lax.pcast(array, missing, to="varying") if missing else array

    def require_own(self, operation: str, paths: Sequence[str], leaves: Sequence[Array]) -> None:
        self.size()
        if not self._tracked():
            return
        for path, leaf in zip(paths, leaves, strict=True):
            if not set(self.names) <= _varying(leaf):
                expected = (
                    f"a value of each replica's own over {self!r} (under check_vma, shard_map has already summed the "
                    "gradient of a replicated parameter: apply jax.lax.pcast(params, axis, to='varying') before "
                    "differentiating, or to a value that is this replica's contribution)"
                )
                raise GradCombineError(operation, expected, "one that is the same on all replicas", path)

    def _tracked(self) -> bool:
        """Whether check_vma is on: then an axis index is typed as varying over its axis."""
        return all(name in _varying(lax.axis_index(name)) for name in self.names)


BACKEND: Backend = JaxBackend()
