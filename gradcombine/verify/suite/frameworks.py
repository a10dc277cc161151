# pyright: standard
"""Rows of the combine, the digits classifier and the library's own steps, by framework; imports JAX and TensorFlow.

JAX: eager, jit and scan; pmap and shard_map over virtual CPU devices. TensorFlow: eager, tf.function and XLA;
MirroredStrategy over logical CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorflow as tf
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradcombine as gc
from gradcombine.audit import Audit, audit
from gradcombine.backends.protocol import Collective
from gradcombine.integrations.jax import train_step
from gradcombine.integrations.optax import accumulate
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.types import AccumulateState, Array, Order, Tree
from gradcombine.verify.suite.classifier import PIXELS, Batch, initial_parameters
from gradcombine.verify.suite.defects import audited as named
from gradcombine.verify.suite.outcomes import CLEAN, LIST, REPLICAS, TIME, TIME_AND_REPLICAS, Finding
from gradcombine.verify.suite.places import (
    MEAN,
    ORDERS,
    Case,
    Contributions,
    merged,
    over_list,
    over_replicas,
    over_time,
)

Window = tuple[gc.Accumulator, AccumulateState]
Compiled = Callable[[Callable[..., Tree]], Callable[..., Tree]]
Spread = Callable[[Callable[..., Tree], int, tuple[Tree, np.ndarray]], list[Tree]]
"""Runs a function on replicas, each with its block of stacked values and weights: each one's result."""


class Framework(NamedTuple):
    """Programs of a framework.

    Attributes:
      array: from NumPy.
      compiled: wrappers of a function that runs on one replica, by mode.
      spread: by mode.
      over: the replicas within such a function.
      window: a full window of stacked values and weights, within such a function.
    """

    array: Callable[[Array], Array]
    compiled: Mapping[str, Compiled]
    spread: Mapping[str, Spread]
    over: Collective
    window: Callable[[Tree, Array, Order], Window]


def exported(tree: Tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in tree.items()}


def cases(counts: Sequence[int], full: bool) -> Iterator[Case]:
    """Rows of the combine, all of them if ``full``; NumPy, the reference, has one replica."""
    for name, framework in {"numpy": NUMPY, **FRAMEWORKS}.items():
        alone = {
            (mode, place): partial(run, framework, compiled)
            for (mode, compiled), (place, run) in product(framework.compiled.items(), _ON_ONE.items())
        }
        for order, ((mode, place), run) in product(ORDERS, (alone | _MORE.get(name, {})).items()):
            yield Case(name, mode, place, 1, order, partial(run, order))
        modes = [(mode, mapped) for mode, mapped in framework.spread.items() if full or mode not in _FULL]
        spread = product(modes, ORDERS, _ON_SEVERAL.items(), counts)
        for (mode, mapped), order, (place, run), count in spread:
            yield Case(name, mode, place, count, order, partial(run, framework, mapped, count, order))


def _arrays(framework: Framework, given: Contributions) -> tuple[list[Tree], list[Array]]:
    values = [{name: framework.array(leaf) for name, leaf in value.items()} for value in given.values]
    return values, [framework.array(np.float32(weight)) for weight in given.weights]


def _in_list(framework: Framework, compiled: Compiled, order: Order, given: Contributions) -> list[Tree]:
    return [exported(compiled(partial(over_list, order=order))(*_arrays(framework, given)))]


def _in_time(framework: Framework, compiled: Compiled, order: Order, given: Contributions) -> list[Tree]:
    accumulator, state = over_time(*_arrays(framework, given), order, compiled)
    return [exported(accumulator.value(state))]


def _in_scan(order: Order, given: Contributions) -> list[Tree]:
    @jax.jit
    def run(values: Tree, weights: jax.Array) -> Tree:
        accumulator, state = _scan(values, weights, order)
        return accumulator.value(state)

    return [exported(run(*given.stacked(len(given.weights))))]


def _on_replicas(framework: Framework, spread: Spread, count: int, order: Order, given: Contributions) -> list[Tree]:
    return spread(partial(over_replicas, over=framework.over, order=order), count, given.stacked(count))


def _in_windows(framework: Framework, spread: Spread, count: int, order: Order, given: Contributions) -> list[Tree]:
    def run(values: Tree, weights: Array) -> Tree:
        return merged(framework.window(values, weights, order), framework.over, order)

    return spread(run, count, given.stacked(count, len(given.weights) // count))


def _eager(function: Callable[..., Tree]) -> Callable[..., Tree]:
    return function


def _unrolled(compiled: Compiled, values: Tree, weights: Array, order: Order) -> Window:
    steps = range(weights.shape[0])
    return over_time(
        [{name: x[i] for name, x in values.items()} for i in steps], [weights[i] for i in steps], order, compiled
    )


def _scan(values: Tree, weights: jax.Array, order: Order) -> Window:
    accumulator = gc.accumulate(MEAN, every=len(weights), order=order)
    empty = accumulator.init(jax.tree.map(lambda value: value[0], values))

    def step(state: AccumulateState, contribution: tuple[Tree, Array]) -> tuple[AccumulateState, None]:
        return accumulator.update(contribution[0], state, contribution[1]), None

    return accumulator, lax.scan(step, empty, (values, weights))[0]


def _alone(function: Callable[..., Tree], count: int, dealt: tuple[Tree, np.ndarray]) -> list[Tree]:
    return [function({name: x[rank] for name, x in dealt[0].items()}, dealt[1][rank]) for rank in range(count)]


def _pmap(function: Callable[..., Tree], count: int, dealt: tuple[Tree, np.ndarray]) -> list[Tree]:
    return _by_rank(jax.pmap(function, "data", devices=jax.devices()[:count])(*dealt), count)


def _shard_map(
    check_vma: bool, function: Callable[..., Tree], count: int, dealt: tuple[Tree, np.ndarray]
) -> list[Tree]:
    def local(*blocks: Tree) -> Tree:
        result = function(*jax.tree.map(lambda block: block[0], blocks))
        return jax.tree.map(lambda leaf: leaf[None], result)

    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    # Results are stacked by replica, so that each replica's is checked.
    spec = PartitionSpec("data")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return _by_rank(jax.jit(sharded)(*dealt), count)


def _by_rank(stacked: Tree, count: int) -> list[Tree]:
    results = exported(stacked)
    return [{name: result[rank] for name, result in results.items()} for rank in range(count)]


def _mirrored(function: Callable[..., Tree], count: int, dealt: tuple[Tree, np.ndarray]) -> list[Tree]:
    replicas = _strategy(count)

    def block_of(context: tf.distribute.ReplicaContext) -> Tree:
        return tf.nest.map_structure(lambda block: tf.constant(block[context.replica_id_in_sync_group]), dealt)

    arguments = replicas.experimental_distribute_values_from_function(block_of)
    results = _traced(lambda contributions: replicas.run(function, args=contributions))(arguments)
    local = {name: replicas.experimental_local_results(result) for name, result in results.items()}
    return [exported({name: result[rank] for name, result in local.items()}) for rank in range(count)]


@cache
def _strategy(count: int) -> tf.distribute.Strategy:
    # The default collective ops of two strategies in one process disturb each other.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{rank}" for rank in range(count)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


# Nothing here branches on a tensor, and AutoGraph would rewrite each function on each replica.
_traced = partial(tf.function, autograph=False)

NUMPY = Framework(np.asarray, {"eager": _eager}, {}, gc.LOCAL, partial(_unrolled, _eager))

FRAMEWORKS = {
    "jax": Framework(
        jnp.asarray,
        {"eager": _eager, "jit": jax.jit},
        {"pmap": _pmap, "shard_map": partial(_shard_map, True), "shard_map, no vma": partial(_shard_map, False)},
        gc.jax_axis("data"),
        _scan,
    ),
    "tensorflow": Framework(
        tf.constant,
        {"eager": _eager, "tf.function": _traced, "XLA": partial(_traced, jit_compile=True)},
        {"MirroredStrategy": _mirrored},
        gc.tf_replicas(),
        # As a separate function, the update is traced once, not once for each step.
        partial(_unrolled, _traced),
    ),
}

_FULL = {"shard_map, no vma"}
"""Modes that are run on demand."""

_ON_ONE = {LIST: _in_list, TIME: _in_time}
_ON_SEVERAL = {REPLICAS: _on_replicas, TIME_AND_REPLICAS: _in_windows}
_MORE: dict[str, dict[tuple[str, str], Callable[[Order, Contributions], list[Tree]]]] = {
    "numpy": {("eager", place): partial(run, NUMPY, _alone, 1) for place, run in _ON_SEVERAL.items()},
    "jax": {("scan", TIME): _in_scan},
}
"""Rows of one replica that are not of every mode, by mode and place."""


def _loss(parameters: Mapping[str, Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    hidden = jnp.tanh(images @ parameters["w1"] + parameters["b1"])
    logits = hidden @ parameters["w2"] + parameters["b2"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


@tf.function(reduce_retracing=True)
def _gradients(parameters: dict[str, Array], images: tf.Tensor, labels: tf.Tensor) -> dict[str, Array]:
    """The gradient and the ``"loss"``."""
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        hidden = tf.tanh(images @ parameters["w1"] + parameters["b1"])
        logits = hidden @ parameters["w2"] + parameters["b2"]
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return tape.gradient(loss, parameters) | {"loss": loss}


@jax.jit
def _measure_jax(parameters: dict[str, Array], batch: Batch) -> dict[str, Array]:
    value, gradients = jax.value_and_grad(_loss)(parameters, *batch)
    return gradients | {"loss": value}


def _measure_tensorflow(parameters: dict[str, Array], batch: Batch) -> dict[str, Array]:
    tensors = {name: tf.convert_to_tensor(leaf) for name, leaf in parameters.items()}
    return _gradients(tensors, tf.constant(batch.images), tf.constant(batch.labels))


MEASURES: dict[str, Callable[[dict[str, Array], Batch], dict[str, Array]]] = {
    "jax": _measure_jax,
    "tensorflow": _measure_tensorflow,
}
"""From parameters and a batch to the mean loss and its gradient as one flat tree, of the framework's arrays."""


EVERY, ROWS, RATE = 4, 8, 0.1
"""Of the steps that are audited: microbatches of a window, examples of each, the optimizer's rate."""


def audited(replicas: int, inject_fault: bool) -> tuple[Finding, Finding]:
    """Rows of two audits: optax.MultiSteps, whose defect has to be named; the library's steps, which have none.

    Args:
      replicas: over which they run.
      inject_fault: whether `optax.MultiSteps`, which runs its optimizer in each call, stands in for `accumulate`.
    """
    audits = {
        "a window in one call": _in_jax(replicas, microbatches=EVERY, over=gc.jax_axis("data")),
        "a microbatch in each call": _in_jax(replicas, every=EVERY),
        "accumulate": _in_optax(inject_fault),
        "AccumulatedStep": _in_tensorflow(replicas),
    }
    found = {name: {x.name for x in report.findings} for name, report in audits.items()}
    defects = "; ".join(f"{name}: {', '.join(sorted(names))}" for name, names in found.items() if names)
    labels = {"steps": ", ".join(found), "defects": defects or "none"}
    return named(_in_optax(inject_fault=True)), Finding("audit", labels, CLEAN, not defects)


def _in_jax(replicas: int, **settings: Any) -> Audit:
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("data",))

    def placed(tree: Tree, *axes: str) -> Tree:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    step = train_step(lambda params, batch: _loss(params, *batch), optax.adam(RATE), **settings)
    parameters = initial_parameters()
    rows = replicas * EVERY * ROWS
    batch = np.zeros((rows, PIXELS), np.float32), np.zeros(rows, np.int32)
    state = jax.eval_shape(step.init, parameters)
    return audit(step.compiled, placed(parameters), placed(state), placed(batch, "data"))


def _in_optax(inject_fault: bool) -> Audit:
    tx: Any = optax.MultiSteps(optax.adam(RATE), EVERY) if inject_fault else accumulate(optax.adam(RATE), EVERY)

    def step(parameters: Tree, state: Tree, gradients: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters = jax.tree.map(jnp.asarray, initial_parameters())
    return audit(jax.jit(step, donate_argnums=(0, 1)), parameters, tx.init(parameters), parameters)


def _in_tensorflow(replicas: int) -> Audit:
    strategy = _strategy(replicas)
    with strategy.scope():
        variables = {name: tf.Variable(tf.constant(leaf)) for name, leaf in initial_parameters().items()}

        def gradients(images: tf.Tensor, labels: tf.Tensor) -> tuple[Tree, Array]:
            found = _gradients(dict(variables), images, labels)
            return [found[name] for name in variables], tf.size(labels)

        def descend(gradients: Tree, variables: Tree) -> None:
            for gradient, variable in zip(gradients, variables, strict=True):
                variable.assign_sub(RATE * gradient)

        step = AccumulatedStep(gradients, list(variables.values()), descend, every=EVERY)
    images, labels = tf.TensorSpec([ROWS, PIXELS]), tf.TensorSpec([ROWS], tf.int32)
    return audit(tf.function(step), images, labels)
