"""equinox: a filter_jit train step called k times with optax.MultiSteps."""

import equinox as eqx
import jax
import optax

from tests.field.problem import BATCH, TABLE, mean, part

PACKAGE, USES = "equinox", "filter_jit and optax.MultiSteps"


class Model(eqx.Module):
    table: jax.Array


def make_step(k):
    tx = optax.MultiSteps(optax.sgd(1.0), k)

    @eqx.filter_jit
    def train_step(model, state, batch):
        grads = eqx.filter_grad(lambda model: mean(model.table, **batch))(model)
        updates, state = tx.update(grads, state, model)
        return eqx.apply_updates(model, updates), state

    def step(model, batch):
        state = tx.init(eqx.filter(model, eqx.is_array))
        for i in range(k):
            model, state = train_step(model, state, part(batch, k, i))
        return model

    return step


def make_case():
    return {"make_step": make_step, "params": Model(TABLE), "batch": BATCH, "returns": "params"}
