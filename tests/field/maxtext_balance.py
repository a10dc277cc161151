"""MaxText: the loss and the accumulation of its pre-training, with a balance loss that the model sows."""

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.common.common_types import ShardMode
from maxtext.trainers.pre_train.train import loss_fn
from maxtext.utils.gradient_accumulation import gradient_accumulation_loss_and_grad

from tests.field.problem import MASK, ROWS, TABLE, TOKENS, WORDS, loss, squares, truth

PACKAGE, USES = "maxtext", "pre_train.train.loss_fn, gradient_accumulation_loss_and_grad"
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "inputs_position": TOKENS[:, 1:] * 0}
BATCH |= {name: MASK[:, 1:].astype("int32") for name in ("inputs_segmentation", "targets_segmentation")}
SET = {"micro_batch_size_to_train_on": ROWS, "num_vocab_tiling": 1, "vocab_size": WORDS, "num_experts": 2}
TRUTH = truth() + squares()


class Model(nnx.Module):
    def __init__(self, mesh=None):
        self.mesh, self.table = mesh, nnx.Param(jnp.asarray(TABLE))

    def __call__(self, decoder_input_tokens, **_):
        self.sow(nnx.Intermediate, "moe_lb_loss", (self.table[...][decoder_input_tokens] ** 2).mean()[None])
        return self.table[...][decoder_input_tokens]


def make_step(k):
    mesh = jax.make_mesh((1,), ("data",))
    everywhere = {"table": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())}
    chosen = SET | {"gradient_accumulation_steps": k, "shard_mode": ShardMode.AUTO}
    config = type("Config", (), {"__getattr__": lambda _, name: chosen.get(name, 0)})()

    @jax.jit
    def step(params, batch):
        model = Model(mesh)
        nnx.update(model, params)
        shardings = jax.tree.map(lambda _: everywhere["table"], nnx.state(model, nnx.Param))
        if k > 1:
            made = gradient_accumulation_loss_and_grad(loss_fn, config, model, None, shardings, batch, None)[2]
        else:
            made = nnx.grad(lambda model: loss_fn(model, config, dict(batch), None, None, is_train=True)[0])(model)
        return {"table": made["table"][...]}

    return step


def terms(params, batch):
    tokens = jnp.concatenate([batch["inputs"], batch["targets"][:, -1:]], 1)
    mask = jnp.pad(batch["targets_segmentation"], ((0, 0), (1, 0))).astype(jnp.float32)
    words = jax.grad(lambda p: loss(p["table"], tokens, mask)[0])(params)
    balance = jax.grad(lambda p: (p["table"][batch["inputs"]] ** 2).mean((1, 2)).sum())(params)
    return {"words": (words, mask.sum()), "balance": (balance, len(tokens))}


def make_case():
    return {"make_step": make_step, "params": {"table": TABLE}, "batch": BATCH, "terms": terms}
