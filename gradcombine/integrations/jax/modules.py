# pyright: standard
"""Modules of flax.nnx and equinox in the place of parameters.

A module is opened into what is differentiated, the keys of its random streams, the state that its calls change, and
what is constant. The loss is called with a module again, put together of these; the changed state goes along as aux.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcombine import reductions
from gradcombine.errors import invalid, within
from gradcombine.integrations.jax.arrays import require_levels
from gradcombine.integrations.jax.loss import Form, Loss, LossOutput, opened, require_first
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check
from gradcombine.types import Tree

OPENED = "__opened_module__"
"""The keyword argument by which the rest of a module reaches its loss."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A part of a module that is no array: a node without leaves, compared by value."""

    value: Tree


class Opened(NamedTuple):
    """A module as a tree of arrays.

    Attributes:
      params: what is differentiated, as the framework's own gradients are: of flax.nnx a State of its Param, of equinox
        the module with None for all but its inexact arrays.
      keys: a tree of random keys, which get the number of the microbatch folded in.
      rest: the other arrays.
      static: a nnx.GraphDef; of equinox the structure of the module, and the leaves that are no arrays.
    """

    params: Tree
    keys: Tree
    rest: Tree
    static: Static


def open_module(x: Tree) -> Opened | None:
    """Opens a module; None for any other tree. One that is open already stays as it is."""
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if isinstance(x, Opened):
        return x
    if nnx is not None and isinstance(x, nnx.Module):
        graph, params, keys, rest = nnx.split(x, nnx.Param, nnx.RngKey, ...)
        return Opened(params, keys, rest, Static(graph))
    if equinox is None or not isinstance(x, equinox.Module):
        return None
    leaves, structure = jax.tree.flatten(x)
    params = [leaf if equinox.is_inexact_array(leaf) else None for leaf in leaves]
    rest = [leaf if equinox.is_array(leaf) and own is None else None for leaf, own in zip(leaves, params, strict=True)]
    constants = tuple(None if equinox.is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
    return Opened(structure.unflatten(params), (), rest, Static((structure, constants)))


def close_module(x: Opened) -> Tree:
    """The module that was opened."""
    if not isinstance(x.static.value, tuple):
        variables = jax.tree.map(
            lambda array: array, (x.params, x.keys, x.rest)
        )  # new ones, which this trace may change
        return sys.modules["flax.nnx"].merge(x.static.value, *variables)
    structure, constants = x.static.value
    params = structure.flatten_up_to(x.params)
    leaves = [
        constant[1] if constant is not None else param if other is None else other
        for constant, param, other in zip(constants, params, x.rest, strict=True)
    ]
    return structure.unflatten(leaves)


def closed_if_open(x: Tree) -> Tree:
    """The module, where one is open; any other tree as it is."""
    return close_module(x) if isinstance(x, Opened) else x


def opened_or_arrays(x: Tree) -> Opened | None:
    """`open_module`, which refuses modules within another tree: all of their arrays would be differentiated."""
    module = open_module(x)
    kinds = tuple(own.Module for name in ("flax.nnx", "equinox") if (own := sys.modules.get(name)) is not None)

    def is_module(node: Tree) -> bool:
        return isinstance(node, kinds)

    if module is not None or not kinds:
        return module
    require_levels(x)
    if any(map(is_module, jax.tree.leaves(x, is_leaf=is_module))):
        raise invalid("one module, or a tree of arrays", f"a {type(x).__name__} of modules")
    return None


def write_state(module: Any, changed: Opened) -> None:
    """Gives a nnx.Module, in place, the state of one that was opened and changed."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(module, nnx.Module):
        nnx.update(module, changed.rest)


class State:
    """The state of a nnx.Module that its calls change: which reduction combines each variable over microbatches.

    The one that its class names as ``combined_by``; of nnx.BatchStat a mean, of nnx.RngCount the maximum. Other
    variables are constants.
    """

    def __init__(self, module: Opened) -> None:
        nnx = sys.modules.get("flax.nnx")
        own = {} if nnx is None else {nnx.BatchStat: reductions.mean(), nnx.RngCount: reductions.max()}
        self.reductions: dict[str, Reduction] = {}
        for path, variable in _variables(module.rest):
            by = getattr(type(variable), "combined_by", own.get(type(variable)))
            if by is not None:
                with within(_shown(path)):
                    check(reduction=by)
                self.reductions[_shown(path)] = by

    def of(self, before: Tree, module: Any) -> dict[str, Tree]:
        """The variables that are combined, by path, of a module that was called."""
        after, found = open_module(module), dict[str, Tree]()
        known = {_shown(path): variable.get_value() for path, variable in _variables(before)}
        for path, variable in _variables([] if after is None else after.rest):
            name, value = _shown(path), variable.get_value()
            if name in self.reductions:
                found[name] = value
            elif known.get(name) is not value:
                expected = "a reduction as the class attribute combined_by, of a variable that the loss changes"
                raise invalid(expected, f"a {type(variable).__name__} without one", name)
        return found

    def replaced(self, module: Opened, values: dict[str, Tree]) -> Opened:
        """The module with the combined variables in their places."""
        if not self.reductions:
            return module
        flat = [(path, x.replace(values.get(_shown(path), x.get_value()))) for path, x in _variables(module.rest)]
        return module._replace(rest=sys.modules["flax.nnx"].from_flat_state(flat))


def _variables(rest: Tree) -> list[tuple[tuple[Any, ...], Any]]:
    return [] if isinstance(rest, list) else list(sys.modules["flax.nnx"].to_flat_state(rest))


def _shown(path: tuple[Any, ...]) -> str:
    return "".join(f"[{part!r}]" if not isinstance(part, str) else f".{part}" for part in path)


class LossOfModule(NamedTuple):
    """A loss of a module as one of its parameters.

    Attributes:
      loss: of ``(params, *args)``, the keyword argument `OPENED` and, where the module has random streams, their keys.
      has_keys: whether they are the argument ``rng_argnum`` of the loss, with the caller's own key where there is one.
      state: of the module.
      forms: how the loss returned its value, one for each time that it was traced.
    """

    loss: Loss
    has_keys: bool
    state: State
    forms: list[Form]

    def arguments(
        self, module: Opened, args: list[Tree], kwargs: dict[str, Tree], *, carried: bool = False
    ) -> tuple[list[Tree], dict[str, Tree]]:
        """The arguments for ``loss``; the first of ``args`` is the module's place; with a carry among them, or not."""
        called, at, carry = [module.params, *args[1:]], self.loss.rng_argnum, self.loss.carry_argnum
        if self.has_keys and at is not None:
            at -= not carried and carry is not None and carry < at
            called[at : at + 1] = [(*called[at : at + 1], module.keys)]
        return called, kwargs | {OPENED: module._replace(params=None, keys=None if self.has_keys else module.keys)}

    def returned(self, module: Opened, aux: Tree) -> tuple[Opened, Tree]:
        """The module with its combined state, and the caller's aux, of the aux of ``loss``."""
        found = {"aux": None, "state": {}} if aux is None else aux
        return self.state.replaced(module, found["state"]), found["aux"]


def of_module(loss: Loss, module: Opened, positions: int, average: Reduction) -> LossOfModule:
    """The loss of an opened module.

    Args:
      loss: of the module as its first argument.
      positions: of positional arguments, the module and a carry among them.
      average: what combines aux without an ``aux_reduction``.
    """
    require_first(loss, "module")
    if not loss.differentiate:
        raise invalid("a loss to differentiate, of a module", "differentiate=False")
    state, forms, has_keys = State(module), list[Form](), bool(jax.tree.leaves(module.keys))
    at = positions if loss.rng_argnum is None else loss.rng_argnum

    def function(params: Tree, *args: Tree, **kwargs: Tree) -> LossOutput:
        rest: Opened = kwargs.pop(OPENED)
        called, keys = list(args), rest.keys
        if has_keys:
            *own, keys = called.pop(at - 1)
            called[at - 1 : at - 1] = own
        whole = close_module(rest._replace(params=params, keys=keys))
        output, form = opened(loss.function(whole, *called, **kwargs), loss.has_aux)
        forms.append(form)
        return output._replace(aux={"aux": output.aux, "state": state.of(rest.rest, whole)})

    aux = {"aux": average if loss.aux_reduction is None else loss.aux_reduction, "state": state.reductions}
    changed = replace(loss, function=function, has_aux=False, aux_reduction=aux)
    return LossOfModule(replace(changed, rng_argnum=at) if has_keys else changed, has_keys, state, forms)


def accepting_modules(loss: Loss) -> Loss:
    """The loss, also of the differentiated part of a module, with the rest as the keyword argument `OPENED`."""

    def function(params: Tree, *args: Tree, **kwargs: Tree) -> Tree:
        rest: Opened | None = kwargs.pop(OPENED, None)
        if rest is None:
            return loss.function(params, *args, **kwargs)
        module = close_module(rest._replace(params=params))
        result = loss.function(module, *args, **kwargs)
        State(rest).of(rest.rest, module)  # raises for a variable that has changed
        return result

    return replace(loss, function=function) if callable(loss.function) else loss


def differentiated(x: Tree) -> tuple[Tree, dict[str, Tree]]:
    """The parameters of a module without state, and the keyword argument for its loss; any other tree as it is."""
    module = opened_or_arrays(x)
    if module is None:
        return x, {}
    kept = [*State(module).reductions, *(".keys" for _ in jax.tree.leaves(module.keys))]
    expected = "a module without state and random streams, as requests come in any order"
    if kept:
        raise invalid(expected, next(iter(kept), None))
    return module.params, {OPENED: module._replace(params=None)}


def with_differentiated(x: Tree, params: Tree) -> Tree:
    """The module with these parameters in their places; of any other tree, the parameters."""
    module = opened_or_arrays(x)
    return params if module is None else close_module(module._replace(params=params))


def of_modules(
    loss: Loss, make: Callable[[Loss], tuple[Callable[..., Tree], ...]], average: Reduction
) -> tuple[Callable[..., Tree], Callable[..., Tree], Callable[..., Tree]]:
    """``init``, ``function`` and ``flush`` of a training step, for trees of arrays and for modules.

    Args:
      loss: the step's.
      make: the three functions for a loss of arrays.
      average: as for `of_module`.
    """
    arrays = make(loss)

    def init(params: Tree, *example: Tree, carry: Tree = None, **kwargs: Tree) -> Tree:
        module = opened_or_arrays(params)
        if module is None:
            return arrays[0](params, *example, carry=carry, **kwargs)
        of = of_module(loss, module, _positions(loss, example), average)
        if not example and not kwargs:
            return make(of.loss)[0](module.params, carry=carry)
        called, kwargs = of.arguments(module, [None, *example], kwargs)
        return make(of.loss)[0](*called, carry=carry, **kwargs)

    def function(params: Tree, state: Tree, *args: Tree, **kwargs: Tree) -> Tree:
        module = opened_or_arrays(params)
        if module is None:
            return arrays[1](params, state, *args, **kwargs)
        of = of_module(loss, module, _positions(loss, args), average)
        called, kwargs = of.arguments(module, [None, *args], kwargs)
        return ended(params, module, of, make(of.loss)[1](called[0], state, *called[1:], **kwargs))

    def flush(params: Tree, state: Tree) -> Tree:
        module = opened_or_arrays(params)
        if module is None:
            return arrays[2](params, state)
        of = of_module(loss, module, _positions(loss, ()), average)
        return ended(params, module, of, make(of.loss)[2](module.params, state))

    def ended(given: Tree, module: Opened, of: LossOfModule, result: Tree) -> Tree:
        params, state, metrics = result
        changed, aux = of.returned(module, metrics.aux)
        rest = jax.tree.map(lambda new, old: jnp.where(metrics.applied, new, old), changed.rest, module.rest)
        changed = module._replace(params=params, rest=rest)
        return changed if isinstance(given, Opened) else close_module(changed), state, metrics._replace(aux=aux)

    return init, function, flush


def _positions(loss: Loss, args: Sequence[Tree]) -> int:
    return 1 + len(args) + (loss.carry_argnum is not None)
