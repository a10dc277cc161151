"""Loss functions: the roles of their arguments and the forms of their results."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from gradcombine.errors import invalid
from gradcombine.types import Scalar, Totals, Tree


class LossOutput(NamedTuple):
    """Result of a loss that returns more than a scalar; `value_and_grad` then returns one for the full window.

    Attributes:
      value: the loss, a real floating scalar; with ``terms``, a dict of sums. For the window: combined like the
        gradients.
      weight: the weight of this microbatch, a scalar, for instance the number of tokens that the loss averages over.
        None: determined by the argument ``weight``. For the window: the sum of weights, float32.
      aux: a tree of arrays, for instance metrics. For the window: combined by ``aux_reduction``.
      carry: the argument ``carry_argnum`` of the next microbatch. For the window: the carry of the last microbatch.
    """

    value: Tree
    weight: Scalar = None
    aux: Tree = None
    carry: Tree = None


@jax.tree_util.register_static
class Form(enum.Enum):
    """Form in which a loss returns its value. A pytree node without leaves, so that transformations can return it."""

    SCALAR = enum.auto()
    WITH_AUX = enum.auto()
    OUTPUT = enum.auto()


@dataclass(frozen=True)
class Loss:
    """A loss function with the roles of its arguments and the form of its result.

    Attributes:
      function: ``function(*args, **kwargs)`` of one microbatch, as for jax.value_and_grad; returns a real floating
        scalar, ``(scalar, aux)`` with ``has_aux``, or a `LossOutput`.
      argnums: positions of the arguments to differentiate; for `train_step`, 0, the parameters.
      batch_argnums: positions of the arguments to divide, trees of arrays whose first axes all have length n, the
        number of examples. None: all positional arguments without another role. Every microbatch gets all other
        arguments undivided, keyword arguments included.
      rng_argnum: position of a random key. Microbatch i of m on replica r gets ``fold_in(key, r * m + i)``; the key has
        to be the same on all replicas.
      carry_argnum: position of an argument that is threaded through the microbatches, such as batch statistics. The
        loss returns its next value as ``LossOutput.carry``. Each replica has its own carry; combine them by
        `gradcombine.all_reduce`.
      has_aux: as for jax.value_and_grad.
      aux_reduction: combines ``aux``: a reduction, or a tree prefix of reductions, as for
        `gradcombine.reductions.per_leaf`: ``{"loss": mean(), "tokens": sum(), "amax": max(), "logits": last()}``. None:
        as for the value.
      differentiate: False: ``function`` returns ``(value, gradients)``, as one made by jax.value_and_grad does. The
        gradients may be narrower than the parameters.
      terms: for a loss of several terms, a dict from term to denominator: ``{"ce": "tokens", "balance":
        "microbatches"}``. Instead of a scalar, the loss returns a dict of terms, each a *sum*; its weight (in a
        `LossOutput`, or from ``weight``) is a dict with the number that this microbatch adds to each denominator. The
        gradient is that of ``sum_j (sum_i L_ij) / (sum_i W_ij)`` over all microbatches i of all replicas: see
        `docs/losses.md`. The value is a dict of the terms, each divided by the total of its denominator; the weight is
        a dict of these totals. ``reduction`` is a mean (with ``totals``, a sum) of any precision; aux without an
        ``aux_reduction`` is averaged over the microbatches with a nonzero weight. Weights are not differentiated.
      totals: whether the totals of the denominators are known before the gradients are computed. None: no; each
        denominator then takes an accumulator and a backward pass. ``"counted"``: the weights of all microbatches are
        computed first (without the rest of the loss; with a carry, from the initial carry) and all-reduced; then one
        accumulator and one backward pass suffice. ``"given"``: likewise, but every call gets the totals over all
        microbatches and replicas as a keyword argument, ``totals={"tokens": 4096, "microbatches": 8}``.
      grad_norm: for `train_step` and `request_step`: whether the metrics of a window include the norm of the gradient
        that the optimizer gets, and, with ``terms`` of unknown totals, the norm of each denominator's part. To get the
        norm of a single term, give it a denominator of its own.
    """

    function: Callable[..., Tree]
    argnums: int | Sequence[int] = 0
    batch_argnums: int | Sequence[int] | None = None
    rng_argnum: int | None = None
    carry_argnum: int | None = None
    has_aux: bool = False
    aux_reduction: Tree | None = None
    differentiate: bool = True
    terms: Mapping[str, str] | None = None
    totals: Totals | None = None
    grad_norm: bool = False

    @classmethod
    def of(cls, loss: Callable[..., Tree] | Loss) -> Loss:
        return loss if isinstance(loss, Loss) else cls(loss)


def require_first(loss: Loss, differentiated: str = "parameters") -> None:
    """Raises unless the loss is differentiated with respect to its first argument."""
    if loss.argnums != 0:
        raise invalid(f"a loss of the {differentiated} as its first argument", f"argnums={loss.argnums!r}")


def parse_output(output: Tree, has_aux: bool) -> tuple[LossOutput, Form]:
    """Converts the result of a loss to a `LossOutput`; also returns the form that it had.

    Raises:
      ValueError: with ``has_aux``, for anything but (scalar, aux).
    """
    if isinstance(output, LossOutput):
        return output, Form.OUTPUT
    if not has_aux:
        return LossOutput(output), Form.SCALAR
    value, aux = output
    return LossOutput(value, aux=aux), Form.WITH_AUX


def in_form(form: Form, values: dict[str, Tree], carry: Tree) -> Tree:
    """The combined values in the form in which the loss returns its values."""
    output = LossOutput(values["value"], values["weight"], values.get("aux"), carry)
    if form is Form.OUTPUT:
        return output
    return output.value if form is Form.SCALAR else (output.value, output.aux)
