# pyright: standard
"""JAX: the primitives, eager and under jit."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
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

from gradcombine.backends.jax_versions import varying
from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.protocol import Backend, Kernel, RowSlices, Split
from gradcombine.errors import GradCombineError, invalid
from gradcombine.types import Array, Leaf, Tree


class JaxBackend(Backend):
    name = "jax"
    differentiates = True

    def owns(self, leaf: Leaf) -> bool:
        return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or self.absent(leaf)

    def split(self, node: Tree) -> Split | None:
        one_level = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        entries, definition = one_level
        # A node without children, as a module of static fields is, counts as one node too.
        if jax.tree_util.treedef_is_leaf(definition) and definition.num_leaves:
            return None
        keys = tuple(jax.tree_util.keystr(path) for path, _ in entries)
        return Split(keys, tuple(child for _, child in entries), definition.unflatten, definition)

    def asarray(self, leaf: Leaf) -> Array:
        if isinstance(leaf, jax.Array):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise invalid("an array", f"the shape/dtype spec {leaf}")
        array = NUMPY.asarray(leaf)
        return _exactly(jnp.asarray(array, _canonical(array.dtype)), array.dtype)

    def dtype(self, leaf: Leaf) -> np.dtype:
        if not hasattr(leaf, "dtype"):
            return NUMPY.dtype(leaf)
        try:
            return np.dtype(leaf.dtype)
        except TypeError:  # of random keys, which NumPy does not know
            raise invalid("a dtype of numbers", leaf.dtype) from None

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        return NUMPY.shape(leaf)

    def concrete(self, array: Array) -> np.ndarray | None:
        return None if isinstance(array, Tracer) else np.asarray(array)

    def absent(self, leaf: Leaf) -> bool:
        if not isinstance(leaf, (np.ndarray, jax.Array, jax.ShapeDtypeStruct)):
            return False
        # A random key has no gradient; where jax.grad is asked for one (allow_int), it returns float0.
        return leaf.dtype == jax.dtypes.float0 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    def make_absent(self, shape: tuple[int, ...]) -> Leaf:
        return np.zeros(shape, jax.dtypes.float0)

    def full(self, shape: tuple[int, ...], fill: float, dtype: np.dtype, like: Sequence[Leaf] = ()) -> Array:
        narrow = _canonical(dtype)
        if len(like) == 1 and isinstance(like[0], (jax.Array, jax.ShapeDtypeStruct)) and like[0].shape == shape:
            return _exactly(_full_like(like[0], fill, narrow), dtype)
        # What belongs to several leaves may differ between replicas only where all of them do: else a leaf that is the
        # same over an axis would, divided by the sum of weights, no longer be so by its type.
        axes = tuple(frozenset.intersection(*map(varying, like))) if like else ()
        made = _exactly(jnp.full(shape, fill, narrow), dtype)
        return lax.pcast(made, axes, to="varying") if axes else made

    def cast(self, array: Array, dtype: np.dtype) -> Array:
        if isinstance(array, jax.Array) and array.dtype == dtype:
            return array
        return _exactly(jnp.asarray(array).astype(_canonical(dtype)), dtype)

    def add(self, a: Array, b: Array) -> Array:
        return jnp.add(a, b)

    def total(self, array: Array) -> Array:
        return jnp.sum(array)

    def largest(self, array: Array) -> Array:
        return jnp.max(array, axis=-1, keepdims=True)

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

    def sqrt(self, array: Array) -> Array:
        return jnp.sqrt(array)

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        return jnp.where(condition, a, b)

    def bitcast(self, array: Array, dtype: np.dtype) -> Array:
        if array.dtype.name.startswith("float6_"):
            raise invalid("a dtype of whole bytes, or of 4 bits", array.dtype)
        whole = jnp.stack([array.real, array.imag], axis=-1) if jnp.iscomplexobj(array) else array
        return lax.bitcast_convert_type(whole, dtype)

    def shift_left(self, a: Array, amount: Array | int) -> Array:
        return jnp.left_shift(a, amount)

    def shift_right(self, a: Array, amount: Array | int) -> Array:
        return jnp.right_shift(a, amount)

    def fused_totals(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        return _totals(kernel, static, tuple(arrays))

    def traced_once(self, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        # Inside of another program too: leaves of one shape are traced and lowered once.
        return _compiled(kernel, static, tuple(arrays))

    def apply_if_rare(
        self, condition: Array, kernel: Kernel, static: tuple[Hashable, ...], arrays: Sequence[Array]
    ) -> tuple[Array, ...]:
        known = self.concrete(condition)
        if known is not None and not any(isinstance(array, Tracer) for array in arrays):
            return super().apply_if_rare(known, kernel, static, arrays)
        # A conditional would copy all of the arrays at every call. A loop of no turns leaves them where they are.
        carried = tuple(_alike(arrays, arrays))

        def turn(state: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
            return jnp.zeros_like(state[0]), tuple(kernel(self, *static, *state[1]))

        return lax.while_loop(lambda state: state[0], turn, (condition, carried))[1]

    def custom_derivative(
        self,
        function: Callable[..., Sequence[Array]],
        surrogate: Callable[..., Sequence[Array]],
        leaves: Sequence[Leaf],
    ) -> list[Array]:
        traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        if not traced:
            return super().custom_derivative(function, surrogate, leaves)

        @jax.custom_jvp
        def call(*arrays: Array) -> list[Array]:
            return list(function(*_replaced(leaves, traced, arrays)))

        def rule(primals: Sequence[Array], tangents: Sequence[Leaf]) -> tuple[list[Array], list[Array]]:
            moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

            def of(*arrays: Array) -> list[Array]:
                return list(surrogate(*_replaced(leaves, traced, _replaced(primals, moving, arrays))))

            _, along = jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])
            return call(*primals), along

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

    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        return jnp.reshape(array, shape)

    def row_numbers(self, array: Array) -> Array:
        return jnp.arange(array.size, dtype=jnp.int32) // jnp.int32(array.shape[-1])

    def cumsum(self, array: Array) -> Array:
        return jnp.cumsum(array, dtype=jnp.int32)

    def search_sorted(self, ordered: Array, keys: Array) -> Array:
        return jnp.searchsorted(ordered, keys).astype(jnp.int32)

    def loop(
        self, condition: Callable[..., Array], body: Callable[..., tuple[Array, ...]], *carry: Array
    ) -> tuple[Array, ...]:
        if isinstance(condition(*carry), Tracer):
            return lax.while_loop(lambda carry: condition(*carry), lambda carry: body(*carry), carry)
        return super().loop(condition, body, *carry)

    def repeat(
        self,
        turns: Array,
        body: Callable[[Array, list[Array], list[Array]], list[Array]],
        carry: Sequence[Array],
        constants: Sequence[Array],
        most: int,
    ) -> list[Array]:
        known = self.concrete(turns)
        if known is not None:
            return super().repeat(known, body, carry, constants, most)
        carry, n = _alike([*carry, *constants], carry), len(carry)

        def loop(turns: Array, *arrays: Array) -> list[Array]:
            def turn(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
                return state[0] + 1, body(state[0], state[1], list(arrays[n:]))

            return lax.while_loop(lambda state: state[0] < turns, turn, (jnp.zeros_like(turns), list(arrays[:n])))[1]

        def bounded(turns: Array, *arrays: Array) -> list[Array]:
            """JAX has no reverse of the loop; of so many turns it has."""

            def turn(carry: list[Array], i: Array) -> tuple[list[Array], None]:
                return lax.cond(i < turns, lambda carry: body(i, carry, list(arrays[n:])), list, carry), None

            return lax.scan(turn, list(arrays[:n]), jnp.arange(most, dtype=turns.dtype))[0]

        return self.custom_derivative(loop, bounded, [turns, *carry, *constants])

    def stack(self, arrays: Sequence[Array]) -> Array:
        return jnp.stack(arrays)

    def slice_at(self, array: Array, i: Array | int) -> Array:
        return lax.dynamic_index_in_dim(array, i, keepdims=False)

    def update_at(self, array: Array, i: Array | int, row: Array) -> Array:
        array, row = _alike([array, row], [array, row])
        return lax.dynamic_update_index_in_dim(array, row, i, axis=0)

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        return jnp.concatenate(list(arrays), axis)

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


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(kernel: Kernel, static: tuple[Hashable, ...], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(kernel(BACKEND, *static, *arrays))


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

    # XLA on CPU gives the rows of a result to different cores, and a scalar to one; elsewhere rows would be written.
    return lax.platform_dependent(*arrays, cpu=of_rows, default=of_all)


def _summed(terms: Sequence[Array], axis: int) -> tuple[Array, ...]:
    """The sums over this axis and those after it.

    Reduced together, what they are made of is read once; and on CPU a reduction of one array alone is cut into windows,
    which takes thirty times as long.
    """
    zeros = [jnp.zeros((), term.dtype) for term in terms]
    return tuple(lax.reduce(list(terms), zeros, lambda a, b: [*map(lax.add, a, b)], tuple(range(axis, terms[0].ndim))))


def _rows(shape: tuple[int, ...]) -> int:
    """How many sums to make first: one for each index of the first axis, or part of a vector; 1 if they are short."""
    size = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else next((n for n in (64, 16, 4, 2) if size % n == 0), 1)
    return rows if size >= 256 * rows > 0 else 1


def _replaced(items: Sequence[Any], positions: Sequence[int], others: Sequence[Any]) -> list[Any]:
    result = list(items)
    for i, other in zip(positions, others, strict=True):
        result[i] = other
    return result


def _alike(among: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
    """The arrays, varying over all axes over which any ``among`` them does: as loops and updates in place ask for."""
    axes = frozenset[str]().union(*map(varying, among))
    missing = [tuple(axes - varying(array)) for array in arrays]
    pairs = zip(arrays, missing, strict=True)
    return [lax.pcast(array, names, to="varying") if names else jnp.asarray(array) for array, names in pairs]


def _canonical(dtype: np.dtype) -> np.dtype:
    """The dtype that JAX has for one of NumPy: of 32 bits for one of 64, unless jax_enable_x64 is set."""
    if not has_dtype(dtype):
        raise invalid("a dtype that JAX has", dtype)
    return jax.dtypes.canonicalize_dtype(dtype)


@cache
def has_dtype(dtype: np.dtype) -> bool:
    """Whether JAX has it, and XLA, which computes with numbers of 6 bits nowhere, and of 1 bit in part."""
    computes = not dtype.name.startswith("float6_") and dtype.name not in ("int1", "uint1")
    return computes and dtype.isnative and hasattr(jnp, dtype.name)


def _exactly(array: Array, dtype: np.dtype) -> Array:
    if array.dtype != dtype:
        raise invalid(f"{dtype} (set jax_enable_x64 for 64-bit values)", array.dtype)
    return array


def _full_like(leaf: Leaf, fill: float, dtype: np.dtype) -> Array:
    """Of the shape and the sharding of an array or spec, and varying over the same axes."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return _placed_like(leaf, jnp.full_like(leaf, fill, dtype))
    # Beside manual axes full_like forgets explicit ones, and fails for a spec that varies.
    kind = jax.typeof(leaf).sharding if isinstance(leaf, jax.Array) else leaf.sharding
    device = kind if isinstance(kind, NamedSharding) and kind.mesh.explicit_axes else None
    return _alike([leaf], [jnp.full(leaf.shape, fill, dtype, device=device)])[0]


def _placed_like(leaf: Leaf, made: Array) -> Array:
    # A constant in a compiled program depends on nothing, so that the partitioner is free to put all of it on every
    # device. Where the sharding is known while tracing, by a spec or an array from outside, it is asked for.
    sharding = None if isinstance(leaf, Tracer) else leaf.sharding
    if isinstance(made, Tracer) and isinstance(sharding, NamedSharding) and sharding.mesh.are_all_axes_auto:
        return lax.with_sharding_constraint(made, sharding)
    return made


BACKEND = JaxBackend()
