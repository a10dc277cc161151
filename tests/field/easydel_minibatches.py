"""EasyDeL: the accumulation of the trainers, from each microbatch's mean, as their losses are."""

from types import SimpleNamespace

import jax
from easydel.trainers.training_utils import minibatch_call

from tests.field.problem import BATCH, ROWS, TABLE, mean

PACKAGE, USES = "easydel", "trainers.training_utils.minibatch_call"


def make_step(k):
    grad = jax.value_and_grad(lambda table, batch: (mean(table, **batch), {}), has_aux=True)

    @jax.jit
    def step(table, batch):
        return minibatch_call(SimpleNamespace(graphstate=table), batch, ROWS // k, grad)[0]

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH}
