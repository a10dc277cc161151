# pyright: standard
"""The contribution of one microbatch: its gradient, loss, weight, and the other results of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcombine import reductions
from gradcombine.backends.jax_backend import BACKEND, replaced, varying
from gradcombine.backends.jax_collective import JaxAxis
from gradcombine.backends.jax_versions import vjp_by_name
from gradcombine.backends.protocol import Collective
from gradcombine.denominators import Terms
from gradcombine.errors import invalid, require_given, require_one, require_tuple, translate_errors, type_name
from gradcombine.integrations.jax.arrays import as_arrays, examples
from gradcombine.integrations.jax.jax_window import ReplicatedWindow
from gradcombine.integrations.jax.loss import (
    Form,
    Loss,
    LossOutput,
    Static,
    batch_positions,
    parse_output,
    positions,
    require_no_mean_of_ratios,
    require_roles,
)
from gradcombine.integrations.jax.on_replicas import mark_varying, on_replicas, require_jax_collective
from gradcombine.places.replicas import LOCAL
from gradcombine.places.window import Window
from gradcombine.reductions.algebra import Reduction, Weighed, Wrapper
from gradcombine.reductions.numbered import without_numbers
from gradcombine.reductions.per_leaf import PerLeaf
from gradcombine.reductions.ratios import Ratio, Ratios
from gradcombine.reductions.weights import parse
from gradcombine.reductions.wrappers import global_norm, zeroed_weight
from gradcombine.settings import check
from gradcombine.types import Array, DType, Order, Scalar, State, Tree


class Contribution(NamedTuple):
    """Results of one microbatch on one replica.

    Attributes:
      parts: a dict of "grads", "value", "weight" (float32, to be summed) and, if the loss returns it, "aux".
      weight: the weight of these parts in the reduction.
      known: the weight if it is known while tracing, a float or None.
      carry: for the next microbatch; None without a carry.
      form: the form in which the loss returned its value.
    """

    parts: dict[str, Tree]
    weight: Scalar
    known: Static
    carry: Tree
    form: Form


class _Local(NamedTuple):
    """Trees that differ between replicas; errors name a leaf by its path in here."""

    levels: Tree
    carry: Tree


@dataclass(frozen=True)
class Objective:
    """A loss of one or several terms, and how the contributions of its microbatches are combined.

    The values and weights of several terms are combined as parts of aux. If their totals are not known, the gradients
    are a dict of `Ratio`s by denominator.

    Attributes:
      loss, weight, reduction, over, order: the arguments of `value_and_grad` and `train_step` with these names.
      terms: the names of the terms and denominators; None for a loss that returns a scalar.
    """

    loss: Loss
    weight: Callable[..., Scalar] | None
    reduction: Reduction
    over: Collective
    order: Order
    terms: Terms | None

    @classmethod
    def of(
        cls,
        loss: Callable[..., Tree] | Loss,
        weight: Callable[..., Scalar] | None = None,
        reduction: Reduction | None = None,
        over: Collective = LOCAL,
        order: Order = "sequential",
    ) -> Objective:
        """Checks the arguments, those of `value_and_grad`, and fills in the reduction."""
        loss, combined = Loss.of(loss), reductions.mean() if reduction is None else reduction
        check(reduction=combined, weight=weight, over=over, order=order, totals=loss.totals)
        require_jax_collective(over)
        check(loss=loss.function, has_aux=loss.has_aux, differentiate=loss.differentiate, grad_norm=loss.grad_norm)
        axis = combined.summed_over
        if axis is not None and loss.grad_norm:
            raise invalid("a reduction of full gradients, for grad_norm", f"{combined.name}, of shards")
        if axis is not None and over is not LOCAL and repr(over) != repr(axis):
            raise invalid(f"over={axis!r}, whose replicas the reduction sums over, or LOCAL", repr(over))
        require_roles(loss)
        if loss.terms is None:
            if loss.totals is not None:
                raise invalid("terms, for totals", "none")
            return cls(loss, weight, combined, over, order, None)
        terms = Terms(loss.terms, loss.totals is not None)
        if not loss.differentiate:
            raise invalid("a loss to differentiate, for terms", "differentiate=False")
        return cls(loss, weight, terms.reduction(reduction), over, order, terms)

    @property
    def average(self) -> Reduction:
        """Reduction of the value, and by default of aux: like that of the gradients, but in precision "fast"."""
        # A member of per_leaf gets the weight itself only if it is an average or Weighed.
        return reductions.mean() if self.reduction.scales_by_weight else Weighed(reductions.sum())

    @property
    def default_aux_reduction(self) -> Reduction:
        """Reduction of aux without an ``aux_reduction``."""
        return self.average if self.terms is None else reductions.mean()

    @property
    def aux_reduction(self) -> Tree:
        """Reduction of aux, or a tree prefix of reductions."""
        given = self.default_aux_reduction if self.loss.aux_reduction is None else self.loss.aux_reduction
        if self.terms is None:
            return given
        return {"terms": self.terms.reduction_of_values(), "weights": reductions.sum(), "aux": given}

    @property
    def has_ratios(self) -> bool:
        """Whether the gradients are `Ratio`s, one per denominator, as its total is not known."""
        return self.terms is not None and not self.terms.known

    def params(self, args: Sequence[Tree]) -> Tree:
        """The differentiated arguments, in the structure of the gradients."""
        chosen = self.loss.argnums
        return tuple(args[i] for i in chosen) if isinstance(chosen, Sequence) else args[chosen]

    def grads_like(self, params: Tree) -> Tree:
        """A tree with the structure, shapes and dtypes of the gradients."""
        return params if self.terms is None else self.terms.like(params)

    def parts_reduction(self, has_aux: bool, wrap: Callable[[Reduction], Reduction] = lambda inner: inner) -> Reduction:
        """Reduction of the parts of a `Contribution`; ``wrap`` may wrap that of the gradients."""
        gradients = Weighed(wrap(without_numbers(self.reduction)))
        members = {"grads": gradients, "value": self.average, "weight": reductions.sum()}
        if has_aux:
            members["aux"] = self.aux_reduction
        combined = reductions.per_leaf(members)
        return _WithNorms(combined, self.reduction) if self.loss.grad_norm else combined

    def window(self, every: int | Callable[[Array], Scalar], max_every: int | None = None, *, has_aux: bool) -> Window:
        """The window that accumulates contributions; with a numbered reduction, the ledger covers all parts."""
        combined = self.parts_reduction(has_aux)
        if self.reduction.microbatches is not None:
            combined = reductions.numbered(combined, self.reduction.microbatches)
        return ReplicatedWindow(combined, every, self.over, self.order, max_every)

    def on_replicas(
        self,
        function: Callable[[list[Tree], dict[str, Tree], Tree, Tree], tuple[Tree, Tree, Tree]],
        args: Sequence[Tree],
        kwargs: dict[str, Tree],
        shared: Tree = (),
        local: Tree = (),
    ) -> tuple[Tree, Tree, Tree]:
        """Runs ``function(args, kwargs, shared, local) -> (shared, local, carry)`` on each replica.

        ``args`` are the arguments of the loss: each replica gets a block of the batch, and its own carry. ``shared``
        and ``local`` are as for the function `on_replicas`.
        """
        at, carried = batch_positions(self.loss, args), positions(self.loss.carry_argnum)
        self._require_unsharded(args)
        axis = self.reduction.summed_over
        if isinstance(axis, JaxAxis) and not axis.is_bound():
            raise invalid(f"a call inside jax.shard_map over {axis!r}, where each replica gets a shard", "none")

        def on_one(shared: Tree, batch: list[Tree], local: Tree) -> tuple[Tree, Tree]:
            (others, kwargs, shared), (local, carry) = shared, local
            loss_args = replaced(others, [*at, *carried], [*batch, *(carry for _ in carried)])
            shared, local, carry = function(loss_args, kwargs, shared, local)
            return shared, _Local(local, carry)

        batch, carry = [args[i] for i in at], next((args[i] for i in carried), None)
        others = replaced(args, [*at, *carried], [None] * len(at + carried))
        shared, (local, carry) = on_replicas(self.over, on_one, (others, kwargs, shared), batch, _Local(local, carry))
        return shared, local, carry

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
        output, form, grads = self._differentiated(self.marked(args), kwargs, scale)
        if self.loss.carry_argnum is not None and output.carry is None:
            raise invalid("a loss that returns LossOutput(carry=...), for carry_argnum", f"one in form {form.name}")
        if self.loss.carry_argnum is None and output.carry is not None:
            raise invalid("carry_argnum, for a loss that returns a carry", None)
        weight = zeroed_weight(self.reduction, grads, self._weight(args, output.weight, default_weight))
        parts = {"grads": grads, "value": jnp.asarray(output.value), "weight": _as_array(weight)}
        if jax.tree.leaves(output.aux):
            require_no_mean_of_ratios(self.aux_reduction, output.aux)
            parts |= as_arrays({"aux": output.aux})
        known, carry = Static(parse(BACKEND, weight).known), as_arrays({"carry": output.carry})["carry"]
        return Contribution(parts, weight, known, carry, form)

    def marked(self, args: Sequence[Tree]) -> list[Tree]:
        """The arguments, of which the differentiated ones vary over the replicas."""
        at, axis = positions(self.loss.argnums), self.reduction.summed_over or self.over
        return replaced(args, at, [mark_varying(axis, self.loss.differentiated(args[i])) for i in at])

    def weight_of(self, args: Sequence[Tree], kwargs: dict[str, Tree], default_weight: int | None) -> Scalar:
        """Weight of one microbatch; the compiler removes the rest of the loss."""
        is_returned = self.weight is None or self.terms is not None
        returned = self.run(self.marked(args), kwargs)[0].weight if is_returned else None
        return self._weight(args, returned, default_weight)

    def denominators(self, terms: Terms, args: Sequence[Tree], kwargs: dict[str, Tree]) -> Array:
        """Weights of one microbatch, one per denominator, in an array; the compiler removes the rest of the loss."""
        weights = self._values_and_weights(terms, self.marked(args), kwargs)[1]
        widest = jax.dtypes.canonicalize_dtype(np.float64)
        return jnp.stack([_as_array(weights[name], widest) for name in terms.denominators])

    def with_totals(self, terms: Terms, kwargs: dict[str, Tree], counted: Array) -> dict[str, Tree]:
        """Adds the totals over all replicas to the keyword arguments, by one small all-reduce."""
        if "totals" in kwargs:
            raise invalid("no argument totals, with totals='counted'", "totals")
        (totals,) = self.over.all_sum([mark_varying(self.over, counted)])
        return kwargs | {"totals": {name: totals[i] for i, name in enumerate(terms.denominators)}}

    def reported(self, values: dict[str, Tree]) -> dict[str, Tree]:
        """The combined parts as `value_and_grad` and the metrics report them, with the scalar loss as "total"."""
        if self.terms is None:
            return values | {"total": values["value"]}
        aux = values["aux"]
        parts = values | {"value": aux["terms"], "weight": aux["weights"], "total": self.terms.total(aux["terms"])}
        return parts | {"aux": aux["aux"] if jax.tree.leaves(aux["aux"]) else None}

    def by_denominator(
        self, terms: Terms, args: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> tuple[LossOutput, Form, dict[str, Ratio]]:
        """Differentiates the loss; returns its output, its form, and by denominator a `Ratio` of gradients and weight.

        Takes one linearization (with JAX 0.9 one more per denominator), and one backward pass per denominator.
        """
        batch_positions(self.loss, args)  # raises for missing arguments
        at = positions(self.loss.argnums)

        def sums_by_denominator(*params: Tree) -> Tree:
            output, form = self.run(replaced(args, at, params), kwargs)
            sums = terms.summed({term: part.numerator for term, part in output.aux["terms"].items()})
            return sums, (output, form)

        vjp, (output, form) = vjp_by_name(sums_by_denominator, *(args[i] for i in at))
        weights = {terms.over[term]: part.denominator for term, part in output.aux["terms"].items()}
        grads = {name: vjp(name) for name in terms.denominators}
        if not isinstance(self.loss.argnums, Sequence):
            grads = {name: grad for name, (grad,) in grads.items()}
        return output, form, terms.contribution(grads, weights)

    def _differentiated(
        self, args: Sequence[Tree], kwargs: dict[str, Tree], scale: Scalar
    ) -> tuple[LossOutput, Form, Tree]:
        if self.terms is not None and self.has_ratios:
            return self.by_denominator(self.terms, args, kwargs)
        if not self.loss.differentiate:
            expected = "a function that returns (value, gradients), for differentiate=False"
            value, grads = require_tuple(expected, self.loss.function(*args, **kwargs), 2)
            leaves = jax.tree_util.tree_leaves_with_path(grads)
            output, form = self._scalar_output(value)
            self.over.require_unreduced((jax.tree_util.keystr(path), x) for path, x in leaves)
            return output, form, grads

        def scaled_loss(*args: Tree, **kwargs: Tree) -> Tree:
            output, form = self.run(args, kwargs)
            value = jnp.asarray(output.value)
            if scale is None:
                return value, (output, form)
            # The factor is NaN for a traced weight whose value is invalid.
            return value * _as_array(scale, value.dtype), (output, form)

        (_, result), grads = jax.value_and_grad(scaled_loss, self.loss.argnums, has_aux=True)(*args, **kwargs)
        return *result, grads

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

    def run(self, args: Sequence[Tree], kwargs: dict[str, Tree]) -> tuple[LossOutput, Form]:
        """Runs the loss; several terms become a scalar to differentiate (for `Ratio`s 0), a weight and aux."""
        if self.terms is None:
            return self._scalar_output(self.loss.function(*args, **kwargs))
        kwargs, totals = dict(kwargs), None
        if self.terms.known:
            totals = kwargs.pop("totals", None)
            totals = require_given("totals={...} of the window's denominators, in each call", totals)
        values, weights, output, form = self._values_and_weights(self.terms, args, kwargs)
        terms = self.terms.parts(values, weights, totals)
        value = self.terms.total(terms) if self.terms.known else jnp.float32(0)
        aux = {"terms": terms, "weights": jax.tree.map(_as_array, weights), "aux": output.aux}
        return LossOutput(value, self.terms.present(weights), aux, output.carry), form

    def _values_and_weights(
        self, terms: Terms, args: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> tuple[dict[str, Tree], dict[str, Tree], LossOutput, Form]:
        output, form = parse_output(self.loss.function(*args, **kwargs), self.loss.has_aux)
        require_one("weights returned by the loss or ones from the argument weight", output.weight, self.weight)
        values, weights = terms.opened(output.value, output.weight)
        if self.weight is not None:
            weights = self.weight(*(args[i] for i in batch_positions(self.loss, args)))
        values = {term: jnp.asarray(x) for term, x in terms.values(values).items()}
        weights = terms.weights(weights)
        # Python numbers are not converted, so that they stay known while tracing.
        weights = {name: lax.stop_gradient(x) if isinstance(x, jax.Array) else x for name, x in weights.items()}
        return terms.widened(values), weights, output, form

    def _scalar_output(self, output: Tree) -> tuple[LossOutput, Form]:
        output, form = parse_output(output, self.loss.has_aux)
        expected = "a loss that is a real floating scalar"
        with translate_errors(expected, received=type_name(output.value)):
            value = jnp.asarray(output.value)
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise invalid(expected, f"{value.dtype} of shape {value.shape}")
        return output, form

    def _weight(self, args: Sequence[Tree], returned: Tree, default_weight: int | None) -> Scalar:
        if self.terms is not None:
            return returned
        require_one("a weight returned by the loss or one from the argument weight", returned, self.weight)
        if returned is not None:
            return returned
        batch = tuple(args[i] for i in batch_positions(self.loss, args))
        if self.weight is not None:
            return self.weight(*batch)
        if not self.reduction.scales_by_weight:
            return 1
        return examples(batch) if default_weight is None else default_weight


class _WithNorms(Wrapper):
    """Adds the norms of ``gradients`` to the value of a reduction of the parts of a `Contribution`.

    The states are those of the wrapped reduction.
    """

    def __init__(self, of: PerLeaf, gradients: Reduction) -> None:
        super().__init__(of, gradients=gradients)
        self._gradients, self._at = without_numbers(gradients), list(of.prefix.paths()).index("['grads']")

    @property
    def description(self) -> str:
        return self.of.description

    def finalize(self, state: State) -> Tree:
        combined = self.of.finalize(state)
        norms = {"grad_norm": global_norm(BACKEND, combined["grads"])}
        if isinstance(self._gradients, Ratios):
            # Repeats the divisions of the finalize above; the compiler merges the two.
            parts = self._gradients.of.finalize(state.parts[self._at])
            norms["grad_norms"] = {name: global_norm(BACKEND, part) for name, part in parts.items()}
        return combined | norms


def _as_array(weight: Scalar, dtype: DType = np.float32) -> Array:
    return parse(BACKEND, weight).cast(BACKEND, np.dtype(dtype))
