# pyright: standard
"""A loss of several terms: its gradient for each denominator, or one where the totals are known."""

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
from gradcombine.integrations.jax.on_replicas import mark_own
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
    """The objective of a loss, of one term or of several; the arguments are those of `value_and_grad`."""
    loss = Loss.of(loss)
    mean = reductions.mean() if reduction is None else reduction
    objective = Objective(loss, weight, mean, over, order)
    check(totals=loss.totals)
    if loss.terms is None:
        if loss.totals is not None:
            raise invalid("terms, for totals", "none")
        return objective
    several = Terms(loss.terms, loss.totals is not None)
    if not loss.differentiate:
        raise invalid("a loss to differentiate, for terms", "differentiate=False")
    aux = reductions.mean() if loss.aux_reduction is None else loss.aux_reduction
    parts = {"terms": several.reduction_of_values(), "weights": reductions.sum(), "aux": aux}
    of_terms = replace(loss, aux_reduction=parts, differentiate=loss.totals is not None)
    return ObjectiveOfTerms(of_terms, weight, several.reduction(reduction), over, order)


@operation("grads_by_denominator")
def grads_by_denominator(
    loss: Callable[..., Tree],
    terms: Mapping[str, str],
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., tuple[LossOutput, dict[str, Tree]]]:
    """The gradients of a loss of several terms, one for each denominator: for `integrations.optax.accumulate`.

    Args:
      loss, argnums, has_aux: as for jax.value_and_grad; returns terms and weights as for `value_and_grad`.
      terms: likewise.

    Returns:
      A function of the arguments of ``loss``. It returns the `LossOutput` of the loss, and by denominator the gradient
      of the sum of its terms, neither divided nor multiplied: one linearization, and one backward pass for each
      denominator through what its terms depend on.

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
        told = LossOutput(values, weights, output.aux["aux"], output.carry)
        return told, {name: part.numerator for name, part in grads.items()}

    return differentiated


class ObjectiveOfTerms(Objective):
    """A loss of several terms, whose values and weights go along as aux.

    Where totals are not known, the gradients are `Ratio`s, one for each denominator.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.terms  # raises for terms that are none

    @cached_property
    def terms(self) -> Terms:
        return Terms({} if self.loss.terms is None else self.loss.terms, self.loss.totals is not None)

    @property
    def counts(self) -> bool:
        return self.loss.totals == "counted"

    def weight_of(self, args: Sequence[Tree], kwargs: dict[str, Tree], default_weight: int | None) -> Tree:
        return self._run(args, kwargs)[0].weight

    def weights_of(self, args: Sequence[Tree], kwargs: dict[str, Tree]) -> Array:
        """The weights of one microbatch, by denominator, as one array; what else the loss computes is left out."""
        weights = self._terms_of(args, kwargs)[1]
        return jnp.stack([self._number(weights[name]) for name in self.terms.denominators])

    def with_totals(self, kwargs: dict[str, Tree], counted: Array) -> dict[str, Tree]:
        """The keyword arguments with the totals of all replicas, by one exchange of a few numbers."""
        if "totals" in kwargs:
            raise invalid("no totals, where they are counted", "totals")
        (totals,) = self.over.all_sum([mark_own(self.over, counted)])
        return kwargs | {"totals": {name: totals[i] for i, name in enumerate(self.terms.denominators)}}

    def like(self, params: Tree) -> Tree:
        return self.terms.like(params)

    def told(self, values: dict[str, Tree]) -> dict[str, Tree]:
        aux = values["aux"]
        told = {"grads": values["grads"], "value": aux["terms"], "weight": aux["weights"]}
        told |= {"aux": aux["aux"]} if jax.tree.leaves(aux["aux"]) else {}
        told |= {name: values[name] for name in ("grad_norm", "grad_norms") if name in values}
        return told | {"total": self.terms.total(aux["terms"])}

    def differentiated(
        self, args: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> tuple[LossOutput, Form, dict[str, Ratio]]:
        """Calls the loss and differentiates by denominator: `_run`'s result, with the gradient and weight of each.

        One linearization (of JAX 0.9: one more for each denominator), and one backward pass for each denominator.
        """
        self.batch_positions(args)  # refuses fewer arguments
        positions = list(self.loss.argnums) if isinstance(self.loss.argnums, Sequence) else [self.loss.argnums]

        def summed(*params: Tree) -> Tree:
            called = list(args)
            for i, x in zip(positions, params, strict=True):
                called[i] = x
            output, form = self._run(called, kwargs)
            sums = self.terms.summed({term: part.numerator for term, part in output.aux["terms"].items()})
            return sums, (output, form)

        _, pull_back, (output, form) = vjp_by_name(summed, *(args[i] for i in positions))
        weights = {self.terms.over[term]: part.denominator for term, part in output.aux["terms"].items()}
        grads = {name: pull_back(name) for name in self.terms.denominators}
        if not isinstance(self.loss.argnums, Sequence):
            grads = {name: of_one for name, (of_one,) in grads.items()}
        return output, form, self.terms.contribution(grads, weights)

    def _run(self, args: Sequence[Tree], kwargs: dict[str, Tree]) -> tuple[LossOutput, Form]:
        kwargs, given = dict(kwargs), None
        if self.loss.totals is not None:
            given = require_given("totals={...} of the window's denominators, in each call", kwargs.pop("totals", None))
        values, weights, output, form = self._terms_of(args, kwargs)
        told = self.terms.parts(values, weights, given)
        total = jnp.float32(0) if self.loss.totals is None else self.terms.total(told)
        aux = {"terms": told, "weights": jax.tree.map(self._number, weights), "aux": output.aux}
        return LossOutput(total, self.terms.present(weights), aux, output.carry), form

    def _differentiated(
        self, args: Sequence[Tree], kwargs: dict[str, Tree], scale: Scalar
    ) -> tuple[tuple[Array, LossOutput, Form], Tree]:
        if self.loss.totals is not None:
            return super()._differentiated(args, kwargs, scale)
        output, form, grads = self.differentiated(args, kwargs)
        return (output.value, output, form), grads

    def _terms_of(
        self, args: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> tuple[dict[str, Tree], dict[str, Tree], LossOutput, Form]:
        output, form = self._in_form(self.loss.function(*args, **kwargs))
        require_one("weights that the loss returns or ones of the argument weight", output.weight, self.weight)
        terms, weights = self.terms.opened(output.value, output.weight)
        if self.weight is not None:
            weights = self.weight(*(args[i] for i in self.batch_positions(args)))
        values = {term: jnp.asarray(x) for term, x in self.terms.values(terms).items()}
        values = self.terms.widened(values)
        # Python's numbers stay known.
        stopped = {
            name: lax.stop_gradient(x) if isinstance(x, jax.Array) else x
            for name, x in self.terms.weights(weights).items()
        }
        return values, stopped, output, form

    def _weight(self, args: Sequence[Tree], returned: Tree, default_weight: int | None) -> Tree:
        return returned

    def _number(self, weight: Scalar) -> Array:
        backend = load("jax")
        return parse(backend, weight).cast(backend, np.dtype(np.float32))
