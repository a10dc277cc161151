"""Hugging Face's Trainer on a Llama without layers, whose logits are the table's rows."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.field.problem import BATCH, TABLE, WORDS

PACKAGE, USES = "transformers", "Trainer(gradient_accumulation_steps=k)"
SIZES = {"vocab_size": WORDS, "hidden_size": WORDS, "num_hidden_layers": 0, "num_attention_heads": 1}
OPTIONS = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1}
QUIET = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "report_to": "none", "use_cpu": True}


class Rows(torch.utils.data.IterableDataset):
    def __init__(self, batch):
        self.tokens, self.real = torch.tensor(batch["tokens"]).long(), torch.tensor(batch["mask"]) > 0

    def __iter__(self):
        pairs = zip(self.tokens, self.real, strict=True)
        return ({"input_ids": x, "labels": torch.where(y, x, -100)} for x, y in pairs)


def make_step(k, trainer=Trainer, arguments=TrainingArguments, rows=Rows, **others):
    def step(table, batch):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)).requires_grad_(False)
        model.model.embed_tokens.weight.copy_(torch.eye(WORDS))
        model.model.norm.weight.fill_(WORDS**-0.5)
        model.lm_head.weight.copy_(table.T).requires_grad_(True)
        sizes = {"per_device_train_batch_size": len(batch["mask"]) // k, "gradient_accumulation_steps": k}
        with tempfile.TemporaryDirectory() as folder:
            trainer(model, arguments(folder, **sizes, **OPTIONS, **QUIET), train_dataset=rows(batch), **others).train()
        return model.lm_head.weight.detach().T

    return step


def make_case():
    return {"make_step": make_step, "params": torch.tensor(TABLE), "batch": BATCH, "returns": "params"}
