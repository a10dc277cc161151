"""drjax: the mean of k groups' means."""

import drjax
import jax

from tests.field.problem import BATCH, ROWS, TABLE, mean

PACKAGE, USES = "drjax", "reduce_mean"


def make_step(k):
    @drjax.program(placements={"groups": k})
    def combined(table, groups):
        grads = drjax.map_fn(lambda table, group: jax.grad(mean)(table, **group), (drjax.broadcast(table), groups))
        return drjax.reduce_mean(grads)

    @jax.jit
    def step(table, batch):
        return combined(table, jax.tree.map(lambda x: x.reshape(k, ROWS // k, *x.shape[1:]), batch))

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH}
