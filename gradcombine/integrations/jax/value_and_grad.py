"""The gradient of a batch, computed in microbatches and on replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.errors import invalid, operation
from gradcombine.integrations.jax.arrays import require_tree
from gradcombine.integrations.jax.loss import Loss, in_form
from gradcombine.integrations.jax.modules import SplitModule, module_loss, split_if_module, write_state
from gradcombine.integrations.jax.objective_of_terms import objective_of
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
    (Gradients are multiplied if ``loss`` returns floats narrower than float32 or than the parameters, computes anything
    in float16, or has a carry and traced weights.) A microbatch of weight 0 changes nothing, whatever it contains:
    another one is computed in its place with weight 0, so an infinite gradient of that other one may become NaN. A
    weight that the loss returns is computed a second time, before the gradients.

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
    objective = objective_of(loss, weight, reduction, over, order)
    check(interleaved=interleaved)
    count, array_loss = valid("microbatches", microbatches), Loss.of(loss)
    if array_loss.grad_norm:
        raise invalid("no grad_norm, as the gradients are returned (use optax.tree.norm)", "grad_norm=True")

    @operation("value_and_grad")
    @wraps(objective.loss.function)
    def combined(*args: Tree, **kwargs: Tree) -> tuple[Tree, Tree]:
        module = next(filter(None, map(split_if_module, objective.differentiated_args(args))), None)
        if module is not None:
            return combined_for_module(module, list(args), kwargs)
        require_tree(args, kwargs)
        values, carry, form = scan_window(objective, count, interleaved, args, kwargs)
        return in_form(form, values, carry), values["grads"]

    def combined_for_module(module: SplitModule, args: list[Tree], kwargs: dict[str, Tree]) -> tuple[Tree, Tree]:
        wrapped = module_loss(array_loss, module, len(args), objective.default_aux_reduction)
        original = args[0]
        args, kwargs = wrapped.arguments(module, args, kwargs, has_carry=True)
        require_tree(args, kwargs)
        module_objective = objective_of(wrapped.loss, weight, reduction, over, order)
        values, carry, _ = scan_window(module_objective, count, interleaved, args, kwargs)
        module, aux = wrapped.updated(module, values.get("aux"))
        write_state(original, module)
        return in_form(wrapped.forms[-1], values | {"aux": aux}, carry), values["grads"]

    return combined
