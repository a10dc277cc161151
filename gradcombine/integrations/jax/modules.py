# pyright: standard
"""Modules of flax.nnx and equinox as parameters.

A module is split into differentiated parameters, keys of random streams, other arrays (such as batch statistics, which
calls of the module change) and constants. The loss gets a module that is merged from these; changed state is returned
as aux.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from gradcombine import reductions
from gradcombine.errors import invalid, within
from gradcombine.integrations.jax.arrays import require_levels
from gradcombine.integrations.jax.loss import (
    Form,
    Loss,
    LossOutput,
    Static,
    parse_output,
    positions,
    require_arguments,
    require_first,
)
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check
from gradcombine.types import Array, Tree

MODULE_REST = "__module_rest__"
"""Keyword argument that passes a module, without its parameters, to its loss."""


class SplitModule(NamedTuple):
    """A module as a tree of arrays.

    Attributes:
      params: the differentiated part, in the structure of the framework's gradients: for flax.nnx a State of the
        module's Params, for equinox the module with None in place of everything but inexact arrays.
      keys: a tree of random keys, into which the number of the microbatch is folded.
      rest: the other arrays.
      static: for flax.nnx a GraphDef; for equinox the structure of the module, and its leaves that are not arrays.
    """

    params: Tree
    keys: Tree
    rest: Tree
    static: Static


def split_module(x: Tree) -> SplitModule | None:
    """Splits a module; returns None for any other tree, and a `SplitModule` unchanged."""
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if isinstance(x, SplitModule):
        return x
    if nnx is not None and isinstance(x, nnx.Module):
        graph, params, keys, rest = nnx.split(x, nnx.Param, nnx.RngKey, ...)
        return SplitModule(params, keys, rest, Static(graph))
    if equinox is None or not isinstance(x, equinox.Module):
        return None
    params, others = equinox.partition(x, equinox.is_inexact_array)
    rest, constants = equinox.partition(others, equinox.is_array)
    leaves, structure = jax.tree.flatten(constants)
    # With their types, as 1 == True.
    return SplitModule(params, (), rest, Static((structure, tuple((type(leaf), leaf) for leaf in leaves))))


def merge_module(x: SplitModule) -> Tree:
    """Inverse of `split_module`."""
    if not isinstance(x.static.value, tuple):
        # New variables, which the current trace may mutate.
        variables = jax.tree.map(lambda array: array, (x.params, x.keys, x.rest))
        return sys.modules["flax.nnx"].merge(x.static.value, *variables)
    structure, constants = x.static.value
    return sys.modules["equinox"].combine(x.params, x.rest, structure.unflatten(leaf for _, leaf in constants))


def split_if_module(x: Tree) -> SplitModule | None:
    """Like `split_module`, but raises for modules inside another tree, whose arrays would all be differentiated."""
    module = split_module(x)
    imported = filter(None, map(sys.modules.get, ("flax.nnx", "equinox")))
    module_types = tuple(library.Module for library in imported)

    def is_module(node: Tree) -> bool:
        return isinstance(node, module_types)

    if module is not None or not module_types:
        return module
    require_levels(x)
    if any(map(is_module, jax.tree.leaves(x, is_leaf=is_module))):
        raise invalid("one module, or a tree of arrays", f"a {type(x).__name__} of modules")
    return None


def write_state(module: Any, changed: SplitModule) -> None:
    """Updates the variables of an nnx.Module in place from a split copy of it; leaves other modules unchanged."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(module, nnx.Module):
        nnx.update(module, changed.rest)


NOT_COMBINED = "a reduction as the class attribute combined_by, of a variable that the loss changes"
ONLY_OPTIMIZED = "parameters that only the optimizer changes"


class VariableReductions:
    """Reductions that combine the variables of an nnx.Module over microbatches, by path.

    A variable's class may name one as its attribute ``combined_by``; nnx.BatchStat uses a mean, and nnx.RngCount a
    maximum. All other variables have to stay constant.
    """

    def __init__(self, module: SplitModule) -> None:
        nnx = sys.modules.get("flax.nnx")
        defaults = {} if nnx is None else {nnx.BatchStat: reductions.mean(), nnx.RngCount: reductions.max()}
        self.reductions: dict[str, Reduction] = {}
        for path, variable in _variables(module.rest):
            reduction = getattr(type(variable), "combined_by", defaults.get(type(variable)))
            if reduction is not None:
                with within(_shown(path)):
                    check(reduction=reduction)
                self.reductions[_shown(path)] = reduction
        # Traced once for each set of variables: a loss is traced several times.
        self._returned: dict[frozenset[str], set[str]] = {}

    def run(
        self, loss: Callable[..., Tree], module: SplitModule, args: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> tuple[Tree, dict[str, Tree]]:
        """Runs ``loss(module, *args, **kwargs)``; raises if it changes variables that are not combined.

        Returns:
          The result, and the values of the combined variables after the call, by path.
        """

        def called(module: SplitModule) -> tuple[Tree, SplitModule | None]:
            merged = merge_module(module)
            return loss(merged, *args, **kwargs), split_module(merged)

        result, after = called(module)
        old, new = _values(module), _values(after)
        written = {name for name, value in new.items() if old.get(name) is not value}
        others = frozenset(written.difference(self.reductions))
        # Transformations such as nnx.remat return all variables, those that they do not change as new tracers.
        if others and others not in self._returned:
            self._returned[others] = _returned(lambda values: _values(called(_with_values(module, values))[1]), old)
        changed = others - self._returned.get(others, set())
        kinds = () if after is None else ((after.params, ONLY_OPTIMIZED), (after.rest, NOT_COMBINED))
        for part, expected in kinds:
            for path, variable in _variables(part):
                if (name := _shown(path)) in changed:
                    raise invalid(expected, f"a {type(variable).__name__} that the loss changes", name)
        return result, {name: new[name] for name in new if name in self.reductions}

    def updated(self, module: SplitModule, values: dict[str, Tree], counted: Array) -> SplitModule:
        """The module with the combined values of its variables; unchanged unless a microbatch ``counted``."""
        if not self.reductions:
            return module
        old = _values(module)
        return _with_values(module, {name: jnp.where(counted, value, old[name]) for name, value in values.items()})


def _variables(part: Tree) -> list[tuple[tuple[Any, ...], Any]]:
    """Paths and variables of a part of an nnx.Module, of which some are plain arrays; none for equinox."""
    nnx = sys.modules.get("flax.nnx")
    return list(nnx.to_flat_state(part)) if nnx is not None and isinstance(part, nnx.State) else []


def _values(module: SplitModule | None) -> dict[str, Array]:
    """Values of the variables of an nnx.Module, except random keys, by path."""
    parts = () if module is None else (module.params, module.rest)
    variables = [pair for part in parts for pair in _variables(part)]
    return {_shown(path): x.get_value() if hasattr(x, "get_value") else x for path, x in variables}


def _with_values(module: SplitModule, values: dict[str, Array]) -> SplitModule:
    """An nnx.Module with other values of some variables, by path."""

    def new(path: tuple[Any, ...], x: Any) -> Any:
        value = values.get(_shown(path))
        return x if value is None else x.replace(value) if hasattr(x, "replace") else value

    def replaced(part: Tree) -> Tree:
        pairs = [(path, new(path, x)) for path, x in _variables(part)]
        return sys.modules["flax.nnx"].from_flat_state(pairs) if pairs else part

    return module._replace(params=replaced(module.params), rest=replaced(module.rest))


def _returned(function: Callable[[dict[str, Array]], dict[str, Array]], values: dict[str, Array]) -> set[str]:
    """Names of the arrays that a function returns as it got them."""
    closed, form = jax.make_jaxpr(function, return_shape=True)(values)
    inputs = dict(zip(sorted(values), range(len(values)), strict=True))  # in JAX' order of a dict
    outputs = zip(sorted(form), closed.jaxpr.outvars, strict=True)
    return {name for name, x in outputs if name in inputs and _origin(closed.jaxpr, x) == inputs[name]}


def _origin(jaxpr: Jaxpr, x: Any) -> int | None:
    """Index of the input of a program that is returned as ``x``, also through inner programs and loops."""
    for equation in reversed(jaxpr.eqns):
        if x in equation.outvars:
            inner, i = equation.params.get("jaxpr"), equation.outvars.index(x)
            inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            if not isinstance(inner, Jaxpr) or len(inner.outvars) != len(equation.outvars):  # a kernel has none
                return None
            if (j := _origin(inner, inner.outvars[i])) is None:
                return None
            if equation.primitive.name == "scan" and not _same_in_scan(equation, inner, i, j):
                return None
            x = equation.invars[j]
    return next((i for i, y in enumerate(jaxpr.invars) if y is x), None)


def _same_in_scan(equation: JaxprEqn, body: Jaxpr, output: int, given: int) -> bool:
    """Whether a scan, of which each iteration returns an input, has the values of this input as its output."""

    def are_rows(outer: Sequence[Any], inner: Sequence[Any]) -> list[bool]:
        return [x.aval.shape != y.aval.shape for x, y in zip(outer, inner, strict=True)]

    # Constants, carried values and rows, in this order; carried values and rows.
    inputs, outputs = are_rows(equation.invars, body.invars), are_rows(equation.outvars, body.outvars)
    if outputs[output]:
        return inputs[given]
    return given == inputs.count(False) - outputs.count(False) + output


def _shown(path: tuple[Any, ...]) -> str:
    return "".join(f"[{part!r}]" if not isinstance(part, str) else f".{part}" for part in path)


class ModuleLoss(NamedTuple):
    """A loss of a module, as a loss of its parameters.

    Attributes:
      loss: takes ``(params, *args)`` and the keyword argument `MODULE_REST`.
      has_keys: whether the module has random streams. Their keys are then the argument ``rng_argnum`` of the loss, in a
        tuple with the caller's key, if there is one.
      variables: the reductions of the module's variables.
      forms: the form in which the loss returned its value, one entry per trace.
    """

    loss: Loss
    has_keys: bool
    variables: VariableReductions
    forms: list[Form]

    def arguments(
        self, module: SplitModule, args: list[Tree], kwargs: dict[str, Tree], *, has_carry: bool = False
    ) -> tuple[list[Tree], dict[str, Tree]]:
        """Arguments of ``loss``: replaces the first of ``args``; ``has_carry`` says whether they include the carry."""
        loss_args, at, carry = [module.params, *args[1:]], self.loss.rng_argnum, self.loss.carry_argnum
        # The keys of random streams would take the place of a missing argument.
        count = len(args) + (carry is not None and not has_carry)
        require_arguments(positions(self.loss.batch_argnums), count)
        if self.has_keys and at is not None:
            at -= not has_carry and carry is not None and carry < at
            loss_args[at : at + 1] = [(*loss_args[at : at + 1], module.keys)]
        rest = module._replace(params=None, keys=None if self.has_keys else module.keys)
        return loss_args, kwargs | {MODULE_REST: rest}

    def updated(self, module: SplitModule, aux: Tree) -> tuple[SplitModule, Tree]:
        """The module with its combined variables, and the caller's aux, both from the aux of ``loss``."""
        parts = {"aux": None, "state": {}, "counted": 0} if aux is None else aux
        return self.variables.updated(module, parts["state"], parts["counted"] != 0), parts["aux"]


def module_loss(loss: Loss, module: SplitModule, positions: int, average: Reduction) -> ModuleLoss:
    """Converts a loss whose first argument is the module to one of its parameters.

    Args:
      positions: the number of positional arguments, including the module and the carry.
      average: combines aux without an ``aux_reduction``.
    """
    require_first(loss, "module")
    if not loss.differentiate:
        raise invalid("a loss to differentiate, for a module", "differentiate=False")
    variables, forms, has_keys = VariableReductions(module), list[Form](), bool(jax.tree.leaves(module.keys))
    # Without a key of the caller, the keys of the random streams are appended to the arguments.
    at = positions if loss.rng_argnum is None else loss.rng_argnum

    def function(params: Tree, *args: Tree, **kwargs: Tree) -> LossOutput:
        rest: SplitModule = kwargs.pop(MODULE_REST)
        loss_args, keys = list(args), rest.keys
        if has_keys:
            *caller_key, keys = loss_args.pop(at - 1)
            loss_args[at - 1 : at - 1] = caller_key
        result, state = variables.run(loss.function, rest._replace(params=params, keys=keys), loss_args, kwargs)
        output, form = parse_output(result, loss.has_aux)
        forms.append(form)
        counted = 1.0 if state else None
        return output._replace(aux={"aux": output.aux, "state": state, "counted": counted})

    # The sum of the weights of the state: if it is 0, the reductions have no value and the module keeps its own.
    aux = {
        "aux": average if loss.aux_reduction is None else loss.aux_reduction,
        "state": variables.reductions,
        "counted": reductions.sum(),
    }
    changed = replace(loss, function=function, has_aux=False, aux_reduction=aux)
    return ModuleLoss(replace(changed, rng_argnum=at) if has_keys else changed, has_keys, variables, forms)


def module_aware_loss(loss: Loss) -> Loss:
    """Extends a loss to the parameters of a split module, with the rest as the keyword argument `MODULE_REST`."""

    def function(params: Tree, *args: Tree, **kwargs: Tree) -> Tree:
        rest: SplitModule | None = kwargs.pop(MODULE_REST, None)
        if rest is None:
            return loss.function(params, *args, **kwargs)
        return VariableReductions(rest).run(loss.function, rest._replace(params=params), args, kwargs)[0]

    return replace(loss, function=function) if callable(loss.function) else loss


def stateless_params(x: Tree) -> tuple[Tree, dict[str, Tree]]:
    """Parameters of a stateless module, and the keyword argument of its loss; any other tree unchanged, and {}."""
    module = split_if_module(x)
    if module is None:
        return x, {}
    stateful = [*VariableReductions(module).reductions, *(".keys" for _ in jax.tree.leaves(module.keys))]
    if stateful:
        raise invalid("a module without state and random streams, as requests come in any order", stateful[0])
    return module.params, {MODULE_REST: module._replace(params=None)}


def with_params(x: Tree, params: Tree) -> Tree:
    """The module with new parameters; for any other tree, just ``params``."""
    module = split_if_module(x)
    return params if module is None else merge_module(module._replace(params=params))


def module_step_functions(
    loss: Loss, make: Callable[[Loss], tuple[Callable[..., Tree], ...]], average: Reduction
) -> tuple[Callable[..., Tree], Callable[..., Tree], Callable[..., Tree]]:
    """Extends ``init``, ``function`` and ``flush``, which ``make`` builds for a loss of arrays, to modules."""
    init_arrays, step_arrays, flush_arrays = make(loss)

    def for_module(module: SplitModule, args: Sequence[Tree]) -> tuple[ModuleLoss, tuple[Callable[..., Tree], ...]]:
        wrapped = module_loss(loss, module, 1 + len(args) + (loss.carry_argnum is not None), average)
        return wrapped, make(wrapped.loss)

    def init(params: Tree, *example: Tree, carry: Tree = None, **kwargs: Tree) -> Tree:
        module = split_if_module(params)
        if module is None:
            return init_arrays(params, *example, carry=carry, **kwargs)
        wrapped, (module_init, _, _) = for_module(module, example)
        if not example and not kwargs:
            return module_init(module.params, carry=carry)
        loss_args, kwargs = wrapped.arguments(module, [None, *example], kwargs)
        return module_init(*loss_args, carry=carry, **kwargs)

    def function(params: Tree, state: Tree, *args: Tree, **kwargs: Tree) -> Tree:
        module = split_if_module(params)
        if module is None:
            return step_arrays(params, state, *args, **kwargs)
        wrapped, (_, module_step, _) = for_module(module, args)
        (array_params, *loss_args), kwargs = wrapped.arguments(module, [None, *args], kwargs)
        return updated(params, module, wrapped, module_step(array_params, state, *loss_args, **kwargs))

    def flush(params: Tree, state: Tree) -> Tree:
        module = split_if_module(params)
        if module is None:
            return flush_arrays(params, state)
        wrapped, (_, _, module_flush) = for_module(module, ())
        return updated(params, module, wrapped, module_flush(module.params, state))

    def updated(original: Tree, module: SplitModule, wrapped: ModuleLoss, result: Tree) -> Tree:
        params, state, metrics = result
        new, aux = wrapped.updated(module, metrics.aux)
        rest = jax.tree.map(lambda new, old: jnp.where(metrics.applied, new, old), new.rest, module.rest)
        new = module._replace(params=params, rest=rest)
        return new if isinstance(original, SplitModule) else merge_module(new), state, metrics._replace(aux=aux)

    return init, function, flush
