"""Tunix: the train step and loss of PeftTrainer, as built from its configuration."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.sft import peft_trainer

from tests.field.problem import LENGTH, MASK, ROWS, TABLE, TOKENS, part

PACKAGE, USES = "google-tunix", "PeftTrainer(gradient_accumulation_steps=k)"
ZEROS = np.zeros((ROWS, LENGTH), np.int32)
BATCH = {"input_tokens": TOKENS, "input_mask": MASK, "positions": ZEROS, "attention_mask": ZEROS}


class Model(nnx.Module):
    def __init__(self, table):
        self.table = nnx.Param(jnp.asarray(table))

    def __call__(self, tokens, positions, cache, attention_mask):
        return self.table[...][tokens], None


def make_step(k):
    config = peft_trainer.TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=None if k == 1 else k)

    def step(model, batch):
        trainer = peft_trainer.PeftTrainer(model, optax.sgd(1.0), config)
        train_step = trainer.create_train_step_fn()
        for i in range(k):
            train_step(trainer.model, trainer.optimizer, part(batch, k, i))
        return trainer.model

    return step


def make_case():
    return {"make_step": make_step, "params": Model(TABLE), "batch": BATCH, "returns": "params"}
