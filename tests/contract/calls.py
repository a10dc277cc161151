"""Valid calls of all public functions, which are found by introspection, and of the methods of their results."""

from __future__ import annotations

import enum
import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions, replicated, statefile
from gradcombine.integrations import horovod
from gradcombine.integrations import jax as for_jax
from gradcombine.integrations import keras as for_keras
from gradcombine.integrations import optax as for_optax
from gradcombine.integrations import tensorflow as for_tensorflow
from gradcombine.verify import record
from tests.contract.kinds import (
    ACC,
    DTYPE,
    FUNCTION,
    KINDS,
    MAYBE_POSITIVE,
    MAYBE_REDUCTION,
    NAME,
    NOT_NEGATIVE,
    NUMBER,
    ONE,
    OVER,
    PATH,
    POSITIVE,
    REDUCTION,
    ROWS,
    STATE,
    STATES,
    SUM,
    TREE,
    TREES,
    WEIGHT,
    WEIGHTS,
    WINDOW,
    Kind,
    choice,
)

PUBLIC = (
    *(
        "gradcombine",
        "gradcombine.reductions",
        "gradcombine.statefile",
        "gradcombine.noise",
        "gradcombine.replicated",
        "gradcombine.wires",
    ),
    *("gradcombine.losses", "gradcombine.sparse", "gradcombine.resilience.faults", "gradcombine.resilience.ledger"),
    *("gradcombine.foreign_orders", "gradcombine.verify", "gradcombine.audit", "gradcombine.integrations.jax"),
    *("gradcombine.integrations.jax.zero", "gradcombine.integrations.optax", "gradcombine.integrations.tensorflow"),
    *("gradcombine.integrations.keras", "gradcombine.integrations.horovod"),
)
"""Public modules."""


class Call(NamedTuple):
    """A function and the kinds of its parameters, including all required ones."""

    function: Callable[..., Any]
    kinds: Mapping[str, Kind]

    def arguments(self) -> dict[str, Any]:
        return {name: self.kinds[name].valid() for name in required(self.function)}


def named(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def required(function: Callable[..., Any]) -> list[str]:
    return [name for name, p in named(function).items() if p.default is p.empty]


def public() -> dict[str, Any]:
    """Public functions and classes that users call, by name; re-exported ones once."""
    qualified: dict[Any, str] = {}
    for module in PUBLIC:
        space = vars(importlib.import_module(module))
        names = space.get("__all__") or [
            n for n, x in space.items() if n[0] != "_" and getattr(x, "__module__", "") == module
        ]
        for name in names:
            if name not in _INNER and callable(x := space[name]) and not _is_record(x):
                qualified.setdefault(x, f"{module}.{name}")
    return {name.removeprefix("gradcombine."): x for x, name in qualified.items()}


def _is_record(x: Any) -> bool:
    """Whether it is a record type that functions return and users do not create."""
    if not isinstance(x, type):
        return not inspect.isroutine(x)
    return hasattr(x, "_fields") or issubclass(x, enum.Enum | BaseException)


_INNER = {"audit_file", "read", "require_once", "shard", "gather", "Loss"}
"""Functions called by other modules, which name the operation in errors, or through a method below."""


def only(valid: Any, **mistakes: Any) -> Kind:
    return Kind(lambda: valid, mistakes)


def loss(params: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(batch @ params["w"]))


SGD = optax.sgd(0.1)
BATCH = np.ones((16, 2), np.float32)
OWN = {"init": np.zeros_like, "update": lambda s, x, w: s + w * x, "merge": np.add, "finalize": np.copy}
OPTIMIZER = only(SGD, none=None, text="sgd", a_function=len, a_class=optax.GradientTransformation)
AXIS = OVER.but(gc.jax_axis("data"))
OF_JAX = Kind(OVER.valid, OVER.mistakes | {"replicas of TensorFlow": gc.tf_replicas()})
MAYBE_OVER = OF_JAX.but(None, "None")
JAX_BATCH = only(BATCH, a_string="text", a_number=1.0, other_lengths=(BATCH, BATCH[:3]), none=None)
ARGNUMS = only(0, text="0", a_float=1.5, a_bool=True, twice=(0, 0))
TARGET = only(None, text="h100:0", a_number=3, a_list=["h100:8"])
FACTORS = ("prescale_factor", "postscale_factor", "gradient_predivide_factor")
STEPS = only([2], none=None, text="2", a_number=3, zero=[0], floats=[1.5], nothing=[])
TENSORS = only([tf.constant([1.0, 2.0])], a_string="text", a_number=1.0, strings=[tf.constant(["a"])])
FAULTS = only(gc.faults.find(gc.LOCAL), none=None, text="text", a_dict={})

WEIGHT_OF = FUNCTION.but(None, "None")
NUMBERED_SUM = reductions.numbered(SUM, 1)
NUMBERED = only(
    NUMBERED_SUM.update(NUMBERED_SUM.init(TREE), reductions.Numbered(TREE, 0)), none=None, another=SUM.init(TREE)
)
PASSED_ON = ("an array of objects", "an array of strings", "an array of dates", "a structured array", "2**31", "a bool")
PASSED_ON += ("an array of bools",)
"""Mistaken leaves that some functions accept or pass through."""
BOOLS = ("a bool", "an array of bools")
"""Bool leaves, accepted by functions that work on the bits of any dtype."""
UNSEEN = ("of another dtype", "of another shape", "a count of floats")
"""Mistakes that only `check_state` reports: combining functions trust the states of their reduction."""
COMPARED = ("an array of strings", "an array of dates", "a structured array", *BOOLS)
"""Leaves that comparisons report as not compared."""


SIZES = only([1, 2], none=None, text="ab", floats=[0.5, 1.5], number=3, bools=[True, False])
MATRIX = np.ones((2, 3), np.float32)
PER_TOKEN = {
    "values": only(MATRIX, none=None, integers=np.ones((2, 3), int), scalar=np.float32(1), lists=[[1.0]], text="a"),
    "mask": only(None, shape=np.ones(3), text="a", texts=np.array([["a"] * 3] * 2)),
    "segments": only(None, shape=np.ones(3, int), floats=MATRIX, negative=-np.ones((2, 3), int), text="a"),
    "groups": only(
        np.zeros(2, int), none=None, shape=np.zeros(3, int), negative=np.int32([0, -1]), floats=MATRIX[:, 0]
    ),
    "of": choice("tokens"),
    "normalizer": NUMBER,
}


def saved() -> str:
    statefile.save("saved.npz", SUM, SUM.init(TREE))
    return "saved.npz"


def begun() -> str:
    statefile.begin_window("windows", 2, TREE)
    return "windows"


def traced() -> str:
    folder = f"traced{next(_NUMBERS)}"
    with record(folder) as recorder:
        recorder(0, gradients=TREE)
    return folder


BEGUN, TRACED = Kind(begun, PATH.mistakes), Kind(traced, PATH.mistakes)
SAVED = Kind(saved, PATH.mistakes)
NEW = Kind(lambda: f"new{next(_NUMBERS)}", PATH.mistakes)
_NUMBERS = itertools.count()

VARIABLES = only([tf.Variable([0.0, 0.0])], none=None, numbers=[1.0], text="w")
OF_INTEGRATIONS = {
    **dict.fromkeys(("optimizer", "inner", "opt", "transformation"), OPTIMIZER),
    "reduction": MAYBE_REDUCTION,
    "over": OF_JAX,
    "weight": WEIGHT_OF,
}
"""Kinds by parameter name, for the functions of integrations."""

SPECIAL: dict[str, dict[str, Kind]] = {
    "Reduction": {name: FUNCTION.but(function) for name, function in OWN.items()},
    "accumulate": {"every": POSITIVE},
    "digest": {"value": TREES.without(*BOOLS)},
    "jax_axis": {
        "names": only("data", none=None, a_number=3, nothing=(), an_array=ONE, twice=["data", "data"], lists=[[]])
    },
    "check_state": {"state": STATE.without("a window", "of another shape")},
    "merge_replicas": {"state": STATE.without("a window", *UNSEEN)},
    "reductions.elementwise": {
        "empty": only(0.0, text="0", none=None, an_object=object()),
        "update": FUNCTION.but(lambda backend, acc, x, weight: acc + x),
        "merge": FUNCTION.but(lambda backend, a, b: a + b),
        "finalize": FUNCTION.but(None, "None"),
        "kinds": only(("float",), text="floats", a_number=3, none=None),
    },
    "reductions.per_leaf": {"reductions": only({"w": SUM}, none=None, text={"w": "sum"}, not_called=reductions.sum)},
    "reductions.ratios": {"denominators": only(["tokens"], none=None, numbers=[1], nothing=[], text=3)},
    "reductions.fed_back": {"reduction": REDUCTION.but(reductions.sum(wire=gc.wires.cast("bfloat16")))},
    "reductions.clipped": {"max_norm": NUMBER},
    "wires.cast": {"dtype": choice("bfloat16"), "seed": NOT_NEGATIVE},
    "wires.blocks": {"bits": POSITIVE.but(4), "size": POSITIVE.but(32), "seed": NOT_NEGATIVE},
    "wires.bytes_sent": {"elements": NOT_NEGATIVE, "itemsize": POSITIVE},
    "noise.squared_norm": {"value": TREES},
    "noise.noise_scale": dict.fromkeys(
        ("mean_square", "square_of_mean", "weight", "count"), only(2.0, text="1", none=None)
    ),
    "sparse.row_sparse": {
        "indices": only(np.int32([0]), floats=np.float32([0]), text="0", too_many=np.int32([0, 1]), none=None),
        "values": only(np.ones((1, 2), np.float32), text="0", none=None, more=np.ones((2, 2), np.float32)),
    },
    "sparse.add_rows": {"rows": only(ROWS, text="0", none=None, a_matrix=np.ones((4, 1)))},
    "sparse.to_dense": {"rows": only(ROWS, text="0", none=None)},
    "sparse.densify": {"values": TREES.but({"w": ROWS}).without(*PASSED_ON)},
    "resilience.faults.find": {"values": TREES.without(*PASSED_ON), "twins": TREES.but(None).without(*BOOLS)},
    "resilience.faults.require_none": {"faults": FAULTS, "values": only(None)},
    "resilience.faults.drop": {"faults": FAULTS, "state": STATE.without("a window", *UNSEEN)},
    "statefile.save": {"path": SAVED, "state": STATE.without("a window", "of another shape")},
    "statefile.save_replicas": {
        "path": SAVED,
        "states": STATES.without("a window in a list", "of another shape in a list"),
    },
    "statefile.begin_window": {"begun": TREES.without(*BOOLS)},
    "statefile.recover": {"reduction": REDUCTION.but(NUMBERED_SUM), "like": only(TREE), "start": only(TREE)},
    "statefile.save_part": {
        "folder": BEGUN,
        "index": NOT_NEGATIVE.but(2),
        "holder": NOT_NEGATIVE,
        "reduction": REDUCTION.but(NUMBERED_SUM),
        "state": NUMBERED,
    },
    **{f"statefile.{name}": {"path": SAVED} for name in ("inspect", "load", "load_replicas")},
    "statefile.resize": {
        "every": MAYBE_POSITIVE,
        "states": STATES.without("a window in a list", "of another shape in a list"),
    },
    "resilience.ledger.deal": {
        "numbers": only([0, 1], none=None, text="ab", floats=[0.5], negative=[-1], twice=[0, 0])
    },
    "resilience.ledger.merge_held": {
        "held": only([SUM.init(TREE)], none=None, a_state=SUM.init(TREE), arrays=[ONE]),
        "assignment": only([[0]], none=None, text="0", none_of_it=[], floats=[[0.5]]),
    },
    "foreign_orders.mean_of_means": {"weights": WEIGHTS.without("a set")},
    "verify.assert_equal_bits": dict.fromkeys("ab", TREES.without(*COMPARED)),
    **{f"losses.{name}": PER_TOKEN for name in ("token_mean", "group_mean")},
    **{f"losses.sequence_mean_of_token_{name}": PER_TOKEN for name in ("mean", "sum")},
    "losses.token_sum": PER_TOKEN | {"count": WEIGHT},
    "losses.deal": {"tokens": SIZES, "groups": SIZES, "parts": POSITIVE},
    "losses.pack": {"tokens": SIZES, "length": POSITIVE},
    "losses.require_whole": {"microbatches": only([[0]], none=None, text="ab", cut=[[0], [0]], floats=[[0.5]])},
    "foreign_orders.addn_blocks": {"names": only(None, numbers=[1, 2], a_number=5, too_few=["a"])},
    "verify.FlightRecorder": {
        "path": NEW,
        "like": TREES.without("2**31", *BOOLS),
        "twins": only((), a_number=3, unknown=["v"]),
    },
    "audit.audit": {"step": FUNCTION.but(jax.jit(lambda: jnp.ones(2))), "target": TARGET},
    "verify.check_microbatches": {
        "params": TREES,
        "batch": JAX_BATCH,
        "loss": FUNCTION.but(loss),
        "inner": OPTIMIZER,
        "accumulating": FUNCTION.but(for_optax.accumulate),
        "microbatches": STEPS,
    },
    "verify.check_step": {
        "make_step": FUNCTION.but(lambda k: jax.jit(jax.grad(loss))),
        "params": TREES,
        "batch": JAX_BATCH,
        "microbatches": STEPS,
        "devices": STEPS,
    },
    "verify.check_reduction": {
        "like": TREES.without(*PASSED_ON),
        "examples": POSITIVE.but(1),
        "elements": only((1.0,), text=["1"], none=None),
        "weights": only((1,), text=["1"], none=None),
    },
    "verify.explain": {
        "result": TREES,
        "weights": WEIGHTS.but(None, "a set"),
        "ranks": only(None, text="1", a_float=[1.5], zero=[0], a_number=1.5),
    },
    "verify.compare": {
        **dict.fromkeys("ab", TREES.without(*COMPARED)),
        "reference": TREES.but(None),
        "roundings": NUMBER.but(None, "None"),
    },
    "verify.plan": {
        "loss": FUNCTION.but(loss),
        "params": TREES,
        "batch": JAX_BATCH,
        "optimizer": OPTIMIZER,
        "target": TARGET,
        "names": only(["window"], unknown=["none"], a_number=3, nothing=[]),
        "axis": NAME.but("data", "nothing"),
        "weight": WEIGHT_OF,
    },
    "verify.first_divergence": dict.fromkeys("ab", TRACED),
    "integrations.jax.detect_lost_peers": {"operation": only("mean")},
    "integrations.jax.grads_by_denominator": {
        "terms": only({"value": "tokens"}, none=None, a_list=["value"], numbers={1: 2})
    },
    "integrations.jax.train_step": {"microbatches": MAYBE_POSITIVE},
    "integrations.jax.outer": {"fragments": POSITIVE},
    "integrations.jax.zero.exchange_costs": {"like": TREES.without("2**31"), "reduction": REDUCTION},
    "integrations.jax.zero.scattered": {"over": AXIS, "reduction": REDUCTION},
    "integrations.optax.accumulate": {"over": MAYBE_OVER},
    "integrations.optax.accumulate_and_apply": {"over": MAYBE_OVER},
    "integrations.optax.map_replicas": {"batch_argnums": ARGNUMS.but((), "twice")},
    "integrations.tensorflow.AccumulatedStep": {
        "variables": VARIABLES,
        "apply": FUNCTION.but(keras.optimizers.SGD(0.1)),
    },
    "integrations.tensorflow.Outer": {
        "variables": VARIABLES,
        "optimizer": only(keras.optimizers.SGD(0.1), none=None, a_number=1, nothing=[], numbers=[1.0]),
    },
    "integrations.keras.Accumulate": {
        "inner_optimizer": only(keras.optimizers.SGD(0.1), none=None, a_number=1, unknown="no optimizer"),
        "reduction": choice("mean"),
        "name": NAME.but(None, "None", "nothing"),
        "dtype": DTYPE,
    },
    "integrations.horovod.AllReduce": {
        **dict.fromkeys(FACTORS, NUMBER.without("-1")),
        "over": OVER,
        "process_set": only(None, text="0", floats=[0.5], a_number=3),
    },
    "integrations.horovod.LocalGradientAggregation": {
        "size": only(None, text="2", zero=0, a_float=1.5),
        "mode": choice("eager"),
    },
}
"""Exceptions by function, where a parameter's kind is not that of its name."""


def accumulator_init(like: Any) -> Any:
    return ACC.init(like)


def accumulator_update(grads: Any, window: Any, weight: Any) -> Any:
    gc.check_state(SUM, window)
    return ACC.update(grads, window, weight)


def accumulator_value(window: Any) -> Any:
    gc.check_state(SUM, window)
    return ACC.ready(window), ACC.value(window), ACC.restart(window)


def reduction_update(state: Any, value: Any, weight: Any) -> Any:
    return SUM.update(state, value, weight)


def reduction_merge(state: Any) -> Any:
    gc.check_state(SUM, state)
    return SUM.merge(SUM.init(TREE), state)


def reduction_finalize(state: Any) -> Any:
    gc.check_state(SUM, state)
    return SUM.finalize(state)


def exact_update(value: Any, weight: Any) -> Any:
    return gc.combine(reductions.mean("exact"), [value], [weight])


def exact_sum(max_terms: Any) -> Any:
    return reductions.sum("exact", max_terms=max_terms), reductions.mean("exact", max_terms=max_terms)


def rows_update(rows: Any, weight: Any) -> Any:
    return gc.combine(reductions.row_mean(2), [rows], [weight])


def ratios_update(ratio: Any) -> Any:
    return gc.combine(reductions.ratios(["tokens"]), [{"tokens": ratio}])


def numbered_update(value: Any, number: Any) -> Any:
    return gc.combine(reductions.numbered(SUM, 4), [reductions.Numbered(value, number)])


def variable_assign(value: Any) -> Any:
    variable = replicated.variable("sum", over=gc.LOCAL)
    return variable.assign(variable.init(TREE), value)


def ledger_read(state: Any) -> Any:
    gc.ledger.require_once(state)
    return gc.ledger.read(state)


def sharded(values: Any) -> Any:
    def replica(_: Any) -> Any:
        return for_jax.zero.gather(for_jax.zero.shard(values, AXIS.valid()), values, AXIS.valid())

    return jax.eval_shape(jax.vmap(replica, axis_name="data"), np.zeros(2))


def recorded(directory: Any, step: Any, gradients: Any) -> None:
    with record(directory) as recorder:
        recorder(step, gradients=gradients)


def optax_update(grads: Any, state: Any, params: Any, weight: Any) -> Any:
    return _WINDOW.update(grads, state, params, weight=weight)


def multi_steps_update(updates: Any, state: Any) -> Any:
    return _MULTI_STEPS.update(updates, state)


def multi_steps_adopt(state: Any) -> Any:
    return _MULTI_STEPS.adopt(state)


def step_called(params: Any, state: Any, batch: Any) -> Any:
    return _STEP.function(params, state, batch)


def value_and_grad_called(params: Any, batch: Any) -> Any:
    return for_jax.value_and_grad(loss, 2)(params, batch)


def value_and_grad_of(**settings: Any) -> Any:
    return for_jax.value_and_grad(for_jax.Loss(**settings), 2)


value_and_grad_of.__signature__ = inspect.signature(for_jax.Loss)  # pyright: ignore[reportFunctionMemberAccess]


def accumulated_step_called(states: Any) -> Any:
    step = for_tensorflow.AccumulatedStep(lambda x: ([x], 1), [tf.Variable([0.0, 0.0])], lambda grads: None, 2)
    step.load_states(states)
    return step(tf.constant([1.0, 2.0]))


def keras_apply(grads: Any, weight: Any) -> Any:
    return _keras().apply(grads, weight=weight)


def keras_weights(weights: Any) -> None:
    _keras().set_weights(weights)


def horovod_called(grads: Any) -> Any:
    return horovod.AllReduce(gc.LOCAL)(grads, [tf.Variable([0.0, 0.0])])


def aggregated(grads: Any) -> Any:
    made = horovod.LocalGradientAggregation(2, lambda grads, variables: grads)
    return made.compute_gradients(grads, [tf.Variable([0.0, 0.0])])


def _keras() -> Any:
    made = for_keras.Accumulate(keras.optimizers.SGD(0.1), 2)
    made.build([keras.Variable(np.zeros(2, np.float32))])
    return made


_WINDOW = for_optax.accumulate(SGD, 2)
_MULTI_STEPS = for_optax.MultiSteps(SGD, 2)
_STEP = for_jax.train_step(loss, SGD)
_HELD = for_tensorflow.AccumulatedStep(lambda x: ([x], 1), [tf.Variable([0.0, 0.0])], lambda grads: None, 2).states()

ARGNUM = ("argnums", "batch_argnums", "rng_argnum", "carry_argnum")

METHODS: list[tuple[Callable[..., Any], dict[str, Kind]]] = [
    (accumulator_init, {"like": TREES.without("2**31")}),
    (accumulator_update, {"grads": TREES, "window": WINDOW}),
    (accumulator_value, {"window": WINDOW}),
    (reduction_update, {"state": STATE.without("a weight of text", "of another dtype", "a count of floats")}),
    (reduction_merge, {}),
    (reduction_finalize, {"state": STATE.without("of another shape")}),
    (exact_update, {}),
    (exact_sum, {"max_terms": POSITIVE}),
    (rows_update, {"rows": only(ROWS, text="0", a_reduction=SUM)}),
    (
        ratios_update,
        {"ratio": only(reductions.Ratio(ONE, 2), an_array=ONE, none=None, negative=reductions.Ratio(ONE, -1))},
    ),
    (numbered_update, {"number": only(1, below=-2, beyond=4, text="1", a_float=1.5, none=None)}),
    (variable_assign, {}),
    (ledger_read, {"state": NUMBERED}),
    (sharded, {"values": TREES.without(*BOOLS)}),
    (recorded, {"step": POSITIVE.but(1, "0"), "gradients": TREES.without(*BOOLS)}),
    (optax_update, {"grads": TREES, "state": STATE.but(_WINDOW.init(TREE)), "params": only(TREE)}),
    (multi_steps_update, {"updates": TREES, "state": STATE.but(_MULTI_STEPS.init(TREE))}),
    (multi_steps_adopt, {"state": STATE.but(optax.MultiSteps(SGD, 2).init(TREE))}),
    (step_called, {"params": TREES.without(*BOOLS), "state": STATE.but(_STEP.init(TREE)), "batch": only(BATCH)}),
    (value_and_grad_called, {"params": only(TREE), "batch": JAX_BATCH}),
    (value_and_grad_of, {"function": FUNCTION.but(loss)} | dict.fromkeys(ARGNUM, ARGNUMS.but(0))),
    (accumulated_step_called, {"states": only(_HELD, none=None, text="a", nothing=[], numbers=[1.0])}),
    (keras_apply, {"grads": TENSORS, "weight": WEIGHT.without("None")}),
    (
        keras_weights,
        {"weights": only([x.numpy() for x in _keras().variables], none=None, nothing=[], text="ab", texts=["a"])},
    ),
    (horovod_called, {"grads": TENSORS.without("a_number")}),
    (aggregated, {"grads": TENSORS}),
]
"""Calls of functions and objects that public functions return, with states, gradients and batches."""


def _calls() -> dict[str, Call]:
    """All calls, by name."""
    functions = public()
    general = {name: OF_INTEGRATIONS if name.startswith("integrations.") else {} for name in functions}
    made = {name: Call(f, KINDS | general[name] | SPECIAL.get(name, {})) for name, f in functions.items()}
    return made | {f.__name__: Call(f, KINDS | kinds) for f, kinds in METHODS}


CALLS = _calls()
