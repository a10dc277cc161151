# pyright: standard
"""Loss functions: the roles of their arguments and the forms of their results."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcombine import tree
from gradcombine.errors import MOST, invalid, translate_errors, type_name
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.ratios import Ratio
from gradcombine.types import Array, Leaf, Scalar, Totals, Tree


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
@dataclass(frozen=True)
class Static:
    """A constant as a pytree node without leaves, so that transformations can return it; compared by value."""

    value: Any


@jax.tree_util.register_static
class Form(enum.Enum):
    """Form in which a loss returns its value; a constant like `Static`."""

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
        as for the value. A microbatch of weight 0 is left out, also with `sum` and `ratio`.
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

    def differentiated(self, argument: Tree) -> Tree:
        """Returns an argument in ``argnums``; raises for leaves, such as counters, that have no gradient."""
        for path, x in jax.tree_util.tree_leaves_with_path(argument) if self.differentiate else ():
            if not jnp.issubdtype(dtype := jnp.result_type(x), jnp.inexact):
                raise invalid("floats or complex numbers to differentiate by", dtype, jax.tree_util.keystr(path))
        return argument


def positions(role: int | Sequence[int] | None) -> list[int]:
    """Positions of the arguments with a role."""
    if role is None:
        return []
    return list(role) if isinstance(role, Sequence) else [role]


def _other_positions(loss: Loss) -> list[int]:
    """Positions of the arguments with a role other than the batch."""
    return [*positions(loss.argnums), *positions(loss.rng_argnum), *positions(loss.carry_argnum)]


def batch_positions(loss: Loss, args: Sequence[Tree]) -> list[int]:
    """Positions of the batch, by default all arguments without another role; raises for missing arguments."""
    batch, others = positions(loss.batch_argnums), _other_positions(loss)
    if loss.batch_argnums is None:
        batch = [i for i in range(len(args)) if i not in others]
    require_arguments([*batch, *others], len(args))
    return batch


def require_arguments(at: Iterable[int], count: int) -> None:
    """Raises unless ``count`` positional arguments include all of these positions."""
    needed = max(at, default=-1) + 1
    if needed > count:
        raise invalid(f"{needed} positional arguments or more", count)


def folded_key(loss: Loss, args: Sequence[Tree], *numbers: Scalar) -> Tree:
    """The argument ``rng_argnum`` with these numbers folded in, such as window index and microbatch number.

    A tree of arrays of keys of any shape has the numbers folded into each key.
    """

    def fold(keys: Leaf, number: Scalar) -> Array:
        function: Callable[[Leaf], Array] = partial(jax.random.fold_in, data=number)
        if isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
            for _ in range(keys.ndim):
                function = jax.vmap(function)
        return function(keys)

    (position,) = positions(loss.rng_argnum)
    with translate_errors("a key of jax.random as the argument rng_argnum"):
        return jax.tree.map(lambda keys: reduce(fold, numbers, keys), args[position], is_leaf=lambda x: x is None)


def require_roles(loss: Loss) -> None:
    """Raises for invalid positions of arguments."""
    if loss.argnums is None:
        raise invalid("the positions of the parameters as argnums", None)
    roles = [*_other_positions(loss), *positions(loss.batch_argnums)]
    valid = [isinstance(role, int) and not isinstance(role, bool) and 0 <= role <= MOST for role in roles]
    if not all(valid) or len(set(roles)) != len(roles):
        raise invalid("argument positions, integers from 0, each with one role", roles)
    for name, role in (("rng_argnum", loss.rng_argnum), ("carry_argnum", loss.carry_argnum)):
        if isinstance(role, Sequence):
            raise invalid(f"one argument position as {name}, or None", role)


def require_first(loss: Loss, differentiated: str = "parameters") -> None:
    """Raises unless the loss is differentiated with respect to its first argument."""
    if loss.argnums != 0:
        raise invalid(f"a loss of the {differentiated} as its first argument", f"argnums={loss.argnums!r}")


def parse_output(output: Tree, has_aux: bool) -> tuple[LossOutput, Form]:
    """Converts the result of a loss to a `LossOutput`; also returns the form that it had."""
    if isinstance(output, LossOutput):
        return output, Form.OUTPUT
    if isinstance(output, tuple) != has_aux or (has_aux and len(output) != 2):
        wanted = "(value, aux)" if has_aux else "a scalar (or (value, aux), with has_aux=True)"
        raise invalid(f"a loss that returns {wanted} or a LossOutput", type_name(output))
    if not has_aux:
        return LossOutput(output), Form.SCALAR
    return LossOutput(output[0], aux=output[1]), Form.WITH_AUX


def in_form(form: Form, values: dict[str, Tree], carry: Tree) -> Tree:
    """The combined values in the form in which the loss returns its values."""
    output = LossOutput(values["value"], values["weight"], values.get("aux"), carry)
    if form is Form.OUTPUT:
        return output
    return output.value if form is Form.SCALAR else (output.value, output.aux)


def require_no_mean_of_ratios(aux_reduction: Tree, aux: Tree) -> None:
    """Raises if aux has a `Ratio` that a mean would combine: numerator and denominator would both be averaged."""
    members, prefix = tree.flatten(aux_reduction, is_leaf=lambda node: isinstance(node, Reduction))
    for path, member, part in zip(prefix.paths(), members, tree.split_as(prefix, aux), strict=True):
        for inner, node in jax.tree_util.tree_leaves_with_path(part, is_leaf=_is_ratio):
            if _is_ratio(node) and isinstance(member, Reduction) and member.divides:
                path_in_aux = f".aux{path}{jax.tree_util.keystr(inner)}"
                raise invalid("reductions.ratio() in aux_reduction, for a Ratio", member.description, path_in_aux)


def _is_ratio(node: Tree) -> bool:
    return isinstance(node, Ratio)
