"""The doors of the frameworks, and what compiles: called eagerly to be made, and traced to be run, never compiled."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions
from gradcombine.audit.auditing import audit_file, audit_named
from gradcombine.audit.target import find_target
from gradcombine.errors import operation as naming
from gradcombine.integrations import horovod
from gradcombine.integrations import jax as for_jax
from gradcombine.integrations import keras as for_keras
from gradcombine.integrations import optax as for_optax
from gradcombine.integrations import tensorflow as for_tensorflow
from gradcombine.integrations.jax.arrays import require_levels
from gradcombine.verify import audit, check_microbatches, check_step, plan
from gradcombine.verify.plan import plan_named
from tests.fuzz.files import HLO
from tests.fuzz.functions import FOLDER, KINDS, Kind, Target, const
from tests.fuzz.values import Drawn, OwnError

PARAMS = {"w": np.zeros(2, np.float32)}
BATCH = np.ones((4, 2), np.float32)


def _loss(params: Any, batch: Any) -> Any:
    return jnp.mean((params["w"] - batch) ** 2)


def _terms(params: Any, batch: Any) -> Any:
    return for_jax.LossOutput({"value": _loss(params, batch)}, {"tokens": jnp.float32(4)})


def _tensors(d: Drawn) -> Any:
    return [tf.constant(np.asarray(d.leaf((2,), "float32")))]


def _grads(d: Drawn) -> Any:
    return {"w": d.leaf((2,), "float32")}


def _mostly_ends(function: Callable[..., Any]) -> Kind:
    """This function, for one input in thirty; else one that raises, as running to the end takes longest."""
    return lambda d: _ends if d.r.randrange(30) else function


def _ends(*_: Any, **__: Any) -> Any:
    raise OwnError


_flags = const(False, True)
_every = const(1, 2, 4, for_optax.UNTIL_FLUSH, lambda index: 2)
_reduction = const(None, reductions.mean(), reductions.sum("exact"))
_inner = const(optax.sgd(0.1), optax.adam(1e-3))
_argnums = const(None, 0, 1, (1,))


def jax_axis(names: Any) -> Any:
    return gc.jax_axis(names)


def optax_accumulate(
    inner: Any, every: Any, reduction: Any, over: Any, skip: Any, order: Any, max_every: Any, denominators: Any
) -> Any:
    options = {"reduction": reduction, "over": over, "skip": skip, "order": order}
    for door in (for_optax.accumulate, for_optax.accumulate_and_apply):
        door(inner, every, **options, max_every=max_every, denominators=denominators)


def optax_update(every: Any, grads: Any, params: Any, weight: Any) -> Any:
    tx = for_optax.accumulate(optax.sgd(0.1), every)
    return jax.eval_shape(lambda flag: tx.update(grads, tx.init(PARAMS), params, weight=weight), True)


def optax_state(grads: Any, state: Any) -> Any:
    return jax.eval_shape(lambda flag: for_optax.accumulate(optax.sgd(0.1), 2).update(grads, state, PARAMS), True)


def multi_steps(opt: Any, every_k_schedule: Any, use_grad_mean: Any, accumulator_dtype: Any, compat: Any) -> Any:
    return for_optax.MultiSteps(opt, every_k_schedule, use_grad_mean, None, accumulator_dtype, compat=compat)


def optax_all_reduce(reduction: Any, over: Any, order: Any, grads: Any) -> Any:
    tx = for_optax.all_reduce(reduction, over=over, order=order)

    def replica(_: Any) -> int:
        tx.update(grads, optax.EmptyState())
        return 0

    return jax.eval_shape(jax.vmap(replica, axis_name="data"), np.zeros(2))


def map_replicas(function: Any, over: Any, batch_argnums: Any) -> Any:
    return for_optax.map_replicas(function, over, batch_argnums=batch_argnums)


def skips(max_norm: Any, updates: Any) -> Any:
    def traced(flag: Any) -> Any:
        for skip in (for_optax.skip_large(max_norm), for_optax.skip_not_finite):
            skip(updates, 0, PARAMS)
        return for_optax.skip_large_updates(updates, 0, PARAMS, max_norm)

    return jax.eval_shape(traced, True)


def train_step(
    loss: Any, optimizer: Any, every: Any, microbatches: Any, batch_argnums: Any, has_aux: Any, params: Any, batch: Any
) -> Any:
    of_loss = for_jax.Loss(loss, batch_argnums=batch_argnums, has_aux=has_aux)
    step = for_jax.train_step(of_loss, optimizer, every=every, microbatches=microbatches)
    return jax.eval_shape(lambda flag: step.function(params, step.init(params), batch), True)


def value_and_grad(loss: Any, microbatches: Any, argnums: Any, batch_argnums: Any, params: Any, batch: Any) -> Any:
    run = for_jax.value_and_grad(for_jax.Loss(loss, argnums=argnums, batch_argnums=batch_argnums), microbatches)
    return jax.eval_shape(lambda flag: run(params, batch), True)


def grads_by_denominator(loss: Any, terms: Any, params: Any, batch: Any) -> Any:
    return jax.eval_shape(lambda flag: for_jax.grads_by_denominator(loss, terms)(params, batch), True)


def zero(reduction: Any, over: Any, values: Any, like: Any, every: Any, replicas: Any) -> Any:
    for_jax.zero.exchange_costs(reduction, like, every, replicas)
    for_jax.zero.scattered(reduction, over)

    def replica(_: Any) -> Any:
        return for_jax.zero.gather(for_jax.zero.shard(values, over), like, over)

    return jax.eval_shape(jax.vmap(replica, axis_name="data"), np.zeros(2))


def accumulated_step(gradients: Any, variables: Any, apply: Any, every: Any, order: Any, reduction: Any) -> Any:
    return for_tensorflow.AccumulatedStep(gradients, variables, apply, every, order=order, reduction=reduction)


def keras_accumulate(inner_optimizer: Any, every: Any, reduction: Any, precision: Any, dtype: Any, order: Any) -> Any:
    options = {"reduction": reduction, "precision": precision, "dtype": dtype, "order": order}
    return for_keras.Accumulate(inner_optimizer, every, **options)


def horovod_all_reduce(
    over: Any, op: Any, prescale_factor: Any, gradient_predivide_factor: Any, process_set: Any, grads: Any
) -> Any:
    options = {"prescale_factor": prescale_factor, "gradient_predivide_factor": gradient_predivide_factor}
    reduce = horovod.AllReduce(over, op, process_set=process_set, **options)
    return reduce(grads, [tf.Variable([0.0, 0.0])])


def local_aggregation(backward_passes_per_step: Any, mode: Any, size: Any, average: Any, grads: Any) -> Any:
    options = {"mode": mode, "size": size, "average_aggregated_gradients": average}
    made = horovod.LocalGradientAggregation(backward_passes_per_step, lambda g, v: g, **options)
    return made.compute_gradients(grads, [tf.Variable([0.0, 0.0])])


def audited(step: Any, args: Any, target: Any) -> Any:
    return audit(step, *(args if isinstance(args, list) else [args]), target=target)


def planned(loss: Any, params: Any, batch: Any, optimizer: Any, microbatches: Any, target: Any, names: Any) -> Any:
    return plan(loss, params, batch, optimizer, microbatches=microbatches, target=target, names=names)


def step_checked(make_step: Any, params: Any, batch: Any, microbatches: Any, devices: Any, returns: Any) -> Any:
    options = {"microbatches": microbatches, "devices": devices, "returns": returns}
    return check_step(make_step, params, batch, **options)


def microbatches_checked(loss: Any, params: Any, windows: Any, inner: Any, accumulating: Any) -> Any:
    return check_microbatches(loss, params, windows, inner, accumulating)


# What these make is called with what its users hand over: states, gradients, batches, configurations.


def optax_init(params: Any) -> Any:
    makers = for_optax.accumulate(optax.sgd(0.1), 2), for_optax.MultiSteps(optax.sgd(0.1), 2), _step()
    return jax.eval_shape(lambda flag: [maker.init(params) for maker in makers], True)


def multi_steps_used(use_grad_mean: Any, compat: Any, updates: Any, state: Any, params: Any) -> Any:
    made = for_optax.MultiSteps(optax.sgd(0.1), 2, use_grad_mean, compat=compat)
    return jax.eval_shape(lambda flag: (made.update(updates, state, params), made.has_updated(state)), True)


def multi_steps_adopted(compat: Any, state: Any) -> Any:
    return for_optax.MultiSteps(optax.sgd(0.1), 2, compat=compat).adopt(state)


@cache
def _step() -> Any:
    return for_jax.train_step(_loss, optax.sgd(0.1), every=2)


def train_step_used(params: Any, state: Any, batch: Any) -> Any:
    step = _step()
    return jax.eval_shape(lambda flag: (step.function(params, state, batch), step.flush_function(params, state)), True)


def train_step_called(params: Any, state: Any, batch: Any) -> Any:
    """Compiled where it is valid.

    jax.jit looks at the trees first: those without an end would harm what follows in JAX, and it asks whether a key is
    that of an earlier tree, which a tuple and a scalar of NumPy do not answer.
    """
    naming("train_step")(require_levels)(params, state, batch)
    for path, _ in jax.tree_util.tree_leaves_with_path([params, state, batch]):
        if any(isinstance(x, jax.tree_util.DictKey) and not isinstance(x.key, str) for x in path):
            raise OwnError
    return _step().flush(*_step()(params, state, batch)[:2])


def accumulated_step_used(gradients: Any, batch: Any, states: Any, number: Any, totals: Any) -> Any:
    step = for_tensorflow.AccumulatedStep(gradients, [tf.Variable([0.0, 0.0])], lambda *_: None, 2)
    step.load_states(states)
    return step(batch, number=number, totals=totals), step.flush()


@cache
def _held() -> Any:
    """The states of a window of such a step."""
    step = for_tensorflow.AccumulatedStep(lambda x: ([x], 1), [tf.Variable([0.0, 0.0])], lambda grads: None, 2)
    return step.states()


@cache
def _built() -> Any:
    """An optimizer of one variable, which is the same after what it refuses."""
    made = for_keras.Accumulate(keras.optimizers.SGD(0.1), 2)
    made.build([keras.Variable(np.zeros(2, np.float32))])
    return made


def keras_applied(grads: Any, trainable_variables: Any, weight: Any) -> Any:
    made = _built() if trainable_variables is None else for_keras.Accumulate(keras.optimizers.SGD(0.1), 2)
    made.apply(grads, trainable_variables, weight)


def keras_pairs(grads_and_vars: Any, weight: Any) -> Any:
    with _built().weighted(weight):
        return _built().apply_gradients(grads_and_vars)


def keras_weights(weights: Any) -> Any:
    _built().set_weights(weights)


def keras_store(store: Any) -> Any:
    _built().load_own_variables(store)


@cache
def _keras_saved() -> dict[str, np.ndarray]:
    store: dict[str, np.ndarray] = {}
    _built().save_own_variables(store)
    return store


def keras_stateless(optimizer_variables: Any, grads: Any, trainable_variables: Any, weight: Any) -> Any:
    """On this backend all are refused."""
    with suppress(gc.GradCombineError):
        _built().stateless_flush(optimizer_variables, trainable_variables)
    return _built().stateless_apply(optimizer_variables, grads, trainable_variables, weight)


def keras_from_config(config: Any) -> Any:
    return for_keras.Accumulate.from_config(config)


def aggregation_used(grads: Any, variables: Any, local: Any, optimizer: Any) -> Any:
    made = horovod.LocalGradientAggregation(2, lambda g, v: g)
    made.register_local_var(local)
    made.compute_gradients(grads, variables)
    return made.apply_gradients(lambda: None, optimizer)


def all_reduce_used(op: Any, grads: Any, variables: Any) -> Any:
    return horovod.AllReduce(gc.LOCAL, op)(grads, variables)


def audit_of_a_name(what: Any, target: Any) -> Any:
    return audit_named(what, target)


def audit_of_a_file(path: Any, target: Any) -> Any:
    return audit_file(path, target)


def plan_of_a_name(what: Any, target: Any, names: Any) -> Any:
    return plan_named(what, target, names)


def target_of_a_name(target: Any) -> Any:
    return find_target(target, compiles=False)


def lost_peers(operation: Any, said: Any) -> None:
    with for_jax.detect_lost_peers("no name" if type(operation) is str and not operation else operation):
        raise ValueError("Gloo", said)


def compiled_step() -> Any:
    """What a command line names, for `audit`."""
    return jax.jit(lambda x: x + 1), [np.float32([1, 2])]


def plan_of_a_model() -> dict[str, Any]:
    """What a command line names, for `plan`."""
    return {"loss": _ends, "params": PARAMS, "batch": BATCH, "optimizer": optax.sgd(0.1), "microbatches": 2}


@cache
def _audited_files() -> list[str]:
    """One of HLO, one that is none, folders with them, and what is not there."""
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    (folder / "empty").mkdir()
    for name, content in (("step.after_optimizations.txt", HLO), ("no.txt", b"no program")):
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in ("step.after_optimizations.txt", "no.txt", "", "empty", "not/there")]


def _step_name(d: Drawn) -> str:
    found = ["_ends", "PARAMS", "not_there", "plan_of_a_model"] + ["compiled_step"] * (d.r.randrange(30) == 0)
    return d.r.choice([f"{__name__}:{d.r.choice(found)}", "json:dumps", "not.there:step", *_audited_files()])


def _audited_file(d: Drawn) -> Any:
    return d.r.choice([str, Path])(d.r.choice(_audited_files()))


_KINDS: dict[str, Kind] = KINDS | {
    "every": _every,
    "reduction": _reduction,
    "inner": _inner,
    "opt": _inner,
    "optimizer": _inner,
    "skip": const(None, for_optax.skip_not_finite),
    "over": const(gc.LOCAL, None, gc.jax_axis("data")),
    "denominators": const(None, ["tokens"]),
    "grads": _grads,
    "updates": _grads,
    "params": _grads,
    "every_k_schedule": _every,
    "use_grad_mean": _flags,
    "accumulator_dtype": const(jnp.float32, "bfloat16", None),
    "compat": _flags,
    "batch_argnums": _argnums,
    "argnums": const(0, (0,)),
    "function": const(_loss),
    "loss": const(_loss),
    "microbatches": const(1, 2, 4, None),
    "has_aux": _flags,
    "batch": lambda d: d.leaf((4, 2), "float32"),
    "terms": const({"value": "tokens"}),
    "gradients": const(lambda x: ([x, x], 1)),
    "variables": lambda d: [tf.Variable([0.0, 0.0])],
    "apply": const(keras.optimizers.SGD(0.1), lambda grads: None),
    "inner_optimizer": const(keras.optimizers.SGD(0.1)),
    "op": const("average", "sum", "adasum"),
    "what": _step_name,
    "path": _audited_file,
    "said": const("other words", "connection closed\n" * 1000),
    "prescale_factor": const(1.0, 2),
    "gradient_predivide_factor": const(1.0, 2.0),
    "process_set": const(None, [0]),
    "backward_passes_per_step": const(1, 2),
    "mode": const(None, "eager", "graph"),
    "size": const(None, 2, lambda: 2),
    "average": _flags,
    "step": const(jax.jit(lambda x: x + 1)),
    "args": lambda d: [d.leaf((2,), "float32")],
    "target": const(None, "h100:8"),
    "make_step": _mostly_ends(lambda *_, **__: jax.grad(_loss)),
    "devices": const((1,), [1, 2]),
    "returns": const("gradients", "params"),
    "windows": lambda d: [[d.leaf((2, 2), "float32")] * 2],
    "accumulating": const(lambda inner: optax.MultiSteps(inner, 2)),
}
_SPECIAL: dict[str, dict[str, Kind]] = {
    "keras_accumulate": {"reduction": const("mean", "sum")},
    "horovod_all_reduce": {"over": const(gc.LOCAL), "grads": _tensors},
    "local_aggregation": {"grads": _tensors},
    "optax_state": {"state": const(for_optax.accumulate(optax.sgd(0.1), 2).init(PARAMS))},
    "multi_steps_used": {
        "updates": _grads,
        "state": lambda d: for_optax.MultiSteps(optax.sgd(0.1), 2, compat=d.r.random() < 0.5).init(PARAMS),
    },
    "multi_steps_adopted": {"state": const(optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS))},
    "train_step_used": {"state": lambda d: _step().init(PARAMS)},
    "train_step_called": {"state": lambda d: jax.tree.map(np.asarray, _step().init(PARAMS))},
    "accumulated_step_used": {
        "gradients": const(lambda x: ([x], 1), lambda x: ([x, x], 1)),
        "batch": lambda d: d.leaf((2,), "float32"),
        "states": lambda d: _held(),
        "number": const(None, 0),
        "totals": const(None),
    },
    "keras_applied": {
        "grads": _tensors,
        "trainable_variables": lambda d: d.r.choice([None] * 9 + [[keras.Variable(np.zeros(2, np.float32))]]),
    },
    "keras_pairs": {"grads_and_vars": lambda d: [*zip(_tensors(d), _built()._trainable_variables, strict=True)]},
    "keras_weights": {"weights": lambda d: [x.numpy() for x in _built().variables]},
    "keras_store": {"store": lambda d: {name: x.copy() for name, x in _keras_saved().items()}},
    "keras_stateless": {
        "optimizer_variables": lambda d: [x.numpy() for x in _built().variables],
        "grads": _tensors,
        "trainable_variables": _tensors,
    },
    "keras_from_config": {"config": lambda d: for_keras.Accumulate(keras.optimizers.SGD(0.1), 2).get_config()},
    "aggregation_used": {
        "grads": _tensors,
        "local": lambda d: tf.Variable([0.0, 0.0]),
        "optimizer": const(keras.optimizers.SGD(0.1)),
    },
    "all_reduce_used": {"grads": _tensors},
    "audit_of_a_file": {"target": const(None, "h100:8", "v5e:4x4")},
    "target_of_a_name": {"target": const("h100:8", "h100:64x8", "v5e:16x16", "v5p:2x2x2", None)},
    "plan_of_a_name": {"names": const(["window"])},
    "planned": {"names": const(["window"]), "loss": _mostly_ends(_loss)},
    "microbatches_checked": {"loss": _mostly_ends(_loss)},
    "optax_update": {"every": const(1, 1, 1, 1, 2, 4, for_optax.UNTIL_FLUSH)},
    "optax_all_reduce": {"over": const(gc.LOCAL, gc.jax_axis("data"))},
    "map_replicas": {"over": const(gc.LOCAL, gc.jax_axis("data")), "batch_argnums": const(1, (1,))},
    "train_step": {
        "loss": _mostly_ends(_loss),
        "every": const(None),
        "microbatches": const(1, 2, 4),
        "batch_argnums": const(1, (1,)),
        "has_aux": const(False),
    },
    "value_and_grad": {"loss": _mostly_ends(_loss), "microbatches": const(1, 2, 4), "batch_argnums": const(1, (1,))},
    "grads_by_denominator": {"loss": const(_terms)},
    "step_checked": {"microbatches": const((1,), [1, 2])},
    "zero": {
        "reduction": const(reductions.mean(), reductions.sum()),
        "over": const(gc.jax_axis("data")),
        "values": _grads,
        "like": _grads,
        "every": const(1, 4),
    },
}
_DOORS: tuple[Callable[..., Any], ...] = (
    jax_axis,
    optax_accumulate,
    optax_update,
    optax_state,
    multi_steps,
    optax_all_reduce,
    map_replicas,
    skips,
    train_step,
    value_and_grad,
    grads_by_denominator,
    zero,
    accumulated_step,
    keras_accumulate,
    horovod_all_reduce,
    local_aggregation,
    audited,
    planned,
    step_checked,
    microbatches_checked,
    optax_init,
    multi_steps_used,
    multi_steps_adopted,
    train_step_used,
    train_step_called,
    accumulated_step_used,
    keras_applied,
    keras_pairs,
    keras_weights,
    keras_store,
    keras_stateless,
    keras_from_config,
    aggregation_used,
    all_reduce_used,
    audit_of_a_name,
    audit_of_a_file,
    plan_of_a_name,
    target_of_a_name,
    lost_peers,
)


def _traced(run: Callable[[], Any]) -> Any:
    return jax.eval_shape(lambda flag: run(), True)


def _one_update(tx: Any) -> Any:
    return _traced(lambda: tx.update(PARAMS, tx.init(PARAMS), PARAMS))


# With each of their parameters, most at its default; and once what these make is for, with arguments that are valid.
_WITH_ALL_PARAMETERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any], dict[str, Kind]]] = {
    "train_step with": (
        for_jax.train_step,
        lambda step: _traced(lambda: step.function(PARAMS, step.init(PARAMS), BATCH)),
        {"loss": const(_loss), "optimizer": _inner, "every": const(2)},
    ),
    "train_step in one call with": (
        for_jax.train_step,
        lambda step: _traced(lambda: step.function(PARAMS, step.init(PARAMS), BATCH)),
        {"loss": const(_loss), "optimizer": _inner, "microbatches": const(2)},
    ),
    "value_and_grad with": (
        for_jax.value_and_grad,
        lambda run: _traced(lambda: run(PARAMS, BATCH)),
        {"loss": const(_loss), "microbatches": const(2)},
    ),
    "grads_by_denominator with": (
        for_jax.grads_by_denominator,
        lambda run: _traced(lambda: run(PARAMS, BATCH)),
        {"loss": const(_terms), "terms": const({"value": "tokens"})},
    ),
    "accumulate with": (for_optax.accumulate, _one_update, {"inner": _inner, "every": const(2)}),
    "accumulate_and_apply with": (
        for_optax.accumulate_and_apply,
        lambda tx: _traced(lambda: tx.apply(PARAMS, tx.init(PARAMS), PARAMS)),
        {"inner": _inner, "every": const(2)},
    ),
    "MultiSteps with": (for_optax.MultiSteps, _one_update, {"opt": _inner, "every_k_schedule": const(2)}),
    "AccumulatedStep with": (
        for_tensorflow.AccumulatedStep,
        lambda step: step(tf.constant([1.0, 2.0])),
        {
            "gradients": const(lambda x: ([x], 1)),
            "variables": lambda d: [tf.Variable([0.0, 0.0])],
            "apply": const(lambda *_: None),
            "every": const(2),
        },
    ),
    "Accumulate with": (
        for_keras.Accumulate,
        lambda made: made.apply([tf.constant([1.0, 2.0])], [keras.Variable(np.zeros(2, np.float32))]),
        {"inner_optimizer": lambda d: keras.optimizers.SGD(0.1), "every": const(2)},
    ),
    "AllReduce with": (
        horovod.AllReduce,
        lambda reduce: reduce([tf.constant([1.0, 2.0])], [tf.Variable([0.0, 0.0])]),
        {"over": const(gc.LOCAL)},
    ),
    "LocalGradientAggregation with": (
        horovod.LocalGradientAggregation,
        lambda made: made.compute_gradients([tf.constant([1.0, 2.0])], [tf.Variable([0.0, 0.0])]),
        {"backward_passes_per_step": const(1, 2), "allreduce": const(lambda grads, variables: grads)},
    ),
    "plan with": (
        plan,
        lambda made: made,
        {
            "loss": const(_ends),
            "params": const(PARAMS),
            "batch": const(BATCH),
            "optimizer": _inner,
            "microbatches": const(2),
            "names": const(["window"]),
        },
    ),
    "check_step with": (
        check_step,
        lambda made: made,
        {"make_step": const(_ends), "params": const(PARAMS), "batch": const(BATCH), "microbatches": const([2])},
    ),
    "check_microbatches with": (
        check_microbatches,
        lambda made: made,
        {
            "loss": const(_ends),
            "params": const(PARAMS),
            "windows": const([[BATCH, BATCH]]),
            "inner": _inner,
            "accumulating": const(lambda inner: optax.MultiSteps(inner, 2)),
        },
    ),
}


def _with_all_parameters(function: Callable[..., Any], use: Callable[[Any], Any], kinds: dict[str, Kind]) -> Target:
    parameters = inspect.signature(function).parameters

    def run(**arguments: Any) -> Any:
        return use(function(**arguments))

    run.__signature__ = inspect.signature(function)  # pyright: ignore[reportFunctionMemberAccess]
    return Target(run, {name: kinds.get(name) or const(p.default) for name, p in parameters.items()})


def targets() -> dict[str, Target]:
    """By name."""
    found = {name: _with_all_parameters(*made) for name, made in _WITH_ALL_PARAMETERS.items()}
    for function in _DOORS:
        special = _SPECIAL.get(function.__name__, {})
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        kinds = {name: special.get(name) or _KINDS[name] for name in names}
        found[function.__name__] = Target(function, kinds)
    return found
