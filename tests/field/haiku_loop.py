"""haiku: a transformed function in a jitted train step, called k times with optax.MultiSteps."""

import haiku as hk
import jax
import optax

from tests.field.problem import BATCH, TABLE, WORDS, mean, part

PACKAGE, USES = "dm-haiku", "transform and optax.MultiSteps"


def forward(tokens, mask):
    table = hk.get_parameter("table", (WORDS, WORDS), init=hk.initializers.Constant(TABLE))
    return mean(table, tokens, mask)


def make_step(k):
    loss, tx = hk.without_apply_rng(hk.transform(forward)).apply, optax.MultiSteps(optax.sgd(1.0), k)

    @jax.jit
    def train_step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, **batch), state, params)
        return optax.apply_updates(params, updates), state

    def step(params, batch):
        state = tx.init(params)
        for i in range(k):
            params, state = train_step(params, state, part(batch, k, i))
        return params

    return step


def make_case():
    params = hk.transform(forward).init(jax.random.key(0), **BATCH)
    return {"make_step": make_step, "params": params, "batch": BATCH, "returns": "params"}
