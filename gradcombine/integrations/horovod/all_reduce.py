"""Horovod's all-reduce of gradients, over gradcombine's replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from gradcombine import reductions, tree, wires
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.backends.tensorflow_backend import BACKEND
from gradcombine.errors import (
    GradCombineError,
    invalid,
    operation,
    require_distinct,
    require_integer,
    require_items,
    require_number,
    require_one_of,
    shown,
)
from gradcombine.integrations.tensorflow import indexed_slices as sparse
from gradcombine.places import replicas
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check
from gradcombine.types import Array, DType, Leaf, Order, Scalar, Tree, no_autograph

Op = Literal["average", "sum", "min", "max", "product", "adasum"]

_REDUCTIONS: dict[str, Callable[..., Reduction]] = {
    "average": reductions.mean,
    "sum": reductions.sum,
    "min": reductions.min,
    "max": reductions.max,
    "product": reductions.product,
    "adasum": reductions.adasum,
}


class HorovodError(GradCombineError):
    """An error with Horovod's message, which programs may match.

    Args:
      text: the message that ``str`` returns.
      operation, expected, received, path: as for `gradcombine.GradCombineError`.
    """

    def __init__(self, text: str, operation: str, expected: str, received: Any, path: str = "") -> None:
        super().__init__(operation, expected, received, path)
        self.text = text

    def __str__(self) -> str:
        return self.text


@operation("AllReduce")
@no_autograph
class AllReduce:
    """A function that combines a list of gradients over ranks, like ``hvd.grouped_allreduce``.

    For use in `LocalGradientAggregation`, and wherever `gradcombine.all_reduce` can be called: with JAX arrays inside
    pmap, vmap or shard_map, with TensorFlow tensors in the replica context of a strategy.

    Args:
      over: the collective: `gradcombine.LOCAL`, `gradcombine.jax_axis` or `gradcombine.tf_replicas`.
      op: ``"average"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"`` or ``"adasum"``.
      prescale_factor: multiplies each float gradient before the all-reduce.
      postscale_factor: multiplies the result.
      gradient_predivide_factor: divides each gradient before an average, and multiplies the average: this keeps the
        sum on the wire small, and the average the same.
      process_set: the ranks that take part; None: all. The other ranks get their gradients back unchanged.
      compression: the dtype in which ranks send float gradients, as for `gradcombine.wires.cast`: ``"float16"`` is
        Horovod's Compression.fp16, but sums in float32. Not for minima and maxima.
      sparse_as_dense: whether tf.IndexedSlices are converted to dense tensors. If not, ranks exchange their rows; only
        for sums and averages.
      order: as for `gradcombine.all_reduce`.

    Raises:
      GradCombineError: for an invalid op, factor, process set or compression, and as `gradcombine.all_reduce`. Ranks
        of the process set that do not exist raise when the object is called.

    Bits: as `gradcombine.all_reduce` with the reduction of that name; each factor rounds once, in float32 or wider. An
    average is divided once by the number of ranks, while Horovod multiplies by its rounded reciprocal. The gradients of
    a call are all-reduced together, once per dtype.

    References: `hvd.grouped_allreduce and hvd.DistributedOptimizer
    <https://horovod.readthedocs.io/en/stable/api.html#module-horovod.tensorflow>`_.

    >>> import numpy as np, gradcombine as gc
    >>> AllReduce(gc.LOCAL, "sum", postscale_factor=0.5)([np.float32([1, 2]), None])
    [array([0.5, 1. ], dtype=float32), None]
    """

    def __init__(
        self,
        over: Collective,
        op: Op = "average",
        *,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        gradient_predivide_factor: float = 1.0,
        process_set: Sequence[int] | None = None,
        compression: DType = None,
        sparse_as_dense: bool = False,
        order: Order = "sequential",
    ) -> None:
        check(order=order, over=over, sparse_as_dense=sparse_as_dense)
        require_one_of(f"an op of {list(get_args(Op))}", op, get_args(Op))
        prescale_factor, postscale_factor, gradient_predivide_factor = (
            require_number("finite factors, and no predivision by 0", factor, -math.inf)
            for factor in (prescale_factor, postscale_factor, gradient_predivide_factor)
        )
        if gradient_predivide_factor == 0:
            raise invalid("finite factors, and no predivision by 0", gradient_predivide_factor)
        if gradient_predivide_factor != 1 and op != "average":
            message = "gradient_predivide_factor not supported with op != Average"
            raise HorovodError(message, "AllReduce", "gradient_predivide_factor 1", gradient_predivide_factor)
        if compression is not None and op in ("min", "max"):
            raise invalid(f"no compression for {op!r}", shown(compression))
        self._over, self._op = over, op
        self._order: Order = order
        self._prescale = prescale_factor / gradient_predivide_factor
        self._postscale = postscale_factor * gradient_predivide_factor
        self._process_set = None if process_set is None else _ranks(process_set)
        self._sparse_as_dense = sparse_as_dense
        self._reduction, self._compressed = _REDUCTIONS[op](), None
        if compression is not None:
            self._compressed = _REDUCTIONS[op](wire=wires.cast(_name(compression)))

    def size(self) -> int:
        """Number of ranks that take part."""
        return self._over.size() if self._process_set is None else len(self._process_set)

    def __call__(self, gradients: Tree, variables: Any = None) -> Tree:
        """Combines gradients over the ranks.

        Args:
          gradients: gradients of this rank, a list or another tree. A leaf that is None on all ranks stays None.
          variables: ignored; accepted because Horovod's function takes them.

        Returns:
          The combined gradients, of the same structure and dtypes.
        """
        leaves, structure = tree.flatten(gradients)
        slices = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, tf.IndexedSlices)}
        if self._sparse_as_dense:
            leaves = [sparse.dense(leaf) if i in slices else leaf for i, leaf in enumerate(leaves)]
            slices = {}
        paths = list(structure.paths())
        included = self._included(resolve(leaves), leaves)
        dense = [None if i in slices else leaf for i, leaf in enumerate(leaves)]
        combined = self._dense(dense, paths, included)
        for i, leaf in slices.items():
            combined[i] = self._sparse(leaf, paths[i], included)
        return tree.unflatten(structure, combined)

    def _dense(self, leaves: list[Leaf], paths: list[str], included: Array) -> list[Leaf]:
        if all(is_absent(leaf) for leaf in leaves):
            return leaves
        backend = resolve(leaves)
        scaled = [_times(backend, x, self._prescale, path) for x, path in zip(leaves, paths, strict=True)]
        weight = 1 if included is None else included
        reduced = self._reduced(backend, scaled, weight)
        combined = [_times(backend, x, self._postscale, path) for x, path in zip(reduced, paths, strict=True)]
        if included is None:
            return combined
        take = included > backend.full((), 0, dtypes.INT32)
        return [
            old if is_absent(old) else backend.where(take, new, backend.cast(backend.asarray(old), backend.dtype(new)))
            for old, new in zip(leaves, combined, strict=True)
        ]

    def _reduced(self, backend: Backend, gradients: list[Leaf], weight: Scalar) -> list[Leaf]:
        if self._compressed is None:
            return replicas.all_reduce(self._reduction, gradients, self._over, weight, self._order)
        is_float = [not is_absent(x) and dtypes.kind(backend.dtype(x)) == "float" for x in gradients]
        results: dict[bool, list[Leaf]] = {}
        for floats, reduction in ((True, self._compressed), (False, self._reduction)):
            chosen = [x if is_f == floats else None for x, is_f in zip(gradients, is_float, strict=True)]
            results[floats] = replicas.all_reduce(reduction, chosen, self._over, weight, self._order)
        return [results[is_f][i] for i, is_f in enumerate(is_float)]

    def _sparse(self, slices: tf.IndexedSlices, path: str, included: Array) -> tf.IndexedSlices:
        if self._op not in ("average", "sum"):
            raise invalid(f"dense gradients for {self._op!r}, or sparse_as_dense", "sparse", path)
        values = _times(BACKEND, slices.values, self._prescale, path)
        gathered = sparse.gather(self._over, sparse.with_values(slices, values), included)
        if self._op == "average":
            divisor = BACKEND.full((), self.size(), BACKEND.dtype(values))
            gathered = sparse.with_values(gathered, BACKEND.divide(gathered.values, divisor))
        gathered = sparse.with_values(gathered, _times(BACKEND, gathered.values, self._postscale, path))
        return gathered if included is None else sparse.choose(included > 0, gathered, slices)

    def _included(self, backend: Backend, leaves: list[Leaf]) -> Array | None:
        """1 on ranks in the process set and 0 on others; None without a process set or without gradients."""
        if self._process_set is None:
            return None
        size = self._over.size()
        if max(self._process_set) >= size:
            raise invalid(f"a process set of ranks below {size}", list(self._process_set))
        if all(is_absent(leaf) for leaf in leaves):
            return None  # without arrays the backend is NumPy's, which cannot read a traced rank
        table = np.array([rank in self._process_set for rank in range(size)], np.int32)
        return backend.slice_at(backend.asarray(table), self._over.rank())


def _ranks(process_set: Sequence[int]) -> tuple[int, ...]:
    expected = "a process set of different ranks, one or more"
    ranks = tuple(require_integer(expected, rank, 0) for rank in require_items(expected, process_set))
    require_distinct(expected, ranks)
    return ranks


def _name(compression: DType) -> Any:
    """Name of a dtype that is a name, a dtype object or a type."""
    return getattr(dtypes.parse(compression), "name", compression)


def _times(backend: Backend, x: Leaf, factor: float, path: str) -> Array:
    if is_absent(x) or factor == 1:
        return x
    dtype = backend.dtype(x)
    if dtypes.kind(dtype) not in ("float", "complex"):
        raise invalid(f"no factors for a gradient of {dtype}", factor, path)
    working = dtypes.working(dtype)
    wide = backend.cast(backend.asarray(x), working)
    return backend.cast(backend.scale(wide, backend.full((), factor, dtypes.part(working))), dtype)
