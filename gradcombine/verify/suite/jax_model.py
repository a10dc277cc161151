"""The digits classifier in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcombine.verify.suite.digits import Batch


def _loss(parameters: dict[str, Any], images: jax.Array, labels: jax.Array) -> jax.Array:
    hidden = jnp.tanh(images @ parameters["w1"] + parameters["b1"])
    logits = hidden @ parameters["w2"] + parameters["b2"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


@jax.jit
def measure(parameters: dict[str, Any], batch: Batch) -> dict[str, jax.Array]:
    """The mean loss over a batch and its gradient, as one flat tree."""
    loss, gradients = jax.value_and_grad(_loss)(parameters, *batch)
    return gradients | {"loss": loss}


def exported(tree: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in tree.items()}
