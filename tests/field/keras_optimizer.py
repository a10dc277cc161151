"""Keras on TensorFlow: an optimizer with gradient_accumulation_steps, from each microbatch's mean."""

import keras
import tensorflow as tf

from tests.field.problem import BATCH, TABLE, part

PACKAGE, USES = "keras", "SGD(gradient_accumulation_steps=k)"


def loss(table, tokens, mask):
    logits, labels, real = tf.gather(table, tokens[:, :-1]), tokens[:, 1:], mask[:, 1:]
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_sum(each * real) / tf.reduce_sum(real)


def make_step(k):
    def step(params, batch):
        table = tf.Variable(params)
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=None if k == 1 else k)
        for i in range(k):
            with tf.GradientTape() as tape:
                value = loss(table, **part(batch, k, i))
            grads = tf.convert_to_tensor(tape.gradient(value, table))
            optimizer.apply([grads], [table])
        return table.numpy()

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH, "returns": "params"}
