# pyright: standard
"""A training step over variables that accumulates gradients and all-reduces and applies them once per window."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gradcombine import reductions, tree
from gradcombine.backends.tensorflow_backend import BACKEND
from gradcombine.errors import invalid, operation, require_equal, require_items, shown, within
from gradcombine.integrations.keras_optimizers import require_built_with, require_each_once
from gradcombine.integrations.tensorflow.boundary import Update
from gradcombine.integrations.tensorflow.inputs import (
    checked_result,
    dense_gradients,
    keras_optimizer,
    local_replicas,
    require_context,
    require_created_in_scope,
    require_gradients,
    require_same_length,
    require_synchronous,
)
from gradcombine.integrations.tensorflow.several_terms import LossOfTerms, WindowMetrics
from gradcombine.integrations.tensorflow.state import (
    Pending,
    ReplicaState,
    WithSeen,
    converted,
    differs,
    effects_since,
    graph_size,
    in_local_variables,
    neutral,
    run_after,
)
from gradcombine.places.replicas import tf_replicas
from gradcombine.places.window import Window
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check
from gradcombine.types import AccumulateState, Array, Leaf, Order, Scalar, Totals, Tree

__all__ = ["AccumulatedStep"]


class AccumulatedStep(WithSeen):
    """A training step that accumulates microbatches and, once per window, all-reduces and applies the gradients.

    Every call computes the gradients of one microbatch on each replica and adds them to the replica's accumulators, in
    variables that are updated in place. At the boundary, and only there, the windows are merged over the replicas,
    divided once by their total weight, and applied. With the default `gradcombine.reductions.mean` and the number of
    examples (or tokens) of a microbatch as its weight, the result is the gradient of the window's entire batch, however
    unevenly it is divided into microbatches and among replicas.

    Call the step in cross-replica context, eagerly or in a tf.function, which is traced once. The boundary is a tf.cond
    outside of the replicas, which exchange nothing between boundaries. Without a strategy the step can be compiled with
    ``jit_compile=True``; under a strategy, compile the function ``gradients`` instead.

    Args:
      gradients: ``gradients(*batch) -> (gradients, weight)`` or ``(gradients, weight, outputs)`` of one microbatch,
        called in replica context. Gradients: one per variable, of its shape and dtype, averaged over the microbatch and
        not yet combined over replicas; None for "no gradient"; tf.IndexedSlices become dense. Weight: a finite,
        nonnegative scalar; a microbatch of weight 0 adds nothing. Outputs: any structure of tensors.
      variables: tf.Variables or Keras variables, each once, created under the strategy in scope.
      apply: a Keras optimizer, built here if necessary, or with these variables (more are left alone); or a function
        ``apply(gradients, variables)``, called in cross-replica context with tensors that are identical on all
        replicas. As in Keras, variables that have never had a gradient are left out: neither they nor their slots
        change. Any gradient other than None counts, also zeros, on any replica. If it is not known while tracing
        whether a variable has had one, a graph applies all gradients, and then restores the variables that have not,
        with their slots in a Keras optimizer, but nothing else that a function changes.
      every: number of microbatches per window: an integer of 1 or more, or a function of the window's index.
      reduction: from `gradcombine.reductions`.
      order: as for `gradcombine.accumulate` over time, and for `gradcombine.merge_replicas` over replicas.
      max_every: as for `gradcombine.accumulate`.
      terms: for a loss of several terms, the name of each term's denominator: ``{"ce": "tokens", "balance":
        "microbatches"}``. Instead of ``gradients``, pass a loss, which the step differentiates:
        ``loss(*batch) -> (values, weights)`` or ``(values, weights, outputs)``. The values are a dict of the terms by
        name, each a *sum*, a floating scalar; the weights are a dict of the denominators by name, each the
        microbatch's contribution. The step applies the gradient of ``sum_j (sum_i L_ij) / (sum_i W_ij)`` over all
        microbatches i of all replicas: see `docs/losses.md`. ``reduction`` is a mean (with ``totals``, a sum). For a
        Keras optimizer that scales the loss, the step scales it, so ``loss`` must not.
      totals: None: the denominators' totals are unknown until the window ends, and each denominator has its own
        accumulators and backward pass. ``"given"``: each call takes the totals as ``totals={...}``, the same in all
        calls of a window, and one set of accumulators and one backward pass suffice; a flush divides by these totals.

    Raises:
      GradCombineError: for variables or an optimizer of another strategy, an optimizer that was built with other
        variables, a call inside ``strategy.run`` or under another strategy, gradients that do not match the variables,
        a call without any gradient if there was none before; and as `gradcombine.accumulate`. The windows are unchanged
        then.

    Bits: order ``"sequential"``: those of `gradcombine.accumulate` on each replica, added over replicas in the order
    that the strategy's all-reduce chooses. Order ``"tree"``: those of `gradcombine.combine` over the entire window,
    replica 0's microbatches first, if all replicas hold the same power of two of them.

    A tf.train.Checkpoint of the step resumes bit for bit in the middle of a window: it holds the window of each
    replica, their common position, and `seen`, but not the variables and the optimizer, which are saved separately.
    Under more replicas, the additional windows stay empty; under fewer, contributions would be missing:
    ``assert_consumed()`` raises for both, ``assert_existing_objects_matched()`` for more only. After `load_states`, or
    from an older checkpoint without `seen`, variables count as seen if their combined gradient in the window differs
    from that of an empty window.

    References: `Custom training with tf.distribute.Strategy
    <https://www.tensorflow.org/tutorials/distribute/custom_training>`_; `tf.VariableSynchronization
    <https://www.tensorflow.org/api_docs/python/tf/VariableSynchronization>`_.

    >>> import tensorflow as tf
    >>> w = tf.Variable([8.0, 8.0])
    >>> def gradients(x):
    ...     return [tf.reduce_mean(x, axis=0)], tf.shape(x)[0]
    >>> def apply(gradients, variables):
    ...     for g, v in zip(gradients, variables):
    ...         v.assign_sub(g)
    >>> step = AccumulatedStep(gradients, [w], apply, every=2)
    >>> applied, _ = step(tf.constant([[1.0, 2.0]]))
    >>> bool(applied), w.numpy()
    (False, array([8., 8.], dtype=float32))
    >>> applied, _ = step(tf.constant([[3.0, 4.0], [3.0, 4.0], [5.0, 6.0]]))
    >>> bool(applied), w.numpy()
    (True, array([5., 4.], dtype=float32))
    """

    @operation("AccumulatedStep")
    def __init__(
        self,
        gradients: Callable[..., Tree],
        variables: Sequence[Any],
        apply: Any,
        every: int | Callable[[Array], Scalar],
        *,
        reduction: Reduction | None = None,
        order: Order = "sequential",
        max_every: int | None = None,
        terms: Mapping[str, str] | None = None,
        totals: Totals | None = None,
    ) -> None:
        optimizer = keras_optimizer(apply)
        check(gradients=gradients)
        super().__init__()
        self._strategy = tf.distribute.get_strategy()
        require_context(self._strategy)
        require_synchronous(self._strategy)
        # As attributes, so that checkpoints include those that are trackable.
        self._gradients, self._apply, self._optimizer = gradients, apply, optimizer
        self._terms: LossOfTerms | None = None
        if terms is not None:
            self._terms = LossOfTerms(terms, totals, reduction, optimizer)
            reduction = self._terms.reduction
        elif totals is not None:
            raise invalid("terms, for totals", "none")
        reduction = reductions.mean() if reduction is None else reduction
        self._window = Window(reduction, every, tf_replicas(), order, max_every)
        require_same_length(self._strategy, every)
        targets = require_items("a list of variables", variables)
        require_each_once(targets)
        for i, target in enumerate(targets):
            require_created_in_scope(self._strategy, target, f"[{i}]")
        # In a closure: tf.Module would wrap a list, and cannot save Keras variables.
        self._targets = lambda: targets
        if optimizer is not None:
            require_created_in_scope(self._strategy, optimizer.iterations, ".iterations")
            if not optimizer.built:
                optimizer.build(targets)
            require_built_with(optimizer, targets)
        self._update = Update(self._strategy, apply, optimizer, targets)
        specs = [tf.TensorSpec(target.shape, target.dtype) for target in targets]
        self._like = lambda chosen: self._terms.like(chosen) if self._terms is not None else chosen
        self._state = in_local_variables(self._window, self._like(specs))
        self.position, self.windows = self._state.position, self._state.windows
        self.layout = self._state.layout()
        self._metrics = None if self._terms is None else self._terms.metrics(self._window, specs)
        if self._metrics is not None:
            self.metrics_position, self.metrics_windows = self._metrics.position, self._metrics.windows
        self._is_single_process = local_replicas(self._strategy) == self._strategy.num_replicas_in_sync
        self.make_seen(len(targets))

    def __call__(
        self, *batch: Tree, totals: Mapping[str, Tree] | None = None, number: Scalar | None = None
    ) -> tuple[Any, ...]:
        """Adds one microbatch on each replica, and applies the window if it is full.

        Args:
          *batch: arguments of ``gradients``; under a strategy, tf.distribute's per-replica values.
          totals: with ``totals="given"``, by denominator the total of the window over its microbatches and replicas.
          number: number of the microbatch, with `gradcombine.reductions.numbered`; under a strategy, a per-replica
            value. A number that the replica's window already holds adds nothing, traced or not, but its call counts
            toward ``every`` (use ``gc.UNTIL_FLUSH`` if microbatches may be repeated). None: its position.

        Returns:
          Boolean scalar: whether the window was full and has been applied; and the ``outputs`` of ``gradients``, per
          replica under a strategy (None if there are none). With ``terms``, also the `WindowMetrics` of the window that
          was applied, zeros if none was.
        """
        return self._step(tf.__internal__.autograph.control_status_ctx(), batch, totals, number)

    def flush(self) -> Array:
        """Applies a partial window, divided by its actual weight, and starts a new one, e.g. at the end of the data.

        Returns:
          Boolean scalar: whether there was a partial window. Otherwise nothing changes. With ``terms``, a pair of this
          and the metrics.
        """
        return self._flush(tf.__internal__.autograph.control_status_ctx())

    @operation("AccumulatedStep")
    def states(self) -> list[AccumulateState]:
        """Returns the window of each replica of this process, by rank, for `gradcombine.statefile`; eager only.

        Returns:
          One state of ``gradcombine.accumulate(reduction, every)`` per replica, for a list of one gradient per
          variable. They include neither the variable `seen` nor, with ``terms``, the metrics (`metrics_position`,
          `metrics_windows`), which can be saved and assigned separately: without them, the metrics of a resumed window
          leave out its earlier microbatches.
        """
        require_context(self._strategy)
        columns = [self._local(x) for x in self._strategy.run(self._state.flat)]
        # strategy.run returns an object that is shared by all replicas once.
        count = max(map(len, columns))
        by_replica = [column if len(column) == count else column * count for column in columns]
        return [self._state.unflat(arrays) for arrays in zip(*by_replica, strict=True)]

    @operation("AccumulatedStep")
    def load_states(self, states: Sequence[AccumulateState]) -> None:
        """Replaces the windows; eager only.

        Args:
          states: one per replica of this process, of NumPy arrays or tensors, as returned by `states` or
            `gradcombine.statefile.resize`.

        Raises:
          GradCombineError: for another number of states, or states that do not match; nothing is written then.
        """
        require_context(self._strategy)
        current = self.states()
        states = require_items("a list of states, one per replica", states)
        require_equal("{} states, one per replica", len(current), len(states))
        for rank, (expected, received) in enumerate(zip(current, states, strict=True)):
            with within(f"[{rank}]"):
                tree.require_alike(expected, received)
        first = int(self._local(self._strategy.run(_rank))[0])
        self._strategy.run(lambda: self._state.write(Pending(states[int(tf.get_static_value(_rank())) - first])))

    # AutoGraph would take seconds to convert the library's code, which does not need it. The caller's functions are
    # converted if the surrounding tf.function uses AutoGraph, according to ``status``.
    @operation("AccumulatedStep")
    @tf.autograph.experimental.do_not_convert
    def _step(self, status: Any, batch: tuple[Any, ...], totals: Tree, number: Scalar) -> tuple[Any, ...]:
        require_context(self._strategy)
        takes_totals = self._terms is not None and self._terms.takes_totals
        if (totals is not None) != takes_totals:
            raise invalid("totals={...} in each call if, and only if, the step has totals='given'", shown(totals))
        # All replicas compute before any of them writes: a failure on one leaves all windows unchanged.
        compute, size_before = converted(self._gradients, status), graph_size()
        # Filled while the replicas' function is traced.
        present: set[int] = set()
        pending, ready, outputs = self._strategy.run(self._accumulated, args=(present, compute, totals, number, *batch))
        if not present:
            self._require_earlier_gradient()
        full = self._agreed(ready)
        tensors = [x for x in tf.nest.flatten(self._local((pending, full)), expand_composites=True) if tf.is_tensor(x)]
        with run_after([*effects_since(size_before), *tensors]):
            computed = tf.no_op()

        def write(pending: list[Pending]) -> None:
            with run_after([computed]):
                for state, new in zip(self._states(), pending, strict=True):
                    state.write(new)

        self._strategy.run(write, args=(pending,))
        with run_after([computed]):
            self.see(present)
        metrics = self._apply_if(full, present, status)
        return (full, outputs) if self._terms is None else (full, outputs, metrics)

    @operation("AccumulatedStep")
    @tf.autograph.experimental.do_not_convert
    def _flush(self, status: Any) -> Array:
        require_context(self._strategy)
        is_partial = self._strategy.run(lambda: self._window.is_partial(self._state.unread()))
        applied = self._agreed(is_partial)
        metrics = self._apply_if(applied, (), status)
        self._strategy.run(self._end)
        return applied if self._terms is None else (applied, metrics)

    def _accumulated(
        self, present: set[int], compute: Callable[..., Tree], totals: Tree, number: Scalar, *batch: Tree
    ) -> tuple[Any, tf.Tensor, Any]:
        targets = self._targets()
        if self._terms is None:
            gradients, weight, *outputs = checked_result(compute(*batch), targets)
            gradient_lists, contributions = [gradients], [gradients]
        else:
            by_denominator, weights, weight, parts, outputs = self._terms.computed(compute, batch, totals, targets)
            dense = {name: dense_gradients(grads, targets) for name, grads in by_denominator.items()}
            gradient_lists, contributions = list(dense.values()), [self._terms.contribution(dense, weights), parts]
        if number is not None and self._window.reduction.microbatches is not None:
            weight, number = self._window.once(self._state.read(), weight, number)
        # The metrics' reduction is not numbered.
        triples = zip(self._states(), contributions, (number, None), strict=False)
        results = [state.contributed(contribution, weight, n) for state, contribution, n in triples]
        pending, (ready, *_) = zip(*results, strict=True)
        pending = [new._replace(after=self._window.end(new.after, ready)) for new in pending]
        present |= {i for grads in gradient_lists for i, gradient in enumerate(grads) if gradient is not None}
        return pending, ready, outputs[0] if outputs else None

    def _states(self) -> list[ReplicaState]:
        """States of each replica: the window's, and the metrics' if there are any."""
        return [self._state] if self._metrics is None else [self._state, self._metrics]

    def _end(self) -> None:
        for held in self._states():
            state = held.unread()
            held.write_step(self._window.end(state, self._window.is_partial(state)).step)

    def _require_earlier_gradient(self) -> None:
        is_partial = self._strategy.run(lambda: self._window.is_partial(self._state.unread()))
        had = tf.reduce_any(self.seen) | self._local(is_partial)[0]
        BACKEND.check(had, "AccumulatedStep", "a gradient for one variable or more, in this call or one before", "none")

    def _apply_if(self, condition: tf.Tensor, present: Collection[int], status: Any) -> Array:
        # In cross-replica context: tf.distribute does not allow collectives in a conditional in replica context.
        terms = self._terms
        return tf.cond(
            condition,
            lambda: self._merge_and_apply(present, status),
            lambda: None if terms is None else terms.empty_metrics(),
        )

    def _merge_and_apply(self, present: Collection[int], status: Any) -> WindowMetrics | None:
        merged = self._strategy.run(lambda: require_gradients(self._state.value()))
        # Replicas of other processes may have gradients of other variables, but all have to take the same branch.
        known = present if self._is_single_process else ()
        self._update.run_where(lambda: self._touched(merged, known), merged, known, status)
        if self._terms is None or self._metrics is None:
            return None
        metrics = self._strategy.run(self._metrics.value)
        return WindowMetrics(**tf.nest.map_structure(lambda x: self._local(x)[0], metrics))

    def _touched(self, merged: Sequence[Leaf], known: Collection[int]) -> tf.Tensor:
        """Boolean vector: the variables that have had a gradient on any replica."""
        over = tf_replicas()
        counts = self._strategy.run(lambda: over.all_sum([tf.cast(tf.convert_to_tensor(self.seen), tf.int32)])[0])
        seen = self._local(counts)[0] > 0

        def with_nonempty() -> tf.Tensor:
            """Adds variables with nonempty accumulators, in case a window was restored without `seen`."""
            like = [None if i in known else tf.TensorSpec(x.shape, x.dtype) for i, x in enumerate(self._targets())]
            pairs = enumerate(zip(merged, neutral(self._window, self._like(like)), strict=True))
            return seen | tf.stack([i in known or differs(self._local(x)[0], empty) for i, (x, empty) in pairs])

        touched = tf.cond(tf.reduce_all(seen), lambda: seen, with_nonempty)
        self.seen.assign(touched)
        return touched

    def _agreed(self, condition: Scalar) -> tf.Tensor:
        """Returns the condition; raises if it differs between replicas because their window lengths differ."""
        first, *others = self._local(condition)
        for other in others:
            expected = "a window length that is the same on all replicas"
            BACKEND.check(tf.equal(first, other), "AccumulatedStep", expected, "another length on some of them")
        return first

    def _local(self, value: Tree) -> Array:
        return self._strategy.experimental_local_results(value)


def _rank() -> Array:
    return tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group)
