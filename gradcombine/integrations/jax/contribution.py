# pyright: standard
"""The contribution of one microbatch: its gradient, loss, weight, and the other results of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcombine import reductions, tree
from gradcombine.backends.jax_collective import JaxAxis
from gradcombine.backends.jax_versions import varying
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import load
from gradcombine.errors import MOST, invalid, require_one, require_tuple, translate_errors, type_name
from gradcombine.integrations.jax.arrays import examples
from gradcombine.integrations.jax.loss import Form, Loss, LossOutput, opened
from gradcombine.integrations.jax.norms import WithNorms
from gradcombine.integrations.jax.on_replicas import ReplicatedWindow, mark_own, on_replicas, require_of_jax
from gradcombine.places.replicas import LOCAL
from gradcombine.places.window import Window
from gradcombine.reductions.algebra import Reduction, Weighed
from gradcombine.reductions.numbered import without_numbers
from gradcombine.reductions.ratios import Ratio
from gradcombine.reductions.weights import parse
from gradcombine.settings import check
from gradcombine.types import Array, Leaf, Order, Scalar, Tree


@jax.tree_util.register_static
@dataclass(frozen=True)
class Known:
    """A number that is known while tracing, None where it is not. A node without leaves, as `Form` is."""

    value: float | None


class Contribution(NamedTuple):
    """One microbatch of one replica.

    Attributes:
      parts: a dict of "grads", "value", "weight" (to be summed) and, where the loss has one, "aux".
      weight: of the other parts.
      known: the weight again.
      carry: for the next microbatch; None where nothing is carried.
      form: how the loss returned its value.
    """

    parts: dict[str, Tree]
    weight: Scalar
    known: Known
    carry: Tree
    form: Form


@dataclass(frozen=True)
class Objective:
    """A loss, and how contributions to its gradient are combined.

    The attributes are the arguments of `value_and_grad` and `train_step` of these names.
    """

    loss: Loss
    weight: Callable[..., Scalar] | None = None
    reduction: Reduction = field(default_factory=reductions.mean)
    over: Collective = LOCAL
    order: Order = "sequential"

    def __post_init__(self) -> None:
        loss = self.loss
        check(reduction=self.reduction, weight=self.weight, over=self.over, order=self.order)
        require_of_jax(self.over)
        check(loss=loss.function, has_aux=loss.has_aux, differentiate=loss.differentiate, grad_norm=loss.grad_norm)
        axis = self.reduction.summed_over
        if axis is not None and loss.grad_norm:
            raise invalid("a reduction of whole gradients, for grad_norm", f"{self.reduction.name}, of shards")
        if axis is not None and self.over is not LOCAL and repr(self.over) != repr(axis):
            raise invalid(f"over={axis!r}, whose replicas the reduction sums over, or LOCAL", repr(self.over))
        if loss.argnums is None:
            raise invalid("the positions of the parameters as argnums", None)
        roles = [*self._taken(), *_positions(loss.batch_argnums)]
        if not all(map(_is_position, roles)) or len(set(roles)) != len(roles):
            raise invalid("argument positions, integers from 0, each with one role", roles)
        for name, role in (("rng_argnum", loss.rng_argnum), ("carry_argnum", loss.carry_argnum)):
            if isinstance(role, Sequence):
                raise invalid(f"one argument position as {name}, or None", role)

    def batch_positions(self, args: Sequence[Tree]) -> list[int]:
        """Where the batch is: where it was said to be, or wherever no argument has another role."""
        taken = self._taken()
        found = _positions(self.loss.batch_argnums) or [i for i in range(len(args)) if i not in taken]
        needed = max([*found, *taken]) + 1
        if needed > len(args):
            raise invalid(f"{needed} positional arguments or more", len(args))
        return found

    def key(self, args: Sequence[Tree], *numbers: Tree) -> Array:
        """The key among the arguments, folded with numbers: of a window, of a contribution."""
        (position,) = _positions(self.loss.rng_argnum)
        with translate_errors("a key of jax.random in the place rng_argnum"):
            return reduce(fold_in, numbers, args[position])

    def params(self, args: Sequence[Tree]) -> Tree:
        """The arguments to differentiate by, in the structure of the gradients."""
        chosen = self.loss.argnums
        return tuple(args[i] for i in chosen) if isinstance(chosen, Sequence) else args[chosen]

    @property
    def average(self) -> Reduction:
        """The reduction of what is combined as the gradients are, but in precision "fast": the value, and the aux."""
        # Marked as an average, a member of per_leaf gets the weight itself, as it does outside of one.
        return reductions.mean() if self.reduction.scales_by_weight else Weighed(reductions.sum())

    @property
    def aux_reduction(self) -> Tree:
        """The reduction of the aux, or a tree of them that it begins with."""
        return self.average if self.loss.aux_reduction is None else self.loss.aux_reduction

    @property
    def average_of_aux(self) -> Reduction:
        """The reduction of aux where there is no ``aux_reduction``."""
        return self.average if self.loss.terms is None else reductions.mean()

    def differentiated_of(self, args: Sequence[Tree]) -> list[Tree]:
        """The arguments to differentiate by, as many of them as there are."""
        return [args[i] for i in _positions(self.loss.argnums) if i < len(args)]

    def combined(self, has_aux: bool, of_gradients: Callable[[Reduction], Reduction] = lambda own: own) -> Reduction:
        """The reduction of the parts of a `Contribution`; ``of_gradients`` may put another in place of the own one."""
        members = {
            "grads": Weighed(of_gradients(without_numbers(self.reduction))),
            "value": self.average,
            "weight": reductions.sum(),
        }
        if has_aux:
            members["aux"] = self.aux_reduction
        combined = reductions.per_leaf(members)
        return WithNorms(combined, self.reduction) if self.loss.grad_norm else combined

    def window(self, every: int | Callable[[Array], Scalar], max_every: int | None = None, *, has_aux: bool) -> Window:
        """The window of such contributions; of all their parts together, where the gradients' are numbered."""
        combined = self.combined(has_aux)
        if self.reduction.microbatches is not None:
            combined = reductions.numbered(combined, self.reduction.microbatches)
        return ReplicatedWindow(combined, every, self.over, self.order, max_every)

    def on_replicas(
        self,
        function: Callable[[list[Tree], dict[str, Tree], Tree, Tree], tuple[Tree, Tree]],
        args: Sequence[Tree],
        kwargs: dict[str, Tree],
        whole: Tree = (),
        own: Tree = (),
    ) -> tuple[Tree, Tree]:
        """``function(args, kwargs, whole, own) -> (whole, own)`` on each replica, with its rows of the batch."""
        positions = self.batch_positions(args)
        self._require_whole(args)
        axis = self.reduction.summed_over
        if isinstance(axis, JaxAxis) and not axis.is_bound():
            raise invalid(f"a call inside of jax.shard_map over {axis!r}, each replica of which gets a shard", "none")
        others = [None if i in positions else x for i, x in enumerate(args)]

        def one(whole: Tree, rows: list[Tree], own: Tree) -> tuple[Tree, Tree]:
            others, kwargs, whole = whole
            called = list(others)
            for i, x in zip(positions, rows, strict=True):
                called[i] = x
            return function(called, kwargs, whole, own)

        rows = [args[i] for i in positions]
        return on_replicas(self.over, one, (others, kwargs, whole), rows, own)

    def contribution(
        self, args: Sequence[Tree], kwargs: dict[str, Tree], default_weight: int | None = None, scale: Scalar = None
    ) -> Contribution:
        """Computes one microbatch.

        Args:
          args, kwargs: of the loss, the batch arguments those of this microbatch.
          default_weight: where neither the loss nor the argument ``weight`` says it. None: the number of examples.
          scale: a number that the gradients, and nothing else, are to be multiplied by; the loss is, before it is
            differentiated. None: none.
        """
        parameters = _positions(self.loss.argnums)
        axis = self.reduction.summed_over or self.over
        called = [mark_own(axis, arg) if i in parameters else arg for i, arg in enumerate(args)]
        (value, rest, form), grads = self._differentiated(called, kwargs, scale)
        if self.loss.carry_argnum is not None and rest.carry is None:
            raise invalid("a loss that returns LossOutput(carry=...), for carry_argnum", f"one in form {form.name}")
        if self.loss.carry_argnum is None and rest.carry is not None:
            raise invalid("carry_argnum, for a loss that returns a carry", None)
        weight = self._weight(args, rest.weight, default_weight)
        backend = load("jax")
        parsed = parse(backend, weight)
        total = parsed.cast(backend, np.dtype(np.float32))
        parts = {"grads": grads, "value": jnp.asarray(value), "weight": total}
        if jax.tree.leaves(rest.aux):
            _require_no_mean_of_ratios(
                self.average if self.loss.aux_reduction is None else self.loss.aux_reduction, rest.aux
            )
            parts["aux"] = jax.tree.map(jnp.asarray, rest.aux)
        return Contribution(parts, weight, Known(parsed.known), jax.tree.map(jnp.asarray, rest.carry), form)

    def weight_of(self, args: Sequence[Tree], kwargs: dict[str, Tree], default_weight: int | None) -> Scalar:
        """The weight of one microbatch, alone. What else the loss computes is left out by the compiler."""
        returned = self._run(args, kwargs)[0].weight if self.weight is None else None
        return self._weight(args, returned, default_weight)

    @property
    def counts(self) -> bool:
        """Whether the totals of several denominators have to be counted before the gradients."""
        return False

    def like(self, params: Tree) -> Tree:
        """A tree of the gradients' structure for these parameters."""
        return params

    def told(self, values: dict[str, Tree]) -> dict[str, Tree]:
        """Combined parts as the caller is told of them, with the whole loss as "total" besides."""
        return values | {"total": values["value"]}

    def _differentiated(
        self, args: Sequence[Tree], kwargs: dict[str, Tree], scale: Scalar
    ) -> tuple[tuple[Array, LossOutput, Form], Tree]:
        def scalar_and_rest(*args: Tree, **kwargs: Tree) -> Tree:
            output, form = self._run(args, kwargs)
            value = jnp.asarray(output.value)
            if scale is None:
                return value, (output, form)
            # NaN for a traced weight that would have been refused.
            backend = load("jax")
            factor = parse(backend, scale).cast(backend, np.dtype(value.dtype))
            return value * factor, (output, form)

        if self.loss.differentiate:
            (_, (output, form)), grads = jax.value_and_grad(scalar_and_rest, self.loss.argnums, has_aux=True)(
                *args, **kwargs
            )
            return (output.value, output, form), grads
        expected = "a function that returns (value, gradients), for differentiate=False"
        value, grads = require_tuple(expected, self.loss.function(*args, **kwargs), 2)
        output, form = self._opened(value)
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        self.over.require_unreduced(paths, [leaf for _, leaf in leaves])
        return (output.value, output, form), grads

    def _require_whole(self, args: Sequence[Tree]) -> None:
        """Refuses parameters of which each replica has others, where shard_map's types tell of it."""
        names: set[str] = set(self.over.names) if isinstance(self.over, JaxAxis) else set()
        for path, x in jax.tree_util.tree_leaves_with_path(self.params(args)):
            if isinstance(x, jax.Array) and (split := sorted(varying(x) & names)):
                expected = (
                    f"parameters that are the same on all replicas of {self.over!r} (gather shards by "
                    "jax.lax.all_gather before, or leave their axis out of over)"
                )
                received = f"ones that may differ over {', '.join(split)}"
                raise invalid(expected, received, jax.tree_util.keystr(path))

    def _run(self, args: Sequence[Tree], kwargs: dict[str, Tree]) -> tuple[LossOutput, Form]:
        """Calls the loss."""
        return self._opened(self.loss.function(*args, **kwargs))

    def _opened(self, output: Tree) -> tuple[LossOutput, Form]:
        output, form = self._in_form(output)
        expected = "a loss that is a real floating scalar"
        with translate_errors(expected, received=type_name(output.value)):
            value = jnp.asarray(output.value)
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise invalid(expected, f"{value.dtype} of shape {value.shape}")
        return output, form

    def _in_form(self, output: Tree) -> tuple[LossOutput, Form]:
        bare = isinstance(output, tuple) and not isinstance(output, LossOutput)
        if (bare != self.loss.has_aux and not isinstance(output, LossOutput)) or (bare and len(output) != 2):
            wanted = "(value, aux)" if self.loss.has_aux else "a scalar (or (value, aux), with has_aux=True)"
            raise invalid(f"a loss that returns {wanted} or a LossOutput", type_name(output))
        return opened(output, self.loss.has_aux)

    def _weight(self, args: Sequence[Tree], returned: Tree, default_weight: int | None) -> Scalar:
        require_one("a weight that the loss returns or one of the argument weight", returned, self.weight)
        if returned is not None:
            return returned
        if self.weight is not None:
            return self.weight(*(args[i] for i in self.batch_positions(args)))
        if not self.reduction.scales_by_weight:
            return 1
        if default_weight is not None:
            return default_weight
        return examples(tuple(args[i] for i in self.batch_positions(args)))

    def _taken(self) -> list[int]:
        """The positions that have a role other than the batch."""
        return [*_positions(self.loss.argnums), *_positions(self.loss.rng_argnum), *_positions(self.loss.carry_argnum)]


def fold_in(keys: Tree, number: Scalar) -> Tree:
    """A key, or each one of a tree of keys of any shape, with a number folded in."""

    def fold(key: Leaf) -> Array:
        function: Callable[[Tree], Tree] = partial(_fold_in, number)
        if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            for _ in range(key.ndim):
                function = jax.vmap(function)
        return function(key)

    return jax.tree.map(fold, keys, is_leaf=lambda x: x is None)


def _fold_in(number: Scalar, key: Leaf) -> Array:
    return jax.random.fold_in(key, number)


def _positions(role: int | Sequence[int] | None) -> list[int]:
    if role is None:
        return []
    return list(role) if isinstance(role, Sequence) else [role]


def _is_position(role: object) -> bool:
    return isinstance(role, int) and not isinstance(role, bool) and 0 <= role <= MOST


def _require_no_mean_of_ratios(aux_reduction: Tree, aux: Tree) -> None:
    """Refuses a `Ratio` in what a mean combines: both of its parts would be weighed and divided."""
    members, prefix = tree.flatten(aux_reduction, is_leaf=lambda node: isinstance(node, Reduction))
    for path, member, part in zip(prefix.paths(), members, tree.split_as(prefix, aux), strict=True):
        for inner, node in jax.tree_util.tree_leaves_with_path(part, is_leaf=_is_ratio):
            if _is_ratio(node) and isinstance(member, Reduction) and member.divides:
                where = f".aux{path}{jax.tree_util.keystr(inner)}"
                raise invalid("reductions.ratio() in aux_reduction, for a Ratio", member.description, where)


def _is_ratio(node: Tree) -> bool:
    return isinstance(node, Ratio)
