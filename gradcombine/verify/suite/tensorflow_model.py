"""The digits classifier in TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gradcombine.verify.suite.digits import PIXELS, Batch

_IMAGES, _LABELS = tf.TensorSpec([None, PIXELS], tf.float32), tf.TensorSpec([None], tf.int32)


@tf.function(reduce_retracing=True)
def _measure(parameters: dict[str, Any], images: tf.Tensor, labels: tf.Tensor) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        hidden = tf.tanh(images @ parameters["w1"] + parameters["b1"])
        logits = hidden @ parameters["w2"] + parameters["b2"]
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return tape.gradient(loss, parameters) | {"loss": loss}


def measure(parameters: dict[str, Any], batch: Batch) -> dict[str, tf.Tensor]:
    """The mean loss over a batch and its gradient, as one flat tree."""
    tensors = {name: tf.convert_to_tensor(leaf) for name, leaf in parameters.items()}
    return _measure(tensors, tf.constant(batch.images), tf.constant(batch.labels))


def exported(tree: dict[str, tf.Tensor]) -> dict[str, np.ndarray]:
    return {name: leaf.numpy() for name, leaf in tree.items()}
