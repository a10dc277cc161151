"""GRPO on a toy task: packed rows, filters with counts that are known late, groups, microbatches and replicas.

A policy chooses digits; a prompt's samples are rewarded for the right one. Groups whose samples all have the same
reward carry no signal and are filtered out by each microbatch, so the number of sequences is known only after the last
one. With 1, 4 and 8 microbatches, on 1 and on 4 replicas, the step makes the same update as for one batch; dividing
each microbatch by its counts does not.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import losses, reductions
from gradcombine.integrations.jax import Loss, LossOutput, train_step

PROMPTS, SAMPLES, DIGITS, LENGTH = 48, 4, 5, 24


def sampled(rng):
    """Sequences of digits, each with its prompt and its advantage within its group."""
    sequences, advantages = [], []
    for prompt in range(PROMPTS):
        texts = [rng.integers(0, DIGITS, rng.integers(2, 10)) for _ in range(SAMPLES)]
        rewards = np.array([np.mean(text == prompt % DIGITS) > 0.25 for text in texts], np.float32)
        sequences += texts
        advantages += list((rewards - rewards.mean()) / (rewards.std() + 1e-6))
    return sequences, advantages, np.repeat(np.arange(PROMPTS), SAMPLES)


def packed(numbers, sequences, advantages, groups, rows):
    """One microbatch: rows of several sequences, each a separate segment."""
    names = ("tokens", "segments", "groups")
    batch = {name: np.zeros((rows, LENGTH), np.int32) for name in names}
    batch["advantages"] = np.zeros((rows, LENGTH), np.float32)
    for row, members in enumerate(losses.pack([len(sequences[i]) for i in numbers], LENGTH)):
        start = 0
        for segment, i in enumerate(numbers[j] for j in members):
            span = slice(start, start := start + len(sequences[i]))
            batch["tokens"][row, span], batch["segments"][row, span] = sequences[i], segment + 1
            batch["groups"][row, span], batch["advantages"][row, span] = groups[i], advantages[i]
    return batch


# quickstart: begin
def loss(params, batch):
    logits = jax.nn.log_softmax(params["w"][batch["groups"] % DIGITS])
    logp = jnp.take_along_axis(logits, batch["tokens"][..., None], -1)[..., 0]
    informative = batch["advantages"] != 0  # a group with a single reward has advantages of 0
    sequences = {"mask": informative, "segments": batch["segments"]}
    terms = {
        "policy": losses.sequence_mean_of_token_mean(-logp * batch["advantages"], **sequences),
        "entropy": losses.token_mean(0.01 * logp, batch["segments"] > 0),
    }
    metrics = {"groups": losses.group_mean(batch["advantages"], batch["groups"], **sequences)}
    return LossOutput(terms, aux=metrics)


DENOMINATORS = {"policy": "sequences", "entropy": "tokens"}
OBJECTIVE = Loss(loss, terms=DENOMINATORS, aux_reduction={"groups": reductions.ratio()})
# quickstart: end


def updated(batch, microbatches, over=gc.LOCAL, put=lambda x: x):
    """Returns the parameters after one step, and the metrics."""
    step = train_step(OBJECTIVE, optax.sgd(1.0), microbatches=microbatches, over=over)
    params = {"w": put(jnp.zeros((DIGITS, DIGITS)))}
    params, _, metrics = step(params, step.init(params), batch)
    return np.asarray(params["w"]), metrics


def main():
    sequences, advantages, groups = sampled(np.random.default_rng(0))
    lengths = [len(x) for x in sequences]
    parts = losses.deal(lengths, groups.tolist(), 8)
    losses.require_whole([groups[part] for part in parts])
    rows = max(len(losses.pack([lengths[i] for i in part], LENGTH)) for part in parts)
    microbatches = [packed(part, sequences, advantages, groups, rows) for part in parts]
    batch = {name: np.concatenate([part[name] for part in microbatches]) for name in microbatches[0]}

    expected, metrics = updated(batch, 1)
    count = int(metrics.weight["sequences"])
    print(f"{PROMPTS * SAMPLES} sequences in {len(batch['tokens'])} rows, of which {count} sequences are informative")
    mesh = jax.make_mesh((4,), ("data",))
    sharded = {name: jax.device_put(x, NamedSharding(mesh, P("data"))) for name, x in batch.items()}
    replicated = NamedSharding(mesh, P())
    for name, (params, metrics) in {
        "4 microbatches": updated(batch, 4),
        "8 microbatches": updated(batch, 8),
        "2 microbatches on 4 replicas": updated(
            sharded, 2, gc.jax_axis("data"), lambda x: jax.device_put(x, replicated)
        ),
    }.items():
        off = np.abs(params - expected).max() / np.abs(expected).max()
        assert int(metrics.weight["sequences"]) == count
        print(f"{name:30} off by {off:.0e}")

    separate = [updated(microbatch, 1)[0] for microbatch in microbatches]
    off = np.abs(np.mean(separate, 0) - expected).max() / np.abs(expected).max()
    print(f"{'a mean over 8 microbatches':30} off by {off:.0e}")


if __name__ == "__main__":
    main()
