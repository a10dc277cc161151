"""The ways to run a window of microbatches: the programs of each, and the code that makes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions
from gradcombine.errors import GradCombineError, shown
from gradcombine.integrations.jax import UNTIL_FLUSH, LossOutput, TrainStep, train_step, value_and_grad, zero
from gradcombine.integrations.optax import accumulate_and_apply, map_replicas
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.sums import Precision
from gradcombine.verify.plan import recipes
from gradcombine.verify.plan.problem import Problem, plain

CALLS = {
    "window": "the whole window in one call",
    "every": "a call for each microbatch, of which every k-th ends the window",
    "flush": "the same, and the host calls another program at the end",
    "accumulate": "optax transformation in two programs, with and without the end, of which the host knows which",
}
PLACES = {
    "replicated": "parameters and optimizer whole on each device",
    "zero1": "the optimizer's state split over the replicas",
    "zero2": "the accumulators as well: a reduce-scatter in each microbatch",
    "fsdp": "parameters and the optimizer's state split, and gathered for the loss",
}
NUMBERS = {
    "bfloat16": "sums exchanged in bfloat16",
    "compensated": "sums with an error as of twice the precision",
    "exact": "correctly rounded sums: the same bits in any order",
    "tree": "the canonical order: the same bits for powers of two of replicas",
}


class Way(NamedTuple):
    """One way: what a call brings, where the state lies, and how sums are made.

    Attributes:
      calls: of `CALLS`.
      place: of `PLACES`.
      numbers: of `NUMBERS`, at most one precision among them.
    """

    calls: str
    place: str
    numbers: tuple[str, ...] = ()

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
        raise GradCombineError("plan", "a way by its name", shown(name))
    words = [word.strip() for word in name.split("+")]
    known = [*CALLS, *PLACES, *NUMBERS]
    if unknown := [word for word in words if word not in known]:
        raise GradCombineError("plan", f"a way of the words {', '.join(known)}, with + between", ", ".join(unknown))
    calls, places, numbers = ([word for word in kind if word in words] for kind in (CALLS, PLACES, NUMBERS))
    exclusive = [calls, places, [word for word in numbers if word in ("compensated", "exact")]]
    if len(words) > len(set(words)) or any(len(chosen) > 1 for chosen in exclusive):
        raise GradCombineError("plan", "a way with one word of each kind", name)
    return Way("".join(calls) or "window", "".join(places) or "replicated", tuple(numbers))


class Part(NamedTuple):
    """A program of a way.

    Attributes:
      step: jitted.
      args: specs, with their shardings.
      calls: how often a window calls it.
    """

    step: Any
    args: tuple[Any, ...]
    calls: int


def programs(problem: Problem, way: Way) -> list[Part]:
    """The programs that a window of this way calls.

    Raises:
      GradCombineError: a combination that the library has no door for.
    """
    if way.calls == "accumulate":
        return _accumulated(problem, way)
    if way.place == "zero2":
        return _sharded(problem, way)
    params, state, k = problem.params, _state(problem, way), problem.microbatches
    optimizer = problem.optimizer
    if way.place == "zero1":
        optimizer = recipes.gathered(optimizer, recipes.shardings(params))
    step = _step(problem, way, optimizer)
    if way.place == "fsdp":
        params = _placed(params, recipes.split(params, problem.mesh, problem.axis))
    if way.place in ("fsdp", "zero1"):
        split = recipes.split(state.opt_state, problem.mesh, problem.axis)
        state = state._replace(opt_state=_placed(state.opt_state, split))
    flush = step.flush_function
    if way.place == "replicated" and problem.here:
        call, end = step.compiled, step.compiled_flush
    else:
        options: dict[str, Any] = {"donate_argnums": (0, 1)}
        if way.place != "replicated":
            options["out_shardings"] = (recipes.shardings(params), recipes.shardings(state), None)
        call, end = jax.jit(step.function, **options), jax.jit(flush, **options)
    if way.calls == "window":
        return [Part(call, (params, state, *problem.batch), 1)]
    one = Part(call, (params, state, *problem.part(k)), k)
    return [one] if way.calls == "every" else [one, Part(end, (params, state), 1)]


def microbatch(problem: Problem) -> Part:
    """The gradients of one microbatch of each replica, and nothing else."""
    gradient = value_and_grad(problem.loss, 1, weight=problem.weight)

    def one(params: Any, *batch: Any) -> Any:
        return jax.tree.map(lambda x: x[None], gradient(params, *batch)[1])

    mapped = jax.shard_map(
        one,
        mesh=problem.mesh,
        in_specs=(P(), *_rows(problem)),
        out_specs=P(problem.axis),
        axis_names={problem.axis},
        check_vma=False,
    )
    return Part(jax.jit(mapped), (problem.params, *problem.part(problem.microbatches)), problem.microbatches)


def reduction_of(way: Way) -> Reduction:
    """Of the gradients."""
    wire = "bfloat16" if "bfloat16" in way.numbers else None
    return reductions.mean(precision_of(way), wire_dtype=wire)


def _written_reduction(way: Way) -> str:
    written = [repr(precision_of(way))] * (precision_of(way) != "fast")
    written += ["wire_dtype='bfloat16'"] * ("bfloat16" in way.numbers)
    return f"gc.reductions.mean({', '.join(written)})"


def precision_of(way: Way) -> Precision:
    return "compensated" if "compensated" in way.numbers else "exact" if "exact" in way.numbers else "fast"


def settings_of(problem: Problem, way: Way) -> tuple[dict[str, Any], dict[str, str]]:
    """Keyword arguments of the way's step, its replicas aside, and how they are written."""
    k, found = problem.microbatches, dict[str, Any]()
    found["microbatches" if way.calls == "window" else "every"] = k if way.calls in ("window", "every") else UNTIL_FLUSH
    if set(way.numbers) - {"tree"}:
        found["reduction"] = reduction_of(way)
    if "tree" in way.numbers:
        found["order"] = "tree"
        if found.get("every") == UNTIL_FLUSH:
            found["max_every"] = k
    texts = {name: repr(value) for name, value in found.items()}
    if found.get("every") == UNTIL_FLUSH:
        texts["every"] = "UNTIL_FLUSH"
    if "reduction" in texts:
        texts["reduction"] = _written_reduction(way)
    return found, texts


def weight_of(problem: Problem) -> dict[str, str]:
    """The caller's own weight as an argument, if there is one."""
    return {} if problem.weight is None else {"weight": "weight"}


def _step(problem: Problem, way: Way, optimizer: Any, over: Any = None) -> TrainStep:
    settings, _ = settings_of(problem, way)
    over = gc.jax_axis(problem.axis) if over is None else over
    return train_step(problem.loss, optimizer, over=over, weight=problem.weight, **settings)


def _example(problem: Problem) -> tuple[Any, ...]:
    """The arguments of one microbatch of one replica."""
    return plain(problem.part(problem.microbatches * problem.replicas))


def _state(problem: Problem, way: Way) -> Any:
    """Specs of the state of a step on the mesh."""
    init = _step(problem, way, problem.optimizer, gc.LOCAL).init
    example = () if way.calls == "window" else _example(problem)
    state = jax.eval_shape(lambda params: init(params, *example), plain(problem.params))
    return _with_window(problem, state)


def _with_window(problem: Problem, state: Any) -> Any:
    levels = problem.beside(state.window.levels, first=True)
    placed = problem.beside(state._replace(window=state.window._replace(levels=())))
    return placed._replace(window=placed.window._replace(levels=levels))


def _placed(values: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), values, where)


def _rows(problem: Problem) -> tuple[P, ...]:
    return tuple(P(problem.axis) if divided else P() for divided in problem.rows)


def _sharded(problem: Problem, way: Way) -> list[Part]:
    """ZeRO-2: a step in a shard_map, whose reduction and optimizer work on shards."""
    if "bfloat16" in way.numbers:
        raise GradCombineError(
            "plan", "another type than bfloat16 with zero2, whose accumulators are exchanged", way.name
        )
    over, mesh, axis = gc.jax_axis(problem.axis), problem.mesh, problem.axis
    settings, _ = settings_of(problem, way)
    reduction = zero.scattered(settings.pop("reduction", reductions.mean()), over)
    if across := across_elements(problem):
        expected = "an elementwise optimizer for zero2, which sees shards of the parameters"
        raise GradCombineError("plan", expected, f"one with {across}")
    optimizer = recipes.on_shards(problem.optimizer, over)
    step = train_step(problem.loss, optimizer, reduction=reduction, weight=problem.weight, **settings)
    example = () if way.calls == "window" else _example(problem)
    specs = recipes.specs_of_shards(problem.optimizer, problem.params, mesh, axis)
    init = recipes.begun(lambda params: step.init(params, *example), mesh, axis, specs)
    state = jax.eval_shape(init, problem.params)
    state = jax.tree.map(
        lambda where, values: jax.tree.map(lambda x: problem.spec(x, where), values),
        specs,
        state,
        is_leaf=lambda x: isinstance(x, P),
    )
    rows, function = _rows(problem), step.function
    if (at := problem.loss.rng_argnum) is not None:
        function = recipes.own_key(function, at + 1, axis)
    call = jax.jit(recipes.on_each(function, mesh, axis, specs, rows), donate_argnums=(0, 1))
    if way.calls == "window":
        return [Part(call, (problem.params, state, *problem.batch), 1)]
    one = Part(call, (problem.params, state, *problem.part(problem.microbatches)), problem.microbatches)
    if way.calls == "every":
        return [one]
    end = jax.jit(recipes.on_each(step.flush_function, mesh, axis, specs, ()), donate_argnums=(0, 1))
    return [one, Part(end, (problem.params, state), 1)]


def _accumulated(problem: Problem, way: Way) -> list[Part]:
    """A transformation, in a step of the caller's."""
    if way.place != "replicated":
        expected = "replicated parameters with accumulate, which maps the optimizer over the replicas"
        raise GradCombineError("plan", expected, way.name)
    over, k, axis = gc.jax_axis(problem.axis), problem.microbatches, problem.axis
    settings, _ = settings_of(problem, way)
    every = settings.pop("every")
    tx = accumulate_and_apply(problem.optimizer, every, over=over, **settings)
    gradient = value_and_grad(problem.loss, 1, weight=problem.weight)
    if (at := problem.loss.rng_argnum) is not None:
        gradient = recipes.own_key(gradient, at, axis)

    def step(params: Any, state: Any, *batch: Any, flush: bool) -> Any:
        value, grads = gradient(params, *batch)
        weight = value.weight if isinstance(value, LossOutput) else 1.0
        return tx.apply(grads, state, params, weight=weight, flush=flush)

    mapped = map_replicas(step, over, batch_argnums=[2 + i for i, divided in enumerate(problem.rows) if divided])
    local = accumulate_and_apply(problem.optimizer, every, **settings)
    state = _with_window(problem, jax.eval_shape(local.init, plain(problem.params)))
    args = (problem.params, state, *problem.part(k))
    within, end = (jax.jit(partial(mapped, flush=flush), donate_argnums=(0, 1)) for flush in (False, True))
    return [*[Part(within, args, k - 1)] * (k > 1), Part(end, args, 1)]


ELEMENTWISE = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota", "copy", "random_bits"}
"""Operations that change a shape without reading one element for another."""


def across_elements(problem: Problem) -> str | None:
    """The first operation by which the optimizer makes one element's update of other elements; None without one."""
    like = plain(problem.params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        tx = optax.with_extra_args_support(problem.optimizer)
        value = jax.ShapeDtypeStruct((), "float32")
        return tx.update(grads, state, params, value=jax.numpy.zeros(value.shape, value.dtype))

    traced = jax.make_jaxpr(update)(like, jax.eval_shape(problem.optimizer.init, like), like)
    return next(_crossing(traced.jaxpr), None)


def _crossing(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        inner = [sub for value in equation.params.values() for sub in _jaxprs(value)]
        for sub in inner:
            yield from _crossing(sub)
        if inner or equation.primitive.name in ELEMENTWISE:
            continue
        taken, made = (
            max((math.prod(x.aval.shape) for x in side if hasattr(x.aval, "shape")), default=1)
            for side in (equation.invars, equation.outvars)
        )
        if equation.primitive.name in ("dot_general", "sort", "conv_general_dilated") or taken > made:
            yield equation.primitive.name


def _jaxprs(value: Any) -> Sequence[Any]:
    values = value if isinstance(value, tuple | list) else [value]
    return [getattr(x, "jaxpr", x) for x in values if hasattr(getattr(x, "jaxpr", x), "eqns")]
