"""brax: the gradient update over k replicas, an axis of vmap, from each replica's mean."""

import jax
import optax
from brax.training.gradients import gradient_update_fn

from tests.field.problem import BATCH, ROWS, TABLE, mean

PACKAGE, USES = "brax", "training.gradients.gradient_update_fn(pmap_axis_name=...)"


def make_step(k):
    tx = optax.sgd(1.0)
    update = gradient_update_fn(lambda table, batch: mean(table, **batch), tx, "replicas", has_aux=False)

    @jax.jit
    def step(table, batch):
        parts = jax.tree.map(lambda x: x.reshape(k, ROWS // k, *x.shape[1:]), batch)
        state = tx.init(table)
        one = jax.vmap(lambda part: update(table, part, optimizer_state=state)[1], axis_name="replicas")
        return one(parts)[0]

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH, "returns": "params"}
