"""The source code of the ways to run a window, as a plan prints it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from gradcombine.verify.plan import recipes
from gradcombine.verify.plan.problem import Problem
from gradcombine.verify.plan.ways import Way, settings_of, weight_of


def code(problem: Problem, way: Way) -> str:
    """The source code that makes the way's programs and runs a window.

    Its user has ``loss``, ``optimizer``, ``params``, ``mesh`` and ``batch``, a tuple of arrays on the mesh; or, where
    a call brings a microbatch, ``microbatches``, a list of such tuples.
    """
    if way.calls == "accumulate":
        body, used = _accumulated_code(problem, way), []
    elif way.place == "zero2":
        body, used = _sharded_code(problem, way), ["on_shards", "specs_of_shards", "on_each", "begun"]
    else:
        body = _stepped_code(problem, way)
        used = ["split", "shardings"] * (way.place != "replicated") + ["gathered"] * (way.place == "zero1")
    if problem.loss.rng_argnum is not None and "own_key(" in body:
        used = [*used, "own_key"]
    functions = "\n\n".join(inspect.getsource(getattr(recipes, name)) for name in used)
    functions = re.sub(r"  # pyright: .*", "", functions)
    text = f"{functions}\n\n{body}" if functions else body
    imports = [line for name, line in IMPORTS.items() if re.search(rf"\b{name}\b", text)]
    return "\n".join(imports) + "\n\n" + ("\n" if functions else "") + text


IMPORTS = {
    "Callable": "from collections.abc import Callable",
    "Any": "from typing import Any",
    "jax": "import jax",
    "optax": "import optax",
    "Mesh": "from jax.sharding import Mesh",
    "NamedSharding": "from jax.sharding import NamedSharding",
    "P": "from jax.sharding import PartitionSpec as P",
    "gc": "import gradcombine as gc",
    "Collective": "from gradcombine.backends.protocol import Collective",
    "TrainState": "from gradcombine.integrations.jax import TrainState",
    "UNTIL_FLUSH": "from gradcombine.integrations.jax import UNTIL_FLUSH",
    "train_step": "from gradcombine.integrations.jax import train_step",
    "value_and_grad": "from gradcombine.integrations.jax import value_and_grad",
    "zero": "from gradcombine.integrations.jax import zero",
    "accumulate_and_apply": "from gradcombine.integrations.optax import accumulate_and_apply",
    "map_replicas": "from gradcombine.integrations.optax import map_replicas",
    "AccumulateState": "from gradcombine.types import AccumulateState",
}


def _written_rows(problem: Problem) -> str:
    return f"({', '.join(f'P({problem.axis!r})' if divided else 'P()' for divided in problem.rows)},)"


def _stepped_code(problem: Problem, way: Way) -> str:
    texts = settings_of(problem, way)[1] | {"over": f"gc.jax_axis({problem.axis!r})"} | weight_of(problem)
    optimizer = "gathered(optimizer, shardings(params))" if way.place == "zero1" else "optimizer"
    lines = [f"step = train_step(loss, {optimizer}, {_arguments(texts)})"]
    example = "" if way.calls == "window" or not problem.loss.has_aux else ", *microbatches[0]"
    lines.append(f"state = step.init(params{example})")
    if way.place == "replicated":
        call, flush = "step", "step.flush"
    else:
        if way.place == "fsdp":
            lines.append(f"params = jax.device_put(params, split(params, mesh, {problem.axis!r}))")
        lines += [
            f"opt_state = jax.device_put(state.opt_state, split(state.opt_state, mesh, {problem.axis!r}))",
            "state = state._replace(opt_state=opt_state)",
            "options = {'donate_argnums': (0, 1), 'out_shardings': (shardings(params), shardings(state), None)}",
            "call = jax.jit(step.function, **options)",
        ]
        call, flush = "call", "jax.jit(step.flush_function, **options)"
    return "\n".join([*lines, *_loop(way, call, flush)]) + "\n"


def _loop(way: Way, call: str, flush: str) -> Iterator[str]:
    if way.calls == "window":
        yield f"params, state, metrics = {call}(params, state, *batch)"
        return
    yield "for part in microbatches:"
    yield f"    params, state, metrics = {call}(params, state, *part)"
    if way.calls == "flush":
        yield f"params, state, metrics = {flush}(params, state)"


def _sharded_code(problem: Problem, way: Way) -> str:
    _, texts = settings_of(problem, way)
    texts["reduction"] = f"zero.scattered({texts.get('reduction', 'gc.reductions.mean()')}, over)"
    axis, at = problem.axis, problem.loss.rng_argnum
    init = "step.init"
    if way.calls != "window" and problem.loss.has_aux:
        init = "lambda params: step.init(params, *microbatches[0])"
    function = "step.function" if at is None else f"own_key(step.function, {at + 1}, {axis!r})"
    lines = [
        f"over = gc.jax_axis({axis!r})",
        f"step = train_step(loss, on_shards(optimizer, over), {_arguments(texts | weight_of(problem))})",
        f"specs = specs_of_shards(optimizer, params, mesh, {axis!r})",
        f"state = jax.jit(begun({init}, mesh, {axis!r}, specs))(params)",
        f"call = on_each({function}, mesh, {axis!r}, specs, {_written_rows(problem)})",
        "call = jax.jit(call, donate_argnums=(0, 1))",
    ]
    if way.calls == "flush":
        lines.append(f"flush = jax.jit(on_each(step.flush_function, mesh, {axis!r}, specs, ()), donate_argnums=(0, 1))")
    return "\n".join([*lines, *_loop(way, "call", "flush")]) + "\n"


def _accumulated_code(problem: Problem, way: Way) -> str:
    _, texts = settings_of(problem, way)
    axis, at = problem.axis, problem.loss.rng_argnum
    texts["over"] = "over"
    gradient = f"value_and_grad({', '.join(['loss', '1', *(f'{x}={x}' for x in weight_of(problem))])})"
    batch = [2 + i for i, divided in enumerate(problem.rows) if divided]
    lines = [
        f"over = gc.jax_axis({axis!r})",
        f"tx = accumulate_and_apply(optimizer, {_arguments(texts)})",
        f"gradient = {gradient if at is None else f'own_key({gradient}, {at}, {axis!r})'}",
        "",
        "",
        "def step(params, state, *batch, flush):",
        "    value, grads = gradient(params, *batch)",
        "    # weight: of this microbatch, where the loss is a mean over another number of examples than the others'",
        "    return tx.apply(grads, state, params, weight=1.0, flush=flush)",
        "",
        "",
        f"step = map_replicas(step, over, batch_argnums={batch})",
        "step = jax.jit(step, static_argnames='flush', donate_argnums=(0, 1))",
        "state = map_replicas(tx.init, over)(params)",
        "for i, part in enumerate(microbatches):",
        f"    params, state = step(params, state, *part, flush=i == {problem.microbatches - 1})",
    ]
    return "\n".join(lines) + "\n"


def _arguments(texts: dict[str, str]) -> str:
    return ", ".join(f"{name}={text}" for name, text in texts.items())
