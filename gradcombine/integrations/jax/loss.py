"""A loss: the roles of its arguments and the forms of its result."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from gradcombine.errors import invalid
from gradcombine.types import Scalar, Totals, Tree


class LossOutput(NamedTuple):
    """Result of a loss, in place of a scalar, and of `value_and_grad` then.

    Attributes:
      value: the loss, a real floating scalar; with ``terms``, a dict of sums. Of the whole window: combined as the
        gradients are.
      weight: of this microbatch, a scalar, for instance the number of tokens that a mean loss is over. None: as the
        argument ``weight`` says. Of the whole window: the sum of weights, float32.
      aux: a tree of arrays, for instance metrics. Of the whole window: combined by ``aux_reduction``.
      carry: what the next microbatch gets in the place ``carry_argnum``. Of the whole window: the last one's.
    """

    value: Tree
    weight: Scalar = None
    aux: Tree = None
    carry: Tree = None


@jax.tree_util.register_static
class Form(enum.Enum):
    """The form in which a loss returns its value. A node without leaves: it may pass through any transformation."""

    SCALAR = enum.auto()
    WITH_AUX = enum.auto()
    OUTPUT = enum.auto()


@dataclass(frozen=True)
class Loss:
    """A loss with the roles of its arguments and the form of its result, for what a plain function does not say.

    Attributes:
      function: ``function(*args, **kwargs)`` of one microbatch, as for jax.value_and_grad: returns a real floating
        scalar, ``(scalar, aux)`` with ``has_aux``, or a `LossOutput`.
      argnums: the arguments to differentiate by; for `train_step` the first one, the parameters.
      batch_argnums: the arguments to divide, trees of arrays with one first axis of n examples. None: all positional
        arguments that have no other role. What is not divided, keyword arguments too, goes to each microbatch whole.
      rng_argnum: the argument that is a random key. Microbatch i of m on replica r gets ``fold_in(key, r * m + i)``;
        the key itself has to be the same on all replicas.
      carry_argnum: the argument that is threaded through the microbatches, as batch statistics are. The loss returns
        the next one as ``LossOutput.carry``. Replicas carry their own: `gradcombine.all_reduce` combines them.
      has_aux: as for jax.value_and_grad.
      aux_reduction: for ``aux``: a reduction, or a tree of them that aux begins with, as for
        `gradcombine.reductions.per_leaf`: ``{"loss": mean(), "tokens": sum(), "amax": max(), "logits": last()}``. None:
        as for the value.
      differentiate: False: ``function`` returns ``(value, gradients)`` itself, as a function that jax.value_and_grad
        has made does. Gradients may be narrower than the parameters.
      terms: for a loss of several terms, the name of each one's denominator: ``{"ce": "tokens", "balance":
        "microbatches"}``. The loss returns, in the place of a scalar, a dict of the terms by name, each a *sum*; and as
        its weight (in a `LossOutput`, or by ``weight``) a dict of the denominators by name, each the number that the
        microbatch adds to it. The gradient is that of ``sum_j (sum_i L_ij) / (sum_i W_ij)`` over all microbatches i of
        all replicas: see `docs/losses.md`. The value is the dict of the terms, each divided by its denominator's total,
        the weight that of the totals. ``reduction`` is a mean (with ``totals``, a sum) of any precision; aux without an
        ``aux_reduction`` is the mean over the microbatches that weigh anything. Weights are constants to the gradient.
      totals: how the denominators' totals are known before the gradients. None: they are not, and each denominator has
        an accumulator and a backward pass of its own. ``"counted"``: the weights of all microbatches are computed first
        (what else the loss computes is left out; with a carry, they are those of the first one) and exchanged, and
        one accumulator and one backward pass do. ``"given"``: the same, with the totals over all microbatches and
        replicas as a keyword argument of each call, ``totals={"tokens": 4096, "microbatches": 8}``.
      grad_norm: of `train_step` and `request_step`: whether the metrics of a window have the norm of its gradient, as
        the optimizer gets it, and with ``terms`` whose totals are not known that of each denominator's part. A term
        whose denominator no other term has is such a part.
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


def require_first(loss: Loss, of: str = "parameters") -> None:
    """Raises for a loss that is to be differentiated by another argument than the first one."""
    if loss.argnums != 0:
        raise invalid(f"a loss of the {of} as its first argument", f"argnums={loss.argnums!r}")


def opened(output: Tree, has_aux: bool) -> tuple[LossOutput, Form]:
    """Converts the result of a loss to a `LossOutput`, and says which form it had.

    Raises:
      ValueError: for anything but (scalar, aux) where ``has_aux``.
    """
    if isinstance(output, LossOutput):
        return output, Form.OUTPUT
    if not has_aux:
        return LossOutput(output), Form.SCALAR
    value, aux = output
    return LossOutput(value, aux=aux), Form.WITH_AUX


def closed(form: Form, values: dict[str, Tree], carry: Tree) -> Tree:
    """Combined values, in the form in which the loss returned its own."""
    output = LossOutput(values["value"], values["weight"], values.get("aux"), carry)
    if form is Form.OUTPUT:
        return output
    return output.value if form is Form.SCALAR else (output.value, output.aux)
