"""jax_privacy.clipped_grad of each example's mean, in microbatches, with a bound too large to clip."""

import jax
import jax_privacy

from tests.field.problem import BATCH, ROWS, TABLE, loss

PACKAGE, USES = "jax-privacy", "clipped_grad(microbatch_size=...)"


def make_step(k):
    grad = jax_privacy.clipped_grad(
        lambda table, batch: loss(table, **batch)[0],
        l2_clip_norm=1e6,
        batch_argnums=1,
        microbatch_size=None if k == 1 else ROWS // k,
    )

    @jax.jit
    def step(table, batch):
        return grad(table, batch) / batch["mask"][:, 1:].sum()

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH}
