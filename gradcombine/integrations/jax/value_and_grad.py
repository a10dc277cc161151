"""Gradients of a batch, computed in microbatches and on replicas, and gradients of a microbatch by denominator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.errors import invalid, operation, require_given
from gradcombine.integrations.jax.arrays import require_tree
from gradcombine.integrations.jax.loss import Form, Loss, LossOutput, in_form, positions
from gradcombine.integrations.jax.modules import module_loss, split_if_module, write_state
from gradcombine.integrations.jax.objective import Objective
from gradcombine.integrations.jax.scan import scan_window
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check, valid
from gradcombine.types import Order, Scalar, Tree


@operation("value_and_grad")
def value_and_grad(
    loss: Callable[..., Tree] | Loss,
    microbatches: int,
    *,
    weight: Callable[..., Scalar] | None = None,
    reduction: Reduction | None = None,
    over: Collective = gc.LOCAL,
    order: Order = "sequential",
    interleaved: bool = False,
) -> Callable[..., tuple[Tree, Tree]]:
    """`jax.value_and_grad` in microbatches: less memory for activations, and one all-reduce of gradients per call.

    The batch arguments are divided along their first axis, a scan runs the microbatches one after another, and the
    replicas all-reduce their sums once, after the scan. With G the gradient and w the weight of a microbatch, the
    result is::

        sum(w * G) / sum(w)    over all microbatches of all replicas, divided once

    If the weight counts what the loss averages over (examples, tokens), this is the gradient of the full batch, however
    its examples and tokens are spread over microbatches and replicas; the mean of the microbatches' means is not.

    The first argument may be a module of flax.nnx or equinox. Gradients are then those that nnx.value_and_grad and
    equinox.filter_value_and_grad return: of nnx.Param, or of inexact arrays. The number of the microbatch is folded
    into the random streams of an nnx.Module. Its other variables are combined over microbatches and replicas, and
    updated in place: nnx.BatchStat by the mean, others by the reduction in the class attribute ``combined_by``.

    Args:
      loss: ``loss(*args, **kwargs)`` of one microbatch, as for jax.value_and_grad; returns a real floating scalar or a
        `LossOutput`. Pass a `Loss` to specify more: which arguments are divided, a random key or a carry, aux, several
        terms.
      microbatches: their number; n examples are divided into microbatches of ceil(n / microbatches). If n is not
        divisible, the last one is smaller: it is compiled separately, and nothing is padded. A batch on a mesh is
        divided in place: each device's examples are divided, and every microbatch gets a part from each device. (Which
        automatic axes shard a batch is unknown while tracing; there the batch is divided into one block per device of
        the mesh, or per as many of them as divide n.)
      weight: ``weight(*batch)`` of one microbatch, a scalar function of its batch arguments. The loss may return the
        weight instead, in a `LossOutput`. None: the number of examples; 1 if all microbatches have the same number, or
        if ``reduction`` is not an average.
      reduction: combines the gradients, from `gradcombine.reductions`; None: their mean. The value is combined by a
        mean with the same weights, or by a sum if ``reduction`` is not an average.
      over: the replicas that share the parameters: `gradcombine.LOCAL`, or `gradcombine.jax_axis`. Inside pmap, vmap
        or shard_map, which bind the axis, arguments are those of one replica, and parameters are marked as varying, so
        that check_vma inserts no sum of its own. If nothing binds the axis, it is an axis of the mesh in scope
        (jax.set_mesh) or of the arguments' mesh, and the function is mapped over it, under jit or not; the compiler
        handles all other axes. The batch arguments are then sharded along their first axis, whose length is a multiple
        of the number of replicas; the carry has a leading axis of replicas, as argument and as result; everything else
        is the same on all replicas, and gathered once per call if it is sharded over the axis. Sharded parameters
        are rejected if their types show it (in shard_map with check_vma); otherwise shards look like full arrays.
      order: as for `gradcombine.accumulate` over microbatches, and for `gradcombine.merge_replicas` over replicas.
      interleaved: microbatch i gets the examples i, i + m, i + 2m, ... of each device.

    Returns:
      A function of the arguments of ``loss``. It returns ``(value, grads)``: the combined value, in the form in which
      ``loss`` returns it, and the combined gradients. They are the same on all replicas, except the carry.

    Raises:
      GradCombineError: for an invalid number of microbatches or argument position, batch arguments of different
        lengths, a loss with another result, and weights from both the loss and ``weight``; as `gradcombine.combine`,
        for instance for integers in ``aux`` without an ``aux_reduction`` for them; naming the term, for terms, weights
        or totals that do not match ``terms``, and for an unsuitable reduction.

    Bits: those of `gradcombine.combine` over the microbatches' gradients with these weights; over replicas, those of
    `gradcombine.merge_replicas`, however the function is mapped over them. Narrow floats are accumulated in float32.
    If the reduction is a plain sum or mean and several microbatches have weights other than 1, w * G is computed as the
    gradient of w * loss: the backward pass rounds instead of a product, with the same bits if w is a power of two.
    (Gradients are multiplied if ``loss`` returns floats narrower than float32 or than the parameters, takes parameters
    or computes anything in float16 or another dtype of a smaller range than float32, reduces the range by
    ``lax.reduce_precision``, has a ``jax.custom_vjp`` or ``linear_call``, whose backward pass may clip or quantize, or
    has a carry and traced weights.) A microbatch of weight 0 changes nothing, whatever it contains: another one is
    computed in its place with weight 0, so an infinite gradient of that other one may become NaN. A weight that the
    loss returns is computed a second time, before the gradients.

    A term of weight 0 changes nothing, with one exception: if totals are known, a single backward pass runs through all
    terms, and may turn the cotangent 0 of that term into NaN. A denominator whose total is 0 adds nothing, and its
    terms are 0. With totals, each ``L / total`` is rounded; without them, one quotient at the end.

    A microbatch costs the memory and memory traffic of one in a handwritten scan. Without ``over``, under jit, XLA can
    move the all-reduce of plain sums and means out of the scan.

    Sums and means of float32 over replicas, with their weights and counts, take one XLA all-reduce; a max or a last in
    ``aux_reduction`` adds an all-gather, and order ``"tree"`` gathers everything. If the parameters, or consumers of
    the gradients, are sharded over the mesh axis, XLA reduce-scatters the sums on GPUs, in an order of its choice.

    References: `jax.value_and_grad <https://docs.jax.dev/en/latest/_autosummary/jax.value_and_grad.html>`_;
    `optax.microbatching <https://optax.readthedocs.io/en/latest/api/microbatching.html>`_.

    >>> import jax.numpy as jnp
    >>> from gradcombine.integrations.jax import Loss, value_and_grad
    >>> def loss(w, x, mask):
    ...     return jnp.sum(w * x * mask) / jnp.sum(mask)
    >>> x, mask = jnp.float32([1, 2, 3, 8]), jnp.float32([1, 1, 1, 0])
    >>> value_and_grad(loss, 2, weight=lambda x, mask: mask.sum())(jnp.float32(10), x, mask)
    (Array(20., dtype=float32), Array(2., dtype=float32))
    >>> def two_terms(w, x, mask):
    ...     return {"fit": jnp.sum(w * x * mask), "decay": w * w}
    >>> weights = lambda x, mask: {"tokens": mask.sum(), "microbatches": 1}
    >>> terms = {"fit": "tokens", "decay": "microbatches"}
    >>> value, grad = value_and_grad(Loss(two_terms, terms=terms), 2, weight=weights)(jnp.float32(10), x, mask)
    >>> float(value["fit"]), float(value["decay"]), float(grad)  # 2 + 20
    (20.0, 100.0, 22.0)
    """
    objective = Objective.of(loss, weight, reduction, over, order)
    check(interleaved=interleaved)
    count, array_loss = valid("microbatches", microbatches), objective.loss
    differentiated = positions(array_loss.argnums)
    if array_loss.grad_norm:
        raise invalid("no grad_norm, as the gradients are returned (use optax.tree.norm)", "grad_norm=True")

    def run(objective: Objective, args: Sequence[Tree], kwargs: dict[str, Tree]) -> tuple[dict[str, Tree], Tree, Form]:
        require_tree(args, kwargs)
        combined, carry, form = scan_window(objective, count, interleaved, args, kwargs)
        return objective.reported(combined), carry, form

    @operation("value_and_grad")
    @wraps(objective.loss.function)
    def function(*args: Tree, **kwargs: Tree) -> tuple[Tree, Tree]:
        module = next(filter(None, map(split_if_module, (args[i] for i in differentiated if i < len(args)))), None)
        if module is None:
            values, carry, form = run(objective, args, kwargs)
            return in_form(form, values, carry), values["grads"]
        wrapped = module_loss(array_loss, module, len(args), objective.default_aux_reduction)
        arrays = wrapped.arguments(module, list(args), kwargs, has_carry=True)
        values, carry, _ = run(replace(objective, loss=wrapped.loss), *arrays)
        module, aux = wrapped.updated(module, values.get("aux"))
        write_state(args[0], module)
        return in_form(wrapped.forms[-1], values | {"aux": aux}, carry), values["grads"]

    return function


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
    objective = Objective.of(Loss(loss, argnums, has_aux=has_aux, terms=terms))
    named = require_given("terms as a dict from the name of a term to the name of its denominator", objective.terms)

    @operation("grads_by_denominator")
    @wraps(loss)
    def differentiated(*args: Tree, **kwargs: Tree) -> tuple[LossOutput, dict[str, Tree]]:
        require_tree(args, kwargs)
        output, _, grads = objective.by_denominator(named, args, kwargs)
        values = {term: part.numerator for term, part in output.aux["terms"].items()}
        weights = {name: part.denominator for name, part in grads.items()}
        result = LossOutput(values, weights, output.aux["aux"], output.carry)
        return result, {name: part.numerator for name, part in grads.items()}

    return differentiated
