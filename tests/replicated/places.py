"""Runs cases of the model on two replicas, as one program: stacked in NumPy, in JAX, or under a strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import gradcombine as gc
from gradcombine import GradCombineError, replicated
from gradcombine.backends.jax_backend import varying
from tests.replicated.observed import Case
from tests.replicated.replay import Place, replay

Outcomes = dict[str, dict[str, Any]]
"""Outcomes by case."""

Program = Callable[[Callable[[Any], Any]], Outcomes]
"""``program(own)`` runs on each replica and returns arrays; ``own(values)`` selects the replica's value."""

ONE_VALUE = ("cross", "SUM", "MEAN")
"""Parts of an outcome that are one value for all replicas."""


def numpy_stacked(cases: list[Case]) -> Outcomes:
    def over_first_axis(reduction: Any, value: Any) -> Any:
        return gc.combine(reduction, list(value))

    place = Place(lambda values: values, over_first_axis, lambda function, state: function(state))
    return {str(case): _plain(_replayed(case, replicated.stacked(2), place)) for case in cases}


def _replayed(case: Case, over: Any, place: Place) -> dict[str, Any]:
    try:
        variable = replicated.variable(case.aggregation, case.synchronization, over=over)
    except GradCombineError:
        return {"raises": True}
    return replay(case, variable, place)


def jax_vmap(cases: list[Case]) -> Outcomes:
    import jax

    def run(program: Program) -> Any:
        return jax.jit(jax.vmap(lambda rank: program(partial(_row, rank)), axis_name="data"))(np.arange(2))

    return _on_replicas(cases, run, gc.jax_axis("data"), _jax_cond)


def jax_pmap(cases: list[Case]) -> Outcomes:
    import jax

    def run(program: Program) -> Any:
        mapped = jax.pmap(lambda rank: program(partial(_row, rank)), axis_name="data", devices=jax.devices()[:2])
        return mapped(np.arange(2))

    return _on_replicas(cases, run, gc.jax_axis("data"), _jax_cond)


def jax_shard_map(cases: list[Case]) -> Outcomes:
    """Runs the cases with check_vma, which tracks the values that vary over the axis."""
    import jax
    from jax.sharding import PartitionSpec

    from tests.integrations.jax.replicas import mesh

    def run(program: Program) -> Any:
        def block(ranks: Any) -> Any:
            return jax.tree.map(lambda x: x[None], program(partial(_row, ranks[0])))

        spec = PartitionSpec("data")
        return jax.jit(jax.shard_map(block, mesh=mesh(2, "data"), in_specs=spec, out_specs=spec))(np.arange(2))

    def reduce(reduction: Any, value: Any) -> Any:
        # Reading a value written to all replicas has an invariant type, for which all_reduce raises.
        if "data" not in varying(value):
            value = jax.lax.pcast(value, "data", to="varying")
        return gc.all_reduce(reduction, value, over=gc.jax_axis("data"))

    return _on_replicas(cases, run, gc.jax_axis("data"), _jax_cond, reduce)


def tf_mirrored(cases: list[Case], compiled: bool) -> Outcomes:
    """Runs the cases eagerly or in a tf.function."""
    import tensorflow as tf

    from tests.integrations.tensorflow.strategies import mirrored

    strategy = mirrored(2)

    def run(program: Program) -> Any:
        def on_one() -> Any:
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            return program(lambda values: tf.constant(values)[rank])

        def both() -> Any:
            rows = strategy.run(on_one)
            return tf.nest.map_structure(strategy.experimental_local_results, rows)

        return tf.function(both)() if compiled else both()

    def cond(function: Any, state: Any) -> Any:
        return tf.cond(tf.constant(True), lambda: function(state), lambda: state)

    return _on_replicas(cases, run, gc.tf_replicas(), cond)


def _on_replicas(
    cases: list[Case], run: Callable[[Program], Outcomes], over: Any, cond: Any, reduce: Any = None
) -> Outcomes:
    known: Outcomes = {str(case): {} for case in cases}

    def program(own: Any) -> Outcomes:
        place, arrays = Place(own, reduce or partial(gc.all_reduce, over=over), cond), {}
        for case in cases:
            outcome = _replayed(case, over, place)
            known[str(case)].update({name: x for name, x in outcome.items() if isinstance(x, (bool, str))})
            arrays[str(case)] = {name: x for name, x in outcome.items() if name not in known[str(case)]}
        return arrays

    return {case: known[case] | _rows(outcome) for case, outcome in run(program).items()}


def _rows(outcome: dict[str, Any]) -> dict[str, Any]:
    rows = _plain(outcome)
    for name in ONE_VALUE:
        if name in rows:
            first, second = rows[name]
            assert first == second, name
            rows[name] = first
    return rows


def _row(rank: Any, values: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(values)[rank]


def _jax_cond(function: Any, state: Any) -> Any:
    import jax

    return jax.lax.cond(jax.numpy.asarray(True), function, lambda before: before, state)


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    def row(x: Any) -> Any:
        return x if isinstance(x, (bool, str)) else np.asarray(x).tolist()

    return {name: [row(y) for y in x] if isinstance(x, (list, tuple)) else row(x) for name, x in found.items()}
