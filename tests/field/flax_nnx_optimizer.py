"""flax nnx: a jitted train step called k times with nnx.Optimizer around optax.MultiSteps."""

import jax.numpy as jnp
import optax
from flax import nnx

from tests.field.problem import BATCH, TABLE, mean, part

PACKAGE, USES = "flax", "nnx.Optimizer around optax.MultiSteps"


class Model(nnx.Module):
    def __init__(self, table):
        self.table = nnx.Param(jnp.asarray(table))


@nnx.jit
def train_step(model, optimizer, batch):
    grads = nnx.grad(lambda model: mean(model.table[...], **batch))(model)
    optimizer.update(model, grads)


def make_step(k):
    def step(model, batch):
        optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(1.0), k), wrt=nnx.Param)
        for i in range(k):
            train_step(model, optimizer, part(batch, k, i))
        return model

    return step


def make_case():
    return {"make_step": make_step, "params": Model(TABLE), "batch": BATCH, "returns": "params"}
