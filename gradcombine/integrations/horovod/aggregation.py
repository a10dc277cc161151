# pyright: standard
"""Horovod's local gradient aggregation: one all-reduce per several backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from gradcombine import reductions
from gradcombine.backends.tensorflow_backend import BACKEND
from gradcombine.errors import (
    MOST,
    GradCombineError,
    invalid,
    operation,
    require_equal,
    require_given,
    require_integer,
    require_items,
    require_one_of,
    shown,
    translate_errors,
    within,
)
from gradcombine.integrations.horovod.all_reduce import HorovodError
from gradcombine.integrations.tensorflow import indexed_slices as sparse
from gradcombine.integrations.tensorflow.inputs import require_gradients
from gradcombine.integrations.tensorflow.state import (
    Pending,
    ReplicaState,
    WithSeen,
    branch,
    completed,
    converted,
    differs,
    in_local_variables,
    neutral,
    run_after,
)
from gradcombine.places.window import Window
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check
from gradcombine.types import Array, Leaf, Scalar

Mode = Literal["eager", "graph"]


class LocalGradientAggregation(WithSeen):
    """Sums the gradients of several backward passes; the last pass combines them over ranks and applies them.

    The two methods replace those of Horovod's LocalGradientAggregationHelper (mode ``"graph"``) and
    LocalGradientAggregationHelperEager (mode ``"eager"``). Both modes run eagerly, in a tf.function and in a tf.Graph
    of TensorFlow 1; they differ in what a pass before the boundary returns.

    Args:
      backward_passes_per_step: k, the number of backward passes from one boundary to the next. 1: all gradients are
        combined in each pass, including sparse ones.
      allreduce: ``allreduce(gradients, variables) -> gradients``, a function of lists of equal length without None: an
        `AllReduce`, or Horovod's function.
      sparse_as_dense: whether tf.IndexedSlices are converted to dense tensors. If not, they are an error for k > 1.
      average_aggregated_gradients: whether to divide the result by k.
      mode: what a pass before the boundary returns. ``"graph"``: its gradients. ``"eager"``: the sums so far. None: as
        in Horovod, ``"graph"`` if this object is created in a graph, else ``"eager"``.
      size: the number of ranks by which the gradients of local variables are divided, an integer or a function. None:
        ``allreduce.size()``.
      scale_local_gradients: whether to divide the gradients of local variables.
      reduction: combines the passes; None: their sum, accumulated in float32 or wider.

    Raises:
      GradCombineError: for k <= 0 and for sparse gradients, with Horovod's messages; for lists that do not match; for
        k > 1 in a tf.function under a strategy of several replicas, where tf.distribute allows no collective in a
        conditional (use `gradcombine.integrations.tensorflow.AccumulatedStep` there). The window is then unchanged.
        This also holds for an error of ``allreduce`` in eager execution: the same pass can be repeated.

    Bits: the sums are those of `gradcombine.accumulate`; quotients are correctly rounded on CPU.

    A gradient that is None in all passes so far is None in the result. If it is None in some passes, these add nothing;
    a pass that returns its gradients then returns zeros for it. The first call creates the variables: it fixes the
    number of gradients, their shapes and their dtypes.

    The state attribute `seen` records which variables have had a gradient, and is part of checkpoints. For an older
    checkpoint without it, variables count if their sum in the window is not zero. A graph decides at trace time where
    it returns None. At the boundary, it raises an error if the window holds a gradient for such a variable, restored
    after tracing or added by another trace: trace it again. (XLA removes this check.)

    References: `Horovod with TensorFlow <https://horovod.readthedocs.io/en/stable/tensorflow.html>`_,
    ``backward_passes_per_step``.

    >>> import tensorflow as tf
    >>> w = tf.Variable([1.0])
    >>> aggregation = LocalGradientAggregation(2, lambda gradients, variables: [10 * g for g in gradients])
    >>> [aggregation.compute_gradients([tf.constant([x])], [w])[0].numpy().item() for x in (1.0, 2.0, 5.0)]
    [1.0, 30.0, 5.0]
    >>> int(aggregation.counter)
    1
    """

    @operation("LocalGradientAggregation")
    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce: Callable[[list[Leaf], list[Any]], Sequence[Leaf]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        *,
        mode: Mode | None = None,
        size: int | Callable[[], Any] | None = None,
        scale_local_gradients: bool = True,
        reduction: Reduction | None = None,
    ) -> None:
        check(
            allreduce=allreduce,
            sparse_as_dense=sparse_as_dense,
            average_aggregated_gradients=average_aggregated_gradients,
            scale_local_gradients=scale_local_gradients,
        )
        if size is not None and not callable(size):
            size = require_integer("a size of 1 or more, a function of it or None", size)
        super().__init__()
        self._k = require_integer("an integer backward_passes_per_step", backward_passes_per_step, lowest=-MOST)
        if self._k <= 0:
            message = "backward_passes_per_step must be > 0"
            expected = "backward_passes_per_step of 1 or more"
            raise HorovodError(message, "LocalGradientAggregation", expected, backward_passes_per_step)
        if mode is not None:
            require_one_of("mode 'eager', 'graph' or None", mode, ("eager", "graph"))
        self._graph_mode = mode == "graph" or (mode is None and not tf.executing_eagerly())
        self._allreduce, self._size = allreduce, size
        self._sparse_as_dense, self._average = sparse_as_dense, average_aggregated_gradients
        self._scale_local = scale_local_gradients
        self._local: set[Any] = set()
        self._window = Window(reductions.sum() if reduction is None else reduction, self._k)
        self._state: ReplicaState | None = None
        self._traced: set[int] = set()
        self._written: list[tf.Operation] = []

    @property
    def counter(self) -> tf.Tensor:
        """Number of passes since the last boundary, an int32 scalar; 0 right after it."""
        return tf.constant(0) if self._state is None else self._window.next(self._state.unread())[1]

    @operation("register_local_var")
    def register_local_var(self, variable: Any) -> None:
        """Excludes a variable from the all-reduce: each rank keeps its gradient, divided by the number of ranks."""
        self._local.add(_key(variable))

    @operation("compute_gradients")
    def compute_gradients(self, grads: Sequence[Leaf], vars: Sequence[Any]) -> list[Leaf]:
        """Processes the gradients of one backward pass.

        Args:
          grads: gradients of this pass: tensors, tf.IndexedSlices or None.
          vars: their variables.

        Returns:
          At a boundary, the combined sums of the window's passes; before it, as described for ``mode``.
        """
        gradients = require_items("a list of gradients", grads)
        variables = require_items("a list of variables", vars)
        require_equal("{} gradients", len(variables), len(gradients))
        for i, x in enumerate(gradients):
            if x is None or isinstance(x, tf.IndexedSlices):
                continue
            with within(f"[{i}]"):
                if not isinstance(x, (tf.Tensor, tf.Variable, np.ndarray)):
                    raise invalid("a tensor, tf.IndexedSlices or None", shown(x))
                gradients[i] = BACKEND.asarray(x)
        if self._sparse_as_dense:
            gradients = [sparse.dense(x) if isinstance(x, tf.IndexedSlices) else x for x in gradients]
        if self._k == 1:
            return self._combined(gradients, variables)
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                message = "IndexedSlices are not supported when `backward_passes_per_step` > 1"
                message += " and `sparse_as_dense` is False."
                raise HorovodError(message, "compute_gradients", "a dense gradient", "IndexedSlices", f"[{i}]")
        _require_no_conditional_collective()
        held = self._state_for(gradients, variables)
        state = self._window.contribute(held.read(), gradients)
        sums = require_gradients(self._window.value(state))
        present = {i for i, x in enumerate(gradients) if x is not None}
        returned = self._with_gradient(held, present)
        filled = [tf.zeros_like(total) if x is None else x for x, total in zip(gradients, sums, strict=True)]
        before_boundary = filled if self._graph_mode else sums
        full = self._window.is_full(state)
        checks = self._checks(full, sums, returned)
        selected = branch(
            full,
            lambda: self._combined([sums[i] for i in returned], [variables[i] for i in returned]),
            lambda: [before_boundary[i] for i in returned],
        )
        # Written last, so that the window is unchanged if the all-reduce fails.
        with run_after([*selected, *checks]):
            written = held.write(Pending(self._window.end(state, full)))
            seen = self.see(present)
        self._written = [*written, seen.op] if written else []
        results = dict(zip(returned, completed(selected, self._written), strict=True))
        return [results.get(i) for i in range(len(gradients))]

    @operation("apply_gradients")
    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> tf.Tensor:
        """Applies the gradients at a boundary; on other passes it only increments counters.

        Args:
          apply_grads_closure: called at a boundary (and before the first pass).
          optimizer: its ``iterations``, if it has them, are incremented on other passes.
          *args: ignored; accepted because Horovod's method takes the gradients.
          **kwargs: ``global_step``, if passed, is incremented on other passes.

        Returns:
          Whether the closure was called, a boolean scalar; in a tf.Graph, the tensor to run.
        """

        def only_count() -> list[Leaf]:
            counters = getattr(optimizer, "iterations", None), kwargs.get("global_step")
            return [x.assign_add(tf.ones((), x.dtype)) for x in counters if x is not None]

        with run_after(self._written):
            boundary = tf.equal(self.counter, 0)
            return branch(
                boundary, lambda: _done(True, converted(apply_grads_closure)()), lambda: _done(False, only_count())
            )

    def _state_for(self, gradients: list[Leaf], variables: list[Any]) -> ReplicaState:
        if self._state is None:
            with tf.init_scope():
                specs = list(map(_spec, gradients, variables, range(len(variables))))
                self._state = in_local_variables(self._window, specs)
                self.make_seen(len(variables), each_replica=True)
            # A closure, as tf.Module would track and save a list.
            self._specs = lambda: specs
            self.position, self.windows = self._state.position, self._state.windows
        return self._state

    def _with_gradient(self, held: ReplicaState, present: set[int]) -> list[int]:
        """Indices of the variables that have had a gradient, in this pass or according to the state."""
        seen = present | (set() if tf.executing_eagerly() else self._traced)
        with tf.init_scope():
            if tf.executing_eagerly():
                seen |= set(np.flatnonzero(tf.convert_to_tensor(self.seen)).tolist())
                others = [i for i in range(self.seen.shape[0]) if i not in seen]
                seen |= set(np.array(others, int)[self._is_nonzero(held.value(), others).numpy()].tolist())
        if not tf.executing_eagerly():  # remembered for later passes in the same graph
            self._traced |= present
        return sorted(seen)

    def _is_nonzero(self, sums: Sequence[Leaf], indices: Sequence[int]) -> tf.Tensor:
        """Whether the window's sums for these variables differ from those of an empty window, a boolean vector."""
        if not indices:
            return tf.zeros([0], tf.bool)
        empty = neutral(self._window, [x if i in indices else None for i, x in enumerate(self._specs())])
        return tf.stack([differs(sums[i], empty[i]) for i in indices])

    def _checks(self, full: Scalar, sums: Sequence[Leaf], returned: Sequence[int]) -> list[tf.Operation]:
        """Operations that raise at a boundary if a graph would return None for a gradient in the window."""
        others = [i for i in range(len(sums)) if i not in returned]
        if tf.executing_eagerly() or not others:
            return []
        lost = full & tf.reduce_any(self._is_nonzero(sums, others))
        expected = "a function traced after each variable of the window had a gradient: trace it again"
        received = "a gradient that was restored, or added by another trace, for a variable that it returns None for"
        message = str(GradCombineError("compute_gradients", expected, received))
        return [tf.debugging.Assert(~lost, [message])]

    def _combined(self, gradients: list[Leaf], variables: list[Any]) -> list[Leaf]:
        """All-reduces the gradients, except of local variables, and divides them as configured; skips None."""
        local = [_key(variable) in self._local for variable in variables]
        combined = list(gradients)
        shared = [i for i, x in enumerate(gradients) if x is not None and not local[i]]
        if shared:
            reduced = converted(self._allreduce)([gradients[i] for i in shared], [variables[i] for i in shared])
            reduced = require_items("a list of gradients from allreduce", reduced)
            require_equal("{} gradients from allreduce", len(shared), len(reduced))
            for i, x in zip(shared, reduced, strict=True):
                with within(f"[{i}]"):
                    combined[i] = _like(x, gradients[i])
        if self._scale_local and any(local):
            size = self._n_ranks()
            combined = [_divided(x, size) if is_local else x for x, is_local in zip(combined, local, strict=True)]
        return [_divided(x, self._k) for x in combined] if self._average else combined

    def _n_ranks(self) -> Array:
        size = getattr(self._allreduce, "size", None) if self._size is None else self._size
        size = require_given("a size, for the gradients of local variables", size)
        size = size() if callable(size) else size
        return size if isinstance(size, tf.Tensor) else require_integer("a size of 1 or more", size)


def _spec(gradient: Leaf, variable: Any, i: int) -> tf.TensorSpec:
    """Shape and dtype of a gradient; those of the variable if the gradient is None or its shape is unknown."""
    # Raised for objects without a shape or dtype, or with ones that TensorFlow does not know.
    with translate_errors(
        "a variable", AttributeError, TypeError, ValueError, received=lambda: shown(variable), path=f"[{i}]"
    ):
        spec = tf.TensorSpec(variable.shape, variable.dtype)
    if gradient is None:
        return spec
    return tf.TensorSpec(gradient.shape if gradient.shape.is_fully_defined() else spec.shape, gradient.dtype)


def _key(variable: Any) -> Any:
    """Identity of a variable; a Keras variable has that of its tf.Variable."""
    value = getattr(variable, "value", None)  # a method of a tf.Variable
    variable = variable if value is None or callable(value) else value
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def _like(reduced: Any, gradient: Leaf) -> Leaf:
    """A result of ``allreduce`` as a tensor; raises unless it has the dtype of its gradient, and its shape if dense."""
    is_sparse = isinstance(reduced, tf.IndexedSlices)
    if not is_sparse:
        if not isinstance(reduced, (tf.Tensor, tf.Variable, np.ndarray)):
            raise invalid("a tensor or tf.IndexedSlices from allreduce", shown(reduced))
        reduced = BACKEND.asarray(reduced)
    has_shape = is_sparse or isinstance(gradient, tf.IndexedSlices) or reduced.shape.is_compatible_with(gradient.shape)
    if reduced.dtype != gradient.dtype or not has_shape:
        received = f"{reduced.dtype.name} of shape {reduced.shape}"
        raise invalid(f"{gradient.dtype.name} of shape {gradient.shape} from allreduce", received)
    return reduced


def _divided(gradient: Leaf, divisor: Scalar) -> Array:
    """``gradient / divisor``, correctly rounded; unchanged for None and for a divisor of 1."""
    if gradient is None or (isinstance(divisor, int) and divisor == 1):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return sparse.with_values(gradient, _divided(gradient.values, divisor))
    if not (gradient.dtype.is_floating or gradient.dtype.is_complex):
        raise invalid("float or complex gradients, to divide them", gradient.dtype.name)
    dtype = np.dtype(gradient.dtype.real_dtype.as_numpy_dtype)
    return BACKEND.divide(gradient, BACKEND.cast(tf.convert_to_tensor(divisor), dtype))


def _done(applied: bool, results: Any) -> tf.Tensor:
    (result,) = completed([tf.constant(applied)], [x for x in tf.nest.flatten(results) if x is not None])
    return result


def _require_no_conditional_collective() -> None:
    context = tf.distribute.get_replica_context()
    replicas = 1 if context is None or tf.executing_eagerly() else context.num_replicas_in_sync
    if replicas > 1:
        expected = "an eager call (or AccumulatedStep): tf.distribute allows no collective in a conditional"
        raise invalid(expected, f"one in a tf.function, on {replicas} replicas")
