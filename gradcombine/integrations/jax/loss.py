"""What a loss may return, and what `value_and_grad` returns for it."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax

from gradcombine.types import Tree


class LossOutput(NamedTuple):
    """What a loss may return in place of a scalar, and what `value_and_grad` then returns in its place.

    Attributes:
      value: the loss, a real floating scalar. Of the whole window: combined as the gradients are.
      weight: of this microbatch, a scalar, for instance the number of tokens that a mean loss is over. None: as the
        argument ``weight`` says. Of the whole window: the sum of weights, float32.
      aux: a tree of arrays, for instance metrics. Of the whole window: combined by ``aux_reduction``.
      carry: what the next microbatch gets in the place ``carry_argnum``. Of the whole window: the last one's.
    """

    value: Any
    weight: Any = None
    aux: Any = None
    carry: Any = None


@jax.tree_util.register_static
class Form(enum.Enum):
    """The form in which a loss returns its value. A node without leaves: it may pass through any transformation."""

    SCALAR = enum.auto()
    WITH_AUX = enum.auto()
    OUTPUT = enum.auto()


def opened(output: Any, has_aux: bool) -> tuple[LossOutput, Form]:
    """What a loss has returned, in one form.

    Raises:
      ValueError: for anything but (scalar, aux) where ``has_aux``.
    """
    if isinstance(output, LossOutput):
        return output, Form.OUTPUT
    if not has_aux:
        return LossOutput(output), Form.SCALAR
    value, aux = output
    return LossOutput(value, aux=aux), Form.WITH_AUX


def closed(form: Form, values: dict[str, Tree], carry: Tree) -> Any:
    """Combined values, in the form in which the loss returned its own."""
    output = LossOutput(values["value"], values["weight"], values.get("aux"), carry)
    if form is Form.OUTPUT:
        return output
    return output.value if form is Form.SCALAR else (output.value, output.aux)
