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
from gradcombine.integrations.jax.loss import Form, Loss, LossOutput, parse_output
from gradcombine.integrations.jax.norms import WithNorms
from gradcombine.integrations.jax.on_replicas import ReplicatedWindow, mark_varying, on_replicas, require_jax_collective
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
    """A number, or None if it is unknown while tracing. A pytree node without leaves, like `Form`."""

    value: float | None


class Contribution(NamedTuple):
    """Results of one microbatch on one replica.

    Attributes:
      parts: a dict of "grads", "value", "weight" (float32, to be summed) and, if the loss returns it, "aux".
      weight: the weight of these parts in the reduction.
      known: the weight, if it is known while tracing.
      carry: for the next microbatch; None without a carry.
      form: the form in which the loss returned its value.
    """

    parts: dict[str, Tree]
    weight: Scalar
    known: Known
    carry: Tree
    form: Form


@dataclass(frozen=True)
class Objective:
    """A loss, and how the contributions of its microbatches are combined.

    The attributes are the arguments of `value_and_grad` and `train_step` with these names.
    """

    loss: Loss
    weight: Callable[..., Scalar] | None = None
    reduction: Reduction = field(default_factory=reductions.mean)
    over: Collective = LOCAL
    order: Order = "sequential"

    def __post_init__(self) -> None:
        loss = self.loss
        check(reduction=self.reduction, weight=self.weight, over=self.over, order=self.order)
        require_jax_collective(self.over)
        check(loss=loss.function, has_aux=loss.has_aux, differentiate=loss.differentiate, grad_norm=loss.grad_norm)
        axis = self.reduction.summed_over
        if axis is not None and loss.grad_norm:
            raise invalid("a reduction of full gradients, for grad_norm", f"{self.reduction.name}, of shards")
        if axis is not None and self.over is not LOCAL and repr(self.over) != repr(axis):
            raise invalid(f"over={axis!r}, whose replicas the reduction sums over, or LOCAL", repr(self.over))
        if loss.argnums is None:
            raise invalid("the positions of the parameters as argnums", None)
        roles = [*self._other_positions(), *_positions(loss.batch_argnums)]
        if not all(map(_is_position, roles)) or len(set(roles)) != len(roles):
            raise invalid("argument positions, integers from 0, each with one role", roles)
        for name, role in (("rng_argnum", loss.rng_argnum), ("carry_argnum", loss.carry_argnum)):
            if isinstance(role, Sequence):
                raise invalid(f"one argument position as {name}, or None", role)

    def batch_positions(self, args: Sequence[Tree]) -> list[int]:
        """Positions of the batch, by default all arguments without another role; raises for missing arguments."""
        others = self._other_positions()
        positions = _positions(self.loss.batch_argnums) or [i for i in range(len(args)) if i not in others]
        needed = max([*positions, *others]) + 1
        if needed > len(args):
            raise invalid(f"{needed} positional arguments or more", len(args))
        return positions

    def key(self, args: Sequence[Tree], *numbers: Tree) -> Array:
        """The argument ``rng_argnum`` with these numbers folded in, such as window index and microbatch number."""
        (position,) = _positions(self.loss.rng_argnum)
        with translate_errors("a key of jax.random as the argument rng_argnum"):
            return reduce(fold_in, numbers, args[position])

    def params(self, args: Sequence[Tree]) -> Tree:
        """The differentiated arguments, in the structure of the gradients."""
        chosen = self.loss.argnums
        return tuple(args[i] for i in chosen) if isinstance(chosen, Sequence) else args[chosen]

    @property
    def average(self) -> Reduction:
        """Reduction of the value, and by default of aux: like that of the gradients, but in precision "fast"."""
        # A member of per_leaf gets the weight itself only if it is an average or Weighed.
        return reductions.mean() if self.reduction.scales_by_weight else Weighed(reductions.sum())

    @property
    def aux_reduction(self) -> Tree:
        """Reduction of aux, or a tree prefix of reductions."""
        return self.average if self.loss.aux_reduction is None else self.loss.aux_reduction

    @property
    def default_aux_reduction(self) -> Reduction:
        """Reduction of aux without an ``aux_reduction``."""
        return self.average if self.loss.terms is None else reductions.mean()

    def differentiated_args(self, args: Sequence[Tree]) -> list[Tree]:
        """The differentiated arguments as a list, without missing ones."""
        return [args[i] for i in _positions(self.loss.argnums) if i < len(args)]

    def parts_reduction(self, has_aux: bool, wrap: Callable[[Reduction], Reduction] = lambda inner: inner) -> Reduction:
        """Reduction of the parts of a `Contribution`; ``wrap`` may wrap that of the gradients."""
        members = {
            "grads": Weighed(wrap(without_numbers(self.reduction))),
            "value": self.average,
            "weight": reductions.sum(),
        }
        if has_aux:
            members["aux"] = self.aux_reduction
        combined = reductions.per_leaf(members)
        return WithNorms(combined, self.reduction) if self.loss.grad_norm else combined

    def window(self, every: int | Callable[[Array], Scalar], max_every: int | None = None, *, has_aux: bool) -> Window:
        """The window that accumulates contributions; with a numbered reduction, the ledger covers all parts."""
        combined = self.parts_reduction(has_aux)
        if self.reduction.microbatches is not None:
            combined = reductions.numbered(combined, self.reduction.microbatches)
        return ReplicatedWindow(combined, every, self.over, self.order, max_every)

    def on_replicas(
        self,
        function: Callable[[list[Tree], dict[str, Tree], Tree, Tree], tuple[Tree, Tree]],
        args: Sequence[Tree],
        kwargs: dict[str, Tree],
        shared: Tree = (),
        local: Tree = (),
    ) -> tuple[Tree, Tree]:
        """Runs ``function(args, kwargs, shared, local) -> (shared, local)`` on each replica, on its part of the batch.

        ``shared`` and ``local`` are as for the function `on_replicas`.
        """
        positions = self.batch_positions(args)
        self._require_unsharded(args)
        axis = self.reduction.summed_over
        if isinstance(axis, JaxAxis) and not axis.is_bound():
            raise invalid(f"a call inside jax.shard_map over {axis!r}, where each replica gets a shard", "none")
        others = [None if i in positions else x for i, x in enumerate(args)]

        def on_one(shared: Tree, batch: list[Tree], local: Tree) -> tuple[Tree, Tree]:
            others, kwargs, shared = shared
            loss_args = list(others)
            for i, x in zip(positions, batch, strict=True):
                loss_args[i] = x
            return function(loss_args, kwargs, shared, local)

        batch = [args[i] for i in positions]
        return on_replicas(self.over, on_one, (others, kwargs, shared), batch, local)

    def contribution(
        self, args: Sequence[Tree], kwargs: dict[str, Tree], default_weight: int | None = None, scale: Scalar = None
    ) -> Contribution:
        """Computes one microbatch.

        Args:
          args, kwargs: arguments of the loss, with the batch arguments of this microbatch.
          default_weight: used if neither the loss nor the argument ``weight`` determines it. None: the number of
            examples.
          scale: multiplies the gradients, but nothing else, by scaling the loss before it is differentiated. None: 1.
        """
        differentiated = _positions(self.loss.argnums)
        axis = self.reduction.summed_over or self.over
        marked = [mark_varying(axis, arg) if i in differentiated else arg for i, arg in enumerate(args)]
        (value, output, form), grads = self._differentiated(marked, kwargs, scale)
        if self.loss.carry_argnum is not None and output.carry is None:
            raise invalid("a loss that returns LossOutput(carry=...), for carry_argnum", f"one in form {form.name}")
        if self.loss.carry_argnum is None and output.carry is not None:
            raise invalid("carry_argnum, for a loss that returns a carry", None)
        weight = self._weight(args, output.weight, default_weight)
        backend = load("jax")
        parsed = parse(backend, weight)
        parts = {"grads": grads, "value": jnp.asarray(value), "weight": parsed.cast(backend, np.dtype(np.float32))}
        if jax.tree.leaves(output.aux):
            _require_no_mean_of_ratios(self.aux_reduction, output.aux)
            parts["aux"] = jax.tree.map(jnp.asarray, output.aux)
        return Contribution(parts, weight, Known(parsed.known), jax.tree.map(jnp.asarray, output.carry), form)

    def weight_of(self, args: Sequence[Tree], kwargs: dict[str, Tree], default_weight: int | None) -> Scalar:
        """Weight of one microbatch; the compiler removes the rest of the loss."""
        returned = self._run(args, kwargs)[0].weight if self.weight is None else None
        return self._weight(args, returned, default_weight)

    @property
    def counts_totals(self) -> bool:
        """Whether the totals of the denominators are counted before the gradients are computed."""
        return False

    def grads_like(self, params: Tree) -> Tree:
        """A tree with the structure, shapes and dtypes of the gradients."""
        return params

    def reported(self, values: dict[str, Tree]) -> dict[str, Tree]:
        """The combined parts as `value_and_grad` and the metrics report them, with the scalar loss as "total"."""
        return values | {"total": values["value"]}

    def _differentiated(
        self, args: Sequence[Tree], kwargs: dict[str, Tree], scale: Scalar
    ) -> tuple[tuple[Array, LossOutput, Form], Tree]:
        def scaled_loss(*args: Tree, **kwargs: Tree) -> Tree:
            output, form = self._run(args, kwargs)
            value = jnp.asarray(output.value)
            if scale is None:
                return value, (output, form)
            # The factor is NaN for a traced weight whose value is invalid.
            backend = load("jax")
            factor = parse(backend, scale).cast(backend, np.dtype(value.dtype))
            return value * factor, (output, form)

        if self.loss.differentiate:
            (_, (output, form)), grads = jax.value_and_grad(scaled_loss, self.loss.argnums, has_aux=True)(
                *args, **kwargs
            )
            return (output.value, output, form), grads
        expected = "a function that returns (value, gradients), for differentiate=False"
        value, grads = require_tuple(expected, self.loss.function(*args, **kwargs), 2)
        output, form = self._checked_output(value)
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        self.over.require_unreduced(paths, [leaf for _, leaf in leaves])
        return (output.value, output, form), grads

    def _require_unsharded(self, args: Sequence[Tree]) -> None:
        """Raises if the parameters vary over the replica axis (shard_map's vma)."""
        names: set[str] = set(self.over.names) if isinstance(self.over, JaxAxis) else set()
        for path, x in jax.tree_util.tree_leaves_with_path(self.params(args)):
            if isinstance(x, jax.Array) and (varying_over := sorted(varying(x) & names)):
                expected = (
                    f"parameters that are the same on all replicas of {self.over!r} (gather shards by "
                    "jax.lax.all_gather before, or leave their axis out of over)"
                )
                received = f"ones that may differ over {', '.join(varying_over)}"
                raise invalid(expected, received, jax.tree_util.keystr(path))

    def _run(self, args: Sequence[Tree], kwargs: dict[str, Tree]) -> tuple[LossOutput, Form]:
        return self._checked_output(self.loss.function(*args, **kwargs))

    def _checked_output(self, output: Tree) -> tuple[LossOutput, Form]:
        output, form = self._parse_output(output)
        expected = "a loss that is a real floating scalar"
        with translate_errors(expected, received=type_name(output.value)):
            value = jnp.asarray(output.value)
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise invalid(expected, f"{value.dtype} of shape {value.shape}")
        return output, form

    def _parse_output(self, output: Tree) -> tuple[LossOutput, Form]:
        is_pair = isinstance(output, tuple) and not isinstance(output, LossOutput)
        if (is_pair != self.loss.has_aux and not isinstance(output, LossOutput)) or (is_pair and len(output) != 2):
            wanted = "(value, aux)" if self.loss.has_aux else "a scalar (or (value, aux), with has_aux=True)"
            raise invalid(f"a loss that returns {wanted} or a LossOutput", type_name(output))
        return parse_output(output, self.loss.has_aux)

    def _weight(self, args: Sequence[Tree], returned: Tree, default_weight: int | None) -> Scalar:
        require_one("a weight returned by the loss or one from the argument weight", returned, self.weight)
        if returned is not None:
            return returned
        if self.weight is not None:
            return self.weight(*(args[i] for i in self.batch_positions(args)))
        if not self.reduction.scales_by_weight:
            return 1
        if default_weight is not None:
            return default_weight
        return examples(tuple(args[i] for i in self.batch_positions(args)))

    def _other_positions(self) -> list[int]:
        """Positions of the arguments with a role other than the batch."""
        return [*_positions(self.loss.argnums), *_positions(self.loss.rng_argnum), *_positions(self.loss.carry_argnum)]


def fold_in(keys: Tree, number: Scalar) -> Tree:
    """Folds a number into each random key of a tree of key arrays of any shape."""

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
    """Raises if aux has a `Ratio` that a mean would combine: numerator and denominator would both be averaged."""
    members, prefix = tree.flatten(aux_reduction, is_leaf=lambda node: isinstance(node, Reduction))
    for path, member, part in zip(prefix.paths(), members, tree.split_as(prefix, aux), strict=True):
        for inner, node in jax.tree_util.tree_leaves_with_path(part, is_leaf=_is_ratio):
            if _is_ratio(node) and isinstance(member, Reduction) and member.divides:
                path_in_aux = f".aux{path}{jax.tree_util.keystr(inner)}"
                raise invalid("reductions.ratio() in aux_reduction, for a Ratio", member.description, path_in_aux)


def _is_ratio(node: Tree) -> bool:
    return isinstance(node, Ratio)
