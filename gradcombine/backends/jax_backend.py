# pyright: standard
"""The JAX backend, eager and under jit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.experimental import checkify, sparse
from jax.sharding import NamedSharding

from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.protocol import Backend, Iteration, Kernel, RowSlices, Split, ToArrays, primitive
from gradcombine.backends.quotient import rounded_quotient
from gradcombine.errors import GradCombineError, invalid
from gradcombine.types import Array, Leaf, Tree


class JaxBackend(Backend):
    name = "jax"
    differentiates = True
    add = primitive(jnp.add)
    total = primitive(jnp.sum)
    product = primitive(jnp.multiply)
    sqrt = primitive(jnp.sqrt)
    where = primitive(jnp.where)
    shift_left = primitive(jnp.left_shift)
    shift_right = primitive(jnp.right_shift)
    reshape = primitive(jnp.reshape)
    stack = primitive(jnp.stack)
    concat = primitive(jnp.concatenate)
    largest = primitive(partial(jnp.max, axis=-1, keepdims=True))
    cumsum = primitive(partial(jnp.cumsum, dtype=jnp.int32))
    slice_at = primitive(partial(lax.dynamic_index_in_dim, keepdims=False))

    def owns(self, leaf: Leaf) -> bool:
        return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or self.absent(leaf)

    def split(self, node: Tree) -> Split | None:
        entries, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        # treedef_is_leaf also holds for a node without children, for instance a module with static fields only.
        if jax.tree_util.treedef_is_leaf(treedef) and treedef.num_leaves:
            return None
        keys = tuple(jax.tree_util.keystr(path) for path, _ in entries)
        return Split(keys, tuple(child for _, child in entries), treedef.unflatten, treedef)

    def asarray(self, leaf: Leaf) -> Array:
        if isinstance(leaf, jax.Array):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise invalid("an array", f"the shape/dtype spec {leaf}")
        array = NUMPY.asarray(leaf)
        return _exactly(jnp.asarray(array, canonical(array.dtype)), array.dtype)

    def dtype(self, leaf: Leaf) -> np.dtype:
        if not hasattr(leaf, "dtype"):
            return NUMPY.dtype(leaf)
        try:
            return np.dtype(leaf.dtype)
        except TypeError:  # typed PRNG keys have no NumPy dtype
            raise invalid("a numeric dtype", leaf.dtype) from None

    def concrete(self, array: Array) -> np.ndarray | None:
        return None if isinstance(array, Tracer) else np.asarray(array)

    def absent(self, leaf: Leaf) -> bool:
        if not isinstance(leaf, (np.ndarray, jax.Array, jax.ShapeDtypeStruct)):
            return False
        # A PRNG key has no gradient: jax.grad with allow_int returns float0 for it.
        return leaf.dtype == jax.dtypes.float0 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    def make_absent(self, shape: tuple[int, ...]) -> Leaf:
        return np.zeros(shape, jax.dtypes.float0)

    def full(self, shape: tuple[int, ...], fill: float, dtype: np.dtype, like: Sequence[Leaf] = ()) -> Array:
        narrow = canonical(dtype)
        if len(like) == 1 and isinstance(like[0], (jax.Array, jax.ShapeDtypeStruct)) and like[0].shape == shape:
            return _exactly(_full_like(like[0], fill, narrow), dtype)
        # An array shared by several leaves, such as the sum of weights, varies only over the axes that all of them vary
        # over: dividing by it must not make a leaf vary over more axes.
        axes = frozenset.intersection(*map(varying, like)) if like else ()
        return vary(_exactly(jnp.full(shape, fill, narrow), dtype), axes)

    def cast(self, array: Array, dtype: np.dtype) -> Array:
        if isinstance(array, jax.Array) and array.dtype == dtype:
            return array
        return _exactly(jnp.asarray(array).astype(canonical(dtype)), dtype)

    def scale(self, array: Array, weight: Array) -> Array:
        if jnp.iscomplexobj(array):
            return lax.complex(self.scale(array.real, weight), self.scale(array.imag, weight))
        product = jnp.multiply(array, weight)
        if not jnp.issubdtype(product.dtype, jnp.floating):
            return product
        # XLA contracts a product and a subsequent addition into a fused multiply-add, even through optimization_barrier
        # and reduce_precision. A select in between keeps the rounding of the product.
        return jnp.where(product != product, product + 1, product)

    def divide(self, array: Array, divisor: Array) -> Array:
        if jnp.iscomplexobj(array):
            return lax.complex(self.divide(array.real, divisor), self.divide(array.imag, divisor))
        # shard_map's types of some operations on empty arrays lack the axes over which they vary.
        if array.dtype != jnp.float32 or not array.size:
            return _quotient(array, divisor)
        return self.traced_once(_differentiable_quotient, (), [array, divisor])[0]

    def bitcast(self, array: Array, dtype: np.dtype) -> Array:
        if array.dtype.name.startswith("float6_"):
            raise invalid("a dtype of 4 bits or of bytes", array.dtype)
        parts = jnp.stack([array.real, array.imag], axis=-1) if jnp.iscomplexobj(array) else array
        return lax.bitcast_convert_type(parts, dtype)

    def fused_totals(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        return _totals(kernel, static, tuple(arrays))

    def traced_once(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        # Under an outer jit too, leaves of equal shape and dtype are traced and lowered once.
        return _compiled(kernel, static, tuple(arrays))

    def apply_if_rare(
        self, condition: Array, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]
    ) -> tuple[Array, ...]:
        known = self.concrete(condition)
        if known is not None and not any(isinstance(array, Tracer) for array in arrays):
            return super().apply_if_rare(known, kernel, static, arrays)
        # A conditional would copy all arrays on every call; a loop of zero iterations leaves them in place.
        carried = tuple(_vary_alike(arrays, arrays))

        def body(state: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
            return jnp.zeros_like(state[0]), tuple(kernel(self, *static, *state[1]))

        return lax.while_loop(lambda state: state[0], body, (condition, carried))[1]

    def custom_derivative(self, function: ToArrays, surrogate: ToArrays, leaves: Sequence[Leaf]) -> list[Array]:
        traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        if not traced:
            return super().custom_derivative(function, surrogate, leaves)

        @jax.custom_jvp
        def call(*arrays: Array) -> list[Array]:
            return list(function(*replaced(leaves, traced, arrays)))

        def rule(primals: Sequence[Array], tangents: Sequence[Leaf]) -> tuple[list[Array], list[Array]]:
            nonzero = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

            def of_nonzero(*arrays: Array) -> list[Array]:
                return list(surrogate(*replaced(leaves, traced, replaced(primals, nonzero, arrays))))

            values, out = jax.jvp(of_nonzero, [primals[i] for i in nonzero], [tangents[i] for i in nonzero])
            # In the body of a scan, JAX 0.10 replaces `call` by `function`, whose own derivative must not be taken.
            return list(map(_with_derivative, call(*map(lax.stop_gradient, primals)), values)), out

        call.defjvp(rule, symbolic_zeros=True)
        return call(*(leaves[i] for i in traced))

    def row_slices(self, leaf: Leaf) -> RowSlices | None:
        if not isinstance(leaf, sparse.BCOO):
            return None
        if (leaf.n_batch, leaf.n_sparse) != (0, 1):
            expected = "a BCOO of rows: n_batch=0 and n_sparse=1"
            raise invalid(expected, f"n_batch={leaf.n_batch} and n_sparse={leaf.n_sparse}")
        return RowSlices(leaf.indices[:, 0], leaf.data, leaf.shape[0])

    def argsort(self, keys: Array) -> Array:
        return jnp.argsort(keys, stable=True).astype(jnp.int32)

    def row_numbers(self, array: Array) -> Array:
        return jnp.arange(array.size, dtype=jnp.int32) // jnp.int32(array.shape[-1])

    def search_sorted(self, ordered: Array, keys: Array) -> Array:
        return jnp.searchsorted(ordered, keys).astype(jnp.int32)

    def loop(
        self, condition: Callable[..., Array], body: Callable[..., tuple[Array, ...]], *carry: Array
    ) -> tuple[Array, ...]:
        if isinstance(condition(*carry), Tracer):
            return lax.while_loop(lambda carry: condition(*carry), lambda carry: body(*carry), carry)
        return super().loop(condition, body, *carry)

    def repeat(
        self, count: Array, body: Iteration, carry: Sequence[Array], constants: Sequence[Array], most: int
    ) -> list[Array]:
        known = self.concrete(count)
        if known is not None:
            return super().repeat(known, body, carry, constants, most)
        carry, n = _vary_alike([*carry, *constants], carry), len(carry)

        def loop(count: Array, *arrays: Array) -> list[Array]:
            def step(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
                return state[0] + 1, body(state[0], state[1], list(arrays[n:]))

            return lax.while_loop(lambda state: state[0] < count, step, (jnp.zeros_like(count), list(arrays[:n])))[1]

        def bounded(count: Array, *arrays: Array) -> list[Array]:
            # JAX cannot differentiate a while loop in reverse mode, but a scan of fixed length.
            def step(carry: list[Array], i: Array) -> tuple[list[Array], None]:
                return lax.cond(i < count, lambda carry: body(i, carry, list(arrays[n:])), list, carry), None

            return lax.scan(step, list(arrays[:n]), jnp.arange(most, dtype=count.dtype))[0]

        return self.custom_derivative(loop, bounded, [count, *carry, *constants])

    def update_at(self, array: Array, i: Array | int, row: Array) -> Array:
        array, row = _vary_alike([array, row], [array, row])
        return lax.dynamic_update_index_in_dim(array, row, i, axis=0)

    def take(self, array: Array, positions: Array) -> Array:
        return array.at[positions].get(mode="promise_in_bounds")

    def put(self, array: Array, positions: Array, rows: Array) -> Array:
        return array.at[positions].set(rows, mode="drop")

    def check(self, condition: Array, operation: str, expected: str, received: str) -> None:
        message = str(GradCombineError(operation, expected, received))
        if isinstance(condition, Tracer):
            checkify.check(jnp.all(condition), message)
        else:
            super().check(condition, operation, expected, received)


def _with_derivative(value: Array, surrogate: Array) -> Array:
    """``value``, bit by bit, with the derivative of ``surrogate``; 0 for infinities and subnormal numbers."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    if jnp.iscomplexobj(value):
        return lax.complex(*map(_with_derivative, (value.real, value.imag), (surrogate.real, surrogate.imag)))
    shifted = value - (lax.stop_gradient(surrogate) - surrogate)
    word = f"uint{jnp.finfo(value.dtype).bits}"
    unchanged = lax.bitcast_convert_type(shifted, word) == lax.bitcast_convert_type(value, word)
    return jnp.where(unchanged, shifted, value)  # the difference of infinities is NaN, and XLA flushes subnormals


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(kernel: Kernel, static: tuple[Hashable, ...], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(kernel(BACKEND, *static, *arrays))


def _quotient(array: Array, divisor: Array) -> Array:
    # XLA turns division by a scalar into multiplication by its reciprocal, which rounds twice. A divisor selected
    # elementwise prevents that.
    return jnp.divide(array, jnp.where(array != array, jnp.ones_like(divisor), divisor))


def _differentiable_quotient(backend: Backend, array: Array, divisor: Array) -> tuple[Array, ...]:
    return tuple(backend.custom_derivative(_rounded_quotient, lambda *x: [_quotient(*x)], [array, divisor]))


def _rounded_quotient(array: Array, divisor: Array) -> list[Array]:
    # XLA on GPUs divides float32 with errors of up to 2 units in the last place.
    rounded = partial(rounded_quotient, BACKEND)
    return [lax.platform_dependent(array, divisor, cuda=rounded, rocm=rounded, default=_quotient)]


@partial(jax.jit, static_argnums=(0, 1))
def _totals(kernel: Kernel, static: tuple[Hashable, ...], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    def of_rows(*arrays: Array) -> tuple[Array, ...]:
        terms = kernel(BACKEND, *static, *arrays)
        rows = _rows(terms[0].shape)
        if rows > 1:
            terms = _summed([term.reshape(rows, -1) if term.ndim == 1 else term for term in terms], 1)
        return _summed(terms, 0)

    def of_all(*arrays: Array) -> tuple[Array, ...]:
        return _summed(kernel(BACKEND, *static, *arrays), 0)

    # On CPU, XLA distributes the rows of a result over the cores but computes a scalar on one core. Elsewhere the rows
    # would only cost memory traffic.
    return lax.platform_dependent(*arrays, cpu=of_rows, default=of_all)


def _summed(terms: Sequence[Array], axis: int) -> tuple[Array, ...]:
    """The sums over ``axis`` and all later axes.

    One variadic reduction reads the inputs once. And on CPU, XLA splits the reduction of a single array into windows,
    which takes thirty times as long.
    """
    zeros = [jnp.zeros((), term.dtype) for term in terms]
    return tuple(lax.reduce(list(terms), zeros, lambda a, b: [*map(lax.add, a, b)], tuple(range(axis, terms[0].ndim))))


def _rows(shape: tuple[int, ...]) -> int:
    """The number of partial sums: one per row, or 2 to 64 equal parts of a vector; 1 if they would be short."""
    size = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else next((n for n in (64, 16, 4, 2) if size % n == 0), 1)
    return rows if size >= 256 * rows > 0 else 1


def replaced(items: Sequence[Any], positions: Sequence[int], others: Iterable[Any]) -> list[Any]:
    """The items with others at these positions."""
    result = list(items)
    for i, other in zip(positions, others, strict=True):
        result[i] = other
    return result


def varying(leaf: Leaf) -> frozenset[str]:
    """The manual mesh axes over which an array or spec may vary, according to shard_map's types (vma)."""
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    if jax.__version_info__ < (0, 10):
        return getattr(aval, "vma", None) or frozenset()
    axes = getattr(aval, "manual_axis_type", None)
    return frozenset() if axes is None else axes.varying


def vary(array: Array, names: Collection[str]) -> Array:
    """Marks an array as varying over these mesh axes as well."""
    missing = tuple(name for name in names if name not in varying(array))
    return lax.pcast(array, missing, to="varying") if missing else array


def _vary_alike(like: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
    """Casts ``arrays`` to vary over every axis that any of ``like`` varies over, as loops and updates require."""
    axes = frozenset[str]().union(*map(varying, like))
    return [vary(jnp.asarray(array), axes) for array in arrays]


def canonical(dtype: np.dtype) -> np.dtype:
    """The dtype that JAX uses for a NumPy dtype: 64 bits become 32 unless jax_enable_x64 is set; raises without one."""
    if not _has_dtype(dtype):
        raise invalid("a dtype that JAX has", dtype)
    return jax.dtypes.canonicalize_dtype(dtype)


@cache
def _has_dtype(dtype: np.dtype) -> bool:
    """Whether JAX and XLA support a dtype: XLA does not compute in 6-bit dtypes, and only partly in 1-bit ones."""
    computes = not dtype.name.startswith("float6_") and dtype.name not in ("int1", "uint1")
    return computes and dtype.isnative and hasattr(jnp, dtype.name)


def _exactly(array: Array, dtype: np.dtype) -> Array:
    if array.dtype != dtype:
        raise invalid(f"{dtype} (set jax_enable_x64 for 64-bit values)", array.dtype)
    return array


def _full_like(leaf: Leaf, fill: float, dtype: np.dtype) -> Array:
    """A filled array of the shape, sharding and varying axes of an array or spec."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return _placed_like(leaf, jnp.full_like(leaf, fill, dtype))
    # In a mesh with manual axes, full_like drops explicit axes, and fails for a spec that varies.
    sharding = jax.typeof(leaf).sharding if isinstance(leaf, jax.Array) else leaf.sharding
    device = sharding if isinstance(sharding, NamedSharding) and sharding.mesh.explicit_axes else None
    return _vary_alike([leaf], [jnp.full(leaf.shape, fill, dtype, device=device)])[0]


def _placed_like(leaf: Leaf, filled: Array) -> Array:
    # A constant in a compiled program depends on no input, so the partitioner may replicate it. Constrain its sharding
    # if that is known while tracing: from a spec, or from an array of the enclosing scope.
    sharding = None if isinstance(leaf, Tracer) else leaf.sharding
    if isinstance(filled, Tracer) and isinstance(sharding, NamedSharding) and sharding.mesh.are_all_axes_auto:
        return lax.with_sharding_constraint(filled, sharding)
    return filled


BACKEND = JaxBackend()
