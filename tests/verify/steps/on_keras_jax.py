"""Checks a small Keras model on the JAX backend; run as a program with KERAS_BACKEND=jax.

Prints one line of JSON: the cause's name, or null, for each step.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras

from gradcombine.verify import check_step
from tests.verify.steps import by_hand, defects


def model(*layers: Any) -> Any:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((by_hand.LENGTH - 1,), dtype="int32")
    x = keras.layers.Embedding(by_hand.VOCABULARY, by_hand.WIDTH)(tokens)
    for layer in layers:
        x = layer(x)
    return keras.Model(tokens, keras.layers.Dense(by_hand.VOCABULARY)(x))


def sums_of(net: Any) -> Any:
    """Returns ``(variables, batch) -> (gradients of the summed loss, number of tokens)``."""
    fixed = [x.value for x in net.non_trainable_variables]

    def summed(variables: Any, part: Any) -> Any:
        logits, _ = net.stateless_call(variables, fixed, part["tokens"][:, :-1], training=True)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), part["tokens"][:, 1:, None], -1)
        mask = part["mask"][:, 1:].astype(log_probs.dtype)
        return -jnp.sum(log_probs[..., 0] * mask), jnp.sum(mask)

    return jax.grad(summed, has_aux=True)


def compiled(net: Any, make: Any, k: int) -> Any:
    return jax.jit(make(sums_of(net), k))


def trained(net: Any, make: Any, k: int) -> Any:
    """A step that returns the variables of the model and of Keras' Adam after one update."""
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(net.trainable_variables)
    initial = [x.value for x in optimizer.variables]
    gradient = make(sums_of(net), k)
    return jax.jit(lambda p, batch: optimizer.stateless_apply(initial, gradient(p, batch), p))


def main() -> None:
    steps: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
        "right": (model(), compiled, defects.right, {}),
        "normalized layers": (model(keras.layers.LayerNormalization()), compiled, defects.weighted_means, {}),
        "mean of means": (model(), compiled, defects.mean_of_means, {}),
        "the last dropped": (model(), compiled, defects.drops_the_last, {}),
        "normalized batches": (model(keras.layers.BatchNormalization()), compiled, defects.weighted_means, {}),
        "dropout": (model(keras.layers.Dropout(0.5)), compiled, defects.right, {}),
        "trained": (model(), trained, defects.right, {"returns": "params"}),
        "trained on means of means": (model(), trained, defects.mean_of_means, {"returns": "params"}),
    }
    causes: dict[str, str | None] = {}
    for name, (net, make, defect, options) in steps.items():
        params = [x.value for x in net.trainable_variables]
        report = check_step(partial(make, net, defect), params, by_hand.batch(), microbatches=(4,), **options)
        causes[name] = None if report.cause is None else report.cause.name
    print(json.dumps(causes))


if __name__ == "__main__":
    main()
