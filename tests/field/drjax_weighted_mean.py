"""drjax: the mean of k groups' means, weighted by their numbers of words."""

import drjax
import jax

from tests.field.problem import BATCH, ROWS, TABLE, mean

PACKAGE, USES = "drjax", "reduce_weighted_mean"


def make_step(k):
    @drjax.program(placements={"groups": k})
    def combined(table, groups):
        grads = drjax.map_fn(lambda table, group: jax.grad(mean)(table, **group), (drjax.broadcast(table), groups))
        counts = drjax.map_fn(lambda x: x["mask"][:, 1:].sum(), groups)
        return drjax.reduce_weighted_mean(grads, counts)

    @jax.jit
    def step(table, batch):
        return combined(table, jax.tree.map(lambda x: x.reshape(k, ROWS // k, *x.shape[1:]), batch))

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH}
