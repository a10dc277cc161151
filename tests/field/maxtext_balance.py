"""MaxText: loss and gradient accumulation of pre-training, with a load-balancing loss that the model sows."""

import jax
from flax import nnx
from maxtext.trainers.pre_train.train import loss_fn
from maxtext.utils.gradient_accumulation import gradient_accumulation_loss_and_grad as accumulated

from tests.field.problem import BATCH, ROWS, TABLE, WORDS, squares, terms, truth

PACKAGE, USES = "maxtext", "pre_train.train.loss_fn, gradient_accumulation_loss_and_grad"
TRUTH, MESH, STEPS = truth() + squares(), jax.make_mesh((1,), ("data",)), "gradient_accumulation_steps"


class Model(nnx.Module):
    def __init__(self, table):
        self.mesh, self.table = MESH, nnx.Param(table)

    def __call__(self, decoder_input_tokens, **_):
        self.sow(nnx.Intermediate, "moe_lb_loss", (self.table[...][decoder_input_tokens] ** 2).mean()[None])
        return self.table[...][decoder_input_tokens]


def make_step(k):
    sizes = {"micro_batch_size_to_train_on": ROWS, "vocab_size": WORDS, "num_experts": 2, STEPS: k}
    config = type("Config", (), {"__getattr__": lambda _, name: sizes.get(name, 0)})()

    @jax.jit
    def step(table, batch):
        x, y, on = batch["tokens"][:, :-1], batch["tokens"][:, 1:], batch["mask"][:, 1:].astype("int32")
        data = {"inputs": x, "targets": y, "inputs_position": x, "inputs_segmentation": on, "targets_segmentation": on}
        model, places = Model(table), nnx.State({"table": nnx.Param(jax.sharding.NamedSharding(MESH, jax.P()))})
        if k > 1:
            return accumulated(loss_fn, config, model, None, places, data, None)[2]["table"][...]
        return nnx.grad(lambda m: loss_fn(m, config, data, None, None, is_train=True)[0])(model)["table"][...]

    return step


def make_case():
    return {"make_step": make_step, "params": TABLE, "batch": BATCH, "terms": terms}
