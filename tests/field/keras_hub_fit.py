"""KerasHub: compile and fit of a causal language model, with Keras' gradient accumulation."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import keras_hub

from tests.field.problem import BATCH, ROWS, TABLE, WORDS

PACKAGE, USES = "keras-hub", "CausalLM.fit, SGD(gradient_accumulation_steps=k)"


class Model(keras_hub.models.CausalLM):
    def __init__(self):
        words, mask = (keras.Input((None,), dtype="int32", name=x) for x in ("token_ids", "padding_mask"))
        table = keras.layers.Embedding(WORDS, WORDS, embeddings_initializer=keras.initializers.Constant(TABLE))
        super().__init__(inputs={"token_ids": words, "padding_mask": mask}, outputs=table(words))
        self.table = table


def make_step(k):
    def step(params, batch):
        model = Model()
        model.table.embeddings.assign(params)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(1.0, gradient_accumulation_steps=None if k == 1 else k), loss)
        words, mask = batch["tokens"], batch["mask"]
        fed = {"token_ids": words[:, :-1], "padding_mask": mask[:, :-1]}
        model.fit(fed, words[:, 1:], ROWS // k, sample_weight=mask[:, 1:], shuffle=False, verbose=0)
        return keras.ops.convert_to_numpy(model.table.embeddings)

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH, "returns": "params"}
