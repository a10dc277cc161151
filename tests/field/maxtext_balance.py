"""MaxText: the loss and the accumulation of its pre-training, with a balance loss that the model sows."""

import jax
from flax import nnx
from maxtext.common.common_types import ShardMode
from maxtext.trainers.pre_train.train import loss_fn
from maxtext.utils.gradient_accumulation import gradient_accumulation_loss_and_grad as accumulated

from tests.field.problem import BATCH, ROWS, TABLE, WORDS, squares, terms, truth

PACKAGE, USES = "maxtext", "pre_train.train.loss_fn, gradient_accumulation_loss_and_grad"
SET = {"micro_batch_size_to_train_on": ROWS, "num_vocab_tiling": 1, "vocab_size": WORDS, "shard_mode": ShardMode.AUTO}
TRUTH, MESH = truth() + squares(), jax.make_mesh((1,), ("data",))


class Model(nnx.Module):
    def __init__(self, table):
        self.mesh, self.table = MESH, nnx.Param(table)

    def __call__(self, decoder_input_tokens, **_):
        self.sow(nnx.Intermediate, "moe_lb_loss", (self.table[...][decoder_input_tokens] ** 2).mean()[None])
        return self.table[...][decoder_input_tokens]


def make_step(k):
    chosen = SET | {"gradient_accumulation_steps": k, "num_experts": 2}
    config = type("Config", (), {"__getattr__": lambda _, name: chosen.get(name, 0)})()

    @jax.jit
    def step(table, batch):
        x, y, real = batch["tokens"][:, :-1], batch["tokens"][:, 1:], batch["mask"][:, 1:].astype("int32")
        data = {"inputs": x, "targets": y, "inputs_position": y * 0}
        data |= {"inputs_segmentation": real, "targets_segmentation": real}
        model, places = Model(table), nnx.State({"table": nnx.Param(jax.sharding.NamedSharding(MESH, jax.P()))})
        if k > 1:
            return accumulated(loss_fn, config, model, None, places, data, None)[2]["table"][...]
        return nnx.grad(lambda m: loss_fn(m, config, data, None, None, is_train=True)[0])(model)["table"][...]

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH, "terms": terms}
