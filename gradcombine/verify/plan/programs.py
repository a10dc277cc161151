# pyright: standard
"""The code of each strategy, which is printed, and the programs that it makes, which are compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, TypeAlias

import jax

import gradcombine as gc
from gradcombine.errors import invalid
from gradcombine.integrations.jax import train_step
from gradcombine.types import Tree
from gradcombine.verify.plan import step_accumulated, step_scattered, step_sharded
from gradcombine.verify.plan.problem import Problem, across_elements
from gradcombine.verify.plan.strategies import Strategy

Part: TypeAlias = tuple[Callable[..., Tree], tuple[Tree, ...], int]
"""A jitted step, specs of its arguments with their shardings, and the number of calls per window."""


class _Family(NamedTuple):
    """The strategies whose step one function makes.

    Attributes:
      module: of the function, printed as it is; None for `train_step` of the library.
      step: the call of the function up to its settings: an expression that is both printed and evaluated.
      lines: what is printed before the window.
    """

    module: ModuleType | None
    step: str
    lines: str


_FAMILIES = {
    "replicated": _Family(
        None,
        "train_step(loss, optimizer, over=gc.jax_axis({axis!r})",
        "import gradcombine as gc\nfrom gradcombine.integrations.jax import train_step\n\n"
        "step = {step}\nstate = step.init(params, *{example})\ncall, flush = step, step.flush\n",
    ),
    "zero1": _Family(
        step_sharded,
        "sharded_step(loss, optimizer, shardings(params), mesh, {axis!r}",
        "init, compiled = {step}\nstate = init(params, *{example})\ncall, flush = compiled(state)\n",
    ),
    "zero2": _Family(
        step_scattered,
        "scattered_step(loss, optimizer, params, mesh, {axis!r}, {rows}",
        "init, call, flush = {step}\nstate = init(params, *{example})\n",
    ),
    "fsdp": _Family(
        step_sharded,
        "sharded_step(loss, optimizer, split(params, mesh, {axis!r}), mesh, {axis!r}",
        "init, compiled = {step}\nstate = init(params, *{example})\ncall, flush = compiled(state)\n"
        "params = jax.device_put(params, split(params, mesh, {axis!r}))\n",
    ),
    "accumulate": _Family(
        step_accumulated,
        "accumulated_step(loss, optimizer, {axis!r}, {rows}",
        "init, call, flush = {step}\nstate = init(params, *{example})\n",
    ),
}

_EVERY = "for part in microbatches:\n    params, state, metrics = call(params, state, *part)\n"
_WINDOWS = {
    "window": "params, state, metrics = call(params, state, *batch)\n",
    "every": _EVERY,
    "flush": _EVERY + "params, state, metrics = flush(params, state)\n",
    "accumulate": "for part in microbatches[:-1]:\n    params, state = call(params, state, *part)\n"
    "params, state = flush(params, state, *microbatches[-1])\n",
}
"""The code of a window, by what a call processes."""


def _family(strategy: Strategy) -> _Family:
    return _FAMILIES[strategy.calls if strategy.calls == "accumulate" else strategy.place]


def _step(problem: Problem, strategy: Strategy) -> str:
    """The expression that makes the step of a strategy."""
    k, calls = problem.microbatches, strategy.calls
    every = {"window": f"microbatches={k}", "every": f"every={k}"}.get(calls, "every=gc.UNTIL_FLUSH")
    settings = [_family(strategy).step.format(axis=problem.axis, rows=problem.rows), every]
    if strategy.mean:
        mean = (f"{name}={'gc.' if name == 'wire' else ''}{value!r}" for name, value in strategy.mean.items())
        settings.append(f"reduction=gc.reductions.mean({', '.join(mean)})")
    if "tree" in strategy.numbers:
        settings.append("order='tree'" if calls in ("window", "every") else f"order='tree', max_every={k}")
    if problem.weight is not None:
        settings.append("weight=weight")
    return f"{', '.join(settings)})"


def code(problem: Problem, strategy: Strategy) -> str:
    """Source code that makes the step of a strategy and runs a window.

    It requires ``loss``, ``optimizer``, ``params``, ``mesh`` and ``batch``, a tuple of arrays on the mesh, or, if a
    call takes one microbatch, ``microbatches``, a list of such tuples.
    """
    module, _, lines = _family(strategy)
    source = "" if module is None else inspect.getsource(module).removeprefix("# pyright: standard\n") + "\n\n"
    example = "batch" if strategy.calls == "window" else "microbatches[0]"
    lines = lines.format(step=_step(problem, strategy), example=example, axis=problem.axis)
    return source + lines + _WINDOWS[strategy.calls]


def programs(problem: Problem, strategy: Strategy) -> list[Part]:
    """Creates the programs that a window calls.

    Raises:
      GradCombineError: for a combination that the library does not support.
    """
    module, k, params = _family(strategy).module, problem.microbatches, problem.params
    if module is step_accumulated and strategy.place != "replicated":
        raise invalid("replicated parameters with accumulate, which updates them on each replica", strategy.name)
    names = {"gc": gc, "train_step": train_step, **({} if module is None else vars(module))}
    step = eval(_step(problem, strategy), names | vars(problem))
    if module is step_scattered and (across := across_elements(problem)):
        raise invalid("an elementwise optimizer for zero2, which updates shards", f"an optimizer with {across}")
    args = (params, *(problem.batch if strategy.calls == "window" else problem.part(k)))
    init = step.init if module is None else step[0]
    with jax.sharding.use_abstract_mesh(problem.mesh.abstract_mesh):
        state = problem.with_shardings(jax.eval_shape(init, *args))
    if strategy.place != "replicated":
        state = state._replace(opt_state=split_specs(problem, state.opt_state))
    if module is step_sharded:
        call, flush = step[1](state)
    elif module is not None:
        _, call, flush = step
    elif problem.here:
        call, flush = step.compiled, step.compiled_flush
    else:
        call, flush = (jax.jit(f, donate_argnums=(0, 1)) for f in (step.function, step.flush_function))
    args = split_specs(problem, params) if strategy.place == "fsdp" else params, state, *args[1:]
    if strategy.calls == "accumulate":
        return [*[(call, args, k - 1)] * (k > 1), (flush, args, 1)]
    calls = 1 if strategy.calls == "window" else k
    return [(call, args, calls)] + [(flush, args[:2], 1)] * (strategy.calls == "flush")


def split_specs(problem: Problem, values: Tree) -> Tree:
    """Shards specs over the replicas as well."""
    targets = step_sharded.split(values, problem.mesh, problem.axis)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), values, targets)
