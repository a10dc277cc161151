"""TRL's SFTTrainer, which batches rows of different lengths, on the model of hf_trainer."""

from functools import partial

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.field import hf_trainer
from tests.field.problem import WORDS

PACKAGE, USES = "trl", "SFTTrainer(gradient_accumulation_steps=k)"
LEVEL = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=LEVEL, eos_token="0", pad_token="0")
ARGUMENTS = partial(SFTConfig, bf16=False, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})


def rows(batch):
    lengths = batch["mask"].sum(1).astype(int)
    sentences = [x[:length] for x, length in zip(batch["tokens"], lengths, strict=True)]
    return Dataset.from_dict({"input_ids": sentences}).to_iterable_dataset()


def make_step(k):
    return hf_trainer.make_step(k, SFTTrainer, ARGUMENTS, rows, processing_class=TOKENIZER)


def make_case():
    return {**hf_trainer.make_case(), "make_step": make_step}
