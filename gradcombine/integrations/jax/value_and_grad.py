"""The gradient of a batch that is computed in microbatches and on replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.errors import invalid, operation
from gradcombine.integrations.jax.arrays import require_tree
from gradcombine.integrations.jax.loss import Loss, closed
from gradcombine.integrations.jax.modules import Opened, of_module, opened_or_arrays, write_state
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
    """`jax.value_and_grad` in microbatches: less memory for activations, and one exchange of gradients a call.

    The batch arguments are divided along their first axis, the microbatches run one after another in a scan, and the
    replicas exchange their sums once, after it. With G the gradient and w the weight of a microbatch, the result is::

        sum(w * G) / sum(w)    over all microbatches of all replicas, divided once

    A weight that counts what the loss is a mean over (examples, tokens) makes this the gradient of the whole batch,
    however its examples and tokens fall into microbatches and replicas; the mean of the microbatches' means is not.

    The first argument may be a module of flax.nnx or equinox. Gradients are then as nnx.value_and_grad and
    equinox.filter_value_and_grad return them: of nnx.Param, or of inexact arrays. A nnx.Module's random streams get the
    number of the microbatch folded in. Its other variables are combined over microbatches and replicas, and written
    into it: nnx.BatchStat by the mean, others by the reduction that their class has as the attribute ``combined_by``.

    Args:
      loss: ``loss(*args, **kwargs)`` of one microbatch, as for jax.value_and_grad: returns a real floating scalar or a
        `LossOutput`. In a `Loss` that says more of it: which arguments are divided, a key or a carry, whether it
        returns aux, several terms.
      microbatches: how many; n examples are divided into microbatches of ceil(n / microbatches). The last one is
        smaller where n is not divisible. It is compiled by itself, and no example is padded. A batch that lies on a
        mesh is divided where it lies: each device's examples are divided so, and a microbatch has a part of each
        device's. (On automatic axes, which of them split a batch is not known while tracing; there it is taken as a
        block for each device of the mesh, or for as many of them as divide n.)
      weight: ``weight(*batch)`` of one microbatch, a scalar, of its batch arguments alone. A loss may return the weight
        instead, in a `LossOutput`. None: the number of examples; 1 where all microbatches have the same number, and
        where ``reduction`` is no average.
      reduction: of the gradients, from `gradcombine.reductions`; None: their mean. The value is combined by a mean with
        the same weights, by a sum where ``reduction`` is no average.
      over: the replicas that share the parameters: `gradcombine.LOCAL`, or `gradcombine.jax_axis`. Inside pmap, vmap
        or shard_map, which bind the axis, arguments are a replica's own, and parameters are marked so, that check_vma
        sums nothing by itself. Where nothing binds it, it is an axis of the mesh in scope (jax.set_mesh) or of the
        arguments' mesh, and the function is mapped over it, under jit or not, all other axes being left to the
        compiler: the batch arguments are split along their first axis, of a multiple of the replicas' number; the
        carry has a first axis of replicas, as it comes and as it goes; all else is the same on all replicas, and
        gathered, once a call, where it was split over the axis. Parameters of which each replica has another part are
        refused where their types tell of it (in shard_map with check_vma); elsewhere such shards look like whole ones.
      order: as for `gradcombine.accumulate` over microbatches, and for `gradcombine.merge_replicas` over replicas.
      interleaved: divide so that microbatch i holds the examples i, i + m, i + 2m, ... of each device's.

    Returns:
      A function of the arguments of ``loss``. It returns ``(value, grads)``, the value in the form that ``loss``
      returns it, combined. On replicas, all get the same, but for the carry.

    Raises:
      GradCombineError: for a number of microbatches or a position that is none, batch arguments of different lengths, a
        loss that returns something else, a weight from two sides; and as `gradcombine.combine`, for instance for
        integers in ``aux`` without an ``aux_reduction`` for them; naming the term, for terms, weights or totals that
        are not those of ``terms``, and for a reduction that does not fit.

    Bits: those of `gradcombine.combine` over the microbatches' gradients with these weights; over replicas, those of
    `gradcombine.merge_replicas`, however the function is mapped over them. Narrow floats are accumulated in float32.
    Where the reduction is a plain sum or mean and several microbatches have weights other than 1, w * G is the gradient
    of w * loss: rounded by the backward pass where a product afterwards would be, and the same where w is a power of
    two. (Not for a ``loss`` that returns or computes narrower floats than float32, float16 anywhere in it, ones
    narrower than the parameters, or with a carry: there gradients are multiplied.) A microbatch of weight 0 changes
    nothing, whatever it holds: another one is computed in its place, and weighs 0; so beside it an infinite gradient of
    that other one may become NaN. A weight that the loss returns is computed once more, ahead of the gradients.

    A term of weight 0 changes nothing in its microbatch, but one thing: where totals are known, one backward pass runs
    through all terms, and may make NaN of the 0 that it begins with there. A denominator whose total is 0 adds nothing,
    and its terms are 0. With totals, terms are rounded as ``L / total`` is, without them as one quotient at the end.

    A microbatch moves and needs what one of a scan written by hand does. Without ``over``, under jit, XLA can move the
    exchange of plain sums and means out of the scan.

    Sums and means of float32 over replicas, with their weights and counts, are one all-reduce of XLA; a max or a last
    in ``aux_reduction`` adds an all-gather, order ``"tree"`` gathers all. On a mesh over which the parameters, or what
    reads the gradients, are split as well, XLA scatters the sums on GPUs: the order of its additions is its own.

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
    count, own = valid("microbatches", microbatches), Loss.of(loss)
    if own.grad_norm:
        raise invalid("no grad_norm, where the gradients are returned (optax.tree.norm)", "grad_norm=True")

    @operation("value_and_grad")
    @wraps(objective.loss.function)
    def combined(*args: Tree, **kwargs: Tree) -> tuple[Tree, Tree]:
        module = next(filter(None, map(opened_or_arrays, objective.differentiated_of(args))), None)
        if module is not None:
            return of_opened(module, list(args), kwargs)
        require_tree(args, kwargs)
        values, carry, form = scan_window(objective, count, interleaved, args, kwargs)
        return closed(form, values, carry), values["grads"]

    def of_opened(module: Opened, args: list[Tree], kwargs: dict[str, Tree]) -> tuple[Tree, Tree]:
        of = of_module(own, module, len(args), objective.average_of_aux)
        whole = args[0]
        args, kwargs = of.arguments(module, args, kwargs, carried=True)
        require_tree(args, kwargs)
        with_module = objective_of(of.loss, weight, reduction, over, order)
        values, carry, _ = scan_window(with_module, count, interleaved, args, kwargs)
        module, aux = of.returned(module, values.get("aux"))
        write_state(whole, module)
        return closed(of.forms[-1], values | {"aux": aux}, carry), values["grads"]

    return combined
