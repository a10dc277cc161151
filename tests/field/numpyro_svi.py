"""numpyro: SVI on k subsamples of the rows, which MultiSteps combines to one update."""

import jax
import jax.numpy as jnp
import numpyro
import optax
from numpyro.infer import SVI, Trace_ELBO

from tests.field.problem import BATCH, ROWS, TABLE, loss, part

PACKAGE, USES = "numpyro", "SVI.update of plate(subsample_size=...)"


def make_step(k):
    def model(tokens, mask, words):
        table = numpyro.param("table", jnp.zeros_like(TABLE))
        with numpyro.handlers.scale(scale=1 / words), numpyro.plate("rows", ROWS, subsample_size=ROWS // k):
            rows = jax.vmap(lambda *row: loss(table, *row)[0])(tokens[:, None], mask[:, None])
            numpyro.factor("likelihood", -rows)

    @jax.jit
    def step(params, batch):
        tx = optax.MultiSteps(optax.sgd(1.0), k).gradient_transformation()
        svi = SVI(model, lambda *_, **__: None, tx, Trace_ELBO())
        words = batch["mask"][:, 1:].sum()
        state = svi.init(jax.random.key(0), **part(batch, k, 0), words=words, init_params=params)
        for i in range(k):
            state, _ = svi.update(state, **part(batch, k, i), words=words)
        return svi.get_params(state)

    return step


def make_case():
    return {"make_step": make_step, "params": {"table": TABLE}, "batch": BATCH, "returns": "params"}
