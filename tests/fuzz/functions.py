"""The public functions, found by introspection, so that none is left out, and what their arguments are drawn from."""

from __future__ import annotations

import atexit
import enum
import importlib
import inspect
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import gradcombine as gc
from gradcombine import digests, reductions, replicated, sparse, statefile
from gradcombine.errors import GradCombineError, operation
from gradcombine.reductions.algebra import require_reduction
from gradcombine.verify import FlightRecorder, record
from tests.fuzz.values import FUNCTIONS, Drawn, OwnError, huge, junk, mutated

Kind = Callable[[Drawn], Any]

PUBLIC = (
    *("gradcombine", "gradcombine.reductions", "gradcombine.statefile", "gradcombine.noise", "gradcombine.replicated"),
    *(
        "gradcombine.sparse",
        "gradcombine.digests",
        "gradcombine.resilience.faults",
        "gradcombine.resilience.ledger",
        "gradcombine.foreign_orders",
        "gradcombine.verify",
    ),
    *("gradcombine.audit", "gradcombine.verify.plan", "gradcombine.integrations.jax"),
    *("gradcombine.integrations.jax.zero", "gradcombine.integrations.optax", "gradcombine.integrations.tensorflow"),
    *("gradcombine.integrations.keras", "gradcombine.integrations.horovod"),
)
"""The modules whose names users have."""


def public(module: str) -> dict[str, Any]:
    """The functions and classes of a module that take arguments of users; what they are returned is left out."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name
        for name, x in vars(found).items()
        if not name.startswith("_") and name not in _INNER and getattr(x, "__module__", "") == module
    ]
    return {f"{module}.{name}": x for name in names if callable(x := getattr(found, name)) and not _is_record(x)}


_INNER = {"digested", "ledgers_in"}
"""Called by other modules, which name their errors."""


def _is_record(x: Any) -> bool:
    if not isinstance(x, type):
        return not inspect.isroutine(x)
    return hasattr(x, "_fields") or issubclass(x, (enum.Enum, BaseException)) or x.__name__ in _RECORDS


_RECORDS = {"Stacked", "TrainStep", "Recorder"}
"""Made by functions that check their arguments."""


class Target(NamedTuple):
    """A function, and what its arguments are drawn from.

    Attributes:
      function: called with keyword arguments.
      kinds: what each argument is drawn from.
      allowed: the errors that it is documented to raise beside `GradCombineError`.
      terms: contributions for the reduction that it returns, if it does.
    """

    function: Callable[..., Any]
    kinds: Mapping[str, Kind]
    allowed: tuple[type[BaseException], ...] = ()
    terms: Kind = Drawn.trees


def const(*values: Any) -> Kind:
    return lambda d: d.r.choice(values)


def of(kind: Callable[..., Any], *args: Any) -> Kind:
    return lambda d: kind(d.r, *args)


def _numbered(d: Drawn) -> Any:
    """A state that holds each of four microbatches once, in most cases."""
    return d.of_a_few(_ledger)


def _ledger(d: Drawn) -> Any:
    reduction, held = reductions.numbered(d.reduction(), 4), 4 if d.r.random() < 0.7 else 3
    return _state(reduction, [reductions.Numbered(d.tree(), number) for number in range(held)])


def _state(reduction: gc.Reduction, values: list[Any]) -> Any:
    state = reduction.init(values[0].value)
    for value in values:
        state = reduction.update(state, value)
    return state


def _stack(d: Drawn) -> Any:
    """A value of each of two replicas."""
    return d.leaf((2, 2), "float32")


def _of_float(d: Drawn) -> Any:
    return d.leaf((2,), "float32")


def _twice(d: Drawn) -> Any:
    """The tree that was drawn for the argument before, in most cases."""
    return d.tree() if d.r.random() < 0.3 else d.latest


def _faults(d: Drawn) -> Any:
    return gc.faults.find(gc.LOCAL, d.r.choice([{"w": np.float32([1, np.nan])}, {"w": np.float32([1, 2])}]))


def _new(d: Drawn) -> Any:
    """A path of nothing yet, in most cases; else of a file, of a trace, or of what cannot be there."""
    folder = Path(FOLDER, "new")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "traced").mkdir(parents=True)
    for name in ("traced/step_00000001.npz", "a.txt"):
        (folder / name).write_text("neither arrays nor digests")
    name = d.r.choice(["new"] * 6 + ["a.txt", "traced", "a.txt/below", "not/there"])
    return d.r.choice([str, Path])(folder / name)


def _file(d: Drawn) -> Any:
    """One that holds a state of the drawn reduction, in most cases."""
    path, content = _paths(d), d.of_a_few(_saved)
    if content is not None:
        with suppress(OSError):
            Path(path).write_bytes(content)
    return path


def _saved(d: Drawn) -> bytes | None:
    path = f"{FOLDER}/saved{d.r.choice(['.npz', '.safetensors'])}"
    try:
        statefile.save_replicas(path, d.reduction(), [d.any_state()])
    except GradCombineError:
        return None
    return Path(path).read_bytes()


def _folder(d: Drawn) -> str:
    """One with the beginning of a window, and a part of it."""
    folder = f"{FOLDER}/windows{d.r.randrange(2)}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(d.of_a_few(_recoverable), folder)
    return folder


def _recoverable(d: Drawn) -> str:
    folder = tempfile.mkdtemp(dir=FOLDER)
    with suppress(GradCombineError):
        statefile.begin_window(folder, 0, d.tree())
        reduction = reductions.numbered(d.reduction(), 4)
        statefile.save_part(folder, 0, 1, reduction, _state(reduction, [reductions.Numbered(d.tree(), 0)]))
    return folder


def _checkable(d: Drawn) -> gc.Reduction:
    """One that breaks the first law, in most cases: to try all of them takes a hundred times as long."""
    return d.reduction() if d.r.random() < 0.1 else _BROKEN


_BROKEN = gc.Reduction(lambda like: (), lambda state, x, weight: (), lambda a, b: (), lambda state: np.float32(np.nan))


def _search_ends(number: int, name: str) -> None:
    """Of two contributions all candidates are tried, of more the first ones."""
    if number > 70:
        raise OwnError


def _part(d: Drawn) -> gc.Reduction:
    return reductions.numbered(d.reduction(), 4)


@cache
def _recordings() -> list[str]:
    """The folders of three traces, of which the last one differs."""
    folders = [tempfile.mkdtemp(dir=FOLDER) for _ in range(3)]
    for i, folder in enumerate(folders):
        with record(folder) as recorder:
            for step in range(2):
                recorder(step, gradients={"w": np.float32([1, step])}, params={"w": np.float32(i // 2)})
    return folders


def _paths(d: Drawn) -> Any:
    name = d.r.choice(["a.npz", "b.safetensors", "c.txt", "", "not/there.npz"])
    return d.r.choice([str, Path])(f"{FOLDER}/{name}")


FOLDER = tempfile.mkdtemp(prefix="fuzz")
"""Where functions write."""
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

KINDS: dict[str, Kind] = {
    "reduction": Drawn.reduction,
    "mean": lambda d: d.r.choice([None, reductions.mean(), reductions.mean("exact"), reductions.sum()]),
    "reductions": lambda d: {"w": d.reduction(), "b": reductions.max()},
    "denominators": const(["tokens"], ("tokens", "rows"), {"tokens"}),
    "values": Drawn.trees,
    "value": Drawn.tree,
    "grads": Drawn.tree,
    "like": Drawn.tree,
    "a": Drawn.tree,
    "b": Drawn.tree,
    "result": Drawn.tree,
    "contributions": Drawn.trees,
    "weights": Drawn.weights,
    "weight": Drawn.weight,
    "order": Drawn.order,
    "every": Drawn.every,
    "max_every": const(None, 4, 8),
    "method": const("add_n", "tree", "accumulate_n", 0, 1, 2, 3),
    "over": const(gc.LOCAL),
    "names": const("data", ("data", "model"), None),
    "state": Drawn.any_state,
    "window": Drawn.window,
    "states": lambda d: [d.any_state() for _ in range(d.r.choice([1, 2, 4]))],
    "replicas": const(1, 2, 3, 4),
    "full": const(False, True),
    "path": _paths,
    "directory": _paths,
    "precision": Drawn.precision,
    "dtype": Drawn.dtype,
    "output_dtype": Drawn.dtype,
    "wire_dtype": Drawn.dtype,
    "accumulator": Drawn.dtype,
    "max_terms": const(4096, 10, 2**20),
    "microbatches": const(4, 100),
    "folder": lambda d: f"{FOLDER}/windows",
    "index": const(0, 1, 7),
    "holder": const(0, 1),
    "begun": Drawn.tree,
    "start": Drawn.tree,
    "divided": const(False, True),
    "capacity": const(1, 4, 100),
    "overflow": const("error", "nan"),
    "max_norm": const(1.0, 0.5, 10),
    "name": const("own", "sum"),
    "reused": const(0, 1),
    "packed": const(True, False),
    "fused": const(True, False),
    "ranks": const(1, 2, 3),
    "aggregation": const("sum", "mean", "none", "only_first_replica", replicated.Aggregation.SUM),
    "synchronization": const("auto", "on_write", "on_read", replicated.Synchronization.AUTO),
    "indices": lambda d: np.int32([d.r.randrange(4) for _ in range(2)]),
    "rows": lambda d: _rows(d),
    "table": lambda d: d.leaf((4, 2), "float32"),
    "unique": const(False, True),
    "mean_square": const(np.float32(4), 5.0),
    "square_of_mean": const(np.float32(1), 2.0),
    "count": const(2, np.int32(4)),
    "step": const(0, 1, np.int64(7), 10**6),
    "steps": const(None, range(4), [1, 2]),
    "reference": lambda d: d.r.choice([None, d.tree()]),
    "roundings": const(None, 2.0, 10),
    "ulp": const(0, 4, {"w": 1}, lambda name: 3),
    "digests": lambda d: np.zeros((2, 2), np.uint32),
    "replica": const(None, 0, np.int32(1)),
    "twins": const((), ["w"], ["b", "w"]),
    "behind": const(0, 1, 3),
    "operation": const("mean"),
    "expected": const("4 weights"),
    "received": of(junk),
    "function": of(lambda r: r.choice(FUNCTIONS)),
    "scales_by_weight": const(False, True),
    "kinds": const(("float",), ("float", "complex")),
    "empty": const(0, 0.0, (0, 1)),
}


def _rows(d: Drawn) -> Any:
    indices = np.int32([d.r.randrange(4) for _ in range(2)])
    return sparse.row_sparse(indices, d.leaf((2, 2), "float32"), 4)


# What a result is for: its functions, with arguments that fit it, or do not.


@operation("update")
def reduction_update(reduction: Any, state: Any, value: Any, weight: Any) -> Any:
    require_reduction(reduction)
    return reduction.update(state, value, weight)


@operation("merge")
def reduction_merge(reduction: Any, state: Any, other: Any) -> Any:
    require_reduction(reduction)
    return reduction.merge(state, other)


@operation("finalize")
def reduction_finalize(reduction: Any, state: Any) -> Any:
    require_reduction(reduction)
    return reduction.clear(state), reduction.finalize(state)


def accumulator_init(reduction: Any, every: Any, order: Any, like: Any) -> Any:
    return gc.accumulate(reduction, every, order=order).init(like)


def accumulator_update(reduction: Any, every: Any, order: Any, window: Any, grads: Any, weight: Any) -> Any:
    return gc.accumulate(reduction, every, order=order).update(grads, window, weight)


def accumulator_value(reduction: Any, every: Any, order: Any, window: Any) -> Any:
    acc = gc.accumulate(reduction, every, order=order)
    return acc.ready(window), acc.value(window), acc.restart(window)


def combine_rows(capacity: Any, overflow: Any, values: Any, weights: Any, dtype: Any) -> Any:
    return gc.combine(reductions.row_mean(capacity, overflow=overflow, dtype=dtype), values, weights)


def combine_ratios(values: Any, denominators: Any) -> Any:
    return gc.combine(reductions.ratios(denominators), values)


def numbered_window(microbatches: Any, like: Any, value: Any, number: Any) -> Any:
    acc = gc.accumulate(reductions.numbered(reductions.mean(), microbatches), every=4)
    state = acc.update(reductions.Numbered(like, 1), acc.init(like))
    return gc.ledger.read(acc.update(reductions.Numbered(value, number), state))


def ledger_read(state: Any, microbatches: Any) -> Any:
    gc.ledger.require_once(state)
    return gc.ledger.read(state, reductions.numbered(reductions.sum(), microbatches).init(np.float32(0)))


def variable_assign(aggregation: Any, synchronization: Any, over: Any, value: Any, other: Any, how: str) -> Any:
    variable = replicated.variable(aggregation, synchronization, over=over)
    state = variable.init(value)
    for functions in (variable, variable.cross):
        state = getattr(functions, how)(state, other)
        functions.read(state)
    return state


def variable_read(aggregation: Any, replicas: Any, state: Any, other: Any) -> Any:
    variable = replicated.variable(aggregation, "on_read", over=replicated.stacked(replicas))
    return variable.read(state), variable.cross.read(state), variable.assign(state, other)


def saved_and_loaded(path: Any, reduction: Any, state: Any, like: Any) -> Any:
    statefile.save(path, reduction, state)
    statefile.inspect(path)
    return statefile.load(path, reduction, like)


def saved_replicas(path: Any, reduction: Any, states: Any, like: Any) -> Any:
    statefile.save_replicas(path, reduction, states)
    return statefile.load_replicas(path, reduction, like)


def recorded(directory: Any, steps: Any, step: Any, gradients: Any, params: Any) -> None:
    with record(directory, steps) as recorder:
        recorder(step, gradients=gradients, params=params)


def flight_recorded(path: Any, like: Any, twins: Any, behind: Any, step: Any, digests: Any, replica: Any) -> None:
    with FlightRecorder(path, like, twins=twins, behind=behind) as recorder:
        recorder(step, digests, replica)


def flown(value: Any, step: Any) -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        flight_recorded(f"{folder}/a.log", value, (), 0, step, digests.digest(value), None)


def stacked_assign(replicas: Any, aggregation: Any, value: Any, other: Any) -> Any:
    variable = replicated.variable(aggregation, over=replicated.stacked(replicas))
    return variable.read(variable.assign(variable.init(value), other))


def described_error(operation: Any, expected: Any, received: Any, path: Any) -> str:
    return str(GradCombineError(operation, expected, received, path))


METHODS: dict[str, Target] = {
    f.__name__: Target(f, kinds)  # pyright: ignore[reportAttributeAccessIssue]
    for f, kinds in [
        (ledger_read, {"state": _numbered, "microbatches": const(4)}),
        (reduction_update, {}),
        (reduction_merge, {"other": Drawn.any_state}),
        (reduction_finalize, {}),
        (accumulator_init, {}),
        (accumulator_update, {}),
        (accumulator_value, {}),
        (combine_rows, {"values": lambda d: [_rows(d) for _ in range(d.r.randrange(1, 4))]}),
        (
            combine_ratios,
            {"values": lambda d: [{"tokens": reductions.Ratio(d.leaf((2,), "float32"), d.weight())}]},
        ),
        (
            numbered_window,
            {"microbatches": const(4, 8), "number": const(0, 1, 3, np.int32(2))},
        ),
        (variable_assign, {"other": Drawn.tree, "how": lambda d: d.r.choice(["assign", "assign_add", "assign_sub"])}),
        (
            variable_read,
            {
                "aggregation": const("sum", "mean", "only_first_replica"),
                "replicas": const(2),
                "state": lambda d: replicated.variable("sum", over=replicated.stacked(2)).init(d.leaf((2,), "float32")),
                "other": _stack,
            },
        ),
        (saved_and_loaded, {}),
        (saved_replicas, {}),
        (recorded, {"directory": _new, "gradients": Drawn.tree, "params": Drawn.tree}),
        (flight_recorded, {"path": _new}),
        (flown, {}),
        (stacked_assign, {"replicas": const(2), "value": _stack, "other": _stack}),
        (described_error, {}),
    ]
}
FIXED = {"how", "examples", "progress", "said"}
"""What is no user's, and what asks for time, or ends it."""

SPECIAL: dict[str, dict[str, Kind]] = {
    "gradcombine.resilience.ledger.deal": {"numbers": const([0, 1, 2, 3], range(9)), "held": const(None, [[0], [1]])},
    "gradcombine.resilience.ledger.merge_held": {
        "held": lambda d: [d.any_state() for _ in range(2)],
        "assignment": const([[0, 1]]),
    },
    "gradcombine.all_reduce": {"value": Drawn.tree},
    "gradcombine.resilience.faults.find": {"values": Drawn.tree, "twins": Drawn.tree},
    "gradcombine.resilience.faults.require_none": {"faults": _faults, "values": Drawn.tree},
    "gradcombine.resilience.faults.drop": {"faults": _faults},
    "gradcombine.merge_replicas": {"state": Drawn.any_state},
    "gradcombine.Reduction": dict.fromkeys(("init", "update", "merge", "finalize"), KINDS["function"]),
    "gradcombine.reductions.elementwise": {
        "update": const(lambda backend, acc, x, weight: acc + x),
        "merge": const(lambda backend, a, b: a + b),
        "finalize": const(None, lambda backend, acc, totals: acc),
    },
    "gradcombine.foreign_orders.addn_blocks": {"names": lambda d: d.r.choice([None, ["a", "b"], ["x"] * 3])},
    "gradcombine.sparse.row_sparse": {"values": lambda d: d.leaf((2, 2), "float32"), "rows": const(4, 10**6)},
    "gradcombine.sparse.densify": {"values": lambda d: {"w": _rows(d)}},
    "gradcombine.reductions.per_leaf": {"reductions": lambda d: dict.fromkeys(("w", "b"), reductions.max())},
    "gradcombine.statefile.inspect": {"path": _file},
    "gradcombine.statefile.load": {"path": _file},
    "gradcombine.statefile.load_replicas": {"path": _file},
    "gradcombine.statefile.recover": {"folder": _folder, "reduction": _part},
    "gradcombine.statefile.save_part": {"folder": _folder, "index": const(0), "reduction": _part, "state": _numbered},
    "gradcombine.statefile.resize": {"every": const(None, 4), "state": Drawn.any_state},
    "gradcombine.verify.equal_bits": {"a": _of_float, "b": _of_float},
    "gradcombine.verify.ulp_distance": {"a": _of_float, "b": _of_float},
    "gradcombine.verify.assert_equal_bits": {"b": _twice},
    "gradcombine.verify.assert_within_ulp": {"b": _twice},
    "gradcombine.verify.explain": {
        "contributions": lambda d: d.trees()[:3],
        "ranks": const(None, [1, 2]),
        "progress": const(_search_ends),
    },
    "gradcombine.verify.first_divergence": {
        "a": lambda d: d.r.choice(_recordings()),
        "b": lambda d: d.r.choice(_recordings()),
        "allowed": const({}, {"params": None}),
        "rules": const(None),
    },
    "gradcombine.verify.check_reduction": {
        "reduction": _checkable,
        "commutative": const(True, False),
        "weighted": const(True, False),
        "ulps": const(0, 4),
        "elements": const((0.0, 1.0), (1.0,)),
        "weights": const((1, 2), (1, 0)),
        "asarray": const(np.asarray),
        "examples": const(1),
    },
}
TERMS: dict[str, Kind] = {
    f"gradcombine.reductions.{name}": terms
    for name, terms in {
        "numbered": lambda d: [reductions.Numbered(value, number) for number, value in enumerate(d.trees())],
        "ratio": lambda d: [reductions.Ratio(value, d.weight()) for value in d.trees()],
        "ratios": lambda d: [{"tokens": reductions.Ratio(value, d.weight())} for value in d.trees()],
        "per_leaf": lambda d: [{"w": value, "b": value} for value in d.trees()],
        "row_sum": lambda d: [_rows(d) for _ in d.trees()],
        "row_mean": lambda d: [_rows(d) for _ in d.trees()],
    }.items()
}


def target_of(name: str, function: Callable[..., Any]) -> Target:
    """The target of a public function.

    Raises:
      KeyError: for a parameter that nothing is known of: it needs a strategy in `KINDS` or `SPECIAL`.
    """
    special = SPECIAL.get(name, {})
    kinds: dict[str, Kind] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name not in special and parameter.name not in KINDS:
            raise KeyError(f"{name} has a parameter {parameter.name} without a strategy")
        kinds[parameter.name] = special.get(parameter.name) or KINDS[parameter.name]
    return Target(function, kinds, _allowed(name), TERMS.get(name, Drawn.trees))


def _allowed(name: str) -> tuple[type[BaseException], ...]:
    if "assert_" in name or "check_reduction" in name:  # a BrokenLaw is one
        return (AssertionError,)
    return (OSError,) if name.startswith(("gradcombine.statefile.", "saved_", "recorded", "flight_recorded")) else ()


ELSEWHERE = (
    "gradcombine.audit",
    "gradcombine.integrations",
    "gradcombine.verify.audit",
    "gradcombine.verify.plan",
    "gradcombine.verify.check_step",
)


def targets() -> dict[str, Target]:
    """What needs no framework, by name."""
    found: dict[str, Target] = {}
    for module in PUBLIC:
        if not module.startswith(ELSEWHERE):
            for name, function in public(module).items():
                if name not in DOORS:
                    found[name] = target_of(name, function)
    for name, target in METHODS.items():
        parameters = inspect.signature(target.function).parameters
        kinds = {p: target.kinds.get(p) or KINDS[p] for p in parameters}
        found[name] = Target(target.function, kinds, _allowed(name))
    return found


DOORS = {
    f"gradcombine.verify.{name}"
    for name in ("audit", "plan", "check_step", "check_microbatches", "record", "FlightRecorder", "BrokenLaw")
} | {
    "gradcombine.jax_axis",
    "gradcombine.tf_replicas",
    "gradcombine.resilience.ledger.read",
    "gradcombine.resilience.ledger.require_once",
}
"""What has targets of its own."""


@cache
def _required(function: Callable[..., Any]) -> set[str]:
    """The parameters without a default, and those whose default takes seconds."""
    parameters = inspect.signature(function).parameters.items()
    return {name for name, p in parameters if p.default is inspect.Parameter.empty or name in FIXED}


def call(target: Target, drawn: Drawn) -> tuple[dict[str, Any], Callable[[], Any]]:
    """The arguments of one input, and the call with them."""
    r, required = drawn.r, _required(target.function)
    arguments = {name: kind(drawn) for name, kind in target.kinds.items() if name in required or r.random() < 0.5}
    free = [name for name in arguments if name not in FIXED]
    for name in r.sample(free, min(len(free), r.choice([0, 1, 1, 1, 1, 1, 1, 2, 2, 3]))):
        arguments[name] = huge(r) if name == "like" and r.random() < 0.05 else mutated(r, arguments[name])

    def run() -> Any:
        result = target.function(**arguments)
        if isinstance(result, gc.Reduction):
            return gc.combine(result, target.terms(drawn))
        return result

    return arguments, run
