# pyright: standard
"""The ways to run a window of microbatches: the code of each, which is printed and compiled."""

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
"""The words of names, as in the table of docs/plan.md."""


class Way(NamedTuple):
    """One way: what a call brings, where the state lies, and how sums are made.

    Attributes:
      calls: of `CALLS`.
      place: of `PLACES`.
      numbers: of `NUMBERS`, at most one precision and one wire among them.
    """

    calls: str
    place: str
    numbers: tuple[str, ...] = ()

    @property
    def mean(self) -> dict[str, Any]:
        """The keyword arguments of the reduction of the gradients."""
        kinds: dict[str, tuple[str, Any]] = {name: ("precision", name) for name in ("compensated", "exact")}
        kinds |= {"bfloat16": ("wire", wires.cast("bfloat16")), "8bits": ("wire", wires.blocks(8))}
        return dict(kinds[name] for name in self.numbers if name in kinds)

    @property
    def name(self) -> str:
        return "+".join((self.calls, *[self.place] * (self.place != "replicated"), *self.numbers))


DEFAULT = (
    *(f"{calls}+{place}" for calls in ("window", "every", "flush") for place in PLACES),
    "accumulate",
    *(f"window+{name}" for name in NUMBERS),
)


def way_of(name: str) -> Way:
    """The way of this name: words of `CALLS`, `PLACES` and `NUMBERS` with + between, as ``"every+zero1+bfloat16"``.

    What is left out is "window", "replicated", and plain sums in the accumulators' own type.

    Raises:
      GradCombineError: another word, or two of which one excludes the other.

    >>> way_of("zero1"), way_of("every+replicated").name
    (Way(calls='window', place='zero1', numbers=()), 'every')
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid("a way by its name", shown(name))
    words = [word.strip() for word in name.split("+")]
    known = [*CALLS, *PLACES, *NUMBERS]
    if unknown := [word for word in words if word not in known]:
        raise invalid(f"a way of the words {', '.join(known)}, with + between", ", ".join(unknown))
    calls, places, numbers = ([word for word in kind if word in words] for kind in (CALLS, PLACES, NUMBERS))
    kinds = ("compensated", "exact"), ("bfloat16", "8bits")
    exclusive = [calls, places, *([word for word in numbers if word in kind] for kind in kinds)]
    if len(words) > len(set(words)) or any(len(chosen) > 1 for chosen in exclusive):
        raise invalid("a way with one word of each kind", name)
    return Way("".join(calls) or "window", "".join(places) or "replicated", tuple(numbers))


def split(values: Tree, mesh: Mesh, axis: str) -> Tree:
    """Shardings that split each array over one more axis, along the largest dimension that it divides."""

    def one(x: Array) -> NamedSharding:
        own = x.sharding.spec if isinstance(x.sharding, NamedSharding) else P()
        entries = [*own, *[None] * (x.ndim - len(own))]
        free = [i for i, n in enumerate(x.shape) if entries[i] is None and n and n % mesh.shape[axis] == 0]
        if free:
            entries[max(free, key=lambda i: x.shape[i])] = axis
        return NamedSharding(mesh, P(*entries))

    return jax.tree.map(one, values)


def shardings(values: Tree) -> Tree:
    """The shardings of arrays, for the results that replace them."""
    return jax.tree.map(lambda x: x.sharding, values)


def gathered(optimizer: optax.GradientTransformation, where: Tree) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state is split, and whose updates lie as the parameters do."""
    inner = optax.with_extra_args_support(optimizer)

    def lies(x: Array, sharding: NamedSharding) -> Array:
        explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
        return (jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint)(x, sharding)

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(lies, updates, where), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def on_shards(optimizer: optax.GradientTransformation, over: Collective) -> optax.GradientTransformationExtraArgs:
    """An elementwise optimizer of shards, which gathers its updates."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        return inner.init(zero.shard(params, over))

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, state, zero.shard(params, over), **extra)
        return zero.gather(updates, params, over), state

    return optax.GradientTransformationExtraArgs(init, update)


def specs_of_shards(optimizer: optax.GradientTransformation, params: Tree, mesh: Mesh, axis: str) -> TrainState:
    """How the state of a step is split whose optimizer is `on_shards`."""
    sizes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((-(-x.size // mesh.shape[axis]),), x.dtype), params)
    inner = jax.tree.map(lambda x: P(axis) if x.ndim else P(), jax.eval_shape(optimizer.init, sizes))
    window: Tree = AccumulateState(P(axis), P(), P())  # pyright: ignore[reportArgumentType]
    return TrainState(window, inner, P())


def on_each(
    function: Callable[..., Tree], mesh: Mesh, axis: str, specs: TrainState, rows: tuple[P, ...]
) -> Callable[..., Tree]:
    """A step's function on each replica; what of a window is its own has a first axis outside, and so have metrics."""

    def change(state: Tree, levels: Callable[[Array], Array]) -> Tree:
        return state._replace(window=state.window._replace(levels=jax.tree.map(levels, state.window.levels)))

    def one(params: Tree, state: Tree, *batch: Tree) -> tuple[Tree, Tree, Tree]:
        params, state, metrics = function(params, change(state, lambda x: x[0]), *batch)
        return params, change(state, lambda x: x[None]), jax.tree.map(lambda x: x[None], metrics)

    returned = (P(), specs, P(axis))
    return jax.shard_map(
        one, mesh=mesh, in_specs=(P(), specs, *rows), out_specs=returned, axis_names={axis}, check_vma=False
    )


def begun(
    init: Callable[..., Tree], mesh: Mesh, axis: str, specs: TrainState, rows: tuple[P, ...]
) -> Callable[..., Tree]:
    """A step's init(params, *example) on each replica."""

    def one(params: Tree, *example: Tree) -> Tree:
        state = init(params, *example)
        levels = jax.tree.map(lambda x: x[None], state.window.levels)
        return state._replace(window=state.window._replace(levels=levels))

    return jax.shard_map(one, mesh=mesh, in_specs=(P(), *rows), out_specs=specs, axis_names={axis}, check_vma=False)


def own_key(function: Callable[..., Tree], at: int, axis: str) -> Callable[..., Tree]:
    """A function whose random key, an argument, is made each replica's own."""

    def called(*args: Tree, **kwargs: Tree) -> Tree:
        own = jax.random.fold_in(args[at], jax.lax.axis_index(axis))
        return function(*args[:at], own, *args[at + 1 :], **kwargs)

    return called


HELPERS = {f.__name__: f for f in (split, shardings, gathered, on_shards, specs_of_shards, on_each, begun, own_key)}
"""Functions that the code of a way may need beside the library's."""

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
init = begun(step.init, mesh, {axis!r}, specs, {example})
call = on_each({function}, mesh, {axis!r}, specs, rows)
call = jax.jit(call, donate_argnums=(0, 1))
flush = jax.jit(on_each(step.flush_function, mesh, {axis!r}, specs, ()), donate_argnums=(0, 1))
"""

ACCUMULATED = """
tx = accumulate_and_apply(optimizer, {settings})
gradient = {gradient}


def step(params, state, *batch, flush):
    value, grads = gradient(params, *batch)
    # Of a loss that is a mean over another number of examples than the others', the number: as LossOutput has it.
    weight = value.weight if isinstance(value, LossOutput) else 1.0
    return tx.apply(grads, state, params, weight=weight, flush=flush)


step = map_replicas(step, over, batch_argnums={batch})
call, flush = (jax.jit(partial(step, flush=ends), donate_argnums=(0, 1)) for ends in (False, True))
"""


class Recipe(NamedTuple):
    """The code of a way, in the order in which it runs.

    Attributes:
      step: makes ``step``, or ``tx``, of ``loss``, ``optimizer``, ``weight``, ``params``, ``mesh`` and ``over``.
      state: makes the state of arrays, in place of which a plan has specs.
      programs: makes ``call`` and ``flush``; empty where they are the step's own.
      loop: runs a window of ``batch``, or of ``microbatches``.
    """

    step: str
    state: str
    programs: str
    loop: str


def recipe(problem: Problem, way: Way) -> Recipe:
    axis, at, k = problem.axis, problem.loss.rng_argnum, problem.microbatches
    weight = "" if problem.weight is None else ", weight=weight"
    own, whole = way.place == "replicated", way.calls == "window"
    example = "" if whole else ", *microbatches[0]"
    settings = _settings(way, k)
    if way.calls == "accumulate":
        gradient = f"value_and_grad(loss, 1{weight})"
        step = ACCUMULATED.format(
            settings=f"{settings}, over=over",
            gradient=gradient if at is None else f"own_key({gradient}, {at}, {axis!r})",
            batch=[2 + i for i, divided in enumerate(problem.rows) if divided],
        )
        loop = f"    params, state = (flush if i == {k - 1} else call)(params, state, *part)"
        return Recipe(
            step, "state = map_replicas(tx.init, over)(params)", "", f"for i, part in enumerate(microbatches):\n{loop}"
        )
    if way.place == "zero2":
        step = SCATTERED.format(
            settings=settings + weight,
            axis=axis,
            example="()" if whole else "rows",
            function="step.function" if at is None else f"own_key(step.function, {at + 1}, {axis!r})",
            rows=f"({', '.join(f'P({axis!r})' if divided else 'P()' for divided in problem.rows)},)",
        )
        state, programs = f"state = jax.jit(init)(params{example})", ""
    else:
        optimizer = "gathered(optimizer, shardings(params))" if way.place == "zero1" else "optimizer"
        step = f"step = train_step(loss, {optimizer}, {settings}, over=over{weight})"
        state = f"state = step.init(params{example})"
        if way.place == "fsdp":
            state += f"\nparams = jax.device_put(params, split(params, mesh, {axis!r}))"
        state, programs = (state, "") if own else (state + SPLIT.format(axis=axis), JITTED)
    call, flush = ("step", "step.flush") if own else ("call", "flush")
    loop = f"for part in microbatches:\n    params, state, metrics = {call}(params, state, *part)"
    if way.calls == "flush":
        loop += f"\nparams, state, metrics = {flush}(params, state)"
    else:
        step, programs = (re.sub("flush = .*\n", "", text) for text in (step, programs))
    return Recipe(step, state, programs, f"params, state, metrics = {call}(params, state, *batch)" if whole else loop)


def _settings(way: Way, k: int) -> str:
    """Keyword arguments of the way's step, its replicas and weight aside."""
    made = f"gc.reductions.mean({', '.join(map(_argument, way.mean.items()))})"
    every = k if way.calls == "every" else "gc.UNTIL_FLUSH"
    found = [f"microbatches={k}" if way.calls == "window" else f"every={every}"]
    if way.place == "zero2":
        found.append(f"reduction=zero.scattered({made}, over)")
    elif way.mean:
        found.append(f"reduction={made}")
    if "tree" in way.numbers:
        found.append("order='tree'" + f", max_every={k}" * (found[0] == "every=gc.UNTIL_FLUSH"))
    return ", ".join(found)


def code(problem: Problem, way: Way) -> str:
    """The source code that makes the way's programs and runs a window.

    Its user has ``loss``, ``optimizer``, ``params``, ``mesh`` and ``batch``, a tuple of arrays on the mesh; or, where
    a call brings a microbatch, ``microbatches``, a list of such tuples.
    """
    parts = [f"over = gc.jax_axis({problem.axis!r})", *recipe(problem, way)]
    body = "\n".join(part.strip() for part in parts if part)
    used = [function for name, function in HELPERS.items() if f"{name}(" in body]
    functions = "".join(re.sub(r"  # pyright: .*", "", inspect.getsource(x)) + "\n\n" for x in used)
    text = functions + body
    return "\n".join(_imports(text)) + "\n\n" + "\n" * bool(functions) + text + "\n"


def _imports(text: str) -> Iterator[str]:
    """The lines that import the names of a text."""
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
"""A jitted step, its arguments as specs with their shardings, and how often a window calls it."""


def programs(problem: Problem, way: Way) -> list[Part]:
    """The programs that a window of this way calls, made by its code.

    Raises:
      GradCombineError: a combination for which the library has no integration.
    """
    accumulates, k = way.calls == "accumulate", problem.microbatches
    if accumulates and way.place != "replicated":
        raise invalid("replicated parameters with accumulate, which maps the optimizer over the replicas", way.name)
    steps, params = recipe(problem, way), problem.params
    names: dict[str, Any] = vars(problem) | HELPERS
    exec("\n".join(_imports("\n".join(steps))), names)
    local: dict[str, Any] = names | {"over": gc.LOCAL}
    names["over"] = gc.jax_axis(problem.axis)
    exec(steps.step, names)
    example: tuple[Tree, ...] = () if accumulates or way.calls == "window" else problem.part(k)
    if way.place == "zero2":
        if across := across_elements(problem):
            expected = "an elementwise optimizer for zero2, which sees shards of the parameters"
            raise invalid(expected, f"one with {across}")
        state = jax.tree.map(
            lambda where, values: jax.tree.map(lambda x: problem.spec(x, where), values),
            names["specs"],
            jax.eval_shape(names["init"], params, *example),
            is_leaf=lambda x: isinstance(x, P),
        )
    else:
        exec(steps.step, local)
        example = plain(problem.part(k * problem.replicas)) if example else ()
        init = local["tx" if accumulates else "step"].init
        state = jax.eval_shape(lambda params: init(params, *example), plain(params))
        # Outside of a step, each replica has its own sums of a window, along a first axis.
        levels = problem.beside(state.window.levels, first=True)
        state = problem.beside(state._replace(window=state.window._replace(levels=())))
        state = state._replace(window=state.window._replace(levels=levels))
    if way.place == "fsdp":
        params = split_specs(problem, params)
    if way.place in ("fsdp", "zero1"):
        state = state._replace(opt_state=split_specs(problem, state.opt_state))
    names |= {"params": params, "state": state}
    exec(steps.programs, names)
    if accumulates or way.place != "replicated":
        call, end = names["call"], names.get("flush")
    elif problem.here:
        call, end = names["step"].compiled, names["step"].compiled_flush
    else:
        call, end = (jax.jit(f, donate_argnums=(0, 1)) for f in (names["step"].function, names["step"].flush_function))
    if way.calls == "window":
        return [(call, (params, state, *problem.batch), 1)]
    args = (params, state, *problem.part(k))
    if accumulates:
        return [*[(call, args, k - 1)] * (k > 1), (end, args, 1)]
    return [(call, args, k)] + [(end, args[:2], 1)] * (way.calls == "flush")


def split_specs(problem: Problem, values: Tree) -> Tree:
    """Specs of arrays that are split over the replicas too."""
    where = split(values, problem.mesh, problem.axis)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), values, where)
