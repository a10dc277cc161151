"""optax.apply_every before SGD, from each microbatch's mean."""

import jax
import optax

from tests.field.problem import BATCH, TABLE, mean, part

PACKAGE, USES = "optax", "apply_every"


def make_step(k):
    tx = optax.chain(optax.apply_every(k), optax.sgd(1.0))

    @jax.jit
    def step(table, batch):
        state = tx.init(table)
        for i in range(k):
            grads = jax.grad(mean)(table, **part(batch, k, i))
            updates, state = tx.update(grads, state, table)
            table = optax.apply_updates(table, updates)
        return table

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH, "returns": "params"}
