# pyright: standard
"""Losses of several terms: one gradient per denominator, or a single gradient if the totals are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, wraps

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcombine import reductions
from gradcombine.backends.jax_versions import vjp_by_name
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import load
from gradcombine.denominators import Terms
from gradcombine.errors import invalid, operation, require_given, require_one
from gradcombine.integrations.jax.arrays import require_tree
from gradcombine.integrations.jax.contribution import Objective
from gradcombine.integrations.jax.loss import Form, Loss, LossOutput
from gradcombine.integrations.jax.on_replicas import mark_varying
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.ratios import Ratio
from gradcombine.reductions.weights import parse
from gradcombine.settings import check
from gradcombine.types import Array, Order, Scalar, Tree


def objective_of(
    loss: Callable[..., Tree] | Loss,
    weight: Callable[..., Scalar] | None,
    reduction: Reduction | None,
    over: Collective,
    order: Order,
) -> Objective:
    """Builds the objective of a loss of one or several terms; the arguments are those of `value_and_grad`."""
    loss = Loss.of(loss)
    mean = reductions.mean() if reduction is None else reduction
    objective = Objective(loss, weight, mean, over, order)
    check(totals=loss.totals)
    if loss.terms is None:
        if loss.totals is not None:
            raise invalid("terms, for totals", "none")
        return objective
    terms = Terms(loss.terms, loss.totals is not None)
    if not loss.differentiate:
        raise invalid("a loss to differentiate, for terms", "differentiate=False")
    aux = reductions.mean() if loss.aux_reduction is None else loss.aux_reduction
    parts = {"terms": terms.reduction_of_values(), "weights": reductions.sum(), "aux": aux}
    loss = replace(loss, aux_reduction=parts, differentiate=loss.totals is not None)
    return ObjectiveOfTerms(loss, weight, terms.reduction(reduction), over, order)


@operation("grads_by_denominator")
def grads_by_denominator(
    loss: Callable[..., Tree],
    terms: Mapping[str, str],
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., tuple[LossOutput, dict[str, Tree]]]:
    """Computes the gradients of a loss of several terms by denominator: for `integrations.optax.accumulate`.

    Args:
      loss, argnums, has_aux: as for jax.value_and_grad; ``loss`` returns terms and weights as for `Loss`.
      terms: as for `Loss`, a dict from term to denominator.

    Returns:
      A function of the arguments of ``loss``. It returns the `LossOutput` of the loss, and a dict by denominator with
      the gradient of the sum of its terms, not divided by anything. It takes one linearization, and one backward pass
      per denominator through the parts of the loss that its terms depend on.

    Raises:
      GradCombineError: as `value_and_grad`.

    >>> import jax.numpy as jnp
    >>> from gradcombine.integrations.jax import LossOutput, grads_by_denominator
    >>> def loss(w, x):
    ...     return LossOutput({"fit": jnp.sum(w * x), "decay": w * w}, weight={"tokens": x.size, "microbatches": 1})
    >>> function = grads_by_denominator(loss, {"fit": "tokens", "decay": "microbatches"})
    >>> output, grads = function(jnp.float32(10), jnp.float32([1, 2]))
    >>> {name: float(grad) for name, grad in grads.items()}, output.weight
    ({'microbatches': 20.0, 'tokens': 3.0}, {'microbatches': 1, 'tokens': 2})
    """
    objective = ObjectiveOfTerms(Loss(loss, argnums, has_aux=has_aux, terms=terms))

    @operation("grads_by_denominator")
    @wraps(loss)
    def differentiated(*args: Tree, **kwargs: Tree) -> tuple[LossOutput, dict[str, Tree]]:
        require_tree(args, kwargs)
        output, _, grads = objective.differentiated(args, kwargs)
        values = {term: part.numerator for term, part in output.aux["terms"].items()}
        weights = {name: part.denominator for name, part in grads.items()}
        result = LossOutput(values, weights, output.aux["aux"], output.carry)
        return result, {name: part.numerator for name, part in grads.items()}

    return differentiated


class ObjectiveOfTerms(Objective):
    """Objective of a loss of several terms, whose values and weights are combined as parts of aux.

    If the totals are not known, the gradients are a dict of `Ratio`s by denominator.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.terms  # raises for invalid terms

    @cached_property
    def terms(self) -> Terms:
        return Terms({} if self.loss.terms is None else self.loss.terms, self.loss.totals is not None)

    @property
    def counts_totals(self) -> bool:
        return self.loss.totals == "counted"

    def weight_of(self, args: Sequence[Tree], kwargs: dict[str, Tree], default_weight: int | None) -> Tree:
        return self._run(args, kwargs)[0].weight

    def weights_of(self, args: Sequence[Tree], kwargs: dict[str, Tree]) -> Array:
        """Weights of one microbatch as an array, one per denominator; the compiler removes the rest of the loss."""
        weights = self._values_and_weights(args, kwargs)[1]
        return jnp.stack([self._number(weights[name]) for name in self.terms.denominators])

    def with_totals(self, kwargs: dict[str, Tree], counted: Array) -> dict[str, Tree]:
        """Adds the totals over all replicas to the keyword arguments, by one small all-reduce."""
        if "totals" in kwargs:
            raise invalid("no argument totals, with totals='counted'", "totals")
        (totals,) = self.over.all_sum([mark_varying(self.over, counted)])
        return kwargs | {"totals": {name: totals[i] for i, name in enumerate(self.terms.denominators)}}

    def grads_like(self, params: Tree) -> Tree:
        return self.terms.like(params)

    def reported(self, values: dict[str, Tree]) -> dict[str, Tree]:
        aux = values["aux"]
        parts = {"grads": values["grads"], "value": aux["terms"], "weight": aux["weights"]}
        parts |= {"aux": aux["aux"]} if jax.tree.leaves(aux["aux"]) else {}
        parts |= {name: values[name] for name in ("grad_norm", "grad_norms") if name in values}
        return parts | {"total": self.terms.total(aux["terms"])}

    def differentiated(
        self, args: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> tuple[LossOutput, Form, dict[str, Ratio]]:
        """Differentiates the loss; returns its output, its form, and by denominator a `Ratio` of gradients and weight.

        Takes one linearization (with JAX 0.9 one more per denominator), and one backward pass per denominator.
        """
        self.batch_positions(args)  # raises for missing arguments
        positions = list(self.loss.argnums) if isinstance(self.loss.argnums, Sequence) else [self.loss.argnums]

        def sums_by_denominator(*params: Tree) -> Tree:
            loss_args = list(args)
            for i, x in zip(positions, params, strict=True):
                loss_args[i] = x
            output, form = self._run(loss_args, kwargs)
            sums = self.terms.summed({term: part.numerator for term, part in output.aux["terms"].items()})
            return sums, (output, form)

        _, vjp, (output, form) = vjp_by_name(sums_by_denominator, *(args[i] for i in positions))
        weights = {self.terms.over[term]: part.denominator for term, part in output.aux["terms"].items()}
        grads = {name: vjp(name) for name in self.terms.denominators}
        if not isinstance(self.loss.argnums, Sequence):
            grads = {name: grad for name, (grad,) in grads.items()}
        return output, form, self.terms.contribution(grads, weights)

    def _run(self, args: Sequence[Tree], kwargs: dict[str, Tree]) -> tuple[LossOutput, Form]:
        kwargs, totals = dict(kwargs), None
        if self.loss.totals is not None:
            totals = kwargs.pop("totals", None)
            totals = require_given("totals={...} of the window's denominators, in each call", totals)
        values, weights, output, form = self._values_and_weights(args, kwargs)
        terms = self.terms.parts(values, weights, totals)
        loss = jnp.float32(0) if self.loss.totals is None else self.terms.total(terms)
        aux = {"terms": terms, "weights": jax.tree.map(self._number, weights), "aux": output.aux}
        return LossOutput(loss, self.terms.present(weights), aux, output.carry), form

    def _differentiated(
        self, args: Sequence[Tree], kwargs: dict[str, Tree], scale: Scalar
    ) -> tuple[tuple[Array, LossOutput, Form], Tree]:
        if self.loss.totals is not None:
            return super()._differentiated(args, kwargs, scale)
        output, form, grads = self.differentiated(args, kwargs)
        return (output.value, output, form), grads

    def _values_and_weights(
        self, args: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> tuple[dict[str, Tree], dict[str, Tree], LossOutput, Form]:
        output, form = self._parse_output(self.loss.function(*args, **kwargs))
        require_one("weights returned by the loss or ones from the argument weight", output.weight, self.weight)
        values, weights = self.terms.opened(output.value, output.weight)
        if self.weight is not None:
            weights = self.weight(*(args[i] for i in self.batch_positions(args)))
        values = {term: jnp.asarray(x) for term, x in self.terms.values(values).items()}
        # Python numbers are not converted, so that they stay known while tracing.
        constant_weights = {
            name: lax.stop_gradient(x) if isinstance(x, jax.Array) else x
            for name, x in self.terms.weights(weights).items()
        }
        return self.terms.widened(values), constant_weights, output, form

    def _weight(self, args: Sequence[Tree], returned: Tree, default_weight: int | None) -> Tree:
        return returned

    def _number(self, weight: Scalar) -> Array:
        backend = load("jax")
        return parse(backend, weight).cast(backend, np.dtype(np.float32))
