# pyright: standard
"""Strategies to run a window of microbatches, and the code of each, which is both printed and compiled."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import wires
from gradcombine.backends.protocol import Collective
from gradcombine.errors import invalid, shown
from gradcombine.integrations.jax import TrainState, zero
from gradcombine.types import AccumulateState, Array, Tree
from gradcombine.verify.plan.problem import Problem, across_elements, plain

CALLS = ("window", "every", "flush", "accumulate")
PLACES = ("replicated", "zero1", "zero2", "fsdp")
NUMBERS = ("bfloat16", "8bits", "compensated", "exact", "tree")
"""Words in the names of strategies, as in the table of docs/plan.md."""


class Strategy(NamedTuple):
    """A strategy to run a window.

    Attributes:
      calls: what a call of the step processes, from `CALLS`.
      place: what is sharded over the replicas, from `PLACES`.
      numbers: precision, wire and order of sums, from `NUMBERS`; at most one precision and one wire.
    """

    calls: str
    place: str
    numbers: tuple[str, ...] = ()

    @property
    def mean(self) -> dict[str, Any]:
        """Keyword arguments of `gradcombine.reductions.mean`."""
        settings: dict[str, tuple[str, Any]] = {name: ("precision", name) for name in ("compensated", "exact")}
        settings |= {"bfloat16": ("wire", wires.cast("bfloat16")), "8bits": ("wire", wires.blocks(8))}
        return dict(settings[name] for name in self.numbers if name in settings)

    @property
    def name(self) -> str:
        return "+".join((self.calls, *[self.place] * (self.place != "replicated"), *self.numbers))


DEFAULT = (
    *(f"{calls}+{place}" for calls in ("window", "every", "flush") for place in PLACES),
    "accumulate",
    *(f"window+{name}" for name in NUMBERS),
)


def way_of(name: str) -> Strategy:
    """Parses a strategy's name: words of `CALLS`, `PLACES`, `NUMBERS` joined by +, as in ``"every+zero1+bfloat16"``.

    The defaults are "window", "replicated", and plain sums in the accumulators' dtype.

    Raises:
      GradCombineError: for an unknown word, and two words that exclude each other.

    >>> way_of("zero1"), way_of("every+replicated").name
    (Strategy(calls='window', place='zero1', numbers=()), 'every')
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid("the name of a strategy", shown(name))
    words = [word.strip() for word in name.split("+")]
    known = [*CALLS, *PLACES, *NUMBERS]
    if unknown := [word for word in words if word not in known]:
        raise invalid(f"a strategy of the words {', '.join(known)}, joined by +", ", ".join(unknown))
    calls, places, numbers = ([word for word in group if word in words] for group in (CALLS, PLACES, NUMBERS))
    exclusive = ("compensated", "exact"), ("bfloat16", "8bits")
    choices = [calls, places, *([word for word in numbers if word in group] for group in exclusive)]
    if len(words) > len(set(words)) or any(len(choice) > 1 for choice in choices):
        raise invalid("a strategy with at most one word for the calls, the sharding, the precision and the wire", name)
    return Strategy("".join(calls) or "window", "".join(places) or "replicated", tuple(numbers))


def split(values: Tree, mesh: Mesh, axis: str) -> Tree:
    """Shardings that additionally shard each array over ``axis``, along its largest divisible dimension."""

    def one(x: Array) -> NamedSharding:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else P()
        entries = [*spec, *[None] * (x.ndim - len(spec))]
        free = [i for i, n in enumerate(x.shape) if entries[i] is None and n and n % mesh.shape[axis] == 0]
        if free:
            entries[max(free, key=lambda i: x.shape[i])] = axis
        return NamedSharding(mesh, P(*entries))

    return jax.tree.map(one, values)


def shardings(values: Tree) -> Tree:
    """Shardings of arrays, for jit's out_shardings."""
    return jax.tree.map(lambda x: x.sharding, values)


def gathered(optimizer: optax.GradientTransformation, targets: Tree) -> optax.GradientTransformationExtraArgs:
    """Gathers the updates of an optimizer with sharded state, to the shardings of the parameters."""
    inner = optax.with_extra_args_support(optimizer)

    def reshard(x: Array, sharding: NamedSharding) -> Array:
        explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
        return (jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint)(x, sharding)

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(reshard, updates, targets), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def on_shards(optimizer: optax.GradientTransformation, over: Collective) -> optax.GradientTransformationExtraArgs:
    """Runs an elementwise optimizer on each replica's shards of the gradients, and gathers the updates."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        return inner.init(zero.shard(params, over))

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, state, zero.shard(params, over), **extra)
        return zero.gather(updates, params, over), state

    return optax.GradientTransformationExtraArgs(init, update)


def specs_of_shards(optimizer: optax.GradientTransformation, params: Tree, mesh: Mesh, axis: str) -> TrainState:
    """Partition specs of the state of a step with an optimizer `on_shards`."""
    sizes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((-(-x.size // mesh.shape[axis]),), x.dtype), params)
    inner = jax.tree.map(lambda x: P(axis) if x.ndim else P(), jax.eval_shape(optimizer.init, sizes))
    window: Tree = AccumulateState(P(axis), P(), P())  # pyright: ignore[reportArgumentType]
    return TrainState(window, inner, P())


def map_step(
    function: Callable[..., Tree], mesh: Mesh, axis: str, specs: TrainState, rows: tuple[P, ...]
) -> Callable[..., Tree]:
    """Maps a step's function over the replicas; outside, accumulators and metrics have a leading axis of replicas."""

    def map_levels(state: Tree, f: Callable[[Array], Array]) -> Tree:
        return state._replace(window=state.window._replace(levels=jax.tree.map(f, state.window.levels)))

    def one(params: Tree, state: Tree, *batch: Tree) -> tuple[Tree, Tree, Tree]:
        params, state, metrics = function(params, map_levels(state, lambda x: x[0]), *batch)
        return params, map_levels(state, lambda x: x[None]), jax.tree.map(lambda x: x[None], metrics)

    out_specs = (P(), specs, P(axis))
    return jax.shard_map(
        one, mesh=mesh, in_specs=(P(), specs, *rows), out_specs=out_specs, axis_names={axis}, check_vma=False
    )


def map_init(
    init: Callable[..., Tree], mesh: Mesh, axis: str, specs: TrainState, rows: tuple[P, ...]
) -> Callable[..., Tree]:
    """Maps a step's ``init(params, *example)`` over the replicas."""

    def one(params: Tree, *example: Tree) -> Tree:
        state = init(params, *example)
        levels = jax.tree.map(lambda x: x[None], state.window.levels)
        return state._replace(window=state.window._replace(levels=levels))

    return jax.shard_map(one, mesh=mesh, in_specs=(P(), *rows), out_specs=specs, axis_names={axis}, check_vma=False)


def own_key(function: Callable[..., Tree], at: int, axis: str) -> Callable[..., Tree]:
    """Gives each replica a different random key, argument number ``at`` of the function."""

    def call(*args: Tree, **kwargs: Tree) -> Tree:
        key = jax.random.fold_in(args[at], jax.lax.axis_index(axis))
        return function(*args[:at], key, *args[at + 1 :], **kwargs)

    return call


HELPERS = {f.__name__: f for f in (split, shardings, gathered, on_shards, specs_of_shards, map_step, map_init, own_key)}
"""Functions that the code of a strategy may contain."""

IMPORTS = {
    "collections.abc": "Callable",
    "functools": "partial",
    "": "jax, optax, gradcombine as gc",
    "jax.sharding": "Mesh, NamedSharding, PartitionSpec as P",
    "gradcombine.backends.protocol": "Collective",
    "gradcombine.integrations.jax": "LossOutput, TrainState, train_step, value_and_grad, zero",
    "gradcombine.integrations.optax": "accumulate_and_apply, map_replicas",
    "gradcombine.types": "AccumulateState, Array, Tree",
}

SPLIT = """
opt_state = jax.device_put(state.opt_state, split(state.opt_state, mesh, {axis!r}))
state = state._replace(opt_state=opt_state)
"""

JITTED = """
options = {'donate_argnums': (0, 1), 'out_shardings': (shardings(params), shardings(state), None)}
call = jax.jit(step.function, **options)
flush = jax.jit(step.flush_function, **options)
"""

SCATTERED = """
step = train_step(loss, on_shards(optimizer, over), {settings})
specs = specs_of_shards(optimizer, params, mesh, {axis!r})
rows = {rows}
init = map_init(step.init, mesh, {axis!r}, specs, {example})
call = map_step({function}, mesh, {axis!r}, specs, rows)
call = jax.jit(call, donate_argnums=(0, 1))
flush = jax.jit(map_step(step.flush_function, mesh, {axis!r}, specs, ()), donate_argnums=(0, 1))
"""

ACCUMULATED = """
tx = accumulate_and_apply(optimizer, {settings})
gradient = {gradient}


def step(params, state, *batch, flush):
    value, grads = gradient(params, *batch)
    # The weight of a LossOutput is the number of examples or tokens that this microbatch's mean is over.
    weight = value.weight if isinstance(value, LossOutput) else 1.0
    return tx.apply(grads, state, params, weight=weight, flush=flush)


step = map_replicas(step, over, batch_argnums={batch})
call, flush = (jax.jit(partial(step, flush=ends), donate_argnums=(0, 1)) for ends in (False, True))
"""


class Recipe(NamedTuple):
    """Source code of a strategy, in order of execution.

    Attributes:
      step: defines ``step`` or ``tx`` from ``loss``, ``optimizer``, ``weight``, ``params``, ``mesh`` and ``over``.
      state: creates the state, in arrays; a plan has specs instead.
      programs: defines ``call`` and ``flush``; empty if the step itself is called.
      loop: runs a window, of ``batch`` or ``microbatches``.
    """

    step: str
    state: str
    programs: str
    loop: str


def recipe(problem: Problem, strategy: Strategy) -> Recipe:
    axis, at, k = problem.axis, problem.loss.rng_argnum, problem.microbatches
    weight = "" if problem.weight is None else ", weight=weight"
    replicated, one_call = strategy.place == "replicated", strategy.calls == "window"
    example = "" if one_call else ", *microbatches[0]"
    settings = _settings(strategy, k)
    if strategy.calls == "accumulate":
        gradient = f"value_and_grad(loss, 1{weight})"
        step = ACCUMULATED.format(
            settings=f"{settings}, over=over",
            gradient=gradient if at is None else f"own_key({gradient}, {at}, {axis!r})",
            batch=[2 + i for i, divided in enumerate(problem.rows) if divided],
        )
        call = f"params, state = (flush if i == {k - 1} else call)(params, state, *part)"
        loop = f"for i, part in enumerate(microbatches):\n    {call}"
        return Recipe(step, "state = map_replicas(tx.init, over)(params)", "", loop)
    if strategy.place == "zero2":
        step = SCATTERED.format(
            settings=settings + weight,
            axis=axis,
            example="()" if one_call else "rows",
            function="step.function" if at is None else f"own_key(step.function, {at + 1}, {axis!r})",
            rows=f"({', '.join(f'P({axis!r})' if divided else 'P()' for divided in problem.rows)},)",
        )
        state, programs = f"state = jax.jit(init)(params{example})", ""
    else:
        optimizer = "gathered(optimizer, shardings(params))" if strategy.place == "zero1" else "optimizer"
        step = f"step = train_step(loss, {optimizer}, {settings}, over=over{weight})"
        state = f"state = step.init(params{example})"
        if strategy.place == "fsdp":
            state += f"\nparams = jax.device_put(params, split(params, mesh, {axis!r}))"
        state, programs = (state, "") if replicated else (state + SPLIT.format(axis=axis), JITTED)
    call, flush = ("step", "step.flush") if replicated else ("call", "flush")
    loop = f"for part in microbatches:\n    params, state, metrics = {call}(params, state, *part)"
    if one_call:
        loop = f"params, state, metrics = {call}(params, state, *batch)"
    if strategy.calls == "flush":
        loop += f"\nparams, state, metrics = {flush}(params, state)"
    else:
        step, programs = (re.sub("flush = .*\n", "", text) for text in (step, programs))
    return Recipe(step, state, programs, loop)


def _settings(strategy: Strategy, k: int) -> str:
    """Keyword arguments of the strategy's step, except for ``over`` and ``weight``."""
    mean = f"gc.reductions.mean({', '.join(map(_argument, strategy.mean.items()))})"
    every = k if strategy.calls == "every" else "gc.UNTIL_FLUSH"
    settings = [f"microbatches={k}" if strategy.calls == "window" else f"every={every}"]
    if strategy.place == "zero2":
        settings.append(f"reduction=zero.scattered({mean}, over)")
    elif strategy.mean:
        settings.append(f"reduction={mean}")
    if "tree" in strategy.numbers:
        settings.append("order='tree'" + f", max_every={k}" * (settings[0] == "every=gc.UNTIL_FLUSH"))
    return ", ".join(settings)


def code(problem: Problem, strategy: Strategy) -> str:
    """Source code that creates the strategy's programs and runs a window.

    It requires ``loss``, ``optimizer``, ``params``, ``mesh`` and ``batch``, a tuple of arrays on the mesh, or, if a
    call takes one microbatch, ``microbatches``, a list of such tuples.
    """
    parts = [f"over = gc.jax_axis({problem.axis!r})", *recipe(problem, strategy)]
    body = "\n".join(part.strip() for part in parts if part)
    used = [function for name, function in HELPERS.items() if f"{name}(" in body]
    functions = "".join(re.sub(r"  # pyright: .*", "", inspect.getsource(x)) + "\n\n" for x in used)
    text = functions + body
    return "\n".join(_imports(text)) + "\n\n" + "\n" * bool(functions) + text + "\n"


def _imports(text: str) -> Iterator[str]:
    """Import statements for the names that occur in source code."""
    words = set(re.findall(r"\w+", text))
    for module, names in IMPORTS.items():
        used = [name for name in names.split(", ") if name.split()[-1] in words]
        if not module:
            yield from (f"import {name}" for name in used)
        elif used:
            yield f"from {module} import {', '.join(used)}"


def _argument(setting: tuple[str, object]) -> str:
    name, value = setting
    return f"{name}={'gc.' if name == 'wire' else ''}{value!r}"


Part: TypeAlias = tuple[Callable[..., Tree], tuple[Tree, ...], int]
"""A jitted step, specs of its arguments with their shardings, and the number of calls per window."""


def programs(problem: Problem, strategy: Strategy) -> list[Part]:
    """Creates the programs that a window calls, by executing the strategy's code.

    Raises:
      GradCombineError: for a combination that the library does not support.
    """
    accumulates, k = strategy.calls == "accumulate", problem.microbatches
    if accumulates and strategy.place != "replicated":
        raise invalid("replicated parameters with accumulate, which updates them on each replica", strategy.name)
    source, params = recipe(problem, strategy), problem.params
    names: dict[str, Any] = vars(problem) | HELPERS
    exec("\n".join(_imports("\n".join(source))), names)
    local: dict[str, Any] = names | {"over": gc.LOCAL}
    names["over"] = gc.jax_axis(problem.axis)
    exec(source.step, names)
    example: tuple[Tree, ...] = () if accumulates or strategy.calls == "window" else problem.part(k)
    if strategy.place == "zero2":
        if across := across_elements(problem):
            raise invalid("an elementwise optimizer for zero2, which updates shards", f"an optimizer with {across}")
        state = jax.tree.map(
            lambda partition, values: jax.tree.map(lambda x: problem.spec(x, partition), values),
            names["specs"],
            jax.eval_shape(names["init"], params, *example),
            is_leaf=lambda x: isinstance(x, P),
        )
    else:
        exec(source.step, local)
        example = plain(problem.part(k * problem.replicas)) if example else ()
        init = local["tx" if accumulates else "step"].init
        state = jax.eval_shape(lambda params: init(params, *example), plain(params))
        # Outside of the step, accumulators have a leading axis of replicas.
        levels = problem.with_shardings(state.window.levels, per_replica=True)
        state = problem.with_shardings(state._replace(window=state.window._replace(levels=())))
        state = state._replace(window=state.window._replace(levels=levels))
    if strategy.place == "fsdp":
        params = split_specs(problem, params)
    if strategy.place in ("fsdp", "zero1"):
        state = state._replace(opt_state=split_specs(problem, state.opt_state))
    names |= {"params": params, "state": state}
    exec(source.programs, names)
    if accumulates or strategy.place != "replicated":
        call, end = names["call"], names.get("flush")
    elif problem.here:
        call, end = names["step"].compiled, names["step"].compiled_flush
    else:
        call, end = (jax.jit(f, donate_argnums=(0, 1)) for f in (names["step"].function, names["step"].flush_function))
    if strategy.calls == "window":
        return [(call, (params, state, *problem.batch), 1)]
    args = (params, state, *problem.part(k))
    if accumulates:
        return [*[(call, args, k - 1)] * (k > 1), (end, args, 1)]
    return [(call, args, k)] + [(end, args[:2], 1)] * (strategy.calls == "flush")


def split_specs(problem: Problem, values: Tree) -> Tree:
    """Shards specs over the replicas as well."""
    targets = split(values, problem.mesh, problem.axis)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), values, targets)
