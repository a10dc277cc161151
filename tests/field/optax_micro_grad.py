"""optax.microbatching.micro_grad of the sum, divided by the words of the batch."""

import jax
from optax import microbatching

from tests.field.problem import BATCH, ROWS, TABLE, loss

PACKAGE, USES = "optax", "microbatching.micro_grad"


def make_step(k):
    grad = microbatching.micro_grad(
        lambda table, batch: loss(table, **batch)[0],
        batch_argnums=1,
        microbatch_size=None if k == 1 else ROWS // k,
    )

    @jax.jit
    def step(table, batch):
        return grad(table, batch)[0] / batch["mask"][:, 1:].sum()

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH}
